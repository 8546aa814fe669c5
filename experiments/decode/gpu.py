"""A decode step on a GPU: cuBLAS's matrix products, the kernels of kernels_cu/experiments/decode.cu, one CUDA graph."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.decode.shapes import ITEM, MOST_PARTS, Model, Room, parts_of
from experiments.decode.step import EPSILON, Reduce, Tensor, operations, tensors, token
from fcomm import Communicator, measure, measure_cuda
from fcomm.backends.cuda import translated
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import DeviceError, SetupError
from fcomm.source import OPTIONS, flatten, kernel_root

if TYPE_CHECKING:
    from fcomm.backends.cuda import CudaBackend

SOURCE = "experiments/decode.cu"
WORKSPACE_BYTES = 32 << 20
"""For cuBLAS, as its manual asks for on Hopper: given beforehand, so that no product of a graph allocates."""
SPARE_BYTES = 512 << 20
"""Of each rank, beside the model: cuBLAS's kernels and workspace, communicators of searched launch shapes."""
KERNELS = ("fill", "add_rms_norm", "silu_mul", "attend", "combine")
FILL_BLOCKS, FILL_THREADS = 1024, 256
ATTEND_THREADS = 128
"""As the kernel has them compiled in."""
POISON = 0xA5


def source(model: Model, dtype: str) -> str:
    """The kernels' source for a model, as one string."""
    lines = [
        f"#define DECODE_T fc::{REDUCIBLE[dtype].kernel_type}",
        f"#define DECODE_HEAD_DIM {model.head_dim}",
        f"#define DECODE_GROUP {model.heads // model.kv_heads}",
        (kernel_root() / SOURCE).read_text(),
    ]
    return flatten("\n".join(lines))


def source_hash() -> str:
    """SHA-256 of the step's own kernels."""
    return hashlib.sha256((kernel_root() / SOURCE).read_bytes()).hexdigest()


def room(comm: Communicator) -> Room:
    """The memory that a GPU has for the ranks' models: the least of all ranks' GPUs. Collective."""
    from cupy.cuda import runtime

    backend: CudaBackend = comm.backend  # type: ignore[assignment]
    sharing = max(comm.mpi.allgather(backend.ranks_here))
    free = min(comm.mpi.allgather(int(runtime.memGetInfo()[0])))
    return Room(max(0, free - sharing * SPARE_BYTES), sharing)


def buffer_bytes(model: Model, ranks: int, batch: int) -> dict[str, int]:
    """Bytes of each buffer of a step on one rank; beside them there are weights and caches (`step.tensors`)."""
    matrices = model.matrices(ranks)
    widths = {
        **dict.fromkeys(("token", "residual", "h", "x", "out"), model.hidden),
        "qkv": matrices["qkv"][0], "attended": matrices["attention_out"][1], "gate_up": matrices["gate_up"][0],
        "activated": matrices["down"][1], "logits": model.vocabulary // ranks,
    }  # fmt: skip
    parts = batch * model.heads // ranks * MOST_PARTS * (model.head_dim + 2) * np.dtype(np.float32).itemsize
    return {**{name: batch * width * ITEM for name, width in widths.items()}, "parts": parts}


class Cublas:
    """The few functions of cuBLAS that a step needs, on one stream and with a workspace of its own.

    Through ctypes: CuPy's binding sets the stream anew in each call, which takes the handle's workspace away, and a captured
    product would then allocate one.
    """

    R_16F, R_16BF, COMPUTE_32F, DEFAULT, NO, TRANSPOSED = 2, 14, 68, -1, 0, 1

    def __init__(self, stream: int, dtype: str) -> None:
        import cupy

        self._library = self._load()
        self._type = self.R_16BF if dtype == "bfloat16" else self.R_16F
        self._handle = ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self._check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "a handle")
        self._check(self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "a stream")
        address, size = ctypes.c_void_p(self._workspace.data.ptr), ctypes.c_size_t(WORKSPACE_BYTES)
        self._check(self._library.cublasSetWorkspace_v2(self._handle, address, size), "a workspace")

    @staticmethod
    def _load() -> Any:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib  # as CuPy finds it

            return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
        except Exception as error:
            first = (str(error).splitlines() or ["no message"])[0]
            raise SetupError(f"a decode step on a GPU needs cuBLAS, and it is not found here: {first}") from None

    def _check(self, status: int, what: str) -> None:
        if status:
            raise DeviceError(f"cuBLAS refused {what} (status {status})")

    def multiply(self, weights: int, x: int, out: int, rows: int, columns: int, batch: int) -> None:
        """out[b, r] = sum over c of weights[r, c] x[b, c], rounded once; all in rows, as C has them."""
        pointer, by_reference = ctypes.c_void_p, ctypes.byref
        status = self._library.cublasGemmEx(
            self._handle, self.TRANSPOSED, self.NO, rows, batch, columns, by_reference(self._one),
            pointer(weights), self._type, columns, pointer(x), self._type, columns, by_reference(self._zero),
            pointer(out), self._type, rows, self.COMPUTE_32F, self.DEFAULT,
        )  # fmt: skip
        self._check(status, f"a product of {rows} x {columns} with {batch} columns")

    def close(self) -> None:
        self._library.cublasDestroy_v2(self._handle)


class GpuModel:
    """`step.Runner` on a GPU: all weights and caches in memory, every layer its own, so that a step reads them all."""

    def __init__(self, comm: Communicator, model: Model, batch: int, context: int, dtype: str) -> None:
        import cupy

        self.model, self.comm, self.context = model, comm, context
        self._dtype, self._backend = REDUCIBLE[dtype].numpy, comm.backend
        self.stream = measure_cuda.stream_of(comm)
        self._sms = comm.gpu.sms if comm.gpu is not None else 1
        self.multiply = Cublas(self.stream.ptr, dtype)
        module = cupy.RawModule(code=source(model, dtype), options=OPTIONS, backend="nvrtc")
        self._kernels = {name: module.get_function(name) for name in KERNELS}
        n = comm.world_size
        self.heads, self.group = model.kv_heads // n, model.heads // model.kv_heads
        try:
            self._arrays = {name: self._fill(t) for name, t in tensors(model, n, comm.rank, batch, context)}
            buffers = buffer_bytes(model, n, batch).items()
            self._arrays |= {name: cupy.empty(nbytes // ITEM, np.uint16) for name, nbytes in buffers}
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise SetupError(f"the GPU has no room for {model.name} after all: {str(error).splitlines()[0]}") from None
        self.stream.synchronize()

    def _fill(self, tensor: Tensor) -> Any:
        import cupy

        array = cupy.empty(int(np.prod(tensor.shape)), np.uint16)
        self.fill(array.data.ptr, tensor)
        return array

    def fill(self, address: int, tensor: Tensor) -> None:
        """Queues the tensor's content to an address."""
        words = int(np.prod(tensor.shape)) // 2
        arguments = (np.uint64(address), np.uint64(words), np.uint32(tensor.seed))
        self.launch(
            "fill", (FILL_BLOCKS,), FILL_THREADS, *arguments, np.float32(tensor.centre), np.float32(tensor.scale)
        )

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        """Queues one of the step's own kernels."""
        with self.stream:
            self._kernels[kernel](grid, (threads,), arguments)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queues a copy within the GPU's memory."""
        from cupy.cuda import runtime

        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, self.stream.ptr)

    def address(self, name: str) -> int:
        return int(self._arrays[name].data.ptr)

    def buffers(self, batch: int) -> tuple[Any, Any]:
        count = batch * self.model.hidden
        return self._arrays["x"][:count].view(self._dtype), self._arrays["out"][:count].view(self._dtype)

    def put_token(self, batch: int, seed: int) -> None:
        from cupy.cuda import runtime

        self.fill(self.address("token"), token(self.model, batch, seed))
        for name in ("residual", "logits", "x", "out"):
            runtime.memsetAsync(self.address(name), POISON, self._arrays[name].nbytes, self.stream.ptr)
        self.stream.synchronize()

    def eager(self, batch: int, x: Any, out: Any, reduce: Reduce | None) -> None:
        for operation in operations(self.model, self._step(batch, x, out), reduce):
            operation()
        self.stream.synchronize()

    def _step(self, batch: int, x: Any, out: Any) -> _Step:
        parts = parts_of(batch, self.heads, self.context, self._sms)
        return _Step(self, batch, int(x.data.ptr), int(out.data.ptr), parts)

    def ready(self, batch: int, x: Any, out: Any, reduce: Reduce | None) -> GraphStep:
        return GraphStep(self, list(operations(self.model, self._step(batch, x, out), reduce)))

    def result(self, batch: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self._backend.synchronize()
        widths = {"residual": self.model.hidden, "logits": self.model.vocabulary // self.comm.world_size}
        residual, logits = (
            self._arrays[name][: batch * width].get().view(self._dtype).reshape(batch, width)
            for name, width in widths.items()
        )
        return residual, logits

    def close(self) -> None:
        import cupy

        self._backend.synchronize()
        self.multiply.close()
        self._arrays.clear()
        cupy.get_default_memory_pool().free_all_blocks()


class GraphStep:
    """`step.Replay`: one CUDA graph. Its time is from the ranks' meeting on the device to its end on this rank."""

    def __init__(self, of: GpuModel, queue: list[Any]) -> None:
        self._of = of
        try:
            for operation in queue:  # loads what is loaded at a first launch
                operation()
            of.stream.synchronize()
            self._graph = measure_cuda.capture(of.stream, queue)
        except RuntimeError as error:
            raise translated(error) if hasattr(error, "status") else error from None
        count = getattr(of.comm.backend, "dependent_edges", None)
        edges = None if count is None else count(self._graph)
        self.facts: dict[str, Any] = {} if edges is None else {"dependent_edges": int(edges)}

    def run(self) -> None:
        self._graph.launch(self._of.stream)
        self._of.stream.synchronize()

    def sample(self, iterations: int) -> NDArray[np.int64]:
        comm = self._of.comm
        meeting = measure_cuda.meeting_of(comm)

        def step() -> NDArray[np.int64]:
            taken = [
                measure_cuda.timed(comm, meeting, lambda: self._graph.launch(self._of.stream))[0]
                for _ in range(iterations)
            ]
            return np.maximum(np.rint(taken), 1).astype(np.int64)

        return measure.together(comm.mpi, step)


class _Step:
    """`step.Operations`: queues each one on the model's stream."""

    def __init__(self, of: GpuModel, batch: int, x: int, out: int, parts: int) -> None:
        self._of, self._model, self._batch = of, of.model, batch
        self._x, self._out, self._parts = x, out, parts
        n = of.comm.world_size
        self._matrices = of.model.matrices(n)
        self._ends = {
            "qkv": (of.address("h"), of.address("qkv")),
            "attention_out": (of.address("attended"), x),
            "gate_up": (of.address("h"), of.address("gate_up")),
            "down": (of.address("activated"), x),
        }

    def load_token(self) -> None:
        of = self._of
        of.copy(of.address("residual"), of.address("token"), ITEM * self._batch * self._model.hidden)

    def norm(self, name: str, add: bool) -> None:
        of, hidden = self._of, self._model.hidden
        addresses = (of.address("residual"), self._out if add else 0, of.address(name), of.address("h"))
        threads = min(1024, -(-hidden // 8 // 32) * 32)
        of.launch(
            "add_rms_norm", (self._batch,), threads, *map(np.uint64, addresses), np.uint32(hidden), np.float32(EPSILON)
        )

    def multiply(self, layer: int, name: str) -> None:
        source, target = self._ends[name]
        self._of.multiply.multiply(
            self._of.address(f"{layer}.{name}"), source, target, *self._matrices[name], self._batch
        )

    def attend(self, layer: int) -> None:
        of, heads = self._of, self._of.heads
        addresses = (of.address("qkv"), of.address(f"{layer}.keys"), of.address(f"{layer}.values"), of.address("parts"))
        scale = np.float32(self._model.head_dim**-0.5)
        blocks = (self._parts, heads, self._batch)
        of.launch("attend", blocks, ATTEND_THREADS, *map(np.uint64, addresses), np.uint32(of.context), scale)
        ends = (np.uint64(of.address("parts")), np.uint64(of.address("attended")))
        of.launch("combine", (heads * of.group, self._batch), self._model.head_dim // 2, *ends, np.uint32(self._parts))

    def activate(self) -> None:
        of, width = self._of, self._model.mlp // self._of.comm.world_size
        blocks = -(-self._batch * width // 8 // 256)
        ends = (np.uint64(of.address("gate_up")), np.uint64(of.address("activated")))
        of.launch("silu_mul", (blocks,), 256, *ends, np.uint32(self._batch), np.uint32(width))

    def multiply_head(self) -> None:
        of, words = self._of, self._model.vocabulary // self._of.comm.world_size
        ends = (of.address("h"), of.address("logits"))
        of.multiply.multiply(of.address("head"), *ends, words, self._model.hidden, self._batch)
