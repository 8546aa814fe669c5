"""Shapes of models: what a decode step multiplies, reads and reduces on each rank, and the memory that takes. Needs no MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from fcomm.errors import ArgumentError, SetupError

ITEM = 2
"""Bytes of an element: weights, activations and cache are bfloat16 or float16."""
GRANULE = 8
"""Rows of every matrix product's result are multiples of so many elements, 16 bytes."""
MAX_RANKS = 8
SAMPLE_LAYERS = 4
"""Layers of a step where ranks share a GPU, unless told: its times are a demonstration whatever their number."""


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer with grouped-query attention and a gated MLP. Sizes are in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the gated MLP: of the gates, and as many ups."""
    vocabulary: int
    note: str

    def refusal(self, ranks: int) -> str | None:
        """Why it cannot be split among so many ranks, in one clause; None if it can."""
        for what, count, granule in (
            ("query heads", self.heads, 1),
            ("key and value heads", self.kv_heads, 1),
            ("MLP columns", self.mlp, GRANULE),
            ("words", self.vocabulary, GRANULE),
        ):
            if count % (ranks * granule):
                aligned = f" of a multiple of {granule}" if granule > 1 and count % ranks == 0 else ""
                return f"its {count} {what} are no equal parts{aligned} for {ranks} ranks"
        return None

    def check(self, ranks: int) -> None:
        """`ArgumentError` where it cannot be split among so many ranks; says for which numbers it can."""
        why = self.refusal(ranks)
        if why is not None:
            fitting = [str(n) for n in range(2, MAX_RANKS + 1) if self.refusal(n) is None]
            raise ArgumentError(f"--model {self.name}: {why}: start {' or '.join(fitting)} ranks")

    def sampled(self, layers: int, ranks: int) -> Model:
        """With so many of its layers, and as much less of its vocabulary: the last product keeps its share of the step."""
        granule = ranks * GRANULE * GRANULE
        words = max(granule, round(self.vocabulary * layers / self.layers / granule) * granule)
        return replace(self, layers=layers, vocabulary=self.vocabulary if layers == self.layers else words)

    def matrices(self, ranks: int) -> dict[str, tuple[int, int]]:
        """(rows, columns) of one rank's part of a layer's weights, each multiplied by a vector of `columns` elements."""
        q, kv = self.heads * self.head_dim // ranks, self.kv_heads * self.head_dim // ranks
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "attention_out": (self.hidden, q),
            "gate_up": (2 * self.mlp // ranks, self.hidden),
            "down": (self.hidden, self.mlp // ranks),
        }

    def weight_bytes(self, ranks: int) -> int:
        """Bytes of one rank's part of the weights, norms and the last product included."""
        layer = sum(rows * columns for rows, columns in self.matrices(ranks).values()) + 2 * self.hidden
        return ITEM * (self.layers * layer + self.hidden + self.vocabulary // ranks * self.hidden)

    def cache_bytes(self, ranks: int, batch: int, context: int) -> int:
        """Bytes of one rank's keys and values: what the attention of one step reads."""
        return ITEM * 2 * self.layers * batch * context * self.kv_heads * self.head_dim // ranks

    def activation_bytes(self, ranks: int, batch: int) -> int:
        """Bytes of one rank's activations at most, the attention's parts among them."""
        columns = 4 * self.hidden + sum(rows for rows, _ in self.matrices(ranks).values()) + self.mlp // ranks
        parts = self.heads // ranks * (self.head_dim + 2) * 4 * MOST_PARTS
        return batch * (ITEM * (columns + self.vocabulary // ranks) + parts)

    def bytes(self, ranks: int, batch: int, context: int) -> int:
        """Bytes of one rank, beside what communicators and libraries take."""
        return self.weight_bytes(ranks) + self.cache_bytes(ranks, batch, context) + self.activation_bytes(ranks, batch)

    def message_bytes(self, batch: int) -> int:
        """Bytes of each of the two all-reduces of a layer."""
        return ITEM * batch * self.hidden


MOST_PARTS = 64
"""Parts of the context that blocks of the attention kernel share at most."""

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        m.name: m
        for m in (
            Model("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256, "Llama 3 8B"),
            Model("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, "Qwen2.5 32B"),
            Model("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256, "Llama 3 70B"),
            Model(
                "deepseek-dense", 3, 7168, 128, 16, 128, 18432, 129280,
                "the three dense layers of DeepSeek-V3, but for their attention: 16 key and value heads, split among the ranks, "
                "stand for the latent cache that each rank of the original reads whole",
            ),
            Model("tiny", 2, 256, 16, 8, 32, 512, 1024, "made up, for tests"),
        )
    }
)  # fmt: skip
"""From the models' published configurations; the note says what each one is."""


def model(name: str) -> Model:
    """The model of that name; `ArgumentError` if there is none."""
    if name not in MODELS:
        raise ArgumentError(f"--model {name!r} is not known; use {', '.join(MODELS)}")
    return MODELS[name]


def gib(nbytes: float) -> str:
    """Bytes in GiB, small ones in MiB, for readers."""
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 29 else f"{nbytes / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class Room:
    """The memory that one GPU has for a step, and how many of the ranks share it."""

    free_bytes: int
    ranks_per_gpu: int

    def fits(self, model: Model, ranks: int, batch: int, context: int) -> bool:
        return self.ranks_per_gpu * model.bytes(ranks, batch, context) <= self.free_bytes

    def layers(self, model: Model, ranks: int, batch: int, context: int) -> int:
        """Most of the model's layers that fit; 0 where not even one does."""
        fitting = (k for k in range(model.layers, 0, -1) if self.fits(model.sampled(k, ranks), ranks, batch, context))
        return next(fitting, 0)


def check_room(model: Model, ranks: int, batches: Sequence[int], context: int, room: Room) -> None:
    """`SetupError` where the model does not fit; says what is needed, what there is, and the largest shape that fits.

    model : with the layers that were asked for. batches : the largest of them counts.
    """
    batch = max(batches)
    if room.fits(model, ranks, batch, context):
        return
    offers = []
    layers = room.layers(model, ranks, batch, context)
    if layers:
        offers.append(f"--layers {layers}")
    smaller = [b for b in sorted(batches) if room.fits(model, ranks, b, context)]
    if smaller:
        offers.append(f"--batch {','.join(map(str, smaller))}")
    others = [
        m for m in MODELS.values()
        if m.layers * m.hidden < model.layers * model.hidden and m.refusal(ranks) is None and m.name != "tiny"
        and room.fits(m, ranks, batch, context)
    ]  # fmt: skip
    if others:
        offers.append(f"--model {max(others, key=lambda m: m.weight_bytes(ranks)).name} with all its layers")
    shared = f" that {room.ranks_per_gpu} ranks share" if room.ranks_per_gpu > 1 else ""
    needed = room.ranks_per_gpu * model.bytes(ranks, batch, context)
    what = f"{model.name} with {model.layers} layers, batch {batch} and context {context}"
    best = f"what fits: {', or '.join(offers)}" if offers else "use a shorter --context or a smaller --batch"
    raise SetupError(f"{what} needs {gib(needed)} of a GPU{shared}, and {gib(room.free_bytes)} are free: {best}")


def default_layers(model: Model, ranks: int, batches: Sequence[int], context: int, room: Room) -> int:
    """Layers of a step that nobody has named: all of them, but a few of what fits where ranks share a GPU."""
    if room.ranks_per_gpu == 1:
        return model.layers
    return max(1, min(model.layers, SAMPLE_LAYERS, room.layers(model, ranks, max(batches), context)))


def parts_of(batch: int, kv_heads: int, context: int, sms: int) -> int:
    """Parts of the context that blocks share: two blocks for each SM, with at least 64 positions each."""
    wanted = math.ceil(2 * sms / (batch * kv_heads))
    return max(1, min(wanted, MOST_PARTS, math.ceil((context + 1) / 64)))
