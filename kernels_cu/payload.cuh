// Payload: what one 16-byte wire cell carries of a message, in registers; and its way from and to the caller's arrays.
#pragma once
#include "primitives.cuh"

namespace fc {

struct Payload {
  u32 w[4];
};

// Where a cell's payload lies in the message. Always a multiple of 4 bytes, so no 2- or 4-byte element is ever split.
struct Span {
  u64 offset;
  u32 bytes;
};

// Alignment is a local fact: it picks a code path here and never the layout on the wire.
FC_DEVICE bool aligned(u64 address, u32 bytes) { return (address & (bytes - 1)) == 0; }

// Reads span.bytes (at most 4 * kWords) of a message of `nbytes` at `base`; what lies beyond its end reads as zero.
// kElement is the size of the elements: no array is aligned to less.
template <int kWords, int kElement>
FC_DEVICE Payload load_payload(u64 base, u64 nbytes, Span span) {
  Payload v = {{0, 0, 0, 0}};
  const u64 at = base + span.offset;
  const bool whole = span.offset + span.bytes <= nbytes;
  if (kWords == 4 && whole && span.bytes == 16 && aligned(at, 16)) {
    const Cell c = ld_plain(reinterpret_cast<const Cell*>(at));
    for (int i = 0; i < 4; i++) v.w[i] = c.w[i];
  } else if (kWords != 3 && whole && span.bytes == 8 && aligned(at, 8)) {
    const u64 x = ld_plain(reinterpret_cast<const u64*>(at));
    v.w[0] = u32(x);
    v.w[1] = u32(x >> 32);
  } else if (kElement == 4 || (whole && aligned(at, 4))) {
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const u32 o = 4u * i;
      if (o < span.bytes && span.offset + o < nbytes) v.w[i] = ld_plain(reinterpret_cast<const u32*>(at + o));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords * (4 / kElement); i++) {
      const u32 o = u32(kElement) * i;
      if (o < span.bytes && span.offset + o < nbytes) {
        const u32 x = kElement == 2 ? u32(ld_plain(reinterpret_cast<const u16*>(at + o)))
                                    : u32(ld_plain(reinterpret_cast<const u8*>(at + o)));
        v.w[o / 4] |= x << (8 * (o % 4));
      }
    }
  }
  return v;
}

// The inverse: writes the part of the span that lies inside the message, and nothing else.
template <int kWords, int kElement>
FC_DEVICE void store_payload(u64 base, u64 nbytes, Span span, Payload v) {
  const u64 at = base + span.offset;
  const bool whole = span.offset + span.bytes <= nbytes;
  if (kWords == 4 && whole && span.bytes == 16 && aligned(at, 16)) {
    st_plain(reinterpret_cast<Cell*>(at), Cell{{v.w[0], v.w[1], v.w[2], v.w[3]}});
  } else if (kWords != 3 && whole && span.bytes == 8 && aligned(at, 8)) {
    st_plain(reinterpret_cast<u64*>(at), v.w[0] | u64(v.w[1]) << 32);
  } else if (kElement == 4 || (whole && aligned(at, 4))) {
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const u32 o = 4u * i;
      if (o < span.bytes && span.offset + o < nbytes) st_plain(reinterpret_cast<u32*>(at + o), v.w[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords * (4 / kElement); i++) {
      const u32 o = u32(kElement) * i;
      if (o < span.bytes && span.offset + o < nbytes) {
        const u32 x = v.w[o / 4] >> (8 * (o % 4));
        if (kElement == 2) {
          st_plain(reinterpret_cast<u16*>(at + o), u16(x));
        } else {
          st_plain(reinterpret_cast<u8*>(at + o), u8(x));
        }
      }
    }
  }
}

}  // namespace fc
