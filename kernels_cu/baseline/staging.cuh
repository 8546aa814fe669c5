// The staging buffer: a message of this rank at an address that all ranks know, for protocols whose peers read it.
#pragma once
#include "payload.cuh"

namespace fc {
namespace staging {

FC_DEVICE u64 cells(u64 nbytes) { return (nbytes + 15) / 16; }
FC_DEVICE Span span(u64 cell) { return Span{cell * 16, 16}; }
FC_DEVICE Payload payload(Cell c) { return Payload{{c.w[0], c.w[1], c.w[2], c.w[3]}}; }
FC_DEVICE Cell cell(Payload v) { return Cell{{v.w[0], v.w[1], v.w[2], v.w[3]}}; }

// region[0] is the buffer; from half_stride on it has room for one shard of sums.
FC_DEVICE u64 base(const Params& p, u32 owner) { return p.slab[owner] + p.region[0].offset; }
FC_DEVICE Cell* at(const Params& p, u32 owner, u64 cell) { return reinterpret_cast<Cell*>(base(p, owner)) + cell; }
FC_DEVICE Cell* sum_at(const Params& p, u32 owner, u64 cell) {
  return reinterpret_cast<Cell*>(base(p, owner) + p.region[0].half_stride) + cell;
}
FC_DEVICE void put(const Params& p, u64 cell, Payload v) { st_relaxed_sys(at(p, p.rank, cell), staging::cell(v)); }

// Whether the caller's input lies in the buffer already, as an input does that was registered for peers to read.
FC_DEVICE bool holds_input(const Params& p) { return p.in == base(p, p.rank); }

}  // namespace staging
}  // namespace fc
