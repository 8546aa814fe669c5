// ll128: a 128-byte line of 120 bytes of payload and a 64-bit flag, written by one store instruction of eight converged
// lanes, lane 7's cell ending in the flag. Needs a link that does not tear such a line (A2).
//
// Lane 7's flag says that the line was written. It does not say that the other lanes' loads of the same instruction saw
// it: a load instruction of eight lanes is eight loads. So the lanes vote, meet, and all load once more; these loads come after
// lane 7's in causality order (__syncwarp joins the lanes), the line is one store, so they see it or something newer - and
// nothing newer is written before this rank's next grid.
#pragma once
#include "wire/base.cuh"

namespace fc {
namespace wire {

struct Ll128 : EpochPerCell, Geometry<4, 8, false> {
  static constexpr u32 kGroupBytes = 120;
  static constexpr u32 kGroupCells = 8;
  static constexpr bool kSecondLook = true;

  static FC_DEVICE u32 lane() { return threadIdx.x & 7u; }
  static FC_DEVICE u32 mask() { return 0xffu << (lane_id() & ~7u); }

  static FC_DEVICE Span span(u32 cell) {
    const u32 lane = cell & 7u;
    return Span{(cell >> 3) * 120ull + lane * 16, lane == 7 ? 8u : 16u};
  }
  static FC_DEVICE void put(Cell* slot, Payload v, u32 e) {
    const bool flag = lane() == 7;
    st_relaxed_sys_line(slot, Cell{{v.w[0], v.w[1], flag ? e : v.w[2], flag ? e : v.w[3]}}, mask());
  }
  static FC_DEVICE Cell look(const Cell* slot) { return ld_relaxed_sys_line(slot, mask()); }
  static FC_DEVICE bool ready(Cell c, u32 e) {
    const bool there = group_any(mask(), lane() == 7 && c.w[2] == e && c.w[3] == e);
    if (there) group_sync(mask());  // a vote orders no memory, this does
    return there;
  }
  static FC_DEVICE bool all_agree(bool yes) { return group_all(mask(), yes); }
};

}  // namespace wire
}  // namespace fc
