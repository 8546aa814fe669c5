"""What the medium between ranks takes by itself: one-way times by ping-pong, bandwidth by a stream.

Without an emulated link these are facts about the real medium, with one about the emulation. The kernels are in
``kernels_cu/measure/pairs.cuh``; each runs its rounds between two readings of one clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fcomm.backends.base import LaunchShape
from fcomm.errors import ArgumentError, FcommError
from fcomm.layout import params_dtype
from fcomm.links import Link
from fcomm.measure import together
from fcomm.protocols import CELL_BYTES
from fcomm.source import MAX_THREADS, flatten

if TYPE_CHECKING:
    from fcomm import Communicator

FORMS = {"cell": "fc::ping_pong<false>", "flag": "fc::ping_pong<true>"}
"""Ping-pongs: evidence in the cell that it vouches for (ll and its kin), or behind it, with a release and an acquire (flag)."""
STREAM = "fc::stream"
LATE = "fc::come_late"
MOST_ROUNDS = 400
ROUNDS_US = 1500.0
"""What the rounds of one sample may take: an emulated link is exact for a few milliseconds of a block's life on a GPU, and on a
CPU that others use too a longer sample is interrupted."""
GUESS_US = {"cuda": 1.5, "cpu": 20.0}
"""One way, beside what an emulated link adds: to choose the number of rounds."""
TIMEOUT_S = 5.0
HIDES_US = {"held": 1.0, "forwarded": 5.0}
"""Latency that hides whatever of the emulation's own time can be hidden, by its form."""


def text(call: str, world_size: int, link: int) -> str:
    """Source of one of the kernels; link : with an emulated link of that form (`Link.compiled`)."""
    lines = [
        f"#define FC_N {world_size}",
        f"#define FC_MAX_THREADS {MAX_THREADS}",
        *([f"#define FC_LINK {int(link)}"] if link else []),
        '#include "measure/pairs.cuh"',
        f"FC_KERNEL(({call}))",
    ]
    return flatten("\n".join(lines))


class Medium:
    """Measures between the ranks of a communicator, in its staging buffer. All methods are collective.

    comm : of two ranks or more; where it emulates a link, that is measured. Nothing of it may be running.
    linked : False measures without the emulation all the same.
    """

    def __init__(self, comm: Communicator, linked: bool = True) -> None:
        if comm.world_size < 2:
            raise ArgumentError("a medium lies between ranks: start at least two")
        self._comm = comm
        self._linked = linked and comm.link is not None
        self._region = comm.layout.regions()["staging"]
        self._round = 0
        self._kernels: dict[str, Any] = {}
        self.most_cells = self._region.capacity // (2 * CELL_BYTES)
        """Cells of one round of a stream that there is room for."""

    def one_way_us(self, form: str = "cell", samples: int = 7) -> NDArray[np.float64]:
        """Microseconds from rank 0's store to what rank 1 does upon it, half a round trip; shape (samples,), the quickest first, alike
        on all ranks.

        form : one of `FORMS`.
        """
        guess = GUESS_US[self._comm.backend.name] + self._latency_us()
        rounds = self._rounds(2 * guess)
        taken = [self._run(FORMS[form], LaunchShape(1, 32), rounds, 0) for _ in range(samples + 1)]
        return np.sort([ns[0] / (2e3 * rounds) for ns in taken[1:]])

    def late_us(self, samples: int = 7) -> NDArray[np.float64]:
        """Microseconds that a rank takes to send a cell and to look at one that was there before: nothing of it is a link's. An
        emulation that has the sender wait adds a latency. Shape (samples,), the quickest first, alike on all ranks.
        `ArgumentError` without an emulated link.
        """
        if not self._linked:
            raise ArgumentError("what an emulation adds to a late rank is measured with an emulated link only")
        rounds = self._rounds(2 * (GUESS_US[self._comm.backend.name] + self._latency_us()))
        taken = [self._run(LATE, LaunchShape(1, 32), rounds, 0) for _ in range(samples + 1)]
        return np.sort([ns[1] / (1e3 * rounds) for ns in taken[1:]])

    def round_us(self, cells: int, samples: int = 7) -> NDArray[np.float64]:
        """Microseconds of one round in which every rank sends so many 16-byte cells to another one and looks for as many (ranks 0 and
        1, 2 and 3, ...; the last of an odd number rests); of the slowest rank, shape (samples,), alike on all ranks.
        """
        link = self._comm.link if self._linked else None
        through = 0.0 if link is None or link.gbps is None else cells * CELL_BYTES / (link.gbps * 1e3)
        rounds = self._rounds(GUESS_US[self._comm.backend.name] + self._latency_us() + through)
        shape = self.stream_shape(cells)
        taken = [self._run(STREAM, shape, rounds, cells) for _ in range(samples + 1)]
        return np.array([ns.max() / (1e3 * rounds) for ns in taken[1:]])

    def gbps(self, samples: int = 7) -> NDArray[np.float64]:
        """10^9 bytes a second that one rank sends while all do: the slope between rounds of few cells and of many, of the quickest
        rounds first; shape (samples,), alike on all ranks.

        Of a link that forwards: of rounds of many alone. Nobody is held there, so threads are in different rounds, and as long as one
        of them has something on the link it is busy: its rate is that of the whole.
        """
        few, many = self.stream_cells()
        if self._linked and self._comm.link is not None and self._comm.link.forwarded:
            return many * CELL_BYTES / (np.sort(self.round_us(many, samples)) * 1e3)
        more_us = np.sort(self.round_us(many, samples)) - np.sort(self.round_us(few, samples))
        return (many - few) * CELL_BYTES / (np.maximum(more_us, 1e-6) * 1e3)

    def typical(self, values: NDArray[np.float64]) -> float:
        """The sample to go by: the median; on the cpu backend the quickest, since others' work interrupts most of them."""
        return float(values[0] if self._comm.backend.name == "cpu" else np.median(values))

    def stream_cells(self) -> tuple[int, int]:
        """Cells of a round that the slope of `gbps` is taken between."""
        many = min(self.most_cells, 4 * self._threads())
        return many // 4, many

    def stream_shape(self, cells: int) -> LaunchShape:
        """Blocks and threads of a stream: one block on each SM at most, each with as many cells as the others."""
        threads = 32 if self._comm.backend.name == "cpu" else MAX_THREADS
        blocks = max(1, min(cells, self._threads()) // threads)
        return LaunchShape(blocks, threads)

    def _threads(self) -> int:
        """Threads of the largest grid, a power of two."""
        if self._comm.backend.name == "cpu":
            return 64
        sms = int(getattr(self._comm.backend, "sms", 1))
        if self._linked and self._comm.link is not None:
            sms //= self._comm.link.blocks(1)  # an SM for each block that forwards
        return int(1 << (min(sms, 64).bit_length() - 1)) * MAX_THREADS

    def _latency_us(self) -> float:
        link = self._comm.link if self._linked else None
        return 0.0 if link is None else link.latency_us

    def _rounds(self, round_us: float) -> int:
        wanted = ROUNDS_US / round_us
        return int(min(MOST_ROUNDS, max(1, wanted)))

    def _run(self, call: str, shape: LaunchShape, rounds: int, cells: int) -> NDArray[np.int64]:
        """Nanoseconds of every rank, the slowest block's: shape (ranks,)."""
        comm = self._comm
        if self._round == 0:
            zeros = np.zeros(self._region.capacity, np.uint8)
            together(comm.group, lambda: comm.backend.write_slab(self._region.offset, zeros))
            self._round = 1
        comm.group.barrier()
        mine = together(comm.group, lambda: self._launch(call, shape, rounds, cells))
        self._round += rounds + 1
        return np.array(comm.group.allgather(mine), np.int64)

    def _launch(self, call: str, shape: LaunchShape, rounds: int, cells: int) -> int:
        comm, link = self._comm, self._comm.link if self._linked else None
        form = 0 if link is None else link.compiled
        # A stream goes to and fro between two ranks. Around a ring of more, a rank that has taken a round knows nothing of what the
        # one that it sends to has taken, and two copies of a mailbox would be too few.
        first = comm.rank - comm.rank % 2 if call == STREAM else 0
        ranks = comm.slabs[first : first + 2] if call == STREAM else comm.slabs
        if call == STREAM and len(ranks) < 2:
            return 0
        n = len(ranks)
        if call not in self._kernels:
            name = (
                f"{call[4:].split('<')[0]}{'-flag' if 'true' in call else ''}{('', '-link', '-forwarded')[form]}-n{n}"
            )
            self._kernels[call] = comm.backend.compile(name, text(call, n, form))
        told = comm.from_host(np.zeros(2 * shape.blocks, np.uint64))
        params = np.zeros(1, params_dtype(n, form))
        params["rank"], params["slab"], params["in"] = comm.rank - first, ranks, self._region.offset
        params["out"], params["part"] = comm.backend.view(told).address, self._round
        params["nbytes"], params["stride"], params["timeout_ns"] = rounds, cells, int(TIMEOUT_S * 1e9)
        if link is not None:
            queues = comm._queues(0, shape.blocks)
            link.write(params, comm.ticks_per_us, comm.slab_bytes, comm.link_own_us, queues)
            shape = LaunchShape(link.blocks(shape.blocks), shape.threads)
        launch_once = getattr(comm.backend, "launch_once", None)  # where launches have streams
        if launch_once is None:
            comm.backend.launch(self._kernels[call], shape, params, None)
        else:
            launch_once(self._kernels[call], shape, params, 0)
        found = comm.to_host(told).reshape(-1, 2)
        if found[:, 1].any():
            raise FcommError(f"a {call[4:]} between the ranks got no answer within {TIMEOUT_S:g} s")
        return int(found[:, 0].max())


def own_us(comm: Communicator) -> float:
    """Microseconds that the emulation's own instructions add to a store's way, beside what it is asked for: by a ping-pong with it,
    at a latency that hides what can be hidden, and one without. Collective; alike on all ranks. Nothing may be taken off yet.
    """
    if getattr(comm.backend, "time_sliced", False):
        return 0.0  # ranks take turns of milliseconds: nothing that could be measured
    kept = comm.link
    assert kept is not None
    assert comm.link_own_us == 0.0
    asked_us = HIDES_US[kept.form]
    comm.use_link(Link(asked_us, form=kept.form))
    try:
        added_us = float(np.median(Medium(comm).one_way_us()) - np.median(Medium(comm, linked=False).one_way_us()))
    finally:
        comm.use_link(kept)
    return max(0.0, added_us - asked_us)
