"""Statistics against values worked out by hand, and budgets."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from fcomm import checks, measure
from fcomm.errors import ArgumentError, DeviceError, FcommError, HangError
from fcomm.measure import ROUNDS, Case
from fcomm.protocols import GpuShare, Protocol, protocols


def _samples(rows: list[tuple[int, int, int, int, int]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["launch", "case", "iteration", "rank", "nanoseconds"])


def _cases(*facts: dict[str, Any]) -> pd.DataFrame:
    base = {
        "collective": "all_reduce", "protocol": "one_shot.ll", "dtype": "float32", "mode": "graph", "nbytes": 4096, "ranks": 2,
        "dependent_launch": "none", "blocks": 4, "threads": 256, "wrong": 0, "iterations": 0, "status": "measured",
    }  # fmt: skip
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


def test_a_case_that_failed_while_it_was_timed_has_no_latency() -> None:
    rows = [(0, c, i, r, 1000) for c in range(2) for i in range(6) for r in range(2)]
    summary = measure.summarise(_samples(rows), _cases({"status": "failed"}, {}))
    assert summary["case"].tolist() == [1]


def test_each_case_has_the_floor_of_its_own_grid_and_launch_feature() -> None:
    kinds: list[tuple[dict[str, Any], int]] = [
        ({"protocol": "floor"}, 500),
        ({"protocol": "floor", "blocks": 8}, 700),
        ({"protocol": "floor", "dependent_launch": "late"}, 250),
        ({}, 2000),
        ({"blocks": 8}, 2100),
        ({"dependent_launch": "late"}, 1000),
        ({"threads": 512}, 3000),
    ]
    rows = [(0, c, i, r, ns) for c, (_, ns) in enumerate(kinds) for i in range(6) for r in range(2)]
    summary = measure.summarise(_samples(rows), _cases(*(facts for facts, _ in kinds))).set_index("case")
    assert summary["floor_us"].tolist()[3:6] == [0.5, 0.7, 0.25]
    assert summary["floor_multiple"].tolist()[3:6] == pytest.approx([4.0, 3.0, 4.0])
    assert math.isnan(summary["floor_us"][6])


def test_nothing_measured_is_an_empty_summary_with_all_columns() -> None:
    summary = measure.summarise(_samples([]), _cases({}))
    assert summary.empty
    assert {"latency_us", "busbw_gbps", "p99_us"} <= set(summary.columns)


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
    assert Case("all_reduce", measure.FLOOR, "float32", 64, 2).columns()["rounds"] == 0
    assert Case("all_reduce", "two_shot.ll+ll128", "float32", 4096, 2).columns()["encoding"] == "ll+ll128"
    assert Case("all_reduce", "two_shot.ll", "float32", 4096, 2).columns()["encoding"] == "ll"


def test_a_name_for_several_has_the_facts_of_the_one_that_runs() -> None:
    # At n = 8 on Hopper the original pushes up to 128 KiB (one hop), and pulls in two shots beyond (four).
    small = Case("all_reduce", "custom_ar_v2", "bfloat16", 128 << 10, 8).columns()
    large = Case("all_reduce", "custom_ar_v2", "bfloat16", 256 << 10, 8).columns()
    assert (small["form"], small["algorithm"], small["rounds"]) == ("custom_ar_v2.push", "custom_ar_v2.push", 1)
    assert (large["form"], large["rounds"]) == ("custom_ar_v2.pull_two_shot", 4)
    assert small["wire_bytes"] == 7 * (128 << 10)
    blackwell = GpuShare("10.0", 148, 148)
    assert (
        Case("all_reduce", "custom_ar_v2", "bfloat16", 256 << 10, 8).columns(blackwell)["form"] == "custom_ar_v2.push"
    )


def test_what_a_size_rules_out_is_refused_with_the_numbers() -> None:
    every = frozenset({"atomic4", "atomic8", "atomic16", "acquire_release", "line128"})
    assert (
        Case("all_reduce", "custom_ar_v2", "bfloat16", 1022, 4).refusal(every)
        == "it takes multiples of 16 bytes, not 1022"
    )
    assert Case("all_reduce", "one_shot.ll", "bfloat16", 1022, 4).refusal(every) is None
    odd = Case("reduce_scatter", "reduce_scatter.ll", "float32", 4096, 3)
    assert odd.refusal(every) == "1024 elements are no equal parts for 3 ranks"
    assert Case("reduce_scatter", "reduce_scatter.ll", "float32", 4096, 4).refusal(every) is None
    whole = Case("all_reduce", "one_shot.ll", "int32", 4096, 4, measure.SANDWICH)
    assert whole.refusal(every) == "the kernel behind the collective normalises floating-point numbers, not int32"


@given(
    st.sampled_from(["none", "late"]),
    st.sampled_from(["array", "staging"]),
    st.none() | st.tuples(st.just(3), st.just(96)),
    st.none() | st.sampled_from([0.0, 2.5]),
    st.none() | st.integers(0, 1),
)
def test_a_case_comes_back_from_its_columns(
    launch: str, where: str, shape: tuple[int, int] | None, delay_us: float | None, late: int | None
) -> None:
    case = Case("all_reduce", "barrier.one_shot", "float32", 4096, 2, "graph", shape, launch, where, delay_us, late)
    assert Case.from_columns(case.columns()) == case


# ---- what is right ---------------------------------------------------------------------------------------------------


def _protocol(name: str) -> Protocol:
    return protocols()[name]


def test_expected_results_follow_the_zero_that_a_baseline_cannot_send() -> None:
    zeros = [np.array([0.0, -0.0, 0.0, 1.0], np.float32), np.array([0.0, -0.0, -0.0, -1.0], np.float32)]
    signs = {
        "one_shot.ll": [False, True, False, False],
        "custom_ar_v2.push": [True, True, True, False],  # 1 - 1 is +0.0 by arithmetic, whatever was sent
        "custom_ar_v2.pull_two_shot": [False, True, False, False],
        "lamport_fp": [False, False, False, False],
    }
    for name, want in signs.items():
        got = checks.expected(_protocol(name), zeros, 0)
        assert np.signbit(got).tolist() == want, name
        assert (got == 0).all()
    gathered = checks.expected(_protocol("sentinel.all_gather"), zeros, 1)
    assert np.signbit(gathered).tolist() == [True, True, True, False, True, True, True, True]
    assert zeros[0].tobytes() == np.array([0.0, -0.0, 0.0, 1.0], np.float32).tobytes()  # the inputs are as they were


def test_expected_results_of_each_collective() -> None:
    xs = [np.arange(4, dtype=np.float32) + 10 * r for r in range(2)]
    assert checks.expected(_protocol("one_shot.ll"), xs, 1).tolist() == [10, 12, 14, 16]
    assert checks.expected(_protocol("reduce_scatter.ll"), xs, 0).tolist() == [10, 12]
    assert checks.expected(_protocol("reduce_scatter.ll"), xs, 1).tolist() == [14, 16]
    assert checks.expected(_protocol("all_gather.ll"), xs, 1).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


class OneRank:
    """A world of one rank, as far as candidates in turns look."""

    def allgather(self, x: Any) -> list[Any]:
        return [x]


class Resettable:
    """A communicator, as far as recovering looks."""

    def __init__(self) -> None:
        self.resets = 0
        self.backend = SimpleNamespace(name="cpu")

    def reset(self) -> None:
        self.resets += 1


def test_a_candidate_that_fails_is_named_and_the_others_go_on() -> None:
    comm: Any = Resettable()
    mpi: Any = OneRank()
    cases = [Case("all_reduce", name, "float32", 64, 2) for name in ("a", "b", "c")]
    bound = [measure.Bound(comm, case, None, None, lambda: None) for case in cases]
    seen: list[tuple[int, str]] = []

    def step(turn: int, b: measure.Bound) -> None:
        if b.case.protocol == "b" and turn == 1:
            raise HangError("rank 0 gave up waiting")
        seen.append((turn, b.case.protocol))

    failed = measure.in_turns(mpi, bound, 3, step)
    assert failed == {cases[1]: "rank 0 gave up waiting"}
    assert comm.resets == 1
    assert [t for t in seen if t[1] == "c"] == [(0, "c"), (1, "c"), (2, "c")]
    assert (2, "a") in seen
    assert (1, "b") not in seen


def test_a_gpu_that_failed_ends_all_candidates() -> None:
    mpi: Any = OneRank()
    bound = [measure.Bound(None, Case("all_reduce", "a", "float32", 64, 2), None, None, lambda: None)]  # type: ignore[arg-type]

    def step(turn: int, b: measure.Bound) -> None:
        raise DeviceError("a kernel failed")

    with pytest.raises(DeviceError, match="a: a kernel failed"):
        measure.in_turns(mpi, bound, 1, step)


def test_the_rank_that_failed_is_heard_before_those_that_waited_for_it() -> None:
    class Three(OneRank):
        def allgather(self, x: Any) -> list[Any]:
            return [HangError("rank 0 gave up waiting"), x, None]

    def step() -> None:
        raise FcommError("no memory")

    mpi: Any = Three()
    with pytest.raises(FcommError, match=r"no memory \(rank 1\)"):
        measure.together(mpi, step)


def test_a_rank_whose_call_fails_while_it_is_timed_still_meets_the_others() -> None:
    class Meeting(OneRank):
        met = 0

        def Barrier(self) -> None:
            self.met += 1

    mpi = Meeting()
    comm: Any = SimpleNamespace(mpi=mpi, backend=SimpleNamespace(synchronize=lambda: None))
    calls = iter([None, None, HangError("rank 1 gave up waiting for rank 0")])

    def launch() -> None:
        error = next(calls)
        if error is not None:
            raise error

    with pytest.raises(HangError, match="rank 1 gave up waiting for rank 0"):
        measure.MODES["host"].sample(comm, launch, 5)
    assert mpi.met == 5
    assert (measure.MODES["host"].sample(comm, lambda: None, 3) > 0).all()


def test_each_rank_is_late_in_turn_and_the_turns_go_on_from_visit_to_visit() -> None:
    case = Case("all_reduce", "one_shot.ll", "float32", 64, 3, "skew", delay_us=2.5)
    every = [measure.Delays(case, rank) for rank in range(3)]
    assert [d.visit(4) for d in every] == [[2500, 0, 0, 2500], [0, 2500, 0, 0], [0, 0, 2500, 0]]
    assert [d.visit(2) for d in every] == [[0, 0], [2500, 0], [0, 2500]]
    always = [measure.Delays(replace(case, late_rank=1), rank) for rank in range(3)]
    assert [d.visit(2) for d in always] == [[0, 0], [2500, 2500], [0, 0]]


def test_what_a_late_rank_adds_is_without_its_delay() -> None:
    """On the cpu backend: the rank that is late is held up by the clock before its call."""

    class Meeting(OneRank):
        def Barrier(self) -> None: ...

    comm: Any = SimpleNamespace(mpi=Meeting(), rank=0, backend=SimpleNamespace(synchronize=lambda: None))
    taken: list[int] = []
    case = Case("all_reduce", measure.COPY, "float32", 64, 2, "skew", delay_us=3000.0)
    launch = measure.Skewed(lambda: taken.append(time.perf_counter_ns()), measure.Delays(case, 0))
    ns = measure.MODES["skew"].sample(comm, launch, 4)
    # Late in calls 0 and 2: what is left is the call's own time. In the others this rank would have waited for the late one,
    # if there were one: it has ended before.
    assert (ns[1::2] == 1).all()
    assert (ns[::2] < 3_000_000).all()
    gaps = np.diff(taken)
    assert gaps[1] >= 3_000_000  # from call 1 to call 2


def test_cases_with_different_delays_are_no_rivals() -> None:
    """A short delay is not a faster candidate for the job of a long one."""
    cases = [Case("all_reduce", "one_shot.ll", "float32", 64, 2, "skew", delay_us=us) for us in (0.0, 10.0)]
    rng = np.random.default_rng(0)
    narrow, wide = rng.normal(5, 0.2, 30), rng.normal(5, 0.8, 30)
    assert measure.in_doubt({cases[0]: narrow, cases[1]: wide}) == [cases[1], cases[0]]
    rival = replace(cases[0], protocol="one_shot.ll16")  # as fast at the same delay: these two come first
    assert measure.in_doubt({cases[0]: narrow, cases[1]: wide, rival: narrow})[2] == cases[1]


def test_modes_of_a_backend_and_their_default() -> None:
    assert list(measure.modes("cpu")) == ["host", "prepared", "skew"]
    assert next(iter(measure.modes("cuda"))) == "graph"
    assert "floor" not in measure.modes("cuda")  # beside each graph, and no mode to ask for


def test_age_is_that_of_the_process() -> None:
    assert 0 < measure.age_s() < 3600


def test_what_cannot_be_made_ready_keeps_its_kind_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a sweep can tell what is not admitted from what failed."""

    def bind(_comm: Any, case: Case, _x: Any, _out: Any) -> Any:
        if case.nbytes > 64:
            raise ArgumentError("a grid of 66 blocks has no room here")
        return lambda: None

    monkeypatch.setattr(measure, "MODES", {"host": replace(measure.MODES["host"], bind=bind)})
    good = Case("all_reduce", measure.COPY, "float32", 64, 1, "host")
    bad = replace(good, nbytes=128)
    comm: Any = SimpleNamespace()
    bound, errors = measure.bind_all(MPI.COMM_SELF, [(comm, good, None, None), (comm, bad, None, None)])
    assert [b.case for b in bound] == [good]
    assert isinstance(errors[bad], ArgumentError)
