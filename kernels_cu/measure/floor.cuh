// The floor: the grid and the argument of a collective, its input loaded and its output stored, and nothing in between.
#pragma once
#include "reduce.cuh"

namespace fc {

template <class T>
FC_DEVICE void floor_copy(const Params& p) {
  const u64 cells = (p.nbytes + 15) / 16, stride = u64(gridDim.x) * blockDim.x;
  for (u64 c = u64(blockIdx.x) * blockDim.x + threadIdx.x; c < cells; c += stride) {
    const Span span{c * 16, 16};
    store_payload<4, T::kElement>(p.out, p.nbytes, span, load_payload<4, T::kElement>(p.in, p.nbytes, span));
  }
}

}  // namespace fc
