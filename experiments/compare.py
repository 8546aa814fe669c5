"""What changed between two runs: ``python -m experiments.compare RUN_A RUN_B``.

Cases are matched by what was asked for. A case changed where the two medians' 95 % intervals do not overlap; everything
else is no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import frames
from experiments.tables import aligned, latency_csv, rows
from fcomm import bootstrap, records
from fcomm.cli import Parser, target
from fcomm.errors import ArgumentError, RecordError
from fcomm.measure import mode_label
from fcomm.sizes import format_size

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

KEYS = [
    "collective", "dtype", "mode", "dependent_launch", "delay_us", "late_rank", "ranks", "nbytes", "protocol", "input", "shape"
]  # fmt: skip
"""What makes a case of one run the same case in another."""


def compare(before: Run, after: Run) -> pd.DataFrame:
    """One row for each case that both runs have, floors included.

    Columns: `KEYS`, `before_us`, `after_us`, `change_percent` (negative: faster after), `verdict` (faster, slower, same, or
    unknown where a run has too few calls for an interval). `RecordError` for time-sliced runs, for mixed launches, and for an
    emulation beside a GPU.
    """
    import numpy as np

    if frames.emulated(before) != frames.emulated(after):
        raise RecordError(f"{before.path} and {after.path} cannot be compared: one of them is an emulation on CPUs")
    frames.one_machine([before])
    frames.one_machine([after])
    kept = [*KEYS, "latency_us", "low_us", "high_us"]
    both = before.for_figures()[kept].merge(after.for_figures()[kept], on=KEYS, suffixes=("_before", "_after"))
    found = both[KEYS].copy()
    found["before_us"], found["after_us"] = both["latency_us_before"], both["latency_us_after"]
    found["change_percent"] = 100 * (both["latency_us_after"] / both["latency_us_before"] - 1)
    unknown = both[["low_us_before", "high_us_before", "low_us_after", "high_us_after"]].isna().any(axis=1)
    faster = both["high_us_after"] < both["low_us_before"]
    slower = both["low_us_after"] > both["high_us_before"]
    found["verdict"] = np.select([unknown, faster, slower], ["unknown", "faster", "slower"], "same")
    return found.sort_values(KEYS, kind="stable").reset_index(drop=True)


def markdown(found: pd.DataFrame, before: Run, after: Run, most: int) -> str:
    """Counts for each protocol, then the largest changes. most : rows of the second table."""
    lines = [*_differences(before, after), ""]
    if found.empty:
        return "\n".join([*lines, "The runs have no case in common."])
    table = [["protocol", "collective", "cases", "faster", "slower", "same", "unknown", "median change"]]
    for (collective, protocol), of_it in frames.grouped(found, ["collective", "protocol"], sort=False):
        counts = of_it["verdict"].value_counts()
        table.append(
            [
                f"`{protocol}`", collective, str(len(of_it)),
                *(str(int(counts.get(v, 0))) for v in ("faster", "slower", "same", "unknown")),
                f"{of_it['change_percent'].median():+.1f} %",
            ]
        )  # fmt: skip
    counts = found["verdict"].value_counts()
    lines += [*aligned(table), ""]
    lines.append(
        f"{len(found)} cases in both: {counts.get('faster', 0)} faster, {counts.get('slower', 0)} slower, "
        f"{counts.get('same', 0)} with overlapping intervals (no change), {counts.get('unknown', 0)} with too few calls."
    )
    changed = found[found["verdict"].isin(["faster", "slower"])]
    changed = changed.reindex(changed["change_percent"].abs().sort_values(ascending=False, kind="stable").index).head(
        most
    )
    if len(changed):
        table = [["case", "ranks", "size", "mode, launch", "before (us)", "after (us)", "change"]]
        table += [_row(row) for row in rows(changed)]
        lines += ["", f"The largest changes ({len(changed)}):", "", *aligned(table)]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> list[str]:
    extra = ", ".join(filter(None, (row["shape"], "in place" if row["input"] == "staging" else "")))
    return [
        f"`{row['protocol']}`{f' ({extra})' if extra else ''}", str(row["ranks"]), format_size(int(row["nbytes"])),
        f"{row['dtype']}, {mode_label(row['mode'], row['delay_us'])}, {row['dependent_launch']}", f"{row['before_us']:.3f}", f"{row['after_us']:.3f}",
        f"{row['change_percent']:+.1f} %",
    ]  # fmt: skip


def _differences(before: Run, after: Run) -> list[str]:
    """What else differs between the runs: machine, kernels, and cases that only one of them has."""
    said = [f"before: {before.path}: {before.taken_on}", f"after:  {after.path}: {after.taken_on}"]
    places = [frames.place(r.provenance) for r in (before, after)]
    if places[0] != places[1]:
        said.append(f"note: not the same machine ({places[0]}; {places[1]}): a change may be the machine's")
    if min(r.latency["launches"].max() for r in (before, after)) < 2:
        said.append(
            "note: one launch only: the intervals are over calls, and what differs between launches is not in them"
        )
    if before.provenance.get("source_hash") == after.provenance.get("source_hash"):
        said.append("the kernels are the same: what differs is the machine's state, the harness, or chance")
    said += [
        f"note: {run.path} was interrupted: {sum(run.owed.values()):,} timed calls are missing"
        for run in (before, after)
        if not run.complete
    ]
    keys = [set(r.latency[KEYS].itertuples(index=False, name=None)) for r in (before, after)]
    for run, only in ((before, keys[0] - keys[1]), (after, keys[1] - keys[0])):
        if only:
            said.append(f"only in {run.path}: {len(only)} cases")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = Parser(prog="python -m experiments.compare", description=(__doc__ or "").split(":")[0], allow_abbrev=False)
    p.add_argument("before", type=Path, metavar="RUN_A", help="folder of a run")
    p.add_argument("after", type=Path, metavar="RUN_B", help="folder of another one")
    p.add_argument("--most", type=int, default=20, metavar="INT", help="changes to list, the largest first (20)")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write all cases there")
    args = p.parse_args(argv)
    if args.most < 0:
        raise ArgumentError(f"--most {args.most} is negative")
    if args.before.resolve() == args.after.resolve():
        raise ArgumentError(f"{args.before} is named twice: name another run to compare it with")
    if args.csv is not None:
        target(args.csv, "--csv")
    before, after = records.load(args.before), records.load(args.after)
    found = compare(before, after)
    if args.csv is not None:
        records.write_whole(args.csv, latency_csv(found))
    print(markdown(found, before, after, args.most))
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
