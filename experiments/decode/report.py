"""The table and the figure of a decode run: time per output token with each way to all-reduce, from the run's records."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.decode.shapes import gib
from experiments.tables import aligned, rows
from fcomm.errors import RecordError
from fcomm.measure import median_interval, slowest_rank
from fcomm.protocols import protocols

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fcomm.records import Run

NONE, AUTO, V2 = "none", "auto", "custom_ar_v2"
WAYS = {NONE: "no communication", V2: "custom AR v2, as its authors set it"}
STEP = (
    "A step is, in each layer: RMSNorm, the products for queries, keys and values, attention of one new token over the cached "
    "context (each cached key and value read once; no rotary embedding, no paging), the output product, all-reduce, residual "
    "add and RMSNorm, the MLP's two products with its gate, all-reduce; then the last norm and the product with the rank's part "
    "of the vocabulary. Weights are random; sampling and the gathering of logits are not part of it."
)


def _steps(run: Run) -> list[dict[str, Any]]:
    if not is_decode(run):
        raise RecordError(f"{run.path} is no run of experiments.decode")
    return list(run.request["steps"])


def frame(run: Run) -> pd.DataFrame:
    """One row for each way that was timed, with what it is compared with.

    The columns of `run.latency` (`latency_us` is the time per output token), and `model`, `batch`, `layers`, `of_layers`, `way`, `tuned`, `bound_us` (the same step without communication), `comm_us` (what
    communication adds to it), `comm_share` (of the step), `v2_us` (the fastest of custom AR v2's three ways at this batch and
    launch feature), `change_percent` against that, with `change_low_percent` and `change_high_percent`: 95 %, from the two
    medians' own intervals at 97.5 % each. NaN where what it is compared with has no times. `RecordError` for other runs.
    """
    import pandas as pd

    known = {case: step for step in _steps(run) for case in step["cases"]}
    tuned = {case for step in _steps(run) for case in step["tuned"]}
    if run.latency.empty or run.cases["time_sliced"].any():
        raise RecordError(f"{run.path} has no times to show: none was taken, or ranks took turns on one GPU (no MPS)")
    latency = run.latency.copy()
    calls = {
        case: of_it["nanoseconds"].to_numpy(np.float64) / 1e3
        for case, of_it in slowest_rank(run.samples).groupby("case")
    }
    latency["tuned"] = latency["case"].isin(tuned)
    for column in ("model", "batch", "layers", "of_layers"):
        latency[column] = [known[case][column] for case in latency["case"]]
    latency["way"] = [_way(row) for row in rows(latency)]
    of_bound = latency[latency["protocol"] == NONE].drop_duplicates(["model", "batch"])
    bound = {(r["model"], r["batch"]): r["latency_us"] for r in rows(of_bound)}
    latency["bound_us"] = [bound.get((r["model"], r["batch"]), math.nan) for r in rows(latency)]
    latency["comm_us"] = latency["latency_us"] - latency["bound_us"]
    latency["comm_share"] = latency["comm_us"] / latency["latency_us"]
    theirs = latency[latency["protocol"].str.startswith(V2)].sort_values("latency_us")
    theirs = theirs.drop_duplicates(["model", "batch", "dependent_launch"])
    v2 = {(r["model"], r["batch"], r["dependent_launch"]): r for r in rows(theirs)}
    compared = []
    for row in rows(latency):
        other = v2.get((row["model"], row["batch"], row["dependent_launch"]))
        compared.append(
            _change(calls.get(row["case"]), None if other is None else calls.get(other["case"]), row, other)
        )
    return pd.concat([latency.reset_index(drop=True), pd.DataFrame(compared)], axis=1)


def _change(
    us: NDArray[np.float64] | None,
    their_us: NDArray[np.float64] | None,
    row: Mapping[str, Any],
    other: Mapping[str, Any] | None,
) -> dict[str, float]:
    if other is None:
        return dict.fromkeys(("v2_us", "change_percent", "change_low_percent", "change_high_percent"), math.nan)
    low = high = math.nan
    if us is not None and their_us is not None:
        (own_low, own_high), (their_low, their_high) = (median_interval(x, 0.975) for x in (us, their_us))
        low, high = own_low / their_high, own_high / their_low
    ratios = {
        "change_percent": row["latency_us"] / other["latency_us"],
        "change_low_percent": low,
        "change_high_percent": high,
    }
    return {"v2_us": other["latency_us"], **{name: 100 * (ratio - 1) for name, ratio in ratios.items()}}


def _way(row: Mapping[str, Any]) -> str:
    if row["protocol"] == V2 and row["tuned"]:
        return f"custom AR v2, launch shape searched ({row['shape']})"
    return WAYS.get(row["protocol"], row["protocol"])


def outputs(row: Mapping[str, Any]) -> str:
    """Whether a way's outputs are those of all others, in a few words."""
    if row["protocol"] == NONE:
        return "not compared"
    if row["status"] != "measured":
        return row["status"]
    if not row["checked_calls"]:
        return "not checked"
    return "same bits" if not row["reason"] else row["reason"]


def table(run: Run) -> str:
    """Markdown: one table for each model and batch, the fastest way first, what was left out and why, and a caption."""
    steps = _steps(run)
    try:
        found = frame(run)
        lines = [line for step in steps for line in _step_table(found, step)]
    except RecordError as error:
        lines = [f"{error}.", ""]
    measured = set(run.latency["case"])
    left_out: dict[str, list[str]] = {}
    for row in rows(run.cases[~run.cases["case"].isin(measured)]):
        (step,) = (s for s in steps if row["case"] in s["cases"])
        what = {**row, "tuned": row["case"] in step["tuned"]}
        name = "custom AR v2, launch shape searched" if what["tuned"] else _way(what)
        left_out.setdefault(f"{row['status']}: {row['reason'] or 'the run ended before'}", []).append(
            f"{name} ({step['model']}, batch {step['batch']})"
        )
    lines += [f"- {why}: {', '.join(which)}" for why, which in left_out.items()]
    return "\n".join([*lines, *([""] if left_out else []), *caption(run)])


def _step_table(found: pd.DataFrame, step: Mapping[str, Any]) -> Iterator[str]:
    of_it = found[(found["model"] == step["model"]) & (found["batch"] == step["batch"])].sort_values("latency_us")
    layers = (
        f"{step['layers']} of {step['of_layers']} layers"
        if step["layers"] != step["of_layers"]
        else f"{step['layers']} layers"
    )
    yield f"### {step['model']}, {layers}, batch {step['batch']}"
    yield ""
    if of_it.empty:
        yield "No way was timed."
        yield ""
        return
    several = of_it["dependent_launch"].nunique() > 1
    head = ["all-reduce", "what ran", *(["launch"] if several else []), "TPOT (us)", "95 %", "over the bound (us)", "communication",
            "against custom AR v2", "outputs"]  # fmt: skip
    lines = [head]
    for row in rows(of_it):
        bound = row["protocol"] == NONE
        lines.append(
            [
                row["way"],
                "" if row["form"] == row["protocol"] or bound else row["form"],
                *([row["dependent_launch"]] if several else []),
                f"{row['latency_us']:.1f}",
                _between(row["low_us"], row["high_us"], "{:.1f}"),
                "" if bound or math.isnan(row["comm_us"]) else f"{row['comm_us']:.1f}",
                "" if bound or math.isnan(row["comm_share"]) else f"{row['comm_share']:.1%}",
                "" if bound or math.isnan(row["change_percent"]) else f"{row['change_percent']:+.1f} %",
                outputs(row),
            ]
        )
    yield from aligned(lines)
    yield ""
    yield from _headline(of_it)
    yield ""


def _between(low: float, high: float, form: str) -> str:
    return "" if math.isnan(low) else f"{form.format(low)} to {form.format(high)}"


def _headline(of_it: pd.DataFrame) -> Iterator[str]:
    """Auto against the fastest of custom AR v2's three ways: chosen beforehand on our side, afterwards on theirs."""
    for launch, of_launch in of_it.groupby("dependent_launch", sort=False):
        auto = rows(of_launch[of_launch["protocol"] == AUTO])
        if not auto or math.isnan(auto[0]["change_percent"]):
            continue
        (row,) = auto
        theirs = of_launch[of_launch["protocol"].str.startswith(V2)]
        v2 = rows(theirs[theirs["latency_us"] == row["v2_us"]])[0]
        between = _between(row["change_low_percent"], row["change_high_percent"], "{:+.1f}")
        interval = f" (95 %: {between} %)" if between else ""
        share = "" if math.isnan(v2["comm_share"]) else f", whose communication is {v2['comm_share']:.1%} of the step"
        yield (
            f"auto ({row['form']}) against the fastest of custom AR v2's three ways ({v2['way']}){share}, dependent launch {launch}: "
            f"TPOT {row['change_percent']:+.1f} %{interval}."
        )


def no_evidence(run: Run) -> str:
    """Why the run's times are no evidence about time per output token on a server; empty where they are."""
    p = run.provenance
    if p.get("backend") == "cpu":
        return "Times of an emulation in NumPy on a CPU: they show that the code runs, and nothing about a GPU."
    if p.get("ranks_per_device", 1) > 1:
        return (
            f"A demonstration, and no evidence about TPOT: {p['ranks_per_device']} ranks share one GPU, so its memory and its SMs "
            "are divided, no link is in any time, and a rank's products and another's waiting take each other's place."
        )
    return ""


def end_to_end(runs: Sequence[Run]) -> tuple[str, str]:
    """For the table of claims: TPOT of `auto` against the fastest of custom AR v2's three ways, and communication's share of the
    latter's step; each from the smallest to the largest over the steps of the runs. runs : of this experiment, or none.
    """
    if not runs:
        return ("not measured here: no decode experiment in these runs",) * 2
    evidence = [run for run in runs if not no_evidence(run)]
    if not evidence:
        return ("not measured here: a decode run with ranks that share a GPU, or an emulated one, is no evidence",) * 2
    found = [row for run in evidence for row in rows(frame(run))]
    changes = [
        row["change_percent"] for row in found if row["protocol"] == AUTO and not math.isnan(row["change_percent"])
    ]
    shares = [
        100 * row["comm_share"] for row in found if row["protocol"].startswith(V2) and row["latency_us"] == row["v2_us"]
    ]
    steps = f"{len({(row['model'], row['batch']) for row in found})} steps"
    return (
        f"{max(changes):+.1f} % to {min(changes):+.1f} % ({steps})" if changes else "not measured: one side is missing",
        f"{min(shares):.1f} % to {max(shares):.1f} % ({steps})" if shares else "not measured: custom AR v2 is missing",
    )


def is_decode(run: Run) -> bool:
    """Whether the run is one of this experiment."""
    return bool(run.request.get("what") == "decode" and isinstance(run.request.get("steps"), list))


def caption(run: Run) -> Iterator[str]:
    """What a reader must know about the figures: what a step is, how it was scaled, where it was taken."""
    why_not = no_evidence(run)
    if why_not:
        yield f"**{why_not}**"
        yield ""
    steps, request = _steps(run), run.request
    yield (
        f"Median of the slowest rank's time of a step over {request['calls']} steps, in {request['dtype']}, context "
        f"{request['context']}; taken on the {run.taken_on}. Bound: the same step with both all-reduces of each layer left out."
    )
    yield STEP
    for name in dict.fromkeys(step["model"] for step in steps):
        step = next(s for s in reversed(steps) if s["model"] == name)
        scaled = ""
        if step["layers"] != step["of_layers"]:
            scaled = (
                f"; scaled to {step['layers']} of its {step['of_layers']} layers and {step['vocabulary']:,} of its "
                f"{step['of_vocabulary']:,} words, so that the last product keeps its share of a step"
            )
        yield (
            f"{name} ({step['note']}): a rank has {gib(step['weight_bytes'])} of weights and, at batch {step['batch']}, "
            f"{gib(step['cache_bytes'])} of cache{scaled}."
        )
    yield (
        "Outputs: residual stream and logits of two inputs, of all ranks, against a step whose sums are taken on the host by the "
        "reduction contract. A baseline that sends one zero for another is held against sums that do so too."
    )
    launches = ", ".join(run.cases["dependent_launch"].unique())
    yield f"All-reduces have dependent launch {launches} on both sides; the kernels between them have none."
    yield f"What auto chose by: {run.provenance.get('chosen_by', 'not on record')}."


def figure(run: Run) -> Figure:
    """What communication adds to a step over the batch, as a share of the step: a panel for each model, a line for each way.

    Ours by algorithm, the fastest encoding of each; `auto`; custom AR v2's ways. `RecordError` where the run has no times.
    """
    from experiments import plots

    found = frame(run)
    found = found[(found["protocol"] != NONE) & found["comm_share"].notna()]
    if found.empty:
        raise RecordError(f"{run.path} has no step with and without communication")
    found["line"] = [_line(row) for row in rows(found)]
    models = list(dict.fromkeys(found["model"]))
    picture = plots.picture()(figsize=(max(6.8, 4.4 * len(models)), 5.0), dpi=150, layout="constrained")
    axes = picture.subplots(1, len(models), sharey=True, squeeze=False)[0]
    looks: dict[str, dict[str, Any]] = {
        AUTO: {"color": plots.COLOURS[0], "marker": "o", "zorder": 5},
        "one_shot": {"color": plots.COLOURS[5], "marker": "s"},
        "two_shot": {"color": plots.COLOURS[2], "marker": "^"},
        "custom AR v2": {"color": "#000000", "marker": "D", "linestyle": "--"},
    }
    for axis, name in zip(axes, models, strict=True):
        of_model = found[found["model"] == name]
        for number, line in enumerate(
            sorted(of_model["line"].unique(), key=lambda text: list(looks).index(text) if text in looks else 9)
        ):
            best = (
                of_model[of_model["line"] == line]
                .sort_values("latency_us")
                .drop_duplicates("batch")
                .sort_values("batch")
            )
            other: dict[str, Any] = {
                "color": plots.BASELINE_COLOURS[number % 4],
                "marker": plots.MARKERS[number],
                "linestyle": ":",
            }
            look = looks.get(line, other)
            axis.plot(best["batch"], 100 * best["comm_share"], label=line, markersize=4.5, linewidth=1.4, **look)
            low, high = (100 * (1 - best["bound_us"] / best[end]) for end in ("low_us", "high_us"))
            axis.fill_between(best["batch"], low, high, color=look["color"], alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(of_model["batch"].unique()), [str(b) for b in sorted(of_model["batch"].unique())])
        first = of_model.iloc[0]
        layers = "" if first["layers"] == first["of_layers"] else f", {first['layers']} of {first['of_layers']} layers"
        axis.set_title(f"{name}{layers}", fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    axes[0].set_ylabel("communication (% of the step)")
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    picture.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8, frameon=False)
    picture.suptitle(
        f"All-reduce in a decode step: the step's time beyond the one without communication\n{run.taken_on}",
        fontsize=10,
    )
    notes = [
        f"Medians over {run.request['calls']} steps of the slowest rank; bands: 95 % intervals of these, the bound's left out."
    ]
    wrapped = textwrap.wrap(" ".join(filter(None, [no_evidence(run), *notes])), 40 + 60 * len(models))
    picture.supxlabel("\n".join(["sequences of a step", "", *wrapped]), fontsize=8)
    return picture


def _line(row: Mapping[str, Any]) -> str:
    p = protocols().get(row["protocol"])
    if row["protocol"].startswith(V2):
        return "custom AR v2"
    return row["protocol"] if p is None or p.baseline else p.algorithm.name
