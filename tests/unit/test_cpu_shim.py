"""The cpu backend's stand-ins for CUDA: conversions bit for bit as NumPy's and ml_dtypes', and fibers as CUDA threads."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.native import compile_library

SHIM = """
#include "reduce.cuh"
using namespace fc;

struct Job {
  u32* out;
  u32 rounds;
};
static u32 index() { return blockIdx.x * blockDim.x + threadIdx.x; }

// Each thread adds 1 to its block's sum, the block meets, and all must see the same sum, in each of many rounds.
static void barriers(const void* p) {
  const Job& job = *static_cast<const Job*>(p);
  u32* sum = job.out + gridDim.x * blockDim.x + blockIdx.x;
  for (u32 k = 1; k <= job.rounds; k++) {
    *sum += 1;
    if (threadIdx.x % 3 == k % 3) spin_pause();
    block_barrier();
    job.out[index()] += *sum == k * blockDim.x;
    block_barrier();
  }
}
// Thread t returns after t rounds; those that stay still meet.
static void early(const void* p) {
  const Job& job = *static_cast<const Job*>(p);
  for (u32 k = 0; k < threadIdx.x; k++) {
    block_barrier();
    job.out[index()]++;
  }
}
// Votes among 8 lanes, the groups of a warp out of step: group g votes g + 1 times, on its lanes' numbers.
static void votes(const void* p) {
  const Job& job = *static_cast<const Job*>(p);
  const u32 group = threadIdx.x / 8, lane = threadIdx.x % 8, mask = 0xffu << (lane_id() & ~7u);
  u32 good = 1;
  for (u32 k = 0; k <= group; k++) {
    const bool mine = group_any(mask, lane == k % 8), none = group_any(mask, 0);
    const bool all = group_all(mask, 1), most = group_all(mask, lane != k % 8);
    good &= mine && !none && all && !most && group_count(mask, lane <= k % 8) == k % 8 + 1;
    if (lane == k % 8) spin_pause();
    group_sync(mask);
  }
  job.out[index()] = good;
}
// A spin on what a later thread of the same grid stores: it must get its turn.
static void relay(const void* p) {
  const Job& job = *static_cast<const Job*>(p);
  const u32 last = gridDim.x * blockDim.x - 1;
  if (index() != last) {
    while (ld_relaxed_sys(job.out + index() + 1) == 0) spin_pause();
  }
  st_relaxed_sys(job.out + index(), index() + 1);
}
static void subnormal(const void* p) {
  const Job& job = *static_cast<const Job*>(p);
  volatile float tiny = bits_to_float(1), two = 2.0f;
  job.out[0] = float_to_bits(tiny * two);
}

extern "C" {
void from_half(const u16* in, u32* out, u64 n) { for (u64 i = 0; i < n; i++) out[i] = float_to_bits(half_to_float(in[i])); }
void from_bfloat(const u16* in, u32* out, u64 n) { for (u64 i = 0; i < n; i++) out[i] = float_to_bits(BF16::get(u32(in[i]) << 16, 1)); }
void to_half(const float* in, u16* out, u64 n) { for (u64 i = 0; i < n; i++) out[i] = float_to_half(in[i]); }
void to_bfloat(const float* in, u16* out, u64 n) { for (u64 i = 0; i < n; i++) out[i] = float_to_bfloat(in[i]); }
void add(const float* a, const float* b, float* out, u64 n) { for (u64 i = 0; i < n; i++) out[i] = add_rn(a[i], b[i]); }
int run(int which, unsigned blocks, unsigned threads, unsigned rounds, u32* out) {
  void (*const bodies[])(const void*) = {barriers, early, votes, relay, subnormal};
  Job job = {out, rounds};
  FloatMode mode;
  return fc_cpu::run_grid(blocks, threads, bodies[which], &job);
}
void flush_to_zero(int on) {
#if defined(__x86_64__)
  _mm_setcsr(on ? 0x9fc0 : 0x1f80);
#endif
}
unsigned twice_the_smallest() {
  volatile float tiny = bits_to_float(1), two = 2.0f;
  return float_to_bits(tiny * two);
}
}
"""
BARRIERS, EARLY, VOTES, RELAY, SUBNORMAL = range(5)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(SHIM, tmp_path_factory.mktemp("shim"), 2)


def convert(function: Any, x: NDArray[Any], to: type[np.generic]) -> NDArray[Any]:
    source, out = np.ascontiguousarray(x), np.zeros(x.size, to)
    function(ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(x.size))
    return out


def run(shim: ctypes.CDLL, body: int, blocks: int, threads: int, rounds: int = 0) -> NDArray[np.uint32]:
    out = np.zeros(blocks * threads + blocks, np.uint32)
    assert shim.run(body, blocks, threads, rounds, ctypes.c_void_p(out.ctypes.data)) == 0
    return out[: blocks * threads]


# ---- conversions ----------------------------------------------------------------------------------------------------

ALL_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def hard_floats(kind: Any) -> NDArray[np.float32]:
    """Over a million floats: every value of a 16-bit type, every midpoint between two, both neighbours of each, and
    random bit patterns."""
    values = ALL_HALVES.view(kind).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    with np.errstate(over="ignore"):
        middles = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
        beyond = np.array(
            [values[-1] * 1.0001, values[-1] * 1.01, values[-1] * 2, np.inf, 65519.996, 65520, 65536], np.float32
        )
        near = np.concatenate([values, middles, beyond, -beyond])
        around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32).view(np.float32)
    subnormal = (
        np.random.default_rng(2).integers(0, 1 << 24, 1 << 14, dtype=np.uint64).astype(np.uint32).view(np.float32)
    )
    return np.concatenate([*around, random, subnormal, -subnormal])


def with_canonical_nans(converted: NDArray[Any], source: NDArray[Any]) -> NDArray[np.uint16]:
    words = converted.view(np.uint16).copy()
    words[np.isnan(source)] = 0x7FFF
    return words


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_every_16_bit_pattern_widens_exactly(shim: ctypes.CDLL, name: str) -> None:
    kind = {"half": np.float16, "bfloat": ml_dtypes.bfloat16}[name]
    got = convert(getattr(shim, f"from_{name}"), ALL_HALVES, np.uint32)
    want = ALL_HALVES.view(kind).astype(np.float32)
    numbers = ~np.isnan(want)
    assert (got == want.view(np.uint32))[numbers].all()
    assert np.isnan(got.view(np.float32)[~numbers]).all()
    assert (~numbers).sum() == {"half": 2 * 1023, "bfloat": 2 * 127}[name]


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_narrowing_rounds_to_nearest_even_at_every_boundary(shim: ctypes.CDLL, name: str) -> None:
    kind = {"half": np.float16, "bfloat": ml_dtypes.bfloat16}[name]
    x = hard_floats(kind)
    assert x.size > 1_000_000
    with np.errstate(over="ignore", invalid="ignore"):
        want = with_canonical_nans(x.astype(kind), x)
    got = convert(getattr(shim, f"to_{name}"), x, np.uint16)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{x[wrong[0]]!r}: {got[wrong[0]]:04x}, not {want[wrong[0]]:04x}"


@pytest.mark.parametrize(
    ("value", "half", "bfloat"),
    [
        (65504.0, 0x7BFF, 0x4780),
        (65519.996, 0x7BFF, 0x4780),  # the last float below the midpoint to 2^16
        (65520.0, 0x7C00, 0x4780),  # float16's overflow threshold, to infinity
        (-0.0, 0x8000, 0x8000),
        (2.0**-24, 0x0001, 0x3380),
        (2.0**-25, 0x0000, 0x3300),  # a tie, to even
        (1.5 * 2.0**-24, 0x0002, 0x33C0),
        (1.0 + 2.0**-11, 0x3C00, 0x3F80),
        (1.0 + 3 * 2.0**-11, 0x3C02, 0x3F80),
        (1.0 + 2.0**-8, 0x3C04, 0x3F80),
        (1.0 + 3 * 2.0**-8, 0x3C0C, 0x3F82),
        (3.4e38, 0x7C00, 0x7F80),
        (float("nan"), 0x7FFF, 0x7FFF),
    ],
)
def test_hand_computed_roundings(shim: ctypes.CDLL, value: float, half: int, bfloat: int) -> None:
    x = np.array([value], np.float32)
    assert convert(shim.to_half, x, np.uint16)[0] == half
    assert convert(shim.to_bfloat, x, np.uint16)[0] == bfloat


def test_sums_have_the_canonical_nan_and_nothing_else_is_changed(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32) for _ in range(2))
    a[:2], b[:2] = (np.inf, -np.inf), (-np.inf, np.inf)
    out = np.zeros_like(a)
    shim.add(*(ctypes.c_void_p(v.ctypes.data) for v in (a, b, out)), ctypes.c_uint64(a.size))
    with np.errstate(all="ignore"):
        want = a + b
    want.view(np.uint32)[np.isnan(want)] = 0x7FFFFFFF
    assert (out.view(np.uint32) == want.view(np.uint32)).all()
    assert (out.view(np.uint32)[:2] == 0x7FFFFFFF).all()


def test_subnormals_live_whatever_the_program_has_set(shim: ctypes.CDLL) -> None:
    try:
        shim.flush_to_zero(1)
        assert run(shim, SUBNORMAL, 1, 1)[0] == 2
        flushed = shim.twice_the_smallest()
    finally:
        shim.flush_to_zero(0)
    assert shim.twice_the_smallest() == 2
    assert flushed in (0, 2), "the caller's own mode is back after a grid"


# ---- fibers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 32), (2, 32), (3, 100), (7, 64), (2, 512)])
def test_all_threads_meet_at_every_barrier_of_a_loop(shim: ctypes.CDLL, blocks: int, threads: int) -> None:
    assert (run(shim, BARRIERS, blocks, threads, rounds=20) == 20).all()


@pytest.mark.parametrize(("blocks", "threads"), [(1, 33), (3, 64), (2, 96)])
def test_threads_that_return_early_are_not_waited_for(shim: ctypes.CDLL, blocks: int, threads: int) -> None:
    assert (run(shim, EARLY, blocks, threads).reshape(blocks, threads) == np.arange(threads)).all()


@pytest.mark.parametrize(("blocks", "threads"), [(1, 8), (1, 32), (2, 64), (3, 96)])
def test_votes_of_eight_lanes_keep_apart(shim: ctypes.CDLL, blocks: int, threads: int) -> None:
    assert (run(shim, VOTES, blocks, threads) == 1).all()


def test_a_spin_lets_the_others_run(shim: ctypes.CDLL) -> None:
    assert (run(shim, RELAY, 4, 128) == np.arange(1, 513)).all()


def test_grids_of_different_sizes_follow_each_other(shim: ctypes.CDLL) -> None:
    for blocks, threads in ((1, 32), (4, 512), (1, 1), (8, 96), (2, 32)):
        assert (run(shim, BARRIERS, blocks, threads, rounds=2) == 2).all()
