// Reduce-scatter: rank r gets the sum of all ranks' r-th parts. One hop, (n - 1)/n S on the wire.
#pragma once
#include "reduce.cuh"
#include "algo/shards.cuh"

namespace fc {

// Deadlock freedom and slot reuse are those of exchange(): all pushes come before the first poll, and the parts have one
// length, so every rank waits for every other one (I1).
template <class Wire, class T>
FC_DEVICE void reduce_scatter(const Params& p) {
  const Shards shards(p);
  Slots<Wire, false> slots(p, p.region[0], 0);
  launch_wait();
  const Turn<Wire> turn(p);
  if (turn.poisoned()) return;
  slots.begin(turn);
  const u32 cells = cells_of<Wire>(p.part);
  Tiles tiles(cells, chunk_cells<Wire>(cells));
  scatter<Wire, T>(p, shards, slots, tiles);

  Ticket ticket;
  ticket.draw(p);
  turn.rearm(p, p.region[0]);
  scrub(p, turn.epoch(), [&](u64 at) { return receives<Wire>(p.region[0], at, cells, 0); });

  for (; tiles.more(); tiles.next()) {
    if (!slots.await(tiles.index(), all_peers(p))) return;
    for (u32 v = tiles.first_item(); v < tiles.items(); v += tiles.stride()) {
      const Item i = tiles.item(v);
      if (i.behind != 0 || i.cell >= tiles.end()) continue;
      Payload sum;
      if (!reduce_own<Wire, T>(p, shards, slots, i.cell, &sum)) return;
      store_payload<Wire, T>(p, p.out, p.part, Wire::span(i.cell), sum);
    }
  }
  block_trigger();
  if (ticket.settle(p, turn.epoch())) turn.record(p, 1, cells);
}

}  // namespace fc
