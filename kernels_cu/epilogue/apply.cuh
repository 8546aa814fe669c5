// An epilogue by itself, on an array in memory: what all-reduce and a kernel behind it do without fusing, with the same bits.
#pragma once
#include "epilogue/values.cuh"

namespace fc {

template <class T, class E>
FC_DEVICE void apply_to_elements(const Params& p) {
  launch_wait();
  const u64 cells = (p.nbytes + 15) / 16, stride = u64(gridDim.x) * blockDim.x;
  for (u64 c = u64(blockIdx.x) * blockDim.x + threadIdx.x; c < cells; c += stride) {
    const Span span{c * 16, 16};
    const Payload v = load_payload<WholeCells, T>(p, p.in, p.nbytes, span);
    store_payload<WholeCells, Then<T, E>>(p, p.out, p.nbytes, span, v);
  }
  late_trigger();
}

// A block takes whole rows, as algo/one_shot_rows.cuh does.
template <class T, class E, u32 kCells>
FC_DEVICE void apply_to_rows(const Params& p) {
  launch_wait();
  const u64 row_bytes = u64(p.epilogue.columns) * T::kElement;
  u32 turn = 0;
  for (u64 from = blockIdx.x * row_bytes; from < p.nbytes; from += gridDim.x * row_bytes) {
    Values<WholeCells, T, E, kCells> row(p, from, row_bytes, Span{threadIdx.x * 16ull, 16}, blockDim.x * 16, turn);
#pragma unroll
    for (u32 k = 0; k < kCells; k++) {
      if (row.here(k)) row.set(k, load_payload<WholeCells, T>(p, p.in + from, row_bytes, row.span(k)));
    }
    row.prefetch_reads();
    row.prefetch_row_vectors();
    E::apply(row);
    row.store_to(p.out);
  }
  late_trigger();
}

}  // namespace fc
