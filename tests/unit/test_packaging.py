"""What a wheel holds: outside of a checkout the kernels must be found inside the package."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL_SUFFIXES = {".cu", ".cuh", ".h", ".hpp", ".cpp"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built without any network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_kernel_source_with_its_bytes(wheel: Path) -> None:
    sources = {
        "fcomm/" + path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in sorted((ROOT / "kernels_cu").rglob("*"))
        if path.suffix in KERNEL_SUFFIXES
    }
    assert sources
    with zipfile.ZipFile(wheel) as archive:
        shipped = {n: archive.read(n) for n in archive.namelist() if Path(n).suffix in KERNEL_SUFFIXES}
    assert shipped.keys() == sources.keys()
    assert shipped == sources


def test_wheel_holds_every_module_and_no_more(wheel: Path) -> None:
    modules = {p.relative_to(ROOT).as_posix() for top in ("fcomm", "experiments") for p in (ROOT / top).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == {
        "fcomm",
        "experiments",
        f"flash_comm-{version()}.dist-info",
    }


def test_unpacked_wheel_imports_from_itself_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", "import fcomm; print(fcomm.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == (site / "fcomm" / "__init__.py").resolve()


def version() -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def test_citation_has_the_version_of_pyproject() -> None:
    match = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert match is not None
    assert match[1] == version()


def test_ci_script_is_executable_and_runs_the_readme_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
