// Two-shot all-reduce: a reduce-scatter, then an all-gather of the sums, both pushed and both self-synchronizing, in one
// kernel. Two hops, 2 (n - 1)/n S on the wire. The sums are added by the same code in the same order as in one-shot, and
// the owner writes to its own output what it sends, so the bits are one-shot's.
//
// The first phase uses the first half of each slot, the second phase the second half, so that within one call no word is
// written twice; with two encodings, each phase has the region of its own.
#pragma once
#include "reduce.cuh"
#include "algo/shards.cuh"

namespace fc {

// Cells of a tile, where the phases' encodings carry other numbers of bytes: a tile is the bytes that both divide, so that
// what one thread of a block reduced, another thread of the same block can send. 15 bytes a thread: a block of k x 32 threads
// has k x 480 bytes, which 8, 12, 16 and 120 divide. How the bytes are tiled is no matter between ranks.
template <class Wire>
FC_DEVICE u32 tile_cells() {
  return blockDim.x * 15 / Wire::kGroupBytes * Wire::kGroupCells;
}

// Deadlock freedom: all pushes of the first phase come before the first poll. Those of the second phase wait for the first
// phase alone. What the third loop waits for is therefore sent by every rank without waiting for it.
//
// Slot reuse (I1) with empty parts: a rank whose part is empty waits for no one in the first phase. But some part is not
// empty; its owner waited for all ranks, and all other ranks wait for that owner. What a rank set back or scrubbed is then
// known to a peer with an empty part by way of the owner alone, which has taken the one's cells and sends to the other: the
// owner's relaxed accesses carry that on only if a fence lies between them.
//
// In place: a cell of a peer's part is read, to be pushed, by the thread that later stores its sum, or with tiles by a
// thread of the same block, and the block's barrier in Ticket::draw() lies between. A cell of my own part is read by the
// thread that stores its sum.
template <class Wire1, class Wire2, class T>
FC_DEVICE void two_shot(const Params& p) {
  constexpr bool kOneWire = is_same<Wire1, Wire2>::value;
  constexpr bool kSameSpans = Wire1::kGroupBytes == Wire2::kGroupBytes && Wire1::kGroupCells == Wire2::kGroupCells;
  static_assert(kSameSpans || (!Wire1::kChunked && !Wire2::kChunked), "a chunk is the tile of one encoding");
  const Shards shards(p);
  Slots<Wire1, false> slots1(p, p.region[0], 0);
  const u32 cells1 = cells_of<Wire1>(p.part), cells2 = cells_of<Wire2>(p.part), own_cells = shards.cells<Wire1>(p.rank);
  const Tiles tiles1(cells1, kSameSpans ? chunk_cells<Wire1>(cells1) : tile_cells<Wire1>());
  const Tiles tiles2(cells2, kSameSpans ? chunk_cells<Wire2>(cells2) : tile_cells<Wire2>());
  const Piece first = piece<Wire1>(p, shards, tiles1, tiles1.first_item());
  launch_wait();
  if constexpr (ablate::without(ablate::kEpoch)) return ablate::end();
  Payload v = {{0, 0, 0, 0}};
  // Before the epoch: the compiler waits for that as soon as it was asked for.
  if (first.there) v = shards.load<Wire1, T>(p.in, first.peer, first.cell);
  const Turns<Wire1, Wire2> turns(p);
  if (turns.first().poisoned()) return;
  slots1.begin(turns.first());
  if constexpr (ablate::kRearmFirst) ablate::rearm<kOneWire>(p, turns);

  scatter<Wire1, T>(p, shards, slots1, tiles1, first, v);

  Ticket ticket;
  ticket.draw(p);
  turns.first().rearm(p, p.region[0]);
  if (!kOneWire) turns.second().rearm(p, p.region[1]);
  scrub(p, turns.first().epoch(), [&](u64 at) {
    return receives<Wire1>(p.region[0], at, own_cells, 0) || receives<Wire2>(p.region[1], at, 0, cells2);
  });

  Slots<Wire2, false> slots2(p, p.region[1], 1);  // here and not above: there its registers would be in the way
  slots2.begin(turns.second());

  // My part: take, add, keep, send on.
  for (Tiles t = tiles1; t.more() && t.base() < own_cells; t.next()) {
    if (!slots1.await(t.index(), all_peers(p))) return;
    bool complete = true;
    for (u32 c = t.first_own<Wire1>(); c < t.end() && c < own_cells; c += t.stride()) {
      Payload sum;
      complete = reduce_own<Wire1, T>(p, shards, slots1, c, &sum);
      if (!complete) break;
      shards.store<Wire1, T>(p.out, p.rank, c, sum);
      if (shards.some_empty()) fence_sys();
      if (kSameSpans) slots2.push(c, sum);
    }
    if (!kSameSpans) {
      block_barrier();  // the tile's sums are in the output, for all threads of the block
      if (shards.some_empty()) fence_sys();
      if (ld_relaxed_gpu(&control(p)->poison) != 0) return;
      Tiles u = tiles2;
      u.go_to(t.index());
      for (u32 c = u.first(); c < u.end() && c < shards.cells<Wire2>(p.rank); c += u.stride()) {
        slots2.push(c, shards.load<Wire2, T>(p.out, p.rank, c));
      }
    }
    if (!complete) return;
    slots2.publish(t.index(), all_peers(p));
  }

  // The others' parts, already added.
  for (Tiles t = tiles2; t.more(); t.next()) {
    if (!slots2.await(t.index(), shards.peers_with<Wire2>(t.base()))) return;
#pragma unroll 1
    for (u32 at = t.first_item(); at < t.items(); at += t.stride()) {
      const Piece theirs = piece<Wire2>(p, shards, t, at);
      if (!theirs.there) continue;
      Cell got;
      if (!slots2.take_from(theirs.peer, theirs.cell, &got)) return;
      shards.store<Wire2, T>(p.out, theirs.peer, theirs.cell, Wire2::payload(got));
    }
  }
  if constexpr (ablate::kRearmLast) ablate::rearm<kOneWire>(p, turns);
  late_trigger();
  if (ticket.settle(p, turns.first().epoch())) {
    turns.first().record(p, kOneWire ? 3 : 1, cells1);
    if (!kOneWire) turns.second().record(p, 2, cells2);
  }
}

}  // namespace fc
