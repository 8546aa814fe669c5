"""All-reduces that others wrote, measured beside ours: NCCL, MPI's own, PyTorch's.

``--peers nccl,mpi,torch`` of the sweep. A peer stands in the place of a communicator (`Beside`), so that whatever times a
protocol times it too: the same data, rounds and records. Its results are held against the bound of a sum in any order
(`fcomm.checks.beyond_rounding`), since none of them promises an order. Where one cannot run, it says why, on all ranks alike,
and that is the reason in the records.

NVLink multicast stays off in all of them: it must be so before any of their libraries is loaded, hence by importing this.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fcomm import measure_cuda
from fcomm.checks import beyond_rounding
from fcomm.errors import ArgumentError, FcommError, NotAdmittedError
from fcomm.measure import PEERS, Case, Launch, Mode

if TYPE_CHECKING:
    from fcomm import Communicator
    from fcomm.backends.base import View

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ |= NO_MULTICAST

NCCL_SHARES_FROM = 23000
"""Version, as NCCL counts, from which two ranks may be on one GPU; by an experimental switch."""
NCCL_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
NCCL_SHARES = 2
SYMMETRIC_RANKS = (2, 4, 8)


class Peer(ABC):
    """Somebody else's all-reduce among the ranks of one communicator. Collective to make.

    comm : ours, whose ranks, device and stream it uses. `NotAdmittedError`, on all ranks alike, where it cannot run here.
    """

    captured = True
    """Whether its calls can be queued on a stream, and so be captured in a graph."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.mpi = comm, comm.mpi
        self.together(self.check)
        self.together(self.start)

    def together(self, step: Callable[[], None]) -> None:
        """Runs a step; if it fails on some rank, all raise the first one's reason, and nobody waits for another."""
        why: str | None = None
        try:
            step()
        except FcommError as error:
            why = str(error)
        except Exception as error:
            lines = str(error).splitlines()
            why = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        for theirs in self.mpi.allgather(why):
            if theirs is not None:
                raise NotAdmittedError(theirs)

    @property
    def sharing(self) -> int:
        """Ranks on this rank's GPU; 0 on the cpu backend."""
        return int(getattr(self.comm.backend, "ranks_here", 0))

    @abstractmethod
    def check(self) -> None:
        """Raises what speaks against it, from facts alone; meets no other rank."""

    def start(self) -> None:  # noqa: B027 - some have nothing to start
        """Makes what all calls share, with the other ranks; everything that may be wrong alone was looked at before."""

    def refusal(self, dtype: str, nbytes: int) -> str | None:
        """Why it does not take such arrays, in one clause; None if it does."""
        return None

    @abstractmethod
    def call(self, src: View, dst: View, stream: int | None) -> Launch:
        """What starts one call on arrays that it takes. stream : None on the cpu backend."""

    def close(self) -> None:  # noqa: B027
        """Collective: gives back what `start` made."""


class Mpi(Peer):
    """``MPI_Allreduce`` on host buffers; a GPU's arrays are copied to pinned ones and back, in the time."""

    captured = False

    def check(self) -> None:
        pass

    def refusal(self, dtype: str, nbytes: int) -> str | None:
        return None if dtype in ("float32", "int32") else f"MPI has no {dtype}: it adds float32 and int32"

    def call(self, src: View, dst: View, stream: int | None) -> Launch:
        from mpi4py import MPI

        kind, allreduce = {"float32": MPI.FLOAT, "int32": MPI.INT32_T}[src.dtype], self.mpi.Allreduce
        if self.comm.backend.name == "cpu":
            x = MPI.IN_PLACE if src.address == dst.address else [src.owner, kind]
            return lambda: allreduce(x, [dst.owner, kind])
        from cupy.cuda import alloc_pinned_memory, runtime

        host = [np.frombuffer(alloc_pinned_memory(max(1, src.nbytes)), np.uint8, src.nbytes) for _ in range(2)]
        down, up = runtime.memcpyDeviceToHost, runtime.memcpyHostToDevice

        def staged() -> None:
            runtime.memcpyAsync(host[0].ctypes.data, src.address, src.nbytes, down, stream)
            runtime.streamSynchronize(stream)
            allreduce([host[0], kind], [host[1], kind])
            runtime.memcpyAsync(dst.address, host[1].ctypes.data, src.nbytes, up, stream)

        return staged


class Nccl(Peer):
    """NCCL through CuPy. The binding has no windows, so NCCL's kernels for symmetric memory are out of its reach."""

    def check(self) -> None:
        if self.comm.backend.name != "cuda":
            raise NotAdmittedError("NCCL is for GPUs")
        try:
            from cupy.cuda import nccl

            available, version = bool(nccl.available), int(nccl.get_version())
        except Exception:  # not there, or CuPy was built without
            raise NotAdmittedError("CuPy finds no NCCL here (the package nvidia-nccl-cu12 or -cu13 has it)") from None
        if not available:
            raise NotAdmittedError("this CuPy was built without NCCL")
        if (why := refused_sharing(self.sharing, version)) is not None:
            raise NotAdmittedError(why)

    def start(self) -> None:
        from cupy.cuda import nccl

        os.environ[NCCL_SWITCH] = "1" if self.sharing > 1 else "0"
        unique = self.mpi.bcast(nccl.get_unique_id() if self.mpi.rank == 0 else None)
        self._communicator = nccl.NcclCommunicator(self.mpi.size, unique, self.mpi.rank)

    def call(self, src: View, dst: View, stream: int | None) -> Launch:
        from cupy.cuda import nccl

        kind = {
            "float32": nccl.NCCL_FLOAT32, "float16": nccl.NCCL_FLOAT16, "bfloat16": nccl.NCCL_BFLOAT16,
            "int32": nccl.NCCL_INT32,
        }[src.dtype]  # fmt: skip
        reduce = self._communicator.allReduce
        return lambda: reduce(src.address, dst.address, src.count, kind, nccl.NCCL_SUM, stream)

    def close(self) -> None:
        self._communicator.destroy()


def refused_sharing(sharing: int, version: int) -> str | None:
    """Why NCCL would not take that many ranks on one GPU; None if it does. version : as NCCL counts, 22809 is 2.28.9."""
    if sharing <= 1:
        return None
    name = f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}"
    if version < NCCL_SHARES_FROM:
        return f"{name} refuses several ranks on one GPU, and {sharing} share this one (from 2.30 on {NCCL_SWITCH} allows two)"
    if sharing > NCCL_SHARES:
        return f"{name} has a switch for {NCCL_SHARES} ranks on one GPU ({NCCL_SWITCH}, experimental), and {sharing} share this one"
    return None


class _Torch(Peer):
    """What PyTorch's have in common: one process group of the communicator's ranks, who meet through a file."""

    def check(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise NotAdmittedError("PyTorch is not installed")
        if self.sharing:  # before PyTorch reads it
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1" if self.sharing > 1 else "0"
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            raise NotAdmittedError("this PyTorch was built without torch.distributed")
        if self.sharing and not torch.cuda.is_available():
            raise NotAdmittedError("this PyTorch has no CUDA")
        if dist.is_initialized() and not _groups:
            raise NotAdmittedError("torch.distributed has a process group already, of somebody else's")

    def start(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        if self.sharing:
            torch.cuda.set_device(self.device)
        if self.mpi.size not in _groups:
            _leave_group()
            if self.nccl_refusal() is None and self.sharing > 1:
                os.environ[NCCL_SWITCH] = "1"
            folder = self.mpi.bcast(tempfile.mkdtemp(prefix="fcomm-torch-") if self.mpi.rank == 0 else None)
            _groups[self.mpi.size] = Path(folder)
            dist.init_process_group(
                "gloo" if self.nccl_refusal() else "cpu:gloo,cuda:nccl",
                store=dist.FileStore(str(Path(folder) / "store"), self.mpi.size),
                rank=self.mpi.rank, world_size=self.mpi.size,
            )  # fmt: skip

    def nccl_refusal(self) -> str | None:
        """Why PyTorch's NCCL does not take these ranks, in one clause; None if it does."""
        import torch

        if not self.sharing:
            return "NCCL is for GPUs"
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return refused_sharing(self.sharing, 10000 * major + 100 * minor + patch)

    @property
    def device(self) -> int:
        return int(getattr(self.comm.backend, "device", 0))

    def tensor(self, view: View) -> Any:
        """The view's array as a tensor on the same memory."""
        words = view.owner.view(np.uint16) if view.dtype == "bfloat16" else view.owner
        tensor = self.torch.from_dlpack(words)
        return tensor.view(self.torch.bfloat16) if view.dtype == "bfloat16" else tensor

    def on(self, stream: int | None) -> Any:
        """PyTorch's current stream for the duration of a block."""
        if stream is None:
            return contextlib.nullcontext()
        return self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream, device=self.device))

    def close(self) -> None:
        _leave_group()


_groups: dict[int, Path] = {}
"""PyTorch's process group, if it is ours: its size, and the folder of the file that its ranks met through."""


def _leave_group() -> None:
    if _groups:
        import torch.distributed as dist

        dist.destroy_process_group()
        for folder in _groups.values():
            shutil.rmtree(folder, ignore_errors=True)
        _groups.clear()


class TorchDistributed(_Torch):
    """``torch.distributed.all_reduce``, in place behind a copy: NCCL on GPUs, Gloo on CPUs."""

    captured = False
    """PyTorch captures it in graphs of its own only."""

    def check(self) -> None:
        super().check()
        if self.sharing and (why := self.nccl_refusal()) is not None:
            raise NotAdmittedError(why)

    def call(self, src: View, dst: View, stream: int | None) -> Launch:
        x, out = self.tensor(src), self.tensor(dst)

        def reduce() -> None:
            with self.on(stream):
                if src.address != dst.address:
                    out.copy_(x)
                self.dist.all_reduce(out)

        return reduce


class TorchSymmetric(_Torch):
    """PyTorch's symmetric memory: its one-shot, with the copy into the symmetric buffer that it makes itself; no multicast."""

    operation = "one_shot_all_reduce_copy_out"

    def check(self) -> None:
        if self.comm.backend.name != "cuda":
            raise NotAdmittedError("PyTorch's symmetric memory is for GPUs")
        if self.mpi.size not in SYMMETRIC_RANKS:
            raise NotAdmittedError(f"PyTorch's symmetric memory adds among 2, 4 or 8 ranks, not {self.mpi.size}")
        super().check()

    def start(self) -> None:
        super().start()
        import torch.distributed._symmetric_memory as symmetric

        if not hasattr(self.torch.ops.symm_mem, self.operation):
            raise NotAdmittedError(f"this PyTorch has no {self.operation}")
        self._group = self.dist.group.WORLD.group_name
        self._buffers: dict[str, Any] = {}
        for name, dtype in (("float32", self.torch.float32), ("bfloat16", self.torch.bfloat16)):
            count = self.comm.layout.max_bytes // dtype.itemsize
            made = symmetric.empty(count, dtype=dtype, device=f"cuda:{self.device}")
            symmetric.rendezvous(made, self._group)
            self._buffers[name] = made

    def refusal(self, dtype: str, nbytes: int) -> str | None:
        if dtype in ("float32", "bfloat16") and nbytes % 16 == 0:
            return None
        return "PyTorch's symmetric memory adds float32 and bfloat16, in multiples of 16 bytes"

    def call(self, src: View, dst: View, stream: int | None) -> Launch:
        buffer, x, out = self._buffers[src.dtype][: src.count], self.tensor(src), self.tensor(dst)

        def reduce() -> None:
            with self.on(stream):
                self.reduce(buffer, x, out)

        return reduce

    def reduce(self, buffer: Any, x: Any, out: Any) -> None:
        """Queues one all-reduce of x, through the buffer, to out."""
        self.torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, x, "sum", self._group, out)

    def close(self) -> None:
        self._buffers.clear()
        super().close()


class TorchSymmetricTwoShot(TorchSymmetric):
    """Its two-shot: a copy into the symmetric buffer, the sum in place there, and a copy out of it."""

    operation = "two_shot_all_reduce_"

    def reduce(self, buffer: Any, x: Any, out: Any) -> None:
        buffer.copy_(x)
        self.torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._group)
        out.copy_(buffer)


KINDS: Mapping[str, type[Peer]] = MappingProxyType(
    dict(zip(PEERS, (Mpi, Nccl, TorchDistributed, TorchSymmetric, TorchSymmetricTwoShot), strict=True))
)
"""Every peer by the name that records have."""
OPTIONS = ("nccl", "mpi", "torch")
MODES = ("graph", "isolated", "host", "prepared")


def named(option: str) -> list[str]:
    """The peers that an item of ``--peers`` stands for."""
    return [name for name in PEERS if name.split(".")[0] == option]


def refusal(case: Case) -> str | None:
    """Why a case of a peer is none, in one clause, as far as its names alone tell; None where it may be tried."""
    if case.collective != "all_reduce":
        return "a peer is measured for all-reduce alone"
    if case.mode not in MODES:
        return f"a peer is measured in modes {', '.join(MODES)}"
    if case.mode not in ("host", "prepared") and not KINDS[case.protocol].captured:
        return f"no graph of the sweep's takes its calls, and mode {case.mode} needs that: add --modes host"
    return None


# ---- in the place of a communicator ----------------------------------------------------------------------------------


class PeerCall:
    """One call of a peer on its arrays, as `fcomm.communicator.Call` is one of ours."""

    blocks = threads = 0

    def __init__(self, launch: Launch, out: Any) -> None:
        self._launch, self.out = launch, out

    def __call__(self) -> Any:
        self._launch()
        return self.out


class Beside:
    """A communicator whose all-reduces a peer makes; everything else is ours. Calls keep no order with those of ours."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._ours, self._name = comm, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def prepare(self, collective: str, x: Any, out: Any = None, *, stream: Any = None, **others: Any) -> PeerCall:
        """As `Communicator.prepare`; what else it is told, protocol and shape, means nothing to a peer."""
        if collective != "all_reduce":
            raise ArgumentError(f"{self._name} is measured for all-reduce alone, not {collective}")
        peer = _peer(self._ours, self._name)
        backend = self._ours.backend
        on = backend.stream(x, stream)
        target = backend.empty_like(x, backend.view(x).shape) if out is None else out
        return PeerCall(peer.call(backend.view(x), backend.view(target), on), target)

    def all_reduce(self, x: Any, out: Any = None, **others: Any) -> Any:
        """As `Communicator.all_reduce`."""
        return self.prepare("all_reduce", x, out, **others)()


_open: dict[tuple[str, int], Peer | str] = {}
"""What was made for each name and number of ranks, or why it could not be."""


def _peer(comm: Communicator, name: str) -> Peer:
    key = (name, comm.world_size)
    if key not in _open:
        try:
            _open[key] = KINDS[name](comm)
        except NotAdmittedError as error:
            _open[key] = str(error)
    found = _open[key]
    if isinstance(found, str):
        raise NotAdmittedError(found)
    return found


def cases(
    options: Sequence[str],
    collective: str,
    dtype: str,
    nbytes: int,
    n: int,
    modes: Sequence[str],
    launches: Sequence[str],
) -> dict[Case, str | None]:
    """The peers' cases of one point, each with the reason if it is none.

    They launch as they do, whatever the feature; they stand beside the protocols of each, in the same rounds.
    """
    found = [
        Case(collective, name, dtype, nbytes, n, mode, None, launch)
        for option in options if n > 1 for name in named(option) for mode in modes for launch in launches
    ]  # fmt: skip
    return {case: refusal(case) for case in found}


def refused_here(comm: Communicator, case: Case) -> str | None:
    """Why a peer cannot run the case on these ranks, in one clause. Collective; makes the peer, if it can run at all."""
    try:
        return _peer(comm, case.protocol).refusal(case.dtype, case.nbytes)
    except NotAdmittedError as error:
        return str(error)


def beside(comm: Communicator, name: str) -> Communicator:
    """The communicator as a peer has it."""
    return cast("Communicator", Beside(comm, name))


def close() -> None:
    """Collective: gives back what the peers of the communicators in use have made; before these are closed."""
    for peer in _open.values():
        if not isinstance(peer, str):
            peer.close()
    _open.clear()


class PeerGraph(measure_cuda.GraphCalls):
    """A peer's calls in a graph, whose outputs are held against the bound of a sum in any order."""

    def _wrong(self, replay: bool) -> int:
        if replay:
            self.ring.poison(self.comm)
            self.long.launch(self.stream)
            self.stream.synchronize()
        self.comm.backend.synchronize()
        return sum(
            beyond_rounding(self.ring.rows(k), self.comm.to_host(self.ring.outputs[k])) for k in range(self.ring.calls)
        )


def binding(mode: Mode, case: Case) -> Callable[[Communicator, Case, Any, Any], Launch]:
    """How a case is made ready to be timed: as its mode says, but for a peer's graph, whose results are judged in another way."""
    return PeerGraph if case.peer and mode.name == "graph" else mode.bind
