"""Links: how true the emulated ones are, who wins on which, and a real third medium predicted before it is measured.

``mpirun -n 2 python -m experiments.links accuracy`` asks emulated links for latencies and bandwidths and measures what a
ping-pong and a stream get. Each command keeps its samples, tables and provenance in a folder of its own; docs/links.md says what
follows from them and what does not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from experiments import link_maps, mps, plots
from experiments.link_records import (
    Candidate,
    Folder,
    close,
    interval,
    markdown,
    open_first,
    refuse_turns,
    say,
    taken_on,
)
from experiments.request import default_ranks, parse_ranks, parse_time
from experiments.sweep import in_turn, on_root
from experiments.tables import rows
from fcomm import Communicator, bootstrap, links, measure, provenance, settings
from fcomm.cli import Parser
from fcomm.communicator import resolve_backend
from fcomm.errors import ArgumentError
from fcomm.links import Link
from fcomm.measure_links import FORMS, Medium
from fcomm.sizes import format_size

if TYPE_CHECKING:
    import pandas as pd

ACCURACY = 0.05
"""Relative error of latency and bandwidth that the emulation may have."""
BESIDE_MEDIUM = 0.8
"""Of the medium's own bandwidth: an emulated link that is faster than this share of it cannot be told from the medium."""
MAX_BYTES = 4 << 20
LATENCIES_US = {
    "held": {"cuda": (0.35, 0.7, 1.0, 2.0), "cpu": (2000.0 / 4, 1000.0)},
    "forwarded": {"cuda": (1.0, 2.0, 3.0, 5.0), "cpu": (2000.0 / 4, 1000.0)},
}
GBPS = {
    "held": {"cuda": (50.0, 150.0, 300.0, 450.0, 900.0), "cpu": (0.005, 0.02)},
    "forwarded": {"cuda": (10.0, 25.0, 50.0, 100.0), "cpu": (0.002, 0.005)},
}
STREAM_LATENCY_US = {"held": {"cuda": 0.7, "cpu": 500.0}, "forwarded": {"cuda": 3.0, "cpu": 100.0}}
"""What `accuracy` asks for, by form and backend; an emulated GPU is so slow that only a slow link can be told from it."""


# ---- accuracy --------------------------------------------------------------------------------------------------------


def accuracy(world: MPI.Intracomm, backend: str, out: Path, samples: int, form: str = "held") -> int:
    """Asks for latencies and bandwidths and measures what is there. Collective; the exit code: 1 where one is off by over 5 %.

    form : one of `fcomm.links.FORMS`.
    """
    found: list[dict[str, Any]] = []

    def keep(what: str, link: Link | None, values: NDArray[np.float64]) -> float:
        asked = (
            {"latency_us": np.nan, "gbps": np.nan}
            if link is None
            else {"latency_us": link.latency_us, "gbps": link.gbps or np.nan}
        )
        found.extend(
            {"what": what, "emulated": link is not None, **asked, "sample": k, "value": v} for k, v in enumerate(values)
        )
        return medium.typical(values)

    with Communicator(world, backend=backend, max_bytes=MAX_BYTES, model="seed") as comm:
        refuse_turns(comm)
        facts = provenance.collect(comm)
        medium = Medium(comm)
        real = {form: keep(f"one_way_us.{form}", None, medium.one_way_us(form, samples)) for form in FORMS}
        real_gbps = keep("gbps", None, medium.gbps(samples))
    say(world, f"the medium itself: {real['cell']:.3f} us one way, {real_gbps:.0f} GB/s a rank")
    table: list[list[str]] = []
    errors: list[float] = []

    def row(
        link: Link, measured: str, asked: float, values: NDArray[np.float64], unit: str, not_judged: str = ""
    ) -> None:
        off = values / asked - 1
        middle = medium.typical(off)
        if not not_judged:
            errors.append(abs(middle))
        table.append(
            [
                str(link),
                measured,
                f"{asked:g}",
                f"{medium.typical(values):.4g}",
                f"{values.min():.4g} to {values.max():.4g}",
                unit,
                f"{100 * middle:+.1f} %{not_judged and f' ({not_judged})'}",
            ]
        )

    with Communicator(world, backend=backend, max_bytes=MAX_BYTES, model="seed", link=Link(0, form=form)) as comm:
        medium = Medium(comm)
        rates, own_us = [comm.ticks_per_us], comm.link_own_us
        ideal = keep("one_way_us.cell", Link(0, form=form), medium.one_way_us("cell", samples))
        stream_us = STREAM_LATENCY_US[form][backend]
        # What forwards has to take an entry before it can be late with it, and can be the slowest part of a stream.
        least_us, most_gbps = 0.0, real_gbps
        if form == "forwarded":
            comm.use_link(Link(stream_us, form=form))
            least_us, most_gbps = ideal - real["cell"], keep("gbps", comm.link, medium.gbps(samples))
            say(world, f"the forwarding itself: {least_us:.3f} us one way, {most_gbps:.3g} GB/s a rank")
        late: list[str] = []
        for latency_us in LATENCIES_US[form][backend]:
            link = Link(latency_us, form=form)
            comm.use_link(link)
            values = medium.one_way_us("cell", samples)
            keep("one_way_us.cell", link, values)
            behind = medium.one_way_us("flag", samples)
            keep("one_way_us.flag", link, behind)
            kept = keep("late_us", link, medium.late_us(samples))
            late.append(f"{kept:.3f} us at {latency_us:g} us")
            hidden = "" if latency_us >= least_us else "not judged: forwarding takes longer"
            row(link, "latency beside the medium's own", latency_us, values - real["cell"], "us", hidden)
            say(world, " ".join(table[-1]))
            row(link, "the same with a release, 3 latencies", 3 * latency_us, behind - real["flag"], "us", "not judged")
        for gbps in GBPS[form][backend]:
            link = Link(stream_us, gbps, form=form)
            comm.use_link(link)
            values = medium.gbps(samples)
            keep("gbps", link, values)
            slower = gbps <= BESIDE_MEDIUM * min(real_gbps, most_gbps)
            row(
                link,
                "bandwidth of a rank",
                gbps,
                values,
                "GB/s",
                "" if slower else "not judged: the medium, or what forwards, is no faster",
            )
            say(world, " ".join(table[-1]))
        measured = backend == "cuda" and form == "held"
        rates.append(bootstrap.collectively(world, comm.backend.ticks_per_us) if measured else rates[0])
    worst = max(errors, default=float("inf"))
    in_words = {
        "held": f"- SM clock: {rates[0]:.1f} ticks a microsecond before, {rates[1]:.1f} after ({100 * (rates[1] / rates[0] - 1):+.2f} %).",
        "forwarded": (
            f"- Forwarding without latency and limit takes {1e3 * least_us:.0f} ns one way and lets {most_gbps:.3g} GB/s of a rank through: shorter "
            "latencies cannot be emulated in this form, nor faster links, and neither is judged."
        ),
    }[form]

    def report() -> str:
        import pandas as pd

        folder = Folder(out, "accuracy" if form == "held" else f"accuracy-{form}", facts)
        folder.table("samples", pd.DataFrame(found))
        text = "\n".join([
            f"# Emulated links ({form}): asked for and measured\n\n{taken_on(facts)}. {'Medians' if backend == 'cuda' else 'Quickest'} of {samples} samples, with their range.\n",
            markdown(["link", "measured", "asked", "found", "range", "unit", "error"], table),
            "",
            (f"- The medium itself: {real['cell']:.3f} us one way ({real['flag']:.3f} us with a release and an acquire), {real_gbps:.0f} GB/s a rank "
            "while all send. A latency is what the link adds to the former; a bandwidth of more than "
                f"{100 * BESIDE_MEDIUM:.0f} % of the latter cannot be told from it, and is not judged."),
            (f"- What the emulation's own instructions add to a store's way, {1e3 * own_us:.0f} ns by a ping-pong when the communicator is made, is "
            f"taken off the latency. A link that is asked for nothing still takes {1e3 * (ideal - real['cell']):.0f} ns."),
            f"- A rank that comes late, when its peer's cell is there, has sent its own and looked at that one after {', '.join(late)} (nothing of it is a link's).",
            in_words,
            f"- Worst error: {100 * worst:.1f} %; {'within' if worst <= ACCURACY else 'NOT within'} {100 * ACCURACY:.0f} %.",
            "",
        ])  # fmt: skip
        folder.write("accuracy.md", text)
        return f"{text}\n{folder.path}/ has samples.parquet, accuracy.md and provenance.json"

    said = on_root(world, report)
    if world.rank == 0:
        print(said, flush=True)
    return 0 if worst <= ACCURACY else 1


# ---- host memory, predicted first ------------------------------------------------------------------------------------------

HOST_SIZES = {"cuda": tuple(1 << k for k in range(10, 21, 2)), "cpu": (1 << 10, 1 << 14)}
HOST_PROTOCOLS = ("one_shot.ll", "two_shot.ll", "one_shot.flag", "two_shot.flag")
HOST_CALLS = 10
"""In a graph: a bus is slow."""
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


MAP_FINISH_S = {"cuda": 8.0, "cpu": 8.0}
"""Of a map's budget: kept for tables and figures."""


@dataclass(frozen=True)
class MediumFacts:
    """What a ping-pong and a stream found of a medium."""

    one_way_us: dict[str, float]
    """By form of the ping-pong (`fcomm.measure_links.FORMS`)."""
    gbps: float
    """Of one rank, while all send."""


def predicted_us(
    device_us: float, form: str, rounds: int, wire_bytes: int, device: MediumFacts, other: MediumFacts
) -> float:
    """Time on another medium, from the time in device memory and from what the two media take by themselves.

    Everything but the medium stays as it was: launch, epoch, polls' instructions, reduction. Per dependent hop the one-way time is
    replaced, per byte that a rank sends the time at its rate. No coefficient is fitted. Never below the hops alone.
    """
    hop_us = other.one_way_us[form] - device.one_way_us[form]
    us = device_us + rounds * hop_us + wire_bytes / 1e3 * (1 / other.gbps - 1 / device.gbps)
    return max(us, rounds * other.one_way_us[form])


def host(world: MPI.Intracomm, backend: str, out: Path, samples: int, ranks: Sequence[int]) -> int:
    """Ping-pong in host memory, predictions into the folder, then the curves, then the errors. Collective; the exit code."""
    sizes, dtype = HOST_SIZES[backend], DTYPES[backend]
    facts: dict[str, Any] = {}
    media: dict[int, dict[str, MediumFacts]] = {}
    found: list[dict[str, Any]] = []

    def placed(n: int, placement: str) -> tuple[MediumFacts, list[dict[str, Any]]]:
        """The medium and, in device memory, the curves of n ranks."""
        comm = open_first(world, n, backend, max(sizes), placement)
        if placement == "device" and n == max(ranks):
            facts.update(provenance.collect(comm))
        medium = Medium(comm)
        seen = MediumFacts(
            {form: medium.typical(medium.one_way_us(form, samples)) for form in FORMS},
            medium.typical(medium.gbps(samples)),
        )
        lines = curves(comm) if placement == "device" else []
        close(comm)
        return seen, lines

    def curves(comm: Communicator) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for nbytes in sizes:
            for name in HOST_PROTOCOLS:
                candidate = Candidate(comm, name, nbytes, dtype, HOST_CALLS)
                middle, low, high = interval(candidate.sample(samples))
                lines.append({**candidate.columns, "latency_us": middle, "low_us": low, "high_us": high})
            say(comm.mpi, f"{comm.world_size} ranks, {comm.placement} memory, {format_size(nbytes)}")
        return lines

    def measured(n: int) -> list[dict[str, Any]]:
        comm = open_first(world, n, backend, max(sizes), "host")
        lines = curves(comm)
        close(comm)
        return lines

    # 1. The media, and the curves in device memory that the predictions begin with.
    for n in ranks:
        media[n] = {}
        for placement in ("host", "device"):
            told = in_turn(world, n, partial(placed, n, placement))
            if told is not None:
                media[n][placement], lines = told
                found += lines
    facts = world.bcast(facts, root=0)

    # 2. Predictions, on the disk before anything of it is measured.
    def predict() -> tuple[Folder, pd.DataFrame]:
        import pandas as pd

        frame = pd.DataFrame(found).rename(columns={"latency_us": "device_us"}).drop(columns=["low_us", "high_us"])
        frame["predicted_us"] = [
            predicted_us(
                row["device_us"], "flag" if row["encoding"] == "flag" else "cell", row["rounds"], row["wire_bytes"],
                media[row["ranks"]]["device"], media[row["ranks"]]["host"],
            )
            for row in rows(frame)
        ]  # fmt: skip
        folder = Folder(out, "host", facts)
        folder.table("predictions", frame)
        content = {str(n): {placement: asdict(seen) for placement, seen in of.items()} for n, of in media.items()}
        folder.write(
            "media.json",
            json.dumps({"predicted_utc": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **content}, indent=2) + "\n",
        )
        say(world, f"{len(frame)} predictions are in {folder.path}/predictions.parquet; now they are measured")
        return folder, frame

    kept = in_turn(world, 1, predict)

    # 3. The curves in host memory.
    taken: list[dict[str, Any]] = []
    for n in ranks:
        taken += in_turn(world, n, partial(measured, n)) or []

    # 4. The errors.
    def report() -> str:
        import pandas as pd

        assert kept is not None
        folder, frame = kept
        key = ["ranks", "nbytes", "protocol"]
        both = frame.merge(
            pd.DataFrame(taken)[[*key, "latency_us", "low_us", "high_us"]], on=key, validate="one_to_one"
        )
        both["error"] = both["predicted_us"] / both["latency_us"] - 1
        folder.table("host", both)
        text = host_report(facts, media, both)
        folder.write("host.md", text)
        return f"{text}\n{folder.path}/ has media.json, predictions.parquet, host.parquet, host.md and provenance.json"

    said = on_root(world, report)
    if world.rank == 0:
        print(said, flush=True)
    return 0


def host_report(facts: dict[str, Any], media: Mapping[int, Mapping[str, MediumFacts]], both: pd.DataFrame) -> str:
    """The table of errors. both : the columns of predictions.parquet, with latency_us and error."""
    size = both["error"].abs()
    lines = [
        f"# Slots in host memory: predicted, then measured\n\n{taken_on(facts)}.\n",
        markdown(
            ["ranks", "memory", "one way (us)", "with release and acquire (us)", "GB/s a rank"],
            [
                [str(n), placement, f"{seen.one_way_us['cell']:.3f}", f"{seen.one_way_us['flag']:.3f}", f"{seen.gbps:.1f}"]
                for n, of in media.items() for placement, seen in of.items()
            ],
        ),
        "\npredicted = the time in device memory + hops x difference of the one-way times + bytes x difference of the rates; nothing is fitted.\n",
        markdown(
            ["ranks", "size", "protocol", "device (us)", "predicted (us)", "measured (us)", "95 %", "error"],
            [
                [
                    str(r['ranks']), format_size(r['nbytes']), r['protocol'], f"{r['device_us']:.2f}", f"{r['predicted_us']:.2f}", f"{r['latency_us']:.2f}",
                    f"{r['low_us']:.2f} to {r['high_us']:.2f}", f"{100 * r['error']:+.1f} %",
                ]
                for r in rows(both)
            ],
        ),
        (f"\n{len(both)} points: median error {100 * size.median():.1f} %, 90th percentile {100 * size.quantile(0.9):.1f} %, worst "
        f"{100 * size.max():.1f} %; the fastest protocol is the predicted one in {_same_winner(both)} of {both.groupby(['ranks', 'nbytes']).ngroups} cells."),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _same_winner(both: pd.DataFrame) -> int:
    cells = [rows(of) for _, of in both.groupby(["ranks", "nbytes"])]
    best = [
        [min(of, key=lambda r: float(r[what]))["protocol"] for what in ("predicted_us", "latency_us")] for of in cells
    ]
    return sum(first == second for first, second in best)


# ---- maps --------------------------------------------------------------------------------------------------------------


def maps(world: MPI.Intracomm, backend: str, out: Path, samples: int, ranks: Sequence[int], end_s: float) -> int:
    """Measures the maps, keeps them with tables and figures. Collective; the exit code."""
    frame, facts = link_maps.measure_maps(world, backend, link_maps.GRIDS[backend], ranks, samples, end_s)

    def keep() -> str:
        if frame.empty:
            raise ArgumentError("there was no time for a single point: use a larger --budget")
        folder = Folder(out, "map", facts)
        folder.table("map", frame)
        text = link_maps.report(frame, facts)
        folder.write("map.md", text)
        drawn = link_maps.figures(frame, facts)
        for name, figure in drawn.items():
            folder.write(name, plots.png(figure))
        best = link_maps.winners(frame)
        summary = f"{len(frame)} times, {len(best)} cells, {int(best['sure'].sum())} of them sure, {int(best['masked'].sum())} masked"
        return f"{text}\n{summary}\n{folder.path}/ has map.parquet, map.md, {', '.join(drawn)} and provenance.json"

    said = on_root(world, keep)
    if world.rank == 0:
        print(said, flush=True)
    return 0


# ---- the command -----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The options of the command. What is wrong with them is an `ArgumentError`."""
    p = Parser(
        prog="mpirun -n N python -m experiments.links", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {
        "accuracy": "ask emulated links for latencies and bandwidths, measure what is there",
        "map": "which protocol is fastest on which emulated link, over latency, bandwidth and message size",
        "host": "slots in host memory: a ping-pong, predictions of all curves, then the curves and the errors",
    }
    for name, text in helps.items():
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        one.add_argument(
            "--backend", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is a GPU (auto)"
        )
        one.add_argument(
            "--out", type=Path, metavar="DIR", default=Path("results"), help="folder for the records (results)"
        )
        one.add_argument("--samples", type=int, metavar="INT", default=7, help="samples of each value, 6 to 1000 (7)")
        if name == "accuracy":
            one.add_argument(
                "--form", choices=links.FORMS, default=links.FORMS[0],
                help="of the emulation: the sender is held back, or blocks of their own forward (held)",
            )  # fmt: skip
        else:
            one.add_argument(
                "--ranks", metavar="LIST", help="rank counts: 2,4 (2, 4 and 8, as far as ranks were started)"
            )
        if name == "map":
            one.add_argument(
                "--budget", metavar="TIME", default="60s", help="for everything from start to figures: 60s, 2m (60s)"
            )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    started_s = time.monotonic() - measure.age_s()
    bootstrap.check_world(MPI.COMM_WORLD)
    world = MPI.COMM_WORLD.Dup()
    options = parser()
    if world.rank > 0:  # one rank tells what --help asks for
        options.print_help = lambda file=None: None  # type: ignore[method-assign]
    args = options.parse_args(argv)
    if not 6 <= args.samples <= 1000:
        raise ArgumentError(f"--samples {args.samples} is not between 6 and 1000")
    budget_s = parse_time(args.budget) if args.command == "map" else 0.0
    if world.size < 2:
        raise ArgumentError(f"a link lies between ranks: mpirun -n 2 python -m experiments.links {args.command}")
    on_cpu = "cpu" in (args.backend, settings.backend() if args.backend == "auto" else "")
    with nullcontext() if on_cpu else mps.mps_for_ranks(world):  # before any rank uses CUDA
        backend = resolve_backend(args.backend, world)
        if args.command == "accuracy":
            return accuracy(world, backend, args.out, args.samples, args.form)
        ranks = default_ranks(min(world.size, 8)) if args.ranks is None else parse_ranks(args.ranks, world.size)
        if min(ranks) < 2:
            raise ArgumentError(f"--ranks {args.ranks}: a link lies between ranks, so there are at least two")
        if args.command == "map":
            return maps(
                world,
                backend,
                args.out,
                args.samples,
                ranks,
                started_s + budget_s - MAP_FINISH_S[backend],
            )
        return host(world, backend, args.out, args.samples, ranks)


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main))
