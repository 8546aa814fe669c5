"""The table of `tests/ranks.py` between real MPI ranks on the cpu backend: one mpirun per rank count."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from subprocess import CompletedProcess

import pytest

from fcomm.backends import cpu
from fcomm.protocols import protocols
from fcomm.source import Specialisation
from tests import launch, ranks

DTYPES = {  # all at the smallest world, each at another one too or in the long tests: every kernel has to be compiled
    1: ("float32", "float16", "bfloat16", "int32"),
    2: ("float32", "float16", "bfloat16", "int32"),
    3: ("float32",),
    5: ("bfloat16",),
    8: ("float32", "int32"),
}
LONG_DTYPES = {**DTYPES, 8: DTYPES[2]}


def build_all(n: int, dtypes: tuple[str, ...]) -> None:
    """Compiles every kernel for n ranks on all cores; between ranks it would be one kernel after the other."""
    if n == 1:
        return
    wanted = (*dtypes, "bytes")
    specs = [Specialisation(p, t, n) for p in protocols().values() for t in p.dtypes if t.name in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(cpu.build, specs))


@cache
def table(n: int) -> CompletedProcess[str]:
    build_all(n, DTYPES[n])
    return launch.mpirun(n, ["-m", "tests.ranks", "--calls", "2000", "--dtypes", *DTYPES[n]], timeout=200)


def verdict(done: CompletedProcess[str], name: str) -> str:
    """What the table says of a case: "" if it passed, else why not."""
    lines = done.stdout.splitlines()
    if any(line.startswith(f"PASS {name} ") for line in lines):
        return ""
    return f"exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.mpi
@pytest.mark.parametrize("n", list(DTYPES))
@pytest.mark.parametrize("name", list(ranks.CASES))
def test_case(n: int, name: str) -> None:
    assert not (why := verdict(table(n), name)), why


@pytest.mark.mpi
@pytest.mark.full
@pytest.mark.parametrize("n", [n for n in DTYPES if n > 1])
def test_a_hundred_thousand_calls(n: int) -> None:
    """Any order of sizes, protocols, dtypes and grids on one communicator, with fresh data in every call."""
    build_all(n, LONG_DTYPES[n])
    name = "fresh_data_and_changing_sizes_in_many_calls"
    arguments = ["-m", "tests.ranks", "--cases", name, "--calls", "100000", "--dtypes", *LONG_DTYPES[n]]
    assert not (why := verdict(launch.mpirun(n, arguments, timeout=1200), name)), why


@pytest.mark.mpi
@pytest.mark.full
@pytest.mark.parametrize("n", [2, 3, 8])
def test_every_epilogue(n: int) -> None:
    """On all protocols that can have it, in all float types, on other grids and misaligned arrays."""
    dtypes = ["bfloat16", "float16", "float32"] if n < 8 else ["bfloat16"]
    arguments = ["-m", "tests.ranks", "--cases", "every_epilogue", "--dtypes", *dtypes]
    assert not (why := verdict(launch.mpirun(n, arguments, timeout=400), "every_epilogue")), why
