"""Crossover maps: which protocol is fastest on which emulated link, by how much, and how sure that is.

`measure_maps` takes the times, `winners` and `crossovers` say what they mean, `figures` draws them; all three work on the frame
that ``map.parquet`` keeps. One row is one protocol at one size on one link.
"""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import plots
from experiments.link_records import Candidate, close, interval, markdown, open_first, say, taken_on
from experiments.sweep import in_turn
from experiments.tables import rows
from fcomm import bootstrap, provenance
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import RecordError
from fcomm.links import Link
from fcomm.protocols import protocol, protocols, shard_bytes
from fcomm.sizes import format_size
from fcomm.source import Specialisation

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from mpi4py import MPI

    from fcomm import Communicator

SHIPPED = Path(__file__).resolve().parent / "data"
"""Where the maps that come with the repository lie."""
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
CALLS = 12
"""In the longer graph. Many points matter more here than the third digit of one."""
L2_SHARE = 0.15
CELL = ["ranks", "nbytes", "link_latency_us", "link_gbps"]
"""What one winner is about."""


@dataclass(frozen=True)
class Grid:
    """What a map covers. Empty `protocols`: all of ours for all-reduce that are admitted."""

    sizes: tuple[int, ...]
    latencies_us: tuple[float, ...]
    gbps: tuple[float, ...]
    protocols: tuple[str, ...] = ()

    def links(self) -> list[Link | None]:
        """No emulation, one that costs nothing, and every link of the grid."""
        return [None, Link(0), *(Link(us, rate) for us in self.latencies_us for rate in self.gbps)]


GRIDS: Mapping[str, Grid] = MappingProxyType(
    {
        "cuda": Grid(tuple(1 << k for k in range(12, 21, 2)), (0.0, 0.5, 1.0, 2.0), (50.0, 150.0, 450.0, 900.0)),
        "cpu": Grid((1 << 10, 1 << 14), (0.0, 1000.0), (0.01, 1.0), ("one_shot.ll", "two_shot.ll")),
    }
)
"""By backend. On the cpu backend the emulated GPU is so slow that only a much slower link shows, and few kernels are built."""


# ---- measuring ---------------------------------------------------------------------------------------------------------


def measure_maps(
    world: MPI.Intracomm, backend: str, grid: Grid, ranks: Sequence[int], samples: int, end_s: float
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Times of every protocol at every point, and the provenance. Collective; the frame on rank 0, elsewhere an empty one.

    end_s : `time.monotonic()` on rank 0 after which no further size is begun; what it leaves out is missing in the frame.
    """
    import pandas as pd

    found: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    names = {
        n: grid.protocols
        or tuple(p.name for p in protocols().values() if p.collective == "all_reduce" and not p.baseline)
        for n in ranks
    }
    _compile_ahead(world, backend, names)
    for n in ranks:
        found += in_turn(world, n, partial(_maps_of, world, backend, grid, n, names[n], samples, end_s, facts)) or []
    facts = world.bcast(facts, root=0)
    return pd.DataFrame(found), facts


def _compile_ahead(world: MPI.Intracomm, backend: str, names: Mapping[int, Sequence[str]]) -> None:
    """Each rank compiles a part of the kernels; they are kept on disk, where the others find them."""
    element = REDUCIBLE[DTYPES[backend]]
    specs = [
        Specialisation(protocol(name), element, n, link=link)
        for n, of in names.items()
        for name in of
        for link in (False, True)
    ]
    mine = specs[world.rank :: world.size]

    def build() -> None:
        for spec in mine:
            if backend == "cpu":
                from fcomm.backends.cpu import build

                build(spec)
            else:
                import cupy

                from fcomm.machine_code import fill_cache

                fill_cache(spec, cupy.cuda.runtime.getDevice())

    say(world, f"compiling {len(specs)} kernels on {world.size} ranks")
    bootstrap.collectively(world, build)


def _maps_of(
    world: MPI.Intracomm,
    backend: str,
    grid: Grid,
    n: int,
    names: Sequence[str],
    samples: int,
    end_s: float,
    facts: dict[str, Any],
) -> list[dict[str, Any]]:
    max_bytes = max(grid.sizes)
    plain = open_first(world, n, backend, max_bytes)
    linked = open_first(world, n, backend, max_bytes, link=Link(0))
    facts.update(provenance.collect(plain))  # of the last, and largest, number of ranks
    l2_gbps = None
    if backend == "cuda":
        from fcomm import measure_cuda

        l2_gbps = measure_cuda.l2_gbps(plain)
    facts.setdefault("l2_gbps", {})[str(n)] = l2_gbps
    facts.setdefault("ticks_per_us", {})[str(n)] = linked.ticks_per_us
    admitted = [name for name in names if plain.refusal(protocol(name), DTYPES[backend]) is None]
    found: list[dict[str, Any]] = []
    for nbytes in grid.sizes:
        for link in grid.links():
            if plain.mpi.bcast(time.monotonic() > end_s):
                say(plain.mpi, f"no time left for {n} ranks from {format_size(nbytes)} and {link} on")
                close(linked)
                close(plain)
                return found
            if link is not None:
                linked.use_link(link)
            found += _point(plain if link is None else linked, link, nbytes, admitted, samples, l2_gbps)
        say(plain.mpi, f"{n} ranks, {format_size(nbytes)}: {len(found)} times")
    close(linked)
    close(plain)
    return found


def _point(
    comm: Communicator, link: Link | None, nbytes: int, names: Sequence[str], samples: int, l2_gbps: float | None
) -> list[dict[str, Any]]:
    """All protocols on one link, in two rounds, each in a random order, so that a drift meets all alike."""
    dtype = DTYPES[comm.backend.name]
    candidates = [Candidate(comm, name, nbytes, dtype, CALLS) for name in names]
    taken: list[list[float]] = [[] for _ in candidates]
    rng = np.random.default_rng([nbytes, comm.world_size])
    for count in (samples - samples // 2, samples // 2):
        for k in rng.permutation(len(candidates)):
            taken[k] += candidates[k].sample(count).tolist()
    found = []
    for candidate, values in zip(candidates, taken, strict=True):
        middle, low, high = interval(np.array(values))
        columns = candidate.columns
        share = columns["wire_bytes"] * comm.world_size / (l2_gbps * 1e3) / middle if l2_gbps else math.nan
        found.append(
            {
                **columns,
                "emulated_link": link is not None,
                "link_latency_us": math.nan if link is None else link.latency_us,
                "link_gbps": math.nan if link is None else link.gbps or math.inf,
                "latency_us": middle,
                "low_us": low,
                "high_us": high,
                "samples": len(values),
                "l2_share": share,
                "in_turns": _in_turns(candidate),
                "cpu_emulation": comm.backend.name == "cpu",
            }
        )  # fmt: skip
    return found


def _in_turns(candidate: Candidate) -> bool:
    """Whether a thread sums and sends several cells in turns, each of which the emulation charges a latency: two-shot with more
    cells of the own part than threads.
    """
    form = candidate.case.form(candidate.comm.gpu)
    assert form is not None
    if form.algorithm.phases != ("shard", "shard"):
        return False
    cells = form.encodings[0].cells(shard_bytes(candidate.case.nbytes, candidate.case.ranks))
    return cells > candidate.blocks * candidate.threads


# ---- what they mean ----------------------------------------------------------------------------------------------------


def winners(frame: pd.DataFrame) -> pd.DataFrame:
    """The fastest protocol of each size and link, one row each.

    Columns beside `CELL`: protocol, algorithm, encoding, latency_us, low_us, high_us; `second` and `margin`, the next one and how much
    longer it takes (0.1: 10 %); `least_margin`, the same between the near ends of the two 95 % intervals; `sure`, whether that is
    positive; `ratio`, best two-shot / best one-shot; `masked`, whether the L2 or the emulation, and not the link, may have
    decided: one of the two first takes more than 15 % of its time at the L2's rate, or is charged latencies in turns.
    """
    import pandas as pd

    found = []
    for key, of in frame[frame["emulated_link"]].groupby(CELL):
        order = rows(of.sort_values("latency_us"))
        first, second = order[0], order[min(1, len(order) - 1)]
        best = {
            name: min((r["latency_us"] for r in order if r["algorithm"] == name), default=math.nan)
            for name in ("one_shot", "two_shot")
        }
        least = second["low_us"] / first["high_us"] - 1
        found.append(
            {
                **dict(zip(CELL, key, strict=True)),
                **{name: first[name] for name in ("protocol", "algorithm", "encoding", "latency_us", "low_us", "high_us")},
                "second": second["protocol"],
                "margin": second["latency_us"] / first["latency_us"] - 1,
                "least_margin": least,
                "sure": bool(len(order) > 1 and least > 0),
                "ratio": best["two_shot"] / best["one_shot"],
                "masked": any(r["l2_share"] > L2_SHARE or r["in_turns"] for r in (first, second)),
            }
        )  # fmt: skip
    return pd.DataFrame(found)


def crossovers(frame: pd.DataFrame) -> pd.DataFrame:
    """From which message size on two-shot is faster than one-shot, for each number of ranks and link: `crossover_bytes`, between
    the measured sizes by interpolating the logarithm of the ratio; infinite where one-shot wins at all sizes, 0 where at none.
    """
    import pandas as pd

    found = []
    for key, of in winners(frame).groupby(["ranks", "link_latency_us", "link_gbps"]):
        of = of.sort_values("nbytes")
        sizes, logs = np.log2(of["nbytes"].to_numpy(float)), np.log(of["ratio"].to_numpy(float))
        wins = np.flatnonzero(logs < 0)
        if wins.size == 0:
            at = math.inf
        elif wins[0] == 0:
            at = 0.0
        else:
            k = int(wins[0])
            at = 2 ** float(sizes[k - 1] + (sizes[k] - sizes[k - 1]) * logs[k - 1] / (logs[k - 1] - logs[k]))
        found.append({**dict(zip(["ranks", "link_latency_us", "link_gbps"], key, strict=True)), "crossover_bytes": at})
    return pd.DataFrame(found)


def emulation_cost(frame: pd.DataFrame) -> pd.DataFrame:
    """What the emulation itself costs: microseconds that a link of no latency and any bandwidth adds, by ranks and algorithm."""
    key = ["ranks", "nbytes", "protocol", "algorithm"]
    plain = frame[~frame["emulated_link"]][[*key, "latency_us"]]
    ideal = frame[frame["emulated_link"] & (frame["link_latency_us"] == 0) & np.isinf(frame["link_gbps"])][
        [*key, "latency_us"]
    ]
    both = plain.merge(ideal, on=key, suffixes=("_plain", "_ideal"))
    both["emulation_us"] = both["latency_us_ideal"] - both["latency_us_plain"]
    return both.groupby(["ranks", "algorithm"])["emulation_us"].agg(["median", "max"]).reset_index()


def load(folder: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The frame and the provenance of a map's folder; `RecordError` where there is none."""
    import pandas as pd

    path = Path(folder)
    try:
        return pd.read_parquet(path / "map.parquet"), json.loads((path / "provenance.json").read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} has no map of experiments.links ({type(error).__name__})") from None


def shipped() -> list[Path]:
    """Folders of the maps that come with the repository."""
    return sorted(path.parent for path in SHIPPED.rglob("map.parquet"))


def report(frame: pd.DataFrame, facts: Mapping[str, Any]) -> str:
    """Both tables as Markdown."""
    best = winners(frame)
    head = [f"# Crossover maps under emulated links\n\n{caption(frame, facts)}\n"]
    lines = [
        [
            str(r["ranks"]), f"{r['link_latency_us']:g}", f"{r['link_gbps']:g}", format_size(r["nbytes"]), r["protocol"], f"{r['latency_us']:.2f}",
            r["second"], f"+{100 * r['margin']:.1f} %", "yes" if r["sure"] else "no", "~" if r["masked"] else "",
        ]
        for r in rows(best)
    ]  # fmt: skip
    across = [
        [str(r["ranks"]), f"{r['link_latency_us']:g}", f"{r['link_gbps']:g}", _size(r["crossover_bytes"])]
        for r in rows(crossovers(frame))
    ]
    costs = [
        [str(r["ranks"]), r["algorithm"], f"{r['median']:.3f}", f"{r['max']:.3f}"] for r in rows(emulation_cost(frame))
    ]
    return "\n".join([
        *head,
        markdown(["ranks", "latency (us)", "GB/s", "size", "fastest", "us", "second", "by", "sure", "masked"], lines),
        "\n## From which size on two-shot is faster than one-shot\n",
        markdown(["ranks", "latency (us)", "GB/s", "size"], across),
        "\n## What the emulation itself takes: a link without latency and limit, less none (us)\n",
        markdown(["ranks", "algorithm", "median", "worst"], costs),
        "",
    ])  # fmt: skip


def _size(nbytes: float) -> str:
    if math.isinf(nbytes):
        return "none"
    return "all" if nbytes == 0 else format_size(round(nbytes / 1024) * 1024)


def caption(frame: pd.DataFrame, facts: Mapping[str, Any]) -> str:
    """What a reader must know about a figure or table."""
    samples = int(frame["samples"].min())
    mode = "a prepared call" if bool(frame["cpu_emulation"].any()) else "one call in a replayed graph"
    return (
        f"{taken_on(dict(facts))}; EMULATED LINKS: latency is what the link adds, bandwidth that of one rank in one direction. All-reduce of "
        f"{DTYPES[str(facts['backend'])]}, {mode}, median of {samples} samples of the slowest rank, one launch. Not sure: the 95 % intervals of "
        "the first two overlap. Masked: the L2 or the emulation may have decided (docs/links.md)."
    )


# ---- figures -----------------------------------------------------------------------------------------------------------


def figures(frame: pd.DataFrame, facts: Mapping[str, Any]) -> dict[str, Figure]:
    """By file name: for each number of ranks who wins where, and one figure of the crossovers."""
    found = {f"map-n{n}.png": winner_map(frame, facts, n) for n in sorted(set(frame["ranks"].tolist()))}
    found["crossovers.png"] = crossover_map(frame, facts)
    return found


def winner_map(frame: pd.DataFrame, facts: Mapping[str, Any], ranks: int) -> Figure:
    """A panel for each size: bandwidth across, latency up, the winner's encoding and its margin in the cell.

    Blue: one-shot; orange: two-shot; the deeper, the larger the margin. Grey letters: not sure. "~": masked.
    """
    best = winners(frame)
    best = best[(best["ranks"] == ranks) & np.isfinite(best["link_gbps"])]
    sizes = sorted(int(b) for b in best["nbytes"].unique())
    across, up = sorted(set(best["link_gbps"].tolist())), sorted(set(best["link_latency_us"].tolist()))
    figure, axes = _panels([format_size(size) for size in sizes])
    for axis, size in zip(_flat(axes), sizes, strict=False):
        for r in rows(best[best["nbytes"] == size]):
            x, y = across.index(r["link_gbps"]), up.index(r["link_latency_us"])
            depth = 0.25 + 0.5 * min(1.0, r["margin"] / 0.3)
            _cell(axis, x, y, "tab:orange" if r["algorithm"] == "two_shot" else "tab:blue", depth)
            text = f"{'~' if r['masked'] else ''}{r['encoding']}\n+{100 * r['margin']:.0f} %"
            axis.text(x, y, text, ha="center", va="center", fontsize=6, color="black" if r["sure"] else "0.45")
        _axes(axis, across, up)
    title = f"All-reduce among {ranks} ranks under emulated links: the fastest protocol (blue one-shot, orange two-shot) and its lead"
    return _finish(figure, title, caption(frame, facts))


def crossover_map(frame: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """A panel for each number of ranks: the size from which two-shot is faster than one-shot, by link."""
    found = crossovers(frame)
    found = found[np.isfinite(found["link_gbps"])]
    counts = sorted(int(n) for n in found["ranks"].unique())
    across, up = sorted(set(found["link_gbps"].tolist())), sorted(set(found["link_latency_us"].tolist()))
    low, high = frame["nbytes"].min(), frame["nbytes"].max()
    figure, axes = _panels([f"{n} ranks" for n in counts])
    for axis, n in zip(_flat(axes), counts, strict=False):
        for r in rows(found[found["ranks"] == n]):
            x, y, at = across.index(r["link_gbps"]), up.index(r["link_latency_us"]), r["crossover_bytes"]
            place = (math.log2(min(max(at, low), high) / low) / max(1.0, math.log2(high / low))) if at > 0 else 0.0
            _cell(axis, x, y, "tab:orange", 0.75 - 0.6 * place)
            axis.text(x, y, _size(at), ha="center", va="center", fontsize=7)
        _axes(axis, across, up)
    return _finish(
        figure,
        "From which message size on two-shot all-reduce is faster than one-shot, under emulated links",
        caption(frame, facts),
    )


def slices(frame: pd.DataFrame, facts: Mapping[str, Any], ranks: int, nbytes: int) -> Figure:
    """Times at one size over the latency of the link, a panel for each bandwidth: the best one-shot and the best two-shot."""
    part = frame[
        frame["emulated_link"]
        & (frame["ranks"] == ranks)
        & (frame["nbytes"] == nbytes)
        & np.isfinite(frame["link_gbps"])
    ]
    rates = sorted(set(part["link_gbps"].tolist()))
    figure, axes = _panels([f"{rate:g} GB/s" for rate in rates])
    for axis, rate in zip(_flat(axes), rates, strict=False):
        of = part[part["link_gbps"] == rate]
        for algorithm, colour in (("one_shot", "tab:blue"), ("two_shot", "tab:orange")):
            best = of[of["algorithm"] == algorithm].sort_values("latency_us").groupby("link_latency_us").first()
            x = best.index.to_numpy(float)
            axis.plot(
                x,
                best["latency_us"],
                marker="o",
                markersize=3,
                linewidth=1.2,
                color=colour,
                label=algorithm.replace("_", "-"),
            )
            axis.fill_between(x, best["low_us"], best["high_us"], color=colour, alpha=0.2, linewidth=0)
            for at, us, name in zip(x, best["latency_us"], best["encoding"], strict=True):
                axis.annotate(name, (at, us), fontsize=5, xytext=(2, 3), textcoords="offset points")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("added latency (µs)", fontsize=7)
        axis.set_ylabel("µs", fontsize=7)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, frameon=False)
    title = f"All-reduce of {format_size(nbytes)} among {ranks} ranks under emulated links: the best one-shot and the best two-shot"
    return _finish(figure, title, caption(frame, facts))


def _panels(labels: Sequence[str]) -> tuple[Figure, Any]:
    columns = min(3, len(labels))
    down = -(-len(labels) // columns)
    figure = plots.picture()(figsize=(max(7.2, 3.4 * columns), 2.7 * down + 1.3), dpi=150, layout="constrained")
    axes = figure.subplots(down, columns, squeeze=False)
    for k, axis in enumerate(_flat(axes)):
        if k < len(labels):
            axis.set_title(labels[k], fontsize=9)
        else:
            axis.remove()
    return figure, axes


def _flat(axes: Any) -> Iterator[Axes]:
    yield from axes.flat


def _cell(axis: Axes, x: float, y: float, colour: str, depth: float) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, facecolor=colour, alpha=depth, linewidth=0))


def _axes(axis: Axes, across: Sequence[float], up: Sequence[float]) -> None:
    axis.set_xlim(-0.5, len(across) - 0.5)
    axis.set_ylim(-0.5, len(up) - 0.5)
    axis.set_xticks(range(len(across)), [f"{v:g}" for v in across], fontsize=7)
    axis.set_yticks(range(len(up)), [f"{v:g}" for v in up], fontsize=7)
    axis.set_xlabel("GB/s of a rank", fontsize=7)
    axis.set_ylabel("added latency (µs)", fontsize=7)


def _finish(figure: Figure, title: str, said: str) -> Figure:
    width = figure.get_figwidth()
    figure.suptitle("\n".join(textwrap.wrap(title, int(width * 12))), fontsize=10)
    figure.supxlabel("\n".join(textwrap.wrap(said, int(width * 17))), fontsize=7)
    figure.set_label(f"{title}. {said}")
    return figure
