"""Where a record comes from: everything that one would want to know before believing a number a year later."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcomm.records import SCHEMA_VERSION
from fcomm.source import source_hash

if TYPE_CHECKING:
    from fcomm import Communicator
    from fcomm.backends.base import Backend
    from fcomm.group import Group

PACKAGES = (
    "flash-comm", "cupy-cuda12x", "cupy-cuda13x", "mpi4py", "mpich", "ml_dtypes", "numpy", "pandas", "pyarrow", "scipy",
)  # fmt: skip

_MUST_MATCH = {
    "hostname": "machine",
    "backend": "backend",
    "world_size": "number of ranks",
    "cores": "number of cores",
    "source_hash": "kernel source",
    "devices": "devices",
}


def machine(mpi: Group, backend: Backend) -> dict[str, Any]:
    """Facts about what the ranks run on, as plain JSON values. Collective; the same result on all ranks."""
    described = {key: _plain(value) for key, value in backend.describe().items()}
    every: list[tuple[str, dict[str, Any]]] = mpi.allgather((socket.gethostname(), described))
    devices = [facts for _, facts in every]
    names = [str(facts.get("uuid", facts.get("device"))) for facts in devices]
    facts: dict[str, Any] = {
        "hostname": every[0][0],
        "backend": backend.name,
        "world_size": mpi.size,
        "ranks_per_device": max(names.count(name) for name in set(names)),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "source_hash": source_hash(),
        # Ranks that see the same device say it once.
        "devices": [d for k, d in enumerate(devices) if d not in devices[:k]],
    }
    return mpi.allgather(facts)[0]


def collect(comm: Communicator, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Facts about this launch, as plain JSON values. Collective; the same result on all ranks."""
    from mpi4py import MPI

    facts: dict[str, Any] = {
        **machine(comm.mpi, comm.backend),
        "schema_version": SCHEMA_VERSION,
        "taken_utc": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "command": shlex.join(argv if argv is not None else sys.orig_argv),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions(),
        "mpi": " ".join(MPI.Get_library_version().split("\n")[0].rstrip("\0").split()),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("FCOMM_")},
        **_git(Path(__file__).resolve().parent.parent),
    }
    return comm.mpi.bcast(facts)


def mismatch(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Why two launches may not be one run, in one clause; None if they may."""
    for key, what in _MUST_MATCH.items():
        if before.get(key) != now.get(key):
            old, new = before.get(key), now.get(key)
            if key == "source_hash":
                old, new = str(old)[:12], str(new)[:12]
            return f"it was taken with another {what} ({old}, now {new})"
    return None


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(root: Path) -> dict[str, Any]:
    """Revision and dirty flag of the checkout that holds this package; nothing where there is none."""
    if not (root / ".git").exists():  # an installed package inside somebody else's repository is not that repository
        return {}
    try:
        revision = _run_git(root, "rev-parse", "HEAD")
        dirty = _run_git(root, "status", "--porcelain", "--untracked-files=no") != ""
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git_revision": revision, "git_dirty": dirty}


def _run_git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _plain(value: Any) -> Any:
    """A value that JSON gives back as it was."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
