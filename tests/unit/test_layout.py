"""The slab: nothing overlaps, everything is aligned, and NumPy's structs are the kernel's structs byte for byte."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fcomm import layout
from fcomm.backends import cpu
from fcomm.dtypes import FLOAT32
from fcomm.errors import ArgumentError
from fcomm.layout import LINE, SLAB_GRANULE, Region, SlabLayout
from fcomm.protocols import CELL_BYTES, ENCODINGS, index_of, protocol, protocols
from fcomm.source import Specialisation
from tests.unit.native import compile_library

layouts = st.builds(SlabLayout, st.integers(2, 16), st.integers(1, 4 << 20), st.integers(1, 3))


def extents(made: SlabLayout) -> list[tuple[int, int, str]]:
    """(start, end, name) of everything in the slab."""
    found = [
        (made.control_offset(c), made.control_offset(c) + layout.CONTROL_BYTES, f"control {c}")
        for c in range(made.channels)
    ]
    for channel in range(made.channels):
        for region in made.regions(channel).values():
            sources = 1 if region.copies == 1 else made.world_size
            for copy in range(region.copies):
                start = region.offset + copy * region.copy_stride
                found.append((start, start + sources * region.slot_stride, f"{region.name} {channel}.{copy}"))
    return sorted(found)


@given(layouts)
@example(SlabLayout(2, 1))
@example(SlabLayout(16, 4 << 20, 3))
def test_nothing_overlaps_and_all_fits(made: SlabLayout) -> None:
    found = extents(made)
    for (_, end, name), (start, _, other) in pairwise(found):
        assert end <= start, f"{name} reaches into {other}"
    assert found[-1][1] <= made.slab_bytes


@given(layouts)
def test_alignment(made: SlabLayout) -> None:
    assert made.slab_bytes % SLAB_GRANULE == 0
    for channel in range(made.channels):
        assert made.control_offset(channel) % LINE == 0
        for region in made.regions(channel).values():
            for value in (region.offset, region.copy_stride, region.slot_stride, region.half_stride):
                assert value % LINE == 0, region


@given(layouts)
def test_a_slot_takes_the_largest_message_in_one_piece_or_in_two_halves(made: SlabLayout) -> None:
    shard = -(-made.max_bytes // made.world_size)
    for name, encoding in ENCODINGS.items():
        region = made.regions()[name]
        assert encoding.slot_bytes(region.capacity) <= region.slot_stride
        assert encoding.slot_bytes(shard) <= region.half_stride
        assert 2 * region.half_stride <= region.slot_stride
    assert made.regions()["staging"].slot_stride >= made.max_bytes


@given(layouts)
def test_only_epoch_evidence_lies_in_what_is_scrubbed(made: SlabLayout) -> None:
    for channel in range(made.channels):
        regions = made.regions(channel)
        start = min(r.offset for r in regions.values())
        for region in regions.values():
            inside = region.offset + made.world_size * region.slot_stride <= start + made.scrub_bytes
            assert inside == region.scrubbed, region
            if region.scrubbed:
                assert region.copy_stride == made.scrub_bytes
                assert region.cleared_to == 0, "0 is never an epoch"


@given(st.integers(2, 16), st.integers(1, 4 << 20), st.integers(1, 3), st.sampled_from(list(protocols())))
def test_a_kernel_is_told_where_everything_is_and_nothing_about_the_message(
    n: int, max_bytes: int, channels: int, name: str
) -> None:
    made, chosen = SlabLayout(n, max_bytes, channels), protocol(name)
    channel, slabs = channels - 1, [(r + 1) << 30 for r in range(n)]
    p = made.params(chosen, n - 1, slabs, 4096, channel, 1.5)[0]
    assert list(p["slab"]) == slabs
    assert [int(p[k]) for k in ("in", "out", "nbytes", "stride", "part")] == [0] * 5, "these are the call's own"
    for k, region in enumerate(made.regions(channel)[r] for r in (chosen.regions * 2)[:2]):
        want = (region.offset, region.copy_stride, region.slot_stride, region.half_stride)
        assert tuple(int(v) for v in p["region"][k]) == want
    assert (p["rank"], p["channel"], p["protocol"]) == (n - 1, channel, index_of(name))
    assert p["control"] == slabs[n - 1] + made.control_offset(channel)
    assert p["error"] == 4096 + channel * layout.ERROR_BYTES
    assert p["timeout_ns"] == 1_500_000_000
    assert p["scrub_offset"] == min(r.offset for r in made.regions(channel).values())
    assert p["scrub_bytes"] == p["scrub_stride"] == made.scrub_bytes
    assert (p["scrub_from"], p["scrub_cells"]) == (made.scrub_from(), layout.SCRUB_CELLS)


@given(layouts, st.integers(1, 4096))
def test_the_scrubbing_window_goes_twice_around_both_copies_before_the_epoch_wraps(
    made: SlabLayout, cells: int
) -> None:
    start = made.scrub_from(cells)
    windows = -(-made.scrub_bytes // CELL_BYTES // cells)
    assert layout.FIRST_EPOCH < start < layout.EPOCHS
    for parity in (0, 1):  # a copy's calls, and the window of cells that each clears: kernels_cu/epoch.cuh
        calls = (layout.EPOCHS - start) // 2
        assert (start + 2 * (calls - 1) + parity) < layout.EPOCHS
        visits = np.bincount(np.arange(calls) % windows, minlength=windows)
        assert visits.min() >= 2
    assert windows * cells * CELL_BYTES >= made.scrub_bytes


def test_the_default_window_leaves_nearly_the_whole_period() -> None:
    assert SlabLayout(8, 1 << 20).scrub_from() > 0.999 * layout.EPOCHS


@pytest.mark.parametrize(
    ("max_bytes", "channels", "words"), [(0, 1, "max_bytes"), (-1, 1, "max_bytes"), (1, 0, "channels")]
)
def test_nonsense_sizes_are_refused_in_one_sentence(max_bytes: int, channels: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        SlabLayout(2, max_bytes, channels)
    assert "\n" not in str(caught.value)


# ---- structs --------------------------------------------------------------------------------------------------------

# NumPy's one 64-bit field stands for two 32-bit words in C.
TWO_WORDS = {"ErrorRecord": {"nbytes": "bytes_low", "cell": "cell_low"}}


def structs(n: int) -> dict[str, np.dtype[np.void]]:
    return {
        "Params": layout.params_dtype(n),
        "Control": layout.CONTROL_DTYPE,
        "ErrorRecord": layout.ERROR_DTYPE,
        "Region": layout.REGION_DTYPE,
    }


def c_facts(n: int, folder: Path) -> dict[str, list[int]]:
    """What the compiler says: each struct's size, then offset and size of each field in turn."""
    lines = ["#include <stddef.h>", '#include "params.cuh"', 'extern "C" {']
    for name, dtype in structs(n).items():
        facts = [f"sizeof(fc::{name})"]
        for field in dtype.names or ():
            c_name = TWO_WORDS.get(name, {}).get(field, field)
            facts += [f"offsetof(fc::{name}, {c_name})", f"sizeof(((fc::{name}*)0)->{c_name})"]
        lines.append(f"unsigned {name}_facts[] = {{{', '.join(f'unsigned({f})' for f in facts)}}};")
    library = compile_library("\n".join([*lines, "}"]), folder, n)
    return {
        name: list((ctypes.c_uint * (1 + 2 * len(dtype.names or ()))).in_dll(library, f"{name}_facts"))
        for name, dtype in structs(n).items()
    }


@pytest.mark.parametrize("n", [2, 3, 8])
def test_every_field_lies_where_the_kernel_looks_for_it(n: int, tmp_path: Path) -> None:
    found = c_facts(n, tmp_path)
    for name, dtype in structs(n).items():
        want = [dtype.itemsize]
        covered = 0
        for field in dtype.names or ():
            kind, offset = dtype.fields[field][:2] if dtype.fields else (np.dtype("u1"), 0)
            size = kind.itemsize // 2 if field in TWO_WORDS.get(name, {}) else kind.itemsize
            want += [offset, size]
            covered += kind.itemsize
        assert found[name] == want, name
        assert covered == dtype.itemsize, f"{name} has bytes that no field names"


@pytest.mark.parametrize("n", [2, 3])
def test_a_compiled_kernel_has_the_same_struct_sizes(n: int) -> None:
    kernel = cpu.CpuKernel(cpu.build(Specialisation(protocol("one_shot.ll"), FLOAT32, n)))
    assert kernel.struct_sizes == (layout.params_dtype(n).itemsize, layout.CONTROL_BYTES, layout.ERROR_BYTES)


def test_control_words_are_one_a_channel_and_start_at_the_first_epoch() -> None:
    words = SlabLayout(4, 1 << 16, 3).initial_control()
    assert words.itemsize == layout.CONTROL_BYTES
    assert words["epoch"].tolist() == [layout.FIRST_EPOCH] * 3
    words["epoch"] = 0
    assert not words.view(np.uint8).any()


def test_constants_are_those_of_the_kernels(tmp_path: Path) -> None:
    text = """
        #include "baseline/barrier.cuh"
        extern "C" unsigned facts[] = {fc::kFirstEpoch, unsigned(fc::barrier::kFlagsPerSource), fc::barrier::kChunks};
    """
    first, flags, chunks = (ctypes.c_uint * 3).in_dll(compile_library(text, tmp_path, 2), "facts")
    assert first == layout.FIRST_EPOCH
    assert flags == layout.BARRIER_FLAGS_PER_SOURCE >= chunks


def test_an_error_record_becomes_one_sentence() -> None:
    record = np.zeros(1, layout.ERROR_DTYPE)[0]
    values = {
        "rank": 1,
        "peer": 3,
        "block": 4,
        "blocks": 6,
        "blocks_started": 5,
        "epoch": 77,
        "nbytes": 1 << 33,
        "cell": 9,
    }
    for name, value in values.items():
        record[name] = value
    record["seen"] = (0xDEAD, 0xBEEF, 0, 1)
    text = layout.error_message(record, ["one_shot.ll"], 8)
    assert text.startswith(
        "rank 1 gave up waiting for rank 3 of 8 in call 76 (one_shot.ll, 8589934592 bytes, channel 0)"
    )
    assert "block 4 of 6 (5 started)" in text
    assert "cell 9" in text
    assert text.endswith("0000dead 0000beef 00000000 00000001")


def test_regions_are_frozen() -> None:
    region: Region = SlabLayout(2, 1024).regions()["ll"]
    with pytest.raises(AttributeError):
        region.offset = 0  # type: ignore[misc]


def test_slots_of_four_gibibytes_are_refused_with_the_numbers() -> None:
    SlabLayout(2, 1 << 30)
    with pytest.raises(
        ArgumentError, match=r"max_bytes 2147483648 makes slots of \d+ bytes, which must be below 4 GiB"
    ):
        SlabLayout(2, 2 << 30)
