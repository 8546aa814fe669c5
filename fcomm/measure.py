"""Taking times and summing them up: cases, the kinds of latency, the check before timing, budgets, statistics.

What a figure may say depends on how its numbers were taken, so each kind of latency is a `Mode` with a name of its own
and never shares a column with another.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fcomm import checks
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import DeviceError, FcommError, HangError
from fcomm.protocols import HOPPER, GpuShare, Protocol, protocols
from fcomm.variants import SHIPPED, Variant, variant

if TYPE_CHECKING:
    import pandas as pd
    from mpi4py import MPI

    from fcomm import Communicator
    from fcomm.group import Group

T = TypeVar("T")

COPY = "copy"
"""What one rank does, whatever the protocol: a case's name for it."""
FLOOR = "floor"
"""A kernel that moves the input to the output and communicates nothing: a case's name for it, in `protocol`."""
PEERS = ("mpi", "nccl", "torch.distributed", "torch.symm_mem.one_shot", "torch.symm_mem.two_shot")
"""All-reduces of other libraries: a case's name for them, in `protocol`; `experiments.peers` makes their calls."""
CHECKED_CALLS = 4
NOT_CHECKED = -1
"""In place of a number of wrong elements."""
DATASETS = 4
"""More than an encoding has copies of a slot (3): a call that read any earlier call's data is always seen."""

ARRAY, STAGING = "array", "staging"

GRAPH, SANDWICH, SANDWICH_DEPENDENT, SKEW = "graph", "sandwich", "sandwich_dependent", "skew"
"""Modes that others ask about by name."""
SANDWICHES = (SANDWICH, SANDWICH_DEPENDENT)
IN_GRAPHS = (GRAPH, *SANDWICHES)
"""Modes whose calls are captured, each with an input of its own."""


# ---- cases and modes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One thing to measure. Cases of one `point` are candidates for the same job, and share buffers and data."""

    collective: str
    protocol: str
    dtype: str
    nbytes: int
    ranks: int
    mode: str = "host"
    shape: tuple[int, int] | None = None
    """(blocks, threads) in place of the default launch shape."""
    dependent_launch: str = "none"
    input: str = ARRAY
    """Where the input lies: an array of the caller's, or the staging buffer, where peers pull it from as it is."""
    delay_us: float | None = None
    """Mode skew: time by which one rank is held up before each call."""
    late_rank: int | None = None
    """Mode skew: the rank that is held up; None: each in turn."""
    variant: str = SHIPPED
    """How its kernels are compiled: see `fcomm.variants`."""

    @property
    def job(self) -> tuple[object, ...]:
        """What candidates for the same job have in common: they may be compared, and one of them is the fastest."""
        return self.point, self.mode, self.dependent_launch, self.delay_us, self.late_rank, self.variant

    @property
    def mode_label(self) -> str:
        """The mode for readers, with the delay where it has one."""
        return mode_label(self.mode, self.delay_us)

    @property
    def label(self) -> str:
        """Its protocol, and its variant where that is not the shipped one."""
        return self.protocol if self.variant == SHIPPED else f"{self.protocol} {self.variant}"

    @property
    def kind(self) -> Variant:
        """What its variant promises."""
        return variant(self.variant)

    @property
    def point(self) -> tuple[str, str, int, int]:
        return self.collective, self.dtype, self.nbytes, self.ranks

    @property
    def peer(self) -> bool:
        """Whether another library makes the calls."""
        return self.protocol in PEERS

    @property
    def registered_name(self) -> str:
        """What to ask the communicator for."""
        return "auto" if self.protocol in (COPY, FLOOR) or self.peer else self.protocol

    @property
    def count(self) -> int:
        """Elements of one rank's input."""
        return self.nbytes // REDUCIBLE[self.dtype].itemsize

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of one rank's result."""
        if self.collective == "all_gather":
            return (self.ranks, self.count)
        return (self.count // self.ranks if self.collective == "reduce_scatter" else self.count,)

    def form(self, gpu: GpuShare | None = None) -> Protocol | None:
        """The protocol that runs: the one named, or the one that a name for several stands for at this size."""
        if self.protocol in (COPY, FLOOR) or self.peer:
            return None
        return protocols()[self.protocol].at(self.nbytes, self.ranks, gpu or HOPPER)

    def refusal(self, capabilities: frozenset[str], gpu: GpuShare | None = None) -> str | None:
        """Why it cannot be measured at all, in one clause; None if it can."""
        if self.mode in SANDWICHES and not REDUCIBLE[self.dtype].is_float:
            return f"the kernel behind the collective normalises floating-point numbers, not {self.dtype}"
        if self.collective == "reduce_scatter" and self.count % self.ranks:
            return f"{self.count} elements are no equal parts for {self.ranks} ranks"
        form = self.form(gpu)
        if form is None:
            return None
        if self.mode in SANDWICHES and not (self.kind.exact and self.kind.checked):
            return f"the norm behind it is compared to the bit, which a result of {self.variant} is not"
        return form.refusal(self.dtype, self.ranks, capabilities, self.nbytes) or self.kind.refusal(form)

    def columns(self, gpu: GpuShare | None = None) -> dict[str, Any]:
        """The counted facts of the case, as columns of `records.CASES`."""
        p = self.form(gpu)
        return {
            "collective": self.collective,
            "protocol": self.protocol,
            "form": p.name if p else self.protocol,
            "algorithm": p.algorithm.name if p else self.protocol,
            "encoding": "+".join(dict.fromkeys(e.name for e in p.encodings)) if p else "",
            "baseline": self.peer or bool(p and p.baseline),
            "mode": self.mode,
            "dependent_launch": self.dependent_launch,
            "input": self.input,
            "variant": self.variant,
            "shape": "" if self.shape is None else f"{self.shape[0]}x{self.shape[1]}",
            "delay_us": self.delay_us,
            "late_rank": self.late_rank,
            "ranks": self.ranks,
            "dtype": self.dtype,
            "count": self.count,
            "nbytes": self.nbytes,
            "rounds": p.algorithm.rounds if p else 0,
            "wire_bytes": p.wire_bytes(self.nbytes, self.ranks) if p else 0,
        }

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Case:
        """The case that has these columns."""
        blocks, _, threads = row["shape"].partition("x")
        delay_us, late_rank = (None if v is None or v != v else v for v in (row["delay_us"], row["late_rank"]))
        return cls(
            row["collective"],
            row["protocol"],
            row["dtype"],
            int(row["nbytes"]),
            int(row["ranks"]),
            row["mode"],
            (int(blocks), int(threads)) if blocks else None,
            row["dependent_launch"],
            row["input"],
            None if delay_us is None else float(delay_us),
            None if late_rank is None else int(late_rank),
            row["variant"],
        )


def mode_label(mode: str, delay_us: float | None) -> str:
    """A mode for readers, with the delay where it has one."""
    return mode if delay_us is None or math.isnan(delay_us) else f"{mode} {delay_us:g}us"


def arrays(comm: Communicator, case: Case) -> tuple[Any, Any]:
    """An input and an output for the case."""
    if case.input == STAGING:
        x = comm.staging_view(case.count, case.dtype)
        form = case.form(comm.gpu)
        if form is not None and form.algorithm.in_place_staging:
            return x, x
    else:
        x = comm.empty(case.count, case.dtype)
    return x, comm.empty(math.prod(case.out_shape), case.dtype).reshape(case.out_shape)


Launch = Callable[[], Any]
"""Starts one call; it is complete after the backend's `synchronize()`."""


@dataclass(frozen=True)
class Mode:
    """A kind of latency: how a call is made ready, and how a number of calls is timed on this rank."""

    name: str
    meaning: str
    bind: Callable[[Communicator, Case, Any, Any], Launch]
    """(comm, case, x, out) -> what is timed; where nothing else is, also what is checked before. Collective."""
    sample: Callable[[Communicator, Launch, int], NDArray[np.int64]]
    """(comm, launch, iterations) -> nanoseconds on this rank, shape (iterations,). Collective."""
    calls: int = 1
    """Calls that one iteration makes: what is expected of it before it was timed."""
    overhead_s: float = 0.0
    """What it costs beside these, likewise."""


def _bind_eager(comm: Communicator, case: Case, x: Any, out: Any) -> Launch:
    name, shape, collective = case.registered_name, case.shape, getattr(comm, case.collective)
    return lambda: collective(x, out, protocol=name, shape=shape)


def _bind_prepared(comm: Communicator, case: Case, x: Any, out: Any) -> Launch:
    return comm.prepare(case.collective, x, out, protocol=case.registered_name, shape=case.shape)


SKEW_MEANING = "what a prepared call adds to a known delay of one rank"


def _sample_host(
    comm: Communicator, launch: Launch, iterations: int, hold_up: Callable[[int], None] | None = None
) -> NDArray[np.int64]:
    nanoseconds = np.empty(iterations, np.int64)
    synchronize, meet, clock = comm.backend.synchronize, comm.mpi.Barrier, time.perf_counter_ns
    error: Exception | None = None
    for k in range(iterations):
        meet()  # a caller's time does not include what the ranks did before; met as often as planned, also after an error
        if error is not None:
            continue
        try:
            start = clock()
            if hold_up is not None:
                hold_up(k)
            launch()
            synchronize()
            nanoseconds[k] = clock() - start
        except Exception as caught:
            error = caught

    def done() -> NDArray[np.int64]:
        if error is not None:
            raise error
        return np.maximum(nanoseconds, 1)

    return together(comm.mpi, done)


class Delays:
    """By how much this rank is held up before each call of a case of mode skew: one rank before a call, each in turn."""

    def __init__(self, case: Case, rank: int) -> None:
        self.whole_ns = round(1e3 * (case.delay_us or 0.0))
        self._late, self._rank, self._ranks, self._calls = case.late_rank, rank, case.ranks, 0

    def visit(self, iterations: int) -> list[int]:
        """Nanoseconds before each of the next calls; the turns go on where the last visit's ended."""
        first, self._calls = self._calls, self._calls + iterations
        late = [k % self._ranks if self._late is None else self._late for k in range(first, self._calls)]
        return [self.whole_ns if rank == self._rank else 0 for rank in late]


@dataclass(frozen=True)
class Skewed:
    """A prepared call before which one rank is held up."""

    call: Launch
    delays: Delays

    def __call__(self) -> Any:
        return self.call()


def _bind_skewed(comm: Communicator, case: Case, x: Any, out: Any) -> Skewed:
    return Skewed(_bind_prepared(comm, case, x, out), Delays(case, comm.rank))


def _sample_skewed(comm: Communicator, launch: Any, iterations: int) -> NDArray[np.int64]:
    """From a barrier to the call's end on this rank, less the delay of the rank that is late."""
    clock, before_ns = time.perf_counter_ns, launch.delays.visit(iterations)

    def hold_up(k: int) -> None:
        end = clock() + before_ns[k]
        while (
            clock() < end
        ):  # a sleep would overshoot; without yielding, a shared core is taken away afterwards for as long
            os.sched_yield()

    return added_ns(_sample_host(comm, launch, iterations, hold_up), launch.delays)


def added_ns(nanoseconds: NDArray[np.int64], delays: Delays) -> NDArray[np.int64]:
    """What calls add to the delay. At least 1: a rank that met the others late may be through before the time is up."""
    return np.maximum(nanoseconds - delays.whole_ns, 1)


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        m.name: m
        for m in (
            Mode("host", "one eager call as the caller experiences it", _bind_eager, _sample_host),
            Mode("prepared", "one prepared call as the caller experiences it", _bind_prepared, _sample_host),
            Mode(SKEW, SKEW_MEANING, _bind_skewed, _sample_skewed),
        )
    }
)
"""Kinds of latency that any backend can be asked for; `measure_cuda` has a GPU's."""


def modes(backend: str) -> Mapping[str, Mode]:
    """Kinds of latency that a sweep takes on a backend, by name; the first one is its default."""
    if backend == "cpu":
        return MODES
    from fcomm import measure_cuda

    return MappingProxyType({name: mode for name, mode in measure_cuda.MODES.items() if name != FLOOR})


def mode_names() -> dict[str, str]:
    """Every mode that a sweep knows, with its meaning."""
    return {m.name: m.meaning for backend in ("cuda", "cpu") for m in modes(backend).values()}


def grid(comm: Communicator, case: Case, x: Any, out: Any) -> tuple[int, int]:
    """Blocks and threads that the case's call launches."""
    call = comm.prepare(case.collective, x, out, protocol=case.registered_name, shape=case.shape)
    return call.blocks, call.threads


# ---- meeting ---------------------------------------------------------------------------------------------------------


def rest(mpi: MPI.Intracomm, pause_s: float = 0.01) -> None:
    """Barrier for ranks that have nothing to do: an MPI library's own would take a core from those that work."""
    request = mpi.Ibarrier()
    while not request.Test():
        time.sleep(pause_s)


def gather(mpi: MPI.Intracomm, nanoseconds: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """All ranks' times on rank 0, shape (iterations, ranks); None elsewhere."""
    all_of_them = np.empty((mpi.size, len(nanoseconds)), np.int64) if mpi.rank == 0 else None
    mpi.Gather(nanoseconds, all_of_them)
    return None if all_of_them is None else np.ascontiguousarray(all_of_them.T)


def age_s() -> float:
    """Seconds since this process was started: what a budget has paid before the first line of Python ran."""
    try:
        with open("/proc/self/stat") as f:  # noqa: PTH123 - not a file of ours
            started = int(f.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()


# ---- checking --------------------------------------------------------------------------------------------------------


class WrongElementsError(FcommError):
    """Results were wrong where they had been right before; raised on all ranks alike."""

    def __init__(self, message: str, count: int = 1) -> None:
        super().__init__(message)
        self.count = count


def _sentence(error: Exception) -> FcommError:
    """An error of this package as it is; any other one is a bug, shown in full, that ends one case and not the sweep."""
    if isinstance(error, FcommError):
        return error
    traceback.print_exception(error, file=sys.stderr)
    if getattr(error, "status", None) is not None:
        from fcomm.backends.cuda import translated

        return translated(error)
    lines = str(error).splitlines()
    return FcommError(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")


def together(mpi: Group, step: Callable[[], T]) -> T:
    """Runs a step that meets the other ranks nowhere but in kernels; if it fails on one, all raise alike.

    A rank that waits in vain for one that failed says so; what that one says comes first.
    """
    error: FcommError | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as caught:
        error = _sentence(caught)
    failures = [
        (isinstance(e, HangError), rank, type(e), str(e))
        for rank, e in enumerate(mpi.allgather(error))
        if e is not None
    ]
    if failures:
        _, rank, kind, message = min(failures, key=lambda f: f[:2])
        raise kind(message if f"rank {rank}" in message else f"{message} (rank {rank})")
    return result  # type: ignore[return-value]  # no rank failed, so this one has its result


class Dataset:
    """A random input of each rank, on which the order of summation shows, and what protocols make of them here.

    Collective to make. forms : the protocols that will be asked about.
    """

    def __init__(
        self, comm: Communicator, seed: Sequence[int], case: Case, forms: Iterable[Protocol | None] = ()
    ) -> None:
        n = comm.world_size
        self._seed, self._case, self._ranks = [*seed, case.count], case, n
        self.own = self._inputs(comm.rank)
        every = np.empty((n, self.own.nbytes), np.uint8)
        comm.mpi.Allgather(self.own.view(np.uint8), every)
        rows = [row.view(self.own.dtype) for row in every]
        self._want: dict[str, NDArray[Any]] = {}
        for form in forms:
            key = _zero_rule(form)
            if key not in self._want:
                self._want[key] = self.own if form is None or n == 1 else checks.expected(form, rows, comm.rank)

    def want(self, form: Protocol | None) -> NDArray[Any]:
        """The exact result on this rank, flat."""
        return self._want[_zero_rule(form)]

    def _inputs(self, rank: int) -> NDArray[Any]:
        return checks.inputs(self._seed, rank, self._ranks, self._case.count, self._case.dtype)

    def wrong(self, case: Case, form: Protocol | None, got: NDArray[Any]) -> int:
        """Wrong elements of a result: other bits or, of a peer or variant that promises no order, an error beyond any order's."""
        if case.kind.exact and not case.peer:
            return checks.wrong_elements(got, self.want(form))
        rows = [self._inputs(rank) for rank in range(self._ranks)]
        return checks.beyond_rounding(rows, got) if case.peer else checks.beyond_order(rows, got)


def _zero_rule(form: Protocol | None) -> str:
    """Protocols of one collective have the same results, but for those that cannot send one of the zeros."""
    return form.name if form is not None and form.name in checks.ZERO_NOT_SENT else ""


@dataclass(frozen=True)
class Bound:
    """A case with the communicator that runs it, its arrays, and what starts one call."""

    comm: Communicator
    case: Case
    x: Any
    out: Any
    launch: Launch


def _put(comm: Communicator, array: Any, host: NDArray[Any]) -> Any:
    """Queues a copy of the host's array to one of the backend's; returns what must live until it is done."""
    backend, source = comm.backend, comm.from_host(host)
    backend.copy(backend.view(source), backend.view(array), backend.stream(array, None))
    return source


def in_turns(
    mpi: MPI.Intracomm, bound: Sequence[Bound], turns: int, step: Callable[[int, Bound], None]
) -> dict[Case, str]:
    """Runs step(turn, candidate) for all candidates one after the other, `turns` times. Collective.

    Returns, in one sentence each, why candidates failed on some rank; a failed one is left out from then on. Steps meet the
    other ranks in kernels only, whose waits are bounded: where one rank fails, the others give up in the same candidate or
    the next one, and the first of them is the one to blame. Raises `DeviceError` if the GPU failed with it.
    """
    failed: dict[Case, str] = {}
    for turn in range(turns):
        while left := [b for b in bound if b.case not in failed]:
            error: tuple[int, bool, str, bool] | None = None
            for k, candidate in enumerate(left):
                try:
                    step(turn, candidate)
                except Exception as caught:
                    why = _sentence(caught)
                    error = (k, isinstance(why, HangError), str(why), isinstance(why, DeviceError))
                    break
            first = min((e for e in mpi.allgather(error) if e is not None), default=None)
            if first is None:
                break
            number, _, sentence, fatal = first
            if fatal:
                raise DeviceError(f"{left[number].case.label}: {sentence}")
            failed[left[number].case] = sentence
            for comm in dict.fromkeys(b.comm for b in left):
                recover(comm)
    return failed


def recover(comm: Communicator) -> None:
    """Collective: puts a communicator, and what measures on it, into its first state after a call on it failed."""
    comm.reset()
    if comm.backend.name == "cuda":
        from fcomm import measure_cuda

        measure_cuda.recover(comm)


def bind_all(
    mpi: MPI.Intracomm, wanted: Sequence[tuple[Communicator, Case, Any, Any]]
) -> tuple[list[Bound], dict[Case, FcommError]]:
    """Makes cases ready for their check, each from (communicator, case, x, out); and why others could not be. Collective."""
    made: dict[Case, Bound] = {}
    errors: dict[Case, FcommError] = {}
    for comm, case, x, out in wanted:
        try:
            made[case] = Bound(comm, case, x, out, MODES[case.mode].bind(comm, case, x, out))
        except Exception as caught:
            errors[case] = _sentence(caught)
    for theirs in mpi.allgather(errors):
        errors = {**theirs, **errors}
    return [b for case, b in made.items() if case not in errors], errors


def fill(comm: Communicator, case: Case, seed: Sequence[int], x: Any) -> None:
    """Puts this rank's random data into the case's input."""
    kept = _put(
        comm, x, checks.inputs([*seed, case.ranks, case.count], comm.rank, comm.world_size, case.count, case.dtype)
    )
    comm.backend.synchronize()
    del kept


def verify(
    mpi: MPI.Intracomm, bound: Sequence[Bound], data: Sequence[Dataset]
) -> tuple[dict[Case, int], dict[Case, str]]:
    """Wrong elements of each candidate of a point, over `CHECKED_CALLS` calls and all ranks; and why candidates failed.

    Candidates take turns and each call has other data than those before it, since what is stale may be another's.
    Outputs are poisoned, so that an element that was not written is wrong. Collective; the same result on all ranks.
    """
    number = {b.case: k for k, b in enumerate(bound)}
    wrong = dict.fromkeys((b.case for b in bound), 0)

    def check(turn: int, b: Bound) -> None:
        # An odd stride, so that a candidate does not meet the same data in every turn.
        dataset = data[(turn * (len(bound) | 1) + number[b.case]) % len(data)]
        form = b.case.form(b.comm.gpu)
        want = dataset.want(form)
        kept = []
        if b.out is not b.x:
            poison = np.empty_like(want)
            checks.poison(poison)
            kept.append(_put(b.comm, b.out, poison))
        kept.append(_put(b.comm, b.x, dataset.own))
        b.comm.backend.synchronize()
        b.launch()
        b.comm.backend.synchronize()
        b.comm.check()
        if b.case.kind.checked:
            wrong[b.case] += dataset.wrong(b.case, form, b.comm.to_host(b.out))

    failed = in_turns(mpi, bound, CHECKED_CALLS, check)
    mine = np.array(list(wrong.values()), np.int64)
    total = np.empty_like(mine)
    mpi.Allreduce(mine, total)
    counted = dict(zip(wrong, total.tolist(), strict=True))
    return {case: count if case.kind.checked else NOT_CHECKED for case, count in counted.items()}, failed


def order_in_bits(
    mpi: MPI.Intracomm, bound: Sequence[Bound], data: Sequence[Dataset]
) -> tuple[dict[Case, dict[str, int]], dict[Case, str]]:
    """What an order of summation that is not fixed does to bits, as columns of `records.CASES`; and why candidates failed.

    Each candidate makes `CHECKED_CALLS` calls on the same data. `inexact`: elements whose bits are not the contract's, over all
    ranks; `ranks_differ`: elements in which some rank has other bits than rank 0; `calls_differ`: elements, over all ranks,
    whose bits are not those of the first call; each the most of any call. Collective; the same result on all ranks.
    """
    found = {b.case: dict.fromkeys(("inexact", "ranks_differ", "calls_differ"), 0) for b in bound}
    results: dict[Case, list[NDArray[Any]]] = {b.case: [] for b in bound}

    def call(turn: int, b: Bound) -> None:
        kept = _put(b.comm, b.x, data[0].own)
        b.comm.backend.synchronize()
        b.launch()
        b.comm.backend.synchronize()
        b.comm.check()
        results[b.case].append(checks.bits(b.comm.to_host(b.out)))
        del kept

    failed = in_turns(mpi, bound, CHECKED_CALLS, call)
    for b in bound:
        if b.case in failed:
            continue
        first, want = results[b.case][0], checks.bits(data[0].want(b.case.form(b.comm.gpu)))
        for got in results[b.case]:
            mine = np.array([np.count_nonzero(got != want), np.count_nonzero(got != first)], np.int64)
            total = np.empty_like(mine)
            mpi.Allreduce(mine, total)
            differs = np.empty(got.shape, np.uint8)
            mpi.Allreduce((got != mpi.bcast(got)).astype(np.uint8), differs, op=_max())
            counts = (total[0], np.count_nonzero(differs), total[1])
            row = found[b.case]
            for name, count in zip(row, counts, strict=True):
                row[name] = max(row[name], int(count))
    return {case: row for case, row in found.items() if case not in failed}, failed


def _max() -> Any:
    from mpi4py import MPI

    return MPI.MAX


COSTED_CALLS = 4


def call_seconds(mpi: MPI.Intracomm, bound: Sequence[Bound]) -> tuple[dict[Case, float], dict[Case, str]]:
    """Seconds of one of a few calls in a row, on the slowest rank; and why candidates failed. Collective."""
    seconds = dict.fromkeys((b.case for b in bound), 0.0)

    def burst(turn: int, b: Bound) -> None:
        start = time.perf_counter()
        for _ in range(COSTED_CALLS):
            b.launch()
        b.comm.backend.synchronize()
        b.comm.check()
        seconds[b.case] = (time.perf_counter() - start) / COSTED_CALLS

    failed = in_turns(mpi, bound, 1, burst)
    every: list[dict[Case, float]] = mpi.allgather(seconds)
    return {case: max(one[case] for one in every) for case in seconds}, failed


# ---- budgets ---------------------------------------------------------------------------------------------------------

ROUNDS = 3
"""Visits of each case in a turn, all candidates between them: drift of the machine then falls on all of them alike."""
WARMUP = 1
"""Untimed calls at the start of each visit."""
LEAST = 10
"""Timed calls of a case in its first turn: fewer do not give a 95 % interval worth showing."""
MOST, MOST_REPLAYS = 2000, 200
"""Timed calls of a case at most, on the cpu backend and on GPUs, where a replay is the mean of many calls already."""
VISIT_S: Mapping[str, float] = MappingProxyType({"cpu": 2e-3, "cuda": 6e-3})
"""What a visit costs beside its calls, its share of making a case ready included, by backend; until the clock knows better."""
SURE = 0.01
"""An interval narrower than this share of its median is not narrowed further: what is chosen by it costs no more."""


def in_doubt(times_us: Mapping[Case, NDArray[np.float64]]) -> list[Case]:
    """Cases that more calls would say something about, those first about which they would say most.

    times_us : the slowest rank's time of each call so far. Candidates for the same job (one point, mode, launch feature and
    delay) are a group. Where the interval of its fastest one is reached by those of others, the choice is not certain: these come
    first; then all others; both by the width of their interval relative to the median, widest first. Cases with an interval
    narrower than `SURE` are left out.
    """
    summary = {case: (float(np.median(us)), *median_interval(us)) for case, us in times_us.items() if len(us)}
    groups: dict[Hashable, list[Case]] = {}
    for case in summary:
        if case.protocol != FLOOR:
            groups.setdefault(case.job, []).append(case)
    rivals: set[Case] = set()
    for group in groups.values():
        best = min(group, key=lambda c: summary[c][0])
        high_us = summary[best][2]
        reached = [c for c in group if not summary[c][1] > high_us]  # an interval that is not known reaches everything
        rivals.update(reached if len(reached) > 1 else ())

    def width(case: Case) -> float:
        median_us, low_us, high_us = summary[case]
        return math.inf if math.isnan(low_us) else (high_us - low_us) / median_us

    return sorted((c for c in summary if width(c) > SURE), key=lambda c: (c not in rivals, -width(c)))


class Pace:
    """What timing takes: estimated from the cost of a call, and corrected by the clock, as points are timed.

    The clock's word for a point holds for that point, for others of its rank count until they have their own, and so on:
    an estimate that is wrong throughout is right after the first turn.
    """

    def __init__(self, visit_s: float) -> None:
        self._visit_s = visit_s
        self._seconds: dict[Hashable, tuple[float, float]] = {}

    def _estimate_s(self, wanted: Iterable[tuple[float, int]]) -> float:
        return sum(ROUNDS * self._visit_s + cost_s * (calls + ROUNDS * WARMUP) for cost_s, calls in wanted)

    def expected_s(self, case: Case, wanted: Sequence[tuple[float, int]]) -> float:
        """Seconds to time candidates of the case's point. wanted : seconds of one iteration, and iterations, of each."""
        for key in (case.point, case.ranks, ""):
            estimated_s, taken_s = self._seconds.get(key, (0.0, 0.0))
            if estimated_s > 0:
                return self._estimate_s(wanted) * taken_s / estimated_s
        return self._estimate_s(wanted)

    def learn(self, case: Case, wanted: Sequence[tuple[float, int]], taken_s: float) -> None:
        """The clock's word for candidates of the case's point."""
        estimate_s = self._estimate_s(wanted)
        for key in (case.point, case.ranks, ""):
            estimated_s, before_s = self._seconds.get(key, (0.0, 0.0))
            self._seconds[key] = (estimated_s + estimate_s, before_s + taken_s)


def fitting(groups: Sequence[tuple[T, float]], available_s: float) -> list[T]:
    """Those that fit into the time, in the order given, each whole or not at all. groups : what, and its seconds."""
    found = []
    for what, seconds in groups:
        if seconds <= available_s:
            found.append(what)
            available_s -= seconds
    return found


def visits(iterations: int, rounds: int = ROUNDS) -> list[int]:
    """Timed calls of each round's visit; they add up to `iterations`."""
    return [iterations * (k + 1) // rounds - iterations * k // rounds for k in range(rounds)]


# ---- statistics ------------------------------------------------------------------------------------------------------


def bus_factor(collective: str, ranks: int) -> float:
    """Ratio busbw / algbw, as nccl-tests defines it: what makes figures of different rank counts comparable."""
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def algbw_gbps(collective: str, nbytes: int, ranks: int, latency_us: float) -> float:
    """GB/s (10^9 bytes). nbytes : bytes of one rank's input."""
    moved = nbytes * (ranks if collective == "all_gather" else 1)
    return moved / latency_us / 1e3


def median_interval(values: NDArray[np.float64], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free interval of the median: two order statistics, whatever the values' distribution.

    The number of n values below the median is binomial(n, 1/2), so the l-th smallest and the l-th largest enclose it
    with probability 1 - 2 P(B < l). The largest l that keeps `confidence` is taken. NaN where n is too small (below 6
    for 95 %).
    """
    n = len(values)
    l = _outside(n, confidence)  # noqa: E741 - the name in the literature
    if l == 0:
        return math.nan, math.nan
    ordered = np.partition(values, [l - 1, n - l])
    return float(ordered[l - 1]), float(ordered[n - l])


@cache
def _outside(n: int, confidence: float) -> int:
    """Values that lie outside the interval of the median of n on each side at most; 0 would be the whole line."""
    from scipy.stats import binom

    below = binom.cdf(np.arange(n // 2 + 1), n, 0.5)
    return int(np.count_nonzero(2 * below <= (1 - confidence) * (1 + 1e-12)))


_EXACT_LAUNCHES = 6
_RESAMPLES = 2000


def launch_interval(groups: Sequence[NDArray[np.float64]], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the pooled median where the launches, not their calls, are the replicates.

    Launches are drawn with replacement, each as a whole: calls within one share its placement, clocks and addresses.
    """
    return weighted_interval(launch_medians(groups), launch_draws(len(groups))[1], confidence)


def launch_draws(launches: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How often each launch is in each draw, shape (draws, launches), and each draw's weight.

    All draws are enumerated for up to 6 launches; beyond, 2000 are taken with a fixed seed: the same for all cases, so that
    two cases of a run can be compared draw by draw.
    """
    k = launches
    if k > _EXACT_LAUNCHES:
        return np.random.default_rng(0).multinomial(k, [1 / k] * k, _RESAMPLES), np.ones(_RESAMPLES)
    draws = np.array([np.bincount(d, minlength=k) for d in itertools.combinations_with_replacement(range(k), k)])
    return draws, np.array([math.factorial(k) / math.prod(math.factorial(c) for c in d) for d in draws.tolist()])


def launch_medians(groups: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Pooled median of each of `launch_draws`."""
    pooled = np.concatenate(groups)
    of = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    order = np.argsort(pooled, kind="stable")
    return _weighted_medians(pooled[order], launch_draws(len(groups))[0][:, of[order]])


def weighted_interval(
    values: NDArray[np.float64], weights: NDArray[np.float64], confidence: float = 0.95
) -> tuple[float, float]:
    """What holds `confidence` of the weight, as much of the rest on either side."""
    by_size = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[by_size]) / weights.sum()
    alpha = 1 - confidence
    low = values[by_size][np.searchsorted(reached, alpha / 2)]
    high = values[by_size][min(int(np.searchsorted(reached, 1 - alpha / 2)), len(values) - 1)]
    return float(low), float(high)


def _weighted_medians(ordered: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Medians of `ordered` with each value repeated `counts` times, one for each row of counts."""
    reached = np.cumsum(counts, axis=1)
    half = reached[:, -1:] / 2
    lower = ordered[np.argmax(reached >= half, axis=1)]
    upper = ordered[np.argmax(reached > half, axis=1)]
    return (lower + upper) / 2


def quantile(values: NDArray[np.float64], q: float) -> float:
    """The smallest value that at least the share q of all values does not exceed: a value that was seen."""
    return float(np.quantile(values, q, method="inverted_cdf"))


def slowest_rank(samples: pd.DataFrame) -> pd.DataFrame:
    """A call is over when its last rank is: the maximum over ranks, one row for each launch, case and iteration."""
    return samples.groupby(["case", "launch", "iteration"], sort=True)["nanoseconds"].max().reset_index()


def summarise(samples: pd.DataFrame, cases: pd.DataFrame) -> pd.DataFrame:
    """`records.LATENCY` for each case with samples and without wrong elements, beside the case's columns."""
    import pandas as pd

    from fcomm.records import LATENCY

    known = {row["case"]: row for row in cases.to_dict("records")}
    rows = []
    for case, calls in slowest_rank(samples).groupby("case", sort=True):
        facts = known[case]
        if facts["wrong"] > 0 or facts["status"] != "measured":
            continue
        groups = [g.to_numpy(np.float64) / 1e3 for _, g in calls.groupby("launch")["nanoseconds"]]
        us = np.concatenate(groups)
        low, high = median_interval(us) if len(groups) == 1 else launch_interval(groups)
        median = float(np.median(us))
        algbw = algbw_gbps(facts["collective"], int(facts["nbytes"]), int(facts["ranks"]), median)
        rows.append(
            {
                "case": case,
                "launches": len(groups),
                "iterations": len(us),
                "latency_us": median,
                "low_us": low,
                "high_us": high,
                "p90_us": quantile(us, 0.9),
                "p99_us": quantile(us, 0.99),
                "min_us": float(us.min()),
                "algbw_gbps": algbw,
                "busbw_gbps": algbw * bus_factor(facts["collective"], int(facts["ranks"])),
            }
        )
    summary = pd.DataFrame(rows, columns=["case", *(c.name for c in LATENCY)])
    summary = summary.astype({"case": cases["case"].dtype, **{c.name: c.type for c in LATENCY}})
    return _beside_floor(cases.drop(columns="iterations").merge(summary, on="case", how="inner"))


_SAME_FLOOR = ["collective", "dtype", "nbytes", "ranks", "mode", "dependent_launch", "blocks", "threads"]


def _beside_floor(latency: pd.DataFrame) -> pd.DataFrame:
    """Fills in each case's floor: the one that was measured with its very grid and launch feature."""
    floors = latency[latency["protocol"] == FLOOR]
    known = {tuple(row): us for *row, us in floors[[*_SAME_FLOOR, "latency_us"]].itertuples(index=False)}
    keys = latency[_SAME_FLOOR].itertuples(index=False)
    latency["floor_us"] = [known.get(tuple(key), math.nan) for key in keys]
    latency["floor_multiple"] = latency["latency_us"] / latency["floor_us"]
    return latency
