"""Rules that all kernels of ours keep, read off their sources."""

from __future__ import annotations

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


def test_no_kernel_of_ours_lets_the_next_grid_in_before_its_blocks_have_returned() -> None:
    """One thread's trigger speaks for its block: where others still poll, two grids of a rank would share the room that
    each rank has one of."""
    for path in sorted((kernel_root() / "algo").glob("*.cuh")):
        assert "launch_trigger" not in path.read_text(), path.name
