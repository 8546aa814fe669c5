// The ablation of the reduction order: a cell is added as soon as it is there, my own part first. Nothing is left to add when
// the last one comes but that one, and no cell has to be kept; for it, ranks and calls differ in the order of the additions,
// and so in bits (tests count them). Within rounding the sum is the contract's.
#pragma once
#include "algo/slots.cuh"
#include "reduce.cuh"

namespace fc {
namespace ablate {

// The loop of Slots::take() with an addition where a cell is ready.
struct Arrival {
  template <class Wire, class T, bool kAddressesFirst>
  static FC_DEVICE bool take_sum(const Slots<Wire, kAddressesFirst>& slots, u32 cell, Payload own, Payload* sum) {
    static_assert(!Wire::kChunked, "all cells of a chunk are there when the first one is looked at");
    constexpr int kPerWord = 4 / T::kElement;
    const Params& p = slots.p_;
    typename T::Acc acc[Wire::kWords][kPerWord];
#pragma unroll
    for (int i = 0; i < Wire::kWords; i++) {
#pragma unroll
      for (int k = 0; k < kPerWord; k++) acc[i][k] = T::get(own.w[i], k);
    }
    const u64 at = pinned(slots.mine_ + slots.inside(cell));
    Cell got[FC_N];
    u32 missing = all_peers(p);
    Wait wait;
    while (true) {
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (missing >> r & 1u) got[r] = Wire::look(reinterpret_cast<const Cell*>(at + u64(r) * slots.between_));
      }
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if ((missing >> r & 1u) && Wire::ready(got[r], slots.e_)) {
          missing &= ~(1u << r);
          Cell c = got[r];
          if (Wire::kSecondLook) c = Wire::look(reinterpret_cast<const Cell*>(at + u64(r) * slots.between_));
          const Payload v = Wire::payload(c);
#pragma unroll
          for (int i = 0; i < Wire::kWords; i++) {
#pragma unroll
            for (int k = 0; k < kPerWord; k++) acc[i][k] = T::add(acc[i][k], T::get(v.w[i], k));
          }
        }
      }
      if (missing == 0) break;
      if (!Wire::all_agree(wait.again(p))) {
        report_missing(p, slots.e_, missing, cell, got);
        return false;
      }
    }
    *sum = Payload{{0, 0, 0, 0}};
#pragma unroll
    for (int i = 0; i < Wire::kWords; i++) sum->w[i] = T::put(acc[i]);
    return true;
  }
};

// The sum in rank order where my own part came through a slot, too.
template <class Wire, class T>
FC_DEVICE Payload sum_of(const Cell* got) {
  return reduce_in_rank_order<T, Wire::kWords>([&](u32 r) { return Wire::payload(got[r]); });
}

// One cell of one-shot's output; false if the wait expired.
template <class Wire, class T, bool kAddressesFirst>
FC_DEVICE bool store_sum(const Params& p, const Slots<Wire, kAddressesFirst>& slots, u32 cell, Payload own) {
  Payload sum;
  if (!Arrival::take_sum<Wire, T>(slots, cell, own, &sum)) return false;
  store_payload<Wire, T>(p, p.out, p.nbytes, Wire::span(cell), sum);
  return true;
}

}  // namespace ablate
}  // namespace fc
