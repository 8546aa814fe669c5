"""Tables of a run: one line a case as users of nccl-tests know it, and the best of each family beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fcomm import measure
from fcomm.errors import ArgumentError
from fcomm.measure import FLOOR, SKEW, STAGING, mode_label
from fcomm.protocols import protocols
from fcomm.sizes import format_size
from fcomm.variants import ABLATIONS, SHIPPED, variant

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

L2_SHARE = 0.15
"""Of a latency: where all ranks' bytes take longer than this to pass the L2, the figure is about the L2."""


def _header(mode_width: int) -> str:
    head = (
        f"#  ranks         size        count        type  protocol                    {'mode':<{mode_width}s}  launch  input        "
        "shape       time     algbw     busbw    wrong   x floor"
    )
    units = f"#                 (B)   (elements){'':{head.index('time') - 34}s}(us)    (GB/s)    (GB/s)"
    return f"{head}\n{units:<{len(head)}s}"


def nccl_table(run: Run) -> str:
    """One line for each case: ranks, size, count, type, protocol, mode, launch, input, shape, time, bandwidths, wrong, floor.

    A variant stands behind its protocol's name; what was not checked has N/A for its wrong elements.
    shape : blocks x threads that were launched; with a star where they are not the default ones.
    """
    measured = {row["case"]: row for row in rows(run.latency)}
    ordered = run.cases[run.cases["protocol"] != FLOOR]
    ordered = ordered.sort_values(["collective", "mode", "dtype", "ranks", "nbytes", "delay_us", "case"], kind="stable")
    labels = [mode_label(case["mode"], case["delay_us"]) for case in rows(ordered)]
    width = max([9, *map(len, labels)])
    lines = [_header(width)]
    for case, label in zip(rows(ordered), labels, strict=True):
        if case["variant"] != SHIPPED:
            case["protocol"] += f" {case['variant']}"
        head = "{ranks:8d} {nbytes:12d} {count:12d} {dtype:>11s}  {protocol:<26s}".format_map(case)
        head += f"  {label:<{width}s}  {case['dependent_launch']:<6s}  {case['input']:<7s} {_shape(case):>10s}"
        if case["case"] in measured:
            row = measured[case["case"]]
            wrong = row["wrong"] if row["wrong"] >= 0 else "N/A"
            us = "{latency_us:9.1f}" if row["emulated"] or row["latency_us"] >= 1000 else "{latency_us:9.2f}"
            floor = "-" if math.isnan(row["floor_multiple"]) else f"{row['floor_multiple']:.2f}"
            tail = f" {us} {{algbw_gbps:9.4f}} {{busbw_gbps:9.4f}} {wrong!s:>8s} {floor:>9s}".format_map(row)
        else:
            wrong = case["wrong"] if case["checked_calls"] else "-"
            tail = f" {'-':>9s} {'-':>9s} {'-':>9s} {wrong!s:>8s} {'-':>9s}  {case['reason']}"
        lines.append(head + tail)
    return "\n".join(lines)


def _shape(case: dict[str, Any]) -> str:
    launched = f"{case['blocks']}x{case['threads']}" if case["blocks"] else "-"
    tuned = case["shape"] and case["protocol"] != FLOOR and case["variant"] == SHIPPED
    return f"{launched}*" if tuned else launched


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame, one mapping each."""
    return [dict(zip(frame.columns, row, strict=True)) for row in frame.itertuples(index=False)]


def latency_csv(latency: pd.DataFrame) -> bytes:
    """The summary for readers without this package."""
    return latency.to_csv(index=False, float_format="%.6g").encode()


# ---- the best of each family -----------------------------------------------------------------------------------------


def family(protocol: str) -> str:
    """What a protocol is one of several forms of: its algorithm, for baselines the library that it was rebuilt after."""
    p = protocols().get(protocol)
    if p is None:
        return protocol
    return protocol.split(".")[0] if p.baseline else p.algorithm.name


def families(collective: str) -> list[str]:
    """Families of a collective, ours first, in the registry's order; then other libraries."""
    of_it = [p for p in protocols().values() if p.collective == collective]
    ours = dict.fromkeys(family(p.name) for p in sorted(of_it, key=lambda p: p.baseline))
    return [*ours, *(measure.PEERS if collective == "all_reduce" else ())]


def encoding_label(protocol: str) -> str:
    """A protocol's name within its family."""
    return protocol.removeprefix(f"{family(protocol)}.")


def cells(latency: pd.DataFrame, by: str = "family", l2_gbps: float | None = None) -> pd.DataFrame:
    """The fastest case of each column of a table, for each rank count and size.

    by : "family", or "protocol" for all of them. l2_gbps : in place of what was measured. Adds to the columns of `latency`
    `column`, `fastest` (of its rank count and size) and `l2_share` (of the time, that all ranks' wire bytes take to pass the
    L2; NaN where that is not known).
    """
    frame = latency[~latency["protocol"].isin([FLOOR, "copy"])].copy()
    frame["column"] = [family(p) if by == "family" else p for p in frame["protocol"]]
    frame = frame.sort_values(["ranks", "nbytes", "latency_us"], kind="stable")
    frame = frame.drop_duplicates(["ranks", "nbytes", "column"]).reset_index(drop=True)
    best = frame.groupby(["ranks", "nbytes"])["latency_us"].transform("min")
    frame["fastest"] = frame["latency_us"] == best
    frame["l2_share"] = l2_share(frame, l2_gbps)
    return frame


def l2_share(latency: pd.DataFrame, l2_gbps: float | None = None) -> pd.Series[float]:
    """Of each latency, the share that all ranks' wire bytes take to pass the L2 of a shared GPU; NaN where not known."""
    rate = latency["l2_gbps"] if l2_gbps is None else l2_gbps
    return latency["ranks"] * latency["wire_bytes"] / (rate * 1e3) / latency["latency_us"]


def select(run: Run, collective: str, launch: str, mode: str | None = None, dtype: str | None = None) -> pd.DataFrame:
    """Rows of the run's latency of one kind; `ArgumentError` where there are none. mode, dtype : the run's first by default."""
    frame = run.for_figures()
    frame = frame[(frame["collective"] == collective) & (frame["dependent_launch"] == launch)]
    if mode != SKEW:  # a table has no column for delays
        frame = frame[frame["mode"] != SKEW]
    for column, wanted in (("mode", mode), ("dtype", dtype)):
        if len(frame):
            frame = frame[frame[column] == (frame[column].iloc[0] if wanted is None else wanted)]
    if frame.empty:
        what = " ".join(filter(None, (mode, dtype)))
        raise ArgumentError(
            f"{run.path} has no {what} times of {collective} with dependent launch {launch}".replace("  ", " ")
        )
    return frame


def _cell(row: dict[str, Any] | None, label: bool) -> str:
    if row is None:
        return ""
    us = row["latency_us"]
    text = f"{us:.2f}" if us < 100 else f"{us:.1f}"
    if row["fastest"]:
        text = f"**{text}**"
    if row["l2_share"] > L2_SHARE:
        text += " ~"
    return f"{text} {_label(row)}".rstrip() if label else text


def _label(row: dict[str, Any]) -> str:
    text = encoding_label(row["form"] if row["protocol"] == row["column"] else row["protocol"])
    text = "" if text == row["column"] else text
    notes = [note for note, holds in (("in place", row["input"] == STAGING), ("tuned", row["shape"])) if holds]
    return f"{text} ({', '.join(notes)})" if notes else text


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are also straight in a terminal."""
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in table]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def matrix(frame: pd.DataFrame, columns: Sequence[str], label: bool) -> Iterator[str]:
    """A block of lines for each rank count: sizes down, columns across, the fastest in bold."""
    for n in sorted(frame["ranks"].unique()):
        of_n = frame[frame["ranks"] == n]
        shown = [c for c in columns if (of_n["column"] == c).any()]
        sms = of_n["sms_per_rank"].iloc[0]
        share = "" if sms != sms or sms is None else f", {int(sms)} SMs each"
        yield f"{n} ranks{share} (us)"
        yield ""
        compared = {bool(b) for b in of_n["baseline"]} == {True, False}
        floors = bool(of_n["floor_us"].notna().any())
        head = ["size", *shown, *(["floor", "x floor"] if floors else []), *(["ours / baseline"] if compared else [])]
        table = [head]
        for nbytes in sorted(of_n["nbytes"].unique()):
            at = {row["column"]: row for row in rows(of_n[of_n["nbytes"] == nbytes])}
            line = [format_size(int(nbytes)), *(_cell(at.get(c), label) for c in shown)]
            best = min(at.values(), key=lambda row: row["latency_us"])
            if floors:
                known = not math.isnan(best["floor_us"])
                line += [f"{best['floor_us']:.2f}", f"{best['floor_multiple']:.2f}"] if known else ["", ""]
            if compared:
                ours, theirs = (
                    min(
                        (r["latency_us"] for r in at.values() if r["baseline"] is b or r["baseline"] == b),
                        default=math.nan,
                    )
                    for b in (False, True)
                )
                line.append("" if math.isnan(ours / theirs) else f"{ours / theirs:.3f}")
            table.append(line)
        yield from aligned(table)
        yield ""


def caption(run: Run, frame: pd.DataFrame, l2_gbps: float | None = None) -> Iterator[str]:
    """What a reader must know about the figures of a table: where and how they were taken, and what they are not."""
    if frame.empty:
        yield f"No times of two or more ranks; taken on the {run.taken_on}. Start ranks with mpirun -n N."
        return
    first = rows(frame.head(1))[0]
    yield (
        f"{first['collective'].replace('_', '-')}, {first['dtype']}, mode {first['mode']}, dependent launch "
        f"{first['dependent_launch']}: median of the slowest rank over {frame['iterations'].min()} to "
        f"{frame['iterations'].max()} iterations, {frame['launches'].max()} launch(es); taken on the {run.taken_on}."
    )
    yield "Bold: the fastest. In place: the input lies in the staging buffer already, where peers pull it from."
    if (frame["shape"] != "").any():
        yield "Tuned: a launch shape that the search found, in place of the default one (a baseline's: its authors')."
    if frame["floor_us"].notna().any():
        yield (
            "Floor: a kernel of the fastest one's grid and launch feature that copies input to output and communicates nothing; "
            "no term for a link is in it."
        )
    p = run.provenance
    if p.get("backend") == "cuda" and p.get("ranks_per_device", 1) > 1:
        rates = {int(r["ranks"]): r["l2_gbps"] for r in rows(frame) if r["l2_gbps"] == r["l2_gbps"] and r["l2_gbps"]}
        if l2_gbps is not None or rates:
            rate = (
                f"{l2_gbps:,.0f} GB/s, as given"
                if l2_gbps is not None
                else ", ".join(f"{v:,.0f} GB/s for {n} ranks" for n, v in sorted(rates.items()))
            )
            yield (
                f"~: all ranks' wire bytes take more than {L2_SHARE:.0%} of the time at the L2's copy rate ({rate}): about the L2, "
                "not about a protocol."
            )
        else:
            yield "The rate of the L2 was not measured, so no cell is marked as being about the L2."
        yield (
            "The ranks share one GPU: no link is in these figures, and neither scaling over ranks nor crossovers can be read "
            "from them."
        )


def best_table(run: Run, frame: pd.DataFrame, by: str = "family", l2_gbps: float | None = None) -> str:
    """The best of each family (or every protocol) by size, as Markdown. frame : what `select` returned."""
    found = cells(frame, by, l2_gbps)
    collective = str(frame["collective"].iloc[0])
    known = families(collective) if by == "family" else [*(p.name for p in protocols().values()), *measure.PEERS]
    lines = [*matrix(found, known, label=by == "family"), *caption(run, found, l2_gbps)]
    return "\n".join(lines)


def encodings_table(run: Run, frame: pd.DataFrame, l2_gbps: float | None = None) -> str:
    """Each encoding's time by size, an algorithm at a time, and where each one is best; as Markdown."""
    ours = frame[~frame["baseline"] & ~frame["protocol"].isin([FLOOR, "copy"])]
    if ours.empty:
        raise ArgumentError(f"{run.path} has no times of our own protocols of that kind")
    lines: list[str] = []
    for algorithm in dict.fromkeys(p.algorithm.name for p in protocols().values()):
        of_it = ours[ours["algorithm"] == algorithm]
        if of_it.empty:
            continue
        found = cells(of_it, "protocol", l2_gbps)
        found["column"] = [encoding_label(p) for p in found["protocol"]]
        names = [encoding_label(p.name) for p in protocols().values() if p.algorithm.name == algorithm]
        lines += [f"### {algorithm}", "", *matrix(found, names, label=False), *_where_best(found, names), ""]
    return "\n".join([*lines, *caption(run, cells(ours, "protocol", l2_gbps), l2_gbps)])


def _where_best(found: pd.DataFrame, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        won = found[(found["column"] == name) & found["fastest"]]
        if not (found["column"] == name).any():
            continue
        places = [
            f"n = {n}: {', '.join(format_size(int(b)) for b in sorted(of_n['nbytes']))}"
            for n, of_n in won.groupby("ranks")
        ]
        yield f"- `{name}` is best at {'; '.join(places)}" if places else f"- `{name}` is never best"


_SAME = ["collective", "mode", "dtype", "dependent_launch", "ranks", "nbytes", "protocol", "input", "blocks", "threads"]


def variant_table(run: Run) -> str:
    """Each variant's time beside that of the shipped kernel in the same grid, and what it does to bits; as Markdown."""
    shipped = {_same(row): row for row in rows(run.latency) if row["variant"] == SHIPPED}
    head = "ranks | size | type | protocol | launch | grid | variant | µs | 95 % | shipped, µs | variant / shipped"
    head += " | not the contract's bits | ranks differ | calls differ"
    lines = ["## Variants", "", f"| {head} |", "|" + "---|" * head.count("|") + "---|"]
    ordered = run.latency[run.latency["variant"].isin(ABLATIONS) & (run.latency["variant"] != SHIPPED)].sort_values(
        [*_SAME, "case"], kind="stable"
    )
    for row in rows(ordered):
        beside = shipped.get(_same(row))
        us = "-" if beside is None else f"{beside['latency_us']:.3f}"
        ratio = "-" if beside is None else f"{row['latency_us'] / beside['latency_us']:.3f}"
        parts = [
            row["ranks"], format_size(row["nbytes"]), row["dtype"], f"`{row['protocol']}`", row["dependent_launch"],
            f"{row['blocks']}x{row['threads']}", f"`{row['variant']}`", f"{row['latency_us']:.3f}",
            f"{row['low_us']:.3f} to {row['high_us']:.3f}", us, ratio, *_order_in_bits(row),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(str(part) for part in parts)} |")
    said = (
        f"{run.taken_on}. Bits are counted in one call, the most of a few: over all ranks' results; those in which the "
        "ranks do not agree; over all ranks' results, against another call on the same data. Exact variants have none of them."
    )
    return "\n".join([*lines, "", said])


def _same(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return mode_label(row["mode"], row["delay_us"]), *(row[c] for c in _SAME)


def _order_in_bits(row: dict[str, Any]) -> list[str]:
    if variant(row["variant"]).exact:
        return ["0", "0", "0"]
    results = row["ranks"] * row["count"]
    of = (("inexact", results), ("ranks_differ", row["count"]), ("calls_differ", results))
    return ["-" if math.isnan(row[name]) else f"{int(row[name])} of {total}" for name, total in of]


def summary_tables(run: Run) -> dict[str, str]:
    """What a sweep on GPUs prints at its end: the best of each family, by file name."""
    found: dict[str, str] = {}
    latency = run.for_figures()
    graph = latency[(latency["mode"] == "graph") & (latency["ranks"] > 1)]
    for collective in graph["collective"].unique():
        for launch in graph.loc[graph["collective"] == collective, "dependent_launch"].unique():
            for dtype in graph["dtype"].unique():
                frame = select(run, collective, launch, "graph", dtype)
                if (frame["protocol"] == FLOOR).all():
                    continue
                title = f"## {collective}, {dtype}, dependent launch {launch}"
                found[f"best-{collective}-{dtype}-{launch}.md"] = f"{title}\n\n{best_table(run, frame)}"
    return found
