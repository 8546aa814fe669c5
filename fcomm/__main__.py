"""`python -m fcomm info | explain | build | verify`: what is here, what may run, what a call would use, what kernels compile
to, and whether protocols hold under the simulator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fcomm import __version__
from fcomm.cli import Parser, launcher_rank, listed, reader_is_gone
from fcomm.dtypes import BYTES, movable, reducible
from fcomm.errors import ArgumentError, FcommError, ModelError, NotAdmittedError, SetupError
from fcomm.protocols import CELL_BYTES, PLACEMENTS, protocol, protocols
from fcomm.sizes import check_elements, format_size, parse_size
from fcomm.source import LAUNCHES
from fcomm.verify import command

if TYPE_CHECKING:
    from fcomm.machine_code import Cubin
    from fcomm.source import Specialisation

WITHOUT_MPI = ("explain", "build", "verify")
"""Commands that are of use where no MPI library is, and start none. Under a launcher its first process alone does them."""
QUIET_S = 3.0
"""Seconds after which a long command begins to say how far it is, and between two such lines."""


def _collectives() -> list[str]:
    return sorted({p.collective for p in protocols().values()})


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m fcomm", description="flash-comm: look at what is here.")
    parser.add_argument("--version", action="version", version=f"flash-comm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info",
        help="ranks, backend, devices, slab; which protocols are admitted, and why others are not",
        description="Start it under mpirun to see what a job of that many ranks would get.",
    )
    info.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto")
    info.add_argument("--max-bytes", default="1M", help="message size that the slabs are made for (default 1M)")
    info.add_argument("--placement", choices=PLACEMENTS, default="device", help="where slots lie (default device)")
    explain = commands.add_parser("explain", help="what a call of a given size would use (needs no GPU and no MPI)")
    explain.add_argument("--collective", choices=_collectives(), default="all_reduce")
    explain.add_argument("--bytes", default="64K", help="message size, such as 64K (default)")
    explain.add_argument(
        "--dtype", default="bfloat16", help="element type, such as bf16, fp16, fp32 (default bfloat16)"
    )
    explain.add_argument("--ranks", type=int, default=8, help="world size (default 8)")
    explain.add_argument("--launch", choices=LAUNCHES, default="none", help="launch feature (default none)")
    explain.add_argument(
        "--model", metavar="FILE", help="cost model (default FCOMM_MODEL, else the coefficients of the package)"
    )
    explain.add_argument("--max-bytes", default="1M", help="message size that the slabs are made for (default 1M)")
    explain.add_argument("--json", action="store_true", help="for programs: the same as JSON")
    build = commands.add_parser(
        "build",
        help="compile kernels for a GPU that need not be here; show registers, spills and grid (needs no MPI)",
        description="Compiles each kernel with NVRTC and prints what came out. Where this machine has a GPU of that "
        "architecture, the kernels are also put into CuPy's disk cache, from which the cuda backend loads them; without "
        "one CuPy cannot fill its cache, and each kernel is compiled at its first use (a third of a second).",
    )
    build.add_argument("--arch", default="sm_90", help="sm_80, sm_90 (default) or sm_100")
    build.add_argument("--ranks", default="2,4,8", help="world sizes (default 2,4,8)")
    build.add_argument("--protocol", default="all", help="names such as one_shot.ll,two_shot.flag (default all)")
    build.add_argument("--dtypes", default="all", help="element types such as float32,bf16,bytes (default all)")
    build.add_argument("--bytes", default="64K", help="message size that the grid is shown for (default 64K)")
    verify = commands.add_parser(
        "verify",
        help="protocols under a deterministic scheduler and a weak memory (needs no GPU and no MPI)",
        description="Runs the kernels' own text in a simulator that tries many schedules; a violation comes with a seed "
        "that repeats it. docs/verification.md says what the simulated machine may do.",
    )
    command.add_options(verify)
    return parser


def _verify(options: argparse.Namespace) -> int:
    names = [] if options.protocol == "all" else listed(options.protocol, "--protocol")
    return command.main(options, None if options.ranks is None else _numbers(options.ranks), names)


def _links(facts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The kind of link from each rank's device (rows) to each other one's, as lines; none for a backend that has no devices.

    facts : what the backend of each rank describes, in rank order.
    """
    if not all("links" in fact for fact in facts):
        return
    table = [["links", *(f"to {peer}" for peer in range(len(facts)))]]
    for rank, fact in enumerate(facts):
        kinds = ("-" if peer == rank else str(kind) for peer, kind in enumerate(fact["links"]))
        table.append([f"  from {rank}", *kinds])
    for first, *cells in table:
        yield f"{first:<10}" + "".join(f" {cell:>7}" for cell in cells)


def _info(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    from fcomm.communicator import Communicator
    from fcomm.source import source_hash

    max_bytes = parse_size(options.max_bytes)
    placement = options.placement
    with Communicator(MPI.COMM_WORLD, backend=options.backend, max_bytes=max_bytes, placement=placement) as comm:
        facts = comm.mpi.gather(comm.backend.describe(), root=0)
        if comm.rank != 0 or facts is None:
            return 0
        library = MPI.Get_library_version().replace("\t", " ").splitlines()[0].strip().rstrip(",\0")
        print(f"flash-comm {__version__}, kernels {source_hash()[:12]}, {library}")
        print(f"ranks      {comm.world_size} on one machine, backend {comm.backend.name}")
        for rank, fact in enumerate(facts):
            details = ", ".join(f"{k} {v}" for k, v in fact.items() if k not in ("backend", "device", "links"))
            if rank == 0 or fact != facts[0]:
                name = "all ranks" if all(f == facts[0] for f in facts) else f"rank {rank}"
                print(f"device     {name}: {fact.get('device')} ({details})")
        for line in _links(facts):
            print(line)
        where = ", in host memory" if comm.placement == "host" else ""
        print(f"slab       {format_size(comm.slab_bytes)} a rank for messages of {format_size(max_bytes)}{where}")
        for region in comm.layout.regions().values():
            print(f"           {region.name}: one piece up to {format_size(region.capacity)}, {region.copies} copies")
        print(f"link       {', '.join(sorted(comm.capabilities))}")
        print(f"model      {comm.model_words}")
        print("protocols")
        for p in protocols().values():
            reasons = {t.name: comm.refusal(p, t.name) for t in p.dtypes}
            admitted = [name for name, reason in reasons.items() if reason is None]
            said = f"admitted for {', '.join(admitted)}" if admitted else next(iter(reasons.values()))
            print(f"  {p.name:24} {p.collective:14} {'baseline, ' if p.baseline else ''}{said}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from fcomm import models, settings
    from fcomm.cost_model import protocols_hash
    from fcomm.explanation import explain
    from fcomm.layout import SlabLayout
    from fcomm.selector import Selector

    if options.ranks < 2:
        raise ArgumentError(f"--ranks {options.ranks}: an exchange needs at least two ranks")
    nbytes = parse_size(options.bytes)
    if options.collective == "all_gather":
        dtype, itemsize = movable(options.dtype)
    else:
        dtype, itemsize = (element := reducible(options.dtype)).name, element.itemsize
    parts = options.ranks if options.collective == "reduce_scatter" else 1
    check_elements(nbytes, f"--bytes {options.bytes}", dtype, itemsize, parts)
    everything = frozenset[str]().union(*(p.needs for p in protocols().values()))
    machine = {"backend": "cuda", "device": "a GPU for each rank"}  # what the seed coefficients are asked for
    origin = models.named(options.model, machine) or models.seed(machine)
    if not origin.model.seed:  # the one of another machine is welcome here: it is what one wants to look at
        machine = origin.model.machine
    why = models.mismatch(origin.model, machine)
    if origin.model.protocols != protocols_hash():
        raise ModelError(f"the {origin.words}, cannot be used: {why}")
    words = origin.words if why is None else f"{origin.words}; a communicator would refuse it: {why}"
    selector = Selector(
        SlabLayout(options.ranks, parse_size(options.max_bytes)),
        everything,
        origin.model,
        launch=options.launch,
        forced=settings.protocol(),
        plain=settings.plain(),
        gpu=origin.model.gpu(options.ranks),
    )
    found = explain(selector, options.collective, nbytes, dtype, model=words)
    print(json.dumps(found.to_json(), indent=2) if options.json else found)
    return 0 if found.choice is not None else 1


def _specialisations(options: argparse.Namespace) -> list[Specialisation]:
    from fcomm.source import Specialisation

    ranks = _numbers(options.ranks)
    every = options.protocol == "all"
    wanted = (
        list(protocols().values()) if every else [protocol(name) for name in listed(options.protocol, "--protocol")]
    )
    types = (
        None
        if options.dtypes == "all"
        else [BYTES if t == "bytes" else reducible(t) for t in listed(options.dtypes, "--dtypes")]
    )
    # A protocol that only moves bytes has one kernel for all types.
    found = [
        Specialisation(p, t, n)
        for p in wanted
        for n in ranks
        for t in p.dtypes
        if types is None or t in types or (t is BYTES and not every)
    ]
    if not found:
        raise ArgumentError(f"no kernel of {options.protocol} takes {options.dtypes}")
    return found


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(n) for n in listed(text, "--ranks")]
    except ValueError:
        raise ArgumentError(f"--ranks {text}: write numbers of ranks, such as 2,4,8") from None
    if min(numbers) < 2:
        raise ArgumentError(f"--ranks {text}: an exchange needs at least two ranks")
    return numbers


def _build(options: argparse.Namespace) -> int:
    from fcomm import machine_code
    from fcomm.backends.base import gpu_shape

    arch = machine_code.architecture(options.arch)
    nbytes = parse_size(options.bytes)
    specs = _specialisations(options)
    machine_code.nvrtc()
    device = _device_of(arch.name)
    width = max(len(s.name) for s in specs)
    shape = gpu_shape(-(-nbytes // CELL_BYTES), arch.sms)
    baseline = {s.name: s.protocol.baseline for s in specs}
    spilled = 0
    print(
        f"{'kernel':{width}}  registers  spill bytes  code bytes  blocks/SM  grid of {format_size(nbytes)} "
        f"on {arch.sms} SMs ({arch.product})"
    )
    started = said = time.monotonic()
    # The compiler runs outside Python's lock; the disk cache is filled by the same threads.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for k, cubin in enumerate(pool.map(lambda s: _compile(s, arch.name, device), specs), 1):
                resident = arch.resident_blocks(cubin.registers, cubin.threads)
                fitting = arch.sms * arch.resident_blocks(cubin.registers, shape.threads)
                # Baselines have the grids that their authors set.
                grid = "-" if baseline[cubin.name] else f"{min(shape.blocks, fitting)} x {shape.threads}"
                print(
                    f"{cubin.name:{width}}  {cubin.registers:9}  {cubin.spill_bytes:11}  {cubin.code_bytes:10}  "
                    f"{resident:9}  {grid}"
                )
                spilled += bool(cubin.faults())
                if time.monotonic() - said > QUIET_S and k < len(specs):
                    said = time.monotonic()
                    print(f"{k} of {len(specs)} kernels after {said - started:.0f} s", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(
        f"{len(specs)} kernels for {arch.name}; blocks/SM: resident blocks of the most threads that a kernel is "
        "compiled for; the grid is what one rank with a GPU of its own starts"
    )
    if device is None:
        print(f"no GPU of {arch.name} here: CuPy's disk cache was not filled")
    else:
        print("CuPy's disk cache has them: a communicator on this machine loads them without compiling")
    if spilled:
        print(f"{spilled} kernels spill, or take more registers than their threads have", file=sys.stderr)
    return 1 if spilled else 0


def _device_of(arch: str) -> int | None:
    """A GPU of this process of that architecture, if there is one."""
    with contextlib.suppress(Exception):  # no driver, no device, MPS in the way: the table needs none of them
        from cupy.cuda import Device, runtime

        for ordinal in range(runtime.getDeviceCount()):
            if arch == f"sm_{Device(ordinal).compute_capability}":
                return ordinal
    return None


def _compile(spec: Specialisation, arch: str, device: int | None) -> Cubin:
    from fcomm import machine_code

    cubin = machine_code.compile_specialisation(spec, arch)
    if device is not None:
        machine_code.fill_cache(spec, device)
    return cubin


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    return {"info": _info, "explain": _explain, "build": _build, "verify": _verify}[options.command](options)


def run(argv: Sequence[str] | None = None) -> int:
    """`main`, with errors as one sentence each: 2 for what the caller can put right, 1 for everything else."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] not in WITHOUT_MPI:
        from fcomm import bootstrap

        return bootstrap.run(main, arguments)
    if launcher_rank() > 0:
        return 0
    try:
        code = main(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough: python -m fcomm explain | head
        reader_is_gone()
        return 0
    except FcommError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ArgumentError, ModelError, NotAdmittedError, SetupError)) else 1
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    raise SystemExit(run())
