"""Message sizes: as people write them (4096, 64K, 1MiB), and rounded up to what they are laid out in."""

from __future__ import annotations

import re

from fcomm.errors import ArgumentError

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(?:I?B)?|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `4096`, `4K`, `4KiB`, `1M`; units are binary. `ArgumentError` for anything else, and for 0."""
    found = _SIZE.fullmatch(text.strip())
    nbytes = int(found[1]) << _UNITS[(found[2] or "").upper()] if found else 0
    if nbytes <= 0:
        raise ArgumentError(f"{text.strip()!r} is not a size: use a positive number of bytes such as 4096, 4K or 1M")
    return nbytes


def format_size(nbytes: int) -> str:
    """The shortest exact spelling: `512 B`, `4 KiB`, `1 MiB`."""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def round_up(value: int, granule: int) -> int:
    """The smallest multiple of `granule` that is not below `value`."""
    return -(-value // granule) * granule


def check_elements(nbytes: int, what: str, dtype: str, itemsize: int, parts: int = 1) -> None:
    """`ArgumentError` unless a message is a whole number of elements in that many equal parts. what : the message, for readers."""
    if nbytes % (itemsize * parts):
        equal = f" in {parts} equal parts" if parts > 1 else ""
        raise ArgumentError(f"{what} is no whole number of {dtype} elements{equal}")
