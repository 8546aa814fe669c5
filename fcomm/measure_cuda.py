"""Latencies on GPUs: inside a CUDA graph, one call alone, and the floor below both.

Every timed stretch begins behind a kernel in which the ranks meet, and which lets none of them go before all hosts have
queued everything that follows. So a time holds neither the hosts' launch latency nor the ranks' different arrivals; how
different these were is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fcomm import checks, topology
from fcomm.backends.base import LaunchShape
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, FcommError
from fcomm.layout import params_dtype
from fcomm.measure import (
    FLOOR,
    GRAPH,
    SANDWICH,
    SANDWICH_DEPENDENT,
    SKEW,
    SKEW_MEANING,
    STAGING,
    WARMUP,
    Case,
    Delays,
    Mode,
    WrongElementsError,
    added_ns,
    together,
)
from fcomm.protocols import ALGORITHMS, Protocol
from fcomm.sizes import round_up
from fcomm.source import LAUNCHES, MAX_THREADS, flatten

if TYPE_CHECKING:
    from fcomm import Communicator
    from fcomm.backends.cuda import CudaBackend, CudaKernel

CALLS = 50
"""Calls in the longer graph; the shorter one has a fifth. The slope between them is the time of one call."""
RING_BYTES = 512 << 20
"""Device memory that inputs, outputs and exact results of one graph may take on one rank; large messages get fewer calls."""
ROUNDED = 1 << 19
"""Elements of a graph's outputs that are compared with a bound on rounding errors, which the host works out for each."""
SHIFT = 64
"""Elements by which the data of successive calls are shifted against each other."""
MEET_TIMEOUT_S = 20.0
L2_BYTES = 16 << 20
"""What all ranks together copy within the L2 when its rate is measured: sources and targets, well below its size."""
L2_COPIES = 20
NORM_ROW_BYTES = 8192
"""A row of the norm behind a sandwiched collective: a hidden size of 4096 in 16 bits."""
NEIGHBOUR_THREADS = 256
EARLY_NS, LATE_NS = 0, 2000
"""How much shorter and longer a delay may be than it was asked for: the GPU's clock moves in steps."""


def _backend(comm: Communicator) -> CudaBackend:
    from fcomm.backends.cuda import CudaBackend

    if not isinstance(comm.backend, CudaBackend):
        raise ArgumentError("this kind of latency is measured on GPUs only; on the cpu backend use the mode host")
    return comm.backend


def _text(header: str, call: str, world_size: int, aligned: bool, max_threads: int, launch: str = "none") -> str:
    lines = [
        f"#define FC_N {world_size}",
        f"#define FC_ALIGNED {int(aligned)}",
        f"#define FC_TRIGGER {LAUNCHES.index(launch)}",
        f"#define FC_MAX_THREADS {max_threads}",
        f'#include "{header}"',
        f"FC_KERNEL(({call}))",
    ]
    return flatten("\n".join(lines))


def meet_text(world_size: int) -> str:
    """Source of the kernel in which the ranks meet."""
    return _text("measure/meet.cuh", "fc::meet", world_size, aligned=True, max_threads=MAX_THREADS)


def floor_text(world_size: int, aligned: bool, threads: int, launch: str = "none") -> str:
    """Source of the floor's kernel, for launches with so many threads a block and that launch feature."""
    most = MAX_THREADS if threads <= MAX_THREADS else max(a.max_threads for a in ALGORITHMS.values())
    return _text("measure/floor.cuh", "fc::floor_copy<fc::Bytes>", world_size, aligned, most, launch)


def filler_text(world_size: int, aligned: bool, aware: bool) -> str:
    """Source of the kernel before a sandwiched collective. aware : it knows dependent launch."""
    return _text(
        "measure/neighbours.cuh", "fc::filler", world_size, aligned, NEIGHBOUR_THREADS, "early" if aware else "none"
    )


def norm_text(world_size: int, aligned: bool, aware: bool, dtype: str) -> str:
    """Source of the kernel behind a sandwiched collective, for results of that element type."""
    call = f"fc::rms_norm<fc::{REDUCIBLE[dtype].kernel_type}>"
    return _text("measure/neighbours.cuh", call, world_size, aligned, NEIGHBOUR_THREADS, "early" if aware else "none")


class Meeting:
    """The kernel in which the ranks meet, with the memory that it needs. Collective to make and to close."""

    def __init__(self, comm: Communicator) -> None:
        from cupy.cuda import PinnedMemory, PinnedMemoryPointer

        n = comm.world_size
        self._backend = _backend(comm)
        self._memory = self._backend.share(n * 128)
        self._pinned = np.frombuffer(PinnedMemoryPointer(PinnedMemory(256, 0), 0), np.uint8)
        self._pinned[:] = 0
        self._go = self._pinned[:4].view(np.uint32)
        self._told = self._pinned[128:160].view(np.uint64)
        self._kernel = self._backend.compile("meet", meet_text(n))
        self._shape = LaunchShape(1, -(-n // 32) * 32)
        self._params = np.zeros(1, params_dtype(n))
        self._params["slab"] = self._memory.addresses
        self._params["in"], self._params["out"] = self._go.ctypes.data, self._told.ctypes.data
        self._params["rank"], self._params["timeout_ns"] = comm.rank, int(MEET_TIMEOUT_S * 1e9)
        self._ticket = 0
        comm.mpi.Barrier()  # nobody writes a flag before all memory is cleared

    def queue(self, stream: Any, delay_ns: int = 0) -> None:
        """Queues the meeting; what is queued behind it starts on all ranks together, after `open`.

        delay_ns : by which this rank is held up when it has met the others.
        """
        self._ticket += 1
        self._told[2] = 0
        self._params["nbytes"], self._params["part"] = self._ticket, delay_ns
        self._backend.launch_once(self._kernel, self._shape, self._params, stream.ptr)

    def open(self) -> None:
        """Says that the host of this rank has queued everything."""
        self._go[0] = self._ticket

    def waited_ns(self) -> int:
        """How long this rank waited for the last one; after a synchronization."""
        if self._told[2]:
            raise FcommError(f"the ranks did not meet within {MEET_TIMEOUT_S:.0f} s: one of them failed or was held up")
        return int(self._told[1] - self._told[0])

    def held_ns(self) -> int:
        """For how long this rank was held up, by the GPU's clock; after a synchronization."""
        return int(self._told[3])

    def align(self, comm: Communicator) -> None:
        """Collective: after an error that kept some ranks from some meetings, all go on from one number."""
        self._backend.synchronize()
        self._ticket = max(comm.mpi.allgather(self._ticket))

    def close(self) -> None:
        """Collective."""
        self._backend.synchronize()
        self._memory.close()


_meetings: WeakKeyDictionary[Communicator, Meeting] = WeakKeyDictionary()
_latest_ring: list[Ring] = []
_streams: dict[int, Any] = {}


def _meeting(comm: Communicator) -> Meeting:
    if comm not in _meetings:
        _meetings[comm] = Meeting(comm)
    return _meetings[comm]


def _stream(comm: Communicator) -> Any:
    """The stream that this rank measures on."""
    from cupy.cuda import Stream

    device = _backend(comm).device
    if device not in _streams:
        _streams[device] = Stream(non_blocking=True)
    return _streams[device]


def recover(comm: Communicator) -> None:
    """Collective: makes what measures on this communicator usable again after an error."""
    if comm in _meetings:
        _meetings[comm].align(comm)


def close(comm: Communicator) -> None:
    """Collective: gives back what measuring on this communicator has allocated; before the communicator is closed."""
    _latest_ring.clear()
    meeting = _meetings.pop(comm, None)
    if meeting is not None:
        meeting.close()


def _fill(words: Any) -> None:
    """Fills an array with what no call writes."""
    from cupy.cuda import runtime

    runtime.memset(words.data.ptr, 0xA5, words.nbytes)


class Ring:
    """An input, an output and the exact result for each call of a graph; all candidates of a point use the same.

    Call k's input is the same random array shifted by k * SHIFT elements, so that each call has other data at every place,
    and the exact results of all of them come from one reduction on the host. Outputs lie in one allocation, with gaps, and
    are compared on the device, gaps included: a call that writes beyond its output is wrong.
    """

    def __init__(self, comm: Communicator, case: Case, most: int = CALLS) -> None:
        self.key = (*case.point, comm.rank, most)
        self.count, self.copies = case.count, comm.world_size if case.collective == "all_gather" else 1
        element = REDUCIBLE[case.dtype]
        self._case, self._rank, self._element = case, comm.rank, element
        self._out_elements = int(np.prod(case.out_shape))
        self._stride = round_up(max(1, self._out_elements * element.itemsize), 256)
        self.calls = max(5, min(most, RING_BYTES // max(1, case.nbytes + 2 * self._stride)))
        total = self.count + (self.calls - 1) * SHIFT
        own = checks.inputs((20, case.nbytes, case.ranks), comm.rank, comm.world_size, total, case.dtype)
        every = np.empty((comm.world_size, own.nbytes), np.uint8)
        comm.mpi.Allgather(own.view(np.uint8), every)
        self._rows = [row.view(own.dtype) for row in every]
        self._wants: dict[str, Any] = {}
        self._wanted_norms: dict[str, Any] = {}
        self.made: list[Any] = []
        together(comm.mpi, lambda: self._allocate(comm, own))

    def _allocate(self, comm: Communicator, own: NDArray[Any]) -> None:
        import cupy

        element, case = self._element, self._case
        self.inputs = [comm.from_host(own[self._part(k)]) for k in range(self.calls)]
        words = np.dtype(f"u{element.itemsize}")
        self._words = cupy.empty(self.calls * self._stride // element.itemsize, words)
        per_call = self._stride // element.itemsize
        self.outputs = [
            self._words[k * per_call : k * per_call + self._out_elements].view(element.numpy).reshape(case.out_shape)
            for k in range(self.calls)
        ]

    def _part(self, k: int) -> slice:
        return slice(k * SHIFT, k * SHIFT + self.count)

    def _shard(self, k: int) -> slice:
        part = self.count // self._case.ranks
        return slice(k * SHIFT + self._rank * part, k * SHIFT + (self._rank + 1) * part)

    def rows(self, k: int) -> list[NDArray[Any]]:
        """Call k's input of each rank."""
        return [row[self._part(k)] for row in self._rows]

    def _exact(self, form: Protocol | None) -> Callable[[int], NDArray[Any]]:
        """Call number -> what its output must hold; None stands for the floor."""
        if form is None:  # the input again, as often as the output holds it
            own = self._rows[self._rank]
            if self._case.collective == "reduce_scatter":
                return lambda k: own[self._shard(k)]
            return lambda k: np.tile(own[self._part(k)], self.copies)
        sent = [checks.as_sent(form.name, row) for row in self._rows]
        if form.collective == "all_gather":
            return lambda k: np.concatenate([row[self._part(k)] for row in sent])
        total = checks.reduce_reference(sent)
        if form.collective == "reduce_scatter":
            return lambda k: total[self._shard(k)]
        return lambda k: total[self._part(k)]

    @staticmethod
    def _rule(form: Protocol | None) -> str:
        """Forms of one rule have the same exact results."""
        return FLOOR if form is None else form.name if form.name in checks.ZERO_NOT_SENT else ""

    def _want(self, comm: Communicator, form: Protocol | None) -> Any:
        key = self._rule(form)
        if key not in self._wants:
            exact = self._exact(form)
            host = np.full((self.calls, self._stride), 0xA5, np.uint8)
            for k in range(self.calls):
                host[k, : self._out_elements * self._element.itemsize] = np.ascontiguousarray(exact(k)).view(np.uint8)
            self._wants[key] = comm.from_host(host.reshape(-1).view(f"u{self._element.itemsize}"))
        return self._wants[key]

    @property
    def out_bytes(self) -> int:
        """Bytes of one output."""
        return self._out_elements * self._element.itemsize

    def make_room_for_neighbours(self) -> None:
        """Allocates what the kernels around sandwiched collectives write, once for all candidates: `made`, their inputs, and
        norms of their results, which lie as the outputs do.
        """
        import cupy

        if not self.made:
            size = round_up(max(1, self.count * self._element.itemsize), 256) // self._element.itemsize
            self._made_words = cupy.empty(self.calls * size, self._element.numpy)
            self._norm_words = cupy.empty_like(self._words)
            self.made = [self._made_words[k * size : k * size + self.count] for k in range(self.calls)]

    def norm_address(self, k: int) -> int:
        """Where the norm of output k is put."""
        return int(self._norm_words.data.ptr) + k * self._stride

    def norms(self, comm: Communicator, form: Protocol | None, norm: Callable[[int, int], object]) -> Any:
        """What the norms must hold: norm(source, target) of the exact results, made on the device, and gaps as poison leaves
        them.
        """
        import cupy

        key = self._rule(form)
        if key not in self._wanted_norms:
            exact, wanted = self._want(comm, form), cupy.empty_like(self._words)
            _fill(wanted)
            comm.backend.synchronize()
            for k in range(self.calls):
                norm(exact.data.ptr + k * self._stride, wanted.data.ptr + k * self._stride)
            comm.backend.synchronize()
            self._wanted_norms[key] = wanted
        return self._wanted_norms[key]

    def poison_neighbours(self, comm: Communicator) -> None:
        """Fills what the kernels around the collectives write."""
        _fill(self._made_words)
        _fill(self._norm_words)
        comm.backend.synchronize()

    def wrong_norms(self, comm: Communicator, form: Protocol | None) -> int:
        """Wrong elements of the norms of this rank's outputs, gaps included; `norms` was called before."""
        comm.backend.synchronize()
        return int((self._norm_words != self._wanted_norms[self._rule(form)]).sum())

    def poison(self, comm: Communicator) -> None:
        """Fills all outputs, and what is between them, with what no call writes."""
        _fill(self._words)
        comm.backend.synchronize()

    def beyond_order(self, comm: Communicator) -> int:
        """Elements of this rank's outputs that are a sum of the inputs in no order; of `ROUNDED` elements, by whole calls."""
        comm.backend.synchronize()
        step = max(1, min(self.calls // 2, -(-self.calls * self.count // ROUNDED)))
        return sum(checks.beyond_order(self.rows(k), comm.to_host(self.outputs[k])) for k in range(0, self.calls, step))

    def wrong(self, comm: Communicator, form: Protocol | None) -> int:
        """Wrong elements in this rank's outputs. form : the protocol that made them; None: the floor."""
        want = self._want(comm, form)
        comm.backend.synchronize()
        return int((self._words != want).sum())


def ring_of(comm: Communicator, case: Case, most: int = CALLS) -> Ring:
    """The ring of the case's point: all communicators of the same ranks share it. Collective where it is made."""
    if not _latest_ring or _latest_ring[0].key != (*case.point, comm.rank, most):
        _latest_ring.clear()  # frees one before the next is made
        _latest_ring.append(Ring(comm, case, most))
    return _latest_ring[0]


Queue = Callable[[], object]


def _slowest_us(comm: Communicator, nanoseconds: NDArray[np.int64]) -> list[float]:
    """The slowest rank's time of each call of a visit in microseconds, without the warm-up. Collective."""
    every = np.empty((comm.world_size, len(nanoseconds)), np.int64)
    comm.mpi.Allgather(nanoseconds, every)
    return (every.max(axis=0)[WARMUP:] / 1e3).tolist()


def _capture(stream: Any, calls: list[Queue]) -> Any:
    with stream:
        stream.begin_capture()
        try:
            for call in calls:
                call()
        finally:
            graph = stream.end_capture()
    graph.upload(stream)
    return graph


def _timed(comm: Communicator, meeting: Meeting, queue: Queue, delay_ns: int = 0) -> tuple[float, int]:
    """Nanoseconds from the ranks' meeting to the end of what `queue` queues, and this rank's wait in the meeting.

    delay_ns : by which this rank is held up behind the meeting; not in the time.
    """
    from cupy.cuda import Event, get_elapsed_time

    stream = _stream(comm)
    start, end = Event(), Event()
    meeting.queue(stream, delay_ns)
    start.record(stream)
    try:
        queue()
        end.record(stream)
    finally:
        meeting.open()  # also after an error: a rank that never opens holds up all others
    stream.synchronize()
    return get_elapsed_time(start, end) * 1e6, meeting.waited_ns()


class _Bound:
    """A candidate of a point made ready. Collective to make; so are its samples, and errors are raised on all ranks."""

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any) -> None:
        self.comm, self.case, self.form = comm, case, case.form(comm.gpu)
        self.stream, self.meeting = _stream(comm), _meeting(comm)
        self.arrival_skew_ns = np.zeros(0, np.int64)
        self.facts: dict[str, Any] = {}
        """What only showed when it was made ready, as columns of `records.CASES`."""
        self._eager: Any = None
        self._ready(x, out)

    def _ready(self, x: Any, out: Any) -> None:
        together(self.comm.mpi, lambda: self._prepare(x, out))

    def _prepare(self, x: Any, out: Any) -> None:
        case = self.case
        self._eager = self.comm.prepare(
            case.collective, x, out, protocol=case.registered_name, shape=case.shape, stream=self.stream
        )

    def __call__(self) -> Any:
        """One eager call on the point's own x and out."""
        return self._eager()

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds of one call on this rank, shape (iterations,). Collective."""
        nanoseconds, waits = together(self.comm.mpi, lambda: self._sample(iterations))
        # The largest wait in a meeting is how long before the last rank the first one was there.
        every = np.empty((self.comm.world_size, len(waits)), np.int64)
        self.comm.mpi.Allgather(np.array(waits, np.int64), every)
        self.arrival_skew_ns = every.max(axis=0)
        return nanoseconds

    def _sample(self, iterations: int) -> tuple[NDArray[np.int64], list[int]]:
        raise NotImplementedError


class GraphCalls(_Bound):
    """K calls in one CUDA graph (`most` at most), each on its own input and output, and a fifth of them in another.

    Where the input lies in the staging buffer there is one for all calls, as the timed calls find it. What is verified is
    then a third graph of the same calls, which puts a fresh input there before each one.
    """

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any, most: int = CALLS) -> None:
        self._most = most
        super().__init__(comm, case, x, out)

    def _ready(self, x: Any, out: Any) -> None:
        self.ring = ring_of(self.comm, self.case, self._most)
        super()._ready(x, out)
        together(self.comm.mpi, self._make)
        self.verify()

    def _make(self) -> None:
        self.long, self.short = self._two_graphs(self._calls())
        self.checked = _capture(self.stream, self._checked_calls()) if self.case.input == STAGING else self.long
        edges = _backend(self.comm).dependent_edges(self.long)
        if edges is not None:
            self.facts["dependent_edges"] = edges
        self.comm.check()

    def _two_graphs(self, queued: list[Queue]) -> tuple[Any, Any]:
        """A graph of everything, which comes in as many equal parts as the ring has calls, and one of the first few parts."""
        parts = self.ring.calls
        self.short_calls = max(1, parts // 5)
        few = queued[: len(queued) // parts * self.short_calls]
        for queue in queued[: len(queued) // parts]:
            queue()  # loads what is loaded at a first launch
        self.stream.synchronize()
        return _capture(self.stream, queued), _capture(self.stream, few)

    def _slope_ns(self, long: Any, short: Any) -> tuple[float, int]:
        """Nanoseconds of one part of two graphs, and this rank's wait in the meeting before the longer one."""
        long_ns, waited = _timed(self.comm, self.meeting, lambda: long.launch(self.stream))
        short_ns, _ = _timed(self.comm, self.meeting, lambda: short.launch(self.stream))
        return (long_ns - short_ns) / (self.ring.calls - self.short_calls), waited

    def _inputs(self) -> list[Any]:
        """Each call's input, where that is an array."""
        return self.ring.inputs

    def _calls(self) -> list[Queue]:
        """What is timed: the calls of the longer graph."""
        case, ring, inputs = self.case, self.ring, self._inputs()
        staging = self.comm.staging_view(case.count, case.dtype) if case.input == STAGING else None
        in_place = self.form is not None and self.form.algorithm.in_place_staging
        return [
            self.comm.prepare(
                case.collective,
                inputs[k] if staging is None else staging,
                staging if staging is not None and in_place else ring.outputs[k],
                protocol=case.registered_name, shape=case.shape, stream=self.stream,
            )
            for k in range(ring.calls)
        ]  # fmt: skip

    def _checked_calls(self) -> list[Queue]:
        """The timed calls with a copy of a fresh input before each and, where it works in place, one of its result behind."""
        backend, ring, at = self.comm.backend, self.ring, self.stream.ptr
        staging = backend.view(self.comm.staging_view(self.case.count, self.case.dtype))
        assert self.form is not None
        queued: list[Queue] = []
        for k, call in enumerate(self._calls()):
            source, result = backend.view(ring.inputs[k]), backend.view(ring.outputs[k])
            queued += [partial(backend.copy, source, staging, at), call]
            if self.form.algorithm.in_place_staging:
                queued.append(partial(backend.copy, staging, result, at))
        return queued

    def verify(self, replay: bool = True) -> None:
        """Compares the outputs of all calls with the exact results, after a replay on poison. Collective."""
        if not self.case.kind.checked:
            return
        wrong = together(self.comm.mpi, lambda: self._wrong(replay or self.checked is not self.long))
        total = int(sum(self.comm.mpi.allgather(wrong)))
        if total:
            when = (
                "in a replayed graph, so it is not timed" if replay else "after the timed replays: its times are void"
            )
            raise WrongElementsError(f"{total} wrong elements {when}", total)

    def _wrong(self, replay: bool) -> int:
        if replay:
            self.ring.poison(self.comm)
            self.checked.launch(self.stream)
            self.stream.synchronize()
            self.comm.check()
        return self.ring.wrong(self.comm, self.form) if self.case.kind.exact else self.ring.beyond_order(self.comm)

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds of one call, for each replay: the slope between the two graphs. Collective."""
        nanoseconds = super().sample(iterations)
        self.verify(replay=False)
        return nanoseconds

    def _sample(self, iterations: int) -> tuple[NDArray[np.int64], list[int]]:
        nanoseconds, waits = np.empty(iterations, np.int64), []
        for k in range(iterations):
            call_ns, waited = self._slope_ns(self.long, self.short)
            nanoseconds[k] = max(1, round(call_ns))
            waits.append(waited)
        self.comm.check()
        return nanoseconds, waits


class SandwichCalls(GraphCalls):
    """What a collective adds to the kernels around it, all in one graph: a filler that makes its input, the collective, a norm
    of its result; less the same graph without the collective.

    aware : filler and norm know dependent launch. Results of the collectives and of the norms are verified, from inputs that
    only the fillers of that replay can have written.
    """

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any, aware: bool) -> None:
        if aware and comm.dependent_launch == "none":
            raise ArgumentError(f"neighbours with dependent launch need it themselves: {comm.no_dependent_launch}")
        self._aware = aware
        self._neighbours_us: list[float] = []
        super().__init__(comm, case, x, out)

    def _make(self) -> None:
        ring, backend = self.ring, _backend(self.comm)
        ring.make_room_for_neighbours()
        n, dtype = self.comm.world_size, self.case.dtype
        whole = ring.out_bytes % 16 == 0
        self._filler = backend.compile("filler", filler_text(n, self.case.nbytes % 16 == 0, self._aware))
        self._norm = backend.compile("norm", norm_text(n, whole, self._aware, dtype))
        plain = backend.compile("norm", norm_text(n, whole, False, dtype))
        ring.norms(self.comm, self.form, lambda source, target: self._queue_norm(plain, source, target, False)())
        self._bare = self._two_graphs([queue for layer in self._layers(False) for queue in layer])
        super()._make()

    def _inputs(self) -> list[Any]:
        return self.ring.made

    def _calls(self) -> list[Queue]:
        return [queue for layer in self._layers(True) for queue in layer]

    def _checked_calls(self) -> list[Queue]:
        """The timed layers; where the collective works in place, with a copy of its result behind it."""
        layers = self._layers(True)
        if self._in_place:
            backend, at = self.comm.backend, self.stream.ptr
            result = backend.view(self.comm.staging_view(self.case.count, self.case.dtype))
            for k, layer in enumerate(layers):
                layer.insert(2, partial(backend.copy, result, backend.view(self.ring.outputs[k]), at))
        return [queue for layer in layers for queue in layer]

    @property
    def _in_place(self) -> bool:
        return self.case.input == STAGING and self.form is not None and self.form.algorithm.in_place_staging

    def _layers(self, whole: bool) -> list[list[Queue]]:
        """For each call: the filler, the collective if the layer is whole, the norm."""
        ring, staged = self.ring, self.case.input == STAGING
        staging = self.comm.staging_view(self.case.count, self.case.dtype).data.ptr if staged else 0
        filler_blocks = -(-self.case.nbytes // (16 * NEIGHBOUR_THREADS))
        calls = super()._calls() if whole else []
        layers: list[list[Queue]] = []
        for k in range(ring.calls):
            source, target = ring.inputs[k].data.ptr, staging or ring.made[k].data.ptr
            result = staging if self._in_place else ring.outputs[k].data.ptr
            made = self._queue(self._filler, filler_blocks, source, target, self.case.nbytes, self._aware)
            norm = self._queue_norm(self._norm, result, ring.norm_address(k), self._aware)
            layers.append([made, *calls[k : k + 1], norm])
        return layers

    def _queue_norm(self, kernel: CudaKernel, source: int, target: int, dependent: bool) -> Queue:
        nbytes = self.ring.out_bytes
        return self._queue(kernel, -(-nbytes // NORM_ROW_BYTES), source, target, nbytes, dependent)

    def _queue(self, kernel: CudaKernel, blocks: int, source: int, target: int, nbytes: int, dependent: bool) -> Queue:
        # Behind a collective's trigger the norm is let in while some threads still wait for peers. The room that it may take is
        # half of this rank's own, as the collective's is: it never takes what a peer's grid needs.
        blocks = max(1, min(blocks, kernel.max_blocks(NEIGHBOUR_THREADS) // 2))
        params = np.zeros(1, params_dtype(self.comm.world_size))
        params["in"], params["out"], params["nbytes"], params["part"] = source, target, nbytes, NORM_ROW_BYTES
        return partial(
            _backend(self.comm).launch_once,
            kernel,
            LaunchShape(blocks, NEIGHBOUR_THREADS),
            params,
            self.stream.ptr,
            dependent,
        )

    def _wrong(self, replay: bool) -> int:
        if replay:
            self.ring.poison_neighbours(self.comm)
        return super()._wrong(replay) + self.ring.wrong_norms(self.comm, self.form)

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds that the collective adds, for each replay. Collective."""
        nanoseconds = super().sample(iterations)
        self._neighbours_us += _slowest_us(self.comm, self._bare_ns)
        if self._neighbours_us:
            self.facts["neighbours_us"] = float(np.median(self._neighbours_us))
        return nanoseconds

    def _sample(self, iterations: int) -> tuple[NDArray[np.int64], list[int]]:
        nanoseconds, waits = np.empty(iterations, np.int64), []
        self._bare_ns = np.empty(iterations, np.int64)
        for k in range(iterations):
            bare_ns, _ = self._slope_ns(*self._bare)
            layer_ns, waited = self._slope_ns(self.long, self.short)
            nanoseconds[k], self._bare_ns[k] = max(1, round(layer_ns - bare_ns)), round(bare_ns)
            waits.append(waited)
        self.comm.check()
        return nanoseconds, waits


class FloorCalls(GraphCalls):
    """The same grid, argument, launch feature and graph, and a kernel that only moves its input to its output.

    As much of the input as the output holds is moved, and as often: a gather's n times, a reduce-scatter's own part.
    """

    def _prepare(self, x: Any, out: Any) -> None:
        self.form = None
        case = self.case
        if case.protocol == FLOOR:
            assert case.shape is not None, case
            self._shape = LaunchShape(*case.shape)
            return
        super()._prepare(x, out)
        self._shape = LaunchShape(self._eager.blocks or 1, self._eager.threads or 32)

    def __call__(self) -> Any:
        return self._calls()[0]()

    def _calls(self) -> list[Queue]:
        comm, case, ring = self.comm, self.case, self.ring
        backend = _backend(comm)
        nbytes = case.nbytes // case.ranks if case.collective == "reduce_scatter" else case.nbytes
        offset = nbytes * comm.rank if case.collective == "reduce_scatter" else 0
        aligned = nbytes % 16 == 0
        kernel = backend.compile(
            FLOOR, floor_text(comm.world_size, aligned, self._shape.threads, comm.dependent_launch)
        )
        calls: list[Queue] = []
        for k in range(ring.calls):
            params = np.zeros(1, params_dtype(comm.world_size))
            params["in"], params["out"] = ring.inputs[k].data.ptr + offset, ring.outputs[k].data.ptr
            params["nbytes"], params["copies"], params["aligned"] = nbytes, ring.copies, aligned
            calls.append(partial(backend.launch_once, kernel, self._shape, params, self.stream.ptr, dependent=True))
        return calls


class IsolatedCall(_Bound):
    """One prepared call, started on all ranks together: from the meeting to the call's end on this rank, by events."""

    def _prepare(self, x: Any, out: Any) -> None:
        super()._prepare(x, out)
        self._eager()
        self.stream.synchronize()
        self.comm.check()

    def _sample(self, iterations: int) -> tuple[NDArray[np.int64], list[int]]:
        nanoseconds, waits = np.empty(iterations, np.int64), []
        for k in range(iterations):
            elapsed, waited = _timed(self.comm, self.meeting, self._eager)
            nanoseconds[k] = max(1, round(elapsed))
            waits.append(waited)
        self.comm.check()
        return nanoseconds, waits


class SkewedCall(IsolatedCall):
    """The same, and one rank is held up on the device when all have met: from the end of the delay to the call's end."""

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any) -> None:
        self._delays = Delays(case, comm.rank)
        super().__init__(comm, case, x, out)

    def _sample(self, iterations: int) -> tuple[NDArray[np.int64], list[int]]:
        nanoseconds, waits = np.empty(iterations, np.int64), []
        delays, held = self._delays, []
        for k, delay_ns in enumerate(delays.visit(iterations)):
            elapsed, waited = _timed(self.comm, self.meeting, self._eager, delay_ns)
            # A rank's time begins when it is let go: of the one that was late, behind the delay.
            nanoseconds[k] = round(elapsed) + delay_ns
            waits.append(waited)
            if delay_ns:
                held.append(self.meeting.held_ns())
        self.comm.check()
        if held and not EARLY_NS <= float(np.median(held)) - delays.whole_ns <= LATE_NS:
            raise FcommError(
                f"this GPU's clock is too coarse for a delay of {delays.whole_ns / 1e3:g} us: it took {np.median(held) / 1e3:g} us"
            )
        return added_ns(nanoseconds, delays), waits


class HostCall(_Bound):
    """One call as the caller experiences it: to its result; the fact `return_us` has the time to its return.

    prepared : a prepared call with a result array of the caller's; otherwise an eager one on the current stream, which makes
    its result (but for pull protocols that work in place).
    """

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any, prepared: bool) -> None:
        super().__init__(comm, case, x, out)
        name, shape, collective = case.registered_name, case.shape, getattr(comm, case.collective)
        result = x if out is x else None
        self._call: Queue = self._eager if prepared else lambda: collective(x, result, protocol=name, shape=shape)
        self._return_us: list[float] = []

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds from the call to its result on this rank. Collective."""
        total, returned = np.empty(iterations, np.int64), np.empty(iterations, np.int64)
        clock, meet, wait = time.perf_counter_ns, self.comm.mpi.Barrier, self.stream.synchronize
        error: FcommError | None = None
        with self.stream:
            for k in range(iterations):
                meet()  # by all ranks, as often as planned, also after an error
                if error is not None:
                    continue
                try:
                    start = clock()
                    self._call()
                    back = clock()
                    wait()
                    total[k], returned[k] = clock() - start, back - start
                    self.comm.check()
                except FcommError as caught:
                    error = caught

        def done() -> NDArray[np.int64]:
            if error is not None:
                raise error
            return np.maximum(total, 1)

        total = together(self.comm.mpi, done)
        self._return_us += _slowest_us(self.comm, returned)
        if self._return_us:
            self.facts["return_us"] = float(np.median(self._return_us))
        return total


def l2_gbps(comm: Communicator) -> float | None:
    """GB/s at which all ranks of one GPU together copy within its L2, each byte read once and written once. Collective.

    None where the ranks do not share one GPU. Slope between two amounts, with the grid that fills the ranks' SMs.
    """
    if comm.world_size < 2 or any(kind != topology.SAME_DEVICE for kind in _backend(comm).links):
        return None
    meeting = _meeting(comm)
    big = L2_BYTES // 2 // comm.world_size // 512 * 512
    small = big // 4
    nanoseconds = together(comm.mpi, lambda: _copy_ns(comm, meeting, big) - _copy_ns(comm, meeting, small))
    slowest = max(comm.mpi.allgather(nanoseconds))
    return comm.world_size * (big - small) / slowest if slowest > 0 else None


def _copy_ns(comm: Communicator, meeting: Meeting, nbytes: int) -> float:
    backend, stream = _backend(comm), _stream(comm)
    kernel = backend.compile(FLOOR, floor_text(comm.world_size, True, MAX_THREADS))
    shape = LaunchShape(min(2 * backend.sms, kernel.max_blocks(MAX_THREADS)), MAX_THREADS)
    source, target = comm.empty(nbytes // 4, "float32"), comm.empty(nbytes // 4, "float32")
    params = np.zeros(1, params_dtype(comm.world_size))
    params["in"], params["out"] = source.data.ptr, target.data.ptr
    params["nbytes"], params["copies"], params["aligned"] = nbytes, 1, 1
    queue = partial(backend.launch_once, kernel, shape, params, stream.ptr)
    queue()
    stream.synchronize()
    graph = _capture(stream, [queue] * L2_COPIES)
    taken = [_timed(comm, meeting, lambda: graph.launch(stream))[0] for _ in range(12)]
    return float(np.median(taken[2:])) / L2_COPIES


def _sample(comm: Communicator, launch: Any, iterations: int) -> NDArray[np.int64]:
    return launch.sample(iterations)


def _graph(comm: Communicator, case: Case, x: Any, out: Any) -> GraphCalls:
    return (FloorCalls if case.protocol == FLOOR else GraphCalls)(comm, case, x, out)


def _sandwich(comm: Communicator, case: Case, x: Any, out: Any) -> SandwichCalls:
    return SandwichCalls(comm, case, x, out, aware=case.mode == SANDWICH_DEPENDENT)


def _host(comm: Communicator, case: Case, x: Any, out: Any) -> HostCall:
    return HostCall(comm, case, x, out, prepared=False)


def _prepared(comm: Communicator, case: Case, x: Any, out: Any) -> HostCall:
    return HostCall(comm, case, x, out, prepared=True)


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        m.name: m
        for m in (
            Mode(GRAPH, "one of many calls in a replayed CUDA graph", _graph, _sample, CALLS * 6 // 5, 6e-4),
            Mode(
                SANDWICH,
                "what a call adds to a graph of the kernels before and behind it",
                _sandwich,
                _sample,
                4 * CALLS * 6 // 5,
                2e-3,
            ),
            Mode(
                SANDWICH_DEPENDENT,
                "the same with neighbours that use dependent launch",
                _sandwich,
                _sample,
                4 * CALLS * 6 // 5,
                2e-3,
            ),
            Mode(SKEW, SKEW_MEANING, SkewedCall, _sample, 1, 2e-4),
            Mode("isolated", "one prepared call after the ranks met on the device", IsolatedCall, _sample, 1, 2e-4),
            Mode("host", "one eager call as the caller experiences it", _host, _sample, 1, 5e-5),
            Mode("prepared", "one prepared call as the caller experiences it", _prepared, _sample, 1, 5e-5),
            Mode(
                FLOOR,
                "the same graph of kernels that copy input to output and do not communicate",
                FloorCalls,
                _sample,
            ),
        )
    }
)
"""Kinds of latency on the cuda backend. `floor` is measured with the grid of the case's own call."""


# What experiments time graphs of their own with (a decode step, say).
capture, timed, meeting_of, stream_of = _capture, _timed, _meeting, _stream
