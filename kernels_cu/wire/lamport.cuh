// lamport: no evidence beside the payload; a slot is full of a word that no payload contains, and a word has arrived when
// it is another one. The word is all ones, a NaN; a payload that has this very word sends another NaN in its place, so
// zeros, subnormals and infinities pass untouched and words are compared as bits, never as numbers.
//
// What was read has to be set back to the sentinel before the slot is used again: see wire/base.cuh.
#pragma once
#include "wire/base.cuh"

namespace fc {
namespace wire {

constexpr u32 kSentinel = 0xffffffffu;
constexpr u32 kOtherNan = 0x7fffffffu;  // a NaN as one float32 and as either of two 16-bit floats

struct Lamport : Sentinel<0> {
  static FC_DEVICE u32 sendable(u32 word) { return word == kSentinel ? kOtherNan : word; }
  static FC_DEVICE void put(Cell* slot, Payload v, u32) {
    st_relaxed_sys(slot, Cell{{sendable(v.w[0]), sendable(v.w[1]), sendable(v.w[2]), sendable(v.w[3])}});
  }
  static FC_DEVICE bool ready(Cell c, u32) {
    return c.w[0] != kSentinel && c.w[1] != kSentinel && c.w[2] != kSentinel && c.w[3] != kSentinel;
  }
  static FC_DEVICE void rearm(Cell* slot) { st_relaxed_sys(slot, Cell{{kSentinel, kSentinel, kSentinel, kSentinel}}); }
};

}  // namespace wire
}  // namespace fc
