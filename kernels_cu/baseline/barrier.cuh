// Baselines with a barrier among the ranks, the design of vLLM's custom all-reduce. Each rank copies its input to a staging
// buffer in its slab, the ranks meet at a barrier of flags, and each reads what it needs from all staging buffers over the
// link. A second barrier sees to it that no one overwrites what a peer still reads.
//
// Work is split into chunks by message size alone, so that ranks with different grids still meet. A block handles its
// chunks in increasing order, one after the other: the smallest chunk that is not done everywhere has all its blocks
// running, so someone always makes progress.
#pragma once
#include "reduce.cuh"
#include "wait.cuh"
#include "algo/shards.cuh"
#include "baseline/staging.cuh"

namespace fc {
namespace barrier {

constexpr u32 kChunks = 36;          // as many as vLLM starts blocks
constexpr u64 kPartCells = 512;      // cells in a row that belong to one chunk: 512 threads' worth
constexpr u64 kFlagsPerSource = 64;  // flag words of one source: the first barrier's, then the second one's from 64

FC_DEVICE u32 chunks(u64 cells) {
  const u64 parts = (cells + kPartCells - 1) / kPartCells;
  return parts < kChunks ? u32(parts) : kChunks;
}

// Calls f(cell) for the cells of the chunk that this thread handles.
template <class F>
FC_DEVICE void each_cell(u32 chunk, u64 cells, const F& f) {
  const u64 step = chunks(cells) * kPartCells;
  for (u64 part = chunk * kPartCells; part < cells; part += step) {
    for (u64 c = part + threadIdx.x; c < part + kPartCells && c < cells; c += blockDim.x) f(c);
  }
}

// Copies this thread's cells of the chunk to the staging buffer, several in flight at a time.
template <int kElement>
FC_DEVICE void stage(const Params& p, u32 chunk, u64 cells) {
  constexpr u32 kBatch = 4;
  const u64 step = chunks(cells) * kPartCells;
  for (u64 part = chunk * kPartCells; part < cells; part += kBatch * step) {
    for (u64 first = part + threadIdx.x; first < part + kPartCells; first += blockDim.x) {
      Payload v[kBatch];
#pragma unroll
      for (u32 i = 0; i < kBatch; i++) {
        if (first + i * step < cells) {
          v[i] = load_payload<WholeCells, Elements<kElement>>(p, p.in, p.nbytes, staging::span(first + i * step));
        }
      }
#pragma unroll
      for (u32 i = 0; i < kBatch; i++) {
        if (first + i * step < cells) staging::put(p, first + i * step, v[i]);
      }
    }
  }
}

// region[1] has the flags: [copy][source][first or second barrier][chunk], words of 4 bytes that hold the epoch.
FC_DEVICE u32* flag(const Params& p, u32 owner, u32 second, u32 source, u32 chunk, u32 e) {
  const Region& g = p.region[1];
  return reinterpret_cast<u32*>(p.slab[owner] + g.offset + (e & 1u) * g.copy_stride + source * g.slot_stride +
                                second * g.half_stride) +
         chunk;
}

// All ranks' blocks of this chunk meet. Thread r of the block speaks with rank r. With `publish`, what the block stored
// before is visible to whoever leaves: the block barrier puts the block's stores before thread r's release, and a peer's
// acquire, followed by its block barrier, puts its loads after it. What an earlier grid of the caller's stored needs no
// such publishing: that grid is complete, and its stores are performed at system scope (A1).
//
// Returns the poison word, whose load is on its way: it says whether a wait of the block expired, and has to be looked at
// only before the block tells its peers anything more.
FC_DEVICE u32 meet(const Params& p, u32 chunk, u32 second, u32 e, bool publish) {
  block_barrier();
  const u32 r = threadIdx.x;
  if (r < FC_N && r != p.rank) {
    u32* theirs = flag(p, r, second, p.rank, chunk, e);
    if (publish) {
      st_release_sys(theirs, e);
    } else {
      st_relaxed_sys(theirs, e);
    }
    await_flag(p, flag(p, p.rank, second, r, chunk, e), e, r, chunk);
  }
  block_barrier();
  return ld_relaxed_gpu(&control(p)->poison);
}

// What every call begins with. Returns false if an earlier wait expired: the caller leaves at once.
FC_DEVICE bool begin(const Params& p, u32 chunks, u32* e, Ticket* ticket) {
  const EpochWords now = ld_epoch(control(p));
  if (now.poison != 0) return false;
  *e = now.epoch;
  ticket->draw(p);
  scrub(p, now.epoch, [&](u64 at) {
    const Region& g = p.region[1];
    return at >= g.offset && at < g.offset + FC_N * g.slot_stride && (at - g.offset) % g.half_stride < chunks * 4;
  });
  return true;
}

// Copies the whole message to the staging buffers, hands every rank's cell to f(cell, cells of all ranks), and meets again.
//
// The second barrier: relaxed is enough, since nothing is handed over. That a thread's loads are done before it is certain,
// since it has stored their values.
template <int kElement, class F>
FC_DEVICE void pull_whole(const Params& p, const F& f) {
  const u64 cells = staging::cells(p.nbytes);
  const u32 count = chunks(cells);
  u32 e;
  Ticket ticket;
  if (!begin(p, count, &e, &ticket)) return;
  const bool there = staging::holds_input(p);
  for (u32 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
    if (!there) stage<kElement>(p, chunk, cells);
    const u32 expired = meet(p, chunk, 0, e, !there);
    each_cell(chunk, cells, [&](u64 c) {
      Cell got[FC_N];
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) got[r] = ld_relaxed_sys(staging::at(p, r, c));
      f(c, got);
    });
    if (expired != 0 || meet(p, chunk, 1, e, false) != 0) return;
  }
  late_trigger();
  ticket.settle(p, e);
}

}  // namespace barrier

template <class T>
FC_DEVICE void barrier_one_shot(const Params& p) {
  launch_wait();
  barrier::pull_whole<T::kElement>(p, [&](u64 c, const Cell* got) {
    const Payload sum = reduce_in_rank_order<T, 4>([&](u32 r) { return staging::payload(got[r]); });
    store_payload<WholeCells, T>(p, p.out, p.nbytes, staging::span(c), sum);
  });
}

template <class T>
FC_DEVICE void barrier_all_gather(const Params& p) {
  launch_wait();
  barrier::pull_whole<T::kElement>(p, [&](u64 c, const Cell* got) {
#pragma unroll
    for (u32 r = 0; r < FC_N; r++) {
      store_payload<WholeCells, T>(p, p.out + r * p.stride, p.nbytes, staging::span(c), staging::payload(got[r]));
    }
  });
}

// Reduce-scatter by pull, then all-gather by pull. A chunk is the same cells of every rank's shard. The sums go to a
// buffer of their own behind the staged message.
//
// Two barriers suffice, the second one between the two phases. When this grid is over, all peers have passed the second
// barrier in all chunks and read no staged message any more: the next call may stage. They may still read my sums; the
// next ones are written after the first barrier of a call that they too have begun, hence after their grid of this one.
template <class T>
FC_DEVICE void barrier_two_shot(const Params& p) {
  launch_wait();
  const Shards shards(p);
  const u64 cells = staging::cells(p.part), own_cells = staging::cells(shards.bytes(p.rank));
  const u32 count = barrier::chunks(cells);
  u32 e;
  Ticket ticket;
  if (!barrier::begin(p, count, &e, &ticket)) return;
  const bool there = staging::holds_input(p);
  const u64 shard_cells = p.stride / 16;
  for (u32 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
    if (!there) {
      barrier::each_cell(chunk, cells, [&](u64 c) {
        Payload v[FC_N];
#pragma unroll
        for (u32 r = 0; r < FC_N; r++) {
          if (c * 16 < shards.bytes(r)) {
            v[r] = load_payload<WholeCells, T>(p, p.in + r * p.stride, shards.bytes(r), staging::span(c));
          }
        }
#pragma unroll
        for (u32 r = 0; r < FC_N; r++) {
          if (c * 16 < shards.bytes(r)) staging::put(p, r * shard_cells + c, v[r]);
        }
      });
    }
    u32 expired = barrier::meet(p, chunk, 0, e, !there);
    barrier::each_cell(chunk, cells, [&](u64 c) {
      if (c >= own_cells) return;
      Cell got[FC_N];
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) got[r] = ld_relaxed_sys(staging::at(p, r, p.rank * shard_cells + c));
      const Payload sum = reduce_in_rank_order<T, 4>([&](u32 r) { return staging::payload(got[r]); });
      st_relaxed_sys(staging::sum_at(p, p.rank, c), staging::cell(sum));
      store_payload<WholeCells, T>(p, p.out + p.rank * p.stride, shards.bytes(p.rank), staging::span(c), sum);
    });
    if (expired != 0) return;
    expired = barrier::meet(p, chunk, 1, e, true);
    barrier::each_cell(chunk, cells, [&](u64 c) {
      Cell got[FC_N];
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (r != p.rank && c * 16 < shards.bytes(r)) got[r] = ld_relaxed_sys(staging::sum_at(p, r, c));
      }
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (r != p.rank && c * 16 < shards.bytes(r)) {
          store_payload<WholeCells, T>(p, p.out + r * p.stride, shards.bytes(r), staging::span(c),
                                       staging::payload(got[r]));
        }
      }
    });
    if (expired != 0) return;
  }
  late_trigger();
  ticket.settle(p, e);
}

}  // namespace fc
