"""Encodings of one's own: registered from a program, in every list, compiled with the kernels' own headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcomm.backends import cpu
from fcomm.dtypes import FLOAT32
from fcomm.errors import ArgumentError, SetupError
from fcomm.layout import SlabLayout
from fcomm.protocols import (
    CELL_BYTES,
    ENCODINGS,
    Encoding,
    _encodings,
    _include,
    left_out,
    protocol,
    protocols,
    register,
    registered,
)
from fcomm.source import Specialisation, source_hash

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
    protocols.cache_clear()
    left_out.cache_clear()


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
