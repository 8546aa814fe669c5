"""What the commands have in common: bad input ends in one sentence, printed once however many ranks there are."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fcomm.errors import ArgumentError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ArgumentError` instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a wrong command line."""
        raise ArgumentError(f"{message} (--help lists the options)")
