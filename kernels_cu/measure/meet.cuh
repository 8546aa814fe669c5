// All ranks meet on the device, when all hosts have queued what is to be timed behind this kernel: a start that neither
// launch latency nor the ranks' different arrivals shift. For measurements only; cuda backend only.
#pragma once
#include "primitives.cuh"

namespace fc {

constexpr u64 kMeetFlagBytes = 128;

// slab[r]: rank r's meeting memory, one flag a line. in: address of the host's word, which reaches the ticket when the host
// has queued everything. nbytes: the ticket, larger in every meeting. out: where the host finds, as three 64-bit words,
// arrival and departure in ns of this GPU's clock, and whether the time ran out.
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
  if (r == 0) told[1] = now_ns();
}

}  // namespace fc
