"""Message sizes as people write them: 64K, 1M, 1 MiB."""

from __future__ import annotations

import re

from fcomm.errors import ArgumentError

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "mb": 1 << 20}
_SIZE = re.compile(r"\s*(\d+)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes in a size such as ``512``, ``64K`` or ``1MiB`` (powers of two); `ArgumentError` where it is none."""
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        raise ArgumentError(f"{text!r} is not a size; write bytes, or a number with K or M, such as 64K")
    return int(found.group(1)) * unit


def format_size(nbytes: int) -> str:
    """The shortest exact spelling: 1 MiB, 64 KiB, 100 B."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
