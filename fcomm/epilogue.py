"""Epilogues: a small device function that all-reduce hands its sums to, while they are still in registers.

An epilogue is lines of CUDA and the names of what they read and write; ``all_reduce(x, out, epilogue=...)`` compiles it
into the kernel. Its bits are those of all-reduce followed by `Communicator.apply`, the same lines in a kernel of their own.
docs/epilogue.md is about writing one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fcomm.backends.base import Backend, LaunchShape, View
from fcomm.errors import ArgumentError
from fcomm.layout import EPILOGUE_ARRAYS, EPILOGUE_SCALARS
from fcomm.protocols import MAX_THREADS, WIDE_THREADS
from fcomm.sizes import round_up
from fcomm.source import flatten, prologue

if TYPE_CHECKING:
    from fcomm.dtypes import ElementType
    from fcomm.protocols import Protocol

MOST_CELLS = 8
"""Cells of a row that one thread may hold."""
WARP = 32
WIDE_RANKS = 8
"""Up to so many ranks, 64 registers do for a thread with one cell of a row, but for a few words from 7 ranks on: so a row of 1,024
cells has a thread for each, which poll all at once, and two blocks of 512 fit on an SM."""
ROW_GRANULE = 16
"""Rows are multiples of so many bytes: a row's sum is a tree over its 16-byte pieces."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Epilogue:
    """What becomes of the sums of an all-reduce before they are stored.

    Calling it with its arrays and scalars by name makes what `Communicator.all_reduce` takes:
    ``add_rms_norm(residual=r, residual_out=r, weight=w, epsilon=1e-6)``.
    """

    name: str
    code: str
    """Body of a device function of one parameter, `values`; what it may ask of it is in docs/epilogue.md."""
    reads: tuple[str, ...] = ()
    """Arrays of the message's shape and dtype that it reads, ..."""
    row_vectors: tuple[str, ...] = ()
    """... arrays with one element for each column, ..."""
    writes: tuple[str, ...] = ()
    """... and arrays of the message's shape and dtype that it writes."""
    scalars: tuple[str, ...] = ()
    """float32 parameters."""
    by_row: bool = False
    """It needs whole rows: it has row vectors, or sums over a row. Rows are the message's last axis."""

    def __post_init__(self) -> None:
        names = (*self.arrays, *self.scalars)
        for name in (self.name, *names):
            if not _NAME.fullmatch(name):
                raise ArgumentError(
                    f"epilogues and what they use are named in small letters, digits and _, not {name!r}"
                )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or "values" in names:
            raise ArgumentError(f"epilogue {self.name} has two things called {(twice or ['values'])[0]}")
        if len(self.arrays) > EPILOGUE_ARRAYS or len(self.scalars) > EPILOGUE_SCALARS:
            raise ArgumentError(
                f"epilogue {self.name} has {len(self.arrays)} arrays and {len(self.scalars)} scalars; up to {EPILOGUE_ARRAYS} and "
                f"{EPILOGUE_SCALARS} can be passed"
            )
        if self.row_vectors and not self.by_row:
            raise ArgumentError(f"epilogue {self.name} has row vectors, so it works on rows: by_row=True")

    def __call__(self, **given: Any) -> Bound:
        """The epilogue with what it reads and writes."""
        wanted = (*self.arrays, *self.scalars)
        missing = [name for name in wanted if name not in given]
        unknown = [name for name in given if name not in wanted]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"knows no {', '.join(unknown)}"
            raise ArgumentError(f"epilogue {self.name} {what}: it takes {', '.join(wanted) or 'nothing'}")
        try:
            scalars = tuple(float(np.float32(given[name])) for name in self.scalars)
        except (TypeError, ValueError):
            raise ArgumentError(f"epilogue {self.name}: {', '.join(self.scalars)} must be numbers") from None
        return Bound(self, {name: given[name] for name in self.arrays}, scalars)

    @property
    def arrays(self) -> tuple[str, ...]:
        """All arrays, in the order in which kernels know them."""
        return (*self.reads, *self.row_vectors, *self.writes)

    @cached_property
    def digest(self) -> str:
        """Names its text: hexadecimal SHA-256 of the struct that kernels are compiled with."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        """The struct that stands for it in kernels, as CUDA C++."""
        return "\n".join(
            [
                '#include "epilogue/values.cuh"',
                "namespace fc {",
                "struct Epilogue {",
                f"  static constexpr bool kByRow = {str(self.by_row).lower()};",
                f"  static constexpr int kReads = {len(self.reads)}, kColumns = {len(self.row_vectors)};",
                "  template <class Values>",
                "  static FC_DEVICE void apply(Values& values) {",
                *(f"    constexpr int {name} = {k};" for k, name in enumerate(self.arrays)),
                *(f"    const f32 {name} = values.scalar({k});" for k, name in enumerate(self.scalars)),
                f'#line 1 "epilogue {self.name}"',
                self.code,
                "  }",
                "};",
                "}  // namespace fc",
                "",
            ]
        )

    def refusal(self, protocol: Protocol) -> str | None:
        """Why the protocol cannot have this epilogue, in one clause; None if it can."""
        if protocol.collective != "all_reduce" or not protocol.encodings:
            return "only flash-comm's own all-reduces have epilogues"
        if len({e.name for e in protocol.encodings}) > 1:
            return "with two encodings an owner reads its sums back from the output, where the epilogue's results are"
        if not self.by_row:
            return None
        if protocol.algorithm.name != "one_shot":
            return f"{self.name} needs whole rows, and a rank reduces only parts of them: use one_shot"
        encoding = protocol.encodings[0]
        if encoding.max_chunks:
            return f"{self.name} needs whole rows, and a chunk of {encoding.name} is no row"
        if encoding.group_cells > 1 or ROW_GRANULE % encoding.group_payload:
            return f"{self.name} sums over rows in pieces of 16 bytes, which cells of {encoding.name} do not divide"
        return None


@dataclass(frozen=True, eq=False)
class Bound:
    """An epilogue with the arrays and scalars of a call."""

    epilogue: Epilogue
    arrays: Mapping[str, Any]
    scalars: tuple[float, ...]

    def look(self, backend: Backend, src: View, dst: View) -> Operands:
        """Checks everything against the message and its result; `ArgumentError` says what does not fit."""
        e = self.epilogue
        element = src.nbytes // src.count if src.count else 0
        columns = src.shape[-1] if src.shape else 0
        if src.dtype not in ("float32", "float16", "bfloat16"):
            raise ArgumentError(f"epilogue {e.name} takes float32, float16 or bfloat16, not {src.dtype}")
        if e.by_row and src.count:
            check_row(e.name, columns, element)
        views = []
        for name in e.arrays:
            view = backend.view(self.arrays[name])
            shape = (columns,) if name in e.row_vectors else src.shape
            if view.dtype != src.dtype or view.shape != shape:
                raise ArgumentError(
                    f"epilogue {e.name}: {name} is {view.dtype} {view.shape}; it must be {src.dtype} {shape}"
                )
            if not view.contiguous:
                raise ArgumentError(f"epilogue {e.name}: {name} is not C-contiguous: pass a contiguous copy")
            views.append(view)
        reads = [("the input", src), *((n, v) for n, v in zip(e.arrays, views, strict=True) if n not in e.writes)]
        writes = [("the output", dst), *((n, v) for n, v in zip(e.arrays, views, strict=True) if n in e.writes)]
        for k, (name, view) in enumerate(writes):
            for other, against in (*reads, *writes[:k]):
                # A thread reads what it needs of its cells before it writes them: one and the same array will do.
                same = view.address == against.address and (other, against) in reads and other not in e.row_vectors
                if (
                    not same
                    and view.address < against.address + against.nbytes
                    and against.address < view.address + view.nbytes
                ):
                    raise ArgumentError(
                        f"epilogue {e.name}: {name} overlaps {other}; only one and the same array, of those that are "
                        "only read, will do"
                    )
        return Operands(self, columns, tuple(views))


def check_row(name: str, columns: int, itemsize: int) -> None:
    """Raises `ArgumentError` for rows that no kernel can hold."""
    nbytes = columns * itemsize
    if nbytes % ROW_GRANULE or not nbytes:
        raise ArgumentError(
            f"epilogue {name} works on rows of a multiple of {ROW_GRANULE} bytes; the message's have {columns} elements, {nbytes} bytes"
        )


@dataclass(frozen=True, eq=False)
class Operands:
    """What an epilogue was called with, as kernels see it."""

    bound: Bound
    columns: int
    views: tuple[View, ...]

    @property
    def epilogue(self) -> Epilogue:
        return self.bound.epilogue

    @property
    def key(self) -> tuple[object, ...]:
        """What a plan depends on: calls with other arrays share it."""
        return self.epilogue.digest, self.columns, self.bound.scalars

    @property
    def address_bits(self) -> int:
        """All addresses, or-ed: how they are aligned."""
        bits = 0
        for view in self.views:
            bits |= view.address
        return bits

    def writer(self, params: np.ndarray[Any, np.dtype[np.void]], itemsize: int) -> Callable[[Operands, int], None]:
        """Fills in what stays from call to call of a plan; returns what fills in the rest: (operands, bytes from the message's
        start to the launch's).
        """
        params["epilogue"]["columns"] = self.columns
        params["epilogue"]["scalar"][0, : len(self.bound.scalars)] = self.bound.scalars
        assert params.dtype.fields is not None
        at = int(params.dtype.fields["epilogue"][1]) // 8
        words = params.view(np.uint64)[at : at + EPILOGUE_ARRAYS + 1]
        vectors = range(len(self.epilogue.reads), len(self.epilogue.reads) + len(self.epilogue.row_vectors))

        def write(operands: Operands, offset: int) -> None:
            for k, view in enumerate(operands.views):
                words[k] = view.address + (0 if k in vectors else offset)
            words[EPILOGUE_ARRAYS] = offset // itemsize

        return write


def cells_held(row_cells: int, threads: int) -> int:
    """Cells of a row that each thread of a block holds: a power of two. `ArgumentError` for more than `MOST_CELLS`."""
    held = 1
    while held * threads < row_cells:
        held *= 2
    if held > MOST_CELLS:
        raise ArgumentError(
            f"a row of {row_cells} cells is too long for blocks of {threads} threads, which hold up to {MOST_CELLS} cells each"
        )
    return held


def row_threads(cells: int, world_size: int) -> int:
    """Threads per block that a kernel of whole rows is compiled for, whose threads hold so many cells of a row."""
    return WIDE_THREADS if cells == 1 and world_size <= WIDE_RANKS else MAX_THREADS


def row_shape(rows: int, row_cells: int, world_size: int, emulated: bool) -> LaunchShape:
    """The default launch shape for whole rows: a block for each, and a thread for each cell if there are as many."""
    if emulated:  # a fiber is dear, a register is not
        return LaunchShape(max(1, min(rows, 2)), round_up(max(64, -(-row_cells // MOST_CELLS)), WARP))
    most = row_threads(1, world_size)
    return LaunchShape(rows, round_up(row_cells, WARP) if row_cells <= most else MAX_THREADS)


@dataclass(frozen=True)
class Fused:
    """An epilogue in a kernel: what a specialisation is compiled with beside its protocol and dtype."""

    epilogue: Epilogue
    cells: int = 0
    """Cells of a row that a thread holds; 0: it works element by element."""

    def max_threads(self, world_size: int) -> int:
        """Threads per block that a kernel of whole rows is compiled for."""
        return row_threads(self.cells, world_size)

    @property
    def name(self) -> str:
        return f"{self.epilogue.name}-{self.epilogue.digest[:8]}{f'-k{self.cells}' if self.cells else ''}"


@dataclass(frozen=True)
class Separate:
    """A kernel that applies an epilogue to an array in memory."""

    fused: Fused
    dtype: ElementType
    world_size: int
    aligned: bool
    launch: str

    @property
    def name(self) -> str:
        return f"apply-{self.fused.name}-{self.dtype.name}-n{self.world_size}{'' if self.aligned else '-any'}-{self.launch}"

    @property
    def max_threads(self) -> int:
        """Threads per block that it is compiled for: it takes few registers, whatever the number of ranks."""
        return row_threads(self.fused.cells, 1)

    def text(self) -> str:
        """The whole source as one string."""
        kind = f"fc::{self.dtype.kernel_type}, fc::Epilogue"
        by_row = f"apply_to_rows<{kind}, {self.fused.cells}>"
        lines = [
            f"// {self.name}",
            *prologue(self.world_size, self.aligned, self.launch, self.max_threads),
            "#define FC_EPILOGUE 1",
            '#include "epilogue/apply.cuh"',
            self.fused.epilogue.text(),
            f"FC_KERNEL((fc::{by_row if self.fused.cells else f'apply_to_elements<{kind}>'}))",
            "",
        ]
        return flatten("\n".join(lines))


add_residual = Epilogue(
    "add_residual",
    "values.with(residual, [](f32 sum, f32 r) { return sum + r; });",
    reads=("residual",),
)
"""sum + residual."""

_NORM = """const f32 mean = values.sum([](f32 x) { return x * x; }) / f32(values.columns());
const f32 scale = 1.0f / sqrt(mean + epsilon);
values.with(weight, [&](f32 x, f32 w) { return x * scale * w; });"""

rms_norm = Epilogue("rms_norm", _NORM, row_vectors=("weight",), scalars=("epsilon",), by_row=True)
"""RMSNorm over rows: x / sqrt(mean of x squared + epsilon) * weight."""

add_rms_norm = Epilogue(
    "add_rms_norm",
    f"""values.with(residual, [](f32 sum, f32 r) {{ return sum + r; }});
values.store(residual_out);
{_NORM}""",
    reads=("residual",),
    row_vectors=("weight",),
    writes=("residual_out",),
    scalars=("epsilon",),
    by_row=True,
)
"""What serving engines fuse: the new residual, sum + residual, is stored, and its RMSNorm is the result. `residual_out` may be
`residual` itself."""
