"""The gate of predictions: ``python -m experiments.validate``. Calibrates on 2 ranks, predicts 4 and 8, says whether that is enough.

The protocol is in ``docs/validation.md``. ``--record WORDS`` appends the verdict to ``experiments/data/validation`` as a further
attempt, with every cell and with what was changed since the one before; attempts are never replaced. The exit code is 0 if the
gate is passed and 1 if not.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import gate
from experiments.fit import block_of, replace_block
from experiments.frames import grouped
from experiments.link_model import Instructions, Link, calibrate, gbps, intervals
from experiments.systems import SYSTEMS
from experiments.tables import aligned, rows
from fcomm import bootstrap, records
from fcomm.cli import Parser, folder, progress
from fcomm.errors import ArgumentError, RecordError
from fcomm.sizes import format_size

if TYPE_CHECKING:
    import pandas as pd

ATTEMPTS = "attempts.json"
SAME = 1e-3
"""Two predictions that differ by less, relatively, are of one model: what another version of SciPy may change."""


@dataclass(frozen=True)
class Outcome:
    """One run of the gate. Frames have the columns `gate.CELLS`."""

    protocol: gate.Protocol
    links: Mapping[str, Link]
    """By GPU, as published (`b300_sxm`)."""
    calibration: pd.DataFrame
    held_out: pd.DataFrame
    left_out: pd.DataFrame
    """Cells whose system runs what is not described, by its own rule: no prediction."""

    @cached_property
    def verdict(self) -> gate.Verdict:
        return gate.judge(self.held_out, self.protocol.thresholds)


def run(prices: Instructions | None = None, table: Path = gate.PUBLISHED) -> Outcome:
    """Calibrates, predicts and compares, as the protocol says. The same every time."""
    which, prices = gate.protocol(), prices or Instructions.load()
    published = gate.published(which, table)
    used = published["ranks"].isin(which.calibration_ranks) & published["system"].isin(which.calibration_systems)
    held = published["ranks"].isin(which.ranks_held_out) & published["system"].isin(which.systems_held_out)
    links = {gpu: _link(published[used & (published["gpu"] == gpu)], gpu, prices) for gpu in which.gpus}
    held_out = predicted(published[held], links, prices)
    unknown = held_out["predicted_us"].isna()
    return Outcome(
        which, links, predicted(published[used], links, prices), held_out[~unknown].reset_index(drop=True), held_out[unknown]
    )  # fmt: skip


def predicted(published: pd.DataFrame, links: Mapping[str, Link], prices: Instructions) -> pd.DataFrame:
    """The same rows with `predicted_us`; NaN where a system runs what is not described."""
    values = []
    for row in rows(published):
        counts = SYSTEMS[row["system"]].counts(int(row["nbytes"]), int(row["ranks"]), row["gpu"], prices)
        values.append(np.nan if counts is None else counts.latency_us(links[row["gpu"]]))
    return published.assign(predicted_us=np.array(values, float))[list(gate.CELLS)]


def _calibrated_on(of_it: pd.DataFrame, gpu: str, prices: Instructions) -> list[Any]:
    return [SYSTEMS[r["system"]].counts(int(r["nbytes"]), int(r["ranks"]), gpu, prices) for r in rows(of_it)]


def _link(of_it: pd.DataFrame, gpu: str, prices: Instructions) -> Link:
    return calibrate(_calibrated_on(of_it, gpu, prices), of_it["published_us"].tolist())


def bootstrap_intervals(outcome: Outcome, prices: Instructions) -> dict[str, dict[str, tuple[float, float]]]:
    """95 % intervals of the calibrated prices, by GPU; see `link_model.intervals`."""
    return {
        gpu: intervals(_calibrated_on(of_it, gpu, prices), of_it["published_us"].tolist(), of_it["system"].tolist())
        for gpu in progress(list(outcome.links), "intervals")
        for of_it in [outcome.calibration[outcome.calibration["gpu"] == gpu]]
    }


# ---- attempts --------------------------------------------------------------------------------------------------------


def attempts(folder: Path = gate.FOLDER) -> list[dict[str, Any]]:
    """What was recorded so far, oldest first; `RecordError` where the file is damaged."""
    path = folder / ATTEMPTS
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, list) or [a["attempt"] for a in found] != list(range(1, len(found) + 1)):
            raise ValueError
        return found
    except (OSError, ValueError, TypeError, KeyError):
        raise RecordError(
            f"{path} is not the list of a validation's attempts: restore it from the repository"
        ) from None


def cells_path(attempt: int, folder: Path = gate.FOLDER) -> Path:
    """Where an attempt's cells are."""
    return folder / f"attempt-{attempt}.csv"


def judged(outcome: Outcome, folder: Path = gate.FOLDER) -> dict[str, Any] | None:
    """The last attempt, if it is this very model that it judged: the same cells, predicted alike within `SAME`."""
    import pandas as pd

    known = attempts(folder)
    if not known:
        return None
    path = cells_path(known[-1]["attempt"], folder)
    try:
        then = pd.read_csv(path)
        keys = [c for c in gate.CELLS if c != "predicted_us"]
        both = then.merge(outcome.held_out, on=keys, how="outer", suffixes=("", "_now"))
        alike = np.isclose(both["predicted_us"], both["predicted_us_now"], rtol=SAME, atol=0)
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"{path} has no cells of an attempt ({type(error).__name__})") from None
    return known[-1] if bool(alike.all()) else None


def record(outcome: Outcome, changed: str, date: str, folder: Path = gate.FOLDER) -> int:
    """Appends an attempt and returns its number. changed : what is different from the one before, and why.

    `ArgumentError` for a model that the last attempt has judged already.
    """
    known = attempts(folder)
    if judged(outcome, folder) is not None:
        raise ArgumentError(f"attempt {len(known)} is of this very model: there is nothing new to record")
    v, number = outcome.verdict, len(known) + 1
    known.append(
        {
            "attempt": number, "date": date, "changed": changed, "passed": v.passed, "median_error": round(v.median_error, 5),
            "kendall_tau": round(v.kendall_tau, 5), "signs_right": round(v.signs_right, 5), "cells": v.cells,
            "orders": v.orders, "pairs": v.pairs, "links": {gpu: vars(link) for gpu, link in outcome.links.items()},
        }
    )  # fmt: skip
    text = io.StringIO()
    outcome.held_out.to_csv(text, index=False, float_format="%.5g")
    records.write_whole(cells_path(number, folder), text.getvalue().encode())
    records.write_whole(folder / ATTEMPTS, f"{json.dumps(known, indent=1)}\n".encode())
    return number


# ---- in words --------------------------------------------------------------------------------------------------------


def report(outcome: Outcome, spans: Mapping[str, Mapping[str, tuple[float, float]]] | None = None) -> str:
    """Calibration, verdict and where it comes from, as Markdown. spans : from `bootstrap_intervals`."""
    return "\n".join([*_calibration(outcome, spans), "", *_verdict(outcome), "", *_where(outcome)])


def _calibration(outcome: Outcome, spans: Mapping[str, Mapping[str, tuple[float, float]]] | None) -> list[str]:
    def value(link: Link, gpu: str, name: str) -> str:
        span = f" [{spans[gpu][name][0]:.3g}, {spans[gpu][name][1]:.3g}]" if spans else ""
        return f"{getattr(link, name):.3g}{span}"

    table = [
        ["GPU", "launch, late (µs)", "hop (µs)", "link (µs/MiB)", "link (GB/s)", "error, 2 ranks: median", "worst"]
    ]
    for gpu, link in outcome.links.items():
        e = gate.errors(outcome.calibration[outcome.calibration["gpu"] == gpu])
        prices = [value(link, gpu, name) for name in ("launch_us", "hop_us", "link_us_per_mib")]
        table.append([gpu, *prices, f"{gbps(link):.0f}", f"{np.median(e):.1%}", f"{e.max():.1%}"])
    systems = " and ".join(outcome.protocol.calibration_systems)
    return [f"Calibrated on {systems} with 2 ranks:", "", *aligned(table)]


def _verdict(outcome: Outcome) -> list[str]:
    v, t = outcome.verdict, outcome.protocol.thresholds
    met = {True: "reached", False: "MISSED"}
    table = [
        ["metric", "value", "over", "threshold", ""],
        ["median error", f"{v.median_error:.1%}", f"{v.cells} cells", f"at most {t.median_error_at_most:.0%}",
         met[v.median_error <= t.median_error_at_most]],
        ["Kendall's tau", f"{v.kendall_tau:.3f}", f"{v.orders} orders", f"at least {t.kendall_tau_at_least}",
         met[v.kendall_tau >= t.kendall_tau_at_least]],
        [f"right signs, differences over {t.difference_counts_over:.0%}", f"{v.signs_right:.1%}", f"{v.pairs} pairs",
         f"at least {t.signs_right_at_least:.0%}", met[v.signs_right >= t.signs_right_at_least]],
    ]  # fmt: skip
    return [f"Held out, {' and '.join(map(str, outcome.protocol.ranks_held_out))} ranks:", "", *aligned(table)]


def _where(outcome: Outcome) -> list[str]:
    f, over = outcome.held_out, outcome.protocol.thresholds.difference_counts_over
    table = [
        ["GPU", "ranks", *(f"{s}: median error (bias)" for s in outcome.protocol.systems_held_out), "tau", "signs"]
    ]
    for (gpu, n), of_it in grouped(f, ["gpu", "ranks"]):
        cells = []
        for system in outcome.protocol.systems_held_out:
            mine = of_it[of_it["system"] == system]
            bias = float(np.median(mine["predicted_us"] / mine["published_us"])) - 1
            cells.append(f"{np.median(gate.errors(mine)):.1%} ({bias:+.1%})")
        pairs = gate.signs(of_it, over)
        table.append(
            [gpu, str(n), *cells, f"{gate.orders(of_it)['tau'].mean():.2f}", f"{pairs['right'].sum()} of {len(pairs)}"]
        )
    lines = ["Where it comes from (bias: median of predicted / published - 1):", "", *aligned(table), ""]
    pairs = gate.signs(f, over)
    table = [["pair", "counts in", "right"]]
    both = pairs.assign(pair=[" / ".join(sorted(p)) for p in zip(pairs["faster"], pairs["slower"], strict=True)])
    table += [[pair, str(len(p)), f"{p['right'].mean():.0%}"] for (pair,), p in grouped(both, ["pair"])]
    lines += [*aligned(table), "", "Largest errors:", ""]
    worst = f.assign(error=f["predicted_us"] / f["published_us"] - 1)
    worst = worst.loc[worst["error"].abs().sort_values(ascending=False).index].head(12)
    table = [["system", "GPU", "ranks", "size", "published (µs)", "predicted (µs)", "error"]]
    table += [
        [r["system"], r["gpu"], str(r["ranks"]), format_size(int(r["nbytes"])), f"{r['published_us']:.2f}",
         f"{r['predicted_us']:.2f}", f"{r['error']:+.0%}"]
        for r in rows(worst)
    ]  # fmt: skip
    lines += aligned(table)
    if len(outcome.left_out):
        named = ", ".join(
            f"{r['system']} on {r['gpu']} with {r['ranks']} ranks at {format_size(int(r['nbytes']))}"
            for r in rows(outcome.left_out)
        )
        lines += ["", f"Not predicted, since the system's own rule goes to NCCL there: {named}."]
    return lines


def history(known: Sequence[Mapping[str, Any]]) -> list[str]:
    """All attempts, as a table."""
    table = [["attempt", "date", "what was changed, and why", "median error", "tau", "signs right", "verdict"]]
    table += [
        [str(a["attempt"]), a["date"], a["changed"], f"{a['median_error']:.1%}", f"{a['kendall_tau']:.3f}",
         f"{a['signs_right']:.1%}", "passed" if a["passed"] else "NOT PASSED"]
        for a in known
    ]  # fmt: skip
    return aligned(table)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = Parser(prog="python -m experiments.validate", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    p.add_argument("--intervals", action="store_true", help="also 95 %% intervals of the calibrated prices (bootstrap)")
    p.add_argument(
        "--record", metavar="WORDS", help="append the verdict as a further attempt: what was changed, and why"
    )
    p.add_argument("--date", metavar="DAY", help="of the attempt (today, UTC)")
    p.add_argument(
        "--docs", type=Path, metavar="DIR", help="put tables into DIR/validation.md and figures into DIR/figures"
    )
    args = p.parse_args(argv)
    if args.record is not None and not args.record.strip():
        raise ArgumentError("--record needs words: what was changed since the attempt before, and why")
    if args.docs is not None:
        block_of(args.docs / "validation.md", "verdict")
        folder(args.docs / "figures", "--docs")
    prices = Instructions.load()
    outcome = run(prices)
    spans = bootstrap_intervals(outcome, prices) if args.intervals or args.docs else None
    text = report(outcome, spans)
    print(text)
    if args.record is not None:
        number = record(outcome, args.record.strip(), args.date or _today())
        print(f"\nRecorded as attempt {number}.")
    last = judged(outcome)
    if last is None:
        print("\nThis model is not the one that the last recorded attempt judged: --record it.")
    else:
        print(f"\nThis is attempt {last['attempt']}, recorded {last['date']}.")
    print(f"{outcome.verdict.sentence[0].upper()}{outcome.verdict.sentence[1:]}.")
    if args.docs is not None:
        _into(args.docs, outcome, text)
    return 0 if outcome.verdict.passed else 1


def _today() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).date().isoformat()


def _into(docs: Path, outcome: Outcome, text: str) -> None:
    from experiments.plots import png
    from experiments.validation_plots import over_published

    known = attempts()
    heading = f"Attempt {known[-1]['attempt']} in full" if judged(outcome) else "The model as it is, not recorded"
    replace_block(
        docs / "validation.md", "verdict", "\n".join([*history(known), "", f"### {heading}", "", text])
    )  # fmt: skip
    records.write_whole(docs / "figures" / "validation.png", png(over_published(outcome)))


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
