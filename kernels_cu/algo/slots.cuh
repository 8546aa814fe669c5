// Slots in use by one call: which copy (Turn), which cells a thread handles (Tiles), and the two ends of the wire (Slots).
#pragma once
#include "payload.cuh"
#include "wait.cuh"

namespace fc {

template <class Wire>
FC_DEVICE u64 cells_of(u64 nbytes) {
  return (nbytes + Wire::kGroupBytes - 1) / Wire::kGroupBytes * Wire::kGroupCells;
}

// Whether a call of `cells` cells in the first halves of the slots and `cells2` in the second receives the word at `at`.
template <class Wire>
FC_DEVICE bool receives(const Region& g, u64 at, u64 cells, u64 cells2) {
  if (at < g.offset || at >= g.offset + FC_N * g.slot_stride) return false;
  const u64 inside = (at - g.offset) % g.slot_stride;
  return (cells != 0 && Wire::writes(inside, cells)) ||
         (cells2 != 0 && inside >= g.half_stride && Wire::writes(inside - g.half_stride, cells2));
}

// The call's number and its copy of the slots. All of it is read once, at the start, from rank-local words; the last block
// to have read them moves them on, for the next grid.
template <class Wire>
class Turn {
 public:
  static constexpr bool kLamport = Wire::kState >= 0;

  // Returns false if an earlier wait expired: the caller leaves at once.
  FC_DEVICE bool begin(const Params& p) {
    const EpochWords now = ld_epoch(control(p));
    e_ = now.epoch;
    copy_ = e_ & 1u;
    if (kLamport) {
      const Cell* state = reinterpret_cast<const Cell*>(&control(p)->lamport[Wire::kState]);
      const Cell a = ld_relaxed_gpu(state), b = ld_relaxed_gpu(state + 1);  // {copy, cells[3]}, {cells2[3], -}
      copy_ = a.w[0];
      before_ = copy_ == 0 ? 2 : copy_ - 1;
      before_cells_ = before_ == 0 ? a.w[1] : before_ == 1 ? a.w[2] : a.w[3];
      before_cells2_ = before_ == 0 ? b.w[0] : before_ == 1 ? b.w[1] : b.w[2];
    }
    return now.poison == 0;
  }

  template <class Other>
  FC_DEVICE void same_as(const Turn<Other>& other) {
    e_ = other.epoch();
    copy_ = other.copy();
  }
  FC_DEVICE u32 epoch() const { return e_; }
  FC_DEVICE u32 copy() const { return copy_; }

  // Lamport: moves the copy on and records how far this call's slots are written, in their first and second halves. To be
  // called by the one thread that advanced the epoch.
  FC_DEVICE void record(const Params& p, u64 cells, u64 cells2) const {
    if (!kLamport) return;
    LamportState* s = &control(p)->lamport[Wire::kState];
    st_relaxed_gpu(&s->cells[copy_], u32(cells));
    st_relaxed_gpu(&s->cells2[copy_], u32(cells2));
    st_relaxed_gpu(&s->copy, copy_ == 2 ? 0u : copy_ + 1);
  }

  // Lamport: sets back what the call before received. Its extents come from device memory, not from this call: it may have
  // been larger.
  FC_DEVICE void rearm(const Params& p, const Region& g) const {
    if (!kLamport) return;
    const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x, stride = u64(gridDim.x) * blockDim.x;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u64 cells = half ? before_cells2_ : before_cells_;
      const u64 base = p.slab[p.rank] + g.offset + before_ * g.copy_stride + half * g.half_stride;
      for (u64 c = first; c < cells; c += stride) {
#pragma unroll
        for (u32 r = 0; r < FC_N; r++) {
          if (r != p.rank) Wire::rearm(reinterpret_cast<Cell*>(base + r * g.slot_stride) + c);
        }
      }
    }
  }

 private:
  u32 e_, copy_, before_, before_cells_, before_cells2_;
};

// The cells of a slot that a thread handles, in increasing order: either side by side with all threads of the grid
// (size 0), or in tiles of `size` cells, each of which belongs to one block.
class Tiles {
 public:
  FC_DEVICE Tiles(u64 cells, u64 size) : cells_(cells), size_(size), tile_(start()) {
    tiles_ = size == 0 ? 1 : u32((cells + size - 1) / size);
  }
  FC_DEVICE void restart() { tile_ = start(); }
  FC_DEVICE bool more() const { return tile_ < tiles_; }
  FC_DEVICE void next() { tile_ += size_ == 0 ? 1 : u32(gridDim.x); }
  FC_DEVICE void go_to(u32 tile) { tile_ = tile; }
  FC_DEVICE u32 index() const { return tile_; }
  FC_DEVICE u64 base() const { return tile_ * size_; }  // the tile's first cell; 0 where there is but one
  FC_DEVICE u64 first() const {
    return size_ == 0 ? u64(blockIdx.x) * blockDim.x + threadIdx.x : tile_ * size_ + threadIdx.x;
  }
  FC_DEVICE u64 stride() const { return size_ == 0 ? u64(gridDim.x) * blockDim.x : u64(blockDim.x); }
  FC_DEVICE u64 end() const {
    const u64 e = (tile_ + 1) * size_;
    return size_ == 0 || e > cells_ ? cells_ : e;
  }
  // Whether this is the first cell that the thread handles at all.
  FC_DEVICE bool is_first(u64 cell) const { return tile_ == start() && cell == first(); }

 private:
  FC_DEVICE u32 start() const { return size_ == 0 ? 0 : u32(blockIdx.x); }
  u64 cells_, size_;
  u32 tile_, tiles_;
};

// Cells of a tile where evidence is by chunk; 0 where it is in the cells.
template <class Wire>
FC_DEVICE u64 chunk_cells(u64 cells) {
  if constexpr (Wire::kChunked) {
    return Wire::chunk_cells(cells);
  } else {
    return 0;
  }
}

FC_DEVICE u32 all_peers(const Params& p) { return ((1u << FC_N) - 1) & ~(1u << p.rank); }

// The two ends of one phase's wire: where I push, where I look. `half` is the part of each slot that the phase uses.
template <class Wire>
class Slots {
 public:
  FC_DEVICE Slots(const Params& p, const Region& g, u32 half, const Turn<Wire>& turn)
      : p_(p), slot_stride_(g.slot_stride), e_(turn.epoch()) {
    at_ = g.offset + turn.copy() * g.copy_stride + half * g.half_stride;
  }

  // Writes one cell to every peer, beginning behind my own rank, so that the ranks do not all push to the same one first.
  FC_DEVICE void push(u64 cell, Payload v) const {
#pragma unroll
    for (u32 j = 1; j < FC_N; j++) push_to(behind(j), cell, v);
  }
  FC_DEVICE void push_to(u32 peer, u64 cell, Payload v) const { Wire::put(cell_of(peer, p_.rank, cell), v, e_); }

  // Chunked wires: says to these peers that this block's chunk is complete, resp. waits until theirs are here. Thread r
  // speaks with rank r.
  FC_DEVICE void publish(u32 chunk, u32 peers) const {
    if (!Wire::kChunked) return;
    block_barrier();  // all threads' stores before the release
    const u32 r = threadIdx.x;
    if (r < FC_N && (peers >> r & 1u)) st_release_sys(flag_of(r, p_.rank, chunk), e_);
  }
  FC_DEVICE bool await(u32 chunk, u32 peers) const {
    if (!Wire::kChunked) return true;
    const u32 r = threadIdx.x;
    if (r < FC_N && (peers >> r & 1u)) await_flag(p_, flag_of(p_.rank, r, chunk), e_, r, chunk);
    block_barrier();  // the acquire before all threads' loads
    return ld_relaxed_gpu(&control(p_)->poison) == 0;
  }

  // Takes one cell of each of these peers into got[peer] and leaves the others alone. All are looked at together, then
  // only those that were not there. Returns false if the wait expired. `peers` is alike for lanes that look together.
  FC_DEVICE bool take(u64 cell, u32 peers, Cell* got) const {
    u32 missing = peers;
    Wait wait;
    while (true) {
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (missing >> r & 1u) got[r] = Wire::look(cell_of(p_.rank, r, cell));
      }
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if ((missing >> r & 1u) && Wire::ready(got[r], e_)) missing &= ~(1u << r);
      }
      if (missing == 0) break;
      if (!Wire::all_agree(wait.again(p_))) {
        report_missing(missing, cell, got);
        return false;
      }
    }
    if (Wire::kSecondLook) {
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (peers >> r & 1u) got[r] = Wire::look(cell_of(p_.rank, r, cell));
      }
    }
    return true;
  }

  // The j-th rank behind mine.
  FC_DEVICE u32 behind(u32 j) const { return p_.rank + j < FC_N ? p_.rank + j : p_.rank + j - FC_N; }

 private:
  FC_DEVICE u64 slot(u32 owner, u32 source) const { return p_.slab[owner] + at_ + source * slot_stride_; }
  FC_DEVICE Cell* cell_of(u32 owner, u32 source, u64 cell) const {
    return reinterpret_cast<Cell*>(slot(owner, source) + Wire::kHeaderBytes) + cell;
  }
  FC_DEVICE u32* flag_of(u32 owner, u32 source, u32 chunk) const {
    return reinterpret_cast<u32*>(slot(owner, source)) + chunk;
  }
  FC_DEVICE void report_missing(u32 missing, u64 cell, const Cell* got) const {
    u32 late = 0;
    Cell last = {{0, 0, 0, 0}};
#pragma unroll
    for (u32 r = FC_N; r-- > 0;) {
      if (missing >> r & 1u) {
        late = r;
        last = got[r];
      }
    }
    report_expired(p_, e_, late, cell, last);
  }

  const Params& p_;
  const u64 slot_stride_;
  u64 at_;
  const u32 e_;
};

}  // namespace fc
