// What stands before and behind a collective in a decode step, in small: a filler that makes its input, and an RMS norm of its
// result. For measurements only; cuda backend only.
//
// FC_TRIGGER 0: neighbours that know nothing of dependent launch. FC_TRIGGER 2: neighbours that do, each by the rule of the
// collectives: it waits before its first access, and only then lets the next grid in. So no more than two grids of a rank are
// resident at a time: one that waits, and the one that it waits for. Neither neighbour waits for a peer.
#pragma once
#include "reduce.cuh"

namespace fc {

FC_DEVICE void neighbour_begin() {
#if FC_TRIGGER
  launch_wait();
#endif
}

// in: nbytes; out: the same bytes.
FC_DEVICE void filler(const Params& p) {
  neighbour_begin();
  const u32 cells = u32((p.nbytes + 15) / 16), stride = gridDim.x * blockDim.x;
  for (u32 c = blockIdx.x * blockDim.x + threadIdx.x; c < cells; c += stride) {
    const Span span{c * 16ull, 16};
    store_payload<WholeCells, Bytes>(p, p.out, p.nbytes, span, load_payload<WholeCells, Bytes>(p, p.in, p.nbytes, span));
  }
}

// Sum over the block's threads, the same bits in each of them. Every thread calls it.
FC_DEVICE float block_sum(float value) {
  __shared__ float of_warp[32];
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) value = add_rn(value, __shfl_xor_sync(0xffffffffu, value, step));
  block_barrier();  // what the last sum left here has been read
  if (lane_id() == 0) of_warp[threadIdx.x / 32] = value;
  block_barrier();
  float sum = of_warp[0];
  for (u32 w = 1; w < blockDim.x / 32; w++) sum = add_rn(sum, of_warp[w]);
  return sum;
}

// y = x / sqrt(mean of x^2 over the row + 1e-6), a block for each row; in float32, rounded once. in, out: nbytes. part: bytes of
// a row, a multiple of 16; the last row may be shorter.
template <class T>
FC_DEVICE void rms_norm(const Params& p) {
  constexpr int kPerWord = 4 / T::kElement;
  neighbour_begin();
  for (u64 row = blockIdx.x * p.part; row < p.nbytes; row += gridDim.x * p.part) {
    const u64 left = p.nbytes - row, length = left < p.part ? left : p.part;
    float squares = 0;
    for (u64 at = threadIdx.x * 16ull; at < length; at += blockDim.x * 16ull) {
      const Payload v = load_payload<WholeCells, T>(p, p.in + row, length, Span{at, 16});
#pragma unroll
      for (int i = 0; i < 4 * kPerWord; i++) {
        const float x = T::get(v.w[i / kPerWord], i % kPerWord);
        squares = add_rn(squares, x * x);
      }
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / float(length / T::kElement) + 1e-6f);
    for (u64 at = threadIdx.x * 16ull; at < length; at += blockDim.x * 16ull) {
      Payload v = load_payload<WholeCells, T>(p, p.in + row, length, Span{at, 16});
#pragma unroll
      for (int i = 0; i < 4; i++) {
        typename T::Acc y[kPerWord];
#pragma unroll
        for (int k = 0; k < kPerWord; k++) y[k] = T::get(v.w[i], k) * scale;
        v.w[i] = T::put(y);
      }
      store_payload<WholeCells, T>(p, p.out + row, length, Span{at, 16}, v);
    }
  }
}

}  // namespace fc
