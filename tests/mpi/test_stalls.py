"""Real ranks on the cpu backend whose kernels stall where it hurts; on GPUs it is `tests.gpu.test_stalls`."""

from __future__ import annotations

import pytest

from tests import launch
from tests.stalls import NEGATIVE, PLACES

pytestmark = pytest.mark.mpi

FEW = "one_shot.ll16,one_shot.lamport,one_shot.flag,two_shot.lamport16+ll128,custom_ar_v2.push"
FAST_MUTANTS = ("one-copy", "evidence-first")


def stalls(n: int, *args: str) -> str:
    done = launch.mpirun(n, ["-m", "tests.stalls", "--backend", "cpu", *args], timeout=100)
    lines = [line for line in done.stdout.splitlines() if line.startswith("STALLS")]
    assert lines, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return lines[0]


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=() if p == "before-re-arm" else pytest.mark.full) for p in PLACES if p != "nowhere"],
)
def test_shipped_kernels_may_stall_anywhere(place: str) -> None:
    assert stalls(2, "--place", place, "--protocol", FEW, "--calls", "60", "--timeout", "60") == "STALLS ok"


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=() if m in FAST_MUTANTS else pytest.mark.full) for m in NEGATIVE]
)
def test_mutants_show_when_kernels_stall(mutant: str) -> None:
    said = stalls(3, "--place", NEGATIVE[mutant], "--mutant", mutant, "--calls", "60", "--timeout", "3")
    assert said.startswith(("STALLS wrong", "STALLS hang")), said
