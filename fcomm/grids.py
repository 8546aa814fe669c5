"""Grids: the launch shape that a call has by default, and how many blocks may be resident for ranks not to block each other.

A grid waits for its peers' grids, so all blocks of all of them have to find room. Room is counted in *places*: a block's kind is
how many of its like one SM holds, and where grids of several kinds are there at a time, an SM has as many places as it holds
blocks of the largest kind. A block of whatever kind takes one place then. With no more blocks than places a block that is still
to come always finds room, wherever the others went: an SM that cannot take it holds a block in every place (else what is there
and the new one would take at most all of it), and not all SMs can be so. Blocks alone would not do: one small block on each SM
leaves no room for a block that needs a whole one, although most of every SM is free.
"""

from __future__ import annotations

from functools import lru_cache

from fcomm.backends.base import LaunchShape, cpu_shape, gpu_shape
from fcomm.protocols import CELL_BYTES, MAX_THREADS, GpuShare, Protocol, derived, protocols, shard_bytes


def default_shape(protocol: Protocol, nbytes: int, world_size: int, gpu: GpuShare | None) -> tuple[int, int]:
    """Blocks and threads of a launch for which nobody asks for others, before it is clamped to what may be resident.

    What the protocol's authors set or, without such a rule or on a backend that has no SMs, the backend's default. nbytes : one
    rank's input, as much as one launch takes. gpu : the smallest share that a rank has; None for the cpu backend.
    """
    return _default_shape(protocol.name, nbytes, world_size, gpu)


@derived
@lru_cache(maxsize=1 << 16)
def _default_shape(name: str, nbytes: int, world_size: int, gpu: GpuShare | None) -> tuple[int, int]:
    protocol = protocols()[name]
    sharded = "shard" in protocol.algorithm.phases
    longest = nbytes
    if sharded:
        longest = nbytes // world_size if protocol.collective == "reduce_scatter" else shard_bytes(nbytes, world_size)
    rule = protocol.algorithm.grid
    cells = -(-longest // CELL_BYTES)
    if rule is not None and gpu is not None:
        return rule.shape(cells, gpu)
    encoding = protocol.encodings[0] if protocol.encodings else None
    if rule is not None and rule.fixed:
        cells = 1 << 30  # a shape that no message changes
    elif encoding is not None:
        cells = encoding.cells(longest) * (world_size if sharded else 1)  # a thread has one cell of one part
    if gpu is None:
        shape = cpu_shape(cells)
    else:
        # Whole messages gain from the largest blocks once a grid of smaller ones is full; shards were measured not to.
        most = MAX_THREADS if sharded or encoding is None else protocol.max_threads(world_size)
        shape = gpu_shape(cells, gpu.sms, most, sharded)
    if (
        encoding is not None and encoding.max_chunks
    ):  # a chunk is one block's, and takes a fence: the more at a time the better
        return max(1, encoding.chunks(longest)), shape.threads
    return shape.blocks, shape.threads


def plain_shape(cells: int, gpu: GpuShare | None) -> LaunchShape:
    """The default grid of a kernel that is no collective, for so many 16-byte cells; gpu : as for `default_shape`."""
    return cpu_shape(cells) if gpu is None else gpu_shape(cells, gpu.sms)


def most_blocks(sms: int, per_sm: int, grids: int = 1, channels: int = 1) -> int:
    """Blocks of one grid at most, where each of so many channels may have that many grids at a time on a rank's SMs.

    per_sm : blocks of its kind that an SM holds. Channels may run anything beside each other, so with several of them a block
    takes a whole SM; grids of one channel are of one kind, or `fit_together`.
    """
    return sms * _places(per_sm, channels) // (grids * channels)


def fit_together(sms: int, before: tuple[int, int], after: tuple[int, int], channels: int = 1) -> bool:
    """Whether every rank may have both of two grids in a row on its SMs. before, after : blocks, and how many an SM holds."""
    places = _places(min(before[1], after[1]), channels)
    return (before[0] + after[0]) * channels <= sms * places


def _places(per_sm: int, channels: int) -> int:
    return per_sm if channels == 1 else min(per_sm, 1)
