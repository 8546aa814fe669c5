"""Tables for the terminal, in the shape that users of nccl-tests know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

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
