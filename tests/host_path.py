"""What a call costs on the host before the driver has it: ``python -m tests.host_path`` prints microseconds of Python.

A communicator of the cuda backend without a GPU: arrays over addresses that nobody reads, and a launch that ends in a C
function which does nothing. What a GPU adds - the driver's launch, CuPy's allocation of a result - is not in the times.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np

from fcomm.backends import cpu, cuda
from fcomm.communicator import Communicator
from fcomm.cost_model import seed_model
from fcomm.layout import ERROR_DTYPE, SlabLayout
from fcomm.selector import Selector
from fcomm.variants import SHIPPED

EVERYTHING = frozenset({"atomic4", "atomic8", "atomic16", "acquire_release", "line128"})


@cache
def launcher() -> Any:
    """A C function with the arguments of cuLaunchKernelEx that counts its calls; it says that all went well."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "launch.c", Path(folder) / "launch.so"
        source.write_text("int calls; int launch(void* c, void* f, void** p, void** e) { calls++; return 0; }\n")
        command = [cpu.find_compiler(), "-x", "c", "-O1", "-fPIC", "-shared", str(source), "-o", str(library)]
        subprocess.run(command, check=True, timeout=60)
        return ctypes.CDLL(str(library))


def array(shape: tuple[int, ...], dtype: Any, address: int) -> Any:
    """A CuPy array over an address that nobody reads."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class Streams:
    """CuPy's streams, of which one is the current one."""

    current = SimpleNamespace(ptr=7)

    def get_current_stream(self) -> Any:
        return self.current


def communicator(dependent_launch: str = "late", world_size: int = 8) -> Communicator:
    """Rank 0 of a communicator whose calls go nowhere. With dependent launch they go through a function of the driver's kind."""
    backend: Any = cuda.CudaBackend.__new__(cuda.CudaBackend)
    backend._cupy = SimpleNamespace(ndarray=cupy.ndarray, cuda=Streams(), empty=None)
    backend._runtime = SimpleNamespace(streamIsCapturing=lambda stream: False, streamQuery=lambda stream: 0)
    backend._last, backend._ahead, backend._shared, backend.sms, backend.device = [None], [None], False, 16, 0
    backend.ranks_here, backend._control = 1, 1 << 32
    backend._packed, backend._kernels, backend._asked, backend._current = {}, {}, 0, None
    backend._launch_kernel = lambda *arguments: None
    backend._launch_dependent = None
    if dependent_launch != "none":
        backend._launch_dependent = launcher().launch
        backend._launch_dependent.argtypes = (ctypes.c_void_p,) * 4
    kernel = SimpleNamespace(pointer=1 << 20, max_blocks=lambda threads, grids=1, channels=1: 64 // grids)
    backend.kernel = lambda spec: kernel
    result = array((1024,), np.float16, 0x300000)
    backend.empty_like = lambda x, shape: result
    backend._errors = np.zeros(1, ERROR_DTYPE)

    comm: Any = Communicator.__new__(Communicator)
    comm.rank, comm.world_size = 0, world_size
    comm.layout, comm.timeout_s, comm.checked = SlabLayout(world_size, 1 << 20), 10.0, False
    comm.link, comm.variant = None, SHIPPED
    comm.backend, comm.capabilities, comm.gpu = backend, EVERYTHING, None
    comm.slabs, comm._grids, comm.dependent_launch = [k << 32 for k in range(1, world_size + 1)], {}, dependent_launch
    comm.selector = Selector(comm.layout, EVERYTHING, seed_model({}), launch=dependent_launch)
    comm._model = SimpleNamespace(words="a model", from_seed=False)
    comm._plans, comm._logged, comm._failed, comm._closed = {}, set(), None, False
    comm._errors = backend.error_records()
    comm._told = comm._errors["valid"].data
    comm._log_choice = lambda *of_it: None
    return comm


def calls(dependent_launch: str = "late") -> dict[str, Callable[[], object]]:
    """The calls that are looked at, by what a caller writes."""
    comm = communicator(dependent_launch)
    x, out = array((1024,), np.float16, 0x100000), array((1024,), np.float16, 0x200000)
    prepared = comm.prepare("all_reduce", x, out)
    return {
        "call = comm.prepare(..., out); call()": prepared,
        "comm.all_reduce(x, out)": lambda: comm.all_reduce(x, out),
        "comm.all_reduce(x)": lambda: comm.all_reduce(x),
    }


def main() -> int:
    cuda._capturing = lambda stream: False  # which is asked at a channel's first calls
    for launch in ("late", "none"):
        for name, call in calls(launch).items():
            call()
            # This process's own time: what others do on the machine does not count.
            us = min(timeit.repeat(call, timer=time.thread_time, number=1000, repeat=15)) / 1000 * 1e6
            print(f"dependent launch {launch:<4s}  {name:<40s} {us:6.2f} us of Python")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
