// The exchange at the heart of every one-phase collective: push my payload to all peers' slots, then take theirs from
// mine, each cell as its own evidence says that it is there. No barrier, no flag, no order among arrivals.
#pragma once
#include "payload.cuh"
#include "wait.cuh"

namespace fc {

// The n - 1 peers' views of one call: where I push, where I look.
template <class Wire>
class Slots {
 public:
  FC_DEVICE Slots(const Params& p, const Region& g, u32 copy) : p_(p), at_(g.offset + copy * g.copy_stride), g_(g) {}
  // My cell in a peer's slab; a peer's cell in my slab.
  FC_DEVICE Cell* at_peer(u32 peer, u64 cell) const { return address(p_.slab[peer], p_.rank, cell); }
  FC_DEVICE Cell* from_peer(u32 peer, u64 cell) const { return address(p_.slab[p_.rank], peer, cell); }

 private:
  FC_DEVICE Cell* address(u64 slab, u32 source, u64 cell) const {
    return reinterpret_cast<Cell*>(slab + at_ + source * g_.slot_stride + cell * 16);
  }
  const Params& p_;
  const u64 at_;
  const Region& g_;
};

template <class Wire>
FC_DEVICE u64 cells_of(u64 nbytes) {
  return (nbytes + Wire::kGroupBytes - 1) / Wire::kGroupBytes * Wire::kGroupCells;
}

template <class Wire>
FC_DEVICE void push(const Params& p, const Slots<Wire>& slots, u64 cell, Payload v, u32 e) {
#pragma unroll
  for (u32 j = 1; j < FC_N; j++) {  // starting behind my own rank, so that ranks do not all push to the same peer first
    const u32 peer = p.rank + j < FC_N ? p.rank + j : p.rank + j - FC_N;
    Wire::put(slots.at_peer(peer, cell), v, e);
  }
}

// Takes one cell of every peer into v[peer]; v[rank] is mine already. All are looked at together, then only those that
// were not there. Returns false if the wait expired.
template <class Wire>
FC_DEVICE bool take(const Params& p, const Slots<Wire>& slots, u64 cell, u32 e, Payload* v) {
  u32 missing = ((1u << FC_N) - 1) & ~(1u << p.rank);
  Wait wait;
  while (true) {
    Cell seen[FC_N];
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      if (missing >> r & 1u) seen[r] = Wire::look(slots.from_peer(r, cell));
    }
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      if ((missing >> r & 1u) && Wire::ready(seen[r], e)) {
        v[r] = Wire::payload(seen[r]);
        missing &= ~(1u << r);
      }
    }
    if (missing == 0) return true;
    if (!wait.again(p)) {
      u32 late = 0;
      Cell last = {{0, 0, 0, 0}};
#pragma unroll
      for (u32 r = FC_N; r-- > 0;) {
        if (missing >> r & 1u) {
          late = r;
          last = seen[r];
        }
      }
      report_expired(p, e, late, cell, last);
      return false;
    }
  }
}

// A Sink is what becomes of the n payloads of a cell: static void consume(p, span, v).
//
// Deadlock freedom: a thread pushes all it owns before its first poll, and the grid is resident, so every cell that
// anyone waits for is pushed without waiting for anything.
template <class Wire, class T, class Sink>
FC_DEVICE void exchange(const Params& p) {
  const EpochWords now = ld_epoch(control(p));
  if (now.poison != 0) return;
  const u32 e = now.epoch;
  const Slots<Wire> slots(p, p.region[0], e & 1u);
  const u64 cells = cells_of<Wire>(p.nbytes);
  const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x, stride = u64(gridDim.x) * blockDim.x;

  Payload own = {{0, 0, 0, 0}};
  if (first < cells) {
    own = load_payload<Wire::kWords, T::kElement>(p.in, p.nbytes, Wire::span(first));
    push<Wire>(p, slots, first, own, e);
  }
  for (u64 c = first + stride; c < cells; c += stride) {
    push<Wire>(p, slots, c, load_payload<Wire::kWords, T::kElement>(p.in, p.nbytes, Wire::span(c)), e);
  }
  advance_epoch(p, e);
  scrub(p, e, 0, 0, Extent{{cells * 16, 0}});
  for (u64 c = first; c < cells; c += stride) {
    Payload v[FC_N];
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) v[r] = own;  // v[rank] stays; the others are taken
    // My next own payload, while the peers' are on their way. In place this is still input: a cell's output is written
    // by the thread that owns the cell, after this.
    if (c + stride < cells) {
      own = load_payload<Wire::kWords, T::kElement>(p.in, p.nbytes, Wire::span(c + stride));
    }
    if (!take<Wire>(p, slots, c, e, v)) return;
    Sink::consume(p, Wire::span(c), v);
  }
}

}  // namespace fc
