// Reduce-scatter: rank r gets the sum of all ranks' r-th parts. One hop, (n - 1)/n S on the wire.
#pragma once
#include "reduce.cuh"
#include "algo/shards.cuh"

namespace fc {

// Deadlock freedom and slot reuse are those of exchange(): all pushes come before the first poll, and the parts have one
// length, so every rank waits for every other one (I1).
template <class Wire, class T>
FC_DEVICE void reduce_scatter(const Params& p) {
  Turn<Wire> turn;
  if (!turn.begin(p)) return;
  const Shards shards(p);
  const Slots<Wire> slots(p, p.region[0], 0, turn);
  const u64 cells = cells_of<Wire>(p.part);
  Tiles tiles(cells, chunk_cells<Wire>(cells));
  scatter<Wire, T>(p, shards, slots, tiles);

  if (advance_epoch(p, turn.epoch())) turn.record(p, cells, 0);
  turn.rearm(p, p.region[0]);
  scrub(p, turn.epoch(), [&](u64 at) { return receives<Wire>(p.region[0], at, cells, 0); });

  for (; tiles.more(); tiles.next()) {
    if (!slots.await(tiles.index(), all_peers(p))) return;
    for (u64 c = tiles.first(); c < tiles.end(); c += tiles.stride()) {
      Payload sum;
      if (!reduce_own<Wire, T>(p, shards, slots, c, &sum)) return;
      store_payload<Wire::kWords, T::kElement>(p.out, p.part, Wire::span(c), sum);
    }
  }
}

}  // namespace fc
