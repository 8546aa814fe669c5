"""Why a call uses the protocol that it uses: as a table for readers, as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fcomm.errors import NotAdmittedError
from fcomm.selector import AUTO, Candidate, Selector
from fcomm.sizes import format_size


@dataclass(frozen=True)
class Explanation:
    """What a call of one size would use, and what speaks for and against every protocol of its collective.

    `str()` of it is a table; `to_json()` has the same as plain values.
    """

    collective: str
    nbytes: int
    """Bytes of one rank's input."""
    dtype: str
    world_size: int
    launch: str
    """Launch feature."""
    priced: str
    """Launch feature whose prices the predictions have: another one where the model has none for `launch`."""
    choice: str | None
    """Name of the protocol; None where none may run, or where one rank copies."""
    why: str
    shape: tuple[int, int] | None
    """(blocks, threads) that the model has for it; None: the protocol's default."""
    model: str
    """Which cost model, in words."""
    slab_bytes: int
    max_bytes: int
    candidates: tuple[Candidate, ...]
    """In the order of the registry."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; times in microseconds."""
        return {
            "collective": self.collective,
            "nbytes": self.nbytes,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "launch": self.launch,
            "priced": self.priced,
            "choice": self.choice,
            "why": self.why,
            "shape": None if self.shape is None else list(self.shape),
            "model": self.model,
            "slab_bytes": self.slab_bytes,
            "max_bytes": self.max_bytes,
            "candidates": [
                {
                    "protocol": c.name,
                    "baseline": c.protocol.baseline,
                    "refusal": c.refusal,
                    "rounds": c.protocol.algorithm.rounds,
                    "launches": c.launches,
                    "wire_bytes": c.wire_bytes,
                    "predicted_us": c.predicted_us,
                    "terms_us": None if c.terms_us is None else dict(c.terms_us),
                }
                for c in self.candidates
            ],
        }

    def __str__(self) -> str:
        call = f"{self.collective} of {format_size(self.nbytes)} of {self.dtype}"
        lines = [
            f"{call} among {self.world_size} ranks, dependent launch {self.launch}: {self.choice or 'nothing'}",
            f"because   {self.why}",
            f"model     {self.model}",
            *(
                [f"          no prices for dependent launch {self.launch}: those of {self.priced} are shown"]
                if self.priced != self.launch
                else []
            ),
            f"slab      {format_size(self.slab_bytes)} a rank for messages of {format_size(self.max_bytes)}",
        ]
        if self.shape is not None:
            lines.append(
                f"grid      {self.shape[0]} x {self.shape[1]} threads, before it is clamped to what may be resident"
            )
        admitted = [c for c in self.candidates if c.refusal is None]
        refused = [c for c in self.candidates if c.refusal is not None]
        if admitted:
            lines += ["", *_table(admitted, self.choice)]
        if refused:
            width = max(len(c.name) for c in refused)
            lines += ["", "not admitted", *(f"  {c.name:{width}}  {c.refusal}" for c in refused)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def _table(admitted: list[Candidate], choice: str | None) -> list[str]:
    """Admitted candidates, the fastest first, with their time and its terms in microseconds."""
    every = dict.fromkeys(term for c in admitted for term in c.terms_us or ())
    terms = [t for t in every if any(abs((c.terms_us or {}).get(t, 0.0)) >= 0.005 for c in admitted)]  # what shows
    header = ["", "protocol", "rounds", "launches", "bytes sent", "µs", *terms]
    rows = [header]
    for c in sorted(admitted, key=lambda c: (c.predicted_us is None, c.predicted_us or 0.0)):
        shown: Mapping[str, float] = c.terms_us or {}
        rows.append(
            [
                "*" if c.name == choice else "",
                f"{c.name} (baseline)" if c.protocol.baseline else c.name,
                str(c.protocol.algorithm.rounds),
                str(c.launches),
                str(c.wire_bytes),
                "unknown" if c.predicted_us is None else f"{c.predicted_us:.2f}",
                *(f"{shown[t]:.2f}" if t in shown else "-" for t in terms),
            ]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
    return [
        "  ".join(
            cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def explain(
    selector: Selector, collective: str, nbytes: int, dtype: str, name: str = AUTO, *, model: str
) -> Explanation:
    """What a call would use. model : the cost model in words."""
    candidates: tuple[Candidate, ...] = tuple(selector.candidates(collective, nbytes, dtype))
    shape, choice = None, None
    if selector.layout.world_size == 1:
        candidates, why = (), "one rank copies and has nobody to exchange with"
    else:
        try:
            chosen = selector.choose(collective, nbytes, dtype, name)
            choice, why = chosen.name, _why(selector, collective, name, candidates)
            shape = selector.shape(chosen, nbytes)
        except NotAdmittedError as error:
            why = str(error)
    return Explanation(
        collective, nbytes, dtype, selector.layout.world_size, selector.launch, selector.priced, choice, why, shape,
        model, selector.layout.slab_bytes, selector.layout.max_bytes, candidates,
    )  # fmt: skip


def _why(selector: Selector, collective: str, name: str, candidates: tuple[Candidate, ...]) -> str:
    if name != AUTO:
        return "it was named"
    if selector.name_for(collective) != AUTO:
        return "FCOMM_PROTOCOL names it"
    running = [c for c in candidates if c.refusal is None and selector.eligible(c.protocol)]
    fast = "the least predicted time"
    if all(c.predicted_us is None for c in running):
        fast = "the model knows none of them, and it is the first"
    if any(c.protocol.plain for c in running):
        return f"FCOMM_PLAIN is set; {fast} among the plain baselines"
    return f"{fast} among {len(running)} admitted protocols"
