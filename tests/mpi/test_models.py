"""Cost models between ranks: said once, measured in a calibration, found by the next job."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import fcomm
from experiments import calibrate
from experiments.calibrate import measured_protocols
from fcomm import models, settings
from fcomm.backends import cpu
from fcomm.cost_model import Model, seed_model
from fcomm.dtypes import BYTES, FLOAT32
from fcomm.errors import ArgumentError, ModelError, SetupError
from fcomm.protocols import protocol, protocols
from fcomm.source import Specialisation, source_hash
from tests import launch

pytestmark = pytest.mark.mpi
CALIBRATE = ["-m", "experiments.calibrate", "--backend", "cpu"]


def test_explain_is_said_once_however_many_ranks_there_are() -> None:
    done = launch.mpirun(3, ["-m", "fcomm", "explain", "--bytes", "64K"], timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_reduce of 64 KiB") == 1
    done = launch.mpirun(3, ["-m", "fcomm", "explain", "--bytes", "3X"], timeout=30)
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        "error: '3X' is not a size: use a positive number of bytes such as 4096, 4K or 1M"
    ]


@pytest.mark.parametrize(
    ("started", "arguments", "words"),
    [
        (1, [], "at least two ranks"),
        (4, ["--ranks", "1,4"], "at least two ranks"),
        (2, ["--ranks", "4"], "--ranks asks for 4 ranks and 2 were started"),
        (2, ["--budget", "soon"], "--budget 'soon' is not a time"),
        (2, ["--dtype", "float64"], "float64 cannot be reduced"),
        (2, ["--sav"], "--sav"),
        (2, ["--calls", "-1"], "--calls -1"),
    ],
)
def test_nonsense_is_one_sentence(started: int, arguments: list[str], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        calibrate.asked(calibrate.parser().parse_args(arguments), started)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks", [(2,), (3,), (7,), (2, 4, 8), (2, 3, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_calibration_covers_what_may_be_chosen(backend: str, ranks: tuple[int, ...]) -> None:
    wanted = calibrate.request(backend, ranks)
    measured = set(wanted.protocols)
    assert {protocol(name).collective for name in measured} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {name for name in measured if protocol(name).baseline} == {p.name for p in protocols().values() if p.plain}
    if backend == "cuda":
        assert measured >= {p.name for p in protocols().values() if not p.baseline}
    assert len(set(wanted.sizes)) == len(wanted.sizes) >= 4
    if len(ranks) < 7:
        assert all(nbytes % (16 * n) == 0 for nbytes in wanted.sizes for n in ranks), "equal, aligned parts"
    assert wanted.resolved(backend).modes == ("graph" if backend == "cuda" else "host",)


def test_a_model_of_another_machine_is_no_matter_for_a_single_rank(tmp_path: Path) -> None:
    """It chooses nothing, and a program that names its model must run with any number of ranks."""
    model = replace(seed_model({"backend": "cuda", "device": "Babbage"}), seed=False)
    path = model.save(tmp_path / "model.json")
    with fcomm.Communicator(MPI.COMM_SELF, backend="cpu", max_bytes=1024, model=path) as comm:
        assert comm.model.digest() == model.digest()
        assert "one rank copies" in comm.explain("all_reduce", 64, "f32").why
    path.write_text(model.to_json()[:-20])
    with pytest.raises(ModelError, match="truncated"):
        fcomm.Communicator(MPI.COMM_SELF, backend="cpu", max_bytes=1024, model=path)


def test_a_budget_that_is_too_short_is_one_sentence() -> None:
    done = launch.mpirun(2, [*CALIBRATE, "--budget", "1s"], timeout=60)
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert (done.returncode, len(said)) == (2, 1), done.stderr
    assert "--budget 1s is too short for a single case" in said[0]


def test_a_model_that_cannot_be_written_is_told_before_the_calibration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = launch.mpirun(2, [*CALIBRATE, "--model", str(tmp_path / "file" / "model.json")], timeout=20)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        f"error: cannot make the folder {tmp_path / 'file'} (File exists): name another one with --model"
    ]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder of one's own, without models, in which the kernels of a calibration are already built."""
    specs = [
        Specialisation(p, BYTES if p.algorithm.moves_bytes else FLOAT32, 2)
        for p in map(protocol, measured_protocols("cpu"))
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cpu.build, specs))
    (tmp_path / "cpu").symlink_to(settings.cache_dir() / "cpu")
    return tmp_path


def job(arguments: Sequence[str], cache: Path, timeout: float = 90) -> tuple[str, str]:
    """What two ranks say that look for models in that folder; they must succeed."""
    done = launch.mpirun(2, arguments, timeout=timeout, env={"FCOMM_MODEL": "", "FCOMM_CACHE_DIR": str(cache)})
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.full
def test_a_calibration_is_found_by_the_next_job(cache: Path) -> None:
    out, _ = job([*CALIBRATE, "--calls", "20", "--save"], cache)
    (path,) = (cache / "models").iterdir()
    model = json.loads(path.read_text())["model"]
    assert model["ranks"] == [2]
    assert set(model["own"]) == set(measured_protocols("cpu"))
    assert f"{path} has the model" in out
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        assert re.search(rf"{collective} +2  none +64 KiB +\d+\.\d\d  \w+\.", out), out
    told = re.search(r"cost model ([0-9a-f]{12}) of ", out)
    assert told, out
    info, _ = job(["-m", "fcomm", "info", "--backend", "cpu"], cache)
    assert f"model      model {told[1]} of " in info, info


@pytest.mark.full
def test_a_communicator_calibrates_itself(cache: Path) -> None:
    script = """
import fcomm, numpy as np
from mpi4py import MPI
with fcomm.Communicator(MPI.COMM_WORLD, backend="cpu") as comm:
    assert comm.model.seed
    x = np.ones(1000, np.float32)
    call = comm.prepare("all_reduce", x)
    model = fcomm.calibrate(comm, 20)
    assert comm.model is model and not model.seed
    assert (call() == 2).all() and (comm.all_reduce(x) == 2).all()
    one = model.digest()
with fcomm.Communicator(MPI.COMM_WORLD, backend="cpu") as comm:
    assert comm.mpi.allgather(comm.model.digest()) == [one, one]
"""
    path = cache / "script.py"
    path.write_text(script)
    job([str(path)], cache)


def test_models_of_several_rank_counts_are_kept_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FCOMM_MODEL", raising=False)
    machine = {"backend": "cpu", "device": "a", "cores": 2}
    some = replace(seed_model(machine), seed=False, source_hash=source_hash())
    times = iter(range(1, 100))

    def keep(*ranks: int, **changes: Any) -> tuple[Path, Model]:
        """Saves a model, later than those before."""
        model = replace(some, ranks=ranks, **changes)
        path = calibrate.save(model)
        os.utime(path, (now := next(times), now))
        return path, model

    def found(world_size: int) -> str:
        return models.find(None, machine, world_size).model.digest()

    _, wide = keep(2, 4, 8)
    _, four = keep(4)
    assert found(4) == four.digest(), "the newest that was fitted to 4 ranks"
    assert found(2) == found(8) == wide.digest(), "calibrating 4 ranks took nothing from the others"
    assert found(6) == wide.digest(), "what knows most rank counts is extrapolated"
    path, four = keep(4, max_bytes=1 << 21)
    assert found(4) == four.digest()
    assert len(list(path.parent.iterdir())) == 2, "the same rank counts replace"
    _, wide = keep(2, 4, 8, max_bytes=1 << 22)
    assert found(4) == wide.digest()
    path.write_text("{")
    os.utime(path, (now := next(times), now))
    assert found(4) == wide.digest(), "one that cannot be read is no loss beside one that can"
    path, _ = keep(2, 4, 8, source_hash="0" * 64)
    origin = models.find(None, machine, 4)
    assert origin.model.seed
    assert f"the cost model {path} was left alone: it was fitted to other kernels" in str(origin.note), (
        "the newest is spoken of"
    )
    assert models.find(None, {**machine, "cores": 3}, 4).note is not None, "of another machine"


def test_the_package_that_measures_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "experiments", None)
    monkeypatch.delitem(sys.modules, "experiments.calibrate", raising=False)
    with pytest.raises(SetupError, match=r"^calibrating needs the package `experiments`"):
        fcomm.calibrate(None)  # type: ignore[arg-type]
