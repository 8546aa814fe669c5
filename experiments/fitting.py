"""The fit of the cost model: from measured cases to prices, and how far its predictions and choices can be trusted.

Nothing here knows what a term means: `fcomm.cost_model.work` counts, this module finds the prices that bring the counts closest
to the times, and judges them on sizes and rank counts that were left out as wholes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.tables import rows
from fcomm.cost_model import (
    COLD_SHARPNESS,
    LAUNCH,
    MIB,
    OWN,
    SHARED,
    Model,
    identity,
    outputs_and_input,
    pieces,
    work,
)
from fcomm.errors import RecordError
from fcomm.grids import default_shape
from fcomm.measure import SKEW, STAGING
from fcomm.protocols import protocols
from fcomm.sizes import format_size
from fcomm.variants import SHIPPED

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

Floats = NDArray[np.float64]
Name = tuple[str, ...]

FEWEST_CALLS = 5
"""Timed calls of a case and launch that a median is made of."""
MOST_LEFT_OUT = 0.1
"""Share of a run's cases that may have fewer, and are left out then."""
FEWEST_SIZES = 4
LOSS_SCALE = 0.05
"""Relative error beyond which a case counts by its amount instead of its square."""
RIDGE = 1e-3
"""Pull of a price towards zero, so that what the data cannot tell apart is not driven to extremes."""
ALIKE = 1e-2
"""Pull of a protocol's prices to those of its kind; a price that is off by its spread weighs as much as one case by 10 %."""
SPREADS: Mapping[str, float] = {
    "evidence_us": 0.3, "peer_us": 0.1, "spread_us": 0.05, "spread_peer_us": 0.02, "pass_us": 0.5, "work_us_per_mib": 0.5,
}  # fmt: skip
FLATTEN, BEND = 0.1, 0.1
"""Pulls on a correction: towards zero, and towards a straight line."""
BETTER = 0.99
"""A searched launch shape replaces the default where its time is below this share of the default's."""
FAR_OFF = 0.2
"""Median relative error of a fit that has not found its way."""
TYPICAL_US = 10.0
"""A latency, for which the strengths of pulls are meant."""
STEPS = 60
BOUNDS: Mapping[Name, tuple[float, float]] = {("overlap",): (1.5, 8.0), ("cold_mib",): (0.25, 64.0)}
"""0.25 MiB: of 50 calls, 12 MiB, which fit into the cache of any GPU of these."""
START: Mapping[Name, float] = {("overlap",): 3.0, ("cold_mib",): 1.0}


# ---- what was measured -----------------------------------------------------------------------------------------------


@dataclass
class Table:
    """Cases of one machine and mode, as columns. Times are µs of the slowest rank.

    times : shape (cases, replicates), medians of one launch each; NaN where a launch has none. halves : shape (cases, 2), medians
    of one half of the launches (of one launch: of its iterations) each. calls : the iterations behind each case.
    """

    frame: pd.DataFrame
    """protocol, collective, launch (feature), ranks, nbytes, dtype, blocks, threads, searched, baseline, latency_us."""
    times: Floats
    halves: Floats
    calls: list[Floats]
    launches: int
    machine: dict[str, Any]
    mode: str
    taken_on: str
    runs: tuple[str, ...]
    source_hash: str
    sms_per_rank: dict[str, int] = field(default_factory=dict)
    max_bytes: int = 1 << 20

    def __len__(self) -> int:
        return len(self.frame)

    def keep(self, mask: NDArray[np.bool_]) -> Table:
        """The cases of a mask."""
        at = np.flatnonzero(mask)
        frame = self.frame.iloc[at].reset_index(drop=True)
        return replace(
            self, frame=frame, times=self.times[at], halves=self.halves[at], calls=[self.calls[k] for k in at]
        )

    @property
    def sizes(self) -> list[int]:
        return sorted(int(b) for b in self.frame["nbytes"].unique())

    @property
    def ranks(self) -> list[int]:
        return sorted(int(n) for n in self.frame["ranks"].unique())

    @cached_property
    def searched_at(self) -> set[tuple[str, int, str, int]]:
        """(protocol, ranks, launch, bytes) for which more than the default shape was measured."""
        f = self.frame[self.frame["searched"]]
        return set(zip(f["protocol"], f["ranks"], f["launch"], f["nbytes"], strict=True))


_KEY = ["protocol", "launch", "ranks", "nbytes", "dtype", "blocks", "threads"]


def read(runs: Sequence[Run], mode: str | None = None) -> Table:
    """The cases of one or several runs of one machine; `RecordError` with the case for what no fit may read.

    mode : kind of latency; graph, where the first run has it, else its first. Launches of all runs are replicates.
    """
    import pandas as pd

    if not runs:
        raise RecordError("no run was named: give the folder of one or several runs")
    first = runs[0]
    machine = identity(first.provenance)
    parts: list[pd.DataFrame] = []
    replicates = 0
    for run in runs:
        _refuse(run)
        if identity(run.provenance) != machine:
            raise RecordError(f"{run.path} is of another machine or placement than {first.path}: fit them apart")
        if run.provenance.get("source_hash") != first.provenance.get("source_hash"):
            raise RecordError(f"{run.path} was taken with other kernels than {first.path}: fit them apart")
        cases = run.cases
        modes = [m for m in dict.fromkeys(cases["mode"]) if m != SKEW]  # which is about a delay
        mode = mode or ("graph" if "graph" in modes or not modes else modes[0])
        registered = protocols()
        named = {p for p in cases["protocol"] if p in registered and registered[p].algorithm.forms is None}
        cases = cases[(cases["mode"] == mode) & cases["protocol"].isin(named) & (cases["ranks"] > 1)]
        cases = cases[(cases["status"] == "measured") & (cases["iterations"] > 0) & (cases["variant"] == SHIPPED)]
        if cases.empty:
            raise RecordError(f"{run.path} has no {mode} times of a protocol between two or more ranks")
        slowest = run.samples[run.samples["case"].isin(cases["case"])]
        slowest = (
            slowest.groupby(["case", "launch", "iteration"])["nanoseconds"].max().div(1e3).rename("us").reset_index()
        )
        slowest = _enough(run, cases, slowest)
        slowest["replicate"] = slowest["launch"] + replicates
        replicates += int(slowest["launch"].max()) + 1
        columns = cases.rename(columns={"dependent_launch": "launch"})[
            ["case", *_KEY, "collective", "baseline", "shape", "input", "sms_per_rank"]
        ]
        whole = None if run.summary is None else run.summary.set_index("case")["latency_us"]
        columns = columns.assign(whole_us=np.nan if whole is None else columns["case"].map(whole))
        parts.append(slowest.drop(columns="launch").merge(columns, on="case"))
    every = _best_input(pd.concat(parts, ignore_index=True))
    sms = every.dropna(subset=["sms_per_rank"]).groupby("ranks")["sms_per_rank"].min()
    every = every.sort_values([*_KEY, "replicate", "iteration"], kind="stable")
    facts = every.groupby(_KEY, sort=False).agg(
        collective=("collective", "first"), baseline=("baseline", "first"), searched=("shape", lambda s: (s != "").all()),
        whole_us=("whole_us", "median"), calls=("us", "size"),
    )  # fmt: skip
    us, which = every["us"].to_numpy(float), every["replicate"].to_numpy()
    ends = np.cumsum(facts["calls"].to_numpy())
    times, halves, calls = np.full((len(facts), replicates), np.nan), np.empty((len(facts), 2)), []
    for k, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        mine = us[start:end]
        for r in np.unique(which[start:end]):
            times[k, r] = np.median(mine[which[start:end] == r])
        there = times[k][np.isfinite(times[k])]
        halves[k] = [np.median(there[h::2] if len(there) > 1 else mine[h::2]) for h in (0, 1)]
        calls.append(mine)
    table = facts.reset_index().drop(columns="calls")
    whole_us = table.pop("whole_us").to_numpy(float)
    table["latency_us"] = np.where(np.isfinite(whole_us), whole_us, np.nanmedian(times, axis=1))
    return Table(
        table, times, halves, calls, int(np.isfinite(times).sum(axis=1).max()), machine, str(mode), first.taken_on,
        tuple(run.path.resolve().name for run in runs), str(first.provenance.get("source_hash", "")),
        {str(n): int(v) for n, v in sms.items()},
        max(int(b) for run in runs for b in run.request.get("sizes", [int(run.cases["nbytes"].max())])),
    )  # fmt: skip


def _best_input(every: pd.DataFrame) -> pd.DataFrame:
    """Where a pull protocol was measured with its input in both places, the times of the staging buffer."""
    place = every.groupby(_KEY)["input"].transform(lambda s: STAGING if (s == STAGING).any() else s.iloc[0])
    return every[every["input"] == place]


def _refuse(run: Run) -> None:
    if run.cases["time_sliced"].any() or run.samples.empty:
        run.for_figures()  # says why not; where it does not refuse it takes seconds, for statistics that no fit needs
    if run.request.get("link"):
        raise RecordError(
            f"{run.path} was taken with an emulated link ({run.request['link']}): a model is of a machine's own links"
        )
    if not run.complete:
        raise RecordError(f"{run.path} is not complete: finish it with --resume {run.path}")
    bad = run.cases[(run.cases["wrong"] > 0) | (run.cases["status"] == "wrong")]
    if len(bad):
        c = rows(bad)[0]
        raise RecordError(f"{run.path} has {c['wrong']} wrong elements in {_named(c)}: no fit reads such a run")
    summary = run.summary
    samples = run.samples[~(run.samples["nanoseconds"] > 0)]["case"].tolist()
    odd = samples if summary is None else samples + summary[~(summary["latency_us"] > 0)]["case"].tolist()
    if odd:
        c = rows(run.cases[run.cases["case"] == odd[0]])[0]
        raise RecordError(f"{run.path} has a time that is not positive in {_named(c)}: no fit reads such a run")


def _enough(run: Run, cases: pd.DataFrame, slowest: pd.DataFrame) -> pd.DataFrame:
    """The times without cases that a budget left with too few calls, if these are few themselves."""
    if run.summary is None:
        counts = slowest.groupby("case").size()
        few = counts[counts < FEWEST_CALLS]
        if len(few) > MOST_LEFT_OUT * len(counts):
            c = rows(cases[cases["case"] == few.index[0]])[0]
            raise RecordError(
                f"{run.path} has {few.iloc[0]} timed calls in {_named(c)}, and a fit needs {FEWEST_CALLS} of each case: "
                "sweep with a larger --budget or --calls"
            )
        if len(few):
            print(
                f"# {run.path}: {len(few)} of {len(counts)} cases are left out, which have fewer than {FEWEST_CALLS} calls",
                file=sys.stderr,
            )
            slowest = slowest[~slowest["case"].isin(few.index)]
    sizes = cases["nbytes"].nunique()
    if sizes < FEWEST_SIZES:
        raise RecordError(
            f"{run.path} has {sizes} message sizes, and a fit needs {FEWEST_SIZES}: sweep with more --sizes"
        )
    return slowest


def _named(c: Mapping[str, Any]) -> str:
    return f"case {c['case']} ({c['protocol']}, {format_size(int(c['nbytes']))} {c['dtype']} on {c['ranks']} ranks)"


# ---- the fit ---------------------------------------------------------------------------------------------------------


@dataclass
class Design:
    """The counts of each case, arranged so that path = `path` @ prices (+ what is cold), traffic = `traffic` @ prices."""

    names: list[Name]
    """(coefficient,), (coefficient, launch feature) or (coefficient, protocol) of each column; the last are the two curved ones."""
    path: Floats
    traffic: Floats
    footprint: Floats
    """MiB of all sharers' inputs and outputs of one call."""
    count: Floats
    """Launches of each row: a message that is split has a row for its whole pieces and one for the rest, ..."""
    first: NDArray[np.intp]
    """... and this is the first row of each case."""

    @classmethod
    def of(cls, table: Table, blank: Model) -> Design:
        """Counts with the shapes that were launched. blank : knows the machine."""
        f = table.frame
        own = [(key, p) for p in dict.fromkeys(f["protocol"]) for key in OWN]
        launch = [(key, la) for la in dict.fromkeys(f["launch"]) for key in LAUNCH]
        names: list[Name] = [(k,) for k in SHARED if k not in ("cold_mib", "overlap")]
        names += [*launch, *own, ("cold_mib",), ("overlap",)]
        at = {name: k for k, name in enumerate(names)}
        registered = protocols()
        columns = (f[c].tolist() for c in ("protocol", "launch", "ranks", "nbytes", "blocks", "threads"))
        every: list[tuple[int, str, str, int, int, tuple[int, int], int, float]] = []
        for i, (name, feature, n, nbytes, blocks, threads) in enumerate(zip(*columns, strict=True)):
            p = registered[name]
            arrays = nbytes * outputs_and_input(p, n) / MIB * blank.sharers(n)
            for size, count in pieces(p, nbytes, n, blank.max_bytes):
                every.append((i, name, feature, n, size, (blocks, threads), count, arrays))
        path, traffic = np.zeros((2, len(every), len(names)))
        for i, (_, name, feature, n, size, shape, _, _) in enumerate(every):
            w = work(registered[name], size, n, shape)
            s = blank.sharers(n)
            path[i, at[("launch_us", feature)]] = 1
            path[i, at[("sharer_us", feature)]] = s - 1
            path[i, at[("hop_us",)]] = w.rounds
            path[i, at[("line_us",)]] = w.line_phases
            path[i, at[("evidence_us", name)]] = w.rounds
            path[i, at[("peer_us", name)]] = w.rounds * w.peers
            path[i, at[("spread_us", name)]] = w.warp_doublings
            path[i, at[("spread_peer_us", name)]] = w.warp_doublings * w.peers
            path[i, at[("pass_us", name)]] = w.extra_passes
            traffic[i, at[("local_us_per_mib",)]] = w.local_mib * s
            traffic[i, at[("link_us_per_mib",)]] = w.wire_mib * s
            traffic[i, at[("rearm_us_per_mib",)]] = w.rearm_mib * s
            traffic[i, at[("work_us_per_mib", name)]] = w.wire_mib * s
        case = np.array([row[0] for row in every])
        first = np.flatnonzero(np.diff(case, prepend=-1))
        return cls(
            names, path, traffic, np.array([row[7] for row in every]), np.array([float(row[6]) for row in every]), first
        )

    def times(self, prices: Floats) -> Floats:
        """Predicted µs of each case."""
        return np.asarray(np.add.reduceat(self.count * self._parts(prices)[0], self.first))

    def _parts(self, prices: Floats) -> tuple[Floats, ...]:
        cold, p = prices[-2], prices[-1]
        share = 1 / (1 + (cold / self.footprint) ** COLD_SHARPNESS)
        path = self.path @ prices + prices[self._cold_us] * share
        traffic = self.traffic @ prices + 1e-9
        most = np.maximum(path, traffic)
        return most * ((path / most) ** p + (traffic / most) ** p) ** (1 / p), path, traffic, share

    @cached_property
    def _cold_us(self) -> int:
        return self.names.index(("cold_us",))

    def slopes(self, prices: Floats) -> Floats:
        """Derivatives of `times` by price."""
        cold, p = prices[-2], prices[-1]
        times, path, traffic, share = self._parts(prices)
        by_path, by_traffic = (path / times) ** (p - 1), (traffic / times) ** (p - 1)
        found = by_path[:, None] * self.path + by_traffic[:, None] * self.traffic
        found[:, self._cold_us] = by_path * share
        found[:, -2] = -by_path * prices[self._cold_us] * share * (1 - share) * COLD_SHARPNESS / cold
        a, b = (path / times) ** p, (traffic / times) ** p  # they add up to 1
        found[:, -1] = times * (a * np.log(path / times) + b * np.log(traffic / times)) / p
        return np.asarray(np.add.reduceat(self.count[:, None] * found, self.first, axis=0))


@dataclass
class Fitted:
    """Prices by name, and what they were found with."""

    design: Design
    prices: Floats

    def model(self, blank: Model) -> Model:
        """The prices as a model, without corrections."""
        shared, launch, own = {}, {}, {}  # type: dict[str, float], dict[str, dict[str, float]], dict[str, dict[str, float]]
        for name, price in zip(self.design.names, self.prices, strict=True):
            value = float(f"{max(0.0, price):.6g}")
            if len(name) == 1:
                shared[name[0]] = value
            else:
                (launch if name[0] in LAUNCH else own).setdefault(name[1], {})[name[0]] = value
        return replace(blank, shared=shared, launch=launch, own=own)


def fit_prices(
    design: Design, latency_us: Floats, start: Mapping[Name, float] | None = None, steps: int = STEPS
) -> Fitted:
    """The prices, none negative, that are closest in relative error; large errors count by amount (soft L1).

    Gauss-Newton with Levenberg's damping: in each step the errors are taken for linear, and the non-negative least squares that
    are left (SciPy's `nnls`) are of the size of the prices and not of the cases.
    """
    # Pulls are in µs of a GPU's calls; an emulation's take a thousand times as long, and are scaled to these.
    unit = np.array([1.0 if name in BOUNDS else float(np.median(latency_us)) / TYPICAL_US for name in design.names])
    latency_us = latency_us / (np.median(latency_us) / TYPICAL_US)
    x = np.array([START.get(name, 0.1) for name in design.names])
    if start is not None:
        x = np.array([start.get(name, 0.0) for name in design.names]) / unit
    low, high, pull = np.zeros(len(x)), np.full(len(x), np.inf), _pull(design.names)
    for j, name in enumerate(design.names):
        if name in BOUNDS:
            low[j], high[j] = BOUNDS[name]
    weight = 1.0 / latency_us

    def cost(at: Floats, scale: float) -> tuple[float, Floats, Floats]:
        errors = design.times(at) * weight - 1
        z = 1 + (errors / scale) ** 2
        return float(2 * scale**2 * np.sum(np.sqrt(z) - 1) + at @ pull @ at), errors, 1 / np.sqrt(z)

    def descend(x: Floats, scale: float) -> tuple[float, Floats]:
        damping = 1e-3
        now, errors, robust = cost(x, scale)
        for _ in range(steps):
            slopes = design.slopes(x) * weight[:, None]
            weighted = slopes * robust[:, None]
            normal, gradient = weighted.T @ slopes, weighted.T @ errors
            while True:
                candidate = np.clip(_step(normal, gradient, x, pull, low, damping), low, high)
                then, errors, robust = cost(candidate, scale)
                if then <= now or damping > 1e6:
                    break
                damping *= 10
            gained, x, now = now - then, candidate if then <= now else x, min(now, then)
            if gained < 1e-4 * now:
                break
            damping = max(1e-6, damping / 5)
        return now, x

    least, found = descend(x, LOSS_SCALE)
    if np.median(np.abs(design.times(found) * weight - 1)) > FAR_OFF:
        # A robust loss gives up most cases where the start was far off: once more, beginning without it.
        again, other = descend(descend(x, 1.0)[1], LOSS_SCALE)
        found = other if again < least else found
    return Fitted(design, found * unit)


def _pull(names: Sequence[Name]) -> Floats:
    """The quadratic form that draws all prices weakly to zero, and those of protocols of one kind to each other.

    The sum over a kind of (price - mean)^2: what the data say of one protocol alone stays, what they do not say is as usual.
    """
    pull = np.diag([0.0 if name in BOUNDS else RIDGE**2 for name in names])
    kinds: dict[tuple[str, str], list[int]] = {}
    for j, name in enumerate(names):
        if name[0] in OWN:
            kinds.setdefault((name[0], _kind(name[1])), []).append(j)
    for (key, _), at in kinds.items():
        strength = ALIKE / SPREADS[key] ** 2
        pull[np.ix_(at, at)] += strength * (np.eye(len(at)) - 1 / len(at))
    return pull


def _kind(protocol: str) -> str:
    """Protocols whose prices are expected to be alike: by how work is divided among blocks."""
    p = protocols()[protocol]
    if p.baseline:
        return "baseline"
    if any(e.max_chunks for e in p.encodings):
        return "chunks"
    return "tiles" if len({e.name for e in p.encodings}) > 1 else "cells"


def _step(normal: Floats, gradient: Floats, x: Floats, pull: Floats, low: Floats, damping: float) -> Floats:
    """The prices above `low` that minimise the quadratic around x."""
    from scipy.linalg import cholesky, solve_triangular
    from scipy.optimize import nnls

    curvature = normal + pull
    curvature[np.diag_indices_from(curvature)] *= 1 + damping
    curvature[np.diag_indices_from(curvature)] += 1e-12
    # |root (y - x)|^2 + 2 gradient (y - x), with the pull's own gradient; y = low + what is not negative.
    root = cholesky(curvature)
    wanted = root @ (x - low) - solve_triangular(root, gradient + pull @ x, trans="T")
    return np.asarray(low + nnls(root, wanted, maxiter=30 * len(x))[0])


def smooth(x: Floats, y: Floats, flatten: float = FLATTEN, bend: float = BEND) -> Floats:
    """A smoothed y over ascending x: pulled towards zero and towards a straight line (a Whittaker smoother)."""
    m = len(x)
    a = (1 + flatten) * np.eye(m)
    for k in range(1, m - 1):
        row = np.zeros(m)
        left, right = x[k] - x[k - 1], x[k + 1] - x[k]
        row[[k - 1, k, k + 1]] = right / (left + right), -1.0, left / (left + right)
        a += bend * np.outer(row, row)
    return np.asarray(np.linalg.solve(a, y))


def chosen_shapes(table: Table) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """At each size where launch shapes were searched: the best one, where it beats the default by 1 %; blocks 0: it does not."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    f = table.frame
    sought = table.searched_at
    keys: Any
    for keys, of_it in f.groupby(["protocol", "ranks", "launch", "nbytes"], sort=True):
        p, n, la, nbytes = keys
        if (p, n, la, nbytes) not in sought:
            continue
        default = of_it.loc[~of_it["searched"], "latency_us"].min()
        best = rows(of_it.sort_values("latency_us").head(1))[0]
        better = best["searched"] and not best["latency_us"] > BETTER * default
        shape = (int(best["blocks"]), int(best["threads"])) if better else (0, 0)
        found.setdefault(f"{p}/{n}/{la}", []).append((int(nbytes), *shape))
    return {key: tuple(anchors) for key, anchors in found.items() if any(a[1] for a in anchors)}


def residency(table: Table, blank: Model) -> dict[str, dict[str, int]]:
    """Blocks that a rank had resident, by protocol, ranks and threads, where the default shape asked for more."""
    found: dict[str, dict[str, int]] = {}
    f = table.frame[~table.frame["searched"]]
    columns = (f[c].tolist() for c in ("protocol", "ranks", "nbytes", "blocks", "threads"))
    for name, n, nbytes, blocks, threads in zip(*columns, strict=True):
        piece = pieces(protocols()[name], nbytes, n, blank.max_bytes)[0][0]
        wanted, _ = default_shape(protocols()[name], piece, n, blank.gpu(n))
        if blocks < wanted:
            found.setdefault(f"{name}/{n}", {})[str(threads)] = int(blocks)
    return found


def would_run(table: Table, model: Model) -> NDArray[np.bool_]:
    """Cases with the launch shape that the model's choice would use; where that one was not measured, the fastest there."""
    f = table.frame
    keep = np.zeros(len(f), bool)
    keys: Any
    for keys, at in f.groupby(["protocol", "ranks", "launch", "nbytes", "dtype"]).groups.items():
        p, n, la, nbytes, _ = keys
        index: list[Any] = list(at)
        if len(index) > 1:
            shape = model.shape(protocols()[p], nbytes, n, la)
            of_it = f.loc[index]
            right = (
                ~of_it["searched"] if shape is None else (of_it["blocks"] == shape[0]) & (of_it["threads"] == shape[1])
            )
            pool = of_it[right] if right.any() else of_it
            index = [pool["latency_us"].idxmin()]
        keep[index[0]] = True
    return keep


def corrections(table: Table, model: Model) -> dict[str, tuple[tuple[float, float], ...]]:
    """The smooth remainder of each protocol, rank count and launch feature, over the logarithm of the size."""
    f = table.frame[would_run(table, model)]
    predicted = predictions(f, model, correct=False)
    left = np.log(f["latency_us"].to_numpy(float) / predicted)
    frame = f.assign(left=left)
    found = {}
    for (p, n, la), of_it in frame.groupby(["protocol", "ranks", "launch"]):
        y = of_it.groupby("nbytes")["left"].mean()
        x = np.log2(y.index.to_numpy(float))
        fitted = smooth(x, y.to_numpy(float))
        found[f"{p}/{n}/{la}"] = tuple((float(f"{a:.6g}"), float(f"{b:.4g}")) for a, b in zip(x, fitted, strict=True))
    return found


def predictions(frame: pd.DataFrame, model: Model, correct: bool = True) -> Floats:
    """Predicted µs of each row, with the launch shapes that the rows were measured with."""
    registered = protocols()
    columns = (frame[c].tolist() for c in ("protocol", "nbytes", "ranks", "launch", "blocks", "threads"))
    return np.array(
        [
            sum(model.predict(registered[p], nbytes, n, la, (blocks, threads), correct).values())
            for p, nbytes, n, la, blocks, threads in zip(*columns, strict=True)
        ]
    )


def blank_model(table: Table) -> Model:
    """What is known of a machine before its prices are."""
    blank = Model(
        machine=table.machine, shared={}, launch={}, own={}, mode=table.mode, ranks=tuple(table.ranks),
        sizes=(table.sizes[0], table.sizes[-1]), dtypes=tuple(sorted(table.frame["dtype"].unique())), runs=table.runs,
        source_hash=table.source_hash, sms_per_rank=table.sms_per_rank,
        max_bytes=table.max_bytes,
    )  # fmt: skip
    return replace(blank, resident=residency(table, blank), shapes=chosen_shapes(table))


def fit(table: Table, start: Mapping[Name, float] | None = None) -> tuple[Model, Fitted]:
    """The model of a table: prices, then corrections."""
    blank = blank_model(table)
    fitted = fit_prices(Design.of(table, blank), table.frame["latency_us"].to_numpy(float), start)
    model = fitted.model(blank)
    return replace(model, corrections=corrections(table, model)), fitted
