// A GPU's arithmetic on a host, bit for bit: rounding, conversions to and from 16 bits, canonical NaNs.
#pragma once
#include <math.h>
#include <string.h>

#define FC_DEVICE inline

namespace fc {

FC_DEVICE float bits_to_float(u32 b) {
  float f;
  memcpy(&f, &b, 4);
  return f;
}
FC_DEVICE u32 float_to_bits(float f) {
  u32 b;
  memcpy(&b, &f, 4);
  return b;
}
// Hosts propagate NaN payloads, a GPU's arithmetic returns one canonical NaN: the contract is the GPU's.
FC_DEVICE float canonical_nan(float r) { return r != r ? bits_to_float(0x7fffffffu) : r; }
FC_DEVICE float add_rn(float a, float b) { return canonical_nan(a + b); }
FC_DEVICE float sub_rn(float a, float b) { return canonical_nan(a - b); }
FC_DEVICE float mul_rn(float a, float b) { return canonical_nan(a * b); }
FC_DEVICE float div_rn(float a, float b) { return canonical_nan(a / b); }
FC_DEVICE float sqrt_rn(float a) { return canonical_nan(sqrtf(a)); }
FC_DEVICE bool less(float a, float b) { return a < b; }
// The binary tree over that many leaves; what a power of two has more counts as zeros.
FC_DEVICE float tree_sum(const float* leaf, u32 count) {
  if (count == 1) return leaf[0];
  u32 left = 1;
  while (2 * left < count) left *= 2;
  return add_rn(tree_sum(leaf, left), tree_sum(leaf + left, count - left));
}
FC_DEVICE float half_to_float(u16 h) {
  const u32 sign = u32(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return bits_to_float(mantissa ? 0x7fffffffu : sign | 0x7f800000u);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = float(mantissa) * 0x1p-24f;  // zero or subnormal: exact
  return bits_to_float(sign | float_to_bits(magnitude));
}
// Shifts right by `drop` bits (1 to 31), rounding to nearest, ties to even.
FC_DEVICE u32 shift_rn(u32 v, u32 drop) {
  const u32 kept = v >> drop, rest = v & ((1u << drop) - 1), half = 1u << (drop - 1);
  return kept + (rest > half || (rest == half && (kept & 1u)));
}
FC_DEVICE u16 float_to_half(float f) {
  const u32 b = float_to_bits(f), sign = b >> 16 & 0x8000u, magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x47800000u) return u16(sign | 0x7c00u);  // 2^16 and above
  // Normal results; a carry out of the mantissa moves into the exponent and, at the top, to infinity, as it should.
  if (magnitude >= 0x38800000u) return u16(sign | shift_rn(magnitude - 0x38000000u, 13));
  const u32 exponent = magnitude >> 23;
  if (exponent < 102) return u16(sign);  // below half of the smallest subnormal
  return u16(sign | shift_rn((magnitude & 0x7fffffu) | 0x800000u, 126 - exponent));
}
FC_DEVICE u16 float_to_bfloat(float f) {
  const u32 b = float_to_bits(f);
  return (b & 0x7fffffffu) > 0x7f800000u ? u16(0x7fff) : u16(shift_rn(b, 16));
}

}  // namespace fc
