"""Emulated links: how fast the memory between ranks is made to look, for kernels that were compiled for it (``link.cuh``).

It has two forms. In the first the sender is held back (``kernels_cu/link.cuh``), in the second blocks of their own forward what the
others store (``kernels_cu/forward.cuh``). What may be concluded from which is said in ``docs/links.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fcomm.errors import ArgumentError
from fcomm.protocols import CELL_BYTES

FORMS = ("held", "forwarded")
"""Forms of the emulation. Kernels know them by their index here and one more (FC_LINK)."""
MOST_LATENCY_US = 1000.0
COST_BITS = 24
"""Kernels are told 2^-24 ticks a byte."""
FORWARDED_TICKS_PER_US = 1000.0
"""Of the clock that all SMs share, by which the second form goes."""

# As in kernels_cu/forward.cuh.
RING = 2048
"""Entries of a queue."""
QUEUES_HEAD_BYTES = 128
QUEUE_BYTES = 128 + RING * (2 * CELL_BYTES + 4)
"""Of one working block: a head, the entries, which of them were taken."""
MOST_SLAB_BYTES = 4 << 32
"""An entry tells its place in a slab in 32 bits, in words."""


@dataclass(frozen=True)
class Link:
    """One rank's link to its peers, in each direction.

    latency_us : what a store takes longer than it does without the emulation, one way; 0 to 1000 microseconds. gbps : 10^9 bytes
    per second that the rank sends at most, over all peers; None: as many as there are. form : one of `FORMS`. jitter_us : up to so
    many microseconds more for each store, by chance, which reorders them; 0 to 1000. seed : of that chance, a number below 2^32.
    The last two are for the second form only. `ArgumentError` for anything else.
    """

    latency_us: float
    gbps: float | None = None
    form: str = FORMS[0]
    jitter_us: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ArgumentError(f"a link's form is one of {', '.join(FORMS)}, not {self.form!r}")
        if self.form != "forwarded" and (self.jitter_us or self.seed):
            raise ArgumentError(
                "a link has jitter_us and seed with form=forwarded only: the other form keeps the order"
            )
        if not 0 <= self.jitter_us <= MOST_LATENCY_US:
            raise ArgumentError(
                f"a link's jitter_us is between 0 and {MOST_LATENCY_US:g} microseconds, not {self.jitter_us:g}"
            )
        if not 0 <= self.seed < 1 << 32:
            raise ArgumentError(f"a link's seed is between 0 and {(1 << 32) - 1}, not {self.seed}")
        if not 0 <= self.latency_us <= MOST_LATENCY_US:
            raise ArgumentError(
                f"a link's latency_us is between 0 and {MOST_LATENCY_US:g} microseconds, not {self.latency_us:g}"
            )
        if self.gbps is not None and not 1e-3 <= self.gbps <= 1e5:
            raise ArgumentError(f"a link's gbps is between 0.001 and 100000 GB/s, not {self.gbps:g}")

    def __str__(self) -> str:
        told = [f"latency_us={self.latency_us:g}"]
        if self.gbps is not None:
            told.append(f"gbps={self.gbps:g}")
        if self.form != FORMS[0]:
            told.append(f"form={self.form}")
        if self.jitter_us:
            told.append(f"jitter_us={self.jitter_us:g}")
        if self.seed:
            told.append(f"seed={self.seed}")
        return ",".join(told)

    @property
    def compiled(self) -> int:
        """What kernels with this form of the emulation are compiled with (FC_LINK)."""
        return FORMS.index(self.form) + 1

    @property
    def forwarded(self) -> bool:
        return self.form == "forwarded"

    def blocks(self, working: int) -> int:
        """Blocks of a grid of which so many work: each has another one for its link, where stores are forwarded."""
        return working * 2 if self.forwarded else working

    def ticks(self, ticks_per_us: float) -> tuple[int, int]:
        """Latency in ticks, and 2^-24 ticks a byte (0: any bandwidth), of a clock with so many ticks a microsecond."""
        cost = 0 if self.gbps is None else max(1, round(ticks_per_us / (self.gbps * 1e3) * (1 << COST_BITS)))
        return round(self.latency_us * ticks_per_us), cost

    def write(
        self, params: NDArray[np.void], ticks_per_us: float, slab_bytes: int, own_us: float = 0.0, queues: int = 0
    ) -> None:
        """Tells a kernel's argument (`layout.params_dtype` with a link).

        own_us : microseconds that the emulation's own instructions add to a store's way; taken off the latency. queues : address
        of `queues_bytes` of this rank's memory, of the second form.
        """
        latency, cost = replace(self, latency_us=max(0.0, self.latency_us - own_us)).ticks(ticks_per_us)
        words = params["link"]
        words["slab_bytes"], words["latency"], words["cost"] = slab_bytes, latency, cost
        if self.forwarded:
            words["jitter"], words["seed"] = round(self.jitter_us * ticks_per_us), self.seed
            words["queues"] = queues


def queues_bytes(working: int) -> int:
    """Bytes of the queues of a grid of so many working blocks. All zero at first, and for the grids of one channel."""
    return QUEUES_HEAD_BYTES + working * QUEUE_BYTES


PRESETS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink3": Link(0.7, 300),
        "nvlink4": Link(0.7, 450),
        "nvlink5": Link(0.7, 900),
        "pcie4": Link(1.0, 32),
        "pcie5": Link(1.0, 64),
    }
)
"""Named links. GB/s are the vendors' figures for one GPU and one direction (A100, H100 and H200, B200; 16 lanes of PCIe), which
no payload reaches; latencies are round numbers of the right size and nobody's measurement."""


def parse(text: str) -> Link:
    """The link that ``latency_us=0.7,gbps=450``, either of the two, or a preset's name asks for; behind either
    ``form=forwarded`` with ``jitter_us=2,seed=1`` where wanted. `ArgumentError` for others.
    """
    first, *rest = (item.strip() for item in text.split(","))
    preset = PRESETS.get(first)
    if preset is not None and not rest:
        return preset
    values: dict[str, str] = {}
    for item in [first, *rest] if preset is None else rest:
        found = re.fullmatch(
            r"(?:(latency_us|gbps|jitter_us)\s*=\s*(\d+(?:\.\d*)?|\.\d+)|(seed)\s*=\s*(\d+)|(form)\s*=\s*(\w+))", item
        )
        name, value = (None, None) if found is None else [group for group in found.groups() if group]
        if name is None or value is None or name in values or (preset and name in ("latency_us", "gbps")):
            raise ArgumentError(
                f"{text!r} is not a link: use latency_us=0.7,gbps=450 (both as numbers), or one of {', '.join(PRESETS)}; behind it, "
                "where wanted, form=forwarded and with that jitter_us=2,seed=1"
            )
        values[name] = value
    gbps = float(values["gbps"]) if "gbps" in values else None
    link = preset or Link(float(values.get("latency_us", 0.0)), gbps)
    return replace(
        link,
        form=values.get("form", FORMS[0]),
        jitter_us=float(values.get("jitter_us", 0.0)),
        seed=int(values.get("seed", 0)),
    )
