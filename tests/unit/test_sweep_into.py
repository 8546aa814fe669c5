"""Another launch into the folder of a run: what it takes over, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import experiments
from experiments import request as rq
from experiments import sweep
from fcomm import records
from fcomm.errors import ArgumentError, RecordError
from fcomm.measure import Case

FACTS = {"hostname": "here", "backend": "cpu", "cores": 2, "world_size": 8, "source_hash": "abc", "devices": []}
ASKED = ["--sizes", "1K,4K", "--ranks", "2,8", "--seed", "3", "--budget", "30s"]


class OneRank:
    """A world of eight, as far as its rank 0 sees it."""

    rank = 0

    def __init__(self, size: int = 8) -> None:
        self.size = size

    def bcast(self, x: Any) -> Any:
        return x

    def allgather(self, x: Any) -> list[Any]:
        return [x]

    def Ibarrier(self) -> Any:
        return self

    def Test(self) -> bool:
        return True

    def Split(self, *_: Any) -> None:
        return None


def args(*argv: str) -> Any:
    return rq.parser().parse_args(argv)


def asked(*argv: str, size: int = 8) -> rq.Request:
    world: Any = OneRank(size)
    return sweep._request(world, args(*argv))


def row(number: int, shape: tuple[int, int] | None = None, **facts: Any) -> dict[str, Any]:
    case = Case("all_reduce", "one_shot.ll", "float32", 1024 << number, 2, "host", shape)
    rest = {
        "blocks": 2, "threads": 32, "placement": "2 ranks on 2 cores", "sms_per_rank": None, "warmup": 1, "planned": 10,
        "checked_calls": 4, "wrong": 0, "status": "measured", "reason": "", "emulated": True, "time_sliced": False,
    }  # fmt: skip
    return {**case.columns(), **rest, "case": number, **facts}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A complete run with a case of each kind."""
    request = rq.build_request(args(*ASKED), 8).resolved("cpu")
    recorder = records.Recorder.create(tmp_path, "here", "cpu", asdict(request), path=tmp_path / "run")
    recorder.begin(FACTS)
    rows = [
        row(0), row(1, (4, 64)), row(2, status="dropped", planned=0), row(3, status="wrong", wrong=3, planned=0),
        row(4, status="failed", planned=0), row(5, status="refused", planned=0),
    ]  # fmt: skip
    recorder.plan(rows)
    for number in (0, 1):
        recorder.append(number, np.full((10, 2), 1000 + number))
    recorder.finish()
    recorder.close()
    return recorder.path


def opened(into: Path, facts: dict[str, Any] | None = None, out: Path = Path("results")) -> tuple[sweep.Sweep, Any]:
    world: Any = OneRank()
    one = sweep.Sweep(world, rq.build_request(args(*ASKED), 8).resolved("cpu"), 0.0)
    one.facts = FACTS if facts is None else facts
    return one, one.open_records(out, None, into)


def test_the_request_is_that_of_the_run_and_the_budget_a_new_one(run: Path) -> None:
    kept = rq.Request.from_json(records.load(run).request)
    assert asked("--into", str(run)).budget_s == 60
    again = asked("--into", str(run), *ASKED[:-1], "45s")
    assert again.budget_s == 45
    assert {**asdict(again), "budget_s": 0} == {**asdict(kept), "budget_s": 0}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--sizes", "1K,8K"], "was asked for with another --sizes"),
        (["--ranks", "2,4"], "was asked for with another --ranks"),
        (["--seed", "4"], "was asked for with another --seed"),
        (["--shapes", "search"], "was asked for with another --shapes"),
        (["--protocols", "one_shot.ll"], "was asked for with another --protocols"),
        (["--out", "elsewhere"], "leave out --out"),
        (["--resume", "elsewhere"], "leave out --into"),
    ],
)
def test_options_that_ask_for_something_else_are_refused(run: Path, argv: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        asked("--into", str(run), *argv)


def test_the_ranks_must_have_been_started(run: Path) -> None:
    with pytest.raises(ArgumentError, match="use mpirun -n 8"):
        asked("--into", str(run), size=4)


def test_a_folder_that_is_not_there_is_a_new_run(tmp_path: Path) -> None:
    named = tmp_path / "results" / "mine"
    assert asked("--into", str(named), *ASKED).sizes == (1024, 4096)
    one, only = opened(named)
    one.close()
    assert only is None
    assert one.launch == 0
    assert (named / "run.json").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a run"):
        asked("--into", str(tmp_path))


def test_another_launch_takes_the_cases_that_may_be_timed_with_their_numbers_and_shapes(run: Path) -> None:
    one, only = opened(run)
    one.close()
    assert one.launch == 1
    assert not one.owed
    assert {number: case.shape for number, case in only.items()} == {0: None, 1: (4, 64), 2: None}


@pytest.mark.parametrize(
    ("fact", "what"), [("hostname", "machine"), ("source_hash", "kernel source"), ("world_size", "number of ranks")]
)
def test_another_machine_or_source_is_refused(run: Path, fact: str, what: str) -> None:
    with pytest.raises(RecordError, match=f"cannot be measured again here: it was taken with another {what}"):
        opened(run, {**FACTS, fact: "else"})
    assert len(experiments.load(run).launches) == 1


def test_an_interrupted_run_is_finished_first(run: Path) -> None:
    recorder = records.Recorder.reopen(run)
    recorder.begin(FACTS)
    recorder.plan([row(0)])
    recorder.close()
    with pytest.raises(RecordError, match="is not complete: finish it with --resume"):
        opened(run)


def test_a_slim_copy_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    records._write_slim(records.load(run), copy, 5, None)
    with pytest.raises(RecordError, match="is a slim copy"):
        opened(copy)


def test_a_run_without_a_case_to_time_is_refused(tmp_path: Path) -> None:
    recorder = records.Recorder.create(tmp_path, "here", "cpu", {}, path=tmp_path / "run")
    recorder.begin(FACTS)
    recorder.plan([row(0, status="refused", planned=0)])
    recorder.finish()
    recorder.close()
    with pytest.raises(RecordError, match="no case that could be measured again"):
        opened(tmp_path / "run")


def test_a_run_that_is_being_written_is_refused(run: Path) -> None:
    recorder = records.Recorder.reopen(run)
    try:
        with pytest.raises(RecordError, match="is being written by another process"):
            opened(run)
    finally:
        recorder.close()
