"""What the commands have in common: bad input ends in one sentence, printed once however many ranks there are."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fcomm.errors import ArgumentError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ArgumentError` instead of printing its usage and leaving, and helps once under a launcher."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a wrong command line."""
        raise ArgumentError(f"{message} (--help lists the options)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if launcher_rank() == 0:
            super()._print_message(message, file)


def target(path: Path, option: str) -> None:
    """Raises `ArgumentError` where no file can be written at `path`: to be called before the work whose result goes there."""
    folder = path.parent
    if path.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "permission denied"
    else:
        return
    raise ArgumentError(f"{option} {path} cannot be written: {why}")


def folder(path: Path, option: str) -> Path:
    """Makes the folder that results go into, if it is not there; `ArgumentError` where it cannot be. Also to be called first."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"cannot make the folder {path} ({error.strerror}): name another one with {option}"
        ) from None
    if not os.access(path, os.W_OK):
        raise ArgumentError(f"the folder {path} cannot be written to: name another one with {option}")
    return path


def listed(text: str, option: str) -> list[str]:
    """The names in a list with commas, each once; `ArgumentError` where there is none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ArgumentError(f"{option} {text!r} names nothing")
    return names


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """A bar for what takes longer than a moment: lively on a terminal, a line every ten seconds in a log; nothing of it stays."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 10.0
    # Closed here also where the reader stops early or fails, or the bar would stay as it was.
    with tqdm(
        items, what, total, file=sys.stderr, mininterval=interval, maxinterval=interval, delay=interval, dynamic_ncols=True,
        leave=False,
    ) as bar:  # fmt: skip
        yield from bar


def launcher_rank() -> int:
    """Number of this process among those that a launcher started together, as its environment says; 0 without one.

    For commands that start no MPI, and speak once all the same.
    """
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def launcher_size() -> int:
    """Number of processes that a launcher started together with this one, as its environment says; 1 without one."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 1


def reader_is_gone() -> None:
    """After a `BrokenPipeError` (``python -m ... | head``): nothing more is written, not even when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
