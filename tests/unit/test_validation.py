"""The gate of predictions: its metrics on made-up cells."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import gate
from fcomm.errors import RecordError

LIMITS = gate.Thresholds(0.12, 0.9, 0.05, 0.9)


def cells(published: dict[str, float], predicted: dict[str, float], **where: Any) -> pd.DataFrame:
    place = {"gpu": "g", "ranks": 4, "nbytes": 1024, **where}
    rows = [{**place, "system": s, "published_us": published[s], "predicted_us": predicted[s]} for s in published]
    return pd.DataFrame(rows, columns=list(gate.CELLS))


PUBLISHED = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def test_errors_are_relative_to_what_was_published() -> None:
    found = gate.errors(cells({"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 5.0}))
    assert found.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("predicted", "tau"),
    [
        ({"a": 10, "b": 20, "c": 30, "d": 40}, 1.0),
        ({"a": 4, "b": 3, "c": 2, "d": 1}, -1.0),
        ({"a": 2, "b": 1, "c": 3, "d": 4}, 4 / 6),  # one pair of six the wrong way round
        ({"a": 1, "b": 2, "c": 3, "d": 3}, 5 / math.sqrt(5 * 6)),  # one tie: neither right nor wrong
        ({"a": 1, "b": 1, "c": 1, "d": 1}, 0.0),  # no order
    ],
)
def test_tau_of_four_systems(predicted: dict[str, float], tau: float) -> None:
    found = gate.orders(cells(PUBLISHED, predicted))
    assert found["tau"].tolist() == pytest.approx([tau])


def test_orders_are_looked_at_within_a_gpu_rank_count_and_size() -> None:
    upside_down = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}
    both = pd.concat([cells(PUBLISHED, PUBLISHED), cells(PUBLISHED, upside_down, nbytes=2048)])
    assert gate.orders(both)["tau"].tolist() == pytest.approx([1.0, -1.0])
    verdict = gate.judge(both, LIMITS)
    assert verdict.kendall_tau == pytest.approx(0.0)
    assert verdict.orders == 2


def test_only_differences_that_count_have_a_sign() -> None:
    found = gate.signs(cells({"a": 1.0, "b": 1.05, "c": 1.06}, {"a": 1.0, "b": 0.5, "c": 2.0}), 0.05)
    # a and b differ by 5 %, not by more; b and c by 1 %.
    assert found[["faster", "slower", "right"]].to_numpy().tolist() == [["a", "c", True]]


def test_a_predicted_tie_is_no_right_sign() -> None:
    found = gate.signs(cells({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 1.5}), 0.05)
    assert found["right"].tolist() == [False]


def test_all_three_thresholds_are_needed_and_a_value_on_one_passes() -> None:
    on_it = gate.Verdict(10, 0.12, 0.9, 5, 0.9, 20, LIMITS)
    assert on_it.passed
    assert "passed: median error 12.0%" in on_it.sentence
    for worse, said in (
        ({"median_error": 0.1201}, "median error is 12.0%"),
        ({"kendall_tau": 0.8999}, "Kendall's tau is 0.90"),
        ({"signs_right": 0.8999}, "90.0% of the differences"),
    ):
        missed = gate.Verdict(**{**vars(on_it), **worse})
        assert not missed.passed
        assert len(missed.misses) == 1
        assert said in missed.sentence


def test_nothing_compared_is_not_passed() -> None:
    verdict = gate.judge(cells({}, {}), LIMITS)
    assert not verdict.passed
    assert len(verdict.misses) == 3


def test_a_perfect_prediction_passes_and_a_scaled_one_fails_on_the_error_alone() -> None:
    assert gate.judge(cells(PUBLISHED, PUBLISHED), LIMITS).passed
    scaled = gate.judge(cells(PUBLISHED, {s: 1.2 * us for s, us in PUBLISHED.items()}), LIMITS)
    assert scaled.median_error == pytest.approx(0.2)
    assert scaled.kendall_tau == scaled.signs_right == 1.0
    assert len(scaled.misses) == 1


def test_the_committed_protocol_asks_for_what_was_promised() -> None:
    which = gate.protocol()
    assert which.thresholds == LIMITS
    assert which.calibration_ranks == (2,)
    assert set(which.calibration_systems) == {"v2", "vllm"}
    assert set(which.ranks_held_out) == {4, 8}
    assert set(which.systems_held_out) == {"v1", "v2", "vllm", "trtllm"}
    assert which.gpus == ("h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm")
    assert (which.least_bytes, which.most_bytes) == (1 << 10, 1 << 20)


def test_every_cell_of_the_protocol_was_published_once() -> None:
    which = gate.protocol()
    f = gate.published(which)
    f = f[f["ranks"].isin(which.ranks_held_out)]
    assert not f.duplicated([*gate.GROUP, "system"]).any()
    assert len(f) == 4 * 2 * 11 * 4


def test_a_protocol_or_table_that_is_none_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "x.json"
    for content in (None, "{", "[]", '{"gpus": []}'):
        if content is not None:
            bad.write_text(content)
        with pytest.raises(RecordError, match="not the protocol"):
            gate.protocol(bad)
    table = tmp_path / "x.csv"
    with pytest.raises(RecordError, match="not the table"):
        gate.published(gate.protocol(), table)
    table.write_text("gpu,system\nb,c\n")
    with pytest.raises(RecordError, match="not the table"):
        gate.published(gate.protocol(), table)
    head = gate.PUBLISHED.read_text().splitlines()[0]
    for value in ("0", "-1", "inf"):
        table.write_text(f"{head}\nh200_sxm,vllm,0.24.0,all_reduce,4,1024,graph,{value}\n")
        with pytest.raises(RecordError, match="not positive"):
            gate.published(gate.protocol(), table)
