"""Rules that all kernels of ours keep, read off their sources."""

from __future__ import annotations

import re

import pytest

from fcomm.protocols import protocols
from fcomm.source import kernel_root

HEADERS = sorted({p.algorithm.header for p in protocols().values()})


def body(header: str) -> str:
    return (kernel_root() / header).read_text()


@pytest.mark.parametrize("header", HEADERS)
def test_every_kernel_waits_for_the_grid_before_it(header: str) -> None:
    shared = body("algo/exchange.cuh") if "exchange<" in body(header) else ""
    assert "launch_wait();" in body(header) + shared


def test_no_kernel_of_ours_lets_the_next_grid_in_while_a_thread_of_its_block_polls() -> None:
    """One thread's trigger speaks for its block: where others still poll, two grids of a rank would share the room that
    each rank has one of."""
    for path in sorted((kernel_root() / "algo").glob("*.cuh")):
        text = path.read_text()
        assert "thread_trigger" not in text, path.name
        assert "launch_dependents" not in text, path.name
        end = text.rfind("block_trigger();")
        if end >= 0:  # behind it: no poll, and nothing of the output
            assert not re.search(r"take|await|store_payload|consume", text[end:].split("\n}\n")[0]), path.name


@pytest.mark.parametrize("header", [h for h in HEADERS if h.startswith("algo/")])
def test_every_kernel_of_ours_has_the_trigger_once(header: str) -> None:
    shared = body("algo/exchange.cuh") if "exchange<" in body(header) else ""
    assert (body(header) + shared).count("block_trigger();") == 1
