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
  const u32 cells = cells_of<Wire>(p.part);
  Tiles tiles(cells, chunk_cells<Wire>(cells));
  const Piece first = piece<Wire>(p, shards, tiles, tiles.first_item());
  launch_wait();
  Payload v = {{0, 0, 0, 0}};
  // Before the epoch: the compiler waits for that as soon as it was asked for.
  if (first.there) v = shards.load<Wire, T>(p.in, first.peer, first.cell);
  const Turn<Wire> turn(p);
  if (turn.poisoned()) return;
  slots.begin(turn);
  scatter<Wire, T>(p, shards, slots, tiles, first, v);

  Ticket ticket;
  ticket.draw(p);
  turn.rearm(p, p.region[0]);
  scrub(p, turn.epoch(), [&](u64 at) { return receives<Wire>(p.region[0], at, cells, 0); });

  for (; tiles.more(); tiles.next()) {
    if (!slots.await(tiles.index(), all_peers(p))) return;
    for (u32 c = tiles.first_own<Wire>(); c < tiles.end(); c += tiles.stride()) {
      Payload sum;
      if (!reduce_own<Wire, T>(p, shards, slots, c, &sum)) return;
      store_payload<Wire, T>(p, p.out, p.part, Wire::span(c), sum);
    }
  }
  late_trigger();
  if (ticket.settle(p, turn.epoch())) turn.record(p, 1, cells);
}

}  // namespace fc
