"""The emulated link: what is asked for, and what its kernels make of it under a clock that the test turns."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcomm import links
from fcomm.dtypes import BFLOAT16
from fcomm.errors import ArgumentError, SetupError
from fcomm.layout import params_dtype
from fcomm.links import Link
from fcomm.machine_code import compile_specialisation, nvrtc
from fcomm.protocols import protocol
from fcomm.source import Specialisation, flatten, kernel_root
from tests.unit.native import compile_library

# ---- what is asked for -------------------------------------------------------------------------------------------------


def test_links_are_read() -> None:
    assert links.parse("latency_us=0.7,gbps=450") == Link(0.7, 450.0)
    assert links.parse(" gbps = 450 , latency_us = .7 ") == Link(0.7, 450.0)
    assert links.parse("latency_us=2") == Link(2.0, None)
    assert links.parse("gbps=50") == Link(0.0, 50.0)
    for name, link in links.PRESETS.items():
        assert links.parse(name) is link
        assert links.parse(str(link)) == link


@pytest.mark.parametrize(
    "text",
    ["", "nvlink9", "latency_us", "latency_us=", "latency_us=-1", "gbps=1e3", "latency_us=1,latency_us=2", "gbps=450,"],
)
def test_nonsense_is_one_sentence(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a link: use latency_us") as caught:
        links.parse(text)
    assert "\n" not in str(caught.value)


def test_limits() -> None:
    with pytest.raises(ArgumentError, match="latency_us is between 0 and 1000 microseconds, not 1001"):
        links.parse("latency_us=1001")
    with pytest.raises(ArgumentError, match="gbps is between 0\\.001 and 100000 GB/s, not 0"):
        links.parse("gbps=0")
    with pytest.raises(ArgumentError, match="not nan"):
        Link(float("nan"))


def test_ticks() -> None:
    assert Link(0.7, 450).ticks(1980.0) == (1386, round(1980 / 450e3 * 2**24))
    assert Link(2).ticks(1980.0) == (3960, 0)  # no bandwidth is any bandwidth
    assert Link(0, 1e5).ticks(1.0)[1] == 1  # and a large one is not none


# ---- what kernels make of it -------------------------------------------------------------------------------------------

LATENCY = 1000
KERNELS = """
static unsigned clock_now;
#define FC_LINK 1
#define FC_MAX_THREADS 512
#include "primitives.cuh"
using namespace fc;

// When each thread's k-th access was made, in ticks since its grid began.
static u32 made[512][16], count[512];
static u32 index() { return blockIdx.x * blockDim.x + threadIdx.x; }
static void note() { made[index()][count[index()]++] = link_now(link_state()); }
static Cell* at(const Params& p, u32 rank, u32 k) { return reinterpret_cast<Cell*>(p.slab[rank] + p.in) + index() * 16 + k; }
static void store(const Params& p, u32 rank, u32 k) {
  st_relaxed_sys(at(p, rank, k), Cell{{1, 2, 3, 4}});
  note();
}
static void two_stores(const Params& p) { store(p, 1, 0); store(p, 1, 1); }
static void a_look_between(const Params& p) { store(p, 1, 0); ld_relaxed_sys(at(p, 0, 0)); store(p, 1, 1); }
static void to_myself(const Params& p) { store(p, 0, 0); ld_relaxed_sys(at(p, 0, 0)); note(); }
static void loads(const Params& p) {
  ld_relaxed_sys(at(p, 1, 0)); note();
  ld_relaxed_sys(at(p, 1, 1)); note();
  store(p, 1, 0);
}
static void release(const Params& p) {
  store(p, 1, 0);
  st_release_sys(reinterpret_cast<u32*>(at(p, 1, 1)), 1); note();
}
// Thread 0 says that all have stored, and has stored nothing itself.
static void flag_for_all(const Params& p) {
  if (threadIdx.x != 0) store(p, 1, 0);
  block_barrier();
  if (threadIdx.x == 0) { st_relaxed_sys(reinterpret_cast<u32*>(at(p, 1, 1)), 1); note(); }
}
static void many(const Params& p) { for (u32 k = 0; k < p.part; k++) store(p, 1, k); }
// A block that has lived for long, such as one that waited for a late rank: times are those since then.
static void old(const Params& p) {
  if (threadIdx.x == 0) clock_now += 0x1000000;
  block_barrier();
  ld_relaxed_sys(at(p, 0, 0));
  store(p, 1, 0);
  made[index()][0] -= 0x1000000;
}
static void line(const Params& p) {
  const u32 mask = 0xffu << (lane_id() & ~7u);
  st_relaxed_sys_line(reinterpret_cast<Cell*>(p.slab[1]) + threadIdx.x, Cell{{1, 2, 3, threadIdx.x}}, mask);
  note();
}

#define ENTRY(name)                                                                              \\
  static void body_##name(const void* p) { const Params& q = *static_cast<const Params*>(p); link_begin(q); name(q); } \\
  extern "C" int run_##name(const Params* p, unsigned blocks, unsigned threads) {                 \\
    memset(count, 0, sizeof count);                                                              \\
    return fc_cpu::run_grid(blocks, threads, body_##name, p);                                     \\
  }
ENTRY(two_stores) ENTRY(a_look_between) ENTRY(to_myself) ENTRY(loads) ENTRY(release) ENTRY(flag_for_all) ENTRY(many) ENTRY(old) ENTRY(line)
extern "C" const u32* times() { return &made[0][0]; }
"""


class Grids:
    """Runs the kernels above as rank 0 of two, on memory of its own."""

    def __init__(self, folder: Path) -> None:
        shim = (kernel_root() / "cpu" / "primitives.hpp").read_text()
        clock = "FC_DEVICE u32 ticks() { return u32(now_ns() >> 6); }"
        assert clock in shim
        text = flatten(KERNELS.replace("#include", "\n#include"))
        self._library = compile_library(text.replace(clock, "FC_DEVICE u32 ticks() { return clock_now++; }"), folder, 2)
        self._library.times.restype = ctypes.POINTER(ctypes.c_uint32)
        self.slabs = np.zeros((2, 1 << 18), np.uint8)

    def __call__(
        self,
        name: str,
        latency: int = LATENCY,
        ticks_a_byte: float = 0.0,
        threads: int = 32,
        blocks: int = 1,
        part: int = 0,
    ) -> Any:
        """Ticks at which each thread's accesses were made; shape (threads of the grid, 16)."""
        params = np.zeros(1, params_dtype(2, link=True))
        params["slab"] = [row.ctypes.data for row in self.slabs]
        params["part"] = part
        params["link"]["slab_bytes"], params["link"]["latency"] = self.slabs.shape[1], latency
        params["link"]["cost"] = round(ticks_a_byte * 2**links.COST_BITS)
        assert getattr(self._library, f"run_{name}")(ctypes.c_void_p(params.ctypes.data), blocks, threads) == 0
        return np.ctypeslib.as_array(self._library.times(), (512, 16))[: threads * blocks].copy()


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Grids:
    return Grids(tmp_path_factory.mktemp("links"))


SLACK = 600
"""Ticks that 32 fibers' own readings of the clock may take: each is one tick."""


def near(found: Any, expected: float) -> bool:
    return bool((found >= expected).all() and (found < expected + SLACK).all())


def test_a_store_takes_the_latency_and_is_not_waited_for(grids: Grids) -> None:
    times = grids("two_stores")
    assert near(times[:, 0], LATENCY)
    assert near(times[:, 1], LATENCY)  # ready when the first one was: it was held back for its own sake
    assert (grids("two_stores", latency=0)[:, :2] < SLACK).all()


def test_what_follows_a_look_depends_on_it(grids: Grids) -> None:
    times = grids("a_look_between")
    assert near(times[:, 0], LATENCY)
    assert near(times[:, 1], 2 * LATENCY)


def test_the_own_slab_has_no_link(grids: Grids) -> None:
    assert (grids("to_myself", ticks_a_byte=100.0)[:, :2] < SLACK).all()


def test_loads_take_both_ways_together_and_stores_behind_them_one_more(grids: Grids) -> None:
    times = grids("loads")
    assert near(times[:, 0], 2 * LATENCY)
    assert near(times[:, 1], 2 * LATENCY)
    assert near(times[:, 2], 3 * LATENCY)


def test_a_release_waits_for_the_acknowledgement(grids: Grids) -> None:
    times = grids("release")
    assert near(times[:, 0], LATENCY)
    assert near(times[:, 1], 3 * LATENCY)  # there, back, and the flag's own way


def test_a_barrier_joins_the_times_of_its_threads(grids: Grids) -> None:
    times = grids("flag_for_all")
    assert near(times[1:, 0], LATENCY)
    assert near(times[0, 0], LATENCY)  # not two: the flag was ready when the others' stores were


@pytest.mark.parametrize(("threads", "blocks", "cells"), [(32, 1, 1), (32, 1, 8), (128, 1, 4), (64, 4, 8)])
def test_bandwidth(grids: Grids, threads: int, blocks: int, cells: int) -> None:
    """The last byte of all is through when bytes / bandwidth have passed, whatever the grid that sends them."""
    ticks_a_byte = 4.0 / blocks  # of the rank
    times = grids("many", ticks_a_byte=ticks_a_byte, threads=threads, blocks=blocks, part=cells)
    through = threads * blocks * cells * 16 * ticks_a_byte
    last = times[:, :cells].max() - LATENCY
    assert last == pytest.approx(through, rel=0.05, abs=SLACK)


def test_an_old_block_has_the_latency_still_and_no_limit(grids: Grids) -> None:
    assert near(grids("old")[:, 0], LATENCY)
    assert near(grids("old", ticks_a_byte=100.0)[:, 0], LATENCY)


def test_a_line_is_stored_whole(grids: Grids) -> None:
    times = grids("line", ticks_a_byte=1.0)
    assert (grids.slabs[1][: 32 * 16].view(np.uint32).reshape(32, 4)[:, 3] == np.arange(32)).all()
    assert times[:, 0].max() >= LATENCY + 32 * 16


# ---- compiled in on request only -----------------------------------------------------------------------------------------


def test_a_default_kernel_knows_nothing_of_it() -> None:
    spec = Specialisation(protocol("one_shot.ll"), BFLOAT16, 2)
    assert "FC_LINK 1" not in spec.text()
    assert spec.name != Specialisation(protocol("one_shot.ll"), BFLOAT16, 2, link=True).name
    assert params_dtype(2, link=True).itemsize == params_dtype(2).itemsize + 24


@pytest.mark.parametrize("name", ["one_shot.lamport16", "two_shot.flag"])
def test_emulated_kernels_compile(name: str) -> None:
    try:
        nvrtc()
    except SetupError as error:  # the wheel with the compiler is an extra
        pytest.skip(str(error))
    plain = compile_specialisation(Specialisation(protocol(name), BFLOAT16, 4), "sm_90")
    linked = compile_specialisation(Specialisation(protocol(name), BFLOAT16, 4, link=True), "sm_90")
    assert plain.code_bytes < linked.code_bytes
    assert linked.registers * linked.threads <= 65536
