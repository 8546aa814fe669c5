"""On GPUs: kernels that stall where it hurts, with memory traffic in the background; and every protocol under a sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import mps
from tests import launch
from tests.gpu.conftest import why_not
from tests.stalls import NEGATIVE, PLACES

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

ROUNDS = 20_000
"""Readings of the clock that a stall takes: some hundred microseconds, long beside any call."""
CANNOT = ("not supported", "Unable to find", "not have permission", "InitializationError")


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, str]]:
    if not mps.available():
        yield {}
        return
    with mps.private_mps() as env:
        yield env


def stalls(n: int, env: dict[str, str], *args: str) -> str:
    done = launch.mpirun(n, ["-m", "tests.stalls", "--backend", "cuda", "--rounds", str(ROUNDS), *args], 90, env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("STALLS")]
    assert lines, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return lines[0]


pytestmark = pytest.mark.full


@pytest.mark.parametrize("place", [p for p in PLACES if p != "nowhere"])
def test_shipped_kernels_may_stall_anywhere(clients: dict[str, str], place: str) -> None:
    assert stalls(4, clients, "--place", place, "--protocol", "few", "--calls", "600", "--traffic") == "STALLS ok"


@pytest.mark.parametrize("mutant", NEGATIVE)
def test_mutants_show_when_kernels_stall(clients: dict[str, str], mutant: str) -> None:
    said = stalls(4, clients, "--place", NEGATIVE[mutant], "--mutant", mutant, "--calls", "200")
    assert said.startswith(("STALLS wrong", "STALLS hang")), said


@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_every_protocol_under_a_sanitizer(tool: str) -> None:
    """Two ranks take turns on the GPU, without MPS, which the sanitizer does not know."""
    beside = Path("/usr/local/cuda/bin/compute-sanitizer")
    sanitizer = shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [
        launch.find_mpirun(), "-n", "2", sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes",
        "application-only", sys.executable, "-m", "tests.stalls", "--backend", "cuda", "--place", "nowhere", "--calls", "70",
        "--timeout", "120",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=launch.ROOT,
        env=launch.environment(), start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        launch.kill(process)
        out, err = process.communicate()
        pytest.fail(f"{tool} took more than 600 s\n{out[-4000:]}\n{err[-4000:]}", pytrace=False)
    text = f"exit code {process.returncode}\n{out[-6000:]}\n{err[-3000:]}"
    for reason in CANNOT:
        if reason in out + err and "STALLS ok" not in out:
            pytest.skip(f"compute-sanitizer cannot work here: {reason}")
    assert "STALLS ok" in out, text
    assert process.returncode == 0, text
    assert (out + err).count("ERROR SUMMARY: 0 errors") == 2, text
