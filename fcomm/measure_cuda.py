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
from fcomm.measure import FLOOR, STAGING, Case, Mode, WrongElementsError, together
from fcomm.protocols import ALGORITHMS, Protocol
from fcomm.sizes import round_up
from fcomm.source import LAUNCHES, MAX_THREADS, flatten

if TYPE_CHECKING:
    from fcomm import Communicator
    from fcomm.backends.cuda import CudaBackend

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


class Meeting:
    """The kernel in which the ranks meet, with the memory that it needs. Collective to make and to close."""

    def __init__(self, comm: Communicator) -> None:
        from cupy.cuda import PinnedMemory, PinnedMemoryPointer

        from fcomm.backends.cuda import SharedMemory

        n = comm.world_size
        self._backend = _backend(comm)
        self._memory = SharedMemory(comm.mpi, self._backend.device, n * 128)
        self._pinned = np.frombuffer(PinnedMemoryPointer(PinnedMemory(256, 0), 0), np.uint8)
        self._pinned[:] = 0
        self._go = self._pinned[:4].view(np.uint32)
        self._told = self._pinned[128:152].view(np.uint64)
        self._kernel = self._backend.compile("meet", meet_text(n))
        self._shape = LaunchShape(1, -(-n // 32) * 32)
        self._params = np.zeros(1, params_dtype(n))
        self._params["slab"] = self._memory.addresses
        self._params["in"], self._params["out"] = self._go.ctypes.data, self._told.ctypes.data
        self._params["rank"], self._params["timeout_ns"] = comm.rank, int(MEET_TIMEOUT_S * 1e9)
        self._ticket = 0
        comm.mpi.Barrier()  # nobody writes a flag before all memory is cleared

    def queue(self, stream: Any) -> None:
        """Queues the meeting; what is queued behind it starts on all ranks together, after `open`."""
        self._ticket += 1
        self._told[2] = 0
        self._params["nbytes"] = self._ticket
        self._backend.launch_once(self._kernel, self._shape, self._params, stream.ptr)

    def open(self) -> None:
        """Says that the host of this rank has queued everything."""
        self._go[0] = self._ticket

    def waited_ns(self) -> int:
        """How long this rank waited for the last one; after a synchronization."""
        if self._told[2]:
            raise FcommError(f"the ranks did not meet within {MEET_TIMEOUT_S:.0f} s: one of them failed or was held up")
        return int(self._told[1] - self._told[0])

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


class Ring:
    """An input, an output and the exact result for each call of a graph; all candidates of a point use the same.

    Call k's input is the same random array shifted by k * SHIFT elements, so that each call has other data at every place,
    and the exact results of all of them come from one reduction on the host. Outputs lie in one allocation, with gaps, and
    are compared on the device, gaps included: a call that writes beyond its output is wrong.
    """

    def __init__(self, comm: Communicator, case: Case) -> None:
        self.key = (*case.point, comm.rank)
        self.count, self.copies = case.count, comm.world_size if case.collective == "all_gather" else 1
        element = REDUCIBLE[case.dtype]
        self._case, self._rank, self._element = case, comm.rank, element
        self._out_elements = int(np.prod(case.out_shape))
        self._stride = round_up(max(1, self._out_elements * element.itemsize), 256)
        self.calls = max(5, min(CALLS, RING_BYTES // max(1, case.nbytes + 2 * self._stride)))
        total = self.count + (self.calls - 1) * SHIFT
        own = checks.inputs((20, case.nbytes, case.ranks), comm.rank, comm.world_size, total, case.dtype)
        every = np.empty((comm.world_size, own.nbytes), np.uint8)
        comm.mpi.Allgather(own.view(np.uint8), every)
        self._rows = [row.view(own.dtype) for row in every]
        self._wants: dict[str, Any] = {}
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

    def _want(self, comm: Communicator, form: Protocol | None) -> Any:
        key = FLOOR if form is None else form.name if form.name in checks.ZERO_NOT_SENT else ""
        if key not in self._wants:
            exact = self._exact(form)
            host = np.full((self.calls, self._stride), 0xA5, np.uint8)
            for k in range(self.calls):
                host[k, : self._out_elements * self._element.itemsize] = np.ascontiguousarray(exact(k)).view(np.uint8)
            self._wants[key] = comm.from_host(host.reshape(-1).view(f"u{self._element.itemsize}"))
        return self._wants[key]

    def poison(self, comm: Communicator) -> None:
        """Fills all outputs, and what is between them, with what no call writes."""
        from cupy.cuda import runtime

        runtime.memset(self._words.data.ptr, 0xA5, self._words.nbytes)
        comm.backend.synchronize()

    def beyond_rounding(self, comm: Communicator) -> int:
        """Elements of this rank's outputs that are a sum of the inputs in no order; of `ROUNDED` elements, by whole calls."""
        comm.backend.synchronize()
        step = max(1, min(self.calls // 2, -(-self.calls * self.count // ROUNDED)))
        return sum(
            checks.beyond_rounding(comm.to_host(self.outputs[k]), [row[self._part(k)] for row in self._rows])
            for k in range(0, self.calls, step)
        )

    def wrong(self, comm: Communicator, form: Protocol | None) -> int:
        """Wrong elements in this rank's outputs. form : the protocol that made them; None: the floor."""
        want = self._want(comm, form)
        comm.backend.synchronize()
        return int((self._words != want).sum())


def ring_of(comm: Communicator, case: Case) -> Ring:
    """The ring of the case's point: all communicators of the same ranks share it. Collective where it is made."""
    if not _latest_ring or _latest_ring[0].key != (*case.point, comm.rank):
        _latest_ring.clear()  # frees one before the next is made
        _latest_ring.append(Ring(comm, case))
    return _latest_ring[0]


Queue = Callable[[], object]


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


def _timed(comm: Communicator, meeting: Meeting, queue: Queue) -> tuple[float, int]:
    """Nanoseconds from the ranks' meeting to the end of what `queue` queues, and this rank's wait in the meeting."""
    from cupy.cuda import Event, get_elapsed_time

    stream = _stream(comm)
    start, end = Event(), Event()
    meeting.queue(stream)
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
    """K calls in one CUDA graph, each on its own input and output, and a fifth of them in another.

    Where the input lies in the staging buffer there is one for all calls, as the timed calls find it. What is verified is
    then a third graph of the same calls, which puts a fresh input there before each one.
    """

    def _ready(self, x: Any, out: Any) -> None:
        self.ring = ring_of(self.comm, self.case)
        super()._ready(x, out)
        together(self.comm.mpi, self._make)
        self.verify()

    def _make(self) -> None:
        ring = self.ring
        calls = self._calls()
        calls[0]()  # loads what is loaded at a first launch
        self.stream.synchronize()
        self.short_calls = max(1, ring.calls // 5)
        self.long, self.short = _capture(self.stream, calls), _capture(self.stream, calls[: self.short_calls])
        self.checked = _capture(self.stream, self._checked_calls()) if self.case.input == STAGING else self.long
        edges = getattr(self.comm.backend, "graph_edges", None)
        if edges is not None:
            self.facts["dependent_edges"] = int(edges(self.long))
        self.comm.check()

    def _calls(self) -> list[Queue]:
        """What is timed: the calls of the longer graph."""
        case, ring = self.case, self.ring
        staging = self.comm.staging_view(case.count, case.dtype) if case.input == STAGING else None
        in_place = self.form is not None and self.form.algorithm.in_place_staging
        return [
            self.comm.prepare(
                case.collective,
                ring.inputs[k] if staging is None else staging,
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
        return self.ring.wrong(self.comm, self.form) if self.case.kind.exact else self.ring.beyond_rounding(self.comm)

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds of one call, for each replay: the slope between the two graphs. Collective."""
        nanoseconds = super().sample(iterations)
        self.verify(replay=False)
        return nanoseconds

    def _sample(self, iterations: int) -> tuple[NDArray[np.int64], list[int]]:
        nanoseconds, waits = np.empty(iterations, np.int64), []
        more = self.ring.calls - self.short_calls
        for k in range(iterations):
            long_ns, waited = _timed(self.comm, self.meeting, lambda: self.long.launch(self.stream))
            short_ns, _ = _timed(self.comm, self.meeting, lambda: self.short.launch(self.stream))
            nanoseconds[k] = max(1, round((long_ns - short_ns) / more))
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


class HostCall(_Bound):
    """One call as the caller experiences it: to its result; `return_ns` holds the times to its return."""

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any, prepared: bool) -> None:
        super().__init__(comm, case, x, out)
        name, shape, stream = case.registered_name, case.shape, self.stream
        collective = getattr(comm, case.collective)
        self._call: Queue = (
            self._eager if prepared else lambda: collective(x, out, protocol=name, shape=shape, stream=stream)
        )
        self.return_ns = np.zeros(0, np.int64)

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds from the call to its result on this rank. Collective."""
        total, returned = np.empty(iterations, np.int64), np.empty(iterations, np.int64)
        clock, meet, wait = time.perf_counter_ns, self.comm.mpi.Barrier, self.stream.synchronize
        error: FcommError | None = None
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
        self.return_ns = returned

        def done() -> NDArray[np.int64]:
            if error is not None:
                raise error
            return np.maximum(total, 1)

        return together(self.comm.mpi, done)


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


def _host(comm: Communicator, case: Case, x: Any, out: Any) -> HostCall:
    return HostCall(comm, case, x, out, prepared=False)


def _prepared(comm: Communicator, case: Case, x: Any, out: Any) -> HostCall:
    return HostCall(comm, case, x, out, prepared=True)


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        m.name: m
        for m in (
            Mode("graph", "one of many calls in a replayed CUDA graph", _graph, _sample, CALLS * 6 // 5, 6e-4),
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
