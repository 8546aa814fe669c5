"""The registry: every protocol, once, as data. Harness, selector, plots, checks and tests read it from here.

A protocol is an algorithm with an encoding for each of its phases. An encoding says how a receiver knows that a piece of
a message is there; an algorithm says who sends what to whom. To add an encoding: one file in ``kernels_cu/wire`` and one
entry in `ENCODINGS`; or, from a program of one's own, a file anywhere and a call of `register`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fcomm.dtypes import BYTES, REDUCIBLE, ElementType
from fcomm.errors import ArgumentError, NotAdmittedError
from fcomm.sizes import round_up

CELL_BYTES = 16
"""Bytes of a cell: what one thread reads or writes of a slot at a time, in every encoding."""

MIN_CHUNK_CELLS = 64
"""Cells of a chunk at least, where evidence is a word for each chunk."""

PLACEMENTS = ("device", "host")
"""Where slots may lie: in each rank's device memory, or in pinned host memory."""
HOST_SLOTS = "host_slots"
"""The capability that says that slots lie in host memory, ..."""
HOST_ENCODINGS = ("ll", "flag")
"""... and the encodings that may use them."""

MAX_THREADS = 512
"""Threads per block that kernels are compiled for, if their algorithm says nothing else: 128 registers for each."""
WIDE_THREADS = 1024


@dataclass(frozen=True)
class Encoding:
    """How readiness travels with the data."""

    name: str
    kernel_type: str
    """Its struct in ``header``, which lies under ``kernels_cu``."""
    header: str
    group_cells: int
    """Cells that are put and taken together."""
    group_payload: int
    """Bytes of payload that such a group carries."""
    copies: int
    """Copies of each slot: 2 (by the epoch's parity) or 3 (in turn, set back to a sentinel one call later)."""
    unit_bytes: int
    """Size of the piece that must arrive whole for its evidence to vouch for its payload; 0 for a chunk."""
    access_bytes: int
    """Width in machine code of each access that carries evidence."""
    rearm_bytes_per_cell: int
    """Bytes that the receiver writes, a cell and peer, to make a slot usable again."""
    needs: frozenset[str]
    """Capabilities of the link that it relies on."""
    bit_exact: bool = True
    """Whether every payload word passes unchanged."""
    max_chunks: int = 0
    """Chunks of a message that have an epoch word each, in front of the slot's payload; 0: evidence is in the cells."""

    @property
    def header_bytes(self) -> int:
        """Bytes of a slot before its first cell."""
        return 4 * self.max_chunks

    @property
    def cleared_to(self) -> int:
        """Byte that slots are filled with before the first call: 0 is no epoch, all ones is the sentinel."""
        return 0xFF if self.copies == 3 else 0

    def cells(self, nbytes: int) -> int:
        """Cells that a message of `nbytes` takes in one slot; the last group is padded."""
        return -(-nbytes // self.group_payload) * self.group_cells

    def chunks(self, nbytes: int) -> int:
        """Chunks with an epoch word each; see ``kernels_cu/wire/flag.cuh``."""
        if not self.max_chunks:
            return 0
        size = max(MIN_CHUNK_CELLS, round_up(-(-self.cells(nbytes) // self.max_chunks), 32))
        return -(-self.cells(nbytes) // size)

    def slot_bytes(self, nbytes: int) -> int:
        """Bytes of a slot that takes a message of `nbytes`."""
        return self.header_bytes + self.cells(nbytes) * CELL_BYTES

    def wire_bytes(self, nbytes: int) -> int:
        """Bytes that go over the link to one peer for a message of `nbytes`, evidence and padding included."""
        return self.cells(nbytes) * CELL_BYTES + 4 * self.chunks(nbytes)


@dataclass(frozen=True)
class GpuShare:
    """What of a GPU a rank may use: the same words on all ranks, the smallest share where shares differ."""

    architecture: str
    """Compute capability, as in "9.0"; empty without a GPU."""
    sms: int
    sms_total: int

    @property
    def family(self) -> str:
        return "blackwell" if self.architecture.split(".")[0] in ("10", "11", "12") else "hopper"


HOPPER = GpuShare("9.0", 132, 132)


@dataclass(frozen=True)
class GridRule:
    """The launch shape that a baseline's authors set, where the caller names none."""

    threads: tuple[int, ...]
    """Threads per block: the fewest of these that cover the message in one pass, else the last."""
    blocks: Mapping[str, int] | None = None
    """Blocks by family of GPUs, of which a rank that shares its GPU takes its share; None: one for each SM."""
    fixed: bool = False
    """The kernel counts by the block: all calls of a communicator's channel, on all ranks, have one number of blocks."""

    def shape(self, cells: int, gpu: GpuShare) -> tuple[int, int]:
        """(blocks, threads) for that many cells."""
        blocks = gpu.sms if self.blocks is None else round(self.blocks[gpu.family] * gpu.sms / gpu.sms_total)
        if not self.fixed:
            blocks = min(blocks, -(-cells // self.threads[-1]))
        blocks = max(1, blocks)
        return blocks, next((t for t in self.threads if blocks * t >= cells), self.threads[-1])


@dataclass(frozen=True)
class Algorithm:
    """Who sends what to whom."""

    name: str
    collective: str
    kernel: str
    """Its function template in ``header``, which lies under ``kernels_cu``."""
    header: str
    phases: tuple[str, ...]
    """What each rank sends to each peer, one dependent hop after another: the "whole" message, or a "shard" of it."""
    encoded: bool = True
    """It exists once for each encoding; otherwise it has evidence of its own and `regions` names its memory."""
    moves_bytes: bool = False
    """The kernel moves bytes of any type unchanged, instead of adding elements."""
    baseline: bool = False
    own_contract: bool = False
    """Results, or what is accepted, follow the original's rules instead of the contract (a baseline faithful to them)."""
    regions: tuple[str, ...] = ()
    extra_rounds: int = 0
    """Dependent hops beside the phases: a baseline's barriers."""
    needs: frozenset[str] = frozenset({"acquire_release"})
    """Capabilities of the link that it relies on, where no encoding says so."""
    floats_only: bool = False
    granule: int = 1
    """Messages are multiples of so many bytes, and arrays aligned to them."""
    max_ranks: int = 0
    """Most ranks that it is made for; 0: any number."""
    grid: GridRule | None = None
    max_threads: int = MAX_THREADS
    """Threads per block that its kernel is compiled for, ..."""
    wide_ranks: int = 0
    """... unless no more ranks than this take part: then for 1,024, since 64 registers do without spilling."""
    wide_ranks_of_lines: int | None = None
    wide_ranks_of_sentinels: int | None = None
    """The same where a unit is several lanes' line, resp. where slots are set back, if that takes more registers."""
    in_place_staging: bool = False
    """The result may lie in the staging buffer itself."""
    forms: Callable[[int, int, str], str] | None = None
    """The name stands for others: which one, by message bytes, world size and family of GPUs. Kernel, header, regions
    and phases are then those of the form for small messages."""

    @property
    def rounds(self) -> int:
        """Dependent hops of one call."""
        return len(self.phases) + self.extra_rounds


def _v2_form(nbytes: int, world_size: int, family: str) -> str:
    push_up_to = V2_PUSH_UP_TO[family].get(world_size, 0)
    return "custom_ar_v2.push" if nbytes <= push_up_to else "custom_ar_v2.pull_two_shot"


SHARD_GRANULE = 16
"""Shards of an all-reduce begin at multiples of this many bytes, so that an aligned message has aligned shards."""


def shard_bytes(nbytes: int, world_size: int) -> int:
    """Length of a full shard when a message is split among the ranks; the last ones may be shorter or empty."""
    return round_up(-(-nbytes // world_size), SHARD_GRANULE)


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
        """Baselines exist to be compared with; the selector does not pick one unless everything else is switched off."""
        return self.algorithm.baseline

    @property
    def plain(self) -> bool:
        """A baseline that keeps the reduction contract: what is left when everything else is switched off, with the same
        bits.
        """
        return self.algorithm.baseline and not self.algorithm.own_contract

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that every link between the ranks must have."""
        needs = frozenset[str]().union(*(e.needs for e in self.encodings))
        return needs if self.encodings else self.algorithm.needs

    def at(self, nbytes: int, world_size: int, gpu: GpuShare = HOPPER) -> Protocol:
        """The protocol that a message of that size runs: itself, or the form that a name for several stands for."""
        forms = self.algorithm.forms
        return self if forms is None else protocols()[forms(nbytes, world_size, gpu.family)]

    def max_threads(self, world_size: int) -> int:
        """Threads per block that its kernel is compiled for; what sets the registers that a thread may use."""
        plain = len({e.name for e in self.encodings}) == 1 and not any(e.max_chunks for e in self.encodings)
        limit, of_lines, of_sentinels = (
            self.algorithm.wide_ranks, self.algorithm.wide_ranks_of_lines, self.algorithm.wide_ranks_of_sentinels,
        )  # fmt: skip
        if of_lines is not None and any(e.unit_bytes > e.access_bytes for e in self.encodings):
            limit = of_lines
        if of_sentinels is not None and any(e.rearm_bytes_per_cell for e in self.encodings):
            limit = of_sentinels
        wide = plain and world_size <= limit
        return WIDE_THREADS if wide else self.algorithm.max_threads

    def wire_bytes(self, nbytes: int, world_size: int, gpu: GpuShare = HOPPER) -> int:
        """Bytes that one rank sends (or, for baselines that pull, reads) over its link in one call, evidence included.

        The rank that sends most; `nbytes` is the message, for all-gather the bytes of one rank.
        """
        if self.algorithm.forms is not None:
            return self.at(nbytes, world_size, gpu).wire_bytes(nbytes, world_size)
        peers = world_size - 1
        total = 0
        for k, phase in enumerate(self.algorithm.phases):
            size = nbytes if phase == "whole" else shard_bytes(nbytes, world_size)
            if not self.encodings:
                total += peers * -(-size // CELL_BYTES) * CELL_BYTES
                continue
            encoding = self.encodings[min(k, len(self.encodings) - 1)]
            lengths = [max(0, min(size, nbytes - r * size)) for r in range(world_size)]
            if phase == "whole" or k > 0:  # the same to each peer
                total += peers * encoding.wire_bytes(size)
            else:  # to each peer its part; rank 0's own part is a full one, so it sends least: take the last rank
                total += sum(encoding.wire_bytes(length) for length in lengths[:-1])
        return total

    def refusal(
        self, dtype: str | None, world_size: int, capabilities: frozenset[str], nbytes: int | None = None
    ) -> str | None:
        """Why this protocol may not run here, in one clause; None if it may.

        `dtype=None` asks about the link alone, `nbytes=None` about messages of a size that suits it.
        """
        if world_size < 2:
            return "one rank has nobody to exchange with"
        if dtype is not None and not self.algorithm.moves_bytes and dtype not in {t.name for t in self.dtypes}:
            return f"it does not handle {dtype}"
        fits_host = all(e.name in HOST_ENCODINGS for e in self.encodings) and "atomic4" not in self.needs
        if HOST_SLOTS in capabilities and not fits_host:
            return (
                f"slots in host memory are for {' and '.join(HOST_ENCODINGS)}: a bus may split 16 bytes and lines, and a sentinel "
                "would be set back over it"
            )
        missing = sorted(self.needs - capabilities)
        if missing:
            return f"the link between the ranks lacks {', '.join(missing)}"
        if self.algorithm.max_ranks and world_size > self.algorithm.max_ranks:
            return f"it is made for 2 to {self.algorithm.max_ranks} ranks"
        if nbytes is not None and nbytes % self.algorithm.granule:
            return f"it takes multiples of {self.algorithm.granule} bytes, not {nbytes}"
        return None


_ATOMIC16 = frozenset({"atomic16"})

_encodings: dict[str, Encoding] = {
    e.name: e
    for e in (
        #        name         struct      header                cells payload copies unit access re-arm
        Encoding("ll", "Ll", "wire/ll.cuh", 1, 8, 2, 8, 16, 0, frozenset({"atomic8"})),
        Encoding("ll16", "Ll16", "wire/ll16.cuh", 1, 12, 2, 16, 16, 0, _ATOMIC16),
        Encoding("ll128", "Ll128", "wire/ll128.cuh", 8, 120, 2, 128, 16, 0, frozenset({"line128"})),
        Encoding(
            "lamport", "Lamport", "wire/lamport.cuh", 1, 16, 3, 4, 16, 16, frozenset({"atomic4"}), bit_exact=False
        ),
        Encoding("lamport16", "Lamport16", "wire/lamport16.cuh", 1, 16, 3, 16, 16, 16, _ATOMIC16, bit_exact=False),
        Encoding("flag", "Flag", "wire/flag.cuh", 1, 16, 2, 0, 4, 0, frozenset({"acquire_release"}), max_chunks=64),
    )
}
ENCODINGS: Mapping[str, Encoding] = MappingProxyType(_encodings)
"""Every encoding by name: ours, and behind them those that were registered."""

_include: dict[str, Path] = {}
"""Folders of the headers of registered encodings, by the encoding's name."""

_holders: weakref.WeakSet[Any] = weakref.WeakSet()
"""Who would break if an encoding were added now: open communicators, whose slabs have a region for each one there was."""

_derived: list[Callable[[], None]] = []

Cached = TypeVar("Cached", bound=Callable[..., Any])


def derived(function: Cached) -> Cached:
    """For a cached function of the registry, above its cache: forgets what it knows when an encoding is registered."""
    _derived.append(function.cache_clear)  # type: ignore[attr-defined]
    return function


def hold(owner: object) -> None:
    """No encoding may be registered from now on, until `owner` lets go or is no more."""
    _holders.add(owner)


def let_go(owner: object) -> None:
    """See `hold`."""
    _holders.discard(owner)


_MIB = 1 << 20
V2_PUSH_UP_TO: Mapping[str, Mapping[int, int]] = MappingProxyType(
    {
        family: MappingProxyType({n: int(mib * _MIB) for n, mib in zip(range(2, 9), sizes, strict=True)})
        for family, sizes in {
            "hopper": (16, 1.25, 0.375, 0.1875, 0.125, 0.125, 0.125),
            "blackwell": (8, 4, 1.125, 1.5, 1, 0.625, 0.5),
        }.items()
    }
)
"""Largest message in bytes, by family of GPUs and world size, for which custom AR v2 pushes; beyond, its two-shot pull."""

_VLLM_GRID = GridRule((512,), MappingProxyType({"hopper": 36, "blackwell": 36}))
_V2_THREADS = (128, 256, 512, 1024)
_V2_GRIDS = {
    "push": GridRule(_V2_THREADS, fixed=True),
    "pull": GridRule(_V2_THREADS[:3], MappingProxyType({"hopper": 64, "blackwell": 96}), fixed=True),
}
_V2_NEEDS = frozenset({"atomic4", "acquire_release"})


def _v2(
    name: str,
    kernel: str,
    phases: tuple[str, ...],
    form: str,
    collective: str = "all_reduce",
    needs: frozenset[str] | None = None,
    in_place_staging: bool = False,
    forms: Callable[[int, int, str], str] | None = None,
) -> Algorithm:
    push = form == "push"
    return Algorithm(
        name, collective, kernel, "baseline/custom_ar_v2.cuh", phases, encoded=False, baseline=True, own_contract=True,
        regions=("v2_slots" if push else "staging", f"v2_{form}_state"), extra_rounds=0 if push else 2,
        needs=needs or frozenset({"atomic4" if push else "acquire_release"}), floats_only=True, granule=CELL_BYTES,
        max_ranks=8, grid=_V2_GRIDS["push" if push else "pull"], max_threads=1024 if push else 512,
        in_place_staging=in_place_staging, forms=forms,
    )  # fmt: skip


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        a.name: a
        for a in (
            Algorithm("one_shot", "all_reduce", "one_shot", "algo/one_shot.cuh", ("whole",), wide_ranks=8),
            Algorithm("two_shot", "all_reduce", "two_shot", "algo/two_shot.cuh", ("shard", "shard"), wide_ranks=8, wide_ranks_of_lines=4, wide_ranks_of_sentinels=7),
            Algorithm("all_gather", "all_gather", "all_gather", "algo/all_gather.cuh", ("whole",), moves_bytes=True, wide_ranks=8),
            Algorithm("reduce_scatter", "reduce_scatter", "reduce_scatter", "algo/reduce_scatter.cuh", ("shard",), wide_ranks=7, wide_ranks_of_lines=3),
            Algorithm(
                "barrier.one_shot", "all_reduce", "barrier_one_shot", "baseline/barrier.cuh", ("whole",),
                encoded=False, baseline=True, regions=("staging", "barrier_flags"), extra_rounds=2, grid=_VLLM_GRID,
            ),
            Algorithm(
                "barrier.two_shot", "all_reduce", "barrier_two_shot", "baseline/barrier.cuh", ("shard", "shard"),
                encoded=False, baseline=True, regions=("staging", "barrier_flags"), extra_rounds=2, grid=_VLLM_GRID,
            ),
            Algorithm(
                "barrier.all_gather", "all_gather", "barrier_all_gather", "baseline/barrier.cuh", ("whole",),
                encoded=False, baseline=True, regions=("staging", "barrier_flags"), extra_rounds=2, grid=_VLLM_GRID,
                moves_bytes=True,
            ),
            _v2("custom_ar_v2", "custom_ar_v2_push", ("whole",), "push", needs=_V2_NEEDS, forms=_v2_form),
            _v2("custom_ar_v2.push", "custom_ar_v2_push", ("whole",), "push"),
            _v2("custom_ar_v2.pull_one_shot", "custom_ar_v2_pull_one_shot", ("whole",), "pull_one_shot"),
            _v2(
                "custom_ar_v2.pull_two_shot", "custom_ar_v2_pull_two_shot", ("shard", "shard"), "pull_two_shot",
                in_place_staging=True,
            ),
            _v2("sentinel.all_gather", "sentinel_all_gather", ("whole",), "push", collective="all_gather"),
            Algorithm(
                "lamport_fp", "all_reduce", "lamport_fp_one_shot", "baseline/lamport_fp.cuh", ("whole",),
                encoded=False, baseline=True, own_contract=True, regions=("lamport_fp", "lamport_fp_state"),
                needs=frozenset({"atomic4"}), floats_only=True, granule=CELL_BYTES, max_ranks=8,
            ),
        )
    }
)  # fmt: skip

MIXED = (("lamport16", "ll128"), ("lamport", "ll128"), ("lamport16", "ll16"), ("ll", "ll128"))
"""Encodings of the two phases of two-shot that exist beside one encoding for both. A pair costs a kernel for each dtype
and world size, so only such pairs are here that no single encoding dominates: cheap evidence for the small hop in front
of a dense line, or 16-byte payloads for the sums in front of exact ones."""


COLLECTIVES = tuple(sorted({a.collective for a in ALGORITHMS.values()}))


def _reason_against(a: Algorithm, encodings: tuple[Encoding, ...]) -> str | None:
    """Why a combination does not exist at all; None if it does."""
    if a.moves_bytes and not all(e.bit_exact for e in encodings):
        return "it would change bytes: one word of every payload stands for 'not arrived'"
    if len({e.name for e in encodings}) > 1:
        if any(e.max_chunks for e in encodings):
            return "a chunk of flag is no tile of another encoding"
        if tuple(e.name for e in encodings) not in MIXED:
            return f"of the mixed pairs only {', '.join('+'.join(m) for m in MIXED)} exist"
    return None


def _build() -> tuple[dict[str, Protocol], dict[str, str]]:
    found: dict[str, Protocol] = {}
    left_out: dict[str, str] = {}
    for a in ALGORITHMS.values():
        dtypes = (BYTES,) if a.moves_bytes else tuple(t for t in REDUCIBLE.values() if t.is_float or not a.floats_only)
        if not a.encoded:
            found[a.name] = Protocol(a.name, a, (), a.regions, dtypes)
            continue
        pairs = [(e,) * len(a.phases) for e in ENCODINGS.values()]
        if len(a.phases) == 2:
            pairs += [(e, f) for e in ENCODINGS.values() for f in ENCODINGS.values() if e is not f]
        for encodings in pairs:
            name = f"{a.name}.{'+'.join(dict.fromkeys(e.name for e in encodings))}"
            reason = _reason_against(a, encodings)
            if reason is not None:
                left_out[name] = reason
                continue
            # Replacing one NaN by another is harmless in a sum of floats only, where every NaN result is the same one.
            admitted = tuple(t for t in dtypes if t.is_float or all(e.bit_exact for e in encodings))
            found[name] = Protocol(name, a, encodings, tuple(e.name for e in encodings), admitted)
    return found, left_out


def register(encoding: Encoding, include: str | Path) -> None:
    """Adds an encoding of one's own: from then on every algorithm exists with it, in every list, sweep and figure.

    include : folder that `encoding.header` lies in; the header may include the kernels' own, as ``"wire/base.cuh"``. Call it
    alike on all ranks (a communicator compares) and while no communicator is open, since a slab has a region for each
    encoding. The same name again replaces what was registered under it. Raises `ArgumentError` for an encoding that cannot
    be; where it says other things than its struct in the header, its kernels do not compile (`source.claims`).
    """
    from fcomm import source, topology  # which import this module, or are of no other use here

    folder, name = Path(include).resolve(), encoding.name
    if _include.get(name) == folder and _encodings[name] == encoding:
        return
    if _holders:
        raise ArgumentError(
            f"{name} comes too late: a communicator is open, and its slab has no place for it; register before the first "
            "Communicator, or close() the one that there is"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ArgumentError(f"an encoding is named in small letters, digits and underscores, not {name!r}")
    if not re.fullmatch(r"[A-Za-z_]\w*", encoding.kernel_type):
        raise ArgumentError(f"{encoding.kernel_type!r} is not the name of a struct")
    if name in _encodings and name not in _include:
        raise ArgumentError(f"{name} is one of flash-comm's own encodings: choose another name")
    if not (folder / encoding.header).is_file():
        raise ArgumentError(f"{folder} has no {encoding.header}, the header of {name}")
    if (source.kernel_root() / encoding.header).exists():
        raise ArgumentError(f"{encoding.header} is the name of one of flash-comm's own headers: choose another one")
    if encoding.copies != 2:
        raise ArgumentError(
            f"{name} has {encoding.copies} copies of each slot; the turns of a sentinel are kept for ours alone"
        )
    if encoding.group_payload % 4 or not 0 < encoding.group_payload <= CELL_BYTES * encoding.group_cells:
        raise ArgumentError(
            f"{name} carries {encoding.group_payload} bytes in {encoding.group_cells} cells of {CELL_BYTES}: a positive multiple "
            "of 4 that fits is needed"
        )
    if encoding.rearm_bytes_per_cell:
        raise ArgumentError(
            f"{name} sets back {encoding.rearm_bytes_per_cell} bytes a cell, which a sentinel does: with two copies it is 0"
        )
    known = frozenset[str]().union(*topology.LINK_CAPABILITIES.values())
    if unknown := sorted(encoding.needs - known):
        raise ArgumentError(
            f"{name} needs {', '.join(unknown)}, which no link has; there are {', '.join(sorted(known))}"
        )
    _encodings[name], _include[name] = encoding, folder
    for forget in _derived:
        forget()


def registered() -> Mapping[str, Path]:
    """Names of the registered encodings, each with its header."""
    return {name: folder / _encodings[name].header for name, folder in _include.items()}


@derived
@cache
def protocols() -> Mapping[str, Protocol]:
    """All protocols by name, in a fixed order (alike on all ranks)."""
    return MappingProxyType(_build()[0])


@derived
@cache
def left_out() -> Mapping[str, str]:
    """Combinations of algorithm and encoding that do not exist, each with the reason."""
    return MappingProxyType(_build()[1])


def protocol(name: str) -> Protocol:
    """The protocol called `name`; `NotAdmittedError` if there is none."""
    try:
        return protocols()[name]
    except KeyError:
        if name in left_out():
            raise NotAdmittedError(f"{name} does not exist: {left_out()[name]}") from None
        raise NotAdmittedError(f"there is no protocol {name!r}; the names are {', '.join(protocols())}") from None


def index_of(name: str) -> int:
    """Position of a protocol in the registry: how kernels name it in an error record."""
    return list(protocols()).index(name)
