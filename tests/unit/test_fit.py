"""The fit: it finds prices that made the data, judges itself on what it has not seen, and refuses what no fit may read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import experiments
from experiments import fit, fitting, judging
from fcomm.cost_model import Model, seed_model, work
from fcomm.errors import ArgumentError, RecordError
from fcomm.grids import default_shape
from fcomm.measure import Case
from fcomm.protocols import protocols
from fcomm.records import Recorder, load
from tests.unit.test_docs import listed_in_records

NAMES = ("one_shot.ll", "one_shot.lamport16", "two_shot.ll", "custom_ar_v2.push", "custom_ar_v2.pull_two_shot")
SIZES = tuple(1024 << k for k in range(0, 10, 2))
DEVICE = {"device": "NVIDIA H200", "compute_capability": "9.0", "sms_total": 132, "ranks_per_gpu": 8, "gpus": 1, "links": ["same"],
          "mps": True, "uuid": "GPU-1"}  # fmt: skip
FACTS = {
    "hostname": "here",
    "backend": "cuda",
    "world_size": 8,
    "devices": [DEVICE],
    "source_hash": "abc",
    "ranks_per_device": 8,
}
TRUTH = seed_model(
    {"backend": "cuda", "device": "NVIDIA H200", "shared_gpus": 1, "sms": 132, "compute_capability": "9.0"}
)
Change = Callable[[dict[str, Any]], dict[str, Any]]


def make_run(
    out: Path, launches: int = 1, calls: int = 8, noise: float = 0.004, change: Change = dict, shapes: bool = False,
    facts: dict[str, Any] = FACTS, sizes: tuple[int, ...] = SIZES, seed: int = 0,
) -> Path:  # fmt: skip
    """A run whose times are what the seed's prices say, but for noise."""
    rng = np.random.default_rng(seed)
    recorder = Recorder.create(out, "here", "cuda", {"seed": 0, "sizes": list(sizes)})
    plan: list[dict[str, Any]] = []
    for n in (2, 4, 8):
        for nbytes in sizes:
            for name in NAMES:
                default = default_shape(protocols()[name], nbytes, n, TRUTH.gpu(n))
                wide = [(default[0] * 2, default[1])] if shapes and name == "one_shot.ll" else []
                for shape in (None, *wide):
                    case = Case("all_reduce", name, "bfloat16", nbytes, n, mode="graph", shape=shape)
                    blocks, threads = shape or default
                    gpu = TRUTH.gpu(n)
                    assert gpu is not None
                    rest = {
                        "blocks": blocks, "threads": threads, "placement": "", "sms_per_rank": gpu.sms, "warmup": 1,
                        "checked_calls": 4, "wrong": 0, "status": "measured", "reason": "", "emulated": False,
                        "time_sliced": False,
                    }  # fmt: skip
                    plan.append(change({**case.columns(), **rest, "case": len(plan), "planned": calls}))
    for launch in range(launches):
        recorder.begin({**facts, "launch": launch})
        recorder.plan(plan)
        for row in plan:
            us = sum(
                TRUTH.predict(
                    protocols()[row["protocol"]], row["nbytes"], row["ranks"], shape=(row["blocks"], row["threads"]),
                    max_bytes=max(sizes),
                ).values()
            )  # fmt: skip
            if row["shape"]:
                us *= 0.8
            times = us * 1e3 * (1 + noise * rng.standard_normal((calls, row["ranks"])))
            recorder.append(row["case"], times.astype(np.int64))
    recorder.finish()
    recorder.close()
    return recorder.path


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("one"), launches=2)


@pytest.fixture(scope="module")
def table(run_path: Path) -> fitting.Table:
    return fitting.read([load(run_path)])


def test_prices_that_made_the_data_are_found_again(table: fitting.Table) -> None:
    model, fitted = fitting.fit(table)
    model.validate()
    measured = table.frame["latency_us"].to_numpy(float)
    assert np.median(np.abs(fitted.design.times(fitted.prices) / measured - 1)) < 0.01
    assert np.median(np.abs(fitting.predictions(table.frame, model, correct=False) / measured - 1)) < 0.01
    # Where the machine's prices can be told apart they are those of the truth.
    assert model.launch["none"]["launch_us"] + model.shared["hop_us"] == pytest.approx(
        TRUTH.launch["none"]["launch_us"] + TRUTH.shared["hop_us"], rel=0.35
    )
    assert all(v >= 0 for prices in model.own.values() for v in prices.values())


def test_the_slopes_are_those_of_the_times(table: fitting.Table) -> None:
    design = fitting.Design.of(table, fitting.blank_model(table))
    prices = np.random.default_rng(1).uniform(0.1, 0.5, len(design.names))
    prices[-2:] = 0.7, 2.5
    slopes = design.slopes(prices)
    for j in range(len(prices)):
        step = np.zeros_like(prices)
        step[j] = 1e-6
        numeric = (design.times(prices + step) - design.times(prices - step)) / 2e-6
        assert slopes[:, j] == pytest.approx(numeric, rel=1e-3, abs=1e-5), design.names[j]


def test_the_fit_and_the_model_agree_on_every_case(table: fitting.Table) -> None:
    model, fitted = fitting.fit(table)
    assert fitting.predictions(table.frame, model, correct=False) == pytest.approx(
        fitted.design.times(fitted.prices), rel=1e-4
    )


def test_sizes_left_out_are_predicted_and_chosen_well(table: fitting.Table) -> None:
    judged = judging.leave_out(table, "nbytes", None)
    assert len(judged.frame) == len(table)
    assert np.median(judged.errors()) < 0.05
    by_policy = judged.choices.groupby("policy")["regret"].mean()
    assert set(by_policy.index) == {judging.SELECTOR, judging.ALWAYS, judging.THRESHOLD, judging.LOOKUP, judging.TABLE}
    assert by_policy[judging.SELECTOR] <= by_policy[judging.ALWAYS] + 1e-3
    ours = {p.name for p in protocols().values() if not p.baseline}
    chosen = judged.choices[judged.choices["policy"] != judging.TABLE]
    assert set(chosen["chosen"]) | set(chosen["best"]) <= ours
    assert judging.leave_out(table, "ranks", None).errors().size == (~table.frame["baseline"]).sum()


def test_nothing_of_a_size_that_is_left_out_reaches_its_prediction(table: fitting.Table) -> None:
    spoilt = replace(table, frame=table.frame.copy())
    at = (spoilt.frame["nbytes"] == SIZES[2]).to_numpy()
    spoilt.frame.loc[at, "latency_us"] *= 7
    before, after = (judging.leave_out(t, "nbytes", None).frame for t in (table, spoilt))
    key = ["protocol", "ranks", "nbytes"]
    of_it = [f[f["nbytes"] == SIZES[2]].sort_values(key)["predicted_us"].to_numpy() for f in (before, after)]
    assert of_it[0] == pytest.approx(of_it[1])


def test_the_regret_of_a_perfect_choice_is_noise_and_of_a_bad_one_is_not(table: fitting.Table) -> None:
    f = table.frame[~table.frame["baseline"]]
    worst = f.loc[f.groupby("nbytes")["latency_us"].idxmax(), "protocol"].iloc[-1]
    judged = judging.leave_out(table, "nbytes", None)
    selector = judged.choices[judged.choices["policy"] == judging.SELECTOR]
    right = selector[selector["chosen"] == selector["best"]]["regret"]
    assert (right == 0).all()
    wrong = selector[selector["chosen"] != selector["best"]]["regret"]
    assert worst in set(f["protocol"])
    assert (wrong > -0.05).all()


def test_intervals_are_of_launches_and_hold_the_fit(table: fitting.Table) -> None:
    assert table.launches == 2
    _, fitted = fitting.fit(table)
    draws = judging.bootstrap(table, fitted, draws=4)
    assert draws.shape == (4, len(fitted.prices))
    assert (draws >= 0).all()
    spread = np.ptp(draws, axis=0)
    assert spread.max() > 0


def test_a_searched_shape_is_kept_where_it_is_better(tmp_path: Path) -> None:
    table = fitting.read([load(make_run(tmp_path, shapes=True))])
    model, _ = fitting.fit(table)
    p = protocols()["one_shot.ll"]
    blocks, threads = default_shape(p, 16384, 4, model.gpu(4))
    assert model.shape(p, 16384, 4) == (2 * blocks, threads)
    assert model.shape(protocols()["two_shot.ll"], 16384, 4) is None


def test_the_smoother_keeps_lines_nearly_and_is_drawn_to_zero() -> None:
    x = np.arange(6.0)
    assert fitting.smooth(x, np.ones(6), flatten=0.0) == pytest.approx(np.ones(6))
    assert 0.8 < fitting.smooth(x, np.ones(6)).mean() < 1.0
    spike = np.eye(6)[2]
    assert fitting.smooth(x, spike)[2] < 0.95


def test_two_runs_are_replicates(tmp_path: Path, run_path: Path) -> None:
    table = fitting.read([load(run_path), load(make_run(tmp_path, launches=1, seed=5))])
    assert table.launches == 3
    assert len(table) == len(SIZES) * 3 * len(NAMES)


# ---- refused ----------------------------------------------------------------------------------------------------------


def wrong_once(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "wrong": 3} if row["case"] == 7 else row


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"change": wrong_once}, r"3 wrong elements in case 7 \("),
        ({"calls": 3}, r"3 timed calls in case 0 \(one_shot\.ll, 1 KiB bfloat16 on 2 ranks\)"),
        ({"sizes": SIZES[:2]}, "2 message sizes"),
        ({"change": lambda row: {**row, "time_sliced": True}}, "time-sliced"),
        ({"change": lambda row: {**row, "status": "dropped"}}, "no graph times"),
    ],
)
def test_runs_that_no_fit_may_read_are_refused_with_the_case(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    run = load(make_run(tmp_path, **options))
    with pytest.raises(RecordError, match=why) as caught:
        fitting.read([run])
    assert "\n" not in str(caught.value)


def test_a_few_cases_with_too_few_calls_are_left_out_and_named(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load(run_path)
    whole = len(fitting.read([run]).frame)
    short = run.cases.loc[run.cases["protocol"] == "one_shot.ll", "case"].iloc[0]
    calls = run.samples["case"] == short
    run.samples = run.samples[
        ~calls | (run.samples["iteration"] < fitting.FEWEST_CALLS - 1) & (run.samples["launch"] == 0)
    ]
    assert len(fitting.read([run]).frame) == whole - 1
    assert f"# {run_path}: 1 of " in capsys.readouterr().err


def test_times_that_are_not_positive_are_refused_with_the_case(run_path: Path) -> None:
    for bad in (0, -5):
        run = load(run_path)
        run.samples.loc[11, "nanoseconds"] = bad
        with pytest.raises(RecordError, match=r"not positive in case \d+ \("):
            fitting.read([run])
    run = load(run_path)
    summary = run.latency[["case", *run.latency.columns[-12:]]].copy()
    summary.loc[4, "latency_us"] = np.nan
    run.summary = summary
    with pytest.raises(RecordError, match=r"not positive in case \d+ \("):
        fitting.read([run])


def test_incomplete_runs_and_strangers_are_refused(tmp_path: Path, run_path: Path) -> None:
    run = load(run_path)
    run.complete = False
    with pytest.raises(RecordError, match="not complete"):
        fitting.read([run])
    other = {**FACTS, "devices": [{**DEVICE, "device": "NVIDIA B200"}]}
    with pytest.raises(RecordError, match="another machine"):
        fitting.read([load(run_path), load(make_run(tmp_path / "a", facts=other))])
    with pytest.raises(RecordError, match="other kernels"):
        fitting.read([load(run_path), load(make_run(tmp_path / "b", facts={**FACTS, "source_hash": "x"}))])
    with pytest.raises(RecordError, match="no run"):
        fitting.read([])


# ---- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_model_report_and_figures(
    run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "out"
    assert fit.main([str(run_path), "--out", str(out), "--draws", "2", "--save"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "sizes left out",
        "rank counts left out",
        "always the best one",
        "custom AR v2's table",
        "`hop_us`",
        "2 launches",
    ):
        assert words in printed
    names = {p.name for p in out.iterdir()}
    assert {"model.json", "fit.md", "regret.png", "map-all_reduce-none.png", "model-all_reduce-none.png"} <= names
    assert [name for name in names if not listed_in_records(name)] == [], "docs/records.md has them all"
    model = Model.load(out / "model.json")
    assert model.report["quality"]["launches"] == 2
    saved = list((tmp_path / "cache" / "models").iterdir())
    assert len(saved) == 1
    assert Model.load(saved[0]) == model
    assert json.loads((out / "model.json").read_text())["schema"] == 1


def test_a_quick_fit_leaves_a_full_one_as_it_is(
    run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model.json", "fit.md"):
        (out / name).write_text("of a full fit")
    assert fit.main([str(run_path), "--out", str(out), "--quick"]) == 0
    assert f"{out}/ has model-quick.json, fit-quick.md" in capsys.readouterr().out
    assert listed_in_records("model-quick.json")
    assert listed_in_records("fit-quick.md")
    assert sorted(p.name for p in out.iterdir()) == ["fit-quick.md", "fit.md", "model-quick.json", "model.json"]
    assert {(out / name).read_text() for name in ("model.json", "fit.md")} == {"of a full fit"}
    assert Model.load(out / "model-quick.json").report == {}


def test_what_cannot_be_written_is_told_before_the_fit(
    run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "fit_runs", lambda *_: pytest.fail("it has begun"))
    (tmp_path / "file").touch()
    for arguments, said in (
        (["--out", str(tmp_path / "file" / "x")], "cannot make the folder .* name another one with --out"),
        (["--docs", str(tmp_path)], r"cost-model\.md has no <!-- fit -->"),
        (["--docs", str(tmp_path), "--quick"], "--docs shows errors, regret and figures, which --quick leaves out"),
    ):
        with pytest.raises(ArgumentError, match=said):
            fit.main([str(run_path), *arguments])


def test_one_launch_says_that_its_intervals_are_not_over_launches(tmp_path: Path) -> None:
    outcome = fit.fit_runs([experiments.load(make_run(tmp_path))], draws=2)
    assert "no intervals over launches" in fit.caption(outcome)


def test_a_fit_of_five_thousand_cases_is_a_matter_of_seconds(table: fitting.Table) -> None:
    """Counted, not timed: the steps of the fit are few, and none grows with more than cases x prices^2."""
    design = fitting.Design.of(table, fitting.blank_model(table))
    calls = 0
    slopes = design.slopes

    def counted(prices: Any) -> Any:
        nonlocal calls
        calls += 1
        return slopes(prices)

    object.__setattr__(design, "slopes", counted)
    fitting.fit_prices(design, table.frame["latency_us"].to_numpy(float))
    assert calls <= 40
    assert work(protocols()["one_shot.ll"], 1024, 2, (1, 256)).rounds == 1
