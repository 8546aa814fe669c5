"""Which cost model a communicator has: where it is looked for, and that all ranks have the same one.

In this order: the `model` argument, FCOMM_MODEL, the model of this machine in the user's cache folder, the seed
coefficients of the package. A model that was named must be of this machine, this registry and these kernels, or it is
refused with the reason. One that was merely found and does not fit is left alone, with a sentence in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcomm import cost_model, settings
from fcomm.cost_model import Model
from fcomm.errors import ModelError
from fcomm.source import source_hash

if TYPE_CHECKING:  # nothing here starts MPI: `python -m fcomm explain` needs none
    from fcomm.backends.base import Backend
    from fcomm.group import Group

log = logging.getLogger("fcomm")

SEED = "seed"
"""Names the coefficients of the package, in place of a file."""


@dataclass(frozen=True)
class Origin:
    """A cost model and where it comes from."""

    model: Model = field(repr=False, compare=False)
    words: str
    """Which one it is, for readers."""
    note: str | None = None
    """What is to be said of it in the log: that there is none of this machine, or that the one there was left alone."""


def seed(machine: Mapping[str, Any]) -> Origin:
    """The coefficients of the package for a machine like that."""
    return Origin(cost_model.seed_model(machine), "the seed coefficients of the package, not measured on this machine")


def named(wanted: str | Path | Model | None, machine: Mapping[str, Any]) -> Origin | None:
    """The model that the argument or FCOMM_MODEL names, whatever it is of; None where neither names one.

    machine : what the seed coefficients are for, if they are named. `ModelError` where a file cannot be read.
    """
    if isinstance(wanted, Model):
        wanted.validate()
        return Origin(wanted, _words(wanted, "given"))
    name = str(wanted) if wanted is not None else settings.model()
    if name is None:
        return None
    if name == SEED:
        return seed(machine)
    model = Model.load(name)
    return Origin(model, _words(model, f"from {name}"))


def _words(model: Model, where: str) -> str:
    return f"model {model.digest()[:12]} of {model.machine.get('device', 'an unnamed machine')}, {where}"


def mismatch(model: Model, machine: Mapping[str, Any]) -> str | None:
    """Why a model is not for that machine and this version of the package, in one clause; None if it is."""
    why = model.mismatch(machine)
    if why is None and not model.seed and model.source_hash != source_hash():
        was = model.source_hash[:12] or "unknown ones"
        why = f"it was fitted to other kernels ({was}, now {source_hash()[:12]}): calibrate anew"
    return why


def find(wanted: str | Path | Model | None, machine: Mapping[str, Any], world_size: int) -> Origin:
    """The model of one rank. `ModelError` where the one that was named cannot be read or is not of this machine."""
    origin = named(wanted, machine)
    if world_size == 1:  # it chooses nothing, and has neither peers nor links that a machine would be known by
        return origin or seed(machine)
    if origin is not None:
        why = mismatch(origin.model, machine)
        if why is not None:
            raise ModelError(f"the {origin.words}, cannot be used: {why}")
        return origin
    how = (
        "protocols are chosen by the package's seed coefficients; to measure this machine, run mpirun -n "
        f"{world_size} python -m experiments.calibrate --save"
    )
    found, left_alone = _in_cache(machine, world_size)
    if found is None:
        return replace(seed(machine), note=f"{left_alone or 'there is no cost model of this machine'}; {how}")
    path, model = found
    return Origin(model, _words(model, f"from {path}"))


def _in_cache(machine: Mapping[str, Any], world_size: int) -> tuple[tuple[Path, Model] | None, str]:
    """The best of the machine's models in the cache folder, else why the newest of them is left alone (nothing: there is none).

    Best is one that was fitted to this world size, the newest of several; else the one that was fitted to most, since it knows
    best how prices go with the number of ranks.
    """
    usable: list[tuple[tuple[bool, int, int], Path, Model]] = []
    left_alone: list[tuple[int, str]] = []
    for path in cost_model.kept(machine):
        written_ns = _written_ns(path)
        try:
            model = Model.load(path)
        except ModelError as error:
            left_alone.append((written_ns, str(error)))
            continue
        why = mismatch(model, machine)
        if why is not None:
            left_alone.append((written_ns, f"the cost model {path} was left alone: {why}"))
            continue
        fits = world_size in model.ranks
        usable.append(((fits, 0 if fits else len(model.ranks), written_ns), path, model))
    if usable:
        return max(usable, key=lambda one: one[0])[1:], ""
    return None, max(left_alone, default=(0, ""))[1]


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def agree(mpi: Group, wanted: str | Path | Model | None, backend: Backend) -> Origin:
    """The model of all ranks. Collective; where one cannot have it or they differ, all raise the same error."""
    from fcomm import bootstrap, provenance

    machine = cost_model.identity(provenance.machine(mpi, backend))
    origin = bootstrap.collectively(mpi, lambda: find(wanted, machine, mpi.size))
    bootstrap.agree(mpi, _Told(origin.model.digest(), origin.words), "the cost model")
    return origin


@dataclass(frozen=True)
class _Told:
    """What ranks compare: models by their content, said in words."""

    digest: str
    words: str = field(compare=False)

    def __str__(self) -> str:
        return self.words


_said: set[str] = set()


def say(origin: Origin, level: int) -> None:
    """Logs what is to be said of a model, once for each process. To be called on one rank."""
    if origin.note is not None and origin.note not in _said:
        _said.add(origin.note)
        log.log(level, "%s", origin.note)
