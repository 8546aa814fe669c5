"""The cost model where each rank has a GPU of its own: counted terms, instruction prices of one shared GPU, three prices of a link.

::

    latency = path + stream + local
    path    = launch + hop_us x hops + instructions (evidence, second loads, peers, warps, passes)
    stream  = the longest of  link_us_per_mib x wire bytes  |  work and re-arming  |  round trips of further reads
    local   = reading input, writing output

It differs from `fcomm.cost_model` where a link differs from an L2: a read takes two hops, since it is a request and its answer;
a thread that reads peers in several passes waits a round trip for each; bytes on the link and the instructions that move them
are a pipeline, so the slower one sets the pace, while the first byte's latency comes in front of it. `docs/validation.md` says how far
this can be trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from experiments.gate import FOLDER
from fcomm.cost_model import MIB, RESIDENT_THREADS, Model, work
from fcomm.errors import ArgumentError, RecordError
from fcomm.grids import default_shape
from fcomm.protocols import GpuShare, Protocol

Floats = np.ndarray[Any, np.dtype[np.float64]]

INSTRUCTIONS = FOLDER / "instructions.json"
GPUS: Mapping[str, GpuShare] = {
    "h100": GpuShare("9.0", 132, 132),
    "h200": GpuShare("9.0", 132, 132),
    "b200": GpuShare("10.0", 148, 148),
    "b300": GpuShare("10.3", 148, 148),
}
"""What a rank has of each kind of GPU: all of it. The published table's names begin with these."""


def gpu_share(name: str) -> GpuShare:
    """The GPU of that name: `b300`, or the published table's `b300_sxm`; `ArgumentError` for another one."""
    try:
        return GPUS[name.removesuffix("_sxm")]
    except KeyError:
        raise ArgumentError(f"no GPU {name!r} is described here; there are {', '.join(GPUS)}") from None


@dataclass(frozen=True)
class Instructions:
    """Prices of what does not depend on a link, fitted to ranks that share one GPU; units as in `fcomm.cost_model`."""

    shared: Mapping[str, float]
    launch_us: Mapping[str, float]
    """Of a launch, by launch feature. Only differences between features are used: the launch itself is calibrated."""
    own: Mapping[str, Mapping[str, float]]
    """By protocol."""
    model_sha256: str
    device: str
    source_hash: str

    @classmethod
    def of(cls, model: Model) -> Instructions:
        """Those of a fitted model."""
        return cls(
            {k: model.shared[k] for k in ("line_us", "rearm_us_per_mib", "local_us_per_mib")},
            {k: v["launch_us"] for k, v in model.launch.items()}, model.own, model.digest(), str(model.machine.get("device")),
            model.source_hash,
        )  # fmt: skip

    def to_json(self) -> str:
        """The text of their file; see `load`."""
        return json.dumps(vars(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path = INSTRUCTIONS) -> Instructions:
        """Those that were frozen for the validation; `RecordError` where the file is not one."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RecordError(f"{path} has no instruction prices ({type(error).__name__})") from None


@dataclass(frozen=True)
class Link:
    """What is calibrated for one kind of GPU."""

    launch_us: float
    """A launch with the late trigger, its share of a graph's replay included."""
    hop_us: float
    """A store of one rank becomes visible to another that polls."""
    link_us_per_mib: float


@dataclass(frozen=True)
class Counts:
    """What one call does, counted; with the prices of `Instructions` in it, so that only the three of a `Link` are missing."""

    launches: int
    launch_offset_us: float
    """What its launch features cost beyond as many launches with the late trigger."""
    hops: int
    """One-way latencies on the longest chain: a push is one, a read two, a store that a release waits for two."""
    instructions_us: float
    wire_mib: float
    work_us: float
    """The SMs' time for the wire bytes, and for setting slots back."""
    round_trips: int
    """Passes of a reading thread after its first, over all phases."""
    local_us: float

    def terms(self, link: Link) -> dict[str, float]:
        """Microseconds by term; their sum is the latency."""
        return {
            "launch": max(0.0, self.launches * link.launch_us + self.launch_offset_us),
            "hops": self.hops * link.hop_us,
            "instructions": self.instructions_us,
            "stream": max(
                self.wire_mib * link.link_us_per_mib, self.work_us, 2 * self.round_trips * link.hop_us
            ),
            "local": self.local_us,
        }  # fmt: skip

    def latency_us(self, link: Link) -> float:
        return sum(self.terms(link).values())


def count(
    protocol: Protocol,
    nbytes: int,
    world_size: int,
    gpu: GpuShare,
    launches: Sequence[str],
    prices: Instructions,
    *,
    shape: tuple[int, int] | None = None,
    hops: int | None = None,
    reads: Sequence[str] = (),
    wire_bytes: float | None = None,
    copies: int = 0,
) -> Counts:
    """Counts one launch of a protocol, or of what a published system does in its place.

    nbytes : of one rank's message. launches : the launch feature of each kernel of the call. hops : the protocol's rounds, if it only
    pushes. reads : phases in which a rank reads its peers' memory, each the "whole" message or a "shard" of it. wire_bytes : what one
    rank sends or reads, where it is not what the protocol does. copies : how often the message is copied on the rank's own GPU.
    """
    own = prices.own[protocol.name]
    grid = shape or launch_shape(protocol, nbytes, world_size, gpu)
    w = work(protocol, nbytes, world_size, grid)
    cells = {"whole": -(-nbytes // 16), "shard": -(-nbytes // (16 * world_size))}
    threads = grid[0] * grid[1]
    trips = sum(-(-cells[part] // threads) - 1 for part in reads)
    wire_mib = w.wire_mib if wire_bytes is None else wire_bytes / MIB
    instructions = (
        own["evidence_us"] * w.rounds + prices.shared["line_us"] * w.line_phases + own["peer_us"] * w.rounds * w.peers
        + (own["spread_us"] + own["spread_peer_us"] * w.peers) * w.warp_doublings
        + (0.0 if reads else own["pass_us"] * w.extra_passes)
    )  # fmt: skip
    return Counts(
        launches=len(launches),
        launch_offset_us=sum(prices.launch_us[f] - prices.launch_us["late"] for f in launches),
        hops=w.rounds if hops is None else hops,
        instructions_us=instructions,
        wire_mib=wire_mib,
        work_us=own["work_us_per_mib"] * wire_mib + prices.shared["rearm_us_per_mib"] * w.rearm_mib,
        round_trips=trips,
        local_us=prices.shared["local_us_per_mib"] * (w.local_mib + 2 * copies * nbytes / MIB),
    )


def launch_shape(protocol: Protocol, nbytes: int, world_size: int, gpu: GpuShare) -> tuple[int, int]:
    """Blocks and threads by the default rule, no more than are resident."""
    blocks, threads = default_shape(protocol, nbytes, world_size, gpu)
    return min(blocks, gpu.sms * max(1, RESIDENT_THREADS // threads)), threads


def calibrate(counts: Sequence[Counts], latency_us: Sequence[float]) -> Link:
    """The three prices of a link that describe some latencies best: relative errors, a loss that is linear beyond 5 %.

    No price is negative. Deterministic. `RecordError` where there are fewer latencies than prices.
    """
    if len(counts) < 3:
        raise RecordError(f"{len(counts)} latencies are too few to calibrate three prices")
    names = (
        "launches",
        "launch_offset_us",
        "hops",
        "instructions_us",
        "wire_mib",
        "work_us",
        "round_trips",
        "local_us",
    )
    launches, offset, hops, instructions, wire, own_work, trips, local = (
        np.array([getattr(c, name) for c in counts], float) for name in names
    )
    measured = np.asarray(latency_us, float)

    def residuals(x: Floats) -> Floats:
        stream = np.maximum(np.maximum(wire * x[2], own_work), 2 * trips * x[1])
        path = np.maximum(0.0, launches * x[0] + offset) + hops * x[1] + instructions
        return np.asarray((path + stream + local) / measured - 1)

    # The longest of three has kinks: several starts, the best end.
    starts = [(1.0, hop, mib) for hop in (0.5, 1.0) for mib in (1.0, 2.5)]
    ends = [
        least_squares(residuals, start, bounds=(0, np.inf), loss="soft_l1", f_scale=0.05, xtol=1e-12)
        for start in starts
    ]
    best = min(ends, key=lambda end: (round(float(end.cost), 12), tuple(end.x)))
    return Link(*(float(f"{v:.6g}") for v in best.x))


def intervals(
    counts: Sequence[Counts], latency_us: Sequence[float], groups: Sequence[str], draws: int = 200, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % intervals of the prices: latencies resampled with replacement, within each group (a system) apart.

    They say how well these latencies determine the prices, not how well the form describes another machine.
    """
    rng = np.random.default_rng(seed)
    label, measured = np.asarray(groups), np.asarray(latency_us, float)
    found = []
    for _ in range(draws):
        parts = [np.flatnonzero(label == g) for g in np.unique(label)]
        chosen = np.concatenate([rng.choice(part, len(part)) for part in parts])
        link = calibrate([counts[k] for k in chosen], measured[chosen])
        found.append([link.launch_us, link.hop_us, link.link_us_per_mib])
    low, high = np.quantile(np.array(found), [0.025, 0.975], axis=0)
    names = ("launch_us", "hop_us", "link_us_per_mib")
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


def gbps(link: Link) -> float:
    """The link's rate in GB/s, one way; infinite where bytes cost nothing."""
    return MIB / link.link_us_per_mib / 1e3 if link.link_us_per_mib > 0 else math.inf
