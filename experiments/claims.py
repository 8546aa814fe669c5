"""The paper's numbers beside ours: ``python -m experiments.claims RUN [RUN ...]``.

Prints Markdown that is also straight in a terminal, and writes it with the same as CSV into the first run's folder. Each
number of ours has its interval, its sample, and where it was taken; what a run cannot say is printed as not measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import frames
from experiments.decode import report
from experiments.figures import newest
from experiments.tables import aligned, latency_csv, rows
from fcomm import bootstrap, records
from fcomm.cli import Parser, folder
from fcomm.errors import ArgumentError
from fcomm.sizes import format_size

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run


@dataclass(frozen=True)
class Paper:
    """What the paper says of one collective, in per cent (negative: faster than its baseline)."""

    collective: str
    against: str
    median_percent: float
    best_percent: float


PAPER = (
    Paper("all_reduce", "custom AR v2", -28.8, -43.7),
    Paper("all_gather", "a baseline that is not named", -23.8, -58.9),
)
PAPER_MACHINE = "8 NVIDIA B300 GPUs of one server"
PAPER_TPOT_PERCENT = (-1.7, -6.8)
PAPER_SHARE_PERCENT = 11.4
"""Of the baseline's decode time, spent in all-reduce: what bounds the change of the time per output token."""

COLUMNS = (
    "collective", "against", "launch", "ranks", "status", "reason", "paper_median_percent", "median_percent",
    "median_low_percent", "median_high_percent", "paper_best_percent", "best_percent", "best_low_percent",
    "best_high_percent", "best_nbytes", "best_ranks", "points", "faster", "slower", "even", "masked", "masked_slower",
    "launches", "iterations_min", "iterations_max", "sharing", "machine",
)  # fmt: skip
"""Of `claims`. ranks: 0 for all rank counts together. Percentages are changes of latency, negative where ours is faster."""


def claims(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each comparison that a claim of the paper asks for, over all rank counts and for each one apart.

    Points that are about the L2 of a shared GPU are not counted, but their number is there. `RecordError` for mixed machines,
    time-sliced runs and runs without times.
    """
    import pandas as pd

    frames.one_machine(runs)
    for run in runs:
        run.for_figures()
    found = [row for paper in PAPER for row in _of_collective(runs, paper)]
    return pd.DataFrame(found, columns=list(COLUMNS))


def _of_collective(runs: Sequence[Run], paper: Paper) -> Iterator[dict[str, Any]]:
    said = {
        "collective": paper.collective, "against": frames.HEADLINE[paper.collective].name, "launch": "", "ranks": 0,
        "paper_median_percent": paper.median_percent, "paper_best_percent": paper.best_percent,
    }  # fmt: skip
    run, frame = next(((r, f) for r in runs for f in [frames.measured(r, paper.collective)] if len(f)), (None, None))
    if run is None or frame is None:
        yield {**said, **_missing(f"{frames.NO_TIMES} {paper.collective.replace('_', '-')}", runs[0])}
        return
    kind = {"mode": str(frame["mode"].iloc[0]), "dtype": str(frame["dtype"].iloc[0])}
    comparisons: list[tuple[frames.Side, str, str | None]] = [
        (frames.HEADLINE[paper.collective], launch, None) for launch in reversed(frames.launch_features(frame))
    ]
    if paper.collective == "all_reduce":
        comparisons.append((frames.V2_AS_SET, frames.ANY, "late"))
    for theirs, launch, their_launch in comparisons:
        against = {**said, "against": theirs.name, "launch": f"{launch} against late" if their_launch else launch}
        ratios = frames.ratios(run, frames.OURS, theirs, paper.collective, launch, their_launch, **kind)
        if ratios.empty:
            lacks = f"the run lacks {frames.OURS.name} or {theirs.name} with dependent launch {their_launch or launch}"
            yield {**against, **_missing(lacks, run)}
            continue
        for n in [0, *sorted(int(n) for n in ratios["ranks"].unique())]:
            of_n = ratios if n == 0 else ratios[ratios["ranks"] == n]
            yield {**against, "ranks": n, **_numbers(frames.summarise(of_n), run)}


def _missing(reason: str, run: Run) -> dict[str, Any]:
    return {"status": "not measured here", "reason": reason, "sharing": sharing(run), "machine": run.taken_on}


def _numbers(s: frames.Summary, run: Run) -> dict[str, Any]:
    where = {"sharing": sharing(run), "machine": run.taken_on}
    counts = {
        "points": s.points, "faster": s.wins, "slower": s.losses, "even": s.even, "masked": s.masked,
        "masked_slower": s.masked_losses,
    }  # fmt: skip
    if s.best is None:
        return {"status": "not measured here", "reason": "all points are about the L2", **counts, **where}
    return {
        "status": "measured", "reason": "", "median_percent": s.median_percent, "median_low_percent": s.median_low_percent,
        "median_high_percent": s.median_high_percent, "best_percent": s.best["change_percent"],
        "best_low_percent": s.best["change_low_percent"], "best_high_percent": s.best["change_high_percent"],
        "best_nbytes": s.best["nbytes"], "best_ranks": s.best["ranks"], **counts, "launches": s.launches,
        "iterations_min": s.iterations[0], "iterations_max": s.iterations[1], **where,
    }  # fmt: skip


def sharing(run: Run) -> str:
    """How the ranks had their processors: what a reader must know before any number."""
    if frames.emulated(run):
        return "emulated"
    return "one GPU shared" if frames.shared(run) else "a GPU each"


def headline(found: pd.DataFrame, collective: str = "all_reduce") -> dict[str, Any] | None:
    """The row that stands for a claim: all rank counts, the same launch feature on both sides, late where it was measured.

    None where it was not measured.
    """
    rows_of_it = rows(
        found[(found["collective"] == collective) & (found["ranks"] == 0) & (found["status"] == "measured")]
    )
    alike = [r for r in rows_of_it if " against " not in r["launch"]]
    return min(alike, key=lambda r: ("late", "none", "early").index(r["launch"]), default=None)


def amdahl(change_percent: float, share_percent: float = PAPER_SHARE_PERCENT) -> float:
    """Change of the whole in per cent, if a part with that share of it changes by so much and nothing else does."""
    return share_percent * change_percent / 100


def amdahl_line(found: pd.DataFrame) -> str:
    """What the measured all-reduce gain would mean for the time per output token (TPOT) at the paper's share; a sentence."""
    paper = PAPER[0]
    theirs = (
        f"The paper's own {paper.median_percent:+.1f} % and {paper.best_percent:+.1f} % give "
        f"{amdahl(paper.median_percent):+.1f} % and {amdahl(paper.best_percent):+.1f} % at that share, so its "
        f"{PAPER_TPOT_PERCENT[1]:+.1f} % was taken at a larger share or gained elsewhere, too."
    )
    row = headline(found)
    if row is None:
        return f"Amdahl: all-reduce was not measured here. {theirs}"
    if row["sharing"] == "emulated":
        return f"Amdahl: times of an emulation say nothing about a decode step. {theirs}"
    low, high = amdahl(row["median_low_percent"]), amdahl(row["median_high_percent"])
    interval = "" if math.isnan(low + high) else f" ({low:+.2f} % to {high:+.2f} %)"
    return (
        f"Amdahl: if all-reduce were {PAPER_SHARE_PERCENT} % of the time per token, as in the paper, the median of "
        f"{row['median_percent']:+.1f} % (dependent launch {row['launch']} on both sides, {row['sharing']}) would change it by "
        f"{amdahl(row['median_percent']):+.2f} %{interval}; no cut of all-reduce could save more than "
        f"{PAPER_SHARE_PERCENT} %. {theirs}"
    )


def markdown(found: pd.DataFrame, runs: Sequence[Run], steps: Sequence[Run] = ()) -> str:
    """A table for each comparison, with what has to be known beside it; predictions only if their gate is passed.

    steps : runs of experiments.decode.
    """
    from experiments import predict  # which imports this module

    lines: list[str] = []
    for (collective, against, launch), of_it in frames.grouped(found, ["collective", "against", "launch"], sort=False):
        trigger = f", dependent launch {launch}{'' if ' against ' in launch else ' on both sides'}" if launch else ""
        lines += [f"### {collective.replace('_', '-')} latency against {against}{trigger}", ""]
        table = [
            ["ranks", "paper: median", "ours: median", "paper: best", "ours: best", "faster / slower / even", "calls"]
        ]
        table += [_row(row) for row in rows(of_it)]
        lines += [*aligned(table), ""]
    lines += predict.section()
    low, high = PAPER_TPOT_PERCENT
    tpot, share = report.end_to_end(steps)
    lines += ["### end to end", ""]
    lines += aligned(
        [
            ["what", "paper", "ours"],
            ["time per output token against the same engine with custom AR v2", f"{low:+.1f} % to {high:+.1f} %", tpot],
            ["all-reduce's share of the baseline's decode time", f"{PAPER_SHARE_PERCENT:.1f} %", share],
        ]
    )
    return "\n".join([*lines, "", *_notes(found, runs)])


def _row(row: dict[str, Any]) -> list[str]:
    ranks = "all" if row["ranks"] == 0 else f"{row['ranks']}"
    median, best = f"{row['paper_median_percent']:+.1f} %", f"{row['paper_best_percent']:+.1f} %"
    if row["status"] != "measured":
        return [ranks, median, f"{row['status']}: {row['reason']}", best, row["status"], "-", "-"]
    masked = f" ({row['masked']:.0f} masked, {row['masked_slower']:.0f} of them slower)" if row["masked"] else ""
    low, high = int(row["iterations_min"]), int(row["iterations_max"])
    calls = f"{low}" if low == high else f"{low} to {high}"
    return [
        ranks, median, _with_interval(row, "median"), best,
        f"{_with_interval(row, 'best')} at {format_size(int(row['best_nbytes']))}, n = {row['best_ranks']:.0f}",
        f"{row['faster']:.0f} / {row['slower']:.0f} / {row['even']:.0f}{masked}",
        f"{calls} in {row['launches']:.0f} launch{'es' if row['launches'] > 1 else ''}",
    ]  # fmt: skip


def _with_interval(row: dict[str, Any], what: str) -> str:
    low, high = row[f"{what}_low_percent"], row[f"{what}_high_percent"]
    interval = "" if math.isnan(low + high) else f" [{low:+.1f}, {high:+.1f}]"
    return f"{row[f'{what}_percent']:+.1f} %{interval}"


def _notes(found: pd.DataFrame, runs: Sequence[Run]) -> Iterator[str]:
    yield f"- {amdahl_line(found)}"
    taken = dict.fromkeys(f"{run.taken_on} ({run.path.name})" for run in runs)
    yield f"- Ours were taken on: {'; '.join(taken)}. The paper's on {PAPER_MACHINE}."
    yield (
        "- A change of latency is a ratio at one size and rank count, both sides measured in one run, the fastest case of each "
        "side. Median: over these points; its brackets go from the median of the lower ends of their 95 % intervals to that of "
        "the upper ends. Best: the largest reduction, with its own interval."
    )
    yield (
        "- custom AR v2, fastest of three ways: as its authors set it, with its launch shape tuned, the best of its own "
        'algorithms; both sides with the same launch feature. "any against late": ours at the fastest trigger, against custom '
        "AR v2 as its authors set it."
    )
    if any(frames.emulated(run) for run in runs):
        yield "- EMULATION: these are times of kernels run on CPU cores. They say nothing about GPUs."
    if any(frames.shared(run) for run in runs):
        yield (
            "- The ranks share one GPU. Not to be claimed from it: microseconds over NVLink, scaling over n, crossovers between "
            "algorithms at 128 KiB and more with n = 8, time per token. Masked: points where all ranks' bytes take more than "
            "15 % of the time at the L2's rate; they are about the L2 and not counted."
        )
    for run in runs:
        if not run.complete:
            yield f"- {run.path.name} was interrupted: {sum(run.owed.values()):,} timed calls are missing."
        if run.latency["launches"].max() < 5:
            yield f"- {run.path.name} has {run.latency['launches'].max()} launch(es); a published figure has five or more."


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = Parser(prog="python -m experiments.claims", description=(__doc__ or "").split(":")[0], allow_abbrev=False)
    p.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders of runs (the newest under results/)")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder for claims.md and claims.csv (the first run's)")
    args = p.parse_args(argv)
    every = [records.load(path) for path in args.runs or [newest(command="claims")]]
    runs, steps = ([run for run in every if report.is_decode(run) is wanted] for wanted in (False, True))
    if not runs:
        raise ArgumentError(
            "only runs of experiments.decode were named: name one of the sweep, whose latencies are claimed, too"
        )
    out = folder(args.out or runs[0].path, "--out")
    found = claims(runs)
    text = markdown(found, runs, steps)
    print(text)
    records.write_whole(out / "claims.md", f"{text}\n".encode())
    records.write_whole(out / "claims.csv", latency_csv(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
