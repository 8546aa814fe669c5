// Zero as the word for "not arrived", element by element: memory of zeros holds +0.0 in every element, whatever its type,
// and a sender sends -0.0 in the place of every +0.0. Elements are compared as bits: no subnormal looks like zero.
#pragma once
#include "reduce.cuh"
#include "wait.cuh"

namespace fc {
namespace zeros {

// Sign bits of the elements that are +0.0. For two 16-bit elements in a word: adding 0x7fff to the low 15 bits of each
// carries into its sign exactly if they are not all zero, and never beyond.
template <class T>
FC_DEVICE u32 signs_of_zeros(u32 word) {
  if (T::kElement == 4) return word == 0 ? 0x80000000u : 0u;
  return ~(((word & 0x7fff7fffu) + 0x7fff7fffu) | word) & 0x80008000u;
}

// The cell with -0.0 for every +0.0.
template <class T>
FC_DEVICE Cell without_zeros(Cell c) {
#pragma unroll
  for (int i = 0; i < 4; i++) c.w[i] |= signs_of_zeros<T>(c.w[i]);
  return c;
}

// Whether every element of the cell has arrived.
template <class T>
FC_DEVICE bool complete(Cell c) {
  return (signs_of_zeros<T>(c.w[0]) | signs_of_zeros<T>(c.w[1]) | signs_of_zeros<T>(c.w[2]) |
          signs_of_zeros<T>(c.w[3])) == 0;
}

// Where a call's cells lie: [copy][source][cell] of region[0]. Here: rank 0's of my own slots.
FC_DEVICE u64 from_first(const Params& p, u32 copy, u64 cell) {
  const Region& g = p.region[0];
  return pinned(p.slab[p.rank] + g.offset + copy * g.copy_stride + cell * 16);
}

// Writes a cell to every rank's slot, my own included; beginning with that, so that the ranks do not all push to the same
// peer first.
template <class T>
FC_DEVICE void push(const Params& p, u32 copy, u64 cell, Cell v) {
  v = without_zeros<T>(v);
  const Region& g = p.region[0];
  const u64 at = pinned(g.offset + copy * g.copy_stride + p.rank * g.slot_stride + cell * 16);
#pragma unroll
  for (u32 j = 0; j < FC_N; j++) {
    const u32 r = p.rank + j < FC_N ? p.rank + j : p.rank + j - FC_N;
    st_relaxed_sys(reinterpret_cast<Cell*>(p.slab[r] + at), v);
  }
}

// Takes all ranks' cells. All are looked at together, then only those that were not there. False if the wait expired.
template <class T>
FC_DEVICE bool take(const Params& p, u32 e, u32 copy, u64 cell, Cell* got) {
  const u64 at = from_first(p, copy, cell);
  const u32 between = pinned(u32(p.region[0].slot_stride));
  u32 missing = (1u << FC_N) - 1;
  Wait wait;
  while (true) {
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      if (missing >> r & 1u) got[r] = ld_relaxed_sys(reinterpret_cast<Cell*>(at + u64(r) * between));
    }
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      if (complete<T>(got[r])) missing &= ~(1u << r);
    }
    if (missing == 0) return true;
    if (!wait.again(p)) break;
  }
  report_missing(p, e, missing, cell, got);
  return false;
}

FC_DEVICE void clear(const Params& p, u32 copy, u64 cell) {
  const u64 at = from_first(p, copy, cell);
  const u32 between = pinned(u32(p.region[0].slot_stride));
#pragma unroll
  for (u32 r = 0; r < FC_N; r++) {
    st_relaxed_sys(reinterpret_cast<Cell*>(at + u64(r) * between), Cell{{0, 0, 0, 0}});
  }
}

}  // namespace zeros
}  // namespace fc
