"""The command: ``mpirun -n 8 python -m experiments.decode --model llama3-8b --batch 1,8,64``.

One model at a time is built on all ranks, from the smallest batch to the largest. Of each batch every way to all-reduce is made
ready, its results compared with those of a step whose sums are taken on the host, and all are timed in rounds, each in a
random order.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from experiments import mps, search
from experiments.decode import report, shapes
from experiments.decode.shapes import Model
from experiments.decode.step import Replay, Runner
from experiments.request import CPU_PROTOCOLS, SEARCH, SHAPES, _items
from experiments.sweep import HANG_S, Communicators, on_root
from fcomm import Communicator, bootstrap, checks, measure, provenance, records, settings
from fcomm.cli import Parser
from fcomm.communicator import Call, resolve_backend
from fcomm.dtypes import BYTES, REDUCIBLE, reducible
from fcomm.errors import ArgumentError, DeviceError, FcommError, NotAdmittedError
from fcomm.measure import ARRAY, COPY, STAGING, Case
from fcomm.protocols import Protocol, protocol, protocols
from fcomm.selector import AUTO
from fcomm.source import LAUNCHES, Specialisation

MODE = "decode"
NONE = "none"
"""The way that leaves communication out: what a step takes at least, however it is reduced."""
V2 = "custom_ar_v2"
BATCHES = {"cuda": (1, 8, 64), "cpu": (1, 4)}
CONTEXT = {"cuda": 2048, "cpu": 64}
CALLS = {"cuda": 30, "cpu": 12}
TOKENS = 2
"""Inputs that each way is checked with: the second finds what the first has left behind."""
MOST_BATCH, MOST_CONTEXT, MOST_CALLS = 1024, 1 << 20, 10_000


@dataclass(frozen=True)
class Request:
    """What is asked for; kept in run.json, with the shapes that came of it."""

    models: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    layers: int
    """0: all of them or, where ranks share a GPU, a few."""
    dtype: str
    protocols: tuple[str, ...]
    launches: tuple[str, ...]
    calls: int
    shapes: str
    seed: int
    backend: str
    what: str = MODE

    def resolved(self, backend: str) -> Request:
        """With what was left open as that backend has it by default."""
        if backend == "cpu":
            big = [name for name in self.models if name != "tiny"]
            if big:
                raise ArgumentError(
                    f"--model {big[0]} needs GPUs: the cpu backend is an emulation, and takes --model tiny alone"
                )
            if any(launch != "none" for launch in self.launches):
                raise ArgumentError(
                    "--launch late and early are for GPUs: the cpu backend runs one grid after the other"
                )
        every = tuple(p.name for p in protocols().values() if p.collective == "all_reduce")
        return replace(
            self,
            backend=backend,
            models=self.models or (("tiny",) if backend == "cpu" else ("llama3-8b",)),
            batches=self.batches or BATCHES[backend],
            context=self.context or CONTEXT[backend],
            calls=self.calls or CALLS[backend],
            launches=self.launches or (("none",) if backend == "cpu" else ("late",)),
            shapes=self.shapes or ("default" if backend == "cpu" else SEARCH),
            protocols=self.protocols or ((*CPU_PROTOCOLS, V2) if backend == "cpu" else every),
        )


def parser() -> argparse.ArgumentParser:
    """The options of the command. What is wrong with them is an `ArgumentError`."""
    p = Parser(
        prog="mpirun -n N python -m experiments.decode",
        description="Time per output token of a decode step, tensor parallel over the ranks, with each way to all-reduce.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--model",
        metavar="LIST",
        help=f"{', '.join(shapes.MODELS)} (llama3-8b; on the cpu backend tiny, which alone it takes)",
    )
    p.add_argument("--batch", metavar="LIST", help="sequences of a step: 1,8,64 (1,8,64; on the cpu backend 1,4)")
    p.add_argument("--context", type=int, metavar="INT", help="cached positions that attention reads (2048)")
    p.add_argument(
        "--layers", type=int, metavar="INT",
        help=f"layers of a step, with as much less of the vocabulary (all; {shapes.SAMPLE_LAYERS} where ranks share a GPU)",
    )  # fmt: skip
    p.add_argument("--dtype", metavar="NAME", help="bfloat16 or float16 (bfloat16)")
    p.add_argument(
        "--protocols", metavar="LIST",
        help="names as in `python -m fcomm info` (all; a few on the cpu backend); auto and no communication are always there",
    )  # fmt: skip
    p.add_argument(
        "--launch", metavar="LIST", help=f"launch features, alike for all: {', '.join(LAUNCHES)} (late on GPUs)"
    )
    p.add_argument(
        "--shapes", choices=SHAPES,
        help="search: other launch shapes are tried for custom AR v2, and the best is measured beside the default "
        "(search on GPUs)",
    )  # fmt: skip
    p.add_argument(
        "--calls", type=int, metavar="INT", help="timed steps of each way and batch (30; on the cpu backend 12)"
    )
    p.add_argument("--seed", type=int, metavar="INT", help="of the inputs and of the order of candidates (0)")
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), help="auto: cuda where there is a GPU (auto)")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder for runs (results/decode)")
    return p


def _numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    found = []
    for item in _items(option, text):
        if not item.isdigit() or not 0 < int(item) <= most:
            raise ArgumentError(f"{option} {item!r} is not a number from 1 to {most}")
        found.append(int(item))
    return tuple(sorted(set(found)))


def _number(option: str, value: int | None, most: int, least: int = 1) -> int:
    if value is not None and not least <= value <= most:
        raise ArgumentError(f"{option} {value} is not between {least} and {most}")
    return value or 0


def build_request(args: argparse.Namespace, ranks: int) -> Request:
    """The request of the command line; `ArgumentError` or `NotAdmittedError` for nonsense."""
    if ranks < 2:
        raise ArgumentError("a decode step compares ways to all-reduce, and one rank has none: use mpirun -n 2 or more")
    models = () if args.model is None else tuple(dict.fromkeys(_items("--model", args.model)))
    layers = _number("--layers", args.layers, 1024)
    for name in models:
        model = shapes.model(name)
        model.check(ranks)
        if layers > model.layers:
            raise ArgumentError(f"--layers {layers}: {name} has {model.layers}")
    dtype = reducible(args.dtype or "bfloat16").name
    if dtype not in ("bfloat16", "float16"):
        raise ArgumentError(f"--dtype {dtype}: a decode step is in bfloat16 or float16")
    names = () if args.protocols is None else tuple(dict.fromkeys(_items("--protocols", args.protocols)))
    for name in names:
        if protocol(name).collective != "all_reduce":
            raise ArgumentError(f"--protocols {name!r} is for {protocol(name).collective}, and a step all-reduces")
    launches = () if args.launch is None else tuple(dict.fromkeys(_items("--launch", args.launch)))
    for launch in launches:
        if launch not in LAUNCHES:
            raise ArgumentError(f"--launch {launch!r} is not known; use {', '.join(LAUNCHES)}")
    return Request(
        models=models,
        batches=() if args.batch is None else _numbers("--batch", args.batch, MOST_BATCH),
        context=_number("--context", args.context, MOST_CONTEXT),
        layers=layers,
        dtype=dtype,
        protocols=names,
        launches=launches,
        calls=_number("--calls", args.calls, MOST_CALLS),
        shapes=args.shapes or "",
        seed=_number("--seed", args.seed, 2**31 - 1, 0),
        backend=args.backend or "auto",
    )


@dataclass(frozen=True)
class Way:
    """One way to all-reduce within a step of one batch."""

    model: str
    batch: int
    protocol: str
    launch: str
    tuned: bool = False
    """With the launch shape that the search finds; a baseline's alone."""

    @property
    def reduces(self) -> bool:
        return self.protocol != NONE


@dataclass
class Candidate:
    """A way with its number in the records, and what became of it."""

    way: Way
    number: int
    case: Case
    form: Protocol | None = None
    replay: Replay | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Columns of `records.CASES` that differ from what was planned."""

    @property
    def alive(self) -> bool:
        return self.replay is not None and "status" not in self.facts


class Decode:
    """One launch of the command. All ranks have one; rank 0's has the recorder."""

    def __init__(self, world: MPI.Intracomm, request: Request, stack: ExitStack) -> None:
        self.world, self.request, self.stack = world, request, stack
        self.recorder: records.Recorder | None = None
        self.request = request.resolved(resolve_backend(request.backend, world))
        for name in self.request.models:
            shapes.model(name).check(world.size)
        self.cuda = self.request.backend == "cuda"
        self.no_launch: dict[str, str] = {}
        self.comms = self._communicators()
        self.first = self.comms.first
        self.facts = {**provenance.collect(self.first), "chosen_by": self.first.model_words}
        if self.cuda:
            from experiments.decode import gpu

            self.facts["decode_source_hash"] = gpu.source_hash()

    # ---- setting up ----

    def _communicators(self) -> Communicators:
        r = self.request
        most = max(shapes.model(name).message_bytes(max(r.batches)) for name in r.models)
        options: dict[str, Any] = {"timeout_s": HANG_S} if self.cuda and "FCOMM_TIMEOUT_S" not in os.environ else {}

        def make(launch: str, variant: str) -> Communicator:
            return self.stack.enter_context(
                Communicator(
                    self.world, backend=r.backend, max_bytes=most, dependent_launch=launch,
                    model=None if self.cuda else "seed", variant=variant, **options,
                )
            )  # fmt: skip

        comms = Communicators(make)
        for launch in r.launches:
            comm = comms.launch(launch)
            if comm.dependent_launch != launch:
                self.no_launch[launch] = str(comm.no_dependent_launch)
                comms.drop(launch)
        if not comms.launches:  # what is there on every GPU
            comms.launch("none")
        return comms

    def models(self) -> list[Model]:
        """The models as they are run: with the layers that were asked for, or as many as there is room for."""
        r, n = self.request, self.world.size
        found = []
        for name in r.models:
            model = shapes.model(name)
            if not self.cuda:
                found.append(model.sampled(r.layers or model.layers, n))
                continue
            from experiments.decode import gpu

            room = gpu.room(self.first)
            layers = r.layers or shapes.default_layers(model, n, r.batches, r.context, room)
            sampled = model.sampled(layers, n)
            shapes.check_room(sampled, n, r.batches, r.context, room)
            found.append(sampled)
        return found

    def plan(self, models: Sequence[Model]) -> list[Candidate]:
        """Every way of every batch, numbered; on record before the first step."""
        r = self.request
        ways = []
        refused: dict[Way, str] = {}
        for model in models:
            for batch in r.batches:
                here = partial(Way, model.name, batch)
                ways.append(here(NONE, self.comms.launches[0]))
                for launch in self.comms.launches:
                    comm = self.comms.launch(launch)
                    ways.append(here(AUTO, launch))
                    for name in r.protocols:
                        ways.append(here(name, launch))
                        why = protocol(name).refusal(r.dtype, comm.world_size, comm.capabilities)
                        if why is not None:
                            refused[ways[-1]] = why
                    if r.shapes == SEARCH and V2 in r.protocols:
                        ways.append(here(V2, launch, tuned=True))
        found = [Candidate(way, number, self._case(way, models)) for number, way in enumerate(ways)]
        for c in found:
            c.form = self._form(c)
            if c.way in refused:
                c.facts = {"status": "refused", "reason": refused[c.way]}
        return found

    def _case(self, way: Way, models: Sequence[Model]) -> Case:
        (model,) = (m for m in models if m.name == way.model)
        nbytes = model.message_bytes(way.batch)
        name = way.protocol if way.reduces else COPY
        if name == AUTO:
            name = self.comms.launch(way.launch).selector.choose("all_reduce", nbytes, self.request.dtype, AUTO).name
        case = Case("all_reduce", name, self.request.dtype, nbytes, self.world.size, MODE, dependent_launch=way.launch)
        form = case.form(self.first.gpu)
        # What peers pull is left where they pull it from, by the product that makes it.
        return replace(case, input=STAGING if form is not None and "staging" in form.regions else ARRAY)

    def _form(self, c: Candidate) -> Protocol | None:
        return c.case.form(self.first.gpu)

    def open_records(self, out: Path, models: Sequence[Model], planned: Sequence[Candidate]) -> None:
        """Begins the run; rank 0 alone writes."""
        asked = asdict(self.request)
        asked["steps"] = [
            {"model": m.name, "layers": m.layers, "of_layers": shapes.MODELS[m.name].layers, "vocabulary": m.vocabulary,
             "of_vocabulary": shapes.MODELS[m.name].vocabulary, "hidden": m.hidden, "note": m.note, "batch": batch,
             "cases": [c.number for c in planned if (c.way.model, c.way.batch) == (m.name, batch)],
             "tuned": [c.number for c in planned if (c.way.model, c.way.batch, c.way.tuned) == (m.name, batch, True)],
             "weight_bytes": m.weight_bytes(self.world.size),
             "cache_bytes": m.cache_bytes(self.world.size, batch, self.request.context)}
            for m in models for batch in self.request.batches
        ]  # fmt: skip

        def step() -> None:
            rows = len(planned) * self.request.calls * self.world.size
            self.recorder = records.Recorder.create(
                out, socket.gethostname(), self.facts["backend"], asked, (4 << 20) + rows * 2 * 19
            )
            self.recorder.begin(self.facts)
            self.recorder.plan([self._row(c) for c in planned])

        on_root(self.world, step)

    def _row(self, c: Candidate) -> dict[str, Any]:
        devices, n = self.facts["devices"], self.world.size
        gpus = len({str(d.get("uuid", d)) for d in devices})
        where = f"{self.facts['cores']} cores" if not self.cuda else f"{min(n, gpus)} GPU{'s' if gpus > 1 else ''}"
        gpu = self.first.gpu
        form = {} if c.way.reduces else {"form": NONE, "algorithm": NONE, "input": ARRAY}
        return {
            **c.case.columns(gpu), "protocol": c.way.protocol, **form, "case": c.number, "blocks": 0, "threads": 0,
            "placement": f"{n} ranks on {where}", "sms_per_rank": None if gpu is None else gpu.sms,
            "warmup": measure.WARMUP, "planned": 0 if c.facts else self.request.calls, "checked_calls": 0, "wrong": 0,
            "status": "measured", "reason": "", "emulated": any(bool(d.get("emulation")) for d in devices),
            "time_sliced": any(bool(d.get("time_sliced")) for d in devices), **c.facts,
        }  # fmt: skip

    def compile_ahead(self, planned: Sequence[Candidate]) -> None:
        """Each rank compiles a part of the kernels; they are kept on disk, where the other ranks will find them."""
        specs: dict[str, tuple[Communicator, Specialisation]] = {}
        for c in planned:
            if c.form is not None and "status" not in c.facts:
                element = BYTES if c.form.algorithm.moves_bytes else REDUCIBLE[c.case.dtype]
                spec = Specialisation(
                    c.form, element, self.world.size, c.case.nbytes % 16 == 0, c.case.dependent_launch
                )
                specs[spec.name] = (self.comms.launch(c.way.launch), spec)
        jobs = list(specs.values())[self.world.rank :: self.world.size]
        with self._progress(len(jobs), "kernel") as advance:
            for comm, spec in jobs:
                with contextlib.suppress(FcommError):  # what cannot be compiled is named where it is made ready
                    cast(Any, comm.backend).kernel(spec)
                advance(1, "compiling")
        measure.rest(self.world)

    @contextmanager
    def _progress(self, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
        if self.world.rank:
            yield lambda count, what: None
            return
        from tqdm import tqdm

        pause = 0.2 if sys.stderr.isatty() else 10.0
        with tqdm(
            total=total, unit=unit, mininterval=pause, maxinterval=pause, file=sys.stderr, dynamic_ncols=True
        ) as bar:

            def advance(count: int, what: str) -> None:
                bar.set_description_str(what, refresh=False)
                bar.update(count)

            yield advance

    # ---- steps ----

    def run(self, models: Sequence[Model], planned: Sequence[Candidate]) -> None:
        """Checks and times all of it, batch by batch."""
        mpi = self.first.mpi
        with self._progress(sum(self.request.calls for c in planned if not c.facts), "step") as advance:
            for model in models:
                runner = measure.together(mpi, partial(self._build, model))
                for batch in self.request.batches:
                    of_it = [c for c in planned if (c.way.model, c.way.batch) == (model.name, batch)]
                    where = f"{model.name}, batch {batch}"
                    self._make_ready(runner, [c for c in of_it if not c.facts and not c.way.tuned])
                    self._check(runner, batch, [c for c in of_it if c.alive])
                    self._tune(runner, batch, of_it)
                    self._time([c for c in of_it if c.alive], advance, where)
                    for c in of_it:
                        c.replay = None
                    self._amend(of_it)
                runner.close()

    def _build(self, model: Model) -> Runner:
        r = self.request
        if self.cuda:
            from experiments.decode.gpu import GpuModel

            return GpuModel(self.first, model, max(r.batches), r.context, r.dtype)
        from experiments.decode.emulated import EmulatedModel

        return EmulatedModel(self.first, model, max(r.batches), r.context, r.dtype)

    def _buffers(self, runner: Runner, c: Candidate) -> tuple[Any, Any]:
        """What the way's all-reduces read, and where they leave their results."""
        x, out = runner.buffers(c.way.batch)
        if not c.way.reduces:
            return x, x
        if c.case.input == STAGING:
            x = self.comms.of(c.case).staging_view(c.case.count, c.case.dtype)
            if c.form is not None and c.form.algorithm.in_place_staging:
                out = x
        return x, out

    def _make_ready(self, runner: Runner, wanted: Sequence[Candidate]) -> None:
        """Binds each way to the step; one that cannot be is left out, with the reason."""
        for c in wanted:
            comm = self.comms.of(c.case)

            def bind(c: Candidate = c, comm: Communicator = comm) -> None:
                x, out = self._buffers(runner, c)
                call = self._call(comm, c, x, out) if c.way.reduces else None
                if call is not None:
                    c.facts |= {"blocks": call.blocks, "threads": call.threads}
                c.replay = runner.ready(c.way.batch, x, out, call)
                c.facts |= c.replay.facts

            self._attempt(c, bind)

    def _call(self, comm: Communicator, c: Candidate, x: Any, out: Any) -> Call:
        """The prepared call. Where ranks share a GPU its grid leaves room for the products of those that are behind: a wait that
        filled every SM would wait for ever.
        """
        make = partial(comm.prepare, "all_reduce", x, out, protocol=c.case.registered_name)
        if self.cuda:
            from fcomm.measure_cuda import stream_of

            make = partial(make, stream=stream_of(self.first))
        call = make(shape=c.case.shape)
        gpu = comm.gpu
        if c.case.shape is None and gpu is not None and gpu.sms < gpu.sms_total and call.blocks > gpu.sms:
            call = make(shape=(gpu.sms, call.threads))
        return call

    def _attempt(self, c: Candidate, step: Callable[[], Any]) -> Any:
        """A step that all ranks take; where one fails, all leave the candidate out and go on with the next."""
        try:
            return measure.together(self.first.mpi, step)
        except DeviceError:
            raise
        except (ArgumentError, NotAdmittedError) as error:
            c.facts |= {"status": "refused", "reason": str(error)}
        except FcommError as error:
            c.facts |= {"status": "failed", "reason": str(error)}
        c.replay = None
        for comm in self.comms.every():
            measure.recover(comm)
        return None

    # ---- checking ----

    def _reference(self, runner: Runner, batch: int, rule: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """A step whose sums are taken on the host, by the reduction contract. rule : of a protocol that sends one zero for another."""
        x, out = runner.buffers(batch)
        comm, mpi = self.first, self.first.mpi

        def reduce() -> None:
            own = comm.to_host(x)
            every = np.empty((mpi.size, own.nbytes), np.uint8)
            mpi.Allgather(own.view(np.uint8), every)
            rows = [checks.as_sent(rule, row.view(own.dtype)) for row in every]
            backend, total = comm.backend, comm.from_host(checks.reduce_reference(rows))
            backend.copy(backend.view(total), backend.view(out), backend.stream(out, None))
            backend.synchronize()

        runner.eager(batch, x, out, reduce)
        return runner.result(batch)

    def _check(self, runner: Runner, batch: int, of_it: Sequence[Candidate]) -> None:
        """Compares what each way leaves - residual stream and logits, to the bit - with the step that is summed on the host.

        A baseline that sends one zero for another is compared with a reference that does so too; whether its outputs, or at
        least its tokens, are those of all others is told apart.
        """
        mpi = self.first.mpi
        for seed in range(self.request.seed, self.request.seed + TOKENS):
            want: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
            for rule in dict.fromkeys(["", *(_rule(c) for c in of_it if c.way.reduces)]):
                runner.put_token(batch, seed)
                want[rule] = self._reference(runner, batch, rule)
            for c in of_it:
                if not c.alive or not c.way.reduces:
                    continue

                def once(c: Candidate = c, seed: int = seed) -> tuple[NDArray[Any], NDArray[Any]]:
                    assert c.replay is not None
                    runner.put_token(batch, seed)
                    c.replay.run()
                    self.comms.of(c.case).check()
                    return runner.result(batch)

                got = self._attempt(c, once)
                if got is None:
                    continue
                own_rule, common = (_differing(got, want[rule]) for rule in (_rule(c), ""))
                others = _tokens(mpi, got[1]) != _tokens(mpi, want[""][1])
                wrong, unlike, words = (
                    np.array(mpi.allgather((own_rule, common, int(others.sum())))).sum(axis=0).tolist()
                )
                c.facts["checked_calls"] = c.facts.get("checked_calls", 0) + 1
                c.facts["wrong"] = c.facts.get("wrong", 0) + wrong
                if c.facts["wrong"]:
                    c.facts |= {
                        "status": "wrong",
                        "reason": f"{wrong} outputs of a step differ from the sums taken on the host",
                    }
                elif unlike and "reason" not in c.facts:
                    tokens = "its tokens are the same" if not words else f"{words // mpi.size} of its tokens differ"
                    c.facts["reason"] = f"{unlike} outputs have other bits, as its zeros do, and {tokens}"

    # ---- launch shapes ----

    def _tune(self, runner: Runner, batch: int, of_it: Sequence[Candidate]) -> None:
        """Finds custom AR v2's best launch shape within the step itself, as the sweep does for a collective alone."""
        for tuned in (c for c in of_it if c.way.tuned and not c.facts):
            (default,) = (c for c in of_it if c.way == replace(tuned.way, tuned=False))
            if not default.alive:
                tuned.facts = {"status": "refused", "reason": "its default launch shape was not measured"}
                continue
            grid = (default.facts["blocks"], default.facts["threads"])
            tried = [default]
            for case in self._trials(default.case, grid):
                one = Candidate(default.way, -1, case, default.form)
                self._make_ready(runner, [one])
                if one.alive:
                    tried.append(one)
            self._check(runner, batch, tried[1:])
            times_us = self._quick([c for c in tried if c.alive])
            alive = [c for c in tried if c.alive]
            best = default
            if any(c is default for c in alive):
                best = alive[int(np.argmin(times_us))]
            if best is default or times_us[alive.index(best)] > (1 - search.GAIN) * times_us[0]:
                tuned.facts = {
                    "status": "refused",
                    "reason": f"of {len(alive)} launch shapes its default one is the fastest",
                }
            else:
                shape = best.case.shape
                assert shape is not None
                tuned.case, tuned.replay = best.case, best.replay
                tuned.facts = {**best.facts, "shape": f"{shape[0]}x{shape[1]}"}

    def _trials(self, case: Case, grid: tuple[int, int]) -> list[Case]:
        gpu = self.first.gpu
        most = 1 << 30 if gpu is None or gpu.sms == gpu.sms_total else gpu.sms  # see `_call`
        return [c for c in search.trials(case, grid, gpu) if c.shape is not None and c.shape[0] <= most]

    def _quick(self, wanted: Sequence[Candidate]) -> list[float]:
        """Median of a few steps of each that does not fail meanwhile, in microseconds; the same on all ranks."""
        taken: dict[int, list[NDArray[np.int64]]] = {}
        for _ in range(search.ROUNDS):
            for k, c in enumerate(wanted):
                some = None if c.replay is None else self._sample(c, search.CALLS // search.ROUNDS)
                if some is not None:
                    taken.setdefault(k, []).append(some)
        mpi = self.first.mpi
        every = [measure.gather(mpi, np.concatenate(taken[k])) for k, c in enumerate(wanted) if c.alive]
        return mpi.bcast([float(np.median(t.max(axis=1))) / 1e3 for t in every if t is not None])

    def _sample(self, c: Candidate, timed: int) -> NDArray[np.int64] | None:
        """Nanoseconds of so many steps on this rank, behind a warm-up; None where the way failed. Collective."""
        replay = c.replay
        assert replay is not None
        taken = self._attempt(c, partial(replay.sample, measure.WARMUP + timed))
        return None if taken is None else taken[measure.WARMUP :]

    # ---- timing ----

    def _time(self, alive: Sequence[Candidate], advance: Callable[[int, str], None], where: str) -> None:
        """Rounds over all ways, each in a random order; the number of steps is fixed beforehand and alike on all ranks."""
        rng = np.random.default_rng([self.request.seed, *map(ord, where)])
        for timed in measure.visits(self.request.calls):
            for k in rng.permutation(len(alive)):
                c = alive[k]
                if not c.alive or not timed:
                    continue
                taken = self._sample(c, timed)
                if taken is None:
                    continue
                nanoseconds = measure.gather(self.first.mpi, taken)
                if nanoseconds is not None and self.recorder is not None:
                    self.recorder.append(c.number, nanoseconds)
                advance(timed, where)

    def _amend(self, of_it: Sequence[Candidate]) -> None:
        def step() -> None:
            assert self.recorder is not None
            self.recorder.amend({c.number: c.facts for c in of_it})

        on_root(self.world, step)

    # ---- the end ----

    def report(self) -> int:
        """Seals the run, prints the table and draws the figure, on rank 0; the exit code on all."""

        def step() -> int:
            assert self.recorder is not None
            self.recorder.finish()
            run = records.load(self.recorder.path)
            text = report.table(run)
            print(text)
            for launch, why in self.no_launch.items():
                print(f"# dependent launch {launch} was left out: {why}")
            self.recorder.save("decode.md", f"{text}\n".encode())
            kept = "records, decode.md"
            if len(run.latency) and not run.cases["time_sliced"].any():
                from experiments import plots

                self.recorder.save("decode.png", plots.png(report.figure(run)))
                kept += ", decode.png"
            print(f"{run.path}/ has the {kept}; taken on the {run.taken_on}", flush=True)
            return int(run.cases["status"].isin(["wrong", "failed"]).any())

        return on_root(self.world, step)

    def close(self) -> None:
        """Lets go of the records."""
        if self.recorder is not None:
            self.recorder.close()


def _rule(c: Candidate) -> str:
    """Which zeros the way's protocol sends: what its results are compared with."""
    return c.form.name if c.form is not None and c.form.name in checks.ZERO_NOT_SENT else ""


def _differing(got: tuple[NDArray[Any], NDArray[Any]], want: tuple[NDArray[Any], NDArray[Any]]) -> int:
    return sum(checks.wrong_elements(a, b) for a, b in zip(got, want, strict=True))


def _tokens(mpi: MPI.Intracomm, logits: NDArray[Any]) -> NDArray[np.int64]:
    """The word with the largest logit of each sequence, of all ranks' parts of the vocabulary. Collective."""
    values = logits.astype(np.float32)
    best = values.argmax(axis=1)
    every = mpi.allgather((np.take_along_axis(values, best[:, None], 1)[:, 0], best + mpi.rank * values.shape[1]))
    rank = np.argmax([value for value, _ in every], axis=0)
    return np.array([word for _, word in every])[rank, np.arange(len(rank))]


@contextmanager
def _shared_gpu(world: MPI.Intracomm, request: Request) -> Iterator[None]:
    """Where ranks outnumber the GPUs, a private MPS daemon lets them run at once. Before any rank uses CUDA."""
    wanted = settings.backend() if request.backend == "auto" else request.backend
    with mps.mps_for_ranks(world) if wanted != "cpu" else contextlib.nullcontext():
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    bootstrap.check_world(MPI.COMM_WORLD)
    world = MPI.COMM_WORLD.Dup()
    options = parser()
    if world.rank > 0:  # one rank tells what --help asks for
        options.print_help = lambda file=None: None  # type: ignore[method-assign]
    args = options.parse_args(argv)
    request = build_request(args, world.size)
    with _shared_gpu(world, request), ExitStack() as stack:
        decode = Decode(world, request, stack)
        try:
            models = decode.models()
            planned = decode.plan(models)
            decode.open_records(args.out or Path("results/decode"), models, planned)
            decode.compile_ahead(planned)
            decode.run(models, planned)
            code = decode.report()
        finally:
            decode.close()
        if decode.cuda:
            from fcomm import measure_cuda

            for comm in decode.comms.every():
                measure_cuda.close(comm)
    return code


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
