"""What a sweep is asked to cover: the command line, its bad input, and the dry run. Needs no MPI."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import peers
from fcomm import links, measure, settings
from fcomm.cli import Parser
from fcomm.dtypes import reducible
from fcomm.errors import ArgumentError, RecordError
from fcomm.measure import ARRAY, COPY, IN_GRAPHS, SANDWICH_DEPENDENT, SANDWICHES, SKEW, STAGING, Case
from fcomm.protocols import PLACEMENTS, GpuShare, protocol, protocols
from fcomm.sizes import format_size, parse_size
from fcomm.source import LAUNCHES
from fcomm.variants import ABLATIONS, SHIPPED

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
GPU_LAUNCHES = ("none", "late")
"""Measured unless told; early is an opt-in, as it is for callers."""
INPUTS = (ARRAY, STAGING)
SHAPES = ("default", SEARCH := "search")
SEARCH_FROM_S = 120.0
"""Budgets from here on have room for a search of launch shapes, on GPUs."""
DELAYS_US = {"cuda": (0.0, 1.0, 2.0, 5.0, 10.0, 20.0), "cpu": (0.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)}
"""Delays of mode skew unless told: from below a call's own time to several times that."""
MOST_DELAY_US = 1e5
DEFAULT_SIZES = "1K..1M"
DEFAULT_BUDGET = "60s"
CPU_PROTOCOLS = (
    "one_shot.ll", "one_shot.lamport16", "two_shot.ll", "two_shot.lamport16", "barrier.one_shot", "custom_ar_v2.push"
)  # fmt: skip
"""What the cpu backend measures of all-reduce unless told: it builds each kernel anew on a new machine, and emulates."""
LARGEST = 64 << 20
MOST_RANKS = 1024
MOST_CALLS = 1_000_000
FINISH_S = {"cpu": 6.0, "cuda": 20.0}
"""Kept for records, tables and figures; importing pandas and matplotlib, and drawing, is most of it."""
CHECKING_SHARE = 0.45
"""Of what is left when it begins: checking may take that much before sizes are dropped for it."""
SEARCH_SHARE = 0.25
"""Likewise, beside that: the search of launch shapes, where there is one."""
TIMING_SHARE = 0.85
"""Of what is left before a turn: a machine that others use too is slower than it was when it was asked."""


# ---- what is asked for -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a sweep is to cover; kept in run.json, and all that a resumed run needs to know."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    protocols: tuple[str, ...]
    """Empty: all that are admitted, but for all-reduce on the cpu backend (see CPU_PROTOCOLS)."""
    modes: tuple[str, ...]
    calls: int
    """Timed calls of a case at most; the budget may allow fewer."""
    budget_s: float
    seed: int
    backend: str
    collectives: tuple[str, ...] = ("all_reduce",)
    launches: tuple[str, ...] = ()
    """Launch features, of `fcomm.source.LAUNCHES`."""
    peers: tuple[str, ...] = ()
    """Other libraries' all-reduces, of `peers.OPTIONS`, measured beside the protocols."""
    inputs: tuple[str, ...] = ()
    """Where pull protocols find their input. Empty: in the staging buffer for `graph`, else in an array."""
    share: float | None = None
    """Percent of the SMs that a rank may use, where ranks share a GPU through MPS."""
    shapes: str = ""
    """Launch shapes, of SHAPES. Empty: a search on GPUs where the budget has room for it."""
    delays_us: tuple[float, ...] = ()
    """Of mode skew: by how much one rank is held up."""
    late_rank: int | None = None
    """Of mode skew: which one; None: each in turn."""
    link: str = ""
    """The emulated link between the ranks (`fcomm.links.parse`). Empty: none."""
    placement: str = "device"
    """Where slots lie: device, or host."""
    variants: tuple[str, ...] = (SHIPPED,)
    """How kernels are compiled, of `fcomm.variants`."""

    def resolved(self, backend: str) -> Request:
        """With what was left open - modes, launch features, calls, shapes - as that backend has it by default."""
        known = measure.modes(backend)
        for mode in self.modes:
            if backend == "cpu" and mode in SANDWICHES:
                raise ArgumentError(
                    f"--modes {mode} is for GPUs: the cpu backend runs one grid after the other, so a call between two kernels "
                    "takes what it takes alone (--modes prepared)"
                )
            if mode not in known:
                raise ArgumentError(f"--modes {mode} is not for the {backend} backend; use {', '.join(known)}")
        if backend == "cpu" and (dependent := [name for name in self.launches if name != "none"]):
            raise ArgumentError(f"--launch {dependent[0]} is for GPUs: the cpu backend runs one grid after the other")
        launches = self.launches or (("none",) if backend == "cpu" else GPU_LAUNCHES)
        if self.modes == (SANDWICH_DEPENDENT,) and launches == ("none",):
            raise ArgumentError(f"--modes {SANDWICH_DEPENDENT} is about dependent launch: use --launch late or early")
        most = measure.MOST if backend == "cpu" else measure.MOST_REPLAYS
        return replace(
            self,
            backend=backend,
            modes=self.modes or (next(iter(known)),),
            launches=launches,
            delays_us=self.delays_us or (DELAYS_US[backend] if SKEW in self.modes else ()),
            calls=self.calls or most,
            shapes=self.shapes or SHAPES[backend == "cuda" and self.budget_s >= SEARCH_FROM_S],
            protocols=self.protocols
            or (CPU_PROTOCOLS if backend == "cpu" and self.collectives == ("all_reduce",) else ()),
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Request:
        """The request that run.json has; `RecordError` where it is another version's."""
        try:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
            return cls(**values)
        except TypeError:
            raise RecordError("the run's request is not one that this version of the sweep understands") from None


def parser() -> argparse.ArgumentParser:
    """The options of the sweep. What is wrong with them is an `ArgumentError`."""
    p = Parser(
        prog="mpirun -n N python -m experiments.sweep",
        description="Measure collectives over message sizes, rank counts, protocols and launch features.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "--sizes", metavar="LIST", help=f"bytes of a message: 1K,4K,64K or 1K..1M, doubling ({DEFAULT_SIZES})"
    )
    p.add_argument(
        "--ranks",
        metavar="LIST",
        help="rank counts: 2,4,8 or 2..8 (powers of two, and all that were started)",
    )
    p.add_argument("--dtypes", metavar="LIST", help="element types: float32, float16, bfloat16, int32 (float32)")
    p.add_argument(
        "--protocols",
        metavar="LIST",
        help="names as in `python -m fcomm info`, or all (all; on the cpu backend the few that a minute is enough for)",
    )
    p.add_argument(
        "--modes",
        metavar="LIST",
        help="; ".join(f"{name}: {meaning}" for name, meaning in measure.mode_names().items())
        + " (graph on GPUs, host on the cpu backend)",
    )
    p.add_argument("--collective", metavar="LIST", help=f"{', '.join(COLLECTIVES)} (all_reduce)")
    p.add_argument(
        "--launch",
        metavar="LIST",
        help="launch features: none; late, early: dependent launch, each thread's trigger at its end or at its entry "
        "(none,late on GPUs, none elsewhere)",
    )
    p.add_argument(
        "--inputs",
        metavar="LIST",
        help="where pull protocols find their input: array, staging (staging for graph and sandwich, else array)",
    )
    p.add_argument(
        "--delays",
        metavar="LIST",
        help="mode skew: microseconds by which one rank is held up before a call "
        f"({','.join(f'{us:g}' for us in DELAYS_US['cuda'])}; on the cpu backend {','.join(f'{us:g}' for us in DELAYS_US['cpu'])})",
    )
    p.add_argument("--late-rank", type=int, metavar="RANK", help="mode skew: the rank that is held up (each in turn)")
    p.add_argument(
        "--share", type=float, metavar="PERCENT", help="limit of the SMs of each rank, where ranks share a GPU (none)"
    )
    p.add_argument(
        "--shapes",
        choices=SHAPES,
        help="launch shapes: default; search: others are tried at a few sizes, and those that gain are measured beside the "
        f"default (search on GPUs with a budget of {SEARCH_FROM_S:.0f}s or more, else default)",
    )
    p.add_argument(
        "--peers",
        metavar="LIST",
        help=f"all-reduces of other libraries beside ours: {', '.join(peers.OPTIONS)} (none); what cannot run says why",
    )
    p.add_argument(
        "--link",
        metavar="LINK",
        help="emulate a slower link between the ranks: latency_us=0.7,gbps=450, or one of "
        f"{', '.join(links.PRESETS)}; behind it form=forwarded[,jitter_us=2,seed=1] for the form that "
        "forwards (docs/links.md) (none)",
    )
    p.add_argument(
        "--placement",
        choices=PLACEMENTS,
        help="where slots lie: device memory, or pinned host memory, which is for ll and flag only (device)",
    )
    p.add_argument(
        "--variants",
        metavar="LIST",
        help="; ".join(f"{v.name}: {v.meaning}" for v in ABLATIONS.values())
        + "; of the protocols that have them (shipped)",
    )
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), help="auto: cuda where there is a GPU (auto)")
    p.add_argument(
        "--calls",
        type=int,
        metavar="INT",
        help=f"timed calls (graph: replays) of a case at most ({measure.MOST}, on GPUs {measure.MOST_REPLAYS}); the budget "
        f"allows each {measure.LEAST}, and more to those that are in doubt",
    )
    p.add_argument("--budget", metavar="TIME", help=f"for everything from start to figure: 60s, 10m ({DEFAULT_BUDGET})")
    p.add_argument("--seed", type=int, metavar="INT", help="of the data and of the order of candidates (0)")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder for runs (results)")
    p.add_argument(
        "--into",
        type=Path,
        metavar="RUN",
        help="folder of the run itself: a new one, or a complete run whose cases are measured again, as another launch",
    )
    p.add_argument("--resume", type=Path, metavar="RUN", help="finish an interrupted run, as it was asked for")
    p.add_argument("--dry-run", action="store_true", help="list the cases and the expected time; run nothing")
    return p


def parse_time(text: str) -> float:
    """Seconds of `90`, `60s`, `10m`, `1h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds > 0:
        raise ArgumentError(f"--budget {text!r} is not a time: use 60s, 10m or 1h")
    return seconds


def parse_delays(text: str) -> tuple[float, ...]:
    """Microseconds, ascending and each once."""
    found: set[float] = set()
    for item in _items("--delays", text):
        try:
            us = float(item)
        except ValueError:
            us = math.nan
        if not 0 <= us <= MOST_DELAY_US:
            raise ArgumentError(f"--delays {item!r} is not a number of microseconds between 0 and {MOST_DELAY_US:.0f}")
        found.add(us)
    return tuple(sorted(found))


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ArgumentError(f"{option} {text!r} has an empty item")
    return items


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes, ascending and each once. `a..b` doubles from a while it does not pass b."""
    found: set[int] = set()
    for item in _items("--sizes", text):
        first, dots, last = item.partition("..")
        try:
            low = parse_size(first)
            high = parse_size(last) if dots else low
        except ArgumentError as error:
            raise ArgumentError(f"--sizes {text!r}: {error}") from None
        if high < low:
            raise ArgumentError(f"--sizes {item!r} runs backwards: write {last}..{first}")
        if high > LARGEST:
            raise ArgumentError(f"--sizes {item!r} is beyond {format_size(LARGEST)}, the largest message of the sweep")
        while low <= high:
            found.add(low)
            low *= 2
    return tuple(sorted(found))


def parse_ranks(text: str, started: int | None) -> tuple[int, ...]:
    """Rank counts, ascending and each once. started : ranks that there are; None does not look."""
    found: set[int] = set()
    for item in _items("--ranks", text):
        bounds = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", item)
        low, high = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (0, 0)
        if low < 1 or high < low or high > MOST_RANKS:
            raise ArgumentError(f"--ranks {item!r} is not a number of ranks: use a list such as 2,4,8 or 2..8")
        found.update(range(low, high + 1))
    if started is not None and max(found) > started:
        more = f"--ranks asks for {max(found)} ranks and {started} {'was' if started == 1 else 'were'} started"
        raise ArgumentError(f"{more}: use mpirun -n {max(found)}")
    return tuple(sorted(found))


def default_ranks(started: int) -> tuple[int, ...]:
    """2, 4, 8, ... as far as ranks were started, and all of them."""
    return tuple(sorted({started} | {2**k for k in range(1, 11) if 2**k <= started}))


def _known(option: str, names: list[str], known: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ArgumentError(f"{option} {name!r} is not known; use {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _list(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """What an option names, each once; nothing where it was not given."""
    return () if text is None else _known(option, _items(option, text), known)


def _given(value: str | None, default: str) -> str:
    return default if value is None else value  # an empty list is a mistake, not the default


def build_request(args: argparse.Namespace, started: int) -> Request:
    """The request of the command line; `ArgumentError` or `NotAdmittedError` for nonsense."""
    sizes = parse_sizes(_given(args.sizes, DEFAULT_SIZES))
    dtypes = tuple(dict.fromkeys(reducible(d).name for d in _items("--dtypes", _given(args.dtypes, "float32"))))
    for dtype in dtypes:
        itemsize = reducible(dtype).itemsize
        for nbytes in sizes:
            if nbytes % itemsize:
                raise ArgumentError(f"--sizes {nbytes} is no whole number of {dtype} elements of {itemsize} bytes")
    names = [] if args.protocols is None else _items("--protocols", args.protocols)
    collectives = _list("--collective", args.collective, COLLECTIVES) or ("all_reduce",)
    if names == ["all"]:
        names = [p.name for p in protocols().values() if p.collective in collectives]
    for name in names:
        if protocol(name).collective not in collectives:
            raise ArgumentError(
                f"--protocols {name!r} is for {protocol(name).collective}, and this sweep is of {', '.join(collectives)}"
            )
    # A dry run shows what would be done, also where nobody started the ranks for it.
    dry = bool(args.dry_run)
    if args.ranks is not None:
        ranks = parse_ranks(args.ranks, None if dry else started)
    else:
        ranks = default_ranks(8 if dry and started == 1 else started)
    calls = 0 if args.calls is None else args.calls
    if args.calls is not None and not 0 < calls <= MOST_CALLS:
        raise ArgumentError(f"--calls {calls} is not between 1 and {MOST_CALLS}")
    seed = 0 if args.seed is None else args.seed
    if seed < 0:
        raise ArgumentError(f"--seed {seed} is negative")
    if args.share is not None and not 0 < args.share <= 100:
        raise ArgumentError(f"--share {args.share:g} is not a percentage between 0 and 100")
    modes = _list("--modes", args.modes, list(measure.mode_names()))
    for option, value in (("--delays", args.delays), ("--late-rank", args.late_rank)):
        if value is not None and SKEW not in modes:
            raise ArgumentError(f"{option} is for --modes {SKEW}, which holds up one rank before a call")
    if args.late_rank is not None and not 0 <= args.late_rank < min(ranks):
        raise ArgumentError(f"--late-rank {args.late_rank} is no rank of {min(ranks)}, which this sweep measures too")
    return Request(
        sizes=sizes,
        ranks=ranks,
        dtypes=dtypes,
        protocols=tuple(dict.fromkeys(names)),
        modes=modes,
        calls=calls,
        budget_s=parse_time(_given(args.budget, DEFAULT_BUDGET)),
        seed=seed,
        backend=args.backend or "auto",
        collectives=collectives,
        peers=_list("--peers", args.peers, peers.OPTIONS),
        launches=_list("--launch", args.launch, LAUNCHES),
        inputs=_list("--inputs", args.inputs, INPUTS),
        share=args.share,
        shapes=args.shapes or "",
        delays_us=() if args.delays is None else parse_delays(args.delays),
        late_rank=args.late_rank,
        placement=args.placement or "device",
        link="" if args.link is None else str(links.parse(args.link)),
        variants=_variants(args.variants, names, collectives),
    )


def _variants(text: str | None, names: Sequence[str], collectives: Sequence[str]) -> tuple[str, ...]:
    """The variants that were asked for; each must be one of some protocol that was."""
    found = _list("--variants", text, list(ABLATIONS)) or (SHIPPED,)
    asked = [p for p in protocols().values() if p.collective in collectives and (not names or p.name in names)]
    for name in found:
        refusals = [ABLATIONS[name].refusal(p) for p in asked]
        if None not in refusals:
            raise ArgumentError(f"--variants {name!r}: none of these protocols has it: {refusals[0]}")
    return found


def candidates(
    request: Request,
    collective: str,
    dtype: str,
    nbytes: int,
    n: int,
    capabilities: frozenset[str],
    gpu: GpuShare | None = None,
    launches: Sequence[str] | None = None,
) -> dict[Case, str | None]:
    """The cases of one point, each with the reason if it may not run; protocols that nobody named are left out then.

    request : a resolved one. launches : the launch features that are there, if not all that are asked for.
    """
    if n == 1:
        alone = (mode for mode in request.modes if mode != SKEW and mode not in SANDWICHES)
        return {Case(collective, COPY, dtype, nbytes, n, mode): None for mode in alone}
    known = [p.name for p in protocols().values() if p.collective == collective]
    names = [name for name in request.protocols if name in known] if request.protocols else known
    found: dict[Case, str | None] = {}
    for name in names:
        for mode in request.modes:
            for launch in request.launches if launches is None else launches:
                if mode == SANDWICH_DEPENDENT and launch == "none":
                    continue  # neighbours have what the communicator has
                for variant in request.variants:
                    case = Case(collective, name, dtype, nbytes, n, mode, None, launch, variant=variant)
                    form = case.form(gpu)
                    if form is not None and case.kind.refusal(form) is not None:  # there is no such kernel
                        continue
                    reason = case.refusal(capabilities, gpu)
                    if reason is None or request.protocols:
                        where = [replace(case, input=i) for i in _inputs(request, case, gpu)]
                        found |= dict.fromkeys([one for c in where for one in _delayed(request, c)], reason)
    return found


def _inputs(request: Request, case: Case, gpu: GpuShare | None) -> tuple[str, ...]:
    form = case.form(gpu)
    if form is None or "staging" not in form.regions:
        return (ARRAY,)
    return request.inputs or ((STAGING,) if case.mode in IN_GRAPHS else (ARRAY,))


def _delayed(request: Request, case: Case) -> list[Case]:
    """The case with each delay, where its mode has them."""
    if case.mode != SKEW:
        return [case]
    return [replace(case, delay_us=us, late_rank=request.late_rank) for us in request.delays_us]


# ---- a dry run -------------------------------------------------------------------------------------------------------

# Seconds of one emulated call among n ranks: (a + b x nbytes) x n x n / cores in use, from a sweep on two cores.
EMULATED_CALL_S = 40e-6
EMULATED_BYTE_S = 3.5e-9
GPU_CALL_S = 10e-6
START_S = 8.0


def expected_call_s(backend: str, cores: int, n: int, nbytes: int) -> float:
    """A rough guess at one call, for a dry run alone: a sweep measures before it plans."""
    if backend == "cuda":
        return GPU_CALL_S + nbytes * n / 200e9
    return (EMULATED_CALL_S + EMULATED_BYTE_S * nbytes) * n * n / min(cores, n)


def dry_run(request: Request) -> str:
    """The cases and the expected time, as text."""
    backend = request.backend if request.backend != "auto" else settings.backend()
    if backend == "auto":
        from fcomm.backends import cuda

        backend = "cuda" if cuda.device_count() else "cpu"
    request = request.resolved(backend)
    known, cores = measure.modes(backend), len(os.sched_getaffinity(0))
    every_need = frozenset[str]().union(*(p.needs for p in protocols().values()))
    lines: list[str] = []
    calls: dict[Any, tuple[float, int]] = {}
    costs: dict[Any, tuple[float, int]] = {}
    for n in request.ranks:
        for collective in request.collectives:
            for dtype in request.dtypes:
                for nbytes in request.sizes:
                    found = candidates(request, collective, dtype, nbytes, n, every_need)
                    found |= peers.cases(request.peers, collective, dtype, nbytes, n, request.modes, request.launches)
                    cases = [case for case, reason in found.items() if reason is None]
                    if not cases:
                        continue
                    cost = expected_call_s(backend, cores, n, nbytes)
                    of_point = [known[c.mode].calls * cost + known[c.mode].overhead_s for c in cases]
                    calls[cases[0].point] = (cost * len(cases), len(cases))
                    costs[cases[0].point] = (sum(of_point), len(cases))
                    lines += [
                        f"{n:8d} {format_size(nbytes):>10s} {dtype:>11s}  {c.label:<26s}  {c.mode_label:<18s} "
                        f"{c.dependent_launch:<6s} {c.input:<8s} ~ {cost * 1e6:,.0f} us"
                        for c in cases
                    ]
    checking = sum(cost for cost, _ in calls.values()) * (measure.CHECKED_CALLS + 2)
    available_s = (request.budget_s - START_S - FINISH_S[backend] - checking) * TIMING_SHARE
    least, visit_s = min(measure.LEAST, request.calls), measure.VISIT_S[backend]
    turn_s = {
        point: cost * (least + measure.ROUNDS * measure.WARMUP) + count * measure.ROUNDS * visit_s
        for point, (cost, count) in costs.items()
    }
    fitting = measure.fitting(sorted(turn_s.items(), key=lambda item: item[1]), available_s)
    dropped = sum(count for point, (_, count) in costs.items() if point not in fitting)
    total = min(START_S + FINISH_S[backend] + checking + sum(turn_s[point] for point in fitting), request.budget_s)
    note = f"; {dropped} would not fit" if dropped else ""
    searched = ", and the launch shapes that a search finds" if request.shapes == SEARCH else ""
    end = (
        f"{len(lines)} cases on the {backend} backend{searched}; expected time about {total:.0f} s for {least} calls of each, "
        f"then the budget of {request.budget_s:.0f} s is spent where most is in doubt{note}"
    )
    return "\n".join(
        [
            "#  ranks       size        type  protocol                    mode               launch input    a call, roughly",
            *lines,
            end,
        ]
    )
