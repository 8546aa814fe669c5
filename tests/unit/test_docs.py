"""Pages point at things that exist."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    """In backticks, with a folder of the repository in front: `tests/unit/test_layout.py`."""
    tops = "fcomm|kernels_cu|experiments|tests|docs|tools"
    for name in re.findall(rf"`((?:{tops})/[\w./-]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def listed_in_records(name: str) -> bool:
    """Whether the list of a run's files has one of that name, which may be a pattern there."""
    page = (ROOT / "docs" / "records.md").read_text()
    block = page.split("## Files")[1].split("```")[1]
    return any(fnmatch(name, word.strip(",")) for line in block.splitlines() for word in line.split())


def test_the_list_of_a_runs_files_is_read() -> None:
    assert listed_in_records("run.json")
    assert listed_in_records(".lock")
    assert listed_in_records("latency-late.png")
    assert not listed_in_records("other.png")
