"""The emulated link that forwards: what arrives when and in which order, under a clock that the test turns."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from fcomm import Communicator, links
from fcomm.dtypes import BFLOAT16
from fcomm.errors import ArgumentError, SetupError
from fcomm.layout import params_dtype
from fcomm.links import Link
from fcomm.machine_code import compile_specialisation, nvrtc
from fcomm.protocols import protocol
from fcomm.source import Specialisation, flatten, kernel_root
from tests.unit.native import compile_library

# ---- what is asked for -------------------------------------------------------------------------------------------------


def test_forwarding_links_are_read() -> None:
    link = links.parse("latency_us=2, gbps=50, form=forwarded, jitter_us=.5, seed=7")
    assert link == Link(2.0, 50.0, "forwarded", 0.5, 7)
    assert links.parse(str(link)) == link
    assert links.parse("nvlink4,form=forwarded") == Link(0.7, 450, "forwarded")
    assert links.parse("form=held") == Link(0.0)
    assert (Link(1).compiled, link.compiled) == (1, 2)
    assert (Link(1).blocks(4), link.blocks(4)) == (4, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency_us=1,form=fast", "a link's form is one of held, forwarded, not 'fast'"),
        ("latency_us=1,jitter_us=2", "jitter_us and seed with form=forwarded only"),
        ("latency_us=1,seed=2", "jitter_us and seed with form=forwarded only"),
        ("form=forwarded,jitter_us=1001", "jitter_us is between 0 and 1000 microseconds, not 1001"),
        ("form=forwarded,seed=4294967296", "seed is between 0 and 4294967295, not 4294967296"),
        ("form=forwarded,seed=-1", "is not a link: use latency_us"),
        ("form=forwarded,seed=1.5", "is not a link: use latency_us"),
        ("form=forwarded,form=forwarded", "is not a link: use latency_us"),
        ("nvlink4,latency_us=1", "is not a link: use latency_us"),
    ],
)
def test_nonsense_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        links.parse(text)
    assert "\n" not in str(caught.value)


def test_slabs_that_an_entry_cannot_reach_are_refused() -> None:
    """Before anything is allocated."""
    with pytest.raises(ArgumentError, match=r"slabs of .. GiB are too large for a link that forwards, .* up to 16 GiB"):
        Communicator(MPI.COMM_SELF, backend="cpu", max_bytes=400 << 20, channels=4, link="nvlink4,form=forwarded")


# ---- what it does ----------------------------------------------------------------------------------------------------

LATENCY = 100_000
SLACK = 8_000
"""Readings of the clock, one tick each, that all fibers make between something due and its being seen."""
KERNELS = """
static unsigned long long clock_now;
#define FC_LINK 2
#define FC_MAX_THREADS 64
#include "primitives.cuh"
using namespace fc;

// When each thread had made its k-th access, and when it saw in the peer's memory what it had sent.
static u32 made[64][8], seen[64][512], wrong;
static u64 started;
static u32 index() { return blockIdx.x * blockDim.x + threadIdx.x; }
static u32 since() { return u32(now_ns() - started); }
static Cell* at(const Params& p, u32 rank, u32 k) { return reinterpret_cast<Cell*>(p.slab[rank] + p.in) + index() * 512 + k; }
static u32 value(const Params& p, u32 k) { return u32(p.nbytes) + index() * 1000 + k; }
static Cell cell(u32 v) { return Cell{{v, v + 1, v + 2, v + 3}}; }
static void store(const Params& p, u32 rank, u32 k) { st_relaxed_sys(at(p, rank, k), cell(value(p, k))); }
static bool there(const Params& p, u32 k) {
  const Cell c = raw::ld_relaxed_sys(at(p, 1, k)), want = cell(value(p, k));
  return memcmp(&c, &want, 16) == 0;
}
static void watch(const Params& p, u32 k) {
  while (!there(p, k)) spin_pause();
  seen[index()][k] = since();
}
static void two_stores(const Params& p) {
  for (u32 k = 0; k < 2; k++) { store(p, 1, k); made[index()][k] = since(); }
  for (u32 k = 0; k < 2; k++) watch(p, k);
}
static void to_myself(const Params& p) {
  store(p, 0, 0);
  made[index()][0] = since();
  const Cell c = ld_relaxed_sys(at(p, 0, 0)), want = cell(value(p, 0));
  if (memcmp(&c, &want, 16)) wrong++;
}
static void loads(const Params& p) {
  for (u32 k = 0; k < 2; k++) { ld_relaxed_sys(at(p, 1, k)); made[index()][k] = since(); }
  ld_relaxed_sys(at(p, 0, 0));
  ld_relaxed_sys(at(p, 1, 2)); made[index()][2] = since();
}
// Thread 0 says that all have stored; the last one looks whether that is true when it is seen.
static void release(const Params& p) {
  u32* flag = reinterpret_cast<u32*>(p.slab[1]);
  for (u32 k = 0; k < p.part; k++) store(p, 1, k);
  block_barrier();
  if (threadIdx.x < 3) st_release_sys(flag + threadIdx.x, u32(p.nbytes));
  for (u32 f = 0; f < 3; f++) {
    while (raw::ld_acquire_sys(flag + f) != u32(p.nbytes)) spin_pause();
    for (u32 k = 0; k < p.part; k++) wrong += !there(p, k);
  }
  made[index()][0] = since();
}
static void many(const Params& p) {
  for (u32 k = 0; k < p.part; k++) store(p, 1, k);
  for (u32 k = 0; k < p.part; k++) watch(p, k);
}
static void silent(const Params&) {}
static void leave(const Params& p) { for (u32 k = 0; k < p.part; k++) store(p, 1, k); }
// Cells in front, as many as the lane's number, so that lines begin anywhere.
static void lines(const Params& p) {
  const u32 mask = 0xffu << (lane_id() & ~7u), v = u32(p.nbytes) + threadIdx.x;
  if (threadIdx.x < 3) store(p, 1, 8);
  Cell* line = reinterpret_cast<Cell*>(p.slab[1]) + threadIdx.x;
  if (threadIdx.x == 0) fence_sys();
  st_relaxed_sys_line(line, cell(v), mask);
  while (raw::ld_relaxed_sys(line - threadIdx.x % 8 + 7).w[0] != (v | 7u)) spin_pause();
  wrong += raw::ld_relaxed_sys(line).w[0] != v;
}
static void words(const Params& p) {
  u32* w = reinterpret_cast<u32*>(p.slab[1]) + threadIdx.x;
  st_relaxed_sys(w, value(p, 0));
  while (raw::ld_relaxed_sys(w) != value(p, 0)) spin_pause();
  seen[index()][0] = since();
}

#define ENTRY(name)                                                                              \\
  static void body_##name(const void* p) { const Params& q = *static_cast<const Params*>(p); FC_LINK_BEGIN(q); name(q); } \\
  extern "C" int run_##name(const Params* p, unsigned blocks, unsigned threads) {                 \\
    started = clock_now; wrong = 0;                                                              \\
    return fc_cpu::run_grid(2 * blocks, threads, body_##name, p);                                 \\
  }
ENTRY(two_stores) ENTRY(to_myself) ENTRY(loads) ENTRY(release) ENTRY(many) ENTRY(silent) ENTRY(leave) ENTRY(lines) ENTRY(words)
extern "C" const u32* when_made() { return &made[0][0]; }
extern "C" const u32* when_seen() { return &seen[0][0]; }
extern "C" u32 mistakes() { return wrong; }
extern "C" const u32 sizes[3] = {u32(sizeof(Queue)), u32(offsetof(Queues, of)), kRing};
"""


class Grids:
    """Runs the kernels above as rank 0 of two, on memory of its own."""

    def __init__(self, folder: Path) -> None:
        shim = (kernel_root() / "cpu" / "primitives.hpp").read_text()
        clock = shim[shim.index("FC_DEVICE u64 now_ns() {") :].split("}\n")[0] + "}\n"
        text = flatten(KERNELS.replace("#include", "\n#include"))
        assert text.count(clock) == 1
        text = text.replace(clock, "FC_DEVICE u64 now_ns() { return clock_now++; }\n")
        self._library = compile_library(text, folder, 2)
        for name in ("when_made", "when_seen"):
            getattr(self._library, name).restype = ctypes.POINTER(ctypes.c_uint32)
        self.sizes = tuple((ctypes.c_uint32 * 3).in_dll(self._library, "sizes"))
        self.slabs = np.zeros((2, 1 << 20), np.uint8)
        self._queues = np.zeros(links.queues_bytes(2) + 128, np.uint8)
        self.calls = 0

    @property
    def _base(self) -> int:
        return -self._queues.ctypes.data % 128

    def queue(self, block: int) -> NDArray[np.uint32]:
        """The words of a block's queue."""
        start = self._base + links.QUEUES_HEAD_BYTES + block * links.QUEUE_BYTES
        return self._queues[start : start + links.QUEUE_BYTES].view(np.uint32)

    def __call__(
        self,
        name: str,
        link: Link | None = None,
        threads: int = 32,
        blocks: int = 1,
        part: int = 0,
        ticks_a_byte: float = 0.0,
    ) -> tuple[Any, Any]:
        """Ticks at which each thread's accesses were made and seen; shapes (threads of the grid, 8) and (.., 512)."""
        self.calls += 1
        params = np.zeros(1, params_dtype(2, link=2))
        params["slab"] = [row.ctypes.data for row in self.slabs]
        params["in"], params["part"], params["nbytes"] = 4096, part, self.calls << 16
        params["timeout_ns"] = 1 << 40
        link = link or Link(LATENCY / 1e3, form="forwarded")
        link.write(params, 1000.0, self.slabs.shape[1], queues=self._queues.ctypes.data + self._base)
        if ticks_a_byte:
            params["link"]["cost"] = round(ticks_a_byte * 2**links.COST_BITS)
        assert getattr(self._library, f"run_{name}")(ctypes.c_void_p(params.ctypes.data), blocks, threads) == 0
        assert self._library.mistakes() == 0
        return (
            np.ctypeslib.as_array(self._library.when_made(), (64, 8))[: threads * blocks].copy(),
            np.ctypeslib.as_array(self._library.when_seen(), (64, 512))[: threads * blocks].copy(),
        )


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Grids:
    return Grids(tmp_path_factory.mktemp("forward"))


def near(found: Any, expected: float) -> bool:
    return bool((found >= expected).all() and (found < expected + SLACK).all())


def jitter(us: float, seed: int) -> Link:
    return Link(LATENCY / 1e3, None, "forwarded", us, seed)


def test_sizes_are_those_of_the_kernels(grids: Grids) -> None:
    assert grids.sizes == (links.QUEUE_BYTES, links.QUEUES_HEAD_BYTES, links.RING)


def test_a_store_arrives_late_and_holds_nobody(grids: Grids) -> None:
    made, seen = grids("two_stores", threads=32, blocks=2)
    assert (made[:, :2] < SLACK).all()
    assert near(seen[:, :2], LATENCY)
    assert near(grids("words")[1][:, 0], LATENCY)


def test_the_own_slab_has_no_link(grids: Grids) -> None:
    assert (grids("to_myself")[0][:, 0] < SLACK).all()
    grids("silent", blocks=2)  # nothing sent: the links leave all the same


def test_loads_take_both_ways_together_and_again_behind_a_look(grids: Grids) -> None:
    made, _ = grids("loads")
    assert near(made[:, :2], 2 * LATENCY)
    assert near(made[:, 2], 4 * LATENCY)


@pytest.mark.parametrize("seed", range(3))
def test_a_release_comes_behind_all_that_its_block_sent(grids: Grids, seed: int) -> None:
    """Whatever the stores' own times; and the kernel itself looks whether all is there."""
    grids("release", jitter(900, seed), threads=64, part=1)  # one each: no thread's own order helps
    grids("release", jitter(300, seed), threads=64, part=5)
    made, _ = grids("release", threads=64, part=3)
    assert near(made[:, 0], 3 * LATENCY)  # there, back, and its own way: two latencies behind the payload
    made, _ = grids("release", threads=64, part=0)
    assert near(made[:, 0], LATENCY)  # and nothing to be acknowledged


@pytest.mark.parametrize("seed", range(3))
def test_a_line_is_seen_whole(grids: Grids, seed: int) -> None:
    grids("lines", jitter(300, seed), threads=64)


def test_a_fence_is_repeated_where_its_stores_are_made(grids: Grids) -> None:
    grids("two_stores")
    start = int(grids.queue(0)[0])
    grids("lines")
    entries = grids.queue(0)[32 : 32 + links.RING * 8].reshape(-1, 8)
    told = [int(entries[(start + k) % links.RING][7]) >> 4 & 15 for k in range(int(grids.queue(0)[0]) - start)]
    fenced, line, cell, nothing = 8, 3, 0, 4
    assert [k for k in told if k != nothing] == [cell] * 3 + [line | fenced] * 8 + [line] * 24
    assert told.index(line | fenced) % 8 == 0


def test_more_than_a_ring_holds_in_many_grids_and_over_the_end_of_the_count(grids: Grids) -> None:
    """The writers wait for room; every cell arrives once, and the queue is empty behind each grid."""
    part = 200
    grids.queue(0)[:] = 0
    grids.queue(0)[0] = (1 << 32) - 100  # as if so many had gone through
    for k in range(3):
        assert part * 32 > 3 * links.RING
        grids("many", Link(1.0, None, "forwarded", 1.0, k), part=part)
        assert grids.queue(0)[:2].tolist() == [(part * 32 * (k + 1) - 100) % (1 << 32), 0]


def test_a_grid_ends_when_all_that_it_sent_has_arrived(grids: Grids) -> None:
    grids("leave", jitter(500, 1), threads=32, blocks=2, part=9)
    cells = grids.slabs[1][4096:].view(np.uint32)[: 64 * 512 * 4].reshape(64, 512, 4)[:, :9, 0]
    want = (grids.calls << 16) + 1000 * np.arange(64)[:, None] + np.arange(9)
    assert (cells == want).all()


@pytest.mark.parametrize(("threads", "blocks", "cells"), [(32, 1, 1), (32, 1, 8), (32, 2, 8), (64, 1, 4)])
def test_bandwidth_is_the_ranks(grids: Grids, threads: int, blocks: int, cells: int) -> None:
    """Through one bucket, whichever block sends how much."""
    ticks_a_byte = 20.0
    _, seen = grids("many", threads=threads, blocks=blocks, part=cells, ticks_a_byte=ticks_a_byte)
    through = threads * blocks * cells * 16 * ticks_a_byte
    assert seen[:, :cells].max() - LATENCY == pytest.approx(through, rel=0.03, abs=SLACK)


def test_jitter_reorders_and_a_seed_replays_it(grids: Grids) -> None:
    def order(seed: int) -> list[int]:
        grids.queue(0)[:] = 0  # the same places in the queue
        _, seen = grids("many", jitter(500, seed), part=1)
        assert near(seen[:, 0].min(), LATENCY) or seen[:, 0].min() < LATENCY + 100_000
        assert seen[:, 0].max() < LATENCY + 500_000 + SLACK
        return [int(k) for k in np.argsort(seen[:, 0])]

    first = order(1)
    assert first != list(range(32))
    assert order(1) == first
    assert order(2) != first


# ---- compiled in on request only -----------------------------------------------------------------------------------------


def test_arguments_of_each_form() -> None:
    assert params_dtype(2, link=2).itemsize == params_dtype(2, link=1).itemsize + 16
    plain = Specialisation(protocol("one_shot.ll"), BFLOAT16, 2)
    assert {Specialisation(protocol("one_shot.ll"), BFLOAT16, 2, link=k).name for k in (1, 2)} == {
        f"{plain.name}-link",
        f"{plain.name}-forwarded",
    }


def test_a_forwarding_kernel_compiles_without_spills() -> None:
    try:
        nvrtc()
    except SetupError as error:  # the wheel with the compiler is an extra
        pytest.skip(str(error))
    cubin = compile_specialisation(Specialisation(protocol("two_shot.lamport16+ll128"), BFLOAT16, 4, link=2), "sm_90")
    assert cubin.faults() == []
