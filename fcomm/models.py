"""Which cost model a communicator has: where it is looked for, and that all ranks have the same one.

In this order: the `model` argument, FCOMM_MODEL, the model of this machine in the user's cache folder, the seed
coefficients of the package. What was named must fit this machine, this registry and these kernels, or is refused with
the reason; what was merely found and does not fit is left alone, with a sentence in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpi4py import MPI

from fcomm import bootstrap, provenance, settings
from fcomm.backends.base import Backend
from fcomm.cost_model import Model, identity, seed_model
from fcomm.errors import FcommError

log = logging.getLogger("fcomm")

SEED = "seed"
"""Names the coefficients of the package, in place of a file."""


@dataclass(frozen=True)
class Origin:
    """A cost model and where it comes from."""

    model: Model
    words: str
    """Which one it is, for readers: alike on all ranks."""
    note: str | None = None
    """What is to be said of it, once and on one rank: a model that was found and left alone, or that there is none."""


def cached_path(machine: Mapping[str, Any]) -> Path:
    """Where the model of a machine lies in the user's cache folder. machine : its identity."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return settings.cache_dir() / "models" / f"{digest[:16]}.json"


def seed() -> Origin:
    """The coefficients of the package."""
    return Origin(seed_model(), "the seed coefficients of the package, which are not of this machine")


def named(wanted: str | Path | Model | None) -> Origin | None:
    """The model of the argument or of FCOMM_MODEL, whatever machine it is of; None where neither names one.

    An error of this package where it cannot be read.
    """
    if isinstance(wanted, Model):
        return Origin(wanted, f"model {wanted.digest()[:12]}")
    name = str(wanted) if wanted is not None else settings.model()
    if name is None:
        return None
    if name == SEED:
        return seed()
    model = Model.load(Path(name))
    return Origin(model, f"model {model.digest()[:12]} of {name}")


def find(wanted: str | Path | Model | None, facts: Mapping[str, Any]) -> Origin:
    """This rank's model. facts : `provenance.machine`'s, the same on all ranks."""
    here = identity(facts)
    origin = named(wanted)
    if origin is not None:
        if origin.model is not seed_model():
            origin.model.check(here)
        return origin
    path = cached_path(here)
    how = f"to measure this machine, run mpirun -n {facts['world_size']} python -m experiments.calibrate --save"
    note = f"there is no cost model of this machine, so protocols are chosen by the package's seed coefficients; {how}"
    if path.exists():
        try:
            model = Model.load(path)
            model.check(here)
            return Origin(model, f"model {model.digest()[:12]} of {path}")
        except FcommError as error:
            note = f"{error}: it was left alone, and protocols are chosen by the package's seed coefficients; {how}"
    return replace(seed(), note=note)


def agree(mpi: MPI.Intracomm, wanted: str | Path | Model | None, backend: Backend) -> Origin:
    """The model of all ranks. Collective; where one cannot have it or they differ, all raise the same error."""
    facts = provenance.machine(mpi, backend)
    origin = bootstrap.collectively(mpi, lambda: find(wanted, facts))
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
