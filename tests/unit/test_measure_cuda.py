"""Ways to take latencies on GPUs, without one: device memory is the host's, and a graph is a list of steps that are run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from fcomm import measure, measure_cuda
from fcomm.backends.base import View
from fcomm.backends.cpu import CpuKernel, build_text
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, FcommError
from fcomm.layout import params_dtype
from fcomm.measure import Case
from fcomm.source import flatten

CALL_NS, NEIGHBOUR_NS = 2000, 700


class DeviceArray(np.ndarray):
    """An array with a device pointer, as CuPy's have it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def empty(shape: Any, dtype: Any) -> DeviceArray:
    return np.empty(shape, dtype).view(DeviceArray)


def at(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


class Graph:
    """What was captured: run step by step."""

    def __init__(self, machine: Machine, steps: list[Callable[[], object]]) -> None:
        self.machine, self.steps = machine, steps

    def launch(self, stream: Any) -> None:
        for step in self.steps:
            step()


class Machine:
    """A GPU with one rank on it, whose collective copies its input; each step has its price."""

    def __init__(self) -> None:
        self.ns = 0.0
        self.order: list[str] = []
        self.dependent: list[bool] = []
        self.delays: list[int] = []
        self.held_ns: Callable[[int], int] = lambda delay: delay
        self.broken: set[str] = set()

    # The backend.
    def compile(self, name: str, text: str) -> Any:
        return SimpleNamespace(name=name, text=text, max_blocks=lambda threads: 8)

    def launch_once(self, kernel: Any, shape: Any, params: Any, stream: int, dependent: bool = False) -> None:
        assert 1 <= shape.blocks <= 4  # half of what has room here
        self.order.append(kernel.name)
        self.dependent.append(dependent)
        self.ns += NEIGHBOUR_NS
        source, target, nbytes = (int(params[w][0]) for w in ("in", "out", "nbytes"))
        if kernel.name in self.broken:
            return
        if kernel.name == "filler":
            at(target, nbytes)[:] = at(source, nbytes)
        else:
            x = at(source, nbytes).view(np.float32)
            with np.errstate(all="ignore"):  # the data have large values and small ones
                at(target, nbytes).view(np.float32)[:] = x / np.sqrt(np.mean(x * x) + 1e-6)

    def dependent_edges(self, graph: Graph) -> int:
        return len(graph.steps) - 1

    def synchronize(self) -> None: ...

    def view(self, x: Any) -> View:
        return View(x.ctypes.data, x.nbytes, x.size, x.dtype.name, x.shape, True, x)

    # The communicator.
    def prepare(self, collective: str, x: Any, out: Any, **how: Any) -> Callable[[], Any]:
        def call() -> Any:
            self.order.append("call")
            self.ns += CALL_NS
            if "call" not in self.broken:
                out.reshape(-1)[:] = x
            return out

        return call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()

    def timed(comm: Any, meeting: Any, queue: Any, delay_ns: int = 0) -> tuple[float, int]:
        made.delays.append(delay_ns)
        start = made.ns
        queue()
        return made.ns - start, 5

    cupy = SimpleNamespace(empty=empty, empty_like=lambda x: empty(x.shape, x.dtype))
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    monkeypatch.setattr(measure_cuda, "_backend", lambda comm: made)
    monkeypatch.setattr(measure_cuda, "_stream", lambda comm: SimpleNamespace(ptr=1, synchronize=lambda: None))
    meeting = SimpleNamespace(held_ns=lambda: made.held_ns(made.delays[-1]))
    monkeypatch.setattr(measure_cuda, "_meeting", lambda comm: meeting)
    monkeypatch.setattr(measure_cuda, "_capture", lambda stream, steps: Graph(made, list(steps)))
    monkeypatch.setattr(measure_cuda, "_timed", timed)
    monkeypatch.setattr(measure_cuda, "_fill", lambda words: words.view(np.uint8).fill(0xA5))
    measure_cuda._latest_ring.clear()
    yield made
    measure_cuda._latest_ring.clear()


def communicator(machine: Machine, launch: str = "late") -> Any:
    return SimpleNamespace(
        mpi=MPI.COMM_SELF, rank=0, world_size=1, backend=machine, gpu=None, dependent_launch=launch,
        no_dependent_launch="not asked for", prepare=machine.prepare, check=lambda: None,
        from_host=lambda x: np.array(x).view(DeviceArray),
    )  # fmt: skip


CASE = Case("all_reduce", measure.COPY, "float32", 4096, 1, measure.SANDWICH)


def bind(machine: Machine, case: Case = CASE, launch: str = "late") -> Any:
    comm = communicator(machine, launch)
    x = empty(case.count, REDUCIBLE[case.dtype].numpy)
    return measure_cuda.MODES[case.mode].bind(comm, case, x, empty(case.out_shape, x.dtype))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no protocol: what is right is what the floor makes, its input."""
    monkeypatch.setattr(measure_cuda.Ring, "_exact", lambda ring, form: lambda k: ring._rows[0][ring._part(k)])


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("mode", measure.SANDWICHES)
def test_a_sandwich_is_the_layer_less_its_neighbours(machine: Machine, mode: str) -> None:
    aware = mode == measure.SANDWICH_DEPENDENT
    made = bind(machine, Case(**{**CASE.__dict__, "mode": mode}))
    ring = made.ring
    assert len(made.long.steps) == 3 * ring.calls
    assert len(made._bare[0].steps) == 2 * ring.calls
    assert len(made.short.steps) == 3 * (ring.calls // 5)
    assert made.facts["dependent_edges"] == 3 * ring.calls - 1
    machine.order.clear()
    machine.dependent.clear()
    made.long.launch(None)
    assert machine.order == ["filler", "call", "norm"] * ring.calls
    assert set(machine.dependent) == {aware}
    for text in (made._filler.text, made._norm.text):
        assert f"#define FC_TRIGGER {2 if aware else 0}" in text
    ns = made.sample(4)
    assert ns.tolist() == [CALL_NS] * 4
    assert made.facts["neighbours_us"] == 2 * NEIGHBOUR_NS / 1e3
    assert len(made.arrival_skew_ns) == 4


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("broken", ["filler", "call", "norm"])
def test_a_sandwich_with_a_layer_that_does_not_do_its_part_is_not_timed(machine: Machine, broken: str) -> None:
    """Also when the candidate before it has left the right results behind."""
    bind(machine).sample(2)
    machine.broken = {broken}
    with pytest.raises(measure.WrongElementsError, match="wrong elements in a replayed graph"):
        bind(machine)
    machine.broken = set()
    made = bind(machine)
    made.sample(2)
    made.ring._norm_words[0] ^= 1
    with pytest.raises(measure.WrongElementsError, match="1 wrong elements after the timed replays"):
        made.verify(replay=False)


@pytest.mark.usefixtures("copies")
def test_neighbours_have_dependent_launch_only_where_the_communicator_has(machine: Machine) -> None:
    with pytest.raises(ArgumentError, match="neighbours with dependent launch need it themselves: not asked for"):
        bind(machine, Case(**{**CASE.__dict__, "mode": measure.SANDWICH_DEPENDENT}), launch="none")


def test_a_delay_counts_from_the_moment_when_the_late_rank_comes(machine: Machine) -> None:
    case = Case("all_reduce", measure.COPY, "float32", 4096, 3, measure.SKEW, delay_us=5.0)
    made = bind(machine, case)
    # Rank 0 of three is late in every third call. Its own time begins behind the delay; the others wait for it.
    assert made.sample(4).tolist() == [CALL_NS, 1, 1, CALL_NS]
    assert machine.delays == [5000, 0, 0, 5000]
    assert made.sample(3).tolist() == [1, 1, CALL_NS]  # the turns go on in the next visit
    fixed = bind(machine, Case(**{**case.__dict__, "late_rank": 2}))
    machine.delays.clear()
    fixed.sample(3)
    assert machine.delays == [0, 0, 0]


def test_a_clock_that_is_too_coarse_for_the_delay_is_told(machine: Machine) -> None:
    machine.held_ns = lambda delay: delay + 2500
    made = bind(machine, Case("all_reduce", measure.COPY, "float32", 4096, 1, measure.SKEW, delay_us=1.0))
    with pytest.raises(FcommError, match=r"too coarse for a delay of 1 us: it took 3\.5 us"):
        made.sample(3)


# ---- the norm behind a sandwiched collective, in the host's words -----------------------------------------------------

SHUFFLE = """
#define FC_CPU 1
#define FC_N 2
#define __shared__ static
#include <math.h>
#include "reduce.cuh"
namespace fc {
// Of one block alone, whose threads are fibers: through the memory of its warp's votes.
inline float __shfl_xor_sync(u32 mask, float value, u32 step) {
  warp().votes[lane_id()] = float_to_bits(value);
  group_sync(mask);
  const float other = bits_to_float(warp().votes[lane_id() ^ step]);
  group_sync(mask);
  return other;
}
}  // namespace fc
#include "measure/neighbours.cuh"
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_is_one(dtype: str) -> None:
    """Rows of several passes of the block, a shorter last one, an end that is no multiple of 16 bytes."""
    element = REDUCIBLE[dtype]
    text = flatten(f"{SHUFFLE}FC_KERNEL((fc::rms_norm<fc::{element.kernel_type}>))")
    kernel = CpuKernel(build_text(text, f"norm-{dtype}"))
    row, threads = 2048 // element.itemsize, 64
    for count in (3 * row + 100, 3 * row + 7, 5):
        x = np.random.default_rng(count).normal(2, 3, count).astype(element.numpy)
        y = np.full(count + 8, 99, element.numpy)
        params = np.zeros(1, params_dtype(2))
        params["in"], params["out"], params["nbytes"], params["part"] = x.ctypes.data, y.ctypes.data, x.nbytes, 2048
        params["aligned"] = x.nbytes % 16 == 0
        assert kernel.run(params.ctypes.data, 1, threads) == 0
        wide = x.astype(np.float64)
        rows = np.split(wide, range(row, count, row))
        want = np.concatenate([part / np.sqrt(np.mean(part**2) + 1e-6) for part in rows])
        np.testing.assert_allclose(y[:count].astype(np.float64), want, rtol=2e-6 if dtype == "float32" else 5e-3)
        assert (y[count:] == 99).all()  # and nothing beyond
