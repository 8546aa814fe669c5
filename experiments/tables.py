"""Tables for the terminal, in the shape that users of nccl-tests know, and the spelling of sizes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fcomm.errors import ArgumentError

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(?:I?B)?|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `4096`, `4K`, `4KiB`, `1M`; units are binary. `ArgumentError` for anything else, and for 0."""
    found = _SIZE.fullmatch(text.strip())
    nbytes = int(found[1]) << _UNITS[(found[2] or "").upper()] if found else 0
    if nbytes <= 0:
        raise ArgumentError(f"{text.strip()!r} is not a size: use a positive number of bytes such as 4096, 4K or 1M")
    return nbytes


def size_label(nbytes: int) -> str:
    """The shortest exact spelling: `512 B`, `4 KiB`, `1 MiB`."""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


_HEADER = (
    "#  ranks         size        count        type  protocol              mode         time     algbw     busbw    wrong\n"
    "#                 (B)   (elements)                                                 (us)    (GB/s)    (GB/s)         "
)


def nccl_table(run: Run) -> str:
    """One line for each case: ranks, size, count, type, protocol, mode, time, algbw, busbw, wrong."""
    lines = [_HEADER]
    measured = {row["case"]: row for row in rows(run.latency)}
    ordered = run.cases.sort_values(["mode", "dtype", "ranks", "nbytes", "case"], kind="stable")
    for case in rows(ordered):
        head = "{ranks:8d} {nbytes:12d} {count:12d} {dtype:>11s}  {protocol:<20s}  {mode:<9s}".format_map(case)
        if case["case"] in measured:
            tail = " {latency_us:9.1f} {algbw_gbps:9.4f} {busbw_gbps:9.4f} {wrong:8d}".format_map(
                measured[case["case"]]
            )
        else:
            wrong = case["wrong"] if case["checked_calls"] else "-"
            tail = f" {'-':>9s} {'-':>9s} {'-':>9s} {wrong!s:>8s}  {case['reason']}"
        lines.append(head + tail)
    return "\n".join(lines)


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame, one mapping each."""
    return [dict(zip(frame.columns, row, strict=True)) for row in frame.itertuples(index=False)]


def latency_csv(latency: pd.DataFrame) -> bytes:
    """The summary for readers without this package."""
    return latency.to_csv(index=False, float_format="%.6g").encode()
