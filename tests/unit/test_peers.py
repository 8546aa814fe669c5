"""Other libraries' all-reduces, as far as they can be looked at without them: who may run where, and what counts as wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments import peers, tables
from experiments.request import build_request, dry_run, parser
from fcomm import checks
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import ArgumentError, NotAdmittedError
from fcomm.measure import FLOOR, PEERS, Case
from fcomm.protocols import protocols
from tests import launch

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def test_multicast_is_off_before_any_library_is_loaded() -> None:
    code = (
        "import os, sys\nimport experiments.sweep\n"
        f"assert all(os.environ[k] == v for k, v in {OFF!r}.items())\n"
        "assert not {'torch', 'cupy.cuda.nccl', 'cupy_backends.cuda.libs.nccl'} & set(sys.modules)"
    )
    env = {**launch.environment(), **dict.fromkeys(OFF, "on")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(os.environ[k] == v for k, v in OFF.items())


# ---- what counts as wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_a_sum_in_any_order_is_within_the_bound(dtype: str) -> None:
    element = REDUCIBLE[dtype].numpy
    xs = [checks.inputs(3, rank, 8, 5000, dtype) for rank in range(8)]
    for order in (range(8), range(7, -1, -1), (3, 1, 4, 0, 5, 2, 7, 6)):
        total = xs[order[0]]
        for rank in order[1:]:  # rounded at each step, as a ring does it
            with np.errstate(over="ignore"):
                total = (total + xs[rank]).astype(element)
        assert checks.beyond_rounding(xs, total) == 0
    assert checks.beyond_rounding(xs, checks.reduce_reference(xs)) == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_a_sum_without_one_rank_is_beyond_it(dtype: str) -> None:
    xs = [checks.inputs(4, rank, 4, 5000, dtype) for rank in range(4)]
    without = checks.reduce_reference(xs[:3])
    assert checks.beyond_rounding(xs, without) > 2000  # half of the data cancels at sizes that hide a small one
    assert checks.beyond_rounding(xs, xs[0]) > 2000
    poisoned = checks.reduce_reference(xs)
    poisoned[7:9] = np.array([checks.inputs(9, 0, 4, 2, dtype)]) if dtype == "int32" else np.nan
    assert checks.beyond_rounding(xs, poisoned) == 2


# ---- who may run where -----------------------------------------------------------------------------------------------


def test_ranks_that_share_a_gpu_and_nccl() -> None:
    assert peers.refused_sharing(1, 22809) is None
    assert peers.refused_sharing(2, 23000) is None
    why = peers.refused_sharing(8, 22809)
    assert why == (
        "NCCL 2.28.9 refuses several ranks on one GPU, and 8 share this one (from 2.30 on NCCL_MULTI_RANK_GPU_ENABLE allows two)"
    )
    assert "NCCL 2.32.3 has a switch for 2 ranks on one GPU" in str(peers.refused_sharing(4, 23203))


def test_options_and_names() -> None:
    assert [name for option in peers.OPTIONS for name in peers.named(option)] == [
        "nccl", "mpi", "torch.distributed", "torch.symm_mem.one_shot", "torch.symm_mem.two_shot"
    ]  # fmt: skip
    assert set(peers.KINDS) == set(PEERS)
    assert not set(PEERS) & {FLOOR, "copy", *protocols()}
    with pytest.raises(ArgumentError, match="--peers 'rccl' is not known; use nccl, mpi, torch"):
        build_request(parser().parse_args(["--peers", "nccl,rccl"]), 2)
    with pytest.raises(ArgumentError, match="has an empty item"):
        build_request(parser().parse_args(["--peers", ""]), 2)


def test_cases_of_peers() -> None:
    words = ["--peers", "mpi,nccl", "--protocols", "one_shot.ll", "--sizes", "4K", "--backend", "cuda"]
    request = build_request(parser().parse_args(words), 2).resolved("cuda")
    found = peers.cases(request.peers, "all_reduce", "float32", 4096, 2, request.modes, request.launches)
    of_peers = {(c.protocol, c.dependent_launch): why for c, why in found.items()}
    assert peers.cases(request.peers, "all_reduce", "float32", 4096, 1, request.modes, request.launches) == {}
    assert set(of_peers) == {(name, launch) for name in ("mpi", "nccl") for launch in ("none", "late")}
    assert of_peers["nccl", "late"] is None
    assert (
        of_peers["mpi", "late"]
        == "no graph of the sweep's takes its calls, and mode graph needs that: add --modes host"
    )
    assert dry_run(request).count(" nccl ") == 2
    gathers = Case("all_gather", "nccl", "float32", 4096, 2)
    assert peers.refusal(gathers) == "a peer is measured for all-reduce alone"
    columns = Case("all_reduce", "torch.symm_mem.one_shot", "float32", 4096, 2).columns()
    assert (columns["baseline"], columns["form"], columns["wire_bytes"]) == (True, "torch.symm_mem.one_shot", 0)
    assert tables.families("all_reduce")[-len(PEERS) :] == list(PEERS)
    assert not set(PEERS) & set(tables.families("all_gather"))


class Alone:
    """A communicator of one rank, as far as a peer looks at it."""

    rank, world_size = 0, 1
    mpi = SimpleNamespace(allgather=lambda value: [value], rank=0, size=1)

    def __init__(self, backend: str, sharing: int = 0) -> None:
        self.backend = SimpleNamespace(name=backend, ranks_here=sharing, device=0)


@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("nccl", "cpu", "NCCL is for GPUs"),
        ("torch.symm_mem.one_shot", "cpu", "PyTorch's symmetric memory is for GPUs"),
        ("torch.symm_mem.two_shot", "cuda", "adds among 2, 4 or 8 ranks, not 1"),
    ],
)
def test_a_peer_that_cannot_run_says_why(name: str, backend: str, words: str) -> None:
    comm: Any = Alone(backend, 8 if backend == "cuda" else 0)
    with pytest.raises(NotAdmittedError, match=words):
        peers.KINDS[name](comm)
    assert words in str(peers.refused_here(comm, Case("all_reduce", name, "float32", 64, 1)))
    peers.close()


def test_pytorch_that_is_missing_or_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    comm: Any = Alone("cuda", 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotAdmittedError, match=r"^PyTorch is not installed$"):
        peers.TorchDistributed(comm)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    dist = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)
    torch = SimpleNamespace(distributed=dist, cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    with pytest.raises(NotAdmittedError, match=r"^this PyTorch has no CUDA$"):
        peers.TorchDistributed(comm)


def test_in_the_place_of_a_communicator() -> None:
    made: list[tuple[Any, Any]] = []

    class Sum(peers.Peer):
        def check(self) -> None:
            pass

        def call(self, src: Any, dst: Any, stream: int | None) -> Any:
            return lambda: made.append((src, dst))

    comm: Any = Alone("cpu")
    comm.backend.stream, comm.backend.view = lambda x, stream: None, lambda x: x
    beside = peers.Beside(comm, "mpi")
    peers._open["mpi", 1] = Sum(comm)
    try:
        call = beside.prepare("all_reduce", "x", "out", protocol="auto", shape=None)
        assert (call.blocks, call.threads, call(), made) == (0, 0, "out", [("x", "out")])
        assert beside.all_reduce("y", "z", protocol="auto") == "z"
        assert made[-1] == ("y", "z")
        assert beside.rank == 0  # all else is the communicator's
        with pytest.raises(ArgumentError, match="mpi is measured for all-reduce alone, not all_gather"):
            beside.prepare("all_gather", "x", "out")
    finally:
        peers.close()
