// One-shot all-reduce: every rank gets every rank's payload and adds them in rank order. One hop, (n - 1) S on the wire.
#pragma once
#include "algo/exchange.cuh"
#include "reduce.cuh"

namespace fc {

template <class Wire, class T>
struct StoreSum {
  static FC_DEVICE void consume(const Params& p, Span span, Payload own, const Cell* got) {
    if constexpr (ablate::without(ablate::kReduce)) return output(p, span, ablate::not_added<Wire>(p, own, got));
    if constexpr (ablate::kOwnInMemory) return output(p, span, ablate::sum_of<Wire, T>(got));
    const Payload sum =
        reduce_in_rank_order<T, Wire::kWords>([&](u32 r) { return r == p.rank ? own : Wire::payload(got[r]); });
    output(p, span, sum);
  }
  static FC_DEVICE void output(const Params& p, Span span, Payload sum) {
    ablate::output<Wire, T>(p, p.out, p.nbytes, span, sum);
  }
};

template <class Wire, class T>
FC_DEVICE void one_shot(const Params& p) {
  exchange<Wire, T, StoreSum<Wire, T>>(p);
}

}  // namespace fc
