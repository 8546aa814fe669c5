"""PyTorch: an all-reduce in the shape that serving engines expect of a custom one, and as an operator of ``torch.library``.

Optional: importing this module imports PyTorch, and nothing else of the package does. Nor does it need mpi4py.

The operator ``torch.ops.fcomm.all_reduce(x, name)`` is for code that is compiled; `name` is that of a `CustomAllReduce` of this
process, since an operator's arguments are tensors and plain values.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from fcomm import bootstrap
from fcomm.communicator import Communicator
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, ClosedError, DisagreementError, FcommError, SetupError
from fcomm.group import Group, TorchGroup, as_group
from fcomm.interop import dtype_name
from fcomm.sizes import format_size

try:
    import torch
except ImportError:
    raise ImportError("fcomm.torch needs PyTorch, which is not installed here: pip install torch") from None

__all__ = ["CustomAllReduce", "TorchGroup", "all_reduce"]

log = logging.getLogger("fcomm")

_by_name: WeakValueDictionary[str, CustomAllReduce] = WeakValueDictionary()
_numbers = itertools.count()


class CustomAllReduce:
    """Sums tensors over the ranks of one server: the shape of vLLM's and SGLang's custom all-reduce.

    An engine asks `should_custom_ar(x)`, then calls `custom_all_reduce(x)`; where the answer is no, it takes its own way. What
    the answer depends on must be alike on all ranks (an engine's tensors are), else one of them waits for the others.

    Parameters
    ----------
    group : process group of torch.distributed with CPU tensors, mpi4py communicator, or object with `allgather` and `barrier`
        All its ranks construct together, on one machine. None: the default process group.
    device : torch.device, str or int
        Where this rank's tensors lie: a CUDA device, or "cpu" for the emulation.
    max_size : int
        Bytes of the largest tensor that is taken.
    name : str, optional
        What the operator knows it by; default "fcomm-0", "fcomm-1" and so on, in the order of construction.
    options
        Of `fcomm.Communicator`: timeout_s, dependent_launch, model, checked.

    Where the ranks cannot work together, the object is `disabled` on all of them, `reason` says why in one sentence, and so does the
    log. `ArgumentError` for a group that is none and a name that is taken.
    """

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str | int = "cuda",
        max_size: int = 1 << 20,
        *,
        name: str | None = None,
        **options: Any,
    ) -> None:
        self.name = f"fcomm-{next(_numbers)}" if name is None else name
        if self.name in _by_name:
            raise ArgumentError(
                f"there already is a CustomAllReduce named {self.name!r}: close it, or choose another name"
            )
        talk = TorchGroup() if group is None else as_group(group)
        self.rank, self.world_size, self.max_size = talk.rank, talk.size, max_size
        self.reason: str | None = None
        """Why it is disabled, in one sentence."""
        self._comm: Communicator | None = None
        self._stream: Any = None
        self._captured: list[str] | None = None
        self._told: set[str] = set()
        self.device: Any = device  # as it was asked for, until it has proved to be of use
        try:
            self.device = bootstrap.collectively(talk, lambda: _device(device))
            # Collective where a rank alone might not come: every one has its device by now.
            bootstrap.agree(talk, self.device.type, "the kind of device")
            self._comm = self._connect(talk, options)
        except FcommError as error:
            self._disable(str(error))
        _by_name[self.name] = self

    def _connect(self, talk: Group, options: dict[str, Any]) -> Communicator:
        if self.world_size == 1:
            raise SetupError("there is one rank, and nothing to reduce")
        cuda = self.device.type == "cuda"
        backend, ordinal = ("cuda", self.device.index) if cuda else ("cpu", None)
        return Communicator(talk, backend=backend, max_bytes=self.max_size, device=ordinal, **options)

    def _disable(self, reason: str) -> None:
        self.reason = reason
        if self.rank == 0:
            self._told.add("disabled")
            log.warning("custom all-reduce %s is disabled: %s", self.name, reason)

    @property
    def disabled(self) -> bool:
        return self._comm is None

    @property
    def comm(self) -> Communicator:
        """The communicator behind it, for `explain`, `check` and `reset`. `ClosedError` or `SetupError` where it is disabled."""
        if self._comm is None:
            raise (ClosedError if self.reason == _CLOSED else SetupError)(str(self.reason))
        return self._comm

    # ---- calls ------------------------------------------------------------------------------------------------------

    def should_custom_ar(self, x: torch.Tensor) -> bool:
        """Whether `custom_all_reduce` takes x. A no is logged with its reason, once for each kind of reason."""
        why = self._refusal(x)
        if why is None:
            return True
        kind, sentence = why
        if kind not in self._told:
            self._told.add(kind)
            log.warning("custom all-reduce %s is not used on rank %d: %s (said once)", self.name, self.rank, sentence)
        return False

    def custom_all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum as a new tensor, on the current stream; None where `should_custom_ar(x)` is no."""
        return self._run(x, None) if self.should_custom_ar(x) else None

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same for callers with no other way: `ArgumentError` where x is not taken. out : x itself, or like x."""
        self.comm  # noqa: B018 - raises where there is none
        why = self._refusal(x)
        if why is not None:
            raise ArgumentError(why[1])
        return self._run(x, out)

    def _refusal(self, x: torch.Tensor) -> tuple[str, str] | None:
        """Why x is not taken: a kind of reason, and a sentence."""
        if self._comm is None:
            return "disabled", str(self.reason)
        if x.device != self.device:
            return (
                "device",
                f"the tensor is on {x.device}, and the all-reduce was made for {self.device}: move it there first",
            )
        if dtype_name(x.dtype) not in REDUCIBLE:
            return "dtype", f"{dtype_name(x.dtype)} cannot be reduced; use one of {', '.join(REDUCIBLE)}"
        if not x.is_contiguous():
            return "contiguous", f"the tensor of shape {tuple(x.shape)} is not contiguous: pass x.contiguous()"
        if (nbytes := x.numel() * x.element_size()) > self.max_size:
            return "size", f"the tensor has {format_size(nbytes)}, and max_size is {format_size(self.max_size)}"
        if self._captured is None and self._capturing():
            return "capture", f"a CUDA graph is being captured outside of {self.name}.capture(): capture it in there"
        return None

    def _run(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self.device.type == "cuda":
            self._follow()
        if self._captured is not None and self._capturing():
            self._captured.append(f"{dtype_name(x.dtype)} {list(x.shape)}")
        return self.comm.all_reduce(x, out)

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _follow(self) -> None:
        """Where calls move to another stream, waits for the one that they leave.

        Two calls of a channel must not run at a time. An engine orders its streams by events, which the communicator cannot
        see: it would refuse the call or not, as the last one happens to have ended, and another rank the other way.
        """
        stream, last = torch.cuda.current_stream(self.device), self._stream
        if stream == last:
            return
        self._stream = stream
        if last is None or torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.stream(last):
            captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            last.synchronize()

    # ---- graphs, and the end ----------------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture of CUDA graphs and the calls that warm up for it, on all ranks.

        What is captured is replayed with nobody looking, so at the end the ranks compare what each of them has captured:
        `DisagreementError` on all where it differs, and the first failing rank's error on all where one failed. Outside of
        it, calls that would be captured are refused.
        """
        if self._comm is None or self._captured is not None:  # nothing to compare, or the outer one does
            yield
            return
        failed: Exception | None = None
        self._captured = []
        try:
            yield
        except Exception as error:
            failed = error
        finally:
            calls, self._captured = self._captured, None

        def finish() -> list[str]:
            if failed is not None:
                raise failed
            return calls

        bootstrap.collectively(self._comm.group, finish)
        _compare(self._comm.group.allgather(calls))

    def close(self) -> None:
        """Collective and idempotent: disables it and frees its memory. Graphs that were captured with it are of no more use."""
        comm, self._comm = self._comm, None
        if _by_name.get(self.name) is self:
            del _by_name[self.name]
        if comm is not None:
            self.reason = _CLOSED
            comm.close()


_CLOSED = "the custom all-reduce is closed"


def _device(device: torch.device | str | int) -> torch.device:
    """The device, with its number; `ArgumentError` where this PyTorch cannot use it."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise ArgumentError(f"{device!r} is no device of PyTorch's: use 'cuda', 'cuda:1' or 'cpu'") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ArgumentError(f"tensors on {found.type} devices are not supported: use cuda or cpu")
    if torch.version.cuda is None:
        raise ArgumentError(
            f"this PyTorch ({torch.__version__}) has no CUDA: install a build that has, or use device='cpu'"
        )
    if not torch.cuda.is_available():
        raise ArgumentError(
            "PyTorch finds no CUDA device: use device='cpu', or look at the driver and CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    number = torch.cuda.current_device() if found.index is None else found.index
    if number >= count:
        raise ArgumentError(f"there is no cuda:{number}: PyTorch sees {count} of them")
    return torch.device("cuda", number)


def _compare(captured: list[list[str]]) -> None:
    """Raises `DisagreementError` unless all ranks have captured the same calls."""
    for rank, calls in enumerate(captured):
        if calls == captured[0]:
            continue
        pairs = enumerate(itertools.zip_longest(captured[0], calls, fillvalue="nothing"))
        number, (first, other) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
        raise DisagreementError(
            f"the ranks captured different all-reduces: call {number} is {first} on rank 0 and {other} on rank {rank}; do not "
            "replay these graphs"
        )


def _operator(x: torch.Tensor, name: str) -> torch.Tensor:
    found = _by_name.get(name)
    if found is None:
        raise ArgumentError(f"there is no CustomAllReduce named {name!r} in this process, or it is closed")
    return found.all_reduce(x)


all_reduce = torch.library.custom_op(
    "fcomm::all_reduce", _operator, mutates_args=(), schema="(Tensor x, str name) -> Tensor"
)
"""``all_reduce(x, name)``: the sum of x over the ranks of the `CustomAllReduce` of that name, as a new tensor."""


def _as_made(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


all_reduce.register_fake(_as_made)
