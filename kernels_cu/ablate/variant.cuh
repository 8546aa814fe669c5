// Which kernel this is: FC_VARIANT is 0 in every kernel that the library uses, and nothing of what follows is then in its
// machine code (tests/unit/test_variants.py compares it). Anything else is for experiments: fcomm/variants.py has the names.
#pragma once
#include "primitives.cuh"

#ifndef FC_VARIANT
#define FC_VARIANT 0
#endif

namespace fc {
namespace ablate {

constexpr bool has(u32 bit) { return (u32(FC_VARIANT) & bit) != 0; }

// ---- ablations: correct kernels that lack one of the ideas ------------------------------------------------------------
constexpr bool kArrivalOrder = has(1u << 0);  // a cell is added when it arrives: see ablate/arrival.cuh
constexpr bool kRearmFirst = has(1u << 1);    // a slot is set back in front of the first push
constexpr bool kRearmLast = has(1u << 2);     // ... or behind the last output
constexpr bool kPollOne = has(1u << 3);       // a peer's cell is waited for before the next peer's is looked at
constexpr bool kOwnInMemory = has(1u << 4);   // a rank pushes its own part to a slot of its own, and polls it there
constexpr bool kRearmElsewhere = kRearmFirst || kRearmLast;

// ---- stages left out, to see what they cost ---------------------------------------------------------------------------
// Results are then of no use. What must still hold is that a grid ends. Without kWire a rank's cells go to the slots in its
// own slab where its peers' would land: as many cells, in the same encoding, and nobody waits for anyone else. So a rank that
// does not poll may run ahead of its peers as far as it likes: nothing of its leaves its slab, and its own grids are ordered
// by kernel boundaries. All variants but the single ones (no_input, no_output, no_reduce, which poll their peers as ever)
// are without it, which the assertions below see to.
enum Stage : u32 {
  kEpoch = 1u << 16,   // load and test of the call's number and poison word
  kInput = 1u << 17,   // loads of the input
  kOutput = 1u << 18,  // stores of the output
  kStores = 1u << 19,  // cells to the peers
  kExit = 1u << 20,    // the ticket, and the epoch's advance by the last block
  kRearm = 1u << 21,   // setting back and scrubbing
  kPoll = 1u << 22,    // waiting for cells
  kReduce = 1u << 23,  // adding
  kWire = 1u << 24,    // cells go to peers and come from them
};
constexpr bool without(Stage stage) { return has(stage); }

// A wait needs what it waits for: cells of this very call, in a slot that was set back. And only a rank that waits for its
// peers' cells may store to their slots (I1).
static_assert(without(kPoll) || !(without(kStores) || without(kExit) || without(kRearm)), "the wait would not end");
static_assert(without(kWire) || !without(kPoll), "peers' slots would be written over while they are read");

// Makes a value needed that would otherwise be computed for nothing, and not at all then. The store, to a word of Control that
// nobody reads, is as good as never made.
FC_DEVICE void keep(const Params& p, u32 value) {
  if (value == 0x7b1c93a5u) st_relaxed_gpu(reinterpret_cast<Control*>(p.control)->reserved, value);
}

}  // namespace ablate
}  // namespace fc
