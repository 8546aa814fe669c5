"""Epilogue: what fusing residual add and RMSNorm into all-reduce saves, ``mpirun -n 8 python -m experiments.epilogue``.

A stretch of a decode step in a CUDA graph, some times over: a filler that writes the all-reduce's input as a GEMM would, the
all-reduce, the norm. Once with the norm in the all-reduce, once in a kernel of its own, once with the filler alone. Every
result is compared with NumPy's, to the bit, before a time is taken.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from experiments import mps
from experiments.request import default_ranks, parse_ranks, parse_time
from experiments.sweep import OVERTIME_S, in_turn, on_root
from experiments.tables import aligned
from fcomm import Communicator, bootstrap, checks, epilogue, measure, provenance, records, settings
from fcomm.cli import Parser
from fcomm.communicator import resolve_backend
from fcomm.dtypes import ElementType, reducible
from fcomm.epilogue import check_row
from fcomm.errors import ArgumentError, FcommError
from fcomm.grids import plain_shape
from fcomm.protocols import protocol
from fcomm.sizes import format_size
from fcomm.source import LAUNCHES

if TYPE_CHECKING:
    import pandas as pd

FUSED, SEPARATE, FILLER = "fused", "separate", "filler"
VARIANTS = (FUSED, SEPARATE, FILLER)
EPSILON = 1e-6
BATCHES = {"cuda": "1,2,4,8,16,32,64", "cpu": "1,4"}
HIDDEN = {"cuda": "4096,5120,7168,8192", "cpu": "1024"}
LAYERS = {"cuda": 10, "cpu": 3}
"""Stretches of a graph, on arrays of their own; a fifth of them in a shorter one, and the slope between the two is one's time."""
ITERATIONS = {"cuda": 40, "cpu": 10}
SHIFT = 64
"""Elements by which the data of successive stretches are shifted against each other."""
MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Wanted:
    """What was asked for."""

    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    hidden: tuple[int, ...]
    dtype: ElementType
    launches: tuple[str, ...]
    iterations: int
    layers: int
    budget_s: float
    fused: str
    separate: str


@dataclass(frozen=True)
class Point:
    """One line of the table: all three variants of it are measured together."""

    ranks: int
    launch: str
    hidden: int
    batch: int


class Stretches:
    """The stretches of a point with their arrays. Collective to make; verified when it is made."""

    def __init__(self, comm: Communicator, wanted: Wanted, point: Point) -> None:
        self.comm, self.wanted, self.point = comm, wanted, point
        shape = (point.batch, point.hidden)
        count, n, dtype = point.batch * point.hidden, comm.world_size, wanted.dtype
        total = count + (wanted.layers - 1) * SHIFT
        rows = [checks.inputs((31, *shape), r, n, total, dtype.name) for r in range(n + 2)]
        self.weight = comm.from_host(rows[n + 1][: point.hidden])
        sums = checks.reduce_reference(rows[:n])
        parts = [slice(k * SHIFT, k * SHIFT + count) for k in range(wanted.layers)]
        self._want = []
        for part in parts:
            kept = checks.add_residual(sums[part], rows[n][part]).reshape(shape)
            self._want.append((checks.rms_norm(kept, rows[n + 1][: point.hidden], EPSILON), kept))
        own, residual = comm.from_host(rows[comm.rank]), comm.from_host(rows[n])
        self.sources = [own[part].reshape(shape) for part in parts]
        self.residuals = [residual[part].reshape(shape) for part in parts]
        self.inputs, self.sums, self.outputs, self.kept = (
            [comm.empty(count, dtype.name).reshape(shape) for _ in parts] for _ in range(4)
        )
        self.stream: Any = None
        view, copy = comm.backend.view, comm.backend.copy
        self._fillers: list[Callable[[], object]] = [partial(copy, view(a), view(b), None) for a, b in self._pairs()]

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.sources, self.inputs, strict=True)

    def _norm(self, k: int) -> epilogue.Bound:
        return epilogue.add_rms_norm(
            residual=self.residuals[k], residual_out=self.kept[k], weight=self.weight, epsilon=EPSILON
        )

    def prepare(self) -> None:
        """Compiles and plans everything; what a graph may not do."""
        comm, stream, layers = self.comm, self.stream, range(self.wanted.layers)
        fused = [
            comm.prepare(
                "all_reduce",
                self.inputs[k],
                self.outputs[k],
                protocol=self.wanted.fused,
                stream=stream,
                epilogue=self._norm(k),
            )
            for k in layers
        ]
        plain = [
            comm.prepare("all_reduce", self.inputs[k], self.sums[k], protocol=self.wanted.separate, stream=stream)
            for k in layers
        ]
        norms = [partial(comm.apply, self._norm(k), self.sums[k], self.outputs[k], stream=stream) for k in layers]
        self.protocols = {
            FUSED: f"{fused[0].protocol}{'' if fused[0].fused else ', two kernels'}",
            SEPARATE: str(plain[0].protocol),
        }
        self.calls: dict[str, list[list[Callable[[], object]]]] = {
            FUSED: [[self._fillers[k], fused[k]] for k in layers],
            SEPARATE: [[self._fillers[k], plain[k], norms[k]] for k in layers],
            FILLER: [[self._fillers[k]] for k in layers],
        }

    def make(self) -> None:
        """Makes the variants ready to be run."""

    def run(self, variant: str, short: bool = False) -> None:
        """Runs all stretches of a variant, or a fifth of them."""
        for stretch in self.calls[variant][: max(1, self.wanted.layers // 5)] if short else self.calls[variant]:
            for call in stretch:
                call()

    def verify(self) -> None:
        """Runs both ways on poisoned outputs and compares all results. Collective."""
        for variant in (FUSED, SEPARATE):
            wrong = measure.together(self.comm.mpi, partial(self._wrong, variant))
            total = int(sum(self.comm.mpi.allgather(wrong)))
            if total:
                raise measure.WrongElementsError(
                    f"{total} wrong elements, {variant}, {self.point}: nothing is timed", total
                )

    def _wrong(self, variant: str) -> int:
        comm = self.comm
        for array in (*self.outputs, *self.kept):
            poisoned = np.empty(array.shape, self.wanted.dtype.numpy)
            checks.poison(poisoned)
            comm.backend.copy(comm.backend.view(comm.from_host(poisoned)), comm.backend.view(array), self._copy_stream)
        comm.backend.synchronize()
        self.run(variant)
        comm.backend.synchronize()
        comm.check()
        pairs = zip(self.outputs, self.kept, self._want, strict=True)
        return sum(
            checks.wrong_elements(comm.to_host(got), want)
            for out, kept, wants in pairs
            for got, want in zip((out, kept), wants, strict=True)
        )

    _copy_stream: Any = None

    def meet(self) -> None:
        """Meets the other ranks before a sample, where nothing else does."""
        self.comm.mpi.Barrier()

    def sample(self, variant: str) -> float:
        """Nanoseconds of one stretch on this rank."""
        comm = self.comm
        start = time.perf_counter_ns()
        self.run(variant)
        comm.backend.synchronize()
        return (time.perf_counter_ns() - start) / self.wanted.layers


class GraphStretches(Stretches):
    """The same in CUDA graphs, which all ranks start together."""

    _copy_stream = 0

    def __init__(self, comm: Communicator, wanted: Wanted, point: Point) -> None:
        from fcomm import measure_cuda
        from fcomm.backends.base import LaunchShape
        from fcomm.layout import params_dtype

        super().__init__(comm, wanted, point)
        self._cuda, backend = measure_cuda, measure_cuda._backend(comm)
        self.stream = measure_cuda._stream(comm)
        nbytes = self.inputs[0].nbytes
        shape = plain_shape(-(-nbytes // 16), comm.gpu)
        text = measure_cuda.floor_text(comm.world_size, True, shape.threads, comm.dependent_launch)
        kernel = backend.compile(measure.FLOOR, text)
        # A filler that is let in while an all-reduce still polls takes the room of that rank's second grid, and no more.
        room = kernel.max_blocks(shape.threads) // (1 if comm.dependent_launch == "none" else 2)
        shape = LaunchShape(max(1, min(shape.blocks, room)), shape.threads)
        self._fillers = []
        for source, target in self._pairs():
            params = np.zeros(1, params_dtype(comm.world_size))
            params["in"], params["out"] = backend.view(source).address, backend.view(target).address
            params["nbytes"], params["copies"], params["aligned"] = nbytes, 1, 1
            self._fillers.append(partial(backend.launch_once, kernel, shape, params, self.stream.ptr, dependent=True))

    def make(self) -> None:
        cuda, stream = self._cuda, self.stream
        self._graphs = {}
        for variant in VARIANTS:
            super().run(variant, short=True)  # loads what is loaded at a first launch
            stream.synchronize()
            for short in (False, True):
                stretches = self.calls[variant][: max(1, self.wanted.layers // 5)] if short else self.calls[variant]
                self._graphs[variant, short] = cuda._capture(stream, [call for s in stretches for call in s])
        self.comm.check()

    def meet(self) -> None:
        """On the device, as part of each sample."""

    def run(self, variant: str, short: bool = False) -> None:
        self._graphs[variant, short].launch(self.stream)

    def sample(self, variant: str) -> float:
        cuda, comm = self._cuda, self.comm
        meeting = cuda._meeting(comm)
        long_ns, _ = cuda._timed(comm, meeting, lambda: self.run(variant))
        short_ns, _ = cuda._timed(comm, meeting, lambda: self.run(variant, short=True))
        comm.check()
        return max(1.0, (long_ns - short_ns) / (self.wanted.layers - max(1, self.wanted.layers // 5)))


def measure_point(
    comm: Communicator, wanted: Wanted, point: Point
) -> tuple[dict[str, NDArray[np.float64]], dict[str, str]]:
    """Times of a point's variants, in turn and in random order. Collective.

    Returns nanoseconds of one stretch by variant, shape (iterations, ranks), and the protocol of each variant.
    """
    kind = GraphStretches if comm.backend.name == "cuda" else Stretches
    stretches = measure.together(comm.mpi, lambda: kind(comm, wanted, point))
    measure.together(comm.mpi, stretches.prepare)
    measure.together(comm.mpi, stretches.make)
    stretches.verify()
    rng = np.random.default_rng([point.ranks, point.hidden, point.batch])  # alike on all ranks

    def sample() -> NDArray[np.float64]:
        own = np.empty((len(VARIANTS), wanted.iterations + 1))
        error: FcommError | None = None
        for k in range(wanted.iterations + 1):
            for v in rng.permutation(len(VARIANTS)):
                stretches.meet()  # as often as planned, also after an error
                if error is not None:
                    continue
                try:
                    own[v, k] = stretches.sample(VARIANTS[v])
                except FcommError as caught:
                    error = caught
        if error is not None:
            raise error
        return own[:, 1:]  # the first one was to warm up

    own = measure.together(comm.mpi, sample)
    stretches.verify()
    every = np.array(comm.mpi.allgather(own))  # (ranks, variants, iterations)
    return {variant: np.ascontiguousarray(every[:, v].T) for v, variant in enumerate(VARIANTS)}, stretches.protocols


def row(
    wanted: Wanted, point: Point, nanoseconds: dict[str, NDArray[np.float64]], named: dict[str, str]
) -> dict[str, Any]:
    """The point's line: medians over iterations of the slowest rank's times, and 95 % intervals of what fusing saves.

    nanoseconds : as from `measure_point`. Times are without the filler's.
    """
    slowest_us = {variant: ns.max(axis=1) / 1e3 for variant, ns in nanoseconds.items()}
    filler_us = float(np.median(slowest_us[FILLER]))
    both = {v: float(np.median(slowest_us[v])) - filler_us for v in (FUSED, SEPARATE)}
    saved = slowest_us[SEPARATE] - slowest_us[FUSED]
    low_us, high_us = measure.median_interval(saved)
    return {
        "ranks": point.ranks,
        "launch": point.launch,
        "hidden": point.hidden,
        "batch": point.batch,
        "dtype": wanted.dtype.name,
        "nbytes": point.hidden * point.batch * wanted.dtype.itemsize,
        "fused": named[FUSED],
        "separate": named[SEPARATE],
        "filler_us": filler_us,
        "separate_us": both[SEPARATE],
        "fused_us": both[FUSED],
        "saved_us": float(np.median(saved)),
        "saved_low_us": low_us,
        "saved_high_us": high_us,
        "saved_percent": 100 * float(np.median(saved)) / both[SEPARATE],
    }


def table(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The lines as a Markdown table, with a caption that says where they were taken."""
    head = [
        "ranks",
        "launch",
        "hidden",
        "batch",
        "size",
        "all-reduce, norm (us)",
        "fused (us)",
        "saved (us) [95 %]",
        "saved",
    ]
    lines = [
            [
                str(r["ranks"]), r["launch"], str(r["hidden"]), str(r["batch"]), format_size(r["nbytes"]),
                f"{r['separate_us']:.2f} {r['separate']}", f"{r['fused_us']:.2f} {r['fused']}",
                f"{r['saved_us']:+.2f} [{r['saved_low_us']:+.2f}, {r['saved_high_us']:+.2f}]", f"{r['saved_percent']:+.0f} %",
            ]
        for r in rows
    ]  # fmt: skip
    first = facts["devices"][0]
    if first.get("emulation"):
        where = f"an emulation on {first['device']}: times of host code, no evidence about a GPU"
    elif first.get("ranks_per_gpu", 1) > 1:
        where = f"ranks sharing {first['device']}{', time-sliced: no evidence about anything' if first.get('time_sliced') else ''}"
    else:
        where = f"a {first['device']} for each rank"
    caption = (
        f"Residual add and RMSNorm ({rows[0]['dtype']}) behind all-reduce and in it; {where}. Times are those of the slowest rank, of one "
        "stretch without its filler; intervals are over the repetitions of one launch."
    )
    return "\n".join([caption, "", *aligned([head, *lines])])


class Kept:
    """The run's folder. Each file in it is whole at any time; what was measured before a crash stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._samples: list[pd.DataFrame] = []

    def begin(self, facts: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise ArgumentError(
                f"cannot make the folder {self.folder} ({error.strerror}): name another in --out"
            ) from None
        records.write_whole(self.folder / "provenance.json", records._json(facts))

    def add(
        self, wanted: Wanted, point: Point, nanoseconds: dict[str, NDArray[np.float64]], rows: Sequence[Any]
    ) -> None:
        import pandas as pd
        import pyarrow as pa

        for variant, ns in nanoseconds.items():
            iterations, ranks = ns.shape
            self._samples.append(
                pd.DataFrame(
                    {
                        "ranks": point.ranks, "launch": point.launch, "hidden": point.hidden, "batch": point.batch,
                        "dtype": wanted.dtype.name, "variant": variant, "iteration": np.repeat(np.arange(iterations), ranks),
                        "rank": np.tile(np.arange(ranks), iterations), "nanoseconds": ns.reshape(-1),
                    }
                )
            )  # fmt: skip
        samples = pa.Table.from_pandas(pd.concat(self._samples, ignore_index=True), preserve_index=False)
        records.write_whole(self.folder / "samples.parquet", records._parquet(samples))
        records.write_whole(self.folder / "table.csv", pd.DataFrame(rows).to_csv(index=False).encode())


def parser() -> argparse.ArgumentParser:
    """The options of the command. What is wrong with them is an `ArgumentError`."""
    p = Parser(
        prog="mpirun -n N python -m experiments.epilogue",
        description="Measure what fusing residual add and RMSNorm into all-reduce saves.",
        allow_abbrev=False,
    )
    p.add_argument("--ranks", metavar="LIST", help="rank counts: 2,4,8 or 2..8 (2, 4, 8, ... up to those started)")
    p.add_argument(
        "--batches", metavar="LIST", help=f"rows of a message ({BATCHES['cuda']}; on the cpu backend {BATCHES['cpu']})"
    )
    p.add_argument(
        "--hidden", metavar="LIST", help=f"elements of a row ({HIDDEN['cuda']}; on the cpu backend {HIDDEN['cpu']})"
    )
    p.add_argument("--dtype", default="bfloat16", help="element type: bfloat16, float16 or float32 (bfloat16)")
    p.add_argument(
        "--launches", metavar="LIST", help="launch features: none, late (none,late; on the cpu backend none)"
    )
    p.add_argument("--fused", metavar="PROTOCOL", default="auto", help="protocol of the fused all-reduce (auto)")
    p.add_argument(
        "--separate", metavar="PROTOCOL", default="auto", help="protocol of the all-reduce before a norm (auto)"
    )
    p.add_argument("--iterations", type=int, metavar="INT", help="timed replays of each variant (40; cpu backend 10)")
    p.add_argument(
        "--budget", metavar="TIME", default="60s", help="for everything; points that do not fit are left out (60s)"
    )
    p.add_argument(
        "--backend", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is a GPU (auto)"
    )
    p.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder, which must be new (results/<time>-epilogue)"
    )
    return p


def _numbers(option: str, text: str) -> tuple[int, ...]:
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdigit() and int(item) > 0 for item in items):
        raise ArgumentError(f"{option} {text!r} is not a list of positive numbers")
    return tuple(dict.fromkeys(map(int, items)))


def wanted_of(args: argparse.Namespace, started: int, backend: str) -> Wanted:
    """The command line's request; `ArgumentError` for what cannot be. started : ranks that there are."""
    ranks = parse_ranks(args.ranks, started) if args.ranks else default_ranks(started)
    if min(ranks) < 2:
        raise ArgumentError("an all-reduce is among at least two ranks: start more, mpirun -n 2")
    dtype = reducible(args.dtype)
    if not dtype.is_float:
        raise ArgumentError(f"--dtype {dtype.name}: a norm is of float32, float16 or bfloat16")
    batches, hidden = (
        _numbers("--batches", args.batches or BATCHES[backend]),
        _numbers("--hidden", args.hidden or HIDDEN[backend]),
    )
    for columns in hidden:
        check_row(epilogue.add_rms_norm.name, columns, dtype.itemsize)
    if max(batches) * max(hidden) * dtype.itemsize > MOST_BYTES:
        raise ArgumentError(
            f"{max(batches)} rows of {max(hidden)} {dtype.name} are more than {format_size(MOST_BYTES)}: no message of a decode step"
        )
    launches = tuple(dict.fromkeys((args.launches or ("none" if backend == "cpu" else "none,late")).split(",")))
    for launch in launches:
        if launch not in LAUNCHES[:2]:
            raise ArgumentError(f"--launches {launch!r} is not known; use none, late")
    iterations = ITERATIONS[backend] if args.iterations is None else args.iterations
    if not 1 <= iterations <= 10_000:
        raise ArgumentError(f"--iterations {iterations} is not between 1 and 10000")
    for name in (args.fused, args.separate):
        if name != "auto" and protocol(name).collective != "all_reduce":
            raise ArgumentError(f"{name} is no all-reduce")
    if args.fused != "auto" and (why := epilogue.add_rms_norm.refusal(protocol(args.fused))):
        raise ArgumentError(f"--fused {args.fused}: {why}")
    return Wanted(
        ranks, batches, hidden, dtype, launches, iterations, LAYERS[backend], parse_time(args.budget), args.fused, args.separate
    )  # fmt: skip


@contextmanager
def _progress(root: bool, total: int) -> Iterator[Callable[[str], object]]:
    if not root:
        yield lambda where: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="epilogue", unit=" points", mininterval=1.0, dynamic_ncols=True) as bar:

        def advance(where: str) -> None:
            bar.set_description_str(where, refresh=False)
            bar.update(1)

        yield advance


class Run:
    """One run of the command."""

    def __init__(self, world: MPI.Intracomm, wanted: Wanted, backend: str, folder: Path, started_s: float) -> None:
        self.world, self.wanted, self.backend, self.started_s = world, wanted, backend, started_s
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._kept = Kept(folder)

    def __call__(self) -> int:
        """Measures all points; returns how many the budget left out. Collective."""
        wanted, left_out = self.wanted, 0
        groups = list(itertools.product(wanted.ranks, wanted.launches))
        lines = len(wanted.hidden) * len(wanted.batches)
        with _progress(self.world.rank == 0, len(groups) * lines) as advance:
            for k, (ranks, launch) in enumerate(groups):
                left_s = wanted.budget_s - (time.monotonic() - self.started_s)
                sub = cast(MPI.Intracomm, self.world.Split(0 if self.world.rank < ranks else MPI.UNDEFINED))
                share_s = max(0.0, left_s) / (len(groups) - k)  # what one group leaves, the others have
                done = in_turn(self.world, ranks, partial(self._group, ranks, launch, share_s, sub, advance))
                left_out += lines - self.world.bcast(done)
        return left_out

    def _group(
        self, ranks: int, launch: str, budget_s: float, sub: MPI.Intracomm, advance: Callable[[str], object]
    ) -> int:
        """Measures the points of one rank count and launch feature; returns how many there was time for."""
        wanted, last_s, done, began_s = self.wanted, 0.0, 0, time.monotonic()
        largest = max(wanted.batches) * max(wanted.hidden) * wanted.dtype.itemsize
        with Communicator(
            sub, backend=self.backend, max_bytes=max(1 << 20, largest), dependent_launch=launch, timeout_s=20
        ) as comm:
            if launch != "none" and comm.dependent_launch == "none":
                raise ArgumentError(f"--launches {launch}: {comm.no_dependent_launch}")
            if not self.facts:
                self.facts = provenance.collect(comm)
                bootstrap.collectively(sub, lambda: self._kept.begin(self.facts) if sub.rank == 0 else None)
            for batch, hidden in itertools.product(wanted.batches, wanted.hidden):
                start = time.monotonic()
                if not sub.bcast(start - began_s + 1.5 * last_s < budget_s):
                    break
                point = Point(ranks, launch, hidden, batch)
                nanoseconds, named = measure_point(comm, wanted, point)
                self.rows.append(row(wanted, point, nanoseconds, named))
                bootstrap.collectively(
                    sub,
                    partial(self._kept.add, wanted, point, nanoseconds, self.rows) if sub.rank == 0 else lambda: None,
                )
                done, last_s = done + 1, time.monotonic() - start
                advance(f"{ranks} ranks, {launch}, {batch} x {hidden}")
            if comm.backend.name == "cuda":
                from fcomm import measure_cuda

                measure_cuda.close(comm)
        sub.Free()
        return done


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    started_s = time.monotonic() - measure.age_s()
    bootstrap.check_world(MPI.COMM_WORLD)
    world = MPI.COMM_WORLD.Dup()
    options = parser()
    if world.rank > 0:  # one rank tells what --help asks for
        options.print_help = lambda file=None: None  # type: ignore[method-assign]
    args = options.parse_args(argv)
    on_cpu = "cpu" in (args.backend, settings.backend() if args.backend == "auto" else "")
    wanted_of(args, world.size, "cpu" if on_cpu else "cuda")  # what is wrong is said before anything starts
    with nullcontext() if on_cpu else mps.mps_for_ranks(world):  # before any rank uses CUDA
        backend = resolve_backend(args.backend, world)
        wanted = wanted_of(args, world.size, backend)
        if backend == "cuda":
            faulthandler.dump_traceback_later(wanted.budget_s + OVERTIME_S, exit=True)
        default = Path("results") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-epilogue"
        folder = on_root(world, lambda: args.out or default)
        run = Run(world, wanted, backend, folder, started_s)
        left_out = run()
        faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        if not run.rows:
            raise ArgumentError(f"a budget of {wanted.budget_s:g} s is too short for a single point")
        said = table(run.rows, run.facts)
        records.write_whole(folder / "table.md", (said + "\n").encode())
        print(said)
        if left_out:
            print(f"\n{left_out} points were left out: the budget of {wanted.budget_s:g} s was over")
        print(f"\n{folder} has the samples")
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
