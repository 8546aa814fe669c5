"""Epilogues without ranks: what can be declared, which protocols can have one, what is compiled, and what is not changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fcomm import checks, machine_code
from fcomm.dtypes import BFLOAT16, FLOAT32
from fcomm.epilogue import (
    MOST_CELLS,
    Epilogue,
    Fused,
    Separate,
    add_residual,
    add_rms_norm,
    cells_held,
    row_shape,
)
from fcomm.errors import ArgumentError, SetupError
from fcomm.layout import EPILOGUE_DTYPE, params_dtype
from fcomm.machine_code import Cubin, compile_specialisation, compile_text, slot_faults, slot_listing
from fcomm.protocols import protocol, protocols
from fcomm.source import MAX_THREADS, Specialisation, flatten
from tests.ranks import page_example

ROWS = ("one_shot.ll", "one_shot.lamport", "one_shot.lamport16")


@pytest.fixture(scope="module")
def nvrtc() -> None:
    try:
        machine_code.nvrtc()
    except SetupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def nvdisasm(nvrtc: None) -> None:
    try:
        machine_code.nvdisasm()
    except SetupError as error:
        pytest.skip(str(error))


# ---- declaring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "Norm"}, "small letters"),
        ({"reads": ("2nd",)}, "small letters"),
        ({"reads": ("a",), "writes": ("a",)}, "two things called a"),
        ({"scalars": ("values",)}, "two things called values"),
        ({"reads": tuple(f"a{k}" for k in range(9))}, "9 arrays and 0 scalars; up to 8 and 5"),
        ({"scalars": tuple(f"s{k}" for k in range(6))}, "0 arrays and 6 scalars"),
        ({"row_vectors": ("w",)}, "by_row=True"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_what_cannot_be_declared(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Epilogue(**{"name": "mine", "code": "", **changes})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "lacks residual, weight, residual_out, epsilon: it takes"),
        ({"residual": 1, "weight": 1, "residual_out": 1, "epsilon": 1, "scale": 2}, "knows no scale: it takes"),
        ({"residual": 1, "weight": 1, "residual_out": 1, "epsilon": "small"}, "epsilon must be numbers"),
    ],
)
def test_what_it_cannot_be_called_with(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        add_rms_norm(**given)


def test_another_text_is_another_kernel() -> None:
    one, other = Epilogue("mine", "values.map(a);"), Epilogue("mine", "values.map(b);")
    names = {Specialisation(protocol("one_shot.ll"), FLOAT32, 2, fused=Fused(e)).name for e in (one, other)}
    assert len(names | {Specialisation(protocol("one_shot.ll"), FLOAT32, 2).name}) == 3
    assert Fused(add_rms_norm, 1).name != Fused(add_rms_norm, 2).name


# ---- which protocols ------------------------------------------------------------------------------------------------


def test_which_protocols_can_have_one() -> None:
    """As the page's table says."""
    elements = [p.name for p in protocols().values() if add_residual.refusal(p) is None]
    encodings = ("ll", "ll16", "ll128", "lamport", "lamport16", "flag")
    assert elements == [f"{a}.{e}" for a in ("one_shot", "two_shot") for e in encodings]
    assert [p.name for p in protocols().values() if add_rms_norm.refusal(p) is None] == list(ROWS)


@pytest.mark.parametrize(
    ("row_cells", "threads", "held"), [(1, 512, 1), (512, 512, 1), (513, 512, 2), (1100, 512, 4), (4096, 512, 8)]
)
def test_cells_that_a_thread_holds(row_cells: int, threads: int, held: int) -> None:
    assert cells_held(row_cells, threads) == held


def test_a_row_that_no_block_can_hold() -> None:
    with pytest.raises(ArgumentError, match="a row of 4097 cells is too long for blocks of 512 threads"):
        cells_held(4097, 512)


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("ranks", [2, 8])
def test_default_shapes_hold_every_row(ranks: int, emulated: bool) -> None:
    for row_cells in (1, 31, 33, 500, 1000, 1025, MOST_CELLS * MAX_THREADS):
        shape = row_shape(3, row_cells, ranks, emulated)
        held = cells_held(row_cells, shape.threads)
        assert shape.threads % 32 == 0
        assert shape.threads <= Fused(add_rms_norm, held).max_threads(ranks)
        assert held * shape.threads >= row_cells
        assert shape.blocks == (2 if emulated else 3)
    assert row_shape(3, 1000, 8, False).threads == 1024
    assert row_shape(3, 1000, 9, False).threads == 512


# ---- compiling ------------------------------------------------------------------------------------------------------


SOME = [("one_shot.ll", "sm_80", 1, 4), ("one_shot.lamport16", "sm_90", 1, 8)]
ALL = [
    (name, arch, cells, n)
    for name in ROWS
    for arch in ("sm_80", "sm_90", "sm_100")
    for cells in (1, 2, 4)
    for n in (2, 4, 5, 8)
]


def check_rows(name: str, arch: str, cells: int, n: int) -> None:
    spec = Specialisation(protocol(name), BFLOAT16, n, launch="late", fused=Fused(add_rms_norm, cells))
    check_spills(compile_specialisation(spec, arch), cells == 1 and n > 6)


def check_spills(made: Cubin, few: bool) -> None:
    """No local memory; few : up to a few words of it, for twice the threads."""
    if few:
        assert made.spill_bytes <= 32
        assert made.stack_bytes <= 16
    else:
        assert made.faults() == []


@pytest.mark.parametrize(("name", "arch", "cells", "n"), SOME)
def test_rows_compile_and_do_not_spill(nvrtc: None, name: str, arch: str, cells: int, n: int) -> None:
    check_rows(name, arch, cells, n)


@pytest.mark.full
@pytest.mark.parametrize(("name", "arch", "cells", "n"), ALL)
def test_all_rows_compile_and_none_spills(nvrtc: None, name: str, arch: str, cells: int, n: int) -> None:
    check_rows(name, arch, cells, n)


@pytest.mark.full
@pytest.mark.parametrize("name", [p.name for p in protocols().values() if add_residual.refusal(p) is None])
@pytest.mark.parametrize("n", [2, 8])
def test_elementwise_ones_compile_and_do_not_spill(nvrtc: None, name: str, n: int) -> None:
    for aligned in (True, False):
        spec = Specialisation(protocol(name), BFLOAT16, n, aligned, fused=Fused(add_residual))
        check_spills(compile_specialisation(spec, "sm_90"), not aligned and n > 6)


@pytest.mark.parametrize("fused", [Fused(add_rms_norm, 2), Fused(add_residual)], ids=lambda f: f.name)
def test_separate_kernels_compile(nvrtc: None, fused: Fused) -> None:
    made = Separate(fused, BFLOAT16, 8, True, "late")
    assert compile_text(made.name, made.text(), "sm_90").faults() == []


def test_the_pages_example_compiles(nvrtc: None) -> None:
    fused = Fused(page_example(), 1)
    assert (
        compile_specialisation(Specialisation(protocol("one_shot.ll"), FLOAT32, 2, fused=fused), "sm_90").faults() == []
    )


def test_a_mistake_is_told_with_its_line(nvrtc: None) -> None:
    wrong = Epilogue("wrong", "values.map([](f32 sum, u64) { return sum; });\nvalues.nothing(missing);")
    spec = Specialisation(protocol("one_shot.ll"), FLOAT32, 2, fused=Fused(wrong))
    with pytest.raises(SetupError, match=r"epilogue wrong\(2\).*missing"):
        compile_specialisation(spec, "sm_90")


def test_a_sum_that_has_no_row_is_told(nvrtc: None) -> None:
    """It would wait for threads that never come."""
    spec = Specialisation(
        protocol("one_shot.ll"), FLOAT32, 2, fused=Fused(Epilogue("wrong", "values.sum([](f32 x) { return x; });"))
    )
    with pytest.raises(SetupError, match="by_row=True"):
        compile_specialisation(spec, "sm_90")


@pytest.mark.parametrize(
    "name",
    [
        "one_shot.lamport16",
        "all_gather.ll",
        *(
            pytest.param(p.name, marks=pytest.mark.full)
            for p in protocols().values()
            if "flag" in p.name or "two" in p.name
        ),
    ],
)
def test_kernels_without_one_are_what_they_were(nvrtc: None, name: str) -> None:
    """The same machine code as from sources that never heard of epilogues."""
    p = protocol(name)
    spec = Specialisation(p, p.dtypes[-1], 8)
    text = spec.text()
    call = "  v = Finish<T>::template apply<G>(p, base, nbytes, span, v);\n"
    assert text.count(call) == 1
    assert (
        compile_text(spec.name, text, "sm_90").image == compile_text(spec.name, text.replace(call, ""), "sm_90").image
    )


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("one_shot.lamport16", Fused(add_rms_norm, 1)),
        pytest.param("two_shot.ll", Fused(add_residual), marks=pytest.mark.full),
    ],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_only_strong_accesses_touch_slots(nvdisasm: None, name: str, fused: Fused) -> None:
    """As for kernels without an epilogue, by the same counts: what an epilogue reads and writes are arrays."""
    spec = Specialisation(protocol(name), BFLOAT16, 3, fused=fused)
    assert slot_faults(spec.protocol, 3, slot_listing(spec, "sm_90")) == []


def test_structs_are_the_same(nvrtc: None) -> None:
    params = params_dtype(3, epilogue=True)
    assert params.fields is not None
    assert EPILOGUE_DTYPE.fields is not None
    facts = {"sizeof(fc::Params)": params.itemsize, "offsetof(fc::Params, epilogue)": params.fields["epilogue"][1]}
    start = params.fields["epilogue"][1]
    facts |= {
        f"offsetof(fc::Params, epilogue.{name})": start + EPILOGUE_DTYPE.fields[name][1]
        for name in EPILOGUE_DTYPE.names or ()
    }
    lines = ["#define FC_N 3", "#define FC_MAX_THREADS 32", "#define FC_EPILOGUE 1", '#include "params.cuh"']
    lines += ["#define offsetof(T, m) __INTADDR__(&((T*)0)->m)"]
    lines += [f'static_assert({what} == {value}, "{what}");' for what, value in facts.items()]
    compile_text("structs", flatten("\n".join([*lines, 'extern "C" __global__ void fc_kernel() {}'])), "sm_90")


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def test_tree_sums_are_pairs_of_neighbours() -> None:
    x = np.array([[1e8, 1.0, -1e8, 1.0, 3.0]], np.float32)
    one = np.float32
    assert checks.tree_sum(x)[0] == ((one(1e8) + one(1)) + (one(-1e8) + one(1))) + one(3)
    assert checks.tree_sum(x)[0] != x.sum()
    assert np.signbit(checks.tree_sum(np.full((1, 4), -0.0, np.float32))[0]) == np.False_


def test_rms_norm_is_what_it_is_called() -> None:
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(checks.rms_norm(x, w, 1e-5), exact, rtol=1e-6)
