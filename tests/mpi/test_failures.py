"""Ranks that die, hang, disagree or were started wrongly: the job ends soon, non-zero, in a sentence, with nothing left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import launch

pytestmark = pytest.mark.mpi

VICTIMS = ["-m", "tests.mpi.victims"]
INFO = ["-m", "fcomm", "info", "--backend", "cpu"]
# What a launcher sets. Tests of a process without one must not inherit it.
LAUNCHER_PREFIXES = ("OMPI_COMM_", "PMI_", "PMIX_", "MPI_LOCAL", "HYDRA_", "MV2_")


def alone(args: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs python without mpirun."""
    clean = {k: v for k, v in launch.environment().items() if not k.startswith(LAUNCHER_PREFIXES)}
    return subprocess.run(
        [sys.executable, *args],
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=launch.ROOT,
    )


def sentences(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    found = sentences(done)
    assert len(found) == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return found[0]


def assert_nothing_left(done: subprocess.CompletedProcess[str]) -> None:
    """None of the shared memory that the ranks had mapped has a name any more, and no rank is still running."""
    names, pids = set(re.findall(r"/dev/shm/\S+", done.stdout)), set(re.findall(r"pid (\d+)", done.stdout))
    assert names, done.stdout + done.stderr
    assert pids, done.stdout + done.stderr
    assert [name for name in names if Path(name).exists()] == []
    end = time.monotonic() + 5
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if running(pid)] == []


def running(pid: str) -> bool:
    """Whether the process is one of our ranks and not just a number, free again or waiting to be reaped."""
    try:
        return b"tests.mpi.victims" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["exit", "kill", "kill early"])
def test_a_rank_that_dies_ends_the_job_and_leaves_no_shared_memory(kind: str) -> None:
    start = time.monotonic()
    done = launch.mpirun(3, [*VICTIMS, kind], timeout=30)
    assert done.returncode not in (0, 124), done.stderr
    assert time.monotonic() - start < 15
    assert_nothing_left(done)


def test_a_job_that_is_interrupted_leaves_no_shared_memory_and_no_ranks() -> None:
    process = launch.mpirun_popen(2, [*VICTIMS, "never calls"])
    assert process.stdout is not None
    said = "".join(process.stdout.readline() for _ in range(4))  # at the start, and when the slabs are made
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert_nothing_left(subprocess.CompletedProcess([], process.returncode, said + out, err))


def test_an_error_of_one_rank_ends_all_and_is_said_once() -> None:
    start = time.monotonic()
    done = launch.mpirun(3, [*VICTIMS, "one raises"], timeout=30)
    assert sentence(done) == "error: rank 1 alone has no luck"
    assert done.returncode not in (0, 124)
    assert time.monotonic() - start < 15
    assert_nothing_left(done)


@pytest.mark.parametrize(("kind", "code", "words"), [("all raise 2", 2, "do that"), ("all raise 1", 1, "has luck")])
def test_an_error_of_all_ranks_is_said_once(kind: str, code: int, words: str) -> None:
    done = launch.mpirun(3, [*VICTIMS, kind], timeout=30)
    assert done.returncode == code, done.stderr
    assert words in sentence(done)


def test_a_constructor_that_fails_on_one_rank_fails_on_all_alike() -> None:
    done = launch.mpirun(3, [*VICTIMS, "unlucky construction"], timeout=30)
    assert done.returncode == 2, done.stderr
    assert sentence(done) == "error: max_bytes must be positive, not -1 (rank 1)"


def test_a_bug_on_one_rank_ends_all() -> None:
    done = launch.mpirun(2, [*VICTIMS, "one has a bug"], timeout=30)
    assert done.returncode not in (0, 124)
    assert "ZeroDivisionError" in done.stderr


def test_a_rank_that_never_calls_is_named() -> None:
    start = time.monotonic()
    done = launch.mpirun(3, [*VICTIMS, "never calls"], timeout=40, env={"FCOMM_TIMEOUT_S": "1"})
    assert done.returncode not in (0, 124)
    assert time.monotonic() - start < 20
    # Each of the ranks that waited may say so before the launcher ends it.
    assert 1 <= len(sentences(done)) <= 2, done.stderr
    for text in sentences(done):
        assert re.match(
            r"error: rank [01] gave up waiting for rank 2 of 3 in call \d+ \(\S+, 4000 bytes, channel 0\)", text
        )
    assert "Traceback" not in done.stderr
    assert_nothing_left(done)


# ---- started wrongly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_launcher_of_another_mpi_is_one_sentence(name: str) -> None:
    done = alone(INFO, {name: "4"})
    assert done.returncode == 1
    assert re.search(rf"started 4 processes \({name}\).*sees one.*use the mpirun that belongs", sentence(done))


def test_no_compiler_is_one_sentence(tmp_path: Path) -> None:
    done = launch.mpirun(2, INFO, timeout=30, env={"FCOMM_CXX": "nosuch", "FCOMM_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert "needs a C++ compiler and found none (nosuch)" in sentence(done)


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = launch.mpirun(2, INFO, timeout=30, env={"FCOMM_CACHE_DIR": str(tmp_path / "file" / "cache")})
    assert done.returncode == 1
    assert "cannot make the cache folder" in sentence(done)


def test_a_cache_folder_that_others_can_write_to_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu").chmod(0o777)
    done = launch.mpirun(2, INFO, timeout=30, env={"FCOMM_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert "can be written by others" in sentence(done)


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["explain", "--bytes", "3X"], "'3X' is not a size"),
        (["explain", "--ranks", "0"], "--ranks 0"),
        (["explain", "--dtype", "float64"], "float64 cannot be reduced"),
        (["info", "--backend", "cpu", "--max-bytes", "-5"], "'-5' is not a size"),
        (["info", "--backend", "cpu", "--max-bytes", "0"], "'0' is not a size"),
    ],
)
def test_nonsense_on_the_command_line_is_one_sentence(args: list[str], words: str) -> None:
    done = alone(["-m", "fcomm", *args])
    assert done.returncode == 2
    assert words in sentence(done)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_nonsense_under_a_launcher_is_said_once() -> None:
    done = launch.mpirun(2, [*INFO, "--max-bytes", "-5"], timeout=30)
    assert done.returncode == 2
    assert "'-5' is not a size" in sentence(done)


def test_nonsense_in_the_environment_is_said_once() -> None:
    done = launch.mpirun(2, INFO, timeout=30, env={"FCOMM_TIMEOUT_S": "soon"})
    assert done.returncode == 2
    assert "FCOMM_TIMEOUT_S=soon" in sentence(done)
    done = launch.mpirun(2, INFO, timeout=30, env={"FCOMM_PROTOCOL": "nonsense"})
    assert done.returncode == 2
    assert "FCOMM_PROTOCOL=nonsense: there is no protocol" in sentence(done)


def test_info_says_what_a_job_would_get() -> None:
    done = launch.mpirun(2, [*INFO, "--max-bytes", "64K"], timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("flash-comm ") == 1, "rank 0 alone speaks"
    assert "2 on one machine, backend cpu" in done.stdout
    assert "for messages of 64 KiB" in done.stdout
    for line in (
        r"one_shot\.ll +all_reduce +admitted for float32, float16, bfloat16, int32",
        r"barrier\.one_shot .*baseline",
    ):
        assert re.search(line, done.stdout), done.stdout
