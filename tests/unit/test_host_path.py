"""The host's way to a launch, without a GPU: what reaches the driver, and how little happens on the way there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from fcomm.errors import ArgumentError, HangError
from fcomm.layout import CALL_WORDS
from tests import host_path


def launched() -> int:
    return ctypes.c_int.in_dll(host_path.launcher(), "calls").value


def words(comm: Any) -> list[tuple[int, ...]]:
    """The words of their own of each plan's last launch."""
    return [tuple(int(plan.params[w][0]) for w in CALL_WORDS) for plan in comm._plans.values()]


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("cupy.cuda.runtime.streamIsCapturing", lambda stream: False)
    return host_path.communicator()


def test_each_call_is_a_launch_with_the_calls_own_words(comm: Any) -> None:
    x, out = host_path.array((1024,), np.float16, 0x100000), host_path.array((1024,), np.float16, 0x200000)
    other = host_path.array((1024,), np.float16, 0x280000)
    before = launched()
    call = comm.prepare("all_reduce", x, out)
    assert launched() == before
    assert call() is out
    assert comm.all_reduce(x, other) is other
    assert launched() == before + 2
    ((source, target, nbytes, stride, part),) = words(comm)  # one plan for both
    assert (source, target, nbytes, stride, part) == (0x100000, 0x280000, 2048, 256, 256)
    call()
    assert words(comm)[0][1] == 0x200000


def test_the_configuration_follows_stream_and_grid(comm: Any) -> None:
    x, out = host_path.array((1024,), np.float16, 0x100000), host_path.array((1024,), np.float16, 0x200000)
    comm.all_reduce(x, out)
    (packed,) = comm.backend._packed.values()
    assert packed.config.stream == 7
    first = comm.backend._current
    comm.all_reduce(x, out)
    assert comm.backend._current is first
    comm.backend._cupy.cuda.current = SimpleNamespace(ptr=9)
    comm.all_reduce(x, out)
    assert packed.config.stream == 9
    call = comm.prepare("all_reduce", x, out, stream=11, shape=(3, 96))
    call()
    own = comm.backend._packed[id(call._plan.params)]
    assert (own.config.grid_x, own.config.block_x, own.config.stream) == (3, 96, 11)
    comm.all_reduce(x, out)  # the other plan's is as it was
    assert packed.config.stream == 9


def test_an_expired_wait_is_seen_before_the_next_launch(comm: Any) -> None:
    x, out = host_path.array((1024,), np.float16, 0x100000), host_path.array((1024,), np.float16, 0x200000)
    call = comm.prepare("all_reduce", x, out)
    before = launched()
    comm._errors["valid"][0] = 1
    for again in (call, call, lambda: comm.all_reduce(x, out)):
        with pytest.raises(HangError, match="gave up waiting"):
            again()
    assert launched() == before


def test_a_result_that_overlaps_in_part_is_still_refused(comm: Any) -> None:
    x = host_path.array((1024,), np.float16, 0x100000)
    assert comm.all_reduce(x, x) is x
    for address in (0x100000 + 16, 0x100000 - 16):
        with pytest.raises(ArgumentError, match="overlaps the input in part"):
            comm.all_reduce(x, host_path.array((1024,), np.float16, address))
    with pytest.raises(ArgumentError, match="no collective 'all_sum'"):
        comm.prepare("all_sum", x, x)


def steps(call: Callable[[], object]) -> int:
    """Functions that a call enters, Python's and C's: what host time is made of, and the same on every machine."""
    count = 0

    def count_one(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    call()
    sys.setprofile(count_one)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 1  # of the call that ends the counting


@pytest.mark.parametrize("launch", ["none", "late"])
def test_the_way_to_a_launch_is_short(monkeypatch: pytest.MonkeyPatch, launch: str) -> None:
    """It was 14, 83 and 85 with a reduction by NumPy and a list of all collectives made anew in every call."""
    monkeypatch.setattr("cupy.cuda.runtime.streamIsCapturing", lambda stream: False)
    prepared, eager, allocating = host_path.calls(launch).values()
    of_the_grid_before = int(launch != "none")  # whether both fit
    assert steps(prepared) <= 13 + of_the_grid_before
    assert steps(eager) <= 42 + of_the_grid_before
    assert steps(allocating) <= 44 + of_the_grid_before
