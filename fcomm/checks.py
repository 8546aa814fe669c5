"""What results must be, to the bit: the reduction contract in NumPy, and inputs on which breaking it shows.

The reference shares no code with the kernels. NumPy's float32 addition is IEEE's, one element at a time; conversions to
16 bits are NumPy's and ml_dtypes' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fcomm.dtypes import REDUCIBLE
from fcomm.protocols import Protocol

CANONICAL_NAN = {4: 0x7FFFFFFF, 2: 0x7FFF}
"""Bits of a NaN result, by element size in bytes."""
ZERO_NOT_SENT = {"custom_ar_v2.push": 0.0, "sentinel.all_gather": 0.0, "lamport_fp": -0.0}
"""The zero that stands for "not arrived" in a baseline's slots: the other one is sent in its place."""


def bits(x: NDArray[Any]) -> NDArray[Any]:
    """The array's elements as unsigned integers of the same size."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.view(f"u{flat.dtype.itemsize}") if flat.dtype.itemsize in (1, 2, 4, 8) else flat.view(np.uint8)


def wrong_elements(got: NDArray[Any], want: NDArray[Any]) -> int:
    """Number of elements whose bits differ."""
    a, b = bits(got), bits(want)
    if a.shape != b.shape:
        return max(a.size, b.size)
    return int(np.count_nonzero(a != b))


def beyond_order(xs: Sequence[NDArray[Any]], got: NDArray[Any]) -> int:
    """Number of elements that are not a sum of the ranks' arrays xs in some order, as the contract would round it.

    Two float32 sums of n terms differ by (n - 1) 2^-23 times the sum of the terms' magnitudes at most, as each lies within half
    of that of the exact one (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2: each of n - 1 additions
    contributes a relative error of 2^-24); then each is rounded to the element type, by half a unit in its last place. Results
    that are not finite must have the contract's bits, and so must integers.
    """
    want = reduce_reference(xs).reshape(-1)
    flat = np.ascontiguousarray(got).reshape(-1)
    other = bits(flat) != bits(want)
    if want.dtype.kind in "iu":
        return int(np.count_nonzero(other))
    info: Any = ml_dtypes.finfo(want.dtype)  # type: ignore[no-untyped-call]
    with np.errstate(all="ignore"):
        a, b = flat.astype(np.float64), want.astype(np.float64)
        magnitude = sum(np.abs(x.reshape(-1).astype(np.float64)) for x in xs)
        allowed = (len(xs) - 1) * 2.0**-23 * magnitude
        allowed += float(info.eps) / 2 * (np.abs(a) + np.abs(b)) + float(info.smallest_subnormal)
        near = np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= allowed)
    return int(np.count_nonzero(other & ~near))


def reduce_reference(xs: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Sum of the ranks' arrays by the contract: float32 accumulation in rank order beginning with rank 0's value, one
    rounding to nearest even at the end; integers as unsigned; NaN results canonical. One array is returned as it is.
    """
    first = np.asarray(xs[0])
    if len(xs) == 1:
        return first.copy()
    if first.dtype.kind in "iu":
        words = [np.asarray(x).view(np.uint32) for x in xs]
        total = words[0].copy()
        for w in words[1:]:
            total = total + w
        return total.view(first.dtype)
    with np.errstate(all="ignore"):
        acc = first.astype(np.float32)
        for x in xs[1:]:
            acc = acc + np.asarray(x).astype(np.float32)
    return rounded(acc, first.dtype)


def rounded(x: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The array in another float type, to nearest even, its NaNs canonical."""
    with np.errstate(all="ignore"):
        out = x.astype(dtype)
    flat = out.reshape(-1)
    flat.view(f"u{flat.dtype.itemsize}")[np.isnan(x.reshape(-1))] = CANONICAL_NAN[flat.dtype.itemsize]
    return out


def tree_sum(terms: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums over the last axis as an epilogue's `values.sum` adds them: neighbours, then neighbouring sums, and so on; what a power
    of two has more than there are terms counts as zeros.
    """
    count = terms.shape[-1]
    more = (1 << (count - 1).bit_length()) - count
    level = np.concatenate([terms, np.zeros((*terms.shape[:-1], more), np.float32)], axis=-1)
    with np.errstate(all="ignore"):
        while level.shape[-1] > 1:
            level = level[..., 0::2] + level[..., 1::2]
        total: NDArray[np.float32] = level[..., 0] + np.float32(0)
    return total


def add_residual(x: NDArray[Any], residual: NDArray[Any]) -> NDArray[Any]:
    """What `epilogue.add_residual` makes of x: the sum in float32, rounded to x's type."""
    with np.errstate(all="ignore"):
        return rounded(x.astype(np.float32) + residual.astype(np.float32), x.dtype)


def rms_norm(x: NDArray[Any], weight: NDArray[Any], epsilon: float) -> NDArray[Any]:
    """What `epilogue.rms_norm` makes of x: rows are the last axis, all in float32, rounded to x's type once."""
    wide = x.astype(np.float32)
    with np.errstate(all="ignore"):
        mean = tree_sum(wide * wide) / np.float32(x.shape[-1])
        scale = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
        return rounded(wide * scale[..., None] * weight.astype(np.float32), x.dtype)


def as_sent(name: str, x: NDArray[Any]) -> NDArray[Any]:
    """What of x arrives by the protocol of that name: one zero for another, where its evidence is a zero."""
    if name not in ZERO_NOT_SENT or np.dtype(x.dtype).kind in "iu":
        return x
    never = np.array(ZERO_NOT_SENT[name], x.dtype)
    replaced = bits(x) == bits(never)
    if not replaced.any():
        return x
    out = x.copy()
    out.reshape(-1)[replaced] = -never
    return out


def expected(p: Protocol, xs: Sequence[NDArray[Any]], rank: int) -> NDArray[Any]:
    """What the protocol leaves on a rank, flat, when the ranks' inputs are xs: the contract, applied to what it sends.

    p : the protocol that runs, not a name for several (see `Protocol.at`).
    """
    sent = [as_sent(p.name, x.reshape(-1)) for x in xs]
    if p.collective == "all_gather":
        return np.concatenate(sent)
    if p.collective == "reduce_scatter":
        part = len(sent[0]) // len(sent)
        return reduce_reference([x[rank * part : (rank + 1) * part] for x in sent])
    return reduce_reference(sent)


def inputs(seed: int | Sequence[int], rank: int, world_size: int, count: int, dtype: str) -> NDArray[Any]:
    """Random data of one rank, different in every call, on which the order of summation shows.

    In half of the elements two ranks, chosen at random, hold a large value and its negative, and the others values so
    small that float32 loses them while the large one is in the sum: what is left depends on who came before whom. The
    other half has magnitudes spread over many binades. Any rank can compute any other rank's data from the arguments.
    """
    key = [seed] if isinstance(seed, int) else list(seed)
    rng = np.random.default_rng([*key, 77, rank])
    element = REDUCIBLE[dtype]
    if not element.is_float:
        return rng.integers(-(2**31), 2**31, count, dtype=np.int64).astype(np.int32)
    values = rng.standard_normal(count, dtype=np.float32)
    values *= np.exp2(rng.integers(-12, 3, count)).astype(np.float32)
    if world_size > 2:
        shared = np.random.default_rng([*key, 78])  # the same on all ranks
        plus = shared.integers(0, world_size, count)
        minus = (plus + shared.integers(1, world_size, count)) % world_size
        large = (shared.integers(1, 16, count) * 2048).astype(np.float32)
        cancels = shared.integers(0, 2, count) == 1
        small = values * np.float32(2.0**-11)
        values = np.where(cancels, np.where(plus == rank, large, np.where(minus == rank, -large, small)), values)
    return values.astype(element.numpy)


def beyond_rounding(xs: Sequence[NDArray[Any]], got: NDArray[Any]) -> int:
    """Elements that no order of summation explains, with every partial sum rounded to the elements' own type; integers exact.

    A sum of n terms in any order is within (n - 1) u / (1 - (n - 1) u) times the sum of their magnitudes of the exact one, u
    being half the distance from 1 to the next number (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2);
    beside it half of the smallest subnormal for each addition.
    """
    if got.dtype.kind in "iu":
        return wrong_elements(got, reduce_reference(xs))
    info: Any = ml_dtypes.finfo(got.dtype)  # type: ignore[no-untyped-call]
    n, u = len(xs) - 1, float(info.eps) / 2
    terms = [np.asarray(x).reshape(-1).astype(np.float64) for x in xs]
    bound = n * u / (1 - n * u) * sum(np.abs(t) for t in terms) + n * float(info.smallest_subnormal) / 2
    error = np.abs(got.reshape(-1).astype(np.float64) - sum(terms))
    return int(np.count_nonzero(~(error <= bound)))  # a NaN is beyond any bound


def order_shows(xs: Sequence[NDArray[Any]]) -> int:
    """Elements whose bits differ between rank order and the reverse: how well inputs can tell orders apart."""
    return wrong_elements(reduce_reference(xs), reduce_reference(list(reversed(xs))))


def poison(x: NDArray[Any]) -> None:
    """Fills an output so that an element that a call fails to write is seen: a NaN that no sum returns, or a pattern."""
    x.reshape(-1).view(np.uint8)[:] = 0xA5


def special_values(dtype: str) -> NDArray[Any]:
    """Values at the edges: zeros of both signs, subnormals, largest, infinities, quiet and signalling NaNs, all ones."""
    element = REDUCIBLE[dtype]
    if dtype == "float32":
        words = np.array(
            [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
             0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF, 0x3F800000, 0xBF800000],
            np.uint32,
        )  # fmt: skip
        return words.view(np.float32)
    if dtype == "int32":
        return np.array([0, 1, -1, 2**31 - 1, -(2**31), 2, 3, 0x7FFF0000], np.int64).astype(np.int32)
    if dtype == "float16":
        half = [
            0,
            0x8000,
            1,
            0x8001,
            0x03FF,
            0x0400,
            0x7BFF,
            0xFBFF,
            0x7C00,
            0xFC00,
            0x7E00,
            0x7C01,
            0xFFFF,
            0x7FFF,
            0x3C00,
        ]
        return np.array(half, np.uint16).view(np.float16)
    brain = [
        0,
        0x8000,
        1,
        0x8001,
        0x007F,
        0x0080,
        0x7F7F,
        0xFF7F,
        0x7F80,
        0xFF80,
        0x7FC0,
        0x7F81,
        0xFFFF,
        0x7FFF,
        0x3F80,
    ]
    return np.array(brain, np.uint16).view(element.numpy if dtype == "bfloat16" else ml_dtypes.bfloat16)
