"""What a decode step is, whatever runs it: the order of its operations, its random weights, and how a reduction is put in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from experiments.decode.shapes import Model

EPSILON = 1e-5
"""Of the norms, added to the mean square."""


@dataclass(frozen=True)
class Tensor:
    """One rank's part of a weight or a cache: its shape, and what it is filled with."""

    shape: tuple[int, ...]
    seed: int
    centre: float
    scale: float
    """Elements are uniform in centre +- scale."""


def tensors(model: Model, ranks: int, rank: int, batch: int, context: int) -> Iterator[tuple[str, Tensor]]:
    """All weights and caches of one rank by name; norms are alike on all ranks, since each of them has the whole of it.

    Products keep the size of what they multiply, and the sums of a residual stream grow with the layers, as in a trained model.
    """
    seed = 0

    def uniform(shape: tuple[int, ...], scale: float, centre: float = 0.0, everywhere: bool = False) -> Tensor:
        nonlocal seed
        seed += 1
        return Tensor(shape, seed * (MAX_SEED_RANKS + 1) + (MAX_SEED_RANKS if everywhere else rank), centre, scale)

    heads = model.kv_heads // ranks
    for layer in range(model.layers):
        yield f"{layer}.attention_norm", uniform((model.hidden,), 0.25, 1.0, everywhere=True)
        yield f"{layer}.mlp_norm", uniform((model.hidden,), 0.25, 1.0, everywhere=True)
        for name, (rows, columns) in model.matrices(ranks).items():
            # Uniform in +-s has the variance s^2 / 3; of a row-parallel product each rank adds a part of the sum.
            inner = columns * (ranks if name in ("attention_out", "down") else 1)
            yield f"{layer}.{name}", uniform((rows, columns), (3 / inner) ** 0.5)
        yield f"{layer}.keys", uniform((batch, heads, context, model.head_dim), 1.0)
        yield f"{layer}.values", uniform((batch, heads, context, model.head_dim), 1.0)
    yield "norm", uniform((model.hidden,), 0.25, 1.0, everywhere=True)
    yield "head", uniform((model.vocabulary // ranks, model.hidden), (3 / model.hidden) ** 0.5)


MAX_SEED_RANKS = 64


def mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The hash of 32 bits that kernels_cu/experiments/decode.cu has (C. Wellons's lowbias32)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def filled(tensor: Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The tensor's content on the host, to the bit what the kernel `fill` puts into one on a GPU."""
    count = int(np.prod(tensor.shape))
    i = np.arange(count, dtype=np.uint64)
    seed, high = np.array([tensor.seed], np.uint32), (i >> np.uint64(32)).astype(np.uint32)
    h = mixed(i.astype(np.uint32) ^ mixed(high ^ mixed(seed)))
    unit = (h >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    values = np.float32(tensor.centre) + unit * np.float32(tensor.scale)
    return values.astype(dtype).reshape(tensor.shape)


def token(model: Model, batch: int, seed: int) -> Tensor:
    """The input of a step: one row for each sequence, as an embedding would give it. Alike on all ranks."""
    return Tensor((batch, model.hidden), 0x40000000 + seed, 0.0, 1.0)


class Operations(Protocol):
    """The operations of a step on the buffers of one rank; each queues or does its work, and returns nothing."""

    def load_token(self) -> None:
        """The residual stream becomes the step's input."""

    def norm(self, name: str, add: bool) -> None:
        """Adds the last all-reduce's result to the residual stream, if `add`; normalises it with that gain."""

    def multiply(self, layer: int, name: str) -> None:
        """One of the layer's matrix products (`Model.matrices`), with the activation that it follows."""

    def attend(self, layer: int) -> None:
        """Attention of the new token over the layer's cache."""

    def activate(self) -> None:
        """The gated MLP's gates, times its ups."""

    def multiply_head(self) -> None:
        """The last product: logits of this rank's part of the vocabulary."""


Reduce = Callable[[], object]
"""Starts one all-reduce, of what the last row-parallel product has left."""


def operations(model: Model, do: Operations, reduce: Reduce | None) -> Iterator[Callable[[], object]]:
    """The step in order, one operation at a time. reduce : None leaves out both all-reduces of each layer.

    Without them each rank adds up its own part alone: other numbers, in the time of everything but communication.
    """
    yield do.load_token
    for layer in range(model.layers):
        yield partial(do.norm, f"{layer}.attention_norm", layer > 0)
        yield partial(do.multiply, layer, "qkv")
        yield partial(do.attend, layer)
        yield partial(do.multiply, layer, "attention_out")
        if reduce is not None:
            yield reduce
        yield partial(do.norm, f"{layer}.mlp_norm", True)
        yield partial(do.multiply, layer, "gate_up")
        yield do.activate
        yield partial(do.multiply, layer, "down")
        if reduce is not None:
            yield reduce
    yield partial(do.norm, "norm", True)
    yield do.multiply_head


class Replay(Protocol):
    """One step made ready with one way to reduce."""

    facts: dict[str, Any]
    """What showed when it was made ready, as columns of `fcomm.records.CASES`."""

    def run(self) -> None:
        """One step, to its end."""

    def sample(self, iterations: int) -> NDArray[np.int64]:
        """Nanoseconds of a step on this rank, begun by all ranks together; shape (iterations,). Collective."""


class Runner(Protocol):
    """One rank's model: its weights, its cache, its buffers, and steps on them."""

    def buffers(self, batch: int) -> tuple[Any, Any]:
        """Flat arrays for what an all-reduce reads and for what it leaves, `batch` rows of the hidden size each."""

    def put_token(self, batch: int, seed: int) -> None:
        """Another input for the steps from now on; poisons what a step leaves."""

    def eager(self, batch: int, x: Any, out: Any, reduce: Reduce | None) -> None:
        """One step, an operation at a time, to its end. x, out : what `reduce` reads and leaves."""

    def ready(self, batch: int, x: Any, out: Any, reduce: Reduce | None) -> Replay:
        """The same step made ready to be timed. Meets the other ranks in its all-reduces only."""

    def result(self, batch: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """What the last step left on this rank: residual stream (batch, hidden) and logits (batch, its part of the words)."""

    def close(self) -> None:
        """Gives the memory back."""
