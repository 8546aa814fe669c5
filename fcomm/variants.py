"""Variants of our kernels: for experiments alone, and compiled only where one is named. As data, like the protocols.

An ablation is a correct kernel that lacks one of the ideas, so that the idea's gain is a figure. A stage variant leaves work
out, so that the rest of a call's time is a figure; its results are of no use, and nobody but `experiments.breakdown` names
it. A communicator is of one variant, and so is its slab: what one leaves in a slot is nothing that another one would expect.
What the bits do is in ``kernels_cu/ablate/variant.cuh``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fcomm.errors import ArgumentError, NotAdmittedError
from fcomm.protocols import SHARD_GRANULE, Protocol

SHIPPED = "shipped"
"""The kernels that the library uses."""

_OURS = ("one_shot", "two_shot")


@dataclass(frozen=True)
class Variant:
    """One way to compile a kernel."""

    name: str
    meaning: str
    bits: int
    """What FC_VARIANT is; 0 is the shipped kernel."""
    algorithms: tuple[str, ...] = _OURS
    rearming: bool = False
    """For encodings alone that set slots back."""
    by_cell: bool = False
    """For encodings alone whose evidence is in the cells."""
    exact: bool = True
    """Whether results have the contract's bits; otherwise they are the contract's within rounding."""
    checked: bool = True
    """Whether results are of any use."""

    def refusal(self, p: Protocol) -> str | None:
        """Why a protocol has no such variant, in one clause; None if it has."""
        if self.bits == 0:
            return None
        if p.baseline or p.algorithm.name not in self.algorithms:
            return f"it is for {' and '.join(self.algorithms)}"
        if self.rearming and not any(e.rearm_bytes_per_cell for e in p.encodings):
            return "its encodings set nothing back"
        if self.by_cell and any(e.max_chunks for e in p.encodings):
            return "all cells of a chunk are there when the first one is looked at"
        return None


ABLATIONS: Mapping[str, Variant] = MappingProxyType(
    {
        v.name: v
        for v in (
            Variant(SHIPPED, "the kernel that the library uses", 0),
            Variant(
                "arrival_order", "cells are added as they arrive, the own part first: within rounding", 1 << 0,
                by_cell=True, exact=False,
            ),
            Variant("rearm_first", "slots are set back before the first push", 1 << 1, rearming=True),
            Variant("rearm_last", "slots are set back behind the last output", 1 << 2, rearming=True),
            Variant("poll_one", "one peer's cell is waited for after the other", 1 << 3, by_cell=True),
            Variant(
                "own_in_memory", "a rank's own part goes through a slot of its own as well", 1 << 4, algorithms=("one_shot",)
            ),
        )
    }
)  # fmt: skip
"""Correct kernels by name, the shipped one among them: what a sweep can be asked for."""

# ---- stages ----------------------------------------------------------------------------------------------------------

STAGES: Mapping[str, str] = MappingProxyType(
    {
        "launch": "an empty kernel with the same grid and launch feature",
        "epoch": "load and test of the call's number and the poison word",
        "input": "loads of the input",
        "output": "stores of the output (of the own part, as long as nothing is added)",
        "stores": "cells and their evidence, to slots of this rank's own slab",
        "exit": "the ticket, and the epoch's advance by the last block",
        "rearm": "setting slots back, and the test for scrubbing",
        "poll": "waiting for these cells",
        "reduce": "adding them",
        "wire": "the same cells from the peers instead: the link, and the ranks' waiting for each other",
    }
)
"""Stages of a call in the order in which a breakdown adds them, each with what it adds."""
_BIT = {name: 1 << (15 + k) for k, name in enumerate(STAGES) if name != "launch"}
ALONE = ("input", "output", "reduce")
"""Stages that can also be left out of an otherwise whole call; nothing would end, or wait, without one of the others."""


def _up_to(stage: str) -> int:
    """Bits that leave out all stages behind that one."""
    names = list(STAGES)
    return sum(_BIT[name] for name in names[names.index(stage) + 1 :])


LADDER: Mapping[str, Variant] = MappingProxyType(
    {
        stage: Variant(f"to_{stage}", f"all stages up to: {what}", _up_to(stage), checked=stage == "wire")
        for stage, what in STAGES.items()
    }
)
"""By stage: the kernel that ends with it. The last one is the shipped one."""
WITHOUT: Mapping[str, Variant] = MappingProxyType(
    {stage: Variant(f"no_{stage}", f"all stages but: {STAGES[stage]}", _BIT[stage], checked=False) for stage in ALONE}
)
"""By stage: the kernel that lacks that one alone."""

_EVERY = {v.name: v for v in (*ABLATIONS.values(), *LADDER.values(), *WITHOUT.values())}


def variant(name: str) -> Variant:
    """The variant called `name`; `ArgumentError` if there is none."""
    try:
        return _EVERY[name]
    except KeyError:
        raise ArgumentError(f"there is no variant {name!r}; use one of {', '.join(ABLATIONS)}") from None


def check_message(name: str, p: Protocol, nbytes: int, world_size: int) -> None:
    """Raises `ArgumentError` where a stage variant would wait for ever: it takes its own cells for those of its peers, and of
    parts that are not equal it would wait for more of them than it has sent.
    """
    if not variant(name).checked and "shard" in p.algorithm.phases and nbytes % (SHARD_GRANULE * world_size):
        raise ArgumentError(
            f"the variant {name} of {p.name} takes messages of {world_size} equal parts of a multiple of {SHARD_GRANULE} bytes, "
            f"and {nbytes} bytes are none"
        )


def check(name: str, p: Protocol) -> None:
    """Raises `NotAdmittedError` where the protocol has no such variant."""
    why = variant(name).refusal(p)
    if why is not None:
        raise NotAdmittedError(f"{p.name} has no variant {name}: {why}")
