"""`python -m fcomm verify`: protocols under the simulator, from the command line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fcomm import variants
from fcomm.backends import sim
from fcomm.cli import listed, target
from fcomm.errors import ArgumentError, NotAdmittedError
from fcomm.protocols import Protocol, protocol, protocols
from fcomm.variants import ABLATIONS, SHIPPED
from fcomm.verify import mutants, page
from fcomm.verify.cases import NORM, Kernels
from fcomm.verify.search import BATCH, Counterexample, Tally, exhaust, search, shrink
from fcomm.verify.words import headline, story

QUIET_S = 2.0
SCHEDULES = 500
MUTANT_SCHEDULES = 3000


MOST_RANKS = 16
"""Up to here worlds were tried; among 40 and more, the simulated machine itself goes wrong."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--protocol", default="all", help="names such as one_shot.ll,two_shot.flag (default all)")
    parser.add_argument(
        "--variant", default=SHIPPED, help=f"how they are compiled: {', '.join(ABLATIONS)} (default {SHIPPED})"
    )
    parser.add_argument("--ranks", help="world sizes (default 2,3,4)")
    parser.add_argument("--calls", type=int, help="calls of each rank in a schedule (default: 2 to 6, drawn)")
    parser.add_argument(
        "--schedules", type=int, default=SCHEDULES,
        help=f"schedules of each protocol, world size and link (default {SCHEDULES})",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, help="stop after that time")
    parser.add_argument("--link", default="nvlink", help=f"what a link tears: {', '.join(sim.LINKS)} (default nvlink)")
    parser.add_argument("--force", action="store_true", help="run protocols on links that they are not admitted for")
    parser.add_argument("--seed", type=int, default=0, help="first schedule (default 0); with --schedules 1, that one")
    parser.add_argument("--trace", action="store_true", help="show every event of a counterexample, not the last ones")
    parser.add_argument(
        "--rows", action="store_true", help="with an epilogue that needs whole rows: protocols that can have one"
    )
    parser.add_argument(
        "--exhaustive", type=int, metavar="DEPARTURES", nargs="?", const=3,
        help="2 ranks, 2 units, 4 calls: all schedules with so many departures (default 3) from the plain one",
    )  # fmt: skip
    parser.add_argument(
        "--sequential", action="store_true", help="sequentially consistent memory instead of the weak one"
    )
    parser.add_argument(
        "--mutants", metavar="FILE", nargs="?", const="",
        help="broken variants that must be caught: those of a file, or the shipped ones",
    )  # fmt: skip
    parser.add_argument("--mutant", default="", help="names of those to run (default all)")
    parser.add_argument("--page", metavar="FILE", help="run everything and write docs/verification.md")


class Progress:
    """A line on the terminal now and then."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, line: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self._said > QUIET_S:
            self._said = now
            print(line(), file=sys.stderr, flush=True)


RANKS = (2, 3, 4)


def main(options: argparse.Namespace, ranks: list[int] | None, names: list[str]) -> int:
    """Runs the command; returns the exit code: 1 if something was violated, or a mutant was not caught.

    ranks, names : world sizes and protocols that were asked for; None and none for all.
    """
    if options.schedules < 1:
        raise ArgumentError(f"--schedules {options.schedules}: at least one")
    if options.seconds is not None and not 0 < options.seconds < 1e9:
        raise ArgumentError(f"--seconds {options.seconds:g}: a time above zero")
    if ranks is not None and max(ranks) > MOST_RANKS:
        raise ArgumentError(f"--ranks {max(ranks)}: the simulator is for up to {MOST_RANKS} ranks")
    if options.exhaustive is not None:
        if options.exhaustive < 0:
            raise ArgumentError(f"--exhaustive {options.exhaustive}: not negative")
        fixed = {
            "--ranks": ranks not in (None, [2]),
            "--calls": options.calls not in (None, 4),
            "--sequential": options.sequential,
        }
        if other := [option for option, is_other in fixed.items() if is_other]:
            raise ArgumentError(
                f"--exhaustive is for 2 ranks, 4 calls and the weak memory: leave out {' and '.join(other)}"
            )
    if options.mutant and options.mutants is None:
        raise ArgumentError(f"--mutant {options.mutant} chooses among those of --mutants: give both")
    if options.calls is not None and options.calls < 1:
        raise ArgumentError(f"--calls {options.calls}: at least one")
    if options.seed < 0:
        raise ArgumentError(f"--seed {options.seed}: not negative")
    if options.rows and (options.exhaustive is not None or options.mutants is not None or options.page):
        raise ArgumentError("--rows is for searches: leave out --exhaustive, --mutants and --page")
    links = [sim.link(name) for name in listed(options.link, "--link")]
    end = None if options.seconds is None else time.monotonic() + options.seconds
    if options.variant not in ABLATIONS:
        raise ArgumentError(f"--variant {options.variant!r} is not known; use {', '.join(ABLATIONS)}")
    if options.variant != SHIPPED and (options.mutants is not None or options.page):
        raise ArgumentError("--variant is for protocols: mutants and the page are of the shipped kernels")
    if options.variant != SHIPPED and options.rows:
        raise ArgumentError("--variant and --rows: variants have no epilogues, leave out one of the two")
    if options.mutants is not None:
        return _mutants(options)
    if options.page:
        target(Path(options.page), "--page")
        return page.write(Path(options.page), options.schedules, options.seed, Progress())
    wanted = [protocol(name) for name in names] if names else every()
    if options.rows:
        for why in (NORM.refusal(p) for p in wanted if names):
            if why is not None:
                raise NotAdmittedError(f"--rows: {why}")
        wanted = [p for p in wanted if NORM.refusal(p) is None]
    for p in wanted if names else ():
        variants.check(options.variant, p)
    wanted = [p for p in wanted if ABLATIONS[options.variant].refusal(p) is None]
    covered: list[Tally] = []
    try:
        return _search(options, wanted, ranks or list(RANKS), links, end, covered, named=bool(names))
    except KeyboardInterrupt:
        schedules, steps = sum(t.schedules for t in covered), sum(t.steps for t in covered)
        print(
            f"interrupted; no violation in {schedules} schedules ({steps} steps) of {len(covered)} searches until then"
        )
        for t in covered:
            print(f"  {_covered(t)}")
        return 130


def every() -> list[Protocol]:
    """All protocols, forms instead of the name that stands for them."""
    return [p for p in protocols().values() if p.algorithm.forms is None]


def _covered(t: Tally) -> str:
    seeds = "" if t.cases == 1 and t.first_seed == 0 and t.schedules > BATCH else f", {t.seeds}"
    return f"{t.protocol.name}, {t.ranks} ranks, {t.link.name}: {t.schedules} schedules ({t.steps} steps{seeds})"


def _search(
    options: argparse.Namespace,
    wanted: list[Protocol],
    ranks: list[int],
    links: list[sim.Link],
    end: float | None,
    covered: list[Tally],
    named: bool,
) -> int:
    kernels, progress, failed = Kernels(variant=options.variant), Progress(), 0
    for proto in wanted:
        for link in links:
            for n in [2] if options.exhaustive is not None else ranks:
                reason = proto.refusal(None, n, link.capabilities)
                if reason is not None and not options.force:
                    if named:
                        raise NotAdmittedError(
                            f"{proto.name} is not admitted on {link.name}: {reason} (--force runs it)"
                        )
                    print(f"{proto.name}, {n} ranks, {link.name}: refused, {reason}")
                    continue
                tally = Tally(proto, n, link, options.seed, rows=options.rows)
                covered.append(tally)

                def tick(t: Tally) -> None:
                    progress(lambda: f"{_covered(t)} so far")

                if options.exhaustive is not None:
                    exhaust(tally, kernels, options.exhaustive, end, tick)
                else:
                    search(tally, kernels, options.schedules, end, options.calls, not options.sequential, tick)
                failed += _report(options, tally, kernels)
                if not tally.complete:
                    print(f"time was over after {sum(t.schedules for t in covered)} schedules")
                    return 1 if failed else 0
    return 1 if failed else 0


def _report(options: argparse.Namespace, t: Tally, kernels: Kernels) -> bool:
    head = f"{t.protocol.name}, {t.ranks} ranks, {t.link.name}"
    if t.found is None:
        if options.exhaustive is not None:
            whole = "all" if t.complete else "the first"
            print(f"{head}: no violation in {whole} {t.schedules} schedules ({t.steps} steps) with up to "
                  f"{options.exhaustive} departures", flush=True)  # fmt: skip
        else:
            print(f"{head}: no violation in {t.schedules} schedules ({t.steps} steps, {t.seeds})", flush=True)
        return False
    found = t.found
    print(f"{head}: {headline(found)}")
    if found.seed is not None:
        calls = f" --calls {options.calls}" if options.calls else ""
        rows = " --rows" if t.rows else ""
        force = " --force" if options.force else ""
        sequential = " --sequential" if options.sequential else ""
        sequential += "" if options.variant == SHIPPED else f" --variant {options.variant}"
        print(
            f"after {t.schedules} schedules; again: python -m fcomm verify --protocol {t.protocol.name} --ranks {t.ranks} "
            f"--link {t.link.name}{calls}{rows}{force}{sequential} --seed {found.seed} --schedules 1"
        )
    if options.trace:
        shown, label = found, "the schedule"
    else:
        shown, label = shrink(found, kernels), "the smallest case found"
    print(f"{label}:")
    for line in story(shown, options.trace):
        print(f"  {line}")
    sys.stdout.flush()
    return True


def _mutants(options: argparse.Namespace) -> int:
    every_one = mutants.load(Path(options.mutants)) if options.mutants else mutants.load()
    chosen = mutants.select(every_one, listed(options.mutant, "--mutant") if options.mutant else [])
    shipped, progress, faults = Kernels(), Progress(), 0
    most = max(options.schedules, MUTANT_SCHEDULES)
    done: list[mutants.Verdict] = []
    try:
        for m in chosen:
            verdict = mutants.judge(m, shipped, options.seed, most)
            done.append(verdict)
            print(f"{m.name:26} {verdict.outcome.kind:26} after {verdict.outcome.schedules} schedules", flush=True)
            if verdict.fault is not None:
                faults += 1
                print(f"  {verdict.fault}")
            if options.trace and verdict.outcome.violated:
                for line in _story_of(m, verdict, shipped):
                    print(f"  {line}")
            progress(lambda: f"{len(done)} of {len(chosen)} mutants")
    except KeyboardInterrupt:
        print(f"interrupted after {len(done)} of {len(chosen)} mutants")
        return 130
    print(f"{len(done) - faults} of {len(done)} mutants caught as expected; what they were made of passes")
    return 1 if faults else 0


def _story_of(m: mutants.Mutant, verdict: mutants.Verdict, shipped: Kernels) -> list[str]:
    from fcomm.verify.cases import make_world

    kernels = mutants.kernels_of(m) if m.edits else shipped
    with sim.Simulator(make_world(m.case, sim.link(m.link), kernels, dict(m.regions))) as s:
        outcome, events = s.trace(verdict.outcome.seed)
    return list(story(Counterexample(m.case, sim.link(m.link), verdict.outcome.seed, outcome, events)))
