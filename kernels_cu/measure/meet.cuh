// All ranks meet on the device, when all hosts have queued what is to be timed behind this kernel: a start that neither
// launch latency nor the ranks' different arrivals shift. For measurements only; cuda backend only.
#pragma once
#include "primitives.cuh"

namespace fc {

constexpr u64 kMeetFlagBytes = 128;

// slab[r]: rank r's meeting memory, one flag a line. in: address of the host's word, which reaches the ticket when the host
// has queued everything. nbytes: the ticket, larger in every meeting. part: ns for which this rank is then held up. out: where
// the host finds, as four 64-bit words, arrival and meeting in ns of this GPU's clock, whether the time ran out, and for how
// long the rank was held up.
FC_DEVICE bool reached(const u32* word, u32 ticket, u64 end_ns) {
  while (int(ld_acquire_sys(word) - ticket) < 0) {
    if (now_ns() > end_ns) return false;
    spin_pause();
  }
  return true;
}

FC_DEVICE void meet(const Params& p) {
  const u32 ticket = u32(p.nbytes), r = threadIdx.x;
  u64* told = reinterpret_cast<u64*>(p.out);
  const u64 end_ns = now_ns() + p.timeout_ns;
  if (r == 0) {
    if (!reached(reinterpret_cast<const u32*>(p.in), ticket, end_ns)) told[2] = 1;
    told[0] = now_ns();
  }
  block_barrier();
  if (r < FC_N && r != p.rank) {
    st_release_sys(reinterpret_cast<u32*>(p.slab[r] + p.rank * kMeetFlagBytes), ticket);
    if (!reached(reinterpret_cast<const u32*>(p.slab[p.rank] + r * kMeetFlagBytes), ticket, end_ns)) told[2] = 1;
  }
  block_barrier();
  if (r == 0) {
    const u64 met_ns = now_ns();
    u64 held_ns = 0;
    while (held_ns < p.part) held_ns = now_ns() - met_ns;
    told[1] = met_ns;
    told[3] = held_ns;
  }
}

}  // namespace fc
