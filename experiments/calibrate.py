"""Calibrate: measure this machine for a minute, fit the cost model, keep it where communicators look for it.

``mpirun -n 8 python -m experiments.calibrate --save``. It is a short sweep of what the selector may choose, followed by the
fit of `experiments.fitting`; `experiments.sweep` and `experiments.fit` do the same with more time, and with figures.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from experiments import fitting, mps
from experiments.request import COLLECTIVES, GPU_LAUNCHES, MOST_CALLS, Request, parse_ranks, parse_time
from experiments.sweep import OVERTIME_S, Sweep, on_root
from fcomm import bootstrap, cost_model, measure, records, settings
from fcomm.cli import Parser, folder, target
from fcomm.communicator import resolve_backend
from fcomm.cost_model import Model
from fcomm.dtypes import reducible
from fcomm.errors import ArgumentError, SetupError
from fcomm.layout import SlabLayout
from fcomm.protocols import protocols
from fcomm.selector import Selector
from fcomm.sizes import format_size, round_up

DEFAULT_BUDGET_S = 60.0
SIZES = {"cuda": tuple(1 << k for k in range(10, 21)), "cpu": tuple(1 << k for k in range(10, 18, 2))}
"""Message sizes in bytes, by backend. An emulated call of a MiB takes longer than a budget has for it."""
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
CPU_ENCODINGS = ("ll", "lamport16")
"""What the cpu backend measures: it builds each kernel anew on a new machine."""


def measured_protocols(backend: str) -> tuple[str, ...]:
    """Names of the protocols that may be chosen without being named: all but the baselines, and the plain ones of these."""
    return tuple(
        p.name
        for p in protocols().values()
        if p.plain or (not p.baseline and (backend != "cpu" or all(e.name in CPU_ENCODINGS for e in p.encodings)))
    )


def sizes(backend: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Message sizes in bytes: those of SIZES, rounded up where that makes equal, aligned parts for all rank counts."""
    unit = 16 * math.lcm(*ranks)
    return tuple(round_up(nbytes, unit) if unit <= min(SIZES[backend]) else nbytes for nbytes in SIZES[backend])


def request(
    backend: str,
    ranks: tuple[int, ...],
    budget_s: float = DEFAULT_BUDGET_S,
    dtype: str | None = None,
    launches: tuple[str, ...] = (),
    calls: int = 0,
) -> Request:
    """What is measured. backend : cuda or cpu. launches, calls : launch features, and timed calls of a case at most; empty and
    0 for the backend's own.
    """
    return Request(
        sizes=sizes(backend, ranks),
        ranks=ranks,
        dtypes=(reducible(dtype or DTYPES[backend]).name,),
        protocols=measured_protocols(backend),
        modes=(),
        calls=calls,
        budget_s=budget_s,
        seed=0,
        backend=backend,
        collectives=COLLECTIVES,
        launches=launches or (GPU_LAUNCHES if backend == "cuda" else ("none",)),
        shapes="default",
    )


@dataclass(frozen=True)
class Calibrated:
    """A fitted model, and what it was fitted to."""

    model: Model
    cases: int
    errors: np.ndarray[tuple[int], np.dtype[np.float64]]
    """Relative errors of the predictions, of the very cases that it was fitted to."""


def calibrate(world: MPI.Intracomm, wanted: Request, started_s: float, out: Path | None = None) -> Calibrated:
    """Measures and fits. Collective; the same result, or the same error, on all ranks.

    started_s : `time.monotonic()` when the budget began. out : folder in which the records are kept; None: they are not.
    """
    if min(wanted.ranks) < 2:
        raise ArgumentError("a cost model is about exchanges: calibrate with at least two ranks")
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fcomm-calibrate-")))
        sweep = Sweep(world, wanted, started_s)
        stack.callback(sweep.close)
        sweep.look_around()
        if any(d.get("time_sliced") for d in sweep.facts["devices"]):
            raise SetupError(
                "the ranks take turns on a GPU (no MPS), so their times say nothing about protocols: use MPS"
            )
        only = sweep.open_records(folder, None, None)
        sweep.time(sweep.plan(sweep.survey(only)))

        def fit() -> Calibrated:
            assert sweep.recorder is not None
            sweep.recorder.finish()
            run = records.load(sweep.recorder.path)
            timed = run.cases.loc[run.cases["iterations"] >= fitting.FEWEST_CALLS, "nbytes"].nunique()
            if timed < fitting.FEWEST_SIZES:
                raise ArgumentError(
                    f"a budget of {wanted.budget_s:.0f} s is too short: there were times for {timed} of {len(wanted.sizes)} message "
                    f"sizes, and a fit needs {fitting.FEWEST_SIZES}"
                )
            table = fitting.read([run])
            model, _ = fitting.fit(table)
            times = table.frame["latency_us"].to_numpy(float)
            return Calibrated(model, len(table), fitting.predictions(table.frame, model) / times - 1)

        return on_root(world, fit)


def save(model: Model) -> Path:
    """Keeps a model where communicators of this machine find it, beside those of other rank counts; returns the path."""
    return model.save(cost_model.model_path(model.machine, model.ranks))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def summary(found: Calibrated) -> str:
    """What was fitted, how well it describes what it was fitted to, and what it chooses."""
    model, errors = found.model, np.abs(found.errors) * 100
    lines = [
        f"cost model {model.digest()[:12]} of {model.machine.get('device')}, {_listed(model.ranks)} ranks, mode {model.mode}",
        f"{found.cases} cases, described with a median error of {np.median(errors):.1f} %, p95 {np.percentile(errors, 95):.1f} %",
        "",
        f"{'collective':14}  {'ranks':>5}  {'launch':6}  {'size':>9}  {'µs':>9}  chosen",
    ]
    everything = frozenset[str]().union(*(p.needs for p in protocols().values()))
    dtype, (smallest, largest) = model.dtypes[0], model.sizes
    shown = [smallest << k for k in range(0, (largest // smallest).bit_length(), 2)]
    for n in model.ranks:
        for launch in model.launch:
            selector = Selector(SlabLayout(n, largest), everything, model, launch=launch, gpu=model.gpu(n))
            for collective in COLLECTIVES:
                for nbytes in shown:
                    chosen = selector.choose(collective, nbytes, dtype)
                    candidates = selector.candidates(collective, nbytes, dtype)
                    us = next(c.predicted_us for c in candidates if c.protocol is chosen)
                    lines.append(
                        f"{collective:14}  {n:5}  {launch:6}  {format_size(nbytes):>9}  "
                        f"{'unknown' if us is None else f'{us:.2f}':>9}  {chosen.name}"
                    )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The options of the command. What is wrong with them is an `ArgumentError`."""
    p = Parser(
        prog="mpirun -n N python -m experiments.calibrate",
        description="Measure what the selector may choose, and fit the cost model of this machine.",
        allow_abbrev=False,
    )
    p.add_argument("--budget", metavar="TIME", default="60s", help="for everything: 60s, 2m (60s)")
    p.add_argument("--ranks", metavar="LIST", help="rank counts: 2,4,8 or 2..8 (all ranks that were started)")
    p.add_argument("--dtype", help="element type that is measured (bfloat16, on the cpu backend float32)")
    p.add_argument(
        "--backend", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is a GPU (auto)"
    )
    p.add_argument(
        "--calls",
        type=int,
        metavar="INT",
        default=0,
        help="timed calls of a case at most (as many as the budget allows)",
    )
    p.add_argument(
        "--save", action="store_true", help="keep the model in the user's cache folder, where communicators look"
    )
    p.add_argument("--model", type=Path, metavar="FILE", help="write the model to a file")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder in which the run's records are kept (they are not)")
    return p


def asked(args: argparse.Namespace, started: int) -> tuple[tuple[int, ...], float, str | None]:
    """Rank counts, seconds and element type of the command line; `ArgumentError` for nonsense. started : ranks that there are."""
    ranks = (started,) if args.ranks is None else parse_ranks(args.ranks, started)
    if min(ranks) < 2:
        raise ArgumentError("a cost model is about exchanges: start at least two ranks, mpirun -n 2")
    if not 0 <= args.calls <= MOST_CALLS:
        raise ArgumentError(f"--calls {args.calls} is not between 1 and {MOST_CALLS}")
    return ranks, parse_time(args.budget), None if args.dtype is None else reducible(args.dtype).name


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    started_s = time.monotonic() - measure.age_s()
    bootstrap.check_world(MPI.COMM_WORLD)
    world = MPI.COMM_WORLD.Dup()
    options = parser()
    if world.rank > 0:  # one rank tells what --help asks for
        options.print_help = lambda file=None: None  # type: ignore[method-assign]
    args = options.parse_args(argv)
    ranks, budget_s, dtype = asked(args, world.size)
    on_root(world, lambda: _check_targets(args.model, args.out))
    faulthandler.dump_traceback_later(budget_s + OVERTIME_S, exit=True)
    on_cpu = "cpu" in (args.backend, settings.backend() if args.backend == "auto" else "")
    with nullcontext() if on_cpu else mps.mps_for_ranks(world):  # before any rank uses CUDA
        backend = resolve_backend(args.backend, world)
        wanted = request(backend, ranks, budget_s, dtype, calls=args.calls)
        found = calibrate(world, wanted, started_s, args.out)
    said = on_root(world, lambda: [summary(found), "", *_keep(found.model, args.save, args.model)])
    faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        print("\n".join(said), flush=True)
    return 0


def _check_targets(model: Path | None, out: Path | None) -> None:
    """Whether what is measured can be put where it is wanted, before it is measured."""
    if model is not None:
        folder(model.parent, "--model")
        target(model, "--model")
    if out is not None:
        folder(out, "--out")


def _keep(model: Model, in_cache: bool, path: Path | None) -> list[str]:
    """Writes the model where it is wanted; what to say of it."""
    said = []
    if path is not None:
        said.append(
            f"{model.save(path)} has the model: name it in FCOMM_MODEL, or in fcomm.Communicator(..., model=...)"
        )
    if in_cache:
        said.append(
            f"{save(model)} has the model: communicators of this machine with {_listed(model.ranks)} ranks find it there"
        )
    return said or ["not kept: --save puts it where communicators of this machine look, --model FILE into a file"]


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
