"""Figures of a fit: points with the model's curves, the chosen protocol over size and ranks, regret beside other policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.judging import POINT, SELECTOR, Judged
from experiments.plots import COLOURS, MARKERS, _dress, _size_ticks, picture, style
from experiments.tables import encoding_label
from fcomm.errors import ArgumentError
from fcomm.protocols import protocols
from fcomm.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.fit import Outcome
    from fcomm.cost_model import Model

MAP_RANKS = range(2, 9)


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Every figure, by file name: curves and map for each collective and launch feature, regret for all together."""
    found: dict[str, Figure] = {}
    f = outcome.table.frame
    for collective, launch in sorted(set(zip(f["collective"], f["launch"], strict=True))):
        found[f"model-{collective}-{launch}.png"] = curves(outcome, collective, launch)
        found[f"map-{collective}-{launch}.png"] = choice_map(outcome, collective, launch)
    if outcome.by_sizes is not None:
        found["regret.png"] = regret(outcome, outcome.by_sizes)
    return found


def curves(outcome: Outcome, collective: str, launch: str) -> Figure:
    """Measured points and the model's curves: a row for each algorithm, a column for each rank count."""
    f = outcome.table.frame
    f = f[(f["collective"] == collective) & (f["launch"] == launch) & ~f["baseline"]]
    algorithms = list(dict.fromkeys(p.algorithm.name for p in protocols().values() if p.name in set(f["protocol"])))
    counts = sorted(f["ranks"].unique())
    figure = picture()(
        figsize=(max(4.0 * len(counts), 6.6), 3.4 * len(algorithms) + 1.2), dpi=150, layout="constrained"
    )
    axes = figure.subplots(len(algorithms), len(counts), sharex=True, sharey="row", squeeze=False)
    for i, algorithm in enumerate(algorithms):
        for j, n in enumerate(counts):
            axis = axes[i, j]
            of_n = f[f["ranks"] == n]
            for p in (p for p in protocols().values() if p.algorithm.name == algorithm):
                of_it = of_n[of_n["protocol"] == p.name].sort_values("latency_us").drop_duplicates("nbytes")
                if of_it.empty:
                    continue
                look = style(p.name)
                x = of_it["nbytes"].to_numpy(float)
                axis.plot(
                    x, of_it["latency_us"], linestyle="", markersize=4, color=look["color"], marker=look["marker"]
                )
                dense = np.unique(
                    (2 ** np.arange(np.log2(x.min()), np.log2(x.max()) + 1e-9, 0.125)).astype(int) // 16 * 16
                )
                y = [outcome.model.latency_us(p, int(b), int(n), launch) for b in dense]
                axis.plot(dense, y, linewidth=1.1, label=encoding_label(p.name), **look, markevery=[])
            _dress(axis)
            axis.set_title(f"{algorithm}, {n} ranks", fontsize=10)
            if j == len(counts) - 1:
                axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
        axes[i, 0].set_ylabel("latency (µs)")
    _size_ticks(axes.flat[0], sorted(int(b) for b in f["nbytes"].unique()))
    _title(
        figure,
        outcome,
        f"{collective.replace('_', '-')}, dependent launch {launch}: measured (points) and model (lines)",
    )
    return figure


def choice_map(outcome: Outcome, collective: str, launch: str) -> Figure:
    """The model's choice among our protocols over message size and ranks."""
    from matplotlib.patches import Patch, Rectangle

    model, table = outcome.model, outcome.table
    known = [p for p in protocols().values() if p.collective == collective and not p.baseline and p.name in model.own]
    least, most = model.sizes
    sizes = [int(2**e) for e in np.arange(np.log2(least), np.log2(most) + 1e-9, 0.5)]
    sizes = [max(16, b // 16 * 16) for b in sizes]
    figure = picture()(figsize=(9.0, 4.2), dpi=150, layout="constrained")
    axis = figure.subplots()
    used: dict[str, int] = {}
    for y, n in enumerate(MAP_RANKS):
        for x, nbytes in enumerate(sizes):
            cost = {p.name: model.latency_us(p, nbytes, n, launch) for p in known}
            name = min(cost, key=cost.__getitem__)
            k = used.setdefault(name, len(used))
            seen = n in table.ranks
            axis.add_patch(
                Rectangle(
                    (x - 0.5, y - 0.5), 1, 1, color=COLOURS[k % len(COLOURS)], alpha=0.8 if seen else 0.4, linewidth=0
                )
            )
            axis.text(x, y, chr(65 + k), ha="center", va="center", fontsize=7, color="black")
    axis.set_xlim(-0.5, len(sizes) - 0.5)
    axis.set_ylim(-0.5, len(MAP_RANKS) - 0.5)
    axis.set_xticks(range(0, len(sizes), 2), [format_size(b) for b in sizes[::2]], fontsize=7.5)
    axis.set_yticks(range(len(MAP_RANKS)), [str(n) for n in MAP_RANKS])
    axis.set_ylabel("ranks")
    handles = [Patch(color=COLOURS[k % len(COLOURS)], label=f"{chr(65 + k)}  {name}") for name, k in used.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    _title(
        figure, outcome, f"{collective.replace('_', '-')}, dependent launch {launch}: protocol that the model chooses",
        "pale: a rank count that was not measured",
    )  # fmt: skip
    return figure


def regret(outcome: Outcome, judged: Judged) -> Figure:
    """Median, 95th percentile and worst regret of each policy on sizes left out, a panel for each collective."""
    choices = judged.choices
    collectives = list(choices["collective"].unique())
    policies = list(dict.fromkeys((SELECTOR, *choices["policy"].unique())))
    figure = picture()(figsize=(4.2 * len(collectives) + 1.5, 3.4), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(collectives), sharey=True, sharex=True, squeeze=False)[0]
    marks = (("median", 0.5), ("p95", 0.95), ("worst", 1.0))
    for axis, collective in zip(axes, collectives, strict=True):
        for y, policy in enumerate(policies):
            of_it = choices[(choices["collective"] == collective) & (choices["policy"] == policy)]
            values = of_it.groupby(POINT)["regret"].mean().to_numpy(float) * 100
            if not len(values):
                continue
            points = [max(0.0, float(np.quantile(values, q))) for _, q in marks]
            axis.plot(points, [y] * 3, color="0.6", linewidth=1.2, zorder=1)
            for k, (point, (name, _)) in enumerate(zip(points, marks, strict=True)):
                axis.plot(
                    point, y, linestyle="", marker=MARKERS[k], color=COLOURS[k], markersize=6, zorder=2,
                    label=name if y == 0 else None,
                )  # fmt: skip
        axis.set_xscale("symlog", linthresh=1.0)
        axis.set_xlim(-0.1, 220)
        axis.set_xticks([0, 1, 5, 15, 50, 100], ["0", "1", "5", "15", "50", "100"])
        axis.minorticks_off()
        axis.set_xlabel("regret (%)")
        axis.set_title(collective.replace("_", "-"), fontsize=10)
        axis.grid(visible=True, axis="x", color="0.88", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(policies)), policies)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    _title(figure, outcome, "Regret of choices at sizes that were left out of the fit")
    return figure


GROUPS = {
    "launch": ("launch", "sharers"),
    "hops": ("hops",),
    "evidence": ("evidence", "second_load", "peers", "spread", "waves"),
    "wire": ("wire",),
    "re-arming": ("rearm",),
    "own memory": ("local", "cold"),
}
"""Terms of the model that a bar shows as one; what is not here (overlap, correction) is drawn backwards, hatched."""


def terms(
    model: Model, nbytes: int, ranks: int, launch: str = "none", collective: str = "all_reduce", most: int = 14
) -> Figure:
    """Predicted time by term at one size and rank count, the fastest protocol first. most : bars to show.

    `ArgumentError` where the model has no prices for the collective and launch feature.
    """
    known = [p for p in protocols().values() if p.collective == collective and p.algorithm.forms is None]
    predicted = {p.name: model.predict(p, nbytes, ranks, launch) for p in known if model.covers(p.name, launch=launch)}
    if not predicted:
        raise ArgumentError(f"the model has no prices for {collective} with dependent launch {launch}")
    shown = sorted(predicted, key=lambda name: sum(predicted[name].values()))[:most]
    figure = picture()(figsize=(8.2, 0.3 * len(shown) + 1.5), dpi=150, layout="constrained")
    axis = figure.subplots()
    for y, name in enumerate(shown):
        left = 0.0
        for k, (group, parts) in enumerate(GROUPS.items()):
            us = sum(predicted[name].get(part, 0.0) for part in parts)
            axis.barh(
                y,
                us,
                left=left,
                height=0.64,
                color=COLOURS[k % len(COLOURS)],
                edgecolor="white",
                label=group if y == 0 else None,
            )
            left += us
        total = sum(predicted[name].values())
        axis.barh(
            y, total - left, left=left, height=0.64, fill=False, hatch="////", edgecolor="0.25", linewidth=0.6,
            label="overlap, correction" if y == 0 else None,
        )  # fmt: skip
        axis.plot([total, total], [y - 0.4, y + 0.4], color="black", linewidth=2, label="predicted" if y == 0 else None)
        axis.text(max(total, left), y, f"  {total:.2f}", va="center", fontsize=7.5)
    axis.set_yticks(range(len(shown)), shown, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, axis.get_xlim()[1] * 1.06)
    axis.set_xlabel("predicted latency (µs)", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    where = model.machine.get("device", "an unnamed machine")
    figure.suptitle(
        f"{collective.replace('_', '-')} of {format_size(nbytes)} among {ranks} ranks, dependent launch {launch}\n"
        f"a model of {where}, not a measurement",
        fontsize=10,
    )
    return figure


def _title(figure: Any, outcome: Outcome, text: str, note: str = "") -> None:
    t = outcome.table
    launches = f"{t.launches} {'launch' if t.launches == 1 else 'launches'}"
    figure.suptitle(f"{text}\n{t.taken_on}", fontsize=10)
    figure.supxlabel(
        f"Mode {t.mode}, {', '.join(sorted(t.frame['dtype'].unique()))}, {launches}; medians of the slowest rank"
        + (f"; {note}" if note else ""),
        fontsize=8,
    )
