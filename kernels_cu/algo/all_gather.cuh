// All-gather: every rank gets every rank's bytes, unchanged. One hop, (n - 1) S on the wire for S bytes per rank.
#pragma once
#include "algo/exchange.cuh"
#include "reduce.cuh"

namespace fc {

template <class Wire>
struct StoreAll {
  static FC_DEVICE void consume(const Params& p, Span span, Payload own, const Cell* got) {
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      store_payload<Wire, Bytes>(p, p.out + r * p.stride, p.nbytes, span, r == p.rank ? own : Wire::payload(got[r]));
    }
  }
};

template <class Wire, class T>
FC_DEVICE void all_gather(const Params& p) {
  exchange<Wire, T, StoreAll<Wire>>(p);
}

}  // namespace fc
