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
  FC_DEVICE bool some_empty() const { return full_ + (rest_ != 0) < FC_N; }
  template <class Wire>
  FC_DEVICE u32 cells(u32 rank) const {
    return rank < full_ ? cells_of<Wire>(p_.part) : rank == full_ ? cells_of<Wire>(rest_) : 0;
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

// A thread's cells of the peers' parts in a tile, a few at a time: all of those are asked for before one is waited for.
template <class Wire>
class Batch {
 public:
  static constexpr u32 kCells = 4;

  FC_DEVICE Batch(const Params& p, const Shards& shards, const Tiles& tile)
      : p_(p), shards_(shards), tile_(tile), at_(tile.first_item()) {}
  FC_DEVICE bool more() const { return at_ < tile_.items(); }
  FC_DEVICE void next() { at_ += kCells * tile_.stride(); }

  // Calls f(k, peer, cell) for the k-th cell of these, where there is one.
  template <class F>
  FC_DEVICE void each(const F& f) const {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      const u32 v = at_ + k * tile_.stride();
      if (v >= tile_.items()) break;  // of a small message a thread has one cell: nothing is worked out for the others
      const Item i = tile_.item(v);
      const u32 peer = p_.rank + i.behind < FC_N ? p_.rank + i.behind : p_.rank + i.behind - FC_N;
      if (i.cell < tile_.end() && i.cell < shards_.cells<Wire>(peer)) f(k, peer, i.cell);
    }
  }
  template <class T>
  FC_DEVICE void load(u64 message, Payload* v) const {
    each([&](u32 k, u32 peer, u32 cell) { v[k] = shards_.load<Wire, T>(message, peer, cell); });
  }

 private:
  const Params& p_;
  const Shards& shards_;
  const Tiles& tile_;
  u32 at_;
};

// Pushes to each peer its part of my input. The first batch of the first tile was loaded before.
template <class Wire, class T>
FC_DEVICE void scatter(const Params& p, const Shards& shards, const Slots<Wire, false>& slots, Tiles tiles, Payload* v) {
  for (bool loaded = true; tiles.more(); tiles.next(), loaded = false) {
    for (Batch<Wire> batch(p, shards, tiles); batch.more(); batch.next()) {
      if (!loaded) batch.template load<T>(p.in, v);
      loaded = false;
      batch.each([&](u32 k, u32 peer, u32 cell) { slots.push_to(peer, cell, v[k]); });
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
