"""How ranks talk at set-up, in checked mode and at the end; never in a call. An mpi4py communicator does it as it is.

Nothing here imports an MPI library: importing mpi4py starts MPI, which a process that something else has launched may not want.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from fcomm import interop
from fcomm.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py import MPI


class Group(Protocol):
    """A fixed set of processes. Both operations are collective: all ranks call them, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process among them, from 0."""

    @property
    def size(self) -> int: ...

    def allgather(self, value: Any, /) -> list[Any]:
        """Every rank's value, in the order of the ranks; values are anything that pickles."""

    def barrier(self) -> None:
        """Returns when all ranks have come."""


class Numbered:
    """A `Group` made of an object that has `allgather` and `barrier` and may not say who is who."""

    def __init__(self, group: Any) -> None:
        self.allgather, self.barrier = group.allgather, group.barrier
        own = os.urandom(16)
        everyone = self.allgather(own)
        self.rank, self.size = everyone.index(own), len(everyone)


class TorchGroup:
    """A `Group` over a process group of ``torch.distributed`` whose tensors are on the CPU (gloo, MPI).

    process_group : None for the default one. `ArgumentError` where it carries CUDA tensors only, as NCCL's does.
    """

    def __init__(self, process_group: Any = None) -> None:
        import torch
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise ArgumentError("torch.distributed has no process group yet: call init_process_group first")
        self._torch, self._distributed = torch, distributed
        self._group = distributed.group.WORLD if process_group is None else process_group
        carries = distributed.get_backend_config(self._group)  # such as "cpu:gloo,cuda:nccl"
        if "cpu" not in {part.split(":")[0] for part in carries.split(",")}:
            raise ArgumentError(
                f"the process group is {distributed.get_backend(self._group)}'s and takes no CPU tensors: pass one that does, "
                "such as torch.distributed.new_group(backend='gloo')"
            )
        self.rank, self.size = distributed.get_rank(self._group), distributed.get_world_size(self._group)

    def allgather(self, value: Any, /) -> list[Any]:
        found: list[Any] = [None] * self.size
        # gloo cannot write into tensors that inference mode makes, and engines run in that mode.
        with self._torch.inference_mode(False):
            self._distributed.all_gather_object(found, value, group=self._group)
        return found

    def barrier(self) -> None:
        self.allgather(None)  # torch's own barrier may ask for a device


def is_mpi(group: object) -> TypeGuard[MPI.Intracomm]:
    """Whether it is a communicator of mpi4py's."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(group, module.Comm)


def as_group(group: Any) -> Group:
    """A `Group` of what a caller has: an mpi4py communicator, a process group of torch.distributed, or any object with
    `allgather(value)` and `barrier()`. Collective where that object has no `rank` and `size`.
    """
    torch = interop.torch_module()
    if torch is not None and torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        return TorchGroup(group)
    if not all(callable(getattr(group, name, None)) for name in ("allgather", "barrier")):
        raise ArgumentError(
            f"a {type(group).__name__} is no way for ranks to talk: pass an mpi4py communicator, a process group of "
            "torch.distributed, or an object with allgather(value) and barrier()"
        )
    if is_mpi(group) or all(isinstance(getattr(group, name, None), int) for name in ("rank", "size")):
        return group
    return Numbered(group)
