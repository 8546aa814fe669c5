"""One rank of the cuda backend: a GPU, a slab that the peers map through CUDA IPC, kernels compiled by CuPy.

The path of a call is `launch`: one look-up, one comparison and the driver's launch. Everything else here happens once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fcomm import bootstrap, interop, topology
from fcomm.backends.base import LaunchShape, View
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, DeviceError, FcommError, SetupError
from fcomm.grids import fit_together, most_blocks
from fcomm.group import Group
from fcomm.host_memory import HostMemory
from fcomm.layout import CONTROL_BYTES, CONTROL_DTYPE, ERROR_DTYPE, SLAB_GRANULE, SlabLayout, params_dtype
from fcomm.source import MAX_THREADS, OPTIONS, Specialisation, flatten

if TYPE_CHECKING:
    from types import ModuleType

    from fcomm.epilogue import Separate

T = TypeVar("T")
log = logging.getLogger("fcomm")

PROBE_OFFSET = 2048

_MPS_TROUBLE = {
    46: "the GPU takes no new process at present",  # cudaErrorDevicesUnavailable
    805: "the MPS daemon does not answer",
    806: "the MPS server failed",
    807: "the MPS server takes no clients at present",
    808: "the MPS server has as many clients as it can take",
    809: "the MPS server has as many connections as it can take",
}
_MPS_NO_ANSWER = 805
_CLIENT_TERMINATED = 810
# Errors after which a context is of no use: a fault of this process or, under MPS, of any process on the GPU.
_FATAL = {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, _CLIENT_TERMINATED, 999}
_OUT_OF_MEMORY = 2
_STREAM_BUSY = 600
_CAPTURE_IMPLICIT = 906
_CAPTURE_ERRORS = range(900, 910)


def device_count() -> int:
    """CUDA devices that this process can see; 0 without CuPy, driver or device. `SetupError` where MPS is in the way."""
    try:
        from cupy.cuda import runtime
    except Exception:  # no CuPy, or one without its libraries: there is no device to use
        return 0
    if topology.mps_is_dead():
        raise SetupError(_mps_sentence(_MPS_NO_ANSWER))
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status in _MPS_TROUBLE:
            raise SetupError(_mps_sentence(error.status)) from None
        return 0


def _mps_sentence(status: int) -> str:
    return (
        f"{_MPS_TROUBLE[status]} (CUDA error {status}, MPS pipe {topology.mps_control().parent}): stop that daemon and "
        "start a fresh one (python -m experiments.mps -- ... does), or unset CUDA_MPS_PIPE_DIRECTORY"
    )


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status", None)
    return int(status) if status is not None else None


class Stream(int):
    """A stream's handle that keeps the stream's owner alive."""

    owner: Any


class CudaKernel:
    """A loaded kernel, and how much of it this rank may have resident."""

    def __init__(self, name: str, loaded: tuple[int, Any, int, int], sms: int) -> None:
        self.name = name
        self.pointer, self._owner, self.registers, self.local_bytes = loaded
        self.sms = sms
        self._per_sm: dict[int, int] = {}

    def per_sm(self, threads: int) -> int:
        """Blocks of that many threads that one SM holds."""
        found = self._per_sm.get(threads)
        if found is None:
            from cupy.cuda import driver

            found = int(driver.occupancyMaxActiveBlocksPerMultiprocessor(self.pointer, threads, 0))
            if found < 1:
                raise ArgumentError(
                    f"{self.name} cannot run with {threads} threads per block: {self.registers} registers"
                )
            self._per_sm[threads] = found
        return found

    def max_blocks(self, threads: int, grids: int = 1, channels: int = 1) -> int:
        return most_blocks(self.sms, self.per_sm(threads), grids, channels)


class _Ahead(NamedTuple):
    """The grid that a channel was given last, and whether a graph was being captured then."""

    kernel: CudaKernel
    shape: LaunchShape
    captured: bool


class _DriverError(Exception):
    """An error that a driver call of our own returned, shaped like CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"driver error {status}")
        self.status = status


class _LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` of the driver: an id and 64 bytes of value, of which one int is used here."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of the driver."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Packed:
    """A launch's arguments in the driver's form: a pointer to an array of one pointer to the struct, and the launch's
    configuration with the attribute of dependent launch. Holds the struct, so that its id stays taken.
    """

    def __init__(self, params: NDArray[np.void]) -> None:
        self.params = params
        self.channel = int(params["channel"][0])
        self.pointers = (ctypes.c_void_p * 1)(params.ctypes.data)
        self.pointers_address = ctypes.addressof(self.pointers)
        self.attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
        self.config = _LaunchConfig(1, 1, 1, 1, 1, 1, 0, None, ctypes.pointer(self.attribute), 1)
        self.config_address = ctypes.addressof(self.config)
        self._shape: LaunchShape | None = None
        self._stream: int | None = None

    def configured(self, shape: LaunchShape, stream: int) -> int:
        """Address of the configuration for that grid and stream, which are mostly those of the last launch."""
        if shape is not self._shape or stream != self._stream:
            config = self.config
            config.grid_x, config.block_x, config.stream = shape.blocks, shape.threads, stream
            self._shape, self._stream = shape, stream
        return self.config_address


class _EdgeData(ctypes.Structure):
    """``CUgraphEdgeData`` of the driver; 8 bytes, of which the type alone is looked at."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


_PROGRAMMATIC_EDGE = 1


def _dependent_edges(edges_of: Any, graph: int) -> int:
    """edges_of : the driver's ``cuGraphGetEdges_v2``. graph : a ``CUgraph``."""
    edges_of.argtypes = (ctypes.c_void_p,) * 5
    edges_of.restype = ctypes.c_int
    count = ctypes.c_size_t(0)

    def ask(*arrays: Any) -> None:
        status = edges_of(graph, *arrays, ctypes.addressof(count))
        if status:
            raise translated(_DriverError(status))

    ask(None, None, None)  # how many there are
    if not count.value:
        return 0
    ends, data = (ctypes.c_void_p * count.value), (_EdgeData * count.value)()
    ask(ends(), ends(), data)
    return sum(edge.type == _PROGRAMMATIC_EDGE for edge in data)


# Modules stay loaded until the process ends: a captured graph may outlive the communicator that it was captured with.
_loaded: dict[tuple[int, str], tuple[int, Any, int, int]] = {}


def _load(device: int, name: str, text: str) -> tuple[int, Any, int, int]:
    found = _loaded.get((device, text))
    if found is not None:
        return found
    import cupy

    try:
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=text, options=OPTIONS, backend="nvrtc")
            raw = module.get_function("fc_kernel")
            found = (int(raw.kernel.ptr), (module, raw), int(raw.num_regs), int(raw.local_size_bytes))
    except cupy.cuda.compiler.CompileException as error:
        lines = str(error).splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise SetupError(f"NVRTC could not compile {name}: {first}") from None
    _loaded[device, text] = found
    return found


class SharedMemory:
    """One raw device allocation on every rank, mapped by all of them. Collective; never CuPy's pool, never moved."""

    def __init__(self, mpi: Group, device: int, nbytes: int) -> None:
        self._mpi, self._device = mpi, device
        self.nbytes = -(-nbytes // SLAB_GRANULE) * SLAB_GRANULE
        self.own = 0
        self.addresses: list[int] = []
        self._mapped: list[int] = []
        try:
            self._make()
        except Exception:  # raised by all ranks or by none
            self.close()
            raise

    def _make(self) -> None:
        from cupy.cuda import runtime

        mpi = self._mpi
        bootstrap.collectively(mpi, self._allocate)
        if mpi.size == 1:
            self.addresses = [self.own]
            return
        handles = mpi.allgather(bootstrap.collectively(mpi, lambda: _asking(lambda: runtime.ipcGetMemHandle(self.own))))
        bootstrap.collectively(mpi, lambda: self._map(handles))

    def _allocate(self) -> None:
        import cupy
        from cupy.cuda import runtime

        try:
            self.own = self._malloc()
        except runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise translated(error) from None
            cupy.get_default_memory_pool().free_all_blocks()  # what CuPy keeps for later and nobody uses
            try:
                self.own = self._malloc()
            except runtime.CUDARuntimeError:
                free = runtime.memGetInfo()[0]
                raise SetupError(
                    f"the GPU has no room for {self.nbytes >> 20} MiB ({free >> 20} MiB are free): "
                    "use smaller max_bytes or fewer channels, or free memory on it"
                ) from None
        # The peers may push as soon as they have met this rank: by then the clearing must be over, not only started.
        _asking(lambda: (runtime.memset(self.own, 0, self.nbytes), runtime.deviceSynchronize()))

    def _malloc(self) -> int:
        from cupy.cuda import runtime

        return int(runtime.malloc(self.nbytes))

    def _map(self, handles: list[bytes]) -> None:
        from cupy.cuda import runtime

        for rank, handle in enumerate(handles):
            if rank == self._mpi.rank:
                self.addresses.append(self.own)
                continue
            try:
                address = int(runtime.ipcOpenMemHandle(handle))
            except runtime.CUDARuntimeError as error:
                raise SetupError(
                    f"rank {self._mpi.rank} cannot map the memory of rank {rank} ({error}): the GPUs need peer access, "
                    'and a container must share its IPC namespace among the ranks; without peer access there is placement="host"'
                ) from None
            self.addresses.append(address)
            self._mapped.append(address)

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Fills bytes of this rank's allocation with a value."""
        from cupy.cuda import runtime

        runtime.memset(self.own + offset, value, nbytes)

    def read(self, offset: int, into: NDArray[Any]) -> None:
        """Copies bytes of it from `offset` on into an array."""
        from cupy.cuda import runtime

        runtime.memcpy(into.ctypes.data, self.own + offset, into.nbytes, runtime.memcpyDeviceToHost)

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Copies an array's bytes to `offset`."""
        from cupy.cuda import runtime

        runtime.memcpy(self.own + offset, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)

    def close(self) -> None:
        """Collective and idempotent: every rank unmaps, they meet, every rank frees."""
        from cupy.cuda import runtime

        mapped, self._mapped = self._mapped, []
        for address in mapped:
            _ignoring(lambda a=address: runtime.ipcCloseMemHandle(a))  # type: ignore[misc]
        own, self.own = self.own, 0
        if self.addresses or own or mapped or self._mpi.size > 1:
            self._mpi.barrier()
        self.addresses = []
        if own:
            _ignoring(lambda: runtime.free(own))


def _ignoring(step: Callable[[], object]) -> None:
    """Does a step of tearing down; a context that a fault has ended cannot be tidied up any more."""
    from cupy.cuda import runtime

    with contextlib.suppress(runtime.CUDARuntimeError):
        step()


def _asking(step: Callable[[], T]) -> T:
    """Runs CUDA calls and turns their errors into one sentence."""
    from cupy.cuda import driver, runtime

    try:
        return step()
    except (runtime.CUDARuntimeError, driver.CUDADriverError) as error:
        raise translated(error) from None


def translated(error: BaseException, shared: bool = False) -> FcommError:
    """The error of this package that stands for an error of CUDA's."""
    status = _status(error)
    if status in _MPS_TROUBLE:
        return SetupError(_mps_sentence(status))
    if status == _CLIENT_TERMINATED or (shared and status in _FATAL):
        return DeviceError(f"a rank sharing this GPU died, or its kernel failed, and took this one's with it ({error})")
    if status in _FATAL:
        return DeviceError(f"a kernel failed, and this process cannot use its GPU any more ({error})")
    if status in _CAPTURE_ERRORS:
        return ArgumentError(f"this cannot be done while a CUDA graph is being captured ({error})")
    return DeviceError(f"CUDA refused: {error}")


def _capturing(stream: int) -> bool:
    """Whether calls on the stream go into a graph. A legacy default stream answers for the streams it waits for."""
    from cupy.cuda import runtime

    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        if error.status == _CAPTURE_IMPLICIT:
            return True
        raise translated(error) from None
    except RuntimeError:  # CuPy's word for a capture that an error has invalidated
        return True


class CudaBackend:
    """One rank of the cuda backend."""

    name = "cuda"

    def __init__(self, mpi: Group, device: int | None = None, placement: str = "device") -> None:
        if device_count() == 0:
            raise ArgumentError("the cuda backend needs an NVIDIA GPU, its driver and CuPy, and this rank finds no GPU")
        import cupy
        from cupy.cuda import driver, runtime

        self._cupy: ModuleType = cupy
        self._runtime: Any = runtime
        self._mpi = mpi
        self._host = placement == "host"
        self._launch_kernel = driver.launchKernel
        self.device = self._choose_device(device)
        _asking(lambda: runtime.setDevice(self.device))
        self._refuse_capture()
        _asking(lambda: runtime.free(0))  # makes the context, if there is none yet
        self.capabilities: frozenset[str] = frozenset()
        self.devices: list[topology.Device] = []
        self._here = _asking(lambda: topology.describe_device(self.device))
        self._memory: SharedMemory | HostMemory | None = None
        self._control = 0
        self._kernels: dict[str, CudaKernel] = {}
        self._packed: dict[int, _Packed] = {}
        self._launch_dependent: Any = None
        self._last: list[int | None] = []
        self._ahead: list[_Ahead | None] = []
        self._told_apart = False
        self._asked = 0
        self._current: Stream | None = None  # CuPy's current stream as it was in the last call

    def _choose_device(self, wanted: int | None) -> int:
        """The device that was asked for; else the one made current, if it is not the first; else one for each rank in turn."""
        if wanted is not None:
            if not 0 <= wanted < device_count():
                raise ArgumentError(f"there is no CUDA device {wanted}: this rank sees {device_count()}")
            return wanted
        current = int(_asking(self._runtime.getDevice))
        return current if current != 0 else _local_rank(self._mpi) % device_count()

    def _refuse_capture(self) -> None:
        torch = interop.torch_module()
        streams = [0, self._cupy.cuda.get_current_stream().ptr]
        if torch is not None and torch.cuda.is_initialized():
            streams.append(torch.cuda.current_stream(self.device).cuda_stream)
        if any(_capturing(s) for s in streams):
            raise ArgumentError("a communicator cannot be built while a CUDA graph is being captured: build it before")

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self.devices = self._mpi.allgather(self._here)  # first of all: every rank comes here
        first = self.devices[0]
        for rank, d in enumerate(self.devices):
            if (d.name, d.compute_capability) != (first.name, first.compute_capability):
                raise SetupError(
                    f"the ranks have GPUs of different kinds (rank 0 {first.name}, rank {rank} {d.name}): "
                    "use GPUs of one kind"
                )
        own = self.devices[self._mpi.rank]
        self.ranks_here = sum(d.uuid == own.uuid for d in self.devices)
        self.sms = topology.sm_share(self.devices, self._mpi.rank)
        self.links = [topology.link(own, d) for d in self.devices]
        self.capabilities = frozenset.intersection(*(topology.LINK_CAPABILITIES[k] for k in self.links))
        if self._host:
            self.capabilities = topology.HOST_CAPABILITIES
        self.mps = all(d.mps for d in self.devices if d.uuid == own.uuid)
        self.time_sliced = any(not d.mps and sum(o.uuid == d.uuid for o in self.devices) > 1 for d in self.devices)
        self._shared = self.ranks_here > 1
        if self.time_sliced:
            self._time_slicing()
        for peer, kind in zip(self.devices, self.links, strict=True):
            if kind in (topology.NVLINK, topology.PCIE) and not self._host:
                self._enable_peer(topology.ordinal_of(peer.uuid))

    def _time_slicing(self) -> None:
        named = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        if named and topology.mps_control().exists():
            raise SetupError(
                f"there is an MPS pipe in {named}, but the GPU is not shared through it: that daemon is dead; start a "
                "fresh one (python -m experiments.mps -- ... does), or unset CUDA_MPS_PIPE_DIRECTORY"
            )
        if self._mpi.rank == 0:
            _warn_time_slicing(max(sum(o.uuid == d.uuid for o in self.devices) for d in self.devices))

    def _enable_peer(self, ordinal: int | None) -> None:
        if ordinal is None:
            return
        try:
            self._runtime.deviceEnablePeerAccess(ordinal)
        except self._runtime.CUDARuntimeError as error:
            if error.status != 704:  # already enabled
                raise translated(error) from None

    def use_dependent_launch(self) -> str | None:
        """From now on grids begin while the one before them in the stream ends; returns why not, or None.

        Every kernel waits at its entry, so this changes when it is scheduled and nothing else.
        """
        if self._here.compute_capability < (9, 0):
            return f"compute capability {'.'.join(map(str, self._here.compute_capability))} has no dependent launch"
        try:
            launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        except (OSError, AttributeError):
            return "the driver has no cuLaunchKernelEx"
        launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        launch.restype = ctypes.c_int
        self._launch_dependent = launch
        return None

    def allocate(self, layout: SlabLayout) -> list[int]:
        mpi = self._mpi
        self._layout = layout
        self._last, self._ahead = [None] * layout.channels, [None] * layout.channels
        memory = self._memory = self.share(layout.slab_bytes)
        try:
            bootstrap.collectively(mpi, lambda: self._make_errors(layout))
            if self._host:
                # Rank-local words stay on the device: no peer touches them, and every call begins with reading them.
                nbytes = layout.channels * CONTROL_BYTES
                self._control = bootstrap.collectively(mpi, lambda: _asking(lambda: int(self._runtime.malloc(nbytes))))
            else:
                self._control = memory.own
            if mpi.size > 1:
                nonce = mpi.allgather(int.from_bytes(os.urandom(4), "little"))[0]
                bootstrap.collectively(mpi, lambda: self._probe_stores(nonce))
                mpi.barrier()
                bootstrap.collectively(mpi, lambda: self._probe_look(nonce))
            bootstrap.collectively(mpi, lambda: _asking(lambda: self.reset(layout)))
        except Exception:  # raised by all ranks or by none
            self.close()
            raise
        return list(memory.addresses)

    def share(self, nbytes: int) -> SharedMemory | HostMemory:
        """Memory of so many bytes on every rank, cleared, that kernels of all of them reach: where slots are. Collective."""
        return HostMemory(self._mpi, nbytes) if self._host else SharedMemory(self._mpi, self.device, nbytes)

    def _make_errors(self, layout: SlabLayout) -> None:
        """Pinned memory, at one address for host and device, so that a record can be read while its kernel still runs."""
        size = layout.channels * ERROR_DTYPE.itemsize
        flags = self._runtime.hostAllocMapped | self._runtime.hostAllocPortable
        pinned = _asking(lambda: self._cupy.cuda.PinnedMemoryPointer(self._cupy.cuda.PinnedMemory(size, flags), 0))
        self._errors = np.frombuffer(pinned, np.uint8)[:size].view(ERROR_DTYPE)
        self._errors[:] = np.zeros(1, ERROR_DTYPE)

    def _probe_stores(self, nonce: int) -> None:
        n = self._mpi.size
        lines = [
            f"#define FC_N {n}",
            f"#define FC_MAX_THREADS {MAX_THREADS}",
            '#include "probe.cuh"',
            "FC_KERNEL(fc::probe)",
        ]
        kernel = self.compile("probe", flatten("\n".join(lines)))
        params = np.zeros(1, params_dtype(n))
        assert self._memory is not None
        params["slab"] = self._memory.addresses
        params["in"], params["rank"], params["out"] = nonce, self._mpi.rank, PROBE_OFFSET
        threads = -(-n // 32) * 32
        self.launch_once(kernel, LaunchShape(1, threads), params, 0)
        self.synchronize()

    def _probe_look(self, nonce: int) -> None:
        n, rank = self._mpi.size, self._mpi.rank
        assert self._memory is not None
        cells = np.zeros((n, 4), np.uint32)
        _asking(lambda: self._own_memory().read(PROBE_OFFSET, cells))
        want = np.array([[r, rank, nonce, ~nonce & 0xFFFFFFFF] for r in range(n)], np.uint32)
        lost = np.flatnonzero((cells != want).any(axis=1))
        if lost.size:
            raise SetupError(
                f"stores of rank {lost[0]} do not arrive in the memory of rank {rank}, although it is mapped (link: "
                f"{self.links[lost[0]]}): peer access does not work here (an IOMMU or ACS between the GPUs?)"
            )

    def _fetch(self, into: NDArray[Any], address: int) -> None:
        self._runtime.memcpy(into.ctypes.data, address, into.nbytes, self._runtime.memcpyDeviceToHost)

    def _store(self, address: int, data: NDArray[Any]) -> None:
        self._runtime.memcpy(address, data.ctypes.data, data.nbytes, self._runtime.memcpyHostToDevice)

    def control_address(self) -> int:
        return self._control

    def error_address(self) -> int:
        return int(self._errors.ctypes.data)

    def error_records(self) -> NDArray[np.void]:
        return self._errors

    def reset(self, layout: SlabLayout) -> None:
        memory = self._own_memory()
        memory.fill(0, memory.nbytes, 0)
        for channel in range(layout.channels):
            for region in layout.regions(channel).values():
                if region.cleared_to:
                    nbytes = region.copies * region.copy_stride
                    memory.fill(region.offset, nbytes, region.cleared_to)
        self.write_control(layout.initial_control())
        self._errors[:] = np.zeros(1, ERROR_DTYPE)
        self._last, self._ahead = [None] * layout.channels, [None] * layout.channels
        self.synchronize()

    def _own_memory(self) -> SharedMemory | HostMemory:
        assert self._memory is not None, "no slab: not allocated, or closed"
        return self._memory

    def control(self) -> NDArray[np.void]:
        self.synchronize()
        words = np.empty(self._layout.channels, CONTROL_DTYPE)
        _asking(lambda: self._fetch(words, self._control))
        return words

    def write_control(self, words: NDArray[np.void]) -> None:
        assert words.dtype.itemsize == CONTROL_BYTES
        _asking(lambda: self._store(self._control, words))
        self.synchronize()

    def slab(self) -> Any:
        """The own slab's bytes as a CuPy array on the same memory, for tests that look at it."""
        memory = self._own_memory()
        unowned = self._cupy.cuda.UnownedMemory(memory.own, memory.nbytes, memory, self.device)
        return self._cupy.ndarray((memory.nbytes,), np.uint8, self._cupy.cuda.MemoryPointer(unowned, 0))

    def write_slab(self, offset: int, content: NDArray[np.uint8]) -> None:
        memory = self._own_memory()
        assert 0 <= offset <= offset + content.nbytes <= memory.nbytes
        self.synchronize()
        _asking(lambda: memory.write(offset, np.ascontiguousarray(content)))
        self.synchronize()

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def kernel(self, spec: Specialisation | Separate) -> CudaKernel:
        key = spec.name
        found = self._kernels.get(key)
        if found is None:
            if (self.device, text := spec.text()) not in _loaded and _capturing(self._asked):
                raise ArgumentError(
                    f"the kernel {spec.name} is not loaded yet, and loading is nothing that a graph can capture: make this "
                    "call, or comm.prepare(...) with the same arguments, once before the capture"
                )
            found = self._kernels[key] = self.compile(spec.name, text)
        return found

    def compile(self, name: str, text: str) -> CudaKernel:
        """Loads a kernel `fc_kernel` from its whole source; compiled binaries are kept on disk by CuPy."""
        return CudaKernel(name, _asking(lambda: _load(self.device, name, text)), self.sms)

    def ticks_per_us(self) -> float:
        """Rate of the SMs' clock at present, which boost and power limits change: measured for 4 ms, after as long for warming up."""
        from cupy.cuda import PinnedMemory, PinnedMemoryPointer

        lines = [
            "#define FC_N 2",
            "#define FC_MAX_THREADS 32",
            '#include "measure/pairs.cuh"',
            "FC_KERNEL(fc::clock_rate)",
        ]
        kernel = self.compile("clock_rate", flatten("\n".join(lines)))
        told = np.frombuffer(PinnedMemoryPointer(PinnedMemory(16, 0), 0), np.uint8)[:16].view(np.uint64)
        params = np.zeros(1, params_dtype(2))
        params["out"], params["nbytes"] = told.ctypes.data, 4_000_000
        for _ in range(2):
            self.launch_once(kernel, LaunchShape(1, 32), params, 0)
            self.synchronize()
        return float(told[1]) / float(told[0]) * 1e3

    def launch(self, kernel: CudaKernel, shape: LaunchShape, params: NDArray[np.void], stream: Any) -> None:
        packed = self._packed.get(id(params))
        if packed is None:
            packed = self._pack(params)
        if self._last[packed.channel] != stream:
            self._change_stream(packed.channel, stream)
        if self._launch_dependent is not None:
            self._dependent(packed, kernel, shape, stream, self._may_overlap(packed.channel, kernel, shape, stream))
        else:
            self._independent(packed, kernel, shape, stream)

    def _may_overlap(self, channel: int, kernel: CudaKernel, shape: LaunchShape, stream: int) -> bool:
        """Whether this grid may be let in by the triggers of the channel's one before, instead of by that one's end.

        A grid that has triggered may still wait for peers whose grids of the same call have no room yet. On a GPU that ranks
        share, both grids of every rank must then fit (`grids.fit_together`). The grid after the next is no matter: it is let in
        when this one is past its wait, so when the one before is complete, on this rank and therefore placed on all. On a GPU
        of a rank's own the one before is placed as a whole when its triggers fire, so nothing that it needs can be taken.

        What is known of the one before is the host's order of launches, which is the stream's, save that captured launches
        run later or never: the first launch behind a capture follows something unknown.
        """
        ahead = self._ahead[channel]
        if ahead is not None and ahead.kernel is kernel and ahead.shape is shape and not ahead.captured:
            return True  # one kind, of which two grids fit by its number of blocks (or it is a baseline's own risk)
        captured = _capturing(stream)
        self._ahead[channel] = _Ahead(kernel, shape, captured)
        channels = len(self._ahead)
        if self.ranks_here == 1 and channels == 1:
            return True
        if ahead is None:
            return captured  # the first of a graph; else behind calls that another stream's have pushed out of sight
        if ahead.captured and not captured:
            return False
        before = (ahead.shape.blocks, ahead.kernel.per_sm(ahead.shape.threads))
        if fit_together(self.sms, before, (shape.blocks, kernel.per_sm(shape.threads)), channels):
            return True
        if not self._told_apart and self._mpi.rank == 0:
            self._told_apart = True
            log.info(
                "dependent launch: %s with %d x %d threads behind %s with %d x %d is launched without it, since both might not fit "
                "on the GPU that ranks share",
                kernel.name, shape.blocks, shape.threads, ahead.kernel.name, ahead.shape.blocks, ahead.shape.threads,
            )  # fmt: skip
        return False

    def launch_once(
        self, kernel: CudaKernel, shape: LaunchShape, params: NDArray[np.void], stream: int, dependent: bool = False
    ) -> None:
        """Starts a kernel that is no collective: it takes no epoch, so the order of streams does not matter.

        dependent : start it as `launch` starts collectives, if dependent launch is in use; the kernel must wait at entry.
        """
        packed = _Packed(params)
        if dependent and self._launch_dependent is not None:
            self._dependent(packed, kernel, shape, stream, True)
        else:
            self._independent(packed, kernel, shape, stream)

    def may_follow(self, kernel: CudaKernel, shape: LaunchShape, stream: int) -> bool:
        """Whether a kernel that is no collective may be let in by the triggers of the collective ahead of it in the stream: it
        waits for that one's end, and holds the room that it got meanwhile. On a GPU that ranks share both must fit.

        The collective behind it is no matter: it is let in when this kernel is past its wait.
        """
        if self._launch_dependent is None:
            return False
        channels = len(self._ahead)
        if self.ranks_here == 1 and channels == 1:
            return True
        after = (shape.blocks, kernel.per_sm(shape.threads))
        for last, ahead in zip(self._last, self._ahead, strict=True):
            if last != stream:
                continue
            if ahead is None or (ahead.captured and not _capturing(stream)):
                return False
            if not fit_together(
                self.sms, (ahead.shape.blocks, ahead.kernel.per_sm(ahead.shape.threads)), after, channels
            ):
                return False
        return True

    def _dependent(self, packed: _Packed, kernel: CudaKernel, shape: LaunchShape, stream: int, overlap: bool) -> None:
        at = packed.configured(shape, stream)
        packed.config.attribute_count = overlap
        status = self._launch_dependent(at, kernel.pointer, packed.pointers_address, None)
        if status:
            raise translated(_DriverError(status), self._shared)

    def _independent(self, packed: _Packed, kernel: CudaKernel, shape: LaunchShape, stream: int) -> None:
        at = packed.pointers_address
        try:
            self._launch_kernel(kernel.pointer, shape.blocks, 1, 1, shape.threads, 1, 1, 0, stream, at, 0)
        except Exception as error:
            raise translated(error, self._shared) from None

    def dependent_edges(self, graph: Any) -> int | None:
        """Programmatic edges of a captured graph (a CuPy Graph): kernels in it that may be scheduled before the one ahead of
        them is over. None where the driver does not tell (before CUDA 12.3 it cannot): then they are not counted, and the
        graph is as good as it was.
        """
        try:
            return _dependent_edges(ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2, int(graph.graph))
        except (OSError, AttributeError, FcommError):
            return None

    def _pack(self, params: NDArray[np.void]) -> _Packed:
        packed = self._packed[id(params)] = _Packed(params)
        return packed

    def _change_stream(self, channel: int, stream: int) -> None:
        """A call comes on another stream than the channel's last one, which must have finished: epochs are taken in
        stream order, and two calls of one channel at a time would share an epoch.

        Nothing here runs while calls stay on one stream. Under capture only other captures can be told: querying a
        stream then is illegal, and what a graph will meet when it is replayed nobody knows yet.
        """
        last = self._last[channel]
        if last is not None:
            if _capturing(last):
                if _capturing(stream):
                    raise ArgumentError(
                        f"two streams that are being captured use channel {channel}: use one stream, or a channel for each "
                        "(Communicator(..., channels=2))"
                    )
            elif not _capturing(stream) and self._busy(last):
                raise ArgumentError(
                    f"channel {channel} still has work on another stream: synchronize that stream first, or use a channel "
                    "for each stream (Communicator(..., channels=2))"
                )
        self._last[channel], self._ahead[channel] = stream, None

    def _busy(self, stream: int) -> bool:
        # CuPy returns the status of this one function instead of raising it.
        status = int(self._runtime.streamQuery(stream))
        if status in _FATAL:
            raise translated(self._runtime.CUDARuntimeError(status), self._shared)
        return status == _STREAM_BUSY  # else finished, or destroyed by its owner, which means the same

    def copy(self, src: View, dst: View, stream: Any) -> None:
        kind = self._runtime.memcpyDeviceToDevice
        _asking(lambda: self._runtime.memcpyAsync(dst.address, src.address, src.nbytes, kind, stream))

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def view(self, x: Any) -> View:
        if isinstance(x, self._cupy.ndarray):
            return interop.view_cupy(x, self.device)
        if interop.is_torch(x):
            return interop.view_torch(x, self.device)
        return interop.view_foreign(x, self.device)

    def empty_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        """An array for a call's result, allocated for the stream that the call was asked for (see `stream`)."""
        if interop.is_torch(x):
            torch = interop.torch_module()
            if torch.cuda.current_stream(x.device).cuda_stream == self._asked:
                return torch.empty(shape, dtype=x.dtype, device=x.device)
            with torch.cuda.stream(torch.cuda.ExternalStream(int(self._asked), device=x.device)):
                return torch.empty(shape, dtype=x.dtype, device=x.device)
        if _capturing(self._asked):
            raise ArgumentError(
                "out=None allocates the result, and a graph would keep only its address: pass out=... under capture"
            )
        if isinstance(x, self._cupy.ndarray):
            dtype = x.dtype
        else:
            name = self.view(x).dtype
            dtype = REDUCIBLE[name].numpy if name in REDUCIBLE else np.dtype(name)
        if self._asked is self._current or self._cupy.cuda.get_current_stream().ptr == self._asked:
            return self._cupy.empty(shape, dtype)
        with self._cupy.cuda.ExternalStream(int(self._asked)):
            return self._cupy.empty(shape, dtype)

    def empty(self, count: int, dtype: str) -> Any:
        return self._cupy.empty(count, REDUCIBLE[dtype].numpy if dtype in REDUCIBLE else np.dtype(dtype))

    def from_host(self, x: NDArray[Any]) -> Any:
        made = self._cupy.empty(x.shape, x.dtype)
        if x.nbytes:
            _asking(lambda: self._store(made.data.ptr, np.ascontiguousarray(x)))
        return made

    def to_host(self, x: Any) -> NDArray[Any]:
        view = self.view(x)
        if not view.contiguous:
            x = x.contiguous() if interop.is_torch(x) else self._cupy.ascontiguousarray(self._cupy.asarray(x))
            view = self.view(x)
        dtype = REDUCIBLE[view.dtype].numpy if view.dtype in REDUCIBLE else np.dtype(view.dtype)
        made = np.empty(view.shape, dtype)
        self.synchronize()
        if made.nbytes:
            _asking(lambda: self._fetch(made, view.address))
        return made

    def stream(self, x: Any, stream: Any) -> Any:
        self._asked = handle = self._stream(x, stream)
        return handle

    def _stream(self, x: Any, stream: Any) -> int:
        if stream is None:
            if interop.is_torch(x):
                return int(interop.torch_module().cuda.current_stream(x.device).cuda_stream)
            stream, last = self._cupy.cuda.get_current_stream(), self._current
            if last is None or last.owner is not stream:
                self._current = last = Stream(stream.ptr)
                last.owner = stream
            return last
        if isinstance(stream, int):
            return stream
        pointer = getattr(stream, "ptr", None)
        if pointer is None:
            pointer = getattr(stream, "cuda_stream", None)
        if pointer is None and hasattr(stream, "__cuda_stream__"):
            pointer = stream.__cuda_stream__()[1]
        if pointer is None:
            raise ArgumentError(
                f"a {type(stream).__name__} is no CUDA stream: pass a CuPy or PyTorch stream, or a handle as an int"
            )
        handle = Stream(pointer)
        handle.owner = stream
        return handle

    def synchronize(self) -> None:
        try:
            self._runtime.deviceSynchronize()
        except self._runtime.CUDARuntimeError as error:
            raise translated(error, self._shared) from None

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        own = self.devices[self._mpi.rank]
        return {
            "backend": "cuda",
            "device": own.name,
            "emulation": False,
            "uuid": own.uuid,
            "compute_capability": ".".join(map(str, own.compute_capability)),
            "sms": own.sms,
            "sms_total": own.sms_total,
            "sms_per_rank": self.sms,
            "ranks_per_gpu": self.ranks_here,
            "gpus": len({d.uuid for d in self.devices}),
            "gpu_uuids": sorted({d.uuid for d in self.devices}),
            # What slots are reached over; a cost model of one placement is none of the other.
            "links": ["host"] * self._mpi.size if self._host else self.links,
            **({"placement": "host"} if self._host else {}),
            "mps": self.mps,
            "mps_share_percent": os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") if self.mps else None,
            "time_sliced": self.time_sliced,
            "driver": self._runtime.driverGetVersion(),
            "cuda_runtime": self._runtime.runtimeGetVersion(),
            "nvrtc": ".".join(map(str, self._cupy.cuda.nvrtc.getVersion())),
            "cupy": self._cupy.__version__,
        }

    def close(self) -> None:
        memory, self._memory = self._memory, None
        self._packed.clear()
        self._kernels.clear()
        if self._host and self._control:
            _ignoring(lambda: self._runtime.free(self._control))
        self._control = 0
        if memory is not None:
            memory.close()


def _local_rank(mpi: Group) -> int:
    """Number of this process on its machine, as the launcher counts; within `mpi` where it does not say."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID", "LOCAL_RANK"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return mpi.rank


_warned = False


def _warn_time_slicing(ranks: int) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    message = (
        f"{ranks} ranks share a GPU without MPS: they take turns on it, a hop between two of them takes about 2.2 ms, and "
        "latencies are those of time slicing; python -m experiments.mps -- mpirun ... lets them run at once"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    sys.stderr.flush()
