// Bounded waiting: every spin ends, by its evidence or by the clock, and a spin that the clock ended is described.
#pragma once
#include "epoch.cuh"

namespace fc {

constexpr u32 kPollsPerLook = 256;  // polls between two looks at the clock: about 100 us, nothing beside the timeout

class Wait {
 public:
  FC_DEVICE Wait() : polls_(0), started_ns_(0) {}

  // To be called after each poll that did not see its evidence. Returns false when waiting makes no sense any more: the
  // time is up, or another wait of this rank found so. The caller then leaves without pushing anything further.
  FC_DEVICE bool again(const Params& p) {
    spin_pause();
    if (++polls_ % kPollsPerLook != 0) return true;
    if (ld_relaxed_gpu(&control(p)->poison) != 0) return false;
    const u64 now = now_ns();
    if (started_ns_ == 0) started_ns_ = now;
    return now - started_ns_ < p.timeout_ns;
  }

 private:
  u32 polls_;
  u64 started_ns_;
};

// Leaves the first expired wait's description where the host finds it, and poisons the channel: the kernels queued behind
// this one, graph nodes included, then push nothing. Later waits of this grid see the poison and end as well. Every expired
// wait poisons before it returns, not just the one that describes itself: behind the block's barrier all its threads see it.
FC_DEVICE void report_expired(const Params& p, u32 e, u32 peer, u64 cell, Cell seen) {
  Control* c = control(p);
  if (atomic_exchange(&c->claim, 1) != 0) {
    st_relaxed_gpu(&c->poison, 1u);
    return;
  }
  const u32 ticket = ld_relaxed_gpu(&c->ticket);
  ErrorRecord* r = reinterpret_cast<ErrorRecord*>(p.error);
  st_relaxed_sys(&r->rank, p.rank);
  st_relaxed_sys(&r->peer, peer);
  st_relaxed_sys(&r->block, u32(blockIdx.x));
  st_relaxed_sys(&r->blocks_started, ticket == 0 ? u32(gridDim.x) : ticket);
  st_relaxed_sys(&r->blocks, u32(gridDim.x));
  st_relaxed_sys(&r->epoch, e);
  st_relaxed_sys(&r->protocol, p.protocol);
  st_relaxed_sys(&r->bytes_low, u32(p.nbytes));
  st_relaxed_sys(&r->bytes_high, u32(p.nbytes >> 32));
  st_relaxed_sys(&r->cell_low, u32(cell));
  st_relaxed_sys(&r->cell_high, u32(cell >> 32));
  for (int i = 0; i < 4; i++) st_relaxed_sys(&r->seen[i], seen.w[i]);
  st_relaxed_sys(&r->channel, p.channel);
  st_release_sys(&r->valid, 1u);  // the words above before this one
  st_relaxed_gpu(&c->poison, 1u);
}

// The same for a wait for several ranks' cells: describes the first of those that are missing.
FC_DEVICE void report_missing(const Params& p, u32 e, u32 missing, u64 cell, const Cell* got) {
  u32 late = 0;
  Cell last = {{0, 0, 0, 0}};
#pragma unroll
  for (u32 r = FC_N; r-- > 0;) {
    if (missing >> r & 1u) {
      late = r;
      last = got[r];
    }
  }
  report_expired(p, e, late, cell, last);
}

// Waits for an epoch word, with acquire. On expiry it reports and returns; the caller looks at the poison.
FC_DEVICE void await_flag(const Params& p, const u32* flag, u32 e, u32 peer, u64 chunk) {
  Wait wait;
  u32 seen = ld_acquire_sys(flag);
  while (seen != e) {
    if (!wait.again(p)) {
      report_expired(p, e, peer, chunk, Cell{{seen, 0, 0, 0}});
      return;
    }
    seen = ld_acquire_sys(flag);
  }
}

}  // namespace fc
