// What an encoding ("wire") is to the algorithms. A wire is a struct of static functions:
//
//   a Geometry                         32-bit words of payload a cell carries at most, and how they lie in a message
//   kGroupBytes, kGroupCells           payload of a group of cells that are put and taken together, and their number (a
//                                      line of ll128; elsewhere one cell)
//   span(cell)                         which bytes of the message a cell carries
//   put(slot, payload, e)              writes a cell into a peer's slot, evidence and all
//   look(slot), ready(cell, e)         reads a cell of my own slot; whether it is the one of this call
//   payload(cell)                      what it carries
//   kSecondLook                        the payload is that of a second look, made after the first one was ready
//   all_agree(yes)                     whether all lanes that look together say yes
//   kChunked, kHeaderBytes             evidence is a word for each chunk of cells, in front of the slot's payload
//   writes(inside, cells)              whether a call of so many cells writes the word at that offset of a slot
//   kState, rearm(slot)                Lamport: which of the two counters; sets a cell back to "not arrived"
//
// Reuse of slots. Two invariants carry it: no rank finishes call e before every peer has started it (I1), and evidence of
// call e + 1 leaves a rank only when its whole grid of call e is complete (I3; completion performs its stores, A1).
//
// - Epoch in the evidence: a slot has two copies, by the epoch's parity. When a peer pushes call e + 2 into the copy of
//   call e, it has finished e + 1, so I had started e + 1 (I1), so my grid of e was complete (I3) and had consumed every
//   unit of e (I2). Old evidence in the copy is e's or older and never equals e + 2; scrub() keeps that so over a wrap.
// - Sentinel: a slot has three copies, taken in turn by the calls L of this encoding. Call L polls copy L, and sets copy
//   L - 1 back, as far as call L - 1 recorded that it was written. A peer pushes call L + 2 into that copy after its whole
//   grid of L + 1, hence after evidence of my call L + 1, which left after my grid of L with its stores was complete. With
//   two copies the peer's call L + 1 would already land in the copy that my call L is still setting back.
#pragma once
#include "payload.cuh"

namespace fc {
namespace wire {

struct PerCell {
  static constexpr u32 kGroupCells = 1;
  static constexpr bool kSecondLook = false;
  static constexpr bool kChunked = false;
  static constexpr u32 kHeaderBytes = 0;

  static FC_DEVICE Cell look(const Cell* slot) { return ld_relaxed_sys(slot); }
  static FC_DEVICE bool all_agree(bool yes) { return yes; }
  static FC_DEVICE Payload payload(Cell c) { return Payload{{c.w[0], c.w[1], c.w[2], c.w[3]}}; }
  static FC_DEVICE bool writes(u64 inside, u32 cells) { return inside < cells * 16ull; }
};

// Evidence is the epoch: two copies of each slot, nothing to set back.
struct EpochPerCell : PerCell {
  static constexpr int kState = -1;
  static FC_DEVICE void rearm(Cell*) {}
};

// Evidence is the absence of a sentinel: three copies, set back one call later. kState says whose counter.
template <int kStateIndex>
struct Sentinel : PerCell, WholeCells {
  static constexpr u32 kGroupBytes = 16;
  static constexpr int kState = kStateIndex;

  static FC_DEVICE Span span(u32 cell) { return Span{cell * 16ull, 16}; }
};

}  // namespace wire
}  // namespace fc
