"""Records on disk: round trips, kills at any byte, edits, refusals, replicates and remainders."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import experiments
from experiments import export, plots, table, tables
from fcomm import records
from fcomm.errors import FcommError, RecordError
from fcomm.measure import Case
from fcomm.records import CASES, LATENCY, SAMPLES, Recorder

ROOT = Path(__file__).resolve().parents[2]
PROVENANCE = {"hostname": "here", "backend": "cpu", "cores": 2, "world_size": 4}


def _case(number: int, planned: int = 10, **facts: Any) -> dict[str, Any]:
    ranks = facts.pop("ranks", 2 + 2 * (number % 2))
    case = Case("all_reduce", "one_shot.ll", "float32", 1024 << number, ranks)
    rest = {
        "blocks": 2, "threads": 32, "placement": f"{ranks} ranks on 2 cores", "sms_per_rank": None, "warmup": 1,
        "checked_calls": 4, "wrong": 0, "status": "measured", "reason": "", "emulated": True, "time_sliced": False,
    }  # fmt: skip
    return {**case.columns(), **rest, "case": number, "planned": planned, **facts}


def _times(calls: int, ranks: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng([seed, calls, ranks]).integers(1000, 9000, (calls, ranks))


def _record(out: Path, visits: int = 2, cases: int = 3, finish: bool = True) -> Path:
    recorder = Recorder.create(out, "here", "cpu", {"seed": 0})
    recorder.begin(PROVENANCE)
    plan = [_case(k) for k in range(cases)]
    recorder.plan(plan)
    for k in range(visits):
        for row in plan:
            recorder.append(row["case"], _times(5, row["ranks"], k))
    if finish:
        recorder.finish()
    recorder.close()
    return recorder.path


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = _record(tmp_path)
    run = experiments.load(path)
    assert run.complete
    assert not run.owed
    assert list(run.samples.columns) == [c.name for c in SAMPLES]
    assert list(run.cases.columns) == [c.name for c in CASES if c.name != "launch"]
    assert len(run.samples) == 2 * 5 * (2 + 4 + 2)
    second = run.samples[(run.samples["case"] == 1) & (run.samples["iteration"] >= 5)]
    assert (second["nanoseconds"].to_numpy().reshape(5, 4) == _times(5, 4, 1)).all()
    assert second["rank"].tolist() == list(range(4)) * 5
    assert run.cases["iterations"].tolist() == [10, 10, 10]
    assert {c.name for c in LATENCY} <= set(run.latency.columns)
    assert len(run.latency) == 3
    assert run.provenance["hostname"] == "here"
    assert run.request == {"seed": 0}
    assert records.runs(tmp_path) == [path]
    names = sorted(p.name for p in (path / "launch-0").iterdir())
    assert names == ["cases.parquet", "provenance.json", "samples.parquet", "seal.json"]


def test_an_interrupted_run_reads_the_same_from_its_stream(tmp_path: Path) -> None:
    whole = experiments.load(_record(tmp_path))
    torn = experiments.load(_record(tmp_path, finish=False))
    assert not torn.complete
    assert torn.samples.equals(whole.samples)
    assert torn.latency.equals(whole.latency)
    assert not torn.owed


def test_two_runs_of_one_second_do_not_share_a_folder(tmp_path: Path) -> None:
    assert _record(tmp_path) != _record(tmp_path)
    assert len(records.runs(tmp_path)) == 2


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Any]:
    path = _record(tmp_path_factory.mktemp("torn"), finish=False)
    content = (path / "launch-0" / "samples.arrows").read_bytes()
    return path, content, experiments.load(path).samples


@given(at=st.floats(0, 1))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_stream_cut_at_any_byte_gives_the_visits_before_it(stream: tuple[Path, bytes, Any], at: float) -> None:
    path, content, whole = stream
    keep = round(at * len(content))
    (path / "launch-0" / "samples.arrows").write_bytes(content[:keep])
    run = experiments.load(path)
    assert run.samples.equals(whole.iloc[: len(run.samples)])
    # What is on record and what is owed add up to the plan, and at most the visit in flight is lost.
    for case in range(3):
        recorded = int(run.cases.set_index("case")["iterations"][case])
        assert recorded % 5 == 0
        assert recorded + run.owed.get(case, 0) == 10
    lost = len(whole) - len(run.samples)
    assert lost * 19 <= (len(content) - keep) + 4 * 5 * 19


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_stream_with_a_changed_byte_never_gives_other_times(
    stream: tuple[Path, bytes, Any], at: float, flip: int
) -> None:
    path, content, whole = stream
    changed = bytearray(content)
    changed[int(at * len(content))] ^= flip
    (path / "launch-0" / "samples.arrows").write_bytes(changed)
    try:
        run = experiments.load(path)
    except RecordError:
        return
    assert run.samples.equals(whole.iloc[: len(run.samples)])


@pytest.mark.parametrize("name", ["samples.parquet", "cases.parquet", "provenance.json", "seal.json", "../run.json"])
@pytest.mark.parametrize("how", ["edit", "truncate", "remove"])
def test_a_complete_run_that_was_touched_is_refused(tmp_path: Path, name: str, how: str) -> None:
    path = _record(tmp_path)
    file = path / "launch-0" / name
    content = file.read_bytes()
    if how == "edit":
        where = content.find(b"here") if b"here" in content else len(content) // 2
        file.write_bytes(content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :])
    elif how == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    if name == "seal.json" and how == "remove":
        # Without its seal it is an interrupted run whose rows all check; nobody takes it for a complete one.
        assert not experiments.load(path).complete
        return
    with pytest.raises(RecordError):
        experiments.load(path)


def test_another_schema_is_refused_by_number(tmp_path: Path) -> None:
    path = _record(tmp_path)
    content = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(RecordError, match="schema 99"):
        experiments.load(path)


@pytest.mark.parametrize("what", ["nothing", "file", "folder"])
def test_what_is_no_run_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "file":
        path.write_text("")
    elif what == "folder":
        path.mkdir()
    with pytest.raises(RecordError, match="not a run"):
        experiments.load(path)


def test_a_resumed_run_becomes_whole(tmp_path: Path) -> None:
    path = _record(tmp_path, visits=1, finish=False)
    with (path / "launch-0" / "samples.arrows").open("ab") as f:
        f.write(b"\xff\xff\xff\xff torn")
    assert experiments.load(path).owed == {0: 5, 1: 5, 2: 5}
    recorder = Recorder.reopen(path)
    assert recorder.begin(PROVENANCE, resumes=True) == 1
    recorder.plan([_case(k, planned=5) for k in range(3)])
    for k in range(2):
        recorder.append(k, _times(5, 2 + 2 * k, 1))
    recorder.close()  # killed again
    assert experiments.load(path).owed == {2: 5}

    recorder = Recorder.reopen(path)
    assert recorder.begin(PROVENANCE, resumes=True) == 2
    recorder.plan([_case(2, planned=5)])
    recorder.append(2, _times(5, 2, 1))
    recorder.finish()
    recorder.close()
    run = experiments.load(path)
    assert run.complete
    assert not run.owed
    assert run.cases["iterations"].tolist() == [10, 10, 10]
    assert run.cases["checked_calls"].tolist() == [8, 8, 12]
    assert run.latency["launches"].tolist() == [2, 2, 2]
    times = experiments.load(_record(tmp_path)).samples["nanoseconds"]
    assert sorted(run.samples["nanoseconds"]) == sorted(times)


def test_a_second_launch_is_a_replicate_and_owes_its_own_calls(tmp_path: Path) -> None:
    path = _record(tmp_path)
    recorder = Recorder.reopen(path)
    assert recorder.begin(PROVENANCE) == 1
    recorder.plan([_case(k) for k in range(3)])
    recorder.append(0, _times(10, 2))
    recorder.close()
    run = experiments.load(path)
    assert not run.complete
    assert run.owed == {1: 10, 2: 10}
    assert run.latency["launches"].tolist() == [2, 1, 1]
    assert run.latency["iterations"].tolist() == [20, 10, 10]


def test_a_launch_killed_before_its_plan_leaves_nothing(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, "here", "cpu", {})
    recorder.begin(PROVENANCE)
    recorder.close()
    run = experiments.load(recorder.path)
    assert not run.complete
    assert run.samples.empty
    assert run.latency.empty
    with pytest.raises(RecordError, match="no times yet"):
        run.for_figures()
    again = Recorder.reopen(recorder.path)
    assert again.begin(PROVENANCE) == 0
    again.discard()
    assert not recorder.path.exists()


def test_a_missing_launch_shows(tmp_path: Path) -> None:
    path = _record(tmp_path)
    recorder = Recorder.reopen(path)
    recorder.begin(PROVENANCE)
    recorder.plan([_case(0)])
    recorder.close()
    shutil.rmtree(path / "launch-0")
    with pytest.raises(RecordError, match="lacks others"):
        experiments.load(path)


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, "here", "cpu", {})
    with pytest.raises(RecordError, match="another process"):
        Recorder.reopen(recorder.path)
    recorder.close()
    Recorder.reopen(recorder.path).close()


def test_a_call_without_a_time_from_each_rank_is_refused(tmp_path: Path) -> None:
    path = _record(tmp_path, finish=False)
    launch = records._read_launch(path / "launch-0")
    launch.samples = launch.samples.drop(index=3)
    with pytest.raises(RecordError, match="does not have one time from each rank"):
        records._check_rows(path, launch, {})
    launch = records._read_launch(path / "launch-0")
    launch.samples.loc[0, "nanoseconds"] = 0
    with pytest.raises(RecordError, match="not positive"):
        records._check_rows(path, launch, {})
    launch = records._read_launch(path / "launch-0")
    launch.samples.loc[0, "case"] = 77
    with pytest.raises(RecordError, match="not planned"):
        records._check_rows(path, launch, {})


# ---- what cannot be written ------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*file/results \(Not a directory\).*--out"):
        Recorder.create(tmp_path / "file" / "results", "here", "cpu", {})


def test_a_read_only_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kw: Any) -> None:  # root, as in containers, may write everywhere
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RecordError, match="Read-only file system"):
        Recorder.create(tmp_path / "results", "here", "cpu", {})


def test_a_disk_without_room_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="MiB free and this run may need"):
        Recorder.create(tmp_path, "here", "cpu", {}, expected_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_what_was_whole(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, "here", "cpu", {})
    recorder.begin(PROVENANCE)
    recorder.plan([_case(0, planned=100_000)])
    recorder.append(0, _times(100, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # Python ignores the signal: writes fail

    def fill() -> None:
        for _ in range(10):
            recorder.append(0, _times(100, 2))

    try:
        with pytest.raises(RecordError, match=r"cannot write .*samples\.arrows"):
            fill()
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run = experiments.load(recorder.path)
    assert not run.complete
    recorded = int(run.cases["iterations"].iloc[0])
    assert 100 <= recorded < 1000
    assert recorded % 100 == 0
    assert run.owed == {0: 100_000 - recorded}


def test_a_failed_write_leaves_the_old_file_and_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    records.write_whole(path, b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        records.write_whole(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert path.read_bytes() == b"old"


# ---- what shows while cases are timed --------------------------------------------------------------------------------


def test_a_case_that_fails_while_it_is_timed_is_void_and_not_owed(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, "here", "cuda", {})
    recorder.begin(PROVENANCE)
    recorder.plan([_case(k) for k in range(3)])
    for k in range(3):
        recorder.append(k, _times(5, 2 + 2 * (k % 2)))
    recorder.amend({1: {"status": "failed", "reason": "it hung"}, 2: {"dependent_edges": 49}, 0: {}})
    recorder.close()
    cut = experiments.load(recorder.path)
    assert cut.cases["status"].tolist() == ["measured", "failed", "measured"]
    assert cut.cases["reason"].tolist() == ["", "it hung", ""]
    assert cut.cases["dependent_edges"].tolist()[2] == 49
    assert cut.owed == {0: 5, 2: 5}
    assert cut.latency["case"].tolist() == [0, 2]
    again = Recorder.reopen(recorder.path)
    again.finish()
    again.close()
    assert experiments.load(recorder.path).cases["status"].tolist() == ["measured", "failed", "measured"]


# ---- slim copies -----------------------------------------------------------------------------------------------------


def _large(out: Path, calls: int = 400) -> Path:
    recorder = Recorder.create(out, "here", "cuda", {"seed": 0})
    recorder.begin(PROVENANCE)
    recorder.plan([_case(k, planned=calls) for k in range(6)])
    for k in range(6):
        recorder.append(k, _times(calls, 2 + 2 * (k % 2), k))
    recorder.finish()
    recorder.close()
    return recorder.path


def test_a_copy_that_fits_is_whole(tmp_path: Path) -> None:
    path = _large(tmp_path / "runs")
    assert records.export(path, tmp_path / "copy", 1 << 20) is None
    run, copy = experiments.load(path), experiments.load(tmp_path / "copy")
    assert copy.complete
    assert copy.samples.equals(run.samples)
    assert copy.latency.equals(run.latency)
    assert copy.provenance == run.provenance
    assert not (tmp_path / "copy" / "latency.parquet").exists()


def test_a_slim_copy_keeps_the_statistics_of_all_samples(tmp_path: Path) -> None:
    path = _large(tmp_path / "runs")
    calls = records.export(path, tmp_path / "data" / "copy", 44_000)
    run, copy = experiments.load(path), experiments.load(tmp_path / "data" / "copy")
    assert calls == 20
    assert sum(p.stat().st_size for p in copy.path.rglob("*") if p.is_file()) <= 44_000
    assert copy.complete
    assert not copy.owed
    assert copy.latency.equals(run.latency)
    assert copy.latency["iterations"].tolist() == [400] * 6
    assert copy.cases["iterations"].tolist() == [20] * 6
    # What is left is evenly spread, to the end, and unchanged.
    kept = copy.samples.merge(run.samples, how="left", indicator=True)
    assert (kept["_merge"] == "both").all()
    assert sorted(copy.samples.loc[copy.samples["case"] == 0, "iteration"].unique()) == list(range(19, 400, 20))
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["copy"]


def test_a_slim_copy_that_was_touched_is_refused(tmp_path: Path) -> None:
    records.export(_large(tmp_path / "runs"), tmp_path / "copy", 44_000)
    file = tmp_path / "copy" / "latency.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(RecordError, match="was changed"):
        experiments.load(tmp_path / "copy")
    file.unlink()
    with pytest.raises(RecordError, match="missing from a slim copy"):
        experiments.load(tmp_path / "copy")


def test_what_cannot_be_copied_is_one_sentence(tmp_path: Path) -> None:
    path = _large(tmp_path / "runs", calls=5)
    with pytest.raises(RecordError, match="does not fit into 1000 bytes"):
        records.export(path, tmp_path / "copy", 1000)
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    with pytest.raises(RecordError, match="is not empty"):
        records.export(path, tmp_path / "runs", 1 << 20)
    with pytest.raises(RecordError, match="is not complete"):
        records.export(_record(tmp_path / "torn", finish=False), tmp_path / "copy", 1 << 20)
    with pytest.raises(RecordError, match=r"has no case with dependent launch early; it has none"):
        records.export(path, tmp_path / "early", 1 << 20, "early")
    assert not (tmp_path / "early").exists()
    records.export(path, tmp_path / "copy", 1 << 20)
    assert export.main([str(path), str(tmp_path / "other"), "--limit", "1M"]) == 0


# ---- figures and tables ----------------------------------------------------------------------------------------------


def test_time_sliced_records_are_not_drawn(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, "here", "cuda", {})
    recorder.begin(PROVENANCE)
    recorder.plan([_case(0, time_sliced=True)])
    recorder.append(0, _times(10, 2))
    recorder.finish()
    recorder.close()
    run = experiments.load(recorder.path)
    assert run.latency["time_sliced"].all()
    with pytest.raises(RecordError, match="taking turns"):
        plots.latency(run)


def test_a_figure_says_where_it_was_taken(tmp_path: Path) -> None:
    run = experiments.load(_record(tmp_path))
    figure = plots.latency(run)
    assert plots.png(figure).startswith(b"\x89PNG")
    title = figure.get_suptitle()
    assert "emulation" in title
    assert "up to 4 MPI ranks on 2 cores" in title
    with pytest.raises(RecordError, match="no graph times"):
        plots.latency(run, mode="graph")


def test_the_table_has_a_line_for_each_case_measured_or_not(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, "here", "cpu", {})
    recorder.begin(PROVENANCE)
    recorder.plan(
        [
            _case(0),
            _case(1, planned=0, wrong=7, status="wrong", reason="7 of 9 elements were wrong"),
            _case(2, planned=0, checked_calls=0, status="dropped", reason="no time"),
        ]
    )
    recorder.append(0, np.full((10, 2), 2000))
    recorder.finish()
    recorder.close()
    lines = tables.nccl_table(experiments.load(recorder.path)).splitlines()
    body = {line.split()[1]: line.split() for line in lines if not line.startswith("#")}
    head = ["2", "1024", "256", "float32", "one_shot.ll", "host", "none", "array", "2x32"]
    assert body["1024"] == [*head, "2.0", "0.5120", "0.5120", "0", "-"]
    assert body["2048"][9:13] == ["-", "-", "-", "7"]
    assert body["4096"][9:13] == ["-", "-", "-", "-"]


def test_cases_that_differ_in_their_launch_shape_alone_stay_apart(tmp_path: Path) -> None:
    kinds = [
        ("one_shot.ll", None, 2000), ("one_shot.ll", (4, 64), 1500), ("barrier.one_shot", None, 3000),
        ("barrier.one_shot", (1, 96), 1000),
    ]  # fmt: skip
    recorder = Recorder.create(tmp_path, "here", "cpu", {})
    recorder.begin(PROVENANCE)
    plan = []
    for number, (name, shape, _) in enumerate(kinds):
        case = Case("all_reduce", name, "float32", 1024, 2, "host", shape)
        blocks, threads = shape or (2, 32)
        plan.append({**_case(number, ranks=2), **case.columns(), "blocks": blocks, "threads": threads})
    recorder.plan(plan)
    for number, (_, _, ns) in enumerate(kinds):
        recorder.append(number, np.full((10, 2), ns))
    recorder.finish()
    recorder.close()
    run = experiments.load(recorder.path)
    assert [Case.from_columns(c).shape for c in tables.rows(run.cases)] == [shape for _, shape, _ in kinds]
    assert run.latency["latency_us"].tolist() == [2.0, 1.5, 3.0, 1.0]
    lines = [line.split() for line in tables.nccl_table(run).splitlines() if not line.startswith("#")]
    assert [(line[4], line[8], line[9]) for line in lines] == [
        ("one_shot.ll", "2x32", "2.0"), ("one_shot.ll", "4x64*", "1.5"), ("barrier.one_shot", "2x32", "3.0"),
        ("barrier.one_shot", "1x96*", "1.0"),
    ]  # fmt: skip
    table = tables.best_table(run, tables.select(run, "all_reduce", "none"))
    assert "1.50 ll (tuned)" in table
    assert "**1.00** one_shot (tuned)" in table
    assert "Tuned: a launch shape that the search found" in table


def test_a_case_that_one_launch_had_no_time_for_is_measured_where_another_had(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, "here", "cpu", {})
    recorder.begin(PROVENANCE)
    recorder.plan([_case(0), _case(1, planned=0, status="dropped", reason="no time", blocks=0, checked_calls=0)])
    recorder.append(0, _times(10, 2))
    recorder.finish()
    recorder.begin(PROVENANCE)
    recorder.plan([_case(0, planned=0, status="dropped", reason="no time"), _case(1)])
    recorder.append(1, _times(10, 4))
    recorder.finish()
    recorder.close()
    run = experiments.load(recorder.path)
    assert run.complete
    assert run.cases[["status", "reason", "blocks", "iterations"]].to_numpy().tolist() == [["measured", "", 2, 10]] * 2
    assert run.latency["launches"].tolist() == [1, 1]


def test_a_run_can_be_given_its_folder_by_name(tmp_path: Path) -> None:
    named = tmp_path / "new" / "run"
    recorder = Recorder.create(tmp_path / "unused", "here", "cpu", {}, path=named)
    recorder.close()
    assert recorder.path == named
    assert (named / "run.json").exists()
    assert not (tmp_path / "unused").exists()
    with pytest.raises(RecordError, match="cannot write"):
        Recorder.create(tmp_path, "here", "cpu", {}, path=named)
    with pytest.raises(RecordError, match="free"):
        Recorder.create(tmp_path, "here", "cpu", {}, 1 << 60, tmp_path / "large")
    assert not (tmp_path / "large").exists()


GPU = {
    "hostname": "here", "backend": "cuda", "world_size": 4, "ranks_per_device": 4,
    "devices": [{"device": "NVIDIA H200", "uuid": "GPU-1", "mps": True}],
}  # fmt: skip


def _gpu_run(out: Path, l2_gbps: float | None = 2000.0, **facts: Any) -> Path:
    """Two sizes among four ranks, none and late: times in ns that make a table by hand."""
    kinds = [  # protocol, input, ns at 1 KiB and at 1 MiB
        ("one_shot.ll", "array", 2000, 40000),
        ("one_shot.lamport16", "array", 1800, 30000),
        ("two_shot.ll128", "array", 3000, 9000),
        ("barrier.two_shot", "staging", 5000, 12000),
        ("custom_ar_v2", "array", 2500, 10000),
        ("custom_ar_v2.pull_one_shot", "staging", 4000, 8000),
        ("lamport_fp", "array", 1900, 35000),
        ("floor", "array", 1000, 5000),
    ]
    recorder = Recorder.create(out, "here", "cuda", {"seed": 0})
    recorder.begin(GPU)
    plan: list[dict[str, Any]] = []
    times: dict[int, Any] = {}
    for launch, faster in (("none", 0), ("late", 500)):
        for k, nbytes in enumerate((1024, 1 << 20)):
            for name, where, *ns in kinds:
                shape = (2, 256) if name == "floor" else None
                case = Case("all_reduce", name, "bfloat16", nbytes, 4, "graph", shape, launch, where)
                number = len(plan)
                plan.append(
                    {
                        **_case(number, ranks=4), **case.columns(), "case": number, "emulated": False, "sms_per_rank": 33,
                        "threads": 256, "l2_gbps": l2_gbps, **facts,
                    }
                )  # fmt: skip
                times[number] = np.full((10, 4), ns[k] - faster)
    recorder.plan(plan)
    for number, ns in times.items():
        recorder.append(number, ns)
    recorder.finish()
    recorder.close()
    return recorder.path


def test_the_best_of_each_family_beside_each_other(tmp_path: Path) -> None:
    run = experiments.load(_gpu_run(tmp_path))
    assert run.taken_on == "4 MPI ranks sharing one NVIDIA H200 through MPS"
    text = tables.best_table(run, tables.select(run, "all_reduce", "none"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == [
        "size", "one_shot", "two_shot", "barrier", "custom_ar_v2", "lamport_fp", "floor", "x floor", "ours / baseline",
    ]  # fmt: skip
    assert lines[2] == [
        "1 KiB", "**1.80** lamport16", "3.00 ll128", "5.00 two_shot (in place)", "2.50 push", "1.90", "1.00", "1.80", "0.947",
    ]  # fmt: skip
    # 4 ranks x 3 MiB at 2,000 GB/s: 6.3 us, more than 15 % of all but nothing; of 40 us it is 15.7 %.
    assert lines[3] == [
        "1 MiB", "30.00 ~ lamport16", "9.00 ~ ll128", "12.00 ~ two_shot (in place)", "**8.00** ~ pull_one_shot (in place)",
        "35.00 ~", "5.00", "1.60", "1.125",
    ]  # fmt: skip
    for said in (
        "4 ranks, 33 SMs each",
        "sharing one NVIDIA H200 through MPS",
        "dependent launch none",
        "2,000 GB/s for 4",
    ):
        assert said in text
    late = tables.best_table(run, tables.select(run, "all_reduce", "late"))
    assert "**1.30** lamport16" in late
    assert "dependent launch late" in late


def test_the_mark_of_the_l2_follows_its_rate(tmp_path: Path) -> None:
    run = experiments.load(_gpu_run(tmp_path, l2_gbps=None))
    frame = tables.select(run, "all_reduce", "none")
    unmarked = tables.best_table(run, frame)
    assert " ~" not in unmarked
    assert "was not measured" in unmarked
    found = tables.cells(frame, l2_gbps=4000.0).set_index(["nbytes", "column"])
    # two_shot.ll128: to three peers a shard and to three a sum, 256 KiB each in 2185 lines of 120 bytes of payload
    wire = 6 * 2185 * 128
    assert found.loc[(1 << 20, "two_shot"), "l2_share"] == pytest.approx(4 * wire / 4e6 / 9.0)
    assert "4,000 GB/s, as given" in tables.best_table(run, frame, l2_gbps=4000.0)


def test_where_each_encoding_is_best(tmp_path: Path) -> None:
    run = experiments.load(_gpu_run(tmp_path))
    text = tables.encodings_table(run, tables.select(run, "all_reduce", "none"))
    assert "- `lamport16` is best at n = 4: 1 KiB, 1 MiB" in text
    assert "- `ll` is never best" in text
    assert "custom_ar_v2" not in text


def test_the_table_command_prints_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _gpu_run(tmp_path)
    assert table.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("4 ranks, 33 SMs each") == 2  # none and late
    kept = path / "table-all_reduce-bfloat16-graph-late.md"
    assert kept.read_text() in printed
    assert kept.with_suffix(".csv").read_text().startswith("case,")
    assert table.main([str(path), "--family", "all", "--launch", "none"]) == 0
    assert "custom_ar_v2.pull_one_shot" in capsys.readouterr().out
    assert table.main([str(path), "--encodings", "--out", str(tmp_path / "apart")]) == 0
    assert {p.name.partition("-")[0] for p in (tmp_path / "apart").iterdir()} == {"encodings"}
    assert not list(path.glob("encodings*"))
    for wrong in (["--mode", "host"], ["--collective", "all_gather"], ["--l2-gbps", "0"], ["--dtype", "float32"]):
        with pytest.raises(FcommError):
            table.main([str(path), *wrong])
    assert experiments.load(path).complete  # derived files are no part of what is sealed


def test_a_time_sliced_run_has_no_table(tmp_path: Path) -> None:
    run = experiments.load(_gpu_run(tmp_path, time_sliced=True))
    with pytest.raises(RecordError, match="taking turns"):
        tables.select(run, "all_reduce", "none")


def test_a_figure_of_a_gpu_has_families_a_floor_and_says_that_it_is_shared(tmp_path: Path) -> None:
    run = experiments.load(_gpu_run(tmp_path))
    figures = plots.figures(run)
    assert list(figures) == ["latency.png", "latency-late.png"]
    figure = figures["latency.png"]
    title = figure.get_suptitle()
    assert "sharing one NVIDIA H200 through MPS" in title
    assert "dependent launch none" in title
    axis = figure.axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert list(lines) == ["one_shot", "two_shot", "barrier", "custom_ar_v2", "lamport_fp", "floor"]
    assert np.array(lines["custom_ar_v2"].get_ydata()).tolist() == [2.5, 8.0]
    assert lines["floor"].get_linestyle() == "--"
    assert np.array(lines["floor"].get_ydata()).tolist() == [1.0, 5.0]
    assert axis.get_title() == "4 ranks, 33 SMs each"


def test_every_column_is_documented_with_its_unit() -> None:
    text = (ROOT / "docs" / "records.md").read_text()
    for column in (*SAMPLES, *CASES, *LATENCY):
        line = f"| `{column.name}` | {column.type} | {column.unit} | {column.meaning} |"
        assert line in text, f"docs/records.md lacks: {line}"
