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

// Whether input, output, message and parts of it all begin and end at multiples of 16 bytes. A local fact: it picks a code
// path and never the layout on the wire. On a GPU it is compiled in, since the other path is long and a launch's first
// instructions are fetched while everyone waits; on a host it is a word of the argument.
FC_DEVICE bool all_aligned(const Params& p) {
#ifdef FC_CPU
  return p.aligned != 0;
#else
  return FC_ALIGNED;
#endif
}

// How an encoding's cells lie in an aligned message: in pieces of kGrain bytes; kWhole where no cell sticks out at its end.
template <int kWordsOfCell, u32 kGrainBytes, bool kNoneSticksOut>
struct Geometry {
  static constexpr int kWords = kWordsOfCell;
  static constexpr u32 kGrain = kGrainBytes;
  static constexpr bool kWhole = kNoneSticksOut;
};
typedef Geometry<4, 16, true> WholeCells;

// Elements of a size, where their type does not matter.
template <int kElementBytes>
struct Elements {
  static constexpr int kElement = kElementBytes;
};

FC_DEVICE bool within(u32 offset, Span span, u64 nbytes) {
  return offset < span.bytes && span.offset + offset < nbytes;
}

// Reads a span of the message of `nbytes` at `base`; what lies beyond the message's end reads as zero.
// G: an encoding, or a Geometry. T: element type; no array is aligned to less than its size.
template <class G, class T>
FC_DEVICE Payload load_payload(const Params& p, u64 base, u64 nbytes, Span span) {
  Payload v = {{0, 0, 0, 0}};
  const u64 at = base + span.offset;
  if (!all_aligned(p)) {
#pragma unroll
    for (int i = 0; i < G::kWords * 4 / T::kElement; i++) {
      const u32 o = u32(T::kElement) * i;
      if (within(o, span, nbytes)) {
        u32 x;
        if constexpr (T::kElement == 4) {
          x = ld_plain(reinterpret_cast<const u32*>(at + o));
        } else if constexpr (T::kElement == 2) {
          x = ld_plain(reinterpret_cast<const u16*>(at + o));
        } else {
          x = ld_plain(reinterpret_cast<const u8*>(at + o));
        }
        v.w[o / 4] |= x << (8 * (o % 4));
      }
    }
  } else if constexpr (G::kGrain == 16) {
    const Cell c = ld_plain(reinterpret_cast<const Cell*>(at));
    for (int i = 0; i < 4; i++) v.w[i] = c.w[i];
  } else if constexpr (G::kGrain == 8) {
#pragma unroll
    for (int i = 0; i < G::kWords; i += 2) {
      if (G::kWhole || within(4u * i, span, nbytes)) {
        const u64 x = ld_plain(reinterpret_cast<const u64*>(at + 4 * i));
        v.w[i] = u32(x);
        v.w[i + 1] = u32(x >> 32);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < G::kWords; i++) {
      if (within(4u * i, span, nbytes)) v.w[i] = ld_plain(reinterpret_cast<const u32*>(at + 4 * i));
    }
  }
  return v;
}

// What becomes of a result on its way from registers to memory: nothing, if the kernel has no epilogue (epilogue/values.cuh).
template <class T>
struct Finish {
  template <class G, class Address>
  static FC_DEVICE Payload apply(const Params&, Address, u64, Span, Payload v) {
    return v;
  }
};

// The inverse: writes the part of the span that lies inside the message, and nothing else.
template <class G, class T>
FC_DEVICE void store_payload(const Params& p, u64 base, u64 nbytes, Span span, Payload v) {
  v = Finish<T>::template apply<G>(p, base, nbytes, span, v);
  const u64 at = base + span.offset;
  if (!all_aligned(p)) {
#pragma unroll
    for (int i = 0; i < G::kWords * 4 / T::kElement; i++) {
      const u32 o = u32(T::kElement) * i;
      if (within(o, span, nbytes)) {
        const u32 x = v.w[o / 4] >> (8 * (o % 4));
        if constexpr (T::kElement == 4) {
          st_plain(reinterpret_cast<u32*>(at + o), x);
        } else if constexpr (T::kElement == 2) {
          st_plain(reinterpret_cast<u16*>(at + o), u16(x));
        } else {
          st_plain(reinterpret_cast<u8*>(at + o), u8(x));
        }
      }
    }
  } else if constexpr (G::kGrain == 16) {
    st_plain(reinterpret_cast<Cell*>(at), Cell{{v.w[0], v.w[1], v.w[2], v.w[3]}});
  } else if constexpr (G::kGrain == 8) {
#pragma unroll
    for (int i = 0; i < G::kWords; i += 2) {
      if (G::kWhole || within(4u * i, span, nbytes)) {
        st_plain(reinterpret_cast<u64*>(at + 4 * i), v.w[i] | u64(v.w[i + 1]) << 32);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < G::kWords; i++) {
      if (within(4u * i, span, nbytes)) st_plain(reinterpret_cast<u32*>(at + 4 * i), v.w[i]);
    }
  }
}

}  // namespace fc
