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
// what one thread of a block reduced, another thread of the same block can send.
constexpr u64 kTileBytes = 1920;  // a multiple of 8, 12, 16 and 120
template <class Wire>
FC_DEVICE u64 tile_cells() {
  return kTileBytes / Wire::kGroupBytes * Wire::kGroupCells;
}

// Deadlock freedom: all pushes of the first phase come before the first poll. Those of the second phase wait for the first
// phase alone. What the third loop waits for is therefore sent by every rank without waiting for it.
//
// Slot reuse (I1) with empty parts: a rank whose part is empty waits for no one in the first phase. But some part is not
// empty; its owner waited for all ranks, and all other ranks wait for that owner.
//
// In place: a thread reads its cells of all parts before it stores any of them: in one tile they belong to one block, and
// the block's barrier in advance_epoch() lies between the reads of the first loop and the stores of the others. The own
// part is read by the thread that stores it.
template <class Wire1, class Wire2, class T>
FC_DEVICE void two_shot(const Params& p) {
  constexpr bool kOneWire = is_same<Wire1, Wire2>::value;
  constexpr bool kSameSpans = Wire1::kGroupBytes == Wire2::kGroupBytes && Wire1::kGroupCells == Wire2::kGroupCells;
  static_assert(kSameSpans || (!Wire1::kChunked && !Wire2::kChunked), "a chunk is the tile of one encoding");
  Turn<Wire1> turn1;
  Turn<Wire2> turn2;
  if (!turn1.begin(p)) return;
  if (kOneWire) {
    turn2.same_as(turn1);
  } else {
    turn2.begin(p);
  }
  const Shards shards(p);
  const Slots<Wire1> slots1(p, p.region[0], 0, turn1);
  const Slots<Wire2> slots2(p, p.region[1], 1, turn2);
  const u64 cells1 = cells_of<Wire1>(p.part), cells2 = cells_of<Wire2>(p.part), own_cells = shards.cells<Wire1>(p.rank);
  const Tiles tiles1(cells1, kSameSpans ? chunk_cells<Wire1>(cells1) : tile_cells<Wire1>());
  const Tiles tiles2(cells2, kSameSpans ? chunk_cells<Wire2>(cells2) : tile_cells<Wire2>());

  scatter<Wire1, T>(p, shards, slots1, tiles1);

  if (advance_epoch(p, turn1.epoch())) {
    turn1.record(p, own_cells, kOneWire ? cells2 : 0);
    if (!kOneWire) turn2.record(p, 0, cells2);
  }
  turn1.rearm(p, p.region[0]);
  if (!kOneWire) turn2.rearm(p, p.region[1]);
  scrub(p, turn1.epoch(), [&](u64 at) {
    return receives<Wire1>(p.region[0], at, own_cells, 0) || receives<Wire2>(p.region[1], at, 0, cells2);
  });

  // My part: take, add, keep, send on.
  for (Tiles t = tiles1; t.more() && t.base() < own_cells; t.next()) {
    if (!slots1.await(t.index(), all_peers(p))) return;
    bool complete = true;
    for (u64 c = t.first(); complete && c < t.end() && c < own_cells; c += t.stride()) {
      Payload sum;
      complete = reduce_own<Wire1, T>(p, shards, slots1, c, &sum);
      if (!complete) break;
      shards.store<Wire1, T>(p.out, p.rank, c, sum);
      if (kSameSpans) slots2.push(c, sum);
    }
    if (!kSameSpans) {
      block_barrier();  // the tile's sums are in the output, for all threads of the block
      if (ld_relaxed_gpu(&control(p)->poison) != 0) return;
      Tiles u = tiles2;
      u.go_to(t.index());
      for (u64 c = u.first(); c < u.end() && c < shards.cells<Wire2>(p.rank); c += u.stride()) {
        slots2.push(c, shards.load<Wire2, T>(p.out, p.rank, c));
      }
    }
    if (!complete) return;
    slots2.publish(t.index(), all_peers(p));
  }

  // The others' parts, already added.
  for (Tiles t = tiles2; t.more(); t.next()) {
    if (!slots2.await(t.index(), shards.peers_with<Wire2>(t.base()))) return;
    for (u64 c = t.first(); c < t.end(); c += t.stride()) {
      const u32 peers = shards.peers_with<Wire2>(c);
      Cell got[FC_N];
      if (!slots2.take(c, peers, got)) return;
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (peers >> r & 1u) shards.store<Wire2, T>(p.out, r, c, Wire2::payload(got[r]));
      }
    }
  }
}

}  // namespace fc
