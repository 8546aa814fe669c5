"""Set up or check the Python environment that the Makefile's targets run in.

``install run|test|lint|notebooks`` builds ``.venv`` with the packages of pyproject.toml at the versions of constraints.txt,
and an MPI whose launcher and library belong together. ``check STAGE`` says in one sentence what the running Python lacks.
``lock`` writes constraints.txt anew. Standard library only: it runs before anything is installed.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

if sys.version_info < (3, 11):  # noqa: UP036 - this file is what tells users of an older Python
    sys.exit("flash-comm needs Python 3.11 or newer; %s is %s" % (sys.executable, sys.version.split()[0]))  # noqa: UP031

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MARK = VENV / ".flash-comm"  # says that this tool made the folder, and so may remove it
LOG = ROOT / ".venv.log"
LOCK = ROOT / ".venv.lock"
CONSTRAINTS = ROOT / "constraints.txt"

# What each stage needs besides the project's own dependencies: extras of pyproject.toml.
STAGES: dict[str, tuple[str, ...]] = {
    "run": (),
    "test": ("nvrtc", "test"),
    "lint": ("lint", "test"),  # test: mypy also reads the tests
    "notebooks": ("notebooks",),
}
# A distribution is known by another import name, or another distribution does as well.
IMPORT_NAMES = {"cupy-cuda12x": "cupy", "mpi4py": "mpi4py.MPI", "pyyaml": "yaml"}
ALTERNATIVES = {"cupy-cuda12x": ("cupy-cuda13x", "cupy")}
# Nothing to import, or conda and a system toolkit provide it under no Python name at all.
NO_IMPORT = ("clang-format", "pandas-stubs", "nvidia-")
COMPILERS = ("c++", "g++", "clang++")

# Open MPI, every version of it: run as root (containers) and with more ranks than cores. Other MPIs ignore these.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# Launcher and library that do not belong together run two worlds of one rank. Only rank 0 prints: lines of two ranks mix.
MPI_PROBE = """
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(1)
if world.Get_rank() == 0:
    print("ranks", total, flush=True)
raise SystemExit(total != 2)
"""


class SetupError(Exception):
    """A problem that the user can act on; its text is the one sentence they see."""


# --- what is needed ------------------------------------------------------------------------------------------------


def load_pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    import tomllib  # here, not at the top, so that an older Python reaches the sentence there

    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def split_requirement(text: str) -> tuple[str, str]:
    """``"numpy>=2.2,<3"`` -> ``("numpy", ">=2.2,<3")``; the name in its canonical form."""
    match = re.fullmatch(r"\s*([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;.*)?", text)
    if match is None:
        raise SetupError(f"pyproject.toml: cannot read the requirement {text!r}")
    return re.sub(r"[-_.]+", "-", match[1]).lower(), match[2].replace(" ", "")


def requirements(extras: tuple[str, ...]) -> list[str]:
    """The project's dependencies and those of ``extras``, as they stand in pyproject.toml."""
    project = load_pyproject()["project"]
    return [
        *project["dependencies"],
        *(r for extra in extras for r in project["optional-dependencies"][extra]),
    ]


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, enough to compare against the plain bounds used in pyproject.toml."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z+]", version.lower())[0]))


def satisfies(version: str, bounds: str) -> bool:
    """Whether ``version`` lies within bounds made of ``>=`` and ``<``."""
    for bound in filter(None, bounds.split(",")):
        operator, limit = re.fullmatch(r"(>=|<)(.+)", bound).groups()  # type: ignore[union-attr]
        have, want = release(version), release(limit)
        width = max(len(have), len(want))
        have, want = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
        if (have >= want) != (operator == ">="):
            return False
    return True


def digest(stage: str) -> str:
    """Changes when an environment made earlier no longer is what ``stage`` asks for."""
    pyproject = load_pyproject()
    facts = [
        sorted(requirements(STAGES[stage])),
        pyproject["build-system"],
        pyproject["project"]["version"],
        pyproject["tool"]["hatch"],
        CONSTRAINTS.read_text(),
        Path(__file__).read_text(),
        str(ROOT),  # scripts in .venv/bin hold absolute paths
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


# --- install -------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """One line for the person who waits; stdout stays free for results."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


class Progress:
    """One line that says what is going on: redrawn on a terminal, printed every few seconds elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start_s = self._shown_s = time.monotonic()
        self._terminal = sys.stderr.isatty()
        say(title)

    def show(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < (0.2 if self._terminal else 5.0):
            return
        self._shown_s = now_s
        line = f"set-up: {now_s - self._start_s:4.0f} s  {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        else:
            print(line[:110], file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal:
            print(
                "\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r",
                end="",
                file=sys.stderr,
                flush=True,
            )


def describe(line: str) -> str:
    """What a line of pip's output means to someone who waits."""
    if match := re.match(r"Collecting (\S+)", line):
        return f"looking up {split_requirement(match[1])[0]}"
    if match := re.match(r"\s*(?:Downloading|Using cached) (\S+)-\d\S* (\(.*\))", line):
        return f"fetching {match[1]} {match[2]}"
    if line.startswith("Installing collected packages:"):
        return f"unpacking {line.count(',') + 1} packages"
    return ""


def run_logged(title: str, command: list[str], log: IO[str], lock_fd: int, *, may_fail: bool = False) -> None:
    """Run ``command`` with its output in the log and a progress line on the screen.

    The child inherits the lock: when this process is killed, a later set-up waits until the child is gone too, rather than
    removing a folder that the child still writes to.
    """
    log.write(f"\n$ {shlex.join(command)}\n")
    log.flush()
    progress = Progress(title)
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    env.pop("PIP_USER", None)  # does not go with a virtual environment
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        pass_fds=(lock_fd,),
    )
    assert process.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def pump(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, args=(process.stdout,), daemon=True).start()
    doing = "working"
    tail: list[str] = []
    try:
        while True:
            try:
                line = lines.get(timeout=0.5)
            except queue.Empty:
                progress.show(doing)
                continue
            if line is None:
                break
            log.write(line)
            log.flush()
            tail = [*tail[-14:], line.rstrip()]
            doing = describe(line) or doing
            progress.show(doing)
        status = process.wait()
    finally:
        progress.close()
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0 and not may_fail:
        print("\n".join(f"  | {line}" for line in tail), file=sys.stderr)
        raise SetupError(f"{title} failed (status {status}); the whole output is in {LOG.relative_to(ROOT)}")


def base_python() -> str:
    """The interpreter outside of any virtual environment, so that removing .venv cannot pull it away from under us."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def create_venv(log: IO[str], lock_fd: int) -> list[str]:
    """Make sure that .venv is there; returns the pip command that installs into it."""
    python = VENV / "bin" / "python"
    stamps = list(VENV.glob(".ready-*"))
    mark = MARK.read_text() if MARK.exists() else ""
    complete = bool(stamps) and python.exists() and f"root {ROOT}\n" in mark
    if not complete:
        if VENV.exists() and any(VENV.iterdir()):
            if not mark:
                raise SetupError(
                    ".venv was not made by this Makefile: move it away, or use it as it is with PY=.venv/bin/python"
                )
            say("removing a .venv that an earlier set-up left unfinished or that was moved")
            shutil.rmtree(VENV)
        VENV.mkdir(exist_ok=True)
        MARK.write_text(f"made by tools/setup_env.py\nroot {ROOT}\n")
    # From here until the end there is no stamp: whatever stops us, the next set-up starts afresh.
    for stamp in stamps:
        stamp.unlink()
    if not complete:
        with_pip = importlib.util.find_spec("ensurepip") is not None
        if not with_pip and importlib.util.find_spec("pip") is None:
            raise SetupError(
                f"{base_python()} can make no virtual environment with pip: install its venv module "
                "(Debian and Ubuntu: the package python3-venv)"
            )
        options = [] if with_pip else ["--without-pip"]
        title = f"creating .venv with Python {sys.version.split()[0]}"
        run_logged(title, [base_python(), "-m", "venv", *options, str(VENV)], log, lock_fd)
    if (VENV / "bin" / "pip").exists():
        return [str(python), "-m", "pip"]
    return [base_python(), "-m", "pip", "--python", str(python)]


def outside_path() -> str:
    """PATH without .venv/bin, for someone who has activated it."""
    own = str(VENV / "bin")
    return os.pathsep.join(p for p in os.environ.get("PATH", os.defpath).split(os.pathsep) if p.rstrip("/") != own)


def mpi_works(mpirun: str, log: IO[str]) -> bool:
    """Whether two ranks started by ``mpirun`` find each other through .venv's mpi4py."""
    command = [mpirun, "-n", "2", str(VENV / "bin" / "python"), "-c", MPI_PROBE]
    log.write(f"\n$ {shlex.join(command)}\n")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **MPI_ENV},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += "\nkilled: no end after 60 s\n"
    log.write(output)
    log.flush()
    return process.returncode == 0 and "ranks 2" in output


def install_mpi(pip: list[str], log: IO[str], lock_fd: int) -> None:
    """Settle on the launcher: one in .venv, else the machine's if it works with mpi4py, else PyPI's mpich."""
    wheel = VENV / "bin" / "mpirun"
    system = shutil.which("mpirun", path=outside_path())
    if not wheel.exists():
        if system is not None and mpi_works(system, log):
            say(f"MPI: {system}")
            return
        why = "the machine has no mpirun" if system is None else f"{system} does not work with mpi4py"
        mpich = load_pyproject()["project"]["optional-dependencies"]["mpich"]
        install = [*pip, "install", "--progress-bar", "off", "-c", str(CONSTRAINTS), *mpich]
        run_logged(f"installing the mpich wheel ({why})", install, log, lock_fd)
    if not mpi_works(str(wheel), log):
        raise SetupError(
            "two ranks under .venv/bin/mpirun do not find each other (is MPI4PY_LIBMPI or MPI4PY_MPIABI set?); "
            f"their output is at the end of {LOG.relative_to(ROOT)}"
        )
    say("MPI: .venv/bin/mpirun (the mpich wheel)")


def has_driver() -> bool:
    """Whether this machine has an NVIDIA driver, without loading it."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


@contextlib.contextmanager
def exclusive() -> Iterator[int]:
    """Hold the lock of .venv; yields its file descriptor."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of .venv to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def ready(stage: str) -> bool:
    """Whether .venv already is what ``stage`` asks for, whatever the files' times say."""
    stamp = VENV / f".ready-{stage}"
    return stamp.exists() and (VENV / "bin" / "python").exists() and stamp.read_text() == digest(stage)


def install(stage: str) -> None:
    """Bring .venv to what ``stage`` asks for and stamp it."""
    start_s = time.monotonic()
    with exclusive() as lock_fd:
        if ready(stage):
            (VENV / f".ready-{stage}").touch()
            return
        # What other stages had installed stays true if their digest still holds.
        keep = {stage, "run", *(s for s in STAGES if ready(s))}
        with LOG.open("w") as log:
            pip = create_venv(log, lock_fd)
            extras = dict.fromkeys([*STAGES[stage], *(["nvrtc"] if has_driver() else [])])
            build = ["hatchling", "editables"]
            wanted = [*requirements(tuple(extras)), *build]
            options = ["install", "--progress-bar", "off", "--no-compile"]
            run_logged(
                f"installing packages for {stage} at the versions of constraints.txt",
                [*pip, *options, "-c", str(CONSTRAINTS), *wanted],
                log,
                lock_fd,
            )
            run_logged(
                "installing flash-comm itself, editable",
                [*pip, *options, "--no-deps", "--no-build-isolation", "-e", "."],
                log,
                lock_fd,
            )
            # On all cores and without the packages' own tests, a third of the time that pip takes for it. Not left to the
            # first import: that would be eight ranks at once. A package may ship a file that is no valid Python: let it.
            site = next((VENV / "lib").glob("python3*"), VENV)
            command = [
                str(VENV / "bin" / "python"),
                "-m",
                "compileall",
                "-q",
                "-j",
                "0",
                "-x",
                "/tests?/",
                str(site),
            ]
            run_logged("compiling Python byte code", command, log, lock_fd, may_fail=True)
            install_mpi(pip, log, lock_fd)
        for each in sorted(keep):
            part = VENV / f".ready-{each}.part"
            part.write_text(digest(each))
            part.replace(VENV / f".ready-{each}")
    say(f"done in {time.monotonic() - start_s:.0f} s")


# --- check ---------------------------------------------------------------------------------------------------------


def find_compiler() -> str | None:
    """The C++ compiler that the cpu backend will use, if there is one."""
    for name in (os.environ.get("FCOMM_CXX"), os.environ.get("CXX"), *COMPILERS):
        if name and (found := shutil.which(shlex.split(name)[0])):
            return found
    return None


def package_problem(requirement: str) -> str | None:
    """Why the running Python does not meet ``requirement``, or None."""
    name, bounds = split_requirement(requirement)
    if name == "clang-format":
        return None if shutil.which("clang-format") else "clang-format (not on PATH)"
    if name.startswith(NO_IMPORT):
        return None
    version = None
    for candidate in (name, *ALTERNATIVES.get(name, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(candidate)
            break
    if version is not None and not satisfies(version, bounds):
        return f"{name} {bounds} (has {version})"
    try:
        if name == "mpi4py":  # load the MPI library, but do not start MPI: some launchers take offence
            import mpi4py

            mpi4py.rc.initialize = False
        importlib.import_module(IMPORT_NAMES.get(name, name.replace("-", "_")))
    except Exception as error:  # a broken package may raise anything
        if version is None:
            return f"{name} (not installed)"
        reason = str(error).strip().splitlines() or [""]
        return f"{name} (installed, but importing it fails: {type(error).__name__}: {reason[0]})"
    return None


def check(stage: str, need: list[str], packages: bool) -> None:
    """Raise with one sentence about everything that is missing."""
    python = os.environ.get("FLASH_COMM_PY", sys.executable)
    if packages:
        problems = [p for r in requirements(STAGES[stage]) if (p := package_problem(r)) is not None]
        if stage == "run" and not has_driver():
            # The cpu backend runs without CuPy; without a GPU only the tests use it, to compile kernels.
            problems = [p for p in problems if not (p.startswith("cupy") and p.endswith("(not installed)"))]
        if problems:
            extras = ",".join(STAGES[stage])
            target = f".[{extras}]" if extras else "."
            raise SetupError(
                f"{python} lacks {', '.join(problems)}: run `{python} -m pip install -c constraints.txt -e '{target}'`, "
                "or leave PY out to let make set up .venv"
            )
    launcher = os.environ.get("MPIRUN", "mpirun")
    if "mpirun" in need and shutil.which(shlex.split(launcher)[0]) is None:
        if Path(sys.prefix) == VENV:
            raise SetupError(f"the {launcher} that set-up had found is gone: run `make distclean`, then the same again")
        raise SetupError(
            f"no {launcher} on PATH: install an MPI (or `{python} -m pip install -c constraints.txt mpich` if there is "
            "none on this machine), or leave PY out to let make set one up"
        )


def check_compiler() -> None:
    """Raise unless kernels can run somewhere."""
    if find_compiler() is None and not has_driver():
        raise SetupError(
            "there is neither a C++ compiler (CXX, c++, g++, clang++) nor an NVIDIA driver, so kernels can run nowhere: "
            "install g++ (Debian and Ubuntu: apt install g++)"
        )


# --- lock ----------------------------------------------------------------------------------------------------------


def lock() -> None:
    """Resolve all of pyproject.toml within its bounds in a throw-away environment and write constraints.txt."""
    extras = load_pyproject()["project"]["optional-dependencies"]
    wanted = [r for r in requirements(tuple(extras)) if split_requirement(r)[0] != "flash-comm"]
    with tempfile.TemporaryDirectory() as folder:
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([base_python(), "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--upgrade", *wanted], check=True)
        frozen = subprocess.run(
            [python, "-m", "pip", "list", "--format", "freeze"], check=True, capture_output=True, text=True
        )
    # Without the label of a build, such as torch's +cpu: which builds there are depends on the index.
    lines = [line.partition("+")[0] for line in frozen.stdout.splitlines()]
    pins = [line for line in lines if not re.match(r"(pip|wheel)==", line)]
    head = (
        [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("#")] if CONSTRAINTS.exists() else []
    )
    part = CONSTRAINTS.with_suffix(".part")
    part.write_text("\n".join([*head, *sorted(pins, key=str.lower)]) + "\n")
    part.replace(CONSTRAINTS)


def main(argv: list[str] | None = None) -> None:
    """Entry point; problems that the user can act on end in one sentence and status 2."""
    parser = argparse.ArgumentParser(prog="setup_env.py", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("install", help="build .venv for a stage")
    command.add_argument("stage", choices=STAGES)
    command = commands.add_parser("check", help="say what the running Python lacks for a stage")
    command.add_argument("stage", choices=STAGES)
    command.add_argument("--packages", action="store_true", help="import each package that is needed")
    command.add_argument("--need", action="append", default=[], choices=["mpirun"])
    commands.add_parser("compiler", help="check that kernels can run somewhere")
    commands.add_parser("lock", help="write constraints.txt anew")
    args = parser.parse_args(argv)

    def stop(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)  # unwind, so that pip ends with us
    try:
        if args.command == "install":
            install(args.stage)
        elif args.command == "check":
            check(args.stage, args.need, args.packages)
        elif args.command == "compiler":
            check_compiler()
        else:
            lock()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\nerror: interrupted; nothing half-done will be used", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        print(f"error: set-up cannot go on: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
