"""Groups that are not MPI's, and the memory that ranks of the cpu backend share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcomm import bootstrap
from fcomm.backends import cpu
from fcomm.errors import ArgumentError, SetupError
from fcomm.group import as_group


class Scripted:
    """One of two ranks; what the other one says is known beforehand."""

    rank, size = 0, 2

    def __init__(self, other: Any = None) -> None:
        self._other = other

    def allgather(self, value: Any) -> list[Any]:
        return [value, self._other]

    def barrier(self) -> None:
        """Both are here."""


def test_a_group_that_says_who_is_who_is_taken_as_it_is() -> None:
    group = Scripted()
    assert as_group(group) is group


def test_one_that_does_not_is_numbered_by_an_exchange() -> None:
    class Second:
        def allgather(self, value: Any) -> list[Any]:
            return ["first", value, "third"]

        def barrier(self) -> None: ...

    group = as_group(Second())
    assert (group.rank, group.size) == (1, 3)
    assert group.allgather(5) == ["first", 5, "third"]


@pytest.mark.parametrize("nothing", [None, 3, object(), np.ones(2)])
def test_what_is_no_group_is_told_what_one_is(nothing: object) -> None:
    with pytest.raises(ArgumentError, match=r"is no way for ranks to talk: pass an mpi4py communicator, .* allgather"):
        as_group(nothing)


def test_ranks_on_two_machines() -> None:
    with pytest.raises(SetupError, match="the 2 ranks are not all on one machine"):
        bootstrap.check_node(Scripted(other="another machine's"))
    bootstrap.check_node(Scripted(other=bootstrap._machine_id()))


def test_shared_memory_is_zeroed_and_leaves_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "SHARED_FOLDER", tmp_path)
    memory = cpu.share_memory(Scripted(), 8192)
    assert memory[:] == bytes(8192)
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_shared_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "SHARED_FOLDER", tmp_path)
    with pytest.raises(SetupError, match=r"cannot share 1099511627776 MiB in .*: make room there .*[(]rank 0[)]"):
        cpu.share_memory(Scripted(), 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_nothing_starts_mpi_that_does_not_need_it() -> None:
    """An engine's processes may have been started by something that an MPI library takes for a launcher of its own."""
    code = (
        "import sys, fcomm.communicator, fcomm.backends.cpu, fcomm.backends.cuda, fcomm.bootstrap; "
        "assert 'mpi4py' not in sys.modules; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
