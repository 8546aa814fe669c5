"""The registry: every protocol, once, as data. Harness, selector, plots, checks and tests read it from here.

A protocol is an algorithm with an encoding for each of its phases. An encoding says how a receiver knows that a piece of
a message is there; an algorithm says who sends what to whom. To add an encoding: one file in ``kernels_cu/wire`` and one
entry in `ENCODINGS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from fcomm.dtypes import BYTES, REDUCIBLE, ElementType
from fcomm.errors import NotAdmittedError

CELL_BYTES = 16
"""Bytes of a cell: what one thread reads or writes of a slot at a time, in every encoding."""


@dataclass(frozen=True)
class Encoding:
    """How readiness travels with the data.

    group_cells, group_payload
        Cells that are put and taken together, and the bytes of payload that they carry.
    copies
        Copies of each slot: 2 (epoch parity) or 3 (Lamport's rotation).
    cleared_to
        Byte that a slot is filled with before the first call.
    evidence_bytes, access_bytes
        Size of the untorn unit that evidence vouches for; width of each evidence-carrying access in machine code.
    needs
        Capabilities of the link that the encoding relies on.
    """

    name: str
    kernel_type: str
    header: str
    group_cells: int
    group_payload: int
    copies: int
    cleared_to: int
    evidence_bytes: int
    access_bytes: int
    needs: frozenset[str]
    floats_only: bool = False

    def cells(self, nbytes: int) -> int:
        """Cells that a message of `nbytes` takes in one slot; the last group is padded."""
        return -(-nbytes // self.group_payload) * self.group_cells

    def slot_bytes(self, nbytes: int) -> int:
        """Bytes that a message of `nbytes` takes in one slot, and on the wire to one peer."""
        return self.cells(nbytes) * CELL_BYTES


@dataclass(frozen=True)
class Algorithm:
    """Who sends what to whom. `rounds` counts dependent hops; `encoded` algorithms exist once for each encoding."""

    name: str
    collective: str
    kernel: str
    header: str
    rounds: int
    encoded: bool
    moves_bytes: bool = False
    """The kernel moves bytes of any type unchanged, instead of adding elements."""
    baseline: bool = False
    own_contract: bool = False
    """The result follows the original's rules instead of the reduction contract (a baseline that is faithful to them)."""


@dataclass(frozen=True)
class Protocol:
    """An algorithm with its encodings: what a caller can name, and what a kernel is compiled for."""

    name: str
    algorithm: Algorithm
    encodings: tuple[Encoding, ...]
    regions: tuple[str, ...]
    """Regions of the slab that its kernel is told of, phase by phase."""
    dtypes: tuple[ElementType, ...]

    @property
    def collective(self) -> str:
        return self.algorithm.collective

    @property
    def baseline(self) -> bool:
        """Baselines exist to be compared with; the selector never picks one."""
        return self.algorithm.baseline

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that every link between the ranks must have."""
        needs = frozenset[str]().union(*(e.needs for e in self.encodings))
        return needs if self.encodings else frozenset({"acquire_release"})

    def wire_bytes(self, nbytes: int, world_size: int) -> int:
        """Bytes that one rank sends (or, for baselines that pull, reads) over its link in one call, evidence included."""
        peers = world_size - 1
        if not self.encodings:
            return peers * -(-nbytes // CELL_BYTES) * CELL_BYTES
        return peers * self.encodings[0].slot_bytes(nbytes)

    def refusal(self, dtype: str | None, world_size: int, capabilities: frozenset[str]) -> str | None:
        """Why this protocol may not run here, in one clause; None if it may. `dtype=None` asks about the link alone."""
        if world_size < 2:
            return "one rank has nobody to exchange with"
        if dtype is not None and not self.algorithm.moves_bytes and dtype not in {t.name for t in self.dtypes}:
            return f"it does not handle {dtype}"
        missing = sorted(self.needs - capabilities)
        if missing:
            return f"the link between the ranks lacks {', '.join(missing)}"
        return None


ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {e.name: e for e in (Encoding("ll", "Ll", "wire/ll.cuh", 1, 8, 2, 0x00, 8, 16, frozenset({"atomic8"})),)}
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        a.name: a
        for a in (
            Algorithm("one_shot", "all_reduce", "one_shot", "algo/one_shot.cuh", rounds=1, encoded=True),
            Algorithm(
                "barrier.one_shot", "all_reduce", "barrier_one_shot", "baseline/barrier.cuh",
                rounds=2, encoded=False, baseline=True,
            ),
        )
    }
)  # fmt: skip


def _build() -> dict[str, Protocol]:
    found: dict[str, Protocol] = {}
    for a in ALGORITHMS.values():
        dtypes = (BYTES,) if a.moves_bytes else tuple(REDUCIBLE.values())
        if not a.encoded:
            found[a.name] = Protocol(a.name, a, (), ("staging", "barrier_flags"), dtypes)
            continue
        for e in ENCODINGS.values():
            admitted = tuple(t for t in dtypes if t.is_float or not e.floats_only)
            if admitted:
                name = f"{a.name}.{e.name}"
                found[name] = Protocol(name, a, (e,), (e.name,), admitted)
    return found


@cache
def protocols() -> Mapping[str, Protocol]:
    """All protocols by name, in a fixed order (alike on all ranks)."""
    return MappingProxyType(_build())


def protocol(name: str) -> Protocol:
    """The protocol called `name`; `NotAdmittedError` if there is none."""
    try:
        return protocols()[name]
    except KeyError:
        raise NotAdmittedError(f"there is no protocol {name!r}; the names are {', '.join(protocols())}") from None


def index_of(name: str) -> int:
    """Position of a protocol in the registry: how kernels name it in an error record."""
    return list(protocols()).index(name)
