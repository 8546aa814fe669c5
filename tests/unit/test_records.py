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
from experiments import plots, tables
from fcomm import records
from fcomm.errors import RecordError
from fcomm.measure import Case
from fcomm.records import CASES, LATENCY, SAMPLES, Recorder

ROOT = Path(__file__).resolve().parents[2]
PROVENANCE = {"hostname": "here", "backend": "cpu", "cores": 2, "world_size": 4}


def _case(number: int, planned: int = 10, **facts: Any) -> dict[str, Any]:
    ranks = facts.pop("ranks", 2 + 2 * (number % 2))
    case = Case("all_reduce", "one_shot.ll", "float32", 1024 << number, ranks)
    rest = {
        "blocks": 2, "threads": 32, "placement": f"{ranks} ranks on 2 cores", "sms_per_rank": None, "warmup": 1,
        "checked_calls": 4, "wrong": 0, "status": "measured", "reason": "", "floor_us": None, "emulated": True,
        "time_sliced": False,
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
    assert body["1024"] == ["2", "1024", "256", "float32", "one_shot.ll", "host", "2.0", "0.5120", "0.5120", "0"]
    assert body["2048"][6:10] == ["-", "-", "-", "7"]
    assert body["4096"][6:10] == ["-", "-", "-", "-"]


def test_every_column_is_documented_with_its_unit() -> None:
    text = (ROOT / "docs" / "records.md").read_text()
    for column in (*SAMPLES, *CASES, *LATENCY):
        line = f"| `{column.name}` | {column.type} | {column.unit} | {column.meaning} |"
        assert line in text, f"docs/records.md lacks: {line}"
