"""Errors, exit codes, and what a launcher of another MPI looks like; one process, so one rank."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import fcomm
from fcomm import bootstrap, errors
from fcomm.errors import ArgumentError, DisagreementError, FcommError, HangError, NotAdmittedError, SetupError
from tests import launch

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass)]


def test_every_error_has_one_base_and_a_builtin_one() -> None:
    for kind in CLASSES:
        assert issubclass(kind, FcommError)
        assert kind is FcommError or issubclass(kind, (ValueError, RuntimeError)), kind
        assert inspect.getdoc(kind)


def test_exit_codes() -> None:
    assert {kind.__name__: bootstrap.exit_code(kind("x")) for kind in CLASSES if issubclass(kind, ValueError)} == {
        "ArgumentError": 2,
        "NotAdmittedError": 2,
    }
    assert bootstrap.exit_code(SetupError("x")) == bootstrap.exit_code(HangError("x")) == 1


def test_a_hang_has_a_record() -> None:
    assert HangError("x").record == {}
    assert HangError("x", {"peer": 3}).record == {"peer": 3}


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"])
def test_a_launcher_that_started_more_than_the_library_sees(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(SetupError, match=f"started 4 processes .{name}.*sees one") as caught:
        bootstrap.check_world()
    assert "\n" not in str(caught.value)
    for harmless in ("1", "", "many"):
        monkeypatch.setenv(name, harmless)
        bootstrap.check_world()


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (ArgumentError("bad size"), 2, "error: bad size\n"),
        (NotAdmittedError("not here"), 2, "error: not here\n"),
        (SetupError("no compiler"), 1, "error: no compiler\n"),
        (DisagreementError("no two alike"), 1, "error: no two alike\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_command_s_error_is_one_line_and_a_code(
    capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, words: str
) -> None:
    def main(_: object) -> int:
        raise raised

    assert bootstrap.run(main) == code
    assert capsys.readouterr() == ("", words)


def test_a_command_s_own_code_is_passed_on() -> None:
    assert bootstrap.run(lambda argv: len(argv or ()), ["a", "b", "c"]) == 3


def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: object) -> int:
        raise KeyError("a bug")

    assert bootstrap.run(main) == 1
    assert "Traceback" in capsys.readouterr().err


def test_collectively_passes_on_results_and_errors() -> None:
    assert bootstrap.collectively(MPI.COMM_SELF, lambda: 5) == 5

    def fail(error: Exception) -> Any:
        raise error

    with pytest.raises(ArgumentError, match=r"^too small$"):
        bootstrap.collectively(MPI.COMM_SELF, lambda: fail(ArgumentError("too small")))
    with pytest.raises(ZeroDivisionError):
        bootstrap.collectively(MPI.COMM_SELF, lambda: 1 / 0)


def test_agree_returns_what_all_have() -> None:
    assert bootstrap.agree(MPI.COMM_SELF, ("a", 1), "it") == ("a", 1)


def test_one_rank_is_a_copy_without_a_launcher() -> None:
    with fcomm.Communicator(MPI.COMM_SELF, backend="cpu", max_bytes=1024) as comm:
        x = np.arange(7, dtype=np.float32)
        y = comm.all_reduce(x)
        assert y is not x
        assert y.tolist() == x.tolist()
        with pytest.raises(ArgumentError, match="float64"):
            comm.all_reduce(np.ones(3))


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    data = launch.ROOT / "experiments" / "data" / "h200-shared"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m experiments.compare {data}/all_reduce {data}/gather_scatter | true"],
        capture_output=True, text=True, timeout=120, check=False, cwd=launch.ROOT, env=launch.environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
