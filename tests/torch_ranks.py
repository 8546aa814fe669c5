"""What must hold of `fcomm.torch` between real ranks on the cpu backend: `mpirun -n 2 python -m tests.torch_ranks`.

One mpirun runs the table, and rank 0 prints one line a case, as in `tests/ranks.py`.
"""

from __future__ import annotations

import logging
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import distributed

import fcomm
from experiments import serving
from fcomm import checks
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, ClosedError, DisagreementError, SetupError
from fcomm.group import as_group
from fcomm.torch import CustomAllReduce, TorchGroup

Case = Callable[[MPI.Intracomm], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block must raise that error, in one sentence that has these words in it."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    text = str(caught.value)
    assert all(w in text for w in words), text
    assert "\n" not in text, text


def make(group: Any, **options: Any) -> CustomAllReduce:
    made = CustomAllReduce(group, "cpu", timeout_s=20, **options)
    assert not made.disabled, made.reason
    return made


def tensor(host: NDArray[Any], device: Any = "cpu") -> torch.Tensor:
    """A NumPy array's bits as a tensor; NumPy and PyTorch know no bfloat16 of one another."""
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32}
    return torch.from_numpy(host.view(np.uint8).copy()).to(device).view(kinds[host.dtype.name]).view(host.shape)


def bits(x: torch.Tensor) -> NDArray[Any]:
    kind = ml_dtypes.bfloat16 if x.dtype == torch.bfloat16 else x.numpy().dtype
    return x.reshape(-1).view(torch.uint8).numpy().view(kind).reshape(x.shape)


def data(group: MPI.Intracomm, seed: int, shape: tuple[int, ...], dtype: str) -> list[NDArray[Any]]:
    count = int(np.prod(shape))
    return [checks.inputs((71, seed), r, group.size, count, dtype).reshape(shape) for r in range(group.size)]


def expect(got: torch.Tensor | None, xs: list[NDArray[Any]]) -> None:
    assert got is not None
    want = checks.reduce_reference(xs)
    assert (tuple(got.shape), got.device.type, got.is_contiguous()) == (want.shape, "cpu", True)
    assert checks.wrong_elements(bits(got), want) == 0


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package's log gets to hear in the block."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fcomm")
    log.addHandler(handler)
    try:
        yield heard
    finally:
        log.removeHandler(handler)


@contextmanager
def as_if_capturing(reducer: CustomAllReduce) -> Iterator[None]:
    """As if the current stream were being captured, which a CPU's cannot be; `tests/gpu/cases.py` captures."""
    with mock.patch.object(reducer, "_capturing", return_value=True):
        yield


# ---- calls ----------------------------------------------------------------------------------------------------------


@case
def sums_have_the_bits_of_the_contract(mpi: MPI.Intracomm) -> None:
    reducer = make(mpi, max_size=1 << 16)
    for k, dtype in enumerate(REDUCIBLE):
        for j, shape in enumerate(((1,), (3, 5), (2, 3, 167))):
            xs = data(mpi, 10 * k + j, shape, dtype)
            x = tensor(xs[mpi.rank])
            kept = x.clone()
            assert reducer.should_custom_ar(x)
            expect(reducer.custom_all_reduce(x), xs)
            assert torch.equal(x.view(torch.uint8), kept.view(torch.uint8)), "the input was written to"
            out = torch.full_like(x, 7)
            assert reducer.all_reduce(x, out=out) is out
            expect(out, xs)
            assert reducer.all_reduce(x, out=x) is x
            expect(x, xs)
            assert checks.wrong_elements(reducer.comm.to_host(x), bits(x)) == 0
        assert reducer.all_reduce(x.view(-1)[:0].view(0, 4)).shape == (0, 4)
    reducer.close()


@case
def the_operator_passes_opcheck(mpi: MPI.Intracomm) -> None:
    reducer = make(mpi, name="checked")
    x = torch.randn((3, 40), generator=torch.Generator().manual_seed(mpi.rank)).bfloat16()
    found = torch.library.opcheck(torch.ops.fcomm.all_reduce.default, (x, "checked"))
    assert set(found.values()) == {"SUCCESS"}, found
    assert len(found) == 4, found
    reducer.close()


@case
def the_operator_is_compiled_into_a_whole_graph(mpi: MPI.Intracomm) -> None:
    reducer = make(mpi)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.fcomm.all_reduce(x.t().contiguous(), reducer.name)
        return torch.ops.fcomm.all_reduce(y, reducer.name)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for k in range(3):  # one tensor more each time: the second makes the size a symbol
        xs = data(mpi, 100 + k, (4 + k, 6), "bfloat16")
        once = [checks.reduce_reference([np.ascontiguousarray(x.T) for x in xs])] * mpi.size
        expect(compiled(tensor(xs[mpi.rank])), once)
    reducer.close()


# ---- what is refused ------------------------------------------------------------------------------------------------


@case
def what_is_not_taken_is_one_sentence_and_a_logged_no(mpi: MPI.Intracomm) -> None:
    reducer = make(mpi, max_size=4096)
    bad = {
        "device": (torch.ones(4, device="meta"), "on meta, and the all-reduce was made for cpu"),
        "contiguous": (torch.ones(4, 6).t(), "shape (6, 4) is not contiguous"),
        "dtype": (torch.ones(4, dtype=torch.float64), "float64 cannot be reduced"),
        "size": (torch.ones(1025), "4100 B, and max_size is 4 KiB"),
    }
    for x, words in bad.values():
        with logged() as heard:
            assert reducer.should_custom_ar(x) is False
            assert reducer.custom_all_reduce(x) is None
        assert len(heard) == 1, heard
        assert words in heard[0], heard
        assert f"rank {mpi.rank}" in heard[0], heard
        with refused(ArgumentError, words):
            reducer.all_reduce(x)
    with refused(ArgumentError, "contiguous"):
        torch.ops.fcomm.all_reduce(bad["contiguous"][0], reducer.name)
    x = torch.ones(4)
    with as_if_capturing(reducer):
        with logged() as heard:
            assert reducer.should_custom_ar(x) is False
            assert reducer.custom_all_reduce(x) is None
        assert len(heard) == 1, heard
        assert f"being captured outside of {reducer.name}.capture()" in heard[0], heard
        with refused(ArgumentError, "outside of", "capture()"):
            reducer.all_reduce(x)
        with reducer.capture():
            assert reducer.should_custom_ar(x)
    assert torch.equal(reducer.all_reduce(x), x * mpi.size)  # nothing of this has cost a call
    reducer.close()


@case
def a_pytorch_without_cuda_disables_it_on_all_ranks(mpi: MPI.Intracomm) -> None:
    for where, version, gpus, words in (
        ("cuda", None, 0, "has no CUDA: install a build that has"),
        ("cuda:0", "13.0", 0, "finds no CUDA device"),
        (3, "13.0", 2, "there is no cuda:3: PyTorch sees 2 of them"),
        ("mars", None, 0, "'mars' is no device of PyTorch's"),
        ("meta", None, 0, "meta devices are not supported"),
    ):
        with (
            mock.patch.object(torch.version, "cuda", version),
            mock.patch.multiple(torch.cuda, is_available=lambda: gpus > 0, device_count=lambda: gpus),  # noqa: B023
            logged() as heard,
        ):
            # One rank is enough: the others learn of it.
            reducer = CustomAllReduce(mpi, where if mpi.rank == mpi.size - 1 else "cpu")
        assert reducer.disabled
        assert reducer.reason is not None
        assert words in reducer.reason, reducer.reason
        assert f"(rank {mpi.size - 1})" in reducer.reason, reducer.reason
        assert [reducer.reason in line for line in heard] == ([True] if mpi.rank == 0 else [])
        x = torch.ones(4)
        assert not reducer.should_custom_ar(x)
        assert reducer.custom_all_reduce(x) is None
        with refused(SetupError, words):
            reducer.all_reduce(x)
        with reducer.capture():
            pass
        reducer.close()


@case
def one_rank_and_a_bad_option_disable_it(mpi: MPI.Intracomm) -> None:
    alone = CustomAllReduce(MPI.COMM_SELF, "cpu")
    assert alone.disabled
    assert alone.reason == "there is one rank, and nothing to reduce"
    odd = CustomAllReduce(mpi, "cpu", dependent_launch="sometimes")
    assert odd.disabled
    assert "not 'sometimes'" in str(odd.reason)


@case
def names_are_unique_and_end_with_close(mpi: MPI.Intracomm) -> None:
    reducer = make(mpi, name="mine")
    with refused(ArgumentError, "already is a CustomAllReduce named 'mine'"):
        CustomAllReduce(mpi, "cpu", name="mine")
    x = torch.ones(3)
    assert torch.equal(torch.ops.fcomm.all_reduce(x, "mine"), x * mpi.size)
    reducer.close()
    reducer.close()
    assert reducer.disabled
    assert not reducer.should_custom_ar(x)
    with refused(ClosedError, "is closed"):
        reducer.all_reduce(x)
    with refused(ArgumentError, "no CustomAllReduce named 'mine'"):
        torch.ops.fcomm.all_reduce(x, "mine")
    make(mpi, name="mine").close()


# ---- capture --------------------------------------------------------------------------------------------------------


@case
def ranks_that_capture_different_calls_all_hear_of_it(mpi: MPI.Intracomm) -> None:
    reducer = make(mpi)
    x = torch.ones(8)
    with reducer.capture():  # alike, with calls before that are not captured
        reducer.all_reduce(x)
        with as_if_capturing(reducer):
            reducer.all_reduce(x)

    def differently() -> None:
        with reducer.capture(), as_if_capturing(reducer):
            reducer.all_reduce(x)
            reducer.all_reduce(x if mpi.rank == 0 else x.view(2, 4))

    with refused(DisagreementError, "call 1 is float32 [8] on rank 0 and float32 [2, 4] on rank 1"):
        differently()

    def one_more() -> None:
        with reducer.capture(), as_if_capturing(reducer):
            reducer.all_reduce(x)
            if mpi.rank == 1:
                assert reducer._captured is not None
                reducer._captured.append("float32 [8]")  # a call in earnest would wait for rank 0

    with refused(DisagreementError, "call 1 is nothing on rank 0 and float32 [8] on rank 1"):
        one_more()
    assert torch.equal(reducer.all_reduce(x), x * mpi.size)
    reducer.close()


@case
def a_capture_that_fails_on_one_rank_fails_on_all(mpi: MPI.Intracomm) -> None:
    reducer = make(mpi)

    def fail() -> None:
        with reducer.capture():
            if mpi.rank == 1:
                raise ArgumentError("no memory for a graph")

    with refused(ArgumentError, "no memory for a graph (rank 1)"):
        fail()
    with refused(ArgumentError, "outside of"), as_if_capturing(reducer):  # and it is over
        reducer.all_reduce(torch.ones(2))
    reducer.close()


# ---- groups ---------------------------------------------------------------------------------------------------------


class Bare:
    """The least that a group may be."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi

    def allgather(self, value: Any) -> list[Any]:
        return self._mpi.allgather(value)

    def barrier(self) -> None:
        self._mpi.barrier()


@case
def any_object_with_allgather_and_barrier_will_do(mpi: MPI.Intracomm) -> None:
    x = np.arange(5, dtype=np.float32)
    with fcomm.Communicator(Bare(mpi), backend="cpu", timeout_s=20, checked=True) as comm:
        assert (comm.rank, comm.world_size) == (mpi.rank, mpi.size)
        assert np.array_equal(comm.all_reduce(x), x * mpi.size)
        with refused(ArgumentError, "did not meet through MPI"):
            comm.mpi  # noqa: B018
        comm.reset()
        assert np.array_equal(comm.all_reduce(x), x * mpi.size)
    reducer = make(Bare(mpi))
    assert (reducer.rank, reducer.world_size) == (mpi.rank, mpi.size)
    expect(reducer.custom_all_reduce(torch.from_numpy(x)), [x] * mpi.size)
    reducer.close()


@case
def process_groups_of_torch_distributed(mpi: MPI.Intracomm) -> None:
    with refused(ArgumentError, "no process group yet"):
        CustomAllReduce(None, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(mpi.bcast(folder)) / "meeting"
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=mpi.rank, world_size=mpi.size)
        x = torch.arange(5, dtype=torch.bfloat16)
        # Engines run in inference mode, which gloo's own gathering of objects does not stand.
        with torch.inference_mode():
            for group in (None, distributed.group.WORLD, distributed.new_group(backend="gloo")):
                reducer = make(group)
                assert (reducer.rank, reducer.world_size) == (mpi.rank, mpi.size)
                with reducer.capture():
                    assert torch.equal(reducer.all_reduce(x), x * mpi.size)
                reducer.close()
        with fcomm.Communicator(distributed.group.WORLD, backend="cpu", timeout_s=20) as comm:
            assert torch.equal(comm.all_gather(x), x.expand(mpi.size, 5))
        with (
            mock.patch.object(distributed, "get_backend_config", return_value="cuda:nccl"),
            mock.patch.object(distributed, "get_backend", return_value="nccl"),
            refused(ArgumentError, "is nccl's and takes no CPU tensors", "new_group(backend='gloo')"),
        ):
            as_group(distributed.group.WORLD)
        assert TorchGroup().allgather(mpi.rank) == list(range(mpi.size))
        mpi.barrier()
        distributed.destroy_process_group()


@case
def the_example(mpi: MPI.Intracomm) -> None:
    assert serving.main(["--device", "cpu"]) == 0


def main() -> int:
    mpi = MPI.COMM_WORLD
    for name, function in CASES.items():
        start = time.monotonic()
        try:
            function(mpi)
        except BaseException:  # the others may wait for this rank anywhere
            print(f"FAIL {name} on rank {mpi.rank}\n{traceback.format_exc()}", flush=True)
            time.sleep(0.2)  # the launcher passes the line on before it ends the others
            mpi.Abort(1)
        mpi.barrier()
        if mpi.rank == 0:
            print(f"PASS {name} {time.monotonic() - start:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
