// ll16: a 16-byte cell of 12 bytes of payload and a 32-bit epoch. The cell arrives whole where 16 bytes are not torn, so
// one epoch vouches for all of it.
#pragma once
#include "wire/base.cuh"

namespace fc {
namespace wire {

struct Ll16 : EpochPerCell, Geometry<3, 4, false> {
  static constexpr u32 kGroupBytes = 12;

  static FC_DEVICE Span span(u32 cell) { return Span{cell * 12ull, 12}; }
  static FC_DEVICE void put(Cell* slot, Payload v, u32 e) { st_relaxed_sys(slot, Cell{{v.w[0], v.w[1], v.w[2], e}}); }
  static FC_DEVICE bool ready(Cell c, u32 e) { return c.w[3] == e; }
};

}  // namespace wire
}  // namespace fc
