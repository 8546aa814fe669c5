"""The decode command, and peers in a sweep, under real mpirun: whole runs on the cpu backend, in one launch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import experiments
from experiments.decode import report
from fcomm.errors import RecordError
from tests import launch

pytestmark = pytest.mark.mpi

NAMES = "one_shot.ll,two_shot.lamport16,custom_ar_v2,custom_ar_v2.pull_two_shot"
DECODE = ["--protocols", NAMES, "--batch", "1,3", "--calls", "6"]
SWEEP = ["--protocols", "one_shot.ll", "--peers", "mpi,nccl", "--sizes", "1K", "--dtypes", "f32,bf16", "--calls", "10"]
BOTH = """
from experiments.decode.__main__ import main as decode
from experiments.sweep import main as sweep
from fcomm import bootstrap

raise SystemExit(bootstrap.run(lambda argv: decode({decode!r}) or sweep({sweep!r})))
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, Path]:
    """Both commands on the same two ranks: what they said, and the folders of their runs."""
    out = tmp_path_factory.mktemp("runs")
    words = [[*DECODE, "--out", str(out / "decode")], [*SWEEP, "--budget", "10m", "--out", str(out / "sweep")]]
    done = launch.mpirun(2, ["-c", BOTH.format(decode=words[0], sweep=words[1])], timeout=100)
    assert done.returncode == 0, done.stderr
    decode, sweep = (next(p.parent for p in (out / name).glob("*/run.json")) for name in ("decode", "sweep"))
    return done, decode, sweep


def test_an_emulated_step_from_start_to_figure(both: tuple[subprocess.CompletedProcess[str], Path, Path]) -> None:
    done, path, _ = both
    run = experiments.load(path)
    assert run.complete
    assert set(run.cases["status"]) == {"measured"}
    assert (run.cases["wrong"] == 0).all()
    assert len(run.cases) == 2 * (2 + len(NAMES.split(",")))
    compared = run.cases[run.cases["protocol"] != "none"]
    assert (compared["checked_calls"] == 2).all()
    assert (run.latency["iterations"] == 6).all()
    assert set(run.cases["nbytes"]) == {512, 3 * 512}  # two bytes for each of 256 elements of a sequence
    assert run.cases.loc[run.cases["protocol"] == "custom_ar_v2.pull_two_shot", "input"].eq("staging").all()

    frame = report.frame(run)
    bound = frame[frame["protocol"] == "none"].set_index("batch")["latency_us"]
    assert np.allclose(frame["bound_us"], frame["batch"].map(bound))
    assert np.allclose(frame["comm_share"], 1 - frame["bound_us"] / frame["latency_us"])
    theirs = frame[frame["protocol"].str.startswith("custom_ar_v2")].groupby("batch")["latency_us"].min()
    assert np.allclose(frame["change_percent"], 100 * (frame["latency_us"] / frame["batch"].map(theirs) - 1))

    text = done.stdout
    assert (path / "decode.md").read_text() in text
    assert (path / "decode.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("### tiny, 2 layers, batch ") == 2
    assert text.count("same bits") == len(compared)
    assert "Times of an emulation in NumPy on a CPU: they show that the code runs, and nothing about a GPU." in text
    assert "auto (" in text


def test_mpi_beside_a_protocol(both: tuple[subprocess.CompletedProcess[str], Path, Path]) -> None:
    done, _, path = both
    run = experiments.load(path)
    assert run.complete
    found = {(c.protocol, c.dtype): (c.status, c.reason, c.iterations, c.wrong) for c in run.cases.itertuples()}
    assert found["mpi", "float32"] == ("measured", "", 10, 0)
    assert found["mpi", "bfloat16"] == ("refused", "MPI has no bfloat16: it adds float32 and int32", 0, 0)
    assert found["nccl", "float32"] == ("refused", "NCCL is for GPUs", 0, 0)
    assert run.cases.loc[run.cases["protocol"] == "mpi", "baseline"].all()
    assert set(run.latency["protocol"]) == {"one_shot.ll", "mpi"}
    assert sum("  mpi  " in line for line in done.stdout.splitlines()) == 2
    assert "NCCL is for GPUs" in done.stdout


def test_other_runs_are_no_decode_runs() -> None:
    run = experiments.load(Path(experiments.__file__).parent / "data" / "h200-shared" / "all_reduce")
    with pytest.raises(RecordError, match=r"is no run of experiments\.decode"):
        report.table(run)


@pytest.mark.full
def test_bad_input_is_said_once(tmp_path: Path) -> None:
    done = launch.mpirun(3, ["-m", "experiments.decode", "--model", "tiny", "--out", str(tmp_path)])
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: --model tiny: its 16 query heads are no equal parts for 3 ranks: start 2 or 4 or 8 ranks"]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
