"""A private MPS daemon around a command.

``python -m experiments.mps [--share PERCENT] -- mpirun -n 8 python3 -m experiments.sweep``

Ranks that share a GPU take turns on it, milliseconds each, unless an MPS server runs them at once. The daemon started here
has directories of its own, serves this command alone, changes no setting of the GPU, and is stopped when the command ends,
however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fcomm.errors import ArgumentError, FcommError, SetupError

if TYPE_CHECKING:
    from mpi4py import MPI

CONTROL = "nvidia-cuda-mps-control"
START_S, QUIT_S, ANSWER_S = 20.0, 15.0, 10.0

# A client that makes a context, since a daemon may answer and its server still refuse; prints CUDA's error.
_CLIENT = """
import ctypes
d = ctypes.CDLL("libcuda.so.1")
print(d.cuInit(0) or d.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0))
"""
_BUSY = 46  # CUDA_ERROR_DEVICE_UNAVAILABLE: a server that has just ended is not gone yet


def available() -> bool:
    """Whether this machine has MPS."""
    return shutil.which(CONTROL) is not None


def environment(pipe: Path, log: Path, share: float | None) -> dict[str, str]:
    """Variables that make a process a client of the daemon with those directories."""
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    if share is not None:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share:g}"
    return env


def _check_share(share: float | None) -> None:
    if share is not None and not 0 < share <= 100:
        raise ArgumentError(f"a share of {share:g} % of the SMs is not between 0 and 100")


def _tell(env: Mapping[str, str], command: str, timeout_s: float = ANSWER_S) -> str | None:
    """Says something to the daemon; its answer, or None if there was none in time."""
    try:
        done = subprocess.run(
            [CONTROL], input=command + "\n", env={**os.environ, **env}, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _log_tail(log: Path) -> str:
    lines: list[str] = []
    for path in sorted(log.glob("*.log")):
        with contextlib.suppress(OSError):
            lines += path.read_text(errors="replace").splitlines()[-2:]
    return "; ".join(line.strip() for line in lines[-3:]) or "its logs are empty"


def _start(base: Path, share: float | None) -> dict[str, str]:
    pipe, log = base / "pipe", base / "log"
    pipe.mkdir()
    log.mkdir()
    env = environment(pipe, log, None)
    clean = {k: v for k, v in os.environ.items() if k != "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}
    try:
        # Not captured: the daemon inherits the descriptors, and a pipe would stay open as long as it runs.
        done = subprocess.run(
            [CONTROL, "-d"], env={**clean, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=START_S, check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SetupError(f"{CONTROL} did not start within {START_S:g} s: {_log_tail(log)}") from None
    except OSError as error:
        raise SetupError(f"{CONTROL} cannot be run ({error.strerror})") from None
    end = time.monotonic() + START_S
    while _tell(env, "get_server_list") is None:
        if done.returncode != 0 or time.monotonic() > end:
            raise SetupError(f"the MPS daemon does not answer (exit code {done.returncode}): {_log_tail(log)}")
        time.sleep(0.2)
    _check_client({**clean, **env}, log)
    return environment(pipe, log, share)


def _check_client(env: Mapping[str, str], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _CLIENT],
                env=dict(env),
                capture_output=True,
                text=True,
                timeout=START_S,
                check=False,
            )
            error = int(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            raise SetupError(f"the MPS daemon runs, but a client got no answer from it: {_log_tail(log)}") from None
        if error == 0:
            break
        if error != _BUSY or time.monotonic() > end:
            raise SetupError(f"the MPS daemon runs, but refuses clients (CUDA error {error}): {_log_tail(log)}")
        time.sleep(0.5)
    if not _tell(env, "get_server_list"):  # a server is started for the first client
        raise SetupError(f"the MPS daemon runs, but the GPU is not shared through it: {_log_tail(log)}")


def _daemon_pid(pipe: Path) -> int | None:
    """The daemon's process, if it is one: from its own file, and by its name."""
    try:
        pid = int((pipe / f"{CONTROL}.pid").read_text().split()[0])
        name = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, IndexError):
        return None
    return pid if CONTROL.encode() in name else None


def _stop(base: Path) -> None:
    """Stops the daemon that was started in `base`, with whatever clients it still has, and removes its directories."""
    pipe = base / "pipe"
    env = environment(pipe, base / "log", None)
    pid = _daemon_pid(pipe)
    servers = [int(word) for word in (_tell(env, "get_server_list") or "").split() if word.isdigit()]
    if _tell(env, "quit -t 3", QUIT_S) is None:
        _tell(env, "quit", QUIT_S)
    for process in [pid, *servers]:
        if process is not None:
            _end(process)
    shutil.rmtree(base, ignore_errors=True)


def _end(pid: int) -> None:
    """Waits for one of our MPS processes to end, and ends it where it does not."""
    for number, patience_s in ((None, 5.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        if number is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            try:
                if b"nvidia-cuda-mps" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return  # a zombie has no command line
            except OSError:
                return
            time.sleep(0.05)


@contextlib.contextmanager
def private_mps(share: float | None = None) -> Iterator[dict[str, str]]:
    """Runs an MPS daemon of one's own for the duration of the block.

    share : percent of the SMs that each client may use, alike for all; None for no limit.
    Yields the environment variables for client processes. They must have been set before a process first uses CUDA.
    """
    _check_share(share)
    if not available():
        raise SetupError(f"there is no {CONTROL} on this machine (it belongs to the NVIDIA driver): MPS cannot be used")
    base = Path(tempfile.mkdtemp(prefix="fcomm-mps-"))
    try:
        yield _start(base, share)
    finally:
        _stop(base)


def gpus_without_cuda() -> int:
    """GPUs that CUDA will find, without touching CUDA: a process that used it already cannot become an MPS client."""
    import ctypes

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        if nvml.nvmlInit_v2() != 0:
            return 0
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
        found = 0 if failed else int(count.value)
    except (OSError, AttributeError):
        return 0
    return found if visible is None else min(found, len([v for v in visible.split(",") if v.strip()]))


@contextlib.contextmanager
def mps_for_ranks(mpi: MPI.Intracomm, share: float | None = None) -> Iterator[bool]:
    """Collective: a private daemon for the ranks of `mpi`, where they outnumber the GPUs and MPS is there.

    Must be entered before any rank uses CUDA, and left when none does any more. Yields whether the ranks are MPS clients
    now. A watcher process stops the daemon when all ranks are gone, so that killed ranks leave none behind.
    """
    ready = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    gpus = gpus_without_cuda()
    wanted = not ready and 0 < gpus < mpi.size and available()
    if not all(mpi.allgather(wanted)):
        yield ready
        return
    pids: list[int] = mpi.allgather(os.getpid())
    told: tuple[dict[str, str] | None, str] | None = None
    if mpi.rank == 0:
        try:
            _check_share(share)
            base = Path(tempfile.mkdtemp(prefix="fcomm-mps-"))
            try:
                told = (_start(base, share), "")
            except FcommError:
                _stop(base)
                raise
            words = [sys.executable, "-m", "experiments.mps", "--watch", str(base), *map(str, pids)]
            subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd=Path(__file__).resolve().parent.parent,
            )  # fmt: skip
        except FcommError as error:
            told = (None, str(error))
    env, problem = mpi.bcast(told)
    if env is None:
        if mpi.rank == 0:
            print(f"note: going on without MPS: {problem}", file=sys.stderr, flush=True)
        yield False
        return
    os.environ.update(env)
    yield True


def _watch(base: Path, pids: Sequence[int]) -> int:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.25)
    _stop(base)
    return 0


def run(command: Sequence[str], share: float | None = None) -> int:
    """Runs a command under a private daemon; its exit code (128 + n if signal n ended it)."""
    process: subprocess.Popen[bytes] | None = None
    caught: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if process is None:
            raise KeyboardInterrupt
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number if len(caught) == 1 else signal.SIGKILL)

    before: dict[int, Any] = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with private_mps(share) as env:
            try:
                process = subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True)
            except OSError as error:
                raise ArgumentError(f"cannot run {command[0]}: {error.strerror}") from None
            code = process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived their launcher
        return 128 - code if code < 0 else code
    except KeyboardInterrupt:
        return 128 + (caught[0] if caught else signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that is named behind ``--``; returns its exit code, 1 without MPS, 2 for a wrong option."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--watch"]:
        return _watch(Path(words[1]), [int(w) for w in words[2:]])
    parser = argparse.ArgumentParser(prog="python -m experiments.mps", description=(__doc__ or "").split("\n\n")[2])
    parser.add_argument(
        "--share", type=float, metavar="PERCENT", help="limit of the SMs of each process, alike for all"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, e.g. mpirun ...")
    options = parser.parse_args(words)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command: python -m experiments.mps -- mpirun -n 8 python3 -m experiments.sweep")
    try:
        return run(command, options.share)
    except FcommError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1


if __name__ == "__main__":
    raise SystemExit(main())
