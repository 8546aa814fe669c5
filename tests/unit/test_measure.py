"""Statistics against values worked out by hand, and budgets."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcomm import measure
from fcomm.measure import LEAST, MOST, ROUNDS, Case


def _samples(rows: list[tuple[int, int, int, int, int]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["launch", "case", "iteration", "rank", "nanoseconds"])


def _cases(*facts: dict[str, Any]) -> pd.DataFrame:
    base = {"collective": "all_reduce", "nbytes": 4096, "ranks": 2, "wrong": 0, "iterations": 0}
    return pd.DataFrame([{"case": k, **base, **f} for k, f in enumerate(facts)])


def test_the_slowest_rank_of_each_call_counts_not_the_slowest_ranks_median() -> None:
    # Rank 0 is slow in calls 0 and 1, rank 1 in calls 2 and 3: each has a median of 2000 or less, no call took less
    # than 3000.
    times = [(3000, 1000), (4000, 1000), (1000, 5000), (1000, 6000)]
    rows = [(0, 0, i, r, t) for i, pair in enumerate(times) for r, t in enumerate(pair)]
    summary = measure.summarise(_samples(rows), _cases({})).iloc[0]
    assert summary["latency_us"] == 4.5
    assert summary["min_us"] == 3.0
    assert summary["p90_us"] == summary["p99_us"] == 6.0
    assert summary["iterations"] == 4
    assert math.isnan(summary["low_us"])  # four values enclose their median with 87.5 % at most


def test_quantiles_are_values_that_were_seen() -> None:
    values = np.arange(1.0, 101.0)
    assert measure.quantile(values, 0.9) == 90
    assert measure.quantile(values, 0.99) == 99
    assert measure.quantile(np.array([7.0]), 0.99) == 7


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # 1 MiB in 100 us: 10.48576 GB/s; all-reduce on 8 ranks moves 2 x 7 / 8 of it over each link.
    assert measure.algbw_gbps("all_reduce", 1 << 20, 8, 100.0) == pytest.approx(10.48576)
    assert measure.bus_factor("all_reduce", 8) == 1.75
    assert measure.bus_factor("all_reduce", 2) == 1.0
    assert measure.bus_factor("all_gather", 4) == 0.75
    assert measure.bus_factor("reduce_scatter", 4) == 0.75
    assert measure.bus_factor("all_reduce", 1) == 0.0
    # all-gather: nbytes of each rank, n times
    assert measure.algbw_gbps("all_gather", 1000, 4, 1.0) == pytest.approx(4.0)
    rows = [(0, 0, i, r, 2000) for i in range(6) for r in range(4)]
    summary = measure.summarise(_samples(rows), _cases({"ranks": 4})).iloc[0]
    assert summary["algbw_gbps"] == pytest.approx(2.048)
    assert summary["busbw_gbps"] == pytest.approx(3.072)


@pytest.mark.parametrize(
    ("n", "l"),
    # 2 P(B < l) <= 5 % for B binomial(n, 1/2), from tables of the sign test
    [(6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (15, 4), (20, 6), (25, 8), (50, 18), (100, 40)],
)
def test_the_interval_of_the_median_is_the_one_of_the_sign_test(n: int, l: int) -> None:  # noqa: E741
    values = np.random.default_rng(n).permutation(np.arange(1.0, n + 1))
    assert measure.median_interval(values) == (l, n + 1 - l)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_values_have_no_interval(n: int) -> None:
    assert all(math.isnan(end) for end in measure.median_interval(np.arange(float(n))))


@given(st.lists(st.floats(0.1, 1e6), min_size=6, max_size=80))
def test_the_interval_encloses_the_median(values: list[float]) -> None:
    low, high = measure.median_interval(np.array(values))
    assert min(values) <= low <= np.median(values) <= high <= max(values)


def test_two_launches_that_differ_give_the_interval_between_them() -> None:
    # Draws: both the first (1/4), one of each (1/2), both the second (1/4); 2.5 % and 97.5 % are the outer two.
    groups = [np.full(9, 10.0), np.full(9, 20.0)]
    assert measure.launch_interval(groups) == (10.0, 20.0)
    # Fifty calls each do not make it narrower: the launch is the replicate.
    assert measure.launch_interval([np.full(50, 10.0), np.full(50, 20.0)]) == (10.0, 20.0)


def test_five_launches_by_enumeration() -> None:
    # One value a launch: the draw's median is the third of five. P(median = 1) = P(at least 3 of 5 draws are the
    # first) = 10 x .2^3 x .8^2 + 5 x .2^4 x .8 + .2^5 = 5.8 % > 2.5 %, so the interval is everything.
    groups = [np.array([float(k)]) for k in range(1, 6)]
    assert measure.launch_interval(groups) == (1.0, 5.0)
    # At 80 % it is what is left when 10 % are cut on either side: P(median <= 2) = 31.7 %.
    assert measure.launch_interval(groups, 0.80) == (2.0, 4.0)


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=2, max_size=4))
@settings(max_examples=60)
def test_enumerated_launches_are_all_ordered_draws(groups: list[list[int]]) -> None:
    arrays = [np.array(g, float) for g in groups]
    k = len(arrays)
    draws = sorted(
        float(np.median(np.concatenate([arrays[j] for j in d]))) for d in itertools.product(range(k), repeat=k)
    )
    low, high = measure.launch_interval(arrays)
    assert low == draws[math.ceil(0.025 * len(draws) - 1e-9) - 1]
    assert high == draws[math.ceil(0.975 * len(draws) - 1e-9) - 1]


def test_many_launches_are_resampled_with_a_fixed_seed() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.normal(100 + 5 * rng.standard_normal(), 1, 20) for _ in range(12)]
    low, high = measure.launch_interval(groups)
    assert (low, high) == measure.launch_interval(groups)
    assert low < np.median(np.concatenate(groups)) < high
    alone = measure.median_interval(np.concatenate(groups))
    assert high - low > alone[1] - alone[0]  # calls of one launch are alike: pooling them would claim too much


def test_summaries_use_launches_where_there_are_several() -> None:
    rows = [(launch, 0, i, r, 1000 * (1 + launch)) for launch in range(2) for i in range(9) for r in range(2)]
    summary = measure.summarise(_samples(rows), _cases({})).iloc[0]
    assert (summary["launches"], summary["iterations"]) == (2, 18)
    assert (summary["low_us"], summary["latency_us"], summary["high_us"]) == (1.0, 1.5, 2.0)


def test_a_case_with_wrong_elements_has_no_latency() -> None:
    rows = [(0, c, i, r, 1000) for c in range(2) for i in range(6) for r in range(2)]
    summary = measure.summarise(_samples(rows), _cases({"wrong": 3}, {}))
    assert summary["case"].tolist() == [1]


def test_nothing_measured_is_an_empty_summary_with_all_columns() -> None:
    summary = measure.summarise(_samples([]), _cases({}))
    assert summary.empty
    assert {"latency_us", "busbw_gbps", "p99_us"} <= set(summary.columns)


# ---- budgets ---------------------------------------------------------------------------------------------------------

_costs = st.dictionaries(
    st.integers(0, 1000), st.tuples(st.floats(1e-6, 2.0), st.integers(1, 4)), min_size=1, max_size=30
)


@given(_costs, st.floats(-1, 200))
def test_a_plan_keeps_to_its_time(costs: dict[int, tuple[float, int]], available_s: float) -> None:
    plan = measure.plan_iterations(costs, available_s)
    assert set(plan) == set(costs)
    assert all(k == 0 or LEAST <= k <= MOST for k in plan.values())
    spent = sum(measure.point_seconds(costs[p][0], k, costs[p][1], 2e-3) for p, k in plan.items() if k)
    assert spent <= max(available_s, 0) + 1e-6
    # What is dropped costs at least as much as what is kept.
    least = {p: measure.point_seconds(c, LEAST, m, 2e-3) for p, (c, m) in costs.items()}
    kept = [least[p] for p, k in plan.items() if k]
    dropped = [least[p] for p, k in plan.items() if not k]
    assert not kept or not dropped or max(kept) <= min(dropped)


def test_calls_are_reduced_before_cases_are_dropped() -> None:
    costs = {"small": (1e-3, 1), "large": (1e-1, 1)}
    assert measure.plan_iterations(costs, 1000.0) == {"small": MOST, "large": MOST}
    tight = measure.plan_iterations(costs, 3.0)
    assert tight["small"] == MOST
    assert LEAST <= tight["large"] < 30
    assert measure.plan_iterations(costs, 1.0) == {"small": MOST, "large": 0}


def test_fewer_calls_than_the_least_can_be_asked_for() -> None:
    assert measure.plan_iterations({"a": (1e-3, 2)}, 100.0, most=3) == {"a": 3}


@given(st.integers(0, 1000))
def test_visits_add_up_and_are_even(iterations: int) -> None:
    calls = measure.visits(iterations)
    assert len(calls) == ROUNDS
    assert sum(calls) == iterations
    assert max(calls) - min(calls) <= 1


def test_a_case_knows_its_counted_facts() -> None:
    columns = Case("all_reduce", "one_shot.ll", "bfloat16", 4096, 4).columns()
    assert (columns["count"], columns["encoding"], columns["rounds"], columns["baseline"]) == (2048, "ll", 1, False)
    assert columns["wire_bytes"] == 3 * 2 * 4096  # to three peers, half of each unit evidence
    assert Case("all_reduce", measure.COPY, "float32", 64, 1).columns()["wire_bytes"] == 0


def test_age_is_that_of_the_process() -> None:
    assert 0 < measure.age_s() < 3600
