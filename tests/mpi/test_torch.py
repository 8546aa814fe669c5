"""`fcomm.torch` between two ranks on the CPU: under MPI, and started by torchrun where there is no mpi4py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import launch

pytestmark = pytest.mark.mpi

TABLE = (launch.ROOT / "tests" / "torch_ranks.py").read_text()
NAMES = re.findall(r"^@case\ndef (\w+)", TABLE, re.MULTILINE)
"""Read, not imported: PyTorch stays out of the process that runs the tests."""


@cache
def table() -> CompletedProcess[str]:
    return launch.mpirun(2, ["-m", "tests.torch_ranks"], timeout=120)


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    done = table()
    assert f"PASS {name} " in done.stdout, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


def test_the_example_says_what_was_compared() -> None:
    said = [line for line in table().stdout.splitlines() if "all-reduces" in line]
    assert [line.split(":")[0] for line in said] == ["eager", "compiled"]


@pytest.fixture
def without_mpi4py(tmp_path: Path) -> dict[str, str]:
    """An environment in which mpi4py cannot be imported."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no mpi4py here')\n")
    env = launch.environment({"OMP_NUM_THREADS": "1"})
    return {**env, "PYTHONPATH": os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])}


@pytest.mark.full
def test_ranks_of_torchrun_need_no_mpi4py(without_mpi4py: dict[str, str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.torch_page"],
        cwd=launch.ROOT, env=without_mpi4py, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("2 ranks, cpu"), done.stdout


def test_without_pytorch_the_example_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    env = launch.environment()
    done = subprocess.run(
        [sys.executable, "-m", "experiments.serving"],
        cwd=launch.ROOT, env={**env, "PYTHONPATH": os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: fcomm.torch needs PyTorch, which is not installed here: pip install torch\n"
