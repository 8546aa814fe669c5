"""Kernel sources: from a specialisation to one string of CUDA C++, and to the hash that names it.

The sources are flattened before any compiler sees them: CuPy's cache keys on the string, not on files that it includes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fcomm.dtypes import ElementType
from fcomm.errors import SetupError
from fcomm.protocols import ENCODINGS, MIN_CHUNK_CELLS, Encoding, Protocol, registered
from fcomm.protocols import MAX_THREADS as MAX_THREADS
from fcomm.variants import SHIPPED, check, variant

if TYPE_CHECKING:
    from fcomm.epilogue import Fused

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


def prologue(world_size: int, aligned: bool, launch: str, max_threads: int) -> list[str]:
    """The defines that every kernel begins with."""
    return [
        f"#define FC_N {world_size}",
        f"#define FC_ALIGNED {int(aligned)}",
        f"#define FC_TRIGGER {LAUNCHES.index(launch)}",
        f"#define FC_MAX_THREADS {max_threads}",
    ]


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
    link: int = 0
    """With an emulated link, whose latency and bandwidth the kernel is told at run time: 1 held (``link.cuh``), 2 forwarded
    (``forward.cuh``), as `fcomm.links.Link.compiled` says."""
    fused: Fused | None = None
    """The epilogue that is compiled in, if any."""
    variant: str = SHIPPED
    """For experiments: see `fcomm.variants`."""

    def __post_init__(self) -> None:
        check(self.variant, self.protocol)

    @property
    def name(self) -> str:
        name = f"{self.protocol.name}-{self.dtype.name}-n{self.world_size}{'' if self.aligned else '-any'}"
        name += f"-{self.fused.name}" if self.fused else ""
        name = name if self.launch == "none" else f"{name}-{self.launch}"
        name += ("", "-link", "-forwarded")[self.link]
        return name if self.variant == SHIPPED else f"{name}-{self.variant}"

    def root_text(self) -> str:
        """The few lines that include a kernel and instantiate it."""
        p = self.protocol
        headers = dict.fromkeys([*(e.header for e in p.encodings), p.algorithm.header])
        kernel, element, fused = p.algorithm.kernel, f"fc::{self.dtype.kernel_type}", self.fused
        arguments = [f"fc::wire::{e.kernel_type}" for e in p.encodings]
        if fused is None:
            arguments.append(element)
        elif fused.cells:
            kernel, headers = f"{kernel}_rows", {**headers, f"algo/{kernel}_rows.cuh": None}
            arguments += [element, "fc::Epilogue", str(fused.cells)]
        else:
            arguments.append(f"fc::Then<{element}, fc::Epilogue>")
        return "\n".join(
            [
                f"// {self.name}",
                *prologue(self.world_size, self.aligned, self.launch, self.max_threads),
                *([f"#define FC_LINK {int(self.link)}"] if self.link else []),
                *([] if fused is None else ["#define FC_EPILOGUE 1"]),
                *([f"#define FC_VARIANT {variant(self.variant).bits:#x}"] if variant(self.variant).bits else []),
                *(f'#include "{h}"' for h in headers),
                *(line for e in dict.fromkeys(p.encodings) for line in claims(e)),
                *([] if fused is None else [fused.epilogue.text()]),
                f"FC_KERNEL((fc::{kernel}<{', '.join(arguments)}>))",
                "",
            ]
        )

    @property
    def max_threads(self) -> int:
        """Threads per block that it is compiled for."""
        if self.fused is not None and self.fused.cells:
            return self.fused.max_threads(self.world_size)
        return self.protocol.max_threads(self.world_size)

    def text(self) -> str:
        """The whole source as one string."""
        return flatten(self.root_text())


def claims(encoding: Encoding) -> list[str]:
    """What the registry says of an encoding's layout and its struct says too, as assertions: hosts go by the one, kernels by the
    other.
    """
    wire = f"fc::wire::{encoding.kernel_type}"
    said = {
        "group_cells": (f"{wire}::kGroupCells", encoding.group_cells),
        "group_payload": (f"{wire}::kGroupBytes", encoding.group_payload),
        "copies": (f"({wire}::kState < 0 ? 2 : 3)", encoding.copies),
        "header_bytes (4 x max_chunks)": (f"{wire}::kHeaderBytes", encoding.header_bytes),
        "max_chunks > 0": (f"{wire}::kChunked", int(encoding.max_chunks > 0)),
    }
    if encoding.max_chunks:
        said["max_chunks"] = (f"{wire}::kMaxChunks", encoding.max_chunks)
        said["the least cells of a chunk"] = (f"{wire}::kMinChunkCells", MIN_CHUNK_CELLS)
    return [
        f'static_assert({theirs} == {ours}, "{encoding.name}: {what} is {ours} in its Encoding, and not in {encoding.header}");'
        for what, (theirs, ours) in said.items()
    ]


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
        if not name.startswith("sim/") and name not in ("link.cuh", "forward.cuh"):
            digest.update(f"{name}\0{_code(path.read_text())}\0".encode())
    return digest.hexdigest()


_CONDITION = re.compile(r"\s*#\s*(if|el|endif)")


def _code(text: str) -> str:
    """The lines of a source without comments, empty lines and what a kernel has with an emulated link only."""
    lines: list[str] = []
    nested: list[tuple[bool, bool]] = []  # of each open condition: is it such a request, and in its first part
    for raw in text.splitlines():
        line = re.sub(r"\s*//.*$", "", raw).rstrip()
        found = _CONDITION.match(line)
        requested = False
        if found and found[1] == "if":
            requested = "FC_LINK" in line
            nested.append((requested, requested))
        elif found and nested:
            requested = nested[-1][0]
            nested.pop()
            if found[1] == "el":
                nested.append((requested, False))
        if line and not requested and not any(left_out for _, left_out in nested):
            lines.append(line)
    return "\n".join(lines)


def source_hash() -> str:
    """SHA-256 over all kernel sources but their comments, without the simulator and the kernels that experiments run beside
    collectives, and with registered headers: which kernels a record was taken with.
    """
    headers = registered()
    if not headers:
        return _own_hash()
    digest = hashlib.sha256(_own_hash().encode())
    for name, header in sorted(headers.items()):
        digest.update(name.encode() + b"\0" + _code(flatten(header.read_text())).encode() + b"\0")
    return digest.hexdigest()


def sources() -> str:
    """`source_hash` and the registered encodings as they were described: what must be alike on all ranks."""
    described = [
        f"{name} ({', '.join(f'{k} {sorted(v) if isinstance(v, frozenset) else v}' for k, v in asdict(ENCODINGS[name]).items())})"
        for name in registered()
    ]
    return " with ".join([source_hash()[:16], *described])
