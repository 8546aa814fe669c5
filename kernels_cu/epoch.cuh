// The epoch: which call this is. It lives in device memory, since a replayed graph repeats its arguments, and it counts
// calls, whatever their size, encoding or grid.
#pragma once
#include "primitives.cuh"

namespace fc {

constexpr u32 kFirstEpoch = 2;  // 0 is never evidence (cleared slots hold it); starting over at 2 keeps the parity

FC_DEVICE Control* control(const Params& p) { return reinterpret_cast<Control*>(p.slab[p.rank] + p.control); }

FC_DEVICE u32 epoch_after(u32 e) { return e == 0xffffffffu ? kFirstEpoch : e + 1; }

// Advances the epoch once per grid: by the last block of which every thread has read it.
//
// Called by all threads of a block after they used the words that ld_epoch returned (at least `if (poison) return`), so
// their loads have completed; the block's barrier puts them before its ticket, and the last ticket before the store. A
// relaxed ticket suffices: nothing but this one word is handed over, and the next grid reads it behind a kernel boundary.
// Returns true in one thread of the grid.
FC_DEVICE bool advance_epoch(const Params& p, u32 e) {
  block_barrier();
  if (threadIdx.x != 0) return false;
  Control* c = control(p);
  if (atomic_inc_wrap(&c->ticket, gridDim.x - 1) != gridDim.x - 1) return false;
  st_relaxed_gpu(&c->epoch, epoch_after(e));
  return true;
}

// The part of every slot that the running call writes; scrubbing keeps off it.
struct Extent {
  u64 bytes[2];  // from the start of the slot, and from its second half
};

// Stale evidence. A slot's tail may still hold the evidence of a large call that was made one whole period (2^32 - 2
// calls) ago; a call with that very epoch would believe it. So before the epoch wraps there is a window of calls in which
// each call clears a few cells, twice around each copy: what a call in the window leaves behind is cleared by the second
// round, or by the first round of the next period, before its epoch comes up again.
//
// Ordering: call e clears only the copy of its own parity, outside its own extents. The last writers there were peers in
// call e - 2 or before, all consumed (I2) before this grid started; the next are peers in call e + 2, which start after
// their call e + 1 has seen evidence of ours, which leaves after this grid is complete (I3, A1).
//
// `used` is what the running call writes in each slot of p.region[first .. last].
FC_DEVICE void scrub(const Params& p, u32 e, int first, int last, Extent used) {
  if (e < p.scrub_from || blockIdx.x != 0) return;
  const u64 round = (e - p.scrub_from) / 2;
  const u64 base = p.slab[p.rank];
  const u64 windows = (p.scrub_bytes / 16 + p.scrub_cells - 1) / p.scrub_cells;
  for (u64 i = threadIdx.x; i < p.scrub_cells; i += blockDim.x) {
    const u64 at = p.scrub_offset + (round % windows * p.scrub_cells + i) * 16;
    if (at >= p.scrub_offset + p.scrub_bytes) continue;
    bool busy = false;
    for (int k = first; k <= last; k++) {
      const Region& g = p.region[k];
      if (at < g.offset || at >= g.offset + FC_N * g.slot_stride) continue;
      const u64 inside = (at - g.offset) % g.slot_stride;
      busy = busy || inside < used.bytes[0] || (inside >= g.half_stride && inside - g.half_stride < used.bytes[1]);
    }
    if (!busy) st_relaxed_sys(reinterpret_cast<Cell*>(base + at + (e & 1u) * p.scrub_stride), Cell{{0, 0, 0, 0}});
  }
}

}  // namespace fc
