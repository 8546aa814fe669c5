// The second form of an emulated link (FC_LINK 2): blocks that forward. A grid has twice its blocks; block b works, and block
// gridDim / 2 + b is its link. What the working block stores to a peer goes into a queue in the rank's own memory, and its link
// makes the very same store when that is due. The working block is not held: it looks at its slots at once, whenever its peers
// arrive, and what it sent is delivered late, at the link's rate and, where that is asked for, in another order. (The first
// form, link.cuh, has the sender wait; it is exact where all arrive together.) docs/links.md says what may be concluded.
//
// When a store is due. Latency L, bandwidth B of one rank's link, jitter J:
//   due = max(stored, bucket) + L + a number in [0, J) that a hash of seed, block and place in the queue gives.
// The bucket is the time at which all that the rank sent before is through at rate B; one word for all its blocks. Times
// are of the clock that all SMs share (globaltimer), in its steps of 32 ns (1 us on some GPUs), and differences of it.
// - A release is due 2 L after the last store of its block before it arrived (acknowledged, and its own way), as in the first
//   form.
// - A load from a peer is made L after it was asked for and answered L later; independent ones are on their way together.
//   Its bytes pass no bucket.
//
// A queue is a ring of kRing entries with one writing and one reading block. An entry's index is counted through all calls; it
// lies at the index modulo kRing and carries, in each of its two cells, how often the ring had gone round: its evidence. What lay
// there before is of exactly one round before, so nothing is ever cleared. A cell is 16 bytes and not
// torn, so cell and evidence need no order. The reader, when it has an entry in registers, says so in `taken`, which the
// writer of the entry one round later looks at. At the end of a grid its queues are empty.
//
// What still holds:
// - Kernel completion performs a grid's stores (A1, I3): the links are blocks of the grid and leave when their working block has
//   ended and the queue is empty. Stores to the own slab (scrubbing, re-arming) and loads of it are not touched.
// - Deadlock freedom: all blocks of both kinds are resident (the host counts both). A link waits for the time, and for its working
//   block, whose waits are bounded. Take the lowest index of a queue that was not forwarded. The entry one round before it
//   was, so its writer has room; all that its thread had before it was forwarded, so it is taken; where it is a release, it
//   waits for lower ones alone, and where it is part of a line, the same is true of the line's other cells. So it is forwarded
//   when it is due.
// - One cell is one store of its width, one line one instruction of eight converged lanes (A2).
// - Order, where a kernel asks for it: see Kind.
#pragma once
#include "params.cuh"

namespace fc {

// Kinds of store, and a mark.
// kRelease: forwarded, with release, when all entries of lower index were, but for those of the same instruction, which have no
//   order. A store that precedes the kernel's release in causality order is one of the same thread or, before a barrier, of its
//   block, and so has a lower index. The chain is: the store; the fence and the word of `low` by which its forwarding thread
//   says so; the releasing thread's look at that word; its release; the peer's acquire. What the kernel's thread had seen of
//   others comes along by the fence before its entry and the one in the release.
// kFenced: a relaxed store behind a fence_sys(). The kernel's fence, the entry, the look at the entry and a fence before the
//   store carry on what the kernel's fence covers.
// kLine: eight entries in a row at an index that eight divides, hence in eight neighbouring lanes.
// kNothing: no store; in front of a line, to make its index such a one.
enum Kind : u32 { kCell = 0, kWord = 1, kRelease = 2, kLine = 3, kNothing = 4, kFenced = 8 };

constexpr u32 kRing = 2048;  // fcomm/links.py allocates for it
// Entries that a link's thread has in registers, of which a block of 1024 leaves it fewer.
constexpr u32 kHeld = FC_MAX_THREADS > 512 ? 2 : 4;
// Nanoseconds before something is due from which on a warp does not look for more: a look takes about as long.
constexpr u64 kNear = 1000;

struct Entry {
  Cell first;   // payload words 0 to 2, round
  Cell second;  // payload word 3, place in the peer's slab in words, time of the store, round << 8 | kind << 4 | peer
};
struct QueueHead {
  u32 base;     // index of the call's first entry
  u32 closing;  // entries of this call and one more, when the working block has ended
  u32 reserved[30];
};
struct Queue {
  QueueHead head;
  Entry entry[kRing];
  u32 taken[kRing];  // the round that was taken there last
};
struct Queues {  // of one rank and channel; all zero at first
  u64 free;      // the bucket: 1/256 ns
  u64 reserved[15];
  Queue of[1];  // one for each working block
};

struct LinkState {
  u64 slab[FC_N], slab_bytes;
  u64 queue, queues;
  u64 cost;  // 2^-24 ns a byte
  u32 rank, latency, jitter, seed;
  u32 count;  // a working block's entries in this call
  u32 line[FC_MAX_THREADS / 8];
  u32 base[FC_MAX_THREADS], fenced[FC_MAX_THREADS];
  u32 lag[FC_MAX_THREADS];  // how long a thread was held for loads
  u32 low[FC_MAX_THREADS];  // a link's threads: the lowest entry of each that was not forwarded ...
  u32 arrived[FC_MAX_THREADS];  // ... and when its latest store, other than a release, was; the thread has one if low is not its number
};
constexpr u32 kAsked = 1, kKnown = 2;  // bits of `fenced`: a fence was asked for; base is known

#if defined(FC_CPU)
// A lane is a group of its own, as fibers do not converge.
FC_DEVICE LinkState& link_state() {
  static thread_local LinkState blocks[64];
  return blocks[blockIdx.x % 64];
}
#define FC_LINK_CALLED FC_DEVICE
struct LinkGroup {
  u32 rank, count;
};
FC_DEVICE LinkGroup link_group() { return LinkGroup{0, 1}; }
FC_DEVICE u32 link_reserve(u32* count, LinkGroup) { return (*count)++; }
FC_DEVICE bool link_exchange(u32* p, u32 old, u32 value) {
  if (*p != old) return false;
  *p = value;
  return true;
}
FC_DEVICE u64 link_take_tokens(u64* free, u64 at, u64 takes) {
  const u64 from = *free > at ? *free : at;
  *free = from + takes;
  return from + takes;
}
FC_DEVICE void link_fence_block() {}
constexpr u32 kLookers = 1;
FC_DEVICE u32 link_looker() { return 0; }
FC_DEVICE u32 link_min(u32 v) { return v; }
// A line as the shim has it: the flag's cell behind the others and a release. `low`: of the thread's neighbours.
FC_DEVICE bool link_line_goes(const u32* low, bool line, bool go, u32 lowest) {
  if (!line || lane_id() % 8 != 7) return go;
  for (u32 k = 1; k < 8; k++) go = go && low[threadIdx.x - k] > lowest - k;
  return go;
}
FC_DEVICE void link_store_line(Cell* p, Cell c) {
  if (lane_id() % 8 == 7) raw::fence_sys();
  raw::st_relaxed_sys(p, c);
}
#undef gridDim
#define gridDim (::fc_cpu::Dim3{::fc_cpu::grid()->blocks / 2, 1, 1})
#else
#define FC_LINK_CALLED __device__ __noinline__
__shared__ LinkState link_shared;
FC_DEVICE LinkState& link_state() { return link_shared; }
// The lanes that execute one store together, and the place of this one.
struct LinkGroup {
  u32 rank, count, mask;
};
FC_DEVICE LinkGroup link_group() {
  const u32 mask = __activemask();
  return LinkGroup{u32(__popc(mask & ((1u << lane_id()) - 1))), u32(__popc(mask)), mask};
}
FC_DEVICE u32 link_reserve(u32* count, LinkGroup g) {
  u32 at = 0;
  if (g.rank == 0) at = atomicAdd(count, g.count);
  return __shfl_sync(g.mask, at, __ffs(g.mask) - 1) + g.rank;
}
FC_DEVICE bool link_exchange(u32* p, u32 old, u32 value) { return atomicCAS(p, old, value) == old; }
// Lanes that take tokens together do so at once, as one.
FC_DEVICE u64 link_take_tokens(u64* free, u64 at, u64 takes) {
  const u32 mask = __activemask(), leader = __ffs(mask) - 1;
  const u32 all = __reduce_add_sync(mask, u32(takes));
  u64 through = 0;
  if (lane_id() == leader) {
    atomicMax(free, at);
    through = atomicAdd(free, u64(all)) + all;  // others may have come in between: then it is later, as it should be
  }
  return __shfl_sync(mask, through, leader);
}
FC_DEVICE void link_fence_block() { __threadfence_block(); }
// A warp looks through its block's threads together.
constexpr u32 kLookers = 32;
FC_DEVICE u32 link_looker() { return lane_id(); }
FC_DEVICE u32 link_min(u32 v) { return __reduce_min_sync(0xffffffffu, v); }
// By all lanes of a warp: a line goes when all eight lanes have their part of it and it is due.
FC_DEVICE bool link_line_goes(const u32*, bool line, bool go, u32) {
  const bool whole = group_all(0xffu << (lane_id() & ~7u), line && go);
  return line ? whole : go;
}
FC_DEVICE void link_store_line(Cell* p, Cell c) { raw::st_relaxed_sys_line(p, c, 0xffu << (lane_id() & ~7u)); }
struct LinkGrid {
  u32 x;
};
FC_DEVICE LinkGrid link_grid() { return LinkGrid{gridDim.x / 2}; }
#define gridDim        (::fc::link_grid())  // what a kernel takes for its grid: the blocks that work
#endif

FC_DEVICE Queue* link_queue(const LinkState& s) { return reinterpret_cast<Queue*>(s.queue); }
// Never that of what lies there: a whole ring, of indices that count modulo 2^32, divides that.
FC_DEVICE u32 link_round(u32 index) { return index / kRing + 1; }

// Before anything of a kernel; true for a block that works. Reads the argument alone, so it may come before launch_wait().
FC_DEVICE bool link_begin(const Params& p) {
  LinkState& s = link_state();
  const u32 me = threadIdx.x, block = blockIdx.x < gridDim.x ? blockIdx.x : blockIdx.x - gridDim.x;
  if (me == 0) {
    for (u32 r = 0; r < FC_N; r++) s.slab[r] = p.slab[r];
    s.slab_bytes = p.link.slab_bytes;
    s.queues = p.link.queues;
    s.queue = reinterpret_cast<u64>(reinterpret_cast<Queues*>(p.link.queues)->of + block);
    s.cost = p.link.cost;
    s.rank = p.rank;
    s.latency = p.link.latency;
    s.jitter = p.link.jitter;
    s.seed = p.link.seed;
    s.count = 0;
  }
  s.base[me] = s.fenced[me] = s.lag[me] = 0;
  s.low[me] = me;
  raw::block_barrier();
  return blockIdx.x < gridDim.x;
}

// Behind everything of a working block; all its threads come here, whatever they returned from.
struct LinkEnd {
  FC_DEVICE ~LinkEnd() {
    raw::block_barrier();  // all entries have their index
    LinkState& s = link_state();
    if (threadIdx.x == 0) st_relaxed_gpu(&link_queue(s)->head.closing, s.count + 1);
  }
};

// ---- the end of the working block -----------------------------------------------------------------------------------------

// Whose slab it is; FC_N for memory that is in none.
FC_DEVICE u32 link_owner(const LinkState& s, const void* p) {
  u32 owner = FC_N;
#pragma unroll
  for (u32 r = 0; r < FC_N; r++) {
    if (reinterpret_cast<u64>(p) - s.slab[r] < s.slab_bytes) owner = r;
  }
  return owner;
}

FC_DEVICE void link_put(LinkState& s, u32 at, Cell c, u32 where, u32 stamp, u32 kind, u32 peer) {
  const u32 me = threadIdx.x;
  Queue* q = link_queue(s);
  if ((s.fenced[me] & kKnown) ==
      0) {  // by each thread for itself, and not before the kernel's first store: behind its wait
    s.base[me] = ld_relaxed_gpu(&q->head.base);
    s.fenced[me] |= kKnown;
  }
  const u32 index = s.base[me] + at, round = link_round(index);
  if (at >= kRing) {
    while (ld_relaxed_gpu(&q->taken[index % kRing]) != link_round(index - kRing)) spin_pause();
  }
  Entry* e = &q->entry[index % kRing];
  raw::st_relaxed_sys(&e->first, Cell{{c.w[0], c.w[1], c.w[2], round}});
  raw::st_relaxed_sys(&e->second, Cell{{c.w[3], where, stamp, round << 8 | kind << 4 | peer}});
}

FC_LINK_CALLED void link_send(Cell* p, Cell c, u32 kind, u32 peer) {
  LinkState& s = link_state();
  const u32 me = threadIdx.x, stamp = u32(now_ns());
  if (kind != kRelease && (s.fenced[me] & kAsked)) kind |= kFenced;
  const LinkGroup group = link_group();
  const u32 at = link_reserve(&s.count, group);
  if (kind == kRelease) c.w[1] = group.rank;
  link_put(s, at, c, u32((reinterpret_cast<u64>(p) - s.slab[peer]) / 4), stamp, kind, peer);
  s.lag[me] = 0;
}

FC_LINK_CALLED void link_send_line(Cell* p, Cell c, u32 mask, u32 peer) {
  LinkState& s = link_state();
  const u32 me = threadIdx.x, stamp = u32(now_ns());
  if (me % 8 == 0) {
    u32 count, at;
    do {
      count = *static_cast<volatile u32*>(&s.count);
      at = (count + 7) / 8 * 8;
    } while (!link_exchange(&s.count, count, at + 8));
    for (; count < at; count++) link_put(s, count, Cell{{0, 0, 0, 0}}, 0, stamp, kNothing, peer);
    s.line[me / 8] = at;
  }
  group_sync(mask);
  const u32 at = s.line[me / 8] + me % 8;
  group_sync(mask);  // read by all before the next line's
  const u32 kind = group_any(mask, s.fenced[me] & kAsked) ? kLine | kFenced : kLine;
  link_put(s, at, c, u32((reinterpret_cast<u64>(p) - s.slab[peer]) / 4), stamp, kind, peer);
  s.lag[me] = 0;
}

FC_DEVICE void link_hold(u64 until) {
  while (now_ns() < until) spin_pause();
}

// A load from a peer in three steps: the request's way, the load (between the two calls), the answer's way. `asked`: when.
FC_LINK_CALLED u64 link_ask() {
  LinkState& s = link_state();
  const u64 asked = now_ns() - s.lag[threadIdx.x];
  link_hold(asked + s.latency);
  return asked;
}
FC_LINK_CALLED void link_answer(u64 asked) {
  LinkState& s = link_state();
  link_hold(asked + 2 * s.latency);
  s.lag[threadIdx.x] = u32(now_ns() - asked);
}
// Whether a load has to be asked for; a look at the own slab is one that the thread waits for.
FC_LINK_CALLED bool link_asks(const void* p) {
  LinkState& s = link_state();
  const u32 owner = link_owner(s, p);
  if (owner == s.rank) s.lag[threadIdx.x] = 0;
  return owner != s.rank && owner != FC_N;
}
// Whose slab a store goes to that has to be sent; FC_N for one that is made at once.
FC_LINK_CALLED u32 link_sends(const void* p) {
  LinkState& s = link_state();
  const u32 owner = link_owner(s, p);
  return owner == s.rank ? FC_N : owner;
}

// ---- the end of the link --------------------------------------------------------------------------------------------------

// An entry in registers.
struct Held {
  Entry entry;
  u64 due;
  bool acknowledged;  // a release: all before it have arrived, and `due` says what that makes of it
  FC_DEVICE u32 kind() const { return entry.second.w[3] >> 4 & 7u; }
  FC_DEVICE bool fenced() const { return (entry.second.w[3] >> 4 & kFenced) != 0; }
  FC_DEVICE bool is_of(u32 round) const { return entry.second.w[3] >> 8 == round && entry.first.w[3] == round; }
};

// What a link's threads say of themselves, by all lanes of a warp: the lowest entry that was not forwarded, and how many ns
// ago the latest store was (the largest number: none was).
FC_DEVICE u32 link_lowest(const LinkState& s) {
  u32 lowest = 0xffffffffu;
  for (u32 t = link_looker(); t < blockDim.x; t += kLookers) {
    const u32 v = *static_cast<const volatile u32*>(s.low + t);
    lowest = v < lowest ? v : lowest;
  }
  return link_min(lowest);
}
FC_DEVICE u32 link_latest(const LinkState& s, u32 now) {
  u32 latest = 0xffffffffu;
  for (u32 t = link_looker(); t < blockDim.x; t += kLookers) {
    const int since = int(now - *static_cast<const volatile u32*>(s.arrived + t));
    const u32 age = since > 0 ? u32(since) : 0;  // another warp's may be later than this one's look at the clock
    if (*static_cast<const volatile u32*>(s.low + t) != t && age < latest) latest = age;
  }
  return link_min(latest);
}

// The kernel's own store.
FC_DEVICE void link_deliver(const LinkState& s, const Held& h) {
  const Cell c = {{h.entry.first.w[0], h.entry.first.w[1], h.entry.first.w[2], h.entry.second.w[0]}};
  const u64 to = s.slab[h.entry.second.w[3] & 15u] + h.entry.second.w[1] * 4ull;
  if (h.fenced()) raw::fence_sys();
  switch (h.kind()) {
    case kCell:
      raw::st_relaxed_sys(reinterpret_cast<Cell*>(to), c);
      break;
    case kWord:
      raw::st_relaxed_sys(reinterpret_cast<u32*>(to), c.w[0]);
      break;
    case kRelease:
      raw::st_release_sys(reinterpret_cast<u32*>(to), c.w[0]);
      break;
    case kLine:
      link_store_line(reinterpret_cast<Cell*>(to), c);
      break;
  }
}

// A number in [0, most): of a hash (two rounds of multiply and shift), so that a seed replays.
FC_DEVICE u32 link_chance(u32 seed, u32 index, u32 most) {
  u32 x = (seed + blockIdx.x * 0x9e3779b9u) ^ index * 0x85ebca6bu;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  x = (x ^ x >> 13) * 0x297a2d39u;
  x ^= x >> 16;
  return u32(u64(x) * most >> 32);
}

// A block that is a link. Thread t forwards the entries t, t + blockDim, ... of the call, each of its own in that order; those of
// different threads overtake each other, as their times and the jitter have it.
FC_LINK_CALLED void link_forward(const Params& p) {
  launch_wait();  // before it the queue is the grid's before
  LinkState& s = link_state();
  Queue* q = link_queue(s);
  constexpr u32 kAll = 0xffffffffu;
  const u32 me = threadIdx.x, base = ld_relaxed_gpu(&q->head.base);
  Held held[kHeld];
  u32 have = 0, lowest = me;  // how many are held; index of the first of them or, with none, of the next one
  bool eager = false, over = false;
  while (true) {
    // 1. Which of the first ones may go.
    const u64 now = now_ns();
    Held& h = held[0];
    const u32 kind = have > 0 ? h.kind() : u32(kNothing);
    bool go = have > 0 && now >= h.due;
    const bool release = have > 0 && kind == kRelease;
    if (group_any(kAll, release)) {
      const u32 all_below = link_lowest(s);
      link_fence_block();  // the other threads' stores, of which that speaks, before the release
      const u32 age = link_latest(s, u32(now));
      if (release) {
        const bool behind = all_below + h.entry.first.w[1] >= lowest;
        if (behind && !h.acknowledged) {
          if (age != kAll && now - age + 2 * s.latency > h.due) h.due = now - age + 2 * s.latency;
          h.acknowledged = true;
        }
        go = behind && now >= h.due;
      }
    }
    go = link_line_goes(s.low, have > 0 && kind == kLine, go, lowest);
    // Lanes with cells part here and meet at the next vote; those of a line go on together.
    if (go) {
      link_deliver(s, h);
      if (kind != kRelease && kind != kNothing) *static_cast<volatile u32*>(&s.arrived[me]) = u32(now);
      link_fence_block();  // the store before the word that says so
      lowest += blockDim.x;
      *static_cast<volatile u32*>(&s.low[me]) = lowest;
      have--;
#pragma unroll
      for (u32 j = 1; j < kHeld; j++) held[j - 1] = held[j];
    }

    // 2. Look for more, unless something of the warp is due before such a look is over.
    const bool near = have > 0 && held[0].due > now && held[0].due - now < kNear;
    if (!group_any(kAll, near)) {
      const u32 had = have;
#pragma unroll
      for (u32 j = 0; j < kHeld; j++) {  // all at once where there were some before, else for the next one
        if (!over && (j == had || (eager && j > had))) {
          const Entry* e = &q->entry[(base + lowest + j * blockDim.x) % kRing];
          held[j].entry.second = raw::ld_relaxed_sys(&e->second);
          held[j].entry.first = raw::ld_relaxed_sys(&e->first);
        }
      }
      u32 bytes = 0, stamp = 0;
      const u64 seen = now_ns();
#pragma unroll
      for (u32 j = 0; j < kHeld; j++) {
        if (over || have != j || (j != had && !eager)) continue;
        const u32 at = lowest + j * blockDim.x, round = link_round(base + at);
        if (!held[j].is_of(round)) continue;
        st_relaxed_gpu(&q->taken[(base + at) % kRing], round);
        const int since = int(u32(seen) - held[j].entry.second.w[2]);  // below 2 s: nothing lies in a queue for long
        const u32 age = since > 0 ? u32(since) : 0;                    // clocks of two SMs may be a step apart
        const u32 what = held[j].kind();
        held[j].due = seen - age + s.latency +
                      (what == kNothing ? 0u : link_chance(s.seed, what == kLine ? at / 8 : at, s.jitter));
        held[j].acknowledged = false;
        bytes += what == kNothing ? 0u : what == kWord || what == kRelease ? 4u : 16u;
        have++;
        stamp = age;
      }
      eager = have > had;
      if (eager && s.cost != 0) {
        const u64 at = (seen - stamp) << 8, takes = (s.cost * bytes + (1u << 15)) >> 16;
        const u64 through = link_take_tokens(&reinterpret_cast<Queues*>(s.queues)->free, at, takes);
        u64 later = through > at ? (through - at) >> 8 : 0;
        if (later > p.timeout_ns) later = p.timeout_ns;  // the receiver has given up
#pragma unroll
        for (u32 j = 0; j < kHeld; j++) {
          if (j >= had && j < have) held[j].due += later;
        }
      }
      if (have == 0 && !over) {
        const u32 closing = ld_relaxed_gpu(&q->head.closing);
        over = closing != 0 && lowest >= closing - 1;
        if (over) *static_cast<volatile u32*>(&s.low[me]) = 0xffffffffu;
      }
    }
    if (group_all(kAll, over)) break;
    spin_pause();
  }
  raw::block_barrier();
  if (me == 0) {  // for the next grid: behind this one's end
    st_relaxed_gpu(&q->head.base, base + ld_relaxed_gpu(&q->head.closing) - 1);
    st_relaxed_gpu(&q->head.closing, 0u);
  }
}

// ---- the words of primitives.cuh, with the link behind ------------------------------------------------------------------
using raw::block_barrier;
FC_DEVICE void fence_sys() {
  raw::fence_sys();
  link_state().fenced[threadIdx.x] |= kAsked;
}
FC_DEVICE Cell ld_relaxed_sys(const Cell* p) {
  if (!link_asks(p)) return raw::ld_relaxed_sys(p);
  const u64 asked = link_ask();
  const Cell c = raw::ld_relaxed_sys(p);
  link_answer(asked);
  return c;
}
FC_DEVICE u32 ld_relaxed_sys(const u32* p) {
  if (!link_asks(p)) return raw::ld_relaxed_sys(p);
  const u64 asked = link_ask();
  const u32 v = raw::ld_relaxed_sys(p);
  link_answer(asked);
  return v;
}
FC_DEVICE u32 ld_acquire_sys(const u32* p) {
  if (!link_asks(p)) return raw::ld_acquire_sys(p);
  const u64 asked = link_ask();
  const u32 v = raw::ld_acquire_sys(p);
  link_answer(asked);
  return v;
}
FC_DEVICE Cell ld_relaxed_sys_line(const Cell* p, u32 mask) {  // of the own slab: nobody pulls lines
  link_asks(p);
  return raw::ld_relaxed_sys_line(p, mask);
}
FC_DEVICE void st_relaxed_sys(Cell* p, Cell c) {
  const u32 peer = link_sends(p);
  if (peer != FC_N) {
    link_send(p, c, kCell, peer);
  } else {
    raw::st_relaxed_sys(p, c);
  }
}
FC_DEVICE void st_relaxed_sys(u32* p, u32 v) {
  const u32 peer = link_sends(p);
  if (peer != FC_N) {
    link_send(reinterpret_cast<Cell*>(p), Cell{{v, 0, 0, 0}}, kWord, peer);
  } else {
    raw::st_relaxed_sys(p, v);
  }
}
FC_DEVICE void st_release_sys(u32* p, u32 v) {
  const u32 peer = link_sends(p);
  if (peer != FC_N) {
    raw::fence_sys();  // what this thread has seen before the entry
    link_send(reinterpret_cast<Cell*>(p), Cell{{v, 0, 0, 0}}, kRelease, peer);
  } else {
    raw::st_release_sys(p, v);
  }
}
FC_DEVICE void st_relaxed_sys_line(Cell* p, Cell c, u32 mask) {
  const u32 peer = link_sends(p);
  if (peer != FC_N) {
    group_sync(mask);
    link_send_line(p, c, mask, peer);
  } else {
    raw::st_relaxed_sys_line(p, c, mask);
  }
}

}  // namespace fc
