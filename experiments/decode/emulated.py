"""A decode step in NumPy, for tiny shapes on the cpu backend: the same operations, weights and roundings as on a GPU.

Its times are those of an emulation. Products are NumPy's in float32; a GPU adds them up in another order, so its results differ
from these by roundings, and not from one another.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.decode.shapes import Model
from experiments.decode.step import EPSILON, Reduce, Tensor, filled, operations, tensors, token
from fcomm import Communicator, checks, measure
from fcomm.dtypes import REDUCIBLE


class EmulatedModel:
    """`step.Runner` in NumPy. Collective to make is nothing; its steps meet the other ranks in their all-reduces."""

    def __init__(self, comm: Communicator, model: Model, batch: int, context: int, dtype: str) -> None:
        self.model, self._comm, self._dtype = model, comm, REDUCIBLE[dtype].numpy
        self._weights: dict[str, NDArray[Any]] = {
            name: filled(tensor, self._dtype).astype(np.float32)
            for name, tensor in tensors(model, comm.world_size, comm.rank, batch, context)
        }
        self._message = comm.empty(batch * model.hidden, dtype), comm.empty(batch * model.hidden, dtype)
        self._token = np.zeros(0)
        self._residual = self._logits = np.zeros((0, 0), self._dtype)

    def buffers(self, batch: int) -> tuple[Any, Any]:
        count = batch * self.model.hidden
        return self._message[0][:count], self._message[1][:count]

    def put_token(self, batch: int, seed: int) -> None:
        tensor: Tensor = token(self.model, batch, seed)
        self._token = filled(tensor, self._dtype)
        self._residual, self._logits = self._token.copy(), self._token.copy()
        for array in (*self._message, self._residual, self._logits):
            checks.poison(array)

    def eager(self, batch: int, x: Any, out: Any, reduce: Reduce | None) -> None:
        for operation in operations(self.model, _Step(self, batch, x, out), reduce):
            operation()

    def ready(self, batch: int, x: Any, out: Any, reduce: Reduce | None) -> EmulatedStep:
        return EmulatedStep(self, batch, x, out, reduce)

    def result(self, batch: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._residual.copy(), self._logits.copy()

    def close(self) -> None:
        self._weights.clear()


class EmulatedStep:
    """`step.Replay`: the operations one after the other."""

    def __init__(self, model: EmulatedModel, batch: int, x: Any, out: Any, reduce: Reduce | None) -> None:
        self.facts: dict[str, Any] = {}
        self._model, self._arguments = model, (batch, x, out, reduce)

    def run(self) -> None:
        self._model.eager(*self._arguments)

    def sample(self, iterations: int) -> NDArray[np.int64]:
        mpi, nanoseconds = self._model._comm.mpi, np.empty(iterations, np.int64)
        error: Exception | None = None
        for k in range(iterations):
            mpi.Barrier()  # met as often as planned, also after an error
            if error is None:
                try:
                    start = time.perf_counter_ns()
                    self.run()
                    nanoseconds[k] = max(1, time.perf_counter_ns() - start)
                except Exception as caught:
                    error = caught

        def done() -> NDArray[np.int64]:
            if error is not None:
                raise error
            return nanoseconds

        return measure.together(mpi, done)


class _Step:
    """`step.Operations` of one step, with its activations."""

    def __init__(self, of: EmulatedModel, batch: int, x: Any, out: Any) -> None:
        self._of, self._model, self._batch = of, of.model, batch
        self._x, self._out = x, out
        self._h = self._wide = np.zeros(0, np.float32)

    def _rounded(self, values: NDArray[Any]) -> NDArray[np.float32]:
        return values.astype(self._of._dtype).astype(np.float32)

    def load_token(self) -> None:
        self._of._residual = self._of._token.copy()

    def norm(self, name: str, add: bool) -> None:
        x = self._of._residual.astype(np.float32)
        if add:
            x = x + self._out.astype(np.float32).reshape(x.shape)
            self._of._residual = x.astype(self._of._dtype)
            x = self._of._residual.astype(np.float32)
        factor = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True, dtype=np.float32) + np.float32(EPSILON))
        self._h = self._rounded(x * factor * self._of._weights[name])

    def multiply(self, layer: int, name: str) -> None:
        product = _product(self._h, self._of._weights[f"{layer}.{name}"])
        if name in ("attention_out", "down"):
            self._x[:] = product.astype(self._of._dtype).reshape(-1)
        else:
            self._wide = self._rounded(product)

    def attend(self, layer: int) -> None:
        keys, values = self._of._weights[f"{layer}.keys"], self._of._weights[f"{layer}.values"]
        heads, dim = keys.shape[1], keys.shape[3]
        group = self._model.heads // self._model.kv_heads
        q, k, v = np.split(self._wide, [heads * group * dim, heads * (group + 1) * dim], axis=1)
        q = q.reshape(self._batch, heads, group, dim)
        keys = np.concatenate([keys[: self._batch], k.reshape(self._batch, heads, 1, dim)], axis=2)
        values = np.concatenate([values[: self._batch], v.reshape(self._batch, heads, 1, dim)], axis=2)
        scores = np.einsum("bhgd,bhpd->bhgp", q, keys) / np.float32(dim**0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        self._h = self._rounded(np.einsum("bhgp,bhpd->bhgd", weights, values).reshape(self._batch, -1))

    def activate(self) -> None:
        gate, up = np.split(self._wide, 2, axis=1)
        self._h = self._rounded(gate / (1 + np.exp(-gate)) * up)

    def multiply_head(self) -> None:
        self._of._logits = _product(self._h, self._of._weights["head"]).astype(self._of._dtype)


def _product(x: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Product of x and the transposed weights. Not by the BLAS: its threads and those of the other ranks would wait for each other."""
    return np.einsum("bc,rc->br", x, weights)
