"""Predictions for GPUs with links: what is counted, calibration, the gate on the published table, and the refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

from experiments import claims, gate, link_model, predict, systems, validate
from experiments.link_model import Counts, Instructions, Link
from fcomm import bootstrap
from fcomm.errors import ArgumentError, ModelError, RecordError
from fcomm.protocols import protocols

PRICES = Instructions.load()
KIB = 1 << 10


@pytest.fixture(scope="module")
def outcome() -> validate.Outcome:
    return validate.run(PRICES)


@pytest.fixture(scope="module")
def perfect(outcome: validate.Outcome) -> validate.Outcome:
    """What the gate would be like if every prediction were right."""
    f = outcome.held_out
    return dataclasses.replace(outcome, held_out=f.assign(predicted_us=f["published_us"]))


@pytest.fixture
def passed(perfect: validate.Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that is passed, at the second attempt."""
    known = [{"attempt": 1, "passed": False}, {"attempt": 2, "passed": True}]
    monkeypatch.setattr(validate, "run", lambda: perfect)
    monkeypatch.setattr(validate, "attempts", lambda: known)
    monkeypatch.setattr(validate, "judged", lambda _: known[-1])


# ---- what is counted -------------------------------------------------------------------------------------------------


def counts(system: str, nbytes: int, n: int, gpu: str) -> Counts:
    found = systems.SYSTEMS[system].counts(nbytes, n, gpu, PRICES)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("system", "gpu", "n", "nbytes", "form"),
    [
        ("v1", "h100_sxm", 2, 1 << 20, systems.ONE_SHOT),
        ("v1", "b300_sxm", 4, 256 * KIB, systems.ONE_SHOT),
        ("v1", "b300_sxm", 4, 512 * KIB, systems.TWO_SHOT),  # below the limit, not up to it
        ("v1", "h200_sxm", 8, 128 * KIB, systems.ONE_SHOT),
        ("v1", "h200_sxm", 8, 256 * KIB, systems.TWO_SHOT),
        ("v2", "h200_sxm", 4, 256 * KIB, systems.PUSH),
        ("v2", "h200_sxm", 4, 512 * KIB, systems.PULL_TWO_SHOT),
        ("v2", "h200_sxm", 8, 128 * KIB, systems.PUSH),
        ("v2", "h200_sxm", 8, 256 * KIB, systems.PULL_TWO_SHOT),
        ("v2", "h200_sxm", 8, 512 * KIB, systems.MULTICAST),
        ("v2", "b200_sxm", 8, 512 * KIB, systems.PUSH),
        ("v2", "b300_sxm", 8, 1 << 20, systems.PULL_TWO_SHOT),
        ("vllm", "h100_sxm", 8, 128 * KIB, systems.ONE_SHOT),
        ("vllm", "h100_sxm", 8, 256 * KIB, systems.MULTICAST_WITH_COPIES),
        ("vllm", "b200_sxm", 8, 512 * KIB, systems.TWO_SHOT),
        ("vllm", "b200_sxm", 8, 1 << 20, systems.MULTICAST_WITH_COPIES),
        ("vllm", "b300_sxm", 8, 1 << 20, systems.TWO_SHOT),
        ("trtllm", "h200_sxm", 8, 512 * KIB, systems.LAMPORT),
        ("trtllm", "h200_sxm", 8, 1 << 20, None),
        ("trtllm", "b200_sxm", 8, 1 << 20, systems.LAMPORT),
    ],
)
def test_what_a_system_runs_at_a_size(system: str, gpu: str, n: int, nbytes: int, form: systems.Form | None) -> None:
    assert systems.SYSTEMS[system].form(nbytes, n, gpu) is form


def test_counts_of_the_published_systems() -> None:
    push, pull, lines = (counts(s, 512 * KIB, 2, "h200_sxm") for s in ("v2", "vllm", "trtllm"))
    assert (push.hops, pull.hops, lines.hops) == (1, 4, 1)
    assert push.wire_mib == pull.wire_mib == lines.wire_mib == 0.5
    # 36 blocks of 512 threads read 288 KiB at a time: 512 KiB take one more round trip, 1 MiB three.
    assert (push.round_trips, pull.round_trips) == (0, 1)
    assert counts("vllm", 1 << 20, 2, "h200_sxm").round_trips == 3
    assert counts("vllm", 288 * KIB, 2, "h200_sxm").round_trips == 0
    two = counts("v1", 512 * KIB, 8, "h200_sxm")
    assert (two.hops, two.wire_mib, two.round_trips) == (6, 2 * 7 / 8 * 0.5, 0)
    cast = counts("vllm", 512 * KIB, 8, "h200_sxm")
    assert (cast.launches, cast.hops, cast.wire_mib) == (3, 6, 0.5 * (1 + 1 / 8))
    # Input and output once, and twice that for the copy in and the copy out.
    assert cast.local_us == pytest.approx(3 * PRICES.shared["local_us_per_mib"])


def test_the_longest_of_link_instructions_and_round_trips_counts() -> None:
    link = Link(launch_us=1.0, hop_us=0.5, link_us_per_mib=2.0)
    base = Counts(1, 0.25, 3, 0.5, wire_mib=1.0, work_us=0.5, round_trips=0, local_us=0.125)
    assert base.terms(link) == {"launch": 1.25, "hops": 1.5, "instructions": 0.5, "stream": 2.0, "local": 0.125}
    assert dataclasses.replace(base, work_us=3.0).terms(link)["stream"] == 3.0
    assert dataclasses.replace(base, round_trips=4).terms(link)["stream"] == 4.0
    assert base.latency_us(link) == 5.375


def test_our_protocols_push_and_baselines_read() -> None:
    found = {}
    for name, p in protocols().items():
        if p.algorithm.forms is None and name in PRICES.own:
            (call,) = predict.count_call(p, 1 << 10, 8, "b300", "late", PRICES)
            found[name] = call
            assert call.hops == (p.algorithm.rounds if not p.baseline else systems.BASELINES[name].hops)
    assert found["one_shot.ll"].wire_mib == 7 * 2 / 1024
    assert found["barrier.one_shot"].hops == 4
    early = predict.count_call(protocols()["one_shot.ll"], 1 << 10, 8, "b300", "early", PRICES)[0]
    assert early.launch_offset_us == pytest.approx(PRICES.launch_us["early"] - PRICES.launch_us["late"])
    assert {name for name in found if protocols()[name].baseline} == set(systems.BASELINES)


def test_a_message_beyond_the_slots_is_several_launches() -> None:
    calls = predict.count_call(protocols()["one_shot.ll"], 1 << 20, 8, "b300", "late", PRICES)
    assert len(calls) > 1
    assert sum(c.wire_mib for c in calls) == pytest.approx(14.0)


def test_prices_are_frozen_from_a_shipped_model(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(PRICES.to_json())
    assert Instructions.load(path) == PRICES
    for bad in ("", "[]", '{"shared": {}}'):
        path.write_text(bad)
        with pytest.raises(RecordError, match="instruction prices"):
            Instructions.load(path)


# ---- calibration -----------------------------------------------------------------------------------------------------


def on_two_ranks(gpu: str = "h200_sxm") -> tuple[list[Counts], list[str]]:
    sizes = [KIB << k for k in range(11)]
    named = [(s, b) for s in ("v2", "vllm") for b in sizes]
    return [counts(s, b, 2, gpu) for s, b in named], [s for s, _ in named]


@pytest.mark.parametrize("truth", [Link(1.2, 0.55, 2.3), Link(2.6, 0.9, 1.2)])
def test_calibration_finds_the_prices_behind_made_up_latencies(truth: Link) -> None:
    of, names = on_two_ranks()
    us = [c.latency_us(truth) for c in of]
    link = link_model.calibrate(of, us)
    assert vars(link) == pytest.approx(vars(truth), rel=1e-3)
    us[0] *= 3  # one latency that is wrong does not move the prices
    assert vars(link_model.calibrate(of, us)) == pytest.approx(vars(truth), rel=0.05)
    spans = link_model.intervals(of, [c.latency_us(truth) for c in of], names, draws=5)
    assert all(
        low <= getattr(truth, k) * 1.001 and high >= getattr(truth, k) * 0.999 for k, (low, high) in spans.items()
    )


def test_two_latencies_do_not_give_three_prices() -> None:
    of, _ = on_two_ranks()
    with pytest.raises(RecordError, match="too few"):
        link_model.calibrate(of[:2], [1.0, 2.0])


# ---- the gate --------------------------------------------------------------------------------------------------------


def test_the_gate_says_the_same_every_time_and_what_was_recorded(outcome: validate.Outcome) -> None:
    again = validate.run(PRICES)
    pd.testing.assert_frame_equal(outcome.held_out, again.held_out)
    assert outcome.verdict == again.verdict
    last = validate.judged(outcome)
    assert last is not None
    assert last["passed"] == outcome.verdict.passed
    assert last["median_error"] == pytest.approx(outcome.verdict.median_error, abs=1e-3)
    for gpu, link in outcome.links.items():
        assert vars(link) == pytest.approx(last["links"][gpu], rel=1e-3)


def test_calibration_sees_two_ranks_of_two_systems_only(outcome: validate.Outcome, tmp_path: Path) -> None:
    assert set(outcome.calibration["ranks"]) == {2}
    assert set(outcome.calibration["system"]) == {"v2", "vllm"}
    assert len(outcome.calibration) == 4 * 22
    # Other latencies, however absurd, leave the predictions as they are.
    f = pd.read_csv(gate.PUBLISHED, dtype={"version": str})
    calibrating = (f["ranks"] == 2) & (f["system"] + f["version"]).isin(["sglang0.5.14", "vllm0.24.0"])
    f.loc[~calibrating, "latency_us"] *= 7
    f.to_csv(tmp_path / "absurd.csv", index=False)
    absurd = validate.run(PRICES, tmp_path / "absurd.csv")
    assert absurd.links == outcome.links
    assert absurd.held_out["predicted_us"].tolist() == outcome.held_out["predicted_us"].tolist()
    assert absurd.verdict.median_error > 0.8


def test_cells_that_go_to_nccl_are_left_out_and_named(outcome: validate.Outcome) -> None:
    assert len(outcome.held_out) + len(outcome.left_out) == 352
    assert set(zip(outcome.left_out["gpu"], outcome.left_out["ranks"], outcome.left_out["nbytes"], strict=True)) == {
        ("h100_sxm", 8, 1 << 20),
        ("h200_sxm", 8, 1 << 20),
    }
    assert "Not predicted" in validate.report(outcome)


def test_attempts_are_appended_and_never_replaced(
    outcome: validate.Outcome, perfect: validate.Outcome, tmp_path: Path
) -> None:
    assert validate.record(outcome, "first", "2026-01-01", tmp_path) == 1
    first = (tmp_path / "attempt-1.csv").read_bytes()
    with pytest.raises(ArgumentError, match="attempt 1 is of this very model"):
        validate.record(outcome, "again", "2026-01-02", tmp_path)
    assert validate.judged(perfect, tmp_path) is None
    assert validate.record(perfect, "all of it, to be right", "2026-01-02", tmp_path) == 2
    known = validate.attempts(tmp_path)
    assert [(a["attempt"], a["passed"], a["changed"]) for a in known] == [
        (1, False, "first"),
        (2, True, "all of it, to be right"),
    ]
    assert (tmp_path / "attempt-1.csv").read_bytes() == first
    last = validate.judged(perfect, tmp_path)
    assert last is not None
    assert last["attempt"] == 2
    assert validate.judged(outcome, tmp_path) is None  # the model of an earlier attempt is not the last one


def test_a_damaged_list_of_attempts_is_refused(outcome: validate.Outcome, tmp_path: Path) -> None:
    validate.record(outcome, "first", "2026-01-01", tmp_path)
    (tmp_path / "attempt-1.csv").unlink()
    with pytest.raises(RecordError, match="no cells of an attempt"):
        validate.judged(outcome, tmp_path)
    for bad in ("", "{}", '[{"attempt": 2}]', "[1]"):
        (tmp_path / validate.ATTEMPTS).write_text(bad)
        with pytest.raises(RecordError, match="restore it"):
            validate.attempts(tmp_path)


# ---- predictions, or none --------------------------------------------------------------------------------------------


def test_predict_refuses_where_the_gate_is_not_passed(
    outcome: validate.Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = dataclasses.replace(
        outcome, held_out=outcome.held_out.assign(predicted_us=outcome.held_out["published_us"].to_numpy()[::-1])
    )
    monkeypatch.setattr(validate, "run", lambda: missed)
    monkeypatch.setattr(validate, "judged", lambda _: {"attempt": 3})
    out = tmp_path / "out"
    code = bootstrap.run(predict.main, ["--gpu", "b300", "--gpus", "8", "--out", str(out)])
    said = capsys.readouterr()
    assert code == 1
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: no predictions: the gate is not passed: the median error is ")
    assert f"{missed.verdict.kendall_tau:.2f}" in said.err
    assert "attempt 3" in said.err
    assert "python -m experiments.counted" in said.err
    assert not out.exists()


def test_predict_refuses_a_model_that_no_attempt_judged(
    perfect: validate.Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "run", lambda: perfect)
    monkeypatch.setattr(validate, "judged", lambda _: None)
    with pytest.raises(ModelError, match=r"not the one that the last recorded attempt .* judged"):
        predict.require()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu", "b100", "--gpus", "8"], "no such GPU is described; there are h100, h200, b200, b300"),
        (["--gpu", "b300", "--gpus", "1"], "2 to 8 GPUs"),
        (["--gpu", "b300", "--gpus", "9"], "2 to 8 GPUs"),
        (["--gpu", "b300", "--gpus", "many"], "invalid int value"),
        (["--gpu", "b300"], "required: --gpus"),
        (["--gpu", "b300", "--gpus", "8", "--sizes", "4M"], "validated from 1 KiB to 1 MiB"),
        (["--gpu", "b300", "--gpus", "8", "--sizes", "512"], "validated from 1 KiB to 1 MiB"),
        (["--gpu", "b300", "--gpus", "8", "--sizes", "1030"], "multiples of 16 bytes"),
    ],
)
def test_bad_arguments_are_one_sentence(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap.run(predict.main, argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("passed")
def test_predictions_are_labelled_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert predict.main(["--gpu", "b300", "--gpus", "8", "--sizes", "64K", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("### PREDICTED, not measured: b300")
    assert "attempt 2: the cells that it is judged on had been seen" in printed
    names = {"predicted-latency.csv", "predicted-claims.csv", "predicted-claims.md", "predicted-latency.png"}
    assert {p.name for p in out.iterdir()} == names
    for name in ("predicted-latency.csv", "predicted-claims.csv"):
        assert set(pd.read_csv(out / name)["status"]) == {predict.PREDICTED}
    f = pd.read_csv(out / "predicted-latency.csv")
    priced = {n for n, p in protocols().items() if p.algorithm.forms or n in PRICES.own}
    assert set(f["protocol"]) == priced
    assert set(f["ranks"]) == {2, 4, 8}
    terms = [c for c in f.columns if c.endswith("_us") and c != "latency_us"]
    assert f["latency_us"].to_numpy() == pytest.approx(f[terms].sum(axis=1).to_numpy(), rel=1e-4)
    # As its authors set it, custom AR v2 pushes 64 KiB.
    at = f[(f["ranks"] == 8)].set_index("protocol")["latency_us"]
    assert at["custom_ar_v2"] == at["custom_ar_v2.push"]


@pytest.mark.usefixtures("passed")
def test_claims_have_a_section_of_predictions_only_if_the_gate_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(predict.section())
    assert text.startswith("### PREDICTED, not measured: b300")
    assert "| all-reduce" in text
    nothing = pd.DataFrame(columns=list(claims.COLUMNS))
    assert text in claims.markdown(nothing, [])
    monkeypatch.setattr(validate, "attempts", lambda: [{"attempt": 1, "passed": False}])
    assert predict.section() == []
    assert "PREDICTED" not in claims.markdown(nothing, [])
    monkeypatch.setattr(validate, "attempts", list)
    assert predict.section() == []


def test_the_committed_attempts_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "validation.md").read_text()
    for attempt in validate.attempts():
        row = f"{attempt['median_error']:.1%} | {attempt['kendall_tau']:.3f} | {attempt['signs_right']:.1%}"
        cells = [" ".join(line.split()) for line in page.splitlines()]
        assert any(row in line for line in cells), f"docs/validation.md lacks attempt {attempt['attempt']}"
        verdict = gate.judge(pd.read_csv(validate.cells_path(attempt["attempt"])), gate.protocol().thresholds)
        assert verdict.passed == attempt["passed"]
        assert verdict.kendall_tau == pytest.approx(attempt["kendall_tau"], abs=1e-3)
