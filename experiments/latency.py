"""All tables of latency with one command: ``python -m experiments.latency``, or from records: ``--run RUN [RUN ...]``.

Measures on whatever GPUs are there - ranks share one where there is only one - what calls take in a CUDA graph, between two other
kernels, alone, and from the host; beside the floor and the baselines. Then prints tables, what became of each target, the
breakdown of a call where kernel variants were measured, and what is counted and not timed. Without a GPU the same kernels run
between processes on the CPU, with a small budget: an emulation, which says nothing about a GPU, and the tables say so.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import counted, frames, lab, mps
from experiments.request import parse_time
from experiments.tables import aligned, best_table, latency_csv, rows, select
from fcomm import bootstrap, measure, records
from fcomm.cli import Parser, launcher_size
from fcomm.errors import ArgumentError, FcommError, RecordError, SetupError
from fcomm.layout import SlabLayout
from fcomm.sizes import format_size

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

# ---- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A line of the targets: what must not be exceeded."""

    name: str
    unit: str
    target: float
    stretch: float


def _both(name: str, median: tuple[float, float], best: tuple[float, float]) -> tuple[Goal, Goal]:
    return Goal(f"{name}: median over sizes", "%", *median), Goal(f"{name}: best size", "%", *best)


EIGHT = _both("all-reduce, 8 ranks, against the fastest of custom AR v2's three ways", (-20, -30), (-45, -55))
FEW = Goal("all-reduce, 2 and 4 ranks, against the same: median over sizes", "%", -12, -20)
NEVER_SLOWER = Goal("all-reduce, any size and ranks, against custom AR v2 as its authors set it: worst", "%", 2, -20)
ENVELOPE = Goal("all-reduce, against the fastest of all baselines at each point: median", "%", -8, -15)
GATHER = _both("all-gather, against the faster of barrier and sentinel", (-25, -35), (-50, -60))
FLOOR = Goal("all-reduce up to 16 KiB, multiple of the floor: worst", "x", 1.35, 1.15)
PREPARED = Goal("host time of a prepared call, to its return: median over cases", "us", 6, 4)
EAGER = Goal("host time of all_reduce(x), to its return: median over cases", "us", 10, 7)
SLAB = Goal("slab of a communicator of 8 ranks for messages of 1 MiB", "MiB", 64, 32)
FLOOR_UP_TO = 16 << 10


@dataclass(frozen=True)
class Outcome:
    """What became of a goal in one place: how many ranks, which launch feature."""

    goal: str
    where: str
    value: float
    low: float
    high: float
    unit: str
    target: float
    stretch: float
    verdict: str
    """stretch met, met, missed, not measured; with "?" where the interval holds what was to be reached."""
    says: str
    """Points behind it; or why there is none."""


def outcome(goal: Goal, where: str, value: float, low: float, high: float, says: str) -> Outcome:
    """The verdict on a value and its 95 % interval (NaN: not known)."""
    if math.isnan(value):
        verdict = "not measured"
    else:
        verdict = "stretch met" if value <= goal.stretch else "met" if value <= goal.target else "missed"
        bound = goal.stretch if verdict == "stretch met" else goal.target
        certain = low > bound if verdict == "missed" else high <= bound
        verdict += "" if certain else " ?"
    return Outcome(goal.name, where, value, low, high, goal.unit, goal.target, goal.stretch, verdict, says)


def missing(goal: Goal, why: str, where: str = "") -> Outcome:
    """Of a goal for which there is nothing to judge, and why."""
    return outcome(goal, where, math.nan, math.nan, math.nan, why)


def targets(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each goal, rank count and launch feature: value, 95 % interval, verdict (`Outcome`).

    runs : of one machine; each goal is read from the first run that has what it needs. Masked points, which are about the L2 of
    a shared GPU, are not counted. Ratios are of one run, with the same launch feature on both sides unless the goal says
    otherwise.
    """
    import pandas as pd

    frames.one_machine(runs)
    for run in runs:
        run.for_figures()  # times that may be shown
    found: list[Outcome] = []
    for n in (8, 4, 2):
        goals = EIGHT if n == 8 else (FEW,)
        found += against(runs, goals, frames.V2_FASTEST, "all_reduce", n)
    found += never_slower(runs)
    found += against(runs, (ENVELOPE,), frames.BASELINES, "all_reduce", None)
    found += against(runs, GATHER, frames.BASELINES, "all_gather", None)
    found += floors(runs)
    found += [_host(runs, PREPARED, "prepared"), _host(runs, EAGER, "host")]
    mib = SlabLayout(8, 1 << 20).slab_bytes / (1 << 20)
    found.append(outcome(SLAB, "counted", mib, mib, mib, "not timed: it is what `python -m fcomm info` prints"))
    return pd.DataFrame([asdict(o) for o in found])


def _of_graphs(run: Run, collective: str) -> pd.DataFrame:
    """The run's graph times of a collective; `RecordError` where it has none, and for an emulation, which meets no target."""
    if frames.emulated(run):
        raise RecordError("the times are those of an emulation")
    return frames.first_kind(run, collective, measure.GRAPH)


def against(
    runs: Sequence[Run], goals: Sequence[Goal], side: frames.Side, collective: str, ranks: int | None
) -> Iterator[Outcome]:
    """The median over points and, with a second goal, the best of them, for each launch feature."""
    of_ranks = "all ranks" if ranks is None else f"{ranks} ranks"
    why = f"no run has times of {collective.replace('_', '-')} in graphs"
    for run in runs:
        try:
            frame = _of_graphs(run, collective)
        except FcommError as error:
            why = str(error) if frames.NO_TIMES not in str(error) else why
            continue
        every = frames.ratios(run, frames.OURS, side, collective, **_kind(frame))
        every = every if ranks is None else every[every["ranks"] == ranks]
        if every.empty:
            why = f"the run lacks {of_ranks}, ours or {side.name}"
            continue
        for launch in dict.fromkeys(every["launch"]):
            total = frames.summarise(every[every["launch"] == launch])
            where = f"{of_ranks}, {launch}"
            if total.best is None:
                yield from (missing(goal, "all points are about the L2", where) for goal in goals)
                continue
            ends = (total.median_percent, total.median_low_percent, total.median_high_percent)
            yield outcome(goals[0], where, *ends, total.counts)
            for goal in goals[1:]:
                best = total.best
                ends = (best["change_percent"], best["change_low_percent"], best["change_high_percent"])
                yield outcome(goal, where, *ends, _point(best))
        return
    yield from (missing(goal, why, of_ranks) for goal in goals)


def _kind(frame: pd.DataFrame) -> dict[str, str]:
    return {"mode": str(frame["mode"].iloc[0]), "dtype": str(frame["dtype"].iloc[0])}


def _point(row: dict[str, object]) -> str:
    return f"{row['ours']}, {format_size(int(str(row['nbytes'])))} among {row['ranks']}"


def never_slower(runs: Sequence[Run]) -> Iterator[Outcome]:
    """Ours at its fastest launch feature; theirs late, as their authors set it. The point where we do worst."""
    for run in runs:
        try:
            kind = _kind(_of_graphs(run, "all_reduce"))
        except FcommError:
            continue
        found = frames.ratios(run, frames.OURS, frames.V2_AS_SET, "all_reduce", frames.ANY, "late", **kind)
        counted_ones = found[~found["masked"].astype(bool)].sort_values(
            "change_percent", ascending=False, kind="stable"
        )
        if len(counted_ones):
            row = rows(counted_ones.head(1))[0]
            ends = (row["change_percent"], row["change_low_percent"], row["change_high_percent"])
            masked = len(found) - len(counted_ones)
            says = f"at {_point(row)}; {frames.summarise(found).counts}" if masked else f"at {_point(row)}"
            yield outcome(NEVER_SLOWER, "any against late", *ends, says)
            return
    yield missing(NEVER_SLOWER, "no run has custom AR v2 as its authors set it, with dependent launch late")


def floors(runs: Sequence[Run], goal: Goal = FLOOR) -> Iterator[Outcome]:
    """The worst of our fastest protocols' multiples up to 16 KiB, for each launch feature.

    The floor holds the protocol's hops where the run measured what one takes: no kernel that communicates can do without.
    """
    for run in runs:
        try:
            frame = _of_graphs(run, "all_reduce")
        except FcommError:
            continue
        best = frames.fastest(frame[frame["nbytes"] <= FLOOR_UP_TO], frames.OURS)
        best = best[best["floor_multiple"].notna() & ~best["masked"]]
        for (launch,), of_it in frames.grouped(best, ["dependent_launch"]):
            hop_us = run.one_way_us or 0.0
            of_it = of_it.assign(least_us=of_it["floor_us"] + of_it["rounds"] * hop_us)
            of_it = of_it.assign(multiple=of_it["latency_us"] / of_it["least_us"])
            row = rows(of_it.sort_values("multiple", ascending=False, kind="stable").head(1))[0]
            value, low, high = (row[c] / row["least_us"] for c in ("latency_us", "low_us", "high_us"))
            says = f"at {row['protocol']}, {format_size(int(row['nbytes']))} among {row['ranks']}; {len(of_it)} points"
            says += f"; with {hop_us:.2f} us a hop" if hop_us else "; without a hop's time, which the run lacks"
            yield outcome(goal, str(launch), value, low, high, says)
        if len(best):
            return
    yield missing(goal, "no run has floors: they are measured on GPUs, in mode graph")


def _host(runs: Sequence[Run], goal: Goal, mode: str) -> Outcome:
    for run in runs:
        frame = frames.measured(run, mode=mode) if not frames.emulated(run) else run.latency.head(0)
        frame = frame[frame["return_us"].notna() & ~frame["baseline"].astype(bool)] if len(frame) else frame
        if len(frame):
            us = frame["return_us"].to_numpy(float)
            low, high = measure.median_interval(us)
            return outcome(
                goal, "host", float(frame["return_us"].median()), low, high,
                f"{len(us)} cases, {us.min():.1f} to {us.max():.1f} us; each the median of the slowest rank",
            )  # fmt: skip
    return missing(goal, f"no run has times of mode {mode} on a GPU", "host")


def targets_markdown(found: pd.DataFrame) -> str:
    """The targets as a table, and how to read it."""
    table = [["target", "where", "measured", "95 %", "goal", "stretch", "verdict", "from"]]
    for row in rows(found):
        unit = "" if row["unit"] == "x" else f" {row['unit']}"
        sign = "+" if row["unit"] == "%" else ""
        known = not math.isnan(row["value"])
        table.append(
            [
                row["goal"], row["where"], f"{row['value']:{sign}.2f}{unit}" if known else "-",
                f"{row['low']:{sign}.2f} to {row['high']:{sign}.2f}" if known and not math.isnan(row["low"]) else "-",
                f"{row['target']:{sign}g}{unit}", f"{row['stretch']:{sign}g}{unit}", row["verdict"], row["says"],
            ]
        )  # fmt: skip
    said = (
        "Per cent: change of our latency against the other's, below zero faster. ?: the interval holds what was to be reached, or is "
        "not known. Masked points, about the L2 of a shared GPU, are not counted."
    )
    return "\n".join([*aligned(table), "", said])


# ---- tables ----------------------------------------------------------------------------------------------------------

MODES = (measure.GRAPH, *measure.SANDWICHES, "isolated", "host", "prepared")
"""In the order of the report."""


def report(runs: Sequence[Run], found: pd.DataFrame, arch: str | None = "sm_90") -> Iterator[str]:
    """The whole report, piece by piece, as Markdown.

    found : from `targets`. arch : of the counted table's machine code; None leaves that out.
    """
    emulation = any(frames.emulated(run) for run in runs)
    yield "# Latency"
    yield f"Taken on the {runs[0].taken_on}."
    if emulation:
        yield "EMULATION on CPUs: these times compare code paths on one CPU, and say nothing about a GPU or about the targets."
    yield "## Targets"
    yield targets_markdown(found)
    for run in runs:
        yield from _mode_tables(run)
    yield "## Where the time of a call goes"
    yield breakdown(runs)
    yield "## Counted, not timed"
    yield _counted_table(runs, arch)


def _mode_tables(run: Run) -> Iterator[str]:
    frame = frames.measured(run)
    kinds = frame[["collective", "dtype", "mode", "dependent_launch"]].drop_duplicates()
    order = {mode: k for k, mode in enumerate(MODES)}
    meanings = measure.mode_names()
    for kind in sorted(rows(kinds), key=lambda k: (k["collective"], k["dtype"], order.get(k["mode"], len(order)))):
        collective, dtype, mode, launch = kind.values()
        of_it = select(run, collective, launch, mode, dtype)
        yield f"## {collective.replace('_', '-')}, {dtype}, {mode}, dependent launch {launch}"
        meaning = meanings.get(mode, mode)
        yield f"{meaning[:1].upper()}{meaning[1:]}."
        yield best_table(run, of_it)
        for column, what in (
            ("neighbours_us", "The kernels before and behind the collective, in the same graph without it, take"),
            ("return_us", "Of that, the time to the call's return is"),
        ):
            known = of_it[column].dropna()
            if len(known):
                yield f"{what} {known.min():.2f} to {known.max():.2f} us (median of the cases {known.median():.2f})."


STAGES = ["collective", "protocol", "dtype", "dependent_launch", "ranks", "nbytes"]
ADDS_UP_WITHIN = 0.10


def breakdown(runs: Sequence[Run]) -> str:
    """Where the time goes, from runs that have variants of kernels (column `variant` of their cases); or that none has."""
    for run in runs:
        stages = _stages(run)
        if stages is not None:
            return breakdown_table(stages)
    return "Not measured: the runs have no variants of a kernel that end after each of its stages."


def _stages(run: Run) -> pd.DataFrame | None:
    """`frames.stages`; None where the run is no breakdown."""
    try:
        return frames.stages(run)
    except RecordError:
        return None


def breakdown_table(stages: pd.DataFrame) -> str:
    """A column for each stage, a row for each case: microseconds that the stage adds, their sum beside the measured call.

    stages : columns `STAGES`, `stage` (in the order of the call), `stage_us` and `shipped_us`, the whole kernel measured by
    itself. The sum must be within 10 % of it; where it is not, the row says so.
    """
    names = list(dict.fromkeys(stages["stage"]))
    table = [["call", *names, "sum", "measured", "sum / measured"]]
    for key, of_it in frames.grouped(stages, STAGES, sort=False):
        _, protocol, dtype, launch, n, nbytes = key
        by_stage = dict(zip(of_it["stage"], of_it["stage_us"], strict=True))
        total, measured_us = float(of_it["stage_us"].sum()), float(of_it["shipped_us"].iloc[0])
        off = "" if abs(total / measured_us - 1) <= ADDS_UP_WITHIN else " (does not add up)"
        table.append(
            [
                f"`{protocol}` {format_size(int(nbytes))} {dtype} among {n}, {launch}",
                *(f"{by_stage[s]:.2f}" if s in by_stage else "" for s in names),
                f"{total:.2f}", f"{measured_us:.2f}", f"{total / measured_us:.2f}{off}",
            ]
        )  # fmt: skip
    return "\n".join([*aligned(table), "", "Microseconds that each stage adds to the one before it."])


def _counted_table(runs: Sequence[Run], arch: str | None) -> str:
    frame = frames.measured(runs[0])
    sizes = sorted(int(b) for b in frame["nbytes"].unique())
    if not sizes:
        raise RecordError("the runs have no times of two or more ranks: start ranks with mpirun -n N")
    few = dict.fromkeys((sizes[0], sizes[len(sizes) // 2]))
    return counted.markdown(counted.counted(list(few), [int(frame["ranks"].max())], arch=arch), arch)


# ---- measuring -------------------------------------------------------------------------------------------------------

PROTOCOLS = (
    "one_shot.ll", "one_shot.lamport16", "two_shot.ll", "two_shot.lamport16", "barrier.one_shot", "barrier.two_shot",
    "custom_ar_v2", "custom_ar_v2.push", "custom_ar_v2.pull_one_shot", "custom_ar_v2.pull_two_shot", "lamport_fp",
)  # fmt: skip
"""All-reduce: the encodings of ours that win somewhere, and every baseline."""
GPU_BUDGET, CPU_BUDGET = "5m", "50s"
GATHER_SHARE = 0.3
"""Of the budget, for all-gather in graphs."""


@dataclass(frozen=True)
class Take:
    """One sweep of the report."""

    name: str
    ranks: int
    arguments: tuple[str, ...]


def takes(gpus: int, ranks: int | None, budget_s: float, extra: Sequence[str]) -> list[Take]:
    """The sweeps that measure everything. gpus : that are there. ranks : to start; by default eight, or one for each GPU.

    extra : further options of the sweep, which go before those chosen here.
    """
    if not gpus:
        arguments = ("--backend", "cpu", "--modes", "host,prepared", "--sizes", "1K,16K", "--budget", f"{budget_s:g}s")
        return [Take("cpu", ranks or 2, (*arguments, *extra))]
    n = ranks or (gpus if gpus > 1 else 8)
    common = ("--backend", "cuda", "--dtypes", "bfloat16", "--sizes", "1K..1M")
    reduce = ("--modes", ",".join(MODES), "--protocols", ",".join(PROTOCOLS))
    gather = ("--modes", measure.GRAPH, "--collective", "all_gather")
    shares = (("all_reduce", reduce, 1 - GATHER_SHARE), ("all_gather", gather, GATHER_SHARE))
    return [
        Take(name, n, (*common, *how, "--budget", f"{budget_s * share:.0f}s", *extra)) for name, how, share in shares
    ]


def take(one: Take, into: Path) -> None:
    """Runs a sweep into a folder; its progress and its own table are printed. `SetupError` where it could not finish."""
    command, env = lab.on_ranks(one.ranks, "-m", "experiments.sweep", *one.arguments, "--into", into)
    code = subprocess.run(command, env=env, check=False).returncode
    if not (into / "run.json").is_file():
        raise SetupError(f"the sweep of {one.name} left no records (exit code {code}): what it said is above")
    if code:
        print(
            f"note: the sweep of {one.name} ended with exit code {code}; the tables have what it recorded", flush=True
        )


def parser() -> Parser:
    """The options of the command."""
    p = Parser(prog="python -m experiments.latency", description=(__doc__ or "").split("\n\n")[1], allow_abbrev=False)
    p.add_argument(
        "--run", type=Path, nargs="+", metavar="RUN", help="make the tables of these runs' records, measure nothing"
    )
    p.add_argument(
        "--budget",
        metavar="TIME",
        help=f"for measuring, all sweeps together ({GPU_BUDGET} on GPUs, {CPU_BUDGET} without)",
    )
    p.add_argument(
        "--np", type=int, metavar="N", help="ranks to start (8 on one GPU, else one for each GPU; 2 without)"
    )
    p.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for new runs (results); with --run, for the report (printed only)",
    )
    p.add_argument("--arch", default="sm_90", help="of the counted table's machine code; none leaves it out (sm_90)")
    p.add_argument(
        "sweep", nargs="*", metavar="-- OPTIONS", help="further options of the sweeps: -- --sizes 2K,64K --launch late"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    folders = args.run
    if folders is None:
        folders = _measure(args.np, args.budget, args.out or Path("results"), args.sweep)
    else:
        for option, value in (("--np", args.np), ("--budget", args.budget), ("options behind --", args.sweep)):
            if value:
                raise ArgumentError(f"--run makes tables of records that are there: leave out {option}")
    runs = [records.load(path) for path in folders]
    found = targets(runs)
    pieces: list[str] = []
    for piece in report(runs, found, None if args.arch == "none" else args.arch):
        print(f"{piece}\n", flush=True)
        pieces.append(f"{piece}\n")
    keep = args.out if args.run else folders[0]
    if keep is not None:
        records.make_folder(keep)
        records.write_whole(keep / "latency.md", "\n".join(pieces).encode())
        records.write_whole(keep / "targets.csv", latency_csv(found))
        print(f"wrote {keep / 'latency.md'} and {keep / 'targets.csv'}")
    return 0


def _measure(ranks: int | None, budget: str | None, out: Path, extra: Sequence[str]) -> list[Path]:
    if launcher_size() > 1:
        raise ArgumentError("this command starts its ranks itself: run it without mpirun")
    if ranks is not None and ranks < 2:
        raise ArgumentError(f"--np {ranks}: an exchange needs at least two ranks")
    gpus = mps.gpus_without_cuda()
    if not gpus:
        print(
            "note: no GPU here: the same kernels run between processes on the CPU, with a small budget; an emulation, whose times "
            "say nothing about a GPU",
            flush=True,
        )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folders = []
    for one in takes(gpus, ranks, parse_time(budget or (GPU_BUDGET if gpus else CPU_BUDGET)), extra):
        folder = out / f"{stamp}-latency-{one.name.replace('_', '-')}"
        print(f"measuring {one.name}: {one.ranks} ranks, into {folder}", flush=True)
        take(one, folder)
        folders.append(folder)
    return folders


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
