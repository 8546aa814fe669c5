"""`python -m fcomm info | explain`: what is here, what may run, and what a call would use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fcomm import __version__
from fcomm.cli import Parser
from fcomm.dtypes import reducible
from fcomm.errors import ArgumentError
from fcomm.protocols import protocols
from fcomm.sizes import format_size, parse_size


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
    explain = commands.add_parser("explain", help="what a call of a given size would use (needs no GPU and no MPI)")
    explain.add_argument("--collective", choices=_collectives(), default="all_reduce")
    explain.add_argument("--bytes", default="64K", help="message size, such as 64K (default)")
    explain.add_argument("--dtype", default="bfloat16")
    explain.add_argument("--ranks", type=int, default=8)
    return parser


def _info(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    from fcomm.communicator import Communicator
    from fcomm.source import source_hash

    max_bytes = parse_size(options.max_bytes)
    with Communicator(MPI.COMM_WORLD, backend=options.backend, max_bytes=max_bytes) as comm:
        facts = comm.mpi.gather(comm.backend.describe(), root=0)
        if comm.rank != 0 or facts is None:
            return 0
        library = MPI.Get_library_version().replace("\t", " ").splitlines()[0].strip().rstrip(",\0")
        print(f"flash-comm {__version__}, kernels {source_hash()[:12]}, {library}")
        print(f"ranks      {comm.world_size} on one machine, backend {comm.backend.name}")
        for rank, fact in enumerate(facts):
            details = ", ".join(f"{k} {v}" for k, v in fact.items() if k not in ("backend", "device"))
            if rank == 0 or fact != facts[0]:
                name = "all ranks" if all(f == facts[0] for f in facts) else f"rank {rank}"
                print(f"device     {name}: {fact.get('device')} ({details})")
        print(f"slab       {format_size(comm.slab_bytes)} a rank for messages of {format_size(max_bytes)}")
        for region in comm.layout.regions().values():
            print(f"           {region.name}: one piece up to {format_size(region.capacity)}, {region.copies} copies")
        print(f"link       {', '.join(sorted(comm.capabilities))}")
        print("protocols")
        for p in protocols().values():
            reasons = {t.name: p.refusal(t.name, comm.world_size, comm.capabilities) for t in p.dtypes}
            admitted = [name for name, reason in reasons.items() if reason is None]
            said = f"admitted for {', '.join(admitted)}" if admitted else next(iter(reasons.values()))
            print(f"  {p.name:24} {p.collective:14} {'baseline, ' if p.baseline else ''}{said}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from fcomm import selector

    if options.ranks < 2:
        raise ArgumentError(f"--ranks {options.ranks}: an exchange needs at least two ranks")
    nbytes, dtype = parse_size(options.bytes), reducible(options.dtype).name
    everything = frozenset[str]().union(*(p.needs for p in protocols().values()))
    choice = selector.choose(options.collective, nbytes, dtype, options.ranks, everything)
    print(f"{options.collective} of {format_size(nbytes)} of {dtype} among {options.ranks} ranks: {choice.name}")
    for name, reason in selector.candidates(options.collective, dtype, options.ranks, everything).items():
        p = protocols()[name]
        wire = f"{p.algorithm.rounds} round(s), {p.wire_bytes(nbytes, options.ranks)} bytes sent by each rank"
        print(f"  {name:24} {'not admitted: ' + reason if reason else wire}{' (baseline)' if p.baseline else ''}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    return {"info": _info, "explain": _explain}[options.command](options)


if __name__ == "__main__":
    from fcomm import bootstrap

    raise SystemExit(bootstrap.run(main))
