"""Launch shapes: bounded, lawful, inherited by neighbours, and the same for ours and for baselines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import search
from experiments.search import CHANGES, Change, Shapes
from fcomm.measure import Case
from fcomm.protocols import GpuShare, protocols

SHARE = GpuShare("9.0", 16, 132)
_sizes = st.lists(st.integers(1, 1 << 26), min_size=1, max_size=20, unique=True)


def case(name: str = "one_shot.ll", nbytes: int = 65536, launch: str = "none", ranks: int = 8) -> Case:
    return Case(protocols()[name].collective, name, "bfloat16", nbytes, ranks, "graph", None, launch)


@given(_sizes)
def test_anchors_are_few_and_reach_from_end_to_end(sizes: list[int]) -> None:
    found = search.anchors(sizes)
    assert set(found) <= set(sizes)
    assert len(set(found)) == len(found) == min(search.ANCHORS, len(sizes))
    if len(sizes) > 1:
        assert {min(sizes), max(sizes)} <= set(found)


def test_anchors_in_the_middle_come_first() -> None:
    assert search.anchors([1024 << k for k in range(11)]) == [8192, 131072, 1024, 1 << 20]
    assert search.anchors([4096]) == [4096]


@given(
    st.sampled_from(CHANGES),
    st.tuples(st.integers(1, 600), st.sampled_from([32, 96, 128, 256, 512, 1024])),
    st.sampled_from([512, 1024]),
)
def test_a_changed_shape_is_lawful_and_has_the_threads_that_it_says(
    change: Change, default: tuple[int, int], most: int
) -> None:
    blocks, threads = change.of(default, most)
    assert blocks >= 1
    assert threads % 32 == 0
    assert 32 <= threads <= most
    wanted = default[0] * default[1] * change.grid
    assert wanted <= blocks * threads < wanted + threads


def test_a_change_at_one_size_says_the_same_about_others() -> None:
    half_the_blocks = Change(1.0, 0.5)  # twice the cells a thread
    assert half_the_blocks.of((64, 256), 512) == (32, 256)
    assert half_the_blocks.of((8, 256), 512) == (4, 256)
    assert Change(2.0, 1.0).of((64, 256), 512) == (32, 512)
    assert Change(2.0, 1.0).of((64, 512), 512) == (64, 512)  # its kernel has no larger blocks
    assert Change().of((7, 96), 1024) == (7, 96)


@pytest.mark.parametrize("name", ["one_shot.ll", "two_shot.flag", "barrier.two_shot", "custom_ar_v2", "lamport_fp"])
def test_ours_and_baselines_have_the_same_trials(name: str) -> None:
    found = search.trials(case(name), (16, 256), SHARE)
    most = protocols()[name].at(65536, 8, SHARE).max_threads(8)
    shapes = {c.shape for c in found}
    assert len(shapes) == len(found) == 8  # bounded, each once, none the default
    assert (16, 256) not in shapes
    assert shapes == {change.of((16, 256), most) for change in CHANGES}


def test_what_has_no_kernel_of_its_own_has_no_trials() -> None:
    assert search.trials(Case("all_reduce", "copy", "float32", 64, 1), (0, 0), None) == {}


def test_neighbours_inherit_from_the_nearest_anchor() -> None:
    shapes = Shapes()
    shapes.learn(case(nbytes=4096), {Change(): 10.0, Change(0.5, 1.0): 8.0, Change(2.0, 1.0): 9.0})
    shapes.learn(case(nbytes=1 << 20), {Change(): 10.0, Change(1.0, 0.5): 7.0})

    def shape(nbytes: int, launch: str = "none") -> tuple[int, int] | None:
        found = shapes.tuned(case(nbytes=nbytes, launch=launch), (16, 256), SHARE)
        return None if found is None else found.shape

    assert shape(4096) == shape(1024) == shape(32768) == (32, 128)
    assert shape(131072) == shape(1 << 20) == shape(16 << 20) == (8, 256)
    assert shape(4096, "late") is None  # a launch feature has its own
    assert shapes.tuned(case("one_shot.ll16"), (16, 256), SHARE) is None


def test_what_gains_nothing_keeps_the_default() -> None:
    shapes = Shapes()
    shapes.learn(case(), {Change(): 10.0, Change(0.5, 1.0): 9.9})  # 1 %: not told from noise
    assert shapes.tuned(case(), (16, 256), SHARE) is None
    shapes.learn(case("two_shot.ll"), {Change(): 10.0, Change(0.5, 0.5): 5.0})
    assert shapes.tuned(case("two_shot.ll"), (1, 32), SHARE) is None  # there is nothing to halve


def test_kernels_that_count_by_the_block_have_a_communicator_for_each_grid() -> None:
    from dataclasses import replace

    assert search.fixed_blocks(replace(case("custom_ar_v2.push"), shape=(8, 256)), SHARE) == 8
    assert search.fixed_blocks(replace(case("custom_ar_v2"), shape=(4, 256)), SHARE) == 4
    assert search.fixed_blocks(case("custom_ar_v2.push"), SHARE) is None  # the default is shared by all
    assert search.fixed_blocks(replace(case("barrier.one_shot"), shape=(8, 256)), SHARE) is None
    assert search.fixed_blocks(replace(case(), shape=(8, 256)), SHARE) is None


def test_communicators_are_made_when_they_are_asked_for_and_once() -> None:
    from dataclasses import replace
    from types import SimpleNamespace
    from typing import Any

    from experiments.sweep import Communicators

    made: list[str] = []

    def make(launch: str, variant: str) -> Any:
        made.append(launch)
        return SimpleNamespace(gpu=SHARE, launch=launch, number=len(made))

    comms = Communicators(make)
    first, late = comms.launch("none"), comms.launch("late")
    pushed = case("custom_ar_v2.push")
    assert comms.of(pushed) is comms.of(case()) is comms.of(replace(case(), shape=(3, 96))) is first
    assert comms.of(case(launch="late")) is late
    four = comms.of(replace(pushed, shape=(4, 128)))
    assert comms.of(replace(pushed, shape=(4, 256))) is four  # threads may differ
    assert four not in (first, late, comms.of(replace(pushed, shape=(8, 128))))
    assert made == ["none", "late", "none", "none"]
    assert comms.launches == ["none", "late"]
    comms.drop("late")
    assert comms.launches == ["none"]
    assert len(comms.every()) == 3
