// One-shot all-reduce whose blocks hold whole rows of a matrix, for an epilogue that needs a row at a time. The cells, and
// where they lie in the slots, are those of one_shot; only which block has them differs: row r is tile r, and each thread of its
// block keeps the sums of its cells in registers until the epilogue has seen all of the row.
#pragma once
#include "algo/slots.cuh"
#include "epilogue/values.cuh"

namespace fc {

// Deadlock freedom, in place, slot reuse: as in exchange(). A row's residual and the like are read, and its results written, by
// the thread that has the cell, after the row's own cells were taken.
//
// No thread returns alone: the others would wait for it in the row's sum. A thread whose wait has expired, or that finds the
// poison of another one, says so in the block's vote.
template <class Wire, class T, class E, u32 kCells>
FC_DEVICE void one_shot_rows(const Params& p) {
  static_assert(!Wire::kChunked && Wire::kGroupCells == 1 && 16 % Wire::kGroupBytes == 0,
                "a cell is a leaf of the row's tree, and so is a pair of them");
  const u64 row_bytes = u64(p.epilogue.columns) * T::kElement;
  const u32 cells = cells_of<Wire>(p.nbytes);
  Tiles rows(cells, cells_of<Wire>(row_bytes));
  const auto input = [&](u32 cell) { return load_payload<Wire, T>(p, p.in, p.nbytes, Wire::span(cell)); };

  Slots<Wire, true> slots(p, p.region[0], 0);
  launch_wait();
  Payload own = {{0, 0, 0, 0}};
  if (rows.more() && rows.first() < rows.end()) own = input(rows.first());
  const Turn<Wire> turn(p);
  const bool well = !turn.poisoned();
  slots.begin(turn);

  for (; well && rows.more(); rows.next()) {
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      const u32 c = rows.first() + k * blockDim.x;
      if (c < rows.end()) slots.push(c, rows.is_first(c) ? own : input(c));
    }
  }

  Ticket ticket;
  ticket.draw(p);
  turn.rearm(p, p.region[0]);
  scrub(p, turn.epoch(), [&](u64 at) { return receives<Wire>(p.region[0], at, cells, 0); });

  u32 turn_of_sum = 0;
  for (rows.restart(); rows.more(); rows.next()) {
    const Span first{threadIdx.x * u64(Wire::kGroupBytes), Wire::kGroupBytes};
    Values<Wire, T, E, kCells> row(p, rows.index() * row_bytes, row_bytes, first, blockDim.x * Wire::kGroupBytes,
                                   turn_of_sum);
    if (well) row.prefetch_reads();
    bool complete = well;
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      const u32 c = rows.first() + k * blockDim.x;
      if (!complete || c >= rows.end()) continue;
      if (!rows.is_first(c)) own = input(c);
      Cell got[FC_N];
      complete = slots.take(c, all_peers(p), got);
      if (!complete) continue;
      row.set(k,
              reduce_in_rank_order<T, Wire::kWords>([&](u32 r) { return r == p.rank ? own : Wire::payload(got[r]); }));
    }
    if (complete) row.prefetch_row_vectors();
    if (!block_all(p, complete)) return;
    E::apply(row);
    row.store_to(p.out);
  }
  late_trigger();
  if (ticket.settle(p, turn.epoch())) turn.record(p, 1, cells);
}

}  // namespace fc
