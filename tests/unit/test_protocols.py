"""The registry: what everything else takes for granted about names, headers and regions."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcomm.dtypes import BYTES, REDUCIBLE
from fcomm.errors import NotAdmittedError
from fcomm.layout import SlabLayout
from fcomm.protocols import (
    ALGORITHMS,
    CELL_BYTES,
    ENCODINGS,
    Encoding,
    Protocol,
    index_of,
    left_out,
    protocol,
    protocols,
)
from fcomm.source import kernel_root
from tests.unit.native import compile_library

EVERYTHING = frozenset[str]().union(*(p.needs for p in protocols().values()))
COLLECTIVES = sorted({p.collective for p in protocols().values()})
each = pytest.mark.parametrize("p", protocols().values(), ids=lambda p: p.name)


# ---- registry -------------------------------------------------------------------------------------------------------


def test_there_are_the_protocols_that_everything_began_with() -> None:
    assert {"one_shot.ll", "barrier.one_shot"} <= set(protocols())


def test_names_are_keys_and_unique() -> None:
    for table in (protocols(), ENCODINGS, ALGORITHMS):
        assert [entry.name for entry in table.values()] == list(table)
    kinds = [e.kernel_type for e in ENCODINGS.values()]
    assert len(set(kinds)) == len(kinds)


@each
def test_a_name_says_algorithm_and_encodings(p: Protocol) -> None:
    if p.algorithm.encoded:
        assert 1 <= len(p.encodings) <= 2
        assert p.name == f"{p.algorithm.name}.{'+'.join(dict.fromkeys(e.name for e in p.encodings))}"
    else:
        assert p.encodings == ()
        assert p.name == p.algorithm.name


@each
def test_its_headers_and_its_kernel_exist(p: Protocol) -> None:
    for header in (p.algorithm.header, *(e.header for e in p.encodings)):
        assert (kernel_root() / header).is_file(), header
    assert re.search(rf"\b{p.algorithm.kernel}\b", (kernel_root() / p.algorithm.header).read_text())
    for e in p.encodings:
        assert re.search(rf"struct {e.kernel_type}\b", (kernel_root() / e.header).read_text())


@each
def test_its_regions_are_in_the_slab(p: Protocol) -> None:
    assert p.regions
    assert set(p.regions) <= set(SlabLayout(3, 1 << 20).regions())
    assert {e.name for e in p.encodings} <= set(p.regions)


@each
def test_it_takes_some_type_and_none_that_its_encodings_cannot_carry(p: Protocol) -> None:
    assert p.dtypes
    if p.algorithm.moves_bytes:
        assert p.dtypes == (BYTES,)
    elif not all(e.bit_exact for e in p.encodings):
        assert all(t.is_float for t in p.dtypes)
    else:
        assert set(p.dtypes) <= set(REDUCIBLE.values())


@each
def test_it_needs_something_of_the_link_and_says_what_is_missing(p: Protocol) -> None:
    assert p.needs
    dtype = p.dtypes[0].name
    assert p.refusal(dtype, 2, EVERYTHING) is None
    for lacking in p.needs:
        reason = p.refusal(dtype, 2, EVERYTHING - {lacking})
        assert reason is not None
        assert lacking in reason
    assert p.refusal(dtype, 1, EVERYTHING) == "one rank has nobody to exchange with"
    if not p.algorithm.moves_bytes:
        assert p.refusal("complex64", 2, EVERYTHING) == "it does not handle complex64"


@pytest.mark.parametrize("e", ENCODINGS.values(), ids=lambda e: e.name)
def test_an_encoding_is_whole(e: Encoding) -> None:
    assert e.copies in (2, 3)
    assert e.cleared_to == {2: 0, 3: 0xFF}[e.copies]
    assert e.group_payload % 4 == 0, "a 2- or 4-byte element is never split"
    assert 0 < e.group_payload <= e.group_cells * CELL_BYTES
    assert bool(e.rearm_bytes_per_cell) == (e.copies == 3) == (not e.bit_exact)
    assert e.header_bytes % CELL_BYTES == 0


def test_encodings_are_those_of_the_kernels(tmp_path: Path) -> None:
    """Numbers that are written in Python and in CUDA are the same in both."""
    lines = [*(f'#include "{e.header}"' for e in ENCODINGS.values()), 'extern "C" {']
    for e in ENCODINGS.values():
        facts = ["kGroupCells", "kGroupBytes", "kHeaderBytes", "kState >= 0"]
        lines.append(
            f"unsigned {e.name}[] = {{{', '.join(f'unsigned(fc::wire::{e.kernel_type}::{f})' for f in facts)}}};"
        )
    sizes = [0, 1, 15, 16, 1000, 64 << 10, (64 << 10) + 4, 200_000, 1 << 20]
    lines.append("unsigned chunks(unsigned long long cells) {")
    lines.append("  const auto size = fc::wire::Flag::chunk_cells(cells);\n  return (cells + size - 1) / size;\n}")
    library = compile_library("\n".join([*lines, "}"]), tmp_path, 2)
    for e in ENCODINGS.values():
        found = list((ctypes.c_uint * 4).in_dll(library, e.name))
        assert found == [e.group_cells, e.group_payload, e.header_bytes, int(e.copies == 3)], e.name
    flag = ENCODINGS["flag"]
    for nbytes in sizes:
        assert library.chunks(ctypes.c_uint64(flag.cells(nbytes))) == flag.chunks(nbytes) <= flag.max_chunks


@given(st.sampled_from(list(ENCODINGS.values())), st.integers(0, 1 << 23))
def test_cells_are_whole_groups_and_just_enough(e: Encoding, nbytes: int) -> None:
    groups, rest = divmod(e.cells(nbytes), e.group_cells)
    assert rest == 0
    assert groups * e.group_payload >= nbytes > (groups - 1) * e.group_payload
    assert e.slot_bytes(nbytes) == e.header_bytes + e.cells(nbytes) * CELL_BYTES
    assert nbytes <= e.wire_bytes(nbytes) <= e.slot_bytes(nbytes)
    assert e.wire_bytes(nbytes) % 4 == 0


def test_combinations_that_do_not_exist_say_why() -> None:
    assert left_out().keys().isdisjoint(protocols())
    for name, reason in left_out().items():
        with pytest.raises(NotAdmittedError, match=f"^{re.escape(name)} does not exist: {re.escape(reason)}$"):
            protocol(name)
    assert not any(
        p.collective == "all_gather" for p in protocols().values() if not all(e.bit_exact for e in p.encodings)
    )


def test_wire_bytes_of_ll_are_twice_the_payload_to_each_peer() -> None:
    assert protocol("one_shot.ll").wire_bytes(64 << 10, 8) == 7 * 2 * (64 << 10)
    assert protocol("one_shot.ll").wire_bytes(1, 3) == 2 * 16
    assert protocol("barrier.one_shot").wire_bytes(100, 2) == 112


def test_index_is_the_place_in_the_registry_and_the_same_in_every_process() -> None:
    assert [index_of(name) for name in protocols()] == list(range(len(protocols())))
    command = "from fcomm.protocols import protocols; print(*protocols())"
    done = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "1"},
        check=True,
        cwd=kernel_root().parent,
    )
    assert done.stdout.split() == list(protocols())


def test_the_registry_cannot_be_changed() -> None:
    for table in (protocols(), ENCODINGS, ALGORITHMS):
        with pytest.raises(TypeError):
            table["x"] = 1  # type: ignore[index]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(NotAdmittedError, match=r"no protocol 'one_shot\.nosuch'.*one_shot\.ll") as caught:
        protocol("one_shot.nosuch")
    assert "\n" not in str(caught.value)
