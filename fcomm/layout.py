"""The slab: what lies where in the one symmetric allocation of each rank, and the struct that tells a kernel.

All ranks use the same offsets, and none depends on message size, grid or algorithm: within a region an evidence word
keeps one address for ever. A region belongs to one unit geometry, since where one encoding expects evidence another one
has arbitrary payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcomm.errors import ArgumentError
from fcomm.protocols import CELL_BYTES, ENCODINGS, V2_PUSH_UP_TO, Protocol, index_of, shard_bytes
from fcomm.sizes import round_up

SLAB_GRANULE = 2 << 20
"""Device memory is handed out in blocks of 2 MiB, and an IPC handle exports the whole block: use whole ones."""
LINE = 128
CONTROL_BYTES = 128
ERROR_BYTES = 128
ONE_SHOT_BYTES = 256 << 10
"""Largest message that every encoding takes in one piece, at any world size."""
FIRST_EPOCH = 2
EPOCHS = 1 << 32
SCRUB_CELLS = 64
"""Cells cleared per call in the scrubbing window before the epoch wraps."""
BARRIER_FLAGS_PER_SOURCE = 64
V2_MAX_BLOCKS = 512
V2_SEMAPHORE_BYTES = 32
"""The semaphores of one block: a word for each source."""


@dataclass(frozen=True)
class Region:
    """A set of slots. Strides and offsets in bytes from the start of the slab, as in ``kernels_cu/params.cuh``."""

    name: str
    offset: int
    copies: int
    copy_stride: int
    slot_stride: int
    half_stride: int
    capacity: int
    """Largest message, in payload bytes, that a slot takes as a whole."""
    cleared_to: int = 0
    scrubbed: bool = False
    """Its evidence is the epoch: stale evidence in it is cleared before the epoch wraps."""


REGION_DTYPE = np.dtype([(n, "<u8") for n in ("offset", "copy_stride", "slot_stride", "half_stride")])
ERROR_DTYPE = np.dtype(
    [(n, "<u4") for n in ("valid", "rank", "peer", "block", "blocks_started", "blocks", "epoch", "protocol")]
    + [("nbytes", "<u8"), ("cell", "<u8"), ("seen", "<u4", 4), ("channel", "<u4"), ("reserved", "<u4", 15)]
)
CONTROL_DTYPE = np.dtype(
    [
        ("epoch", "<u4"),
        ("poison", "<u4"),
        ("lamport", "<u4", 2),
        ("ticket", "<u4"),
        ("claim", "<u4"),
        ("reserved", "<u4", 26),
    ]
)
CALL_WORDS = ("in", "out", "nbytes", "stride", "part")
"""The words of a kernel's argument that differ from call to call, in a row."""
FIRST_CALL_WORD = 2
"""Their place in the argument, in words of 8 bytes."""


_LINK = [("slab_bytes", "<u8"), ("cost", "<u8"), ("latency", "<u4"), ("reserved", "<u4")]
LINK_DTYPES = (np.dtype(_LINK), np.dtype([*_LINK, ("queues", "<u8"), ("jitter", "<u4"), ("seed", "<u4")]))
"""``struct Link`` of the two forms of an emulated link."""

EPILOGUE_ARRAYS = 8
EPILOGUE_SCALARS = 5
EPILOGUE_DTYPE = np.dtype(
    [("array", "<u8", EPILOGUE_ARRAYS), ("first", "<u8"), ("columns", "<u4"), ("scalar", "<f4", EPILOGUE_SCALARS)]
)
"""Its part of ``struct Params``, behind the rest of the argument, for kernels that have an epilogue."""


def params_dtype(world_size: int, link: int = 0, epilogue: bool = False) -> np.dtype[np.void]:
    """The bytes of ``struct Params`` in ``kernels_cu/params.cuh`` for a world of that size.

    link, epilogue : of a kernel that has an emulated link of that form (`fcomm.links.Link.compiled`), or an epilogue.
    """
    return np.dtype(
        [("rank", "<u4"), ("scrub_from", "<u4"), ("control", "<u8")]
        + [(n, "<u8") for n in CALL_WORDS]
        + [("region", REGION_DTYPE, 2), ("slab", "<u8", world_size)]
        + [(n, "<u8") for n in ("error", "timeout_ns", "scrub_offset", "scrub_stride", "scrub_bytes")]
        + [(n, "<u4") for n in ("scrub_cells", "channel", "protocol", "aligned", "copies", "reserved")]
        + ([("link", LINK_DTYPES[link - 1])] if link else [])
        + ([("epilogue", EPILOGUE_DTYPE)] if epilogue else [])
    )


class SlabLayout:
    """Offsets of one communicator's slab.

    Parameters
    ----------
    world_size : int
    max_bytes : int
        Largest message in bytes that one call handles in one piece by the algorithm made for large ones.
    channels : int
        Calls that may be in flight at a time, each with regions and an epoch of its own.
    """

    def __init__(self, world_size: int, max_bytes: int, channels: int = 1) -> None:
        if max_bytes < 1:
            raise ArgumentError(f"max_bytes must be positive, not {max_bytes}")
        if channels < 1:
            raise ArgumentError(f"channels must be at least 1, not {channels}")
        self.world_size = world_size
        self.max_bytes = max_bytes
        self.channels = channels
        # One-shot takes whole messages up to ONE_SHOT_BYTES; a two-phase algorithm puts a shard of max_bytes / n into
        # each half of a slot.
        self.capacity = round_up(
            max(min(max_bytes, ONE_SHOT_BYTES), 2 * round_up(-(-max_bytes // world_size), LINE)), LINE
        )
        control = round_up(channels * CONTROL_BYTES, 4096)
        self.channel_bytes, template = self._regions(0)
        self._regions_of = [template if c == 0 else self._regions(c * self.channel_bytes)[1] for c in range(channels)]
        widest = max(region.slot_stride for region in template.values() if region.copies > 1)
        if widest >= 1 << 32:  # kernels multiply it in 32 bits
            raise ArgumentError(
                f"max_bytes {max_bytes} makes slots of {widest} bytes, which must be below 4 GiB: larger messages are "
                "handled in pieces, so max_bytes may be smaller than they are"
            )
        self.slab_bytes = round_up(control + channels * self.channel_bytes, SLAB_GRANULE)

    def _regions(self, start: int) -> tuple[int, dict[str, Region]]:
        """Lays out one channel: epoch-evidenced regions of copy 0 in a row, the same of copy 1, then the others."""
        start += round_up(self.channels * CONTROL_BYTES, 4096)
        at = start
        n = self.world_size
        epoch_regions: dict[str, tuple[int, int, int, int]] = {}
        for e in ENCODINGS.values():
            if e.copies == 2:
                half = round_up(e.slot_bytes(-(-self.capacity // 2)), LINE)
                epoch_regions[e.name] = (at - start, 2 * half, half, self.capacity)
                at += n * 2 * half
        flags = BARRIER_FLAGS_PER_SOURCE * 4
        staging = round_up(self.max_bytes, LINE)
        # The barriers' chunks grow with the message: what limits it is the staging buffer.
        epoch_regions["barrier_flags"] = (at - start, 2 * flags, flags, staging)
        at = start + round_up(at - start + n * 2 * flags, LINE)
        self.scrub_bytes = at - start
        regions = {
            name: Region(name, start + off, 2, self.scrub_bytes, stride, half, cap, scrubbed=True)
            for name, (off, stride, half, cap) in epoch_regions.items()
        }
        at += self.scrub_bytes
        for e in ENCODINGS.values():
            if e.copies == 3:
                half = round_up(e.slot_bytes(-(-self.capacity // 2)), LINE)
                stride = 2 * half
                regions[e.name] = Region(e.name, at, 3, n * stride, stride, half, self.capacity, e.cleared_to)
                at += 3 * n * stride
        sums = round_up(shard_bytes(staging, n), LINE)  # behind the staged message: room for one shard
        regions["staging"] = Region("staging", at, 1, 0, staging + sums, staging, staging)
        at += staging + sums
        # custom_ar_v2 pushes messages up to a size that falls with the world size; larger ones go in pieces, if forced.
        slot = min(staging, round_up(max(table.get(n, LINE) for table in V2_PUSH_UP_TO.values()), LINE))
        regions["v2_slots"] = Region("v2_slots", at, 2, n * slot, slot, 0, slot)
        at += 2 * n * slot
        for form in ("push", "pull_one_shot", "pull_two_shot"):
            counters, semaphores = V2_MAX_BLOCKS * 4, V2_MAX_BLOCKS * V2_SEMAPHORE_BYTES
            name = f"v2_{form}_state"
            regions[name] = Region(name, at, 1, 0, counters + semaphores, counters, staging)
            at += counters + semaphores
        slot = round_up(self.capacity, LINE)
        regions["lamport_fp"] = Region("lamport_fp", at, 3, n * slot, slot, 0, slot)
        at += 3 * n * slot
        regions["lamport_fp_state"] = Region("lamport_fp_state", at, 1, 0, LINE, 0, staging)
        at += LINE
        return round_up(at - start, 4096), regions

    def control_offset(self, channel: int) -> int:
        """Bytes from the start of the slab to the channel's rank-local words."""
        return channel * CONTROL_BYTES

    def regions(self, channel: int = 0) -> dict[str, Region]:
        """The channel's regions by name."""
        return self._regions_of[channel]

    def piece_bytes(self, protocol: Protocol) -> int:
        """Largest message in bytes that one launch of the protocol takes; longer ones are split into such pieces.

        For all-gather and reduce-scatter: the largest part of one rank.
        """
        capacity = min(self.regions()[name].capacity for name in protocol.regions)
        if protocol.encodings and protocol.algorithm.phases == ("shard", "shard"):
            return self.world_size * (capacity // 2 // LINE * LINE)
        return capacity

    def scrub_from(self, cells: int = SCRUB_CELLS) -> int:
        """First epoch of the window in which both copies are cleared twice, `cells` cells a call."""
        windows = -(-(self.scrub_bytes // CELL_BYTES) // cells)
        return EPOCHS - 4 * windows - 4

    def initial_control(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The rank-local words before the first call, one element a channel."""
        words = np.zeros(self.channels, CONTROL_DTYPE)
        words["epoch"] = FIRST_EPOCH
        return words

    def params(
        self,
        protocol: Protocol,
        rank: int,
        slabs: list[int],
        error_address: int,
        channel: int,
        timeout_s: float,
        link: int = 0,
        epilogue: bool = False,
        control: int | None = None,
    ) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """A kernel's argument with everything filled in but the call's own words, and those of a link or an epilogue if it has one.

        control : address of this rank's control words; None: where they lie in its slab.
        """
        p = np.zeros(1, params_dtype(self.world_size, link, epilogue))
        p["slab"] = slabs
        p["control"] = (slabs[rank] if control is None else control) + self.control_offset(channel)
        p["error"] = error_address + channel * ERROR_BYTES
        p["timeout_ns"] = int(timeout_s * 1e9)
        regions = self.regions(channel)
        for k in range(2):
            region = regions[protocol.regions[min(k, len(protocol.regions) - 1)]]
            for name in REGION_DTYPE.names or ():
                p["region"][0, k][name] = getattr(region, name)
        first = next(iter(regions.values()))
        p["scrub_offset"] = first.offset
        p["scrub_stride"] = self.scrub_bytes
        p["scrub_bytes"] = self.scrub_bytes
        p["scrub_from"] = self.scrub_from()
        p["scrub_cells"] = SCRUB_CELLS
        p["rank"] = rank
        p["channel"] = channel
        p["protocol"] = index_of(protocol.name)
        return p


def error_message(record: np.void, protocol_names: list[str], world_size: int) -> str:
    """One sentence about an expired wait."""
    return (
        f"rank {record['rank']} gave up waiting for rank {record['peer']} of {world_size} in call {int(record['epoch']) - 1} "
        f"({protocol_names[int(record['protocol'])]}, {record['nbytes']} bytes, channel {record['channel']}): block "
        f"{record['block']} of {record['blocks']} ({record['blocks_started']} started) did not see epoch "
        f"{record['epoch']} in cell {record['cell']}, where it last read "
        f"{' '.join(f'{int(w):08x}' for w in record['seen'])}"
    )
