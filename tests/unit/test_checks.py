"""The reference that everything is compared with, itself compared with hand-computed cases and a slow independent sum."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fcomm import checks
from fcomm.dtypes import REDUCIBLE

FLOATS = [name for name, t in REDUCIBLE.items() if t.is_float]


def arrays(dtype: str, *ranks: Sequence[float]) -> list[NDArray[Any]]:
    return [np.array(values, np.float32).astype(REDUCIBLE[dtype].numpy) for values in ranks]


def words(x: NDArray[Any]) -> list[int]:
    return [int(v) for v in checks.bits(x)]


# ---- hand-computed cases --------------------------------------------------------------------------------------------


def test_the_order_is_rank_order() -> None:
    a, b, c = [2.0**24], [1.0], [-(2.0**24)]
    assert checks.reduce_reference(arrays("float32", a, b, c))[0] == 0.0  # 2^24 + 1 is 2^24 in float32
    assert checks.reduce_reference(arrays("float32", a, c, b))[0] == 1.0


@pytest.mark.parametrize(
    ("dtype", "small", "want"), [("bfloat16", 2.0**-9, 1.015625), ("float16", 2.0**-12, 1.001953125)]
)
def test_rounded_once_at_the_end(dtype: str, small: float, want: float) -> None:
    """One at a time in 16 bits, each of the seven would be lost."""
    xs = arrays(dtype, [1.0], *[[small]] * 7)
    one_at_a_time = xs[0]
    for x in xs[1:]:
        one_at_a_time = (one_at_a_time + x).astype(xs[0].dtype)
    assert float(one_at_a_time[0]) == 1.0
    assert float(checks.reduce_reference(xs)[0]) == want


def test_a_tie_goes_to_even() -> None:
    assert words(checks.reduce_reference(arrays("bfloat16", [1.0, 1.0078125], [2.0**-8, 2.0**-8]))) == [0x3F80, 0x3F82]
    assert words(checks.reduce_reference(arrays("float16", [1.0], [2.0**-11]))) == [0x3C00]


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_keep_their_sign_as_ieee_says(dtype: str) -> None:
    minus = [-0.0, -0.0, 0.0, 1.0]
    got = checks.reduce_reference(arrays(dtype, minus, [-0.0, 0.0, 0.0, -1.0], [-0.0, -0.0, 0.0, -0.0]))
    assert np.signbit(got).tolist() == [True, False, False, False]
    assert (got == 0).all()


@pytest.mark.parametrize(("dtype", "nan"), [("float32", 0x7FFFFFFF), ("float16", 0x7FFF), ("bfloat16", 0x7FFF)])
def test_a_nan_result_is_canonical(dtype: str, nan: int) -> None:
    xs = arrays(dtype, [math.inf, 1, 1], [-math.inf, 1, 1])
    xs[0][1], xs[1][2] = np.array([math.nan, -math.nan], np.float32).astype(xs[0].dtype)
    assert words(checks.reduce_reference(xs)) == [nan] * 3


def test_signalling_nans_too() -> None:
    xs = [np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32), np.ones(2, np.float32)]
    assert words(checks.reduce_reference(xs)) == [0x7FFFFFFF] * 2


def test_overflow_is_infinity() -> None:
    assert words(checks.reduce_reference(arrays("float16", [65504, 65504, -65504], [15, 16, -16]))) == [
        0x7BFF,
        0x7C00,
        0xFC00,
    ]
    largest = float(np.finfo(np.float32).max)
    assert words(checks.reduce_reference(arrays("float32", [largest], [largest]))) == [0x7F800000]
    assert words(checks.reduce_reference(arrays("bfloat16", [3.38e38], [3.38e38]))) == [0x7F80]


def test_float16_does_not_overflow_on_the_way() -> None:
    assert words(checks.reduce_reference(arrays("float16", [65504], [65504], [-65504]))) == [0x7BFF]


def test_subnormals_are_kept() -> None:
    one = np.array([1], np.uint32).view(np.float32)
    assert words(checks.reduce_reference([one, one, one])) == [3]
    half = np.array([1], np.uint16).view(np.float16)
    assert words(checks.reduce_reference([half, half])) == [2]


def test_integers_wrap_as_unsigned() -> None:
    xs = [np.array([2**31 - 1, -(2**31), -1], np.int32), np.array([1, -1, 1], np.int32)]
    assert checks.reduce_reference(xs).tolist() == [-(2**31), 2**31 - 1, 0]
    assert checks.reduce_reference(xs).dtype == np.int32


def test_one_rank_gets_its_own_bits_back() -> None:
    x = np.array([0xFFFFFFFF, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
    y = checks.reduce_reference([x])
    assert words(y) == words(x)
    assert not np.shares_memory(x, y)


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_inputs_stay_as_they_were_and_shapes_are_kept(dtype: str) -> None:
    xs = [checks.inputs(0, r, 3, 24, dtype).reshape(2, 3, 4) for r in range(3)]
    before = [x.tobytes() for x in xs]
    assert checks.reduce_reference(xs).shape == (2, 3, 4)
    assert [x.tobytes() for x in xs] == before


# ---- against an independent sum -------------------------------------------------------------------------------------


def float32_of(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def to_float32(value: float) -> float:
    """Nearest float32 of a double that is the sum of two float32: rounding twice is harmless for such a sum."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def decode(word: int, dtype: str) -> float:
    if dtype == "float32":
        return float32_of(word)
    if dtype == "bfloat16":
        return float32_of(word << 16)
    sign, exponent, mantissa = (-1.0) ** (word >> 15), word >> 10 & 31, word & 1023
    if exponent == 31:
        return math.nan if mantissa else sign * math.inf
    return sign * (math.ldexp(mantissa, -24) if exponent == 0 else math.ldexp(1024 + mantissa, exponent - 25))


def encode(value: float, dtype: str) -> int:
    """The bits of the nearest value of the type; a tie goes to the even one."""
    if math.isnan(value):
        return 0x7FFFFFFF if dtype == "float32" else 0x7FFF
    if dtype == "float32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    infinity = 0x7C00 if dtype == "float16" else 0x7F80
    sign = 0x8000 if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign | infinity
    low, high = 0, infinity  # bisect the non-negative values, whose bits have their order
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if decode(middle, dtype) <= abs(value) else (low, middle)
    exact = Fraction(abs(value))
    # Infinity counts as the next power of two would.
    top = Fraction(2) ** (16 if dtype == "float16" else 128) if high == infinity else Fraction(decode(high, dtype))
    below, above = exact - Fraction(decode(low, dtype)), top - exact
    return sign | (low if below < above or (below == above and low % 2 == 0) else high)


def slow_sum(column: Sequence[int], dtype: str) -> int:
    if dtype == "int32":
        return sum(column) % (1 << 32)
    total = decode(column[0], dtype)
    for word in column[1:]:
        total = to_float32(total + decode(word, dtype))
    return encode(total, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_slow_sum_itself(dtype: str) -> None:
    every = np.arange(1 << 16).astype(np.uint16).view(REDUCIBLE[dtype].numpy)
    with np.errstate(invalid="ignore"):
        wide = every.astype(np.float64).tolist()
    for word, value in enumerate(wide):
        mine = decode(word, dtype)
        assert mine == value or (math.isnan(mine) and math.isnan(value))
        if word % 7 == 0 and value == value:
            assert encode(mine, dtype) == word


patterns = {
    "float32": st.integers(0, 2**32 - 1)
    | st.sampled_from([0, 1 << 31, 0x7F800000, 0x3F800000, 0xBF800000, 1, 0x7F7FFFFF]),
    "int32": st.integers(0, 2**32 - 1),
    "float16": st.integers(0, 2**16 - 1) | st.sampled_from([0, 1 << 15, 0x7C00, 0x3C00, 0xBC00, 1, 0x7BFF]),
    "bfloat16": st.integers(0, 2**16 - 1) | st.sampled_from([0, 1 << 15, 0x7F80, 0x3F80, 0xBF80, 1, 0x7F7F]),
}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(REDUCIBLE)), st.integers(2, 8))
def test_the_reference_is_the_slow_sum(data: st.DataObject, dtype: str, n: int) -> None:
    columns = data.draw(st.lists(st.lists(patterns[dtype], min_size=n, max_size=n), min_size=1, max_size=8))
    check_against_slow_sum(columns, dtype, n)


@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_reference_is_the_slow_sum_on_the_inputs_of_the_tests(dtype: str, n: int) -> None:
    xs = [checks.inputs(5, r, n, 200, dtype) for r in range(n)]
    check_against_slow_sum([list(column) for column in zip(*map(words, xs), strict=True)], dtype, n)


def check_against_slow_sum(columns: list[list[int]], dtype: str, n: int) -> None:
    element = REDUCIBLE[dtype]
    xs = [np.array([c[r] for c in columns], f"u{element.itemsize}").view(element.numpy) for r in range(n)]
    assert words(checks.reduce_reference(xs)) == [slow_sum(c, dtype) for c in columns]


# ---- counting, inputs -----------------------------------------------------------------------------------------------


def test_wrong_elements_are_counted_by_bits() -> None:
    x = np.array([1.0, 0.0, np.nan, 3.0], np.float32)
    assert checks.wrong_elements(x, x.copy()) == 0, "a NaN equals itself"
    y = x.copy()
    y[1] = -0.0
    y[3] = np.nextafter(y[3], np.float32(4))
    assert checks.wrong_elements(x, y) == 2
    assert checks.wrong_elements(x, x[:3]) == 4, "a missing element makes all wrong"
    assert checks.wrong_elements(x.reshape(2, 2), x) == 0


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_inputs_differ_by_seed_call_and_rank_and_can_be_made_again(dtype: str) -> None:
    made = {
        (seed, rank): checks.inputs(seed, rank, 4, 500, dtype).tobytes()
        for seed in (1, 2, (1, 1), (1, 2), (2, 1))
        for rank in range(4)
    }
    assert len(set(made.values())) == len(made)
    assert checks.inputs((1, 2), 3, 4, 500, dtype).tobytes() == made[(1, 2), 3]
    assert checks.inputs(1, 0, 4, 500, dtype).dtype == REDUCIBLE[dtype].numpy


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 8])
def test_the_order_of_summation_shows_in_a_quarter_of_the_elements(dtype: str, n: int) -> None:
    xs = [checks.inputs((7, n), r, n, 4000, dtype) for r in range(n)]
    assert all(np.isfinite(x.astype(np.float32)).all() for x in xs)
    assert np.isfinite(checks.reduce_reference(xs).astype(np.float32)).all()
    assert checks.order_shows(xs) > 0.25 * 4000


@pytest.mark.parametrize("dtype", FLOATS)
def test_beginning_with_the_own_value_shows_too(dtype: str) -> None:
    """The flaw of libraries whose ranks begin with what they have at hand: ranks differ from each other."""
    xs = [checks.inputs(8, r, 4, 4000, dtype) for r in range(4)]
    own_first = checks.reduce_reference([xs[2], xs[0], xs[1], xs[3]])
    assert checks.wrong_elements(own_first, checks.reduce_reference(xs)) > 0.1 * 4000


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_poison_is_never_a_result(dtype: str) -> None:
    out = np.zeros(100, REDUCIBLE[dtype].numpy)
    checks.poison(out)
    assert (out.view(np.uint8) == 0xA5).all()
    want = checks.reduce_reference([checks.inputs(9, r, 2, 100, dtype) for r in range(2)])
    assert checks.wrong_elements(out, want) == 100


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_have_every_kind(dtype: str) -> None:
    values = checks.special_values(dtype)
    assert values.dtype == REDUCIBLE[dtype].numpy
    with np.errstate(invalid="ignore"):
        wide, ones = values.astype(np.float64), (1 << 8 * values.itemsize) - 1
    tiny = 2.0**-14 if dtype == "float16" else 2.0**-126  # the smallest normal value
    subnormal = (wide != 0) & (np.abs(wide) < tiny)
    assert {True, False} == set(np.signbit(wide[wide == 0]))
    assert subnormal.any()
    assert {True, False} == set(np.signbit(wide[np.isinf(wide)]))
    assert np.isnan(wide).sum() >= 3
    assert ones in words(values), "the all-ones word is a sentinel of Lamport encodings"
