"""Building kernels on the host: private, once, whole or not at all, and clear about what is missing."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fcomm.backends import cpu
from fcomm.dtypes import FLOAT32
from fcomm.errors import SetupError
from fcomm.protocols import protocol
from fcomm.source import Specialisation
from tests.launch import environment

SPEC = Specialisation(protocol("one_shot.ll"), FLOAT32, 2)
BUILD = """
import mpi4py
mpi4py.rc.initialize = False  # one of these is killed, and MPI would leave shared memory behind
from tests.unit.test_cpu_build import SPEC
from fcomm.backends import cpu
print(cpu.build(SPEC))
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FCOMM_CXX", raising=False)
    forget()


def forget() -> None:
    cpu.find_compiler.cache_clear()
    cpu._compiler_identity.cache_clear()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "cpu"


def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> Path:
    """A compiler that is a shell script; `--version` is the real one's, so a library's name is the real one's too.

    In the script, $real is the real compiler, and $out is the file to be made.
    """
    real = cpu.find_compiler()
    path = tmp_path / "cxx"
    path.write_text(
        f'#!/bin/sh\nreal={real}\n[ "$1" = --version ] && exec $real --version\nfor out; do :; done\n{script}\n'
    )
    path.chmod(0o700)
    monkeypatch.setenv("FCOMM_CXX", str(path))
    forget()
    return path


def sentence(error: pytest.ExceptionInfo[SetupError]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


def test_a_library_is_built_once_and_for_this_user_alone(cache: Path) -> None:
    os.umask(old := os.umask(0))  # whatever the umask
    try:
        os.umask(0)
        library = cpu.build(SPEC)
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert cpu.CpuKernel(library).struct_sizes[1:] == (128, 128)
    built = library.stat().st_mtime_ns
    assert cpu.build(SPEC) == library
    assert library.stat().st_mtime_ns == built
    assert sorted(p.suffix for p in cache.iterdir()) in ([".lock", ".so"], [".so"]), "no scratch is left"


def test_other_text_is_another_library() -> None:
    assert cpu.build(SPEC) != cpu.build(SPEC, defines=("FC_SOMETHING 1",))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(cache: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    with pytest.raises(SetupError, match="can be written by others") as caught:
        cpu.build(SPEC)
    assert "FCOMM_CACHE_DIR" in sentence(caught)


def test_a_folder_that_cannot_be_made_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(SetupError, match="cannot make the cache folder") as caught:
        cpu.build(SPEC)
    sentence(caught)


def test_a_folder_that_cannot_be_written_is_one_sentence(cache: Path) -> None:
    (cache / f"{SPEC.name}.lock").mkdir(parents=True, mode=0o700)  # root may write anywhere, but not open a folder
    cache.chmod(0o700)
    with pytest.raises(SetupError, match="cannot write to the cache folder") as caught:
        cpu.build(SPEC)
    sentence(caught)


def test_processes_that_race_build_one_good_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    log = tmp_path / "log"
    compiler(monkeypatch, tmp_path, f'echo built >> {log}; sleep 0.3; exec $real "$@"')
    racing = [
        subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in racing]
    assert [process.returncode for process in racing] == [0, 0]
    assert said[0] == said[1]
    assert log.read_text() == "built\n"
    assert [str(p) for p in cache.glob("*.so")] == said[:1]
    assert cpu.CpuKernel(Path(said[0])).max_blocks(32) >= 1


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCOMM_CXX", "nosuch-compiler")
    with pytest.raises(SetupError, match="nosuch-compiler") as caught:
        cpu.find_compiler()
    assert "FCOMM_CXX" in sentence(caught)
    monkeypatch.delenv("FCOMM_CXX")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match=r"c\+\+, g\+\+, clang\+\+") as caught:
        cpu.find_compiler()
    sentence(caught)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'kernel.cpp:1: error: it will not do' >&2; echo more >&2; exit 1", "error: it will not do"),
        ("printf 'first line\\nsecond line\\n' >&2; exit 1", "first line second line"),
        ("exit 7", "exit code 7"),
    ],
)
def test_a_broken_compiler_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    path = compiler(monkeypatch, tmp_path, script)
    with pytest.raises(SetupError) as caught:
        cpu.build(SPEC)
    text = sentence(caught)
    assert text.startswith(f"{path} could not compile {SPEC.name}: ")
    assert words in text


def test_a_compiler_that_cannot_be_run_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler(monkeypatch, tmp_path, "").write_bytes(b"\0\1\2\3 no program")
    with pytest.raises(SetupError, match="cannot be run") as caught:
        cpu.build(SPEC)
    sentence(caught)


def test_a_compiler_that_fails_half_way_leaves_nothing_to_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    compiler(monkeypatch, tmp_path, 'echo half a library > "$out"; exit 1')
    with pytest.raises(SetupError):
        cpu.build(SPEC)
    assert [p for p in cache.rglob("*") if p.suffix != ".lock"] == []
    assert_builds_with_the_real_compiler(monkeypatch)


def test_a_build_that_is_killed_leaves_nothing_to_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    compiler(monkeypatch, tmp_path, 'echo half a library > "$out"; kill -9 $PPID')
    done = subprocess.run([sys.executable, "-c", BUILD], env=environment(), timeout=60, check=False)
    assert done.returncode == -9
    assert list(cache.glob("*.so")) == []
    assert_builds_with_the_real_compiler(monkeypatch)


def assert_builds_with_the_real_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FCOMM_CXX")
    forget()
    assert hasattr(ctypes.CDLL(str(cpu.build(SPEC))), "fc_launch")


def test_every_library_is_built_without_contraction_or_fast_math() -> None:
    assert "-ffp-contract=off" in cpu.FLAGS
    assert "-fno-fast-math" in cpu.FLAGS


def test_what_killed_builds_have_left_is_cleared_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "cpu"
    folder.mkdir(mode=0o700)

    def left(name: str, age_s: float = 0.0) -> Path:
        scratch = folder / f"{name}~abcd1234.scratch"
        scratch.mkdir()
        (scratch / "kernel.cpp").touch()
        os.utime(scratch, (time.time() - age_s,) * 2)
        return scratch

    own, running, old = left("kernel"), left("kernel-any"), left("other", 2 * cpu.STALE_S)
    library = cpu.build_text('extern "C" int f() { return 1; }', "kernel")
    assert not own.exists(), "its lock is free, so nobody builds in it"
    assert not old.exists()
    assert running.exists(), "another one's may be in use"
    assert {p.name for p in folder.iterdir()} == {library.name, "kernel.lock", running.name}
    own = left("kernel")
    with pytest.raises(SetupError, match="could not compile kernel"):
        cpu.build_text("no C++", "kernel")
    assert {p.name for p in folder.iterdir()} == {library.name, "kernel.lock", running.name}


def test_a_build_that_is_killed_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    """A compiler that never ends stands for one that takes its time; the whole group is killed, as by the system."""
    slow = tmp_path / "slow-c++"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 60\n')
    slow.chmod(0o755)
    folder = tmp_path / "cache" / "cpu"
    script = "from fcomm.backends import cpu; cpu.build_text('int f;', 'kernel')"
    env = environment({"FCOMM_CACHE_DIR": str(tmp_path / "cache"), "FCOMM_CXX": str(slow)})
    process = subprocess.Popen([sys.executable, "-c", script], env=env, start_new_session=True)
    end = time.monotonic() + 20
    while not list(folder.glob("kernel~*/kernel.cpp")) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list(folder.glob("kernel~*")), "this is what it leaves"
    env = environment({"FCOMM_CACHE_DIR": str(tmp_path / "cache"), "FCOMM_CXX": ""})
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=60)
    assert not list(folder.glob("kernel~*"))
    assert len(list(folder.glob("kernel-*.so"))) == 1
