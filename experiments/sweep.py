"""The sweep: ``mpirun -n 8 python -m experiments.sweep`` measures all-reduce over sizes, rank counts and protocols.

Rank counts below the number of ranks started are sub-communicators; the other ranks sleep meanwhile. For each rank count,
first every candidate's results are compared with the reference, then iteration counts are fixed so that the whole sweep
keeps to its budget, then the candidates are timed in rounds, each in a random order.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from mpi4py import MPI

from experiments.request import (
    CHECKING_SHARE,
    COLLECTIVE,
    FINISH_S,
    TIMING_SHARE,
    Request,
    build_request,
    candidates,
    dry_run,
    parser,
)
from experiments.tables import latency_csv, nccl_table, rows
from fcomm import Communicator, bootstrap, checks, measure, provenance, records
from fcomm.dtypes import reducible
from fcomm.errors import ArgumentError, FcommError, RecordError
from fcomm.measure import MODES, Case
from fcomm.protocols import protocols
from fcomm.sizes import format_size

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
    blocks: int = 0
    threads: int = 0
    planned: int = 0


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

    # The clock of the budget: it began when the processes did.
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def left_s(self) -> float:
        return self.request.budget_s - FINISH_S - self.elapsed_s()

    # ---- records ----

    def look_around(self) -> None:
        """Facts about the machine, from a communicator of all ranks: what cannot work at all fails here."""
        with Communicator(self.world, backend=self.request.backend, max_bytes=4096) as comm:
            self.facts = provenance.collect(comm)

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
        points = len(r.sizes) * len(r.dtypes) * len(r.modes) * max(len(r.protocols), len(protocols()))
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
        for number, s in enumerate(found):
            s.number = number
        if only is not None:
            numbers = {case: number for number, case in only.items()}
            for s in found:
                s.number = numbers[s.case]
        return self.world.bcast(found)

    def _survey_ranks(self, n: int, deadline_s: float, only: dict[int, Case] | None) -> list[Surveyed]:
        r = self.request
        found = []
        with self._communicator(n) as comm:
            for dtype in r.dtypes:
                names = candidates(r, n, dtype, comm.admitted(dtype, COLLECTIVE))
                per_byte_s = 0.0
                for nbytes in r.sizes:
                    point = {
                        Case(COLLECTIVE, name, dtype, nbytes, n, mode): reason
                        for name, reason in names.items()
                        for mode in r.modes
                    }
                    if only is not None:
                        wanted = set(only.values())
                        point = {case: None for case in point if case in wanted}
                    found += [Surveyed(case, status="refused", reason=why) for case, why in point.items() if why]
                    run = [case for case, why in point.items() if why is None]
                    # Sizes ascend: what the last one took, by its bytes, is what this one takes at most.
                    if run and comm.mpi.bcast(self.elapsed_s() + per_byte_s * nbytes < deadline_s):
                        checked = self._survey_point(comm, run)
                        found += checked
                        per_byte_s = sum(s.cost_s for s in checked) * (measure.CHECKED_CALLS + 2) / nbytes
                    else:
                        late = "the budget ended before its results could be checked"
                        found += [Surveyed(case, status="dropped", reason=late) for case in run]
        return found

    def _survey_point(self, comm: Communicator, cases: list[Case]) -> list[Surveyed]:
        first = cases[0]
        count = first.nbytes // reducible(first.dtype).itemsize
        x, out = comm.empty(count, first.dtype), comm.empty(count, first.dtype)
        seed = (self.request.seed, self.launch, comm.world_size)
        data = measure.datasets(comm, seed, count, first.dtype)
        launches = {case: MODES[case.mode].bind(comm, case, x, out) for case in cases}
        wrong = measure.verify(comm, launches, x, out, data)
        found = []
        for case, launch in launches.items():
            blocks, threads = measure.grid(comm, case, x, out)
            s = Surveyed(case, blocks=blocks, threads=threads, wrong=wrong[case], checked_calls=measure.CHECKED_CALLS)
            if s.wrong:
                s.status = "wrong"
                s.reason = f"{s.wrong} of {count * comm.world_size * measure.CHECKED_CALLS} elements were wrong"
            else:
                start = time.perf_counter()
                MODES[case.mode].sample(comm, launch, 2)
                s.cost_s = (time.perf_counter() - start) / 2
            found.append(s)
        return found

    def _communicator(self, n: int) -> Communicator:
        return Communicator(self.subs[n], backend=self.facts["backend"], max_bytes=max(self.request.sizes))

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
                if surveyed and not any(s.planned or s.status in ("wrong", "refused") for s in surveyed):
                    self.recorder.discard()
                    raise ArgumentError(
                        f"--budget {self.request.budget_s:.0f}s is too short for a single case: starting and checking took "
                        f"{self.elapsed_s():.0f} s, and {FINISH_S:.0f} s are kept for records and figure"
                    )
            self.recorder.plan([self._row(s) for s in surveyed])
            return surveyed

        return on_root(self.world, step)

    def _spend_budget(self, runnable: list[Surveyed]) -> None:
        points: dict[Any, list[Surveyed]] = {}
        for s in runnable:
            points.setdefault(s.case.point, []).append(s)
        costs = {p: (sum(s.cost_s for s in of_it), len(of_it)) for p, of_it in points.items()}
        plan = measure.plan_iterations(costs, self.left_s() * TIMING_SHARE, most=self.request.calls)
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
        if self.facts["backend"] == "cpu":
            cores = self.facts["cores"]
            placement = f"{n} ranks on {cores} cores"
        else:
            placement = f"{n} ranks on {min(n, len(devices))} GPUs"
        sms = devices[0].get("sms_per_rank") if devices else None
        return {
            **s.case.columns(),
            "case": s.number,
            "blocks": s.blocks,
            "threads": s.threads,
            "placement": placement,
            "sms_per_rank": sms,
            "warmup": measure.WARMUP,
            "planned": s.planned,
            "checked_calls": s.checked_calls,
            "wrong": s.wrong,
            "status": s.status,
            "reason": s.reason,
            "floor_us": None,
            "emulated": any(bool(d.get("emulation")) for d in devices),
            "time_sliced": any(bool(d.get("time_sliced")) for d in devices),
        }

    # ---- timing ----

    def time(self, planned: list[Surveyed]) -> None:
        """Times all cases, rank count by rank count. The budget may end the rounds of a rank count early."""
        boxed = not self.owed  # a resumed run ends as it was planned, however long that takes
        groups = {n: [s for s in planned if s.case.ranks == n and s.planned] for n in self.request.ranks}
        weights = {n: sum(s.cost_s * s.planned for s in of_it) for n, of_it in groups.items()}
        with self._progress(sum(s.planned for s in planned)) as advance:
            for k, n in enumerate(self.request.ranks):
                if not groups[n]:
                    continue
                ahead = sum(weights[m] for m in self.request.ranks[k:])
                allowed_s = self.left_s() * weights[n] / max(ahead, 1e-9) if boxed else float("inf")
                in_turn(self.world, n, partial(self._time_ranks, n, groups[n], allowed_s, advance))

    def _time_ranks(self, n: int, group: list[Surveyed], allowed_s: float, advance: Callable[[int, str], None]) -> None:
        start = time.perf_counter()
        with self._communicator(n) as comm:
            bound = self._bind(comm, group)
            schedule = {s.number: measure.visits(s.planned) for s in group}
            rng = np.random.default_rng([self.request.seed, self.launch, n])  # the same order on all ranks
            for k in range(measure.ROUNDS):
                for i in rng.permutation(len(group)):
                    s = group[i]
                    self._visit(comm, s, bound[s.case], schedule[s.number][k], advance)
                # Rounds end for all candidates and ranks alike; calls within a round were fixed before the first.
                spent = time.perf_counter() - start
                late = spent * (k + 2) / (k + 1) > allowed_s
                error, late = comm.mpi.bcast((self.write_error, late))
                if error is not None:
                    raise error
                if late:
                    break

    def _bind(self, comm: Communicator, group: list[Surveyed]) -> dict[Case, measure.Launch]:
        """Candidates of one point share their input and output: the same data at the same addresses."""
        buffers: dict[Any, tuple[Any, Any]] = {}
        bound = {}
        for s in group:
            case = s.case
            count = case.nbytes // reducible(case.dtype).itemsize
            if case.point not in buffers:
                key = [self.request.seed, self.launch, case.ranks, count]
                own = checks.inputs(key, comm.rank, comm.world_size, count, case.dtype)
                buffers[case.point] = comm.from_host(own), comm.empty(count, case.dtype)
            bound[case] = MODES[case.mode].bind(comm, case, *buffers[case.point])
        return bound

    def _visit(
        self,
        comm: Communicator,
        s: Surveyed,
        launch: measure.Launch,
        calls: int,
        advance: Callable[[int, str], None],
    ) -> None:
        """One visit of a case. Records that cannot be written end the round, on all ranks, not the visit."""
        if not calls:
            return
        mode = MODES[s.case.mode]
        mode.sample(comm, launch, measure.WARMUP)
        nanoseconds = measure.gather(comm.mpi, mode.sample(comm, launch, calls))
        if nanoseconds is None or self.recorder is None or self.write_error is not None:
            return
        try:
            self.recorder.append(s.number, nanoseconds)
        except RecordError as error:
            self.write_error = error
        advance(calls, f"{s.case.ranks} ranks")

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """A bar on rank 0: lively on a terminal, a line every ten seconds in a log."""
        if not self.root:
            yield lambda calls, where: None
            return
        from tqdm import tqdm

        interval = 0.2 if sys.stderr.isatty() else 10.0
        with tqdm(
            total=total, desc="sweep", unit="call", mininterval=interval, maxinterval=interval, file=sys.stderr,
            dynamic_ncols=True,
        ) as bar:  # fmt: skip

            def advance(calls: int, where: str) -> None:
                bar.set_description_str(where, refresh=False)
                bar.update(calls)

            yield advance

    # ---- the end ----

    def report(self) -> int:
        """Seals the run, prints the table and draws the figure, on rank 0; the exit code on all."""

        def step() -> int:
            assert self.recorder is not None
            self.recorder.finish()
            run = records.load(self.recorder.path)
            print(nccl_table(run))
            self.recorder.save("latency.csv", latency_csv(run.latency))
            drawn = []
            if len(run.latency) and not run.cases["time_sliced"].any():
                from experiments import plots

                for mode in run.latency["mode"].unique():
                    name = "latency.png" if mode == run.latency["mode"].iloc[0] else f"latency-{mode}.png"
                    self.recorder.save(name, plots.png(plots.latency(run, mode)))
                    drawn.append(name)
            for line in _remarks(run):
                print(line)
            print(
                f"{run.path}/ has the records{''.join(f', {name}' for name in drawn)}; taken on the {run.taken_on}",
                flush=True,
            )
            return 1 if (run.cases["status"] == "wrong").any() else 0

        return on_root(self.world, step)

    def close(self) -> None:
        """Lets go of the records and the sub-communicators of this rank."""
        if self.recorder is not None:
            self.recorder.close()


def _remarks(run: records.Run) -> Iterator[str]:
    """What a reader of the table must know: what is not in it, and why."""
    for status, what in (("dropped", "not measured"), ("wrong", "WRONG RESULTS, never timed")):
        cases = run.cases[run.cases["status"] == status]
        for reason, of_it in cases.groupby("reason", sort=False):
            listed = [f"{c['protocol']} {format_size(c['nbytes'])} {c['dtype']} on {c['ranks']}" for c in rows(of_it)]
            more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
            yield f"# {what} ({reason}): {', '.join(listed[:6])}{more}"
    measured = run.cases[run.cases["status"] == "measured"]
    cut = measured[measured["iterations"] < measured["planned"]]
    if len(cut):
        yield f"# {len(cut)} cases have fewer calls than planned: the machine was slower than when asked, and rounds were left out"


def _cases_by_number(run: records.Run) -> dict[int, Case]:
    keys = ("collective", "protocol", "dtype", "nbytes", "ranks", "mode", "features")
    return {int(c["case"]): Case(**{key: c[key] for key in keys}) for c in rows(run.cases)}


def _resumed(world: MPI.Intracomm, args: argparse.Namespace) -> Request:
    given = [
        n
        for n in ("sizes", "ranks", "dtypes", "protocols", "modes", "calls", "budget", "seed", "out")
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
    sweep = Sweep(world, build_request(args, world.size) if args.resume is None else _resumed(world, args), started_s)
    try:
        return _run(sweep, args)
    finally:
        sweep.close()


def _run(sweep: Sweep, args: argparse.Namespace) -> int:
    sweep.look_around()
    only = sweep.open_records(args.out or Path("results"), args.resume)
    if only is None or only:
        sweep.time(sweep.plan(sweep.survey(only)))
    return sweep.report()


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
