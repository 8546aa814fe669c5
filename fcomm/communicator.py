"""The public class. One call is: look at the array, choose, plan (cached), launch - no MPI, no allocation, no wait."""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fcomm import bootstrap, models, settings
from fcomm.backends.base import Backend, LaunchShape, View
from fcomm.dtypes import BYTES, REDUCIBLE, reducible
from fcomm.epilogue import Bound, Fused, Operands, Separate, cells_held, row_shape
from fcomm.errors import ArgumentError, ClosedError, DisagreementError, HangError, NotAdmittedError
from fcomm.explanation import Explanation, explain
from fcomm.grids import default_shape, plain_shape
from fcomm.group import Group, as_group, is_mpi
from fcomm.layout import (
    CALL_WORDS,
    ERROR_DTYPE,
    FIRST_CALL_WORD,
    LINE,
    V2_MAX_BLOCKS,
    SlabLayout,
    error_message,
    params_dtype,
)
from fcomm.links import FORWARDED_TICKS_PER_US, MOST_SLAB_BYTES, Link, queues_bytes
from fcomm.links import parse as parse_link
from fcomm.protocols import (
    CELL_BYTES,
    COLLECTIVES,
    PLACEMENTS,
    GpuShare,
    Protocol,
    hold,
    let_go,
    protocols,
    shard_bytes,
)
from fcomm.selector import AUTO, Selector
from fcomm.sizes import format_size
from fcomm.source import LAUNCHES, Specialisation, sources
from fcomm.variants import SHIPPED, check_message
from fcomm.variants import variant as variant_called

if TYPE_CHECKING:
    from mpi4py import MPI

    from fcomm.cost_model import Model

log = logging.getLogger("fcomm")

WARP = 32
ALIGNMENT = 16
"""Bytes that arrays and messages are multiples of where the kernels' wide accesses can be used throughout."""
_CALL_WORDS = struct.Struct(f"={len(CALL_WORDS)}Q")


def _make_backend(name: str, mpi: Group, device: int | None, placement: str) -> Backend:
    if name == "cpu":
        from fcomm.backends.cpu import CpuBackend

        return CpuBackend(mpi, placement)
    if name == "cuda":
        from fcomm.backends.cuda import CudaBackend

        return CudaBackend(mpi, device, placement)
    raise ArgumentError(f"there is no backend {name!r}; use auto, cuda or cpu")


def resolve_backend(name: str, mpi: Group) -> str:
    """Which backend a name stands for. Collective: `auto` is cuda where every rank has a device, cpu where none has.

    A mixture is an `ArgumentError`.
    """
    if name == "auto":
        name = settings.backend()
    if name != "auto":
        return name
    from fcomm.backends import cuda

    have = mpi.allgather(bootstrap.collectively(mpi, lambda: cuda.device_count() > 0))
    if any(have) and not all(have):
        lacking = ", ".join(str(r) for r, h in enumerate(have) if not h)
        raise ArgumentError(f"some ranks have a GPU and others (rank {lacking}) have none: give each rank one, or none")
    return "cuda" if all(have) else "cpu"


def _smallest_share(facts: list[dict[str, Any]]) -> GpuShare | None:
    """What every rank has of a GPU at least, alike on all ranks; None where the backend has none."""
    if not all("sms_per_rank" in f for f in facts):
        return None
    least = min(facts, key=lambda f: (f["sms_per_rank"] / f["sms_total"], f["compute_capability"]))
    return GpuShare(least["compute_capability"], least["sms_per_rank"], least["sms_total"])


class Plan:
    """A call with everything decided but the arrays: kernel, grid, and the kernel's argument packed but for the call's own words."""

    def __init__(
        self,
        comm: Communicator,
        proto: Protocol,
        dtype: str,
        nbytes: int,
        channel: int,
        shape: LaunchShape | None,
        aligned: bool,
        operands: Operands | None = None,
    ):
        element = BYTES if proto.algorithm.moves_bytes else REDUCIBLE[dtype]
        self.protocol = proto
        if operands is not None and operands.epilogue.refusal(proto) is not None:
            operands = None  # it follows in a kernel of its own
        self.fused = operands is not None
        row_bytes = operands.columns * element.itemsize if operands is not None and operands.epilogue.by_row else 0
        self.pieces = _pieces(comm, proto, nbytes, row_bytes or 1)
        for piece in self.pieces:
            check_message(comm.variant, proto, piece.nbytes, comm.world_size)
        aligned = aligned and not any((p.nbytes | p.stride | p.part) % ALIGNMENT for p in self.pieces)
        fused = None
        if row_bytes:
            row_cells = proto.encodings[0].cells(row_bytes)
            wanted = shape or row_shape(
                self.pieces[0].nbytes // row_bytes, row_cells, comm.world_size, comm.gpu is None
            )
        else:
            fitted = comm.selector.shape(proto, nbytes) if shape is None else None
            wanted = shape or LaunchShape(*(fitted or self._default_shape(comm)))
        if operands is not None:
            fused = Fused(operands.epilogue, cells_held(row_cells, max(wanted.threads, 1)) if row_bytes else 0)
        linked = comm.link_compiled
        spec = Specialisation(
            proto, element, comm.world_size, aligned, comm.dependent_launch, linked, fused, comm.variant
        )
        self.kernel = comm.backend.kernel(spec)
        _check_shape(wanted, spec.max_threads)
        # Each channel may have a grid running, and one that is let in before that is complete needs room of its own. A baseline
        # whose grid its authors fixed could only be refused: with its late trigger it has the risk that they took.
        launch, rule, channels = comm.dependent_launch, proto.algorithm.grid, comm.layout.channels
        fixed = rule is not None and rule.fixed
        grids = 1 if launch == "none" or (launch == "late" and fixed) else 2
        # Where a link forwards, each block that works has another one for it, and both have to be resident.
        of_each = 1 if comm.link is None else comm.link.blocks(1)
        resident = self.kernel.max_blocks(wanted.threads, grids, channels) // of_each
        if resident < 1:
            raise ArgumentError(
                f"{proto.name} with {wanted.threads} threads a block has no room for the {grids * channels} grids that {channels} "
                f"channel(s) with dependent launch {comm.dependent_launch!r} may have on this rank's SMs: use fewer "
                f"{'threads' if channels == 1 else 'channels'}"
            )
        self.shape = LaunchShape(min(wanted.blocks, resident), wanted.threads)
        self._grid = LaunchShape(self.shape.blocks * of_each, self.shape.threads)
        if fixed:
            comm._keep_grid(proto, channel, wanted, resident)
        self._queues = comm._queues(channel, self.shape.blocks)
        self.params = comm.layout.params(
            proto,
            comm.rank,
            comm.slabs,
            comm.backend.error_address(),
            channel,
            comm.timeout_s,
            link=linked,
            epilogue=operands is not None,
            control=comm.backend.control_address(),
        )
        self.follow_link(comm)
        self.params["aligned"] = aligned
        self._bytes = self.params.view(np.uint8).data
        self._write = None if operands is None else operands.writer(self.params, element.itemsize)

    def _default_shape(self, comm: Communicator) -> tuple[int, int]:
        first, n = self.pieces[0], comm.world_size
        taken = first.part * n if self.protocol.collective == "reduce_scatter" else first.nbytes
        return default_shape(self.protocol, taken, n, comm.gpu)

    def follow_link(self, comm: Communicator) -> None:
        """Tells the kernel of the emulated link, if there is one, as it is now."""
        if comm.link is not None:
            comm.link.write(self.params, comm.ticks_per_us, comm.slab_bytes, comm.link_own_us, self._queues)

    def launch(self, backend: Backend, src: View, dst: View, stream: Any, operands: Operands | None = None) -> None:
        for piece in self.pieces:
            _CALL_WORDS.pack_into(
                self._bytes, 8 * FIRST_CALL_WORD,
                src.address + piece.offset, dst.address + piece.offset, piece.nbytes, piece.stride, piece.part,
            )  # fmt: skip
            if self._write is not None and operands is not None:
                self._write(operands, piece.offset)
            backend.launch(self.kernel, self._grid, self.params, stream)


def _check_shape(wanted: LaunchShape, most: int) -> None:
    """Raises `ArgumentError` for what cannot be launched. most : threads per block that the kernel is compiled for."""
    if wanted.threads % WARP or not WARP <= wanted.threads <= most or wanted.blocks < 1:
        raise ArgumentError(
            f"a launch shape is blocks >= 1 and threads a multiple of {WARP} up to {most}, not {wanted}"
        )


class SeparatePlan:
    """An epilogue in a kernel of its own, on an array in memory, with everything decided but the arrays."""

    def __init__(self, comm: Communicator, src: View, operands: Operands, shape: LaunchShape | None, aligned: bool):
        element, by_row = REDUCIBLE[src.dtype], operands.epilogue.by_row
        row_bytes = operands.columns * element.itemsize
        if by_row:
            row_cells = row_bytes // CELL_BYTES
            wanted = shape or row_shape(src.nbytes // row_bytes, row_cells, 1, comm.gpu is None)
        else:
            wanted = shape or plain_shape(-(-src.nbytes // CELL_BYTES), comm.gpu)
        fused = Fused(operands.epilogue, cells_held(row_cells, max(wanted.threads, 1)) if by_row else 0)
        aligned = aligned and src.nbytes % ALIGNMENT == 0
        made = Separate(fused, element, comm.world_size, aligned, comm.dependent_launch)
        _check_shape(wanted, made.max_threads)
        self.kernel = comm.backend.kernel(made)
        self.shape = wanted
        if comm.dependent_launch != "none":
            # Let in while a collective's grid still polls: in the room of the second grid.
            room = self.kernel.max_blocks(wanted.threads, 2, comm.layout.channels)
            self.shape = LaunchShape(max(1, min(wanted.blocks, room)), wanted.threads)
        self.params = np.zeros(1, params_dtype(comm.world_size, epilogue=True))
        self.params["nbytes"], self.params["aligned"], self.params["copies"] = src.nbytes, aligned, 1
        self._write = operands.writer(self.params, element.itemsize)

    def launch(self, backend: Backend, src: View, dst: View, stream: Any, operands: Operands) -> None:
        self.params["in"], self.params["out"] = src.address, dst.address
        self._write(operands, 0)
        backend.launch_once(
            self.kernel,
            self.shape,
            self.params,
            stream,
            dependent=backend.may_follow(self.kernel, self.shape, stream),
        )


@dataclass(frozen=True)
class Piece:
    """What one launch handles, in bytes: where it begins in input and output, and the kernel's nbytes, stride, part."""

    offset: int
    nbytes: int
    stride: int
    part: int


def _pieces(comm: Communicator, proto: Protocol, nbytes: int, unit: int = 1) -> list[Piece]:
    """Splits a message of `nbytes` (the input's) into what the protocol's slots take, in multiples of `unit` bytes."""
    n, limit = comm.world_size, comm.layout.piece_bytes(proto) // unit * unit
    if limit == 0:
        raise ArgumentError(
            f"a row of {unit} bytes does not fit into a slot of {proto.name}, which takes {comm.layout.piece_bytes(proto)} bytes: "
            "use a communicator with larger max_bytes"
        )
    if proto.collective == "reduce_scatter":  # a piece of every rank's part
        part = nbytes // n
        lengths = [(at, min(limit, part - at)) for at in range(0, part, limit)]
        return [Piece(at, (n - 1) * part + length, part, length) for at, length in lengths]
    pieces = []
    for at in range(0, nbytes, limit):
        length = min(limit, nbytes - at)
        if proto.collective == "all_gather":
            pieces.append(Piece(at, length, nbytes, length))
        else:
            shard = shard_bytes(length, n)
            pieces.append(Piece(at, length, shard, shard))
    return pieces


class Call:
    """A prepared call: `call()` launches it again on the same arrays."""

    def __init__(
        self,
        comm: Communicator,
        plan: Plan | None,
        src: View,
        dst: View,
        stream: Any,
        signature: object,
        channel: int,
        operands: Operands | None = None,
    ):
        self._comm, self._plan, self._src, self._dst, self._operands = comm, plan, src, dst, operands
        self._stream, self._signature, self._channel = stream, signature, channel
        self.out = dst.owner
        # Where the epilogue has a kernel of its own, it reads the sums from the output, unless that is something else it reads.
        self._sums = dst
        if operands is not None and not self.fused and any(v.address == dst.address for v in operands.views):
            self._sums = comm._room_for_sums(channel, dst)

    @property
    def fused(self) -> bool:
        """Whether the call has an epilogue, and it is in the collective's own kernel."""
        return self._plan is not None and self._plan.fused

    @property
    def protocol(self) -> str | None:
        """Name of the protocol; None where nothing is exchanged (one rank, or no elements)."""
        return None if self._plan is None else self._plan.protocol.name

    @property
    def blocks(self) -> int:
        return 0 if self._plan is None else self._plan.shape.blocks

    @property
    def threads(self) -> int:
        return 0 if self._plan is None else self._plan.shape.threads

    def __call__(self) -> Any:
        self._comm._start(self._signature, self._channel, self._stream)
        if self._operands is None or self.fused:
            self._comm._run(self._plan, self._src, self._dst, self._stream, self._operands)
        else:
            self._comm._run(self._plan, self._src, self._sums, self._stream)
            self._comm._separate(self._sums, self._dst, self._stream, self._operands, None)
        return self.out


class Communicator:
    """The ranks of one server, their slabs and their calls.

    Parameters
    ----------
    group : mpi4py communicator, process group of torch.distributed, or any object with `allgather(value)` and `barrier()`
        All its ranks construct together, on one machine. An mpi4py communicator is duplicated; any other group is used as
        it is, so between the ranks its other uses must be in one order with this communicator's collective steps.
    backend : {"auto", "cuda", "cpu"}
    max_bytes : int
        Message size that the slabs are made for. Larger messages are handled in pieces.
    channels : int
        Calls that may be in flight at a time, each on a stream of its own.
    checked : bool
        Compare every call's signature among the ranks before launching it: slow, and tells disagreement from a hang.
    timeout_s : float, optional
        Seconds until a wait for a peer is given up; default FCOMM_TIMEOUT_S.
    dependent_launch : {"none", "late", "early"}
        "late": a call's grid may be scheduled while the kernel before it in the stream ends, and waits for that one
        before it touches anything; its own successor may be scheduled when each of its blocks has a thread that is done.
        "early": when all its blocks have begun, which is the caller's promise that whatever follows in the stream waits
        before it reads a result or overwrites an input: kernels of other launches without the attribute do, kernels with
        it that never wait do not. Without effect below compute capability 9.0 and on the cpu backend (`no_dependent_launch` says why). Both take room for two grids of every rank;
        where ranks share a GPU, a call does not overlap the one before if their blocks differ and might not fit together.
    placement : {"device", "host"}
        Where slots lie: in device memory, which peers map, or in pinned host memory, which every rank reaches over its bus. The
        latter is for GPUs without peer access, and for `ll` and `flag` only; everything else is refused with the reason.
    link : Link or str, optional
        Emulate a slower link between the ranks, for measurements: `fcomm.links`, docs/links.md. Results are the same.
    model : path or Model, optional
        Cost model that protocols are chosen by, the same on all ranks; "seed" for the coefficients of the package. Default:
        FCOMM_MODEL, else the one of this machine in the cache folder, else "seed".
    device : int, optional
        CUDA device of this rank; default: the current one if that is not the first, else one for each rank in turn.
    variant : str
        For experiments: compile every kernel as that variant (`fcomm.variants`). Calls then name their protocol.

    Raises
    ------
    SetupError, DisagreementError, ArgumentError, ModelError
        On all ranks alike.
    """

    def __init__(
        self,
        group: Any,
        backend: str = "auto",
        max_bytes: int = 1 << 20,
        channels: int = 1,
        checked: bool = False,
        timeout_s: float | None = None,
        dependent_launch: str = "none",
        model: str | Path | Model | None = None,
        device: int | None = None,
        link: Link | str | None = None,
        placement: str = "device",
        variant: str = SHIPPED,
    ) -> None:
        self.group: Group = as_group(group)
        if is_mpi(self.group):
            bootstrap.check_world(self.group)
            self.group = self.group.Dup()
        self._closed = True
        try:
            self._construct(
                backend,
                max_bytes,
                channels,
                checked,
                timeout_s,
                dependent_launch,
                model,
                device,
                link,
                placement,
                variant,
            )
        except BaseException:
            self._free_group()
            raise

    def _construct(
        self,
        backend: str,
        max_bytes: int,
        channels: int,
        checked: bool,
        timeout_s: float | None,
        dependent_launch: str,
        model: str | Path | Model | None,
        device: int | None,
        link: Link | str | None,
        placement: str,
        variant: str,
    ) -> None:
        mpi = self.group
        self.rank, self.world_size = mpi.rank, mpi.size

        def local() -> tuple[SlabLayout, float, bool, Link | None]:
            if dependent_launch not in LAUNCHES:
                raise ArgumentError(f"dependent_launch is one of {', '.join(LAUNCHES)}, not {dependent_launch!r}")
            if placement not in PLACEMENTS:
                raise ArgumentError(f"placement is one of {', '.join(PLACEMENTS)}, not {placement!r}")
            variant_called(variant)
            return (
                SlabLayout(mpi.size, max_bytes, channels),
                settings.timeout_s() if timeout_s is None else timeout_s,
                checked or settings.checked(),
                parse_link(link) if isinstance(link, str) else link,
            )

        self.layout, self.timeout_s, self.checked, self.link = bootstrap.collectively(mpi, local)
        name = bootstrap.collectively(mpi, lambda: backend if backend != "auto" else settings.backend())
        self._forced, self._plain = bootstrap.collectively(mpi, lambda: (settings.protocol(), settings.plain()))
        self.variant = variant
        told = (
            name,
            max_bytes,
            channels,
            self.checked,
            self._forced,
            self._plain,
            dependent_launch,
            self.link,
            placement,
            variant,
        )
        bootstrap.agree(mpi, told, "backend, sizes and settings")
        bootstrap.agree(
            mpi, bootstrap.collectively(mpi, sources), "the kernels (hash of their sources, registered encodings)"
        )
        bootstrap.check_node(mpi)
        name = resolve_backend(name, mpi)
        self.placement = placement
        if self.link is not None and self.link.forwarded and self.layout.slab_bytes > MOST_SLAB_BYTES:
            raise ArgumentError(
                f"slabs of {self.layout.slab_bytes >> 30} GiB are too large for a link that forwards, which knows places up to "
                f"{MOST_SLAB_BYTES >> 30} GiB: use smaller max_bytes or fewer channels"
            )
        made: Backend = bootstrap.collectively(mpi, lambda: _make_backend(name, mpi, device, placement))
        bootstrap.collectively(mpi, made.prepare)
        self.backend: Backend = made
        every: list[frozenset[str]] = mpi.allgather(made.capabilities)
        self.capabilities = frozenset.intersection(*every)
        self.gpu = _smallest_share(mpi.allgather(made.describe()))
        self.link_own_us = 0.0
        self.ticks_per_us = 0.0
        if self.link is not None:
            forwarded = self.link.forwarded
            self.ticks_per_us = FORWARDED_TICKS_PER_US if forwarded else bootstrap.collectively(mpi, made.ticks_per_us)
        self._queue_memory: dict[int, list[tuple[int, Any]]] = {}
        self._model = models.agree(mpi, model, made)
        self._grids: dict[tuple[str, int], int] = {}
        self._sums: dict[tuple[int, str, int], View] = {}
        self.slabs = made.allocate(self.layout)
        self.slab_bytes = self.layout.slab_bytes
        self.no_dependent_launch = "not asked for" if dependent_launch == "none" else made.use_dependent_launch()
        self.dependent_launch = "none" if self.no_dependent_launch else dependent_launch
        self._select(self._model)
        self._errors = made.error_records()
        self._told = self._errors["valid"].data
        """One word for each channel, looked at before every call: through NumPy that takes microseconds."""
        self._failed: str | None = None
        self._closed = False
        hold(self)
        mpi.barrier()  # no one pushes before all slabs are cleared
        if self.link is not None and self.backend.name == "cuda" and self.world_size > 1:
            from fcomm import measure_links

            self.link_own_us = measure_links.own_us(self)

    def _select(self, model: models.Origin) -> None:
        """Chooses protocols by that model from now on."""
        self._model = model
        launches = set(self.group.allgather(self.dependent_launch))
        self.selector = Selector(
            self.layout,
            self.capabilities,
            model.model,
            launch=launches.pop() if len(launches) == 1 else "none",
            forced=self._forced,
            plain=self._plain,
            gpu=self.gpu,
        )
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._separate_plans: dict[tuple[object, ...], SeparatePlan] = {}
        self._logged: set[tuple[str, int, str]] = set()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        protocol: str = "auto",
        stream: Any = None,
        channel: int = 0,
        shape: tuple[int, int] | None = None,
        epilogue: Bound | None = None,
    ) -> Any:
        """Sums x over all ranks, in rank order and float32, rounded once; the same bits on every rank.

        x : array of float32, float16, bfloat16 or int32, any shape, C-contiguous. out : the same kind, shape and dtype,
        or x itself, or None for a new array. shape : (blocks, threads) instead of the default launch shape. epilogue : what
        becomes of the sums before they are stored (`fcomm.epilogue`), alike on all ranks. Returns out.
        """
        return self.prepare(
            "all_reduce",
            x,
            out,
            op=op,
            protocol=protocol,
            stream=stream,
            channel=channel,
            shape=shape,
            epilogue=epilogue,
        )()

    def apply(
        self, epilogue: Bound, x: Any, out: Any = None, *, stream: Any = None, shape: tuple[int, int] | None = None
    ) -> Any:
        """Applies an epilogue to this rank's x, in a kernel of its own: no other rank takes part.

        ``apply(e, all_reduce(x))`` has the bits of ``all_reduce(x, epilogue=e)``. Arguments as for `all_reduce`; returns out.
        """
        self._check_open()
        src, dst, on = self._arrays("all_reduce", x, out, stream)
        self._separate(
            src, dst, on, epilogue.look(self.backend, src, dst), None if shape is None else LaunchShape(*shape)
        )
        return dst.owner

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        protocol: str = "auto",
        stream: Any = None,
        channel: int = 0,
        shape: tuple[int, int] | None = None,
    ) -> Any:
        """Every rank's x, bytes unchanged, in rank order.

        x : C-contiguous array of any dtype and shape, alike on all ranks. out : array of shape (n, *x.shape) and the
        same dtype, of which x may be the part ``out[rank]``, or None for a new array. Returns out.
        """
        return self.prepare("all_gather", x, out, protocol=protocol, stream=stream, channel=channel, shape=shape)()

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        protocol: str = "auto",
        stream: Any = None,
        channel: int = 0,
        shape: tuple[int, int] | None = None,
    ) -> Any:
        """The sum over all ranks of this rank's part of x: the rank-th of n equal parts of the flattened x.

        x : as for `all_reduce`, its size a multiple of n. out : array of x.size / n elements, which may be that part of
        x itself, or None for a new array of shape (x.size / n,). Returns out.
        """
        return self.prepare(
            "reduce_scatter", x, out, op=op, protocol=protocol, stream=stream, channel=channel, shape=shape
        )()

    def prepare(
        self,
        collective: str,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        protocol: str = "auto",
        stream: Any = None,
        channel: int = 0,
        shape: tuple[int, int] | None = None,
        epilogue: Bound | None = None,
    ) -> Call:
        """Decides everything about a call once; `call()` then launches it, as often as wanted, on the same arrays."""
        self._check_open()
        self._check_options(collective, op, channel)
        if epilogue is not None and collective != "all_reduce":
            raise ArgumentError(f"all_reduce has epilogues, {collective} has none")
        src, dst, on = self._arrays(collective, x, out, stream)
        operands = None if epilogue is None else epilogue.look(self.backend, src, dst)
        wanted = None if shape is None else LaunchShape(*shape)
        signature: tuple[object, ...] = (collective, src.dtype, src.shape, op, protocol, channel)
        if operands is not None:
            signature = (*signature, operands.key)
        plan = self._plan(collective, src, dst, protocol, channel, wanted, operands)
        if plan is not None and not plan.protocol.encodings:
            self._check_baseline(plan.protocol, src, dst, channel)
        return Call(self, plan, src, dst, on, signature, channel, operands)

    def _arrays(self, collective: str, x: Any, out: Any, stream: Any) -> tuple[View, View, Any]:
        """Input, output and stream of a call."""
        src = self.backend.view(x)
        if not src.contiguous:
            raise ArgumentError(f"the input of shape {src.shape} is not C-contiguous: pass a contiguous copy")
        on = self.backend.stream(x, stream)  # before anything is allocated: a result is allocated for its stream
        if out is None:
            out = self.backend.empty_like(x, self._result_shape(collective, src))
        dst = self.backend.view(out)
        self._check_out(collective, src, dst)
        return src, dst, on

    def _plan(
        self,
        collective: str,
        src: View,
        dst: View,
        name: str,
        channel: int,
        shape: LaunchShape | None,
        operands: Operands | None = None,
    ) -> Plan | None:
        if self.world_size == 1 or src.nbytes == 0:
            self._chosen(collective, src, name, operands)  # a wrong name or dtype is wrong at any size
            return None
        # A local fact: it picks a kernel, not what is on the wire.
        aligned = (src.address | dst.address | (operands.address_bits if operands else 0)) % ALIGNMENT == 0
        key = (collective, src.dtype, src.nbytes, name, channel, shape, aligned, operands and operands.key)
        plan = self._plans.get(key)
        if plan is None:
            chosen = self._chosen(collective, src, name, operands)
            plan = Plan(self, chosen, src.dtype, src.nbytes, channel, shape, aligned, operands)
            self._plans[key] = plan
            self._log_choice(collective, src.nbytes, name, plan)
        return plan

    def _room_for_sums(self, channel: int, like: View) -> View:
        """Memory for the sums of a channel's calls, one at a time. It stays: a captured graph may use it."""
        key = (channel, like.dtype, like.count)
        if key not in self._sums:
            self._sums[key] = self.backend.view(self.backend.empty(like.count, like.dtype))
        return self._sums[key]

    def _separate(self, src: View, dst: View, stream: Any, operands: Operands, shape: LaunchShape | None) -> None:
        """Launches an epilogue's own kernel."""
        if src.nbytes == 0:
            return
        aligned = (src.address | dst.address | operands.address_bits) % ALIGNMENT == 0
        key = (src.dtype, src.nbytes, shape, aligned, operands.key)
        plan = self._separate_plans.get(key)
        if plan is None:
            plan = self._separate_plans[key] = SeparatePlan(self, src, operands, shape, aligned)
        plan.launch(self.backend, src, dst, stream, operands)

    def _chosen(self, collective: str, src: View, name: str, operands: Operands | None = None) -> Protocol:
        if collective != "all_gather" and src.dtype not in REDUCIBLE:
            raise ArgumentError(f"dtype {src.dtype} cannot be reduced; use one of {', '.join(REDUCIBLE)}")
        if self.variant != SHIPPED and self.selector.name_for(collective, name) == AUTO:
            raise ArgumentError(
                f"a communicator of the variant {self.variant} chooses no protocol: name one in the call"
            )
        if operands is None:
            return self.selector.choose(collective, src.nbytes, src.dtype, name)
        if self.variant != SHIPPED:
            raise ArgumentError(f"a communicator of the variant {self.variant} has no epilogues")
        return self.selector.choose_with(operands.epilogue, collective, src.nbytes, src.dtype, name)

    def _log_choice(self, collective: str, nbytes: int, name: str, plan: Plan) -> None:
        """Says which path calls take: once for each size class (up to a power of two) and protocol, on rank 0."""
        if self.rank != 0:
            return
        if self.selector.name_for(collective, name) == AUTO:
            # An emulation is not chosen for its speed: nobody need look up for it.
            models.say(self._model, logging.INFO if self.backend.name == "cpu" else logging.WARNING)
        size_class = (nbytes - 1).bit_length()
        key = (collective, size_class, plan.protocol.name)
        if key not in self._logged:
            self._logged.add(key)
            log.info(
                "%s up to %s among %d ranks: %s, %d x %d threads (%s)",
                collective, format_size(1 << size_class), self.world_size, plan.protocol.name, plan.shape.blocks,
                plan.shape.threads, self._model.words,
            )  # fmt: skip

    def _start(self, signature: object, channel: int, stream: Any) -> None:
        """What stands before every launch: the communicator is usable and, in checked mode, the ranks agree."""
        self._check_open()
        self.check()
        if self.checked:
            try:
                bootstrap.agree(self.group, signature, "this call (collective, dtype, shape, op, protocol, channel)")
            except DisagreementError as error:
                raise DisagreementError(f"{error}; nothing was launched") from None

    def _run(self, plan: Plan | None, src: View, dst: View, stream: Any, operands: Operands | None = None) -> None:
        if plan is not None:
            plan.launch(self.backend, src, dst, stream, operands)
            if self.backend.name == "cpu":
                self.check()  # the grid is complete: say now what went wrong in it
        elif src.nbytes and src.address != dst.address:
            self.backend.copy(src, dst, stream)

    # ---- arguments --------------------------------------------------------------------------------------------------

    def _result_shape(self, collective: str, src: View) -> tuple[int, ...]:
        if collective == "all_gather":
            return (self.world_size, *src.shape)
        if collective == "reduce_scatter":
            if src.count % self.world_size:
                raise ArgumentError(
                    f"reduce_scatter of {src.count} elements among {self.world_size} ranks: the parts would not be equal"
                )
            return (src.count // self.world_size,)
        return src.shape

    def _check_options(self, collective: str, op: str, channel: int) -> None:
        if collective not in COLLECTIVES:
            raise ArgumentError(f"there is no collective {collective!r}; use one of {', '.join(COLLECTIVES)}")
        if op != "sum":
            raise ArgumentError(f"op {op!r} is not supported; only 'sum' is")
        if not 0 <= channel < self.layout.channels:
            raise ArgumentError(f"channel {channel} is outside 0..{self.layout.channels - 1}")

    def _check_out(self, collective: str, src: View, dst: View) -> None:
        shape = self._result_shape(collective, src)
        fits = dst.count == shape[0] if collective == "reduce_scatter" else dst.shape == shape
        if dst.dtype != src.dtype or not fits:
            raise ArgumentError(f"out is {dst.dtype} {dst.shape}; it must be {src.dtype} {shape}")
        if not dst.contiguous:
            raise ArgumentError("out is not C-contiguous")
        if dst.address + dst.nbytes <= src.address or src.address + src.nbytes <= dst.address:
            return
        own_part = self.rank * min(src.nbytes, dst.nbytes)
        in_place, part = {
            "all_gather": (dst.address + own_part, "x being out[rank]"),
            "reduce_scatter": (dst.address - own_part, "out being this rank's part of x"),
        }.get(collective, (dst.address, "x itself"))
        if src.address != in_place:
            raise ArgumentError(f"out overlaps the input in part: only {part}, or memory apart from it, will do")

    def _check_baseline(self, proto: Protocol, src: View, dst: View, channel: int) -> None:
        """What protocols demand of arrays that have their originals' limits, or whose peers read the staging buffer."""
        granule = proto.algorithm.granule
        if (src.address | dst.address) % granule:
            raise NotAdmittedError(f"{proto.name} takes arrays that are aligned to {granule} bytes only")
        if "staging" not in proto.regions:
            return
        staging = self.layout.regions(channel)["staging"]
        start = self.slabs[self.rank] + staging.offset
        inside = [v.address < start + staging.slot_stride and v.address + v.nbytes > start for v in (src, dst)]
        if inside[0] and src.address != start:
            raise ArgumentError(f"{proto.name} reads an input in the staging buffer from the buffer's start only")
        if inside[1] and not (proto.algorithm.in_place_staging and src.address == dst.address == start):
            raise ArgumentError(f"{proto.name} cannot put its result there: peers read this rank's staging buffer")

    def _keep_grid(self, proto: Protocol, channel: int, wanted: LaunchShape, resident: int) -> None:
        """A kernel that counts by the block: the first call of a channel fixes its number of blocks."""
        most = min(resident, V2_MAX_BLOCKS)
        if wanted.blocks > most:
            raise ArgumentError(
                f"{proto.name} with {wanted.threads} threads takes up to {most} blocks, not {wanted.blocks}"
            )
        kept = self._grids.setdefault((proto.regions[-1], channel), wanted.blocks)
        if kept != wanted.blocks:
            raise ArgumentError(
                f"{proto.name} counts its calls by the block, and this communicator's first one had {kept} blocks, not "
                f"{wanted.blocks}: keep to that, or use another communicator"
            )

    # ---- state ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `HangError` if a wait of this rank has expired since the last `reset()`."""
        if self._failed is None and not any(self._told):
            return
        first = self._errors[self._errors["valid"] != 0]
        record = {k: first[0][k] for k in ERROR_DTYPE.names or ()} if len(first) else {}
        if self._failed is None:
            self._failed = error_message(first[0], list(protocols()), self.world_size)
        raise HangError(f"{self._failed}; results since then are unspecified, call reset() on all ranks", record)

    def reset(self) -> None:
        """Collective: after a hang, waits for this rank's kernels and puts all ranks into one agreed first state."""
        if self._closed:
            raise ClosedError("the communicator is closed")
        self.backend.synchronize()
        self.group.barrier()  # nobody's kernel pushes any more
        self.backend.reset(self.layout)
        self._failed = None
        self.group.barrier()  # and nobody pushes before all are reset

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the communicator is closed")

    def close(self) -> None:
        """Collective and idempotent: frees the slabs, after all ranks came here.

        Raises `HangError`, when all is freed, for an expired wait of this rank that nothing has told of before.
        """
        if self._closed:
            return
        self._closed = True
        let_go(self)
        self.backend.synchronize()
        untold: HangError | None = None
        try:
            if self._failed is None:
                self.check()
        except HangError as error:
            untold = error
        self.backend.close()
        self._plans.clear()
        self._separate_plans.clear()
        self._sums.clear()
        self._free_group()
        if untold is not None:
            raise untold

    def _free_group(self) -> None:
        if is_mpi(self.group):
            self.group.Free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error that other ranks may not have had, they will not come to a collective close, and waiting for them
        # would hide the error behind a hang: the slabs then stay until the process ends.
        if kind is None or issubclass(kind, DisagreementError):
            self.close()

    # ---- looking ----------------------------------------------------------------------------------------------------

    @property
    def mpi(self) -> MPI.Intracomm:
        """The group, where it is an mpi4py communicator: measuring and calibrating need MPI's own operations."""
        if not is_mpi(self.group):
            raise ArgumentError(
                "this communicator's ranks did not meet through MPI: construct it with an mpi4py communicator"
            )
        return self.group

    @property
    def model(self) -> Model:
        """The cost model that protocols are chosen by."""
        return self._model.model

    @property
    def model_words(self) -> str:
        """Which model it is and where it comes from, for readers."""
        return self._model.words

    def use_model(self, model: str | Path | Model | None = None) -> None:
        """Collective: chooses protocols by another cost model from now on, as if constructed with it. Prepared calls stay
        as they are.
        """
        self._check_open()
        self._select(models.agree(self.group, model, self.backend))

    def use_link(self, link: Link) -> None:
        """Emulates another link from now on, prepared calls included (a captured graph keeps its own). To be called on all ranks
        alike, for a communicator that was made with one.
        """
        self._check_open()
        if self.link is None:
            raise ArgumentError("this communicator's kernels have no emulated link: construct it with link=...")
        if link.form != self.link.form:
            raise ArgumentError(
                f"this communicator's kernels have links of form {self.link.form}, not {link.form}: construct another one"
            )
        self.link = link
        for plan in self._plans.values():
            plan.follow_link(self)

    @property
    def link_compiled(self) -> int:
        """The form of emulated link in this communicator's kernels, as they are compiled (`Specialisation.link`)."""
        return 0 if self.link is None else self.link.compiled

    def _queues(self, channel: int, working: int) -> int:
        """Address of queues for a channel's grids of so many working blocks; 0 where no link forwards. They are empty between
        grids, so any will do; smaller ones are kept, since plans and graphs have their address.
        """
        if self.link is None or not self.link.forwarded:
            return 0
        kept = self._queue_memory.setdefault(channel, [])
        if not kept or kept[-1][0] < working:
            made = self.backend.from_host(np.zeros(queues_bytes(working) + LINE, np.uint8))
            self.backend.synchronize()
            kept.append((working, made))
        return -(-self.backend.view(kept[-1][1]).address // LINE) * LINE

    def admitted(self, dtype: str, collective: str = "all_reduce") -> dict[str, str | None]:
        """Every protocol of a collective: None where it may run here, else the reason why not."""
        return {p.name: self.refusal(p, dtype) for p in protocols().values() if p.collective == collective}

    def refusal(self, proto: Protocol, dtype: str) -> str | None:
        """Why a protocol may not run here, in one clause; None if it may."""
        return proto.refusal(dtype, self.world_size, self.capabilities) or self.selector.refusal(proto, dtype)

    def explain(self, collective: str, nbytes: int, dtype: str, protocol: str = AUTO) -> Explanation:
        """What a call of that size would use and why: `print` it for a table.

        nbytes : bytes of one rank's input. dtype : name of the element type. protocol : as for the call.
        """
        self._check_options(collective, "sum", 0)
        if collective != "all_gather":
            dtype = reducible(dtype).name
        return explain(self.selector, collective, nbytes, dtype, protocol, model=self._model.words)

    def staging_view(self, count: int, dtype: str, channel: int = 0) -> Any:
        """The staging buffer of a channel, up to `max_bytes` of it, as an array of `count` elements.

        Protocols whose peers read inputs (`barrier.*`, `custom_ar_v2.pull_*`) take an input here as it is, without the
        copy that they make of any other one. Any other call of such a protocol overwrites it, and the two-shot pull does.
        """
        self._check_open()
        element, staging = np.dtype(REDUCIBLE[dtype].numpy), self.layout.regions(channel)["staging"]
        if count * element.itemsize > staging.capacity:
            raise ArgumentError(f"the staging buffer has {staging.capacity} bytes: too few for {count} of {dtype}")
        return self.backend.slab()[staging.offset : staging.offset + count * element.itemsize].view(element)

    def empty(self, count: int, dtype: str) -> Any:
        """An uninitialised array of the backend's kind."""
        return self.backend.empty(count, dtype)

    def from_host(self, x: NDArray[Any]) -> Any:
        """A NumPy array's content as an array of the backend's kind."""
        return self.backend.from_host(x)

    def to_host(self, x: Any) -> NDArray[Any]:
        """An array of the backend's kind as a NumPy array of its own."""
        return self.backend.to_host(x)
