// The number that epilogues calculate with: a float whose operators are IEEE's, rounded to nearest even, on every backend.
// C++'s own are whatever the compiler was told: CuPy has NVRTC flush subnormals to zero, and hosts keep payloads of NaNs.
#pragma once
#include "primitives.cuh"

namespace fc {

struct f32 {
  float v;
  f32() = default;
  FC_DEVICE f32(float value) : v(value) {}
  FC_DEVICE explicit f32(u32 count) : v(float(count)) {}
  FC_DEVICE explicit operator float() const { return v; }

  friend FC_DEVICE f32 operator+(f32 a, f32 b) { return add_rn(a.v, b.v); }
  friend FC_DEVICE f32 operator-(f32 a, f32 b) { return sub_rn(a.v, b.v); }
  friend FC_DEVICE f32 operator*(f32 a, f32 b) { return mul_rn(a.v, b.v); }
  friend FC_DEVICE f32 operator/(f32 a, f32 b) { return div_rn(a.v, b.v); }
  friend FC_DEVICE f32 operator-(f32 a) { return bits_to_float(float_to_bits(a.v) ^ 0x80000000u); }
  friend FC_DEVICE bool operator<(f32 a, f32 b) { return less(a.v, b.v); }
  friend FC_DEVICE bool operator>(f32 a, f32 b) { return less(b.v, a.v); }
  friend FC_DEVICE f32 sqrt(f32 a) { return sqrt_rn(a.v); }
};

}  // namespace fc
