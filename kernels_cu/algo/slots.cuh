// Slots in use by one call: which copy (Turn), which cells a thread handles (Tiles), and the two ends of the wire (Slots).
#pragma once
#include "ablate/stages.cuh"
#include "payload.cuh"
#include "wait.cuh"

namespace fc {

namespace ablate {
struct Arrival;
}

template <class Wire>
FC_DEVICE u32 cells_of(u64 nbytes) {  // a slot is smaller than 2^32 cells
  return u32((nbytes + Wire::kGroupBytes - 1) / Wire::kGroupBytes) * Wire::kGroupCells;
}

// Whether a call of `cells` cells in the first halves of the slots and `cells2` in the second receives the word at `at`.
template <class Wire>
FC_DEVICE bool receives(const Region& g, u64 at, u32 cells, u32 cells2) {
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

  FC_DEVICE explicit Turn(const Params& p) {
    if constexpr (kLamport) {
      const Cell now = ld_relaxed_gpu(reinterpret_cast<const Cell*>(control(p)));
      e_ = now.w[0];
      poisoned_ = now.w[1];
      const u32 packed = now.w[2 + Wire::kState];
      copy_ = packed & 3u;
      before_halves_ = packed >> 2 & 3u;
      before_cells_ = packed >> 4;
    } else {
      const EpochWords now = ld_epoch(control(p));
      e_ = now.epoch;
      poisoned_ = now.poison;
      copy_ = e_ & 1u;
    }
  }

  // Whether an earlier wait expired: then nothing may be pushed.
  FC_DEVICE bool poisoned() const { return poisoned_ != 0; }
  FC_DEVICE u32 epoch() const { return e_; }
  FC_DEVICE u32 copy() const { return copy_; }

  // Lamport: moves the copy on and records what this call has written of its own one: which halves of the slots (bit 0, bit
  // 1), and how many cells of them at most. To be called by the one thread that advanced the epoch.
  FC_DEVICE void record(const Params& p, u32 halves, u32 cells) const {
    if constexpr (kLamport) {
      const u32 next =
          copy_ == 2 ? 0u : copy_ + 1;  // stored as such: derived from a counter it would jump where that wraps
      st_relaxed_gpu(&control(p)->lamport[Wire::kState], next | halves << 2 | cells << 4);
    }
  }

  // Lamport: sets back what the call before received. How much that is comes from device memory, not from this call: it may
  // have been larger. A cell of these halves that was not written is set back all the same: nobody writes it before then.
  template <bool kElsewhere = false>  // behind the pushes, where the wait hides it; or where an ablation has it
  FC_DEVICE void rearm(const Params& p, const Region& g) const {
    if constexpr (kLamport && kElsewhere == ablate::kRearmElsewhere && !ablate::without(ablate::kRearm)) {
      const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
      const u32 before = copy_ == 0 ? 2 : copy_ - 1;
      const u32 between = pinned(u32(g.slot_stride));
#pragma unroll 1
      for (u32 half = 0; half < 2; half++) {
        if ((before_halves_ >> half & 1u) == 0) continue;
        const u64 base = p.slab[p.rank] + g.offset + before * g.copy_stride + half * g.half_stride;
#pragma unroll 1
        for (u32 c = first; c < before_cells_; c += stride) {
          const u64 at = pinned(base + c * 16ull);
#pragma unroll
          for (u32 r = 0; r < FC_N; r++) {
            if (r != p.rank || ablate::kOwnInMemory) Wire::rearm(reinterpret_cast<Cell*>(at + u64(r) * between));
          }
        }
      }
    }
  }

 private:
  u32 e_, poisoned_, copy_, before_halves_, before_cells_;
};

// The turns of a call with two phases: one and the same where both have one encoding.
template <class Wire1, class Wire2>
class Turns {
 public:
  FC_DEVICE explicit Turns(const Params& p) : first_(p), second_(p) {}
  FC_DEVICE const Turn<Wire1>& first() const { return first_; }
  FC_DEVICE const Turn<Wire2>& second() const { return second_; }

 private:
  Turn<Wire1> first_;
  Turn<Wire2> second_;
};
template <class Wire>
class Turns<Wire, Wire> {
 public:
  FC_DEVICE explicit Turns(const Params& p) : turn_(p) {}
  FC_DEVICE const Turn<Wire>& first() const { return turn_; }
  FC_DEVICE const Turn<Wire>& second() const { return turn_; }

 private:
  Turn<Wire> turn_;
};

// One cell of one peer's part of a message; ranks are counted from mine on, which is 0.
struct Item {
  u32 behind, cell;
};

// The cells of a slot that a thread handles, in increasing order: either side by side with all threads of the grid
// (size 0), or in tiles of `size` cells, each of which belongs to one block.
class Tiles {
 public:
  FC_DEVICE Tiles(u32 cells, u32 size) : cells_(cells), size_(size), tile_(start()) {
    tiles_ = size == 0 ? 1 : (cells + size - 1) / size;
  }
  FC_DEVICE void restart() { tile_ = start(); }
  FC_DEVICE void go_to(u32 tile) { tile_ = tile; }
  FC_DEVICE bool more() const { return tile_ < tiles_; }
  FC_DEVICE void next() { tile_ += size_ == 0 ? 1 : gridDim.x; }
  FC_DEVICE u32 index() const { return tile_; }
  FC_DEVICE u32 base() const { return tile_ * size_; }  // the tile's first cell; 0 where there is but one
  FC_DEVICE u32 first() const { return (size_ == 0 ? blockIdx.x * blockDim.x : tile_ * size_) + threadIdx.x; }
  FC_DEVICE u32 stride() const { return size_ == 0 ? gridDim.x * blockDim.x : blockDim.x; }
  FC_DEVICE u32 end() const {
    const u32 e = (tile_ + 1) * size_;
    return size_ == 0 || e > cells_ ? cells_ : e;
  }

  // For algorithms that split a message: the tile's cells of all peers' parts, for (v = first_item(); v < items();
  // v += stride()). Warps take the peers in turn, and a warp's cells lie side by side. An item may lie behind the end.
  FC_DEVICE u32 first_item() const { return first() - base(); }
  FC_DEVICE u32 items() const { return end() <= base() ? 0 : (end() - base() + 31) / 32 * 32 * (FC_N - 1); }
  FC_DEVICE Item item(u32 v) const { return Item{v / 32 % (FC_N - 1) + 1, base() + v / 32 / (FC_N - 1) * 32 + v % 32}; }

  // The tile's cells of my own part, whose sums everyone waits for, spread over all blocks a line at a time: for (c =
  // first_own(); c < end(); c += stride()).
  template <class Wire>
  FC_DEVICE u32 first_own() const {
    constexpr u32 kSide = Wire::kGroupCells > kLineCells ? Wire::kGroupCells : kLineCells;
    return size_ == 0 ? (threadIdx.x / kSide * gridDim.x + blockIdx.x) * kSide + threadIdx.x % kSide : first();
  }

  // Whether this is the first cell that the thread handles at all.
  FC_DEVICE bool is_first(u32 cell) const { return tile_ == start() && cell == first(); }

 private:
  FC_DEVICE u32 start() const { return size_ == 0 ? 0 : blockIdx.x; }
  u32 cells_, size_, tile_, tiles_;
};

// Cells of a tile where evidence is by chunk; 0 where it is in the cells.
template <class Wire>
FC_DEVICE u32 chunk_cells(u32 cells) {
  if constexpr (Wire::kChunked) {
    return Wire::chunk_cells(cells);
  } else {
    return 0;
  }
}

FC_DEVICE u32 all_peers(const Params& p) { return ((1u << FC_N) - 1) & (ablate::kOwnInMemory ? ~0u : ~(1u << p.rank)); }

// The two ends of one phase's wire: where I push, where I look. `half` is the part of each slot that the phase uses.
//
// kAddressesFirst: the peers' addresses are computed while the epoch is loaded and kept in registers, 2 (n - 1) of them.
// For a phase that has been waiting for others before it pushes, they would only be in the way.
template <class Wire, bool kAddressesFirst>
class Slots {
 public:
  // Addresses first, since they need nothing from memory; begin() follows when the call's number is known.
  FC_DEVICE Slots(const Params& p, const Region& g, u32 half) : p_(p), g_(g) {
    const u64 at = g.offset + half * g.half_stride;
    mine_ = pinned(p.slab[p.rank] + at);
    in_theirs_ = pinned(at + p.rank * g.slot_stride);
    between_ = kAddressesFirst ? pinned(u32(g.slot_stride)) : u32(g.slot_stride);
#pragma unroll
    for (u32 j = 1; kAddressesFirst && j < FC_N; j++) theirs_[j] = pinned(to(behind(j)));
  }
  FC_DEVICE void begin(const Turn<Wire>& turn) {
    e_ = turn.epoch();
    shift_ = pinned(turn.copy() * g_.copy_stride);
    if constexpr (ablate::without(ablate::kExit)) ablate::keep(p_, e_ ^ u32(shift_));
  }

  // Writes one cell to every peer, beginning behind my own rank, so that the ranks do not all push to the same one first.
  FC_DEVICE void push(u32 cell, Payload v) const {
    if constexpr (ablate::without(ablate::kStores)) return ablate::keep(p_, v);
    const u64 at = pinned(inside(cell));
    if constexpr (ablate::kOwnInMemory) Wire::put(reinterpret_cast<Cell*>(to(p_.rank) + at), v, e_);
#pragma unroll
    for (u32 j = 1; j < FC_N; j++) {
      Wire::put(reinterpret_cast<Cell*>((kAddressesFirst ? theirs_[j] : to(behind(j))) + at), v, e_);
    }
  }
  // Writes one cell to one peer.
  FC_DEVICE void push_to(u32 peer, u32 cell, Payload v) const {
    if constexpr (ablate::without(ablate::kStores)) return ablate::keep(p_, v);
    Wire::put(reinterpret_cast<Cell*>(to(peer) + inside(cell)), v, e_);
  }

  // Chunked wires: says to these peers that this block's chunk is complete, resp. waits until theirs are here. Thread r
  // speaks with rank r.
  FC_DEVICE void publish(u32 chunk, u32 peers) const {
    if (!Wire::kChunked || ablate::without(ablate::kStores)) return;
    block_barrier();  // all threads' stores before the release
    const u32 r = threadIdx.x;
    if (r < FC_N && (peers >> r & 1u)) st_release_sys(flag_of(to(r), chunk), e_);
  }
  FC_DEVICE bool await(u32 chunk, u32 peers) const {
    if (!Wire::kChunked || ablate::without(ablate::kPoll)) return true;
    const u32 r = threadIdx.x;
    if (r < FC_N && (peers >> r & 1u)) await_flag(p_, flag_of(from(r), chunk), e_, r, chunk);
    block_barrier();  // the acquire before all threads' loads
    return ld_relaxed_gpu(&control(p_)->poison) == 0;
  }

  // Takes one cell of each of these peers into got[peer] and leaves the others alone. All are looked at together, then
  // only those that were not there. Returns false if the wait expired. `peers` is alike for lanes that look together.
  template <bool kTogether = !ablate::kPollOne>
  FC_DEVICE bool take(u32 cell, u32 peers, Cell* got) const {
    if constexpr (ablate::without(ablate::kPoll)) return ablate::nothing_came<FC_N>(p_, got);
    if constexpr (!kTogether)
      return ablate::one_by_one<FC_N>([&](u32 r) { return take<true>(cell, peers & 1u << r, got); });
    const u64 at = pinned(mine_ + inside(cell));
    u32 missing = peers;
    Wait wait;
    while (true) {
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (missing >> r & 1u) got[r] = Wire::look(reinterpret_cast<const Cell*>(at + u64(r) * between_));
      }
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if ((missing >> r & 1u) && Wire::ready(got[r], e_)) missing &= ~(1u << r);
      }
      if (Wire::kChunked || missing == 0) break;  // chunks: await() has seen the flag
      if (!Wire::all_agree(wait.again(p_))) {
        report_missing(p_, e_, missing, cell, got);
        return false;
      }
    }
    if (Wire::kSecondLook) {
#pragma unroll
      for (u32 r = 0; r < FC_N; r++) {
        if (peers >> r & 1u) got[r] = Wire::look(reinterpret_cast<const Cell*>(at + u64(r) * between_));
      }
    }
    return true;
  }

  // The same for one cell of one peer.
  FC_DEVICE bool take_from(u32 peer, u32 cell, Cell* got) const {
    if constexpr (ablate::without(ablate::kPoll)) return ablate::nothing_came<1>(p_, got);
    const Cell* at = reinterpret_cast<const Cell*>(pinned(from(peer) + inside(cell)));
    Wait wait;
    while (true) {
      *got = Wire::look(at);
      if (Wire::kChunked || Wire::ready(*got, e_)) break;
      if (!Wire::all_agree(wait.again(p_))) {
        report_expired(p_, e_, peer, cell, *got);
        return false;
      }
    }
    if (Wire::kSecondLook) *got = Wire::look(at);
    return true;
  }

  // The j-th rank behind mine.
  FC_DEVICE u32 behind(u32 j) const { return p_.rank + j < FC_N ? p_.rank + j : p_.rank + j - FC_N; }

 private:
  friend struct ablate::Arrival;

  // Where a peer's payload lands in copy 0 of my slots; where mine lands in a peer's.
  FC_DEVICE u64 from(u32 peer) const { return mine_ + u64(peer) * between_; }
  FC_DEVICE u64 to(u32 peer) const { return ablate::without(ablate::kWire) ? from(peer) : p_.slab[peer] + in_theirs_; }
  // From there to a cell of this call's copy.
  FC_DEVICE u64 inside(u32 cell) const { return shift_ + Wire::kHeaderBytes + cell * 16ull; }
  FC_DEVICE u32* flag_of(u64 slot, u32 chunk) const { return reinterpret_cast<u32*>(slot + shift_) + chunk; }

  const Params& p_;
  const Region& g_;
  u64 mine_, in_theirs_, theirs_[FC_N], shift_;
  u32 e_, between_;  // bytes between two sources' slots: below 4 GiB, as the layout sees to
};

}  // namespace fc
