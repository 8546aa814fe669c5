"""The host's side of the cuda backend, as far as it can be looked at without a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fcomm import interop, topology
from fcomm.backends import cuda
from fcomm.backends.base import LaunchShape, gpu_shape
from fcomm.communicator import Plan
from fcomm.errors import ArgumentError, DeviceError, FcommError, SetupError
from fcomm.layout import SlabLayout, params_dtype
from fcomm.protocols import GpuShare, protocol
from fcomm.variants import SHIPPED

cupy = pytest.importorskip("cupy")


def array(shape: tuple[int, ...], dtype: Any, address: int = 0x10000, device: int = 0) -> Any:
    """A CuPy array over an address that nobody reads."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 16, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


# ---- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8])
def test_cupy_arrays(dtype: Any) -> None:
    x = array((3, 4), dtype)
    view = interop.view_cupy(x, 0)
    assert (view.address, view.count, view.shape, view.contiguous) == (0x10000, 12, (3, 4), True)
    assert (view.dtype, view.nbytes, view.owner) == (np.dtype(dtype).name, x.nbytes, x)
    assert interop.view_cupy(x.reshape(-1)[1:], 0).address == 0x10000 + np.dtype(dtype).itemsize
    assert not interop.view_cupy(x.T, 0).contiguous
    assert not interop.view_cupy(x[:, ::2], 0).contiguous
    with pytest.raises(ArgumentError, match="on device 0, but this rank's communicator uses device 1"):
        interop.view_cupy(x, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool", "complex64"])
def test_dlpack_capsules_are_read_and_not_consumed(dtype: str) -> None:
    x = np.zeros((3, 4, 5), dtype)
    for host, dense in (
        (x, True),
        (x[1:], True),
        (x[:, 1:], False),
        (x.T, False),
        (x[:, :0], True),
        (x[:1, :1, :1], True),
    ):
        for _ in range(2):
            view = interop.view_dlpack(host, host.__dlpack__())
            assert (view.dtype, view.shape, view.nbytes, view.contiguous) == (dtype, host.shape, host.nbytes, dense)
            assert view.address == host.ctypes.data or not host.size


class Foreign:
    """Another library's array, on a device."""

    def __init__(self, host: Any, device: tuple[int, int]) -> None:
        self._host, self._device = host, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, stream: int | None = None) -> Any:
        assert stream == -1
        return self._host.__dlpack__()


def test_foreign_arrays_and_where_they_are() -> None:
    host = np.ones(7, np.float32)
    assert interop.view_foreign(Foreign(host, (2, 1)), 1).address == host.ctypes.data
    for x, words in (
        (Foreign(host, (2, 0)), "on device 0, but"),
        (Foreign(host, (1, 0)), "host memory"),
        (Foreign(host, (10, 0)), "not in CUDA memory"),
        (host, "host memory"),
        ([1.0], "a list is no GPU array"),
    ):
        with pytest.raises(ArgumentError, match=words):
            interop.view_foreign(x, 1)


def test_array_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", lambda _: SimpleNamespace(device=0))
    facts = {"typestr": "<f4", "shape": (2, 3), "data": (4096, False), "version": 2}
    x = SimpleNamespace(__cuda_array_interface__={**facts, "strides": None})
    view = interop.view_foreign(x, 0)
    assert (view.address, view.nbytes, view.dtype, view.contiguous) == (4096, 24, "float32", True)
    x = SimpleNamespace(__cuda_array_interface__={**facts, "strides": (4, 8)})
    assert not interop.view_foreign(x, 0).contiguous
    with pytest.raises(ArgumentError, match="on device 0"):
        interop.view_foreign(x, 3)


# ---- who shares a GPU -----------------------------------------------------------------------------------------------


def device(uuid: str = "a", sms: int = 132, total: int = 132, mps: bool = True) -> topology.Device:
    return topology.Device(0, uuid, "GPU", (9, 0), sms, total, mps)


def test_share_of_the_sms() -> None:
    assert topology.sm_share([device()], 0) == 132
    assert topology.sm_share([device()] * 8, 3) == 16
    assert topology.sm_share([device(sms=14)] * 8, 3) == 14  # limited by MPS, and divided by that already
    assert topology.sm_share([device(sms=66)] * 8, 3) == 16  # a limit is no reservation
    assert topology.sm_share([device("a")] * 2 + [device("b")] * 6, 0) == 66
    assert topology.sm_share([device("a")] * 2 + [device("b")] * 6, 7) == 22
    assert topology.sm_share([device(sms=4, total=4)] * 8, 0) == 1


def test_size_of_the_whole_gpu_behind_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_nvml_cores", lambda _: 132 * 128)
    assert topology._total_sms("GPU-x", (9, 0), 14) == 132
    monkeypatch.setattr(topology, "_nvml_cores", lambda _: 0)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "12")
    assert 14 <= topology._total_sms("GPU-x", (9, 0), 14) <= 132
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    assert topology._total_sms("GPU-x", (9, 0), 132) == 132


# ---- launching ------------------------------------------------------------------------------------------------------


class Runtime:
    """The runtime's streams: which of them work, and which are being captured."""

    CUDARuntimeError = cupy.cuda.runtime.CUDARuntimeError

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.capturing: set[int] = set()

    def streamIsCapturing(self, stream: int) -> bool:
        return stream in self.capturing

    def streamQuery(self, stream: int) -> int:
        assert not self.capturing, "a query during capture is illegal, and ends the capture"
        return 600 if stream in self.busy else 0


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = cuda.CudaBackend.__new__(cuda.CudaBackend)
    made._runtime, made._last, made._shared, made.sms = Runtime(), [None, None], False, 16
    made._ahead, made.ranks_here = [None, None], 8
    made._told_apart, made._mpi = False, SimpleNamespace(rank=0)
    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", made._runtime.streamIsCapturing)
    return made


def test_a_second_stream_must_wait_for_the_first(backend: Any) -> None:
    backend._change_stream(0, 7)
    backend._runtime.busy = {7}
    with pytest.raises(ArgumentError, match="channel 0 still has work on another stream"):
        backend._change_stream(0, 8)
    backend._change_stream(1, 8)
    backend._runtime.busy = set()
    backend._change_stream(0, 8)
    assert backend._last == [8, 8]


def test_streams_under_capture_are_never_queried(backend: Any) -> None:
    backend._change_stream(0, 7)
    backend._runtime.busy, backend._runtime.capturing = {7}, {8}
    backend._change_stream(0, 8)  # what stream 7 does now does not matter to a graph that runs later
    backend._runtime.capturing = {8, 9}
    with pytest.raises(ArgumentError, match="two streams that are being captured use channel 0"):
        backend._change_stream(0, 9)
    backend._change_stream(0, 7)  # an eager call while another stream is being captured


def test_default_shape_of_a_gpu() -> None:
    for cells in (1, 256, 257, 5000, 16 * 2 * 256, 16 * 2 * 256 + 1, 10**6):
        shape = gpu_shape(cells, 16)
        assert shape.threads % 32 == 0
        assert (shape.blocks - 1) * shape.threads < cells <= shape.blocks * shape.threads
    assert gpu_shape(16 * 256, 16).threads == 256
    assert gpu_shape(16 * 256 + 1, 16).threads == 512
    assert gpu_shape(16 * 1024 + 1, 16, 1024).threads == 1024


def kernel(per_sm: dict[int, int]) -> cuda.CudaKernel:
    """A kernel of which an SM holds so many blocks of so many threads."""
    made = cuda.CudaKernel("k", (1, None, 62, 0), 16)
    made._per_sm = per_sm
    return made


@pytest.fixture
def one_channel(backend: Any) -> Any:
    backend._last, backend._ahead = [None], [None]
    return backend


LARGE, SMALL = LaunchShape(16, 512), LaunchShape(256, 32)
PER_SM = {512: 2, 32: 32, 256: 4}


def planned(launch: str, channels: int, shape: tuple[int, int] | None, name: str = "one_shot.ll") -> tuple[int, int]:
    """The grid of a call of 256 KiB among 8 ranks with 16 SMs each."""
    backend = SimpleNamespace(
        kernel=lambda spec: kernel({**PER_SM, 1024: 1}), error_address=lambda: 0, control_address=lambda: 0
    )
    comm: Any = SimpleNamespace(
        backend=backend, world_size=8, rank=0, slabs=[0] * 8, timeout_s=1.0, gpu=GpuShare("9.0", 16, 132),
        layout=SlabLayout(8, 1 << 20, channels), dependent_launch=launch, selector=SimpleNamespace(shape=lambda *_: None),
        _keep_grid=lambda *_: None, link=None, link_compiled=0, _queues=lambda *_: None, variant=SHIPPED,
    )  # fmt: skip
    made = Plan(comm, protocol(name), "float32", 1 << 18, 0, None if shape is None else LaunchShape(*shape), True)
    return made.shape.blocks, made.shape.threads


def test_grids_are_clamped_to_the_places_that_there_are() -> None:
    for launch, channels, blocks in (
        ("none", 1, 32),
        ("late", 1, 16),
        ("early", 1, 16),
        ("none", 2, 8),
        ("early", 2, 4),
    ):
        assert planned(launch, channels, (999, 512)) == (blocks, 512)
    assert planned("early", 1, (9999, 32)) == (256, 32)
    assert planned("none", 4, (9999, 32)) == (4, 32), (
        "beside another channel's blocks a small one may take an SM of its own"
    )
    assert planned("none", 1, None) == (16, 1024), "32 by default, of which 16 SMs hold one each"
    assert planned("late", 1, None, "custom_ar_v2.push") == (16, 1024), "its authors' grid, at their risk"
    with pytest.raises(ArgumentError, match=r"no room for the 34 grids that 17 channel\(s\) .* use fewer channels"):
        planned("early", 17, (1, 32))


def test_a_grid_is_let_in_early_only_beside_one_that_it_fits_with(
    one_channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fcomm")
    k, other = kernel(PER_SM), kernel(PER_SM)

    def overlaps(of: cuda.CudaKernel, shape: LaunchShape) -> bool:
        return bool(one_channel._may_overlap(0, of, shape, 7))

    assert not overlaps(k, LARGE), "nobody knows what is in the stream before it"
    assert overlaps(k, LARGE)
    assert not overlaps(k, SMALL), "256 + 16 blocks do not have 32 places"
    assert overlaps(k, SMALL)
    assert not overlaps(other, LARGE)
    assert overlaps(k, LaunchShape(16, 512)), "another protocol, the same kind of block"
    assert overlaps(k, LaunchShape(16, 256))
    assert not overlaps(k, LaunchShape(17, 512))
    (said,) = caplog.records  # once
    assert said.getMessage() == (
        "dependent launch: k with 256 x 32 threads behind k with 16 x 512 is launched without it, since both might not fit on the "
        "GPU that ranks share"
    )
    one_channel.ranks_here = 1
    assert overlaps(k, SMALL), "on a GPU of its own a grid is placed when it lets another one in"
    one_channel._change_stream(0, 8)
    one_channel.ranks_here = 8
    assert not overlaps(k, SMALL), "calls on another stream came between"


def test_what_was_captured_is_not_what_ran_before(one_channel: Any) -> None:
    k, runtime = kernel(PER_SM), one_channel._runtime

    def overlaps(shape: LaunchShape) -> bool:
        return bool(one_channel._may_overlap(0, k, shape, 7))

    overlaps(LARGE)
    runtime.capturing = {7}
    assert [overlaps(s) for s in (SMALL, SMALL, LARGE, LARGE)] == [False, True, False, True], (
        "within the graph, as always"
    )
    runtime.capturing = set()
    small = LaunchShape(16, 512)
    assert not overlaps(small), "behind a capture: the call that ran last may have been any"
    assert overlaps(small)
    runtime.capturing = {7}
    assert overlaps(small), "as it was before, and first in its graph"
    runtime.capturing = set()
    assert overlaps(small)
    one_channel._ahead = [None]
    runtime.capturing = {7}
    assert overlaps(LARGE), "first in its graph: there is no grid that it could overlap"


def test_a_kernel_behind_a_collective_is_let_in_early_only_where_both_fit(one_channel: Any) -> None:
    collective, other, runtime = kernel(PER_SM), kernel(PER_SM), one_channel._runtime

    def follows(blocks: int, stream: int = 7) -> bool:
        return bool(one_channel.may_follow(other, LaunchShape(blocks, 256), stream))

    one_channel._launch_dependent = None
    assert not follows(16)
    one_channel._launch_dependent = object()
    assert follows(64), "there is no collective on its stream"
    one_channel._last = [7]
    one_channel._may_overlap(0, collective, LARGE, 7)
    assert follows(16)
    assert not follows(17), "16 blocks of 512 threads leave 16 places"
    assert follows(17, 8)
    one_channel.ranks_here = 1
    assert follows(64), "on a GPU of its own a grid is placed when it lets another one in"
    one_channel.ranks_here = 8
    runtime.capturing = {7}
    one_channel._may_overlap(0, collective, SMALL, 7)
    one_channel._may_overlap(0, collective, LARGE, 7)
    assert follows(16), "in the graph that the collective is in"
    runtime.capturing = set()
    assert not follows(16), "behind a capture: the call that ran last may have been any"


def test_the_launch_attribute_is_there_only_where_grids_may_overlap(one_channel: Any) -> None:
    seen: list[tuple[int, int]] = []
    one_channel._packed = {}

    def launch_ex(config: int, *_: object) -> int:
        found = cuda._LaunchConfig.from_address(config)
        seen.append((found.grid_x, found.attribute_count))
        return 0

    one_channel._launch_dependent = launch_ex
    params = np.zeros(1, params_dtype(2))
    k = kernel(PER_SM)
    for shape in (LARGE, LARGE, SMALL, SMALL):
        one_channel.launch(k, shape, params, 7)
    one_channel.launch_once(k, LaunchShape(1, 32), params, 7, dependent=True)
    assert seen == [(16, 0), (16, 1), (256, 0), (256, 1), (1, 1)]


def test_streams_are_handles_that_keep_their_owner(backend: Any) -> None:
    owner = SimpleNamespace(ptr=99)
    handle = backend.stream(None, owner)
    assert handle == 99
    assert handle.owner is owner
    assert backend.stream(None, 5) == 5
    assert backend.stream(None, SimpleNamespace(cuda_stream=6)) == 6
    assert backend.stream(None, SimpleNamespace(__cuda_stream__=lambda: (0, 8))) == 8
    with pytest.raises(ArgumentError, match="no CUDA stream"):
        backend.stream(None, "main")


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "shared", "kind", "words"),
    [
        (46, True, SetupError, "takes no new process"),
        (805, False, SetupError, "does not answer"),
        (810, False, DeviceError, "a rank sharing this GPU died"),
        (719, True, DeviceError, "a rank sharing this GPU died"),
        (719, False, DeviceError, "a kernel failed"),
        (900, False, ArgumentError, "being captured"),
        (1, False, DeviceError, "CUDA refused"),
    ],
)
def test_errors_of_cuda_are_one_sentence(status: int, shared: bool, kind: type[FcommError], words: str) -> None:
    error = RuntimeError("cudaErrorSomething: something")
    error.status = status  # type: ignore[attr-defined]
    found = cuda.translated(error, shared)
    assert type(found) is kind
    assert words in str(found)
    assert "\n" not in str(found)


def test_no_device_here_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    status = [0]

    def count() -> int:
        error = cupy.cuda.runtime.CUDARuntimeError.__new__(cupy.cuda.runtime.CUDARuntimeError)
        error.status = status[0]
        raise error

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", count)
    for status[0] in (35, 100):
        assert cuda.device_count() == 0
    status[0] = 805
    with pytest.raises(SetupError, match="MPS daemon does not answer"):
        cuda.device_count()


def test_a_dead_mps_daemon_is_found_without_asking_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA would fail, wait or go on without MPS, as its version has it."""
    monkeypatch.setattr(topology, "MPS_PATIENCE_S", 0.5)
    tool = tmp_path / "bin" / "nvidia-cuda-mps-control"
    tool.parent.mkdir()
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PATH", str(tool.parent))
    for code in (1, 0):
        tool.write_text(f"#!/bin/sh\nexit {code}\n")
        tool.chmod(0o755)
        topology.mps_is_dead.cache_clear()
        assert topology.mps_is_dead() is (code == 1)
    topology.mps_is_dead.cache_clear()
    tool.unlink()
    assert not topology.mps_is_dead()  # nobody to ask
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    topology.mps_is_dead.cache_clear()
    with pytest.raises(SetupError, match="MPS daemon does not answer"):
        cuda.device_count()
    topology.mps_is_dead.cache_clear()
    (tmp_path / "control").unlink()
    assert not topology.mps_is_dead()
    topology.mps_is_dead.cache_clear()


# ---- graphs ---------------------------------------------------------------------------------------------------------


def test_programmatic_edges_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function that answers as the driver's does: first the number of edges, then the edges."""
    kinds = [0, 1, 1, 0, 1]
    asked: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 5)
    def edges_of(graph: int, ends: int, starts: int, data: int, count: int) -> int:
        asked.append(graph)
        number = ctypes.c_size_t.from_address(count)
        if data:
            assert ends
            assert starts
            assert number.value == len(kinds)
            for k, kind in enumerate(kinds):
                (cuda._EdgeData * len(kinds)).from_address(data)[k].type = kind
        number.value = len(kinds)
        return 0 if graph == 5 else 1

    assert ctypes.sizeof(cuda._EdgeData) == 8
    assert cuda._dependent_edges(edges_of, 5) == 3
    assert asked == [5, 5]
    kinds.clear()
    assert cuda._dependent_edges(edges_of, 5) == 0
    with pytest.raises(DeviceError, match="CUDA refused: driver error 1"):
        cuda._dependent_edges(edges_of, 6)
    # An old driver has no such function: not counted, which is not zero.
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    made = cuda.CudaBackend.__new__(cuda.CudaBackend)
    assert made.dependent_edges(SimpleNamespace(graph=5)) is None
    kinds += [1, 0]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuGraphGetEdges_v2=edges_of))
    assert made.dependent_edges(SimpleNamespace(graph=5)) == 1
    assert made.dependent_edges(SimpleNamespace(graph=6)) is None  # nor is one that it refuses to look at
