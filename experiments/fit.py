"""Fits the cost model to runs: ``python -m experiments.fit results/RUN [...] [--save]``.

Launches of all the runs are replicates. Writes ``model.json``, ``fit.md`` and figures into the first run's folder (``--quick``:
``model-quick.json`` and ``fit-quick.md``, beside what a full fit has left); ``--save`` also puts the model where selection on this
machine finds it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments import judging
from experiments.fitting import Fitted, Floats, Table, fit, predictions, read
from experiments.judging import SELECTOR, Judged, bootstrap, leave_out, summary
from experiments.tables import rows
from fcomm import bootstrap as ranks
from fcomm import records
from fcomm.cli import Parser, folder, progress
from fcomm.cost_model import LAUNCH, OWN, SHARED, Model, model_path
from fcomm.errors import ArgumentError
from fcomm.sizes import format_size

TARGETS = {
    "regret": (0.01, 0.05, 0.15),
    "sizes": (0.05, 0.15, math.inf),
    "ranks": (0.12, math.inf, math.inf),
}
"""Median, 95th percentile and worst that a fit is held to; `docs/cost-model.md`."""
MISSES = 8


@dataclass
class Outcome:
    """A fitted model with what is known of its quality."""

    table: Table
    model: Model
    fitted: Fitted
    draws: Floats
    by_sizes: Judged | None
    by_ranks: Judged | None
    fit_s: float


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = Parser(prog="python -m experiments.fit", description=(__doc__ or "").split(":")[0], allow_abbrev=False)
    p.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs of one machine")
    p.add_argument(
        "--save", action="store_true", help="keep the model in the user's cache folder, where selection looks"
    )
    p.add_argument("--mode", metavar="NAME", help="kind of latency (graph, else the run's first)")
    p.add_argument("--draws", type=int, default=judging.DRAWS, metavar="INT", help="resamplings for intervals (40)")
    p.add_argument(
        "--quick",
        action="store_true",
        help="the model alone (model-quick.json): no intervals, errors, regret or figures",
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="folder for model, report and figures (the first run's)")
    p.add_argument(
        "--docs", type=Path, metavar="DIR", help="also put tables and figures into DIR/cost-model.md and DIR/figures"
    )
    return p


DOCUMENTED = ("model-all_reduce-none.png", "map-all_reduce-none.png", "regret.png")
"""Figures that the documentation shows, there under cost-<name>."""


def block_of(path: Path, name: str) -> tuple[str, str]:
    """What stands before and behind the comments `<!-- name -->` and `<!-- /name -->` of a page; `ArgumentError` without them."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = path.read_text() if path.is_file() else ""
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ArgumentError(f"{path} has no {begin} ... {end} to put tables in")
    return head, tail


def replace_block(path: Path, name: str, content: str) -> None:
    """Puts content between the comments `<!-- name -->` and `<!-- /name -->` of a page."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, tail = block_of(path, name)
    records.write_whole(path, f"{head}{begin}\n\n{content.strip()}\n\n{end}{tail}".encode())


def fit_runs(
    runs: Sequence[records.Run],
    mode: str | None = None,
    draws: int = judging.DRAWS,
    judge: bool = True,
    bar: Any = judging.quietly,
) -> Outcome:
    """Fits and, with `judge`, finds intervals, errors and regret. `RecordError` for runs that no fit may read."""
    table = read(runs, mode)
    start_s = time.perf_counter()
    model, fitted = fit(table)
    fit_s = time.perf_counter() - start_s
    if not judge:
        return Outcome(table, model, fitted, np.empty((0, len(fitted.prices))), None, None, fit_s)
    drawn = bootstrap(table, fitted, draws, progress=bar)
    start = dict(zip(fitted.design.names, fitted.prices, strict=True))
    by_sizes = leave_out(table, "nbytes", start, bar)
    by_ranks = leave_out(table, "ranks", start, bar) if len(table.ranks) > 2 else None
    outcome = Outcome(table, model, fitted, drawn, by_sizes, by_ranks, fit_s)
    return replace_model(outcome)


def replace_model(outcome: Outcome) -> Outcome:
    """Puts intervals, errors and regret into the model, so that its file says how good it is."""
    low, high = np.quantile(outcome.draws, [0.025, 0.975], axis=0)
    intervals = {
        " ".join(name): [float(f"{a:.4g}"), float(f"{b:.4g}")]
        for name, a, b in zip(outcome.fitted.design.names, low, high, strict=True)
    }
    quality: dict[str, Any] = {"cases": len(outcome.table), "launches": outcome.table.launches}
    for name, judged in (("sizes", outcome.by_sizes), ("ranks", outcome.by_ranks)):
        if judged is not None:
            quality[f"error, {name} left out"] = summary(judged.errors())
            quality[f"error without correction, {name} left out"] = summary(judged.errors(corrected=False))
            quality[f"regret, {name} left out"] = summary(_regret(judged, SELECTOR))
    report = {"created_utc": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "intervals": intervals, "quality": quality}
    outcome.model = replace(outcome.model, report=report)
    return outcome


def _regret(judged: Judged, policy: str, column: str = "regret") -> Floats:
    c = judged.choices
    return c.loc[c["policy"] == policy, column].to_numpy(float)


# ---- in words --------------------------------------------------------------------------------------------------------


def coefficients_table(outcome: Outcome) -> str:
    """The prices with units and, where there are draws, 95 % intervals; as Markdown."""
    model, report = outcome.model, outcome.model.report.get("intervals", {})

    def cell(value: float, name: str) -> str:
        found = report.get(name)
        return f"{value:.3g}" if found is None else f"{value:.3g} [{found[0]:.3g}, {found[1]:.3g}]"

    lines = ["| price of the machine | value | unit |", "|---|---|---|"]
    lines += [f"| `{key}` | {cell(model.shared[key], key)} | {unit} |" for key, unit in SHARED.items()]
    for feature, prices in model.launch.items():
        lines += [
            f"| `{key}`, dependent launch {feature} | {cell(prices[key], f'{key} {feature}')} | {unit} |"
            for key, unit in LAUNCH.items()
        ]
    lines += ["", f"| protocol | {' | '.join(f'`{key}`' for key in OWN)} |", "|---" * (len(OWN) + 1) + "|"]
    for name, prices in model.own.items():
        lines.append(f"| `{name}` | {' | '.join(cell(prices[key], f'{key} {name}') for key in OWN)} |")
    return "\n".join([*lines, "", *(f"- `{key}`: {unit}" for key, unit in OWN.items())])


def quality_table(outcome: Outcome) -> str:
    """Errors and regret by what was left out, beside targets and other policies; as Markdown."""
    assert outcome.by_sizes is not None
    f, model = outcome.table.frame, outcome.model
    ours = ~f["baseline"].to_numpy()
    seen = [
        np.abs(predictions(f[ours], model, correct=c) / f["latency_us"].to_numpy(float)[ours] - 1)
        for c in (False, True)
    ]
    by_sizes = outcome.by_sizes
    lines = ["| prediction error, our protocols | cases | median | p95 | worst | target |", "|---|---|---|---|---|---|"]
    lines.append(_line("seen, form alone", seen[0], None))
    lines.append(_line("seen, with the correction", seen[1], None))
    lines.append(_line("sizes left out, form alone", by_sizes.errors(corrected=False), None))
    lines.append(_line("sizes left out, with the correction", by_sizes.errors(), TARGETS["sizes"]))
    lines.append(_line("sizes left out, baselines too", by_sizes.errors(baselines=True), None))
    if outcome.by_ranks is not None:
        lines.append(_line("rank counts left out", outcome.by_ranks.errors(), TARGETS["ranks"]))
    for title, judged in (("sizes", by_sizes), ("rank counts", outcome.by_ranks)):
        if judged is None:
            continue
        lines += [
            "",
            f"| regret, {title} left out | choices | median | p95 | worst | mean | to the best of all, median | target |",
        ]
        lines.append("|---|---|---|---|---|---|---|---|")
        for policy in judged.choices["policy"].unique():
            found, to_any = _regret(judged, policy), _regret(judged, policy, "to_any")
            target = TARGETS["regret"] if policy == SELECTOR and judged is by_sizes else None
            parts = _line(policy, found, target).removesuffix(" |").split(" | ")
            lines.append(" | ".join([*parts[:5], f"{found.mean():.1%}", f"{np.median(to_any):.3f}", parts[5]]) + " |")
    return "\n".join(lines)


def _line(name: str, values: Floats, target: tuple[float, float, float] | None) -> str:
    s = summary(values)
    wanted = "" if target is None else " / ".join("-" if math.isinf(t) else f"{t:.0%}" for t in target)
    met = target is not None and all(s[k] <= t for k, t in zip(("median", "p95", "worst"), target, strict=True))
    verdict = "" if target is None else f"{wanted}: {'met' if met else 'MISSED'}"
    return f"| {name} | {s['count']} | {s['median']:.1%} | {s['p95']:.1%} | {s['worst']:.1%} | {verdict} |"


def misses(judged: Judged, count: int = MISSES) -> str:
    """The points with the largest regret of the model's choice; as Markdown."""
    c = judged.choices[judged.choices["policy"] == SELECTOR]
    keys = [*judging.POINT, "chosen", "best"]
    worst = c.groupby(keys)["regret"].mean().reset_index().sort_values("regret", ascending=False).head(count)
    lines = [
        "| collective | ranks | size | dependent launch | chosen | best | regret |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['collective']} | {r['ranks']} | {format_size(int(r['nbytes']))} | {r['launch']} | `{r['chosen']}` | "
        f"`{r['best']}` | {r['regret']:.1%} |"
        for r in rows(worst)
    ]
    return "\n".join(lines)


def caption(outcome: Outcome) -> str:
    """Where and how the figures were taken, and what regret means."""
    t = outcome.table
    intervals = (
        f"intervals: 95 % of resampled launches, each drawn as a whole ({t.launches} launches)"
        if t.launches > 1
        else "one launch, so there are no intervals over launches: those given are of its iterations alone, and too narrow"
    )
    halves = "halves of the launches" if t.launches > 1 else "halves of the iterations (there is one launch)"
    dtypes = ", ".join(sorted(t.frame["dtype"].unique()))
    return (
        f"{len(t)} cases, {dtypes}, mode {t.mode}, taken on the {t.taken_on}; {intervals}. The fit took {outcome.fit_s:.1f} s.\n\n"
        "Regret: time of the chosen / time of the best - 1; the best is the fastest protocol that is no baseline, found on one and "
        f'scored on the other of two {halves}. "To the best of all" counts baselines too. Custom AR v2\'s table chooses among its '
        "own forms and is compared with the best of these."
    )


def report(outcome: Outcome) -> str:
    """Everything that the command prints, as Markdown."""
    parts = [f"# Cost model: {outcome.model.machine.get('device')}", caption(outcome)]
    if outcome.by_sizes is not None:
        parts += ["## Quality", quality_table(outcome), "## Largest regrets, sizes left out", misses(outcome.by_sizes)]
        if outcome.by_ranks is not None:
            parts += ["## Largest regrets, rank counts left out", misses(outcome.by_ranks)]
    parts += ["## Coefficients", coefficients_table(outcome)]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    if args.draws < 1:
        raise ArgumentError(f"--draws {args.draws} is not a positive number")
    if len({path.resolve() for path in args.runs}) < len(args.runs):
        raise ArgumentError("a run is named twice: its launches would count twice")
    if args.docs is not None:
        if args.quick:
            raise ArgumentError(
                "--docs shows errors, regret and figures, which --quick leaves out: leave out one of the two"
            )
        block_of(args.docs / "cost-model.md", "fit")
        folder(args.docs / "figures", "--docs")
    runs = [records.load(path) for path in args.runs]
    into = folder(args.out or args.runs[0], "--out")
    outcome = fit_runs(runs, args.mode, args.draws, not args.quick, progress)
    text = report(outcome)
    print(text)
    # A quick fit knows neither intervals nor errors, and must not take the place of one that does.
    kept = ["model-quick.json", "fit-quick.md"] if args.quick else ["model.json", "fit.md"]
    outcome.model.save(into / kept[0])
    records.write_whole(into / kept[1], text.encode())
    if not args.quick:
        from experiments.fit_plots import figures
        from experiments.plots import png

        for name, figure in figures(outcome).items():
            records.write_whole(into / name, png(figure))
            kept.append(name)
            if args.docs is not None and name in DOCUMENTED:
                records.write_whole(args.docs / "figures" / f"cost-{name}", png(figure))
        if args.docs is not None:
            page = args.docs / "cost-model.md"
            replace_block(page, "fit", text.split("\n", 1)[1].replace("\n## ", "\n### "))
    print(f"{into}/ has {', '.join(kept)}")
    if args.save:
        print(
            f"saved as {outcome.model.save(model_path(outcome.model.machine, outcome.model.ranks))}, where selection on this machine finds it"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(ranks.run(main, alone=True))
