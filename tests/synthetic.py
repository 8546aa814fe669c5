"""Runs made up for tests: times that follow a rule, on disk like measured ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fcomm.measure import Case
from fcomm.protocols import protocols
from fcomm.records import Recorder

GPU = {
    "hostname": "here", "backend": "cuda", "world_size": 4, "ranks_per_device": 4, "cores": 8, "source_hash": "a",
    "devices": [{"device": "NVIDIA H200", "uuid": "GPU-1", "mps": True}],
}  # fmt: skip
CPU = {
    "hostname": "here",
    "backend": "cpu",
    "world_size": 4,
    "cores": 2,
    "source_hash": "a",
    "devices": [{"device": "a CPU"}],
}

ALL_REDUCE = {  # protocol, (input, shape): us at 0 bytes, us for each KiB
    ("one_shot.ll", "array", None): (1.6, 0.040),
    ("one_shot.lamport16", "array", None): (1.8, 0.030),
    ("two_shot.ll", "array", None): (2.9, 0.008),
    ("two_shot.lamport16", "array", None): (3.0, 0.006),
    ("barrier.two_shot", "staging", None): (5.0, 0.012),
    ("custom_ar_v2", "array", None): (2.0, 0.030),
    ("custom_ar_v2", "array", (8, 512)): (1.9, 0.030),
    ("custom_ar_v2.pull_one_shot", "staging", None): (4.0, 0.005),
    ("lamport_fp", "array", None): (1.9, 0.032),
}
ALL_GATHER = {
    ("all_gather.ll", "array", None): (1.5, 0.03),
    ("all_gather.flag", "array", None): (2.5, 0.02),
    ("barrier.all_gather", "staging", None): (4.0, 0.02),
    ("sentinel.all_gather", "array", None): (2.0, 0.03),
}

Microseconds = Callable[[Case, int], float]
"""Of a case in a launch."""


def rule(kinds: dict[tuple[str, str, Any], tuple[float, float]]) -> Microseconds:
    """Latency by protocol and size, growing with ranks, less with dependent launch."""
    by_name = {(name, shape): us for (name, _, shape), us in kinds.items()}

    def us(case: Case, launch: int) -> float:
        fixed, per_kib = by_name.get((case.protocol, case.shape), (1.0, 0.004))
        gain = {"none": 0.0, "late": 0.3, "early": 0.4}[case.dependent_launch]
        return fixed * (1 + 0.15 * case.ranks) - gain + per_kib * case.nbytes / 1024

    return us


def make(
    out: Path,
    kinds: dict[tuple[str, str, Any], tuple[float, float]] | None = None,
    us: Microseconds | None = None,
    collective: str = "all_reduce",
    sizes: Sequence[int] = (1024, 65536, 1 << 20),
    ranks: Sequence[int] = (2, 4),
    features: Sequence[str] = ("none", "late"),
    launches: int = 1,
    calls: int = 12,
    spread: float = 0.01,
    provenance: dict[str, Any] | None = None,
    mode: str = "graph",
    finish: bool = True,
    l2_gbps: float | None = 1500.0,
    floors: bool = True,
    dtype: str = "bfloat16",
    delays_us: Sequence[float | None] = (None,),
    **facts: Any,
) -> Path:
    """Writes a run; its folder. spread : relative, of the calls. facts : columns of all cases."""
    kinds = kinds or ALL_REDUCE
    us = us or rule(kinds)
    provenance = provenance or GPU
    emulated = provenance["backend"] == "cpu"
    cases = [
        Case(collective, name, dtype, nbytes, n, mode, shape, feature, where, delay_us)
        for n in ranks
        for nbytes in sizes
        for feature in features
        for delay_us in delays_us
        for name, where, shape in [*kinds, *([("floor", "array", (2, 256))] if floors else [])]
        if name == "floor" or protocols()[name].refusal(dtype, n, protocols()[name].needs, nbytes) is None
    ]
    plan = [
        {
            "blocks": 2, "threads": 256, "placement": f"{c.ranks} ranks on 1 GPU", "sms_per_rank": 132 // c.ranks, "warmup": 1,
            "checked_calls": 4, "wrong": 0, "status": "measured", "reason": "", "emulated": emulated, "time_sliced": False,
            "l2_gbps": None if emulated else l2_gbps, "planned": calls, **c.columns(), "case": k, **facts,
        }
        for k, c in enumerate(cases)
    ]  # fmt: skip
    if emulated:
        for row in plan:
            row["sms_per_rank"] = None
    recorder = Recorder.create(out, "here", str(provenance["backend"]), {"seed": 0})
    for launch in range(launches):
        if launch:
            recorder = Recorder.reopen(recorder.path)
        recorder.begin(provenance)
        recorder.plan(plan)
        noise = np.random.default_rng(launch)
        for row, case in zip(plan, cases, strict=True):
            if row["status"] != "measured":
                continue
            ns = 1000 * us(case, launch) * (1 + spread * np.abs(noise.standard_normal((calls, 1))))
            # The last rank is the slowest; others are a little earlier.
            ranks_ns = ns * np.linspace(0.9, 1.0, case.ranks)
            recorder.append(row["case"], np.maximum(1, ranks_ns.round()).astype(np.int64))
        if finish or launch + 1 < launches:
            recorder.finish()
        recorder.close()
    return recorder.path
