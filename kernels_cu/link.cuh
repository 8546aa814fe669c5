// A link that is slower than the memory between the ranks: compiled in on request only (FC_LINK, fcomm/links.py). The accesses
// of primitives.cuh to a peer's slab then take as long as over a link of the given latency and bandwidth; all others, and
// every result, stay what they are. docs/links.md says what may be concluded from such times.
//
// The model. Latency L, bandwidth B of one rank's link in each direction.
// - A store is on its way when it is ready and what the rank sent before it is through: it is issued no earlier than
//   max(ready, link free) + bytes / B + L. A rank's link is shared out to its blocks in equal parts (B / gridDim.x): blocks run
//   on SMs whose clocks agree in rate and not in time, so one queue for all of them would need a clock that all share, and
//   the one there is (globaltimer) moves in steps of 32 ns to 1 us. Our grids give blocks equal numbers of cells.
// - A load costs 2 L (the request, the answer), and its bytes pass through the same queue.
// - A release waits until all that its block sent before has been acknowledged, one L after it arrived.
//
// A thread's own time. A store is not waited for: a thread that has to be held until its store is due must not be late with
// what it could have done meanwhile. So each thread has a `lag`, the time that it was held, and is "ready" at now - lag. A look
// at the own slab ends that, since what follows depends on what it sees, and that is there now: lag = 0. Loads from peers are
// independent of each other, and stores depend on the loads before them (`loaded`). A block's barrier joins its threads'
// times: the latest one holds for all.
//
// Not modelled, each with the direction of its error: a thread that looks, sends and looks again in turns is charged a latency
// for each turn (two-shot with more than one own cell a thread: too slow); peers that are late or early against each other
// (a thread is held where a real one would look at once: too slow by at most its own bytes / B); headers of packets (too fast).
#pragma once
#include "params.cuh"

namespace fc {

struct LinkState {
  u64 own, slab_bytes;
  u32 started, latency;
  u64 cost;      // 2^-24 ticks a byte of this block's share
  u32 free;      // the link is free from here on; in 1/256 ticks, which end after 2^24 - see kLongest
  u32 last_due;  // when the block's latest store arrives
  u32 joined;    // the latest of the threads' times at the last barrier
  u32 lag[FC_MAX_THREADS], loaded[FC_MAX_THREADS];
};
// Ticks after a block's start beyond which its bandwidth is no longer limited: 1/256 ticks have 32 bits. 7.9 ms at 2 GHz.
constexpr u32 kLongest = 0xf00000;
// Ticks that the queue may be behind at least for its exact state not to matter.
constexpr u32 kSlack = 64;

#if defined(FC_CPU)
// A lane is a group of its own, as fibers do not converge.
FC_DEVICE LinkState& link_state() {
  static thread_local LinkState blocks[64];
  return blocks[blockIdx.x % 64];
}
#define FC_LINK_CALLED FC_DEVICE
FC_DEVICE u32 link_group() { return 1u << lane_id(); }
FC_DEVICE u32 link_count(u32) { return 1; }
FC_DEVICE u32 link_max(u32, u32 v) { return v; }
FC_DEVICE u32 link_first(u32, u32 v) { return v; }
FC_DEVICE bool link_all(u32, bool yes) { return yes; }
FC_DEVICE bool link_leads(u32) { return true; }
FC_DEVICE void link_sync(u32) {}
FC_DEVICE u32 link_fetch_max(u32* p, u32 v) {
  const u32 old = *p;
  if (v > old) *p = v;
  return old;
}
FC_DEVICE u32 link_fetch_add(u32* p, u32 v) {
  const u32 old = *p;
  *p = old + v;
  return old;
}
#else
// Called and not inlined: a kernel has a store for each peer in each of its loops, and code that runs once comes from far away.
#define FC_LINK_CALLED __device__ __noinline__
__shared__ LinkState link_shared;
FC_DEVICE LinkState& link_state() { return link_shared; }
// The lanes that execute one store together: it is one access of up to 512 bytes, and stays one.
FC_DEVICE u32 link_group() { return __activemask(); }
FC_DEVICE u32 link_count(u32 group) { return __popc(group); }
FC_DEVICE u32 link_max(u32 group, u32 v) { return __reduce_max_sync(group, v); }
FC_DEVICE u32 link_first(u32 group, u32 v) { return __shfl_sync(group, v, __ffs(group) - 1); }
FC_DEVICE bool link_all(u32 group, bool yes) { return __all_sync(group, yes); }
FC_DEVICE bool link_leads(u32 group) { return lane_id() == u32(__ffs(group)) - 1; }
FC_DEVICE void link_sync(u32 group) { __syncwarp(group); }
FC_DEVICE u32 link_fetch_max(u32* p, u32 v) { return atomicMax(p, v); }
FC_DEVICE u32 link_fetch_add(u32* p, u32 v) { return atomicAdd(p, v); }
#endif

FC_DEVICE u32 link_now(const LinkState& s) { return ticks() - s.started; }

// Before a kernel's first access. It reads the argument and the clock alone, so it may come before launch_wait().
FC_DEVICE void link_begin(const Params& p) {
  LinkState& s = link_state();
  if (threadIdx.x == 0) {
    s.own = p.slab[p.rank];
    s.slab_bytes = p.link.slab_bytes;
    s.started = ticks();
    s.latency = p.link.latency;
    s.cost = p.link.cost * gridDim.x;
    s.free = s.last_due = s.joined = 0;
  }
  s.lag[threadIdx.x] = s.loaded[threadIdx.x] = 0;
  raw::block_barrier();
}

FC_DEVICE bool link_is_mine(const LinkState& s, const void* p) {
  return reinterpret_cast<u64>(p) - s.own < s.slab_bytes;
}

// When a group's bytes, ready at that time, have left. Takes them into the queue.
FC_DEVICE u32 link_through(LinkState& s, u32 group, u32 ready, u32 bytes) {
  if (s.cost == 0) return ready;
  const u32 at = ready < kLongest ? ready << 8 : kLongest << 8;
  const u32 takes = u32((s.cost * (bytes * link_count(group)) + (1u << 15)) >> 16);
  // A thread's stores to further peers: the latency has been waited for with the first, and the queue is far from full. What
  // this saves is not time of the link but of its emulation, which nothing hides any more.
  u32 from = s.free;
  if (link_all(group, from >= at && int(link_now(s) - ((from + takes) >> 8) - s.latency) > int(kSlack))) {
    if (link_leads(group)) link_fetch_add(&s.free, takes);
  } else {
    if (link_leads(group)) {
      link_fetch_max(&s.free, at);
      from = link_fetch_add(&s.free, takes);  // others may have come in between: then it is later, as it should be
    }
    from = link_first(group, from);
  }
  const u32 left = (from + takes + 255) >> 8;
  return int(left - ready) > 0 ? left : ready;  // the latter beyond kLongest alone
}

// Waits until it is due; returns what the clock says then.
FC_DEVICE u32 link_hold(const LinkState& s, u32 group, u32 due) {
  u32 now = link_now(s);
  while (int(due - now) > 0) {
    spin_pause();
    now = link_now(s);
  }
  link_sync(group);  // lanes go on together, so that their store stays one
  return now;
}

// Holds a store of so many bytes a lane back until it is due. `acknowledged`: a release.
FC_LINK_CALLED void link_send(u32 bytes, bool acknowledged) {
  LinkState& s = link_state();
  const u32 group = link_group(), me = threadIdx.x;
  u32 ready = link_now(s) - s.lag[me];
  if (int(s.loaded[me] - ready) > 0) ready = s.loaded[me];
  if (acknowledged && s.last_due != 0 && int(s.last_due + s.latency - ready) > 0) ready = s.last_due + s.latency;
  ready = link_max(group, ready);
  const u32 due = link_through(s, group, ready, bytes) + s.latency;
  if (!acknowledged && link_leads(group)) link_fetch_max(&s.last_due, due);  // releases do not wait for each other
  s.lag[me] = link_hold(s, group, due) - ready;
}
FC_DEVICE void link_store(const void* p, u32 bytes, bool acknowledged) {
  if (!link_is_mine(link_state(), p)) link_send(bytes, acknowledged);
}

// Holds a load from a peer's slab back until its answer would be here. What it reads is that moment's value, which is the same
// wherever a barrier lies between the write and the read.
FC_LINK_CALLED void link_fetch(u32 bytes) {
  LinkState& s = link_state();
  const u32 me = threadIdx.x, group = link_group(), ready = link_max(group, link_now(s) - s.lag[me]);
  const u32 due = link_through(s, group, ready, bytes) + 2 * s.latency;
  s.lag[me] = link_hold(s, group, due) - ready;
  s.loaded[me] = due;
}
FC_DEVICE void link_load(const void* p, u32 bytes) {
  LinkState& s = link_state();
  if (link_is_mine(s, p)) {
    s.lag[threadIdx.x] = 0;
  } else {
    link_fetch(bytes);
  }
}

// ---- the words of primitives.cuh, with the link in front ------------------------------------------------------------------
FC_DEVICE Cell ld_relaxed_sys(const Cell* p) {
  link_load(p, 16);
  return raw::ld_relaxed_sys(p);
}
FC_DEVICE void st_relaxed_sys(Cell* p, Cell c) {
  link_store(p, 16, false);
  raw::st_relaxed_sys(p, c);
}
FC_DEVICE u32 ld_relaxed_sys(const u32* p) {
  link_load(p, 4);
  return raw::ld_relaxed_sys(p);
}
FC_DEVICE void st_relaxed_sys(u32* p, u32 v) {
  link_store(p, 4, false);
  raw::st_relaxed_sys(p, v);
}
FC_DEVICE u32 ld_acquire_sys(const u32* p) {
  link_load(p, 4);
  return raw::ld_acquire_sys(p);
}
FC_DEVICE void st_release_sys(u32* p, u32 v) {
  link_store(p, 4, true);
  raw::st_release_sys(p, v);
}
FC_DEVICE void st_relaxed_sys_line(Cell* p, Cell c, u32 mask) {
  link_store(p, 16, false);
  group_sync(mask);
  raw::st_relaxed_sys_line(p, c, mask);
}
FC_DEVICE Cell ld_relaxed_sys_line(const Cell* p, u32 mask) {
  link_load(p, 16);
  group_sync(mask);
  return raw::ld_relaxed_sys_line(p, mask);
}
FC_LINK_CALLED void block_barrier() {
  LinkState& s = link_state();
  const u32 me = threadIdx.x, group = link_group();
  u32 mine = link_now(s) - s.lag[me];
  if (int(s.loaded[me] - mine) > 0) mine = s.loaded[me];
  mine = link_max(group, mine);
  if (link_leads(group)) link_fetch_max(&s.joined, mine);  // times only grow, so it need not be set back
  raw::block_barrier();
  s.lag[me] = link_now(s) - s.joined;
  raw::block_barrier();  // nobody comes to the next one before all have read this one's
}

}  // namespace fc
