// The only PTX of the project. Everything above speaks in these words; kernels_cu/cpu/primitives.hpp has the same
// words for host threads, kernels_cu/sim/primitives.hpp for simulated ones, and a kernel that uses anything else does not
// run there.
//
// Naming: ld_/st_, then the ordering, then the scope. "sys" accesses are strong at system scope (PTX ".sys"), which is
// what makes a store visible to a peer GPU and a poll see it. Evidence is only ever touched by these.
#pragma once
#include "params.cuh"

// With an emulated link the words that it has to do with are `raw`, and it has words of the same names. FC_LINK is 1 for
// link.cuh, which holds the sender back, and 2 for forward.cuh, which has blocks that forward.
#if FC_LINK
#define FC_LINK_RAW_BEGIN namespace raw {
#define FC_LINK_RAW_END   }
#define FC_RAW            raw::
#if FC_LINK == 2
#define FC_LINK_BEGIN(p)    \
  if (!fc::link_begin(p)) { \
    fc::link_forward(p);    \
    return;                 \
  }                         \
  const fc::LinkEnd link_end_
#else
#define FC_LINK_BEGIN(p) fc::link_begin(p)
#endif
#else
#define FC_LINK_RAW_BEGIN
#define FC_LINK_RAW_END
#define FC_LINK_BEGIN(p) (void)0
#define FC_RAW
#endif

#if defined(FC_CPU)
// Here and not in the two headers below: sources are flattened, and each file stands once.
#include "cpu/arithmetic.hpp"
#if defined(FC_SIM)
#if FC_LINK
#error "the simulator has delays of its own: no emulated link there"
#endif
#include "sim/primitives.hpp"
#else
#include "cpu/primitives.hpp"
#endif
#else

#ifndef FC_ALIGNED
#define FC_ALIGNED 0
#endif
#ifndef FC_TRIGGER
#define FC_TRIGGER 0
#endif

namespace fc {

#define FC_DEVICE __device__ __forceinline__

// 16 bytes on the wire: the access width of every encoding's payload-carrying access.
struct alignas(16) Cell {
  u32 w[4];
};

// ---- evidence-carrying accesses -------------------------------------------------------------------------------------
// One 128-bit STRONG.SYS instruction each (tests/unit/test_machine_code.py reads the cubin). 16-byte single-copy
// atomicity is not in PTX's formal model; it rests on libcu++'s documented 16-byte loads and stores and on the link.
FC_LINK_RAW_BEGIN
FC_DEVICE Cell ld_relaxed_sys(const Cell* p) {
  Cell c;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(c.w[0]), "=r"(c.w[1]), "=r"(c.w[2]), "=r"(c.w[3])
               : "l"(p)
               : "memory");
  return c;
}
FC_DEVICE void st_relaxed_sys(Cell* p, Cell c) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(c.w[0]), "r"(c.w[1]), "r"(c.w[2]),
               "r"(c.w[3])
               : "memory");
}
FC_DEVICE u32 ld_relaxed_sys(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FC_DEVICE void st_relaxed_sys(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
FC_DEVICE u32 ld_acquire_sys(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FC_DEVICE void st_release_sys(u32* p, u32 v) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// A 128-byte line is eight lanes' cells, written and read by one instruction of eight converged lanes. `mask` names the
// lanes; the host version needs it to order the lanes, here the instruction itself is the line (assumption A2).
FC_DEVICE void st_relaxed_sys_line(Cell* p, Cell c, u32 /*mask*/) { st_relaxed_sys(p, c); }
FC_DEVICE Cell ld_relaxed_sys_line(const Cell* p, u32 /*mask*/) { return ld_relaxed_sys(p); }
FC_LINK_RAW_END

// Orders what this thread has seen, by relaxed loads, before what it stores from here on, for whoever sees that.
#if FC_LINK == 2
namespace raw {
#endif
FC_DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
#if FC_LINK == 2
}
#endif

// ---- rank-local words -----------------------------------------------------------------------------------------------
// Relaxed at GPU scope: the words are shared by the blocks of one grid, and grids are ordered by the kernel boundary.
struct EpochWords {
  u32 epoch, poison;
};
FC_DEVICE EpochWords ld_epoch(const Control* c) {  // 8 bytes, one access: the two words are looked at together
  EpochWords e;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0,%1}, [%2];" : "=r"(e.epoch), "=r"(e.poison) : "l"(c) : "memory");
  return e;
}
FC_DEVICE Cell ld_relaxed_gpu(const Cell* p) {
  Cell c;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(c.w[0]), "=r"(c.w[1]), "=r"(c.w[2]), "=r"(c.w[3])
               : "l"(p)
               : "memory");
  return c;
}
FC_DEVICE u32 ld_relaxed_gpu(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FC_DEVICE void st_relaxed_gpu(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
FC_DEVICE u64 ld_relaxed_gpu(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
FC_DEVICE void st_relaxed_gpu(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Adds 1 and wraps to 0 after `last`; returns the old value. The ticket of a grid of last + 1 blocks re-arms itself.
FC_DEVICE u32 atomic_inc_wrap(u32* p, u32 last) {
  u32 v;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(last) : "memory");
  return v;
}
FC_DEVICE u32 atomic_exchange(u32* p, u32 value) {
  u32 v;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(value) : "memory");
  return v;
}

// ---- plain memory: the caller's arrays ------------------------------------------------------------------------------
// Never the non-coherent path: a result may overwrite its own input.
// In assembly, since the compiler takes an address that came as an integer for one of any memory (generic addressing).
FC_DEVICE u8 ld_plain(const u8* p) {
  u32 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return u8(v);
}
FC_DEVICE void st_plain(u8* p, u8 v) { asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(u32(v)) : "memory"); }
FC_DEVICE u16 ld_plain(const u16* p) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
FC_DEVICE void st_plain(u16* p, u16 v) { asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory"); }
FC_DEVICE u32 ld_plain(const u32* p) {
  u32 v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
FC_DEVICE void st_plain(u32* p, u32 v) { asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
FC_DEVICE u64 ld_plain(const u64* p) {
  u64 v;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
FC_DEVICE void st_plain(u64* p, u64 v) { asm volatile("st.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
FC_DEVICE Cell ld_plain(const Cell* p) {
  Cell c;
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(c.w[0]), "=r"(c.w[1]), "=r"(c.w[2]), "=r"(c.w[3])
               : "l"(p)
               : "memory");
  return c;
}
FC_DEVICE void st_plain(Cell* p, Cell c) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(c.w[0]), "r"(c.w[1]), "r"(c.w[2]), "r"(c.w[3])
               : "memory");
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
// Explicitly rounded: no contraction and no flush to zero whatever the compiler's flags are.
FC_DEVICE float add_rn(float a, float b) {
  float r;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
#define FC_BINARY(name, instruction)                            \
  FC_DEVICE float name(float a, float b) {                      \
    float r;                                                    \
    asm(instruction " %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); \
    return r;                                                   \
  }
FC_BINARY(sub_rn, "sub.rn.f32")
FC_BINARY(mul_rn, "mul.rn.f32")
FC_BINARY(div_rn, "div.rn.f32")
#undef FC_BINARY
FC_DEVICE float sqrt_rn(float a) {
  float r;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
FC_DEVICE bool less(float a, float b) {
  u32 r;
  asm("set.lt.u32.f32 %0, %1, %2;" : "=r"(r) : "f"(a), "f"(b));
  return r != 0;
}
FC_DEVICE float bits_to_float(u32 b) { return __uint_as_float(b); }
FC_DEVICE u32 float_to_bits(float f) { return __float_as_uint(f); }
FC_DEVICE float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
FC_DEVICE u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
FC_DEVICE u16 float_to_bfloat(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

// ---- threads, time --------------------------------------------------------------------------------------------------
FC_DEVICE u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// This SM's clock, which a block never leaves; SMs agree in its rate and not in its time. Rate: measure/pairs.cuh.
FC_DEVICE u32 ticks() {
  u32 t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}
// The value, computed here and kept in a register. Without it the compiler works addresses out anew wherever they are used,
// in every round of a poll too, from parameters whose loads take as long as ten instructions.
FC_DEVICE u64 pinned(u64 v) {
  asm volatile("" : "+l"(v));
  return v;
}
FC_DEVICE u32 pinned(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}
// Dependent launch (sm_90 on; nothing happens where the launch did not ask for it). A grid may begin while the stream's one
// before it ends. launch_wait() returns when that one is complete and its stores are visible; before it a kernel touches
// nothing that any kernel writes: not the input, not the slab, not the epoch. A trigger lets the next grid be scheduled, when
// every block has come to it or has returned, and says nothing about memory.
//
// A trigger speaks for its whole block as soon as one thread executes it, and one thread is always the first to be done. Others
// may still poll for a peer's block that is not resident yet, and the grid that is let in could take that block's room, for
// good, where ranks share a GPU. Hence there must be room for two grids of each rank wherever triggers are used: one that
// polls and one that waits. There are never three: the grid behind these two comes in when the second has passed its
// launch_wait(), and then the first is complete.
//
// FC_TRIGGER == 1 ("late"): each thread behind its last store of the output. FC_TRIGGER == 2 ("early"): at the entry, behind
// the wait.
FC_DEVICE void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
FC_DEVICE void launch_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#if FC_TRIGGER == 2
  launch_dependents();
#endif
}
constexpr u32 kLineCells = 8;   // cells that lie in one line of memory; blocks have a multiple of it in threads
FC_DEVICE void spin_pause() {}  // a spinning warp costs its own issue slots only
FC_LINK_RAW_BEGIN
FC_DEVICE void block_barrier() { __syncthreads(); }
FC_LINK_RAW_END
// The late trigger of a thread, behind its last store of the output.
FC_DEVICE void late_trigger() {
#if FC_TRIGGER == 1
  launch_dependents();
#endif
}
FC_DEVICE u32 lane_id() { return threadIdx.x & 31u; }
FC_DEVICE u32 group_any(u32 mask, u32 predicate) { return __any_sync(mask, predicate); }
FC_DEVICE u32 group_all(u32 mask, u32 predicate) { return __all_sync(mask, predicate); }
FC_DEVICE void group_sync(u32 mask) { __syncwarp(mask); }

// Whether all threads of the block that have not returned say yes; a barrier of the block as well.
FC_DEVICE bool block_all(const Params&, bool yes) { return __syncthreads_and(yes); }

// Sum of one leaf for each of the block's kCells x blockDim.x places, of which thread t has t, t + blockDim.x, ...: the binary
// tree over the places, so that the order is a property of the places alone. Absent places count as zeros, which changes no
// sum but -0. All threads of the block call it, in turns that count up, and all get the sum.
template <u32 kCells>
FC_DEVICE float block_tree_sum(const Params&, const float (&leaf)[kCells], u32 turn) {
  static_assert((kCells & (kCells - 1)) == 0, "a tree of pairs");
  __shared__ float of_warps[2][32 * kCells];  // in turn: a warp may come to the next sum while another reads this one's
  float* const part = of_warps[turn & 1u];
#pragma unroll
  for (u32 k = 0; k < kCells; k++) {
    float v = leaf[k];
#pragma unroll
    for (u32 m = 1; m < 32; m *= 2) v = add_rn(v, __shfl_xor_sync(0xffffffffu, v, m));
    if (lane_id() == 0) part[(k * blockDim.x + threadIdx.x) / 32] = v;
  }
  FC_RAW block_barrier();
  float v[kCells];
#pragma unroll
  for (u32 k = 0; k < kCells; k++) {
    const u32 warp = lane_id() * kCells + k;
    v[k] = warp < kCells * blockDim.x / 32 ? part[warp] : 0.0f;
  }
#pragma unroll
  for (u32 m = 1; m < kCells; m *= 2) {
#pragma unroll
    for (u32 k = 0; k < kCells; k += 2 * m) v[k] = add_rn(v[k], v[k + m]);
  }
#pragma unroll
  for (u32 m = 1; m < 32; m *= 2) v[0] = add_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], m));
  return add_rn(0.0f, v[0]);
}

}  // namespace fc

#define FC_KERNEL(call)                                                                                             \
  extern "C" __global__ void __launch_bounds__(FC_MAX_THREADS, 1) fc_kernel(const __grid_constant__ fc::Params p) { \
    FC_LINK_BEGIN(p);                                                                                               \
    call(p);                                                                                                        \
  }

#endif

#if FC_LINK == 1
#include "link.cuh"
#endif
#if FC_LINK == 2
#include "forward.cuh"
#endif
