// The words of primitives.cuh for host threads: a rank is a process, a slab is shared memory, a CUDA thread is a fiber.
#pragma once
#include <string.h>
#include <time.h>

#include "fiber.hpp"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define __launch_bounds__(n)

namespace fc {

struct alignas(16) Cell {
  u32 w[4];
};

// ---- threads --------------------------------------------------------------------------------------------------------
#define threadIdx (::fc_cpu::Dim3{::fc_cpu::self().thread, 0, 0})
#define blockIdx  (::fc_cpu::Dim3{::fc_cpu::self().block->index, 0, 0})
#define blockDim  (::fc_cpu::Dim3{::fc_cpu::grid()->threads, 1, 1})
#define gridDim   (::fc_cpu::Dim3{::fc_cpu::grid()->blocks, 1, 1})

FC_DEVICE u32 lane_id() { return fc_cpu::self().thread % fc_cpu::kWarp; }
constexpr u32 kLineCells = 8;
FC_DEVICE u64 pinned(u64 v) { return v; }
FC_DEVICE u32 pinned(u32 v) { return v; }
FC_DEVICE void launch_wait() {}
FC_DEVICE void late_trigger() {}
FC_DEVICE void spin_pause() { fc_cpu::next_fiber(); }
FC_LINK_RAW_BEGIN
FC_DEVICE void block_barrier() { fc_cpu::wait_at(fc_cpu::self().block->gate, fc_cpu::self().block->live); }
FC_LINK_RAW_END
FC_DEVICE fc_cpu::Warp& warp() { return fc_cpu::self().block->warps[fc_cpu::self().thread / fc_cpu::kWarp]; }
FC_DEVICE void group_sync(u32 mask) {
  fc_cpu::wait_at(warp().gate[__builtin_ctz(mask)], unsigned(__builtin_popcount(mask)));
}
// Number of lanes of `mask` whose predicate is true. The second meeting keeps the votes until all lanes have read them.
FC_DEVICE u32 group_count(u32 mask, u32 predicate) {
  fc_cpu::Warp& w = warp();
  w.votes[lane_id()] = predicate != 0;
  group_sync(mask);
  u32 count = 0;
  for (u32 lane = 0; lane < fc_cpu::kWarp; lane++) {
    if (mask >> lane & 1u) count += w.votes[lane];
  }
  group_sync(mask);
  return count;
}
FC_DEVICE u32 group_any(u32 mask, u32 predicate) { return group_count(mask, predicate) != 0; }
FC_DEVICE u32 group_all(u32 mask, u32 predicate) {
  return group_count(mask, predicate) == u32(__builtin_popcount(mask));
}
// Memory that the threads of a block share, kLeaves words for each of them. All threads of a rank run on one OS thread, and
// all grids ask for the same, so what one block has there stays while others come.
constexpr u32 kLeaves = 8;
FC_DEVICE u32* block_words() {
  static thread_local fc_cpu::Arena shared;
  const size_t words = size_t(blockDim.x) * kLeaves;
  char* base = shared.reserve(gridDim.x * words * sizeof(u32));
  if (!base) abort();
  return reinterpret_cast<u32*>(base) + blockIdx.x * words;
}
FC_DEVICE bool block_all(const Params&, bool yes) {
  u32* votes = block_words();
  votes[threadIdx.x] = yes;
  FC_RAW block_barrier();
  bool all = true;
  for (u32 t = 0; t < blockDim.x; t++) all = all && votes[t];
  FC_RAW block_barrier();  // before anyone votes again
  return all;
}
template <u32 kCells>
FC_DEVICE float block_tree_sum(const Params&, const float (&leaf)[kCells], u32) {
  static_assert(kCells <= kLeaves, "more leaves than block_words() has room for");
  float* leaves = reinterpret_cast<float*>(block_words());
  for (u32 k = 0; k < kCells; k++) leaves[k * blockDim.x + threadIdx.x] = leaf[k];
  FC_RAW block_barrier();
  const float sum = add_rn(0.0f, tree_sum(leaves, kCells * blockDim.x));
  FC_RAW block_barrier();  // before anyone writes the next one's
  return sum;
}
FC_DEVICE u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return u64(t.tv_sec) * 1000000000ull + u64(t.tv_nsec);
}
// 64 ns each: an emulated link is as much slower as the emulation is.
FC_DEVICE u32 ticks() { return u32(now_ns() >> 6); }

// ---- evidence-carrying accesses -------------------------------------------------------------------------------------
// 16 bytes in one access: aligned 16-byte vector moves are atomic on x86-64 with AVX, ldp/stp on aarch64 with LSE2
// (fcomm/backends/cpu.py admits 16-byte encodings only where the processor says so).
FC_LINK_RAW_BEGIN
#if defined(__x86_64__)
FC_DEVICE Cell ld_relaxed_sys(const Cell* p) {
  __m128 v;
  __asm__ volatile("movaps %1, %0" : "=x"(v) : "m"(*p) : "memory");
  Cell c;
  memcpy(&c, &v, 16);
  return c;
}
FC_DEVICE void st_relaxed_sys(Cell* p, Cell c) {
  __m128 v;
  memcpy(&v, &c, 16);
  __asm__ volatile("movaps %1, %0" : "=m"(*p) : "x"(v) : "memory");
}
#else
FC_DEVICE Cell ld_relaxed_sys(const Cell* p) {
  u64 lo, hi;
  __asm__ volatile("ldp %0, %1, [%2]" : "=r"(lo), "=r"(hi) : "r"(p) : "memory");
  return Cell{{u32(lo), u32(lo >> 32), u32(hi), u32(hi >> 32)}};
}
FC_DEVICE void st_relaxed_sys(Cell* p, Cell c) {
  const u64 lo = c.w[0] | u64(c.w[1]) << 32, hi = c.w[2] | u64(c.w[3]) << 32;
  __asm__ volatile("stp %0, %1, [%2]" ::"r"(lo), "r"(hi), "r"(p) : "memory");
}
#endif
FC_DEVICE u32 ld_relaxed_sys(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
FC_DEVICE void st_relaxed_sys(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FC_DEVICE u32 ld_acquire_sys(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FC_DEVICE void st_release_sys(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

// No host instruction writes 128 bytes untorn, so a line is emulated: payload first and the flag's cell last, behind a
// release; reading, the flag's cell first, then an acquire. The lanes meet in between.
FC_DEVICE void st_relaxed_sys_line(Cell* p, Cell c, u32 mask) {
  const bool flag_lane = lane_id() % 8 == 7;
  if (!flag_lane) st_relaxed_sys(p, c);
  group_sync(mask);
  if (flag_lane) {
    __atomic_thread_fence(__ATOMIC_RELEASE);
    st_relaxed_sys(p, c);
  }
}
FC_DEVICE Cell ld_relaxed_sys_line(const Cell* p, u32 mask) {
  const bool flag_lane = lane_id() % 8 == 7;
  Cell c = {};
  if (flag_lane) {
    c = ld_relaxed_sys(p);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
  }
  group_sync(mask);
  if (!flag_lane) c = ld_relaxed_sys(p);
  return c;
}
FC_LINK_RAW_END
#if FC_LINK == 2
namespace raw {
#endif
FC_DEVICE void fence_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
#if FC_LINK == 2
}
#endif

// ---- rank-local words -----------------------------------------------------------------------------------------------
struct EpochWords {
  u32 epoch, poison;
};
FC_DEVICE EpochWords ld_epoch(const Control* c) {
  const u64 v = __atomic_load_n(reinterpret_cast<const u64*>(c), __ATOMIC_RELAXED);
  return EpochWords{u32(v), u32(v >> 32)};
}
FC_DEVICE Cell ld_relaxed_gpu(const Cell* p) { return FC_RAW ld_relaxed_sys(p); }
FC_DEVICE u32 ld_relaxed_gpu(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
FC_DEVICE void st_relaxed_gpu(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FC_DEVICE u64 ld_relaxed_gpu(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
FC_DEVICE void st_relaxed_gpu(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FC_DEVICE u32 atomic_inc_wrap(u32* p, u32 last) {  // all blocks of a rank run on one OS thread
  const u32 old = __atomic_load_n(p, __ATOMIC_RELAXED);
  __atomic_store_n(p, old >= last ? 0 : old + 1, __ATOMIC_RELAXED);
  return old;
}
FC_DEVICE u32 atomic_exchange(u32* p, u32 value) { return __atomic_exchange_n(p, value, __ATOMIC_RELAXED); }

// ---- plain memory ---------------------------------------------------------------------------------------------------
// memcpy: the caller's arrays have their own type, and reading them through another one must not be undefined.
#define FC_PLAIN(type)                     \
  FC_DEVICE type ld_plain(const type* p) { \
    type v;                                \
    memcpy(&v, p, sizeof v);               \
    return v;                              \
  }                                        \
  FC_DEVICE void st_plain(type* p, type v) { memcpy(p, &v, sizeof v); }
FC_PLAIN(u8)
FC_PLAIN(u16)
FC_PLAIN(u32)
FC_PLAIN(u64)
FC_PLAIN(Cell)
#undef FC_PLAIN

// Full float arithmetic for the duration of a grid, whatever the host program has set: no flush to zero.
struct FloatMode {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  FloatMode() { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved); }
#else
  u64 saved;
  FloatMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"(u64(0)));
  }
  ~FloatMode() { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

}  // namespace fc

#define FC_KERNEL(call)                                                                                 \
  static void fc_body(const void* p) {                                                                  \
    FC_LINK_BEGIN(*static_cast<const fc::Params*>(p));                                                  \
    call(*static_cast<const fc::Params*>(p));                                                           \
  }                                                                                                     \
  extern "C" __attribute__((visibility("default"))) int fc_launch(const fc::Params* p, unsigned blocks, \
                                                                  unsigned threads) {                   \
    fc::FloatMode mode;                                                                                 \
    return fc_cpu::run_grid(blocks, threads, fc_body, p);                                               \
  }                                                                                                     \
  extern "C" __attribute__((visibility("default"))) const unsigned fc_sizes[3] = {                      \
      unsigned(sizeof(fc::Params)), unsigned(sizeof(fc::Control)), unsigned(sizeof(fc::ErrorRecord))};
