"""Figures from a run's records. Each function returns a matplotlib Figure and needs no display."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import frames
from experiments.tables import cells, families, family, rows
from fcomm import measure
from fcomm.errors import RecordError
from fcomm.measure import FLOOR, SKEW
from fcomm.protocols import protocols
from fcomm.sizes import format_size
from fcomm.source import LAUNCHES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fcomm.records import Run

# Okabe and Ito's palette: told apart by readers with any colour vision; markers carry the same distinction in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
# Baselines are grey, so that a reader sees at once what is compared with what. Hollow means masked, in every figure.
BASELINE_COLOURS = ("#000000", "#777777", "#444444", "#999999")
DASHES = ("-", "--", ":", "-.")
PANELS_IN_A_ROW = 4


def style(protocol: str) -> dict[str, Any]:
    """Colour and marker of a protocol: its own in every figure of its collective, whatever else is drawn."""
    if protocol in measure.PEERS:
        k = measure.PEERS.index(protocol)
        return {"color": BASELINE_COLOURS[k % len(BASELINE_COLOURS)], "marker": MARKERS[-1 - k]}
    known = protocols().get(protocol)
    alike = [
        p.name
        for p in protocols().values()
        if known and p.collective == known.collective and p.baseline == known.baseline
    ]
    k = alike.index(protocol) if known else len(MARKERS) - 1
    colours = BASELINE_COLOURS if known and known.baseline else COLOURS
    colour = colours[k % len(colours)]
    return {"color": colour, "marker": MARKERS[k % len(MARKERS)]}


def family_style(name: str, collective: str) -> dict[str, Any]:
    """Colour and marker of a family of protocols."""
    known = families(collective)
    theirs = [f for f in known if _baseline(f)]
    ours = [f for f in known if not _baseline(f)]
    if name in theirs:
        k = theirs.index(name)
        return {"color": BASELINE_COLOURS[k % len(BASELINE_COLOURS)], "marker": MARKERS[k % len(MARKERS)]}
    k = ours.index(name) if name in ours else len(ours)
    return {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)]}


def _baseline(name: str) -> bool:
    return name in measure.PEERS or any(p.baseline for p in protocols().values() if family(p.name) == name)


def figures(run: Run) -> dict[str, Figure]:
    """Every latency figure of a run, by file name: one for each collective, mode and launch feature that it has.

    Of mode skew, what calls add to a delay.
    """
    frame = run.for_figures()
    late = frame[(frame["mode"] == SKEW) & (frame["ranks"] > 1)]
    frame = frame[frame["mode"] != SKEW]
    kinds = frame[["collective", "mode", "dependent_launch"]].drop_duplicates()
    found: dict[str, Figure] = {}
    for collective, mode, launch in kinds.itertuples(index=False):
        parts = (collective, mode, launch)
        varied = [str(part) for part, column in zip(parts, kinds.columns, strict=True) if kinds[column].nunique() > 1]
        name = "latency.png" if not found else f"latency-{'-'.join(varied)}.png"
        found[name] = latency(run, mode, collective, launch)
    for collective in late["collective"].unique():
        found[f"skew-{collective.replace('_', '-')}.png"] = skew(run, collective)
    return found


def latency(run: Run, mode: str | None = None, collective: str = "all_reduce", launch: str | None = None) -> Figure:
    """Latency over message size: a panel for each rank count, 95 % intervals as bands.

    A line for each protocol; on GPUs for the best of each family, baselines grey, with the floor of the fastest one dashed.
    mode : the kind of latency; the run's first if not named; launch : the same for the launch feature. Several dtypes are told
    apart by dashes. Raises `RecordError` where the run has nothing of that kind, or is time-sliced.
    """
    frame = run.for_figures()
    frame = frame[(frame["collective"] == collective) & (frame["mode"] != SKEW)]
    if mode is None and len(frame):
        mode = str(frame["mode"].iloc[0])
    frame = frame[(frame["mode"] == mode) & (frame["protocol"] != FLOOR)]
    if launch is None and len(frame):
        launch = str(frame["dependent_launch"].iloc[0])
    frame = frame[frame["dependent_launch"] == launch]
    if frame.empty:
        raise RecordError(f"{run.path} has no {mode or ''} times of {collective}".replace("  ", " "))
    by_family = not frame["emulated"].any() and (frame["ranks"] > 1).any()

    counts = sorted(int(n) for n in frame["ranks"].unique())
    columns = min(len(counts), PANELS_IN_A_ROW)
    rows = -(-len(counts) // columns)
    figure = picture()(figsize=(max(4.2 * columns, 6.6), 3.6 * rows + 1.1), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, n in itertools.zip_longest(axes.flat, counts):
        if n is None:
            axis.set_visible(False)
            continue
        of_n, dtypes = frame[frame["ranks"] == n], sorted(frame["dtype"].unique())
        if by_family and n > 1:
            _family_panel(axis, of_n, collective, dtypes)
        else:
            _latency_panel(axis, of_n, dtypes)
        axis.tick_params(labelbottom=True)
        sms = of_n["sms_per_rank"].iloc[0]
        share = "" if sms is None or sms != sms else f", {int(sms)} SMs each"
        axis.set_title(f"{n} {'rank' if n == 1 else 'ranks'}{share}", fontsize=10)
    _size_ticks(axes.flat[0], sorted(int(b) for b in frame["nbytes"].unique()))
    for axis in axes[:, 0]:
        axis.set_ylabel("latency (µs), slowest rank")
    _legend(figure, axes)
    types = ", ".join(sorted(frame["dtype"].unique()))
    feature = f", dependent launch {launch}" if by_family else ""
    figure.suptitle(
        f"{collective.replace('_', '-')} latency, {types}, mode {mode}{feature}\n{run.taken_on}", fontsize=10
    )
    launches = int(frame["launches"].max())
    fewest, most = int(frame["iterations"].min()), int(frame["iterations"].max())
    calls = f"{most}" if fewest == most else f"{fewest} to {most}"
    families_shown = "; the best of each family; dashed: floor of the fastest" if by_family else ""
    figure.supxlabel(
        f"message size\n\nMedian over {calls} calls of the slowest rank; bands: 95 % interval of the median; "
        f"{launches} {'launch' if launches == 1 else 'launches'}{families_shown}",
        fontsize=8,
    )
    return figure


def _latency_panel(axis: Axes, frame: Any, dtypes: list[str]) -> None:
    order = {name: k for k, name in enumerate(protocols())}
    for protocol in sorted(frame["protocol"].unique(), key=lambda p: order.get(p, len(order))):
        for dtype in dtypes:
            of_it = frame[(frame["protocol"] == protocol) & (frame["dtype"] == dtype)]
            # Where launch shapes were searched, the line is that of the best one at each size.
            line = of_it.sort_values("latency_us").drop_duplicates("nbytes").sort_values("nbytes")
            if line.empty:
                continue
            x = line["nbytes"].to_numpy(float)
            look = style(protocol)
            label = f"{protocol}, {dtype}" if len(dtypes) > 1 else protocol
            known = protocols().get(protocol)
            phases = len(known.algorithm.phases) if known else 1  # dashed: two phases
            dash = DASHES[(dtypes.index(dtype) + phases - 1) % len(DASHES)]
            axis.plot(x, line["latency_us"], label=label, linestyle=dash, markersize=4.5, linewidth=1.4, **look)
            axis.fill_between(x, line["low_us"], line["high_us"], color=look["color"], alpha=0.22, linewidth=0)
    _dress(axis)


def _family_panel(axis: Axes, frame: Any, collective: str, dtypes: list[str]) -> None:
    for k, dtype in enumerate(dtypes):
        dash = DASHES[k % len(DASHES)]
        found = cells(frame[frame["dtype"] == dtype])
        for name in families(collective):
            line = found[found["column"] == name].sort_values("nbytes")
            if line.empty:
                continue
            x, look = line["nbytes"].to_numpy(float), family_style(name, collective)
            label = f"{name}, {dtype}" if len(dtypes) > 1 else name
            axis.plot(x, line["latency_us"], label=label, linestyle=dash, markersize=4.5, linewidth=1.4, **look)
            axis.fill_between(x, line["low_us"], line["high_us"], color=look["color"], alpha=0.22, linewidth=0)
        floor = found[found["fastest"] & found["floor_us"].notna()].sort_values("nbytes")
        if len(floor):
            axis.plot(floor["nbytes"], floor["floor_us"], label="floor", linestyle="--", color="0.5", linewidth=1.0)
    _dress(axis)


def _dress(axis: Axes) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    _plain_microseconds(axis)
    axis.tick_params(axis="x", labelsize=7.5)
    axis.grid(visible=True, which="major", color="0.85", linewidth=0.6)
    axis.grid(visible=True, which="minor", axis="y", color="0.93", linewidth=0.4)
    axis.spines[["top", "right"]].set_visible(False)


def _size_ticks(axis: Axes, sizes: list[int]) -> None:
    """Labels at measured sizes only, as many as there is room for; the first and the last always."""
    room = np.log2(sizes[-1] / sizes[0]) / 5.5
    shown = [sizes[0]]
    for nbytes in sizes[1:-1]:
        if np.log2(nbytes / shown[-1]) >= room and np.log2(sizes[-1] / nbytes) >= room:
            shown.append(nbytes)
    if len(sizes) > 1:
        shown.append(sizes[-1])
    axis.set_xticks(shown, [format_size(b) for b in shown])
    axis.set_xticks(sizes, [""] * len(sizes), minor=True)


def _plain_microseconds(axis: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_ylim()
    wide = high / low > 300
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.yaxis.set_minor_locator(LogLocator(base=10, subs=tuple(np.arange(2.0, 10.0))))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Any) -> None:
    """In the first panel, where small messages leave room above; beside the panels when there are many lines."""
    entries = {}
    for axis in axes.flat:
        entries.update(dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)))
    lines, names = list(entries.values()), list(entries)
    if len(names) <= 4:
        axes.flat[0].legend(lines, names, loc="upper left", fontsize=8.5, framealpha=0.85, edgecolor="0.85")
    else:
        figure.legend(lines, names, loc="outside right upper", fontsize=8.5, frameon=False)


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    return encode(figure, "png")


STAGE_COLOURS = (
    "#555555",
    "#999999",
    "#56B4E9",
    "#0072B2",
    "#E69F00",
    "#CCCCCC",
    "#F0E442",
    "#D55E00",
    "#009E73",
    "#CC79A7",
)
"""Of `variants.STAGES`, in their order: what no protocol can do without in greys and blues, what one is made of in colours."""


def breakdown(run: Run) -> Figure:
    """Where the time of a call goes: a bar of stages for each protocol, size and launch feature, a panel for each rank count.

    Stages below zero (hidden by what came before) hang below the axis; the black mark is the shipped kernel, measured apart.
    Raises `RecordError` where the run is no breakdown, or is time-sliced.
    """
    found = frames.stages(run)
    found = found[found["mode"] == found["mode"].iloc[0]]
    counts = _rank_counts(found)
    bars = found[["protocol", "nbytes", "dependent_launch"]].drop_duplicates().reset_index(drop=True)
    several = bars["dependent_launch"].nunique() > 1
    labels = [
        f"{protocol}\n{format_size(int(nbytes))}{f', {launch}' if several else ''}"
        for protocol, nbytes, launch in bars.itertuples(index=False)
    ]
    figure, axes = _panels(counts, width=max(0.75 * len(bars) * min(len(counts), PANELS_IN_A_ROW), 7.2), height=3.4)
    for axis, n in zip(axes.flat, counts, strict=False):
        of_n = found[found["ranks"] == n]
        for x, (protocol, nbytes, launch) in enumerate(bars.itertuples(index=False)):
            bar = of_n[
                (of_n["protocol"] == protocol) & (of_n["nbytes"] == nbytes) & (of_n["dependent_launch"] == launch)
            ]
            up, down = 0.0, 0.0
            for colour, row in zip(STAGE_COLOURS, rows(bar), strict=False):
                us = row["stage_us"]
                axis.bar(
                    x, us, 0.7, bottom=up if us >= 0 else down, color=colour, edgecolor="white", linewidth=0.4,
                    label=row["stage"],
                )  # fmt: skip
                up, down = (up + us, down) if us >= 0 else (up, down + us)
            if len(bar):
                axis.hlines(
                    bar["shipped_us"].iloc[0], x - 0.42, x + 0.42, color="black", linewidth=1.6, label="shipped"
                )
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
        axis.tick_params(labelbottom=True)
    for axis in axes[:, 0]:
        axis.set_ylabel("µs, slowest rank", fontsize=9)
    frame = run.latency[run.latency["ranks"] > 1].assign(masked=False)
    said = (
        "Stage: difference of two kernels, of which the second one has that stage more; the last one is the shipped kernel. Below zero: "
        "hidden by what came before."
    )
    return _finish(
        run, figure, axes, frame, _title(frame, ": where the time goes"), "µs, slowest rank", said, xlabel=""
    )


# ---- the paper's figures: one thing beside another, from experiments.frames ------------------------------------------

SIDE_LOOKS: dict[str, dict[str, Any]] = {
    frames.OURS.name: {"color": "#0072B2", "marker": "o", "linestyle": "-", "zorder": 5},
    frames.V2_AS_SET.name: {"color": "#000000", "marker": "s", "linestyle": "--", "zorder": 4},
    frames.V2_TUNED.name: {"color": "#555555", "marker": "^", "linestyle": "-.", "zorder": 3},
    frames.V2_BEST_FORM.name: {"color": "#888888", "marker": "D", "linestyle": ":", "zorder": 3},
    frames.LAMPORT.name: {"color": "#D55E00", "marker": "v", "linestyle": "-", "zorder": 2},
    frames.BARRIER.name: {"color": "#009E73", "marker": "P", "linestyle": "--", "zorder": 2},
    frames.SENTINEL.name: {"color": "#CC79A7", "marker": "X", "linestyle": "--", "zorder": 2},
}
LAUNCH_LOOKS: dict[str, dict[str, Any]] = {
    "none": {"color": "#D55E00", "marker": "s"},
    "late": {"color": "#0072B2", "marker": "o"},
    "early": {"color": "#009E73", "marker": "^"},
}
VERDICT_LOOKS: dict[str, dict[str, Any]] = {
    "win": {"color": "#0072B2", "marker": "o", "label": "ours faster"},
    "loss": {"color": "#D55E00", "marker": "s", "label": "ours slower"},
    "even": {"color": "0.45", "marker": "D", "label": "not told apart"},
    "unknown": {"color": "0.7", "marker": "x", "label": "too few calls for an interval"},
}


def side_latency(
    run: Run, collective: str = "all_reduce", launch: str | None = None, published: pd.DataFrame | None = None
) -> Figure:
    """Latency over size: ours against each baseline, the fastest case of each at each size, bands of 95 %.

    launch : launch feature, alike on all sides. published : from `frames.published`, drawn thin: lines to
    look at, never numbers to subtract from.
    """
    frame, launch = _of_launch(run, collective, launch)
    if published is not None:
        published = published[
            (published["collective"] == collective)
            & published["bytes"].between(frame["nbytes"].min(), frame["nbytes"].max())
        ]
    sides = [s for s in frames.SIDES.get(collective, (frames.OURS, frames.BASELINES)) if len(s.of(frame))]
    counts = _rank_counts(frame)
    figure, axes = _panels(counts)
    for axis, n in zip(axes.flat, counts, strict=False):
        for side in sides:
            line = frames.fastest(frame[frame["ranks"] == n], side)
            if len(line):
                _line(axis, line, side.name, SIDE_LOOKS.get(side.name, {"color": "0.4", "marker": "x"}))
        if published is not None:
            for k, (label, of_it) in enumerate(published[published["ranks"] == n].groupby("label", sort=False)):
                axis.plot(
                    of_it["bytes"], of_it["latency_us"], label=str(label), color="#AA4499", linewidth=0.9,
                    linestyle=DASHES[k % len(DASHES)], marker=("", "1", "2", "3", "4")[k // len(DASHES)], zorder=1,
                )  # fmt: skip
        _dress(axis)
    said = "; thin: published by others on their machines" if published is not None and len(published) else ""
    return _finish(
        run, figure, axes, frame, _title(frame, f" latency, dependent launch {launch} on all sides"),
        "latency (µs), slowest rank", f"The fastest case of each at each size{said}.",
    )  # fmt: skip


def reduction(
    run: Run,
    collective: str = "all_reduce",
    launch: str | None = None,
    ours: frames.Side = frames.OURS,
    theirs: frames.Side | None = None,
    their_launch: str | None = None,
) -> Figure:
    """Change of latency in per cent over size against a baseline: each point with its interval, wins and losses alike.

    theirs : the collective's `frames.HEADLINE` by default. launch, their_launch : as for `frames.ratios`.
    """
    theirs = theirs or frames.HEADLINE[collective]
    frame = frames.first_kind(run, collective)
    launch = launch or headline_launch(frame)
    kind = {"mode": str(frame["mode"].iloc[0]), "dtype": str(frame["dtype"].iloc[0])}
    found = frames.ratios(run, ours, theirs, collective, launch, their_launch, **kind)
    if found.empty:
        raise RecordError(f"the run lacks {ours.name} or {theirs.name} with dependent launch {their_launch or launch}")
    counts = sorted(int(n) for n in found["ranks"].unique())
    figure, axes = _panels(counts)
    for axis, n in zip(axes.flat, counts, strict=False):
        _reduction_panel(axis, found[found["ranks"] == n], n)
    compressed = "; the scale is compressed beyond 50 %" if _shared_scale(axes, found) else ""
    both = f"dependent launch {launch} on both sides"
    if their_launch is not None:
        both = f"{'fastest' if launch == frames.ANY else launch} trigger against {their_launch}"
    total = frames.summarise(found)
    shown = frame[frame["dependent_launch"].isin({their_launch or launch, launch})]
    return _finish(
        run, figure, axes, shown, _title(frame, f": {ours.name} against {theirs.name}, {both}"),
        "change of latency (%)",
        f"All panels: {total.counts}. Below zero: ours is faster. Dashed: median; ringed: best{compressed}.",
    )  # fmt: skip


def _reduction_panel(axis: Axes, found: pd.DataFrame, n: int) -> None:
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.plot(found["nbytes"], found["change_percent"], color="0.8", linewidth=1.0, zorder=1)
    for verdict, look in VERDICT_LOOKS.items():
        for masked in (False, True):
            of_it = found[(found["verdict"] == verdict) & (found["masked"] == masked)]
            if of_it.empty:
                continue
            y = of_it["change_percent"].to_numpy(float)
            spread = np.vstack([y - of_it["change_low_percent"], of_it["change_high_percent"] - y])
            axis.errorbar(
                of_it["nbytes"], y, yerr=None if np.isnan(spread).any() else spread, fmt=look["marker"], color=look["color"],
                markerfacecolor="white" if masked and verdict != "unknown" else look["color"], markersize=5.5, elinewidth=1.1,
                capsize=2.5, label=f"{look['label']}, masked" if masked else look["label"], zorder=3,
            )  # fmt: skip
    total = frames.summarise(found)
    axis.set_xscale("log", base=2)
    if total.best is not None:
        axis.axhline(total.median_percent, color="#0072B2", linestyle="--", linewidth=1.0, zorder=2)
        axis.plot(
            total.best["nbytes"], total.best["change_percent"], marker="o", markersize=11, markerfacecolor="none",
            markeredgecolor="black", linestyle="none", zorder=4,
        )  # fmt: skip
        axis.set_title(
            f"{n} ranks: median {total.median_percent:+.1f} %, best {total.best['change_percent']:+.1f} %", fontsize=9
        )
    else:
        axis.set_title(f"{n} ranks: all points are about the L2", fontsize=9)
    axis.tick_params(axis="x", labelsize=7.5)
    axis.grid(visible=True, color="0.88", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _shared_scale(axes: Any, found: pd.DataFrame) -> bool:
    """Limits that hold every point, if not every interval; whether losses beyond 80 % made it compress the scale from 50 % on.

    One large loss must not flatten all other points, nor a wide interval.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.flat[0]
    points = found["change_percent"]
    low, high = min(0.0, float(points.min())), max(0.0, float(points.max()))
    margin = 0.15 * (min(high, 80) - low) + 2
    ends = [float(found[f"change_{end}_percent"].fillna(0.0).quantile(q)) for end, q in (("low", 0.1), ("high", 0.9))]
    bottom = max(-100.0, min(low - margin, max(ends[0], low - 30)))
    compressed = high > 80
    if compressed:
        axis.set_yscale("symlog", linthresh=50 if low > -50 else 100, linscale=2.5)
        high *= 1.4
        axis.yaxis.set_major_locator(
            FixedLocator([m for m in (*range(-100, 60, 10), 100, 200, 400, 800, 1600) if bottom <= m <= high])
        )
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        high = max(high + margin, min(ends[1], high + 30))
    axis.set_ylim(bottom, high)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+.0f}" if v else "0"))
    return compressed


def best_encodings(run: Run, collective: str = "all_reduce", launch: str | None = None) -> Figure:
    """Our fastest protocol at each size and rank count, by name, and how many others cannot be told from it."""
    frame, launch = _of_launch(run, collective, launch)
    found = frames.winners(frame)
    if found.empty:
        raise RecordError("the run has no times of our own protocols")
    counts, sizes = _rank_counts(found), sorted(int(b) for b in found["nbytes"].unique())
    names = list(dict.fromkeys([*_encoding_names(), *sorted(found["encoding"].unique())]))
    shown = [n for n in names if (found["encoding"] == n).any()]
    figure, axes = _panels([0], width=max(1.05 * len(sizes) + 1.2, 6.6), height=0.75 * len(counts) + 0.9)
    axis = axes.flat[0]
    for row in rows(found):
        x, y = sizes.index(int(row["nbytes"])), counts.index(int(row["ranks"]))
        colour = COLOURS[shown.index(row["encoding"]) % len(COLOURS)]
        face = "white" if row["masked"] else _tint(colour)
        _patch(axis, x, y, face, colour)
        algorithm = str(row["algorithm"]).replace("_", "-")
        text = (
            f"{row['encoding'].replace('+', '+' + chr(10))}\n{algorithm if collective == 'all_reduce' else ''}".rstrip()
        )
        ties = f"\n= {row['ties']} other{'s' if row['ties'] > 1 else ''}" if row["ties"] else ""
        axis.text(x, y, text + ties, ha="center", va="center", fontsize=7, color="black")
    axis.set_xlim(-0.5, len(sizes) - 0.5)
    axis.set_ylim(len(counts) - 0.5, -0.5)
    axis.set_xticks(range(len(sizes)), [format_size(b) for b in sizes], fontsize=8)
    axis.set_yticks(range(len(counts)), [f"{n} ranks" for n in counts], fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return _finish(
        run, figure, axes, found, _title(frame, f": our fastest protocol by size and ranks, dependent launch {launch}"), "",
        "\"= k others\": the intervals of k other protocols of ours overlap its own.", legend=False,
    )  # fmt: skip


def one_encoding(run: Run, collective: str = "all_reduce", launch: str | None = None) -> Figure:
    """Ablation: the time with one encoding alone (any algorithm) over the time with all of them."""
    frame, launch = _of_launch(run, collective, launch)
    ours = frames.OURS.of(frame)
    if ours["encoding"].nunique() < 2:
        raise RecordError("the run has fewer than two encodings of ours")
    best = frames.fastest(frame, frames.OURS)[["ranks", "nbytes", "latency_us"]]
    counts = _rank_counts(ours)
    figure, axes = _panels(counts)
    names = [n for n in _encoding_names() if (ours["encoding"] == n).any()]
    names += sorted(set(ours.loc[~ours["encoding"].str.contains("+", regex=False), "encoding"]) - set(names))
    for axis, n in zip(axes.flat, counts, strict=False):
        for k, name in enumerate(names):
            line = frames.fastest(ours[ours["ranks"] == n], frames.encoding(name))
            line = line.merge(best, on=["ranks", "nbytes"], suffixes=("", "_best"))
            for column in ("low_us", "high_us", "latency_us"):
                line[column] = line[column] / line["latency_us_best"]
            look = {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)], "linestyle": DASHES[k % 4]}
            _line(axis, line, name, look)
        axis.axhline(1, color="0.3", linewidth=0.8)
        _dress(axis)
        _plain_factors(axis)
    return _finish(
        run, figure, axes, ours, _title(frame, f": one encoding at a time, dependent launch {launch}"),
        "time over the time with all encodings", "Each encoding with its best algorithm and, at 1, all of them.",
    )  # fmt: skip


def shots(run: Run, launch: str | None = None) -> Figure:
    """Ablation: our best two-shot over our best one-shot, with intervals."""
    frame, launch = _of_launch(run, "all_reduce", launch)
    found = frames.ratios(
        run, frames.algorithm("two_shot"), frames.algorithm("one_shot"), launch=launch,
        mode=str(frame["mode"].iloc[0]), dtype=str(frame["dtype"].iloc[0]),
    )  # fmt: skip
    if found.empty:
        raise RecordError("the run does not have both one-shot and two-shot")
    counts = sorted(int(n) for n in found["ranks"].unique())
    figure, axes = _panels(counts)
    for axis, n in zip(axes.flat, counts, strict=False):
        of_n = found[found["ranks"] == n]
        line = of_n.rename(columns={"low": "low_us", "high": "high_us"}).assign(latency_us=of_n["ratio"])
        _line(axis, line, "two-shot over one-shot", {"color": "#0072B2", "marker": "o", "linestyle": "-"})
        axis.axhline(1, color="0.3", linewidth=0.8)
        _dress(axis)
        _plain_factors(axis)
    return _finish(
        run, figure, axes, frame, _title(frame, f": two-shot over one-shot, dependent launch {launch}"),
        "time of two-shot over one-shot", "The fastest encoding of each. Below 1: two-shot is faster.",
    )  # fmt: skip


def triggers(run: Run, collective: str = "all_reduce") -> Figure:
    """Ablation: dependent launch none, late and early, for ours and for the baseline of the headline."""
    frame = frames.first_kind(run, collective)
    features = frames.launch_features(frame)
    if len(features) < 2:
        raise RecordError(f"the run has one launch feature only ({', '.join(features)})")
    counts = _rank_counts(frame)
    theirs = frames.HEADLINE[collective]
    figure, axes = _panels(counts)
    for axis, n in zip(axes.flat, counts, strict=False):
        for side, dash, name in ((frames.OURS, "-", "ours"), (theirs, ":", theirs.name)):
            for feature in features:
                line = frames.fastest(frame[(frame["ranks"] == n) & (frame["dependent_launch"] == feature)], side)
                if len(line):
                    look = LAUNCH_LOOKS.get(feature, {"color": "0.4", "marker": "x"})
                    _line(axis, line, f"{name}, {feature}", {**look, "linestyle": dash})
        _dress(axis)
    lacks = [f for f in LAUNCHES if f not in features]
    said = f"Not measured: {', '.join(lacks)}." if lacks else ""
    return _finish(
        run, figure, axes, frame, _title(frame, f": dependent launch {', '.join(features)} on both sides"),
        "latency (µs), slowest rank", said,
    )  # fmt: skip


def floor_multiples(run: Run, collective: str = "all_reduce", launch: str | None = None) -> Figure:
    """Latency as a multiple of the floor: a kernel of the same grid and launch feature that communicates nothing."""
    frame, launch = _of_launch(run, collective, launch)
    frame = frame[frame["floor_multiple"].notna()]
    if frame.empty:
        raise RecordError("the run has no floor: it is measured on GPUs, in mode graph")
    counts = _rank_counts(frame)
    theirs = frames.HEADLINE[collective]
    figure, axes = _panels(counts)
    looks = {
        frames.OURS: SIDE_LOOKS[frames.OURS.name],
        theirs: {"color": "#000000", "marker": "s", "linestyle": "--"},
    }
    for axis, n in zip(axes.flat, counts, strict=False):
        for side, look in looks.items():
            line = frames.fastest(frame[frame["ranks"] == n], side)
            if len(line):
                for column in ("latency_us", "low_us", "high_us"):
                    line[column] = line[column] / line["floor_us"]
                _line(axis, line, side.name, look)
        axis.axhline(1, color="0.3", linewidth=0.8)
        _dress(axis)
        _plain_factors(axis)
    return _finish(
        run, figure, axes, frame, _title(frame, f": multiples of the floor, dependent launch {launch}"),
        "time over the floor's time",
        "Floor: a kernel of the same grid and launch feature that copies input to output and communicates nothing, for each "
        "case its own. A pull that works in place saves that copy and may lie below 1.",
    )  # fmt: skip


SKEW_PANELS = 4


def skew(run: Run, collective: str = "all_reduce", launch: str | None = None) -> Figure:
    """What a call adds to a delay of one rank, over the delay: a panel for each rank count and for one or two sizes.

    A line for each side: its protocol that is fastest without a delay, in all panels followed over the delays. Level: a late
    rank costs its delay and nothing else. Falling: work of the others was done while they waited for it.
    """
    frame = frames.skewed(run, collective, launch)
    launch = launch or headline_launch(frame)
    frame = frame[frame["dependent_launch"] == launch]
    if frame["delay_us"].nunique() < 2:
        raise RecordError("the run has no two delays with that launch feature: name several with --delays")
    counts, sizes = _rank_counts(frame), sorted(int(b) for b in frame["nbytes"].unique())
    sizes = sizes[:1] + (sizes[-1:] if len(sizes) > 1 and 2 * len(counts) <= SKEW_PANELS else [])
    keys = [(n, nbytes) for nbytes in sizes for n in counts]
    frame = frame[frame["nbytes"].isin(sizes)]
    figure, axes = _panels([*range(len(keys))], labels=[f"{n} ranks, {format_size(b)}" for n, b in keys])
    delays = sorted(float(us) for us in frame["delay_us"].unique())
    for axis, (n, nbytes) in zip(axes.flat, keys, strict=False):
        here = frame[(frame["ranks"] == n) & (frame["nbytes"] == nbytes)]
        for side in frames.SIDES.get(collective, (frames.OURS, frames.BASELINES)):
            at_once = side.of(here[here["delay_us"] == here["delay_us"].min()]).sort_values("latency_us", kind="stable")
            if at_once.empty:
                continue
            chosen = rows(at_once.head(1))[0]
            line = here[(here["protocol"] == chosen["protocol"]) & (here["shape"] == chosen["shape"])]
            line = line[line["input"] == chosen["input"]].sort_values("delay_us")
            _line(axis, line.assign(nbytes=line["delay_us"]), side.name, SIDE_LOOKS.get(side.name, {"color": "0.4"}))
        axis.set_xscale("symlog", linthresh=max(delays[1], 1e-3), linscale=0.6)
        axis.set_xticks(delays, [f"{us:g}" for us in delays])
        axis.set_xticks([], minor=True)
        axis.tick_params(labelbottom=True, labelsize=7.5)
        axis.grid(visible=True, color="0.88", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].set_ylim(bottom=0)  # when all is drawn: panels share the axis, and setting one end freezes the other
    which = frame["late_rank"].dropna().unique()
    who = f"rank {int(which[0])}" if len(which) else "each rank in turn"
    return _finish(
        run, figure, axes, frame, _title(frame, f": what a call adds to a delay of one rank, dependent launch {launch}"),
        "end of the call behind the delay (µs)",
        f"Late: {who}. Each side's fastest protocol without a delay. Level: a late rank costs its delay and nothing else.",
        xlabel="delay of one rank (µs)",
    )  # fmt: skip


def scaling(run: Run, collective: str = "all_reduce", launch: str | None = None) -> Figure:
    """Latency over the number of ranks, a panel for each of a few sizes."""
    frame, launch = _of_launch(run, collective, launch)
    if frame["ranks"].nunique() < 2:
        raise RecordError(f"the run has one number of ranks only ({int(frame['ranks'].iloc[0])})")
    sizes = sorted(int(b) for b in frame["nbytes"].unique())
    chosen = [sizes[k] for k in np.unique(np.linspace(0, len(sizes) - 1, min(4, len(sizes))).round().astype(int))]
    theirs = frames.HEADLINE[collective]
    figure, axes = _panels(chosen, labels=[format_size(b) for b in chosen])
    for axis, nbytes in zip(axes.flat, chosen, strict=False):
        of_size = frame[frame["nbytes"] == nbytes]
        for side, look in ((frames.OURS, SIDE_LOOKS[frames.OURS.name]), (theirs, SIDE_LOOKS[frames.V2_AS_SET.name])):
            line = frames.fastest(of_size, side).sort_values("ranks")
            if len(line):
                _line(axis, line.assign(nbytes=line["ranks"]), side.name, look)
        _dress(axis)
    counts = sorted(int(n) for n in frame["ranks"].unique())
    axes.flat[0].set_xticks(counts, [str(n) for n in counts])
    axes.flat[0].set_xticks([], minor=True)
    return _finish(
        run, figure, axes, frame, _title(frame, f" latency over ranks, dependent launch {launch}"),
        "latency (µs), slowest rank", "", xlabel="ranks",
    )  # fmt: skip


def at_point(
    run: Run, nbytes: int, ranks: int, collective: str = "all_reduce", launch: str | None = None, most: int = 14
) -> Figure:
    """Every protocol at one size and rank count, the fastest first, with intervals. most : bars to show."""
    frame, launch = _of_launch(run, collective, launch)
    found = frame[(frame["nbytes"] == nbytes) & (frame["ranks"] == ranks)].sort_values("latency_us", kind="stable")
    found = found.drop_duplicates("protocol").head(most)
    if found.empty:
        raise RecordError(f"the run has no times of {format_size(nbytes)} among {ranks} ranks")
    figure, axes = _panels([0], width=7.6, height=0.27 * len(found) + 0.7)
    axis = axes.flat[0]
    for y, row in enumerate(rows(found)):
        look = {"color": "0.55"} if row["baseline"] else {"color": "#0072B2"}
        axis.barh(
            y,
            row["latency_us"],
            height=0.62,
            **({"fill": False, "edgecolor": look["color"]} if row["masked"] else look),
        )
        if not np.isnan(row["low_us"]):
            axis.plot([row["low_us"], row["high_us"]], [y, y], color="black", linewidth=1.4)
        axis.text(row["latency_us"], y, f"  {row['latency_us']:.2f}", va="center", fontsize=7.5)
    axis.set_yticks(range(len(found)), list(found["protocol"]), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, float(found["latency_us"].max()) * 1.12)
    axis.set_xlabel("latency (µs), slowest rank", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return _finish(
        run, figure, axes, found, _title(frame, f" of {format_size(nbytes)} among {ranks} ranks, dependent launch {launch}"),
        "", "Grey: baselines. Lines: 95 % intervals.", legend=False, xlabel="",
    )  # fmt: skip


# ---- parts of these --------------------------------------------------------------------------------------------------


def headline_launch(frame: pd.DataFrame) -> str:
    """The launch feature of figures that show one: late where it was measured, being the default trigger."""
    features = frames.launch_features(frame)
    return "late" if "late" in features else features[0]


def _of_launch(run: Run, collective: str, launch: str | None) -> tuple[pd.DataFrame, str]:
    frame = frames.first_kind(run, collective)
    launch = launch or headline_launch(frame)
    frame = frame[frame["dependent_launch"] == launch]
    if frame.empty:
        raise RecordError(f"the run has no {collective.replace('_', '-')} with dependent launch {launch}")
    return frame, launch


def _rank_counts(frame: pd.DataFrame) -> list[int]:
    return sorted(int(n) for n in frame["ranks"].unique())


def _encoding_names() -> list[str]:
    return list(
        dict.fromkeys("+".join(dict.fromkeys(e.name for e in p.encodings)) for p in protocols().values() if p.encodings)
    )


def _title(frame: pd.DataFrame, what: str) -> str:
    first = rows(frame.head(1))[0]
    emulation = "EMULATION on CPUs: " if first["emulated"] else ""
    return f"{emulation}{first['collective'].replace('_', '-')}{what} ({first['dtype']}, mode {first['mode']})"


@cache
def picture() -> type[Figure]:
    """A Figure that notebooks show without pyplot, whose state outlives a cell."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            return encode(self, "png", dpi=80)

    return Picture


def _panels(
    keys: Sequence[int], labels: Sequence[str] | None = None, width: float | None = None, height: float = 2.9
) -> tuple[Figure, Any]:
    """A figure with a panel for each key, at most `PANELS_IN_A_ROW` beside each other, on common axes."""
    columns = min(len(keys), PANELS_IN_A_ROW)
    down = -(-len(keys) // columns)
    figure = picture()(figsize=(width or max(3.5 * columns, 7.2), height * down + 1.25), dpi=150, layout="constrained")
    axes = figure.subplots(down, columns, sharex=True, sharey=True, squeeze=False)
    for axis, key in itertools.zip_longest(axes.flat, keys):
        if key is None:
            axis.remove()
        elif labels is not None:
            axis.set_title(labels[list(keys).index(key)], fontsize=9)
        elif key:
            axis.set_title(f"{key} ranks", fontsize=9)
            axis.tick_params(labelbottom=True)
    return figure, axes


def _line(axis: Axes, line: pd.DataFrame, label: str, look: Mapping[str, Any]) -> None:
    """A curve over `nbytes` with its band; masked points are hollow."""
    x, y = line["nbytes"].to_numpy(float), line["latency_us"].to_numpy(float)
    style = {"linestyle": "-", "zorder": 3, **look}
    masked = line["masked"].to_numpy(bool)
    axis.plot(x, y, label=label, markersize=4.5, linewidth=1.3, **style)
    if masked.any():
        point = {**style, "linestyle": "none", "zorder": style["zorder"] + 0.5}
        axis.plot(x[masked], y[masked], markersize=4.5, markerfacecolor="white", **point)
    axis.fill_between(
        x, line["low_us"], line["high_us"], color=look["color"], alpha=0.2, linewidth=0, zorder=style["zorder"] - 0.5
    )


def _finish(
    run: Run,
    figure: Figure,
    axes: Any,
    shown: pd.DataFrame,
    title: str,
    ylabel: str,
    said: str,
    legend: bool = True,
    xlabel: str = "message size",
) -> Figure:
    """Title, legend and the caption that every figure carries."""
    import textwrap

    first = axes.flat[0]
    entries: dict[str, Any] = {}
    if legend:
        for axis in axes.flat:
            if axis.figure is not None:
                entries.update(dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)))
        if xlabel == "message size":
            _size_ticks(first, sorted(int(b) for b in shown["nbytes"].unique()))
        for axis in axes[:, 0]:
            axis.set_ylabel(ylabel, fontsize=9)
    width = figure.get_figwidth()
    text = f"{said} {frames.caption(run, shown)}".strip()
    heading = "\n".join(textwrap.wrap(title, int(width * 12.5)))
    if legend:  # the legend's title: a title of the figure would lie upon it
        room = int(width * 14 / (max(map(len, entries), default=1) + 6))
        columns = max(1, min(len(entries), room))
        entry = figure.legend(
            entries.values(), entries, loc="outside upper center", fontsize=8, frameon=False, ncols=columns, title=heading,
            title_fontsize=10,
        )  # fmt: skip
        entry.get_title().set_multialignment("center")
    else:
        figure.suptitle(heading, fontsize=10)
    lines = textwrap.wrap(text, int(width * 17.5))
    figure.supxlabel("\n".join([xlabel, "", *lines] if xlabel else lines), fontsize=7.5)
    figure.set_label(f"{title}. {text}")
    return figure


def _tint(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(colour)
    return 0.35 * r + 0.65, 0.35 * g + 0.65, 0.35 * b + 0.65


def _patch(axis: Axes, x: float, y: float, face: Any, edge: str) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, facecolor=face, edgecolor=edge, linewidth=1.1))


def _plain_factors(axis: Axes) -> None:
    """Plain numbers on a logarithmic axis of ratios, few enough to be read."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axis.get_ylim()
    marks: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 50, 100)
    if high / low > 3:
        marks = (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
    axis.yaxis.set_major_locator(FixedLocator([m for m in marks if low <= m <= high]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


FORMATS = ("png", "svg", "pdf")


def encode(figure: Figure, kind: str, dpi: float | None = None) -> bytes:
    """The figure as a file's bytes, the same for the same records. kind : png, svg or pdf."""
    import matplotlib as mpl

    content = io.BytesIO()
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with mpl.rc_context({"svg.hashsalt": "flash-comm", "pdf.fonttype": 42}):
        figure.savefig(content, format=kind, metadata=date, dpi=dpi or "figure")
    return content.getvalue()
