// What a medium between ranks takes, and nothing else: a ping-pong for its latency, a stream for its bandwidth, in the two ways
// that our protocols use it. Each runs many rounds in one grid, between two readings of one clock, so neither launches nor
// clocks of two ranks come into it. With an emulated link compiled in they show what the emulation makes of it.
//
// slab[r] + in: this rank's mailboxes, cleared before; part: the number of the first round (never one that was there before);
// nbytes: rounds; stride: cells that a rank sends to the next one in a round; out: for each block, as 64-bit words, the
// nanoseconds of all its rounds and whether its time ran out.
#pragma once
#include "primitives.cuh"

namespace fc {

// kFlag: payload and evidence apart, as `flag` has them: a release behind the payload, an acquire before it is read. Else both
// in one cell, as in `ll`.
template <bool kFlag>
FC_DEVICE bool pass_on(Cell* theirs, const Cell* mine, u32 e, bool first, u64 end_ns) {
  for (u32 turn = 0; turn < 2; turn++) {
    if ((turn == 0) == first) {
      if (kFlag) {
        st_relaxed_sys(theirs, Cell{{e, e, e, e}});
        st_release_sys(reinterpret_cast<u32*>(theirs + 8), e);
      } else {
        st_relaxed_sys(theirs, Cell{{e, e, e, e}});
      }
      continue;
    }
    for (u32 polls = 1;; polls++) {
      const bool there = kFlag ? ld_acquire_sys(reinterpret_cast<const u32*>(mine + 8)) == e : [&] {
        const Cell c = ld_relaxed_sys(mine);
        return c.w[1] == e && c.w[3] == e;
      }();
      if (there) break;
      if (polls % 256 == 0 && now_ns() > end_ns) return false;
      spin_pause();
    }
    if (kFlag && ld_relaxed_sys(mine).w[0] != e)
      return false;  // the payload behind its flag: used, so that it is waited for
  }
  return true;
}

// Ranks 0 and 1, one thread each.
template <bool kFlag>
FC_DEVICE void ping_pong(const Params& p) {
  if (p.rank > 1 || threadIdx.x != 0 || blockIdx.x != 0) return;
  u64* told = reinterpret_cast<u64*>(p.out);
  Cell* theirs = reinterpret_cast<Cell*>(p.slab[1 - p.rank] + p.in);
  const Cell* mine = reinterpret_cast<const Cell*>(p.slab[p.rank] + p.in);
  const u64 end_ns = now_ns() + p.timeout_ns;
  u32 e = u32(p.part);
  bool in_time = pass_on<kFlag>(theirs, mine, e++, p.rank == 0, end_ns);  // both are there
  const u64 started = now_ns();
  for (u32 k = 0; in_time && k < u32(p.nbytes); k++) in_time = pass_on<kFlag>(theirs, mine, e++, p.rank == 0, end_ns);
  told[0] = now_ns() - started;
  told[1] = !in_time;
}

// Every rank sends to the next one and takes from the one before, thread by thread: all cells of a round, then all looks. The
// two copies of a mailbox are taken in turn: who sends round k + 2 has taken k + 1 from the thread that had taken k before.
FC_DEVICE void stream(const Params& p) {
  const u32 next = p.rank + 1 < FC_N ? p.rank + 1 : 0, cells = u32(p.stride), step = gridDim.x * blockDim.x;
  u64* told = reinterpret_cast<u64*>(p.out) + 2 * blockIdx.x;
  const u64 end_ns = now_ns() + p.timeout_ns;
  u64 started = 0;
  bool in_time = true;
  for (u32 k = 0; in_time && k <= u32(p.nbytes); k++) {
    if (k == 1) {  // in the first one all have come
      block_barrier();
      started = now_ns();
    }
    const u32 e = u32(p.part) + k;
    Cell* theirs = reinterpret_cast<Cell*>(p.slab[next] + p.in) + (k & 1u) * cells;
    const Cell* mine = reinterpret_cast<const Cell*>(p.slab[p.rank] + p.in) + (k & 1u) * cells;
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    for (u32 c = first; c < cells; c += step) st_relaxed_sys(theirs + c, Cell{{e, e, e, e}});
    for (u32 c = first; in_time && c < cells; c += step) {
      for (u32 polls = 1;; polls++) {
        const Cell seen = ld_relaxed_sys(mine + c);
        if (seen.w[1] == e && seen.w[3] == e) break;
        if (polls % 256 == 0 && now_ns() > end_ns) {
          in_time = false;
          break;
        }
        spin_pause();
      }
    }
  }
  if (!in_time) told[1] = 1;
  block_barrier();
  if (threadIdx.x == 0) told[0] = now_ns() - started;
}

#if FC_LINK
// Rank 1 comes late: what rank 0 sent is there. Then it sends, looks, and has what it needs. out[0]: the nanoseconds of that
// alone, in all rounds; a link takes no part in them. One thread each.
FC_DEVICE void come_late(const Params& p) {
  if (p.rank > 1 || threadIdx.x != 0 || blockIdx.x != 0) return;
  u64* told = reinterpret_cast<u64*>(p.out);
  Cell* theirs = reinterpret_cast<Cell*>(p.slab[1 - p.rank] + p.in);
  const Cell* mine = reinterpret_cast<const Cell*>(p.slab[p.rank] + p.in);
  const u64 end_ns = now_ns() + p.timeout_ns;
  u64 spent = 0;
  for (u32 k = 0; k <= u32(p.nbytes); k++) {
    const u32 e = u32(p.part) + k;
    if (p.rank == 0) st_relaxed_sys(theirs, Cell{{e, e, e, e}});
    for (u32 polls = 1; ld_relaxed_sys(mine).w[0] != e; polls++) {
      if (polls % 256 == 0 && now_ns() > end_ns) {
        told[1] = 1;
        return;
      }
      spin_pause();
    }
    if (p.rank == 0) continue;
    const u64 from = now_ns();
    st_relaxed_sys(theirs, Cell{{e, e, e, e}});
    if (ld_relaxed_sys(mine).w[3] != e) told[1] = 1;
    if (k > 0) spent += now_ns() - from;
  }
  told[0] = spent;
}
#endif

// Ticks of this SM's clock in about nbytes nanoseconds: out[0] nanoseconds, out[1] ticks. The timer moves in steps of up to a
// microsecond, so it is read where it steps.
FC_DEVICE void clock_rate(const Params& p) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  u64* told = reinterpret_cast<u64*>(p.out);
  const u64 before = now_ns();
  u64 from, to;
  while ((from = now_ns()) == before) spin_pause();
  const u32 started = ticks();
  const u64 end = from + p.nbytes;
  while ((to = now_ns()) < end) spin_pause();
  told[1] = ticks() - started;
  told[0] = to - from;
}

}  // namespace fc
