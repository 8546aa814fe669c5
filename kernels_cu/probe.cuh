// One store of every rank into every slab, through the mapping that the protocols will use. The host looks whether all
// have arrived: peer access can be reported, mapped, and still drop writes (an IOMMU in between).
#pragma once
#include "primitives.cuh"

namespace fc {

// `in` is a nonce, `out` the bytes from the start of each slab to the probe's cells, one for each source rank.
FC_DEVICE void probe(const Params& p) {
  const u32 peer = threadIdx.x;
  if (blockIdx.x != 0 || peer >= FC_N) return;
  Cell* theirs = reinterpret_cast<Cell*>(p.slab[peer] + p.out) + p.rank;
  st_relaxed_sys(theirs, Cell{{p.rank, peer, u32(p.in), ~u32(p.in)}});
}

}  // namespace fc
