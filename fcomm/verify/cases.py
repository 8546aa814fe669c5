"""Cases: what the ranks of a simulated machine do, and the world that the engine runs for it.

Each rank's stream has a step in front of every call and behind the last one: a small grid of the caller's, as a layer of a
model would be. It checks the result of the call before it, and stores the next call's input. All calls use one input and
one output array, so a message that was read too late or an output that was stored too late shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fcomm import checks, variants
from fcomm.backends import sim
from fcomm.dtypes import BYTES, REDUCIBLE
from fcomm.epilogue import Epilogue, Fused, cells_held
from fcomm.errors import ArgumentError
from fcomm.layout import CALL_WORDS, CONTROL_DTYPE, FIRST_EPOCH, SlabLayout
from fcomm.protocols import Protocol, protocol, shard_bytes
from fcomm.sizes import round_up
from fcomm.source import LAUNCHES, Specialisation
from fcomm.variants import SHIPPED

MAX_BYTES = 4096
"""Message size of the simulated slabs."""
DTYPE = "float32"
ORDERLESS = np.array([0, 0x80000000, 0xFFFFFFFF, 0x7F800000], np.uint32)
"""Zeros, the sentinel (a NaN) and infinity: a sum of them and of small integers has the same bits in every order."""
NEVER_NS = np.uint64(1 << 62)
ALIGNMENT = 256
FAULTS = ("no wait", "empty calls", "short room", "shared region", "stale cells")
"""What a host can do wrong: a step that never waits; launching calls of no bytes; room for too few grids on a device; two
encodings in one region; evidence of the last period of the epoch in the slots."""


NORM = Epilogue(
    "norm",
    """const f32 mean = values.sum([](f32 x) { return x * x; }) / f32(values.columns());
    const f32 scale = 1.0f / sqrt(mean + 1.0f);
    values.map([&](f32 x, u64) { return x * scale; });""",
    by_row=True,
)
"""An epilogue that needs whole rows and nothing else: RMSNorm with an epsilon and weights of 1."""


@dataclass(frozen=True)
class Call:
    """One call of every rank.

    count: elements of a rank's input (all-gather: bytes). blocks: of the grid, rank by rank, the last for all others.
    """

    protocol: str
    count: int
    blocks: tuple[int, ...] = (1,)

    def blocks_of(self, rank: int) -> int:
        return self.blocks[min(rank, len(self.blocks) - 1)]


@dataclass(frozen=True)
class Case:
    """What happens on a simulated machine. Everything else is the schedule's."""

    ranks: int
    calls: tuple[Call, ...]
    threads: int = 8
    replays: int = 1
    """How often the calls are made, as by a graph: with the same arguments each time."""
    launch: str = "none"
    streams: int = 1
    """Streams of each rank, with a channel and arrays for each, that all make these calls."""
    step_blocks: int = 1
    """Blocks of the steps' grids."""
    devices: int = 0
    """Devices that the ranks share, taking turns; 0: one for each."""
    in_place: bool = False
    shift: int = 0
    """Bytes by which the arrays miss an alignment of 16."""
    first_epoch: int = FIRST_EPOCH
    scrub_calls: int = 0
    """Length of the scrubbing window, in calls before the epoch wraps; 0: the real one."""
    data: int = 0
    """Seed of the inputs."""
    lookalike: bool = False
    """Most words of the inputs are numbers of calls, as evidence is."""
    max_bytes: int = MAX_BYTES
    """Message size that the slabs are made for."""
    columns: int = 0
    """Elements of a row: calls of protocols that can have `NORM` over rows for their epilogue; 0: none."""
    faults: frozenset[str] = frozenset()
    weak: bool = True

    @property
    def protocols(self) -> list[Protocol]:
        return [protocol(name) for name in dict.fromkeys(c.protocol for c in self.calls)]

    def describe(self) -> str:
        """In a few words."""
        sizes = ", ".join(f"{c.protocol} {c.count} on {'/'.join(map(str, c.blocks))}" for c in self.calls)
        parts = [
            f"{self.ranks} ranks",
            f"calls (elements on blocks): {sizes}",
            f"{self.threads} threads",
            *([f"replayed {self.replays} times"] if self.replays > 1 else []),
            *([f"dependent launch {self.launch}"] if self.launch != "none" else []),
            *([f"{self.devices} shared devices"] if self.devices else []),
            *([f"{self.streams} streams"] if self.streams > 1 else []),
            *(["in place"] if self.in_place else []),
            *([f"a norm over rows of {self.columns}"] if self.columns else []),
            *([f"first epoch {self.first_epoch:#x}"] if self.first_epoch != FIRST_EPOCH else []),
            *sorted(self.faults),
        ]
        return "; ".join(parts)


class Kernels:
    """Kernels of one set of sources, compiled when they are first asked for.

    variant : how those protocols are compiled that have it; the others, which stand between their calls, are the shipped ones.
    """

    def __init__(self, root: Path | None = None, variant: str = SHIPPED) -> None:
        self.root, self.variant = root, variants.variant(variant)
        self._made: dict[str, sim.SimKernel] = {}

    def get(self, proto: Protocol, ranks: int, fused: Fused | None = None) -> sim.SimKernel:
        dtype = BYTES if proto.algorithm.moves_bytes else REDUCIBLE[DTYPE]
        name = SHIPPED if self.variant.refusal(proto) else self.variant.name
        spec = Specialisation(proto, dtype, ranks, fused=fused, variant=name)
        if spec.name not in self._made:
            self._made[spec.name] = sim.compile_kernel(spec, self.root)
        return self._made[spec.name]


def _fused(case: Case, proto: Protocol) -> Fused | None:
    """The epilogue of the protocol's calls."""
    if case.columns == 0 or NORM.refusal(proto) is not None:
        return None
    return Fused(NORM, cells_held(proto.encodings[0].cells(case.columns * 4), case.threads))


def _input(case: Case, proto: Protocol, call: int, rank: int, count: int, ordered: bool = True) -> NDArray[np.generic]:
    """One rank's input of one call: different in every call, with values that look like evidence among them.

    ordered : whether the order of summation is fixed; otherwise values are such that every order has the same bits.
    """
    rng = np.random.default_rng([case.data, call, rank])
    if not ordered:
        whole = rng.integers(-4096, 4096, count).astype(np.float32)
        special = rng.random(count) < 0.15
        whole.view(np.uint32)[special] = rng.choice(ORDERLESS, int(special.sum()))
        return whole
    if proto.algorithm.moves_bytes:
        x: NDArray[np.generic] = rng.integers(0, 256, count, dtype=np.uint8)
        return x
    x = checks.inputs([case.data, call], rank, case.ranks, count, DTYPE)
    words = x.view(np.uint32)
    special = np.array([0, 0x80000000, 0xFFFFFFFF, 0x7F800000, 1, *range(2, 10)], np.uint32)
    for k in np.flatnonzero(rng.random(count) < (0.9 if case.lookalike else 0.15)):
        words[k] = rng.integers(FIRST_EPOCH, 10) if case.lookalike else rng.choice(special)
    return x


def _call_words(proto: Protocol, ranks: int, nbytes: int) -> tuple[int, int, int]:
    """nbytes, stride and part of a launch that takes the message in one piece, as `Communicator` sets them."""
    if proto.collective == "reduce_scatter":
        return nbytes, nbytes // ranks, nbytes // ranks
    if proto.collective == "all_gather":
        return nbytes, nbytes, nbytes
    shard = shard_bytes(nbytes, ranks)
    return nbytes, shard, shard


def _rooms(case: Case) -> int:
    """Grids of a rank that its device has room for."""
    if "short room" in case.faults or case.launch == "none":
        return 1
    return 2


def make_world(case: Case, link: sim.Link, kernels: Kernels, regions: Mapping[str, str] | None = None) -> sim.World:
    """The world of a case.

    regions : regions that take others' place, by name (the fault "shared region").
    """
    n = case.ranks
    if n < 2:
        raise ArgumentError(f"{n} ranks: an exchange needs at least two")
    layout = SlabLayout(n, case.max_bytes, case.streams)
    protos = case.protocols
    images = []
    for rank in range(n):
        image = sim.first_image(layout)
        words = image[: case.streams * CONTROL_DTYPE.itemsize].view(CONTROL_DTYPE)
        words["epoch"] = case.first_epoch
        if "stale cells" in case.faults:
            _plant(image, layout, rank)
        images.append(image)
    extent = ALIGNMENT + round_up(max(c.count for c in case.calls) * 4 * n + 16, ALIGNMENT)
    array_bytes = 2 * extent * case.streams
    world = sim.World(
        n,
        link,
        images,
        sim.tables(layout, link, protos, dict(regions or {})),
        [r % case.devices if case.devices else r for r in range(n)],
        [],
        [],
        array_bytes,
        case.weak,
    )
    made = [c for _ in range(case.replays) for c in case.calls]
    for rank in range(n):
        for stream in range(case.streams):
            _program(case, world, layout, kernels, rank, stream, made, extent, dict(regions or {}))
    rooms = _rooms(case) * case.streams
    world.capacity = [
        rooms
        * sum(max(case.step_blocks, *(c.blocks_of(r) for c in case.calls)) for r in range(n) if world.device_of[r] == d)
        for d in range(case.devices or n)
    ]
    return world


def _program(
    case: Case,
    world: sim.World,
    layout: SlabLayout,
    kernels: Kernels,
    rank: int,
    stream: int,
    made: list[Call],
    extent: int,
    regions: dict[str, str],
) -> None:
    """Appends the launches of one of a rank's streams: step, call, step, call, ..., step."""
    n, dependent = case.ranks, case.launch != "none"
    in_base = sim.array_base(rank) + 2 * stream * extent + case.shift
    nodes: list[NDArray[np.void]] = []
    before: sim.Launch | None = None
    for k, call in enumerate(made):
        proto = protocol(call.protocol)
        ordered = kernels.variant.exact or kernels.variant.refusal(proto) is not None
        xs = [_input(case, proto, k + 1000 * stream, r, call.count, ordered) for r in range(n)]
        nbytes = xs[0].nbytes
        exact, fused = checks.expected(proto, xs, rank), _fused(case, proto)
        if fused is not None:
            exact = checks.rms_norm(exact.reshape(-1, case.columns), np.ones(case.columns, np.float32), 1.0)
        want = np.ascontiguousarray(exact).reshape(-1).view(np.uint8)
        out_base = in_base
        if not case.in_place:
            out_base += extent
        elif proto.collective == "all_gather":
            out_base = in_base
        in_at = in_base + (rank * nbytes if case.in_place and proto.collective == "all_gather" else 0)
        out_at = out_base
        if case.in_place and proto.collective == "reduce_scatter":
            out_at = in_base + rank * (nbytes // n)
        node = k % len(case.calls)
        if node == len(nodes):
            p = layout.params(
                proto, rank, [sim.slab_base(r) for r in range(n)], 0, stream, 1.0, epilogue=fused is not None
            )
            if fused is not None:
                p["epilogue"]["columns"] = case.columns
            for name in regions:  # the fault: a region in another's place
                for j, used in enumerate(proto.regions):
                    if used == name:
                        other = layout.regions()[regions[name]]
                        for part in ("offset", "copy_stride", "slot_stride", "half_stride"):
                            p["region"][0, j][part] = getattr(other, part)
                        if len(proto.regions) == 1:
                            p["region"][0, 1] = p["region"][0, 0]
            words = _call_words(proto, n, nbytes)
            for name, value in zip(CALL_WORDS, (in_at, out_at, *words), strict=True):
                p[name] = value
            p["timeout_ns"] = NEVER_NS
            p["aligned"] = (in_at | out_at | words[0] | words[1] | words[2]) % 16 == 0
            # What a host that counted its calls itself would pass when it captures them. No kernel of ours looks at it.
            p["reserved"] = FIRST_EPOCH + k
            if case.scrub_calls:
                p["scrub_from"] = (1 << 32) - case.scrub_calls
                cells = -(-layout.scrub_bytes // 16)
                p["scrub_cells"] = -(-cells // max(1, case.scrub_calls // 4 - 1))  # twice around each copy
            nodes.append(p)
        world.launches.append(_step(case, rank, stream, k, before, in_at, xs[rank].view(np.uint8)))
        if nbytes > 0 or "empty calls" in case.faults:
            world.launches.append(
                sim.Launch(
                    rank, k, kernels.get(proto, n, fused), nodes[node], call.blocks_of(rank), case.threads,
                    stream=stream, dependent=dependent, trigger=LAUNCHES.index(case.launch), in_at=in_at, in_bytes=nbytes,
                    out_at=out_at, out_bytes=want.nbytes, expected=want, alike=proto.collective != "reduce_scatter",
                )
            )  # fmt: skip
            before = world.launches[-1]
        world.kept += [want, xs, nodes]
    world.launches.append(_step(case, rank, stream, len(made), before, in_base, np.zeros(0, np.uint8)))


def _step(
    case: Case, rank: int, stream: int, call: int, before: sim.Launch | None, fill_at: int, fill: NDArray[np.uint8]
) -> sim.Launch:
    waits = "no wait" not in case.faults
    step = sim.Launch(
        rank, call, blocks=case.step_blocks, stream=stream, dependent=case.launch != "none", waits=waits,
        fill_at=fill_at, fill=fill,
    )  # fmt: skip
    if before is not None:
        step = replace(step, out_at=before.out_at, out_bytes=before.out_bytes, expected=before.expected)
    return step


def _plant(image: NDArray[np.uint8], layout: SlabLayout, rank: int) -> None:
    """Old evidence of the first epochs behind the wrap, in all cells of the regions that are scrubbed."""
    for region in layout.regions().values():
        if not region.scrubbed:
            continue
        for copy in range(region.copies):
            start = region.offset + copy * region.copy_stride
            words = image[start : start + layout.world_size * region.slot_stride].view(np.uint32)
            words[:] = FIRST_EPOCH + copy


def companion(proto: Protocol) -> Protocol:
    """A protocol with other evidence, admitted on every link; some of its calls stand between those that are checked."""
    if proto.algorithm.moves_bytes:
        return protocol("barrier.all_gather" if proto.name == "all_gather.flag" else "all_gather.flag")
    return protocol("one_shot.flag" if any(e.copies == 3 for e in proto.encodings) else "one_shot.lamport")


def drawn(proto: Protocol, ranks: int, seed: int, calls: int | None = None, most_cells: int = 64) -> Case:
    """The case of a batch of schedules: everything about it follows from the arguments."""
    rng, more = np.random.default_rng([seed, ranks, 11]), np.random.default_rng([seed, ranks, 12])
    mixed, streams = more.random() < 0.3, int(more.choice([1, 2], p=[0.85, 0.15]))
    names = {e.name for e in proto.encodings}
    fixed = proto.algorithm.grid is not None and proto.algorithm.grid.fixed
    if "shard" in proto.algorithm.phases and proto.encodings:
        threads = 32  # the cells of a part are dealt out by whole warps
    elif "ll128" in names:
        threads = int(rng.choice([8, 16]))
    else:
        threads = int(rng.choice([4, 8, 16])) if ranks <= 4 else 8
    number = calls or int(rng.choice([2, 3, 4, 6]))
    graph = number > 2 and rng.random() < 0.4
    nodes = max(1, int(rng.integers(1, number))) if graph else number
    blocks = [int(rng.integers(1, 4))] if fixed else [int(b) for b in rng.integers(1, 4, ranks)]
    made: list[Call] = []
    for _ in range(nodes):
        one = companion(proto) if mixed and made and more.random() < 0.4 else proto
        made.append(Call(one.name, _count(one, ranks, rng, most_cells), tuple(blocks)))
        if not fixed:
            blocks = [int(b) for b in rng.integers(1, 4, ranks)]
    launch = str(rng.choice(LAUNCHES, p=[0.4, 0.4, 0.2]))
    aligned_only = proto.algorithm.granule > 1
    shift = 0 if aligned_only or rng.random() < 0.7 else (1 if proto.algorithm.moves_bytes else 4)
    wrap = rng.random() < 0.15
    return Case(
        ranks,
        tuple(made),
        threads,
        -(-number // nodes),
        launch,
        streams,
        int(rng.choice([1, 3])),
        int(rng.choice([0, 1, 2], p=[0.5, 0.3, 0.2])),
        bool(rng.random() < 0.3) and not aligned_only,
        shift,
        (1 << 32) - int(rng.integers(1, 5)) if wrap else FIRST_EPOCH,
        data=seed,
    )


def with_rows(case: Case, seed: int) -> Case:
    """The case with whole rows: all calls that can have `NORM` for their epilogue."""
    columns = int(np.random.default_rng([seed, case.ranks, 13]).choice([4, 8, 20, 32], p=[0.2, 0.4, 0.2, 0.2]))
    calls = tuple(
        replace(c, count=min(round_up(c.count, columns), MAX_BYTES // 4 // columns * columns))
        if NORM.refusal(protocol(c.protocol)) is None
        else c
        for c in case.calls
    )
    return replace(case, calls=calls, columns=columns)


def _count(proto: Protocol, ranks: int, rng: np.random.Generator, most_cells: int) -> int:
    """Elements (or bytes) of a message: most often few cells."""
    cells = int(rng.choice([1, 2, 5, 12, 30, most_cells], p=[0.15, 0.2, 0.25, 0.2, 0.1, 0.1]))
    cells = min(cells, most_cells)
    payload = proto.encodings[0].group_payload // proto.encodings[0].group_cells if proto.encodings else 16
    if proto.encodings and proto.encodings[0].max_chunks and rng.random() < 0.3:
        cells = 70
    nbytes = max(4, cells * payload - int(rng.choice([0, 4, 8])))
    if proto.algorithm.granule > 1:
        nbytes = round_up(nbytes, proto.algorithm.granule)
    if proto.algorithm.moves_bytes:
        nbytes = max(1, nbytes - (0 if proto.algorithm.granule > 1 else int(rng.integers(0, 4))))
        return min(nbytes, MAX_BYTES)
    count = min(nbytes, MAX_BYTES) // 4
    if proto.collective == "reduce_scatter":
        count = max(1, count // ranks) * ranks
    return count
