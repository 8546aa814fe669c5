"""The search: many schedules of many cases, and what is left of a counterexample when everything needless is gone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fcomm.backends import sim
from fcomm.layout import FIRST_EPOCH
from fcomm.protocols import Protocol
from fcomm.verify.cases import Call, Case, Kernels, drawn, make_world, with_rows

BATCH = 50
"""Schedules of one case before the next case is drawn."""
SHRINK_SCHEDULES = 200
SHRINK_S = 10.0
EXHAUSTIVE_DEPARTURES = 3
EXHAUSTIVE_CALLS = 4
EXHAUSTIVE_CELLS = 2


@dataclass(frozen=True)
class Counterexample:
    """A schedule that violates something: in this case, with this seed (None: the last one of an enumeration)."""

    case: Case
    link: sim.Link
    seed: int | None
    outcome: sim.Outcome
    events: NDArray[np.void]
    """`fcomm.backends.sim.EVENT`, in the order of time."""


@dataclass
class Tally:
    """What a search has covered."""

    protocol: Protocol
    ranks: int
    link: sim.Link
    first_seed: int = 0
    schedules: int = 0
    steps: int = 0
    cases: int = 0
    found: Counterexample | None = None
    complete: bool = True
    """False: time was over, or somebody interrupted."""
    rows: bool = False
    """Calls have an epilogue that needs whole rows."""

    @property
    def seeds(self) -> str:
        return f"seeds {self.first_seed}..{self.first_seed + max(0, self.schedules - 1)}"


def case_of(proto: Protocol, ranks: int, seed: int, calls: int | None, weak: bool = True, rows: bool = False) -> Case:
    """The case that a seed belongs to."""
    case = replace(drawn(proto, ranks, seed // BATCH, calls), weak=weak)
    return with_rows(case, seed // BATCH) if rows else case


def search(
    tally: Tally,
    kernels: Kernels,
    schedules: int,
    end: float | None = None,
    calls: int | None = None,
    weak: bool = True,
    tick: Callable[[Tally], None] = lambda _: None,
) -> None:
    """Runs the schedules from the tally's first seed on, until one violates something.

    end : when to stop, on `time.monotonic`'s clock. tick : is called after each case.
    """
    seed, last = tally.first_seed, tally.first_seed + schedules
    while seed < last and tally.found is None:
        if end is not None and time.monotonic() > end:
            tally.complete = False
            return
        count = min(last, (seed // BATCH + 1) * BATCH) - seed
        case = case_of(tally.protocol, tally.ranks, seed, calls, weak, tally.rows)
        with sim.Simulator(make_world(case, tally.link, kernels)) as s:
            outcome = s.random(seed, count)
            tally.cases += 1
            tally.schedules += outcome.schedules
            tally.steps += outcome.steps
            if outcome.violated:
                _, events = s.trace(outcome.seed)
                tally.found = Counterexample(case, tally.link, outcome.seed, outcome, events)
        seed += count
        tick(tally)


def exhaustive_case(proto: Protocol) -> Case:
    """2 ranks, 2 units, 4 calls: small enough for all schedules with few departures from the plain one."""
    names = {e.name for e in proto.encodings}
    group = proto.encodings[0] if proto.encodings else None
    nbytes = EXHAUSTIVE_CELLS * (16 if group is None else group.group_payload)
    sharded = "shard" in proto.algorithm.phases and bool(proto.encodings)
    if sharded:
        threads = 32
    elif "ll128" in names:
        threads = 8
    else:
        threads = 2 if "flag" in names or not proto.encodings else 1
    if sharded:
        nbytes *= 2  # that many units of each part
    count = nbytes if proto.algorithm.moves_bytes else nbytes // 4
    if proto.collective == "reduce_scatter":
        count = count // 2 * 2
    return Case(2, (Call(proto.name, count),) * EXHAUSTIVE_CALLS, threads=threads)


def exhaust(
    tally: Tally,
    kernels: Kernels,
    departures: int = EXHAUSTIVE_DEPARTURES,
    end: float | None = None,
    tick: Callable[[Tally], None] = lambda _: None,
    most_steps: int | None = None,
) -> None:
    """All schedules of `exhaustive_case` with up to so many departures: a preemption, an older message read, a store that
    lands in front of a newer one. most_steps : steps after which it stops.
    """
    case = exhaustive_case(tally.protocol)
    tally.cases = 1
    with sim.Simulator(make_world(case, tally.link, kernels)) as s:
        fresh, more = True, True
        while more and tally.found is None:
            if (end is not None and time.monotonic() > end) or (most_steps and tally.steps >= most_steps):
                tally.complete = False
                return
            outcome = s.exhaust(departures, 2000, fresh)
            fresh, more = False, bool(outcome.more) and not outcome.violated
            tally.schedules += outcome.schedules
            tally.steps += outcome.steps
            if outcome.violated:
                _, events = s.trace(None)
                tally.found = Counterexample(case, tally.link, None, outcome, events)
            tick(tally)


def shrink(found: Counterexample, kernels: Kernels, seconds: float = SHRINK_S) -> Counterexample:
    """The smallest case that still shows the same violation, as far as it is found in that time."""
    end = time.monotonic() + seconds
    best = found
    improved = True
    while improved and time.monotonic() < end:
        improved = False
        for case in _smaller(best.case):
            if time.monotonic() > end:
                break
            with sim.Simulator(make_world(case, best.link, kernels)) as s:
                outcome = s.random(0, SHRINK_SCHEDULES, seconds=1.0)
                if outcome.kind == best.outcome.kind:
                    _, events = s.trace(outcome.seed)
                    best = Counterexample(case, best.link, outcome.seed, outcome, events)
                    improved = True
                    break
    return best


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the most helpful first."""
    calls = case.calls
    if case.ranks > 2:
        n = case.ranks - 1
        fitting = tuple(
            replace(c, count=-(-c.count // case.ranks) * n, blocks=c.blocks[:n])
            if c.protocol.startswith("reduce_scatter")
            else replace(c, blocks=c.blocks[:n])
            for c in calls
        )
        yield replace(case, ranks=n, calls=fitting)
    if case.replays > 1:
        yield replace(case, replays=1)
        yield replace(case, replays=case.replays - 1)
    if len(calls) > 1:
        yield replace(case, calls=calls[: (len(calls) + 1) // 2])
        yield replace(case, calls=calls[:-1])
        yield replace(case, calls=calls[1:])
    for halve in (True, False):
        counts = [
            _fitting(c, case.ranks, case.columns or 1, c.count // 2 if halve else c.count - (case.columns or 1))
            for c in calls
        ]
        if [c.count for c in calls] != counts:
            yield replace(case, calls=tuple(replace(c, count=k) for c, k in zip(calls, counts, strict=True)))
    if any(b > 1 for c in calls for b in c.blocks):
        yield replace(case, calls=tuple(replace(c, blocks=(1,)) for c in calls))
        yield replace(case, calls=tuple(replace(c, blocks=tuple(max(1, b - 1) for b in c.blocks)) for c in calls))
    least = max(_least_threads(p) for p in case.protocols)
    if case.threads > least and case.threads // 2 >= max(least, 1):
        yield replace(case, threads=case.threads // 2)
    for other in (
        replace(case, streams=1),
        replace(case, launch="none"),
        replace(case, devices=0),
        replace(case, step_blocks=1),
        replace(case, in_place=False),
        replace(case, shift=0),
        replace(case, first_epoch=FIRST_EPOCH),
    ):
        if other != case:
            yield other


def _least_threads(proto: Protocol) -> int:
    if "shard" in proto.algorithm.phases and proto.encodings:
        return 32
    return 8 if any(e.name == "ll128" for e in proto.encodings) else 4


def _fitting(call: Call, ranks: int, columns: int, count: int) -> int:
    """A count near the given one that the protocol takes. columns : of a row, which is not cut."""
    if call.count == 0:
        return 0
    granule = 4 if not call.protocol.startswith(("one_shot", "two_shot", "all_gather", "reduce_scatter")) else 1
    if call.protocol.startswith("reduce_scatter"):
        granule = ranks
    granule = granule // math.gcd(granule, columns) * columns
    return max(granule, count // granule * granule)
