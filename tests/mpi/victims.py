"""Ranks that fail on purpose, each in its own way: `mpirun -n N python -m tests.mpi.victims KIND`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

import fcomm
from fcomm import bootstrap
from fcomm.errors import ArgumentError, SetupError

WORLD = MPI.COMM_WORLD


def shared_memory() -> str:
    """Names of the shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return " ".join(sorted({line.split()[5] for line in lines if "/dev/shm/" in line}))


def call_for_ever(comm: fcomm.Communicator, until: int) -> None:
    x = np.ones(1000, np.float32)
    for k in itertools.count():
        if k == until and comm.rank == WORLD.size - 1:
            return
        comm.all_reduce(x)


def main(argv: Sequence[str] | None) -> int:
    kind = (argv or sys.argv[1:])[0]
    print(f"pid {os.getpid()} maps {shared_memory()}", flush=True)
    if kind == "kill early" and WORLD.rank == WORLD.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "one raises" and WORLD.rank == 1:
        raise SetupError("rank 1 alone has no luck")
    if kind == "all raise 2":
        raise ArgumentError("no rank can do that")
    if kind == "all raise 1":
        raise SetupError("no rank has luck")
    if kind == "one has a bug" and WORLD.rank == 1:
        raise ZeroDivisionError
    if kind == "unlucky construction":
        fcomm.Communicator(WORLD, backend="cpu", max_bytes=-1 if WORLD.rank == 1 else 1024)
    comm = fcomm.Communicator(WORLD, backend="cpu", max_bytes=1 << 16)
    print(f"pid {os.getpid()} maps {shared_memory()}", flush=True)
    WORLD.Barrier()
    if kind in ("exit", "kill", "never calls"):
        call_for_ever(comm, until=20)  # from here on, on the last rank alone
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "never calls":
        time.sleep(60)
    WORLD.Barrier()  # where the others of "one raises" are
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
