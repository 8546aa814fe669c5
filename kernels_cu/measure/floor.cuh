// The floor: the grid and the argument of a collective, its input loaded and its output stored, and nothing in between.
// `copies` is the number of times that the output holds as much as the input: 1, or the number of ranks of a gather.
#pragma once
#include "reduce.cuh"

namespace fc {

template <class T>
FC_DEVICE void floor_copy(const Params& p) {
  launch_wait();
  const u32 cells = u32((p.nbytes + 15) / 16), stride = gridDim.x * blockDim.x;
  for (u32 c = blockIdx.x * blockDim.x + threadIdx.x; c < cells; c += stride) {
    const Span span{c * 16ull, 16};
    const Payload v = load_payload<WholeCells, T>(p, p.in, p.nbytes, span);
    for (u32 r = 0; r < p.copies; r++) {
      store_payload<WholeCells, T>(p, p.out + r * p.nbytes, p.nbytes, span, v);
    }
  }
  late_trigger();
}

}  // namespace fc
