"""What a campaign on GPUs with links of their own is held to, and what became of it.

The thresholds are data, here and nowhere else; values and intervals are those of `experiments.latency`. A run whose ranks share
a GPU has no link in its times, and an emulation has no GPU: they meet and miss nothing, whatever they measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from experiments import frames
from experiments.decode import report
from experiments.latency import Goal, Outcome, against, floors, missing, never_slower, outcome
from experiments.published import MULTICAST_FROM
from experiments.tables import rows
from fcomm import measure
from fcomm.errors import FcommError
from fcomm.sizes import format_size

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.cost_model import Model
    from fcomm.records import Run

REDUCE = (
    Goal("all-reduce, 8 ranks, against the fastest of custom AR v2's three ways: median over sizes", "%", -30, -30),
    Goal("all-reduce, 8 ranks, against the fastest of custom AR v2's three ways: best size", "%", -45, -45),
)
GATHER = (
    Goal("all-gather, against the faster of barrier and sentinel: median over sizes", "%", -25, -25),
    Goal("all-gather, against the faster of barrier and sentinel: best size", "%", -60, -60),
)
GATHER_NCCL = Goal("all-gather, against NCCL: median over sizes", "%", -25, -25)
SMALL = Goal("all-reduce up to 16 KiB, multiple of the floor: worst", "x", 1.25, 1.25)
TOKEN = Goal("time per output token: what its cut lacks of share x cut of all-reduce, worst step", "%", 10, 0)
REGRET = Goal("selector's regret at sizes left out of the fit: median", "%", 1, 1)
REBUILT = Goal("custom AR v2 as rebuilt, off its published curve: worst size", "%", 10, 10)

GPUS = ("GB300", "GB200", "B300", "B200", "H200", "H100")
"""Whose curves are published: `..._sxm` are boards with an NVLink switch, superchips have no suffix."""


def published_name(device: str) -> str | None:
    """The name that published latencies have for a device such as ``NVIDIA H200``; None where there are none."""
    words = device.upper().split()
    found = next((gpu for gpu in GPUS if gpu in words), None)
    if found is None or {"NVL", "PCIE"} & set(words):
        return None
    return found.lower() if found.startswith("G") else f"{found.lower()}_sxm"


def targets(runs: Sequence[Run], steps: Sequence[Run], model: Model | None) -> pd.DataFrame:
    """One row for each goal and place, as `experiments.latency.targets` has them.

    runs : sweeps of one machine; each goal is read from the first that has what it needs. steps : runs of experiments.decode.
    model : fitted to the runs, with its quality.
    """
    import pandas as pd

    usable = [run for run in runs if len(run.latency) and not run.cases["time_sliced"].any()]
    found = [
        *_compared(usable, REDUCE, frames.V2_FASTEST, "all_reduce", 8),
        *_compared(usable, GATHER, frames.BASELINES, "all_gather", None),
        missing(GATHER_NCCL, "the sweep measures NCCL's all-reduce alone", "all ranks"),
        *floors(usable, SMALL),
        *_token(usable, steps),
        *never_slower(usable),
        _regret(model),
        _rebuilt(usable),
    ]
    why = _no_link([*usable, *steps])
    return pd.DataFrame([asdict(o if why is None else _voided(o, why)) for o in found])


def _no_link(runs: Sequence[Run]) -> str | None:
    if any(frames.emulated(run) for run in runs):
        return "an emulation"
    return "ranks share a GPU" if any(frames.shared(run) for run in runs) else None


def _voided(o: Outcome, why: str) -> Outcome:
    """What a run without links says of a goal: its value may be read, and is no verdict."""
    if math.isnan(o.value):
        return o
    unit = "x" if o.unit == "x" else f" {o.unit}"
    there = f"{why}, where it is {o.value:{'+' if o.unit == '%' else ''}.2f}{unit}; {o.says}"
    return replace(o, value=math.nan, low=math.nan, high=math.nan, verdict="not measured", says=there)


def _compared(
    runs: Sequence[Run], goals: Sequence[Goal], side: frames.Side, collective: str, ranks: int | None
) -> Iterator[Outcome]:
    if not runs:
        yield from (missing(goal, "there are no times") for goal in goals)
        return
    yield from against(runs, goals, side, collective, ranks)


# ---- end to end ------------------------------------------------------------------------------------------------------


def _token(runs: Sequence[Run], steps: Sequence[Run]) -> Iterator[Outcome]:
    """A step can gain all-reduce's share of it times the cut of all-reduce, which the sweep took by itself at that size."""
    if not steps:
        yield missing(TOKEN, "there are no times of decode steps")
        return
    why = "no sweep has all-reduce of a step's size in graphs, with custom AR v2 beside it"
    lacks: list[tuple[float, str]] = []
    for run in steps:
        try:
            found = report.frame(run)
        except FcommError as error:
            why = str(error)
            continue
        cuts = _cuts(runs)
        for row in rows(found[found["protocol"] == report.AUTO]):
            cut = cuts.get((row["ranks"], row["nbytes"], row["dependent_launch"]))
            if cut is not None:
                lacks += _lack(found, row, cut)
                why = "all-reduce is not faster by itself at any step's size"
    if not lacks:
        yield missing(TOKEN, why)
        return
    value, where = max(lacks)
    yield outcome(TOKEN, where, value, math.nan, math.nan, f"{len(lacks)} steps")


def _cuts(runs: Sequence[Run]) -> dict[tuple[int, int, str], float]:
    """By how much of its time all-reduce is shorter than the fastest of custom AR v2's ways: by ranks, bytes, launch feature."""
    for run in runs:
        try:
            kind = frames.first_kind(run, "all_reduce", measure.GRAPH)
        except FcommError:
            continue
        dtype = str(kind["dtype"].iloc[0])
        every = frames.ratios(run, frames.OURS, frames.V2_FASTEST, "all_reduce", mode=measure.GRAPH, dtype=dtype)
        if len(every):
            return {(r["ranks"], r["nbytes"], r["launch"]): 1 - r["ratio"] for r in rows(every)}
    return {}


def _lack(found: pd.DataFrame, row: Mapping[str, Any], cut: float) -> list[tuple[float, str]]:
    same = found[
        (found["model"] == row["model"]) & (found["batch"] == row["batch"]) & (found["latency_us"] == row["v2_us"])
    ]
    could = cut * float(same["comm_share"].iloc[0]) if len(same) else math.nan
    if not could > 0:
        return []
    gained = -row["change_percent"] / 100
    return [(100 * (1 - gained / could), f"{row['model']}, batch {row['batch']}, {row['dependent_launch']}")]


# ---- selection, and the rebuilt baseline -----------------------------------------------------------------------------


def _regret(model: Model | None) -> Outcome:
    quality: Mapping[str, Any] = {} if model is None else model.report.get("quality", {})
    regret = quality.get("regret, sizes left out")
    if regret is None:
        return missing(REGRET, "no model was fitted" if model is None else "the fit did not judge its choices")
    value = 100 * float(regret["median"])
    return outcome(REGRET, "all ranks", value, math.nan, math.nan, f"{regret['count']} choices")


def _rebuilt(runs: Sequence[Run]) -> Outcome:
    """Late, as its authors launch it; without the sizes at which theirs would use multicast, which is not used here."""
    why = "no run has custom AR v2 in graphs, with dependent launch late"
    for run in runs:
        devices = run.provenance.get("devices") or [{}]
        device = str(devices[0].get("device", ""))
        try:
            frame = frames.measured(run, "all_reduce", "late", measure.GRAPH)
        except FcommError as error:
            why = str(error)
            continue
        mine = frames.V2_AS_SET.of(frame[frame["dtype"].isin(["bfloat16", "float16"])])
        if mine.empty:
            continue
        name = published_name(device)
        if name is None:
            why = f"nothing is published of {device}"
            continue
        curve = frames.published(name)
        curve = curve[
            (curve["collective"] == "all_reduce") & (curve["system"] == "sglang") & (curve["version"] >= "0.5.14")
        ]
        theirs = {(r["ranks"], r["bytes"]): r["latency_us"] for r in rows(curve)}
        hopper = name.startswith("h")
        off: list[tuple[float, float, float, str]] = []
        for row in rows(mine):
            us = theirs.get((row["ranks"], row["nbytes"]))
            if us is None or (hopper and row["nbytes"] >= MULTICAST_FROM.get(row["ranks"], math.inf)):
                continue
            value, low, high = (100 * (row[c] / us - 1) for c in ("latency_us", "low_us", "high_us"))
            where = f"{format_size(int(row['nbytes']))} among {row['ranks']}: {value:+.1f} %"
            nearest = 0.0 if low < 0 < high else min(abs(low), abs(high))
            off.append((abs(value), nearest, max(abs(low), abs(high)), where))
        if off:
            value, low, high, where = max(off)
            return outcome(REBUILT, "late", value, low, high, f"{where}; {len(off)} points")
        why = f"no size and number of ranks of the run is published of {name}"
    return missing(REBUILT, why)
