"""What is counted and not timed, for each protocol, size and rank count: true on any machine.

``python -m experiments.counted [--sizes LIST] [--ranks LIST] [--arch sm_90]`` prints Markdown; ``--csv FILE`` writes all of
it. Rounds, bytes, stores, polls and re-arming come from the registry; registers and the width of evidence from the machine
code, where NVRTC and nvdisasm are installed (no GPU is needed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.frames import grouped
from experiments.request import COLLECTIVES, parse_ranks, parse_sizes
from experiments.tables import aligned, latency_csv, rows
from fcomm import bootstrap, records
from fcomm.cli import Parser, progress, target
from fcomm.dtypes import BFLOAT16
from fcomm.errors import ArgumentError, SetupError
from fcomm.protocols import CELL_BYTES, Protocol, protocols, shard_bytes
from fcomm.sizes import check_elements, format_size
from fcomm.source import Specialisation

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.machine_code import CodeSummary

COLUMNS = {
    "rounds": "dependent steps between ranks",
    "hops": "the same in one-way latencies of a link: a read is a request and its answer",
    "wire_bytes": "bytes that one rank sends or reads, evidence and padding included",
    "stores_per_byte": "system-scope stores to peers, by payload byte of the message",
    "polls_per_byte": "system-scope loads of slots if all is there at the first look, by payload byte of the message",
    "rearm_bytes": "bytes that one rank writes to make its slots usable again",
    "evidence_bytes": "width of each access that sees evidence, in machine code",
    "registers": "registers of a thread",
}
"""Columns of `counted` beside collective, protocol, ranks and nbytes, with their meaning."""


def counted(
    sizes: Sequence[int], ranks: Sequence[int], collective: str = "all_reduce", arch: str | None = "sm_90"
) -> pd.DataFrame:
    """One row for each protocol, rank count and size of a collective; what is not known by counting is NaN.

    sizes : bytes of one rank's message, of bfloat16. arch : of the machine code; None leaves registers and widths out, as does
    a machine without the compiler.
    """
    import pandas as pd

    known = [p for p in protocols().values() if p.collective == collective]
    code = _machine_code(known, ranks, arch)
    found = [
        {
            "collective": collective, "protocol": p.name, "ranks": n, "nbytes": nbytes, "form": form.name,
            **_count(form, nbytes, n),
            "evidence_bytes": code[form.name, n].evidence_bytes if (form.name, n) in code else math.nan,
            "registers": code[form.name, n].registers if (form.name, n) in code else math.nan,
        }
        for p in known
        for n in ranks
        for nbytes in sizes
        if p.refusal(BFLOAT16.name, n, p.needs, nbytes) is None
        for form in [p.at(nbytes, n)]
    ]  # fmt: skip
    return pd.DataFrame(found, columns=["collective", "protocol", "ranks", "nbytes", "form", *COLUMNS])


def _count(p: Protocol, nbytes: int, n: int) -> dict[str, float]:
    reads = _reads(p)
    stores, polls, rearm = _accesses(p, nbytes, n)
    return {
        "rounds": p.algorithm.rounds, "hops": p.algorithm.rounds + reads, "wire_bytes": p.wire_bytes(nbytes, n),
        "stores_per_byte": stores / nbytes, "polls_per_byte": polls / nbytes, "rearm_bytes": rearm,
    }  # fmt: skip


def _reads(p: Protocol) -> int:
    """Phases in which a rank reads its peers' memory, instead of having been sent what it needs."""
    if p.encodings or "staging" not in p.regions:
        return 0
    return 1 if p.algorithm.in_place_staging else len(p.algorithm.phases)  # v2's two-shot stores its sums to the peers


def _accesses(p: Protocol, nbytes: int, n: int) -> tuple[float, float, float]:
    """System-scope stores and loads of payload and its evidence, and re-armed bytes, of rank 0 in one call.

    Of baselines with barriers the accesses depend on the grid: NaN.
    """
    if not p.encodings:
        if _reads(p):
            return math.nan, math.nan, 0.0
        cells = -(-nbytes // CELL_BYTES)  # their own slot is pushed, polled and set back like a peer's
        return n * cells, n * cells, float(n * cells * CELL_BYTES)
    stores = polls = rearm = 0
    for k, phase in enumerate(p.algorithm.phases):
        e = p.encodings[min(k, len(p.encodings) - 1)]
        size = nbytes if phase == "whole" else shard_bytes(nbytes, n)
        lengths = [max(0, min(size, nbytes - r * size)) for r in range(n)]
        # To each peer, and from each peer: in a first phase of shards each peer's part, and n - 1 times my own.
        if phase == "whole":
            sent, got = [nbytes] * (n - 1), [nbytes] * (n - 1)
        elif k == 0:
            sent, got = lengths[1:], [lengths[0]] * (n - 1)
        else:
            sent, got = [lengths[0]] * (n - 1), lengths[1:]
        stores += sum(e.cells(b) + e.chunks(b) for b in sent)
        looks = 2 if e.group_cells > 1 else 1  # a line is looked at once more when its flag is there
        polls += sum(looks * e.cells(b) + e.chunks(b) for b in got)
        rearm += sum(e.rearm_bytes_per_cell * e.cells(b) for b in got)
    return stores, polls, rearm


def _machine_code(
    known: Sequence[Protocol], ranks: Sequence[int], arch: str | None
) -> dict[tuple[str, int], CodeSummary]:
    if arch is None:
        return {}
    from fcomm import machine_code

    try:
        machine_code.architecture(arch)
        machine_code.nvrtc()
        machine_code.nvdisasm()
    except SetupError:
        return {}
    specs = [
        Specialisation(p, BFLOAT16 if BFLOAT16 in p.dtypes else p.dtypes[0], n)
        for p in known
        for n in ranks
        if p.algorithm.forms is None
    ]
    found = {}
    with ThreadPoolExecutor(4) as pool:  # the compiler and the disassembler run outside Python's lock
        every = pool.map(lambda spec: machine_code.summary(spec, arch), specs)
        for spec, made in progress(zip(specs, every, strict=True), "compiling", len(specs)):
            found[spec.protocol.name, spec.world_size] = made
    return found


def markdown(frame: pd.DataFrame, arch: str | None) -> str:
    """A table for each rank count. frame : from `counted`."""
    lines: list[str] = []
    for (n, nbytes), of_it in grouped(frame, ["ranks", "nbytes"]):
        lines += [f"{n} ranks, {format_size(int(nbytes))} of bfloat16", ""]
        table = [
            [
                "protocol",
                "rounds",
                "hops",
                "wire bytes",
                "stores / B",
                "polls / B",
                "re-arm bytes",
                "evidence",
                "registers",
            ]
        ]
        for row in rows(of_it):
            name = (
                row["protocol"]
                if row["form"] == row["protocol"]
                else f"{row['protocol']} ({row['form'].split('.')[1]})"
            )
            table.append(
                [
                    f"`{name}`", f"{row['rounds']}", f"{row['hops']}", f"{row['wire_bytes']:,}", _short(row["stores_per_byte"]),
                    _short(row["polls_per_byte"]), f"{row['rearm_bytes']:,.0f}",
                    "-" if math.isnan(row["evidence_bytes"]) else f"{row['evidence_bytes']:.0f} B",
                    "-" if math.isnan(row["registers"]) else f"{row['registers']:.0f}",
                ]
            )  # fmt: skip
        lines += [*aligned(table), ""]
    lines += [f"- {name.replace('_', ' ')}: {meaning}" for name, meaning in COLUMNS.items()]
    lines.append("- a dash: depends on the grid (barriers count by the block), or needs the compiler (NVRTC, nvdisasm)")
    if arch is not None:
        lines.append(f"- machine code: {arch}, bfloat16 (gathers: any bytes), aligned arrays; nothing here was timed")
    return "\n".join(lines)


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = Parser(prog="python -m experiments.counted", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    p.add_argument("--sizes", default="2K,64K", metavar="LIST", help="bytes of a message (2K,64K)")
    p.add_argument("--ranks", default="2,8", metavar="LIST", help="rank counts (2,8)")
    p.add_argument("--collective", choices=COLLECTIVES, default="all_reduce", help="(all_reduce)")
    p.add_argument("--arch", default="sm_90", help="sm_80, sm_90 (default) or sm_100; none leaves machine code out")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write all rows there, too")
    args = p.parse_args(argv)
    ranks = parse_ranks(args.ranks, None)
    if min(ranks) < 2:
        raise ArgumentError(f"--ranks {args.ranks}: an exchange needs at least two ranks")
    if args.csv is not None:
        target(args.csv, "--csv")
    sizes, arch = parse_sizes(args.sizes), None if args.arch == "none" else args.arch
    for nbytes, n in product(sizes, ranks if args.collective == "reduce_scatter" else [1]):
        check_elements(nbytes, f"--sizes {format_size(nbytes)}", BFLOAT16.name, BFLOAT16.itemsize, n)
    frame = counted(sizes, ranks, args.collective, arch)
    if args.csv is not None:
        records.write_whole(args.csv, latency_csv(frame))
    print(markdown(frame, arch))
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
