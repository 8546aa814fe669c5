"""Tidy frames of a run: what was measured, who was fastest, and by how much, with intervals; what may not be counted.

>>> run = experiments.load("results/...")
>>> frames.measured(run, collective="all_reduce", launch="late")  # one row a case
>>> frames.ratios(run, frames.OURS, frames.V2_FASTEST)  # one row a size, rank count and launch feature

Every figure, claim and notebook is made from these. A ratio is always between two things of one run, at one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from experiments.tables import L2_SHARE, l2_share, rows
from fcomm import provenance
from fcomm.errors import ArgumentError, RecordError
from fcomm.measure import (
    FLOOR,
    GRAPH,
    SKEW,
    launch_draws,
    launch_interval,
    launch_medians,
    median_interval,
    slowest_rank,
    weighted_interval,
)
from fcomm.source import LAUNCHES
from fcomm.variants import LADDER, SHIPPED, WITHOUT

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

POINT = ["collective", "dtype", "mode", "ranks", "nbytes"]
"""What two things must have in common to be compared, beside the launch feature."""
NO_TIMES = "the run has no times of"
ANY = "any"
"""As a side's launch feature: the fastest of all of them."""


# ---- what was measured -----------------------------------------------------------------------------------------------


def place(facts: Mapping[str, Any]) -> str:
    """The machine of a launch in a few words. facts : its provenance."""
    devices = sorted(
        {f"{d.get('device', '?')} {str(d.get('uuid', ''))[:12]}".strip() for d in facts.get("devices") or []}
    )
    return f"{facts.get('hostname', '?')}, {facts.get('backend', '?')} backend, {', '.join(devices) or 'no device'}"


def _kind(facts: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """A machine but for the serial numbers of its GPUs."""
    devices = tuple(sorted(str(d.get("device", "?")) for d in facts.get("devices") or []))
    return str(facts.get("hostname", "?")), str(facts.get("backend", "?")), devices


def one_machine(runs: Sequence[Run]) -> None:
    """Raises `RecordError` where launches were taken on different machines: their times go in no common figure.

    Two runs may differ in ranks, kernels and which GPU of one kind it was, since a figure is drawn from one run; launches
    of one run may not.
    """
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise ArgumentError("a run is named twice")
    taken = [(run.path, facts) for run in runs for facts in run.launches]
    for (path, facts), (_, before) in zip(taken[1:], taken, strict=False):
        if _kind(before) != _kind(facts):
            raise RecordError(
                f"{path} mixes machines, and times of different machines go in no common figure: {place(before)}; {place(facts)}"
            )
    for run in runs:
        first, *others = run.launches or [{}]
        for facts in others:
            why = provenance.mismatch(first, facts)
            if why is not None:
                raise RecordError(f"{run.path} mixes launches that are not replicates, and nothing is drawn: {why}")


def measured(
    run: Run,
    collective: str | None = None,
    launch: str | None = None,
    mode: str | None = None,
    dtype: str | None = None,
    ranks: int | None = None,
) -> pd.DataFrame:
    """`run.latency` of the protocols between two ranks or more, narrowed to what is named.

    Adds `family` (our algorithm; of a baseline what it was rebuilt after), `l2_share` (of the time, that all ranks' bytes
    take to pass the L2 of a shared GPU) and `masked` (that share is so large that the time is about the L2). `RecordError`
    for time-sliced, mixed and empty runs; no rows where the run has nothing of that kind. Times of mode skew, which are about a
    delay, are there only where they are named.
    """
    one_machine([run])
    frame = run.for_figures()
    frame = frame[(frame["ranks"] > 1) & (frame["protocol"] != FLOOR)]
    if mode != SKEW:
        frame = frame[frame["mode"] != SKEW]
    named = {"collective": collective, "dependent_launch": launch, "mode": mode, "dtype": dtype, "ranks": ranks}
    for column, wanted in named.items():
        if wanted is not None:
            frame = frame[frame[column] == wanted]
    frame = frame.copy()
    frame["family"] = [
        protocol.split(".")[0] if baseline else algorithm
        for protocol, baseline, algorithm in zip(frame["protocol"], frame["baseline"], frame["algorithm"], strict=True)
    ]
    frame["l2_share"] = l2_share(frame)
    frame["masked"] = frame["l2_share"] > L2_SHARE
    return frame.reset_index(drop=True)


STAGE_KEY = ("collective", "protocol", "dtype", "mode", "dependent_launch", "ranks", "nbytes")


def stages(run: Run) -> pd.DataFrame:
    """What each stage of a call adds, one row for each case of `STAGE_KEY` and each stage, in the order of `variants.STAGES`.

    up_to_us, low_us, high_us : latency of the kernel that ends with the stage, and its 95 % interval. stage_us : what that is
    beyond the kernel before it; the last one is the shipped kernel, so these add up to its time. share : of `shipped_us`. alone_us :
    what the shipped kernel saves without this stage alone (NaN where it cannot be left out). shipped_us : the shipped kernel,
    measured once more as a candidate of its own. floor_us : a kernel of the same grid that copies its input to its output.
    Cases that lack a stage are left out; `RecordError` where none is left, and for time-sliced runs.
    """
    import pandas as pd

    run.refuse_time_sliced()
    by_case: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows(run.latency):
        by_case.setdefault(tuple(row[c] for c in STAGE_KEY), {})[row["variant"]] = row
    found = []
    for key, of_it in by_case.items():
        if not {SHIPPED, *(v.name for v in LADDER.values())} <= of_it.keys():
            continue
        shipped, before_us = of_it[SHIPPED], 0.0
        for stage, last in LADDER.items():
            row = of_it[last.name]
            without = of_it.get(WITHOUT[stage].name) if stage in WITHOUT else None
            found.append(
                {
                    **dict(zip(STAGE_KEY, key, strict=True)),
                    "blocks": row["blocks"],
                    "threads": row["threads"],
                    "stage": stage,
                    "up_to_us": row["latency_us"],
                    "low_us": row["low_us"],
                    "high_us": row["high_us"],
                    "stage_us": row["latency_us"] - before_us,
                    "share": (row["latency_us"] - before_us) / shipped["latency_us"],
                    "alone_us": math.nan if without is None else shipped["latency_us"] - without["latency_us"],
                    "shipped_us": shipped["latency_us"],
                    "floor_us": shipped["floor_us"],
                    "emulated": row["emulated"],
                }
            )
            before_us = row["latency_us"]
    if not found:
        raise RecordError(f"{run.path} has no case with all stages: it is not a breakdown, or had no time for one")
    order = ["mode", "dtype", "dependent_launch", "protocol", "ranks", "nbytes"]
    return pd.DataFrame(found).sort_values(order, kind="stable").reset_index(drop=True)


def first_kind(run: Run, collective: str, mode: str | None = None, dtype: str | None = None) -> pd.DataFrame:
    """`measured` of one mode and dtype of that collective: graph, where the run has it, else its first; its first dtype.

    `RecordError` where there is none.
    """
    frame = measured(run, collective, mode=mode, dtype=dtype)
    if frame.empty:
        raise RecordError(f"{NO_TIMES} {collective.replace('_', '-')}")
    chosen = GRAPH if (frame["mode"] == GRAPH).any() else frame["mode"].iloc[0]
    frame = frame[frame["mode"] == chosen]
    return frame[frame["dtype"] == frame["dtype"].iloc[0]]


def launch_features(frame: pd.DataFrame) -> list[str]:
    """The launch features of a frame, in their order."""
    there = set(frame["dependent_launch"])
    return [name for name in LAUNCHES if name in there] + sorted(there - set(LAUNCHES))


def grouped(
    frame: pd.DataFrame, by: Sequence[str], sort: bool = True
) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The frame's groups with their keys as tuples."""
    yield from cast(Any, frame.groupby(list(by), sort=sort))


def skewed(run: Run, collective: str = "all_reduce", launch: str | None = None) -> pd.DataFrame:
    """What calls add to a delay of one rank: `measured` of mode skew and of the first dtype, sorted by delay.

    `latency_us` is what the call adds: from the moment when the late rank comes, to the end on the slowest rank. `RecordError`
    where the run has no times of that mode.
    """
    frame = measured(run, collective, launch, SKEW)
    if frame.empty:
        raise RecordError(
            f"{NO_TIMES} {collective.replace('_', '-')} with a rank that is late: they are taken with --modes {SKEW}"
        )
    frame = frame[frame["dtype"] == frame["dtype"].iloc[0]]
    return frame.sort_values(["ranks", "nbytes", "protocol", "delay_us"], kind="stable").reset_index(drop=True)


# ---- sides of a comparison -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One side of a comparison. At each point the fastest of its cases stands for it."""

    name: str
    holds: Callable[[dict[str, Any]], bool]
    """Whether a case is one of its own, by its protocol, family, algorithm, encoding, baseline and shape."""

    def of(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Its rows."""
        looked_at = frame[["protocol", "family", "algorithm", "encoding", "baseline", "shape"]]
        return frame[np.array([self.holds(row) for row in rows(looked_at)], dtype=bool)]


def _v2(row: dict[str, Any]) -> bool:
    return bool(row["baseline"] and row["family"] == "custom_ar_v2")


OURS = Side("flash-comm", lambda r: not r["baseline"])
V2_AS_SET = Side("custom AR v2 as its authors set it", lambda r: r["protocol"] == "custom_ar_v2" and not r["shape"])
V2_TUNED = Side("custom AR v2, launch shape tuned", lambda r: _v2(r) and bool(r["shape"]))
V2_BEST_FORM = Side("custom AR v2, best of its algorithms", lambda r: _v2(r) and not r["shape"])
V2_FASTEST = Side("custom AR v2, fastest of three ways", _v2)
BASELINES = Side("fastest baseline", lambda r: bool(r["baseline"]))
LAMPORT = Side("one-shot Lamport (TensorRT-LLM)", lambda r: r["family"] == "lamport_fp")
BARRIER = Side("barriers (vLLM)", lambda r: bool(r["baseline"] and r["family"] == "barrier"))
SENTINEL = Side("sentinel gather (v2's push)", lambda r: bool(r["baseline"] and r["family"] == "sentinel"))

SIDES = {
    "all_reduce": (OURS, V2_AS_SET, V2_TUNED, V2_BEST_FORM, LAMPORT, BARRIER),
    "all_gather": (OURS, SENTINEL, BARRIER),
    "reduce_scatter": (OURS, BASELINES),
}
"""What a latency figure of a collective draws."""
HEADLINE = {"all_reduce": V2_FASTEST, "all_gather": BASELINES, "reduce_scatter": BASELINES}
"""What a collective is compared with: for all-reduce the fastest of custom AR v2's three ways."""


def algorithm(name: str) -> Side:
    """Our protocols of one algorithm."""
    return Side(name.replace("_", "-"), lambda r: not r["baseline"] and r["algorithm"] == name)


def encoding(name: str) -> Side:
    """Our protocols of one encoding (of a mixed pair, as `first+second`), whatever the algorithm."""
    return Side(name, lambda r: not r["baseline"] and r["encoding"] == name)


def fastest(frame: pd.DataFrame, side: Side, by: Sequence[str] = ("dependent_launch",)) -> pd.DataFrame:
    """The fastest row of a side at each point. by : further columns that keep points apart."""
    ordered = side.of(frame).sort_values("latency_us", kind="stable")
    keys = [*POINT, *by]
    return ordered.drop_duplicates(keys).sort_values(keys, kind="stable").reset_index(drop=True)


# ---- ratios ----------------------------------------------------------------------------------------------------------


def ratios(
    run: Run,
    ours: Side,
    theirs: Side,
    collective: str = "all_reduce",
    launch: str | None = None,
    their_launch: str | None = None,
    mode: str | None = None,
    dtype: str | None = None,
) -> pd.DataFrame:
    """Time of one side over time of the other at each size, rank count and launch feature, with a 95 % interval.

    launch : both sides' launch feature; each in turn by default. their_launch : where the other side's is another one (then
    `launch` may be `ANY`). Columns: those of `POINT`, `launch`, `ours`, `theirs` (protocols), `ours_us`, `theirs_us`,
    `ratio`, `low`, `high`, `change_percent` (negative: ours is faster) with `change_low_percent` and `change_high_percent`,
    `verdict` (win, loss, even, or unknown where calls are too few for an interval), `masked`, `launches`, `iterations` (the
    fewer of the two), `shape` and `input` of theirs. No rows where one side is missing.

    The interval. Of several launches, which all cases share: launches are drawn with replacement, each as a whole and the
    same ones for both sides, and each side takes its fastest case of that draw, so that picking the best is part of what is
    resampled. Otherwise the two medians' own distribution-free intervals at 97.5 % each, the lower end of one over the upper
    end of the other: wide, but it assumes nothing.
    """
    import pandas as pd

    frame = measured(run, collective, mode=mode, dtype=dtype)
    found: list[dict[str, Any]] = []
    pairs = [(launch, their_launch)] if their_launch is not None else [(f, f) for f in launch_features(frame)]
    for here, there in pairs:
        if launch is not None and their_launch is None and here != launch:
            continue
        a = ours.of(frame if here == ANY else frame[frame["dependent_launch"] == here])
        b = theirs.of(frame if there == ANY else frame[frame["dependent_launch"] == there])
        calls = _Calls(run, [*a["case"], *b["case"]])
        of_theirs = dict(grouped(b, POINT))
        for key, mine in grouped(a, POINT):
            if key in of_theirs:
                kind = here if here == there else f"{here} against {there}"
                found.append(
                    {**dict(zip(POINT, key, strict=True)), "launch": kind, **_compare(mine, of_theirs[key], calls)}
                )
    columns = [*POINT, "launch", *_COMPARED]
    return pd.DataFrame(found, columns=columns).sort_values(["launch", *POINT], kind="stable").reset_index(drop=True)


_COMPARED = (
    "ours", "theirs", "ours_us", "theirs_us", "ratio", "low", "high", "change_percent", "change_low_percent",
    "change_high_percent", "verdict", "masked", "launches", "iterations", "shape", "input",
)  # fmt: skip


def brief(found: pd.DataFrame) -> pd.DataFrame:
    """Of `ratios` (or `claims.claims`) the columns that a reader looks at first, rounded."""
    wanted = (
        "collective", "against", "launch", "ranks", "nbytes", "ours", "theirs", "paper_median_percent", "median_percent",
        "paper_best_percent", "best_percent", "change_percent", "change_low_percent", "change_high_percent", "verdict",
        "masked", "points", "sharing",
    )  # fmt: skip
    return found[[c for c in wanted if c in found]].round(1)


class _Calls:
    """Times of the slowest rank, by case and launch."""

    def __init__(self, run: Run, cases: Sequence[int]) -> None:
        calls = slowest_rank(run.samples[run.samples["case"].isin(cases)])
        self._of: dict[int, dict[int, NDArray[np.float64]]] = {}
        for (case, launch), of_it in grouped(calls, ["case", "launch"]):
            self._of.setdefault(int(case), {})[int(launch)] = of_it["nanoseconds"].to_numpy(np.float64) / 1e3

    def of(self, case: int) -> dict[int, NDArray[np.float64]]:
        return self._of.get(int(case), {})


def _compare(mine: pd.DataFrame, others: pd.DataFrame, calls: _Calls) -> dict[str, Any]:
    a, b = (rows(f.sort_values("latency_us", kind="stable").head(1))[0] for f in (mine, others))
    ratio = a["latency_us"] / b["latency_us"]
    low, high = _interval(mine, others, a, b, calls)
    verdict = "win" if high < 1 else "loss" if low > 1 else "unknown" if math.isnan(low + high) else "even"
    return {
        "ours": a["protocol"], "theirs": b["form"], "ours_us": a["latency_us"], "theirs_us": b["latency_us"],
        "ratio": ratio, "low": low, "high": high, "change_percent": 100 * (ratio - 1),
        "change_low_percent": 100 * (low - 1), "change_high_percent": 100 * (high - 1), "verdict": verdict,
        "masked": bool(a["masked"] or b["masked"]), "launches": min(a["launches"], b["launches"]),
        "iterations": min(a["iterations"], b["iterations"]), "shape": b["shape"], "input": b["input"],
    }  # fmt: skip


def _interval(
    mine: pd.DataFrame, others: pd.DataFrame, a: dict[str, Any], b: dict[str, Any], calls: _Calls
) -> tuple[float, float]:
    # Cases that no draw can make the fastest of their side need not be looked at.
    close = [
        [int(r["case"]) for r in rows(f) if not r["low_us"] > best["high_us"]] for f, best in ((mine, a), (others, b))
    ]
    launches = {frozenset(calls.of(case)) for side in close for case in side}
    if len(launches) == 1 and len(next(iter(launches))) > 1:
        order = sorted(next(iter(launches)))
        best = [np.min([launch_medians([calls.of(case)[k] for k in order]) for case in side], axis=0) for side in close]
        return weighted_interval(best[0] / best[1], launch_draws(len(order))[1])
    (low_a, high_a), (low_b, high_b) = (_own_interval(calls.of(r["case"])) for r in (a, b))
    return low_a / high_b, high_a / low_b


def _own_interval(groups: dict[int, NDArray[np.float64]]) -> tuple[float, float]:
    if not groups:
        return math.nan, math.nan
    kept = list(groups.values())
    return median_interval(kept[0], 0.975) if len(kept) == 1 else launch_interval(kept, 0.975)


@dataclass(frozen=True)
class Summary:
    """Many ratios in a few numbers; masked points are left out."""

    points: int
    masked: int
    masked_losses: int
    wins: int
    losses: int
    even: int
    """Points whose interval holds 1, or that have none."""
    median_percent: float
    median_low_percent: float
    median_high_percent: float
    """Median over points of the change; from the median of the lower ends to that of the upper ends: if each interval holds
    its true change, this one holds the true median."""
    best: dict[str, Any] | None
    """The row with the largest reduction."""
    iterations: tuple[int, int]
    """Fewest and most calls of a point."""
    launches: int

    @property
    def counts(self) -> str:
        masked = (
            f"; not counted: {self.masked} about the L2 ({self.masked_losses} of them slower)" if self.masked else ""
        )
        return f"{self.wins} of {self.points} faster, {self.losses} slower, {self.even} not told apart{masked}"


def summarise(found: pd.DataFrame) -> Summary:
    """Numbers for a title or a claim. found : rows of `ratios`."""
    kept = found[~found["masked"].astype(bool)]
    verdicts = kept["verdict"].value_counts()
    wins, losses = int(verdicts.get("win", 0)), int(verdicts.get("loss", 0))
    median, low, high = (
        float(kept[c].median(skipna=False)) if len(kept) else math.nan
        for c in ("change_percent", "change_low_percent", "change_high_percent")
    )
    best = rows(kept.sort_values("change_percent", kind="stable").head(1))
    return Summary(
        points=len(kept),
        masked=len(found) - len(kept),
        masked_losses=int((found["masked"].astype(bool) & (found["verdict"] == "loss")).sum()),
        wins=wins,
        losses=losses,
        even=len(kept) - wins - losses,
        median_percent=median,
        median_low_percent=low,
        median_high_percent=high,
        best=best[0] if best else None,
        iterations=(int(kept["iterations"].min()), int(kept["iterations"].max())) if len(kept) else (0, 0),
        launches=int(kept["launches"].min()) if len(kept) else 0,
    )


# ---- which one is best -----------------------------------------------------------------------------------------------


def winners(frame: pd.DataFrame) -> pd.DataFrame:
    """Our fastest protocol at each point and launch feature, and how many others cannot be told from it.

    frame : rows of `measured`. Adds `ties` to the fastest rows: our other protocols whose interval overlaps.
    """
    best = fastest(frame, OURS)
    ours = OURS.of(frame)
    keys = [*POINT, "dependent_launch"]
    close = ours.merge(best[[*keys, "case", "high_us"]], on=keys, suffixes=("", "_best"))
    close = close[(close["low_us"] <= close["high_us_best"]) & (close["case"] != close["case_best"])]
    counts = close.groupby("case_best")["protocol"].nunique()
    best["ties"] = best["case"].map(counts).fillna(0).astype(int)
    return best


# ---- captions --------------------------------------------------------------------------------------------------------


def caption(run: Run, frame: pd.DataFrame) -> str:
    """What a reader must know about a figure: how many calls, on what, shared or emulated, what is masked, what is missing.

    frame : the rows of `measured` that are shown.
    """
    fewest, most = int(frame["iterations"].min()), int(frame["iterations"].max())
    calls = f"{most}" if fewest == most else f"{fewest} to {most}"
    launches = int(frame["launches"].max())
    said = [
        f"Taken on: {run.taken_on}.",
        f"Median over {calls} calls of the slowest rank, {launches} {'launch' if launches == 1 else 'launches'}.",
        f"95 % intervals{'' if launches > 1 else ' over calls'}.",
    ]
    sms = {
        int(n): int(s)
        for n, s in frame.dropna(subset=["sms_per_rank"])[["ranks", "sms_per_rank"]].itertuples(index=False)
    }
    if shared(run):
        of = ", ".join(f"{s} SMs each at n = {n}" for n, s in sorted(sms.items()))
        said.append(f"The ranks share one GPU ({of}): no link, scaling or crossover between GPUs is in this figure.")
        rates = frame["l2_gbps"].dropna()
        if rates.empty:
            said.append("The L2's rate was not measured, so nothing is masked.")
        elif frame["masked"].any():
            said.append(
                f"Hollow: all ranks' bytes take more than {100 * L2_SHARE:.0f} % of the time at the L2's rate "
                f"({rates.min():,.0f} to {rates.max():,.0f} GB/s): about the L2, not counted."
            )
        else:
            said.append("No point is masked as being about the L2.")
    asked = run.cases[(run.cases["ranks"] > 1) & (run.cases["protocol"] != FLOOR) & (run.cases["variant"] == SHIPPED)]
    for column in ("collective", "mode", "dtype", "dependent_launch"):
        asked = asked[asked[column].isin(set(frame[column]))]
    lost = asked[~asked["status"].isin(["measured", "refused"])]
    if len(lost):
        reasons = lost["reason"].value_counts()
        said.append(f"{len(lost)} of {len(asked)} cases have no times ({reasons.index[0]}).")
    if not run.complete:
        owed = sum(run.owed.values())
        said.append(f"Interrupted run: {owed:,} timed calls are missing; drawn with what it has.")
    return " ".join(said)


def shared(run: Run) -> bool:
    """Whether ranks of this run shared a GPU."""
    facts = run.provenance
    return bool(facts.get("backend") == "cuda" and facts.get("ranks_per_device", 1) > 1)


def emulated(run: Run) -> bool:
    """Whether the times are those of the cpu backend."""
    return bool(run.provenance.get("backend") == "cpu")


# ---- others' published curves ----------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).resolve().parent / "data" / "published_latency.csv"


def published(gpu: str) -> pd.DataFrame:
    """Latencies that others published for that GPU (graph replay; NCCL by nccl-tests), as `plots.side_latency` draws them.

    Lines to plot beside ours, never numbers to subtract ours from: they were taken elsewhere, by rank 0 alone, with inputs of
    ones. Columns: collective, system, version, ranks, bytes, latency_us, label. `ArgumentError` for a GPU that is not there.
    """
    import pandas as pd

    if not PUBLISHED.is_file():
        raise ArgumentError(f"{PUBLISHED} is not there: published curves come with a checkout, not with the package")
    frame = pd.read_csv(PUBLISHED)
    if gpu not in set(frame["gpu"]):
        raise ArgumentError(f"nothing is published of {gpu!r}; there is {', '.join(sorted(frame['gpu'].unique()))}")
    frame = frame[(frame["gpu"] == gpu) & frame["mode"].isin(["graph", "nccl-tests"])]
    names = {
        "sglang": {"0.5.14": "custom AR v2 (SGLang)", "0.5.10": "custom AR v1 (SGLang)"},
        "trtllm": {},
        "vllm": {},
        "nccl": {},
    }
    plain = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "nccl": "NCCL"}
    frame["label"] = [
        f"published, {gpu}: {names.get(system, {}).get(version, plain.get(system, system))}"
        for system, version in zip(frame["system"], frame["version"], strict=True)
    ]
    keys = ["collective", "system", "version", "label", "ranks", "bytes"]
    return frame.groupby(keys, sort=True)["latency_us"].mean().reset_index()
