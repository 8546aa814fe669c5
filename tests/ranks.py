"""What must hold between real ranks: a table of cases, run by `mpirun -n N python -m tests.ranks`.

One mpirun runs the whole table, since starting ranks costs more than most cases. Each case is a function of a fresh
communicator; it raises where something does not hold. Rank 0 prints one line a case, which pytest then reads.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import fcomm
import fcomm.layout
from fcomm import checks, cost_model, models, provenance
from fcomm.cost_model import Model
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, DisagreementError, FcommError, HangError, ModelError
from fcomm.links import Link
from fcomm.protocols import HOPPER, V2_PUSH_UP_TO, Protocol
from fcomm.source import source_hash

Case = Callable[[fcomm.Communicator], None]
CASES: dict[str, Case] = {}
COUNTS = (1, 2, 3, 5, 7, 8, 31, 32, 33, 64, 127, 255, 256, 1000, 1023, 2880, 4096, 10007)
SHAPES = ((1, 32), (3, 32), (2, 96), (7, 64))


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


DTYPES = tuple(REDUCIBLE)


def reducing(comm: fcomm.Communicator, *wanted: str, own_contract: bool = False) -> Iterator[tuple[Protocol, str]]:
    """Every admitted all-reduce that keeps the contract (or every other one), with every dtype it takes (of those wanted)."""
    for p in fcomm.protocols().values():
        if p.collective == "all_reduce" and p.algorithm.own_contract == own_contract:
            for t in p.dtypes:
                if t.name not in (wanted or DTYPES):
                    continue
                if p.refusal(t.name, max(comm.world_size, 2), comm.capabilities) is None:
                    yield p, t.name


def float_dtype() -> str:
    """A float type among those that are tested."""
    return next(t for t in DTYPES if REDUCIBLE[t].is_float)


def reference(comm: fcomm.Communicator, name: str, xs: list[NDArray[Any]]) -> NDArray[Any]:
    """The sum by the contract, of what the protocol sends."""
    p = fcomm.protocols().get(name)
    if p is None or comm.world_size == 1:
        return checks.reduce_reference(xs)
    runs = p.at(xs[0].nbytes, comm.world_size, comm.gpu or HOPPER).name
    return checks.reduce_reference([checks.as_sent(runs, x) for x in xs])


def place(comm: fcomm.Communicator, host: NDArray[Any], offset: int = 0) -> Any:
    """The host array on the backend, `offset` elements into its allocation: misaligned for offset > 0."""
    padded = np.concatenate([host[:1].repeat(offset) if len(host) else host[:0], host.reshape(-1)])
    return comm.from_host(padded)[offset if len(host) else 0 :]


def poisoned(comm: fcomm.Communicator, count: int, dtype: str, offset: int = 0) -> Any:
    host = np.empty(count + offset, REDUCIBLE[dtype].numpy)
    checks.poison(host)
    return comm.from_host(host)[offset:]


def reduce_once(
    comm: fcomm.Communicator, name: str, dtype: str, count: int, seed: tuple[int, ...],
    *, offset: int = 0, out_offset: int = 0, in_place: bool = False, shape: tuple[int, int] | None = None,
    data: list[NDArray[Any]] | None = None,
) -> NDArray[Any]:  # fmt: skip
    """One verified all-reduce on fresh data; returns the result."""
    n = comm.world_size
    xs = data or [checks.inputs(seed, r, n, count, dtype) for r in range(n)]
    x = place(comm, xs[comm.rank], offset)
    out = x if in_place else poisoned(comm, count, dtype, out_offset)
    y = comm.all_reduce(x, out, protocol=name, shape=shape)
    got = comm.to_host(y)
    comm.check()
    wrong = checks.wrong_elements(got, reference(comm, name, xs))
    assert wrong == 0, (
        f"{name} {dtype} count={count} seed={seed} shape={shape}: {wrong} wrong elements on rank {comm.rank}"
    )
    return got


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block must raise one of the package's errors, in one sentence that has these words in it."""
    try:
        yield
    except FcommError as error:
        text = str(error)
        missing = [w for w in words if w not in text]
        assert not missing, f"expected {missing} in: {text}"
        assert "\n" not in text, text
        return
    raise AssertionError(f"nothing was raised; expected an error that says {words}")


# ---- results --------------------------------------------------------------------------------------------------------


@case
def every_protocol_dtype_and_length(comm: fcomm.Communicator) -> None:
    for p, dtype in reducing(comm):
        for k, count in enumerate(COUNTS if dtype == DTYPES[0] else COUNTS[::3]):
            reduce_once(comm, p.name, dtype, count, (1, k), in_place=k % 2 == 0)


@case
def misaligned_views(comm: fcomm.Communicator) -> None:
    for p, dtype in reducing(comm, DTYPES[-1], DTYPES[0]):
        for k, (a, b) in enumerate([(1, 0), (3, 1), (2, 3)]):
            for count in (6, 1001):
                # Alignment is a local fact: the ranks differ in it.
                a_here, b_here = (a, b) if comm.rank % 2 == 0 else (b, a)
                reduce_once(comm, p.name, dtype, count, (2, k, count), offset=a_here, out_offset=b_here)
                reduce_once(comm, p.name, dtype, count, (3, k, count), offset=a_here, in_place=True)


@case
def any_grid_even_a_different_one_on_each_rank(comm: fcomm.Communicator) -> None:
    for p, dtype in reducing(comm, DTYPES[-1]):
        for k, shape in enumerate(SHAPES):
            reduce_once(comm, p.name, dtype, 1500 + k, (4, k), shape=shape)
            other = SHAPES[(k + comm.rank) % len(SHAPES)]
            reduce_once(comm, p.name, dtype, 1500 + k, (5, k), shape=other)


@case
def fresh_data_and_changing_sizes_in_many_calls(comm: fcomm.Communicator) -> None:
    """Every call has new data, so a stale slot shows; sizes jump between large and small, protocols and dtypes mix."""
    rng = np.random.default_rng(6)
    pairs = list(reducing(comm))
    calls = MANY_CALLS
    for k in range(calls):
        p, dtype = pairs[int(rng.integers(len(pairs)))]
        count = int(rng.choice([1, 17, 64, 300, 1024, 3000]))
        shape = SHAPES[int(rng.integers(len(SHAPES)))] if k % 4 == 0 else None
        reduce_once(comm, p.name, dtype, count, (6, k), in_place=bool(rng.integers(2)), shape=shape)


@case
def larger_than_a_slot(comm: fcomm.Communicator) -> None:
    """A message beyond the capacity is handled in pieces, none of it lost."""
    for p, dtype in reducing(comm, DTYPES[0]):
        count = comm.layout.piece_bytes(p) // REDUCIBLE[dtype].itemsize + 5
        reduce_once(comm, p.name, dtype, count, (7,))
        reduce_once(comm, p.name, dtype, 2 * count, (8,), in_place=True)


@case
def special_values(comm: fcomm.Communicator) -> None:
    """Zeros of both signs, subnormals, infinities and NaNs of every kind, each against each."""
    n = comm.world_size
    for p, dtype in reducing(comm):
        values = checks.special_values(dtype)
        rng = np.random.default_rng(9)
        for repeat in range(4):
            xs = [rng.permutation(np.tile(values, 12)) for _ in range(n)]
            if repeat == 0:  # all ranks alike: a sum of -0.0 stays -0.0, NaN stays NaN
                xs = [np.tile(values, 12)] * n
            reduce_once(comm, p.name, dtype, len(xs[0]), (9,), data=xs)


@case
def order_is_rank_order(comm: fcomm.Communicator) -> None:
    """Rank 0 has 1.0 and the others 2^-9: added first to last in float32, nothing is lost before the last rounding."""
    n = comm.world_size
    for p, dtype in reducing(comm):
        if dtype != "bfloat16":
            continue
        element = REDUCIBLE[dtype].numpy
        xs = [np.full(100, 1.0 if r == 0 else 2.0**-9, np.float32).astype(element) for r in range(n)]
        got = reduce_once(comm, p.name, dtype, 100, (10,), data=xs)
        if n == 8:  # in bfloat16, one at a time, all the small ones would vanish
            assert (got.astype(np.float32) == 1.015625).all()


@case
def same_bits_on_all_ranks_and_for_all_protocols(comm: fcomm.Communicator) -> None:
    for dtype in DTYPES:
        results = [
            reduce_once(comm, p.name, dtype, 777, (11,)).tobytes()
            for p, d in reducing(comm)
            if d == dtype and not p.algorithm.own_contract
        ]
        assert len(set(results)) == 1
        assert len(set(comm.mpi.allgather(results[0]))) == 1


@case
def nothing_to_do(comm: fcomm.Communicator) -> None:
    before = comm.backend.control()["epoch"].copy()
    for p, dtype in reducing(comm):
        reduce_once(comm, p.name, dtype, 0, (12,))
    assert (comm.backend.control()["epoch"] == before).all(), "an empty call advanced the epoch"


@case
def any_shape_and_a_result_of_its_own(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    xs = [checks.inputs(13, r, n, 60, "float32").reshape(3, 4, 5) for r in range(n)]
    y = comm.all_reduce(comm.from_host(xs[comm.rank]))
    assert y.shape == (3, 4, 5)
    assert checks.wrong_elements(comm.to_host(y), checks.reduce_reference(xs)) == 0


@case
def prepared_calls(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    x, out = comm.from_host(np.zeros(500, np.float32)), poisoned(comm, 500, "float32")
    call = comm.prepare("all_reduce", x, out)
    for k in range(20):
        xs = [checks.inputs((14, k), r, n, 500, "float32") for r in range(n)]
        x[:] = comm.from_host(xs[comm.rank])
        assert call() is out
        assert checks.wrong_elements(comm.to_host(out), checks.reduce_reference(xs)) == 0


# ---- all-gather: any bytes, unchanged -------------------------------------------------------------------------------

GATHER_BYTES = (1, 2, 3, 7, 8, 11, 12, 13, 15, 16, 17, 119, 120, 121, 128, 255, 1000, 4096, 10007)


def gathering(comm: fcomm.Communicator) -> list[str]:
    """Every admitted all-gather."""
    ranks = max(comm.world_size, 2)
    return [
        p.name
        for p in fcomm.protocols().values()
        if p.collective == "all_gather"
        and not p.algorithm.own_contract
        and p.refusal(None, ranks, comm.capabilities) is None
    ]


def gather_once(
    comm: fcomm.Communicator, name: str, xs: list[NDArray[Any]], *,
    offset: int = 0, out_offset: int = 0, in_place: bool = False, shape: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """One verified all-gather of each rank's array."""
    n, x = comm.world_size, xs[comm.rank]
    flat = np.full(n * x.size + out_offset, 0, x.dtype)
    checks.poison(flat)
    out = comm.from_host(flat)[out_offset:].reshape(n, *x.shape)
    mine = place(comm, x, offset).reshape(x.shape)
    if in_place:
        out[comm.rank] = mine
        mine = out[comm.rank]
    got = comm.to_host(comm.all_gather(mine, out, protocol=name, shape=shape))
    comm.check()
    for r in range(n):
        same = got[r].tobytes() == xs[r].tobytes()
        assert same, f"{name} {x.dtype} {x.shape} shape={shape}: rank {comm.rank} has not rank {r}'s bytes"


def random_bytes(seed: tuple[int, ...], rank: int, count: int) -> NDArray[np.uint8]:
    return np.random.default_rng([*seed, rank]).integers(0, 256, count, dtype=np.uint8)


@case
def gather_any_number_of_bytes(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    for name in gathering(comm):
        for k, count in enumerate(GATHER_BYTES):
            xs = [random_bytes((30, k), r, count) for r in range(n)]
            a, b = [(0, 0), (1, 0), (0, 3), (5, 7)][k % 4]
            gather_once(comm, name, xs, offset=a, out_offset=b, in_place=k % 5 == 4)
            gather_once(comm, name, xs, shape=SHAPES[(k + comm.rank) % len(SHAPES)])


@case
def gather_changes_no_bit_of_any_type(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    words = np.array(
        [0, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF, 0x7F800001, 0x7FC00000, 1, 2, 3, 0x80000001], np.uint32
    )
    types = [np.float32, np.int32, np.uint8, np.complex64, np.float64, np.bool_, np.int8, ml_dtypes.float8_e4m3fn]
    types += [ml_dtypes.bfloat16, np.float16]
    if comm.backend.name == "cuda":
        types.remove(ml_dtypes.float8_e4m3fn)  # CuPy has no such arrays; torch's are tested with the GPU's cases
    pattern = np.resize(words, 132).view(np.uint8)
    for name in gathering(comm):
        for t in types:
            size = np.dtype(t).itemsize
            data = pattern if t is not np.bool_ else pattern & 1
            xs = [np.roll(data, size * r)[: 480 // size * size].view(t) for r in range(n)]
            gather_once(comm, name, xs)
        record = np.dtype([("a", "<i2"), ("b", "<f4"), ("c", "u1")])
        if comm.backend.name == "cpu":  # CuPy has no structured arrays
            gather_once(comm, name, [random_bytes((31,), r, 70 * 7).view(record) for r in range(n)])


@case
def gather_larger_than_a_slot(comm: fcomm.Communicator) -> None:
    for name in gathering(comm):
        count = 2 * comm.layout.piece_bytes(fcomm.protocols()[name]) + 77
        xs = [random_bytes((32,), r, count) for r in range(comm.world_size)]
        gather_once(comm, name, xs)
        gather_once(comm, name, xs, in_place=True)


@case
def gather_nothing_and_refusals(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    for name in gathering(comm):
        gather_once(comm, name, [np.empty(0, np.float32)] * n)
    x = comm.from_host(np.ones(8, np.float32))
    with refused("lamport", "not arrived"):
        comm.all_gather(x, protocol="all_gather.lamport")
    with refused("is a protocol for all_reduce"):
        comm.all_gather(x, protocol="one_shot.ll")
    with refused("out is"):
        comm.all_gather(x, comm.from_host(np.ones(8 * n + 1, np.float32)))
    big = comm.from_host(np.ones((n, 8), np.float32))
    if n == 1:
        return
    with refused("overlaps", "out[rank]"):
        comm.all_gather(big.reshape(-1)[1 : 1 + 8], big)


# ---- reduce-scatter -------------------------------------------------------------------------------------------------


def scatter_once(
    comm: fcomm.Communicator, name: str, dtype: str, part: int, seed: tuple[int, ...], *,
    offset: int = 0, in_place: bool = False, shape: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """One verified reduce-scatter of parts of that many elements."""
    n = comm.world_size
    xs = [checks.inputs(seed, r, n, n * part, dtype) for r in range(n)]
    x = place(comm, xs[comm.rank], offset)
    out = x[comm.rank * part : (comm.rank + 1) * part] if in_place else poisoned(comm, part, dtype)
    got = comm.to_host(comm.reduce_scatter(x, out, protocol=name, shape=shape))
    comm.check()
    want = checks.reduce_reference(xs)[comm.rank * part : (comm.rank + 1) * part]
    wrong = checks.wrong_elements(got, want)
    assert wrong == 0, f"{name} {dtype} part={part} shape={shape}: {wrong} wrong elements on rank {comm.rank}"


def scattering(comm: fcomm.Communicator, *wanted: str) -> Iterator[tuple[str, str]]:
    """Every admitted reduce-scatter with every dtype it takes (of those wanted)."""
    ranks = max(comm.world_size, 2)
    for p in fcomm.protocols().values():
        if p.collective == "reduce_scatter":
            for t in p.dtypes:
                if t.name in (wanted or DTYPES) and p.refusal(t.name, ranks, comm.capabilities) is None:
                    yield p.name, t.name


@case
def scatter_any_length_alignment_and_grid(comm: fcomm.Communicator) -> None:
    for name, dtype in scattering(comm):
        for k, part in enumerate((0, 1, 3, 8, 60, 257, 1000)):
            scatter_once(comm, name, dtype, part, (50, k), in_place=k % 2 == 1)
            other = SHAPES[(k + comm.rank) % len(SHAPES)]
            scatter_once(comm, name, dtype, part, (51, k), offset=k % 3, shape=other)


@case
def scatter_in_pieces_and_in_many_calls(comm: fcomm.Communicator) -> None:
    for name, dtype in scattering(comm, DTYPES[0]):
        part = comm.layout.piece_bytes(fcomm.protocols()[name]) // REDUCIBLE[dtype].itemsize + 3
        scatter_once(comm, name, dtype, part, (52,))
        for k in range(12):  # among others: as large as fills several passes of a grid, then small
            scatter_once(comm, name, dtype, (8192, 5)[k % 2], (53, k))
            reduce_once(comm, "auto", dtype, 300, (54, k))
    with refused("would not be equal") if comm.world_size > 1 else nullcontext():
        comm.reduce_scatter(comm.from_host(np.ones(comm.world_size + 1, np.float32)))


# ---- bit patterns ---------------------------------------------------------------------------------------------------


@case
def every_16_bit_pattern(comm: fcomm.Communicator) -> None:
    """All 65,536 patterns of both 16-bit types, each beside others of the same cell, against other patterns."""
    n = comm.world_size
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for p, dtype in reducing(comm):
        if REDUCIBLE[dtype].itemsize != 2:
            continue
        xs = [np.roll(patterns, 257 * r).view(REDUCIBLE[dtype].numpy) for r in range(n)]
        reduce_once(comm, p.name, dtype, len(patterns), (33,), data=xs)
    for name in gathering(comm):
        gather_once(comm, name, [np.roll(patterns, 257 * r) for r in range(n)])


@case
def words_that_look_like_evidence(comm: fcomm.Communicator) -> None:
    """32-bit payloads equal to current and coming epochs, to the sentinel and to its neighbours."""
    n = comm.world_size
    for p, dtype in reducing(comm):
        if REDUCIBLE[dtype].itemsize != 4:
            continue
        for k in range(6):
            e = int(comm.backend.control()["epoch"][0])
            near = [e, e + 1, e + 2, e - 1, 0, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF, 0x80000000, 0x7F800001, 0xFFC00000]
            words = np.resize(np.array(near, np.uint32), 600 + k)
            xs = [np.roll(words, r).view(REDUCIBLE[dtype].numpy) for r in range(n)]
            reduce_once(comm, p.name, dtype, len(words), (34, k), data=xs)
            same = [np.full(333, 0xFFFFFFFF, np.uint32).view(REDUCIBLE[dtype].numpy)] * n
            reduce_once(comm, p.name, dtype, 333, (34, k), data=same)
    for name in gathering(comm):
        for _ in range(4):
            e = int(comm.backend.control()["epoch"][0])
            gather_once(comm, name, [np.full(500, e + r % 2, np.uint32) for r in range(n)])


# ---- epochs and reuse -----------------------------------------------------------------------------------------------


@case
def epoch_counts_calls(comm: fcomm.Communicator) -> None:
    start = int(comm.backend.control()["epoch"][0])
    protocols = [p.name for p, _ in reducing(comm, DTYPES[0])]
    for k, name in enumerate(protocols):
        reduce_once(comm, name, DTYPES[0], 100 + k, (15, k), shape=SHAPES[k % len(SHAPES)])
    launches = len(protocols) if comm.world_size > 1 else 0  # one rank copies
    control = comm.backend.control()
    assert int(control["epoch"][0]) == start + launches
    assert int(control["ticket"][0]) == 0, "the ticket re-arms itself"


@case
def wrap_of_the_epoch_with_old_evidence(comm: fcomm.Communicator) -> None:
    """Just before the epoch wraps, every slot is full of evidence of an epoch that comes after the wrap, as large calls
    one period ago would have left it. Only scrubbing keeps the call with that epoch from believing it."""
    if comm.world_size == 1:
        return
    with make(comm, max_bytes=1 << 13) as small_slab:  # so that the window before the wrap is some hundred calls
        _wrap(small_slab)


def _wrap(comm: fcomm.Communicator) -> None:
    users: dict[tuple[str, ...], str] = {}  # one protocol for each set of epoch-evidenced regions
    for p, _ in reducing(comm, DTYPES[0]):
        if any(comm.layout.regions()[r].copies == 2 for r in p.regions):
            users.setdefault(p.regions, p.name)
    epoch_of = {name: fcomm.layout.FIRST_EPOCH + 2 * k for k, name in enumerate(users.values())}
    comm.mpi.Barrier()
    for regions, name in users.items():
        for region in (comm.layout.regions()[r] for r in regions):
            for copy in range(region.copies if region.copies == 2 else 0):
                old = np.full(comm.world_size * region.slot_stride // 4, epoch_of[name] + copy, np.uint32)
                comm.backend.write_slab(region.offset + copy * region.copy_stride, old.view(np.uint8))
    start = comm.layout.scrub_from()
    words = comm.backend.control()
    words["epoch"] = start
    comm.backend.write_control(words)
    comm.mpi.Barrier()
    small = comm.prepare(
        "all_reduce", comm.from_host(np.ones(1, REDUCIBLE[DTYPES[0]].numpy)), protocol=next(iter(users.values()))
    )
    for _ in range((1 << 32) - start):
        small()
    comm.check()
    assert int(comm.backend.control()["epoch"][0]) == fcomm.layout.FIRST_EPOCH, "0 and 1 are skipped"
    # One rank comes late, so the others look at their slots before its evidence can have arrived.
    for name, epoch in epoch_of.items():
        for copy in (0, 1):
            assert int(comm.backend.control()["epoch"][0]) == epoch + copy
            time.sleep(0.1 if comm.rank == 0 else 0)
            reduce_once(comm, name, DTYPES[0], 1900, (16, epoch, copy))


@case
def two_communicators_in_turn(comm: fcomm.Communicator) -> None:
    with make(comm) as other:
        for k in range(30):
            p, dtype = list(reducing(comm))[k % len(list(reducing(comm)))]
            reduce_once(comm, p.name, dtype, 200 + k, (17, k))
            reduce_once(other, p.name, dtype, 200 - k, (18, k))


@case
def split_halves(comm: fcomm.Communicator) -> None:
    if comm.world_size < 4:
        return
    half = comm.mpi.Split(comm.rank * 2 // comm.world_size, comm.rank)
    assert isinstance(half, MPI.Intracomm)
    with fcomm.Communicator(half, backend=comm.backend.name, max_bytes=1 << 16) as part:
        for k in range(10):
            for name in ("one_shot.ll", "two_shot.lamport16"):
                reduce_once(part, name, "float32", 150 + k, (19, k))
                reduce_once(comm, name, "float32", 150 + k, (20, k))
    half.Free()


# ---- bad input ------------------------------------------------------------------------------------------------------


@case
def arrays_that_are_refused(comm: fcomm.Communicator) -> None:
    x = comm.from_host(np.ones((4, 6), np.float32))
    with refused("contiguous"):
        comm.all_reduce(x.T)
    with refused("contiguous"):
        comm.all_reduce(x[:, ::2])
    with refused("float64", "cannot be reduced"):
        comm.all_reduce(comm.from_host(np.ones(4, np.float64)))
    with refused("out is"):
        comm.all_reduce(x, comm.from_host(np.ones((6, 4), np.float32)))
    with refused("out is"):
        comm.all_reduce(x, comm.from_host(np.ones((4, 6), np.int32)))
    flat = comm.from_host(np.ones(20, np.float32))
    with refused("overlaps"):
        comm.all_reduce(flat[:10], flat[5:15])
    with refused("list"):
        comm.all_reduce([1.0, 2.0])
    reduce_once(comm, "auto", "float32", 33, (21,))  # and the communicator is as good as before


@case
def options_that_are_refused(comm: fcomm.Communicator) -> None:
    x = comm.from_host(np.ones(10, np.float32))
    with refused("no protocol", "one_shot.ll"):
        comm.all_reduce(x, protocol="one_shot.nosuch")
    with refused("op", "sum"):
        comm.all_reduce(x, op="max")
    with refused("channel"):
        comm.all_reduce(x, channel=1)
    if comm.world_size > 1:
        with refused("multiple of 32"):
            comm.all_reduce(x, shape=(1, 33))
        with refused("blocks"):
            comm.all_reduce(x, shape=(0, 32))
    with refused("no collective"):
        comm.prepare("all_to_all", x)


@case
def ranks_that_disagree_in_checked_mode(comm: fcomm.Communicator) -> None:
    if comm.world_size == 1:
        return
    with make(comm, checked=True) as checked:
        reduce_once(checked, "auto", "float32", 50, (22,))
        with refused("disagree", "nothing was launched"):
            checked.all_reduce(comm.from_host(np.ones(50 + comm.rank, np.float32)))
        dtype = np.float32 if comm.rank else np.float16
        with refused("disagree"):
            checked.all_reduce(comm.from_host(np.ones(50, dtype)))
        reduce_once(checked, "auto", "float32", 50, (23,))


@case
def ranks_that_disagree_at_construction(comm: fcomm.Communicator) -> None:
    if comm.world_size == 1:
        return
    with refused("disagree"):
        fcomm.Communicator(comm.mpi, backend=comm.backend.name, max_bytes=(1 << 16) + comm.rank)
    with refused("max_bytes must be positive"):
        fcomm.Communicator(comm.mpi, backend=comm.backend.name, max_bytes=-1 if comm.rank == 0 else 1 << 16)


def hang_of(comm: fcomm.Communicator, name: str, x: Any) -> HangError:
    """The error of a call for which a rank is missing."""
    try:
        comm.all_reduce(x, protocol=name)
        comm.backend.synchronize()
        comm.check()
    except HangError as error:
        return error
    raise AssertionError(f"{name}: the missing rank was not noticed")


@case
def a_hang_is_named_and_can_be_reset(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    if n == 1:
        return
    late = n - 1
    with make(comm, timeout_s=0.3) as victim:
        for p, dtype in [*reducing(comm, DTYPES[0]), *reducing(comm, float_dtype(), own_contract=True)]:
            _hang(victim, p, dtype, late)


def _hang(comm: fcomm.Communicator, p: Protocol, dtype: str, late: int) -> None:
    reduce_once(comm, p.name, dtype, 104, (24,))
    epoch = int(comm.backend.control()["epoch"][0])
    x = comm.from_host(np.ones(104, REDUCIBLE[dtype].numpy))
    if comm.rank != late:
        error = hang_of(comm, p.name, x)
        assert f"rank {comm.rank} gave up waiting for rank" in str(error), error
        assert p.at(x.nbytes, comm.world_size).name in str(error), error
        record = {k: v for k, v in error.record.items() if k in ("rank", "epoch", "nbytes")}
        assert record == {"rank": comm.rank, "epoch": epoch, "nbytes": x.nbytes}, error.record
        # The rank that never came; with more than one hop, perhaps a rank that gave up on it. Never oneself.
        assert error.record["peer"] != comm.rank, error.record
        assert error.record["peer"] == late or p.algorithm.rounds > 1, error.record
        with refused("gave up waiting", "reset()"):
            comm.all_reduce(x, protocol=p.name)
    comm.reset()
    for k in range(3):
        reduce_once(comm, p.name, dtype, 104, (25, k))


@case
def close_tells_of_a_hang_that_nothing_has_told_of(comm: fcomm.Communicator) -> None:
    other = make(comm)
    other._errors["valid"][0] = 1  # what a wait that expired in the last call leaves
    with refused("gave up waiting"):
        other.close()
    other.close()


@case
def close_is_idempotent(comm: fcomm.Communicator) -> None:
    other = make(comm)
    other.close()
    other.close()
    with refused("closed"):
        other.all_reduce(comm.from_host(np.ones(3, np.float32)))


# ---- baselines with rules of their own ------------------------------------------------------------------------------

FORMS = ("custom_ar_v2", "custom_ar_v2.push", "custom_ar_v2.pull_one_shot", "custom_ar_v2.pull_two_shot")


def with_zeros(seed: tuple[int, ...], comm: fcomm.Communicator, count: int, dtype: str) -> list[NDArray[Any]]:
    """Random data in which zeros of both signs are frequent, and some elements are zero on all ranks."""
    n = comm.world_size
    xs = [checks.inputs(seed, r, n, count, dtype) for r in range(n)]
    shared = np.random.default_rng([*seed, 5]).random(count) < 0.3
    for r, x in enumerate(xs):
        rng = np.random.default_rng([*seed, 6, r])
        zero = shared | (rng.random(count) < 0.2)
        x[zero] = np.where(rng.random(count) < 0.5, 0.0, -0.0).astype(x.dtype)[zero]
    return xs


@case
def baselines_of_any_admitted_length(comm: fcomm.Communicator) -> None:
    for p, dtype in reducing(comm, own_contract=True):
        per_granule = p.algorithm.granule // REDUCIBLE[dtype].itemsize
        for k, granules in enumerate((1, 2, 3, 8, 31, 64, 65, 255, 700, 2500)):
            count = granules * per_granule
            reduce_once(comm, p.name, dtype, count, (40, k), in_place=k % 3 == 0)
            reduce_once(comm, p.name, dtype, count, (41, k), data=with_zeros((41, k), comm, count, dtype))


@case
def baselines_and_special_values(comm: fcomm.Communicator) -> None:
    """Subnormals and all NaNs pass; only one zero is another one's stand-in."""
    n = comm.world_size
    for p, dtype in reducing(comm, own_contract=True):
        values = checks.special_values(dtype)
        rng = np.random.default_rng(42)
        for repeat in range(4):
            xs = [np.tile(values, 16) if repeat == 0 else rng.permutation(np.tile(values, 16)) for _ in range(n)]
            reduce_once(comm, p.name, dtype, len(xs[0]), (42,), data=xs)


@case
def baselines_and_every_16_bit_pattern(comm: fcomm.Communicator) -> None:
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for p, dtype in reducing(comm, own_contract=True):
        if REDUCIBLE[dtype].itemsize == 2:
            xs = [np.roll(patterns, 257 * r).view(REDUCIBLE[dtype].numpy) for r in range(comm.world_size)]
            reduce_once(comm, p.name, dtype, len(patterns), (43,), data=xs)


@case
def zero_sums_of_baselines(comm: fcomm.Communicator) -> None:
    """The limit itself, said without the reference: a sum of +0.0 is -0.0 after a push, a sum of -0.0 is +0.0."""
    if comm.world_size == 1:
        return
    for p, dtype in reducing(comm, own_contract=True):
        for zero in (0.0, -0.0):
            x = comm.from_host(np.full(64, zero, REDUCIBLE[dtype].numpy))
            got = np.signbit(comm.to_host(comm.all_reduce(x, protocol=p.name)).astype(np.float32))
            negative = {"custom_ar_v2": True, "custom_ar_v2.push": True, "lamport_fp": False}
            want = negative.get(p.name, bool(np.signbit(zero)))
            assert (got == want).all(), (p.name, dtype, zero)


@case
def baselines_in_many_calls_among_others(comm: fcomm.Communicator) -> None:
    rng = np.random.default_rng(44)
    own, others = list(reducing(comm, own_contract=True)), list(reducing(comm))
    for k in range(MANY_CALLS // 3):
        pairs = own if rng.integers(3) else others
        p, dtype = pairs[int(rng.integers(len(pairs)))]
        count = 8 * int(rng.choice([1, 3, 16, 50, 128, 400, 1000]))
        data = with_zeros((44, k), comm, count, dtype) if p.algorithm.own_contract and k % 2 else None
        reduce_once(comm, p.name, dtype, count, (44, k), in_place=bool(rng.integers(2)), data=data)


@case
def baselines_on_other_grids(comm: fcomm.Communicator) -> None:
    """Blocks are fixed for each communicator where a kernel counts by them; threads are free, and differ among ranks."""
    if comm.world_size == 1:
        return
    for blocks in (1, 3):
        with make(comm) as other:
            for p, dtype in reducing(other, own_contract=True):
                for k, threads in enumerate((32, 96, 64)):
                    own = (32, 64, 96)[(k + comm.rank) % 3]
                    reduce_once(other, p.name, dtype, 1504 + 8 * k, (45, k), shape=(blocks, threads))
                    reduce_once(other, p.name, dtype, 1504 + 8 * k, (46, k), shape=(blocks, own))
    for k, shape in enumerate(SHAPES):  # lamport_fp counts by the call
        reduce_once(comm, "lamport_fp", float_dtype(), 1504, (47, k), shape=shape)
        reduce_once(comm, "lamport_fp", float_dtype(), 1504, (48, k), shape=SHAPES[(k + comm.rank) % len(SHAPES)])


@case
def baselines_larger_than_a_slot(comm: fcomm.Communicator) -> None:
    for p in {p.name: p for p, _ in reducing(comm, own_contract=True)}.values():
        count = comm.layout.piece_bytes(p) // REDUCIBLE[float_dtype()].itemsize + 8
        reduce_once(comm, p.name, float_dtype(), count, (49,))
        reduce_once(comm, p.name, float_dtype(), 2 * count, (50,), in_place=True)


@case
def limits_of_baselines_are_refused(comm: fcomm.Communicator) -> None:
    if comm.world_size == 1:
        return
    element = REDUCIBLE[float_dtype()]
    per = 16 // element.itemsize
    x = comm.from_host(np.ones(4 * per, element.numpy))
    for name in (*FORMS, "lamport_fp"):
        with refused("multiples of 16 bytes", f"not {64 - element.itemsize}"):
            comm.all_reduce(x[: 4 * per - 1], protocol=name)
        with refused("aligned to 16 bytes"):
            comm.all_reduce(x[1 : 1 + 3 * per], protocol=name)
        with refused("aligned to 16 bytes"):
            comm.all_reduce(
                x[: 3 * per], comm.from_host(np.ones(4 * per, element.numpy))[1 : 1 + 3 * per], protocol=name
            )
        with refused("does not handle int32"):
            comm.all_reduce(comm.from_host(np.ones(16, np.int32)), protocol=name)
    for wrong in (comm.from_host(np.ones(16, np.int32)), comm.from_host(np.ones(16, np.uint8))):
        with refused("does not handle"):
            comm.all_gather(wrong, protocol="sentinel.all_gather")
    for name in FORMS[1:]:
        reduce_once(comm, name, float_dtype(), 64, (51,))
        blocks = comm.prepare("all_reduce", x, protocol=name).blocks
        with refused("counts its calls by the block", f"{blocks} blocks"):
            comm.all_reduce(x, protocol=name, shape=(blocks + 1 if blocks == 1 else blocks - 1, 32))
        with refused("takes up to"):
            comm.all_reduce(x, protocol=name, shape=(10**6, 32))
        reduce_once(comm, name, float_dtype(), 64, (52,), shape=(blocks, 96))


@case
def custom_ar_v2_goes_by_its_size_table(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    if n == 1:
        return
    family = comm.gpu.family if comm.gpu else "hopper"
    limit = V2_PUSH_UP_TO[family][n]
    if limit > 1 << 20:
        return
    with make(comm, max_bytes=limit + 16) as large:
        element = REDUCIBLE[float_dtype()]
        for nbytes, form in ((limit, "push"), (limit + 16, "pull_two_shot")):
            count = nbytes // element.itemsize
            call = large.prepare("all_reduce", large.from_host(np.ones(count, element.numpy)), protocol="custom_ar_v2")
            assert call.protocol == f"custom_ar_v2.{form}"
            reduce_once(large, "custom_ar_v2", float_dtype(), count, (53,))


@case
def inputs_in_the_staging_buffer(comm: fcomm.Communicator) -> None:
    """The copy in front of a pull is left out, on some ranks or all; the two-shot pull works in place there."""
    n = comm.world_size
    if n == 1:
        return
    dtype = float_dtype()
    names = [p.name for p in fcomm.protocols().values() if p.collective == "all_reduce" and "staging" in p.regions]
    for name in names:
        for k, count in enumerate((8, 200, 1000, 4000)):
            for everyone in (True, False):
                xs = [checks.inputs((54, k, int(everyone)), r, n, count, dtype) for r in range(n)]
                x = place(comm, xs[comm.rank])
                if everyone or comm.rank % 2:
                    view = comm.staging_view(count, dtype)
                    view[:] = x
                    x = view
                out = poisoned(comm, count, dtype)
                comm.all_reduce(x, out, protocol=name)
                assert checks.wrong_elements(comm.to_host(out), checks.reduce_reference(xs)) == 0, (name, count)
    view = comm.staging_view(1000, dtype)
    for k in range(5):
        xs = [checks.inputs((55, k), r, n, 1000, dtype) for r in range(n)]
        view[:] = comm.from_host(xs[comm.rank])
        comm.all_reduce(view, view, protocol="custom_ar_v2.pull_two_shot")
        assert checks.wrong_elements(comm.to_host(view), checks.reduce_reference(xs)) == 0
    for name in names:
        with refused("from the buffer's start"):
            comm.all_reduce(view[8:], protocol=name)
        with refused("cannot put its result there"):
            comm.all_reduce(comm.from_host(np.ones(1000, view.dtype)), view, protocol=name)
        if name != "custom_ar_v2.pull_two_shot":
            with refused("cannot put its result there"):
                comm.all_reduce(view, view, protocol=name)
    with refused("staging buffer has"):
        comm.staging_view(1 << 30, "float32")


@case
def sentinel_gather(comm: fcomm.Communicator) -> None:
    """Everything arrives but +0.0, which becomes -0.0."""
    n = comm.world_size
    for dtype in [t for t in DTYPES if REDUCIBLE[t].is_float]:
        for k, count in enumerate((8, 24, 256, 1000, 8000)):
            xs = with_zeros((56, k), comm, count, dtype)
            if k == 3:
                xs = [np.resize(np.roll(checks.special_values(dtype), r), count) for r in range(n)]
            flat = np.zeros(n * count, xs[0].dtype)
            checks.poison(flat)
            out = comm.from_host(flat).reshape(n, count)
            x = place(comm, xs[comm.rank])
            if k % 2:
                out[comm.rank] = x
                x = out[comm.rank]
            got = comm.to_host(comm.all_gather(x, out, protocol="sentinel.all_gather"))
            for r in range(n):
                want = checks.as_sent("sentinel.all_gather", xs[r]) if n > 1 else xs[r]
                assert got[r].tobytes() == want.tobytes(), (dtype, count, r)


@case
def counts_of_blocks_wrap(comm: fcomm.Communicator) -> None:
    if comm.world_size == 1:
        return
    comm.mpi.Barrier()
    for region in comm.layout.regions().values():
        if region.name.startswith("v2_") and region.name.endswith("_state"):
            words = np.full(region.slot_stride // 4, (1 << 32) - 4, np.uint32)
            comm.backend.write_slab(region.offset, words.view(np.uint8))
    comm.mpi.Barrier()
    for k in range(8):
        for name in FORMS[1:]:
            reduce_once(comm, name, float_dtype(), 4000, (57, k))


# ---- cost models and the choice -------------------------------------------------------------------------------------


FEW = (2,)
"""World sizes for cases with many communicators, in which all that matters is that there is another rank."""


def fitted(comm: fcomm.Communicator, cheap: str = "", **changes: Any) -> Model:
    """A model that passes for one of this machine. cheap : a protocol that costs nothing of its own, others do."""
    machine = cost_model.identity(provenance.machine(comm.mpi, comm.backend))
    model = cost_model.seed_model(machine)
    own = {name: dict.fromkeys(prices, 0.0 if name == cheap else 9.0) for name, prices in model.own.items()}
    return replace(model, seed=False, own=own, source_hash=source_hash(), **changes)


@contextmanager
def shared_folder(comm: fcomm.Communicator) -> Iterator[Path]:
    """A folder that all ranks see, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() if comm.rank == 0 else nullcontext("") as mine:
        yield Path(comm.mpi.bcast(mine))
        comm.mpi.Barrier()


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Variables of this rank, set or (None) unset for as long as the block lasts."""
    before = {name: os.environ.get(name) for name in variables}

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(variables)
    try:
        yield
    finally:
        put(before)


def same_error(comm: fcomm.Communicator, kind: type[FcommError], **options: Any) -> str:
    """What constructing a communicator raises: of that kind, in one sentence, the same on all ranks."""
    error: FcommError | None = None
    try:
        make(comm, **options)
    except FcommError as caught:
        error = caught
    said = str(error)
    assert isinstance(error, kind), (kind, error)
    assert "\n" not in said, said
    assert comm.mpi.allgather(said) == [said] * comm.world_size
    return said


@case
def auto_is_what_the_model_says_on_all_ranks_and_has_the_bits_of_any_other(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    if n == 1:
        return
    count = 3000
    xs = [checks.inputs((60,), r, n, count, DTYPES[0]) for r in range(n)]
    want = checks.reduce_reference(xs)
    for cheap in ("one_shot.ll128", "two_shot.ll16", "one_shot.flag")[: 3 if n in FEW else 1]:
        with make(comm, model=fitted(comm, cheap)) as other:
            x = place(other, xs[other.rank])
            call = other.prepare("all_reduce", x)
            assert call.protocol == cheap
            assert checks.wrong_elements(other.to_host(call()), want) == 0
            assert checks.wrong_elements(other.to_host(other.all_reduce(x, protocol=cheap)), want) == 0
            assert other.explain("all_reduce", x.nbytes, DTYPES[0]).choice == cheap
    with make(comm) as other:
        choices = [
            other.explain(collective, nbytes, dtype).choice
            for collective in ("all_reduce", "all_gather", "reduce_scatter")
            for dtype in DTYPES
            for nbytes in (4, 1000, 4096, 65536, 1 << 20)
        ]
        assert None not in choices
        assert comm.mpi.allgather(choices) == [choices] * n
        reduce_once(other, "auto", DTYPES[0], 3000, (61,))


@case
def launch_shapes_of_the_model_are_the_default(comm: fcomm.Communicator) -> None:
    if comm.world_size not in FEW:
        return
    key = f"one_shot.ll/{comm.world_size}/none"
    model = fitted(comm, "one_shot.ll", shapes={key: ((64, 1, 32), (4096, 3, 64), (65536, 0, 0))})
    with make(comm, model=model) as other:
        for nbytes, blocks, threads in ((64, 1, 32), (5000, 3, 64)):
            x = other.from_host(np.ones(nbytes // 4, np.float32))
            call = other.prepare("all_reduce", x)
            assert (call.blocks, call.threads) == (blocks, threads)
            assert other.explain("all_reduce", x.nbytes, "float32").shape == (blocks, threads)
            call = other.prepare("all_reduce", x, shape=(2, 96))
            assert (call.blocks, call.threads) == (2, 96), "one that is named goes before it"
            reduce_once(other, "one_shot.ll", DTYPES[0], nbytes // 4, (62,))


@case
def models_that_do_not_fit_are_refused_on_all_ranks(comm: fcomm.Communicator) -> None:
    if comm.world_size not in FEW:
        return
    good = fitted(comm)
    body = json.loads(good.to_json())
    negative = replace(good, own={**good.own, "one_shot.ll": {**good.own["one_shot.ll"], "peer_us": -1.0}})
    text = good.to_json()
    files = {
        "another machine": (replace(good, machine={**good.machine, "device": "Babbage"}).to_json(), "of another machine (device Babbage"),
        "other protocols": (replace(good, protocols="0" * 64).to_json(), "another set of protocols"),
        "other kernels": (replace(good, source_hash="f" * 64).to_json(), "other kernels (ffffffffffff, now "),
        "schema": (json.dumps({**body, "schema": 99}), "schema 99"),
        "truncated": (text[: len(text) // 2], "truncated"),
        "edited": (text.replace('"mode": "graph"', '"mode": "host"'), "SHA-256"),
        "impossible": (negative.to_json(), "-1.0 for peer_us of one_shot.ll"),
        "something else": ("[1, 2]", "is not a cost model"),
    }  # fmt: skip
    with shared_folder(comm) as folder:
        for name, (content, words) in files.items():
            path = folder / f"{name}.json"
            if comm.rank == 0:
                path.write_text(content)
            comm.mpi.Barrier()
            said = same_error(comm, ModelError, model=path)
            assert words in said, (name, said)
            assert str(path) in said, (name, said)
            with environment(FCOMM_MODEL=str(path)):
                assert words in same_error(comm, ModelError)
            alone = same_error(comm, FcommError, model=path if comm.rank == 1 else "seed")
            assert words in alone, "one rank's trouble is everybody's"
            assert "rank 1" in alone, alone
        assert "No such file" in same_error(comm, ModelError, model=folder / "nosuch.json")
        path = good.save(folder / f"good-{comm.rank}.json")
        with make(comm, model=path) as other:  # files of the same content
            assert other.model.digest() == good.digest()
            assert str(path) in other.model_words
            with refused("-1.0 for peer_us"):
                other.use_model(negative)
            other.use_model("seed")
            reduce_once(other, "auto", DTYPES[0], 100, (63,))


@case
def an_encoding_cannot_come_while_a_communicator_is_open(comm: fcomm.Communicator) -> None:
    late = replace(fcomm.protocols()["one_shot.ll16"].encodings[0], name="late")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "late.cuh").touch()
        with refused("late comes too late: a communicator is open", "register before the first Communicator"):
            fcomm.register(replace(late, header="late.cuh"), folder)
    assert "one_shot.late" not in comm.admitted("float32")


@case
def ranks_with_other_kernels_all_say_so(comm: fcomm.Communicator) -> None:
    """A header of one's own that was edited on one machine, or a checkout that is older."""
    if comm.world_size == 1:
        return
    last = comm.world_size - 1
    with mock.patch("fcomm.communicator.sources", return_value="new" if comm.rank == last else "old"):
        said = same_error(comm, DisagreementError, model="seed")
    assert said.startswith("the ranks disagree on the kernels"), said
    assert said.endswith(f"rank 0 has old, rank {last} has new"), said


@case
def ranks_with_different_models_all_say_so(comm: fcomm.Communicator) -> None:
    if comm.world_size == 1:
        return
    one, two = fitted(comm, "one_shot.ll"), fitted(comm, "two_shot.ll")
    said = same_error(comm, DisagreementError, model=two if comm.rank == comm.world_size - 1 else one)
    assert said.startswith("the ranks disagree on the cost model: rank 0 has model "), said
    assert one.digest()[:12] in said, said
    assert two.digest()[:12] in said, said
    said = same_error(comm, DisagreementError, model=one if comm.rank == 0 else None)
    assert "rank 1 has the seed coefficients of the package" in said, said
    said = same_error(comm, DisagreementError, model=None if comm.rank == 0 else one)
    assert "rank 0 has the seed coefficients of the package" in said, said


@case
def a_model_in_the_cache_is_found_and_one_that_does_not_fit_is_left_alone(comm: fcomm.Communicator) -> None:
    if comm.world_size not in FEW:
        return
    good = fitted(comm, "two_shot.ll")
    with shared_folder(comm) as folder, environment(FCOMM_MODEL=None, FCOMM_CACHE_DIR=str(folder)):
        path = cost_model.model_path(good.machine, good.ranks)

        def note() -> str:
            with make(comm) as other:
                assert other.model.seed
                said = str(other._model.note)
                assert f"run mpirun -n {comm.world_size} python -m experiments.calibrate --save" in said, said
                return said

        def put(text: str) -> None:
            if comm.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            comm.mpi.Barrier()

        assert "there is no cost model of this machine" in note()
        put(good.to_json())
        with make(comm) as other:
            assert other.model.digest() == good.digest()
            assert other._model.note is None
            assert other.explain("all_reduce", 4096, DTYPES[0]).choice == "two_shot.ll"
        put(replace(good, source_hash="0" * 64).to_json())
        assert "was left alone: it was fitted to other kernels" in note()
        put(replace(good, protocols="0" * 64).to_json())
        assert "was left alone: it was fitted with another set of protocols" in note()
        put(good.to_json()[:-100])
        assert "truncated" in note()
        put(good.to_json())
        with environment(FCOMM_CACHE_DIR=str(folder if comm.rank else folder / "other")):
            assert "disagree on the cost model" in same_error(comm, DisagreementError)


@case
def the_kill_switch(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    if n not in FEW:
        return
    with environment(FCOMM_PLAIN="1", FCOMM_PROTOCOL="one_shot.ll"), make(comm) as plain:
        for count in (1, 777, 10007):
            reduce_once(plain, "auto", DTYPES[0], count, (64,))
        gather_once(plain, "auto", [random_bytes((65,), r, 1000) for r in range(n)])
        x = plain.from_host(np.ones(64 * n, np.float32))
        assert str(plain.prepare("all_reduce", x).protocol).startswith("barrier.")
        assert plain.prepare("all_gather", x).protocol == "barrier.all_gather"
        assert str(plain.prepare("reduce_scatter", x).protocol).startswith("reduce_scatter."), (
            "it has no plain baseline"
        )
        with refused("one_shot.ll is not admitted here", "FCOMM_PLAIN"):
            plain.all_reduce(x, protocol="one_shot.ll")
        assert "FCOMM_PLAIN" in str(plain.admitted("float32")["one_shot.ll"])
        assert "FCOMM_PLAIN is set" in plain.explain("all_reduce", 4096, "float32").why
    with environment(FCOMM_PLAIN="1" if comm.rank == 0 else None):
        assert "disagree" in same_error(comm, DisagreementError)


@case
def the_path_is_logged_once_for_each_size_class(comm: fcomm.Communicator) -> None:
    if comm.world_size not in FEW:
        return
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign,assignment]
    logger = logging.getLogger("fcomm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    models._said.clear()
    try:
        with (
            environment(FCOMM_MODEL=None),
            mock.patch.object(cost_model, "kept", return_value=[]),
            make(comm) as other,
        ):
            for count in (1000, 1024, 1000, 600, 1025, 2000):  # in bytes: up to 4 KiB four times, up to 8 KiB twice
                other.all_reduce(other.from_host(np.ones(count, np.float32)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    texts = [line.getMessage() for line in lines]
    if comm.rank:
        assert texts == []
        return
    assert texts[0].startswith("there is no cost model of this machine"), texts
    assert len(set(texts)) == len(texts), texts
    starts = [f"all_reduce up to {size} among {comm.world_size} ranks: " for size in ("4 KiB", "8 KiB")]
    assert all(any(text.startswith(start) for text in texts[1:]) for start in starts), texts
    assert all(text.startswith(tuple(starts)) and "seed coefficients" in text for text in texts[1:]), texts


# ---- other media ------------------------------------------------------------------------------------------------------


@case
def slots_in_host_memory(comm: fcomm.Communicator) -> None:
    """ll and flag run there with the same bits; everything else is refused, and says why."""
    with make(comm, placement="host") as other:
        dtype = DTYPES[0]
        for p in fcomm.protocols().values():
            if p.collective != "all_reduce" or p.algorithm.forms is not None:
                continue
            if p.encodings and all(e.name in ("ll", "flag") for e in p.encodings):
                for k, count in enumerate((1, 1001, 40000)):  # the last one in two pieces
                    reduce_once(other, p.name, dtype, count, (60, k), in_place=k == 1)
            elif p.encodings or "atomic4" in p.needs:
                with refused("slots in host memory are for ll and flag"):
                    reduce_once(other, p.name, dtype, 1000, (61,))
        for name in ("all_gather.ll", "all_gather.flag"):
            gather_once(other, name, [random_bytes((62,), r, 1000) for r in range(comm.world_size)])
        reduce_once(other, "barrier.two_shot", dtype, 1001, (62,))
        reduce_once(other, "auto", dtype, 500, (63,))
        assert other.backend.describe()["placement"] == "host"
        other.reset()
        for k in range(5):
            reduce_once(other, "two_shot.ll", dtype, 3000, (64, k))
    same = same_error(comm, ArgumentError, placement="disk")
    assert "placement is one of device, host, not 'disk'" in same, same


@case
def an_emulated_link_changes_no_bit(comm: fcomm.Communicator) -> None:
    """And the time of a call is at least what the link makes of it."""
    if comm.world_size == 1 or (comm.backend.name == "cpu" and comm.world_size > 2):
        return  # nothing goes over a link; each kernel is compiled for it anew
    with make(comm, link="latency_us=400") as other:
        for name, hops in (("one_shot.ll", 1), ("two_shot.ll128", 2)):
            for k, count in enumerate((1, 1001)):
                reduce_once(other, name, DTYPES[0], count, (65, k))
            x, out = other.from_host(np.ones(64, np.float32)), other.from_host(np.ones(64, np.float32))
            call = other.prepare("all_reduce", x, out, protocol=name)
            call()
            other.backend.synchronize()
            comm.mpi.Barrier()
            start = time.perf_counter()
            call()
            other.backend.synchronize()
            assert time.perf_counter() - start >= hops * 390e-6, name
        other.use_link(Link(0.0, 10.0))
        reduce_once(other, "one_shot.ll", DTYPES[0], 1000, (66,))
    with refused("no emulated link", "link=..."):
        comm.use_link(Link(1.0))
    same = same_error(comm, ArgumentError, link="fast")
    assert "'fast' is not a link" in same, same


@case
def a_link_that_forwards_out_of_order_changes_no_bit(comm: fcomm.Communicator) -> None:
    """Late, at a limited rate and in another order each time: for encodings of each kind, both phases, all collectives."""
    on_cpu = comm.backend.name == "cpu"
    if comm.world_size == 1 or (on_cpu and comm.world_size > 2):
        return  # nothing goes over a link; each kernel is compiled for it anew
    link = Link(20.0, 0.5 if on_cpu else 50.0, "forwarded", jitter_us=50.0, seed=1)
    with make(comm, link=link) as other:
        names = ("two_shot.lamport16+ll128", "two_shot.flag", "barrier.two_shot")
        for name in names if on_cpu else (*names, "one_shot.ll"):
            for k, count in enumerate((1, 40001, 1001)):  # the second one in pieces, and with rings that go round
                other.use_link(replace(link, seed=k))
                reduce_once(other, name, DTYPES[0], count, (67, k), in_place=k == 2)
        if not on_cpu:
            gather_once(other, "all_gather.ll16", [random_bytes((68,), r, 1000) for r in range(comm.world_size)])
            scatter_once(other, "reduce_scatter.ll", DTYPES[0], 1001, (69,))
        with refused("links of form forwarded, not held"):
            other.use_link(Link(1.0))


# ---- epilogues ------------------------------------------------------------------------------------------------------


SCALED_RELU = fcomm.Epilogue(
    "scaled_relu",
    "values.map([&](f32 sum, u64 index) { return sum > 0.0f ? sum * scale : f32(u32(index & 3u)); });",
    scalars=("scale",),
)


def rows_of(comm: fcomm.Communicator, seed: tuple[int, ...], rows: int, columns: int, dtype: str) -> list[NDArray[Any]]:
    """The ranks' inputs, a residual, a row vector (one row of several), and what all-reduce makes of the inputs."""
    n = comm.world_size
    xs = [checks.inputs(seed, r, n, rows * columns, dtype).reshape(rows, columns) for r in range(n + 2)]
    return [*xs, checks.reduce_reference(xs[:n])]


def fused_once(
    comm: fcomm.Communicator, name: str, dtype: str, rows: int, columns: int, seed: tuple[int, ...],
    *, shape: tuple[int, int] | None = None, offset: int = 0, in_place: bool = False,
) -> None:  # fmt: skip
    """Residual add and RMSNorm in one verified all-reduce, and by separate kernels, with the same bits."""
    *xs, residual, vectors, total = rows_of(comm, seed, rows, columns, dtype)
    want_residual = checks.add_residual(total, residual)
    want = checks.rms_norm(want_residual, vectors[0], 1e-6)
    what = f"{name} {dtype} {rows} x {columns} seed={seed} shape={shape}"

    def array(host: NDArray[Any]) -> Any:
        return place(comm, host.reshape(-1), offset).reshape(host.shape)

    x, r, w = array(xs[comm.rank]), array(residual), array(vectors[0])
    kept = r if in_place else poisoned(comm, rows * columns, dtype, offset).reshape(rows, columns)
    out = x if in_place else poisoned(comm, rows * columns, dtype, offset).reshape(rows, columns)
    epilogue = fcomm.epilogue.add_rms_norm(residual=r, residual_out=kept, weight=w, epsilon=1e-6)
    comm.all_reduce(x, out, protocol=name, shape=shape, epilogue=epilogue)
    for got, exact, which in ((out, want, "results"), (kept, want_residual, "new residuals")):
        assert checks.wrong_elements(comm.to_host(got), exact) == 0, f"{what}: {which} of rank {comm.rank}"
    x, r = array(xs[comm.rank]), array(residual)
    added = comm.apply(fcomm.epilogue.add_residual(residual=r), comm.all_reduce(x))
    apart = comm.apply(fcomm.epilogue.rms_norm(weight=w, epsilon=1e-6), added)
    assert checks.wrong_elements(comm.to_host(apart), want) == 0, f"{what}: separate kernels on rank {comm.rank}"


@case
def epilogues_have_the_bits_of_separate_kernels(comm: fcomm.Communicator) -> None:
    if comm.world_size not in (1, *FEW):
        return
    dtype = "bfloat16" if "bfloat16" in DTYPES else float_dtype()
    fused_once(comm, "one_shot.ll", dtype, 5, 1000, (70,))
    fused_once(comm, "auto", dtype, 5, 1000, (71,), in_place=True)
    fused_once(
        comm, "one_shot.ll", dtype, 37, 1000, (72,), in_place=True
    )  # more than a slot takes: in pieces of whole rows
    if comm.world_size > 1:
        elementwise_once(comm, "two_shot.ll", dtype, 1003, (73,))
        with make(comm, timeout_s=0.3) as victim:
            _hang_of_rows(victim, dtype)
        _apart(comm, dtype)
    _layer_norm(comm, page_example())


def _apart(comm: fcomm.Communicator, dtype: str) -> None:
    """Protocols that cannot have the epilogue and are forced on "auto", or all that is left: two kernels, the same bits."""
    for settings in ({"FCOMM_PROTOCOL": "two_shot.ll"}, {"FCOMM_PLAIN": "1"}):
        with environment(**settings), make(comm) as other:
            *xs, residual, vectors, total = rows_of(comm, (80,), 5, 1000, dtype)
            x, r, w = (other.from_host(a) for a in (xs[comm.rank], residual, vectors[0]))
            kept = other.from_host(residual)
            epilogue = fcomm.epilogue.add_rms_norm(residual=r, residual_out=kept, weight=w, epsilon=1e-6)
            call = other.prepare("all_reduce", x, r, epilogue=epilogue)  # the output is what it reads
            assert not call.fused, call.protocol
            call()
            want = checks.add_residual(total, residual)
            assert checks.wrong_elements(other.to_host(kept), want) == 0, settings
            assert checks.wrong_elements(other.to_host(r), checks.rms_norm(want, vectors[0], 1e-6)) == 0, settings


def page_example() -> fcomm.Epilogue:
    """The epilogue of docs/epilogue.md, as its readers would copy it."""
    text = (Path(__file__).parents[1] / "docs" / "epilogue.md").read_text()
    lines = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "fcomm.Epilogue(" in b)
    space: dict[str, Any] = {}
    exec(lines.rsplit("\ny = ", 1)[0], space)
    made: fcomm.Epilogue = space["layer_norm"]
    return made


def _layer_norm(comm: fcomm.Communicator, layer_norm: fcomm.Epilogue) -> None:
    *xs, _, vectors, total = rows_of(comm, (79,), 3, 96, "float32")
    one = np.float32
    mean = (checks.tree_sum(total) / one(96))[:, None]
    variance = checks.tree_sum((total - mean) * (total - mean)) / one(96)
    scale = (one(1) / np.sqrt(variance + one(1e-5)))[:, None]
    x, w = comm.from_host(xs[comm.rank]), comm.from_host(vectors[0])
    got = comm.all_reduce(x, protocol="one_shot.ll", epilogue=layer_norm(weight=w, epsilon=1e-5))
    assert checks.wrong_elements(comm.to_host(got), (total - mean) * scale * vectors[0]) == 0


def _hang_of_rows(comm: fcomm.Communicator, dtype: str) -> None:
    """A block whose threads meet in the row's sum: those that gave up must not leave the others waiting there."""
    x = comm.from_host(np.ones((5, 1000), REDUCIBLE[dtype].numpy))
    epilogue = fcomm.epilogue.add_rms_norm(
        residual=x, residual_out=comm.from_host(comm.to_host(x)), weight=x[0], epsilon=1e-6
    )
    if comm.rank > 0:
        with refused(f"rank {comm.rank} gave up waiting for rank 0", "one_shot.ll", f"{x.nbytes} bytes"):
            comm.all_reduce(x, protocol="one_shot.ll", epilogue=epilogue)
            comm.backend.synchronize()
            comm.check()
    comm.reset()
    fused_once(comm, "one_shot.ll", dtype, 5, 1000, (78,))


def elementwise_once(comm: fcomm.Communicator, name: str, dtype: str, count: int, seed: tuple[int, ...]) -> None:
    """A caller's own epilogue on any number of elements, verified; and its index where the message goes in pieces."""
    n = comm.world_size
    xs = [checks.inputs(seed, r, n, count, dtype) for r in range(n)]
    total = checks.reduce_reference(xs).astype(np.float32)
    with np.errstate(all="ignore"):
        want = np.where(total > 0, total * np.float32(0.3), (np.arange(count) & 3).astype(np.float32))
    out = poisoned(comm, count, dtype)
    comm.all_reduce(comm.from_host(xs[comm.rank]), out, protocol=name, epilogue=SCALED_RELU(scale=0.3))
    wrong = checks.wrong_elements(comm.to_host(out), checks.rounded(want, xs[0].dtype))
    assert wrong == 0, f"{name} {dtype} count={count}: {wrong} wrong elements on rank {comm.rank}"


def every_epilogue(comm: fcomm.Communicator) -> None:
    """All that the light case has some of: protocols, dtypes, grids, alignments. For the long tests."""
    for p, dtype in reducing(comm):
        if dtype == "int32":
            continue
        if SCALED_RELU.refusal(p) is None:
            for k, count in enumerate((1, 7, 33, 1003, 40001)):
                elementwise_once(comm, p.name, dtype, count, (74, k))
        if fcomm.epilogue.add_rms_norm.refusal(p) is not None:
            continue
        size = REDUCIBLE[dtype].itemsize
        for k, columns in enumerate((16 // size, 2880 // size, 4096)):
            for j, shape in enumerate((None, (1, 512), (3, 512))):
                fused_once(comm, p.name, dtype, (1, 3, 11)[k], columns, (75, k, j), shape=shape, offset=k % 2)
    with make(comm) as other:
        fused_once(other, "auto", float_dtype(), 2, 1024, (76,), in_place=True)


@case
def epilogues_that_are_refused(comm: fcomm.Communicator) -> None:
    if comm.world_size not in FEW:
        return
    norm = fcomm.epilogue.add_rms_norm
    x, r, out = (comm.from_host(np.ones((4, 64), np.float32)) for _ in range(3))
    w = comm.from_host(np.ones(64, np.float32))
    good = {"residual": r, "residual_out": r, "weight": w, "epsilon": 1e-6}

    def call(x: Any = x, out: Any = out, protocol: str = "auto", **changes: Any) -> None:
        comm.all_reduce(x, out, protocol=protocol, epilogue=norm(**{**good, **changes}))

    with refused("two_shot.ll is not admitted here", "needs whole rows", "use one_shot"):
        call(protocol="two_shot.ll")
    with refused("one_shot.flag", "a chunk of flag is no row"):
        call(protocol="one_shot.flag")
    for name in ("one_shot.ll16", "one_shot.ll128"):
        with refused(name, "pieces of 16 bytes"):
            call(protocol=name)
    with refused("barrier.one_shot", "only flash-comm's own all-reduces have epilogues"):
        call(protocol="barrier.one_shot")
    with refused("two_shot.ll+ll128 is not admitted here", "reads its sums back from the output"):
        comm.all_reduce(x, protocol="two_shot.ll+ll128", epilogue=SCALED_RELU(scale=1.0))
    with refused("all_reduce has epilogues, all_gather has none"):
        comm.prepare("all_gather", x, epilogue=SCALED_RELU(scale=1.0))
    with refused("takes float32, float16 or bfloat16, not int32"):
        comm.all_reduce(comm.from_host(np.ones(64, np.int32)), epilogue=SCALED_RELU(scale=1.0))
    odd = comm.from_host(np.ones((4, 63), np.float32))
    with refused("multiple of 16 bytes", "63 elements, 252 bytes"):
        call(x=odd, out=None)
    with refused("weight is float32 (4, 64)", "must be float32 (64,)"):
        call(weight=x)
    with refused("residual is float32 (2, 64)", "must be float32 (4, 64)"):
        call(residual=r[:2])
    with refused("residual_out is not C-contiguous"):
        call(residual_out=comm.from_host(np.ones((4, 128), np.float32))[:, ::2])
    with refused("residual_out overlaps the output"):
        call(residual_out=out)
    both = comm.from_host(np.ones((5, 64), np.float32))
    with refused("residual_out overlaps residual", "one and the same array"):
        call(residual=both[:4], residual_out=both[1:])
    with refused("the output overlaps weight"):
        call(out=both[:4], weight=both[3])
    with refused("a row of 262144 bytes does not fit into a slot", "larger max_bytes"):
        long = comm.from_host(np.ones((1, 1 << 16), np.float32))
        comm.all_reduce(long, protocol="one_shot.ll", epilogue=fcomm.epilogue.rms_norm(weight=long[0], epsilon=1e-6))
    with refused("too long for blocks of 32 threads"):
        row = comm.from_host(np.ones((1, 2048), np.float32))
        comm.all_reduce(
            row, protocol="one_shot.ll", shape=(1, 32), epilogue=fcomm.epilogue.rms_norm(weight=row[0], epsilon=1e-6)
        )
    broken = fcomm.Epilogue("broken", "values.map([](f32 sum, u64) { return sum +; });")
    with refused("could not compile", "broken"):
        comm.all_reduce(x, epilogue=broken())
    reduce_once(comm, "one_shot.ll", "float32", 256, (77,))
    few = comm.from_host(np.ones(8, REDUCIBLE["bfloat16"].numpy))
    with make(comm, checked=True) as careful, refused("disagree", "nothing was launched"):
        careful.all_reduce(few, protocol="two_shot.ll", epilogue=SCALED_RELU(scale=1.0 + comm.rank))


LONG_CASES: dict[str, Case] = {f.__name__: f for f in (every_epilogue,)}
"""Cases that only the long tests run."""

# ---- running the table ----------------------------------------------------------------------------------------------

MANY_CALLS = 500


@case
def a_communicator_of_a_variant_runs_its_kernels(comm: fcomm.Communicator) -> None:
    if comm.world_size not in FEW:
        return
    with make(comm, variant="poll_one") as other:
        asked: list[str] = []
        kernel = other.backend.kernel

        def heard(spec: Any) -> Any:
            asked.append(spec.name)
            return kernel(spec)

        with mock.patch.object(other.backend, "kernel", heard):
            reduce_once(other, "one_shot.ll", "float32", 100, (90,))
        assert asked
        assert all(name.endswith("-poll_one") for name in asked), asked


def make(comm: fcomm.Communicator, **options: Any) -> fcomm.Communicator:
    return fcomm.Communicator(comm.mpi, **{"backend": comm.backend.name, "max_bytes": 1 << 16, **options})


def run_case(mpi: MPI.Intracomm, backend: str, function: Case) -> float:
    """Runs one case on a communicator of its own; seconds it took. A rank that fails ends all of them: the others may
    wait for it anywhere, and what they would do next says nothing."""
    start = time.monotonic()
    try:
        with fcomm.Communicator(mpi, backend=backend, max_bytes=1 << 16, timeout_s=20) as comm:
            function(comm)
    except Exception:
        trace = traceback.format_exc().replace("\n", "\n    ")
        print(f"FAIL {function.__name__} on rank {mpi.rank}\n    {trace}", flush=True)
        time.sleep(0.2)  # the launcher passes the line on before it ends the others
        mpi.Abort(1)
    mpi.Barrier()
    return time.monotonic() - start


def main() -> int:
    global MANY_CALLS, DTYPES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), help="element types of the table")
    parser.add_argument("--calls", type=int, default=MANY_CALLS, help="calls of the case with fresh data in each")
    options = parser.parse_args()
    MANY_CALLS, DTYPES = options.calls, tuple(options.dtypes)
    mpi = MPI.COMM_WORLD
    for name in options.cases:
        seconds = run_case(mpi, options.backend, {**CASES, **LONG_CASES}[name])
        if mpi.rank == 0:
            print(f"PASS {name} {seconds:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
