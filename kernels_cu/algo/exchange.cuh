// The exchange at the heart of every one-phase collective: push my payload to all peers' slots, then take theirs from
// mine, each cell as its own evidence says that it is there. No barrier among ranks, no order among arrivals.
#pragma once
#include "ablate/arrival.cuh"
#include "algo/slots.cuh"

namespace fc {

// One call of a one-phase collective, from the first read of the epoch to the last output.
//
// A Sink is what becomes of the n ranks' payloads: static void consume(p, span, own payload, peers' cells).
//
// Deadlock freedom: a block pushes all it owns before its first poll, and the grid is resident, so every cell that anyone
// waits for is pushed without waiting for anything.
template <class Wire, class T, class Sink>
FC_DEVICE void exchange(const Params& p) {
  const u32 cells = cells_of<Wire>(p.nbytes);
  Tiles tiles(cells, chunk_cells<Wire>(cells));
  const auto input = [&](u32 cell) { return ablate::input<Wire, T>(p, p.in, p.nbytes, Wire::span(cell)); };

  Slots<Wire, true> slots(p, p.region[0], 0);
  launch_wait();
  if constexpr (ablate::without(ablate::kEpoch)) return ablate::end();

  // My payload of the first cell stays in registers until it is reduced; for a message that the grid covers in one pass,
  // which is what the launch shape aims at, that is all of them. Its load is the first thing, so that it and the epoch's
  // are on their way together: the compiler waits for the epoch as soon as it was asked for.
  Payload own = {{0, 0, 0, 0}};
  if (tiles.more() && tiles.first() < tiles.end()) own = input(tiles.first());
  const Turn<Wire> turn(p);
  if (turn.poisoned()) return;
  slots.begin(turn);
  if constexpr (ablate::kRearmFirst) turn.template rearm<true>(p, p.region[0]);

  for (; tiles.more(); tiles.next()) {
    Payload v = own;
    if (!tiles.is_first(tiles.first()) && tiles.first() < tiles.end()) v = input(tiles.first());
    for (u32 c = tiles.first(); c < tiles.end();) {
      const u32 next = c + tiles.stride();
      Payload ahead = {{0, 0, 0, 0}};
      if (next < tiles.end()) ahead = input(next);  // on its way while this one is pushed
      slots.push(c, v);
      v = ahead;
      c = next;
    }
    slots.publish(tiles.index(), all_peers(p));
  }

  Ticket ticket;
  ticket.draw(p);
  turn.rearm(p, p.region[0]);
  scrub(p, turn.epoch(), [&](u64 at) { return receives<Wire>(p.region[0], at, cells, 0); });

  for (tiles.restart(); tiles.more(); tiles.next()) {
    if (!slots.await(tiles.index(), all_peers(p))) return;
    for (u32 c = tiles.first(); c < tiles.end(); c += tiles.stride()) {
      // In place this is still input: a cell's output is written by the thread that owns the cell, after this.
      if (!tiles.is_first(c) && !ablate::kOwnInMemory) own = input(c);
      if constexpr (ablate::kArrivalOrder) {
        if (!ablate::store_sum<Wire, T>(p, slots, c, own)) return;
        continue;
      }
      Cell got[FC_N];
      if (!slots.take(c, all_peers(p), got)) return;
      Sink::consume(p, Wire::span(c), own, got);
    }
  }
  if constexpr (ablate::kRearmLast) turn.template rearm<true>(p, p.region[0]);
  late_trigger();
  if (ticket.settle(p, turn.epoch())) turn.record(p, 1, cells);
}

}  // namespace fc
