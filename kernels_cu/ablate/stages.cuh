// What takes the place of a stage that is left out. In kernels of FC_VARIANT 0 each of these is the stage itself.
#pragma once
#include "ablate/variant.cuh"
#include "payload.cuh"

namespace fc {
namespace ablate {

// In place of everything behind the wait for the grid before.
FC_DEVICE void end() { late_trigger(); }

FC_DEVICE void keep(const Params& p, Payload v) { keep(p, v.w[0] ^ v.w[1] ^ v.w[2] ^ v.w[3]); }

template <class Wire, class T>
FC_DEVICE Payload input(const Params& p, u64 message, u64 nbytes, Span span) {
  if constexpr (without(kInput)) {
    return Payload{{p.rank, p.rank, p.rank, p.rank}};  // no sentinel
  } else {
    return load_payload<Wire, T>(p, message, nbytes, span);
  }
}

template <class Wire, class T>
FC_DEVICE void output(const Params& p, u64 message, u64 nbytes, Span span, Payload v) {
  if constexpr (without(kOutput)) {
    keep(p, v);
  } else {
    store_payload<Wire, T>(p, message, nbytes, span, v);
  }
}

// In place of polling.
template <u32 kCells>
FC_DEVICE bool nothing_came(const Params& p, Cell* got) {
#pragma unroll
  for (u32 k = 0; k < kCells; k++) got[k] = Cell{{p.rank, p.rank, p.rank, p.rank}};
  return true;
}

// In place of adding: my own part. Payload that its evidence does not share an access with has to be waited for all the same.
template <class Wire>
FC_DEVICE Payload not_added(const Params& p, Payload own, const Cell* got) {
  if constexpr (!without(kPoll) && (Wire::kSecondLook || Wire::kChunked)) {
    u32 all = 0;
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) all ^= r == p.rank ? 0 : got[r].w[0] ^ got[r].w[1] ^ got[r].w[2] ^ got[r].w[3];
    keep(p, all);
  }
  return own;
}

template <class Wire>
FC_DEVICE bool take_own(const Params& p, Payload own, const Cell* got, Payload* sum) {
  *sum = not_added<Wire>(p, own, got);
  return true;
}

// One after the other: all that take(what) would have taken together.
template <u32 kMost, class Take>
FC_DEVICE bool one_by_one(const Take& take) {
#pragma unroll
  for (u32 k = 0; k < kMost; k++) {
    if (!take(k)) return false;
  }
  return true;
}

// Setting back in another place than the shipped one, for a call with two phases.
template <bool kOneWire, class Turns>
FC_DEVICE void rearm(const Params& p, const Turns& turns) {
  turns.first().template rearm<true>(p, p.region[0]);
  if (!kOneWire) turns.second().template rearm<true>(p, p.region[1]);
}

}  // namespace ablate
}  // namespace fc
