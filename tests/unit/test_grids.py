"""Room for grids: the rule, and an opponent who puts blocks wherever they do most harm."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from fcomm.grids import default_shape, fit_together, most_blocks
from fcomm.protocols import GpuShare, protocol

SMS, RANKS = 2, 2
"""SMs that a rank has, and ranks on the GPU: small enough for an opponent who tries everything."""


def stuck(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether some placement of all but one block of these grids leaves the last block of the first kind without room.

    before, after : blocks of each rank's grid, and how many blocks of its kind an SM holds.
    """
    size = [Fraction(1, before[1]), Fraction(1, after[1])]
    full = [  # what one SM may hold so that it has no room
        (x, y)
        for x, y in product(range(before[1] + 1), range(after[1] + 1))
        if 1 - size[0] < x * size[0] + y * size[1] <= 1
    ]
    reached = {(0, 0)}
    for _ in range(SMS * RANKS):
        reached = {
            (a + x, b + y)
            for (a, b), (x, y) in product(reached, full)
            if a + x < RANKS * before[0] and b + y <= RANKS * after[0]
        }
    return bool(reached)


KINDS = (1, 2, 3, 4, 8)


def grids(per_sm: int) -> list[tuple[int, int]]:
    """Every grid of a kind of which a rank has room for two."""
    return [(blocks, per_sm) for blocks in range(1, most_blocks(SMS, per_sm, 2) + 1)]


@pytest.mark.parametrize("kinds", list(product(KINDS, KINDS)), ids=lambda k: f"{k[0]}-{k[1]}")
def test_grids_that_fit_together_cannot_be_put_so_that_one_is_stuck(kinds: tuple[int, int]) -> None:
    for before, after in product(grids(kinds[0]), grids(kinds[1])):
        assert not (fit_together(SMS, before, after) and stuck(before, after)), (before, after)
        assert fit_together(SMS, before, after) == fit_together(SMS, after, before)


def test_blocks_alone_do_not_say_whether_grids_fit() -> None:
    """Each grid has half of the room that there is for its kind, and still they get stuck."""
    whole, small = (most_blocks(SMS, 1, 2), 1), (most_blocks(SMS, 8, 2), 8)
    assert whole == (1, 1)
    assert small == (8, 8)
    assert stuck(whole, small)
    assert not fit_together(SMS, whole, small)


def test_two_shapes_in_a_row_on_a_shared_h200() -> None:
    """((999, 512) then (9999, 32)) among 8 ranks of 16 SMs; kernels of 62 registers, so two or 32 blocks to an SM."""
    large, small = (most_blocks(16, 2, 2), 2), (most_blocks(16, 32, 2), 32)
    assert (large[0], small[0]) == (16, 256)
    assert fit_together(16, large, large)
    assert fit_together(16, small, small)
    assert not fit_together(16, large, small)
    assert not fit_together(16, small, large)
    assert fit_together(16, (8, 1), (8, 4)), "as many blocks as SMs, of any kind"
    assert not fit_together(16, (8, 1), (9, 4))
    assert fit_together(16, (16, 4), (16, 2))


def test_channels_may_run_anything_beside_each_other() -> None:
    """With several of them a block counts as a whole SM, and then two grids of each fit whatever they are."""
    assert most_blocks(16, 2) == 32
    assert most_blocks(16, 2, channels=2) == most_blocks(16, 8, channels=2) == 8
    assert most_blocks(16, 2, grids=2, channels=3) == 2
    assert most_blocks(16, 2, channels=17) == 0
    for channels in (2, 3, 4):
        most = most_blocks(16, 32, 2, channels)
        assert fit_together(16, (most, 1), (most, 32), channels)
    assert not fit_together(16, (5, 1), (4, 1), 2)


def test_the_default_shape() -> None:
    share = GpuShare("9.0", 16, 132)
    ll, two = protocol("one_shot.ll"), protocol("two_shot.ll")
    assert default_shape(ll, 1024, 8, share) == (1, 256)
    assert default_shape(ll, 32768, 8, share) == (16, 256)
    assert default_shape(ll, 262144, 8, share) == (32, 1024)
    assert default_shape(two, 32768, 8, share) == (8, 512), "shards: large blocks from every other SM on"
    assert default_shape(two, 262144, 8, share) == (16, 512), "shards: one block on an SM"
    assert default_shape(protocol("reduce_scatter.ll"), 262144, 8, share) == (16, 512)
    assert default_shape(protocol("one_shot.flag"), 65536, 8, share) == (64, 256)
    assert default_shape(protocol("custom_ar_v2.push"), 4096, 8, share) == (16, 128), "its authors': a block on each SM"
    assert default_shape(protocol("custom_ar_v2.push"), 4096, 8, None) == (2, 32), "fixed, and there are no SMs"
    assert default_shape(ll, 16, 8, None) == (1, 32)
