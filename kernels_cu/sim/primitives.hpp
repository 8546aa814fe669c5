// The words of primitives.cuh for the simulator: nothing is done here, everything is asked of the machine.
#pragma once
#include <stdlib.h>

#include "sim/machine.hpp"

#define __launch_bounds__(n)

namespace fc_sim {

extern "C" __attribute__((visibility("hidden"))) Machine* fc_machine;

struct Dim3 {
  unsigned x, y, z;
};
inline unsigned long long address(const void* p) { return reinterpret_cast<unsigned long long>(p); }
template <class T>
inline T load(const T* p, unsigned order) {
  T v;
  fc_machine->load(address(p), sizeof v, order, &v);
  return v;
}
template <class T>
inline void store(T* p, T v, unsigned order) {
  fc_machine->store(address(p), sizeof v, order, &v);
}

}  // namespace fc_sim

namespace fc {

struct alignas(16) Cell {
  u32 w[4];
};

// ---- threads --------------------------------------------------------------------------------------------------------
#define threadIdx (::fc_sim::Dim3{::fc_sim::fc_machine->self->thread, 0, 0})
#define blockIdx  (::fc_sim::Dim3{::fc_sim::fc_machine->self->block, 0, 0})
#define blockDim  (::fc_sim::Dim3{::fc_sim::fc_machine->self->threads, 1, 1})
#define gridDim   (::fc_sim::Dim3{::fc_sim::fc_machine->self->blocks, 1, 1})

FC_DEVICE u32 lane_id() { return threadIdx.x % 32; }
constexpr u32 kLineCells = 1;  // blocks may have any number of threads
FC_DEVICE u64 pinned(u64 v) { return v; }
FC_DEVICE u32 pinned(u32 v) { return v; }
FC_DEVICE void spin_pause() { fc_sim::fc_machine->pause(); }
FC_DEVICE void block_barrier() { fc_sim::fc_machine->meet(0); }
FC_DEVICE void group_sync(u32 mask) { fc_sim::fc_machine->meet(mask); }
FC_DEVICE u32 group_any(u32 mask, u32 predicate) { return fc_sim::fc_machine->vote(mask, predicate) != 0; }
FC_DEVICE u32 group_all(u32 mask, u32 predicate) {
  return fc_sim::fc_machine->vote(mask, predicate) == u32(__builtin_popcount(mask));
}
// Memory that the threads of a block share is none that a rank's threads race for: it is not simulated. A rank has one running
// grid in a channel, so these three say whose it is.
constexpr u32 kLeaves = 8;
FC_DEVICE u32* block_words(const Params& p) {
  constexpr u32 kRanks = 16, kChannels = 4, kBlocks = 8, kWords = 64 * kLeaves;
  static u32 shared[kRanks][kChannels][kBlocks][kWords];
  if (p.rank >= kRanks || p.channel >= kChannels || blockIdx.x >= kBlocks || blockDim.x * kLeaves > kWords) abort();
  return shared[p.rank][p.channel][blockIdx.x];
}
FC_DEVICE bool block_all(const Params& p, bool yes) {
  u32* votes = block_words(p);
  votes[threadIdx.x] = yes;
  block_barrier();
  bool all = true;
  for (u32 t = 0; t < blockDim.x; t++) all = all && votes[t];
  block_barrier();  // before anyone votes again
  return all;
}
template <u32 kCells>
FC_DEVICE float block_tree_sum(const Params& p, const float (&leaf)[kCells], u32) {
  float* leaves = reinterpret_cast<float*>(block_words(p));
  for (u32 k = 0; k < kCells; k++) leaves[k * blockDim.x + threadIdx.x] = leaf[k];
  block_barrier();
  const float sum = add_rn(0.0f, tree_sum(leaves, kCells * blockDim.x));
  block_barrier();  // before anyone writes the next one's
  return sum;
}
FC_DEVICE u64 now_ns() { return 1; }  // no wait expires: the engine sees by itself that nothing can go on
FC_DEVICE void launch_dependents() { fc_sim::fc_machine->launch_dependents(); }
FC_DEVICE void launch_wait() {
  fc_sim::fc_machine->launch_wait();
  if (fc_sim::fc_machine->self->trigger == 2) launch_dependents();
}
FC_DEVICE void late_trigger() {
  if (fc_sim::fc_machine->self->trigger == 1) launch_dependents();
}

// ---- evidence-carrying accesses -------------------------------------------------------------------------------------
FC_DEVICE Cell ld_relaxed_sys(const Cell* p) { return fc_sim::load(p, fc_sim::kRelaxed); }
FC_DEVICE void st_relaxed_sys(Cell* p, Cell c) { fc_sim::store(p, c, fc_sim::kRelaxed); }
FC_DEVICE u32 ld_relaxed_sys(const u32* p) { return fc_sim::load(p, fc_sim::kRelaxed); }
FC_DEVICE void st_relaxed_sys(u32* p, u32 v) { fc_sim::store(p, v, fc_sim::kRelaxed); }
FC_DEVICE u32 ld_acquire_sys(const u32* p) { return fc_sim::load(p, fc_sim::kAcquire); }
FC_DEVICE void st_release_sys(u32* p, u32 v) { fc_sim::store(p, v, fc_sim::kRelease); }
FC_DEVICE void fence_sys() { fc_sim::fc_machine->fence(0); }
FC_DEVICE void st_relaxed_sys_line(Cell* p, Cell c, u32 mask) {
  fc_sim::fc_machine->store_line(fc_sim::address(p), mask, &c);
}
FC_DEVICE Cell ld_relaxed_sys_line(const Cell* p, u32 /*mask*/) { return ld_relaxed_sys(p); }

// ---- rank-local words -----------------------------------------------------------------------------------------------
struct EpochWords {
  u32 epoch, poison;
};
FC_DEVICE EpochWords ld_epoch(const Control* c) {
  return fc_sim::load(reinterpret_cast<const EpochWords*>(c), fc_sim::kRelaxed);
}
FC_DEVICE Cell ld_relaxed_gpu(const Cell* p) { return fc_sim::load(p, fc_sim::kRelaxed); }
FC_DEVICE u32 ld_relaxed_gpu(const u32* p) { return fc_sim::load(p, fc_sim::kRelaxed); }
FC_DEVICE void st_relaxed_gpu(u32* p, u32 v) { fc_sim::store(p, v, fc_sim::kRelaxed); }
FC_DEVICE u64 ld_relaxed_gpu(const u64* p) { return fc_sim::load(p, fc_sim::kRelaxed); }
FC_DEVICE void st_relaxed_gpu(u64* p, u64 v) { fc_sim::store(p, v, fc_sim::kRelaxed); }
FC_DEVICE u32 atomic_inc_wrap(u32* p, u32 last) {
  return fc_sim::fc_machine->modify(fc_sim::address(p), fc_sim::kIncrementAndWrap, last);
}
FC_DEVICE u32 atomic_exchange(u32* p, u32 value) {
  return fc_sim::fc_machine->modify(fc_sim::address(p), fc_sim::kExchange, value);
}

// ---- plain memory ---------------------------------------------------------------------------------------------------
template <class T>
FC_DEVICE T ld_plain(const T* p) {
  return fc_sim::load(p, fc_sim::kPlain);
}
template <class T>
FC_DEVICE void st_plain(T* p, T v) {
  fc_sim::store(p, v, fc_sim::kPlain);
}

}  // namespace fc

#define FC_KERNEL(call)                                                                                          \
  namespace fc_sim {                                                                                             \
  extern "C" __attribute__((visibility("hidden"))) Machine* fc_machine = nullptr;                                \
  }                                                                                                              \
  extern "C" __attribute__((visibility("default"))) void fc_bind(fc_sim::Machine* m) { fc_sim::fc_machine = m; } \
  extern "C" __attribute__((visibility("default"))) void fc_body(const void* p) {                                \
    call(*static_cast<const fc::Params*>(p));                                                                    \
  }
