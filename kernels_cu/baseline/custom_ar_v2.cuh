// Baseline: SGLang's second custom all-reduce ("custom AR v2"), rebuilt from a description: a one-shot push whose evidence is
// "no element is +0.0", a one-shot pull and a two-shot pull between barriers. docs/baselines.md says what differs and in
// whose favour.
//
// All forms count by the block: block b has a counter of its own in this rank's memory, so that no block waits for another
// one to learn which call this is. The price is that the grid of a form must never change, and that messages are whole
// 16-byte cells, aligned. The host refuses anything else.
#pragma once
#include "baseline/staging.cuh"
#include "baseline/zeros.cuh"

namespace fc {
namespace v2 {

constexpr u32 kMaxBlocks = 512;
constexpr u64 kWordsPerBlock = 8;  // one semaphore for each source, in one 32-byte sector

// region[1]: first a counter for each block, from half_stride on the blocks' semaphores.
FC_DEVICE u32* counter(const Params& p) {
  return reinterpret_cast<u32*>(p.slab[p.rank] + p.region[1].offset) + blockIdx.x;
}
FC_DEVICE u32* semaphore(const Params& p, u32 owner, u32 source) {
  return reinterpret_cast<u32*>(p.slab[owner] + p.region[1].offset + p.region[1].half_stride) +
         blockIdx.x * kWordsPerBlock + source;
}

// ---- push -----------------------------------------------------------------------------------------------------------

// Pushes the input's cells to all ranks, takes theirs and hands them to f(cell, cells of all ranks).
//
// Two copies of the slots, in turn. The consumer sets back what it took, in the same call. A peer pushes into that copy
// again two calls later; by then its grid of the call in between is over, for which it took cells that left me after my
// grid of this call, stores included, was complete (I3, A1). Every call has at least one cell from every rank.
//
// Deadlock freedom: a thread pushes all it owns before its first poll, and the grid is resident.
template <class T, class F>
FC_DEVICE void exchange(const Params& p, const F& f) {
  const u32 cells = u32(p.nbytes / 16), stride = gridDim.x * blockDim.x;
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const Cell* in = reinterpret_cast<const Cell*>(p.in);
  Cell next = {{0, 0, 0, 0}};
  if (first < cells) next = ld_plain(in + first);  // asked for together with the words below
  const u32 turn = ld_relaxed_gpu(counter(p));
  const EpochWords now = ld_epoch(control(p));
  if (now.poison != 0) return;
  const u32 copy = turn & 1u;
  for (u32 c = first; c < cells;) {
    const Cell v = next;
    const u32 cell = c;
    c += stride;
    if (c < cells) next = ld_plain(in + c);
    zeros::push<T>(p, copy, cell, v);
  }
  for (u32 c = first; c < cells; c += stride) {
    Cell got[FC_N];
    if (!zeros::take<T>(p, now.epoch, copy, c, got)) return;
    if (c + stride >= cells) late_trigger();
    f(c, got);
    zeros::clear(p, copy, c);
  }
  block_barrier();  // all threads of the block have read the counter
  if (threadIdx.x == 0) st_relaxed_gpu(counter(p), turn + 1);
}

// ---- barrier of the pull forms --------------------------------------------------------------------------------------

// Block b of all ranks meets: thread r tells rank r the number of this barrier, and waits until it has been told it. A peer
// may be one barrier further when I look, hence the comparison. It cannot be two: it would have passed one that I have not
// come to.
//
// acquire: what the peers' blocks stored before their `publish` comes before what this block loads from here on.
//
// Returns the poison word, whose load is on its way: it says whether a wait of the block expired, and has to be looked at
// only before the block tells its peers anything more.
template <bool kPublish, bool kAcquire>
FC_DEVICE u32 meet(const Params& p, u32 e, u32 number) {
  const u32 r = threadIdx.x;
  if (r < FC_N && r != p.rank) {
    u32* theirs = semaphore(p, r, p.rank);
    if (kPublish) {
      st_release_sys(theirs, number);
    } else {
      st_relaxed_sys(theirs, number);
    }
    const u32* mine = semaphore(p, p.rank, r);
    Wait wait;
    while (true) {
      const u32 seen = kAcquire ? ld_acquire_sys(mine) : ld_relaxed_sys(mine);
      if (int(seen - number) >= 0) break;
      if (!wait.again(p)) {
        report_expired(p, e, r, blockIdx.x, Cell{{seen, number, 0, 0}});
        break;
      }
    }
  }
  block_barrier();
  return ld_relaxed_gpu(&control(p)->poison);
}

// The cells of this block: as many whole warps' worth in a row as make the grid cover all of them. Which they are does not
// depend on the number of threads, so ranks need to agree on the number of blocks only.
struct Range {
  u32 first, end;
  FC_DEVICE explicit Range(u32 cells) {
    const u32 each = (cells + gridDim.x - 1) / gridDim.x, size = (each + 31) / 32 * 32;
    first = blockIdx.x * size;
    end = first + size < cells ? first + size : cells;
  }
  FC_DEVICE bool empty() const { return first >= end; }
};

// A call of a pull form: its barriers are number + 1 and number + 2.
struct Visit {
  u32 number, e;
  bool there;  // the input lies in the staging buffer
  // Returns false if an earlier wait expired.
  FC_DEVICE bool begin(const Params& p) {
    number = ld_relaxed_gpu(counter(p));
    const EpochWords now = ld_epoch(control(p));
    e = now.epoch;
    there = staging::holds_input(p);
    return now.poison == 0;
  }
  // Opens the staging buffers. Where this grid filled it, its stores are published; where the caller did, a grid before
  // this one stored it and is complete, so its stores are performed at system scope (A1) before the store of this barrier.
  FC_DEVICE u32 open(const Params& p) const {
    if (there) return meet<false, true>(p, e, number + 1);
    block_barrier();
    return meet<true, true>(p, e, number + 1);
  }
  // All threads that need the counter are in the first warp of the block and have passed its barriers.
  FC_DEVICE void end(const Params& p) const {
    if (threadIdx.x == 0) st_relaxed_gpu(counter(p), number + 2);
  }
};

}  // namespace v2

template <class T>
FC_DEVICE void custom_ar_v2_push(const Params& p) {
  launch_wait();
  v2::exchange<T>(p, [&](u32 c, const Cell* got) {
    const Payload sum = reduce_in_rank_order<T, 4>([&](u32 r) { return staging::payload(got[r]); });
    st_plain(reinterpret_cast<Cell*>(p.out) + c, staging::cell(sum));
  });
}

// The same push without the sum.
template <class T>
FC_DEVICE void sentinel_all_gather(const Params& p) {
  launch_wait();
  v2::exchange<T>(p, [&](u32 c, const Cell* got) {
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) st_plain(reinterpret_cast<Cell*>(p.out + r * p.stride) + c, got[r]);
  });
}

// Every rank reads all inputs. Nobody's input changes before all have read it: the closing barrier hands nothing over, so it
// is relaxed. That a thread's loads are done before it is certain, since it has stored the sum of their values.
template <class T>
FC_DEVICE void custom_ar_v2_pull_one_shot(const Params& p) {
  launch_wait();
  const v2::Range range(u32(p.nbytes / 16));
  if (range.empty()) return;
  v2::Visit visit;
  if (!visit.begin(p)) return;
  if (!visit.there) {
    const Cell* in = reinterpret_cast<const Cell*>(p.in);
    constexpr u32 kBatch = 4;  // loads that a thread has in flight
    for (u32 first = range.first + threadIdx.x; first < range.end; first += kBatch * blockDim.x) {
      Cell v[kBatch];
#pragma unroll
      for (u32 i = 0; i < kBatch; i++) {
        if (first + i * blockDim.x < range.end) v[i] = ld_plain(in + first + i * blockDim.x);
      }
#pragma unroll
      for (u32 i = 0; i < kBatch; i++) {
        if (first + i * blockDim.x < range.end) st_relaxed_sys(staging::at(p, p.rank, first + i * blockDim.x), v[i]);
      }
    }
  }
  const u32 expired = visit.open(p);
  for (u32 c = range.first + threadIdx.x; c < range.end; c += blockDim.x) {
    Cell got[FC_N];
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) got[r] = ld_relaxed_sys(staging::at(p, r, c));
    const Payload sum = reduce_in_rank_order<T, 4>([&](u32 r) { return staging::payload(got[r]); });
    st_plain(reinterpret_cast<Cell*>(p.out) + c, staging::cell(sum));
  }
  if (expired != 0) return;
  block_barrier();
  v2::meet<false, false>(p, visit.e, visit.number + 2);
  late_trigger();
  visit.end(p);
}

// Every rank reads its shard of all inputs and stores the sum into every rank's staging buffer, where the shard was. A cell
// of shard r is read and then overwritten by one thread of rank r, and by nobody else. Only if the result is wanted
// elsewhere is it copied there.
//
// When this grid is over, all peers' blocks have passed the closing barrier: they read nothing of this buffer any more, and
// what they stored here is here.
template <class T>
FC_DEVICE void custom_ar_v2_pull_two_shot(const Params& p) {
  launch_wait();
  const u32 cells = u32(p.nbytes / 16), shard = u32(p.part / 16), own = p.rank * shard;  // shards end with the message
  const v2::Range range(shard);
  if (range.empty()) return;
  v2::Visit visit;
  if (!visit.begin(p)) return;
  const bool stays = p.out == staging::base(p, p.rank);
  if (!visit.there) {
    const Cell* in = reinterpret_cast<const Cell*>(p.in);
    for (u32 c = range.first + threadIdx.x; c < range.end; c += blockDim.x) {
      Cell v[FC_N];
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (r * shard + c < cells) v[r] = ld_plain(in + r * shard + c);
      }
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (r * shard + c < cells) st_relaxed_sys(staging::at(p, p.rank, r * shard + c), v[r]);
      }
    }
  }
  const u32 expired = visit.open(p);
  for (u32 c = range.first + threadIdx.x; c < range.end && own + c < cells; c += blockDim.x) {
    Cell got[FC_N];
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) got[r] = ld_relaxed_sys(staging::at(p, r, own + c));
    const Cell sum = staging::cell(reduce_in_rank_order<T, 4>([&](u32 r) { return staging::payload(got[r]); }));
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      if (r != p.rank || stays) st_relaxed_sys(staging::at(p, r, own + c), sum);
    }
    if (!stays) st_plain(reinterpret_cast<Cell*>(p.out) + own + c, sum);
  }
  if (expired != 0) return;
  block_barrier();
  v2::meet<true, true>(p, visit.e, visit.number + 2);
  late_trigger();
  visit.end(p);
  if (stays) return;
  for (u32 c = range.first + threadIdx.x; c < range.end; c += blockDim.x) {
    Cell v[FC_N];
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      if (r != p.rank && r * shard + c < cells) v[r] = ld_relaxed_sys(staging::at(p, p.rank, r * shard + c));
    }
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      if (r != p.rank && r * shard + c < cells) st_plain(reinterpret_cast<Cell*>(p.out) + r * shard + c, v[r]);
    }
  }
}

}  // namespace fc
