"""Rules that all kernels of ours keep, read off their sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fcomm.protocols import protocols
from fcomm.source import kernel_root

HEADERS = sorted({p.algorithm.header for p in protocols().values()} | {"algo/one_shot_rows.cuh", "epilogue/apply.cuh"})


def body(header: str) -> str:
    return (kernel_root() / header).read_text()


@pytest.mark.parametrize("header", HEADERS)
def test_every_kernel_waits_for_the_grid_before_it(header: str) -> None:
    shared = body("algo/exchange.cuh") if "exchange<" in body(header) else ""
    assert "launch_wait();" in body(header) + shared


@pytest.mark.parametrize("path", sorted((kernel_root() / "algo").glob("*.cuh")), ids=lambda path: path.stem)
def test_behind_a_threads_late_trigger_it_neither_polls_nor_stores_output(path: Path) -> None:
    text = path.read_text()
    assert "launch_dependents" not in text
    end = text.rfind("late_trigger();")
    if end >= 0:
        assert not re.search(r"take|await|store_payload|consume", text[end:].split("\n}\n")[0])


@pytest.mark.parametrize("header", [h for h in HEADERS if h.startswith("algo/")])
def test_every_kernel_of_ours_has_the_trigger_once(header: str) -> None:
    shared = body("algo/exchange.cuh") if "exchange<" in body(header) else ""
    assert (body(header) + shared).count("late_trigger();") == 1
