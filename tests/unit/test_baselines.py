"""What the registry says of baselines: sizes that pick a form, launch shapes, limits, wire bytes, and constants in kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from fcomm import layout
from fcomm.protocols import HOPPER, V2_PUSH_UP_TO, GpuShare, Protocol, protocol, protocols
from tests.unit.native import compile_library

BLACKWELL = GpuShare("10.0", 148, 148)
OWN = [p for p in protocols().values() if p.algorithm.own_contract]
EVERYTHING = frozenset[str]().union(*(p.needs for p in protocols().values()))


def test_all_are_there_and_none_is_picked() -> None:
    forms = {f"custom_ar_v2{f}" for f in ("", ".push", ".pull_one_shot", ".pull_two_shot")}
    barriers = {"barrier.one_shot", "barrier.two_shot", "barrier.all_gather"}
    found = {p.name for p in protocols().values() if p.baseline}
    assert found == forms | barriers | {"sentinel.all_gather", "lamport_fp"}


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=lambda g: g.family)
@pytest.mark.parametrize("n", range(2, 9))
def test_the_size_table_picks_the_form(gpu: GpuShare, n: int) -> None:
    v2, limit = protocol("custom_ar_v2"), V2_PUSH_UP_TO[gpu.family][n]
    assert limit % 16 == 0
    assert v2.at(limit, n, gpu).name == "custom_ar_v2.push"
    assert v2.at(limit + 16, n, gpu).name == "custom_ar_v2.pull_two_shot"
    for nbytes in (16, limit, limit + 16, 64 << 20):
        assert v2.wire_bytes(nbytes, n, gpu) == v2.at(nbytes, n, gpu).wire_bytes(nbytes, n)


def test_a_name_for_one_kernel_stands_for_itself() -> None:
    assert all(p.at(1 << 20, 4) is p for p in protocols().values() if p.algorithm.forms is None)


def test_wire_bytes() -> None:
    size = 64 << 10
    assert protocol("custom_ar_v2.push").wire_bytes(size, 8) == 7 * size
    assert protocol("custom_ar_v2.pull_two_shot").wire_bytes(size, 8) == 2 * 7 * size // 8
    assert protocol("barrier.two_shot").wire_bytes(size, 8) == 2 * 7 * size // 8
    assert protocol("lamport_fp").wire_bytes(size, 4) == protocol("sentinel.all_gather").wire_bytes(size, 4) == 3 * size


def test_launch_shapes_are_the_originals() -> None:
    push = protocol("custom_ar_v2.push").algorithm.grid
    pull = protocol("custom_ar_v2.pull_two_shot").algorithm.grid
    barrier = protocol("barrier.one_shot").algorithm.grid
    assert push
    assert pull
    assert barrier
    assert [push.shape(c, HOPPER) for c in (1, 132 * 128, 132 * 128 + 1, 10**7)] == [
        (132, 128), (132, 128), (132, 256), (132, 1024),
    ]  # fmt: skip
    assert push.shape(1, GpuShare("9.0", 16, 132))[0] == 16
    assert pull.shape(1, HOPPER)[0] == 64
    assert pull.shape(1, BLACKWELL)[0] == 96
    assert [pull.shape(1, GpuShare("9.0", 132 // n, 132))[0] for n in (2, 4, 8)] == [32, 16, 8]
    assert barrier.shape(10**6, HOPPER) == (36, 512)
    assert barrier.shape(600, HOPPER) == (2, 512)


@pytest.mark.parametrize("p", OWN, ids=lambda p: p.name)
def test_limits_are_one_clause_each(p: Protocol) -> None:
    assert p.refusal("float32", 8, EVERYTHING, 4096) is None
    assert p.refusal("float32", 8, EVERYTHING, 4100) == "it takes multiples of 16 bytes, not 4100"
    assert p.refusal("float32", 9, EVERYTHING, 4096) == "it is made for 2 to 8 ranks"
    assert p.refusal("int32", 8, EVERYTHING, 4096) == "it does not handle int32"


def test_constants_are_those_of_the_kernels(tmp_path: Path) -> None:
    text = """
        #include "baseline/custom_ar_v2.cuh"
        extern "C" unsigned facts[] = {fc::v2::kMaxBlocks, unsigned(fc::v2::kWordsPerBlock)};
    """
    blocks, words = (ctypes.c_uint * 2).in_dll(compile_library(text, tmp_path, 2), "facts")
    assert blocks == layout.V2_MAX_BLOCKS
    assert 4 * words == layout.V2_SEMAPHORE_BYTES
    assert all(p.algorithm.max_ranks <= words for p in OWN)
