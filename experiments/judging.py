"""How far a fitted model can be trusted: errors and regret on sizes and rank counts that were left out as wholes.

Regret of a choice: time of the chosen / time of the best - 1. The best is the fastest protocol that is no baseline, found on one
half of the launches and scored, with the chosen one, on the other half, both ways round; otherwise noise would make every choice
look bad, or a lookup of the same times look perfect. With one launch the halves are those of its iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.fitting import (
    Fitted,
    Floats,
    Name,
    Table,
    fit,
    fit_prices,
    predictions,
    would_run,
)
from fcomm.protocols import GpuShare, protocols

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.cost_model import Model

POINT = ["collective", "launch", "dtype", "ranks", "nbytes"]
"""What a choice is made for."""
MOST_FOLDS = 12
DRAWS = 40
"""Resamplings for an interval of the coefficients."""

SELECTOR, ALWAYS, THRESHOLD, TABLE, LOOKUP = (
    "the model", "always the best one", "one size threshold", "custom AR v2's table", "lookup of the nearest size",
)  # fmt: skip

Progress = Callable[[Sequence[Any], str], Iterator[Any]]


def quietly(items: Sequence[Any], what: str) -> Iterator[Any]:
    """No progress."""
    del what
    yield from items


@dataclass
class Judged:
    """One way of leaving out.

    frame : the cases that were predicted without having been seen, with `latency_us`, `predicted_us` and, without the
    correction, `plain_us`. choices : one row for each point, policy and direction: the `chosen` protocol and the `best` one,
    `regret`, and `to_any`: the chosen one's time / that of the fastest of all, baselines included.
    """

    frame: pd.DataFrame
    choices: pd.DataFrame

    def errors(self, corrected: bool = True, baselines: bool = False) -> Floats:
        """Relative errors of the predictions, of ours or of all."""
        f = self.frame if baselines else self.frame[~self.frame["baseline"]]
        found = f["predicted_us" if corrected else "plain_us"].to_numpy(float) / f["latency_us"].to_numpy(float) - 1
        return np.abs(found)


def folds(values: Sequence[int]) -> list[list[int]]:
    """Each value alone, or every k-th where there are many."""
    values = sorted(values)
    k = len(values) if len(values) <= MOST_FOLDS else MOST_FOLDS
    return [list(values[j::k]) for j in range(k)]


def leave_out(table: Table, by: str, start: Mapping[Name, float] | None, progress: Progress = quietly) -> Judged:
    """Leaves out sizes (by="nbytes") or rank counts (by="ranks"), fits to the rest, predicts and chooses what was left out.

    start : prices that each fit starts from; they change how long it takes, not where it ends.
    """
    import pandas as pd

    frames, choices = [], []
    values = table.frame[by].to_numpy()
    for left in progress(folds([int(v) for v in np.unique(values)]), f"leaving out {by}"):
        out = np.isin(values, left)
        train, test = table.keep(~out), table.keep(out)
        if train.frame.empty:
            continue
        known = test.frame["protocol"].isin(set(train.frame["protocol"])) & test.frame["launch"].isin(
            set(train.frame["launch"])
        )
        test = test.keep(known.to_numpy())
        model, _ = fit(train, start)
        model = replace(model, sms_per_rank=table.sms_per_rank)
        f = test.frame.assign(
            predicted_us=predictions(test.frame, model), plain_us=predictions(test.frame, model, correct=False)
        )
        frames.append(f)
        choices.append(_choices(f, test.halves, would_run(test, model), train, model, by))
    return Judged(pd.concat(frames, ignore_index=True), pd.concat(choices, ignore_index=True))


def _choices(
    frame: pd.DataFrame, halves: Floats, runs: NDArray[np.bool_], train: Table, model: Model, by: str
) -> pd.DataFrame:
    import pandas as pd

    policies: dict[str, Callable[[Any, pd.DataFrame], str | None]] = {SELECTOR: _by_model}
    if by == "nbytes":  # the others know nothing of a rank count that they have not seen
        policies |= {
            ALWAYS: _always(train), THRESHOLD: _threshold(train), LOOKUP: _lookup(train), TABLE: _v2_table(model),
        }  # fmt: skip
    found = []
    times = frame["latency_us"].to_numpy(float)
    point: Any
    for point, at in frame.groupby(POINT).groups.items():
        index = np.array(list(at))
        of_it = frame.loc[index]
        for policy, choose in policies.items():
            theirs = policy == TABLE
            # Custom AR v2's table chooses among its own forms, and is compared with the best of these.
            own = (
                of_it["protocol"].str.startswith("custom_ar_v2.").to_numpy()
                if theirs
                else ~of_it["baseline"].to_numpy()
            )
            if not own.any():
                continue
            pool = index[own & (runs[index] | theirs)]
            name = choose(point, frame.loc[pool])
            mine = [k for k in pool if frame.at[k, "protocol"] == name]
            if not mine:
                continue
            chosen = min(mine, key=lambda k: times[k])
            for a in (0, 1):
                best = index[own][np.argmin(halves[index[own], a])]
                fastest = index[np.argmin(halves[index, a])]
                found.append(
                    (
                        *point, policy, name, frame.at[best, "protocol"],
                        halves[chosen, 1 - a] / halves[best, 1 - a] - 1, halves[chosen, 1 - a] / halves[fastest, 1 - a],
                    )
                )  # fmt: skip
    return pd.DataFrame(found, columns=[*POINT, "policy", "chosen", "best", "regret", "to_any"])


# ---- policies: a point and the candidates there, to the name of one of them ------------------------------------------


def _by_model(point: Any, pool: pd.DataFrame) -> str:
    del point
    return str(pool.at[pool["predicted_us"].idxmin(), "protocol"])


def _ours(train: Table) -> pd.DataFrame:
    """Relative times at the points of the training sizes: rows are points, columns protocols."""
    f = train.frame[~train.frame["baseline"]]
    times = f.pivot_table(index=POINT, columns="protocol", values="latency_us", aggfunc="min")
    return times.div(times.min(axis=1), axis=0)


def _of(relative: pd.DataFrame, **levels: Any) -> pd.DataFrame:
    for level, value in levels.items():
        relative = relative[relative.index.get_level_values(level) == value]
    return relative.dropna(axis=1)


def _always(train: Table) -> Callable[[Any, pd.DataFrame], str | None]:
    relative = _ours(train)
    best: dict[str, str | None] = {}
    for collective in train.frame["collective"].unique():
        of_it = _of(relative, collective=collective)
        best[collective] = None if of_it.empty or not len(of_it.columns) else str(np.log(of_it).mean().idxmin())
    return lambda point, pool: best.get(point[0])


def _threshold(train: Table) -> Callable[[Any, pd.DataFrame], str | None]:
    """For each collective, launch feature and rank count the two protocols and the size between them that are best together."""
    relative = _ours(train)
    rules: dict[tuple[Any, ...], tuple[float, str, str]] = {}
    for key in {(p[0], p[1], p[3]) for p in relative.index}:
        of_it = _of(relative, collective=key[0], launch=key[1], ranks=key[2])
        if of_it.empty or not len(of_it.columns):
            continue
        mean = of_it.groupby(level="nbytes").mean()
        sizes, table, names = mean.index.to_numpy(float), np.log(mean.to_numpy(float)), list(mean.columns)
        below = np.vstack([np.zeros(len(names)), np.cumsum(table, axis=0)])
        costs = below.min(axis=1) + (below[-1] - below).min(axis=1)
        cut = int(np.argmin(costs))
        edge = np.inf if cut == len(sizes) else 0.0 if cut == 0 else np.sqrt(sizes[cut - 1] * sizes[cut])
        rules[key] = (edge, names[int(below[cut].argmin())], names[int((below[-1] - below[cut]).argmin())])

    def choose(point: Any, pool: pd.DataFrame) -> str | None:
        del pool
        rule = rules.get((point[0], point[1], point[3]))
        return None if rule is None else rule[1] if point[4] <= rule[0] else rule[2]

    return choose


def _lookup(train: Table) -> Callable[[Any, pd.DataFrame], str | None]:
    f = train.frame[~train.frame["baseline"]]
    best = f.loc[f.groupby(POINT)["latency_us"].idxmin()]
    known: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for (*key, nbytes), name in zip(best[POINT].itertuples(index=False), best["protocol"], strict=True):
        known.setdefault(tuple(key), []).append((int(nbytes), str(name)))

    def choose(point: Any, pool: pd.DataFrame) -> str | None:
        del pool
        near = known.get(tuple(point[:4]))
        return min(near, key=lambda s: (abs(np.log(s[0] / point[4])), s[0]))[1] if near else None

    return choose


def _v2_table(model: Model) -> Callable[[Any, pd.DataFrame], str | None]:
    v2 = protocols()["custom_ar_v2"]

    def choose(point: Any, pool: pd.DataFrame) -> str | None:
        del pool
        if point[0] != v2.collective:
            return None
        return v2.at(int(point[4]), int(point[3]), model.gpu(int(point[3])) or GpuShare("", 1, 1)).name

    return choose


# ---- intervals of the coefficients -----------------------------------------------------------------------------------


def bootstrap(table: Table, fitted: Fitted, draws: int = DRAWS, seed: int = 0, progress: Progress = quietly) -> Floats:
    """Prices of resampled data, shape (draws, prices): launches drawn as wholes; with one launch, its iterations.

    Each draw starts from the fit and takes a few steps.
    """
    rng = np.random.default_rng(seed)
    start = dict(zip(fitted.design.names, fitted.prices, strict=True))
    whole = table.frame["latency_us"].to_numpy(float)
    found = []
    for _ in progress(range(draws), "resampling"):
        if table.launches > 1:
            drawn = table.times[:, rng.integers(0, table.times.shape[1], table.times.shape[1])]
            there = np.isfinite(drawn).any(axis=1)
            latency = whole.copy()
            latency[there] = np.nanmedian(drawn[there], axis=1)
        else:
            latency = np.array([np.median(rng.choice(us, len(us))) for us in table.calls])
        found.append(fit_prices(fitted.design, latency, start, steps=5).prices)
    return np.array(found)


def summary(values: Floats) -> dict[str, float]:
    """Median, 95th percentile, largest and count."""
    if not len(values):
        return {"median": float("nan"), "p95": float("nan"), "worst": float("nan"), "count": 0}
    median, p95 = np.quantile(values, [0.5, 0.95])
    return {"median": float(median), "p95": float(p95), "worst": float(np.max(values)), "count": len(values)}
