// flag: payload as it is, and one epoch word for a whole chunk of it. Here evidence and payload are apart, so they have to
// be ordered: the block's payload stores, its barrier, then a release of the flag; at the receiver an acquire of the flag,
// the block's barrier, then the payload loads. PTX's causality order carries the release over the barrier to the stores of
// all threads of the block, and the acquire to all their loads.
//
// Which cells a chunk has depends on the message size alone, never on the grid: sender and receiver may have other ones.
#pragma once
#include "wire/base.cuh"

namespace fc {
namespace wire {

struct Flag : EpochPerCell, WholeCells {
  static constexpr u32 kGroupBytes = 16;
  static constexpr bool kChunked = true;
  static constexpr u32 kMaxChunks = 64;
  static constexpr u32 kMinChunkCells = 64;
  static constexpr u32 kHeaderBytes = kMaxChunks * 4;  // the flag words, in front of a slot's payload

  static FC_DEVICE u32 chunk_cells(u32 cells) {
    const u32 even = ((cells + kMaxChunks - 1) / kMaxChunks + 31) / 32 * 32;
    return even < kMinChunkCells ? kMinChunkCells : even;
  }
  static FC_DEVICE bool writes(u64 inside, u32 cells) {
    const u32 size = chunk_cells(cells);
    return inside < kHeaderBytes ? inside / 4 < (cells + size - 1) / size : inside < kHeaderBytes + cells * 16ull;
  }

  static FC_DEVICE Span span(u32 cell) { return Span{cell * 16ull, 16}; }
  static FC_DEVICE void put(Cell* slot, Payload v, u32) {
    st_relaxed_sys(slot, Cell{{v.w[0], v.w[1], v.w[2], v.w[3]}});
  }
  static FC_DEVICE bool ready(Cell, u32) { return true; }  // by the chunk's flag, see Slots::await
};

}  // namespace wire
}  // namespace fc
