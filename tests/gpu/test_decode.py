"""The decode step and the peers on GPUs: whole commands, and the step's kernels and products against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import experiments
from experiments import mps
from tests import launch
from tests.gpu.conftest import why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, str]]:
    if not mps.available():
        yield {}
        return
    with mps.private_mps() as env:
        yield env


def test_a_step_computes_what_numpy_computes(clients: dict[str, str]) -> None:
    done = launch.mpirun(2, ["-m", "tests.gpu.decode_step"], timeout=90, env=clients)
    assert done.returncode == 0, done.stderr
    assert "decode step: done" in done.stdout


def test_a_decode_run_from_start_to_figure(clients: dict[str, str], tmp_path: Path) -> None:
    words = [
        "--model",
        "tiny",
        "--batch",
        "1,8",
        "--protocols",
        "one_shot.ll,two_shot.lamport16,custom_ar_v2",
        "--calls",
        "6",
    ]
    done = launch.mpirun(2, ["-m", "experiments.decode", *words, "--out", str(tmp_path)], timeout=120, env=clients)
    assert done.returncode == 0, done.stderr
    (path,) = (p.parent for p in tmp_path.glob("*/run.json"))
    run = experiments.load(path)
    assert set(run.cases["status"]) <= {"measured", "refused"}
    assert len(run.latency) >= 2 * 5
    assert (path / "decode.png").exists()
    if run.provenance["ranks_per_device"] > 1:
        assert "A demonstration, and no evidence about TPOT" in done.stdout


@pytest.mark.full
def test_peers_run_or_say_why(clients: dict[str, str], tmp_path: Path) -> None:
    words = [
        "--sizes",
        "16K",
        "--dtypes",
        "float32",
        "--protocols",
        "one_shot.ll",
        "--peers",
        "nccl,mpi,torch",
        "--launch",
        "none",
    ]
    words += ["--modes", "graph,host", "--calls", "10", "--budget", "60s", "--shapes", "default"]
    done = launch.mpirun(2, ["-m", "experiments.sweep", *words, "--out", str(tmp_path)], timeout=120, env=clients)
    assert done.returncode == 0, done.stderr
    (path,) = (p.parent for p in tmp_path.glob("*/run.json"))
    cases = experiments.load(path).cases
    assert set(cases["status"]) <= {"measured", "refused"}
    assert cases.loc[cases["status"] == "refused", "reason"].str.len().gt(10).all()
    assert cases.loc[(cases["protocol"] == "mpi") & (cases["mode"] == "host"), "status"].eq("measured").all()
