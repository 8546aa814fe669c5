"""Emulated links: how fast the memory between ranks is made to look, for kernels that were compiled for it (``link.cuh``).

What the emulation does is said in ``kernels_cu/link.cuh``, what may be concluded from it in ``docs/links.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fcomm.errors import ArgumentError

MOST_LATENCY_US = 1000.0
COST_BITS = 24
"""Kernels are told 2^-24 ticks a byte."""


@dataclass(frozen=True)
class Link:
    """One rank's link to its peers, in each direction.

    latency_us : what a store takes longer than it does without the emulation, one way; 0 to 1000 microseconds. gbps : 10^9 bytes
    per second that the rank sends at most, over all peers; None: as many as there are. `ArgumentError` for anything else.
    """

    latency_us: float
    gbps: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.latency_us <= MOST_LATENCY_US:
            raise ArgumentError(
                f"a link's latency_us is between 0 and {MOST_LATENCY_US:g} microseconds, not {self.latency_us:g}"
            )
        if self.gbps is not None and not 1e-3 <= self.gbps <= 1e5:
            raise ArgumentError(f"a link's gbps is between 0.001 and 100000 GB/s, not {self.gbps:g}")

    def __str__(self) -> str:
        return f"latency_us={self.latency_us:g}" + ("" if self.gbps is None else f",gbps={self.gbps:g}")

    def ticks(self, ticks_per_us: float) -> tuple[int, int]:
        """Latency in ticks, and 2^-24 ticks a byte (0: any bandwidth), of a clock with so many ticks a microsecond."""
        cost = 0 if self.gbps is None else max(1, round(ticks_per_us / (self.gbps * 1e3) * (1 << COST_BITS)))
        return round(self.latency_us * ticks_per_us), cost

    def write(self, params: NDArray[np.void], ticks_per_us: float, slab_bytes: int, own_us: float = 0.0) -> None:
        """Tells a kernel's argument (`layout.params_dtype` with a link).

        own_us : microseconds that the emulation's own instructions add to a store's way; taken off the latency.
        """
        latency, cost = replace(self, latency_us=max(0.0, self.latency_us - own_us)).ticks(ticks_per_us)
        words = params["link"]
        words["slab_bytes"], words["latency"], words["cost"] = slab_bytes, latency, cost


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
    """The link that ``latency_us=0.7,gbps=450``, either of the two, or a preset's name asks for; `ArgumentError` for others."""
    if text in PRESETS:
        return PRESETS[text]
    values: dict[str, float] = {}
    for item in text.split(","):
        found = re.fullmatch(r"\s*(latency_us|gbps)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*", item)
        if found is None or found[1] in values:
            raise ArgumentError(
                f"{text!r} is not a link: use latency_us=0.7,gbps=450 (both as numbers), or one of {', '.join(PRESETS)}"
            )
        values[found[1]] = float(found[2])
    return Link(values.get("latency_us", 0.0), values.get("gbps"))
