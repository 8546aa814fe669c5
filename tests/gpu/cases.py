"""What must hold between ranks on GPUs, beyond `tests.ranks`: ``mpirun -n N python -m tests.gpu.cases [names]``.

Rank 0 prints one line a case; whatever fails prints its traceback on the rank where it failed, at once, and a case that
does not end prints where each rank stands. What cannot share a process with other cases is a scenario (``--scenario``).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

import fcomm
from fcomm import checks
from fcomm.backends import cuda
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, DeviceError, FcommError, HangError, SetupError
from fcomm.protocols import protocol
from fcomm.source import LAUNCHES, Specialisation
from tests import ranks
from tests.gpu.prewarm import TRIGGERED, kernels
from tests.ranks import Case, make, poisoned, reduce_once, reducing, refused

CASES: dict[str, Case] = {}
CASE_LIMIT_S = 60


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def cupy() -> Any:
    import cupy as module

    return module


def data(comm: fcomm.Communicator, seed: tuple[int, ...], count: int, dtype: str) -> list[NDArray[Any]]:
    return [checks.inputs(seed, r, comm.world_size, count, dtype) for r in range(comm.world_size)]


def write(array: Any, host: NDArray[Any]) -> None:
    """Overwrites a device array in place (also bfloat16), and waits."""
    from cupy.cuda import runtime

    assert array.nbytes == host.nbytes
    runtime.memcpy(array.data.ptr, np.ascontiguousarray(host).ctypes.data, host.nbytes, runtime.memcpyHostToDevice)
    runtime.deviceSynchronize()


def spinner() -> Any:
    """A kernel that takes its time: one argument, nanoseconds."""
    return cupy().RawKernel(
        'extern "C" __global__ void spin(long long ns) { long long t, s; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(s));'
        ' do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); } while (t - s < ns); }',
        "spin",
    )


def expect(comm: fcomm.Communicator, out: Any, xs: list[NDArray[Any]], what: str) -> None:
    wrong = checks.wrong_elements(comm.to_host(out), checks.reduce_reference(xs))
    assert wrong == 0, f"{what}: {wrong} of {xs[0].size} elements wrong on rank {comm.rank}"


class Captured:
    """A graph of calls, each on its own input and output."""

    def __init__(self, comm: fcomm.Communicator, calls: list[tuple[str, str, int]], seed: int) -> None:
        cp = cupy()
        self.comm, self.seed, self.calls = comm, seed, calls
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.inputs = [comm.empty(count, dtype) for _, dtype, count in calls]
        self.outputs = [poisoned(comm, count, dtype) for _, dtype, count in calls]
        for (name, _, _), x, out in zip(calls, self.inputs, self.outputs, strict=True):
            comm.prepare("all_reduce", x, out, protocol=name)  # loads the kernel
        comm.backend.synchronize()
        with self.stream:
            self.stream.begin_capture()
            for (name, _, _), x, out in zip(calls, self.inputs, self.outputs, strict=True):
                comm.all_reduce(x, out, protocol=name)
            self.graph = self.stream.end_capture()

    def replay(self, k: int) -> None:
        """One replay on fresh data, verified."""
        every = [data(self.comm, (self.seed, k, i), count, dtype) for i, (_, dtype, count) in enumerate(self.calls)]
        for x, out, xs in zip(self.inputs, self.outputs, every, strict=True):
            write(x, xs[self.comm.rank])
            host = np.empty_like(xs[0])
            checks.poison(host)
            write(out, host)
        self.graph.launch(self.stream)
        self.stream.synchronize()
        self.comm.check()
        for i, (out, xs) in enumerate(zip(self.outputs, every, strict=True)):
            expect(self.comm, out, xs, f"replay {k}, call {i} {self.calls[i]}")


def mixture(comm: fcomm.Communicator, calls: int, seed: int) -> list[tuple[str, str, int]]:
    """Calls of all protocols and dtypes with sizes that jump up and down."""
    rng = np.random.default_rng(seed)
    pairs = [(p.name, dtype) for p, dtype in reducing(comm)]
    return [(*pairs[(k + seed) % len(pairs)], int(rng.choice([1, 33, 500, 2880, 9001]))) for k in range(calls)]


@case
def graphs_with_slots_in_host_memory(comm: fcomm.Communicator) -> None:
    """Replays, a hang in between, and what the backend says of itself; eager calls are in the table of all backends."""
    if comm.world_size == 1:
        return
    with fcomm.Communicator(comm.mpi, backend="cuda", max_bytes=1 << 16, timeout_s=2, placement="host") as other:
        calls = [
            (name, "bfloat16", count)
            for name in ("one_shot.ll", "two_shot.ll", "one_shot.flag", "two_shot.flag")
            for count in (1, 500, 9001)
        ]
        graph = Captured(other, calls, seed=77)
        for k in range(20):
            graph.replay(k)
        if comm.rank != 0:
            with ranks.refused("gave up waiting for rank"):
                other.all_reduce(other.from_host(np.ones(100, np.float32)), protocol="one_shot.ll")
                other.backend.synchronize()
                other.check()
        other.reset()
        graph.replay(20)
        assert other.backend.describe()["placement"] == "host"


@case
def an_emulated_link_is_as_slow_as_asked(comm: fcomm.Communicator) -> None:
    """A ping-pong under emulation, beside one without; experiments.links accuracy measures it with more care."""
    from fcomm.links import Link
    from fcomm.measure_links import Medium

    if comm.world_size == 1 or comm.backend.describe()["time_sliced"]:
        return
    real = float(np.median(Medium(comm).one_way_us()))
    with fcomm.Communicator(comm.mpi, backend="cuda", max_bytes=1 << 16, link="latency_us=2") as other:
        added = float(np.median(Medium(other).one_way_us())) - real
        assert abs(added / 2 - 1) < 0.05, (real, added)
        other.use_link(Link(5))
        added = float(np.median(Medium(other).one_way_us())) - real
        assert abs(added / 5 - 1) < 0.05, (real, added)


FORWARDED = ("one_shot.flag", "one_shot.ll128", "two_shot.flag", "two_shot.lamport16+ll128")


@case
def a_link_that_forwards_keeps_the_contract_in_any_order(comm: fcomm.Communicator) -> None:
    """Each store up to 20 us later than another: replays of a graph in dependent launch, eager calls, late ranks, a hang."""
    from fcomm.links import Link

    if comm.world_size == 1 or comm.backend.describe()["time_sliced"]:
        return
    link = Link(2.0, 100.0, "forwarded", jitter_us=20.0)
    options: dict[str, Any] = {"backend": "cuda", "max_bytes": 1 << 16, "timeout_s": 2, "link": link}
    with fcomm.Communicator(comm.mpi, dependent_launch="late", **options) as other:
        admitted = other.admitted("bfloat16")
        names = [name for name in FORWARDED if admitted[name] is None]
        counts = [1, 500, 9001, 32768]
        graph = Captured(other, [(name, "bfloat16", count) for name in names for count in counts], seed=78)
        for k in range(5):
            graph.replay(k)
        for k in range(30):  # links of other seeds, one rank late
            other.use_link(replace(link, seed=k))
            if k % comm.world_size == comm.rank:
                time.sleep(2e-4)
            reduce_once(other, names[k % len(names)], "bfloat16", counts[k % 3], (79, k))
        if comm.rank != 0:
            with ranks.refused("gave up waiting for rank"):
                other.all_reduce(other.from_host(np.ones(100, REDUCIBLE["bfloat16"].numpy)), protocol=names[0])
                other.backend.synchronize()
                other.check()
        other.reset()
        graph.replay(5)


@case
def a_link_that_forwards_is_late_and_holds_nobody(comm: fcomm.Communicator) -> None:
    """The latency asked for, beside the medium's own; and none for a rank whose peer's data are there."""
    from fcomm.links import Link
    from fcomm.measure_links import Medium

    if comm.world_size == 1 or comm.backend.describe()["time_sliced"]:
        return
    real = float(np.median(Medium(comm).one_way_us()))
    link = Link(5.0, form="forwarded")
    with fcomm.Communicator(comm.mpi, backend="cuda", max_bytes=1 << 16, link=link) as other:
        added = float(np.median(Medium(other).one_way_us())) - real
        assert abs(added / 5 - 1) < 0.05, (real, added)
        late = float(np.median(Medium(other).late_us()))
        assert late < 2.5, late


# ---- set-up ---------------------------------------------------------------------------------------------------------


@case
def described(comm: fcomm.Communicator) -> None:
    facts = comm.backend.describe()
    if comm.rank == 0:
        print(f"# {facts}", flush=True)
    assert facts["emulation"] is False
    assert facts["ranks_per_gpu"] * facts["gpus"] == comm.world_size, facts
    assert facts["sms_per_rank"] * facts["ranks_per_gpu"] <= facts["sms_total"], facts
    if facts["ranks_per_gpu"] > 1:
        assert facts["time_sliced"] != facts["mps"], facts
        assert facts["mps"] is ("CUDA_MPS_PIPE_DIRECTORY" in os.environ), facts
    assert comm.mpi.allreduce(facts["sms_per_rank"], MPI.MIN) == comm.mpi.allreduce(facts["sms_per_rank"], MPI.MAX)


@case
def kernels_are_resident_and_do_not_spill(comm: fcomm.Communicator) -> None:
    from fcomm.source import MAX_THREADS, Specialisation

    # Each rank compiles its part, so that the others find it on disk.
    for k, (p, dtype) in enumerate(reducing(comm)):
        if k % comm.world_size == comm.rank:
            comm.backend.kernel(Specialisation(p, REDUCIBLE[dtype], comm.world_size))
    comm.mpi.Barrier()
    for p, dtype in reducing(comm):
        kernel: Any = comm.backend.kernel(Specialisation(p, REDUCIBLE[dtype], comm.world_size))
        shown = f"{kernel.name}: {kernel.registers} registers, {kernel.local_bytes} local bytes"
        if comm.rank == 0:
            print(f"# {shown}, {[kernel.max_blocks(t) for t in (128, 256, 512)]} blocks of 128, 256, 512", flush=True)
        assert kernel.local_bytes == 0, shown
        assert kernel.max_blocks(MAX_THREADS) >= 1


@case
def a_pooled_array_comes_first(comm: fcomm.Communicator) -> None:
    cp = cupy()
    cp.get_default_memory_pool().free_all_blocks()
    small = cp.arange(16, dtype=cp.float32)
    with make(comm) as other:
        expect(other, other.all_reduce(small), [np.arange(16, dtype=np.float32)] * comm.world_size, "pooled")


@case
def memory_is_given_back(comm: fcomm.Communicator) -> None:
    from cupy.cuda import runtime

    cycles = 100 if comm.world_size == 2 else 30

    def cycle(k: int) -> None:
        with make(comm, max_bytes=1 << 20) as other:
            ranks.reduce_once(other, "one_shot.ll", "float32", 100 + k, (40, k))

    def free() -> int:
        cupy().get_default_memory_pool().free_all_blocks()
        comm.backend.synchronize()
        comm.mpi.Barrier()
        bytes_free = int(runtime.memGetInfo()[0])
        comm.mpi.Barrier()
        return bytes_free

    for k in range(3):
        cycle(k)
    before, start = free(), time.monotonic()
    for k in range(cycles):
        cycle(k)
    lost = before - free()
    if comm.rank == 0:
        print(
            f"# {cycles} cycles: {lost} bytes lost, {(time.monotonic() - start) / cycles * 1e3:.1f} ms each", flush=True
        )
    assert lost <= 8 << 20, f"{lost >> 20} MiB lost in {cycles} cycles"


@case
def no_memory_left_is_one_sentence(comm: fcomm.Communicator) -> None:
    from cupy.cuda import runtime

    taken = 0
    comm.mpi.Barrier()
    if comm.rank == comm.world_size - 1:
        taken = runtime.malloc(max(2 << 20, runtime.memGetInfo()[0] - (768 << 20)))
    comm.mpi.Barrier()
    try:
        with refused("no room", "MiB"):
            make(comm, max_bytes=1 << 30)
    finally:
        comm.mpi.Barrier()
        if taken:
            runtime.free(taken)
    comm.mpi.Barrier()
    ranks.reduce_once(comm, "auto", "float32", 33, (41,))


# ---- arrays ---------------------------------------------------------------------------------------------------------


class OnlyDlpack:
    """A GPU array of another library: DLPack and nothing else."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()


class OnlyInterface:
    """A GPU array of another library: ``__cuda_array_interface__`` and nothing else."""

    def __init__(self, x: Any) -> None:
        self.__cuda_array_interface__ = x.__cuda_array_interface__
        self._x = x


@case
def arrays_of_other_libraries(comm: fcomm.Communicator) -> None:
    cp = cupy()
    for k, wrap in enumerate((OnlyDlpack, OnlyInterface)):
        for dtype in ("float32", "float16"):
            xs = data(comm, (42, k), 1001, dtype)
            x, out = comm.from_host(xs[comm.rank]), poisoned(comm, 1001, dtype)
            y = comm.all_reduce(wrap(x), wrap(out))
            assert type(y) is wrap
            expect(comm, out, xs, wrap.__name__)
            y = comm.all_reduce(wrap(x))
            assert isinstance(y, cp.ndarray)
            expect(comm, y, xs, f"{wrap.__name__}, own result")
        with refused("contiguous"):
            comm.all_reduce(wrap(cp.ones((4, 6), cp.float32).T))
    with refused("host memory"):
        comm.all_reduce(np.ones(3, np.float32))


def as_tensor(host: NDArray[Any], device: Any) -> Any:
    """A NumPy array's bits as a tensor on a device; NumPy and PyTorch know no bfloat16 of one another."""
    import torch

    return torch.from_numpy(host.view(np.uint8).copy()).to(device).view(getattr(torch, host.dtype.name))


@case
def torch_tensors(comm: fcomm.Communicator) -> None:
    try:
        import torch
    except ImportError:
        if comm.rank == 0:
            print("# torch is not installed: torch_tensors has nothing to do", flush=True)
        return
    backend: Any = comm.backend
    here = torch.device("cuda", backend.device)

    def tensor(host: NDArray[Any]) -> Any:
        return as_tensor(host, here)

    for k, dtype in enumerate(REDUCIBLE):
        for count in (1, 8, 1001):
            xs = data(comm, (43, k, count), count, dtype)
            x = tensor(xs[comm.rank])
            y = comm.all_reduce(x)
            assert isinstance(y, torch.Tensor)
            assert (y.dtype, y.device, y.shape) == (x.dtype, x.device, x.shape)
            expect(comm, y, xs, f"torch {dtype} {count}")
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):  # the channel's last stream must have finished: expect() has waited
                assert comm.all_reduce(x, x) is x
            side.synchronize()
            expect(comm, x, xs, f"torch {dtype} {count} in place on a side stream")
    with refused("host memory"):
        comm.all_reduce(torch.ones(3))
    with refused("contiguous"):
        comm.all_reduce(torch.ones(4, 6, device=here).t())
    # A graph captured by torch, results from its own pool.
    count = 3000
    x = tensor(np.zeros(count, REDUCIBLE["bfloat16"].numpy))
    comm.all_reduce(x)
    comm.backend.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = comm.all_reduce(x)
        z = comm.all_reduce(y)
    for k in range(5):
        xs = data(comm, (44, k), count, "bfloat16")
        x.copy_(tensor(xs[comm.rank]))
        graph.replay()
        torch.cuda.synchronize()
        comm.check()
        expect(comm, y, xs, "torch graph, first call")
        expect(comm, z, [checks.reduce_reference(xs)] * comm.world_size, "torch graph, second call")


@case
def serving_engines_all_reduce(comm: fcomm.Communicator) -> None:
    try:
        import torch
    except ImportError:
        if comm.rank == 0:
            print("# torch is not installed: serving_engines_all_reduce has nothing to do", flush=True)
        return
    from fcomm.torch import CustomAllReduce

    backend: Any = comm.backend
    here = torch.device("cuda", backend.device)
    reducer = CustomAllReduce(comm.mpi, here, max_size=1 << 16, timeout_s=15)
    if comm.world_size == 1:
        assert reducer.disabled
        return
    assert not reducer.disabled, reducer.reason
    # Streams in turn, and nobody waits in between: the class does.
    streams, made = [torch.cuda.current_stream(), torch.cuda.Stream()], []
    for k in range(10):
        xs = data(comm, (57, k), 3000, "bfloat16")
        x = as_tensor(xs[comm.rank], here)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(streams[k % 2]):
            made.append((xs, x, reducer.custom_all_reduce(x)))
    torch.cuda.synchronize()
    for k, (xs, _, y) in enumerate(made):
        expect(comm, y, xs, f"eager call {k}, streams in turn")
    # What it does not take.
    for bad, words in (
        (x.cpu(), "on cpu"),
        (x.view(60, 50).t(), "not contiguous"),
        (x.repeat(11), "max_size is 64 KiB"),
    ):
        assert reducer.custom_all_reduce(bad) is None
        with refused(words):
            reducer.all_reduce(bad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert reducer.custom_all_reduce(x) is None
        with refused(f"outside of {reducer.name}.capture()"):
            reducer.all_reduce(x)
        y = x + x  # the capture has survived it
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y.view(torch.int16), (x + x).view(torch.int16))
    # Graphs, between eager calls.
    graph = torch.cuda.CUDAGraph()
    with reducer.capture():
        reducer.custom_all_reduce(x)
        with torch.cuda.graph(graph):
            y = reducer.custom_all_reduce(x)
            z = torch.ops.fcomm.all_reduce(y, reducer.name)
    for k in range(5):
        xs = data(comm, (58, k), 3000, "bfloat16")
        x.copy_(as_tensor(xs[comm.rank], here))
        graph.replay()
        eager = reducer.custom_all_reduce(x)
        torch.cuda.synchronize()
        reducer.comm.check()
        expect(comm, y, xs, f"replay {k}")
        expect(comm, z, [checks.reduce_reference(xs)] * comm.world_size, f"replay {k}, through the operator")
        expect(comm, eager, xs, f"eager after replay {k}")
    other = torch.cuda.CUDAGraph()
    with refused("captured different all-reduces", "call 0"), reducer.capture(), torch.cuda.graph(other):
        reducer.all_reduce(x if comm.rank == 0 else x.view(2, 1500))
    reducer.close()
    with refused("there is no CUDA device 99"):
        fcomm.Communicator(comm.mpi, backend="cuda", device=99)


@case
def the_torch_operator_and_its_example(comm: fcomm.Communicator) -> None:
    try:
        import torch
    except ImportError:
        if comm.rank == 0:
            print("# torch is not installed: the_torch_operator_and_its_example has nothing to do", flush=True)
        return
    from experiments import serving
    from fcomm.torch import CustomAllReduce

    backend: Any = comm.backend
    here = torch.device("cuda", backend.device)
    reducer = CustomAllReduce(comm.mpi, here, timeout_s=15)
    x = torch.full((3, 40), 1.0 + comm.rank, dtype=torch.bfloat16, device=here)
    found = torch.library.opcheck(torch.ops.fcomm.all_reduce.default, (x, reducer.name))
    assert set(found.values()) == {"SUCCESS"}, found
    reducer.close()
    assert serving.main(["--device", "cuda"]) == 0


# ---- graphs ---------------------------------------------------------------------------------------------------------


@case
def graphs_of_one_an_odd_number_and_hundreds(comm: fcomm.Communicator) -> None:
    for calls in (1, 7, 300):
        graph = Captured(comm, mixture(comm, calls, calls), 45)
        for k in range(3):
            graph.replay(k)


@case
def a_thousand_replays_back_to_back(comm: fcomm.Communicator) -> None:
    """Inputs change between replays and outputs are kept, all on the stream: the host waits once, at the end."""
    from cupy.cuda import runtime

    replays, count, different = 1000, 600, 8
    for p, dtype in reducing(comm):
        if dtype != ("float32" if p.algorithm.name == "one_shot" else "bfloat16"):
            continue
        graph = Captured(comm, [(p.name, dtype, count)] * 3, 46)
        sets = [[data(comm, (46, d, i), count, dtype) for i in range(3)] for d in range(different)]
        store = [[comm.from_host(xs[comm.rank]) for xs in one] for one in sets]
        kept = comm.empty(replays * 3 * count, dtype)
        nbytes = graph.inputs[0].nbytes
        runtime.memset(kept.data.ptr, 0xA5, kept.nbytes)
        comm.backend.synchronize()
        for k in range(replays):
            for i in range(3):
                runtime.memcpyAsync(
                    graph.inputs[i].data.ptr, store[k % different][i].data.ptr, nbytes,
                    runtime.memcpyDeviceToDevice, graph.stream.ptr,
                )  # fmt: skip
            graph.graph.launch(graph.stream)
            for i in range(3):
                runtime.memcpyAsync(
                    kept.data.ptr + (3 * k + i) * nbytes, graph.outputs[i].data.ptr, nbytes,
                    runtime.memcpyDeviceToDevice, graph.stream.ptr,
                )  # fmt: skip
        graph.stream.synchronize()
        comm.check()
        got = comm.to_host(kept).reshape(replays, 3, count)
        want = [[checks.reduce_reference(xs) for xs in one] for one in sets]
        for k in range(replays):
            for i in range(3):
                wrong = checks.wrong_elements(got[k, i], want[k % different][i])
                assert wrong == 0, f"{p.name} {dtype}: replay {k}, call {i}: {wrong} wrong elements on rank {comm.rank}"


@case
def two_graphs_and_eager_calls_alternate(comm: fcomm.Communicator) -> None:
    a, b = Captured(comm, mixture(comm, 5, 1), 47), Captured(comm, mixture(comm, 4, 2), 48)
    pairs = list(reducing(comm))
    for k in range(10):
        a.replay(k)
        p, dtype = pairs[k % len(pairs)]
        ranks.reduce_once(comm, p.name, dtype, 100 + 37 * k, (49, k))
        b.replay(k)
        if k % 3 == 0:
            a.replay(100 + k)


@case
def captured_again_with_other_sizes(comm: fcomm.Communicator) -> None:
    for k, size in enumerate((9000, 3, 20000, 64)):
        calls = [(name, dtype, size) for name, dtype, _ in mixture(comm, 5, k)]
        Captured(comm, calls, 50).replay(k)


@case
def what_a_capture_refuses(comm: fcomm.Communicator) -> None:
    cp = cupy()
    fresh, loaded = make(comm), dict(cuda._loaded)
    cuda._loaded.clear()  # as in a process that has not made such a call yet
    x, out = cp.ones(50, cp.float32), cp.empty(50, cp.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            if comm.world_size > 1:
                with refused("not loaded yet", "prepare"):
                    fresh.all_reduce(x, out)
            with refused("being captured"):
                make(comm)
        finally:
            stream.end_capture()
            cuda._loaded.update(loaded)
    fresh.all_reduce(x, out)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with refused("out=None"):
                fresh.all_reduce(x)
            fresh.all_reduce(x[:20], out[:20])  # another size of a kernel that is there is no trouble
        finally:
            graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    expect(comm, out[:20], [np.ones(20, np.float32)] * comm.world_size, "captured after a refusal")
    fresh.close()


@case
def a_hang_inside_a_graph_is_named(comm: fcomm.Communicator) -> None:
    n = comm.world_size
    with make(comm, timeout_s=0.5) as victim:
        graph = Captured(victim, [("one_shot.ll", "float32", 400)] * 20, 51)
        graph.replay(0)
        epoch = int(victim.backend.control()["epoch"][0])
        if comm.rank != n - 1:
            start = time.monotonic()
            graph.graph.launch(graph.stream)
            graph.stream.synchronize()  # one wait expires, and the other 19 calls leave without waiting
            took = time.monotonic() - start
            assert took < 5, f"the graph took {took:.1f} s to give up"
            with pytest.raises(HangError) as caught:
                victim.check()
            record = caught.value.record
            assert (record["rank"], record["peer"], record["epoch"]) == (comm.rank, n - 1, epoch), caught.value
        victim.reset()
        graph.replay(1)


# ---- dependent launch -----------------------------------------------------------------------------------------------


def with_trigger(comm: fcomm.Communicator, launch: str) -> bool:
    """Whether this GPU has that launch feature; its kernels are compiled then, by one rank each."""
    if comm.dependent_launch != launch:
        assert comm.no_dependent_launch
        if comm.rank == 0:
            print(f"# dependent launch {launch}: {comm.no_dependent_launch}", flush=True)
        return False
    for name in TRIGGERED[comm.rank :: comm.world_size]:
        comm.backend.kernel(Specialisation(protocol(name), REDUCIBLE["bfloat16"], comm.world_size, True, launch))
    comm.mpi.Barrier()
    return True


def dependent(comm: fcomm.Communicator, launch: str) -> None:
    """Calls whose grids overlap: sizes that jump, then full grids of one protocol after another, where the next grid
    would take the room of a peer's if it were let in too soon."""
    with make(comm, max_bytes=1 << 20, dependent_launch=launch) as other:
        if not with_trigger(other, launch):
            return
        names = [name for name in TRIGGERED if other.admitted("bfloat16")[name] is None]
        rng = np.random.default_rng(53)
        counts = [int(c) * 8 for c in rng.choice([1, 5, 360, 1126, 4096], len(names) * 2)]
        graph = Captured(other, [(name, "bfloat16", c) for name, c in zip(names * 2, counts, strict=True)], 53)
        for k in range(3):
            graph.replay(k)
        full = Captured(other, [(name, "bfloat16", 1 << 16) for name in names for _ in range(6)], 54)
        full.replay(0)
        for _ in range(10):
            full.graph.launch(full.stream)
        full.replay(1)


@case
def dependent_launch_with_a_late_trigger_is_exact(comm: fcomm.Communicator) -> None:
    dependent(comm, "late")


@case
def dependent_launch_with_an_early_trigger_is_exact(comm: fcomm.Communicator) -> None:
    dependent(comm, "early")


@case
def two_shapes_in_a_row_fit_whatever_they_are(comm: fcomm.Communicator) -> None:
    for launch in ("early", "late"):
        shapes_in_a_row(comm, launch)


def shapes_in_a_row(comm: fcomm.Communicator, launch: str) -> None:
    """The punctual ranks' grids of two calls are there when the late ranks' first one looks for room. Small blocks on every
    SM would leave none for blocks that need a whole one, although each grid has half of the blocks that fit.
    """
    cp, n, count = cupy(), comm.world_size, 1 << 16
    if n == 1:
        return
    xs = data(comm, (56,), count, "float32")
    stream, spin = cp.cuda.Stream(non_blocking=True), spinner()
    with make(comm, max_bytes=1 << 20, dependent_launch=launch, timeout_s=3) as other:
        if other.dependent_launch != launch:
            return
        x = other.from_host(xs[comm.rank])
        for shapes in (((999, 512), (9999, 32)), ((999, 1024), (9999, 32))):
            outs = [poisoned(other, count, "float32") for _ in range(6)]
            calls = [
                other.prepare("all_reduce", x, out, protocol="one_shot.ll", stream=stream, shape=shape)
                for out, shape in zip(outs, shapes * 3, strict=True)
            ]
            with stream:
                spin((1,), (1,), (1,))
                other.backend.synchronize()
                stream.begin_capture()
                for call in calls:
                    call()
                graph = stream.end_capture()
            for late, captured in ((n - 1, False), (n - 1, True), (n // 2, False), (n // 2, True)):
                for out in outs:
                    write(out, np.full(count, np.nan, np.float32))
                comm.mpi.Barrier()
                if comm.rank >= late:
                    with stream:
                        spin((1,), (1,), (50_000_000,))
                if captured:
                    graph.launch(stream)
                else:
                    for call in calls:
                        call()
                stream.synchronize()
                other.check()
                for k, out in enumerate(outs):
                    expect(other, out, xs, f"shapes {shapes}, ranks from {late} on late, captured {captured}, call {k}")


@case
def a_hang_under_dependent_launch_is_named(comm: fcomm.Communicator) -> None:
    """A thread that gives up returns without coming to the block's trigger."""
    n = comm.world_size
    with make(comm, timeout_s=0.5, dependent_launch="late") as victim:
        if victim.dependent_launch != "late":
            return
        graph = Captured(victim, [("one_shot.lamport16", "float32", 4000), ("two_shot.ll", "float32", 4000)] * 4, 55)
        graph.replay(0)
        if comm.rank != n - 1:
            start = time.monotonic()
            graph.graph.launch(graph.stream)
            graph.stream.synchronize()
            assert time.monotonic() - start < 5
            with pytest.raises(HangError):
                victim.check()
        victim.reset()
        graph.replay(1)


# ---- streams --------------------------------------------------------------------------------------------------------


@case
def two_streams_on_one_channel(comm: fcomm.Communicator) -> None:
    cp = cupy()
    if comm.world_size == 1:
        return
    a, b = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    xs = data(comm, (52,), 500, "float32")
    x, out, other = comm.from_host(xs[comm.rank]), poisoned(comm, 500, "float32"), poisoned(comm, 500, "float32")
    spin = spinner()
    with make(comm, channels=2) as two:
        two.all_reduce(x, out, stream=a)
        two.all_reduce(x, other, stream=b, channel=1)
        comm.backend.synchronize()
        with a:
            spin((1,), (1,), (1,))
        a.synchronize()  # the kernel is loaded now
        for _ in range(3):
            with a:
                spin((1,), (1,), (300_000_000,))
            two.all_reduce(x, out, stream=a)
            with refused("channel 0 still has work on another stream"):
                two.all_reduce(x, other, stream=b)
            two.all_reduce(x, other, stream=b, channel=1)  # a channel of its own is what to use
            a.synchronize()
            two.all_reduce(x, other, stream=b)  # and so is waiting
            b.synchronize()
            expect(comm, out, xs, "first stream")
            expect(comm, other, xs, "second stream")
        for stream in (a.ptr, a, None):
            two.all_reduce(x, out, stream=stream)
            comm.backend.synchronize()
        with refused("no CUDA stream"):
            two.all_reduce(x, out, stream="a")


@case
def epilogues_in_graphs(comm: fcomm.Communicator) -> None:
    """Residual add and RMSNorm over real rows, on every encoding that can, in replayed graphs and with every trigger."""
    if comm.world_size == 1:
        return
    norm = fcomm.epilogue.add_rms_norm
    shapes = {"bfloat16": (5, 8192), "float16": (3, 5120), "float32": (2, 7168)}
    for launch in LAUNCHES:
        with make(comm, max_bytes=1 << 20, dependent_launch=launch) as other:
            if other.dependent_launch != launch:
                continue
            for p, dtype in reducing(other, *shapes):
                # Each is a kernel to compile: all encodings once, one of them with all types and triggers.
                one = p.name == "one_shot.lamport16" and (launch == "none" or dtype == "bfloat16")
                if norm.refusal(p) is None and (one or (launch == "none" and dtype == "bfloat16")):
                    _epilogue_graph(other, p.name, dtype, *shapes[dtype])
    ranks.fused_once(comm, "one_shot.ll", "bfloat16", 7, 4096, (57,), offset=1)
    ranks.elementwise_once(comm, "two_shot.ll128", "bfloat16", 100_003, (58,))


def _epilogue_graph(comm: fcomm.Communicator, name: str, dtype: str, rows: int, columns: int) -> None:
    cp = cupy()
    stream, layers, size = cp.cuda.Stream(non_blocking=True), 4, rows * columns
    *xs, residual, vectors, total = ranks.rows_of(comm, (56,), layers * rows, columns, dtype)
    kept = checks.add_residual(total, residual)
    want = checks.rms_norm(kept, vectors[0], 1e-6)
    x, r, w = (comm.from_host(a) for a in (xs[comm.rank], residual, vectors[0]))
    out, r_out = (poisoned(comm, layers * size, dtype).reshape(layers * rows, columns) for _ in range(2))
    parts = [slice(k * rows, (k + 1) * rows) for k in range(layers)]
    calls = [
        comm.prepare(
            "all_reduce", x[part], out[part], protocol=name, stream=stream,
            epilogue=fcomm.epilogue.add_rms_norm(residual=r[part], residual_out=r_out[part], weight=w, epsilon=1e-6),
        )
        for part in parts
    ]  # fmt: skip
    with stream:
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    for replay in range(3):
        for array in (out, r_out):
            host = np.empty((layers * rows, columns), want.dtype)
            checks.poison(host)
            write(array, host)
        graph.launch(stream)
        stream.synchronize()
        comm.check()
        for got, exact, what in ((out, want, "results"), (r_out, kept, "new residuals")):
            wrong = checks.wrong_elements(comm.to_host(got), exact)
            assert wrong == 0, (
                f"{name} {dtype} {comm.dependent_launch}, replay {replay}: {wrong} {what} wrong on rank {comm.rank}"
            )


@case
def all_kinds_of_latency_can_be_taken(comm: fcomm.Communicator) -> None:
    from fcomm import measure, measure_cuda

    dtype = "bfloat16"
    for p in fcomm.protocols().values():
        gathers = p.collective == "all_gather"
        if p.name not in ("one_shot.ll", "two_shot.ll", "all_gather.ll", "barrier.one_shot"):
            continue  # the way of measuring is the same for all
        one = measure.Case(p.collective, p.name, dtype, 16384, comm.world_size)
        x = comm.from_host(data(comm, (53,), 8192, dtype)[comm.rank])
        out = comm.empty(8192 * comm.world_size, dtype).reshape(-1, 8192) if gathers else comm.empty(8192, dtype)
        for mode in measure_cuda.MODES.values():
            if mode.name == measure.SANDWICH_DEPENDENT and comm.dependent_launch == "none":
                continue
            delay_us = 5.0 if mode.name == measure.SKEW else None
            launch: Any = mode.bind(comm, replace(one, mode=mode.name, delay_us=delay_us), x, out)
            ns = comm.mpi.allreduce(float(np.median(mode.sample(comm, launch, 20))), MPI.MAX)
            if comm.rank == 0:
                skew = float(np.median(launch.arrival_skew_ns)) if launch.arrival_skew_ns.size else 0.0
                print(f"# {p.name} {mode.name}: {ns / 1e3:.2f} us, arrival skew {skew / 1e3:.2f} us", flush=True)
            assert 100 < ns < 1e8, (mode.name, ns)
            told = {k: round(v, 2) for k, v in launch.facts.items()}
            if comm.rank == 0 and told:
                print(f"# {p.name} {mode.name}: {told}", flush=True)
    measure_cuda.close(comm)


@case
def neighbours_with_dependent_launch(comm: fcomm.Communicator) -> None:
    """Layers of kernels that all wait and let the next one in, at every launch feature: exact, and their edges programmatic."""
    from fcomm import measure, measure_cuda

    for feature in ("late", "early"):
        with fcomm.Communicator(comm.mpi, backend="cuda", max_bytes=1 << 20, dependent_launch=feature) as other:
            if other.dependent_launch == "none":
                return
            for name in ("one_shot.ll", "two_shot.lamport16", "custom_ar_v2.pull_two_shot"):
                where = measure.STAGING if "pull" in name else measure.ARRAY
                for mode in (*measure.SANDWICHES, measure.GRAPH):
                    one = measure.Case(
                        "all_reduce", name, "bfloat16", 65536, comm.world_size, mode, None, feature, where
                    )
                    x, out = measure.arrays(other, one)
                    launch: Any = measure_cuda.MODES[mode].bind(other, one, x, out)
                    launch.sample(3)
                    edges, calls = launch.facts.get("dependent_edges"), launch.ring.calls
                    if comm.rank == 0:
                        print(f"# {name} {mode} {feature}: {edges} programmatic edges of {calls} calls", flush=True)
                    if edges is not None:
                        # Whoever has the attribute hangs on the one before by such an edge; only the graph's first hangs on none.
                        layers = {measure.SANDWICH: calls, measure.SANDWICH_DEPENDENT: 3 * calls - 1}
                        assert edges == layers.get(mode, calls - 1), (name, mode, feature)
            measure_cuda.close(other)


@case
def the_norm_behind_a_collective_is_one(comm: fcomm.Communicator) -> None:
    from fcomm import measure, measure_cuda

    one = measure.Case("all_reduce", "one_shot.ll", "float32", 3 * 8192 + 400, comm.world_size, measure.SANDWICH)
    x, out = measure.arrays(comm, one)
    launch: Any = measure_cuda.MODES[one.mode].bind(comm, one, x, out)
    values = np.random.default_rng(3).normal(2, 3, one.count).astype(np.float32)
    source, target = comm.from_host(values), comm.empty(one.count, "float32")
    launch._queue_norm(launch._norm, source.data.ptr, target.data.ptr, False)()
    comm.backend.synchronize()
    rows = np.split(values.astype(np.float64), range(2048, one.count, 2048))
    want = np.concatenate([row / np.sqrt(np.mean(row**2) + 1e-6) for row in rows])
    np.testing.assert_allclose(comm.to_host(target), want, rtol=2e-6)
    measure_cuda.close(comm)


# ---- scenarios: things that need a process of their own --------------------------------------------------------------


def without_a_gpu(mpi: MPI.Intracomm, backend: str) -> None:
    """The last rank sees no GPU (its environment was emptied before CUDA was touched)."""
    with refused("GPU", str(mpi.size - 1)):
        fcomm.Communicator(mpi, backend=backend)
    print(f"SCENARIO ok rank {mpi.rank}", flush=True)


def short(mpi: MPI.Intracomm, backend: str) -> None:
    """A few calls of every protocol: what memcheck, and time slicing, can afford."""
    with fcomm.Communicator(mpi, backend="cuda", max_bytes=1 << 16) as comm:
        for p, dtype in reducing(comm):
            for k, count in enumerate((1, 33, 1001)):
                ranks.reduce_once(comm, p.name, dtype, count, (54, k), offset=k % 2, in_place=k == 1)
        print(f"SCENARIO ok rank {mpi.rank} time_sliced={comm.backend.describe()['time_sliced']}", flush=True)


def construct(mpi: MPI.Intracomm, backend: str) -> None:
    """Says what construction says."""
    try:
        fcomm.Communicator(mpi, backend=backend).close()
        print(f"SCENARIO constructed rank {mpi.rank}", flush=True)
    except (SetupError, ArgumentError) as error:
        print(f"SCENARIO refused rank {mpi.rank}: {error}", flush=True)


def death(mpi: MPI.Intracomm, backend: str) -> None:
    """The last rank's kernel writes to nowhere while the others wait for it."""
    comm = fcomm.Communicator(mpi, backend="cuda", timeout_s=5)
    ranks.reduce_once(comm, "one_shot.ll", "float32", 100, (55,))
    mpi.Barrier()
    try:
        if mpi.rank == mpi.size - 1:
            code = 'extern "C" __global__ void fault(int* p) { *(p + threadIdx.x) = 1; }'
            cupy().RawKernel(code, "fault")((1,), (1,), (np.intp(8),))
            comm.backend.synchronize()
        else:
            x = cupy().ones(100, cupy().float32)  # here: below, CuPy's own kernel might be the first to learn of it
            for _ in range(200):
                comm.all_reduce(x)
                comm.backend.synchronize()
                comm.check()
        print(f"SCENARIO unnoticed rank {mpi.rank}", flush=True)
    except (DeviceError, HangError) as error:
        print(f"SCENARIO {type(error).__name__} rank {mpi.rank}: {error}", flush=True)
    except Exception as error:
        print(f"SCENARIO other rank {mpi.rank}: {type(error).__name__} {error}", flush=True)
    sys.stdout.flush()
    time.sleep(1)
    os._exit(0)  # a context that faulted cannot be torn down in order


SCENARIOS = {f.__name__: f for f in (without_a_gpu, short, construct, death)}


# ---- running --------------------------------------------------------------------------------------------------------


def run_case(mpi: MPI.Intracomm, function: Case) -> bool:
    """Runs one case; whether it held on all ranks. A rank that fails says so at once: the others may be waiting for it."""
    error = ""
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    try:
        with fcomm.Communicator(mpi, backend="cuda", max_bytes=1 << 16, timeout_s=15) as comm:
            function(comm)
    except Exception:
        error = traceback.format_exc()
        print(f"rank {mpi.rank} of {mpi.size}, {function.__name__}:\n{error}", file=sys.stderr, flush=True)
    held = not any(mpi.allgather(error))
    faulthandler.cancel_dump_traceback_later()
    return held


def compile_ahead(mpi: MPI.Intracomm) -> None:
    """Each rank compiles a part of the kernels; CuPy keeps them on disk, where the others find them."""
    if mpi.size == 1:
        return
    with fcomm.Communicator(mpi, backend="cuda", max_bytes=1 << 16) as comm:
        for spec in kernels(mpi.size, ranks.DTYPES)[mpi.rank :: mpi.size]:
            comm.backend.kernel(spec)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases of this file or of tests/ranks.py; all without any")
    parser.add_argument("--dtypes", nargs="*", default=list(ranks.DTYPES), help="element types of the table")
    parser.add_argument("--scenario", choices=SCENARIOS)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--blind", action="store_true", help="the last rank sees no GPU")
    options = parser.parse_args()
    mpi = MPI.COMM_WORLD
    if options.blind and mpi.rank == mpi.size - 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.scenario:
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        SCENARIOS[options.scenario](mpi, options.backend)
        return 0
    ranks.MANY_CALLS, ranks.DTYPES = 300, tuple(options.dtypes)
    table = {**CASES, **ranks.CASES}
    if len(options.names) != 1:
        compile_ahead(mpi)
    failed = 0
    for name in options.names or table:
        start = time.monotonic()
        try:
            held = run_case(mpi, table[name])
        except FcommError:
            held = False
        failed += not held
        if mpi.rank == 0:
            print(f"{'PASS' if held else 'FAIL'} {name} {time.monotonic() - start:.2f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
