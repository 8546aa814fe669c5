"""Where the time of a call goes: ``mpirun -n 8 python -m experiments.breakdown`` measures kernels that stop one stage short.

The first kernel of a ladder is empty, each further one has a stage more, and the last is the shipped one (`variants.LADDER`).
What a stage adds is the difference to the kernel before it. A stage that overlaps with a later one looks dear on its own step
and cheap to leave out of the whole call, so both are measured where both can be. ``--run FOLDER`` prints the table of a run
again.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

from experiments import frames
from experiments.request import Request, default_ranks, parse_ranks, parse_sizes, parse_time
from experiments.sweep import OVERTIME_S, Sweep, on_root, shared_gpu
from experiments.tables import rows
from fcomm import bootstrap, measure, records
from fcomm.cli import Parser
from fcomm.communicator import resolve_backend
from fcomm.dtypes import reducible
from fcomm.errors import ArgumentError, NotAdmittedError
from fcomm.protocols import SHARD_GRANULE, protocol, protocols
from fcomm.sizes import format_size, round_up
from fcomm.source import LAUNCHES
from fcomm.variants import LADDER, SHIPPED, STAGES, WITHOUT

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

DEFAULT_PROTOCOLS = "one_shot.ll,one_shot.lamport16,two_shot.ll,two_shot.lamport16"
DEFAULT_SIZES = (2 << 10, 16 << 10, 128 << 10)
DEFAULT_BUDGET = "60s"
DEFAULT_DTYPE = "bfloat16"
CLOSE = 0.10
"""Share of the measured time that stages and that time may be apart."""

MODES = [name for name in measure.mode_names() if name not in (*measure.SANDWICHES, measure.SKEW)]
"""Those in which a call stands by itself: stages that wait for nobody say nothing about a late rank or about neighbours."""
VARIANTS = (SHIPPED, *(v.name for v in LADDER.values()), *(v.name for v in WITHOUT.values()))


class Breakdown(Sweep):
    """A sweep of stage variants, with a table of stages at its end."""

    def report(self) -> int:
        """Seals the run, prints the table and draws the figure, on rank 0; the exit code on all."""

        def step() -> int:
            from experiments import plots

            assert self.recorder is not None
            self.recorder.finish()
            run = records.load(self.recorder.path)
            text = table(run)
            print(text)
            self.recorder.save("breakdown.md", f"{text}\n".encode())
            self.recorder.save("breakdown.png", plots.png(plots.breakdown(run)))
            for line in self.missing():
                print(line)
            print(f"{run.path}/ has the records, breakdown.md, breakdown.png", flush=True)
            return int(run.cases["status"].isin(["wrong", "failed"]).any())

        return on_root(self.world, step)


# ---- the table -------------------------------------------------------------------------------------------------------


def table(run: Run) -> str:
    """Stages of each case with their time and share, the residual, and what is left out; as Markdown."""
    found = frames.stages(run)
    lines: list[str] = []
    for _, of_it in found.groupby(list(frames.STAGE_KEY), sort=False):
        lines += [*_case(of_it), ""]
    lines += [*_meaning(), "", f"Taken on the {run.taken_on}.", *_not_there(run)]
    return "\n".join(lines)


def _case(of_it: pd.DataFrame) -> Iterator[str]:
    first = rows(of_it.head(1))[0]
    emulation = "EMULATION on a CPU: " if first["emulated"] else ""
    yield (
        f"## {emulation}{first['protocol']}, {first['ranks']} ranks, {format_size(int(first['nbytes']))} of {first['dtype']}, mode "
        f"{first['mode']}, dependent launch {first['dependent_launch']}, grid {first['blocks']}x{first['threads']}"
    )
    yield ""
    yield f"| {'stage':8} | {'up to here, µs':>14} | {'95 %':>20} | {'stage, µs':>9} | {'share':>7} | {'left out alone, µs':>18} |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in rows(of_it):
        alone = "-" if math.isnan(row["alone_us"]) else f"{row['alone_us']:.3f}"
        interval = f"{row['low_us']:.3f} to {row['high_us']:.3f}"
        yield (
            f"| {row['stage']:8} | {row['up_to_us']:14.3f} | {interval:>20} | {row['stage_us']:9.3f} | {row['share']:7.1%} | "
            f"{alone:>18} |"
        )
    total, shipped = float(of_it["stage_us"].sum()), float(first["shipped_us"])
    residual = shipped - total
    verdict = "within" if abs(residual) <= CLOSE * shipped else "NOT within"
    yield (
        f"| residual | {shipped:14.3f} | {'shipped, once more':>20} | {residual:9.3f} | {residual / shipped:7.1%} | {'-':>18} |"
    )
    yield ""
    copied = (
        ""
        if math.isnan(first["floor_us"])
        else f"; the floor, which copies input to output, takes {first['floor_us']:.3f} µs"
    )
    yield f"Stages add up to {total:.3f} of {shipped:.3f} µs: {verdict} {CLOSE:.0%}{copied}."


def _meaning() -> Iterator[str]:
    yield "Stages, each with what it adds to those before it:"
    for stage, what in STAGES.items():
        yield f"- `{stage}`: {what}"
    yield (
        "\nA stage's time is the difference of two kernels; below zero it is hidden by, or helps, what came before. The last kernel of "
        "a ladder is the shipped one, so stages add up to that; the residual is the shipped kernel measured once more, as a "
        "candidate of its own. `left out alone`: what the shipped kernel saves without that stage; less than the stage's own step "
        "where it overlaps with others. Results of kernels that lack a stage are of no use and are not checked (`wrong` is N/A)."
    )


def _not_there(run: Run) -> Iterator[str]:
    lost = run.cases[~run.cases["status"].isin(["measured"])]
    for reason, of_it in lost.groupby("reason", sort=False):
        names = {
            f"{c['protocol']} {c['variant']} {format_size(c['nbytes'])} on {c['ranks']}": None for c in rows(of_it)
        }
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield f"\nNot measured ({reason}): {', '.join(list(names)[:4])}{more}."


# ---- the command -----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The options of the command. What is wrong with them is an `ArgumentError`."""
    ours = [p.name for p in protocols().values() if _refusal(p.name) is None]
    p = Parser(
        prog="mpirun -n N python -m experiments.breakdown",
        description="Where the time of an all-reduce goes: kernels that have one stage more each, up to the shipped one.",
        epilog="Stages: " + "; ".join(f"{name}: {what}" for name, what in STAGES.items()) + ".",
        allow_abbrev=False,
    )
    p.add_argument("--protocols", metavar="LIST", help=f"of {', '.join(ours)} ({DEFAULT_PROTOCOLS})")
    p.add_argument(
        "--ranks", metavar="LIST", help="rank counts: 2,4,8 or 2..8 (powers of two, and all that were started)"
    )
    p.add_argument(
        "--sizes", metavar="LIST",
        help="bytes of a message, in equal parts of a multiple of 16 bytes for each rank: 2K,64K or 1K..1M, doubling "
        f"({','.join(format_size(s).replace(' KiB', 'K') for s in DEFAULT_SIZES)})",
    )  # fmt: skip
    p.add_argument("--dtype", help=f"element type ({DEFAULT_DTYPE})")
    p.add_argument(
        "--launch", metavar="LIST", help=f"launch features: {', '.join(LAUNCHES)} (late on GPUs, none elsewhere)"
    )
    p.add_argument("--mode", help="kind of latency: " + ", ".join(MODES) + " (graph on GPUs, else host)")
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), help="auto: cuda where there is a GPU (auto)")
    p.add_argument("--budget", metavar="TIME", help=f"for everything from start to figure: 60s, 10m ({DEFAULT_BUDGET})")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder for runs (results)")
    p.add_argument("--run", type=Path, metavar="RUN", help="measure nothing: print the table of a run")
    return p


def _refusal(name: str) -> str | None:
    return next((why for v in LADDER.values() if (why := v.refusal(protocol(name))) is not None), None)


def build_request(args: argparse.Namespace, started: int) -> Request:
    """The request of the command line; `ArgumentError` or `NotAdmittedError` for nonsense."""
    names = tuple(
        dict.fromkeys(n.strip() for n in (DEFAULT_PROTOCOLS if args.protocols is None else args.protocols).split(","))
    )
    for name in names:
        why = _refusal(name)
        if why is not None:
            raise NotAdmittedError(f"{name} cannot be broken down into stages: {why}")
    ranks = default_ranks(started) if args.ranks is None else parse_ranks(args.ranks, started)
    if min(ranks) < 2:
        raise ArgumentError("a breakdown is about exchanges: start at least two ranks, mpirun -n 2")
    unit = SHARD_GRANULE * math.lcm(*ranks)
    sizes = tuple(round_up(b, unit) for b in DEFAULT_SIZES) if args.sizes is None else parse_sizes(args.sizes)
    for nbytes in sizes:
        if nbytes % unit:
            raise ArgumentError(
                f"--sizes {nbytes}: a breakdown among {', '.join(map(str, ranks))} ranks takes multiples of {unit} bytes, equal parts "
                f"of a multiple of {SHARD_GRANULE} bytes for each rank"
            )
    launches = () if args.launch is None else tuple(dict.fromkeys(n.strip() for n in args.launch.split(",")))
    for launch in launches:
        if launch not in LAUNCHES:
            raise ArgumentError(f"--launch {launch!r} is not known; use {', '.join(LAUNCHES)}")
    if args.mode is not None and args.mode not in MODES:
        raise ArgumentError(f"--mode {args.mode!r} is not known; use {', '.join(MODES)}")
    return Request(
        sizes=sizes,
        ranks=ranks,
        dtypes=(reducible(args.dtype or DEFAULT_DTYPE).name,),
        protocols=names,
        modes=() if args.mode is None else (args.mode,),
        calls=0,
        budget_s=parse_time(args.budget or DEFAULT_BUDGET),
        seed=0,
        backend=args.backend or "auto",
        launches=launches,
        shapes="default",
        variants=VARIANTS,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    started_s = time.monotonic() - measure.age_s()
    bootstrap.check_world(MPI.COMM_WORLD)
    world = MPI.COMM_WORLD.Dup()
    options = parser()
    if world.rank > 0:  # one rank tells what --help asks for
        options.print_help = lambda file=None: None  # type: ignore[method-assign]
    args = options.parse_args(argv)
    if args.run is not None:
        text = on_root(world, lambda: table(records.load(args.run)))
        if world.rank == 0:
            print(text)
        return 0
    request = build_request(args, world.size)
    with shared_gpu(world, request):
        backend = resolve_backend(request.backend, world)
        launches = request.launches or (("late",) if backend == "cuda" else ("none",))
        sweep = Breakdown(world, replace(request, backend=backend, launches=launches), started_s)
        try:
            sweep.look_around()
            if sweep.cuda:
                faulthandler.dump_traceback_later(max(1.0, sweep.left_s() + OVERTIME_S), exit=True)
            sweep.open_records(args.out or Path("results"), None, None)
            sweep.time(sweep.plan(sweep.survey(None)))
            return sweep.report()
        finally:
            faulthandler.cancel_dump_traceback_later()
            sweep.close()


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
