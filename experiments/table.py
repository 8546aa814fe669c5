"""The best of each family, by size and rank count: ``python -m experiments.table RUN``; ``--encodings`` compares ours.

Prints Markdown and writes it, with the same as CSV, into the run's folder or ``--out``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.request import COLLECTIVES
from experiments.tables import best_table, cells, encodings_table, latency_csv, select
from fcomm import bootstrap, records
from fcomm.cli import Parser, folder
from fcomm.dtypes import reducible
from fcomm.errors import ArgumentError
from fcomm.source import LAUNCHES


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = Parser(prog="python -m experiments.table", description=(__doc__ or "").split(":")[0], allow_abbrev=False)
    p.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    p.add_argument(
        "--family", choices=("best", "all"), default="best", help="best of each family, or every protocol (best)"
    )
    p.add_argument("--encodings", action="store_true", help="each encoding of our algorithms, and where each is best")
    p.add_argument("--collective", choices=COLLECTIVES, default="all_reduce", help="(all_reduce)")
    p.add_argument("--launch", choices=LAUNCHES, help="launch feature (each that the run has)")
    p.add_argument("--mode", metavar="NAME", help="kind of latency (the run's first)")
    p.add_argument("--dtype", metavar="NAME", help="element type (the run's first)")
    p.add_argument(
        "--l2-gbps",
        type=float,
        metavar="RATE",
        help="rate of the L2 in GB/s, where ranks share a GPU (as the run measured it)",
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="folder for the tables (the run's)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    if args.l2_gbps is not None and not args.l2_gbps > 0:
        raise ArgumentError(f"--l2-gbps {args.l2_gbps:g} is not positive")
    run = records.load(args.run)
    out = folder(args.out or args.run, "--out")
    latency = run.for_figures()
    of_it = latency[latency["collective"] == args.collective]
    there = [name for name in LAUNCHES if (of_it["dependent_launch"] == name).any()]
    dtype = None if args.dtype is None else reducible(args.dtype).name
    what = "encodings" if args.encodings else "table" if args.family == "best" else "table-all"
    by = "family" if args.family == "best" and not args.encodings else "protocol"
    for launch in there if args.launch is None and there else [args.launch or "none"]:
        frame = select(run, args.collective, launch, args.mode, dtype)
        best = partial(best_table, by=by)
        text = (encodings_table if args.encodings else best)(run, frame, l2_gbps=args.l2_gbps)
        kind = f"{args.collective}, {frame['dtype'].iloc[0]}, {frame['mode'].iloc[0]}, dependent launch {launch}"
        content = f"## {kind}\n\n{text}\n"
        print(content)
        name = f"{what}-{args.collective}-{frame['dtype'].iloc[0]}-{frame['mode'].iloc[0]}-{launch}"
        for suffix, data in ((".md", content.encode()), (".csv", latency_csv(cells(frame, by, args.l2_gbps)))):
            records.write_whole(out / f"{name}{suffix}", data)
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
