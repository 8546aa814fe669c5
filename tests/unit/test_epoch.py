"""Epoch arithmetic and scrubbing: a model of what must hold over the wrap, and the kernels' own code run for it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fcomm.backends import cpu
from fcomm.dtypes import FLOAT32
from fcomm.layout import CONTROL_BYTES, CONTROL_DTYPE, EPOCHS, ERROR_DTYPE, FIRST_EPOCH, SCRUB_CELLS, SlabLayout
from fcomm.protocols import CELL_BYTES, protocol, protocols
from fcomm.source import Specialisation
from tests.unit.native import compile_library

SHIM = """
#include "epoch.cuh"
using namespace fc;
static const Params* params;
static u32 epoch, winners;

static void run_advance(const void*) {
  const u32 e = ld_epoch(control(*params)).epoch;
  if (e != epoch) return;
  Ticket ticket;
  ticket.draw(*params);
  if (ticket.settle(*params, e)) winners++;
}

extern "C" {
unsigned next_epoch(unsigned e) { return epoch_after(e); }
// Number of threads of the grid for which the ticket advanced the epoch; none if they read another epoch than e.
unsigned advance(const Params* p, unsigned e, unsigned blocks, unsigned threads) {
  params = p;
  epoch = e;
  winners = 0;
  fc_cpu::run_grid(blocks, threads, run_advance, nullptr);
  return winners;
}
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compile_library(SHIM, tmp_path_factory.mktemp("epoch"), 2)
    library.next_epoch.restype = library.advance.restype = ctypes.c_uint
    library.advance.argtypes = (ctypes.c_void_p, *[ctypes.c_uint] * 3)
    return library


@cache
def kernel(name: str) -> cpu.CpuKernel:
    return cpu.CpuKernel(cpu.build(Specialisation(protocol(name), FLOAT32, 2)))


class World:
    """Two ranks in this process, each an OS thread during a call, their slabs in ordinary memory."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self.name, self.layout = name, SlabLayout(2, max_bytes)
        self.slabs: list[NDArray[np.uint8]] = []
        for _ in range(2):
            memory = np.zeros(self.layout.slab_bytes + 128, np.uint8)
            start = -memory.ctypes.data % 128
            self.slabs.append(memory[start : start + self.layout.slab_bytes])
        self.errors = [np.zeros(1, ERROR_DTYPE) for _ in range(2)]
        addresses = [int(s.ctypes.data) for s in self.slabs]
        self.params = [
            self.layout.params(protocol(name), r, addresses, int(self.errors[r].ctypes.data), 0, 10.0) for r in range(2)
        ]
        self.control = [s[:CONTROL_BYTES].view(CONTROL_DTYPE) for s in self.slabs]
        for words in self.control:
            words[:] = self.layout.initial_control()
        for region in self.layout.regions().values():
            for slab in self.slabs:
                slab[region.offset : region.offset + region.copies * region.copy_stride] = region.cleared_to
        self.scrub_offset = min(r.offset for r in self.layout.regions().values())

    def set_epoch(self, e: int) -> None:
        for words in self.control:
            words["epoch"] = e

    def call(self, pool: ThreadPoolExecutor, count: int, grid: tuple[int, int]) -> None:
        """One all-reduce of `count` float32; raises where the sum is wrong."""
        xs = [np.arange(count, dtype=np.float32) + r for r in range(2)]
        ys = [np.zeros_like(x) for x in xs]
        for p, x, y in zip(self.params, xs, ys, strict=True):
            p["in"], p["out"], p["nbytes"] = x.ctypes.data, y.ctypes.data, x.nbytes
        assert list(pool.map(lambda p: kernel(self.name).run(p.ctypes.data, *grid), self.params)) == [0, 0]
        for y, error in zip(ys, self.errors, strict=True):
            assert not error["valid"][0]
            assert (y == xs[0] + xs[1]).all()

    def copies(self, rank: int) -> list[NDArray[np.uint32]]:
        """The words of the scrubbed part of copy 0 and of copy 1."""
        start, size = self.scrub_offset, self.layout.scrub_bytes
        return [self.slabs[rank][start + k * size : start + (k + 1) * size].view(np.uint32) for k in (0, 1)]

    def plant(self) -> None:
        """Fills all that is scrubbed with something old."""
        for rank in (0, 1):
            for copy in self.copies(rank):
                copy[:] = OLD


OLD = 0xA5A5A5A5
GRIDS = [(1, 32), (3, 32), (1, 96)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


# ---- epochs ---------------------------------------------------------------------------------------------------------


def next_epoch(e: int) -> int:
    """What must follow e: the model."""
    return FIRST_EPOCH if e == EPOCHS - 1 else e + 1


@given(st.one_of(st.integers(FIRST_EPOCH, EPOCHS - 1), st.integers(EPOCHS - 5, EPOCHS - 1)))
def test_the_next_epoch_is_never_0_or_1_and_has_the_other_parity(shim: ctypes.CDLL, e: int) -> None:
    after = shim.next_epoch(e)
    assert after == next_epoch(e)
    assert after >= FIRST_EPOCH
    assert after % 2 != e % 2


def test_the_wrap_goes_from_all_ones_to_2(shim: ctypes.CDLL) -> None:
    got = list(itertools.accumulate(range(4), lambda e, _: shim.next_epoch(e), initial=EPOCHS - 2))
    assert got == [EPOCHS - 2, EPOCHS - 1, 2, 3, 4]


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 32), (7, 1), (2, 96), (36, 32)])
def test_a_grid_of_any_size_advances_the_epoch_once(shim: ctypes.CDLL, blocks: int, threads: int) -> None:
    world = World("one_shot.ll", 1024)
    for e in (FIRST_EPOCH, 1000, EPOCHS - 2, EPOCHS - 1):
        world.set_epoch(e)
        assert shim.advance(world.params[0].ctypes.data, e, blocks, threads) == 1, "one thread is told so"
        assert int(world.control[0]["epoch"][0]) == next_epoch(e)
        assert int(world.control[0]["ticket"][0]) == 0, "the ticket re-arms itself"


# ---- scrubbing: the kernels' code -----------------------------------------------------------------------------------

ONE_SHOTS = [p.name for p in protocols().values() if p.algorithm.name == "one_shot"]


def received(world: World, nbytes: int) -> NDArray[np.bool_]:
    """Which words of the scrubbed part of a copy a call of that size uses."""
    (encoding,) = protocol(world.name).encodings
    words = np.zeros(world.layout.scrub_bytes // 4, bool)
    if encoding.copies == 2:
        region = world.layout.regions()[encoding.name]
        for source in (0, 1):
            at = region.offset - world.scrub_offset + source * region.slot_stride
            words[at // 4 : at // 4 + encoding.chunks(nbytes)] = True
            start = at + encoding.header_bytes
            words[start // 4 : (start + encoding.cells(nbytes) * CELL_BYTES) // 4] = True
    return words


@pytest.mark.parametrize("name", ONE_SHOTS)
@pytest.mark.parametrize(("count", "grid"), [(1, (1, 32)), (150, (3, 32)), (64, (1, 96))])
def test_half_a_window_clears_every_word_but_those_in_use(
    pool: ThreadPoolExecutor, name: str, count: int, grid: tuple[int, int]
) -> None:
    """Each copy, in one round over it, and again in the second."""
    world = World(name, 600)
    start = world.layout.scrub_from()
    half = (EPOCHS - start) // 4 * 2  # an even number of calls: as many with even as with odd epochs
    idle = ~received(world, 4 * count)
    for first in (start, start + half):
        world.set_epoch(first)
        world.plant()
        for _ in range(half):
            world.call(pool, count, grid)
        for rank in (0, 1):
            for copy in world.copies(rank):
                assert (copy[idle] == 0).all()


def test_a_call_scrubs_only_the_copy_of_its_own_parity_and_only_in_the_window(pool: ThreadPoolExecutor) -> None:
    world = World("one_shot.ll", 6000)
    start = world.layout.scrub_from()
    for e in (start, start + 1, EPOCHS - 2, EPOCHS - 1):
        world.set_epoch(e)
        world.plant()
        world.call(pool, 1, (2, 32))
        for rank in (0, 1):
            cleared = [int((c == 0).sum()) for c in world.copies(rank)]
            assert 0 < cleared[e % 2] <= 4 * SCRUB_CELLS + 4, "the received cell may hold zeros too"
            assert cleared[1 - e % 2] == 0
    for e in (FIRST_EPOCH, start // 2, start - 1):
        world.set_epoch(e)
        world.plant()
        world.call(pool, 1, (2, 32))
        for rank in (0, 1):
            for copy, received_cells in zip(world.copies(rank), (1 - e % 2, e % 2), strict=True):
                assert (copy != OLD).sum() == 4 * received_cells, "the peer's cell and nothing else"


# ---- scrubbing: why it suffices -------------------------------------------------------------------------------------


def stale_hits(windows: int, cells: int, slack: int, sizes: Callable[[int], int], *, rounds: int = 2) -> int:
    """Model of one slot over three short periods: calls that would have found a cell already carrying their epoch.

    `sizes(k)` is the number of cells that call k uses. `rounds`: times that the window goes around each copy.
    """
    total = windows * cells
    span = 2 * rounds * windows + 4
    end = FIRST_EPOCH + slack * 2 + span  # epochs FIRST_EPOCH .. end - 1, an even number of them
    start = end - span
    slot = np.zeros((2, total), np.int64)
    hits = 0
    for k in range(3 * (end - FIRST_EPOCH)):
        e = FIRST_EPOCH + k % (end - FIRST_EPOCH)
        used = min(sizes(k), total)
        hits += bool((slot[e % 2, :used] == e).any())
        slot[e % 2, :used] = e
        if e >= start and rounds:
            window = np.arange(cells) + (e - start) // 2 % windows * cells
            slot[e % 2, window[window >= used]] = 0
    return hits


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 8), st.integers(0, 2**32), st.floats(0, 1))
def test_no_call_finds_evidence_of_its_epoch_from_a_period_ago(
    windows: int, cells: int, slack: int, seed: int, large: float
) -> None:
    rng = np.random.default_rng(seed)

    def sizes(_: int) -> int:
        return int(rng.integers(1, windows * cells + 1)) if rng.random() < large else 1

    assert stale_hits(windows, cells, slack, sizes) == 0


@pytest.mark.parametrize(("rounds", "hits"), [(0, 2), (1, 2), (2, 0)])
def test_one_round_would_not_suffice(rounds: int, hits: int) -> None:
    """One large call a period, with the very epoch of the call that scrubs what it uses, and small ones else."""
    slack, windows, cells = 8, 5, 4
    span = 2 * rounds * windows + 4
    large = 2 * slack + (2 * 3 if rounds else 0)  # the fourth round's, which clears window 3 of 0..4
    assert (
        stale_hits(windows, cells, slack, lambda k: 20 if k % (2 * slack + span) == large else 1, rounds=rounds) == hits
    )


# ---- Lamport's rotation ---------------------------------------------------------------------------------------------

SENTINEL = 0xFFFFFFFF


@pytest.mark.parametrize("name", ["lamport", "lamport16"])
@pytest.mark.parametrize("seed", range(3))
def test_each_call_sets_back_what_the_call_before_received_however_large_that_was(
    pool: ThreadPoolExecutor, name: str, seed: int
) -> None:
    world = World(f"one_shot.{name}", 8192)
    (encoding,), region = protocol(world.name).encodings, world.layout.regions()[name]
    counts = np.random.default_rng(seed).choice([1, 4, 5, 300, 2000], 9)
    counts[3:6] = (2000, 1, 2000)  # a small call between large ones
    evidence = slice(None) if name == "lamport" else slice(3, 4)
    for k, count in enumerate(int(c) for c in counts):
        world.call(pool, count, GRIDS[k % 3])
        cells = encoding.cells(4 * count)
        for rank in (0, 1):
            memory = world.slabs[rank][region.offset :][: 3 * region.copy_stride].view(np.uint32)
            slots = memory.reshape(3, 2, region.slot_stride // CELL_BYTES, 4)[:, 1 - rank, :, evidence]
            assert (slots[(k - 1) % 3] == SENTINEL).all(), "what the call before received is set back"
            assert (slots[(k + 1) % 3] == SENTINEL).all(), "what the next call receives is ready for it"
            arrived = (slots[k % 3] != SENTINEL).any(axis=1)
            assert arrived[:cells].all()
            assert not arrived[cells:].any()
            assert int(world.control[rank]["epoch"][0]) == FIRST_EPOCH + k + 1


def test_encodings_take_turns_of_their_own(pool: ThreadPoolExecutor) -> None:
    """A call of one Lamport encoding must not move the other's copy on, nor one of another encoding either's."""
    world = World("one_shot.lamport", 4096)
    addresses = [int(s.ctypes.data) for s in world.slabs]
    for k in range(12):
        world.name = ("one_shot.lamport", "one_shot.ll", "one_shot.lamport16", "one_shot.lamport")[k % 4]
        for rank in (0, 1):
            error = int(world.errors[rank].ctypes.data)
            world.params[rank] = world.layout.params(protocol(world.name), rank, addresses, error, 0, 10.0)
        world.call(pool, 7 * k + 1, (2, 32))
    for rank in (0, 1):
        assert (world.control[rank]["lamport"] & 3).tolist() == [[6 % 3, 3 % 3]]
