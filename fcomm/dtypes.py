"""Element types: the name that users see, the kernel's type, and NumPy's."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fcomm.errors import ArgumentError


@dataclass(frozen=True)
class ElementType:
    """One element type that kernels know.

    `kernel_type` is its struct in ``kernels_cu/reduce.cuh``; `itemsize` is in bytes.
    """

    name: str
    kernel_type: str
    itemsize: int
    is_float: bool
    numpy: np.dtype[np.generic]


FLOAT32 = ElementType("float32", "F32", 4, True, np.dtype(np.float32))
FLOAT16 = ElementType("float16", "F16", 2, True, np.dtype(np.float16))
BFLOAT16 = ElementType("bfloat16", "BF16", 2, True, np.dtype(ml_dtypes.bfloat16))
INT32 = ElementType("int32", "I32", 4, False, np.dtype(np.int32))
BYTES = ElementType("bytes", "Bytes", 1, False, np.dtype(np.uint8))

REDUCIBLE = {t.name: t for t in (FLOAT32, FLOAT16, BFLOAT16, INT32)}
ALIASES = {"f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16", "half": "float16"}
ALIASES |= {"bf16": "bfloat16", "i32": "int32"}


def reducible(name: str) -> ElementType:
    """The element type called `name` (or an alias such as ``bf16``); `ArgumentError` where it cannot be summed."""
    found = REDUCIBLE.get(ALIASES.get(name, name))
    if found is None:
        raise ArgumentError(f"dtype {name} cannot be reduced; use one of {', '.join(REDUCIBLE)}")
    return found


def movable(name: str) -> tuple[str, int]:
    """Name and bytes of any element type of fixed size, for what only moves bytes; `ArgumentError` where there is no such type."""
    if name == BYTES.name:
        return name, BYTES.itemsize
    try:
        found = np.dtype(ALIASES.get(name, name))
    except TypeError:
        raise ArgumentError(f"there is no dtype {name!r}: use a name of NumPy's, such as int8, or bfloat16") from None
    if found.hasobject or not found.itemsize:
        raise ArgumentError(f"dtype {name!r} has no bytes that could be sent")
    return found.name, found.itemsize
