"""Kernel headers compiled for the host, so that a test can call their functions one by one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from fcomm.backends import cpu
from fcomm.source import kernel_root


def compile_library(text: str, folder: Path, world_size: int) -> ctypes.CDLL:
    """Compiles C++ with the flags of the cpu backend for a world of that size, and loads it."""
    source, library = folder / f"native{world_size}.cpp", folder / f"native{world_size}.so"
    source.write_text(text)
    command = [
        cpu.find_compiler(), *cpu.FLAGS, "-fvisibility=default", "-DFC_CPU", f"-DFC_N={world_size}",
        "-I", str(kernel_root()), str(source), "-o", str(library),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))
