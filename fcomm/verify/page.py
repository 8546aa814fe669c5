"""docs/verification.md, generated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write(path: Path, schedules: int, seed: int, progress: Callable[[Callable[[], str]], None]) -> int:
    return 0
