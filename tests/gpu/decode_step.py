"""A tiny decode step on the GPU against the same step in NumPy: ``mpirun -n 2 python3 -m tests.gpu.decode_step``.

Weights to the bit; residual stream and logits up to the roundings that another order of summation makes; then a graph of the
step against the step taken one operation at a time, to the bit.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

import fcomm
from experiments.decode.emulated import EmulatedModel
from experiments.decode.gpu import GpuModel
from experiments.decode.shapes import MODELS
from experiments.decode.step import filled, tensors
from fcomm import measure_cuda
from fcomm.dtypes import REDUCIBLE

BATCH, CONTEXT, SEED = 3, 71, 5


def check(comm: fcomm.Communicator, dtype: str) -> None:
    model, element = MODELS["tiny"], REDUCIBLE[dtype].numpy
    gpu = GpuModel(comm, model, BATCH, CONTEXT, dtype)
    for name, tensor in tensors(model, comm.world_size, comm.rank, BATCH, CONTEXT):
        assert (gpu._arrays[name].get().view(element) == filled(tensor, element).reshape(-1)).all(), name
    host_arrays = SimpleNamespace(
        mpi=comm.mpi, rank=comm.rank, world_size=comm.world_size, empty=lambda count, _: np.empty(count, element)
    )
    host = EmulatedModel(host_arrays, model, BATCH, CONTEXT, dtype)  # type: ignore[arg-type]

    host.put_token(BATCH, SEED)
    x, out = host.buffers(BATCH)

    def reduce() -> None:
        out[:] = sum(row.astype(np.float32) for row in comm.mpi.allgather(x.copy()))

    host.eager(BATCH, x, out, reduce)
    want = host.result(BATCH)

    gpu.put_token(BATCH, SEED)
    x, out = gpu.buffers(BATCH)
    call: Any = partial(comm.prepare("all_reduce", x, out, stream=gpu.stream))
    gpu.eager(BATCH, x, out, call)
    got = gpu.result(BATCH)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for a, b in zip(got, want, strict=True):
        error = np.abs(a.astype(np.float32) - b.astype(np.float32)).max()
        assert error < 8 * unit * np.abs(b.astype(np.float32)).max(), (dtype, error)

    graph = gpu.ready(BATCH, x, out, call)
    gpu.put_token(BATCH, SEED)
    graph.run()
    for a, b in zip(gpu.result(BATCH), got, strict=True):
        assert (a.view(np.uint16) == b.view(np.uint16)).all(), dtype
    assert (graph.sample(5) > 0).all()
    comm.check()
    gpu.close()


def main() -> None:
    with fcomm.Communicator(MPI.COMM_WORLD, backend="cuda", timeout_s=10) as comm:
        for dtype in ("bfloat16", "float16"):
            check(comm, dtype)
        measure_cuda.close(comm)
    if MPI.COMM_WORLD.rank == 0:
        print("decode step: done", flush=True)


if __name__ == "__main__":
    main()
