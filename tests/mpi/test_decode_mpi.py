"""The decode command, and peers in a sweep, under real mpirun: whole runs on the cpu backend, in one launch."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest

import experiments
from experiments import claims
from experiments.decode import report
from fcomm.errors import ArgumentError, RecordError
from tests import launch

pytestmark = pytest.mark.mpi

NAMES = "one_shot.ll,two_shot.lamport16,custom_ar_v2,custom_ar_v2.pull_two_shot"
DECODE = ["--protocols", NAMES, "--batch", "1,3", "--calls", "6", "--shapes", "search"]
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
    tuned = run.cases["case"].isin([case for step in run.request["steps"] for case in step["tuned"]])
    assert tuned.sum() == 2
    assert (
        run.cases.loc[tuned, "reason"].str.contains("its default one is the fastest")
        | (run.cases.loc[tuned, "shape"] != "")
    ).all()
    assert set(run.cases.loc[~tuned, "status"]) == {"measured"}
    assert (run.cases["wrong"] == 0).all()
    assert len(run.cases) == 2 * (3 + len(NAMES.split(",")))
    compared = run.cases[(run.cases["protocol"] != "none") & (run.cases["status"] == "measured")]
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
    assert text.count("| same bits") == len(compared)
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


def test_steps_are_no_latencies(both: tuple[subprocess.CompletedProcess[str], Path, Path], tmp_path: Path) -> None:
    _, decode, sweep = both
    with pytest.raises(RecordError, match="has times of whole decode steps, and no latencies of a collective"):
        experiments.load(decode).for_figures()
    assert claims.main([str(decode), str(sweep), "--out", str(tmp_path)]) == 0
    assert "an emulated one, is no evidence" in (tmp_path / "claims.md").read_text()
    with pytest.raises(ArgumentError, match=r"only runs of experiments\.decode were named"):
        claims.main([str(decode), "--out", str(tmp_path)])


def test_what_a_server_would_claim(both: tuple[subprocess.CompletedProcess[str], Path, Path]) -> None:
    run = experiments.load(both[1])
    run.launches[0].update(backend="cuda", ranks_per_device=1)
    tpot, share = report.end_to_end([run])
    frame = report.frame(run)
    auto = frame.loc[frame["protocol"] == "auto", "change_percent"]
    assert tpot == f"{auto.max():+.1f} % to {auto.min():+.1f} % (2 steps)"
    assert share.endswith("(2 steps)")
    assert "no evidence" not in report.table(run)


# An all-reduce that is wrong on one rank, in one element and in its second call, must be found before anything is timed.
BROKEN = """
from mpi4py import MPI

from experiments.decode.__main__ import main
from fcomm import bootstrap
from fcomm.communicator import Call

right, calls = Call.__call__, {{}}


def wrong(self):
    out = right(self)
    if self.protocol == "two_shot.lamport16" and MPI.COMM_WORLD.rank == 1:
        calls[self] = calls.get(self, 0) + 1
        if calls[self] == 2:
            out.reshape(-1)[7] += 1
    return out


Call.__call__ = wrong
raise SystemExit(bootstrap.run(lambda argv: main({words!r})))
"""


@pytest.mark.full
def test_a_wrong_sum_is_found_and_not_timed(tmp_path: Path) -> None:
    words = ["--protocols", "one_shot.ll,two_shot.lamport16", "--batch", "2", "--calls", "6", "--out", str(tmp_path)]
    done = launch.mpirun(2, ["-c", BROKEN.format(words=words)], timeout=100)
    assert done.returncode == 1, done.stderr
    (path,) = (p.parent for p in tmp_path.glob("*/run.json"))
    run = experiments.load(path)
    bad = run.cases[run.cases["protocol"] == "two_shot.lamport16"].iloc[0]
    assert (bad["status"], bad["iterations"]) == ("wrong", 0)
    assert bad["wrong"] > 0
    assert "outputs of a step differ from the sums taken on the host" in bad["reason"]
    assert (run.cases.loc[run.cases["protocol"] != "two_shot.lamport16", "status"] == "measured").all()
    assert "- wrong: " in done.stdout


@pytest.mark.full
def test_bad_input_is_said_once(tmp_path: Path) -> None:
    done = launch.mpirun(3, ["-m", "experiments.decode", "--model", "tiny", "--out", str(tmp_path)])
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: --model tiny: its 16 query heads are no equal parts for 3 ranks: start 2 or 4 or 8 ranks"]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_torch_distributed_beside_a_protocol(tmp_path: Path) -> None:
    """Over two rank counts, each with a process group of its own."""
    words = [
        "--protocols",
        "one_shot.ll",
        "--peers",
        "torch",
        "--ranks",
        "2,3",
        "--sizes",
        "1K",
        "--dtypes",
        "f32,bf16",
    ]
    words += ["--calls", "10", "--budget", "10m", "--out", str(tmp_path)]
    done = launch.mpirun(3, ["-m", "experiments.sweep", *words], timeout=200)
    assert done.returncode == 0, done.stderr
    (path,) = (p.parent for p in tmp_path.glob("*/run.json"))
    cases = experiments.load(path).cases
    theirs = cases[cases["protocol"] == "torch.distributed"]
    assert len(theirs) == 4
    assert (theirs["status"] == "measured").all()
    assert (theirs["wrong"] == 0).all()
    symmetric = cases[cases["protocol"].str.startswith("torch.symm_mem")]
    assert set(symmetric["reason"]) == {"PyTorch's symmetric memory is for GPUs"}
