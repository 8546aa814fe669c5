"""pyproject.toml, environment.yml and constraints.txt name the same packages; set-up trusts nothing half-done."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# What conda provides and pip does not know or need not be told.
CONDA_ONLY = {"python", "pip", "make", "cxx-compiler"}
# Names that conda has for PyPI's.
CONDA_NAMES = {"pytorch": "torch"}
# Names that only PyPI has.
PYPI_ONLY = re.compile(r"cupy-cuda12x|nvidia-.*")


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def as_bounds(requirements: list[str]) -> dict[str, SpecifierSet]:
    parsed = [Requirement(text) for text in requirements]
    return {str(canonicalize_name(r.name)): r.specifier for r in parsed if r.name != "flash-comm"}


def pyproject_bounds() -> dict[str, SpecifierSet]:
    table = project()
    extras = [r for extra in table["optional-dependencies"].values() for r in extra]
    return as_bounds([*table["dependencies"], *extras])


def environment_bounds() -> tuple[dict[str, SpecifierSet], dict[str, SpecifierSet]]:
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = as_bounds([entry for entry in entries if isinstance(entry, str)])
    pip = as_bounds([text for entry in entries if isinstance(entry, dict) for text in entry["pip"]])
    return conda, pip


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    split = [line.split("==") for line in lines]
    return {str(canonicalize_name(name)): version for name, version in split}


def test_environment_yml_has_the_names_and_bounds_of_pyproject() -> None:
    conda, pip = environment_bounds()
    assert not conda.keys() & pip.keys()
    in_environment = {CONDA_NAMES.get(n, n): bounds for n, bounds in (conda | pip).items() if n not in CONDA_ONLY}
    assert in_environment == pyproject_bounds()


def test_environment_yml_takes_from_pypi_only_what_conda_lacks() -> None:
    conda, pip = environment_bounds()
    assert [name for name in pip if not PYPI_ONLY.fullmatch(name)] == []
    assert [name for name in conda if PYPI_ONLY.fullmatch(name)] == []


def test_environment_yml_asks_for_the_same_python() -> None:
    conda, _ = environment_bounds()
    assert conda["python"] == SpecifierSet(project()["requires-python"])


def test_every_package_has_a_lower_bound() -> None:
    unbounded = [n for n, bounds in pyproject_bounds().items() if not any(b.operator == ">=" for b in bounds)]
    assert unbounded == []


def test_each_package_is_pinned_within_its_bounds() -> None:
    pinned = pins()
    outside = {n: (str(b), pinned.get(n)) for n, b in pyproject_bounds().items() if pinned.get(n, "") not in b}
    assert outside == {}


def test_only_one_mpi_is_pinned() -> None:
    assert [name for name in pins() if name in {"mpich", "openmpi", "impi-rt"}] == ["mpich"]


@pytest.fixture(scope="module")
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_setup_reads_bounds_as_packaging_does(setup_env: ModuleType) -> None:
    versions = ["0.5.1", "0.6", "1", "1.0.0", "2.2", "3", "4.1.2", "12.9.86", "13.0", "2026.6"]
    for name, bounds in pyproject_bounds().items():
        for version in versions:
            got = setup_env.satisfies(version, str(bounds))
            assert got == bounds.contains(version, prereleases=True), (name, str(bounds), version)


def test_check_names_what_is_missing_and_what_is_too_old(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "requirements", lambda extras: ["no-such-thing>=1", "numpy>=99", "pytest>=1"])
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.check("test", [], packages=True)
    text = str(caught.value)
    assert "no-such-thing (not installed)" in text
    assert "numpy >=99 (has " in text
    assert "pytest" not in text.split(":")[0]


def test_check_says_that_there_is_no_launcher(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("MPIRUN", raising=False)
    monkeypatch.setattr(setup_env.sys, "prefix", "/elsewhere")
    with pytest.raises(setup_env.SetupError, match="no mpirun on PATH"):
        setup_env.check("run", ["mpirun"], packages=False)


@pytest.fixture
def venv_in(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set-up that works on a folder of its own and records commands in place of running them."""
    for name, file in {
        "VENV": ".venv",
        "MARK": ".venv/.flash-comm",
        "LOG": ".venv.log",
        "LOCK": ".venv.lock",
    }.items():
        monkeypatch.setattr(setup_env, name, tmp_path / file)
    return tmp_path / ".venv"


def test_a_foreign_venv_is_never_removed(setup_env: ModuleType, venv_in: Path) -> None:
    (venv_in / "bin").mkdir(parents=True)
    with pytest.raises(setup_env.SetupError, match="not made by this Makefile"):
        setup_env.install("run")
    assert (venv_in / "bin").is_dir()


def test_a_failed_install_leaves_no_stamp(
    setup_env: ModuleType, venv_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_run(title: str, command: list[str], *args: object, **options: object) -> None:
        if "venv" in command:
            (venv_in / "bin").mkdir()
            (venv_in / "bin" / "python").touch()
        elif broken:
            raise setup_env.SetupError("network down")

    monkeypatch.setattr(setup_env, "run_logged", fake_run)
    monkeypatch.setattr(setup_env, "install_mpi", lambda pip, log, lock_fd: None)
    broken = False
    setup_env.install("run")
    assert setup_env.ready("run")
    broken = True  # the next stage fails half-way: what was installed for the first may be damaged too
    with pytest.raises(setup_env.SetupError, match="network down"):
        setup_env.install("test")
    assert list(venv_in.glob(".ready-*")) == []
    broken = False
    (venv_in / "leftover").touch()
    setup_env.install("test")
    assert setup_env.ready("run")
    assert setup_env.ready("test")
    assert not (venv_in / "leftover").exists()


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_make_alone_lists_the_targets() -> None:
    done = make()
    assert done.returncode == 0
    assert {"sweep", "test", "test-full", "lint", "format", "clean"} <= {
        line.split()[0] for line in done.stdout.splitlines()
    }


def test_make_refuses_an_interpreter_that_is_not_there() -> None:
    done = make("sweep", "PY=no-such-python")
    assert done.returncode != 0
    assert "PY=no-such-python: there is no such interpreter" in done.stderr


def test_make_uses_a_given_interpreter_without_setting_up() -> None:
    done = make("-n", "sweep", f"PY={sys.executable}", "NP=3", "SWEEP_ARGS=--dry-run")
    assert done.returncode == 0
    assert "install" not in done.stdout
    assert "-n 3" in done.stdout
    assert "-m experiments.sweep --dry-run" in done.stdout
    assert "--into" not in done.stdout


def test_make_launches_a_sweep_several_times_into_one_folder() -> None:
    done = make("-n", "sweep", f"PY={sys.executable}", "SWEEP_ARGS=--sizes 1K --budget 5m", "LAUNCHES=5")
    assert done.returncode == 0
    assert "-le 5" in done.stdout
    # The last of two budgets counts, so the one that was asked for.
    assert '-m experiments.sweep --budget 30s --sizes 1K --budget 5m --into "$run"' in done.stdout
