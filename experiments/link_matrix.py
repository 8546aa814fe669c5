"""The link between each two ranks: ``mpirun -n 8 python -m experiments.link_matrix --out DIR``.

For each pair, one after the other while the rest sleep: its kind, the one-way time of a cell of 16 bytes by ping-pong, and what each
of the two sends while both do (`fcomm.measure_links`). A pair that cannot be connected has its reason instead. Prints the
matrices; DIR gets them as links.md, and everything as links.json.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from mpi4py import MPI

from experiments import mps
from experiments.link_records import refuse_turns
from experiments.links import MAX_BYTES
from experiments.sweep import on_root
from experiments.tables import aligned
from fcomm import Communicator, bootstrap, measure, provenance, records, settings
from fcomm.cli import Parser, folder
from fcomm.communicator import resolve_backend
from fcomm.errors import ArgumentError, FcommError
from fcomm.measure_links import Medium

SCHEMA = 1


@dataclass(frozen=True)
class Pair:
    """What was found between two ranks. Times in microseconds, rates in 10^9 bytes a second; None where they are not connected."""

    ranks: tuple[int, int]
    kind: str = ""
    one_way_us: float | None = None
    gbps: float | None = None
    """That one rank sends, while both do."""
    reason: str = ""


def measured(comm: Communicator, ranks: tuple[int, int], samples: int) -> Pair:
    """Of the communicator of two ranks. Collective; `ranks` are their numbers among all."""
    refuse_turns(comm)
    medium = Medium(comm)
    kinds = comm.backend.describe().get("links")
    kind = kinds[1 - comm.rank] if kinds else "emulation"
    one_way_us = medium.typical(medium.one_way_us("cell", samples))
    return Pair(ranks, str(kind), one_way_us, medium.typical(medium.gbps(samples)))


def measure_pair(world: MPI.Intracomm, backend: str, pair: tuple[int, int], samples: int) -> Pair:
    """What is between two ranks of the world, known to all. Collective."""
    found: Pair | None = None
    mine = world.Split(0 if world.rank in pair else MPI.UNDEFINED, world.rank)
    if world.rank in pair:
        try:
            with Communicator(mine, backend=backend, max_bytes=MAX_BYTES, model="seed") as comm:
                found = measured(comm, pair, samples)
        except FcommError as error:
            found = Pair(pair, reason=str(error))
        finally:
            mine.Free()
    measure.rest(world)
    return world.bcast(found, root=pair[0])


def markdown(pairs: Sequence[Pair], ranks: int, where: str) -> str:
    """A matrix for each thing found; links.json has the digits."""
    lines = [f"# Links between {ranks} ranks", "", where, ""]
    by_ranks = {pair.ranks: pair for pair in pairs}

    def cell(a: int, b: int, what: str) -> str:
        pair = by_ranks.get((min(a, b), max(a, b)))
        if a == b or pair is None:
            return "-"
        value = getattr(pair, what)
        return (
            "none"
            if pair.reason
            else value
            if isinstance(value, str)
            else f"{value:.{2 if what == 'one_way_us' else 1}f}"
        )

    for what, title in (
        ("kind", "Kind"),
        ("one_way_us", "One way of a 16-byte cell (us)"),
        ("gbps", "Sent by one rank while both send (GB/s)"),
    ):
        table = [["rank", *map(str, range(ranks))]]
        table += [[str(a), *(cell(a, b, what) for b in range(ranks))] for a in range(ranks)]
        lines += [f"## {title}", "", *aligned(table), ""]
    lines += [f"- ranks {pair.ranks[0]} and {pair.ranks[1]}: {pair.reason}" for pair in pairs if pair.reason]
    return "\n".join(lines)


def parser() -> Parser:
    """The options of the command."""
    p = Parser(
        prog="mpirun -n N python -m experiments.link_matrix",
        description="Kind, one-way time and bandwidth of the link between each two ranks.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--backend", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is a GPU (auto)"
    )
    p.add_argument("--samples", type=int, default=7, metavar="INT", help="of each pair and quantity (7)")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for links.md and links.json")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 where some pair is not connected."""
    bootstrap.check_world(MPI.COMM_WORLD)
    world = MPI.COMM_WORLD.Dup()
    args = parser().parse_args(argv)
    if not 1 <= args.samples <= 1000:
        raise ArgumentError(f"--samples {args.samples} is not between 1 and 1000")
    if world.size < 2:
        raise ArgumentError("a link lies between ranks: mpirun -n 2 python -m experiments.link_matrix")
    on_root(world, lambda: folder(args.out, "--out"))
    on_cpu = "cpu" in (args.backend, settings.backend() if args.backend == "auto" else "")
    with nullcontext() if on_cpu else mps.mps_for_ranks(world):  # before any rank uses CUDA
        return _matrix(world, resolve_backend(args.backend, world), args.out, args.samples)


def _matrix(world: MPI.Intracomm, backend: str, out: Path, samples: int) -> int:
    with Communicator(world, backend=backend, max_bytes=4096, model="seed") as comm:
        facts = provenance.collect(comm)
    pairs = []
    every = list(itertools.combinations(range(world.size), 2))
    for k, two in enumerate(every, 1):
        pairs.append(measure_pair(world, backend, two, samples))
        if world.rank == 0:
            last = pairs[-1]
            said = last.reason or f"{last.kind}, {last.one_way_us:.2f} us one way, {last.gbps:.1f} GB/s"
            print(f"{k} of {len(every)}: ranks {two[0]} and {two[1]}: {said}", flush=True)

    def keep() -> None:
        devices = sorted({str(d.get("device", "?")) for d in facts["devices"]})
        several = backend == "cuda" and facts.get("ranks_per_device", 1) > 1
        sharing = f", {facts['ranks_per_device']} ranks sharing one" if several else ""
        emulation = " EMULATION: times between processes on CPU cores." if backend == "cpu" else ""
        where = f"Taken on {facts['hostname']}, {', '.join(devices)}{sharing}, {time.strftime('%Y-%m-%d', time.gmtime())}.{emulation}"
        text = markdown(pairs, world.size, where)
        print(f"\n{text}", flush=True)
        content = {"schema": SCHEMA, "samples": samples, "provenance": facts, "pairs": [asdict(pair) for pair in pairs]}
        records.write_whole(out / "links.md", f"{text}\n".encode())
        records.write_whole(out / "links.json", json.dumps(content, indent=1, default=str).encode())

    on_root(world, keep)
    return int(any(pair.reason for pair in pairs))


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
