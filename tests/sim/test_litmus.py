"""The simulator's memory: known litmus programs, each with the set of all outcomes that it may have.

Each allowed outcome must appear, no other one may. Threads are ranks; x and y lie in the slabs of two of them. "acq_rel" and
"sc" are fences of that strength between the two accesses of each thread that has two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from fcomm.backends import sim

pytestmark = pytest.mark.sim

KERNEL = """
#define FC_CPU 1
#define FC_SIM 1
#define FC_N 4
#include "primitives.cuh"
namespace fc {
struct Op { u32 kind, value; u64 at; };
FC_DEVICE void litmus(const Params& p) {
  const Op* op = reinterpret_cast<const Op*>(p.in);
  u32* out = reinterpret_cast<u32*>(p.out);
  for (u64 i = 0; i < p.nbytes; i++, op++) {
    u32* at = reinterpret_cast<u32*>(op->at);
    switch (op->kind) {
      case 0: st_relaxed_sys(at, op->value); break;
      case 1: st_release_sys(at, op->value); break;
      case 2: *out++ = ld_relaxed_sys(at); break;
      case 3: *out++ = ld_acquire_sys(at); break;
      case 4: fence_sys(); break;
      case 5: fc_sim::fc_machine->fence(1); break;
      case 6: launch_wait(); break;
      case 7: if (threadIdx.x != op->value) return; break;
      case 8: block_barrier(); break;
      case 9: group_sync(3); break;
      case 10: group_any(3, 1); break;
      case 11: if (threadIdx.x != op->value) { op++; i++; } break;  // the next one is of that thread alone
    }
  }
}
}  // namespace fc
FC_KERNEL(fc::litmus)
"""
KINDS = {
    "W": 0, "Wrel": 1, "R": 2, "Racq": 3, "acq_rel": 4, "sc": 5, "wait": 6, "thread": 7, "barrier": 8, "syncwarp": 9,
    "vote": 10, "only": 11,
}  # fmt: skip
X, Y = sim.slab_base(0), sim.slab_base(1) + 64
PLACES = {"x": X, "y": Y}
OP = np.dtype([("kind", "<u4"), ("value", "<u4"), ("at", "<u8")])

Outcome = tuple[int, ...]


def w(place: str, value: int, how: str = "W") -> tuple[str, str, int]:
    return how, place, value


def r(place: str, how: str = "R") -> tuple[str, str, int]:
    return how, place, 0


def fenced(thread: list[tuple[str, str, int]], fence: str | None) -> list[tuple[str, str, int]]:
    """The accesses with a fence between each two of them."""
    if fence is None:
        return thread
    out = [thread[0]]
    for access in thread[1:]:
        out += [(fence, "x", 0), access]
    return out


@dataclass(frozen=True)
class Program:
    name: str
    threads: list[list[tuple[str, str, int]]]
    forbidden: frozenset[Outcome]
    """Outcomes (values read, thread by thread; then final values) that must not appear; all other combinations must."""
    final: str = ""
    values: tuple[int, ...] = (0, 1)
    final_values: tuple[int, ...] = ()

    def all_outcomes(self) -> set[Outcome]:
        reads = sum(op[0] in ("R", "Racq") for t in self.threads for op in t)
        spaces = [self.values] * reads + [self.final_values] * len(self.final)
        return set(itertools.product(*spaces))


def programs() -> Iterator[Program]:
    none: frozenset[Outcome] = frozenset()
    every = (None, "acq_rel", "sc")
    mp = [[w("x", 1), w("y", 1)], [r("y"), r("x")]]
    for f in every:
        yield Program(f"MP {f}", [fenced(t, f) for t in mp], none if f is None else frozenset({(1, 0)}))
    yield Program(
        "MP release, acquire", [[w("x", 1), w("y", 1, "Wrel")], [r("y", "Racq"), r("x")]], frozenset({(1, 0)})
    )
    yield Program("MP release, relaxed", [[w("x", 1), w("y", 1, "Wrel")], [r("y"), r("x")]], none)
    yield Program("MP relaxed, acquire", [[w("x", 1), w("y", 1)], [r("y", "Racq"), r("x")]], none)
    sb = [[w("x", 1), r("y")], [w("y", 1), r("x")]]
    for f in every:
        yield Program(f"SB {f}", [fenced(t, f) for t in sb], frozenset({(0, 0)}) if f == "sc" else none)
    two = [[w("x", 1), w("y", 2)], [w("y", 1), w("x", 2)]]
    for f in every:
        yield Program(
            f"2+2W {f}",
            [fenced(t, f) for t in two],
            frozenset({(1, 1)}) if f == "sc" else none,
            "xy",
            final_values=(1, 2),
        )
    yield Program("CoRR", [[w("x", 1)], [r("x"), r("x")]], frozenset({(1, 0)}))
    corr = [[w("x", 1)], [w("x", 2)], [r("x"), r("x")], [r("x"), r("x")]]
    back = {(1, 0), (2, 0)}
    apart = {
        o for o in itertools.product((0, 1, 2), repeat=4)
        if o[:2] in back or o[2:] in back or {o[:2], o[2:]} == {(1, 2), (2, 1)}
    }  # fmt: skip
    yield Program("CoRR, two writers and two readers", corr, frozenset(apart), values=(0, 1, 2))
    iriw = [[w("x", 1)], [w("y", 1)], [r("x"), r("y")], [r("y"), r("x")]]
    for f in every:
        yield Program(f"IRIW {f}", [fenced(t, f) for t in iriw], frozenset({(1, 0, 1, 0)}) if f == "sc" else none)
    rr = [[w("x", 1), w("y", 1)], [w("y", 2), r("x")]]
    for f in every:
        yield Program(
            f"R {f}", [fenced(t, f) for t in rr], frozenset({(0, 2)}) if f == "sc" else none, "y", final_values=(1, 2)
        )
    s = [[w("x", 2), w("y", 1)], [r("y"), w("x", 1)]]
    for f in every:
        yield Program(
            f"S {f}", [fenced(t, f) for t in s], none if f is None else frozenset({(1, 2)}), "x", final_values=(1, 2)
        )
    wrc = [[w("x", 1)], [r("x"), w("y", 1)], [r("y"), r("x")]]
    for f in every:
        yield Program(f"WRC {f}", [fenced(t, f) for t in wrc], none if f is None else frozenset({(1, 1, 0)}))
    # A release of a location covers the thread's later relaxed stores there.
    yield Program(
        "MP, a relaxed store behind the release",
        [[w("x", 1), w("y", 1, "Wrel"), w("y", 2)], [r("y", "Racq"), r("x")]],
        frozenset({(1, 0), (2, 0), (0, 2), (1, 2), (2, 2)}),  # nobody stores 2 to x
        values=(0, 1, 2),
    )


PROGRAMS = {p.name: p for p in programs()}


class Machine:
    """A program ready to run: one block of `threads` threads for each rank, or several launches of a rank."""

    def __init__(
        self,
        kernel: sim.SimKernel,
        launches: list[tuple[int, list[tuple[str, str, int]]]],
        threads: int = 1,
        weak: bool = True,
        dependent: bool = False,
    ) -> None:
        ranks = max(2, 1 + max(rank for rank, _ in launches))
        size = 4096
        cells = size // 16
        flags = np.full(cells, 15, np.uint8)  # everybody may do everything
        tables = (np.full(cells, 4, np.uint8), np.full(cells, 255, np.uint8), flags)
        images = [np.zeros(size, np.uint8) for _ in range(ranks)]
        self.registers = np.zeros((len(launches), 4), np.uint32)
        self.reads = []
        world = sim.World(ranks, sim.LINKS["nvlink"], images, tables, list(range(ranks)), [1] * ranks, [], 64, weak)
        for k, (rank, ops) in enumerate(launches):
            code = np.array([(KINDS[how], value, PLACES[place]) for how, place, value in ops], OP)
            words = np.zeros(16, np.uint64)  # as much of fc::Params as the kernel looks at
            words[2], words[3], words[4] = code.ctypes.data, self.registers[k].ctypes.data, len(code)
            self.reads.append(sum(how in ("R", "Racq") for how, _, _ in ops))
            params = words.view(np.dtype([("word", "<u8")]))
            world.launches.append(sim.Launch(rank, k, kernel, params, 1, threads, dependent=dependent))
            world.kept += [code, words]
        self.simulator = sim.Simulator(world)

    def outcome(self, final: str) -> Outcome:
        read = [int(self.registers[k, i]) for k, n in enumerate(self.reads) for i in range(n)]
        return (*read, *(self.simulator.final_word(PLACES[place]) for place in final))

    def outcomes(self, schedules: int, final: str = "") -> set[Outcome]:
        seen = set()
        with self.simulator as s:
            for seed in range(schedules):
                assert s.random(seed, 1).kind == sim.KINDS[0]
                seen.add(self.outcome(final))
        return seen

    def outcomes_by_enumeration(self, departures: int, final: str = "") -> set[Outcome]:
        seen = set()
        with self.simulator as s:
            more, fresh = 1, True
            while more:
                found = s.exhaust(departures, 1, fresh)
                fresh, more = False, found.more
                assert found.kind == sim.KINDS[0]
                seen.add(self.outcome(final))
        return seen


@pytest.fixture(scope="module")
def kernel() -> sim.SimKernel:
    from fcomm.source import flatten

    return sim.compile_text(flatten(KERNEL), "litmus")


def interleavings(program: Program) -> set[Outcome]:
    """Outcomes with one memory and one access at a time: a few lines of Python that share nothing with the engine."""
    seen = set()

    def step(at: tuple[int, ...], memory: dict[str, int], read: tuple[Outcome, ...]) -> None:
        if all(i == len(t) for i, t in zip(at, program.threads, strict=True)):
            seen.add((*itertools.chain(*read), *(memory[place] for place in program.final)))
            return
        for k, thread in enumerate(program.threads):
            if at[k] == len(thread):
                continue
            how, place, value = thread[at[k]]
            after, got = memory, read
            if how.startswith("W"):
                after = {**memory, place: value}
            elif how.startswith("R"):
                got = (*read[:k], (*read[k], memory[place]), *read[k + 1 :])
            step((*at[:k], at[k] + 1, *at[k + 1 :]), after, got)

    step((0,) * len(program.threads), {"x": 0, "y": 0}, ((),) * len(program.threads))
    return seen


def test_there_are_enough_verdicts() -> None:
    assert len(PROGRAMS) >= 20
    assert sum(bool(p.forbidden) for p in PROGRAMS.values()) >= 10


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_allowed_outcome_appears_and_no_other(kernel: sim.SimKernel, name: str) -> None:
    p = PROGRAMS[name]
    seen = Machine(kernel, list(enumerate(p.threads))).outcomes(4000, p.final)
    assert seen == p.all_outcomes() - p.forbidden


@pytest.mark.parametrize("name", PROGRAMS)
def test_sequentially_consistent_memory_has_the_interleavings(kernel: sim.SimKernel, name: str) -> None:
    p = PROGRAMS[name]
    assert Machine(kernel, list(enumerate(p.threads)), weak=False).outcomes(12000, p.final) == interleavings(p)


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if len(p.threads) == 2])
def test_enumeration_finds_what_random_search_finds(kernel: sim.SimKernel, name: str) -> None:
    p = PROGRAMS[name]
    machine = Machine(kernel, list(enumerate(p.threads)))
    assert machine.outcomes_by_enumeration(5, p.final) == p.all_outcomes() - p.forbidden


def test_load_buffering_is_not_modelled(kernel: sim.SimKernel) -> None:
    """Written down as a limit: an outcome that PTX allows and this memory does not have."""
    threads = [[r("x"), w("y", 1)], [r("y"), w("x", 1)]]
    assert Machine(kernel, list(enumerate(threads))).outcomes(3000) == {(0, 0), (0, 1), (1, 0)}


# ---- launches, barriers, votes: what joins threads beside fences ----------------------------------------------------


def test_completion_of_a_grid_releases_and_the_next_one_acquires(kernel: sim.SimKernel) -> None:
    """MP with each pair of accesses in two grids of one stream, all of them relaxed (A1)."""
    launches = [(0, [w("x", 1)]), (0, [w("y", 1)]), (1, [r("y")]), (1, [r("x")])]
    assert Machine(kernel, launches).outcomes(4000) == {(0, 0), (0, 1), (1, 1)}


@pytest.mark.parametrize("waits", [True, False])
def test_a_dependent_grid_knows_nothing_before_its_wait(kernel: sim.SimKernel, waits: bool) -> None:
    after = [("wait", "x", 0)] if waits else []
    launches = [(0, [w("x", 1)]), (0, [*after, w("y", 1)]), (1, [r("y")]), (1, [*after, r("x")])]
    seen = Machine(kernel, launches, dependent=True).outcomes(4000)
    assert seen == {(0, 0), (0, 1), (1, 1)} | (set() if waits else {(1, 0)})


@pytest.mark.parametrize("join", ["barrier", "syncwarp", "vote"])
def test_a_barrier_joins_threads_and_a_vote_does_not(kernel: sim.SimKernel, join: str) -> None:
    """Thread 0 of rank 0 stores x; they meet; thread 1 releases y. A peer's acquire of y covers x, unless they only voted."""
    writer = [("only", "x", 0), w("x", 1), (join, "x", 0), ("thread", "x", 1), w("y", 1, "Wrel")]
    reader = [("thread", "x", 0), r("y", "Racq"), r("x")]
    seen = Machine(kernel, [(0, writer), (1, reader)], threads=2).outcomes(4000)
    assert seen == {(0, 0), (0, 1), (1, 1)} | ({(1, 0)} if join == "vote" else set())
