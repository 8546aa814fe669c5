"""Mutants: variants of the shipped kernels, each with one fault, that the search must catch as what it is."""

from __future__ import annotations

import difflib
import shutil
import tempfile
import tomllib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcomm.backends import sim
from fcomm.errors import ArgumentError
from fcomm.source import kernel_root
from fcomm.verify.cases import FAULTS, Call, Case, Kernels, make_world

MOST_LINES = 20
LEAST_SOUND = 100
SHIPPED = Path(__file__).with_name("mutants.toml")
_CASE_FIELDS = (
    "threads", "replays", "launch", "streams", "step_blocks", "devices", "in_place", "shift", "first_epoch", "scrub_calls", "lookalike", "max_bytes", "columns",
)  # fmt: skip
_FIELDS = {"name", "fault", "met", "expected", "or", "ordering", "calls", "edit", "link", "ranks", "faults", "regions"}


@dataclass(frozen=True)
class Edit:
    """A text of a kernel file, and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One fault, and the case that shows it."""

    name: str
    fault: str
    met: str
    expected: str
    also: tuple[str, ...]
    ordering: bool
    edits: tuple[Edit, ...]
    case: Case
    link: str
    regions: tuple[tuple[str, str], ...]

    @property
    def changed_lines(self) -> int:
        """Lines that differ between the two texts of its edits."""
        return sum(
            line[:1] in "+-" and line[:3] not in ("+++", "---")
            for e in self.edits
            for line in difflib.unified_diff(e.old.splitlines(), e.new.splitlines(), lineterm="", n=0)
        )

    def sound(self) -> tuple[Case, str, tuple[tuple[str, str], ...]]:
        """The same case without its fault: case, link and regions under which the shipped sources must pass."""
        # Planted cells are no fault of the host's, but what time brings: the shipped sources clear them.
        case = replace(self.case, faults=self.case.faults & {"stale cells"})
        return case, self.link if self.edits else "nvlink", ()


def load(path: Path = SHIPPED) -> list[Mutant]:
    """The mutants of a file; `ArgumentError` if it is not one."""
    try:
        listed = tomllib.loads(path.read_text()).get("mutant", [])
    except OSError as error:
        raise ArgumentError(f"cannot read {path} ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is no list of mutants: {error}") from None
    if not listed:
        raise ArgumentError(f"{path} has no [[mutant]]")
    made = [_mutant(m, path) for m in listed]
    if len({m.name for m in made}) < len(made):
        raise ArgumentError(f"{path} has two mutants of one name")
    return made


def _mutant(m: dict[str, Any], path: Path) -> Mutant:
    name = str(m.get("name", "a mutant without a name"))
    wrong = sorted(m.keys() - _FIELDS - set(_CASE_FIELDS))
    if wrong:
        raise ArgumentError(f"{path}: {name} has a field {wrong[0]}, which means nothing")
    try:
        edits = tuple(Edit(**e) for e in m.get("edit", []))
        calls = tuple(Call(c[0], int(c[1]), tuple(c[2]) if len(c) > 2 else (1,)) for c in m["calls"])
        faults = frozenset(m.get("faults", []))
        case = Case(int(m.get("ranks", 2)), calls, faults=faults, **{k: m[k] for k in _CASE_FIELDS if k in m})
        mutant = Mutant(
            m["name"], m["fault"], m.get("met", "ours"), m["expected"], tuple(m.get("or", [])),
            bool(m.get("ordering", False)), edits, case, m.get("link", "nvlink"), tuple(m.get("regions", {}).items()),
        )  # fmt: skip
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ArgumentError(f"{path}: {name} is not complete ({type(error).__name__}: {error})") from None
    for kind in (mutant.expected, *mutant.also):
        if kind not in sim.KINDS[1:]:
            raise ArgumentError(f"{path}: {name} expects {kind!r}; violations are {', '.join(sim.KINDS[1:])}")
    if unknown := sorted(faults - set(FAULTS)):
        raise ArgumentError(f"{path}: {name} has the fault {unknown[0]!r}; a host's faults are {', '.join(FAULTS)}")
    if mutant.changed_lines > MOST_LINES:
        raise ArgumentError(f"{path}: {name} changes {mutant.changed_lines} lines, and {MOST_LINES} are the most")
    _ = sim.link(mutant.link), case.protocols  # both must exist
    return mutant


def patch_sources(name: str, edits: Sequence[Edit], root: Path) -> None:
    """Copies the kernel sources to `root` and applies the edits there; `ArgumentError` if one does not apply."""
    shutil.copytree(kernel_root(), root)
    for edit in edits:
        file = root / edit.file
        if not file.is_file():
            raise ArgumentError(f"the patch {name} does not apply: there is no kernel file {edit.file}")
        text = file.read_text()
        if (times := text.count(edit.old)) != 1:
            found = "does not stand there" if times == 0 else f"stands there {times} times"
            raise ArgumentError(f"the patch {name} does not apply to {edit.file}: {edit.old.strip()!r} {found}")
        file.write_text(text.replace(edit.old, edit.new))


def patched_kernels(name: str, edits: Sequence[Edit]) -> Kernels:
    """Kernels of the patched sources, which stay on disk as long as the object lives."""
    folder = tempfile.mkdtemp(prefix="fcomm-mutant-")
    root = Path(folder) / "kernels_cu"
    kernels = Kernels(root)
    weakref.finalize(kernels, shutil.rmtree, folder, ignore_errors=True)
    patch_sources(name, edits, root)
    return kernels


def kernels_of(mutant: Mutant) -> Kernels:
    """The mutant's kernels, those of its case compiled."""
    kernels = patched_kernels(mutant.name, mutant.edits) if mutant.edits else Kernels()
    for proto in mutant.case.protocols:
        kernels.get(proto, mutant.case.ranks)
    return kernels


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    `caught` counts schedules up to the violation; `sound` is what the shipped sources came to in ten times as many on the
    same seeds, and `consistent` what the mutant came to under sequentially consistent memory (ordering mutants only).
    """

    mutant: Mutant
    outcome: sim.Outcome
    sound: sim.Outcome | None
    consistent: sim.Outcome | None

    @property
    def caught(self) -> bool:
        return self.outcome.kind in (self.mutant.expected, *self.mutant.also)

    @property
    def fault(self) -> str | None:
        """What is wrong with the verdict; None if it is as it must be."""
        m = self.mutant
        if not self.outcome.violated:
            return f"{m.name} was not caught in {self.outcome.schedules} schedules"
        if not self.caught:
            return f"{m.name} was caught as {self.outcome.kind}, and {m.expected} was expected"
        if self.sound is not None and self.sound.violated:
            return f"the sources without {m.name} fail too: {self.sound.kind} (seed {self.sound.seed})"
        if self.consistent is not None and self.consistent.violated:
            return f"{m.name} fails under sequentially consistent memory, too ({self.consistent.kind})"
        return None


def judge(mutant: Mutant, shipped: Kernels, seed: int, most: int) -> Verdict:
    """Searches for the mutant's violation in up to `most` schedules, then checks the controls."""
    kernels = kernels_of(mutant) if mutant.edits else shipped
    world = make_world(mutant.case, sim.link(mutant.link), kernels, dict(mutant.regions))
    with sim.Simulator(world) as s:
        outcome = s.random(seed, most)
    consistent = None
    if mutant.ordering:
        case = replace(mutant.case, weak=False)
        with sim.Simulator(make_world(case, sim.link(mutant.link), kernels, dict(mutant.regions))) as s:
            consistent = s.random(seed, most)
    case, link, regions = mutant.sound()
    with sim.Simulator(make_world(case, sim.link(link), shipped, dict(regions))) as s:
        sound = s.random(seed, max(LEAST_SOUND, 10 * outcome.schedules))
    return Verdict(mutant, outcome, sound, consistent)


def select(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Those of these names, or all; `ArgumentError` for a name that none has."""
    known = {m.name: m for m in mutants}
    for name in names:
        if name not in known:
            raise ArgumentError(f"there is no mutant {name!r}; the names are {', '.join(known)}")
    return [known[name] for name in names] if names else list(mutants)
