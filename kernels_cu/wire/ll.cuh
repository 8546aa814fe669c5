// ll: two units of {4 bytes of payload, 32-bit epoch} in a 16-byte cell. A unit arrives whole (8 bytes are not torn), so
// its epoch vouches for its payload and nothing has to be ordered.
#pragma once
#include "wire/base.cuh"

namespace fc {
namespace wire {

struct Ll : EpochPerCell, Geometry<2, 8, true> {
  static constexpr u32 kGroupBytes = 8;

  static FC_DEVICE Span span(u32 cell) { return Span{cell * 8ull, 8}; }
  static FC_DEVICE void put(Cell* slot, Payload v, u32 e) { st_relaxed_sys(slot, Cell{{v.w[0], e, v.w[1], e}}); }
  static FC_DEVICE bool ready(Cell c, u32 e) { return c.w[1] == e && c.w[3] == e; }
  static FC_DEVICE Payload payload(Cell c) { return Payload{{c.w[0], c.w[2], 0, 0}}; }
};

}  // namespace wire
}  // namespace fc
