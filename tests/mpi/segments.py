"""Shared host memory between ranks, with stand-ins for what pins it: run by test_links_mpi under mpirun."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
from cupy.cuda import runtime
from mpi4py import MPI

from fcomm import host_memory
from fcomm.errors import SetupError
from fcomm.host_memory import HostMemory

mpi = MPI.COMM_WORLD
pinned: dict[int, tuple[int, int]] = {}
spans: list[tuple[float, float]] = []


def register(address: int, nbytes: int, flags: int) -> None:
    assert flags == 3  # portable, mapped
    assert address % 4096 == 0
    start = time.clock_gettime(time.CLOCK_MONOTONIC)
    time.sleep(0.002)
    pinned[address] = (nbytes, flags)
    spans.append((start, time.clock_gettime(time.CLOCK_MONOTONIC)))


def names() -> list[str]:
    return [str(p) for p in Path("/dev/shm").glob("*fcomm*")]


def held() -> list[str]:
    """Segments that a descriptor of this process holds."""
    found = []
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor by which the folder itself was read
            found.append(str(path.readlink()))
    return [name for name in found if "fcomm" in name]


def main() -> None:
    made: Any = runtime
    made.hostRegister, made.hostUnregister = register, pinned.pop
    host_memory.device_pointer = lambda address: address
    memory = HostMemory(mpi, 3 << 20)
    assert memory.nbytes == 4 << 20
    assert memory.own == memory.addresses[mpi.rank]
    assert len(set(memory.addresses)) == len(pinned) == mpi.size
    mpi.Barrier()
    assert not names()  # nothing would stay behind, even now
    # Every rank writes a word into every other one's segment, through its own mapping.
    for rank in range(mpi.size):
        memory._pages[rank].content[4 * mpi.rank : 4 * mpi.rank + 4].view(np.uint32)[0] = 1000 * rank + mpi.rank + 1
    mpi.Barrier()
    found = np.zeros(mpi.size, np.uint32)
    memory.read(0, found)
    assert found.tolist() == [1000 * mpi.rank + r + 1 for r in range(mpi.size)]
    memory.write(0, np.full(2, 7, np.uint32))
    memory.fill(4, 4, 0xFF)
    memory.read(0, found)
    assert found[:2].tolist() == [7, 0xFFFFFFFF]
    # One rank after the other: no two ranks' times of pinning overlap.
    every = sorted((min(s)[0], max(e for _, e in s)) for s in mpi.allgather(spans))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(every)), every
    memory.close()
    memory.close()
    assert not pinned

    # A rank that cannot pin: all ranks get the same sentence, and nothing stays.
    def refuse(address: int, nbytes: int, flags: int) -> None:
        error = runtime.CUDARuntimeError.__new__(runtime.CUDARuntimeError)
        raise error

    if mpi.rank == mpi.size - 1:
        made.hostRegister = refuse
    try:
        HostMemory(mpi, 1 << 20)
    except SetupError as error:
        said = str(error)
    assert f"(rank {mpi.size - 1})" in said or f"rank {mpi.size - 1}" in said, said
    assert "cannot pin 2 MiB of shared host memory" in said
    assert not pinned
    # Too large for the machine: said before anything is touched.
    made.hostRegister = register
    try:
        HostMemory(mpi, 1 << 50)
    except SetupError as error:
        said = str(error)
    assert "no room in the machine's memory" in said, said
    assert not names()
    assert not held()
    print(f"SEGMENTS ok rank {mpi.rank}", flush=True)


if __name__ == "__main__":
    main()
