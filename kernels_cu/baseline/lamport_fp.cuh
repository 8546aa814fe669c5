// Baseline: a one-shot all-reduce in the manner of TensorRT-LLM's Lamport kernels, rebuilt from a description. An element
// has arrived when it is not -0.0; a sender sends +0.0 in the place of -0.0. Three buffers in turn; each call clears what
// the call before it received, by the size which that call recorded; the last block to arrive moves the turn on.
//
// On the wire every element has its sign flipped, so that -0.0 is a word of zeros: one cleared buffer then serves element
// types of both widths, which fills of 0x80000000 and 0x80008000 would not. They are flipped back as bits: a negation in
// C++ would flush subnormals where the compiler is told to.
#pragma once
#include "baseline/staging.cuh"
#include "baseline/zeros.cuh"

namespace fc {
namespace lamport_fp {

// The elements of a word with their signs flipped.
template <class T>
FC_DEVICE u32 flipped(u32 word) {
  return word ^ (T::kElement == 4 ? 0x80000000u : 0x80008000u);
}
template <class T>
struct Flipped : T {
  static FC_DEVICE float get(u32 word, int k) { return T::get(flipped<T>(word), k); }
};

// region[1]: {copy of the next call, cells used by the call that used copy 0, 1, 2 last}.
FC_DEVICE u32* state(const Params& p) { return reinterpret_cast<u32*>(p.slab[p.rank] + p.region[1].offset); }

}  // namespace lamport_fp

// Deadlock freedom: a thread pushes all it owns before its first poll. Reuse of the buffers: wire/base.cuh, sentinel; the
// own slot is pushed, polled and cleared like a peer's.
template <class T>
FC_DEVICE void lamport_fp_one_shot(const Params& p) {
  launch_wait();
  u32* state = lamport_fp::state(p);
  const u32 cells = u32(p.nbytes / 16), stride = gridDim.x * blockDim.x;
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const Cell* in = reinterpret_cast<const Cell*>(p.in);
  Cell next = {{0, 0, 0, 0}};
  if (first < cells) next = ld_plain(in + first);  // asked for together with the words below
  const Cell told = ld_relaxed_gpu(reinterpret_cast<const Cell*>(state));
  const EpochWords now = ld_epoch(control(p));
  if (now.poison != 0) return;
  const u32 copy = told.w[0], before = copy == 0 ? 2 : copy - 1;
  const u32 before_cells = before == 0 ? told.w[1] : before == 1 ? told.w[2] : told.w[3];
  for (u32 c = first; c < cells;) {
    Cell v = next;
    const u32 cell = c;
    c += stride;
    if (c < cells) next = ld_plain(in + c);
#pragma unroll
    for (int i = 0; i < 4; i++) v.w[i] = lamport_fp::flipped<T>(v.w[i]);
    zeros::push<T>(p, copy, cell, v);
  }
  Ticket ticket;
  ticket.draw(p);
  for (u32 c = first; c < before_cells; c += stride) zeros::clear(p, before, c);
  for (u32 c = first; c < cells; c += stride) {
    Cell got[FC_N];
    if (!zeros::take<T>(p, now.epoch, copy, c, got)) return;
    const Payload sum = reduce_in_rank_order<lamport_fp::Flipped<T>, 4>([&](u32 r) { return staging::payload(got[r]); });
    st_plain(reinterpret_cast<Cell*>(p.out) + c, staging::cell(sum));
  }
  late_trigger();
  if (ticket.settle(p, now.epoch)) {
    st_relaxed_gpu(state + 1 + copy, cells);
    st_relaxed_gpu(state, copy == 2 ? 0u : copy + 1);
  }
}

}  // namespace fc
