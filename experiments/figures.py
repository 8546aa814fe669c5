"""The paper's figures from a run's records: ``python -m experiments.figures RUN [RUN ...]``.

Each as vector graphics and as PNG, with a list of what was drawn, its caption, and what could not be drawn and why. With
several runs of one machine (all-reduce in one, all-gather in another) each figure is drawn from the first that has what it
needs. Without a run named: the newest under ``results/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import counted, frames, plots
from experiments.tables import latency_csv
from fcomm import bootstrap, records
from fcomm.cli import Parser, folder, listed
from fcomm.errors import ArgumentError, FcommError, RecordError
from fcomm.source import LAUNCHES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fcomm.records import Run

SHIPPED = Path(__file__).resolve().parent / "data" / "h200-shared"
"""Runs on one H200 that come with the repository, for readers without a GPU."""


@dataclass(frozen=True)
class PaperFigure:
    """A figure by its file's name: what it shows, and the function of a run that draws it or raises `RecordError`."""

    name: str
    shows: str
    draw: Callable[..., Figure]


def _each_launch() -> Iterator[PaperFigure]:
    for launch in LAUNCHES:
        side = f"dependent launch {launch} on all sides"
        yield PaperFigure(
            f"all-reduce-latency-{launch}",
            f"all-reduce latency over size, ours against custom AR v2 (three ways) and others, {side}",
            partial(plots.side_latency, collective="all_reduce", launch=launch),
        )
        yield PaperFigure(
            f"all-reduce-reduction-{launch}",
            f"reduction over size against the fastest of custom AR v2's three ways, {side}",
            partial(plots.reduction, collective="all_reduce", launch=launch),
        )
    yield PaperFigure(
        "all-reduce-reduction-as-set",
        "reduction over size, ours at any trigger against custom AR v2 as its authors set it (late)",
        partial(
            plots.reduction, collective="all_reduce", launch=frames.ANY, theirs=frames.V2_AS_SET, their_launch="late"
        ),
    )
    for launch in LAUNCHES:
        side = f"dependent launch {launch} on all sides"
        yield PaperFigure(
            f"all-gather-latency-{launch}",
            f"all-gather latency over size, {side}",
            partial(plots.side_latency, collective="all_gather", launch=launch),
        )
        yield PaperFigure(
            f"all-gather-reduction-{launch}",
            f"all-gather: reduction over size against the fastest baseline, {side}",
            partial(plots.reduction, collective="all_gather", launch=launch),
        )


def selector_regret(run: Run) -> Figure:
    """What the fitted model's choices cost at sizes that it was not fitted to, beside other ways to choose."""
    from experiments import fit, fit_plots

    outcome = fit.fit_runs([run], draws=1)
    assert outcome.by_sizes is not None
    figure = fit_plots.regret(outcome, outcome.by_sizes)
    emulation = "EMULATION on CPUs: " if frames.emulated(run) else ""
    figure.set_label(
        f"{emulation}Regret of choices at sizes that were left out of the fit: time of the chosen over that of the best, minus 1; "
        f"the best found on one half of the launches (of one launch: of its calls), scored on the other. "
        f"{frames.caption(run, frames.measured(run))}"
    )
    return figure


FIGURES: tuple[PaperFigure, ...] = (
    *_each_launch(),
    PaperFigure("best-encodings", "which encoding wins where (size x ranks), all-reduce", plots.best_encodings),
    PaperFigure(
        "best-encodings-all-gather",
        "which encoding wins where (size x ranks), all-gather",
        partial(plots.best_encodings, collective="all_gather"),
    ),
    PaperFigure("ablation-encodings", "one encoding at a time", plots.one_encoding),
    PaperFigure("ablation-shots", "two-shot against one-shot", plots.shots),
    PaperFigure("ablation-selector", "the selector against fixed choices", selector_regret),
    PaperFigure("ablation-launch", "dependent launch none, late and early, on both sides", plots.triggers),
    PaperFigure("floor", "multiples of the floor", plots.floor_multiples),
    PaperFigure("scaling", "latency over the number of ranks", plots.scaling),
    PaperFigure("skew", "what a delay of one rank adds to a call", plots.skew),
)


@dataclass
class Drawn:
    """What became of one figure."""

    name: str
    shows: str
    figure: Figure | None = None
    run: Run | None = None
    reason: str = ""
    """Why there is no figure."""


def draw(runs: Sequence[Run], published: pd.DataFrame | None = None) -> Iterator[Drawn]:
    """Each figure, from the first run that has what it needs; where none has, the reason.

    published : from `frames.published`, laid over the latency figures. `RecordError` for mixed machines and time-sliced runs.
    """
    frames.one_machine(runs)
    for run in runs:
        run.for_figures()
    for paper_figure in FIGURES:
        yield _draw(runs, paper_figure, published)


def one(runs: Sequence[Run], name: str) -> Drawn:
    """One figure by its name, as `draw` does all of them; `ArgumentError` for a name that there is not."""
    frames.one_machine(runs)
    for paper_figure in FIGURES:
        if paper_figure.name == name:
            return _draw(runs, paper_figure, None)
    raise ArgumentError(f"there is no figure {name!r}; there are {', '.join(f.name for f in FIGURES)}")


def _draw(runs: Sequence[Run], wanted: PaperFigure, published: pd.DataFrame | None) -> Drawn:
    extra = {"published": published} if "-latency-" in wanted.name else {}
    reasons: list[str] = []
    for run in runs:
        try:
            return Drawn(wanted.name, wanted.shows, wanted.draw(run, **extra), run)
        except FcommError as error:
            reasons.append(str(error))
    # A run of another collective has nothing to say about this one.
    telling = [r for r in reasons if not r.startswith(frames.NO_TIMES)] or reasons
    return Drawn(wanted.name, wanted.shows, reason="; ".join(dict.fromkeys(telling)))


def newest(results: Path = Path("results"), command: str = "figures") -> Path:
    """The newest run; `ArgumentError` where there is none. command : of this package, that looks for one."""
    found = records.runs(results)
    if not found:
        raise ArgumentError(
            f"there is no run under {results}/: take one with `make sweep`, or look at those that come with the repository: "
            f"python -m experiments.{command} {SHIPPED / '*'}/"
        )
    return found[-1]


def parser() -> Parser:
    """The options of the command."""
    p = Parser(prog="python -m experiments.figures", description=(__doc__ or "").split(":")[0], allow_abbrev=False)
    p.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders of runs (the newest under results/)")
    p.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the figures (figures/ in the first run's folder)"
    )
    p.add_argument("--formats", default=",".join(plots.FORMATS), metavar="LIST", help=f"({','.join(plots.FORMATS)})")
    p.add_argument("--only", metavar="LIST", help="names of figures, or their beginnings")
    p.add_argument(
        "--published", metavar="GPU", help="lay others' published latencies over ours: h200_sxm, b300_sxm, ..."
    )
    p.add_argument("--no-counted", action="store_true", help="leave out the counted table (it compiles kernels)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    formats = listed(args.formats, "--formats")
    for name in formats:
        if name not in plots.FORMATS:
            raise ArgumentError(f"--formats {name!r} is not known; use {', '.join(plots.FORMATS)}")
    wanted = ("",) if args.only is None else tuple(listed(args.only, "--only"))
    known = [one.name for one in FIGURES] + [COUNTED]
    for w in wanted:
        if not any(name.startswith(w) for name in known):
            raise ArgumentError(f"--only {w!r} is no figure; there are {', '.join(known)}")
    lines = frames.published(args.published) if args.published else None
    runs = [records.load(path) for path in args.runs or [newest()]]
    out = folder(args.out or runs[0].path / "figures", "--out")
    kept: list[str] = []
    missing: list[str] = []
    for drawn in draw(runs, lines):
        if not drawn.name.startswith(wanted):
            continue
        if drawn.figure is None:
            missing.append(f"{drawn.name} ({drawn.shows}): {drawn.reason}")
            continue
        for kind in formats:
            records.write_whole(out / f"{drawn.name}.{kind}", plots.encode(drawn.figure, kind))
        kept.append(f"## {drawn.name}\n\n![{drawn.shows}]({drawn.name}.{formats[0]})\n\n{drawn.figure.get_label()}\n")
        print(f"drew {out / drawn.name}.{'|'.join(formats)}: {drawn.shows}", flush=True)
    if COUNTED.startswith(wanted) and not args.no_counted:
        kept.append(f"## {COUNTED}\n\n{_counted(runs[0], out)}\n")
        print(f"wrote {out / COUNTED}.md|csv: what is counted and not timed, for each protocol")
    for line in missing:
        print(f"not drawn: {line}")
    names = ", ".join(str(run.path.name) for run in runs)
    index = [f"# Figures of {names}\n", *kept]
    if missing:
        index += ["## Not drawn\n", *(f"- {line}" for line in missing), ""]
    records.write_whole(out / "README.md", "\n".join(index).encode())
    return 0 if kept else 1


COUNTED = "counted"


def _counted(run: Run, out: Path) -> str:
    """Writes the counted table for the run's sizes and its largest rank count; returns the Markdown of two of the sizes."""
    frame = frames.measured(run)
    if frame.empty:
        raise RecordError(f"{run.path} has no times of two or more ranks: start ranks with mpirun -n N")
    sizes = sorted(int(b) for b in frame["nbytes"].unique())
    every = counted.counted(sizes, [int(frame["ranks"].max())])
    records.write_whole(out / f"{COUNTED}.csv", latency_csv(every))
    text = counted.markdown(every[every["nbytes"].isin({sizes[0], sizes[len(sizes) // 2]})], "sm_90")
    records.write_whole(out / f"{COUNTED}.md", f"{text}\n".encode())
    return text


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
