// What a kernel is told about the communicator: one plain struct, passed by value, so that a launch reads no table.
// fcomm/layout.py packs the same bytes (its dtype is compared with this struct by a test).
#pragma once

namespace fc {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};

// A slot region: `slots` copies (epoch parity, or Lamport's rotation) of one slot per source rank.
// All ranks use the same offsets, so "where rank r's data lands" is one formula at sender and receiver.
struct Region {
  u64 offset;       // bytes from the start of the slab to copy 0, source 0
  u64 copy_stride;  // bytes between two copies
  u64 slot_stride;  // bytes between two sources; fixed, whatever the message size
  u64 half_stride;  // bytes from a slot's start to the part that the second phase of a two-phase algorithm uses
};

// Rank-local words. Only this rank's kernels write them, except that the host resets them between calls. A call's first
// access is one load of what it needs of the first 16 bytes: every warp makes it, and all of them at one address.
struct Control {
  u32 epoch;       // epoch of the next call
  u32 poison;      // non-zero: a wait expired; kernels leave without pushing anything
  u32 lamport[2];  // for each Lamport encoding, as Turn packs it: copy of the next call, what the call before it wrote
  u32 ticket;      // blocks of the running grid that have read the words above; wraps to 0 by itself
  u32 claim;       // taken by the first block whose wait expires
  u32 reserved[26];
};

// Where the first expired wait leaves its description, in memory that the host can read while the kernel runs.
struct ErrorRecord {
  u32 valid;  // written last, with release
  u32 rank, peer, block, blocks_started, blocks, epoch, protocol;
  u32 bytes_low, bytes_high;
  u32 cell_low, cell_high;  // index of the 16-byte cell in the slot, or of the chunk whose flag was waited for
  u32 seen[4];              // the cell as last read
  u32 channel;
  u32 reserved[15];
};

#if FC_LINK
// The emulated link of a rank, in ticks of the clock that its kernels read (link.cuh) resp. in nanoseconds (forward.cuh).
struct Link {
  u64 slab_bytes;  // of every rank
  u64 cost;        // 2^-24 ticks a byte; 0: any bandwidth
  u32 latency;     // ticks
  u32 reserved;
#if FC_LINK == 2
  u64 queues;  // address of this channel's Queues
  u32 jitter, seed;
#endif
};
#endif

// In the order in which a call comes to need it: a launch starts with cold constant memory, line by line.
struct Params {
  u32 rank;
  u32 scrub_from;  // first epoch of the scrubbing window; the window ends where the epoch wraps
  u64 control;     // address of this channel's Control
  u64 in;          // these five are the call's own: input, output, message bytes ...
  u64 out;
  u64 nbytes;
  u64 stride;        // ... and, where every rank has a part of it: bytes from one part's start to the next's,
  u64 part;          // and the length of the longest part
  Region region[2];  // of the first and the second phase
  u64 slab[FC_N];    // base address of every rank's slab, as seen by this rank
  u64 error;         // address of this channel's ErrorRecord
  u64 timeout_ns;
  u64 scrub_offset;  // bytes from the start of the slab: the epoch-evidenced regions of copy 0, contiguous
  u64 scrub_stride;  // bytes to the same regions of copy 1
  u64 scrub_bytes;
  u32 scrub_cells;  // 16-byte cells scrubbed per call in that window
  u32 channel;
  u32 protocol;  // index in the registry, for the error record
  u32 aligned;   // hosts only: see all_aligned()
  u32 copies;    // of the input in the output, for the floor's kernel
  u32 reserved;
#if FC_LINK
  Link link;
#endif
#ifdef FC_EPILOGUE
  // What an epilogue is given beside the sums (fcomm/epilogue.py fills it in). Only kernels that have one know of it.
  struct {
    u64 array[8];  // addresses: what it reads, its row vectors, what it writes; from the launch's first row or element on
    u64 first;     // index of the launch's first element in the message
    u32 columns;  // elements of a row
    float scalar[5];
  } epilogue;
#endif
};

}  // namespace fc
