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

// One of a thread's cells of the peers' parts, if it is there.
struct Piece {
  u32 peer, cell;
  bool there;
};

template <class Wire>
FC_DEVICE Piece piece(const Params& p, const Shards& shards, const Tiles& tile, u32 v) {
  const Item i = tile.item(v);
  const u32 peer = p.rank + i.behind < FC_N ? p.rank + i.behind : p.rank + i.behind - FC_N;
  return Piece{peer, i.cell, v < tile.items() && i.cell < tile.end() && i.cell < shards.cells<Wire>(peer)};
}

// Pushes to each peer its part of my input. `first` is the thread's first piece, which was loaded to `v` while the epoch was
// on its way; small messages have no more.
template <class Wire, class T>
FC_DEVICE void scatter(const Params& p, const Shards& shards, const Slots<Wire, false>& slots, const Tiles& tiles,
                       Piece first, Payload v) {
  Piece now = first;
  for (Tiles tile = tiles; tile.more(); tile.next()) {
    u32 at = tile.first_item();
    if (tile.index() != tiles.index()) {
      now = piece<Wire>(p, shards, tile, at);
      if (now.there) v = shards.load<Wire, T>(p.in, now.peer, now.cell);
    }
#pragma unroll 1
    while (at < tile.items()) {
      at += tile.stride();
      const Piece next = piece<Wire>(p, shards, tile, at);
      Payload ahead = {{0, 0, 0, 0}};
      if (next.there) ahead = shards.load<Wire, T>(p.in, next.peer, next.cell);  // on its way while this one is pushed
      if (now.there) slots.push_to(now.peer, now.cell, v);
      now = next;
      v = ahead;
    }
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
