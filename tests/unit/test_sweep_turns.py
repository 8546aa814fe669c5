"""How a sweep spends its budget: a few calls for all, then more where most is in doubt; by the clock and not by a guess."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import request as rq
from experiments import sweep
from fcomm import measure
from fcomm.measure import FLOOR, LEAST, ROUNDS, WARMUP, Case, Pace


def case(protocol: str, nbytes: int = 4096, ranks: int = 2, launch: str = "none") -> Case:
    return Case("all_reduce", protocol, "float32", nbytes, ranks, "graph", None, launch)


def around(us: float, width: float, calls: int = 10) -> Any:
    """Times whose median's interval is [us - width, us + width] for ten calls."""
    return us + width * np.linspace(-1, 1, calls) * (calls - 1) / (calls - 3)


# ---- doubt -----------------------------------------------------------------------------------------------------------


def test_what_a_choice_hangs_on_comes_first_and_then_the_widest() -> None:
    times = {
        case("a"): around(10, 0.3),  # the fastest, and b reaches into its interval
        case("b"): around(10.4, 0.4),
        case("c"): around(20, 5),  # wide, and decided
        case("d"): around(30, 1),
        case("a", 8192): around(10, 0.5),  # the fastest by far
        case("b", 8192): around(40, 1),
    }
    found = measure.in_doubt(times)
    assert found == [case("b"), case("a"), case("c"), case("a", 8192), case("d"), case("b", 8192)]


def test_candidates_of_another_launch_feature_are_no_rivals_nor_are_floors() -> None:
    times = {
        case("a"): around(10, 0.2),
        case("a", launch="late"): around(10, 0.3),
        case(FLOOR): around(10, 0.4),
        case("b", 8192): around(10, 0.15),
        case("c", 8192): around(10, 0.15),
    }
    assert [c.nbytes for c in measure.in_doubt(times)] == [8192, 8192, 4096, 4096, 4096]


def test_what_is_known_well_enough_is_not_in_doubt() -> None:
    times = {case("a"): around(10, 0.04), case("b"): around(10, 0.049), case("c"): np.array([5.0, 5.0])}
    assert measure.in_doubt(times) == [case("c")]  # two calls have no interval at all
    assert measure.in_doubt({}) == []


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.floats(1, 100), min_size=1, max_size=30), min_size=1))
def test_doubt_is_about_every_case_once_and_rivals_stand_in_front(by_name: dict[str, list[float]]) -> None:
    times = {case(name): np.array(us) for name, us in by_name.items()}
    found = measure.in_doubt(times)
    assert len(set(found)) == len(found)
    for c in set(times) - set(found):
        low, high = measure.median_interval(times[c])
        assert high - low <= measure.SURE * np.median(times[c])
    best = min(times, key=lambda c: float(np.median(times[c])))
    _, best_high = measure.median_interval(times[best])
    rival = [not measure.median_interval(times[c])[0] > best_high for c in found]
    if sum(not measure.median_interval(us)[0] > best_high for us in times.values()) > 1:
        assert rival == sorted(rival, reverse=True)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_the_clock_corrects_what_was_expected() -> None:
    pace = Pace(visit_s=1e-3)
    small, large, other = case("a"), case("a", 8192), case("a", ranks=4)
    guess = ROUNDS * 1e-3 + 0.1 * (10 + ROUNDS * WARMUP)
    assert pace.expected_s(small, [(0.1, 10)]) == pytest.approx(guess)
    pace.learn(small, [(0.1, 10)], guess / 4)
    for c in (small, large, other):  # nothing else is known of them
        assert pace.expected_s(c, [(0.1, 10)]) == pytest.approx(guess / 4)
    pace.learn(large, [(0.1, 10)], guess)
    assert pace.expected_s(small, [(0.1, 10)]) == pytest.approx(guess / 4)
    assert pace.expected_s(large, [(0.1, 10)]) == pytest.approx(guess)
    assert pace.expected_s(case("a", 64), [(0.1, 10)]) == pytest.approx(guess * 5 / 8)


@given(st.lists(st.tuples(st.integers(), st.floats(0.01, 10)), max_size=20), st.floats(-1, 30))
def test_what_fits_keeps_to_the_time_and_leaves_out_nothing_that_would(
    groups: list[tuple[int, float]], available_s: float
) -> None:
    groups = [(k, seconds) for k, (_, seconds) in enumerate(groups)]
    found = measure.fitting(groups, available_s)
    seconds = dict(groups)
    spent = sum(seconds[k] for k in found)
    assert found == sorted(found)
    assert spent <= max(available_s, 0) + 1e-9
    assert all(seconds[k] > available_s - spent - 1e-9 for k in seconds if k not in found)


class Clocked(sweep.Sweep):
    """A sweep's turns without ranks: the clock is advanced by what timing would take."""

    def __init__(self, budget_s: float, calls: int, surveyed: list[sweep.Surveyed], true_s: Any) -> None:
        self.request = rq.build_request(
            rq.parser().parse_args([f"--budget={budget_s:g}", f"--calls={calls}", "--ranks=2,4,8"]), 8
        ).resolved("cuda")
        self.places = {n: sweep.Place(setup_s=0.5) for n in (2, 4, 8)}
        self.facts = {"backend": "cuda"}
        self.pace = Pace(measure.VISIT_S["cuda"])
        self.times_us, self.void = {}, set()
        self.now_s, self.true_s, self.surveyed = 0.0, true_s, surveyed
        self.rng = np.random.default_rng(0)
        for number, s in enumerate(surveyed):
            s.number, s.planned = number, min(LEAST, calls)

    def elapsed_s(self) -> float:
        return self.now_s

    def run(self) -> int:
        turns = 0
        while calls := self._next_turn(self.surveyed):
            turns += 1
            assert turns < 100
            self.now_s += sum(p.setup_s for p in self.places.values())
            for of_it in sweep._points(s for s in self.surveyed if s.number in calls).values():
                wanted = [(s.cost_s, calls[s.number]) for s in of_it]
                if self._expected_s(calls, of_it) > self.left_s():
                    continue
                taken = sum(self.true_s(s, calls[s.number]) for s in of_it)
                self.now_s += taken
                self.pace.learn(of_it[0].case, wanted, taken)
                for s in of_it:
                    us = (10 + 5 * (s.number % 3)) * self.rng.normal(1, 0.05, calls[s.number])
                    self.times_us.setdefault(s.number, []).append(us)
        return turns


def _all_gather_of_the_h200() -> list[sweep.Surveyed]:
    """66 points of 19 cases: more than fits at four times their true cost, and about 24 s in truth."""
    return [
        sweep.Surveyed(Case("all_gather", f"p{k}", "bfloat16", 1024 << size, n, "graph", None, where), cost_s=4e-3)
        for where in ("none", "late")
        for n in (2, 4, 8)
        for size in range(11)
        for k in range(19)
    ]


def test_an_estimate_that_is_far_too_high_drops_nothing_and_leaves_no_time_unspent() -> None:
    """A sweep of 120 s took 36 s, left out the largest messages, and took ten calls of all others."""
    surveyed = _all_gather_of_the_h200()

    def true_s(s: sweep.Surveyed, calls: int) -> float:
        return 10e-3 + 0.6e-3 * (calls + ROUNDS)

    simulated = Clocked(120, 200, surveyed, true_s)
    first = simulated._first_turn(surveyed)
    assert 0 < len(first) < len(surveyed)  # as it was
    simulated.run()
    calls = [sum(map(len, simulated.times_us[s.number])) for s in surveyed]
    assert min(calls) >= LEAST
    assert np.median(calls) > LEAST
    assert simulated.now_s < 120 - rq.FINISH_S["cuda"]
    assert simulated.left_s() < 0.3 * 120


def test_more_calls_go_where_the_choice_hangs_on_them() -> None:
    surveyed = _all_gather_of_the_h200()
    simulated = Clocked(90, 200, surveyed, lambda s, calls: 10e-3 + 0.6e-3 * (calls + ROUNDS))
    simulated.run()
    # Cases with number % 3 == 0 are the fastest, all alike; the others are decided after ten calls.
    calls = np.array([sum(map(len, simulated.times_us[s.number])) for s in surveyed])
    rivals = np.array([s.number % 3 == 0 for s in surveyed])
    assert calls[rivals].mean() > 1.5 * calls[~rivals].mean()


def test_an_estimate_that_is_far_too_low_keeps_to_the_budget() -> None:
    surveyed = _all_gather_of_the_h200()
    simulated = Clocked(60, 200, surveyed, lambda s, calls: 0.05 + 10e-3 * (calls + ROUNDS))
    simulated.run()
    assert simulated.now_s < 60
    timed = {s.case.nbytes for s in surveyed if s.number in simulated.times_us}
    assert timed  # the small messages
    assert max(timed) < 1 << 20


def test_nothing_is_timed_more_often_than_asked() -> None:
    surveyed = _all_gather_of_the_h200()[:60]
    simulated = Clocked(3600, 37, surveyed, lambda s, calls: 1e-3 * calls)
    simulated.run()
    assert {sum(map(len, of_it)) for of_it in simulated.times_us.values()} <= set(range(LEAST, 38))
    assert max(sum(map(len, of_it)) for of_it in simulated.times_us.values()) == 37


def test_what_failed_is_not_timed_again() -> None:
    surveyed = _all_gather_of_the_h200()[:19]
    simulated = Clocked(600, 200, surveyed, lambda s, calls: 1e-3 * calls)
    simulated.void = {3, 4}
    simulated.run()
    assert set(simulated.times_us) == set(range(19)) - {3, 4}


def test_points_come_small_messages_first() -> None:
    surveyed = [sweep.Surveyed(case(name, nbytes, n)) for nbytes in (8192, 1024) for n in (4, 2) for name in "ab"]
    keys = [(of_it[0].case.nbytes, of_it[0].case.ranks, len(of_it)) for of_it in sweep._points(surveyed).values()]
    assert keys == [(1024, 2, 2), (1024, 4, 2), (8192, 2, 2), (8192, 4, 2)]
