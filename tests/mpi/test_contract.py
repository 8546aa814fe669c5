"""The table of `tests/ranks.py` between real MPI ranks on the cpu backend: one mpirun per rank count."""

from __future__ import annotations

from functools import cache
from subprocess import CompletedProcess

import pytest

from tests import launch, ranks

RANK_COUNTS = (1, 2, 3, 4, 8)


@cache
def table(n: int) -> CompletedProcess[str]:
    return launch.mpirun(n, ["-m", "tests.ranks", "--backend", "cpu"], timeout=200)


def verdict(done: CompletedProcess[str], name: str) -> str:
    """What the table says of a case: "" if it passed, else why not."""
    lines = done.stdout.splitlines()
    if any(line.startswith(f"PASS {name} ") for line in lines):
        return ""
    return f"exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.mpi
@pytest.mark.parametrize("n", RANK_COUNTS)
@pytest.mark.parametrize("name", list(ranks.CASES))
def test_case(n: int, name: str) -> None:
    assert not (why := verdict(table(n), name)), why
