"""The sweep: ``mpirun -n 8 python -m experiments.sweep`` measures collectives over sizes, rank counts and protocols.

Rank counts below the number of ranks started are sub-communicators; the other ranks sleep meanwhile. For each rank count,
first every candidate's results are compared with the reference, then iteration counts are fixed so that the whole sweep
keeps to its budget, then the candidates are timed in rounds, each in a random order. On GPUs each case that is timed in a
graph has a floor beside it: a kernel of the same grid and launch feature that communicates nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from mpi4py import MPI

from experiments import mps
from experiments.request import (
    CHECKING_SHARE,
    FINISH_S,
    TIMING_SHARE,
    Request,
    build_request,
    candidates,
    dry_run,
    parser,
)
from experiments.tables import latency_csv, nccl_table, rows, summary_tables
from fcomm import Communicator, bootstrap, measure, provenance, records, settings
from fcomm.dtypes import BYTES, REDUCIBLE
from fcomm.errors import ArgumentError, DeviceError, FcommError, RecordError
from fcomm.measure import FLOOR, Case
from fcomm.protocols import GpuShare, protocols
from fcomm.sizes import format_size
from fcomm.source import Specialisation

T = TypeVar("T")

# ---- together --------------------------------------------------------------------------------------------------------


def in_turn(world: MPI.Intracomm, ranks: int, step: Callable[[], T]) -> T | None:
    """Runs a step on the first `ranks` ranks while the others sleep; an error of one of them is raised on all."""
    result, error = None, None
    if world.rank < ranks:
        try:
            result = step()
        except FcommError as caught:
            error = caught
    measure.rest(world)
    for failure in world.allgather(error):
        if failure is not None:
            raise failure
    return result


def on_root(world: MPI.Intracomm, step: Callable[[], T]) -> T:
    """Runs a step on rank 0; all ranks get its result, or its error."""
    return world.bcast(in_turn(world, 1, step))


def _first(world: MPI.Intracomm, n: int) -> MPI.Intracomm:
    """A communicator of the first n ranks; MPI.COMM_NULL on the others."""
    return cast(MPI.Intracomm, world.Split(0 if world.rank < n else MPI.UNDEFINED, world.rank))


class _Buffers:
    """Input and output of each point: its candidates share them, so that all have the same data at the same addresses.

    seed : of the input's content; None leaves it as it is, for checks that write their own.
    """

    def __init__(self, *seed: int) -> None:
        self._seed = seed
        self._kept: dict[Any, tuple[Any, Any]] = {}

    def of(self, comm: Communicator, case: Case) -> tuple[Any, Any]:
        in_place = case.input != measure.ARRAY
        form = case.form(comm.gpu)
        own = form is not None and form.algorithm.in_place_staging
        key = (case.point, case.input, (case.dependent_launch, own) if in_place else None)
        if key not in self._kept:
            x, out = self._kept[key] = measure.arrays(comm, case)
            if self._seed:
                measure.fill(comm, case, self._seed, x)
            return x, out
        return self._kept[key]


Advance = Callable[[int, str], None]

# ---- the sweep -------------------------------------------------------------------------------------------------------


@dataclass
class Surveyed:
    """A case after its check: how many elements were wrong, what a call costs, what was launched."""

    case: Case
    number: int = -1
    status: str = "measured"
    reason: str = ""
    wrong: int = 0
    checked_calls: int = 0
    cost_s: float = 0.0
    """Seconds of one timed iteration."""
    blocks: int = 0
    threads: int = 0
    planned: int = 0


@dataclass
class Place:
    """What one rank count has of the machine."""

    gpu: GpuShare | None = None
    l2_gbps: float | None = None
    no_launch: dict[str, str] = field(default_factory=dict)
    """Launch features that are not there, each with the reason."""


HANG_S = 10.0
"""Seconds until a wait between GPUs is given up; an emulation on a busy machine may need longer (FCOMM_TIMEOUT_S)."""
OVERTIME_S = 150.0
"""Beyond its budget a sweep on GPUs ends, wherever it stands, and says where that is."""


class Sweep:
    """One launch of the sweep. All ranks have one; rank 0's has the recorder."""

    def __init__(self, world: MPI.Intracomm, request: Request, started_s: float) -> None:
        self.world, self.request = world, request
        self.root = world.rank == 0
        self.started_s = started_s
        self.recorder: records.Recorder | None = None
        self.launch = 0
        self.owed: dict[int, int] = {}
        self.write_error: RecordError | None = None
        self.facts: dict[str, Any] = {}
        self.subs = {n: _first(world, n) for n in request.ranks}
        self.places = {n: Place() for n in request.ranks}

    @property
    def cuda(self) -> bool:
        return bool(self.facts["backend"] == "cuda")

    # The clock of the budget: it began when the processes did.
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def left_s(self) -> float:
        return self.request.budget_s - FINISH_S[self.facts["backend"]] - self.elapsed_s()

    # ---- setting up ----

    def look_around(self) -> None:
        """Facts about the machine, from a communicator of all ranks: what cannot work at all fails here."""
        r = self.request
        with Communicator(self.world, backend=r.backend, max_bytes=4096, dependent_launch="none") as comm:
            self.facts = provenance.collect(comm)
            self.request = r.resolved(self.facts["backend"])
            if self.cuda:
                self._compile_ahead(comm)

    def _compile_ahead(self, comm: Communicator) -> None:
        """Each rank compiles a part of the kernels; CuPy keeps them on disk, where the other ranks will find them.

        What cannot be compiled is left for the check of its protocol, which names it.
        """
        jobs = self._kernels(comm)
        mine = jobs[comm.rank :: comm.world_size]
        with self._progress(len(mine), "kernel") as advance:
            for job in mine:
                with suppress(FcommError):
                    job()
                advance(1, f"compiling, {comm.world_size} ranks")
        measure.rest(self.world)

    def _kernels(self, comm: Communicator) -> list[Callable[[], object]]:
        from fcomm import measure_cuda

        r, backend = self.request, cast(Any, comm.backend)
        specs: dict[str, Specialisation] = {}
        floors: dict[tuple[int, bool, str], None] = {}
        for n in r.ranks:
            for collective in r.collectives:
                for dtype in r.dtypes:
                    for nbytes in r.sizes:
                        aligned = nbytes % (16 * n if collective == "reduce_scatter" else 16) == 0
                        floors |= {(n, aligned, launch): None for launch in r.launches}
                        for case, why in candidates(
                            r, collective, dtype, nbytes, n, comm.capabilities, comm.gpu
                        ).items():
                            form = case.form(comm.gpu)
                            if why is None and form is not None:
                                element = BYTES if form.algorithm.moves_bytes else REDUCIBLE[dtype]
                                spec = Specialisation(form, element, n, aligned, case.dependent_launch)
                                specs[spec.name] = spec
        jobs: list[Callable[[], object]] = [partial(backend.kernel, spec) for spec in specs.values()]
        jobs += [partial(backend.compile, "meet", measure_cuda.meet_text(n)) for n in r.ranks]
        for n, aligned, launch in floors:
            for threads in (32, 1024):
                jobs.append(partial(backend.compile, FLOOR, measure_cuda.floor_text(n, aligned, threads, launch)))
        return jobs

    @contextmanager
    def _communicators(self, n: int) -> Iterator[dict[str, Communicator]]:
        """A communicator for each launch feature that is there."""
        with ExitStack() as stack:
            comms: dict[str, Communicator] = {}
            for launch in self.request.launches:
                options: dict[str, Any] = (
                    {"timeout_s": HANG_S} if self.cuda and "FCOMM_TIMEOUT_S" not in os.environ else {}
                )
                comm = stack.enter_context(
                    Communicator(
                        self.subs[n],
                        backend=self.facts["backend"],
                        max_bytes=max(self.request.sizes),
                        dependent_launch=launch,
                        **options,
                    )
                )
                if comm.dependent_launch == launch:
                    comms[launch] = comm
                else:
                    self.places[n].no_launch[launch] = str(comm.no_dependent_launch)
            if not comms:
                why = "; ".join(self.places[n].no_launch.values())
                raise ArgumentError(f"--launch {','.join(self.request.launches)} is not to be had here: {why}")
            first = next(iter(comms.values()))
            self.places[n].gpu = first.gpu
            yield comms
            if self.cuda:
                from fcomm import measure_cuda

                for comm in comms.values():
                    measure_cuda.close(comm)

    # ---- records ----

    def open_records(self, out: Path, resume: Path | None) -> dict[int, Case] | None:
        """Starts or continues a run. Returns the cases to run by number, or None for all that were asked for.

        What an interrupted run still owes is kept in `owed`, as timed calls by case number.
        """

        def create() -> tuple[int, dict[int, int], dict[int, Case] | None]:
            self.recorder = records.Recorder.create(
                out, socket.gethostname(), self.facts["backend"], asdict(self.request), self._expected_bytes()
            )
            return self.recorder.begin(self.facts), {}, None

        def reopen(path: Path) -> tuple[int, dict[int, int], dict[int, Case] | None]:
            self.recorder = records.Recorder.reopen(path)
            run = records.load(path)
            why = next(filter(None, (provenance.mismatch(p, self.facts) for p in run.launches)), None)
            if why is not None:
                raise RecordError(f"{path} cannot be resumed here: {why}; start a new run")
            if not run.launches:  # it ended before it had a plan
                return self.recorder.begin(self.facts), {}, None
            if not run.owed:  # it ended between its last call and its seal, or is complete
                return -1, {}, {}
            every = _cases_by_number(run)
            launch = self.recorder.begin(self.facts, resumes=True)
            return launch, run.owed, {number: every[number] for number in run.owed}

        self.launch, self.owed, only = on_root(self.world, create if resume is None else lambda: reopen(resume))
        return only

    def _expected_bytes(self) -> int:
        r = self.request
        points = len(r.sizes) * len(r.dtypes) * len(r.modes) * len(r.launches) * max(len(r.protocols), len(protocols()))
        # 19 bytes a row in the stream, as many again at most in Parquet; a figure and tables.
        return 4 << 20 | points * sum(r.ranks) * r.calls * 2 * 19

    # ---- checking ----

    def survey(self, only: dict[int, Case] | None) -> list[Surveyed]:
        """Checks every case; known to all ranks. only : the cases of a resumed run, by number."""
        found: list[Surveyed] = []
        for k, n in enumerate(self.request.ranks):
            share = CHECKING_SHARE * self.request.budget_s * (k + 1) / len(self.request.ranks)
            deadline_s = float("inf") if only is not None else share
            found += in_turn(self.world, n, partial(self._survey_ranks, n, deadline_s, only)) or []
        if only is None:
            found += _floors(found)
        else:
            found += [_floor_of(case, found) for case in only.values() if case.protocol == FLOOR]
        for number, s in enumerate(found):
            s.number = number
        if only is not None:
            numbers = {case: number for number, case in only.items()}
            for s in found:
                s.number = numbers[s.case]
        return self.world.bcast(found)

    def _survey_ranks(self, n: int, deadline_s: float, only: dict[int, Case] | None) -> list[Surveyed]:
        r = self.request
        wanted = None if only is None else set(only.values())
        found = []
        points = [(c, d) for c in r.collectives for d in r.dtypes]
        with self._communicators(n) as comms, self._progress(len(points) * len(r.sizes), "point") as advance:
            first = next(iter(comms.values()))
            if self.cuda:
                from fcomm import measure_cuda

                self.places[n].l2_gbps = measure_cuda.l2_gbps(first)
            for collective, dtype in points:
                per_byte_s = 0.0
                for nbytes in r.sizes:
                    point = candidates(r, collective, dtype, nbytes, n, first.capabilities, first.gpu, list(comms))
                    if wanted is not None:
                        point = {case: None for case in point if case in wanted}
                    found += [Surveyed(case, status="refused", reason=why) for case, why in point.items() if why]
                    run = [case for case, why in point.items() if why is None]
                    # Sizes ascend: what the last one took, by its bytes, is what this one takes at most.
                    start = self.elapsed_s()
                    if run and first.mpi.bcast(start + per_byte_s * nbytes < deadline_s):
                        found += self._survey_point(comms, run)
                        per_byte_s = (self.elapsed_s() - start) / nbytes
                    else:
                        late = "the budget ended before its results could be checked"
                        found += [Surveyed(case, status="dropped", reason=late) for case in run]
                    advance(1, f"checking, {n} ranks")
        return found

    def _survey_point(self, comms: Mapping[str, Communicator], cases: list[Case]) -> list[Surveyed]:
        first, mpi = cases[0], next(iter(comms.values())).mpi
        # On GPUs results are those of the call and not of the way to time it; elsewhere each way makes calls of its own.
        known = measure.modes(self.facts["backend"])
        checked = {case: replace(case, mode="prepared") if self.cuda else case for case in cases}
        surveyed = {case: Surveyed(case) for case in dict.fromkeys(checked.values())}
        buffers = _Buffers()
        bound, failed = measure.bind_all(
            mpi,
            [
                (comms[case.dependent_launch], case, *buffers.of(comms[case.dependent_launch], case))
                for case in surveyed
            ],
        )
        seed = (self.request.seed, self.launch, first.ranks)
        forms = [b.case.form(b.comm.gpu) for b in bound] or [None]
        some = next(iter(comms.values()))
        data = [measure.Dataset(some, (*seed, k), first, forms) for k in range(measure.DATASETS)]
        wrong, more = measure.verify(mpi, bound, data)
        failed |= more
        seconds, more = measure.call_seconds(mpi, [b for b in bound if b.case not in failed and not wrong[b.case]])
        failed |= more
        for b in bound:
            s = surveyed[b.case]
            if b.case not in failed:
                s.blocks, s.threads = measure.grid(b.comm, b.case, b.x, b.out)
            s.wrong, s.checked_calls, s.cost_s = wrong[b.case], measure.CHECKED_CALLS, seconds.get(b.case, 0.0)
        for case, s in surveyed.items():
            if s.wrong:
                s.status, s.reason = "wrong", f"{s.wrong} elements of {measure.CHECKED_CALLS} calls were wrong"
            if case in failed:
                s.status, s.reason = "failed", failed[case]
        found = []
        for case in cases:
            mode = known[case.mode]
            s = surveyed[checked[case]]
            found.append(replace(s, case=case, cost_s=s.cost_s * mode.calls + mode.overhead_s))
        return found

    # ---- planning ----

    def plan(self, surveyed: list[Surveyed]) -> list[Surveyed]:
        """Fixes every case's calls, on rank 0 for all, and records them."""

        def step() -> list[Surveyed]:
            assert self.recorder is not None
            runnable = [s for s in surveyed if s.status == "measured"]
            if self.owed:
                for s in runnable:
                    s.planned = self.owed[s.number]
            else:
                self._spend_budget(runnable)
                if surveyed and not any(s.planned or s.status in ("wrong", "failed", "refused") for s in surveyed):
                    self.recorder.discard()
                    kept = FINISH_S[self.facts["backend"]]
                    raise ArgumentError(
                        f"--budget {self.request.budget_s:.0f}s is too short for a single case: starting and checking took "
                        f"{self.elapsed_s():.0f} s, and {kept:.0f} s are kept for records and figure"
                    )
            self.recorder.plan([self._row(s) for s in surveyed])
            return surveyed

        return on_root(self.world, step)

    @property
    def visit_s(self) -> float:
        return measure.VISIT_CUDA_S if self.cuda else measure.VISIT_S

    def _spend_budget(self, runnable: list[Surveyed]) -> None:
        points: dict[Any, list[Surveyed]] = {}
        for s in runnable:
            points.setdefault(s.case.point, []).append(s)
        costs = {p: (sum(s.cost_s for s in of_it), len(of_it)) for p, of_it in points.items()}
        available_s = self.left_s() * TIMING_SHARE
        plan = measure.plan_iterations(costs, available_s, self.visit_s, most=self.request.calls)
        for p, of_it in points.items():
            for s in of_it:
                s.planned = plan[p]
                if not s.planned:
                    s.status, s.reason = (
                        "dropped",
                        f"{min(measure.LEAST, self.request.calls)} calls did not fit into the budget",
                    )

    def _row(self, s: Surveyed) -> dict[str, Any]:
        devices, n = self.facts["devices"], s.case.ranks
        place = self.places[n]
        gpus = len({str(d.get("uuid", d)) for d in devices})
        where = f"{min(n, gpus)} GPUs" if gpus > 1 else "1 GPU"
        if not self.cuda:
            where = f"{self.facts['cores']} cores"
        return {
            **s.case.columns(place.gpu),
            "case": s.number,
            "blocks": s.blocks,
            "threads": s.threads,
            "placement": f"{n} ranks on {where}",
            "sms_per_rank": None if place.gpu is None else place.gpu.sms,
            "warmup": measure.WARMUP,
            "planned": s.planned,
            "checked_calls": s.checked_calls,
            "wrong": s.wrong,
            "status": s.status,
            "reason": s.reason,
            "l2_gbps": place.l2_gbps,
            "emulated": any(bool(d.get("emulation")) for d in devices),
            "time_sliced": any(bool(d.get("time_sliced")) for d in devices) and n > 1,
        }

    # ---- timing ----

    def time(self, planned: list[Surveyed]) -> None:
        """Times all cases, rank count by rank count. The budget may end the rounds of a rank count early."""
        boxed = not self.owed  # a resumed run ends as it was planned, however long that takes
        groups = {n: [s for s in planned if s.case.ranks == n and s.planned] for n in self.request.ranks}
        weights = {n: sum(self._weight(s) for s in of_it) for n, of_it in groups.items()}
        how = self._time_points if self.cuda else self._time_ranks
        with self._progress(sum(s.planned for s in planned), "call") as advance:
            for k, n in enumerate(self.request.ranks):
                if not groups[n]:
                    continue
                ahead = sum(weights[m] for m in self.request.ranks[k:])
                allowed_s = self.left_s() * weights[n] / max(ahead, 1e-9) if boxed else float("inf")
                in_turn(self.world, n, partial(how, n, groups[n], allowed_s, advance))

    def _weight(self, s: Surveyed) -> float:
        return measure.point_seconds(s.cost_s, s.planned, 1, self.visit_s)

    def _time_ranks(self, n: int, group: list[Surveyed], allowed_s: float, advance: Advance) -> None:
        """All cases in rounds: where a case costs little to make ready, drift falls on all sizes alike."""
        start = time.perf_counter()
        with self._communicators(n) as comms:
            mpi = next(iter(comms.values())).mpi
            known = measure.modes(self.facts["backend"])
            buffers = _Buffers(self.request.seed, self.launch)
            bound = {}
            for s in group:
                comm = comms[s.case.dependent_launch]
                bound[s.case] = known[s.case.mode].bind(comm, s.case, *buffers.of(comm, s.case))
            schedule = {s.number: measure.visits(s.planned) for s in group}
            rng = np.random.default_rng([self.request.seed, self.launch, n])  # the same order on all ranks
            for k in range(measure.ROUNDS):
                for i in rng.permutation(len(group)):
                    s = group[i]
                    self._visit(comms[s.case.dependent_launch], s, bound[s.case], schedule[s.number][k], advance)
                # Rounds end for all candidates and ranks alike; calls within a round were fixed before the first.
                spent = time.perf_counter() - start
                late = spent * (k + 2) / (k + 1) > allowed_s
                error, late = mpi.bcast((self.write_error, late))
                if error is not None:
                    raise error
                if late:
                    break

    def _time_points(self, n: int, group: list[Surveyed], allowed_s: float, advance: Advance) -> None:
        """Point by point, each in rounds: graphs and their data are made ready for one point at a time.

        A candidate that fails is named in the records and left out; the others go on. Where the GPU itself failed, all that
        is left of this rank count is.
        """
        points: dict[Any, list[Surveyed]] = {}
        for s in group:
            points.setdefault(s.case.point, []).append(s)
        start = time.perf_counter()
        todo = dict(points)
        try:
            with self._communicators(n) as comms:
                mpi = next(iter(comms.values())).mpi
                for key, of_point in points.items():
                    spent, ahead = time.perf_counter() - start, sum(self._weight(s) for p in todo.values() for s in p)
                    share = sum(self._weight(s) for s in of_point) / max(ahead, 1e-9)
                    error, point_s = mpi.bcast((self.write_error, (allowed_s - spent) * share))
                    if error is not None:
                        raise error
                    if point_s > 0:
                        self._time_point(comms, of_point, point_s, advance)
                    else:
                        why = "the budget ended before it was timed"
                        self._amend({s.number: {"status": "dropped", "reason": why} for s in of_point})
                    del todo[key]
        except RecordError:
            raise
        except FcommError as error:  # of the GPU, or of communicators that it has no more room for: all ranks have it
            why = f"not timed: {error}"
            self._amend({s.number: {"status": "failed", "reason": why} for of_it in todo.values() for s in of_it})

    def _time_point(
        self, comms: Mapping[str, Communicator], of_point: list[Surveyed], allowed_s: float, advance: Advance
    ) -> None:
        start = time.perf_counter()
        mpi = next(iter(comms.values())).mpi
        known, buffers = measure.modes("cuda"), _Buffers(self.request.seed, self.launch)
        bound: dict[int, Any] = {}
        facts: dict[int, dict[str, Any]] = {}
        skews: dict[int, list[float]] = {}

        def attempt(s: Surveyed, step: Callable[[], Any]) -> Any:
            """A step that fails on all ranks alike or on none; None where it did."""
            try:
                return step()
            except DeviceError:
                self._amend({s.number: {"status": "failed", "reason": "the GPU failed while this was timed"}})
                raise
            except RecordError:
                raise
            except measure.WrongElementsError as error:
                facts[s.number] = {"status": "wrong", "reason": str(error), "wrong": error.count}
            except FcommError as error:
                facts[s.number] = {"status": "failed", "reason": str(error)}
            bound.pop(s.number, None)
            for comm in comms.values():
                measure.recover(comm)
            return None

        for s in of_point:
            comm = comms[s.case.dependent_launch]
            mode, arrays = known[s.case.mode], buffers.of(comm, s.case)
            made = attempt(s, partial(mode.bind, comm, s.case, *arrays))
            if made is not None:
                bound[s.number] = made
                facts[s.number] = dict(made.facts)
        schedule = {s.number: measure.visits(s.planned) for s in of_point}
        rng = np.random.default_rng([self.request.seed, self.launch, *map(ord, str(of_point[0].case.point))])
        for k in range(measure.ROUNDS):
            for i in rng.permutation(len(of_point)):
                s = of_point[i]
                if s.number not in bound:
                    continue
                made, calls = bound[s.number], schedule[s.number][k]
                comm = comms[s.case.dependent_launch]
                attempt(s, partial(self._visit, comm, s, made, calls, advance))
                if len(made.arrival_skew_ns):
                    skews.setdefault(s.number, []).append(float(np.median(made.arrival_skew_ns)) / 1e3)
            late = (time.perf_counter() - start) * (k + 2) / (k + 1) > allowed_s
            error, late = mpi.bcast((self.write_error, late))
            if error is not None:
                raise error
            if late:
                break
        for number, waits in skews.items():
            facts[number]["arrival_skew_us"] = statistics.median(waits)
        self._amend(facts)

    def _amend(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """On rank 0. Records that cannot be written end the round, on all ranks, not the visit."""
        if self.recorder is None or self.write_error is not None:
            return
        try:
            self.recorder.amend(facts)
        except RecordError as error:
            self.write_error = error

    def _visit(self, comm: Communicator, s: Surveyed, launch: measure.Launch, calls: int, advance: Advance) -> None:
        """One visit of a case."""
        if not calls:
            return
        mode = measure.modes(self.facts["backend"])[s.case.mode]
        mode.sample(comm, launch, measure.WARMUP)
        nanoseconds = measure.gather(comm.mpi, mode.sample(comm, launch, calls))
        if nanoseconds is None or self.recorder is None or self.write_error is not None:
            return
        try:
            self.recorder.append(s.number, nanoseconds)
        except RecordError as error:
            self.write_error = error
        advance(calls, f"timing, {s.case.ranks} ranks")

    @contextmanager
    def _progress(self, total: int, unit: str) -> Iterator[Advance]:
        """A bar on rank 0: lively on a terminal, a line every ten seconds in a log."""
        if not self.root:
            yield lambda calls, where: None
            return
        from tqdm import tqdm

        interval = 0.2 if sys.stderr.isatty() else 10.0
        with tqdm(
            total=total, desc="sweep", unit=unit, mininterval=interval, maxinterval=interval, file=sys.stderr,
            dynamic_ncols=True,
        ) as bar:  # fmt: skip

            def advance(calls: int, where: str) -> None:
                bar.set_description_str(where, refresh=False)
                bar.update(calls)

            yield advance

    # ---- the end ----

    def report(self) -> int:
        """Seals the run, prints the tables and draws the figures, on rank 0; the exit code on all."""

        def step() -> int:
            assert self.recorder is not None
            self.recorder.finish()
            run = records.load(self.recorder.path)
            table = nccl_table(run)
            print(table)
            self.recorder.save("table.txt", f"{table}\n".encode())
            self.recorder.save("latency.csv", latency_csv(run.latency))
            kept = self._derived(run)
            for line in (*self._missing(), *_remarks(run)):
                print(line)
            print(
                f"{run.path}/ has the records{''.join(f', {name}' for name in kept)}; taken on the {run.taken_on}",
                flush=True,
            )
            return int(run.cases["status"].isin(["wrong", "failed"]).any())

        return on_root(self.world, step)

    def _derived(self, run: records.Run) -> list[str]:
        """Figures and, where floors and launch features were measured, the tables of the best; not of time-sliced runs."""
        assert self.recorder is not None
        if not len(run.latency) or run.cases["time_sliced"].any():
            return []
        from experiments import plots

        kept = []
        for name, text in summary_tables(run).items():
            print(f"\n{text}")
            self.recorder.save(name, f"{text}\n".encode())
            kept.append(name)
        for name, figure in plots.figures(run).items():
            self.recorder.save(name, plots.png(figure))
            kept.append(name)
        return kept

    def _missing(self) -> Iterator[str]:
        """Launch features that were asked for and are not there."""
        told = {(launch, why) for place in self.places.values() for launch, why in place.no_launch.items()}
        for launch, why in sorted(told):
            yield f"# dependent launch {launch} was left out: {why}"

    def close(self) -> None:
        """Lets go of the records and the sub-communicators of this rank."""
        if self.recorder is not None:
            self.recorder.close()


def _floors(found: Sequence[Surveyed]) -> list[Surveyed]:
    """The floor of each case that is timed in graphs: one for each grid and launch feature of a point."""
    wanted = {
        replace(s.case, protocol=FLOOR, shape=(s.blocks, s.threads), input=measure.ARRAY): None
        for s in found
        if s.case.mode == "graph" and s.status == "measured" and s.blocks
    }
    return [_floor_of(case, found) for case in wanted]


def _floor_of(case: Case, found: Sequence[Surveyed]) -> Surveyed:
    costs = [s.cost_s for s in found if s.case.point == case.point and s.status == "measured"]
    blocks, threads = case.shape or (0, 0)
    return Surveyed(case, cost_s=min(costs, default=0.0), blocks=blocks, threads=threads)


def _remarks(run: records.Run) -> Iterator[str]:
    """What a reader of the table must know: what is not in it, and why."""
    shown = {"dropped": "not measured", "wrong": "WRONG RESULTS, times void", "failed": "FAILED, times void"}
    for status, what in shown.items():
        cases = run.cases[run.cases["status"] == status]
        for reason, of_it in cases.groupby("reason", sort=False):
            listed = [f"{c['protocol']} {format_size(c['nbytes'])} {c['dtype']} on {c['ranks']}" for c in rows(of_it)]
            more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
            yield f"# {what} ({reason}): {', '.join(listed[:6])}{more}"
    measured = run.cases[run.cases["status"] == "measured"]
    cut = measured[measured["iterations"] < measured["planned"]]
    if run.cases["time_sliced"].any():
        yield "# ranks took turns on a GPU (no MPS): these times are about the driver's schedule, and nothing reads them"
    if len(cut):
        yield f"# {len(cut)} cases have fewer calls than planned: the machine was slower than when asked, and rounds were left out"


def _cases_by_number(run: records.Run) -> dict[int, Case]:
    return {int(c["case"]): Case.from_columns(c) for c in rows(run.cases)}


def _resumed(world: MPI.Intracomm, args: argparse.Namespace) -> Request:
    given = [
        n
        for n in (
            "sizes",
            "ranks",
            "dtypes",
            "protocols",
            "modes",
            "calls",
            "budget",
            "seed",
            "out",
            "collective",
            "launch",
            "inputs",
            "share",
        )
        if getattr(args, n) is not None
    ]
    if given:
        raise ArgumentError(f"--resume continues a run as it was asked for: leave out --{given[0]}")
    content = on_root(world, lambda: records.load(args.resume).request)
    request = Request.from_json(content)
    if max(request.ranks) > world.size:
        raise ArgumentError(
            f"{args.resume} was started with {max(request.ranks)} ranks or more: use mpirun -n {max(request.ranks)}"
        )
    return request if args.backend is None else replace(request, backend=args.backend)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    started_s = time.monotonic() - measure.age_s()
    bootstrap.check_world(MPI.COMM_WORLD)
    # A communicator of our own: a rank that fails looks for the others on COMM_WORLD, not among those that rest here.
    world = MPI.COMM_WORLD.Dup()
    options = parser()
    if world.rank > 0:  # one rank tells what --help asks for
        options.print_help = lambda file=None: None  # type: ignore[method-assign]
    args = options.parse_args(argv)
    if args.dry_run:
        if args.resume is not None:
            raise ArgumentError("--dry-run shows a new sweep: leave out --resume")
        request = build_request(args, world.size)
        if world.rank == 0:
            print(dry_run(request))
        return 0
    request = build_request(args, world.size) if args.resume is None else _resumed(world, args)
    with _shared_gpu(world, request):
        sweep = Sweep(world, request, started_s)
        try:
            return _run(sweep, args)
        finally:
            faulthandler.cancel_dump_traceback_later()
            sweep.close()


@contextmanager
def _shared_gpu(world: MPI.Intracomm, request: Request) -> Iterator[None]:
    """Where ranks outnumber the GPUs, a private MPS daemon lets them run at once. Before any rank uses CUDA."""
    wanted = settings.backend() if request.backend == "auto" else request.backend
    if wanted == "cpu":
        yield
        return
    if request.share is not None:  # a client's own variable, whoever has started the daemon
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{request.share:g}"
    with mps.mps_for_ranks(world, request.share):
        yield


def _run(sweep: Sweep, args: argparse.Namespace) -> int:
    sweep.look_around()
    if sweep.cuda and args.resume is None:
        faulthandler.dump_traceback_later(max(1.0, sweep.left_s() + OVERTIME_S), exit=True)
    only = sweep.open_records(args.out or Path("results"), args.resume)
    if only is None or only:
        sweep.time(sweep.plan(sweep.survey(only)))
    return sweep.report()


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
