"""A slim copy of a run, small enough to be committed: ``python -m experiments.export RUN DEST``.

Cases, statistics and provenance are kept whole; of the samples as many calls of each case as there is room for, evenly.
`experiments.load` reads it like any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fcomm import bootstrap, records
from fcomm.cli import Parser
from fcomm.sizes import format_size, parse_size
from fcomm.source import LAUNCHES

DEFAULT_LIMIT = "1500K"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = Parser(prog="python -m experiments.export", description=(__doc__ or "").split(":")[0], allow_abbrev=False)
    p.add_argument("run", type=Path, metavar="RUN", help="folder of a complete run")
    p.add_argument("destination", type=Path, metavar="DEST", help="new folder")
    p.add_argument("--limit", default=DEFAULT_LIMIT, metavar="SIZE", help=f"bytes at most ({DEFAULT_LIMIT})")
    p.add_argument("--launch", choices=LAUNCHES, help="keep the cases with this dependent launch only")
    args = p.parse_args(argv)
    calls = records.export(args.run, args.destination, parse_size(args.limit), args.launch)
    run = records.load(args.destination)
    kept = "all calls" if calls is None else f"{calls} calls of each case, and the statistics of all"
    size = sum(f.stat().st_size for f in args.destination.rglob("*") if f.is_file())
    shown = format_size(round(size / 1024) * 1024)
    print(f"{args.destination}/ has {len(run.cases)} cases with {kept}: {shown}")
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
