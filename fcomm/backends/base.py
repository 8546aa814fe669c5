"""What the communicator asks of a backend. One small interface; cpu and cuda implement it (the simulator has its own)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fcomm.layout import SlabLayout
from fcomm.source import MAX_THREADS, Specialisation

if TYPE_CHECKING:
    from fcomm.epilogue import Separate


@dataclass(slots=True)  # not frozen, which takes three times as long to make; two are made in every call
class View:
    """A caller's array as kernels see it: an address, and what is there. Nobody changes one.

    `dtype` is the element type's name as NumPy (or ml_dtypes) spells it; `nbytes` is its size without gaps.
    """

    address: int
    nbytes: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    owner: Any
    """The array itself; kept alive by whoever keeps the view."""


@dataclass(frozen=True)
class LaunchShape:
    """Blocks and threads per block of a grid."""

    blocks: int
    threads: int


SMALL_BLOCK = 256
"""Threads per block of the default launch shape while its grid has no more than one block per SM."""


def gpu_shape(cells: int, sms: int, most: int = MAX_THREADS, sharded: bool = False) -> LaunchShape:
    """The default grid of a GPU for so many 16-byte cells, before it is clamped to what may be resident.

    most : threads per block that the kernel is compiled for. sharded : of an algorithm that splits the message.
    """
    # Small blocks start sooner and spread over more SMs, until there is one on each. Then one larger block on an SM beats two
    # small ones (measured on an H200 that ranks share), then two of those, then the largest. Beyond that the grid strides.
    # Shards, whose kernels are long and which wait twice for the last block to start, gain from larger blocks as soon as every
    # other SM has a small one (two_shot.ll, 8 ranks of 16 SMs, 32 KiB, early: 8 x 512 4.57, 16 x 256 6.25 us), and from no
    # more than one on an SM (128 KiB: late 16 x 512 5.92, without dependent launch 32 x 512 8.30 us).
    if cells <= SMALL_BLOCK * (sms // 2 if sharded else sms):
        return LaunchShape(max(1, -(-cells // SMALL_BLOCK)), SMALL_BLOCK)
    threads = most if most > MAX_THREADS and cells > 2 * MAX_THREADS * sms else MAX_THREADS
    blocks = -(-cells // threads)
    return LaunchShape(min(blocks, sms) if sharded else blocks, threads)


CPU_THREADS = 32
CPU_BLOCKS = 2


def cpu_shape(cells: int) -> LaunchShape:
    """The default grid of the cpu backend for so many 16-byte cells."""
    return LaunchShape(max(1, min(CPU_BLOCKS, -(-cells // CPU_THREADS))), CPU_THREADS)


class Kernel(Protocol):
    """A compiled specialisation."""

    def max_blocks(self, threads: int, grids: int = 1, channels: int = 1) -> int:
        """Blocks of that many threads that a grid of this rank may have, where each channel has so many grids at a time."""


class Backend(Protocol):
    """One rank's view of the machine it runs on."""

    name: str
    capabilities: frozenset[str]

    def prepare(self) -> None:
        """Finds out what this rank lacks; raises `SetupError`. Called before anything collective."""

    def allocate(self, layout: SlabLayout) -> list[int]:
        """Collective: makes this rank's slab, cleared, and returns the address of every rank's slab."""

    def control_address(self) -> int:
        """Address, for kernels, of this rank's control words (`SlabLayout.control_offset` apart for each channel)."""

    def error_address(self) -> int:
        """Address, for kernels, of this rank's error records (one for each channel)."""

    def error_records(self) -> NDArray[np.void]:
        """The error records themselves, readable while a kernel runs. Shape (channels,), `layout.ERROR_DTYPE`."""

    def reset(self, layout: SlabLayout) -> None:
        """Puts this rank's slots, control words and error records into their first state. Nothing may be running."""

    def control(self) -> NDArray[np.void]:
        """A copy of the control words. Shape (channels,), `layout.CONTROL_DTYPE`. Waits for what is running."""

    def write_control(self, words: NDArray[np.void]) -> None:
        """Replaces the control words. Nothing may be running."""

    def slab(self) -> Any:
        """The own slab as an array of bytes of the backend's kind, on the same memory."""

    def write_slab(self, offset: int, content: NDArray[np.uint8]) -> None:
        """Overwrites part of this rank's slab: how a test plants old evidence. Nothing may be running."""

    def kernel(self, spec: Specialisation | Separate) -> Kernel:
        """Compiles a specialisation, or an epilogue's own kernel, or finds it compiled."""

    def compile(self, name: str, text: str) -> Kernel:
        """Loads a kernel of whatever source that is whole; for measurements."""

    def ticks_per_us(self) -> float:
        """Rate of the clock that kernels with an emulated link read, on this rank and now."""

    def launch(self, kernel: Any, shape: LaunchShape, params: NDArray[np.void], stream: Any) -> None:
        """Starts a grid on a stream. `params` is copied before this returns."""

    def launch_once(
        self, kernel: Any, shape: LaunchShape, params: NDArray[np.void], stream: Any, dependent: bool = False
    ) -> None:
        """Starts a kernel that is no collective, and takes no epoch; `params` is copied before this returns."""

    def may_follow(self, kernel: Any, shape: LaunchShape, stream: Any) -> bool:
        """Whether such a kernel may be let in while the collective ahead of it in the stream still waits for peers."""

    def use_dependent_launch(self) -> str | None:
        """Lets grids begin while the one before them in the stream ends, from now on; returns why not, or None."""

    def copy(self, src: View, dst: View, stream: Any) -> None:
        """Copies src.nbytes bytes on a stream."""

    def view(self, x: Any) -> View:
        """Looks at a caller's array; `ArgumentError` if it is not one that this backend's kernels can reach."""

    def empty_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        """An uninitialised array of x's kind and dtype."""

    def empty(self, count: int, dtype: str) -> Any: ...

    def from_host(self, x: NDArray[Any]) -> Any: ...

    def to_host(self, x: Any) -> NDArray[Any]: ...

    def stream(self, x: Any, stream: Any) -> Any:
        """The stream that a call on x uses when the caller named `stream` (None: the current one)."""

    def synchronize(self) -> None:
        """Waits for everything this rank has launched."""

    def describe(self) -> dict[str, Any]:
        """Facts about the machine, for records and `python -m fcomm info`."""

    def close(self) -> None:
        """Collective: unmaps peers' slabs, meets the other ranks, frees this rank's."""
