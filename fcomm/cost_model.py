"""The cost model: what a call of each protocol costs, by term, as data that was fitted to this machine's measurements.

The form, for one protocol, message size, world size and launch feature (``docs/cost-model.md`` explains each term)::

    path    = launch + sharers + hops + evidence + second_load + peers + spread + waves + cold
    traffic = wire + rearm + local
    latency = (path^p + traffic^p)^(1/p) x correction

`path` is the chain of steps that depend on each other; `traffic` is the time that all bytes take through what they share.
They overlap: a large message hides the chain, a small one has no traffic to speak of; `p` says how sharply one gives way to the
other. What is counted (rounds, peers, warps, passes, bytes with evidence and padding) comes from the registry and is never
fitted; what is fitted are the prices, none of them negative.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from fcomm import settings
from fcomm.errors import ModelError
from fcomm.grids import default_shape
from fcomm.layout import SlabLayout
from fcomm.protocols import CELL_BYTES, GpuShare, Protocol, derived, protocols, shard_bytes

SCHEMA = 1
"""Version of a model's file; it changes when a coefficient or a count changes its meaning."""

MIB = 1 << 20
WARP = 32
COLD_SHARPNESS = 4
"""How fast arrays stop fitting into the cache: the share that misses is 1 / (1 + (cold_mib / footprint)^4)."""

SHARED: Mapping[str, str] = {
    "hop_us": "µs per dependent hop: a store of one rank becomes visible to another that polls for it",
    "line_us": "µs per phase of ll128: the vote and the second load of a line",
    "cold_us": "µs once: input and output come from memory, since they no longer fit into the cache",
    "cold_mib": "MiB of all ranks' arrays of one call at which half of the `cold_us` is paid",
    "local_us_per_mib": "µs per MiB of input and output, of all ranks that share a GPU",
    "link_us_per_mib": "µs per MiB of wire bytes, evidence included, of all ranks that share a GPU",
    "rearm_us_per_mib": "µs per MiB that is written to set slots back, of all ranks that share a GPU",
    "overlap": "exponent p of the smooth maximum of path and traffic: 1 adds them up, large takes the longer one",
}
"""Prices of the machine, alike for all protocols, with their units."""

LAUNCH: Mapping[str, str] = {
    "launch_us": "µs per launch of a grid, with this launch feature",
    "sharer_us": "µs per launch for each further rank on the same GPU",
}
"""Prices of a launch, for each launch feature."""

OWN: Mapping[str, str] = {
    "evidence_us": "µs per round: making and checking evidence, fences included",
    "peer_us": "µs per round and peer: its stores are issued and its cells polled after the others'",
    "spread_us": "µs per doubling of warps: the slowest of more warps is later",
    "spread_peer_us": "µs per doubling of warps and peer",
    "pass_us": "µs for each pass of a thread after its first",
    "work_us_per_mib": "µs per MiB of wire bytes beyond the link's: packing, unpacking and polling it",
}
"""Prices of a protocol's own."""

TERMS = (
    "launch", "sharers", "hops", "evidence", "second_load", "peers", "spread", "waves", "cold", "wire", "rearm", "local",
    "overlap", "correction",
)  # fmt: skip
"""Terms of a prediction, µs each. Their sum is the latency: `overlap` is negative, `correction` has either sign."""


# ---- what is counted -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one call does, counted from the registry for one launch shape; bytes are one rank's."""

    rounds: int
    peers: int
    line_phases: int
    """Phases whose evidence covers a line of several lanes, so that it takes a second load."""
    warp_doublings: float
    """log2 of the warps that have something to do."""
    extra_passes: int
    """Passes of the busiest thread after its first, over all phases."""
    wire_mib: float
    rearm_mib: float
    local_mib: float
    """Input and output."""


def work(protocol: Protocol, nbytes: int, world_size: int, shape: tuple[int, int]) -> Work:
    """Counts what a call does. nbytes : of one rank's input. shape : blocks, threads."""
    return _work(protocol.name, nbytes, world_size, shape)


@derived
@lru_cache(maxsize=1 << 16)  # by name: hashing a protocol takes longer than a prediction
def _work(name: str, nbytes: int, world_size: int, shape: tuple[int, int]) -> Work:
    protocol = protocols()[name]
    blocks, threads = shape
    n, algorithm, encodings = world_size, protocol.algorithm, protocol.encodings
    shard = nbytes // n if protocol.collective == "reduce_scatter" else shard_bytes(nbytes, n)
    passes = lines = most_items = rearm = 0
    mixed = len(encodings) == 2 and encodings[0] is not encodings[1]
    for k, phase in enumerate(algorithm.phases):
        size = nbytes if phase == "whole" else shard
        if not encodings:  # baselines: the first phase handles one rank's part, a second one all parts
            items = -(-size // CELL_BYTES) * (n if k else 1)
            once = -(-items // (blocks * threads))
        else:
            encoding = encodings[min(k, len(encodings) - 1)]
            parts = n if phase == "shard" else 1
            cells = encoding.cells(size)
            items = cells * parts
            lines += encoding.group_cells > 1
            rearm += (n - 1) * cells * encoding.rearm_bytes_per_cell
            if encoding.max_chunks:  # a chunk is one block's
                chunks = max(1, encoding.chunks(size))
                longest = -(-cells // chunks)
                once = -(-chunks // blocks) * -(-longest * parts // threads)
            elif mixed:  # a tile is one block's; see kernels_cu/algo/two_shot.cuh
                tile = threads * 15 // encoding.group_payload * encoding.group_cells
                once = -(-cells // (tile * blocks)) * -(-min(tile, cells) * parts // threads)
            else:
                once = -(-items // (blocks * threads))
        passes += max(0, once - 1)
        most_items = max(most_items, items)
    warps = min(most_items, blocks * threads) / WARP
    return Work(
        rounds=algorithm.rounds,
        peers=n - 1,
        line_phases=lines,
        warp_doublings=math.log2(warps) if warps > 1 else 0.0,
        extra_passes=passes,
        wire_mib=protocol.wire_bytes(nbytes, n) / MIB,
        rearm_mib=rearm / MIB,
        local_mib=nbytes * outputs_and_input(protocol, n) / MIB,
    )


@derived
@lru_cache(maxsize=256)
def _layout(world_size: int, max_bytes: int) -> SlabLayout:
    return SlabLayout(world_size, max_bytes)


def pieces(protocol: Protocol, nbytes: int, world_size: int, max_bytes: int) -> tuple[tuple[int, int], ...]:
    """(bytes, how many) of the launches that a message takes: one, or several where it is longer than the protocol's slots.

    nbytes and the pieces' bytes : of one rank's input. max_bytes : what the communicator was made for.
    """
    return _pieces(protocol.name, nbytes, world_size, max_bytes)


@derived
@lru_cache(maxsize=1 << 16)
def _pieces(name: str, nbytes: int, world_size: int, max_bytes: int) -> tuple[tuple[int, int], ...]:
    protocol = protocols()[name]
    limit = _layout(world_size, max_bytes).piece_bytes(protocol)
    if protocol.collective == "reduce_scatter":
        limit *= world_size
    full, rest = divmod(nbytes, limit)
    return tuple((size, count) for size, count in ((limit, full), (rest, 1)) if size and count) or ((0, 1),)


# ---- whose model it is -----------------------------------------------------------------------------------------------


def identity(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The machine that a model is for: plain values, alike on all ranks and for any number of ranks placed alike.

    facts : a launch's provenance (`fcomm.provenance.collect`), or what a backend's `describe()` says.
    """
    devices: Sequence[Mapping[str, Any]] = facts.get("devices") or [facts]
    first = devices[0]
    backend = str(facts.get("backend", first.get("backend")))
    if backend != "cuda":
        cores = facts.get("cores", first.get("cores", 1))
        return {"backend": backend, "device": str(facts.get("cpu") or first.get("device")), "cores": int(cores)}
    shared = any(int(d.get("ranks_per_gpu", 1)) > 1 for d in devices)
    links = {str(link) for d in devices for link in d.get("links", ())}
    return {
        "backend": backend,
        "device": " + ".join(sorted({str(d.get("device")) for d in devices})),
        "compute_capability": str(min(str(d.get("compute_capability")) for d in devices)),
        "sms": min(int(d.get("sms_total", 0)) for d in devices),
        "shared_gpus": max(int(d.get("gpus", 1)) for d in devices) if shared else 0,
        "links": sorted(links if shared else links - {"same"}),
        "share_percent": next((str(d["mps_share_percent"]) for d in devices if d.get("mps_share_percent")), None),
    }


def machine_key(machine: Mapping[str, Any]) -> str:
    """A file name's worth of an identity: what it is in words, and a hash."""
    words = "".join(c if c.isalnum() else "-" for c in str(machine.get("device", "machine")).lower())
    return f"{'-'.join(filter(None, words.split('-')))[:40]}-{_sha256(machine)[:12]}"


def model_path(machine: Mapping[str, Any], ranks: Sequence[int]) -> Path:
    """Where this machine's model that was fitted to those world sizes is kept: in the user's cache folder (FCOMM_CACHE_DIR)."""
    fitted_to = f"-n{'.'.join(map(str, ranks))}" if ranks else ""
    return settings.cache_dir() / "models" / f"{machine_key(machine)}{fitted_to}.json"


def kept(machine: Mapping[str, Any]) -> list[Path]:
    """Files of all the models that this machine has in the cache folder, one for each set of world sizes; in no order of worth."""
    one = model_path(machine, ())
    return sorted(one.parent.glob(f"{one.stem}*.json"))


@derived
@cache
def protocols_hash() -> str:
    """Hash of the registry as far as a prediction depends on it: which protocols there are, and what each one sends."""
    described = {
        name: [
            p.collective, list(p.algorithm.phases), p.algorithm.rounds,
            [[e.name, e.group_cells, e.group_payload, e.rearm_bytes_per_cell, e.max_chunks] for e in p.encodings],
        ]
        for name, p in protocols().items()
    }  # fmt: skip
    return _sha256(described)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---- the model -------------------------------------------------------------------------------------------------------

Curve = tuple[tuple[float, float], ...]
"""Points (log2 of bytes, natural logarithm of measured / predicted), ascending; straight lines between, level beyond."""


@dataclass(frozen=True)
class Model:
    """Prices of one machine, fitted (or, for a seed, documented), and what they were fitted to. Plain data; hashable by `digest`.

    Names of tables: of a protocol; "P/n/launch" for a protocol on n ranks with a launch feature.
    """

    machine: dict[str, Any]
    """See `identity`."""
    shared: dict[str, float]
    """`SHARED`."""
    launch: dict[str, dict[str, float]]
    """`LAUNCH`, by launch feature."""
    own: dict[str, dict[str, float]]
    """`OWN`, by protocol."""
    corrections: dict[str, Curve] = field(default_factory=dict)
    """What the form misses, smooth in the logarithm of the size, by "P/n/launch"."""
    shapes: dict[str, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    """Launch shapes of anchor sizes (bytes, blocks, threads), by "P/n/launch"; blocks 0: the default shape was best."""
    resident: dict[str, dict[str, int]] = field(default_factory=dict)
    """Blocks of a rank that were resident at most, by "P/n" and threads per block, where that was less than asked for."""
    sms_per_rank: dict[str, int] = field(default_factory=dict)
    """SMs that a rank had, by world size."""
    max_bytes: int = 1 << 20
    """What the measured communicators were made for; longer messages than their slots take were split."""
    mode: str = "graph"
    """Which latency it predicts."""
    seed: bool = False
    """Documented coefficients, not this machine's."""
    ranks: tuple[int, ...] = ()
    """World sizes that it was fitted to."""
    sizes: tuple[int, int] = (0, 0)
    """Least and largest message that it was fitted to, bytes."""
    dtypes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    """Names of the runs that it was fitted to."""
    source_hash: str = ""
    """Of the kernels that were measured."""
    protocols: str = field(default_factory=protocols_hash)
    """`protocols_hash` of the registry that it was fitted with."""
    report: dict[str, Any] = field(default_factory=dict)
    """Intervals of the coefficients, and errors and regret by what was left out."""

    # ---- asking ----

    def covers(self, protocol: str, world_size: int = 0, launch: str | None = None) -> bool:
        """Whether there are prices for that protocol and launch feature; world_size : must have been measured, unless 0."""
        return (
            protocol in self.own
            and (launch is None or launch in self.launch)
            and (not world_size or world_size in self.ranks)
        )

    def predict(
        self,
        protocol: Protocol,
        nbytes: int,
        world_size: int,
        launch: str = "none",
        shape: tuple[int, int] | None = None,
        correct: bool = True,
        max_bytes: int = 0,
    ) -> dict[str, float]:
        """Microseconds by term (`TERMS`); their sum is the latency of a call.

        nbytes : of one rank's input. shape : blocks and threads; what the model has for that size if not given.
        max_bytes : what the communicator was made for, which decides how a message is split; as measured if not given.
        correct : with the smooth correction. `ModelError` where the model has no prices for the protocol or launch feature.
        """
        gpu = self.gpu(world_size)
        form = protocol if protocol.algorithm.forms is None else protocol.at(nbytes, world_size, gpu or _NO_GPU)
        key = f"{form.name}/{world_size}/{launch}"
        own, prices = self.own.get(form.name), self.launch.get(launch)
        if own is None or prices is None:
            what = f"protocol {form.name}" if own is None else f"dependent launch {launch}"
            raise ModelError(f"the cost model of {self.machine.get('device')} has no coefficients for {what}")
        parts = pieces(form, nbytes, world_size, max_bytes or self.max_bytes)
        grid = shape or self._shape(form, nbytes, parts[0][0], world_size, launch)
        s, sharers = self.shared, self.sharers(world_size)
        terms = dict.fromkeys(TERMS, 0.0)
        total = 0.0
        cold = s["cold_us"] * cold_share(nbytes * outputs_and_input(form, world_size) / MIB * sharers, s["cold_mib"])
        for size, count in parts:
            w = work(form, size, world_size, grid)
            launched = prices["launch_us"]
            others = prices["sharer_us"] * (sharers - 1)
            hops = s["hop_us"] * w.rounds
            evidence = own["evidence_us"] * w.rounds
            second = s["line_us"] * w.line_phases
            peers = own["peer_us"] * w.rounds * w.peers
            spread = (own["spread_us"] + own["spread_peer_us"] * w.peers) * w.warp_doublings
            waves = own["pass_us"] * w.extra_passes
            path = launched + others + hops + evidence + second + peers + spread + waves + cold
            wire = (s["link_us_per_mib"] + own["work_us_per_mib"]) * w.wire_mib * sharers
            rearm = s["rearm_us_per_mib"] * w.rearm_mib * sharers
            local = s["local_us_per_mib"] * w.local_mib * sharers
            latency = smooth_maximum(path, wire + rearm + local, s["overlap"])
            overlap = latency - path - wire - rearm - local
            values = (launched, others, hops, evidence, second, peers, spread, waves, cold, wire, rearm, local, overlap)
            for term, value in zip(TERMS, values, strict=False):  # the correction comes last, and once
                terms[term] += count * value
            total += count * latency
        curve = self.corrections.get(key) if correct else None
        if curve:
            terms["correction"] = total * math.expm1(value_at(curve, math.log2(max(1, nbytes))))
        return terms

    def latency_us(self, protocol: Protocol, nbytes: int, world_size: int, launch: str = "none") -> float:
        """The sum of `predict`'s terms: microseconds of a call."""
        return sum(self.predict(protocol, nbytes, world_size, launch).values())

    def shape(self, protocol: Protocol, nbytes: int, world_size: int, launch: str = "none") -> tuple[int, int] | None:
        """Blocks and threads that were found better than the default, at the nearest size that was searched; None: the default."""
        anchors = self.shapes.get(f"{protocol.name}/{world_size}/{launch}")
        if not anchors:
            return None
        _, blocks, threads = min(anchors, key=lambda a: abs(math.log2(a[0] / max(1, nbytes))))
        return (blocks, threads) if blocks else None

    def sharers(self, world_size: int) -> int:
        """Ranks on the fullest GPU; on the cpu backend one, and each rank beyond the number of cores."""
        if self.machine.get("backend") == "cpu":
            return max(1, 1 + world_size - int(self.machine.get("cores", 1)))
        gpus = int(self.machine.get("shared_gpus", 0))
        return -(-world_size // gpus) if gpus else 1

    def gpu(self, world_size: int) -> GpuShare | None:
        """A rank's share of its GPU; None for the cpu backend."""
        if self.machine.get("backend") == "cpu":
            return None
        total = int(self.machine.get("sms", 0)) or 132
        sms = self.sms_per_rank.get(str(world_size)) or max(1, total // self.sharers(world_size))
        return GpuShare(str(self.machine.get("compute_capability", "9.0")), sms, total)

    def mismatch(self, machine: Mapping[str, Any]) -> str | None:
        """Why this model is not for that machine and this version, in one clause; None if it is."""
        if self.protocols != protocols_hash():
            return "it was fitted with another set of protocols: calibrate anew"
        if self.seed:
            return None
        for key in sorted({*machine, *self.machine}):
            if machine.get(key) != self.machine.get(key):
                return f"it is of another machine ({key} {self.machine.get(key)}, here {machine.get(key)})"
        return None

    def _shape(self, form: Protocol, nbytes: int, piece: int, world_size: int, launch: str) -> tuple[int, int]:
        if self.shapes:
            found = self.shape(form, nbytes, world_size, launch)
            if found:
                return found
        blocks, threads = default_shape(form, piece, world_size, self.gpu(world_size))
        limits = self.resident.get(f"{form.name}/{world_size}")
        limit = limits.get(str(threads)) if limits else None
        if limit is None and self.machine.get("backend") != "cpu":
            limit = self._resident_by_rule(threads, world_size)
        return (min(blocks, limit) if limit else blocks), threads

    def _resident_by_rule(self, threads: int, world_size: int) -> int:
        gpu = self.gpu(world_size)
        return gpu.sms * max(1, RESIDENT_THREADS // threads) if gpu else 0

    # ---- as data ----

    @cached_property
    def _digest(self) -> str:
        return _sha256(self._content())

    def digest(self) -> str:
        """SHA-256 of everything that a prediction depends on; ranks compare it."""
        return self._digest

    def _content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps({name: getattr(self, name) for name in _FIELDS}))
        return found

    def to_json(self) -> str:
        """The model as the text of its file; see `from_json`."""
        body = {"schema": SCHEMA, "sha256": self.digest(), "model": self._content()}
        return json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "the cost model") -> Model:
        """Reads `to_json`'s text; `ModelError` where it is truncated, edited, of another schema or holds impossible values."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise ModelError(f"{name} is not a cost model: it is truncated, or not JSON") from None
        if not isinstance(body, dict) or "schema" not in body:
            raise ModelError(f"{name} is not a cost model: it has no schema version")
        if body["schema"] != SCHEMA:
            raise ModelError(
                f"{name} is of schema {body['schema']}; this version reads schema {SCHEMA}: calibrate anew"
            )
        content = body.get("model")
        if not isinstance(content, dict) or set(content) != set(_FIELDS):
            raise ModelError(f"{name} is damaged: fields are missing or unknown")
        if _sha256(content) != body.get("sha256"):
            raise ModelError(f"{name} was changed: its SHA-256 is not the recorded one")
        model = cls(**{**content, **{k: _tuples(content[k]) for k in ("ranks", "sizes", "dtypes", "runs")},
                       **{k: {key: _tuples(v) for key, v in content[k].items()} for k in ("corrections", "shapes")}})  # fmt: skip
        model.validate(name)
        return model

    def validate(self, name: str = "the cost model") -> None:
        """`ModelError` where a coefficient is missing, negative or not finite, naming it."""
        tables = [("shared", self.shared, SHARED)]
        tables += [(f"launch {k}", v, LAUNCH) for k, v in self.launch.items()]
        tables += [(k, v, OWN) for k, v in self.own.items()]
        for where, table, wanted in tables:
            for key in wanted:
                value = table.get(key)
                if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                    raise ModelError(
                        f"{name} has {value!r} for {key} of {where}: a coefficient is finite and not negative"
                    )
        if self.shared["overlap"] < 1 or self.shared["cold_mib"] <= 0:
            raise ModelError(f"{name} has an overlap below 1, or a cold_mib that is not positive")
        for key, curve in self.corrections.items():
            if not all(math.isfinite(v) for point in curve for v in point):
                raise ModelError(f"{name} has a correction of {key} that is not finite")

    def save(self, path: str | Path) -> Path:
        """Writes the file whole, or leaves what was there; makes its folder. Returns the path; `ModelError` if it cannot."""
        path = Path(path)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                scratch.write_text(self.to_json())
                scratch.replace(path)
            finally:
                scratch.unlink(missing_ok=True)
        except OSError as error:
            raise ModelError(f"cannot write {path} ({error.strerror})") from None
        return path

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """Reads a model's file; `ModelError`, with the path, for anything that is not one."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read the cost model {path} ({getattr(error, 'strerror', 'not text')})") from None
        return cls.from_json(text, f"the cost model {path}")


RESIDENT_THREADS = 1024
"""Threads of a rank on one SM, where no run has shown fewer: kernels of 1,024 threads have 64 registers each."""

_NO_GPU = GpuShare("", 1, 1)
_FIELDS = tuple(name for name in Model.__dataclass_fields__)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def cold_share(footprint_mib: float, cold_mib: float) -> float:
    """The share of input and output that comes from memory, where the arrays of all sharers' calls take that much."""
    return 1.0 / (1.0 + (cold_mib / footprint_mib) ** COLD_SHARPNESS) if footprint_mib > 0 else 0.0


def outputs_and_input(protocol: Protocol, world_size: int) -> float:
    """Bytes of one rank's input and output, for each byte of its input."""
    return (
        1.0
        + {"all_reduce": 1.0, "all_gather": float(world_size), "reduce_scatter": 1.0 / world_size}[protocol.collective]
    )


def smooth_maximum(a: float, b: float, p: float) -> float:
    """(a^p + b^p)^(1/p): a + b for p = 1, the larger one for large p. Both not negative."""
    most = max(a, b)
    return most * ((a / most) ** p + (b / most) ** p) ** (1.0 / p) if most > 0 else 0.0


def value_at(curve: Sequence[tuple[float, float]], x: float) -> float:
    """A curve's value: straight between its points, level beyond its ends."""
    if x <= curve[0][0]:
        return curve[0][1]
    if x >= curve[-1][0]:
        return curve[-1][1]
    k = bisect_right(curve, x, key=lambda point: point[0])
    (x0, y0), (x1, y1) = curve[k - 1], curve[k]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# ---- seeds -----------------------------------------------------------------------------------------------------------


def seed_model(machine: Mapping[str, Any]) -> Model:
    """Documented coefficients for a machine that has no model of its own; see `docs/cost-model.md`, "Seed".

    They are those that were fitted on one NVIDIA H200, so that choices are sensible from the first call on; where each rank has a
    GPU of its own, a hop over NVLink costs what it is estimated to, and the link has its nominal rate.
    """
    own = {name: dict(zip(OWN, prices, strict=True)) for name, prices in _SEED_OWN.items()}
    for name, p in protocols().items():  # what is new in the registry is taken for the dearest of its kind
        if name not in own and p.algorithm.forms is None:
            alike = [own[q.name] for q in protocols().values() if q.name in own and q.collective == p.collective]
            own[name] = {key: max(prices[key] for prices in alike) for key in OWN}
    shared = dict(_SEED_SHARED)
    if machine.get("backend") == "cuda" and not machine.get("shared_gpus"):
        shared |= {"hop_us": 0.8, "link_us_per_mib": 2.3}
    return Model(
        machine=dict(machine), shared=shared, launch={k: dict(v) for k, v in _SEED_LAUNCH.items()}, own=own, seed=True
    )


_SEED_SHARED: Mapping[str, float] = {
    "hop_us": 0.42,
    "line_us": 0.33,
    "cold_us": 0.68,
    "cold_mib": 0.64,
    "local_us_per_mib": 0.21,
    "link_us_per_mib": 0.12,
    "rearm_us_per_mib": 0.2,
    "overlap": 1.5,
}
_SEED_LAUNCH: Mapping[str, Mapping[str, float]] = {
    "none": {"launch_us": 1.0, "sharer_us": 0.26},
    "late": {"launch_us": 0.7, "sharer_us": 0.25},
}
# Prices in the order of OWN.
_SEED_OWN: Mapping[str, tuple[float, float, float, float, float, float]] = {
    "all_gather.flag": (1.6, 0.064, 0.035, 0.064, 1.1, 0.42),
    "all_gather.ll": (0.082, 0.043, 0.056, 0.00066, 0.89, 0.37),
    "all_gather.ll128": (0.088, 0.24, 0.053, 0.017, 1.2, 0.83),
    "all_gather.ll16": (0.11, 0.068, 0.062, 0.0, 1.4, 0.73),
    "barrier.all_gather": (0.048, 0.0054, 0.045, 0.02, 0.41, 1.0),
    "barrier.one_shot": (0.051, 0.0096, 0.037, 0.012, 0.48, 0.66),
    "barrier.two_shot": (0.37, 0.034, 0.0083, 0.0, 0.18, 0.97),
    "custom_ar_v2.pull_one_shot": (0.069, 0.02, 0.016, 0.0055, 0.15, 0.037),
    "custom_ar_v2.pull_two_shot": (0.32, 0.015, 0.0085, 0.0, 0.0, 0.0),
    "custom_ar_v2.push": (0.31, 0.065, 0.029, 0.0, 0.33, 0.66),
    "lamport_fp": (0.11, 0.022, 0.054, 0.012, 0.34, 0.62),
    "one_shot.flag": (2.1, 0.0, 0.069, 0.05, 1.0, 0.49),
    "one_shot.lamport": (0.15, 0.065, 0.041, 0.0013, 1.0, 0.45),
    "one_shot.lamport16": (0.14, 0.058, 0.038, 0.0022, 1.0, 0.46),
    "one_shot.ll": (0.096, 0.036, 0.048, 0.0045, 0.66, 0.32),
    "one_shot.ll128": (0.11, 0.24, 0.057, 0.01, 1.1, 0.66),
    "one_shot.ll16": (0.15, 0.058, 0.06, 0.0018, 1.2, 0.45),
    "reduce_scatter.flag": (1.8, 0.023, 0.073, 0.039, 0.73, 1.4),
    "reduce_scatter.lamport": (0.34, 0.044, 0.081, 0.0, 0.99, 0.65),
    "reduce_scatter.lamport16": (0.37, 0.025, 0.077, 0.0, 0.85, 0.68),
    "reduce_scatter.ll": (0.21, 0.021, 0.089, 0.00012, 0.85, 0.43),
    "reduce_scatter.ll128": (0.39, 0.12, 0.073, 0.018, 1.8, 0.83),
    "reduce_scatter.ll16": (0.39, 0.021, 0.094, 0.0, 0.89, 0.72),
    "sentinel.all_gather": (0.33, 0.041, 0.033, 0.0, 0.31, 0.85),
    "two_shot.flag": (2.1, 0.002, 0.078, 0.046, 0.58, 1.4),
    "two_shot.lamport": (0.2, 0.073, 0.067, 0.0079, 0.85, 0.65),
    "two_shot.lamport+ll128": (0.33, 0.022, 0.065, 0.063, 0.7, 1.3),
    "two_shot.lamport16": (0.19, 0.064, 0.067, 0.0077, 0.83, 0.66),
    "two_shot.lamport16+ll128": (0.35, 0.012, 0.071, 0.062, 0.68, 1.3),
    "two_shot.lamport16+ll16": (0.37, 0.022, 0.057, 0.058, 0.5, 1.2),
    "two_shot.ll": (0.14, 0.029, 0.08, 0.0048, 0.82, 0.45),
    "two_shot.ll+ll128": (0.29, 0.0, 0.058, 0.051, 0.7, 1.5),
    "two_shot.ll128": (0.22, 0.1, 0.087, 0.023, 1.3, 0.54),
    "two_shot.ll16": (0.17, 0.05, 0.086, 0.0021, 0.71, 0.58),
}
