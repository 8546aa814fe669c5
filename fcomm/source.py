"""Kernel sources: from a specialisation to one string of CUDA C++, and to the hash that names it.

The sources are flattened before any compiler sees them: CuPy's cache keys on the string, not on files that it includes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fcomm.dtypes import ElementType
from fcomm.errors import SetupError
from fcomm.protocols import MAX_THREADS as MAX_THREADS
from fcomm.protocols import Protocol, registered
from fcomm.variants import SHIPPED, check, variant

OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""What NVRTC is told: IEEE arithmetic, no flush to zero, no contraction."""

LAUNCHES = ("none", "late", "early")
"""Launch features: no dependent launch; dependent launch, triggered by each thread behind its last output, resp. at the entry.
Kernels know them by their index here (FC_TRIGGER)."""

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


@cache
def kernel_root() -> Path:
    """Folder of the kernel sources: beside the package when installed, at the top of a checkout otherwise."""
    package = Path(__file__).resolve().parent
    for root in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (root / "primitives.cuh").is_file():
            return root
    raise SetupError(f"the kernel sources are missing: neither {package} nor its parent has a folder kernels_cu")


@dataclass(frozen=True)
class Specialisation:
    """What one kernel is compiled for: a protocol, an element type and a world size."""

    protocol: Protocol
    dtype: ElementType
    world_size: int
    aligned: bool = True
    """For arrays and messages at multiples of 16 bytes only (compiled in on GPUs; a host's kernel is told at run time)."""
    launch: str = "none"
    """The launch feature, one of `LAUNCHES` (a host's kernel is the same for all)."""
    variant: str = SHIPPED
    """For experiments: see `fcomm.variants`."""

    def __post_init__(self) -> None:
        check(self.variant, self.protocol)

    @property
    def name(self) -> str:
        name = f"{self.protocol.name}-{self.dtype.name}-n{self.world_size}{'' if self.aligned else '-any'}"
        name = name if self.launch == "none" else f"{name}-{self.launch}"
        return name if self.variant == SHIPPED else f"{name}-{self.variant}"

    def root_text(self) -> str:
        """The few lines that include a kernel and instantiate it."""
        headers = dict.fromkeys([*(e.header for e in self.protocol.encodings), self.protocol.algorithm.header])
        wires = [f"fc::wire::{e.kernel_type}" for e in self.protocol.encodings]
        arguments = ", ".join([*wires, f"fc::{self.dtype.kernel_type}"])
        return "\n".join(
            [
                f"// {self.name}",
                f"#define FC_N {self.world_size}",
                f"#define FC_ALIGNED {int(self.aligned)}",
                f"#define FC_TRIGGER {LAUNCHES.index(self.launch)}",
                f"#define FC_MAX_THREADS {self.protocol.max_threads(self.world_size)}",
                *([f"#define FC_VARIANT {variant(self.variant).bits:#x}"] if variant(self.variant).bits else []),
                *(f'#include "{h}"' for h in headers),
                f"FC_KERNEL((fc::{self.protocol.algorithm.kernel}<{arguments}>))",
                "",
            ]
        )

    def text(self) -> str:
        """The whole source as one string."""
        return flatten(self.root_text())


def flatten(text: str, root: Path | None = None) -> str:
    """Replaces each quoted include by the file, once (as ``#pragma once`` would); system includes stay."""
    # A registered encoding's header is in a folder of its own; what it includes is looked for among the kernels first.
    roots = [root] if root else [kernel_root(), *dict.fromkeys(header.parent for header in registered().values())]
    seen: set[Path] = set()

    def find(name: str, origin: str) -> tuple[Path, str] | None:
        for folder in roots:
            for path in (folder / name, (folder / origin).parent / name):  # or relative to the including file
                if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
                    return path.resolve(), path.resolve().relative_to(folder.resolve()).as_posix()
        return None

    def expand(lines: str, origin: str) -> list[str]:
        out: list[str] = []
        for number, line in enumerate(lines.splitlines(), 1):
            found = _INCLUDE.match(line)
            if found is None:
                out.append("" if line.strip() == "#pragma once" else line)  # an empty line: line numbers stay right
                continue
            included = find(found.group(1), origin)
            if included is None:
                raise SetupError(f"{origin}:{number} includes {found.group(1)}, which is not among the kernel sources")
            path, name = included
            if path in seen:
                out.append("")
            else:
                seen.add(path)
                out += [f'#line 1 "{name}"', *expand(path.read_text(), name), f'#line {number + 1} "{origin}"']
        return out

    return "\n".join(expand(text, "specialisation.cu")) + "\n"


@cache
def _own_hash() -> str:
    digest = hashlib.sha256()
    root = kernel_root()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".cuh", ".hpp")):
        name = path.relative_to(root).as_posix()
        if not name.startswith("sim/"):
            digest.update(f"{name}\0{_code(path.read_text())}\0".encode())
    return digest.hexdigest()


def _code(text: str) -> str:
    """The lines of a source without comments and empty lines."""
    lines = (re.sub(r"\s*//.*$", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def source_hash() -> str:
    """SHA-256 over all kernel sources but their comments, without the simulator and with registered headers: which kernels a
    record was taken with.
    """
    headers = registered()
    if not headers:
        return _own_hash()
    digest = hashlib.sha256(_own_hash().encode())
    for name, header in sorted(headers.items()):
        digest.update(name.encode() + b"\0" + _code(flatten(header.read_text())).encode() + b"\0")
    return digest.hexdigest()
