"""Taking times and summing them up: cases, the kinds of latency, the check before timing, budgets, statistics.

What a figure may say depends on how its numbers were taken, so each kind of latency is a `Mode` with a name of its own
and never shares a column with another.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fcomm import checks
from fcomm.protocols import protocols

if TYPE_CHECKING:
    import pandas as pd
    from mpi4py import MPI

    from fcomm import Communicator

P = TypeVar("P", bound=Hashable)

COPY = "copy"
"""What one rank does, whatever the protocol: a case's name for it."""
CHECKED_CALLS = 4
DATASETS = 4
"""More than an encoding has copies of a slot (3): a call that read any earlier call's data is always seen."""


# ---- cases and modes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One thing to measure. Cases of one `point` are candidates for the same job, and share buffers and data."""

    collective: str
    protocol: str
    dtype: str
    nbytes: int
    ranks: int
    mode: str = "host"
    shape: tuple[int, int] | None = None
    """(blocks, threads) in place of the default launch shape."""
    features: str = "none"

    @property
    def point(self) -> tuple[str, str, int, int]:
        return self.collective, self.dtype, self.nbytes, self.ranks

    @property
    def registered_name(self) -> str:
        """What to ask the communicator for."""
        return "auto" if self.protocol == COPY else self.protocol

    def columns(self) -> dict[str, Any]:
        """The counted facts of the case, as columns of `records.CASES`."""
        from fcomm.dtypes import REDUCIBLE

        p = None if self.protocol == COPY else protocols()[self.protocol]
        return {
            "collective": self.collective,
            "protocol": self.protocol,
            "algorithm": p.algorithm.name if p else COPY,
            "encoding": "+".join(e.name for e in p.encodings) if p else "",
            "baseline": bool(p and p.baseline),
            "mode": self.mode,
            "features": self.features,
            "ranks": self.ranks,
            "dtype": self.dtype,
            "count": self.nbytes // REDUCIBLE[self.dtype].itemsize,
            "nbytes": self.nbytes,
            "rounds": p.algorithm.rounds if p else 0,
            "wire_bytes": p.wire_bytes(self.nbytes, self.ranks) if p else 0,
        }


Launch = Callable[[], Any]
"""Starts one call; it is complete after the backend's `synchronize()`."""


@dataclass(frozen=True)
class Mode:
    """A kind of latency: how a call is made ready, and how a number of calls is timed on this rank."""

    name: str
    meaning: str
    bind: Callable[[Communicator, Case, Any, Any], Launch]
    """(comm, case, x, out) -> what is timed; also what is checked before."""
    sample: Callable[[Communicator, Launch, int], NDArray[np.int64]]
    """(comm, launch, iterations) -> nanoseconds on this rank, shape (iterations,). Collective."""


def _bind_eager(comm: Communicator, case: Case, x: Any, out: Any) -> Launch:
    name, shape = case.registered_name, case.shape
    assert case.collective == "all_reduce", case
    return lambda: comm.all_reduce(x, out, protocol=name, shape=shape)


def _bind_prepared(comm: Communicator, case: Case, x: Any, out: Any) -> Launch:
    return comm.prepare(case.collective, x, out, protocol=case.registered_name, shape=case.shape)


def _sample_host(comm: Communicator, launch: Launch, iterations: int) -> NDArray[np.int64]:
    nanoseconds = np.empty(iterations, np.int64)
    synchronize, meet, clock = comm.backend.synchronize, comm.mpi.Barrier, time.perf_counter_ns
    for k in range(iterations):
        meet()  # a caller's time does not include what the ranks did before
        start = clock()
        launch()
        synchronize()
        nanoseconds[k] = clock() - start
    return np.maximum(nanoseconds, 1)


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        m.name: m
        for m in (
            Mode("host", "one eager call as the caller experiences it", _bind_eager, _sample_host),
            Mode("prepared", "one prepared call as the caller experiences it", _bind_prepared, _sample_host),
        )
    }
)


def grid(comm: Communicator, case: Case, x: Any, out: Any) -> tuple[int, int]:
    """Blocks and threads that the case's call launches."""
    call = comm.prepare(case.collective, x, out, protocol=case.registered_name, shape=case.shape)
    return call.blocks, call.threads


# ---- meeting ---------------------------------------------------------------------------------------------------------


def rest(mpi: MPI.Intracomm, pause_s: float = 0.01) -> None:
    """Barrier for ranks that have nothing to do: an MPI library's own would take a core from those that work."""
    request = mpi.Ibarrier()
    while not request.Test():
        time.sleep(pause_s)


def gather(mpi: MPI.Intracomm, nanoseconds: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """All ranks' times on rank 0, shape (iterations, ranks); None elsewhere."""
    all_of_them = np.empty((mpi.size, len(nanoseconds)), np.int64) if mpi.rank == 0 else None
    mpi.Gather(nanoseconds, all_of_them)
    return None if all_of_them is None else np.ascontiguousarray(all_of_them.T)


def age_s() -> float:
    """Seconds since this process was started: what a budget has paid before the first line of Python ran."""
    try:
        with open("/proc/self/stat") as f:  # noqa: PTH123 - not a file of ours
            started = int(f.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()


# ---- checking --------------------------------------------------------------------------------------------------------


def datasets(
    comm: Communicator, seed: Sequence[int], count: int, dtype: str
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Random inputs on which the order of summation shows: (own input, exact result), `DATASETS` of them. Collective."""
    made = []
    for k in range(DATASETS):
        own = checks.inputs([*seed, count, k], comm.rank, comm.world_size, count, dtype)
        every = np.empty((comm.world_size, own.nbytes), np.uint8)
        comm.mpi.Allgather(own.view(np.uint8), every)
        made.append((own, checks.reduce_reference([row.view(own.dtype) for row in every])))
    return made


def verify(
    comm: Communicator,
    launches: Mapping[Case, Launch],
    x: Any,
    out: Any,
    data: Sequence[tuple[NDArray[Any], NDArray[Any]]],
) -> dict[Case, int]:
    """Wrong elements of each candidate of a point, over `CHECKED_CALLS` calls and all ranks.

    Candidates take turns and each call has other data than those before it, since what is stale may be another's.
    Outputs are poisoned, so that an element that was not written is wrong. Collective; the same result on all ranks.
    """
    turns = itertools.cycle(data)
    poison = np.empty_like(data[0][1])
    checks.poison(poison)
    wrong = np.zeros(len(launches), np.int64)
    for _ in range(CHECKED_CALLS):
        for k, launch in enumerate(launches.values()):
            own, want = next(turns)
            x[...] = comm.from_host(own)
            out[...] = comm.from_host(poison)
            comm.backend.synchronize()
            launch()
            comm.backend.synchronize()
            wrong[k] += checks.wrong_elements(comm.to_host(out), want)
    total = np.empty_like(wrong)
    comm.mpi.Allreduce(wrong, total)
    return dict(zip(launches, total.tolist(), strict=True))


# ---- budgets ---------------------------------------------------------------------------------------------------------

ROUNDS = 5
"""Times that a sweep comes back to each case: drift of the machine then falls on all candidates alike."""
WARMUP = 1
"""Untimed calls at the start of each visit."""
VISIT_S = 2e-3
"""Fixed cost of a visit: gathering times and appending them."""
LEAST, MOST = 10, 400
"""Timed calls of a case: fewer do not give a 95 % interval worth showing, more do not narrow it visibly."""


def point_seconds(cost_s: float, iterations: int, candidates: int, visit_s: float) -> float:
    """Seconds that a point takes. cost_s : one call of each candidate, summed; visit_s : fixed cost of a visit."""
    return cost_s * (iterations + ROUNDS * WARMUP) + ROUNDS * candidates * visit_s


def plan_iterations(
    costs: Mapping[P, tuple[float, int]], available_s: float, visit_s: float = VISIT_S, most: int = MOST
) -> dict[P, int]:
    """Timed calls for each point, so that all of them together take at most `available_s`.

    costs : point -> (seconds of one call of each candidate, summed; number of candidates). All candidates of a point get
    the same count, and points share the time evenly as far as `LEAST` and `most` allow. Where even `LEAST` calls take too
    long, the costliest points are dropped (0 calls), whole, since a point with half its candidates compares nothing.
    """
    least = min(LEAST, most)

    def seconds(point: P, iterations: int) -> float:
        return point_seconds(costs[point][0], iterations, costs[point][1], visit_s)

    kept = sorted(costs, key=lambda p: seconds(p, least))
    while kept and sum(seconds(p, least) for p in kept) > available_s:
        kept.pop()

    def counts(share_s: float) -> dict[P, int]:
        return {p: int(min(max((share_s - seconds(p, 0)) / max(costs[p][0], 1e-9), least), most)) for p in kept}

    low, high = 0.0, max(available_s, 0.0)
    for _ in range(50):
        middle = (low + high) / 2
        fits = sum(seconds(p, k) for p, k in counts(middle).items()) <= available_s
        low, high = (middle, high) if fits else (low, middle)
    return {**dict.fromkeys(costs, 0), **counts(low)}


def visits(iterations: int, rounds: int = ROUNDS) -> list[int]:
    """Timed calls of each round's visit; they add up to `iterations`."""
    return [iterations * (k + 1) // rounds - iterations * k // rounds for k in range(rounds)]


# ---- statistics ------------------------------------------------------------------------------------------------------


def bus_factor(collective: str, ranks: int) -> float:
    """Ratio busbw / algbw, as nccl-tests defines it: what makes figures of different rank counts comparable."""
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def algbw_gbps(collective: str, nbytes: int, ranks: int, latency_us: float) -> float:
    """GB/s (10^9 bytes). nbytes : bytes of one rank's input."""
    moved = nbytes * (ranks if collective == "all_gather" else 1)
    return moved / latency_us / 1e3


def median_interval(values: NDArray[np.float64], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free interval of the median: two order statistics, whatever the values' distribution.

    The number of n values below the median is binomial(n, 1/2), so the l-th smallest and the l-th largest enclose it
    with probability 1 - 2 P(B < l). The largest l that keeps `confidence` is taken. NaN where n is too small (below 6
    for 95 %).
    """
    from scipy.stats import binom

    n = len(values)
    alpha = 1 - confidence
    below = binom.cdf(np.arange(n // 2 + 1), n, 0.5)
    # l values at most lie outside on each side; l = 0 would be the whole line.
    l = int(np.count_nonzero(2 * below <= alpha * (1 + 1e-12)))  # noqa: E741 - the name in the literature
    if l == 0:
        return math.nan, math.nan
    ordered = np.partition(values, [l - 1, n - l])
    return float(ordered[l - 1]), float(ordered[n - l])


_EXACT_LAUNCHES = 6
_RESAMPLES = 2000


def launch_interval(groups: Sequence[NDArray[np.float64]], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the pooled median where the launches, not their calls, are the replicates.

    Launches are drawn with replacement, each as a whole: calls within one share its placement, clocks and addresses.
    All draws are enumerated for up to 6 launches; beyond, 2000 are taken with a fixed seed.
    """
    k = len(groups)
    pooled = np.concatenate(groups)
    of = np.repeat(np.arange(k), [len(g) for g in groups])
    order = np.argsort(pooled, kind="stable")
    if k <= _EXACT_LAUNCHES:
        draws = np.array([np.bincount(d, minlength=k) for d in itertools.combinations_with_replacement(range(k), k)])
        weights = np.array([math.factorial(k) / math.prod(math.factorial(c) for c in d) for d in draws.tolist()])
    else:
        draws = np.random.default_rng(0).multinomial(k, [1 / k] * k, _RESAMPLES)
        weights = np.ones(len(draws))
    medians = _weighted_medians(pooled[order], draws[:, of[order]])
    by_size = np.argsort(medians, kind="stable")
    reached = np.cumsum(weights[by_size]) / weights.sum()
    alpha = 1 - confidence
    low = medians[by_size][np.searchsorted(reached, alpha / 2)]
    high = medians[by_size][min(int(np.searchsorted(reached, 1 - alpha / 2)), len(medians) - 1)]
    return float(low), float(high)


def _weighted_medians(ordered: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Medians of `ordered` with each value repeated `counts` times, one for each row of counts."""
    reached = np.cumsum(counts, axis=1)
    half = reached[:, -1:] / 2
    lower = ordered[np.argmax(reached >= half, axis=1)]
    upper = ordered[np.argmax(reached > half, axis=1)]
    return (lower + upper) / 2


def quantile(values: NDArray[np.float64], q: float) -> float:
    """The smallest value that at least the share q of all values does not exceed: a value that was seen."""
    return float(np.quantile(values, q, method="inverted_cdf"))


def slowest_rank(samples: pd.DataFrame) -> pd.DataFrame:
    """A call is over when its last rank is: the maximum over ranks, one row for each launch, case and iteration."""
    return samples.groupby(["case", "launch", "iteration"], sort=True)["nanoseconds"].max().reset_index()


def summarise(samples: pd.DataFrame, cases: pd.DataFrame) -> pd.DataFrame:
    """`records.LATENCY` for each case with samples and without wrong elements, beside the case's columns."""
    import pandas as pd

    from fcomm.records import LATENCY

    known = cases.set_index("case")
    rows = []
    for case, calls in slowest_rank(samples).groupby("case", sort=True):
        facts = dict(known.loc[[case]].iloc[0].items())
        if facts["wrong"] > 0:
            continue
        groups = [g.to_numpy(np.float64) / 1e3 for _, g in calls.groupby("launch")["nanoseconds"]]
        us = np.concatenate(groups)
        low, high = median_interval(us) if len(groups) == 1 else launch_interval(groups)
        median = float(np.median(us))
        algbw = algbw_gbps(facts["collective"], int(facts["nbytes"]), int(facts["ranks"]), median)
        rows.append(
            {
                "case": case,
                "launches": len(groups),
                "iterations": len(us),
                "latency_us": median,
                "low_us": low,
                "high_us": high,
                "p90_us": quantile(us, 0.9),
                "p99_us": quantile(us, 0.99),
                "min_us": float(us.min()),
                "algbw_gbps": algbw,
                "busbw_gbps": algbw * bus_factor(facts["collective"], int(facts["ranks"])),
            }
        )
    summary = pd.DataFrame(rows, columns=["case", *(c.name for c in LATENCY)])
    summary = summary.astype({"case": cases["case"].dtype, **{c.name: c.type for c in LATENCY}})
    return cases.drop(columns="iterations").merge(summary, on="case", how="inner")
