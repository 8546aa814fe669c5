"""Frames of a run: sides, ratios with intervals, the mask, winners, regret."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import experiments
from experiments import frames
from fcomm.errors import ArgumentError, RecordError
from fcomm.measure import Case
from tests import synthetic
from tests.synthetic import make


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return experiments.load(make(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return experiments.load(make(tmp_path_factory.mktemp("replicated"), launches=3, calls=8))


def test_measured_has_our_algorithms_and_the_baselines_originals(run: Any) -> None:
    frame = frames.measured(run)
    assert set(frame["family"]) == {"one_shot", "two_shot", "barrier", "custom_ar_v2", "lamport_fp"}
    assert "floor" not in set(frame["protocol"])
    assert frames.launch_features(frame) == ["none", "late"]
    narrowed = frames.measured(run, "all_reduce", "late", "graph", "bfloat16", 4)
    assert {(r["ranks"], r["dependent_launch"]) for r in narrowed.to_dict("records")} == {(4, "late")}
    assert frames.measured(run, "all_gather").empty
    with pytest.raises(RecordError, match="no times of all-gather"):
        frames.first_kind(run, "all_gather")


def test_points_about_the_l2_are_masked(run: Any) -> None:
    rows = frames.measured(run, launch="none").to_dict("records")
    of_it = {(r["protocol"], r["ranks"], r["nbytes"]): r for r in rows}
    large = of_it["one_shot.ll", 4, 1 << 20]
    # Four ranks, each 2 x 3 MiB to its peers, at 1500 GB/s.
    assert large["l2_share"] == pytest.approx(4 * 2 * 3 * (1 << 20) / 1.5e6 / large["latency_us"])
    assert large["masked"]
    assert not of_it["one_shot.ll", 4, 1024]["masked"]


@pytest.mark.parametrize(
    ("side", "protocols"),
    [
        (frames.OURS, {"one_shot.ll", "one_shot.lamport16", "two_shot.ll", "two_shot.lamport16"}),
        (frames.V2_AS_SET, {"custom_ar_v2"}),
        (frames.V2_TUNED, {"custom_ar_v2"}),
        (frames.V2_BEST_FORM, {"custom_ar_v2", "custom_ar_v2.pull_one_shot"}),
        (frames.V2_FASTEST, {"custom_ar_v2", "custom_ar_v2.pull_one_shot"}),
        (frames.LAMPORT, {"lamport_fp"}),
        (frames.BARRIER, {"barrier.two_shot"}),
        (frames.algorithm("two_shot"), {"two_shot.ll", "two_shot.lamport16"}),
        (frames.encoding("ll"), {"one_shot.ll", "two_shot.ll"}),
        (frames.SENTINEL, set()),
    ],
    ids=lambda v: v.name if isinstance(v, frames.Side) else "",
)
def test_what_belongs_to_a_side(run: Any, side: frames.Side, protocols: set[str]) -> None:
    frame = frames.measured(run)
    of_it = side.of(frame)
    assert set(of_it["protocol"]) == protocols
    assert list(of_it.columns) == list(frame.columns)
    if side in (frames.V2_AS_SET, frames.V2_BEST_FORM):
        assert set(of_it["shape"]) == {""}
    if side is frames.V2_TUNED:
        assert set(of_it["shape"]) == {"8x512"}


def test_a_ratio_is_of_the_fastest_of_each_side_with_one_launch_feature(run: Any) -> None:
    found = frames.ratios(run, frames.OURS, frames.V2_FASTEST)
    assert len(found) == 2 * 2 * 3
    latency = frames.measured(run)
    for row in found.to_dict("records"):
        point = latency[
            (latency["ranks"] == row["ranks"])
            & (latency["nbytes"] == row["nbytes"])
            & (latency["dependent_launch"] == row["launch"])
        ]
        ours = point.loc[~point["baseline"], "latency_us"].min()
        theirs = point.loc[point["family"] == "custom_ar_v2", "latency_us"].min()
        assert row["ratio"] == pytest.approx(ours / theirs)
        assert row["change_percent"] == pytest.approx(100 * (ours / theirs - 1))
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["verdict"] == ("win" if row["high"] < 1 else "loss" if row["low"] > 1 else "even")
    tuned = found[(found["nbytes"] == 1024) & (found["launch"] == "none")]
    assert set(tuned["shape"]) == {"8x512"}  # the tuned form is the fastest of the three
    only = frames.ratios(run, frames.OURS, frames.V2_FASTEST, launch="late")
    assert only.equals(found[found["launch"] == "late"].reset_index(drop=True))


def test_any_trigger_against_late(run: Any) -> None:
    found = frames.ratios(run, frames.OURS, frames.V2_AS_SET, launch=frames.ANY, their_launch="late")
    assert set(found["launch"]) == {"any against late"}
    late = frames.measured(run, launch="late")
    ours = frames.OURS.of(late).groupby(["ranks", "nbytes"])["latency_us"].min()
    for row in found.to_dict("records"):
        assert row["ours_us"] == ours[row["ranks"], row["nbytes"]]  # late is the faster one here
    assert frames.ratios(run, frames.OURS, frames.V2_AS_SET, launch=frames.ANY, their_launch="early").empty


def test_the_interval_of_one_launch_is_of_order_statistics(tmp_path: Path) -> None:
    kinds = {("one_shot.ll", "array", None): (1.0, 0.0), ("custom_ar_v2", "array", None): (2.0, 0.0)}
    path = make(tmp_path, kinds, sizes=(1024,), ranks=(2,), features=("none",), calls=7, floors=False, spread=0.1)
    run = experiments.load(path)
    (row,) = frames.ratios(run, frames.OURS, frames.V2_FASTEST).to_dict("records")
    calls = run.samples.groupby(["case", "iteration"])["nanoseconds"].max().unstack("case")
    # 97.5 % of the median of 7 calls: from the smallest to the largest.
    assert row["low"] == pytest.approx(calls[0].min() / calls[1].max())
    assert row["high"] == pytest.approx(calls[0].max() / calls[1].min())
    few = experiments.load(make(tmp_path, kinds, sizes=(1024,), ranks=(2,), features=("none",), calls=6, floors=False))
    (row,) = frames.ratios(few, frames.OURS, frames.V2_FASTEST).to_dict("records")
    assert math.isnan(row["low"])
    assert row["verdict"] == "unknown"


def test_launches_are_resampled_together(tmp_path: Path) -> None:
    """What slows a whole launch slows both sides: the ratio's interval does not see it."""
    kinds = {("one_shot.ll", "array", None): (1.0, 0.0), ("custom_ar_v2", "array", None): (2.0, 0.0)}

    def us(case: Case, launch: int) -> float:
        return (1.0 if case.protocol == "one_shot.ll" else 2.0) * (1 + 0.5 * launch)

    path = make(
        tmp_path, kinds, us, sizes=(1024,), ranks=(2,), features=("none",), launches=4, floors=False, spread=0.0
    )
    run = experiments.load(path)
    (row,) = frames.ratios(run, frames.OURS, frames.V2_FASTEST).to_dict("records")
    assert row["launches"] == 4
    assert (row["low"], row["high"]) == pytest.approx((0.5, 0.5), abs=1e-3)
    own = run.latency.set_index("protocol").loc["one_shot.ll"]
    assert own["high_us"] > 1.5 * own["low_us"]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_ratio_and_its_reciprocal_have_reciprocal_intervals(replicated: Any, data: st.DataObject) -> None:
    sides = [frames.OURS, frames.V2_AS_SET, frames.V2_FASTEST, frames.LAMPORT, frames.BARRIER]
    a, b = data.draw(st.sampled_from(sides)), data.draw(st.sampled_from(sides))
    launch = data.draw(st.sampled_from(["none", "late"]))
    there, back = frames.ratios(replicated, a, b, launch=launch), frames.ratios(replicated, b, a, launch=launch)
    assert len(there) == len(back) == 6
    np.testing.assert_allclose(there["ratio"] * back["ratio"], 1)
    assert (there["low"] <= there["ratio"] * (1 + 1e-9)).all()
    assert (there["ratio"] <= there["high"] * (1 + 1e-9)).all()
    if a is b:
        assert (there["verdict"] == "even").all()
    mirrored = {"win": "loss", "loss": "win", "even": "even"}
    for one, other in zip(there.to_dict("records"), back.to_dict("records"), strict=True):
        if abs(math.log(one["ratio"])) > 0.05:  # far apart: no draw of launches can turn it round
            assert mirrored[one["verdict"]] == other["verdict"]


def test_a_summary_counts_what_is_not_masked(run: Any) -> None:
    found = frames.ratios(run, frames.OURS, frames.V2_FASTEST, launch="none")
    kept = found[~found["masked"].astype(bool)]
    assert 0 < len(kept) < len(found)
    s = frames.summarise(found)
    assert (s.points, s.masked) == (len(kept), len(found) - len(kept))
    assert s.wins + s.losses + s.even == s.points
    assert s.median_percent == pytest.approx(np.median(kept["change_percent"]))
    assert s.median_low_percent <= s.median_percent <= s.median_high_percent
    assert s.best is not None
    assert s.best["change_percent"] == kept["change_percent"].min()
    nothing = frames.summarise(found[:0])
    assert (nothing.points, nothing.best) == (0, None)
    assert math.isnan(nothing.median_percent)


def test_winners_and_their_ties(run: Any) -> None:
    best = frames.winners(frames.measured(run, "all_reduce", "none")).set_index(["ranks", "nbytes"])
    assert best.loc[(2, 1024), "protocol"] == "one_shot.ll"
    assert best.loc[(4, 1 << 20), "protocol"] == "two_shot.lamport16"
    assert best.loc[(4, 1 << 20), "ties"] == 0  # two_shot.ll is a quarter slower there


# ---- what may not be drawn -------------------------------------------------------------------------------------------


def test_time_sliced_runs_have_no_frames(tmp_path: Path) -> None:
    run = experiments.load(make(tmp_path, time_sliced=True, sizes=(1024,)))
    with pytest.raises(RecordError, match="taking turns"):
        frames.measured(run)


def test_launches_of_different_machines_are_refused(tmp_path: Path, run: Any) -> None:
    mixed = experiments.load(make(tmp_path, sizes=(1024,), launches=2))
    mixed.launches[1] = {**mixed.launches[1], "devices": [{"device": "NVIDIA B200", "uuid": "GPU-2"}]}
    with pytest.raises(RecordError, match=r"mixes machines.*H200 GPU-1.*B200 GPU-2"):
        frames.measured(mixed)
    mixed.launches[1] = {**mixed.launches[0], "source_hash": "b"}
    with pytest.raises(RecordError, match=r"not replicates.*kernel source"):
        frames.measured(mixed)
    frames.one_machine([run, experiments.load(make(tmp_path, sizes=(1024,)))])
    emulated = experiments.load(make(tmp_path, sizes=(1024,), features=("none",), provenance=synthetic.CPU))
    with pytest.raises(RecordError, match="no common figure"):
        frames.one_machine([run, emulated])


def test_captions_say_what_a_reader_must_know(tmp_path: Path, run: Any) -> None:
    said = frames.caption(run, frames.measured(run))
    for part in (
        "sharing one NVIDIA H200 through MPS",
        "12 calls of the slowest rank, 1 launch",
        "no link",
        "Hollow",
        "66 SMs",
    ):
        assert part in said, said
    unknown = experiments.load(make(tmp_path, sizes=(1024,), l2_gbps=None))
    assert "nothing is masked" in frames.caption(unknown, frames.measured(unknown))
    torn = experiments.load(make(tmp_path, sizes=(1024,), finish=False, planned=30))
    assert "Interrupted run" in frames.caption(torn, frames.measured(torn))
    emulated = experiments.load(
        make(tmp_path, sizes=(1024,), features=("none",), provenance=synthetic.CPU, floors=False)
    )
    assert "emulation" in frames.caption(emulated, frames.measured(emulated))


def test_published_curves_are_those_of_one_gpu() -> None:
    lines = frames.published("h200_sxm")
    assert {"published, h200_sxm: custom AR v2 (SGLang)", "published, h200_sxm: NCCL"} <= set(lines["label"])
    assert not lines.duplicated(["collective", "label", "ranks", "bytes"]).any()
    with pytest.raises(ArgumentError, match="b300_sxm"):
        frames.published("a laptop")
