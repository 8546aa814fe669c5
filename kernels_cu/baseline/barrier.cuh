// Baseline: barrier one-shot all-reduce, the design of vLLM's custom all-reduce. Each rank copies its input to a staging
// buffer in its slab, the ranks meet at a barrier of flags, each reads all staging buffers over the link and adds them in
// rank order, and they meet again, so that no one overwrites a buffer that a peer still reads.
//
// Work is split into chunks by message size alone, so that ranks with different grids still meet. A block handles its
// chunks in increasing order, one after the other: the smallest chunk that is not done anywhere has all its blocks
// running, so someone always makes progress.
#pragma once
#include "reduce.cuh"
#include "wait.cuh"

namespace fc {
namespace barrier {

constexpr u32 kChunks = 36;          // as many as vLLM starts blocks
constexpr u64 kPartCells = 512;      // cells in a row that belong to one chunk: 512 threads' worth
constexpr u64 kFlagsPerSource = 64;  // flag words of one source: the arrival flags, then the departure flags from 64

FC_DEVICE u64 cells(u64 nbytes) { return (nbytes + 15) / 16; }
FC_DEVICE u32 chunks(u64 nbytes) {
  const u64 parts = (cells(nbytes) + kPartCells - 1) / kPartCells;
  return parts < kChunks ? u32(parts) : kChunks;
}
FC_DEVICE Span span(u64 cell) { return Span{cell * 16, 16}; }

// region[0] is the staging buffer, region[1] the flags: [copy][arrive or depart][source][chunk] words of 4 bytes.
FC_DEVICE u32* flag(const Params& p, u32 owner, u32 depart, u32 source, u32 chunk, u32 e) {
  const Region& g = p.region[1];
  return reinterpret_cast<u32*>(p.slab[owner] + g.offset + (e & 1u) * g.copy_stride + source * g.slot_stride +
                                depart * g.half_stride) +
         chunk;
}
FC_DEVICE Cell* staging(const Params& p, u32 owner, u64 cell) {
  return reinterpret_cast<Cell*>(p.slab[owner] + p.region[0].offset + cell * 16);
}

// All ranks' blocks of this chunk meet. Thread r of the block speaks with rank r. With `publish`, what the block stored
// before is visible to whoever leaves: the block barrier puts the block's stores before thread r's release, and a peer's
// acquire, followed by its block barrier, puts its loads after it.
FC_DEVICE bool meet(const Params& p, u32 chunk, u32 depart, u32 e, bool publish) {
  block_barrier();
  const u32 r = threadIdx.x;
  if (r < FC_N && r != p.rank) {
    u32* theirs = flag(p, r, depart, p.rank, chunk, e);
    if (publish) {
      st_release_sys(theirs, e);
    } else {
      st_relaxed_sys(theirs, e);
    }
    await_flag(p, flag(p, p.rank, depart, r, chunk, e), e, r, chunk);
  }
  block_barrier();
  return ld_relaxed_gpu(&control(p)->poison) == 0;
}

}  // namespace barrier

template <class T>
FC_DEVICE void barrier_one_shot(const Params& p) {
  const EpochWords now = ld_epoch(control(p));
  if (now.poison != 0) return;
  const u32 e = now.epoch;
  advance_epoch(p, e);
  const u64 cells = barrier::cells(p.nbytes);
  const u32 chunks = barrier::chunks(p.nbytes);
  scrub(p, e, [&](u64 at) {
    const Region& g = p.region[1];
    return at >= g.offset && at < g.offset + FC_N * g.slot_stride && (at - g.offset) % g.half_stride < chunks * 4;
  });
  const u64 step = chunks * barrier::kPartCells;
  for (u32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const u64 first = chunk * barrier::kPartCells;
    for (u64 part = first; part < cells; part += step) {
      for (u64 c = part + threadIdx.x; c < part + barrier::kPartCells && c < cells; c += blockDim.x) {
        const Payload v = load_payload<4, T::kElement>(p.in, p.nbytes, barrier::span(c));
        st_relaxed_sys(barrier::staging(p, p.rank, c), Cell{{v.w[0], v.w[1], v.w[2], v.w[3]}});
      }
    }
    if (!barrier::meet(p, chunk, 0, e, true)) return;
    for (u64 part = first; part < cells; part += step) {
      for (u64 c = part + threadIdx.x; c < part + barrier::kPartCells && c < cells; c += blockDim.x) {
        Cell got[FC_N];
#pragma unroll
        for (u32 r = 0; r < FC_N; r++) got[r] = ld_relaxed_sys(barrier::staging(p, r, c));
        const Payload sum = reduce_in_rank_order<T, 4>(
            [&](u32 r) { return Payload{{got[r].w[0], got[r].w[1], got[r].w[2], got[r].w[3]}}; });
        store_payload<4, T::kElement>(p.out, p.nbytes, barrier::span(c), sum);
      }
    }
    // Departure: relaxed is enough, since nothing is handed over; that my loads are done before it is the block barrier's.
    if (!barrier::meet(p, chunk, 1, e, false)) return;
  }
}

}  // namespace fc
