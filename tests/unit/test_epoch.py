"""Epoch arithmetic and scrubbing: a model of what must hold over the wrap, and the kernels' own code run for it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcomm.layout import CONTROL_BYTES, CONTROL_DTYPE, EPOCHS, FIRST_EPOCH, SCRUB_CELLS, SlabLayout
from fcomm.protocols import CELL_BYTES, protocol
from tests.unit.native import compile_library

SHIM = """
#include "epoch.cuh"
using namespace fc;
static const Params* params;
static u32 epoch, first_region, last_region, winners;
static Extent used;

static void run_advance(const void*) {
  const u32 e = ld_epoch(control(*params)).epoch;
  if (e == epoch && advance_epoch(*params, e)) winners++;
}
static void run_scrub(const void*) { scrub(*params, epoch, first_region, last_region, used); }

extern "C" {
unsigned next_epoch(unsigned e) { return epoch_after(e); }
// Threads of the grid to which advance_epoch said true; 99 if some thread read another epoch than e.
unsigned advance(const Params* p, unsigned e, unsigned blocks, unsigned threads) {
  params = p;
  epoch = e;
  winners = 0;
  fc_cpu::run_grid(blocks, threads, run_advance, nullptr);
  return winners;
}
void scrub_calls(const Params* p, unsigned from, unsigned count, int first, int last, u64 used0, u64 used1,
                 unsigned blocks, unsigned threads) {
  params = p;
  first_region = first;
  last_region = last;
  used = Extent{{used0, used1}};
  for (unsigned k = 0; k < count; k++) {
    epoch = from + k;
    fc_cpu::run_grid(blocks, threads, run_scrub, nullptr);
  }
}
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compile_library(SHIM, tmp_path_factory.mktemp("epoch"), 2)
    u64, pointer, u32 = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint
    library.next_epoch.restype = library.advance.restype = u32
    library.advance.argtypes = (pointer, u32, u32, u32)
    library.scrub_calls.argtypes = (pointer, u32, u32, ctypes.c_int, ctypes.c_int, u64, u64, u32, u32)
    library.scrub_calls.restype = None
    return library


class Slab:
    """One rank's slab of a world of two in ordinary memory, with the argument of a kernel that uses it."""

    def __init__(self, max_bytes: int, name: str = "one_shot.ll") -> None:
        self.layout = SlabLayout(2, max_bytes)
        memory = np.zeros(self.layout.slab_bytes + 128, np.uint8)
        start = -memory.ctypes.data % 128
        self.bytes = memory[start : start + self.layout.slab_bytes]
        self.control = self.bytes[:CONTROL_BYTES].view(CONTROL_DTYPE)
        self.control[:] = self.layout.initial_control()
        address = self.bytes.ctypes.data
        self.params = self.layout.params(protocol(name), 0, [address, address], 0, 0, 1.0)

    def copies(self) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The scrubbed part of copy 0 and of copy 1, one row a cell."""
        start, size = int(self.params["scrub_offset"][0]), self.layout.scrub_bytes
        return [self.bytes[start + k * size : start + (k + 1) * size].reshape(-1, CELL_BYTES) for k in (0, 1)]


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
    slab = Slab(1024)
    for e in (FIRST_EPOCH, 1000, EPOCHS - 2, EPOCHS - 1):
        slab.control["epoch"] = e
        assert shim.advance(slab.params.ctypes.data, e, blocks, threads) == 1, "one thread is told so"
        assert int(slab.control["epoch"][0]) == next_epoch(e)
        assert int(slab.control["ticket"][0]) == 0, "the ticket re-arms itself"


# ---- scrubbing: the kernels' code -----------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6000), st.sampled_from([(1, 32), (3, 32), (1, 96)]), st.booleans())
def test_half_a_window_clears_every_cell_but_those_in_use(
    shim: ctypes.CDLL, max_bytes: int, grid: tuple[int, int], two_phases: bool
) -> None:
    """Each copy, in one round over it, and again in the second."""
    slab = Slab(max_bytes)
    region = slab.layout.regions()["ll"]
    used = (48, 32 if two_phases else 0)
    start = slab.layout.scrub_from()
    half = (EPOCHS - start) // 4 * 2  # an even number of calls: as many with even as with odd epochs
    busy = np.zeros(slab.layout.scrub_bytes // CELL_BYTES, bool)
    for source in (0, 1):
        at = source * region.slot_stride
        busy[at // 16 : (at + used[0]) // 16] = True
        busy[(at + region.half_stride) // 16 : (at + region.half_stride + used[1]) // 16] = True
    for first in (start, start + half):
        slab.bytes[CONTROL_BYTES:] = 0xA5
        shim.scrub_calls(slab.params.ctypes.data, first, half, 0, 0, *used, *grid)
        for copy in slab.copies():
            cleared = (copy == 0).all(axis=1)
            kept = (copy == 0xA5).all(axis=1)
            assert (cleared | kept).all()
            assert (kept == busy).all()
        outside = slab.bytes[CONTROL_BYTES:].size - sum(c.size for c in slab.copies())
        assert (slab.bytes[CONTROL_BYTES:] == 0xA5).sum() == outside + 2 * 16 * busy.sum(), "nothing else is touched"


def test_a_call_scrubs_only_the_copy_of_its_own_parity_and_only_in_the_window(shim: ctypes.CDLL) -> None:
    slab = Slab(6000)
    start = slab.layout.scrub_from()
    for e, copy in ((start, 0), (start + 1, 1), (EPOCHS - 2, 0), (EPOCHS - 1, 1)):
        slab.bytes[CONTROL_BYTES:] = 0xA5
        shim.scrub_calls(slab.params.ctypes.data, e, 1, 0, 0, 0, 0, 2, 32)
        cleared = [int((c == 0).all(axis=1).sum()) for c in slab.copies()]
        assert 0 < cleared[copy] <= SCRUB_CELLS
        assert cleared[1 - copy] == 0
    slab.bytes[CONTROL_BYTES:] = 0xA5
    for e in (FIRST_EPOCH, start // 2, start - 1):
        shim.scrub_calls(slab.params.ctypes.data, e, 1, 0, 0, 0, 0, 2, 32)
    assert (slab.bytes[CONTROL_BYTES:] == 0xA5).all()


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
    assert stale_hits(windows, cells, slack, lambda k: 20 if k % (2 * slack + span) == large else 1, rounds=rounds) == hits
