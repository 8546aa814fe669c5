"""Ranks finding each other, and agreeing: what every rank must do alike is checked here, once, before it matters."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fcomm.cli import launcher_rank, reader_is_gone
from fcomm.errors import ArgumentError, DisagreementError, FcommError, NotAdmittedError, SetupError
from fcomm.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# How launchers tell a process the size of its world.
_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


def check_world(mpi: MPI.Intracomm | None = None) -> None:
    """Raises `SetupError` where a launcher of one MPI runs the library of another: n worlds of one rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD if mpi is None else mpi
    if MPI.COMM_WORLD.size > 1:
        return
    for name in _LAUNCHER_SIZES:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 1 and world.size == 1:
            library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
            raise SetupError(
                f"the launcher started {value} processes ({name}), but mpi4py's library ({library}) sees one: "
                "use the mpirun that belongs to this library"
            )


def check_node(group: Group) -> None:
    """Raises `SetupError`, on all ranks, if they are not all on one machine."""
    unlink_library_segments()
    if len(set(group.allgather(_machine_id()))) != 1:
        raise SetupError(f"the {group.size} ranks are not all on one machine; flash-comm works within one server")


def _machine_id() -> str:
    """What tells machines apart and containers of one machine not; the host's name where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def unlink_library_segments() -> None:
    """Takes the names from the segments that MPICH made in MPI_Init: a job that is killed then leaves none in /dev/shm.

    Done when this module is imported, where a command begins and where a communicator does, for MPI_Init may come in between. The
    memory stays until its last process ends. All ranks have mapped it when MPI_Init returns, so no one looks for the name
    again; MPI_Finalize does not mind that it is gone.
    """
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        for name in set(re.findall(r"/dev/shm/mpich_shm_\S+$", maps, re.MULTILINE)):
            Path(name).unlink(missing_ok=True)


unlink_library_segments()  # of a program that has imported mpi4py before, which is when MPI_Init is called


def collectively(mpi: Group, step: Callable[[], T]) -> T:
    """Runs a step that may fail on some ranks; if it does, all ranks raise the first failing rank's error."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    failures = mpi.allgather(None if error is None else (type(error), str(error)))
    for rank, failure in enumerate(failures):
        if failure is not None:
            if error is not None and not isinstance(error, FcommError):
                raise error
            kind, message = failure
            where = f" (rank {rank})" if mpi.size > 1 and f"rank {rank}" not in message else ""
            raise (kind if issubclass(kind, FcommError) else SetupError)(f"{message}{where}")
    return result  # type: ignore[return-value]  # no rank failed, so this one has its result


def agree(mpi: Group, value: T, what: str) -> T:
    """Raises `DisagreementError` on all ranks unless `value` is the same everywhere."""
    values = mpi.allgather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise DisagreementError(f"the ranks disagree on {what}: rank 0 has {values[0]}, rank {rank} has {other}")
    return value


def exit_code(error: BaseException) -> int:
    """2 for something that the caller can put right on the command line, 1 for everything else."""
    return 2 if isinstance(error, (ArgumentError, NotAdmittedError)) else 1


def run(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None, *, alone: bool = False) -> int:
    """Runs a command's main and turns an error into one sentence and an exit code.

    Under more than one rank an error ends all of them: a rank that raised alone would leave the others waiting in the
    next collective step. alone : the command is no job for ranks; of several that a launcher started the first one does it.
    """
    if alone and launcher_rank() > 0:
        return 0
    unlink_library_segments()
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        reader_is_gone()
        code = 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    except FcommError as error:
        code = exit_code(error)
        if alone:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            _say(f"error: {error}")
    except Exception:
        traceback.print_exc()
        code = 1
    if not alone and (world := _world()) is not None:
        sys.stderr.flush()
        sys.stdout.flush()
        _leave_together(world, code)
    return code


def _world() -> MPI.Intracomm | None:
    """MPI's world if this process is one of several ranks in it; importing mpi4py to find out would start MPI."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized() or module.COMM_WORLD.size == 1:
        return None
    return module.COMM_WORLD


def _say(line: str) -> None:
    """Prints a line once if all ranks came here, and from this rank if they did not."""
    world = _world()
    if world is None or not _together(world) or world.rank == 0:
        print(line, file=sys.stderr, flush=True)


_met: bool | None = None


def _together(world: MPI.Intracomm, seconds: float = 2.0) -> bool:
    """Whether all ranks come to this place within a short time; asked once."""
    global _met
    if _met is None:
        request = world.Ibarrier()
        end = time.monotonic() + seconds
        while not (_met := bool(request.Test())) and time.monotonic() < end:
            time.sleep(0.01)
    return bool(_met)


def _leave_together(world: MPI.Intracomm, code: int) -> None:
    """Ends all ranks: quietly if all came here, by MPI_Abort if some are still waiting elsewhere."""
    if not _together(world):
        unlink_library_segments()
        world.Abort(code)
