// lamport16: as lamport, but a whole 16-byte cell is one unit whose last word speaks for all four: a quarter of the
// comparisons and of the payload words that may have to be rewritten, where 16 bytes are not torn. Only that word has to
// be set back; the store takes the whole cell all the same, since a quarter of a sector costs more than all of it.
#pragma once
#include "wire/lamport.cuh"

namespace fc {
namespace wire {

struct Lamport16 : Sentinel<1> {
  static FC_DEVICE void put(Cell* slot, Payload v, u32) {
    st_relaxed_sys(slot, Cell{{v.w[0], v.w[1], v.w[2], Lamport::sendable(v.w[3])}});
  }
  static FC_DEVICE bool ready(Cell c, u32) { return c.w[3] != kSentinel; }
  static FC_DEVICE void rearm(Cell* slot) { Lamport::rearm(slot); }
};

}  // namespace wire
}  // namespace fc
