// A message in n parts, one for each rank: rank r's begins at r * stride and has the length that is left, at most `part`.
// Up to one of them is shorter than the others, and those behind it are empty.
#pragma once
#include "algo/slots.cuh"
#include "reduce.cuh"

namespace fc {

class Shards {
 public:
  FC_DEVICE explicit Shards(const Params& p) : p_(p) {
    u32 full = 0;
    while (full < FC_N && full * p.stride + p.part <= p.nbytes) full++;
    full_ = full;
    rest_ = full < FC_N && full * p.stride < p.nbytes ? p.nbytes - full * p.stride : 0;
  }
  FC_DEVICE u64 bytes(u32 rank) const { return rank < full_ ? p_.part : rank == full_ ? rest_ : 0; }
  template <class Wire>
  FC_DEVICE u32 cells(u32 rank) const {
    return cells_of<Wire>(bytes(rank));
  }
  // The peers whose parts have a cell with that index.
  template <class Wire>
  FC_DEVICE u32 peers_with(u32 cell) const {
    const u32 shorter = cell < cells_of<Wire>(rest_) ? 1u << full_ : 0u;
    return ((1u << full_) - 1 | shorter) & all_peers(p_);
  }

  template <class Wire, class T>
  FC_DEVICE Payload load(u64 message, u32 rank, u32 cell) const {
    return load_payload<Wire, T>(p_, message + rank * p_.stride, bytes(rank), Wire::span(cell));
  }
  template <class Wire, class T>
  FC_DEVICE void store(u64 message, u32 rank, u32 cell, Payload v) const {
    store_payload<Wire, T>(p_, message + rank * p_.stride, bytes(rank), Wire::span(cell), v);
  }

 private:
  const Params& p_;
  u32 full_;
  u64 rest_;
};

// Pushes to each peer its part of my input.
template <class Wire, class T>
FC_DEVICE void scatter(const Params& p, const Shards& shards, const Slots<Wire, false>& slots, Tiles tiles) {
  for (; tiles.more(); tiles.next()) {
    for (u32 v = tiles.first_item(); v < tiles.items(); v += tiles.stride()) {
      const Item i = tiles.item(v);
      const u32 peer = slots.behind(i.behind);
      if (i.behind == 0 || i.cell >= tiles.end() || i.cell >= shards.cells<Wire>(peer)) continue;
      slots.push_to(peer, i.cell, shards.load<Wire, T>(p.in, peer, i.cell));
    }
    slots.publish(tiles.index(), shards.peers_with<Wire>(tiles.base()));
  }
}

// The sum of one cell of my part; false if the wait expired.
template <class Wire, class T>
FC_DEVICE bool reduce_own(const Params& p, const Shards& shards, const Slots<Wire, false>& slots, u32 cell,
                          Payload* sum) {
  const Payload own = shards.load<Wire, T>(p.in, p.rank, cell);
  Cell got[FC_N];
  if (!slots.take(cell, all_peers(p), got)) return false;
  *sum = reduce_in_rank_order<T, Wire::kWords>([&](u32 r) { return r == p.rank ? own : Wire::payload(got[r]); });
  return true;
}

}  // namespace fc
