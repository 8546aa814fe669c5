// The reduction contract: float32 accumulation in rank order beginning with rank 0's own value, rounded once to nearest
// even; integers add as unsigned; a NaN result is the canonical one. The order is a property of this file alone: it does
// not know when a payload arrived, by which encoding, or on how many blocks.
#pragma once
#include "payload.cuh"

namespace fc {

// An element type: how many elements a 32-bit word holds, what accumulates them, and the way in and out of a word.
struct F32 {
  static constexpr int kElement = 4;
  typedef float Acc;
  static FC_DEVICE Acc get(u32 word, int) { return bits_to_float(word); }
  static FC_DEVICE Acc add(Acc a, Acc b) { return add_rn(a, b); }
  static FC_DEVICE u32 put(const Acc* a) { return float_to_bits(a[0]); }
};

struct F16 {
  static constexpr int kElement = 2;
  typedef float Acc;
  static FC_DEVICE Acc get(u32 word, int k) { return half_to_float(u16(word >> (16 * k))); }
  static FC_DEVICE Acc add(Acc a, Acc b) { return add_rn(a, b); }
  static FC_DEVICE u32 put(const Acc* a) { return float_to_half(a[0]) | u32(float_to_half(a[1])) << 16; }
};

struct BF16 {
  static constexpr int kElement = 2;
  typedef float Acc;
  static FC_DEVICE Acc get(u32 word, int k) { return bits_to_float(k ? word & 0xffff0000u : word << 16); }
  static FC_DEVICE Acc add(Acc a, Acc b) { return add_rn(a, b); }
  static FC_DEVICE u32 put(const Acc* a) { return float_to_bfloat(a[0]) | u32(float_to_bfloat(a[1])) << 16; }
};

struct I32 {
  static constexpr int kElement = 4;
  typedef u32 Acc;
  static FC_DEVICE Acc get(u32 word, int) { return word; }
  static FC_DEVICE Acc add(Acc a, Acc b) { return a + b; }
  static FC_DEVICE u32 put(const Acc* a) { return a[0]; }
};

// Bytes that are moved and never added.
struct Bytes {
  static constexpr int kElement = 1;
};

// Sum of the ranks' payloads, of(0) + of(1) + ... + of(FC_N - 1), element by element.
template <class T, int kWords, class Of>
FC_DEVICE Payload reduce_in_rank_order(const Of& of) {
  constexpr int kPerWord = 4 / T::kElement;
  Payload sum = {{0, 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < kWords; i++) {
    typename T::Acc acc[kPerWord];
#pragma unroll
    for (int k = 0; k < kPerWord; k++) {
      acc[k] = T::get(of(0u).w[i], k);
#pragma unroll
      for (u32 r = 1; r < FC_N; r++) acc[k] = T::add(acc[k], T::get(of(r).w[i], k));
    }
    sum.w[i] = T::put(acc);
  }
  return sum;
}

}  // namespace fc
