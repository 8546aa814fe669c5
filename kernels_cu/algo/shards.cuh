// A message in n parts, one for each rank: rank r's begins at r * stride and has the length that is left, at most `part`.
// Up to one of them is shorter than the others, and those behind it are empty.
#pragma once
#include "ablate/arrival.cuh"
#include "algo/slots.cuh"
#include "reduce.cuh"

namespace fc {

class Shards {
 public:
  FC_DEVICE explicit Shards(const Params& p) : p_(p) {
    u32 full = 0;
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) full += r * p.stride + p.part <= p.nbytes ? 1 : 0;  // no branch: all at once
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
    return ablate::input<Wire, T>(p_, message + rank * p_.stride, bytes(rank), Wire::span(cell));
  }
  template <class Wire, class T>
  FC_DEVICE void store(u64 message, u32 rank, u32 cell, Payload v) const {
    ablate::output<Wire, T>(p_, message + rank * p_.stride, bytes(rank), Wire::span(cell), v);
  }

 private:
  const Params& p_;
  u32 full_;
  u64 rest_;
};

// Some of a thread's cells of the peers' parts in a tile: all of them are asked for before one is waited for. Which they are
// is worked out once for all that is done with them, since a small message takes as long as the instructions for it.
template <class Wire, u32 kCells>
class Batch {
 public:
  FC_DEVICE Batch(const Params& p, const Shards& shards, const Tiles& tile, u32 from)
      : p_(p), shards_(shards), tile_(tile), at_(from) {
    locate();
  }
  FC_DEVICE bool more() const { return at_ < tile_.items(); }
  FC_DEVICE void next() {
    at_ += kCells * tile_.stride();
    locate();
  }

  // Calls f(k, peer, cell) for the k-th cell of these, where there is one.
  template <class F>
  FC_DEVICE void each(const F& f) const {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      const u32 behind = which_[k] >> kCellBits;
      if (behind != 0) {
        f(k, p_.rank + behind < FC_N ? p_.rank + behind : p_.rank + behind - FC_N, which_[k] & kCellMask);
      }
    }
  }
  template <class T>
  FC_DEVICE void load(u64 message, Payload* v) const {
    each([&](u32 k, u32 peer, u32 cell) { v[k] = shards_.load<Wire, T>(message, peer, cell); });
  }

 private:
  static constexpr u32 kCellBits = 28, kCellMask = (1u << kCellBits) - 1;  // slots are smaller than 4 GiB
  static_assert(FC_N <= 16, "the rank has the four bits that are left");

  FC_DEVICE void locate() {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) which_[k] = 0;
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      const u32 v = at_ + k * tile_.stride();
      if (v >= tile_.items()) break;
      const Item i = tile_.item(v);
      const u32 peer = p_.rank + i.behind < FC_N ? p_.rank + i.behind : p_.rank + i.behind - FC_N;
      if (i.cell < tile_.end() && i.cell < shards_.cells<Wire>(peer)) which_[k] = i.behind << kCellBits | i.cell;
    }
#pragma unroll
    for (u32 k = 0; k < kCells; k++) which_[k] = pinned(which_[k]);
  }

  const Params& p_;
  const Shards& shards_;
  const Tiles& tile_;
  u32 at_, which_[kCells];
};

constexpr u32 kBatch = 4;

// Pushes to each peer its part of my input. `first` is the thread's first cell, which was loaded to `v` while the epoch was
// on its way; small messages have no more.
template <class Wire, class T>
FC_DEVICE void scatter(const Params& p, const Shards& shards, const Slots<Wire, false>& slots, const Tiles& tiles,
                       const Batch<Wire, 1>& first, Payload v) {
  first.each([&](u32, u32 peer, u32 cell) { slots.push_to(peer, cell, v); });
  u32 done = tiles.stride();
  for (Tiles tile = tiles; tile.more(); tile.next()) {
    for (Batch<Wire, kBatch> batch(p, shards, tile, tile.first_item() + done); batch.more(); batch.next()) {
      Payload more[kBatch];
      batch.template load<T>(p.in, more);
      batch.each([&](u32 k, u32 peer, u32 cell) { slots.push_to(peer, cell, more[k]); });
    }
    done = 0;
    slots.publish(tile.index(), shards.peers_with<Wire>(tile.base()));
  }
}

// The sum of one cell of my part; false if the wait expired.
template <class Wire, class T>
FC_DEVICE bool reduce_own(const Params& p, const Shards& shards, const Slots<Wire, false>& slots, u32 cell,
                          Payload* sum) {
  const Payload own = shards.load<Wire, T>(p.in, p.rank, cell);
  if constexpr (ablate::kArrivalOrder) return ablate::Arrival::take_sum<Wire, T>(slots, cell, own, sum);
  Cell got[FC_N];
  if (!slots.take(cell, all_peers(p), got)) return false;
  if constexpr (ablate::without(ablate::kReduce)) return ablate::take_own<Wire>(p, own, got, sum);
  *sum = reduce_in_rank_order<T, Wire::kWords>([&](u32 r) { return r == p.rank ? own : Wire::payload(got[r]); });
  return true;
}

}  // namespace fc
