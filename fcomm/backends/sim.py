"""The simulator: all ranks in one process, under one seeded scheduler, with a weak memory.

It runs the kernels' own text, compiled against ``kernels_cu/sim``. The engine (``kernels_cu/sim/engine.hpp``) says what its
memory allows; this module says what a machine looks like to it. It has no communicator: `fcomm.verify` is its user.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcomm.backends import cpu
from fcomm.errors import ArgumentError
from fcomm.layout import CONTROL_BYTES, SlabLayout
from fcomm.protocols import CELL_BYTES, ENCODINGS, Protocol
from fcomm.sizes import round_up
from fcomm.source import Specialisation, flatten, kernel_root

ENGINE_FLAGS = ("-O2", "-ftree-vectorize", *(f for f in cpu.FLAGS if f != "-O1"))

KINDS = (
    "no violation",
    "stale data accepted",
    "torn data accepted",
    "sentinel accepted as data",
    "write over unread data",
    "deadlock",
    "wrong bits",
    "rank-dependent bits",
    "access outside the slot",
    "racing plain access",
    "no end in sight",
)
"""What a schedule can violate, by the engine's number."""


@dataclass(frozen=True)
class Link:
    """What lies between the ranks: which aligned pieces of a store it does not tear."""

    name: str
    grain: int
    """Bytes of a thread's store that arrive together, at most 16."""
    line: int
    """Bytes of a 128-byte line of eight lanes that arrive together."""
    capabilities: frozenset[str]
    meaning: str


_ORDER = frozenset({"acquire_release"})
LINKS = {
    link.name: link
    for link in (
        Link("nvlink", 16, 128, _ORDER | {"atomic4", "atomic8", "atomic16", "line128"}, "nothing is torn"),
        Link("half-line", 16, 64, _ORDER | {"atomic4", "atomic8", "atomic16"}, "lines are torn into 64 bytes"),
        Link("cells", 16, 16, _ORDER | {"atomic4", "atomic8", "atomic16"}, "lines are torn into 16 bytes"),
        Link("pcie", 8, 8, _ORDER | {"atomic4", "atomic8"}, "16 bytes are torn into 8"),
        Link("word", 4, 4, _ORDER | {"atomic4"}, "everything is torn into words of 4 bytes"),
    )
}


def link(name: str) -> Link:
    """The link of that name; `ArgumentError` if there is none."""
    if name not in LINKS:
        raise ArgumentError(f"there is no link {name!r}; the names are {', '.join(LINKS)}")
    return LINKS[name]


_LAUNCH = np.dtype(
    [(n, "<u8") for n in ("body", "params", "in_at", "in_bytes", "out_at", "out_bytes", "expected")]
    + [(n, "<u8") for n in ("fill_at", "fill_bytes", "fill")]
    + [(n, "<u4") for n in ("rank", "stream", "blocks", "threads", "call", "dependent", "trigger", "waits", "alike")]
    + [("reserved", "<u4")]
)
_SETUP = np.dtype(
    [(n, "<u4") for n in ("ranks", "devices", "launches", "weak", "line_bytes", "reserved")]
    + [(n, "<u8") for n in ("slab_bytes", "array_bytes", "images", "grain", "source", "flags")]
    + [(n, "<u8") for n in ("device_of", "capacity", "launch")]
)
_RESULT = np.dtype(
    [(n, "<u8") for n in ("schedules", "steps", "seed", "at", "bytes")]
    + [(n, "<u4") for n in ("kind", "rank", "call", "block", "thread", "other_rank", "other_call", "more")]
)
EVENT = np.dtype(
    [("at", "<u8")]
    + [(n, "<u4") for n in ("event", "bytes", "order", "rank", "call", "block", "thread")]
    + [(n, "<u4") for n in ("from_rank", "from_call", "behind")]
    + [("values", "<u4", 4), ("reserved", "<u4", 2)]
)
EVENTS = (
    "load", "store", "line", "modify", "start", "end", "wait", "trigger", "output", "input", "step", "meet",
)  # fmt: skip
NOBODY = 0xFFFF
"""Writer of what memory held before the first call."""
_NO_SOURCE = 255
_REMOTE_WRITES, _REMOTE_READS, _OWN_WRITES, _OWN_READS, _CHECKED, _SENTINEL, _LINE, _WORDS = (1 << k for k in range(8))


def slab_base(rank: int) -> int:
    """Simulated address of a rank's slab."""
    return (rank + 1) << 33


def array_base(rank: int) -> int:
    """Simulated address of the memory for a rank's arrays."""
    return slab_base(rank) + (1 << 32)


@cache
def engine() -> ctypes.CDLL:
    """The engine, compiled or found on disk."""
    text = flatten((kernel_root() / "sim" / "engine.hpp").read_text())
    made = ctypes.CDLL(str(cpu.build_text(text, "engine", "sim", ENGINE_FLAGS)))
    made.sim_new.restype = made.sim_machine.restype = made.sim_array.restype = ctypes.c_void_p
    sizes = tuple((ctypes.c_uint * 4).in_dll(made, "sim_sizes"))
    assert sizes == tuple(d.itemsize for d in (_LAUNCH, _SETUP, _RESULT, EVENT)), sizes
    return made


class SimKernel:
    """A specialisation compiled for the simulator."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.body = ctypes.cast(self._library.fc_body, ctypes.c_void_p).value or 0
        self._library.fc_bind.argtypes = (ctypes.c_void_p,)

    def bind(self, machine: int) -> None:
        """Says which machine runs the kernel from now on."""
        self._library.fc_bind(machine)


def compile_kernel(spec: Specialisation, root: Path | None = None) -> SimKernel:
    """Compiles a specialisation from the sources under `root` (default: the shipped ones), or finds it on disk."""
    text = "#define FC_CPU 1\n#define FC_SIM 1\n" + flatten(spec.root_text(), root)
    return compile_text(text, spec.name)


def compile_text(text: str, name: str) -> SimKernel:
    """Compiles the text of a kernel that ends in FC_KERNEL."""
    return SimKernel(cpu.build_text(text, name, "sim"))


@dataclass
class Launch:
    """One grid of a rank's stream. Without a kernel: a step, which checks the output before it and stores new input.

    Addresses are simulated ones; arrays of bytes are the host's.
    """

    rank: int
    call: int
    kernel: SimKernel | None = None
    params: NDArray[np.void] | None = None
    blocks: int = 1
    threads: int = 1
    stream: int = 0
    dependent: bool = False
    trigger: int = 0
    waits: bool = True
    """A step's: whether it waits for the grid before it, where it is launched dependently."""
    in_at: int = 0
    in_bytes: int = 0
    out_at: int = 0
    out_bytes: int = 0
    expected: NDArray[np.uint8] | None = None
    alike: bool = False
    """Every rank has the same output."""
    fill_at: int = 0
    fill: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run of schedules came to."""

    schedules: int
    steps: int
    kind: str
    seed: int
    rank: int
    call: int
    block: int
    thread: int
    other_rank: int
    other_call: int
    at: int
    nbytes: int
    more: int

    @property
    def violated(self) -> bool:
        return self.kind != KINDS[0]


def tables(
    layout: SlabLayout, link: Link, used: Sequence[Protocol], shared: dict[str, str] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """For each 16 bytes of a slab: what the link does not tear, whose slot it is, who may do what there.

    used : the protocols that run. shared : regions that a fault lets a protocol use in place of its own.
    """
    cells = simulated_bytes(layout) // CELL_BYTES
    grain = np.full(cells, link.grain, np.uint8)
    source = np.full(cells, _NO_SOURCE, np.uint8)
    flags = np.zeros(cells, np.uint8)
    control = round_up(layout.channels * CONTROL_BYTES, 4096) // CELL_BYTES
    grain[:control] = 4
    flags[:control] = _OWN_READS | _OWN_WRITES | _WORDS
    names = {(shared or {}).get(r, r) for p in used for r in p.regions}
    for channel in range(layout.channels):
        for region in layout.regions(channel).values():
            first = region.offset // CELL_BYTES
            encoding = ENCODINGS.get(region.name)
            if region.name.endswith("_state") or region.name == "staging":
                end = first + region.slot_stride // CELL_BYTES
                if region.name in names:
                    flags[first:end] = _OWN_READS | _OWN_WRITES | _REMOTE_WRITES | _REMOTE_READS
                if region.name != "staging":
                    grain[first:end] = 4
                    flags[first:end] |= _WORDS
                continue
            rights = _OWN_WRITES if region.scrubbed else 0
            if region.name in names:
                rights |= _REMOTE_WRITES | _OWN_READS | _OWN_WRITES | _CHECKED
                if region.cleared_to or not region.scrubbed:
                    rights |= _SENTINEL
                if region.name == "ll128":
                    rights |= _LINE
            for copy in range(region.copies):
                for rank in range(layout.world_size):
                    at = (region.offset + copy * region.copy_stride + rank * region.slot_stride) // CELL_BYTES
                    end = at + region.slot_stride // CELL_BYTES
                    source[at:end] = rank
                    flags[at:end] = rights
                    if encoding is None and region.scrubbed:  # a barrier's flags
                        grain[at:end] = 4
                    elif encoding is not None and encoding.header_bytes:
                        for half in (0, region.half_stride // CELL_BYTES):
                            grain[at + half : at + half + encoding.header_bytes // CELL_BYTES] = 4
    return grain, source, flags


def simulated_bytes(layout: SlabLayout) -> int:
    """Bytes of a slab that the simulator knows of: without what only fills up device memory's granule."""
    return round_up(layout.channels * CONTROL_BYTES, 4096) + layout.channels * layout.channel_bytes


def first_image(layout: SlabLayout) -> NDArray[np.uint8]:
    """A slab before the first call."""
    image = np.zeros(simulated_bytes(layout), np.uint8)
    for channel in range(layout.channels):
        for region in layout.regions(channel).values():
            if region.cleared_to:
                image[region.offset : region.offset + region.copies * region.copy_stride] = region.cleared_to
    words = layout.initial_control()
    image[: words.nbytes] = words.view(np.uint8)
    return image


@dataclass
class World:
    """Everything that a run of schedules has in common."""

    ranks: int
    link: Link
    images: list[NDArray[np.uint8]]
    """Each rank's slab before the first call."""
    tables: tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
    device_of: list[int]
    capacity: list[int]
    """Blocks that may be resident on each device."""
    launches: list[Launch]
    array_bytes: int
    weak: bool = True
    """False: sequentially consistent memory (pieces that the link tears are still stores of their own)."""
    kept: list[Any] = field(default_factory=list)


class Simulator:
    """A world under the engine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._engine = engine()
        launches = np.zeros(len(world.launches), _LAUNCH)
        for row, one in zip(launches, world.launches, strict=True):
            row["body"] = 0 if one.kernel is None else one.kernel.body
            row["params"] = 0 if one.params is None else one.params.ctypes.data
            row["expected"] = 0 if one.expected is None else one.expected.ctypes.data
            row["fill"] = 0 if one.fill is None else one.fill.ctypes.data
            row["fill_bytes"] = 0 if one.fill is None else one.fill.nbytes
            for name in ("in_at", "in_bytes", "out_at", "out_bytes", "fill_at", "rank", "stream", "blocks", "threads"):
                row[name] = getattr(one, name)
            for name in ("call", "dependent", "trigger", "waits", "alike"):
                row[name] = getattr(one, name)
        setup = np.zeros(1, _SETUP)
        images = np.array([i.ctypes.data for i in world.images], np.uint64)
        device_of, capacity = np.array(world.device_of, np.uint32), np.array(world.capacity, np.uint32)
        for name, value in (
            ("ranks", world.ranks), ("devices", len(world.capacity)), ("launches", len(launches)),
            ("weak", world.weak), ("line_bytes", world.link.line), ("slab_bytes", world.images[0].nbytes),
            ("array_bytes", world.array_bytes), ("images", images.ctypes.data),
            ("grain", world.tables[0].ctypes.data), ("source", world.tables[1].ctypes.data),
            ("flags", world.tables[2].ctypes.data), ("device_of", device_of.ctypes.data),
            ("capacity", capacity.ctypes.data), ("launch", launches.ctypes.data),
        ):  # fmt: skip
            setup[name] = value
        self._kept = (launches, images, device_of, capacity, setup)
        self._handle = ctypes.c_void_p(self._engine.sim_new(ctypes.c_void_p(setup.ctypes.data)))

    def close(self) -> None:
        self._engine.sim_free(self._handle)  # of a null pointer: nothing
        self._handle = ctypes.c_void_p()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self) -> None:
        machine = self._engine.sim_machine(self._handle)
        for kernel in {id(one.kernel): one.kernel for one in self.world.launches if one.kernel}.values():
            kernel.bind(machine)

    def random(self, seed: int, count: int, seconds: float = 0.0) -> Outcome:
        """Runs schedules seed, seed + 1, ..., until one violates something (or, if given, that time is over)."""
        return self._run(
            "sim_random", ctypes.c_uint64(seed), ctypes.c_uint64(count), ctypes.c_double(seconds), None, 0, None
        )

    def exhaust(self, departures: int, most: int, fresh: bool) -> Outcome:
        """Goes on (or begins) with all schedules that depart so often at most from the plain one; `more`: not through."""
        return self._run("sim_exhaust", departures, ctypes.c_uint64(most), int(fresh))

    def trace(self, seed: int | None, room: int = 1 << 16) -> tuple[Outcome, NDArray[np.void]]:
        """One schedule again, with its last `room` events; seed None: the one that `exhaust` came to."""
        events, made = np.zeros(room, EVENT), ctypes.c_uint(0)
        pointer = ctypes.c_void_p(events.ctypes.data)
        if seed is None:
            outcome = self._run("sim_again", pointer, room, ctypes.byref(made))
        else:
            outcome = self._run(
                "sim_random", ctypes.c_uint64(seed), ctypes.c_uint64(1), ctypes.c_double(0), pointer, room,
                ctypes.byref(made),
            )  # fmt: skip
        n = made.value
        return outcome, events[:n] if n <= room else np.roll(events, -(n % room))

    def _run(self, function: str, *arguments: Any) -> Outcome:
        self._bind()
        result = np.zeros(1, _RESULT)
        getattr(self._engine, function)(self._handle, *arguments, ctypes.c_void_p(result.ctypes.data))
        r = result[0]
        return Outcome(
            int(r["schedules"]), int(r["steps"]), KINDS[r["kind"]], int(r["seed"]), int(r["rank"]), int(r["call"]),
            int(r["block"]), int(r["thread"]), int(r["other_rank"]), int(r["other_call"]), int(r["at"]),
            int(r["bytes"]), int(r["more"]),
        )  # fmt: skip

    def array(self, rank: int) -> NDArray[np.uint8]:
        """A rank's arrays as the last schedule left them."""
        at = self._engine.sim_array(self._handle, rank)
        return np.frombuffer(ctypes.string_at(at, self.world.array_bytes), np.uint8)

    def final_word(self, at: int) -> int:
        """The 32-bit word that a location of a slab ends with, in modification order."""
        word = ctypes.c_uint32()
        self._engine.sim_final_value(self._handle, ctypes.c_uint64(at), 4, ctypes.byref(word))
        return word.value
