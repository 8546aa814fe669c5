"""The cpu backend: MPI ranks on host cores, slabs in shared memory, one fiber for each CUDA thread.

It runs the kernels' own text, compiled by the host's C++ compiler against ``kernels_cu/cpu``. Results are exact; times
are times of an emulation.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fcomm import bootstrap, interop, settings
from fcomm.backends.base import LaunchShape, View
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, SetupError
from fcomm.group import Group
from fcomm.layout import CONTROL_BYTES, CONTROL_DTYPE, ERROR_DTYPE, SlabLayout
from fcomm.source import Specialisation
from fcomm.topology import HOST_CAPABILITIES

if TYPE_CHECKING:
    from fcomm.epilogue import Separate

T = TypeVar("T")

# -ffp-contract=off: a fused multiply-add would round once where the contract rounds twice. -O1 halves the time to build.
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-strict-aliasing",
    "-w",
    "-fvisibility=hidden",
)
MAX_FIBERS = 2048
TICKS_PER_US = 1000 / 64
"""Of ``ticks()`` in ``kernels_cu/cpu/primitives.hpp``."""


@cache
def find_compiler() -> str:
    """Path of the host's C++ compiler; `SetupError` if there is none."""
    wanted = settings.compiler()
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return path
    raise SetupError(
        f"the cpu backend needs a C++ compiler and found none ({wanted or 'c++, g++, clang++'}): install g++ or clang++, "
        "or name one in FCOMM_CXX"
    )


def _run_compiler(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([find_compiler(), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SetupError(f"{find_compiler()} cannot be run ({error.strerror}): name another in FCOMM_CXX") from None


@cache
def _compiler_identity() -> str:
    done = _run_compiler("--version")
    return done.stdout.splitlines()[0] if done.stdout else find_compiler()


def _private_folder(path: Path) -> Path:
    """Makes a folder that only this user can write to; code is loaded from it."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = path.stat()
    except OSError as error:
        raise SetupError(
            f"cannot make the cache folder {path} ({error.strerror}): name another in FCOMM_CACHE_DIR"
        ) from None
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SetupError(f"the cache folder {path} can be written by others: name a private one in FCOMM_CACHE_DIR")
    return path


def _compile(source: Path, name: str, flags: tuple[str, ...]) -> Path:
    """Compiles a file to a shared library beside it."""
    made = source.with_suffix(".so")
    done = _run_compiler(*flags, "-x", "c++", str(source), "-o", str(made))
    if done.returncode != 0:
        said = next((s.strip() for s in done.stderr.splitlines() if "error" in s), " ".join(done.stderr.split())[:200])
        raise SetupError(f"{find_compiler()} could not compile {name}: {said or f'exit code {done.returncode}'}")
    return made


def build(spec: Specialisation | Separate, defines: tuple[str, ...] = ()) -> Path:
    """Compiles a specialisation to a shared library, or finds it on disk."""
    text = "#define FC_CPU 1\n" + "".join(f"#define {d}\n" for d in defines) + spec.text()
    return build_text(text, spec.name)


SCRATCH = ".scratch"
STALE_S = 3600.0
"""A folder in which nothing was written for so long is no build's any more: a compiler takes seconds."""


def _clear_away(folder: Path, name: str) -> None:
    """Removes the scratch folders of builds that were killed: of this name, whose lock the caller holds, and old ones of any."""
    stale = time.time() - STALE_S
    for scratch in folder.glob(f"*~*{SCRATCH}"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if scratch.name.startswith(f"{name}~") or scratch.stat().st_mtime < stale:
                shutil.rmtree(scratch, ignore_errors=True)


def build_text(text: str, name: str, folder_name: str = "cpu", flags: tuple[str, ...] = FLAGS) -> Path:
    """Compiles C++ to a shared library in a folder of the cache, or finds it there.

    Safe when ranks race: one builds, in a file of its own that is renamed when it is whole; the others wait for it.
    """
    key = hashlib.sha256("\0".join([text, _compiler_identity(), *flags, platform.machine()]).encode()).hexdigest()
    folder = _private_folder(settings.cache_dir() / folder_name)
    library = folder / f"{name}-{key[:24]}.so"
    if library.exists():
        return library
    try:
        with FileLock(str(folder / f"{name}.lock")):
            _clear_away(folder, name)
            if not library.exists():  # nobody built it while this rank waited
                with tempfile.TemporaryDirectory(prefix=f"{name}~", suffix=SCRATCH, dir=folder) as scratch:
                    source = Path(scratch) / "kernel.cpp"
                    source.write_text(text)
                    _compile(source, name, flags).replace(library)
    except OSError as error:
        raise SetupError(f"cannot write to the cache folder {folder} ({error.strerror})") from None
    return library


def processor_flags() -> frozenset[str]:
    """Feature flags of this machine's processor, as Linux spells them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def _capabilities() -> frozenset[str]:
    found = {"atomic4", "atomic8", "acquire_release", "line128"}
    # Aligned 16-byte accesses are single-copy atomic on x86-64 with AVX and on aarch64 with LSE2 ("uscat").
    if {"avx", "uscat"} & processor_flags():
        found.add("atomic16")
    return frozenset(found)


class CpuKernel:
    """A specialisation in a loaded shared library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))  # a CDLL call releases the interpreter's lock
        self.run = self._library.fc_launch
        self.run.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self.run.restype = ctypes.c_int
        self.struct_sizes = tuple((ctypes.c_uint * 3).in_dll(self._library, "fc_sizes"))

    def max_blocks(self, threads: int, grids: int = 1, channels: int = 1) -> int:
        """A launch returns when its grid is complete, so there is never a second one beside it."""
        return max(1, MAX_FIBERS // threads)


SHARED_FOLDER = Path("/dev/shm")  # memory that processes share by name


def share_memory(group: Group, nbytes: int) -> mmap.mmap:
    """One piece of zeroed memory that all ranks map. Collective; it lasts while a rank has it mapped."""
    path = SHARED_FOLDER / group.allgather(f"flash-comm-{uuid.uuid4().hex}")[0]

    def make() -> None:
        if group.rank != 0:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # too little room is an error here, and a signal at first use
        finally:
            os.close(descriptor)

    def map_it() -> mmap.mmap:
        descriptor = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def or_say(step: Callable[[], T]) -> T:
        try:
            return step()
        except OSError as error:
            raise SetupError(
                f"the ranks cannot share {nbytes >> 20} MiB in {SHARED_FOLDER} ({error.strerror}): make room there (a container's "
                "--shm-size), or use smaller max_bytes or fewer channels"
            ) from None

    try:
        bootstrap.collectively(group, lambda: or_say(make))
        return bootstrap.collectively(group, lambda: or_say(map_it))
    finally:  # all have mapped it, or none will: a job that is killed leaves no name behind
        if group.rank == 0:
            path.unlink(missing_ok=True)


class CpuBackend:
    """One rank of the cpu backend."""

    name = "cpu"

    def __init__(self, mpi: Group, placement: str = "device") -> None:
        self._mpi = mpi
        self._placement = placement
        # Slabs are in host memory as it is: being asked for that admits what it would admit with GPUs.
        self.capabilities = HOST_CAPABILITIES if placement == "host" else _capabilities()
        self._memory: mmap.mmap | None = None
        self._kernels: dict[str, CpuKernel] = {}

    def prepare(self) -> None:
        """What can fail on one rank alone, before anything collective."""
        find_compiler()
        _private_folder(settings.cache_dir() / "cpu")

    def allocate(self, layout: SlabLayout) -> list[int]:
        mpi, stride = self._mpi, -(-layout.slab_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = share_memory(mpi, mpi.size * stride)
        every = np.frombuffer(self._memory, np.uint8)
        bases = [every.ctypes.data + rank * stride for rank in range(mpi.size)]
        self._slab = every[mpi.rank * stride :][: layout.slab_bytes]
        self._errors = np.zeros(layout.channels, ERROR_DTYPE)
        self.reset(layout)
        return bases

    def control_address(self) -> int:
        return int(self._slab.ctypes.data)

    def error_address(self) -> int:
        return int(self._errors.ctypes.data)

    def error_records(self) -> NDArray[np.void]:
        return self._errors

    def reset(self, layout: SlabLayout) -> None:
        self._slab[:] = 0
        for channel in range(layout.channels):
            for region in layout.regions(channel).values():
                if region.cleared_to:
                    end = region.offset + region.copies * region.copy_stride
                    self._slab[region.offset : end] = region.cleared_to
        self._errors[:] = np.zeros(1, ERROR_DTYPE)
        self._channels = layout.channels
        self.write_control(layout.initial_control())

    def _control_words(self) -> NDArray[np.void]:
        return self._slab[: self._channels * CONTROL_BYTES].view(CONTROL_DTYPE)

    def control(self) -> NDArray[np.void]:
        return self._control_words().copy()

    def write_control(self, words: NDArray[np.void]) -> None:
        self._control_words()[:] = words

    def slab(self) -> NDArray[np.uint8]:
        return self._slab

    def write_slab(self, offset: int, content: NDArray[np.uint8]) -> None:
        self._slab[offset : offset + content.size] = content

    def kernel(self, spec: Specialisation | Separate) -> CpuKernel:
        spec = replace(spec, aligned=True)  # one kernel for both: it is told at run time
        if spec.name not in self._kernels:
            self._kernels[spec.name] = CpuKernel(build(spec))
        return self._kernels[spec.name]

    def compile(self, name: str, text: str) -> CpuKernel:
        return CpuKernel(build_text(f"#define FC_CPU 1\n{text}", name))

    def ticks_per_us(self) -> float:
        return TICKS_PER_US

    def launch(self, kernel: CpuKernel, shape: LaunchShape, params: NDArray[np.void], stream: Any) -> None:
        if kernel.run(params.ctypes.data, shape.blocks, shape.threads) != 0:
            raise SetupError(f"no memory for the stacks of {shape.blocks * shape.threads} threads")

    def launch_once(
        self, kernel: CpuKernel, shape: LaunchShape, params: NDArray[np.void], stream: Any, dependent: bool = False
    ) -> None:
        self.launch(kernel, shape, params, stream)

    def may_follow(self, kernel: CpuKernel, shape: LaunchShape, stream: Any) -> bool:
        return False

    def use_dependent_launch(self) -> str | None:
        return "the cpu backend runs one grid after the other"

    def copy(self, src: View, dst: View, stream: Any) -> None:
        ctypes.memmove(dst.address, src.address, src.nbytes)

    def view(self, x: Any) -> View:
        if interop.is_torch(x):
            return interop.view_torch_host(x)
        if not isinstance(x, np.ndarray):
            raise ArgumentError(f"the cpu backend takes NumPy arrays and PyTorch tensors, not {type(x).__name__}")
        return View(
            x.ctypes.data,
            x.nbytes, x.size, x.dtype.name, x.shape, x.flags.c_contiguous, x,
        )  # fmt: skip

    def empty_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        if interop.is_torch(x):
            return interop.torch_module().empty(shape, dtype=x.dtype)
        return np.empty(shape, x.dtype)

    def empty(self, count: int, dtype: str) -> NDArray[Any]:
        return np.empty(count, REDUCIBLE[dtype].numpy if dtype in REDUCIBLE else np.dtype(dtype))

    def from_host(self, x: NDArray[Any]) -> NDArray[Any]:
        return x.copy()

    def to_host(self, x: Any) -> NDArray[Any]:
        if interop.is_torch(x):  # by bytes: NumPy takes no bfloat16 from PyTorch
            flat, name = x.detach().contiguous().reshape(-1), self.view(x).dtype
            raw = np.array(flat.view(interop.torch_module().uint8))
            return raw.view(REDUCIBLE[name].numpy if name in REDUCIBLE else np.dtype(name)).reshape(x.shape)
        return np.array(x)

    def stream(self, x: Any, stream: Any) -> Any:
        if stream is not None:
            raise ArgumentError("the cpu backend has no streams: leave stream=None")
        return None

    def synchronize(self) -> None:
        """A launch returns when its grid is complete, so there is nothing to wait for."""

    def describe(self) -> dict[str, Any]:
        model = platform.processor() or platform.machine()
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            model = next((s.split(":", 1)[1].strip() for s in lines if s.startswith("model name")), model)
        except OSError:
            pass
        return {
            "backend": "cpu",
            "device": model,
            "cores": len(os.sched_getaffinity(0)),
            "compiler": _compiler_identity(),
            "emulation": True,
            **({"placement": "host"} if self._placement == "host" else {}),
        }

    def close(self) -> None:
        if self._memory is None:
            return
        self._mpi.barrier()
        # Unmapped when the last array on it is gone: a caller may still hold a view of the staging buffer.
        del self._slab
        self._memory = None
