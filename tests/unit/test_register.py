"""Encodings of one's own: registered from a program, in every list, compiled with the kernels' own headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcomm import cost_model
from fcomm.backends import cpu
from fcomm.dtypes import BYTES, FLOAT32
from fcomm.errors import ArgumentError, SetupError
from fcomm.layout import SlabLayout
from fcomm.protocols import (
    CELL_BYTES,
    ENCODINGS,
    Encoding,
    _derived,
    _encodings,
    _include,
    hold,
    let_go,
    protocol,
    protocols,
    register,
    registered,
)
from fcomm.source import Specialisation, claims, source_hash, sources

HEADER = """
#pragma once
#include "wire/base.cuh"
#include "shared.cuh"
namespace fc {
namespace wire {
struct Sum16 : EpochPerCell, Geometry<3, 4, false> {
  static constexpr u32 kGroupBytes = 12;
  static FC_DEVICE Span span(u32 cell) { return Span{cell * 12ull, 12}; }
  static FC_DEVICE void put(Cell* slot, Payload v, u32 e) {
    st_relaxed_sys(slot, Cell{{v.w[0], v.w[1], v.w[2], e + sum16(v.w)}});
  }
  static FC_DEVICE bool ready(Cell c, u32 e) { return c.w[3] == e + sum16(c.w); }
};
}  // namespace wire
}  // namespace fc
"""
SHARED = """
#pragma once
#include "primitives.cuh"
namespace fc {
FC_DEVICE u32 sum16(const u32* w) { return w[0] + w[1] + w[2]; }
}  // namespace fc
"""
SUM16 = Encoding("sum16", "Sum16", "sum16.cuh", 1, 12, 2, 16, 16, 0, frozenset({"atomic16"}))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """What a test registers is gone after it."""
    yield
    for name in list(_include):
        del _encodings[name], _include[name]
    for forget in _derived:
        forget()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sum16.cuh").write_text(HEADER)
    (tmp_path / "shared.cuh").write_text(SHARED)
    return tmp_path


def test_a_registered_encoding_is_in_every_list(folder: Path) -> None:
    before, ours = list(protocols()), source_hash()
    register(SUM16, folder)
    new = [name for name in protocols() if name not in before]
    assert new == ["one_shot.sum16", "two_shot.sum16", "all_gather.sum16", "reduce_scatter.sum16"]
    assert list(ENCODINGS)[-1] == "sum16"
    assert registered() == {"sum16": folder / "sum16.cuh"}
    assert protocol("one_shot.sum16").wire_bytes(24, 3) == 2 * 2 * CELL_BYTES
    assert "sum16" in SlabLayout(4, 1 << 16).regions()
    with_it = source_hash()
    assert with_it != ours
    (folder / "shared.cuh").write_text(SHARED.replace("w[2]", "2 * w[2]"))
    assert source_hash() not in (with_it, ours)  # records say which kernels they are of, what a header includes too


def test_it_compiles_with_the_kernels_headers_and_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path / "cache"))
    register(SUM16, str(folder))
    spec = Specialisation(protocol("two_shot.sum16"), FLOAT32, 2)
    text = spec.text()
    assert text.count("struct Sum16") == text.count("u32 sum16(") == text.count("struct EpochPerCell") == 1
    first = cpu.build(spec)
    assert first.is_file()
    (folder / "shared.cuh").write_text(SHARED.replace("+ w[2]", "+ 3 * w[2]"))
    assert cpu.build(spec) != first  # an edited header is another kernel
    (folder / "sum16.cuh").write_text(HEADER.replace("shared.cuh", "../elsewhere.cuh"))
    with pytest.raises(SetupError, match=r"elsewhere\.cuh"):
        spec.text()


def test_the_same_name_again_replaces(folder: Path) -> None:
    register(SUM16, folder)
    register(dataclasses.replace(SUM16, needs=frozenset({"atomic8"})), folder)
    assert protocol("one_shot.sum16").needs == {"atomic8"}
    assert list(ENCODINGS).count("sum16") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "ll16"}, "own encodings"),
        ({"name": "Sum+16"}, "small letters"),
        ({"kernel_type": "fc::Sum"}, "name of a struct"),
        ({"header": "none.cuh"}, r"has no none\.cuh"),
        ({"copies": 3}, "3 copies"),
        ({"group_payload": 10}, "positive multiple of 4"),
        ({"group_payload": 20}, "positive multiple of 4"),
        ({"rearm_bytes_per_cell": 16}, "sets back 16 bytes"),
        ({"needs": frozenset({"atomic16", "atomci8"})}, "needs atomci8, which no link has"),
    ],
    ids=lambda v: next(iter(v.values())) if isinstance(v, dict) else "",
)
def test_what_cannot_be_is_refused(folder: Path, changes: dict[str, object], said: str) -> None:
    before = list(protocols())
    with pytest.raises(ArgumentError, match=said):
        register(dataclasses.replace(SUM16, **changes), folder)  # type: ignore[arg-type]
    assert list(protocols()) == before


def test_a_header_that_hides_one_of_ours_is_refused(folder: Path) -> None:
    (folder / "wire").mkdir()
    (folder / "wire" / "ll.cuh").write_text(HEADER)
    with pytest.raises(ArgumentError, match="own headers"):
        register(dataclasses.replace(SUM16, header="wire/ll.cuh"), folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group_payload": 16}, "group_payload is 16"),
        ({"group_payload": 8}, "group_payload is 8"),
        ({"group_cells": 8}, "group_cells is 8"),
        ({"max_chunks": 64}, "header_bytes"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_contradicts_the_struct_does_not_compile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    """Hosts lay slots out by the Encoding, kernels by the struct: where they differ, cells would overlap or never be read."""
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path / "cache"))
    wrong = dataclasses.replace(SUM16, **changes)  # type: ignore[arg-type]
    register(wrong, folder)
    with pytest.raises(SetupError, match=f"sum16: {said}.* in its Encoding, and not in sum16.cuh"):
        cpu.build(Specialisation(protocol("all_gather.sum16"), BYTES, 2))


def test_every_kernel_compares_its_encodings_with_their_structs() -> None:
    """What is shipped compiles with these assertions in other tests."""
    assert [len(claims(ENCODINGS[name])) for name in ("ll", "flag")] == [5, 7]
    for p in protocols().values():
        text = Specialisation(p, p.dtypes[0], 2).root_text()
        assert all(claim in text for e in p.encodings for claim in claims(e))


def test_too_late_for_an_open_communicator(folder: Path) -> None:
    class Open:
        pass

    slab = Open()
    hold(slab)
    with pytest.raises(
        ArgumentError, match=r"a communicator is open.*register before the first Communicator, or close\(\)"
    ):
        register(SUM16, folder)
    assert "one_shot.sum16" not in protocols()
    let_go(slab)
    register(SUM16, folder)
    hold(slab)
    register(dataclasses.replace(SUM16), folder)  # the very same once more, as a notebook's cell does, changes nothing
    with pytest.raises(ArgumentError, match="a communicator is open"):
        register(dataclasses.replace(SUM16, unit_bytes=8), folder)
    del slab  # left without close(), as after an error
    register(dataclasses.replace(SUM16, unit_bytes=8), folder)
    assert ENCODINGS["sum16"].unit_bytes == 8


def test_what_follows_from_the_registry_is_counted_anew(folder: Path) -> None:
    before = cost_model.protocols_hash()
    cost_model.pieces(protocol("one_shot.ll"), 3 << 20, 4, 1 << 20)  # a layout of that size is remembered from here on
    register(SUM16, folder)
    assert cost_model.protocols_hash() != before
    assert cost_model.pieces(protocol("one_shot.sum16"), 3 << 20, 4, 1 << 20) == ((512 << 10, 6),)
    assert cost_model.work(protocol("one_shot.sum16"), 24, 2, (1, 32)).wire_mib == 32 / (1 << 20)
    (folder / "wide.cuh").write_text(HEADER)
    register(dataclasses.replace(SUM16, header="wide.cuh", group_payload=8), folder)
    assert cost_model.work(protocol("one_shot.sum16"), 24, 2, (1, 32)).wire_mib == 48 / (1 << 20)


def test_ranks_tell_each_other_headers_and_descriptions(folder: Path) -> None:
    ours = sources()
    assert ours == source_hash()[:16]
    register(SUM16, folder)
    with_it = sources()
    assert with_it.startswith(source_hash()[:16] + " with sum16 (")
    (folder / "shared.cuh").write_text(SHARED.replace("w[2]", "2 * w[2]"))
    assert sources().partition(" ")[0] != with_it.partition(" ")[0]
    (folder / "shared.cuh").write_text(SHARED)
    register(dataclasses.replace(SUM16, needs=frozenset({"atomic8", "atomic16"})), folder)
    assert "needs ['atomic16', 'atomic8']" in sources()  # in one order on all ranks
