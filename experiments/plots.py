"""Figures from a run's records. Each function returns a matplotlib Figure and needs no display."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.tables import cells, families, family
from fcomm.errors import RecordError
from fcomm.measure import FLOOR
from fcomm.protocols import protocols
from fcomm.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fcomm.records import Run

# Okabe and Ito's palette: told apart by readers with any colour vision; markers carry the same distinction in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
# Baselines are grey and hollow, so that a reader sees at once what is compared with what.
BASELINE_COLOURS = ("#000000", "#777777", "#444444", "#999999")
DASHES = ("-", "--", ":", "-.")
PANELS_IN_A_ROW = 4


def style(protocol: str) -> dict[str, Any]:
    """Colour and marker of a protocol: its own in every figure of its collective, whatever else is drawn."""
    known = protocols().get(protocol)
    alike = [
        p.name
        for p in protocols().values()
        if known and p.collective == known.collective and p.baseline == known.baseline
    ]
    k = alike.index(protocol) if known else len(MARKERS) - 1
    colours = BASELINE_COLOURS if known and known.baseline else COLOURS
    colour = colours[k % len(colours)]
    hollow = {"markerfacecolor": "white"} if known and known.baseline else {}
    return {"color": colour, "marker": MARKERS[k % len(MARKERS)], **hollow}


def family_style(name: str, collective: str) -> dict[str, Any]:
    """Colour and marker of a family of protocols."""
    known = families(collective)
    theirs = [f for f in known if _baseline(f)]
    ours = [f for f in known if not _baseline(f)]
    if name in theirs:
        k = theirs.index(name)
        return {
            "color": BASELINE_COLOURS[k % len(BASELINE_COLOURS)],
            "marker": MARKERS[k % len(MARKERS)],
            "markerfacecolor": "white",
        }
    k = ours.index(name) if name in ours else len(ours)
    return {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)]}


def _baseline(name: str) -> bool:
    return any(p.baseline for p in protocols().values() if family(p.name) == name)


def figures(run: Run) -> dict[str, Figure]:
    """Every latency figure of a run, by file name: one for each collective, mode and launch feature that it has."""
    frame = run.for_figures()
    kinds = frame[["collective", "mode", "dependent_launch"]].drop_duplicates()
    found: dict[str, Figure] = {}
    for collective, mode, launch in kinds.itertuples(index=False):
        parts = (collective, mode, launch)
        varied = [str(part) for part, column in zip(parts, kinds.columns, strict=True) if kinds[column].nunique() > 1]
        name = "latency.png" if not found else f"latency-{'-'.join(varied)}.png"
        found[name] = latency(run, mode, collective, launch)
    return found


def latency(run: Run, mode: str | None = None, collective: str = "all_reduce", launch: str | None = None) -> Figure:
    """Latency over message size: a panel for each rank count, 95 % intervals as bands.

    A line for each protocol; on GPUs for the best of each family, baselines hollow, with the floor of the fastest one dashed.
    mode : the kind of latency; the run's first if not named; launch : the same for the launch feature. Several dtypes are told
    apart by dashes. Raises `RecordError` where the run has nothing of that kind, or is time-sliced.
    """
    from matplotlib.figure import Figure

    frame = run.for_figures()
    frame = frame[frame["collective"] == collective]
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
    figure = Figure(figsize=(max(4.2 * columns, 6.6), 3.6 * rows + 1.1), dpi=150, layout="constrained")
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
    wide = high / low > 30
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
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
