"""Starting ranks from a test: mpirun with a limit, the whole process group ended when it is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Open MPI refuses root and more ranks than cores unless told; other libraries ignore that.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PYTHONUNBUFFERED": "1",
    "FCOMM_MODEL": "seed",  # a test does not depend on what was calibrated on the machine
}


def find_mpirun() -> str:
    """The launcher that make chose (MPIRUN), else the one beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    named = os.environ.get("MPIRUN", "mpirun").split()[0]
    found = str(beside) if named == "mpirun" and beside.exists() else shutil.which(named)
    assert found, "no mpirun: `make test` sets one up"
    return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {**os.environ, **_ENVIRONMENT, **(extra or {})}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return env


def mpirun_popen(
    n: int, args: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Starts `python args...` on n ranks in a process group of its own."""
    return subprocess.Popen(
        [find_mpirun(), "-n", str(n), sys.executable, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(env),
        cwd=cwd or ROOT,
        start_new_session=True,
    )


def family(pid: int) -> list[int]:
    """A process and all that it and its children have started: a launcher puts its ranks into groups of their own."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def kill(process: subprocess.Popen[str]) -> None:
    """Ends the launcher and all ranks at once, as a crash or an impatient user would."""
    for pid in family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def mpirun(
    n: int,
    args: Sequence[str],
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python args...` on n ranks; returns exit code, output and errors. 124 stands for "ran out of time"."""
    process = mpirun_popen(n, args, env, cwd)
    try:
        out, err = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        kill(process)
        out, err = process.communicate()
        code, err = 124, f"{err}\n(ended after {timeout} s)"
    return subprocess.CompletedProcess(process.args, code, out, err)
