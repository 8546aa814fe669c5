"""Slots in pinned host memory: the transport of ranks whose GPUs cannot reach each other's memory (``placement="host"``).

Each rank makes one segment of anonymous shared memory, all ranks map all of them, and each registers what it has mapped with its
own CUDA context; kernels then load and store it over the bus. A segment has no name, so that nothing stays behind whatever ends a
rank, and no limit such as that of /dev/shm in a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fcomm import bootstrap
from fcomm.errors import SetupError
from fcomm.layout import SLAB_GRANULE
from fcomm.sizes import round_up

if TYPE_CHECKING:
    from fcomm.group import Group

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class Pages:
    """One segment in this process: mapped, and once `register` was called, within reach of this rank's kernels."""

    def __init__(self, path: Path, nbytes: int) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.content: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.content.ctypes.data)
        self._registered = False

    def register(self) -> int:
        """Pins the pages and makes them known to this rank's CUDA context; their address for kernels."""
        from cupy.cuda import runtime

        try:
            runtime.hostRegister(self.address, self.content.nbytes, _PORTABLE | _MAPPED)
        except runtime.CUDARuntimeError as error:
            raise SetupError(
                f'CUDA cannot pin {self.content.nbytes >> 20} MiB of shared host memory ({error}): placement="host" needs it; '
                "raise the limit of locked memory (ulimit -l), or use a smaller max_bytes"
            ) from None
        self._registered = True
        return device_pointer(self.address)

    def close(self) -> None:
        from cupy.cuda import runtime

        if self._registered:
            self._registered = False
            with contextlib.suppress(runtime.CUDARuntimeError):  # a context that a fault has ended
                runtime.hostUnregister(self.address)
        del self.content
        with contextlib.suppress(BufferError):  # somebody still looks at it: unmapped with the process then
            self._map.close()


def device_pointer(address: int) -> int:
    """The address by which kernels reach registered host memory; on most systems the very same."""
    found = ctypes.c_void_p()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
    except (OSError, AttributeError):
        return address
    if failed or found.value is None:
        raise SetupError(f"CUDA gives kernels no access to pinned host memory (driver error {failed})")
    return int(found.value)


def available_bytes() -> int:
    """Memory of the machine that can be had, by its own account; a great deal where it gives none."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
    return 1 << 62


class HostMemory:
    """One segment of host memory on every rank, mapped and registered by all of them. Collective; never moved.

    `own`, `addresses`: as kernels of this rank see them. nbytes : of each segment, rounded up.
    """

    def __init__(self, mpi: Group, nbytes: int) -> None:
        self._mpi = mpi
        self.nbytes = round_up(nbytes, SLAB_GRANULE)
        self.own = 0
        self.addresses: list[int] = []
        self._pages: list[Pages] = []
        try:
            self._make()
        except Exception:  # raised by all ranks or by none
            self.close()
            raise

    def _make(self) -> None:
        mpi = self._mpi
        fd = -1
        try:
            fd = bootstrap.collectively(mpi, self._create)
            paths = mpi.allgather(Path(f"/proc/{os.getpid()}/fd/{fd}"))
            bootstrap.collectively(mpi, lambda: self._map(paths))  # all have mapped it before a descriptor goes
        finally:
            if fd >= 0:
                os.close(fd)
        # One rank after the other: pinning locks pages, and ranks that pin the same ones at a time may fail for want of them.
        for turn in range(mpi.size):
            bootstrap.collectively(mpi, self._register if turn == mpi.rank else lambda: None)
        self.own = self.addresses[mpi.rank]

    def _create(self) -> int:
        """A segment's descriptor. Its pages are there: one that is missing later would end the rank at a store."""
        problem = f"there is no room in the machine's memory for {self.nbytes >> 20} MiB of each rank"
        if self.nbytes > available_bytes():
            raise SetupError(f"{problem}: use a smaller max_bytes")
        fd = os.memfd_create("fcomm")
        try:
            os.posix_fallocate(fd, 0, self.nbytes)
        except OSError as error:
            os.close(fd)
            raise SetupError(f"{problem} ({error.strerror}): use a smaller max_bytes") from None
        return fd

    def _map(self, paths: list[Path]) -> None:
        for rank, path in enumerate(paths):
            try:
                self._pages.append(Pages(path, self.nbytes))
            except (OSError, ValueError) as error:
                raise SetupError(
                    f"rank {self._mpi.rank} cannot map the memory of rank {rank} ({error}): ranks must run as one user and, in "
                    "containers, share their process namespace"
                ) from None

    def _register(self) -> None:
        self.addresses = [pages.register() for pages in self._pages]

    # What the host does with this rank's own segment, while nothing runs.

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Fills bytes with a value."""
        self._pages[self._mpi.rank].content[offset : offset + nbytes] = value

    def read(self, offset: int, into: NDArray[Any]) -> None:
        """Copies bytes from `offset` on into an array."""
        part = self._pages[self._mpi.rank].content[offset : offset + into.nbytes]
        into.reshape(-1).view(np.uint8)[:] = part

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Copies an array's bytes to `offset`."""
        self._pages[self._mpi.rank].content[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

    def close(self) -> None:
        """Collective and idempotent: every rank unmaps, when all have come."""
        pages, self._pages = self._pages, []
        if pages or self.own or self._mpi.size > 1:
            self._mpi.barrier()
        self.own, self.addresses = 0, []
        for one in pages:
            one.close()
