"""Compiles the suite's kernels on all cores, into the cache where its ranks look: ``python -m tests.gpu.prewarm``.

Compiling is most of the suite's time, and two ranks would do it two at a time. The kernels are only loaded, never launched.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from contextlib import suppress

import fcomm
from fcomm.backends import cuda
from fcomm.dtypes import REDUCIBLE
from fcomm.protocols import protocol
from fcomm.source import Specialisation

MOST_PROCESSES = 16
TRIGGERED = (
    "one_shot.ll", "one_shot.lamport16", "one_shot.flag", "one_shot.ll128", "two_shot.ll", "two_shot.lamport16",
    "two_shot.flag", "barrier.two_shot",
)  # fmt: skip
"""Every kernel that has a trigger, and each kind of wait."""


def kernels(world_size: int, dtypes: Sequence[str]) -> list[Specialisation]:
    """What the cases need that run every protocol."""
    plain = [
        Specialisation(p, t, world_size, aligned)
        for p in fcomm.protocols().values()
        for t in p.dtypes
        if p.algorithm.moves_bytes or t.name in dtypes
        for aligned in ((True,) if p.baseline and not p.algorithm.moves_bytes else (True, False))
    ]
    triggered = [
        Specialisation(protocol(name), REDUCIBLE["bfloat16"], world_size, True, launch)
        for name in TRIGGERED
        for launch in ("late", "early")
    ]
    return plain + triggered


def shares(plans: Sequence[str], most: int) -> list[list[tuple[str, str]]]:
    """Name and source of each kernel, in as many lists as processes are to compile them. plans : "N:DTYPE,..."."""
    apart = [plan.partition(":") for plan in plans]
    texts = [(spec.name, spec.text()) for n, _, names in apart for spec in kernels(int(n), names.split(","))]
    count = min(most, len(texts))
    return [texts[k::count] for k in range(count)]


def _load(share: Sequence[tuple[str, str]]) -> None:
    for name, text in share:
        with suppress(Exception):  # the case that needs it says what is wrong
            cuda._load(0, name, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="+", metavar="N:DTYPE,...", help="rank counts, each with its element types")
    work = shares(parser.parse_args().plans, min(MOST_PROCESSES, os.cpu_count() or 1))
    with multiprocessing.get_context("spawn").Pool(len(work)) as pool:
        pool.map(_load, work, chunksize=1)


if __name__ == "__main__":
    main()
