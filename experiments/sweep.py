"""The sweep: ``mpirun -n 8 python -m experiments.sweep`` measures collectives over sizes, rank counts and protocols.

Rank counts below the number of ranks started are sub-communicators; the other ranks sleep meanwhile. For each rank count,
launch shapes are searched if that was asked for (see `experiments.search`), and every candidate's results are compared with
the reference. Then come turns: the first gives each case a few calls, point by point; each further one gives as many calls
again to the cases that are most in doubt (`measure.in_doubt`), while the budget lasts. The calls of a turn are fixed on rank
0 before it begins; within a point they are taken in rounds, each in a random order. On GPUs each case that is timed in a
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from experiments import mps, peers, search
from experiments.request import (
    CHECKING_SHARE,
    FINISH_S,
    SEARCH,
    SEARCH_SHARE,
    TIMING_SHARE,
    Request,
    build_request,
    candidates,
    dry_run,
    parser,
)
from experiments.tables import latency_csv, nccl_table, rows, summary_tables, variant_table
from fcomm import Communicator, bootstrap, links, measure, provenance, records, settings
from fcomm.dtypes import BYTES, REDUCIBLE
from fcomm.errors import ArgumentError, DeviceError, FcommError, NotAdmittedError, RecordError
from fcomm.measure import FLOOR, Case
from fcomm.measure_links import Medium
from fcomm.protocols import GpuShare, protocols
from fcomm.sizes import format_size
from fcomm.source import Specialisation
from fcomm.variants import SHIPPED

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
        key = (case.point, case.input, (comm, own) if in_place else None)
        if key not in self._kept:
            x, out = self._kept[key] = measure.arrays(comm, case)
            if self._seed:
                measure.fill(comm, case, self._seed, x)
            return x, out
        return self._kept[key]


class Communicators:
    """The communicators of one rank count: one for each launch feature, and one more wherever one cannot serve.

    A baseline whose kernel counts by the block keeps to one grid on a communicator, so each grid of its own has another. So
    has each variant of our kernels.
    """

    def __init__(self, make: Callable[[str, str], Communicator]) -> None:
        self._make = make
        self._made: dict[tuple[str, int | None, str], Communicator] = {}
        self._beside: dict[tuple[str, str], Communicator] = {}

    def launch(self, name: str) -> Communicator:
        """The one with a launch feature. Collective where it is made."""
        return self._get(name, None, SHIPPED)

    def of(self, case: Case) -> Communicator:
        """The one that runs the case. Collective where it is made, and by all ranks in the same order."""
        if case.peer:
            key = (case.dependent_launch, case.protocol)
            if key not in self._beside:
                self._beside[key] = peers.beside(self.launch(case.dependent_launch), case.protocol)
            return self._beside[key]
        blocks = None if case.shape is None else search.fixed_blocks(case, self.first.gpu)
        return self._get(case.dependent_launch, blocks, case.variant)

    def _get(self, launch: str, blocks: int | None, variant: str) -> Communicator:
        key = launch, blocks, variant
        if key not in self._made:
            self._made[key] = self._make(launch, variant)
        return self._made[key]

    def drop(self, launch: str) -> None:
        """Leaves out a launch feature that turned out not to be there."""
        del self._made[launch, None, SHIPPED]

    @property
    def launches(self) -> list[str]:
        return [launch for launch, blocks, variant in self._made if blocks is None and variant == SHIPPED]

    @property
    def first(self) -> Communicator:
        return next(iter(self._made.values()))

    @property
    def mpi(self) -> MPI.Intracomm:
        return self.first.mpi

    def every(self) -> list[Communicator]:
        return [*self._made.values(), *self._beside.values()]


Advance = Callable[[int, str], None]
Keep = Callable[[int, NDArray[np.int64]], None]
"""Takes the times of a visit on rank 0: the case's number, nanoseconds of shape (iterations, ranks)."""

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
    bits: dict[str, int] = field(default_factory=dict)
    """What its order of summation does to bits, where that is not fixed (`measure.order_in_bits`)."""


@dataclass
class Place:
    """What one rank count has of the machine."""

    gpu: GpuShare | None = None
    l2_gbps: float | None = None
    setup_s: float = 0.0
    """What it took to make its communicators."""
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
        self.pace = measure.Pace(0.0)
        self.times_us: dict[int, list[NDArray[np.float64]]] = {}
        """On rank 0: the slowest rank's time of each call of this launch so far, by case number."""
        self.void: set[int] = set()
        """On rank 0: cases that turned out wrong or failed while they were timed."""
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
        with Communicator(self.world, backend=r.backend, max_bytes=4096, model="seed", placement=r.placement) as comm:
            self.facts = provenance.collect(comm)
            if (
                self.facts["backend"] == "cuda"
                and comm.world_size > 1
                and not any(d.get("time_sliced") for d in self.facts["devices"])
            ):
                self.facts["one_way_us"] = float(np.median(Medium(comm).one_way_us()))
            self.request = r.resolved(self.facts["backend"])
            self.pace = measure.Pace(measure.VISIT_S[self.facts["backend"]])
            self._compile_ahead(comm)

    def _compile_ahead(self, comm: Communicator) -> None:
        """Each rank compiles a part of the kernels; they are kept on disk, where the other ranks will find them.

        What cannot be compiled is left for the check of its protocol, which names it.
        """
        jobs = self._kernels(comm)
        mine = jobs[comm.rank :: comm.world_size]
        with self._progress(len(mine), "kernel") as advance:
            for job in mine:
                if self.left_s() > 0:
                    with suppress(FcommError):
                        job()
                advance(1, f"compiling, {comm.world_size} ranks")
        measure.rest(self.world)

    def _kernels(self, comm: Communicator) -> list[Callable[[], object]]:
        r, backend = self.request, cast(Any, comm.backend)
        compiled = links.parse(r.link).compiled if r.link else 0
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
                                launch, linked = case.dependent_launch, compiled
                                spec = Specialisation(form, element, n, aligned, launch, linked, variant=case.variant)
                                specs[spec.name] = spec
        jobs: list[Callable[[], object]] = [partial(backend.kernel, spec) for spec in specs.values()]
        if not self.cuda:
            return jobs
        from fcomm import measure_cuda

        jobs += [partial(backend.compile, "meet", measure_cuda.meet_text(n)) for n in r.ranks]
        for mode in set(r.modes) & set(measure.SANDWICHES):
            aware = mode == measure.SANDWICH_DEPENDENT
            for n, aligned in dict.fromkeys((n, aligned) for n, aligned, _ in floors):
                jobs.append(partial(backend.compile, "filler", measure_cuda.filler_text(n, aligned, aware)))
                for dtype in r.dtypes:
                    if REDUCIBLE[dtype].is_float:
                        jobs.append(partial(backend.compile, "norm", measure_cuda.norm_text(n, aligned, aware, dtype)))
        for n, aligned, launch in floors:
            for threads in (32, 1024):
                jobs.append(partial(backend.compile, FLOOR, measure_cuda.floor_text(n, aligned, threads, launch)))
        return jobs

    @contextmanager
    def _communicators(self, n: int) -> Iterator[Communicators]:
        """A communicator for each launch feature that is there, and more as they are asked for."""
        options: dict[str, Any] = {"timeout_s": HANG_S} if self.cuda and "FCOMM_TIMEOUT_S" not in os.environ else {}
        with ExitStack() as stack:

            def make(launch: str, variant: str) -> Communicator:
                return stack.enter_context(
                    Communicator(
                        self.subs[n],
                        backend=self.facts["backend"],
                        max_bytes=max(self.request.sizes),
                        dependent_launch=launch,
                        link=self.request.link or None,
                        placement=self.request.placement,
                        model="seed",  # no fitted launch shapes: the default of a protocol is what its authors set
                        variant=variant,
                        **options,
                    )
                )

            comms = Communicators(make)
            for launch in self.request.launches:
                comm = comms.launch(launch)
                if comm.dependent_launch != launch:
                    self.places[n].no_launch[launch] = str(comm.no_dependent_launch)
                    comms.drop(launch)
            if not comms.launches:
                why = "; ".join(self.places[n].no_launch.values())
                raise ArgumentError(f"--launch {','.join(self.request.launches)} is not to be had here: {why}")
            self.places[n].gpu = comms.first.gpu
            yield comms
            if self.cuda:
                from fcomm import measure_cuda

                for comm in comms.every():
                    measure_cuda.close(comm)
            peers.close()

    # ---- records ----

    def open_records(self, out: Path, resume: Path | None, into: Path | None) -> dict[int, Case] | None:
        """Starts or continues a run. Returns the cases to run by number, or None for all that were asked for.

        resume : a run to finish; what it still owes is kept in `owed`, as timed calls by case number. into : the folder of a
        new run, or of a complete one whose cases are measured once more, as another launch.
        """

        def create(path: Path | None = None) -> tuple[int, dict[int, int], dict[int, Case] | None]:
            self.recorder = records.Recorder.create(
                out, socket.gethostname(), self.facts["backend"], asdict(self.request), self._expected_bytes(), path
            )
            return self.recorder.begin(self.facts), {}, None

        def reopen(path: Path, verb: str) -> records.Run:
            self.recorder = records.Recorder.reopen(path)
            run = records.load(path)
            why = next(filter(None, (provenance.mismatch(p, self.facts) for p in run.launches)), None)
            if why is not None:
                raise RecordError(f"{path} cannot be {verb} here: {why}; start a new run")
            return run

        def finish(path: Path) -> tuple[int, dict[int, int], dict[int, Case] | None]:
            run = reopen(path, "resumed")
            assert self.recorder is not None
            if not run.launches:  # it ended before it had a plan
                return self.recorder.begin(self.facts), {}, None
            if not run.owed:  # it ended between its last call and its seal, or is complete
                return -1, {}, {}
            every = _cases_by_number(run)
            launch = self.recorder.begin(self.facts, resumes=True)
            return launch, run.owed, {number: every[number] for number in run.owed}

        def repeat(path: Path) -> tuple[int, dict[int, int], dict[int, Case] | None]:
            run = reopen(path, "measured again")
            assert self.recorder is not None
            if run.summary is not None:
                raise RecordError(f"{path} is a slim copy, and takes no more launches: name the run itself")
            if not run.complete:
                raise RecordError(f"{path} is not complete: finish it with --resume {path} before it is measured again")
            again = run.cases["status"].isin(["measured", "dropped"])
            if not again.any():
                raise RecordError(f"{path} has no case that could be measured again")
            numbers = set(run.cases.loc[again, "case"])
            return self.recorder.begin(self.facts), {}, {k: c for k, c in _cases_by_number(run).items() if k in numbers}

        def step() -> tuple[int, dict[int, int], dict[int, Case] | None]:
            if resume is not None:
                return finish(resume)
            return create(into) if into is None or not into.exists() else repeat(into)

        self.launch, self.owed, only = on_root(self.world, step)
        return only

    def _expected_bytes(self) -> int:
        r = self.request
        points = len(r.sizes) * len(r.dtypes) * len(r.modes) * len(r.launches) * max(len(r.protocols), len(protocols()))
        points *= len(r.variants)
        # 19 bytes a row in the stream, as many again at most in Parquet; a figure and tables. Few cases are in doubt for long.
        calls = min(r.calls, 4 * measure.LEAST)
        return 4 << 20 | points * sum(r.ranks) * calls * 2 * 19

    # ---- checking ----

    def survey(self, only: dict[int, Case] | None) -> list[Surveyed]:
        """Checks every case; known to all ranks. only : the cases of a run that is continued, by number."""
        found: list[Surveyed] = []
        searching = self.request.shapes == SEARCH and only is None
        start_s, share = self.elapsed_s(), CHECKING_SHARE + (SEARCH_SHARE if searching else 0.0)
        allowed_s = max(self.left_s(), 0.0) * share
        for k, n in enumerate(self.request.ranks):
            deadline_s = start_s + allowed_s * (k + 1) / len(self.request.ranks)
            if self.owed:  # an interrupted run is finished, however long that takes
                deadline_s = float("inf")
            found += in_turn(self.world, n, partial(self._survey_ranks, n, deadline_s, searching, only)) or []
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

    def _survey_ranks(self, n: int, deadline_s: float, searching: bool, only: dict[int, Case] | None) -> list[Surveyed]:
        r = self.request
        found: list[Surveyed] = []
        points = [(c, d) for c in r.collectives for d in r.dtypes]
        opened = time.monotonic()
        with self._communicators(n) as comms:
            self.places[n].setup_s = time.monotonic() - opened
            first = comms.first
            if self.cuda:
                from fcomm import measure_cuda

                self.places[n].l2_gbps = measure_cuda.l2_gbps(first)
            shapes = search.Shapes()
            if searching and n > 1:
                shapes, bad = self._search(n, comms)
                found += bad
            with self._progress(len(points) * len(r.sizes), "point") as advance:
                for collective, dtype in points:
                    per_byte_s = 0.0
                    for nbytes in r.sizes:
                        point = self._candidates(comms, collective, dtype, nbytes, n)
                        if only is not None:  # with the shapes that they had
                            wanted = (c for c in only.values() if c.protocol != FLOOR)
                            point = {c: None for c in wanted if c.point == (collective, dtype, nbytes, n)}
                        found += [Surveyed(case, status="refused", reason=why) for case, why in point.items() if why]
                        run = [case for case, why in point.items() if why is None]
                        # Sizes ascend: what the last one took, by its bytes, is what this one takes at most.
                        start = self.elapsed_s()
                        if run and first.mpi.bcast(start + per_byte_s * nbytes < deadline_s):
                            default = self._survey_variants(comms, run)
                            found += default + self._survey_tuned(comms, shapes, default)
                            per_byte_s = (self.elapsed_s() - start) / nbytes
                        else:
                            late = "the budget ended before its results could be checked"
                            found += [Surveyed(case, status="dropped", reason=late) for case in run]
                        advance(1, f"checking, {n} ranks")
        return found

    def _candidates(
        self, comms: Communicators, collective: str, dtype: str, nbytes: int, n: int
    ) -> dict[Case, str | None]:
        first = comms.first
        found = candidates(self.request, collective, dtype, nbytes, n, first.capabilities, first.gpu, comms.launches)
        r = self.request
        for case, why in peers.cases(r.peers, collective, dtype, nbytes, n, r.modes, comms.launches).items():
            found[case] = why or peers.refused_here(first, case)
        return found

    def _survey_variants(self, comms: Communicators, cases: list[Case]) -> list[Surveyed]:
        """Checks the cases of a point; variants in the grid that the shipped kernel has, where their own might be another one."""
        found = self._survey_point(comms, [case for case in cases if case.variant == SHIPPED])
        grids: dict[Case, tuple[int, int]] = comms.mpi.bcast({s.case: (s.blocks, s.threads) for s in found if s.blocks})
        rest = (case for case in cases if case.variant != SHIPPED)
        fixed = [replace(case, shape=case.shape or grids.get(replace(case, variant=SHIPPED))) for case in rest]
        return found + self._survey_point(comms, fixed)

    def _survey_tuned(self, comms: Communicators, shapes: search.Shapes, default: Sequence[Surveyed]) -> list[Surveyed]:
        """Checks the cases of a point with the launch shapes that were found for them, where these are others at all."""
        gpu, mpi = comms.first.gpu, comms.mpi
        grids: list[tuple[int, int]] = mpi.bcast([(s.blocks, s.threads) for s in default])
        tuned: dict[Case, tuple[int, int]] = {}
        for s, grid in zip(default, grids, strict=True):
            case = (
                shapes.tuned(s.case, grid, gpu) if s.status == "measured" and s.case.shape is None and grid[0] else None
            )
            if case is not None:
                tuned[case] = grid
        checked = self._survey_point(comms, list(tuned))
        launched: list[tuple[int, int]] = mpi.bcast([(s.blocks, s.threads) for s in checked])
        # What was found at another size may ask for more than there is here, or be clamped to the default grid.
        return [s for s, grid in zip(checked, launched, strict=True) if s.checked_calls and grid != tuned[s.case]]

    def _search(self, n: int, comms: Communicators) -> tuple[search.Shapes, list[Surveyed]]:
        """Tries launch shapes at a few sizes, for one dtype, mode and input, as far as the search's share of the budget reaches.

        Returns what was found, and the shapes with which results were wrong or a call hung: these go on record.
        """
        r, mpi = self.request, comms.mpi
        shapes, bad = search.Shapes(), []
        sizes = [(nbytes, collective) for nbytes in search.anchors(r.sizes) for collective in r.collectives]
        # Of what was left when the first rank count began: what is left now, and what those before have had.
        start, behind = self.elapsed_s(), r.ranks.index(n)
        allowed_s = self.left_s() * SEARCH_SHARE / (len(r.ranks) - behind * (CHECKING_SHARE + SEARCH_SHARE))
        with self._progress(len(sizes), "point") as advance:
            for done, (nbytes, collective) in enumerate(sizes):
                spent_s = self.elapsed_s() - start
                if mpi.bcast(spent_s * (done + 1) / max(done, 1) > allowed_s):
                    break
                cases: dict[search.Key, Case] = {}
                for case, why in self._candidates(comms, collective, r.dtypes[0], nbytes, n).items():
                    if why is None and case.mode == r.modes[0]:
                        cases.setdefault(search.key_of(case), case)
                bad += self._search_point(comms, list(cases.values()), shapes)
                advance(1, f"searching launch shapes, {n} ranks")
        return shapes, bad

    def _search_point(self, comms: Communicators, cases: list[Case], shapes: search.Shapes) -> list[Surveyed]:
        mpi, gpu = comms.mpi, comms.first.gpu
        default = [s for s in self._survey_point(comms, cases) if s.status == "measured"]
        grids: list[tuple[int, int]] = mpi.bcast([(s.blocks, s.threads) for s in default])
        tried = {s.case: search.trials(s.case, grid, gpu) for s, grid in zip(default, grids, strict=True)}
        every = self._survey_point(comms, [case for of_it in tried.values() for case in of_it])
        surveyed = {s.case: s for s in every}
        for s in default:
            # Where blocks were clamped to what is resident, several shapes are one.
            alike: dict[tuple[int, int], Surveyed] = {}
            for one in (s, *(surveyed[case] for case in tried[s.case])):
                if one.status == "measured":
                    alike.setdefault((one.blocks, one.threads), one)
            compared: list[Surveyed] = mpi.bcast(list(alike.values()))
            times_us = self._try(comms, compared) if len(compared) > 1 else {}
            changes = {s.case: search.Change(), **tried[s.case]}
            if s.case in times_us:
                shapes.learn(s.case, {changes[case]: us for case, us in times_us.items()})
        # Not those that could not be made ready: they ask for more than there is.
        return [s for s in every if s.status in ("wrong", "failed") and s.checked_calls]

    def _try(self, comms: Communicators, alike: list[Surveyed]) -> dict[Case, float]:
        """Median time of each shape of a case in microseconds; without those that failed. Collective."""
        times_us: dict[int, list[NDArray[np.float64]]] = {}
        for number, s in enumerate(alike):
            s.number = number

        def keep(number: int, nanoseconds: NDArray[np.int64]) -> None:
            times_us.setdefault(number, []).append(nanoseconds.max(axis=1) / 1e3)

        calls = dict.fromkeys(range(len(alike)), min(search.CALLS, self.request.calls))
        facts: dict[int, dict[str, Any]] = {}
        self._rounds(comms, alike, calls, search.ROUNDS, float("inf"), keep, facts, lambda calls, where: None)
        for number, of_it in facts.items():
            if "status" in of_it:
                times_us.pop(number, None)
        return comms.mpi.bcast({alike[k].case: float(np.median(np.concatenate(us))) for k, us in times_us.items()})

    def _survey_point(self, comms: Communicators, cases: list[Case]) -> list[Surveyed]:
        if not cases:
            return []
        first, mpi = cases[0], comms.mpi
        # On GPUs results are those of the call and not of the way to time it; elsewhere each way makes calls of its own.
        known = measure.modes(self.facts["backend"])
        plain = {case: replace(case, mode="prepared", delay_us=None, late_rank=None) for case in cases}
        checked = {case: plain[case] if self.cuda or case.mode == measure.SKEW else case for case in cases}
        surveyed = {case: Surveyed(case) for case in dict.fromkeys(checked.values())}
        buffers = _Buffers()
        wanted = [(comms.of(case), case) for case in surveyed]
        bound, unbound = measure.bind_all(mpi, [(comm, case, *buffers.of(comm, case)) for comm, case in wanted])
        failed = {case: str(error) for case, error in unbound.items()}
        seed = (self.request.seed, self.launch, first.ranks)
        forms = [b.case.form(b.comm.gpu) for b in bound] or [None]
        data = [measure.Dataset(comms.first, (*seed, k), first, forms) for k in range(measure.DATASETS)]
        wrong, more = measure.verify(mpi, bound, data)
        failed |= more
        seconds, more = measure.call_seconds(mpi, [b for b in bound if b.case not in failed and wrong[b.case] <= 0])
        failed |= more
        unfixed = [b for b in bound if not b.case.kind.exact and b.case not in failed]
        counted, more = measure.order_in_bits(mpi, unfixed, data)
        failed |= more
        for b in bound:
            s = surveyed[b.case]
            if b.case not in failed:
                s.blocks, s.threads = measure.grid(b.comm, b.case, b.x, b.out)
            s.wrong, s.cost_s, s.bits = wrong[b.case], seconds.get(b.case, 0.0), counted.get(b.case, {})
            s.checked_calls = measure.CHECKED_CALLS if b.case.kind.checked else 0
        for case, s in surveyed.items():
            if s.wrong > 0:
                s.status, s.reason = "wrong", f"{s.wrong} elements of {measure.CHECKED_CALLS} calls were wrong"
            if case in failed:
                # What the communicator does not take - a grid that has no room here, say - was never launched.
                refused = isinstance(unbound.get(case), ArgumentError | NotAdmittedError)
                s.status, s.reason = "refused" if refused else "failed", failed[case]
        found = []
        for case in cases:
            mode = known[case.mode]
            s = surveyed[checked[case]]
            cost_s = s.cost_s * mode.calls + mode.overhead_s + 1e-6 * (case.delay_us or 0.0)
            found.append(replace(s, case=case, cost_s=cost_s))
        return found

    # ---- planning ----

    def plan(self, surveyed: list[Surveyed]) -> list[Surveyed]:
        """Fixes the calls that every case is to have at least, on rank 0 for all, and records them."""

        def step() -> list[Surveyed]:
            assert self.recorder is not None
            runnable = [s for s in surveyed if s.status == "measured"]
            for s in runnable:
                s.planned = self.owed[s.number] if self.owed else min(measure.LEAST, self.request.calls)
            told = any(s.status in ("wrong", "failed", "refused") for s in surveyed)
            if surveyed and not told and not self.owed and not self._first_turn(runnable):
                self.recorder.discard()
                kept = FINISH_S[self.facts["backend"]]
                raise ArgumentError(
                    f"--budget {self.request.budget_s:.0f}s is too short for a single case: starting and checking took "
                    f"{self.elapsed_s():.0f} s, and {kept:.0f} s are kept for records and figure"
                )
            self.recorder.plan([self._row(s) for s in surveyed])
            return surveyed

        return on_root(self.world, step)

    def _first_turn(self, untimed: Sequence[Surveyed]) -> dict[int, int]:
        """Calls of the cases that have none yet: small messages first, a point whole, since half its candidates compare nothing."""
        points = _points(untimed).values()
        kept = self._within(
            [(of_it, self._expected_s({s.number: s.planned for s in of_it}, of_it)) for of_it in points]
        )
        return {s.number: s.planned for of_it in kept for s in of_it}

    def _next_turn(self, surveyed: Sequence[Surveyed]) -> dict[int, int]:
        """Calls by case number of the next turn, on rank 0; none when nothing is in doubt or the budget is spent."""
        runnable = [s for s in surveyed if s.planned and s.number not in self.void]
        calls = self._first_turn([s for s in runnable if s.number not in self.times_us])
        if calls:
            return calls
        by_case = {s.case: s for s in runnable}
        times_us = {s.case: np.concatenate(self.times_us[s.number]) for s in runnable if s.number in self.times_us}
        priced = []
        for case in measure.in_doubt(times_us):
            s, had = by_case[case], len(times_us[case])
            more = min(had, self.request.calls - had)
            if more > 0:
                priced.append(((s.number, more), self._expected_s({s.number: more}, [s])))
        return dict(self._within(priced))

    def _within(self, priced: Sequence[tuple[T, float]]) -> list[T]:
        opening_s = sum(place.setup_s for place in self.places.values())
        return measure.fitting(priced, self.left_s() * TIMING_SHARE - opening_s)

    def _expected_s(self, calls: Mapping[int, int], of_point: Sequence[Surveyed]) -> float:
        wanted = [(s.cost_s, calls[s.number]) for s in of_point]
        return self.pace.expected_s(of_point[0].case, wanted)

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
            **s.bits,
            "emulated": any(bool(d.get("emulation")) for d in devices),
            "time_sliced": any(bool(d.get("time_sliced")) for d in devices) and n > 1,
        }

    # ---- timing ----

    def time(self, planned: list[Surveyed]) -> None:
        """Times the cases in turns. The calls of a turn are fixed on rank 0 before it begins."""
        if self.owed:  # a resumed run ends as it was planned, however long that takes
            self._turn(planned, {s.number: s.planned for s in planned if s.planned}, boxed=False)
            return
        timed = -1
        while True:

            def step(before: int = timed) -> tuple[int, dict[int, int]]:
                calls = sum(len(us) for of_it in self.times_us.values() for us in of_it)
                return calls, {} if calls == before else self._next_turn(
                    planned
                )  # a turn that timed nothing is the last

            timed, calls = on_root(self.world, step)
            if not calls:
                break
            self._turn(planned, calls, boxed=True)
        if self.root:
            late = f"{min(measure.LEAST, self.request.calls)} calls did not fit into the budget"
            untimed = [s for s in planned if s.planned and s.number not in self.times_us and s.number not in self.void]
            self._amend({s.number: {"status": "dropped", "reason": late} for s in untimed})
        on_root(self.world, self._raise_write_error)

    def _raise_write_error(self) -> None:
        if self.write_error is not None:
            raise self.write_error

    def _turn(self, planned: Sequence[Surveyed], calls: Mapping[int, int], boxed: bool) -> None:
        """Times the cases that have calls, rank count by rank count, each within its share of the time that is left."""
        groups = {n: [s for s in planned if s.case.ranks == n and s.number in calls] for n in self.request.ranks}
        weights = {n: self._expected_s(calls, of_it) if of_it else 0.0 for n, of_it in groups.items()}
        with self._progress(sum(calls.values()), "call") as advance:
            for k, n in enumerate(self.request.ranks):
                if not groups[n]:
                    continue
                ahead = sum(weights[m] for m in self.request.ranks[k:])
                allowed_s = self.left_s() * weights[n] / max(ahead, 1e-9) if boxed else float("inf")
                in_turn(self.world, n, partial(self._time_ranks, n, groups[n], calls, allowed_s, advance))
                on_root(self.world, self._raise_write_error)

    def _time_ranks(
        self, n: int, group: list[Surveyed], calls: Mapping[int, int], allowed_s: float, advance: Advance
    ) -> None:
        """Point by point, small messages first: graphs and their data are made ready for one point at a time.

        A candidate that fails is named in the records and left out; the others go on. Where the GPU itself failed, all that
        is left of this rank count is.
        """
        start = time.perf_counter()
        todo = _points(group)
        facts: dict[int, dict[str, Any]] = {}
        try:
            with self._communicators(n) as comms:
                self.places[n].setup_s = time.perf_counter() - start
                for key, of_point in list(todo.items()):
                    left_s = allowed_s - (time.perf_counter() - start)
                    fits = self._expected_s(calls, of_point) <= left_s
                    error, fits, left_s = comms.mpi.bcast((self.write_error, fits, left_s))
                    if error is not None:
                        raise error
                    if fits:
                        began = time.perf_counter()
                        self._rounds(comms, of_point, calls, measure.ROUNDS, left_s, self._keep, facts, advance)
                        if any("status" in of_it for of_it in facts.values()):  # what voids times is written at once
                            self._amend(facts)
                            facts.clear()
                        wanted = [(s.cost_s, calls[s.number]) for s in of_point]
                        self.pace.learn(of_point[0].case, wanted, time.perf_counter() - began)
                    del todo[key]
        except RecordError:
            raise
        except FcommError as error:  # of the GPU, or of communicators that it has no more room for: all ranks have it
            why = {"status": "failed", "reason": f"not timed: {error}"}
            left = [s.number for of_it in todo.values() for s in of_it if s.number not in self.times_us]
            self._amend({**dict.fromkeys(left, why), **facts})
        else:
            self._amend(facts)

    def _rounds(
        self,
        comms: Communicators,
        of_point: Sequence[Surveyed],
        calls: Mapping[int, int],
        rounds: int,
        allowed_s: float,
        keep: Keep,
        facts: dict[int, dict[str, Any]],
        advance: Advance,
    ) -> None:
        """Times candidates of one point in rounds, each in a random order. Collective.

        facts : takes what shows meanwhile, by case number, as columns of `records.CASES`; of those that fail, why.
        """
        start = time.perf_counter()
        mpi, known = comms.mpi, measure.modes(self.facts["backend"])
        buffers = _Buffers(self.request.seed, self.launch)
        bound: dict[int, tuple[Communicator, measure.Launch]] = {}
        skews: dict[int, list[float]] = {}

        def attempt(s: Surveyed, step: Callable[[], T]) -> T | None:
            """A step that fails on all ranks alike or on none; None where it did."""
            try:
                return step()
            except DeviceError:
                facts[s.number] = {"status": "failed", "reason": "the GPU failed while this was timed"}
                raise
            except RecordError:
                raise
            except measure.WrongElementsError as error:
                facts[s.number] = {"status": "wrong", "reason": str(error), "wrong": error.count}
            except FcommError as error:
                facts[s.number] = {"status": "failed", "reason": str(error)}
            bound.pop(s.number, None)
            for comm in comms.every():
                measure.recover(comm)
            return None

        for s in of_point:
            comm = comms.of(s.case)
            bind = peers.binding(known[s.case.mode], s.case)
            made = attempt(s, partial(bind, comm, s.case, *buffers.of(comm, s.case)))
            if made is not None:
                bound[s.number] = comm, made
                facts[s.number] = dict(getattr(made, "facts", {}))
        schedule = {s.number: measure.visits(calls[s.number], rounds) for s in of_point}
        rng = np.random.default_rng([self.request.seed, self.launch, *map(ord, str(of_point[0].case.point))])
        for k in range(rounds):
            for i in rng.permutation(len(of_point)):
                s = of_point[i]
                timed = schedule[s.number][k]
                if s.number not in bound or not timed:
                    continue
                comm, made = bound[s.number]
                sample = known[s.case.mode].sample
                taken = attempt(s, partial(sample, comm, made, measure.WARMUP + timed))
                if taken is None:
                    continue
                nanoseconds = measure.gather(comm.mpi, taken[measure.WARMUP :])
                if nanoseconds is not None:
                    keep(s.number, nanoseconds)
                waits = getattr(made, "arrival_skew_ns", ())
                if len(waits):
                    skews.setdefault(s.number, []).append(float(np.median(waits)) / 1e3)
                advance(timed, f"timing, {s.case.ranks} ranks")
            # Rounds end for all candidates and ranks alike; calls within a round were fixed before the first.
            late = (time.perf_counter() - start) * (k + 2) / (k + 1) > allowed_s
            error, late = mpi.bcast((self.write_error, late))
            if error is not None:
                raise error
            if late:
                break
        for number, (_, made) in bound.items():  # some facts show with the times
            facts[number].update(getattr(made, "facts", {}))
        for number, waited_us in skews.items():
            facts[number]["arrival_skew_us"] = statistics.median(waited_us)

    def _keep(self, number: int, nanoseconds: NDArray[np.int64]) -> None:
        """Puts the times of a visit on record, on rank 0. What cannot be written ends the round, on all ranks, not the visit."""
        if self.recorder is None or self.write_error is not None:
            return
        self.times_us.setdefault(number, []).append(nanoseconds.max(axis=1) / 1e3)
        try:
            self.recorder.append(number, nanoseconds)
        except RecordError as error:
            self.write_error = error

    def _amend(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """On rank 0. Records that cannot be written end the round, on all ranks, not the visit."""
        if self.recorder is None or self.write_error is not None:
            return
        self.void |= {number for number, of_it in facts.items() if "status" in of_it}
        try:
            self.recorder.amend(facts)
        except RecordError as error:
            self.write_error = error

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

            try:
                yield advance
            except BaseException:
                bar.leave = False  # what failed leaves its error and no bar
                raise

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
            for line in (*self.missing(), *_remarks(run)):
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
        if run.latency["variant"].nunique() > 1:
            text = variant_table(run)
            print(f"\n{text}")
            self.recorder.save("variants.md", f"{text}\n".encode())
            kept.append("variants.md")
        if not (run.latency["variant"] == SHIPPED).any():
            return kept
        for name, text in summary_tables(run).items():
            print(f"\n{text}")
            self.recorder.save(name, f"{text}\n".encode())
            kept.append(name)
        for name, figure in plots.figures(run).items():
            self.recorder.save(name, plots.png(figure))
            kept.append(name)
        return kept

    def missing(self) -> Iterator[str]:
        """Launch features that were asked for and are not there."""
        told = {(launch, why) for place in self.places.values() for launch, why in place.no_launch.items()}
        for launch, why in sorted(told):
            yield f"# dependent launch {launch} was left out: {why}"

    def close(self) -> None:
        """Lets go of the records and the sub-communicators of this rank."""
        if self.recorder is not None:
            self.recorder.close()


def _points(cases: Iterable[Surveyed]) -> dict[Any, list[Surveyed]]:
    """Cases by point; small messages first."""
    found: dict[Any, list[Surveyed]] = {}
    for s in sorted(cases, key=lambda s: (s.case.nbytes, s.case.ranks)):
        found.setdefault(s.case.point, []).append(s)
    return found


def _floors(found: Sequence[Surveyed]) -> list[Surveyed]:
    """The floor of each case that is timed in graphs: one for each grid and launch feature of a point."""
    wanted = {
        replace(s.case, protocol=FLOOR, shape=(s.blocks, s.threads), input=measure.ARRAY, variant=SHIPPED): None
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
            listed = [f"{_named(c)} {format_size(c['nbytes'])} {c['dtype']} on {c['ranks']}" for c in rows(of_it)]
            more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
            yield f"# {what} ({reason}): {', '.join(listed[:6])}{more}"
    measured = run.cases[run.cases["status"] == "measured"]
    cut = measured[measured["iterations"] < measured["planned"]]
    if run.cases["time_sliced"].any():
        yield "# ranks took turns on a GPU (no MPS): these times are about the driver's schedule, and nothing reads them"
    if len(cut):
        yield f"# {len(cut)} cases have fewer calls than planned: the machine was slower than when asked, and rounds were left out"


def _named(c: Mapping[str, Any]) -> str:
    return str(c["protocol"] if c["variant"] == SHIPPED else f"{c['protocol']} {c['variant']}")


def _cases_by_number(run: records.Run) -> dict[int, Case]:
    return {int(c["case"]): Case.from_columns(c) for c in rows(run.cases)}


OPTIONS = {
    "peers": "peers", "sizes": "sizes", "ranks": "ranks", "dtypes": "dtypes", "protocols": "protocols", "modes": "modes", "calls": "calls",
    "budget": "budget_s", "seed": "seed", "collective": "collectives", "launch": "launches", "inputs": "inputs",
    "shapes": "shapes", "share": "share", "delays": "delays_us", "late_rank": "late_rank", "link": "link", "placement": "placement",
    "variants": "variants",
}  # fmt: skip
"""Options that describe a run, with the field of its request that each one sets."""


def _resumed(world: MPI.Intracomm, args: argparse.Namespace) -> Request:
    given = [name for name in (*OPTIONS, "out", "into") if getattr(args, name) is not None]
    if given:
        raise ArgumentError(f"--resume continues a run as it was asked for: leave out --{given[0].replace('_', '-')}")
    return _kept_request(world, args.resume, args)


def _repeated(world: MPI.Intracomm, args: argparse.Namespace) -> Request:
    """The request of a run that gets another launch. Options may say again what it was asked for, and another budget."""
    kept, now = _kept_request(world, args.into, args), build_request(args, world.size)
    given = {name: of_it for name, of_it in OPTIONS.items() if getattr(args, name) is not None and name != "budget"}
    for name, of_it in given.items():
        if getattr(now, of_it) != getattr(kept, of_it):
            raise ArgumentError(
                f"{args.into} was asked for with another --{name.replace('_', '-')}: leave it out to measure that run again, or name a new folder"
            )
    return replace(kept, budget_s=now.budget_s)


def _kept_request(world: MPI.Intracomm, path: Path, args: argparse.Namespace) -> Request:
    request = Request.from_json(on_root(world, lambda: records.load(path).request))
    if max(request.ranks) > world.size:
        raise ArgumentError(
            f"{path} was started with {max(request.ranks)} ranks or more: use mpirun -n {max(request.ranks)}"
        )
    return request if args.backend is None else replace(request, backend=args.backend)


def _request(world: MPI.Intracomm, args: argparse.Namespace) -> Request:
    if args.resume is not None:
        return _resumed(world, args)
    if args.into is None:
        return build_request(args, world.size)
    if args.out is not None:
        raise ArgumentError("--into names the run's folder itself: leave out --out")
    there = on_root(world, lambda: args.into.exists())
    return _repeated(world, args) if there else build_request(args, world.size)


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
        for name in ("resume", "into"):
            if getattr(args, name) is not None:
                raise ArgumentError(f"--dry-run shows a new sweep: leave out --{name}")
        request = build_request(args, world.size)
        if world.rank == 0:
            print(dry_run(request))
        return 0
    request = _request(world, args)
    with shared_gpu(world, request):
        sweep = Sweep(world, request, started_s)
        try:
            return _run(sweep, args)
        finally:
            faulthandler.cancel_dump_traceback_later()
            sweep.close()


@contextmanager
def shared_gpu(world: MPI.Intracomm, request: Request) -> Iterator[None]:
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
    only = sweep.open_records(args.out or Path("results"), args.resume, args.into)
    if only is None or only:
        sweep.time(sweep.plan(sweep.survey(only)))
    return sweep.report()


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
