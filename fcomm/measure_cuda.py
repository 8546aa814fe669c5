"""Latencies on GPUs: inside a CUDA graph, one call alone, and the floor below both.

Every timed stretch begins behind a kernel in which the ranks meet, and which lets none of them go before all hosts have
queued everything that follows. So a time holds neither the hosts' launch latency nor the ranks' different arrivals; how
different these were is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fcomm import checks
from fcomm.backends.base import LaunchShape
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, FcommError
from fcomm.layout import params_dtype
from fcomm.measure import Case, Mode
from fcomm.source import MAX_THREADS, flatten

if TYPE_CHECKING:
    from fcomm import Communicator
    from fcomm.backends.cuda import CudaBackend

CALLS = 50
"""Calls in the longer graph; the shorter one has a fifth. The slope between them is the time of one call."""
RING_BYTES = 256 << 20
"""Device memory that the inputs and outputs of one graph may take on one rank; large messages get fewer calls."""
SHIFT = 64
"""Elements by which the data of successive calls are shifted against each other."""
MEET_TIMEOUT_S = 20.0


def _backend(comm: Communicator) -> CudaBackend:
    from fcomm.backends.cuda import CudaBackend

    if not isinstance(comm.backend, CudaBackend):
        raise ArgumentError("this kind of latency is measured on GPUs only; on the cpu backend use the mode host")
    return comm.backend


def _compile(backend: CudaBackend, name: str, header: str, call: str, world_size: int) -> Any:
    lines = [
        f"#define FC_N {world_size}",
        "#define FC_ALIGNED 1",
        f"#define FC_MAX_THREADS {MAX_THREADS}",
        f'#include "{header}"',
        f"FC_KERNEL(({call}))",
    ]
    return backend.compile(name, flatten("\n".join(lines)))


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
        self._kernel = _compile(self._backend, "meet", "measure/meet.cuh", "fc::meet", n)
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

    def close(self) -> None:
        self._backend.synchronize()
        self._memory.close()


_meetings: WeakKeyDictionary[Communicator, Meeting] = WeakKeyDictionary()
_rings: WeakKeyDictionary[Communicator, tuple[Any, Ring]] = WeakKeyDictionary()


def _meeting(comm: Communicator) -> Meeting:
    if comm not in _meetings:
        _meetings[comm] = Meeting(comm)
    return _meetings[comm]


def close(comm: Communicator) -> None:
    """Collective: gives back what measuring on this communicator has allocated; before the communicator is closed."""
    _rings.pop(comm, None)
    meeting = _meetings.pop(comm, None)
    if meeting is not None:
        meeting.close()


class Ring:
    """An input, an output and the exact result for each call of a graph; all candidates of a point use the same.

    Call k's input is the same random array shifted by k * SHIFT elements, so that each call has other data at every place,
    and the exact results of all of them come from one reduction on the host.
    """

    def __init__(self, comm: Communicator, case: Case) -> None:
        itemsize = REDUCIBLE[case.dtype].itemsize
        self.count = case.nbytes // itemsize
        if case.collective not in ("all_reduce", "all_gather"):
            raise ArgumentError(f"{case.collective} is not measured in graphs yet")
        outputs = 1 if case.collective == "all_reduce" else comm.world_size
        self.calls = max(5, min(CALLS, RING_BYTES // max(1, (1 + outputs) * case.nbytes)))
        total = self.count + (self.calls - 1) * SHIFT
        own = checks.inputs((20, case.nbytes, case.ranks), comm.rank, comm.world_size, total, case.dtype)
        every = np.empty((comm.world_size, own.nbytes), np.uint8)
        comm.mpi.Allgather(own.view(np.uint8), every)
        rows = [row.view(own.dtype) for row in every]
        self.copies = 1 if case.collective == "all_reduce" else comm.world_size
        self._want = [checks.reduce_reference(rows)] if case.collective == "all_reduce" else rows
        self.inputs = [comm.from_host(own[self._part(k)]) for k in range(self.calls)]
        self.outputs = [comm.empty(self.copies * self.count, case.dtype) for _ in range(self.calls)]
        if self.copies > 1:
            self.outputs = [out.reshape(self.copies, self.count) for out in self.outputs]

    def _part(self, k: int) -> slice:
        return slice(k * SHIFT, k * SHIFT + self.count)

    def _exact(self, k: int) -> NDArray[Any]:
        return np.concatenate([row[self._part(k)] for row in self._want])

    def poison(self, comm: Communicator) -> None:
        from cupy.cuda import runtime

        for out in self.outputs:
            if out.nbytes:
                runtime.memset(out.data.ptr, 0xA5, out.nbytes)
        comm.backend.synchronize()

    def wrong(self, comm: Communicator, calls: int) -> int:
        """Wrong elements in the first `calls` outputs, over all ranks. Collective."""
        found = sum(
            checks.wrong_elements(comm.to_host(self.outputs[k]).reshape(-1), self._exact(k)) for k in range(calls)
        )
        return int(sum(comm.mpi.allgather(found)))


def _ring(comm: Communicator, case: Case) -> Ring:
    point, ring = _rings.get(comm, (None, None))
    if ring is None or point != case.point:
        _rings.pop(comm, None)  # frees one before the next is made
        ring = Ring(comm, case)
        _rings[comm] = (case.point, ring)
    return ring


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


class _Bound:
    """A candidate of a point made ready: calling it makes one eager call on the point's own x and out."""

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any) -> None:
        from cupy.cuda import Stream

        self.comm, self.case = comm, case
        self.stream = Stream(non_blocking=True)
        self.arrival_skew_ns = np.zeros(0, np.int64)
        self._eager = comm.prepare(
            case.collective, x, out, protocol=case.registered_name, shape=case.shape, stream=self.stream
        )

    def __call__(self) -> Any:
        return self._eager()

    def _timed(self, queue: Queue) -> tuple[float, int]:
        """Nanoseconds from the ranks' meeting to the end of what `queue` queues, and this rank's wait in the meeting."""
        from cupy.cuda import Event, get_elapsed_time

        start, end = Event(), Event()
        meeting = _meeting(self.comm)
        meeting.queue(self.stream)
        start.record(self.stream)
        try:
            queue()
            end.record(self.stream)
        finally:
            meeting.open()  # also after an error: a rank that never opens holds up all others
        self.stream.synchronize()
        return get_elapsed_time(start, end) * 1e6, meeting.waited_ns()

    def _skew(self, waits: list[int]) -> None:
        """The largest wait in a meeting is how long before the last rank the first one was there."""
        every = np.empty((self.comm.world_size, len(waits)), np.int64)
        self.comm.mpi.Allgather(np.array(waits, np.int64), every)
        self.arrival_skew_ns = every.max(axis=0)


class GraphCalls(_Bound):
    """K calls in one CUDA graph, each on its own input and output, and a fifth of them in another."""

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any) -> None:
        super().__init__(comm, case, x, out)
        self.ring = ring = _ring(comm, case)
        calls = self._calls()
        calls[0]()  # loads what is loaded at a first launch
        self.stream.synchronize()
        self.short_calls = max(1, ring.calls // 5)
        self.long, self.short = _capture(self.stream, calls), _capture(self.stream, calls[: self.short_calls])
        self.long.launch(self.stream)
        self.stream.synchronize()
        comm.check()
        comm.mpi.Barrier()

    def _calls(self) -> list[Queue]:
        case, ring = self.case, self.ring
        return [
            self.comm.prepare(
                case.collective, ring.inputs[k], ring.outputs[k],
                protocol=case.registered_name, shape=case.shape, stream=self.stream,
            )
            for k in range(ring.calls)
        ]  # fmt: skip

    def verify(self) -> int:
        """Wrong elements after one replay of all calls on poisoned outputs, over all ranks. Collective."""
        self.ring.poison(self.comm)
        self.comm.mpi.Barrier()
        self.long.launch(self.stream)
        self.stream.synchronize()
        self.comm.check()
        return self.ring.wrong(self.comm, self.ring.calls)

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds of one call, for each replay: the slope between the two graphs. Collective."""
        if wrong := self.verify():
            raise FcommError(f"{self.case.protocol}: {wrong} wrong elements in a replayed graph, so it is not timed")
        nanoseconds, waits = np.empty(iterations, np.int64), []
        more = self.ring.calls - self.short_calls
        for k in range(iterations):
            long_ns, waited = self._timed(lambda: self.long.launch(self.stream))
            short_ns, _ = self._timed(lambda: self.short.launch(self.stream))
            nanoseconds[k] = max(1, round((long_ns - short_ns) / more))
            waits.append(waited)
        self._skew(waits)
        self.comm.check()
        if wrong := self.ring.wrong(self.comm, self.ring.calls):
            raise FcommError(
                f"{self.case.protocol}: {wrong} wrong elements after the timed replays: its times are void"
            )
        return nanoseconds


class FloorCalls(GraphCalls):
    """The same grid, argument and graph, and a kernel that only copies its input to its output."""

    def _calls(self) -> list[Queue]:
        comm, case, ring = self.comm, self.case, self.ring
        backend = _backend(comm)
        kernel = _compile(backend, "floor", "measure/floor.cuh", "fc::floor_copy<fc::Bytes>", comm.world_size)
        shape = LaunchShape(self._eager.blocks or 1, self._eager.threads or 32)
        calls: list[Queue] = []
        for k in range(ring.calls):
            params = np.zeros(1, params_dtype(comm.world_size))
            params["in"], params["out"] = ring.inputs[k].data.ptr, ring.outputs[k].data.ptr
            params["nbytes"] = case.nbytes
            params["copies"] = ring.copies
            calls.append(lambda p=params: backend.launch_once(kernel, shape, p, self.stream.ptr))  # type: ignore[misc]
        return calls

    def verify(self) -> int:
        ring = self.ring
        ring.poison(self.comm)
        self.long.launch(self.stream)
        self.stream.synchronize()
        found = sum(
            checks.wrong_elements(
                self.comm.to_host(ring.outputs[k]).reshape(-1), np.tile(self.comm.to_host(ring.inputs[k]), ring.copies)
            )
            for k in range(ring.calls)
        )
        return int(sum(self.comm.mpi.allgather(found)))

    def sample(self, iterations: int) -> NDArray[np.int64]:
        if self.verify():
            raise FcommError("the floor kernel does not copy its input")
        more = self.ring.calls - self.short_calls
        nanoseconds = np.empty(iterations, np.int64)
        for k in range(iterations):
            long_ns, _ = self._timed(lambda: self.long.launch(self.stream))
            short_ns, _ = self._timed(lambda: self.short.launch(self.stream))
            nanoseconds[k] = max(1, round((long_ns - short_ns) / more))
        return nanoseconds


class IsolatedCall(_Bound):
    """One prepared call, started on all ranks together."""

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds from the meeting to the call's end on this rank, by events. Collective."""
        self._eager()
        self.stream.synchronize()
        nanoseconds, waits = np.empty(iterations, np.int64), []
        for k in range(iterations):
            elapsed, waited = self._timed(self._eager)
            nanoseconds[k] = max(1, round(elapsed))
            waits.append(waited)
        self._skew(waits)
        self.comm.check()
        return nanoseconds


class HostCall(_Bound):
    """One call as the caller experiences it: to its return, and to its result."""

    def __init__(self, comm: Communicator, case: Case, x: Any, out: Any, prepared: bool) -> None:
        super().__init__(comm, case, x, out)
        name, shape, stream = case.registered_name, case.shape, self.stream
        collective = getattr(comm, case.collective)
        self._call: Queue = (
            self._eager if prepared else lambda: collective(x, out, protocol=name, shape=shape, stream=stream)
        )
        self.return_ns = np.zeros(0, np.int64)

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds from the call to its result; `return_ns` holds those to the call's return. Collective."""
        total, returned = np.empty(iterations, np.int64), np.empty(iterations, np.int64)
        clock, meet, wait = time.perf_counter_ns, self.comm.mpi.Barrier, self.stream.synchronize
        for k in range(iterations):
            meet()
            start = clock()
            self._call()
            back = clock()
            wait()
            total[k], returned[k] = clock() - start, back - start
        self.return_ns = returned
        self.comm.check()
        return np.maximum(total, 1)


def _sample(comm: Communicator, launch: Any, iterations: int) -> NDArray[np.int64]:
    return launch.sample(iterations)


def _host(comm: Communicator, case: Case, x: Any, out: Any) -> HostCall:
    return HostCall(comm, case, x, out, prepared=False)


def _prepared(comm: Communicator, case: Case, x: Any, out: Any) -> HostCall:
    return HostCall(comm, case, x, out, prepared=True)


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        m.name: m
        for m in (
            Mode("graph", "one of many calls in a replayed CUDA graph", GraphCalls, _sample),
            Mode("isolated", "one prepared call after the ranks met on the device", IsolatedCall, _sample),
            Mode("host", "one eager call as the caller experiences it", _host, _sample),
            Mode("prepared", "one prepared call as the caller experiences it", _prepared, _sample),
            Mode(
                "floor",
                "the same graph of kernels that copy input to output and do not communicate",
                FloorCalls,
                _sample,
            ),
        )
    }
)
"""Kinds of latency on the cuda backend. `floor` is measured with the grid of the case's own call."""
