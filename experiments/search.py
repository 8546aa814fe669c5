"""Launch shapes: which ones are tried, at which sizes, and what the sizes between them inherit. Pure functions.

A shape is described by what it changes about the default one of the same case, so that a change found at one size says
something about its neighbours: there, too, blocks have twice the threads, or threads twice the cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from fcomm.communicator import WARP
from fcomm.measure import Case
from fcomm.protocols import GpuShare

ANCHORS = 4
"""Sizes at most at which shapes are tried, for each collective and rank count."""
CALLS = 6
"""Timed calls of each shape that is tried ..."""
ROUNDS = 3
"""... in so many visits, all shapes of a case in turns."""
GAIN = 0.02
"""Less than this share of the default shape's time is not taken for a gain."""
FACTORS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Change:
    """A launch shape, in relation to the default one: the same for every protocol, ours and baselines."""

    threads: float = 1.0
    """Threads of a block, as a multiple of the default's."""
    grid: float = 1.0
    """Threads of the whole grid, as a multiple of the default's: half as many have twice the cells each."""

    def of(self, default: tuple[int, int], most_threads: int) -> tuple[int, int]:
        """(blocks, threads) in place of the default ones. most_threads : of a block, that the kernel is compiled for."""
        blocks, threads = default
        limit = max(WARP, most_threads // WARP * WARP)
        wanted = min(max(round(threads * self.threads / WARP) * WARP, WARP), limit)
        return max(1, math.ceil(blocks * threads * self.grid / wanted)), wanted


CHANGES = tuple(
    Change(threads, grid)
    for threads, grid in sorted(product(FACTORS, FACTORS), key=lambda pair: 2 - pair.count(1.0))
    if (threads, grid) != (1, 1)
)
"""What is tried beside the default shape; of several that come to the same one, the smallest change first."""


def anchors(sizes: Sequence[int], most: int = ANCHORS) -> list[int]:
    """Sizes at which shapes are tried, evenly spread from the first to the last one.

    Those in the middle come first, whose neighbours are most: the time for the search may end before the last one.
    """
    ordered = sorted(set(sizes))
    count = min(most, len(ordered))
    if count == 1:
        return [ordered[len(ordered) // 2]]
    spread = [ordered[round(k * (len(ordered) - 1) / (count - 1))] for k in range(count)]
    return sorted(spread, key=lambda size: abs(spread.index(size) - (count - 1) / 2))


Key = tuple[str, str, int, str]


def key_of(case: Case) -> Key:
    """What is searched apart: collective, protocol, rank count, launch feature."""
    return case.collective, case.protocol, case.ranks, case.dependent_launch


def fixed_blocks(case: Case, gpu: GpuShare | None) -> int | None:
    """Blocks of a case's own shape where its kernel counts by the block: it then needs a communicator of its own."""
    form = case.form(gpu)
    rule = None if form is None else form.algorithm.grid
    return case.shape[0] if rule is not None and rule.fixed and case.shape is not None else None


def trials(case: Case, default: tuple[int, int], gpu: GpuShare | None) -> dict[Case, Change]:
    """The case with each other shape that is tried, and what it changes; shapes that come out alike once."""
    form = case.form(gpu)
    if form is None:
        return {}
    most = form.max_threads(case.ranks)
    found: dict[Case, Change] = {}
    for change in CHANGES:
        shape = change.of(default, most)
        if shape != default:
            found.setdefault(replace(case, shape=shape), change)
    return found


@dataclass
class Shapes:
    """What was found so far: for each key and anchor the best change, which may be none."""

    best: dict[Key, dict[int, Change]] = field(default_factory=dict)

    def learn(self, case: Case, times_us: Mapping[Change, float]) -> None:
        """The median of each shape that was tried at the case's size; the default one's is that of ``Change()``."""
        fastest = min(times_us, key=lambda change: times_us[change])
        gained = times_us[fastest] < (1 - GAIN) * times_us[Change()]
        self.best.setdefault(key_of(case), {})[case.nbytes] = fastest if gained else Change()

    def tuned(self, case: Case, default: tuple[int, int], gpu: GpuShare | None) -> Case | None:
        """The case with the shape that the nearest anchor gives it; None where that is the default one, or not known."""
        known, form = self.best.get(key_of(case)), case.form(gpu)
        if not known or form is None:
            return None
        nearest = min(known, key=lambda size: (abs(math.log2(size / case.nbytes)), size))
        shape = known[nearest].of(default, form.max_threads(case.ranks))
        return None if shape == default else replace(case, shape=shape)
