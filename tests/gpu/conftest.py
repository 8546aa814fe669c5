from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache

import pytest

from tests.launch import environment


@cache
def why_not() -> str | None:
    """Why the GPU suite cannot run here; None if it can. CUDA is asked in another process: this one must stay free of it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver on this machine"
    code = "from fcomm.backends.cuda import device_count; print(device_count())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment()
        )
    except subprocess.TimeoutExpired:
        return "CUDA does not answer within 60 s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["CUDA cannot be asked"])[-1]
    return None if int(done.stdout) > 0 else "no GPU that CUDA can use (or no CuPy)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
