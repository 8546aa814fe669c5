"""Which protocol a call uses. A pure function of facts that are the same on all ranks; selection changes time, never bits."""

from __future__ import annotations

from collections.abc import Sequence

from fcomm.errors import NotAdmittedError
from fcomm.protocols import Protocol, protocols


def candidates(collective: str, dtype: str, world_size: int, capabilities: frozenset[str]) -> dict[str, str | None]:
    """Protocols of a collective: None where admitted, else the reason, in registry order."""
    return {
        p.name: p.refusal(dtype, world_size, capabilities) for p in protocols().values() if p.collective == collective
    }


def choose(collective: str, nbytes: int, dtype: str, world_size: int, capabilities: frozenset[str]) -> Protocol:
    """The protocol for a call. Until a cost model is fitted: the first admitted one that is no baseline."""
    found = candidates(collective, dtype, world_size, capabilities)
    for name, reason in found.items():
        if reason is None and not protocols()[name].baseline:
            return protocols()[name]
    raise NotAdmittedError(f"no protocol for {collective} of {dtype} among {world_size} ranks: {_reasons(found)}")


def _reasons(found: dict[str, str | None]) -> str:
    parts: Sequence[str] = [f"{name}: {reason}" for name, reason in found.items() if reason]
    return "; ".join(parts) or "none is registered"
