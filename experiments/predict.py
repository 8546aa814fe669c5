"""Predictions for GPUs with links of their own: ``python -m experiments.predict --gpu b300 --gpus 8``.

Prints the paper's claims as predictions, and writes them with the curves of all protocols into a folder; everything in it is
labelled as predicted. It answers only if the gate of ``python -m experiments.validate`` is passed, by the very model that would
predict; otherwise it says in one sentence by how much the gate was missed, writes nothing, and ends with exit code 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import frames, gate, validate
from experiments.claims import PAPER, PAPER_MACHINE
from experiments.link_model import GPUS, Counts, Instructions, Link, count, gpu_share
from experiments.request import parse_sizes
from experiments.systems import BASELINES
from experiments.tables import aligned, encoding_label, family, latency_csv, rows
from fcomm import bootstrap, records
from fcomm.cli import Parser, folder
from fcomm.cost_model import pieces
from fcomm.errors import ArgumentError, ModelError, RecordError
from fcomm.protocols import CELL_BYTES, Protocol, protocols
from fcomm.sizes import format_size
from fcomm.source import LAUNCHES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SIZES = "1K..1M"
"""Within which the gate was looked at."""
MAX_BYTES = 1 << 20
"""Of the communicator: what is longer than a protocol's slots is sent in pieces."""
PREDICTED = "PREDICTED, not measured"

MAY_BE_SAID = (
    "what may be said without it: counts, which hold on any machine (python -m experiments.counted), and what was measured where the "
    "ranks share one GPU (docs/performance.md)"
)


def require() -> tuple[validate.Outcome, dict[str, Any]]:
    """The gate's outcome and its recorded attempt, if it is passed; otherwise `ModelError`, with the numbers."""
    outcome = validate.run()
    attempt = validate.judged(outcome)
    if attempt is None:
        raise ModelError(
            "no predictions: this model is not the one that the last recorded attempt at the gate judged (python -m "
            f"experiments.validate --record); {MAY_BE_SAID}"
        )
    if not outcome.verdict.passed:
        raise ModelError(
            f"no predictions: {outcome.verdict.sentence} (attempt {attempt['attempt']}, docs/validation.md); {MAY_BE_SAID}"
        )
    return outcome, attempt


def count_call(
    protocol: Protocol, nbytes: int, world_size: int, gpu: str, launch: str, prices: Instructions
) -> list[Counts]:
    """One call of a protocol, counted: a `Counts` for each launch that the message takes."""
    share = gpu_share(gpu)
    form = protocol.at(nbytes, world_size, share)
    how = BASELINES.get(form.name)
    return [
        count(
            form, size, world_size, share, (launch,), prices, hops=how.hops if how else None, reads=how.reads if how else ()
        )
        for size, times in pieces(form, nbytes, world_size, MAX_BYTES)
        for _ in range(times)
    ]  # fmt: skip


def predictions(
    gpu: str, link: Link, prices: Instructions, ranks: Sequence[int], sizes: Sequence[int], launch: str = "late"
) -> pd.DataFrame:
    """One row for each protocol, rank count and size that there are prices for: what it is, `latency_us` and its terms.

    Column `status` says in every row that it is a prediction. A protocol without prices, such as a pair of encodings that was not
    measured, has no rows.
    """
    import pandas as pd

    found = []
    for p in protocols().values():
        for n in ranks:
            for nbytes in sizes:
                if p.at(nbytes, n, gpu_share(gpu)).name not in prices.own or p.refusal(None, n, p.needs, nbytes):
                    continue
                calls = [c.terms(link) for c in count_call(p, nbytes, n, gpu, launch, prices)]
                terms = {f"{name}_us": sum(c[name] for c in calls) for name in calls[0]}
                found.append(
                    {
                        "status": PREDICTED, "gpu": gpu, "ranks": n, "collective": p.collective, "protocol": p.name,
                        "family": family(p.name), "algorithm": p.algorithm.name, "encoding": encoding_label(p.name),
                        "baseline": p.baseline, "dependent_launch": launch, "nbytes": nbytes, "shape": "",
                        "latency_us": sum(terms.values()), **terms,
                    }
                )  # fmt: skip
    return pd.DataFrame(found)


def claims(frame: pd.DataFrame) -> pd.DataFrame:
    """The paper's claims as predictions: a row for each collective and rank count, changes in per cent (negative: ours is faster).

    Both sides are the fastest of their protocols at each size, with the same launch feature.
    """
    import pandas as pd

    found = []
    for paper in PAPER:
        of_it = frame[frame["collective"] == paper.collective]
        # Of custom AR v2's three ways one is a search for its launch shape, which a prediction knows nothing of.
        theirs = frames.V2_BEST_FORM if paper.collective == "all_reduce" else frames.HEADLINE[paper.collective]
        for (n,), of_n in frames.grouped(of_it, ["ranks"]):
            best = [
                side.of(of_n).groupby("nbytes")["latency_us"].min() for side in (frames.OURS, theirs)
            ]  # fmt: skip
            change = (best[0] / best[1] - 1).dropna() * 100
            if change.empty:
                continue
            found.append(
                {
                    "status": PREDICTED, "collective": paper.collective, "against": theirs.name, "ranks": n,
                    "paper_median_percent": paper.median_percent, "median_percent": float(change.median()),
                    "paper_best_percent": paper.best_percent, "best_percent": float(change.min()),
                    "best_nbytes": int(change.index[int(change.argmin())]), "sizes": len(change), "faster": int((change < 0).sum()),
                }
            )  # fmt: skip
    return pd.DataFrame(found)


def markdown(found: pd.DataFrame, gpu: str, outcome: validate.Outcome, attempt: dict[str, Any]) -> str:
    """The claims as predictions, with what has to be known beside them."""
    table = [
        [
            "collective",
            "against",
            "ranks",
            "paper: median",
            "PREDICTED: median",
            "paper: best",
            "PREDICTED: best",
            "faster",
        ]
    ]
    table += [
        [
            r["collective"].replace("_", "-"), r["against"], f"{r['ranks']}", f"{r['paper_median_percent']:+.1f} %",
            f"{r['median_percent']:+.1f} %", f"{r['paper_best_percent']:+.1f} %",
            f"{r['best_percent']:+.1f} % at {format_size(int(r['best_nbytes']))}", f"{r['faster']} of {r['sizes']} sizes",
        ]
        for r in rows(found)
    ]  # fmt: skip
    return "\n".join([f"### {PREDICTED}: {gpu}", "", *aligned(table), "", *_notes(gpu, outcome, attempt)])


def _notes(gpu: str, outcome: validate.Outcome, attempt: dict[str, Any]) -> list[str]:
    f = outcome.held_out
    e = gate.errors(f[f["gpu"] == f"{gpu}_sxm"])
    v = outcome.verdict
    number = attempt["attempt"]
    unseen = (
        "" if number == 1 else f", which was attempt {number}: the cells that it is judged on had been seen by then"
    )
    return [
        f"- {PREDICTED} on this machine or any other. The paper's figures were taken on {PAPER_MACHINE}.",
        (
            f"- The model was validated on published latencies of other systems{unseen}: {v.sentence}. On this GPU the error was "
            f"{np.median(e):.1%} (median) and {np.quantile(e, 0.9):.1%} (90th percentile). Of our protocols nothing was validated."
        ),
        (
            "- Instruction prices were measured where ranks share one H200; a launch, a hop and the link's rate were calibrated on "
            "published latencies with 2 ranks."
        ),
    ]  # fmt: skip


def curves(frame: pd.DataFrame, gpu: str) -> Figure:
    """Predicted latency over size: a row for each collective, a column for each rank count, a line for each protocol."""
    from experiments.plots import _dress, _size_ticks, picture, style

    collectives, counts = list(dict.fromkeys(frame["collective"])), sorted(int(n) for n in frame["ranks"].unique())
    figure = picture()(figsize=(4.2 * len(counts) + 2.6, 3.4 * len(collectives) + 1.0), dpi=150, layout="constrained")
    axes = figure.subplots(len(collectives), len(counts), sharex=True, sharey="row", squeeze=False)
    for i, collective in enumerate(collectives):
        for j, n in enumerate(counts):
            axis = axes[i, j]
            of_it = frame[(frame["collective"] == collective) & (frame["ranks"] == n)]
            for (name,), line in frames.grouped(of_it, ["protocol"], sort=False):
                axis.plot(line["nbytes"], line["latency_us"], label=name, linewidth=1.0, markersize=3.5, linestyle="--",
                          **style(name))  # fmt: skip
            _dress(axis)
            axis.set_title(f"{collective.replace('_', '-')}, {n} ranks: PREDICTED", fontsize=9)
            if j == len(counts) - 1:
                axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
        axes[i, 0].set_ylabel("PREDICTED latency (µs)")
    _size_ticks(axes.flat[0], sorted(int(b) for b in frame["nbytes"].unique()))
    figure.suptitle(f"{PREDICTED}: {gpu}, a GPU for each rank (dashed lines are predictions)", fontsize=11)
    return figure


def section() -> list[str]:
    """For the claims table: the predictions for the paper's machine, B300 with 8 ranks, if the gate is passed; else nothing."""
    try:
        known = validate.attempts()
        if not known or not known[-1]["passed"]:
            return []
        outcome, attempt = require()
    except (ModelError, RecordError):
        return []
    prices = Instructions.load()
    frame = predictions("b300", outcome.links["b300_sxm"], prices, (8,), parse_sizes(SIZES))
    return [markdown(claims(frame), "b300", outcome, attempt), ""]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from experiments import plots

    p = Parser(prog="python -m experiments.predict", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    p.add_argument("--gpu", required=True, metavar="NAME", help=f"kind of GPU: {', '.join(GPUS)}")
    p.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of the server, one for each rank: 2 to 8")
    p.add_argument(
        "--sizes", default=SIZES, metavar="LIST", help=f"bytes of a message ({SIZES}, within which it is validated)"
    )
    p.add_argument("--launch", choices=LAUNCHES, default="late", help="dependent launch, on both sides (late)")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder to make (predicted-NAME-N)")
    args = p.parse_args(argv)
    if args.gpu not in GPUS:
        raise ArgumentError(f"--gpu {args.gpu}: no such GPU is described; there are {', '.join(GPUS)}")
    if not 2 <= args.gpus <= 8:
        raise ArgumentError(f"--gpus {args.gpus}: predictions are for 2 to 8 GPUs, a rank on each")
    sizes = parse_sizes(args.sizes)
    which = gate.protocol()
    if min(sizes) < which.least_bytes or max(sizes) > which.most_bytes:
        low, high = format_size(which.least_bytes), format_size(which.most_bytes)
        raise ArgumentError(
            f"--sizes {args.sizes}: the model is validated from {low} to {high}, and predicts nothing beyond"
        )
    if any(size % CELL_BYTES for size in sizes):
        raise ArgumentError(f"--sizes {args.sizes}: baselines take multiples of {CELL_BYTES} bytes")
    outcome, attempt = require()
    out = folder(args.out or Path(f"predicted-{args.gpu}-{args.gpus}"), "--out")
    ranks = sorted({n for n in (2, 4, args.gpus) if n <= args.gpus})
    frame = predictions(args.gpu, outcome.links[f"{args.gpu}_sxm"], Instructions.load(), ranks, sizes, args.launch)
    found = claims(frame)
    text = markdown(found, args.gpu, outcome, attempt)
    print(text)
    records.write_whole(out / "predicted-latency.csv", latency_csv(frame))
    records.write_whole(out / "predicted-claims.csv", latency_csv(found))
    records.write_whole(out / "predicted-claims.md", f"{text}\n".encode())
    records.write_whole(out / "predicted-latency.png", plots.png(curves(frame, args.gpu)))
    print(f"\n{PREDICTED}: curves of {frame['protocol'].nunique()} protocols and the claims are in {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
