"""A decode step without a GPU: shapes and the memory they take, the step's kernels on the host, the report."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.decode import __main__ as command
from experiments.decode import gpu, shapes
from experiments.decode.emulated import EmulatedModel
from experiments.decode.shapes import MODELS, Room
from experiments.decode.step import Tensor, filled, tensors
from fcomm import measure_cuda
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, FcommError, SetupError
from tests.unit.native import compile_library

GIB = 1 << 30

# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.6), ("qwen2.5-32b", 32.8)])
def test_models_have_as_many_weights_as_their_names_say(name: str, billions: float) -> None:
    m = MODELS[name]
    # The embedding is looked up, so a step does not read it; Llama and Qwen2.5-32B have one beside their last product.
    weights = m.weight_bytes(1) / 2 + m.vocabulary * m.hidden
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert m.weight_bytes(8) * 8 == pytest.approx(m.weight_bytes(1), rel=1e-3)


def test_what_a_model_needs_is_what_a_step_allocates() -> None:
    m, n, batch, context = MODELS["llama3-8b"].sampled(3, 4), 4, 8, 512
    held = sum(2 * int(np.prod(t.shape)) for _, t in tensors(m, n, 0, batch, context))
    assert held == m.weight_bytes(n) + m.cache_bytes(n, batch, context)
    assert sum(gpu.buffer_bytes(m, n, batch).values()) <= m.activation_bytes(n, batch)


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        (
            "llama3-8b",
            3,
            "--model llama3-8b: its 32 query heads are no equal parts for 3 ranks: start 2 or 4 or 8 ranks",
        ),
        ("qwen2.5-32b", 5, "its 8 key and value heads are no equal parts for 5 ranks: start 2 or 4 or 8 ranks"),
        ("deepseek-dense", 6, "its 128 query heads are no equal parts for 6 ranks"),
    ],
)
def test_a_shape_that_does_not_divide_by_the_ranks(name: str, ranks: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        MODELS[name].check(ranks)


def test_too_little_memory_says_what_fits() -> None:
    m, n = MODELS["llama3-70b"], 8
    with pytest.raises(SetupError) as caught:
        shapes.check_room(m, n, (1, 64), 2048, Room(133 * GIB, 8))
    text = str(caught.value)
    assert text.startswith(
        "llama3-70b with 80 layers, batch 64 and context 2048 needs 169.7 GiB of a GPU that 8 ranks share, "
    )
    assert "and 133.0 GiB are free: what fits: --layers " in text
    assert "or --model qwen2.5-32b with all its layers" in text
    layers = int(text.split("--layers ")[1].split(",")[0])
    shapes.check_room(m.sampled(layers, n), n, (1, 64), 2048, Room(133 * GIB, 8))  # what is offered does fit,
    with pytest.raises(SetupError):  # and one layer more does not
        shapes.check_room(m.sampled(layers + 1, n), n, (1, 64), 2048, Room(133 * GIB, 8))
    with pytest.raises(SetupError, match=r"--layers 1, or --batch 1$"):
        shapes.check_room(MODELS["llama3-8b"], 2, (1, 1024), 8192, Room(20 * GIB, 1))
    with pytest.raises(SetupError, match=r"free: use a shorter --context or a smaller --batch$"):
        shapes.check_room(MODELS["llama3-8b"], 2, (64,), 1 << 20, Room(GIB // 2, 2))
    shapes.check_room(m, n, (1, 64), 2048, Room(133 * GIB, 1))  # a GPU for each rank


def test_layers_that_nobody_named() -> None:
    m = MODELS["llama3-70b"]
    assert shapes.default_layers(m, 8, (1,), 2048, Room(130 * GIB, 1)) == 80
    assert shapes.default_layers(m, 8, (1,), 2048, Room(130 * GIB, 8)) == 4
    assert shapes.default_layers(m, 8, (1,), 2048, Room(5 * GIB, 8)) == 3
    sampled = m.sampled(4, 8)
    assert (sampled.layers, sampled.vocabulary % 64) == (4, 0)
    assert sampled.vocabulary / m.vocabulary == pytest.approx(4 / 80, rel=0.05)
    assert m.sampled(80, 8) == m


def test_parts_of_the_context() -> None:
    assert shapes.parts_of(1, 1, 2048, 132) == 33  # 64 positions at least
    assert shapes.parts_of(64, 1, 2048, 132) == 5
    assert shapes.parts_of(64, 8, 2048, 132) == 1
    assert shapes.parts_of(1, 1, 1 << 20, 132) == shapes.MOST_PARTS
    assert shapes.parts_of(1, 1, 10, 132) == 1


# ---- the command line ------------------------------------------------------------------------------------------------


def request(words: str, ranks: int = 2) -> command.Request:
    return command.build_request(command.parser().parse_args(words.split()), ranks)


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        ("", 1, "one rank has none: use mpirun -n 2 or more"),
        ("--model llama4", 2, "--model 'llama4' is not known; use llama3-8b, "),
        ("--model llama3-8b,", 2, "--model 'llama3-8b,' has an empty item"),
        ("--model llama3-8b", 3, "no equal parts for 3 ranks: start 2 or 4 or 8 ranks"),
        ("--model llama3-8b --layers 33", 2, "--layers 33: llama3-8b has 32"),
        ("--layers 0", 2, "--layers 0 is not between 1 and"),
        ("--batch 0", 2, "--batch '0' is not a number from 1 to"),
        ("--batch 1..8", 2, "--batch '1..8' is not a number"),
        ("--batch -1", 2, "--batch '-1' is not a number"),
        ("--context -5", 2, "--context -5 is not between"),
        ("--dtype float32", 2, "--dtype float32: a decode step is in bfloat16 or float16"),
        ("--dtype complex64", 2, "dtype complex64 cannot be reduced"),
        ("--protocols one_shot.fast", 2, "there is no protocol 'one_shot.fast'"),
        ("--protocols all_gather.ll", 2, "is for all_gather, and a step all-reduces"),
        ("--launch soon", 2, "--launch 'soon' is not known; use none, late, early"),
        ("--calls 0", 2, "--calls 0 is not between 1 and"),
    ],
)  # fmt: skip
def test_bad_input(words: str, ranks: int, message: str) -> None:
    with pytest.raises(FcommError) as caught:
        request(words, ranks)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cpu_backend_takes_tiny_alone() -> None:
    with pytest.raises(ArgumentError, match=r"--model llama3-8b needs GPUs: .* takes --model tiny alone"):
        request("--model llama3-8b").resolved("cpu")
    with pytest.raises(ArgumentError, match="--launch late and early are for GPUs"):
        request("--launch late").resolved("cpu")
    assert request("").resolved("cpu").models == ("tiny",)
    assert request("").resolved("cuda").models == ("llama3-8b",)


# ---- a GPU's step, on the host ---------------------------------------------------------------------------------------

# CUDA's words that decode.cu uses and the cpu backend's shim lacks, put in front of its kernels. A grid is run block by block, so
# that what a block shares may be static; lanes exchange through the words that the shim has for votes.
HOST = """
#include <math.h>
#include <functional>
#define __global__
#define __shared__ static
#undef blockIdx
#undef gridDim
static fc_cpu::Dim3 blockIdx, gridDim;
static void __syncthreads() { fc::block_barrier(); }
static float __shfl_xor_sync(unsigned, float value, unsigned distance) {
  fc_cpu::Warp& w = fc::warp();
  const unsigned lane = fc::lane_id(), live = blockDim.x < 32 ? (1u << blockDim.x) - 1 : ~0u;
  memcpy(&w.votes[lane], &value, 4);
  fc::group_sync(live);
  memcpy(&value, &w.votes[lane ^ distance], 4);
  fc::group_sync(live);
  return value;
}
static std::function<void()> body;
static void one(const void*) { body(); }
static void run(const unsigned* grid, unsigned threads) {
  gridDim = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        fc_cpu::run_grid(1, threads, one, nullptr);
      }
}
"""
ENTRIES = {
    "fill": "u64 a, u64 b, u32 c, float d, float e",
    "add_rms_norm": "u64 a, u64 b, u64 c, u64 d, u32 e, float f",
    "silu_mul": "u64 a, u64 b, u32 c, u32 d",
    "attend": "u64 a, u64 b, u64 c, u64 d, u32 e, float f",
    "combine": "u64 a, u64 b, u32 c",
}
C_TYPES = {np.uint64: ctypes.c_uint64, np.uint32: ctypes.c_uint32, np.float32: ctypes.c_float}


class Array(np.ndarray[Any, Any]):
    """A CuPy array, as far as a step looks at it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> Any:
        return np.array(self)


class HostStream:
    ptr = 7

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class HostCublas:
    """cuBLAS as its manual has it: matrices in columns, one behind the other."""

    def __init__(self, element: Any, kind: int) -> None:
        self._element, self._kind, self.workspace = element, kind, 0

    def cublasCreate_v2(self, handle: Any) -> int:
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        assert (stream.value, self.workspace) == (HostStream.ptr, 0)  # a stream that is set takes the workspace away
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, address: Any, size: Any) -> int:
        self.workspace = size.value
        return 0

    def cublasDestroy_v2(self, handle: Any) -> int:
        return 0

    def _matrix(self, pointer: Any, rows: int, columns: int, leading: int) -> Any:
        words = np.ctypeslib.as_array((ctypes.c_uint16 * (leading * columns)).from_address(pointer.value))
        return words.view(self._element).reshape(columns, leading).T[:rows]

    def cublasGemmEx(
        self, handle: Any, trans_a: int, trans_b: int, m: int, n: int, k: int, alpha: Any, a: Any, a_type: int, lda: int,
        b: Any, b_type: int, ldb: int, beta: Any, c: Any, c_type: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        assert (trans_a, trans_b, {a_type, b_type, c_type}, compute, algorithm) == (1, 0, {self._kind}, 68, -1)
        assert (alpha._obj.value, beta._obj.value) == (1, 0)
        assert self.workspace
        product = self._matrix(a, k, m, lda).astype(np.float32).T @ self._matrix(b, k, n, ldb).astype(np.float32)
        self._matrix(c, m, n, ldc)[:] = product.astype(self._element)
        return 0


def host_module(code: str, folder: Path) -> Any:
    """The step's kernels compiled for the host, as CuPy's RawModule hands them out."""
    calls = [
        f'extern "C" void host_{name}(const unsigned* grid, unsigned threads, {arguments}) {{ body = [=] {{ {name}('
        f"{', '.join(a.split()[1] for a in arguments.split(','))}); }}; run(grid, threads); }}"
        for name, arguments in ENTRIES.items()
    ]
    code = code.replace("namespace decode {", f"{HOST}\nnamespace decode {{", 1)
    library = compile_library("\n".join([code, *calls]), folder, 1)

    def function(name: str) -> Any:
        def launch(grid: tuple[int, ...], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            sizes = (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3])
            if name == "fill":
                sizes[0] = 1  # it strides
            getattr(library, f"host_{name}")(sizes, block[0], *(C_TYPES[type(a)](a) for a in arguments))

        return launch

    return SimpleNamespace(get_function=function)


@pytest.fixture
def host_cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CuPy's place is taken by what a step needs of it, on host memory."""
    runtime = SimpleNamespace(
        memcpyDeviceToDevice=3,
        memcpyAsync=lambda target, source, nbytes, kind, stream: ctypes.memmove(target, source, nbytes),
        memsetAsync=lambda address, value, nbytes, stream: ctypes.memset(address, value, nbytes),
    )
    cuda = SimpleNamespace(runtime=runtime, memory=SimpleNamespace(OutOfMemoryError=MemoryError))
    cupy = SimpleNamespace(
        cuda=cuda,
        empty=lambda count, dtype: np.empty(count, dtype).view(Array),
        RawModule=lambda code, options, backend: host_module(code, tmp_path),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(measure_cuda, "stream_of", lambda comm: HostStream())
    monkeypatch.setattr(
        measure_cuda,
        "capture",
        lambda stream, queue: SimpleNamespace(launch=lambda stream: [operation() for operation in queue]),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_a_gpus_step_computes_what_numpy_computes(dtype: str, host_cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of two ranks whose peer sends zeros; attention in two parts, the second one with an odd end."""
    model, batch, context = MODELS["tiny"], 2, 71
    element = REDUCIBLE[dtype].numpy
    cublas = HostCublas(element, 14 if dtype == "bfloat16" else 2)
    monkeypatch.setattr(gpu.Cublas, "_load", staticmethod(lambda: cublas))
    comm: Any = SimpleNamespace(
        rank=1, world_size=2, gpu=SimpleNamespace(sms=16), backend=SimpleNamespace(synchronize=lambda: None),
        empty=lambda count, _: np.empty(count, element),
    )  # fmt: skip
    on_gpu = gpu.GpuModel(comm, model, batch, context, dtype)
    emulated = EmulatedModel(comm, model, batch, context, dtype)
    for name, tensor in tensors(model, 2, 1, batch, context):
        assert (on_gpu._arrays[name].view(element) == filled(tensor, element).reshape(-1)).all(), name
    assert shapes.parts_of(batch, on_gpu.heads, context, 16) == 2

    def step(model: Any, run: Callable[..., object]) -> Any:
        model.put_token(batch, 5)
        x, out = model.buffers(batch)
        run(batch, x, out, partial(np.copyto, out.view(np.uint16), x.view(np.uint16)))
        return model.result(batch)

    want, got = step(emulated, emulated.eager), step(on_gpu, on_gpu.eager)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        scale, unit = np.abs(b.astype(np.float32)).max(), 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        assert np.abs(a.astype(np.float32) - b.astype(np.float32)).max() < 4 * unit * scale
    again = step(on_gpu, lambda *arguments: on_gpu.ready(*arguments).run())
    assert all((a.view(np.uint16) == b.view(np.uint16)).all() for a, b in zip(again, got, strict=True))
    on_gpu.close()


def test_weights_are_random_and_differ_between_ranks() -> None:
    t = Tensor((64, 64), 7, 1.0, 0.25)
    values = filled(t, REDUCIBLE["float16"].numpy).astype(np.float64)
    assert 0.75 <= values.min() < 0.77
    assert 1.23 < values.max() <= 1.25
    assert values.mean() == pytest.approx(1.0, abs=0.01)
    of_rank = [dict(tensors(MODELS["tiny"], 2, rank, 1, 8)) for rank in (0, 1)]
    assert of_rank[0]["0.qkv"].seed != of_rank[1]["0.qkv"].seed
    assert of_rank[0]["0.mlp_norm"] == of_rank[1]["0.mlp_norm"]
    seeds = [t.seed for one in of_rank for name, t in one.items() if not name.endswith("norm")]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("name", ["qwen2.5-32b", "llama3-70b"])  # the odd group of heads, and the largest
def test_the_kernels_compile_for_gpus_and_do_not_spill(name: str) -> None:
    from fcomm.machine_code import compile_text, nvrtc

    try:
        nvrtc()
    except SetupError as error:  # the wheel with the compiler is an extra
        pytest.skip(str(error))
    assert compile_text("decode", gpu.source(MODELS[name], "bfloat16"), "sm_90").spill_bytes == 0
