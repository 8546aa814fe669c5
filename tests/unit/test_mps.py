"""The daemon around a command, with a stand-in for NVIDIA's: what is started is stopped, whatever happens to the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import mps
from fcomm.errors import ArgumentError, SetupError
from tests.launch import ROOT, environment

# Answers like nvidia-cuda-mps-control as far as experiments.mps asks; its daemon is a process of the same name.
FAKE = """#!{python}
import os, signal, subprocess, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
file = os.path.join(pipe, "nvidia-cuda-mps-control.pid")
if "--serve" in sys.argv:
    time.sleep(60)
elif "-d" in sys.argv:
    if os.environ.get("FAKE_DEAD"):
        sys.exit(1)
    open(os.environ["FAKE_BASE"], "a").write(pipe + "\\n")
    daemon = subprocess.Popen([sys.executable, __file__, "--serve"], start_new_session=True)
    open(file, "w").write(str(daemon.pid))
else:
    if not os.path.exists(file):
        sys.exit("Cannot find MPS control daemon process")
    pid = int(open(file).read())
    for line in sys.stdin:
        if line.startswith("quit"):
            if not os.environ.get("FAKE_STUBBORN"):
                os.kill(pid, signal.SIGTERM)
        elif line.startswith("get_server_list"):
            print(pid)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stand-in on PATH; returns the file that lists the pipe directories of the daemons it started."""
    tool = tmp_path / "bin" / mps.CONTROL
    tool.parent.mkdir()
    tool.write_text(FAKE.format(python=sys.executable))
    tool.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_BASE", str(tmp_path / "started"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(mps, "_CLIENT", "print(0)")
    return tmp_path / "started"


def left_behind(tmp_path: Path) -> list[str]:
    """Directories and daemons that should be gone."""
    found = [str(p) for p in (tmp_path / "tmp").iterdir()]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes().decode().replace("\0", " ")
            except OSError:
                continue
            if str(tmp_path) in line and "--serve" in line:
                found.append(line)
    return found


def test_the_command_sees_the_daemon_and_its_exit_code_is_ours(fake: Path, tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(7 if os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'] == '12.5' and os.path.exists(os.environ['CUDA_MPS_PIPE_DIRECTORY']) else 1)"
    assert mps.main(["--share", "12.5", "--", sys.executable, "-c", code]) == 7
    assert fake.read_text().count("\n") == 1
    assert left_behind(tmp_path) == []


def test_a_daemon_that_does_not_quit_is_ended(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STUBBORN", "1")
    assert mps.main(["--", sys.executable, "-c", "pass"]) == 0
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(number: signal.Signals, fake: Path, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\nfrom experiments import mps\nmps._CLIENT = 'print(0)'\nsys.exit(mps.main(sys.argv[1:]))\n"
    )
    marker = tmp_path / "running"
    command = f"import pathlib, time; pathlib.Path({str(marker)!r}).touch(); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, str(script), "--", sys.executable, "-c", command], env=environment(), cwd=ROOT
    )
    end = time.monotonic() + 30
    while not marker.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert marker.exists()
    process.send_signal(number)
    assert process.wait(timeout=30) in (128 + number, 1, 130)
    assert left_behind(tmp_path) == []


def test_the_watcher_stops_the_daemon_after_its_processes(fake: Path, tmp_path: Path) -> None:
    base = tmp_path / "tmp" / "base"
    base.mkdir()
    mps._start(base, None)
    assert len(left_behind(tmp_path)) == 2
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    watcher = subprocess.Popen(
        [sys.executable, "-m", "experiments.mps", "--watch", str(base), str(rank.pid)], cwd=ROOT, env=environment()
    )
    rank.wait(timeout=20)
    assert watcher.wait(timeout=30) == 0
    assert left_behind(tmp_path) == []


def test_a_dead_daemon_is_named(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEAD", "1")
    with pytest.raises(SetupError, match="does not answer"), mps.private_mps():
        pass
    assert left_behind(tmp_path) == []


def test_a_daemon_that_refuses_clients_is_named(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_CLIENT", "print(807)")
    with pytest.raises(SetupError, match=r"refuses clients.*807"), mps.private_mps():
        pass
    assert left_behind(tmp_path) == []


def test_no_mps_and_wrong_options_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert mps.main(["--", "true"]) == 1
    assert mps.main(["--share", "0", "--", "true"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "no nvidia-cuda-mps-control" in errors[0]
    assert "not between 0 and 100" in errors[1]
    with pytest.raises(ArgumentError), mps.private_mps(101):
        pass
