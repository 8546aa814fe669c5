// The epoch: which call this is. It lives in device memory, since a replayed graph repeats its arguments, and it counts
// calls, whatever their size, encoding or grid.
#pragma once
#include "ablate/variant.cuh"
#include "primitives.cuh"

namespace fc {

constexpr u32 kFirstEpoch = 2;  // 0 is never evidence (cleared slots hold it); starting over at 2 keeps the parity

FC_DEVICE Control* control(const Params& p) { return reinterpret_cast<Control*>(p.control); }

FC_DEVICE u32 epoch_after(u32 e) { return e == 0xffffffffu ? kFirstEpoch : e + 1; }

// Advances the rank-local words once per grid, by the last block of which every thread has read them. In two steps: the
// ticket is drawn early, and what it says is looked at when the block has nothing else to do, since an atomic takes about as
// long to answer as a peer's data to arrive.
//
// draw() is called by all threads of a block after they used the words that they read at the start (at least for
// `if (poisoned) return`), so their loads have completed; the block's barrier puts them before its ticket, and the last
// ticket comes before the stores that follow settle(). A relaxed ticket suffices: nothing but these words is handed over,
// and the next grid reads them behind a kernel boundary.
class Ticket {
 public:
  FC_DEVICE void draw(const Params& p) {
    if constexpr (ablate::without(ablate::kExit)) return;
    block_barrier();
    drawn_ = 0;
    if (threadIdx.x == 0) drawn_ = atomic_inc_wrap(&control(p)->ticket, gridDim.x - 1);
  }
  // Advances the epoch; true in the one thread of the grid that did, which then may change the other words.
  FC_DEVICE bool settle(const Params& p, u32 e) const {
    if constexpr (ablate::without(ablate::kExit)) return false;
    if (threadIdx.x != 0 || drawn_ != gridDim.x - 1) return false;
    st_relaxed_gpu(&control(p)->epoch, epoch_after(e));
    return true;
  }

 private:
  u32 drawn_;
};

// Clears stale evidence: one call's share of it. A slot's tail may still hold the evidence of a large call that was made
// one whole period (2^32 - 2 calls) ago; a call with that very epoch would believe it. So before the epoch wraps there is
// a window of calls in which each clears a few cells, twice around each copy: what a call in the window leaves behind is
// cleared by the second round, or by the first round of the next period, before its epoch comes up again.
//
// Ordering: call e clears only the copy of its own parity, and there only words that it does not itself receive. Whoever
// wrote them was a peer in call e - 2 or before, all consumed (I2) before this grid started; who will write them next is a
// peer in call e + 2, which starts when its call e + 1 has seen evidence of ours, which leaves when this grid is complete
// (I3, A1).
//
// Receives: static bool receives(p, at) - whether the running call receives the word `at` bytes from the slab's start,
// counted in copy 0.
template <class Receives>
FC_DEVICE void scrub(const Params& p, u32 e, const Receives& receives) {
  if constexpr (ablate::without(ablate::kRearm)) return;
  if (e < p.scrub_from || blockIdx.x != 0) return;
  const u64 round = (e - p.scrub_from) / 2;
  const u64 rounds = (p.scrub_bytes / 16 + p.scrub_cells - 1) / p.scrub_cells;  // that make one way around
  const u64 end = p.scrub_offset + p.scrub_bytes;
  const u64 copy = p.slab[p.rank] + (e & 1u) * p.scrub_stride;
  for (u64 i = threadIdx.x; i < p.scrub_cells * 4ull; i += blockDim.x) {
    const u64 at = p.scrub_offset + round % rounds * p.scrub_cells * 16 + i * 4;
    if (at < end && !receives(at)) st_relaxed_sys(reinterpret_cast<u32*>(copy + at), 0);
  }
}

}  // namespace fc
