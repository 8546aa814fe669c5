"""What the commands have in common: bad input ends in one sentence, printed once however many ranks there are."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from fcomm.errors import ArgumentError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ArgumentError` instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a wrong command line."""
        raise ArgumentError(f"{message} (--help lists the options)")


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
