"""One decode step of a serving engine, tensor parallel over the ranks, with flash-comm's all-reduce in PyTorch.

``mpirun -n 2 python -m experiments.serving`` or, without MPI, ``torchrun --nproc-per-node 2 -m experiments.serving``

An example to copy from, and a check: the step runs eagerly, compiled and, on a GPU, as a CUDA graph; each time its outputs must have
the bits of a step whose all-reduces PyTorch does by itself, in float32 and in the order of the ranks. Two ranks may share a
GPU: put ``python -m experiments.mps --`` in front.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fcomm import bootstrap
from fcomm.errors import FcommError, SetupError
from fcomm.group import Group, as_group

if TYPE_CHECKING:
    import torch

    from fcomm.torch import CustomAllReduce

BATCH, HIDDEN, INNER, LAYERS = 4, 512, 1024, 2
STEPS = 3


def meet() -> Group:
    """The ranks' group: gloo where a launcher such as torchrun has said how to meet, MPI elsewhere."""
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        from torch import distributed

        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
        return as_group(distributed.group.WORLD)
    from mpi4py import MPI

    bootstrap.check_world()
    return MPI.COMM_WORLD


def own_device(kind: str, group: Group) -> torch.device:
    """Where the rank's tensors lie; GPUs are dealt out in turn."""
    import torch

    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and torch.cuda.is_available():
        number = group.rank % torch.cuda.device_count()
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    return torch.device(kind)


class Model:
    """Feed-forward layers of which each rank holds a part: every layer's output is a sum over the ranks."""

    def __init__(self, group: Group, device: torch.device) -> None:
        import torch

        dice = torch.Generator().manual_seed(group.rank)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=dice) / rows**0.5).bfloat16().to(device)

        inner = INNER // group.size
        self.layers = [(weights(HIDDEN, inner), weights(inner, HIDDEN)) for _ in range(LAYERS)]

    def step(self, x: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Takes and gives bfloat16 of shape (BATCH, HIDDEN), the same on all ranks."""
        for up, down in self.layers:
            x = x + reduce((x @ up).relu() @ down)
        return x


def inputs(number: int, device: torch.device) -> torch.Tensor:
    """The same values on all ranks, others for each step."""
    import torch

    return torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(1000 + number)).bfloat16().to(device)


def reference(group: Group) -> Callable[[torch.Tensor], torch.Tensor]:
    """All-reduce by the contract, through the host."""
    import torch

    def reduce(x: torch.Tensor) -> torch.Tensor:
        total, *others = (torch.from_numpy(part) for part in group.allgather(x.float().cpu().numpy()))
        for part in others:
            total = total + part
        return total.to(x.dtype).to(x.device)

    return reduce


def serve(model: Model, reducer: CustomAllReduce, group: Group) -> list[str]:
    """Runs the steps every way that the device has; returns a line for each, the same on all ranks."""
    import torch

    xs = [inputs(k, reducer.device) for k in range(STEPS)]
    wanted = [model.step(x, reference(group)) for x in xs]

    def taken(x: torch.Tensor) -> torch.Tensor:
        """What an engine does: ask, and go another way where the answer is no."""
        y = reducer.custom_all_reduce(x)
        assert y is not None
        return y

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return model.step(x, lambda part: torch.ops.fcomm.all_reduce(part, reducer.name))

    step = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    found = {"eager": [model.step(x, taken) for x in xs], "compiled": [step(x) for x in xs]}
    if reducer.device.type == "cuda":
        x, graph, replayed = xs[0].clone(), torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        with reducer.capture(), torch.cuda.graph(graph):
            out = model.step(x, taken)
        for values in xs:
            x.copy_(values)
            graph.replay()
            replayed.append(out.clone())
        torch.cuda.synchronize()
        reducer.comm.check()
        found["CUDA graph"] = replayed
    lines = []
    for way, outputs in found.items():
        same = all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
        if not all(group.allgather(same)):
            raise FcommError(f"{way}: outputs differ from those with PyTorch's sum")
        lines.append(
            f"{way}: {STEPS} steps, {STEPS * LAYERS} all-reduces, the bits of PyTorch's sum in rank order on all ranks"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m experiments.serving", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda where PyTorch finds a GPU"
    )
    options = parser.parse_args(argv)
    try:
        from fcomm.torch import CustomAllReduce
    except ImportError as error:
        raise SetupError(str(error)) from None
    group = meet()
    if group.size == 1 or INNER % group.size:
        raise SetupError(
            f"this example divides {INNER} columns among the ranks: start 2, 4 or 8 (mpirun -n 2 ..., torchrun ...)"
        )
    reducer = CustomAllReduce(group, own_device(options.device, group))
    if reducer.disabled:
        raise SetupError(str(reducer.reason))
    lines = serve(Model(group, reducer.device), reducer, group)
    if group.rank == 0:
        print(f"{group.size} ranks, {_where(reducer)}", *lines, sep="\n", flush=True)
    reducer.close()
    return 0


def _where(reducer: Any) -> str:
    return f"{reducer.device}, {reducer.comm.backend.describe()['device']}"


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
