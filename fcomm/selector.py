"""Which protocol a call uses: first what is admitted, then what is fast. Selection changes time, never bits.

A choice is a pure function of facts that are the same on all ranks: collective, bytes, dtype, world size, launch feature,
and the agreed model, capabilities and settings. No rank asks another one, so nothing here may read what differs between
them: variables, addresses, clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fcomm.cost_model import pieces
from fcomm.errors import NotAdmittedError
from fcomm.layout import SlabLayout
from fcomm.protocols import HOPPER, GpuShare, Protocol, protocol, protocols

if TYPE_CHECKING:
    from fcomm.cost_model import Model
    from fcomm.epilogue import Epilogue

AUTO = "auto"


@dataclass(frozen=True)
class Candidate:
    """One protocol for a call: whether it may run, what it sends, and how long the model thinks that it takes."""

    protocol: Protocol
    refusal: str | None
    """Why it may not run, in one clause; None where it may."""
    launches: int
    """Kernels of one call: more than one where the message is larger than the protocol's slots."""
    wire_bytes: int
    """Bytes that one rank sends (baselines that pull: reads) over its link in the call, evidence included."""
    terms_us: Mapping[str, float] | None
    """Predicted time by term of the cost model; None where it is refused or the model does not know it."""

    @property
    def name(self) -> str:
        return self.protocol.name

    @property
    def predicted_us(self) -> float | None:
        """Predicted time of the call: the sum of the terms."""
        return None if self.terms_us is None else math.fsum(self.terms_us.values())


class Selector:
    """The chooser of one communicator, or of one that might be.

    Parameters
    ----------
    layout : SlabLayout
        Of the communicator: world size, and where messages are split.
    capabilities : frozenset of str
        What every link between the ranks has.
    model : Model
        The agreed cost model.
    launch : str
        Launch feature: none, late or early.
    forced : str, optional
        Name of a protocol that "auto" stands for in calls of its collective.
    plain : bool
        The kill switch: where a collective has a plain baseline, everything else is off.
    gpu : GpuShare, optional
        The smallest share of a GPU that a rank has: it picks the form of a name for several.
    """

    def __init__(
        self,
        layout: SlabLayout,
        capabilities: frozenset[str],
        model: Model,
        *,
        launch: str = "none",
        forced: str | None = None,
        plain: bool = False,
        gpu: GpuShare | None = None,
    ) -> None:
        self.layout, self.capabilities, self.model, self.launch = layout, capabilities, model, launch
        self.forced, self.plain, self.gpu = forced, plain, gpu
        self.world_size = max(2, layout.world_size)
        """One rank exchanges nothing, and is told of names and dtypes what two would be."""
        self.priced = next((kind for kind in (launch, "late", "none") if kind in model.launch), launch)
        """The launch feature whose prices are used: its nearest kin where the model has none for it."""
        self._choices: dict[tuple[str, int, str, str], Protocol] = {}

    # ---- what may run ----

    def refusal(self, proto: Protocol, dtype: str, nbytes: int | None = None) -> str | None:
        """Why a protocol may not run here, in one clause; None if it may. nbytes : None for a size that suits it."""
        if (
            self.plain
            and not proto.plain
            and any(p.plain for p in protocols().values() if p.collective == proto.collective)
        ):
            return "FCOMM_PLAIN has switched off all but the plain baseline"
        return proto.refusal(dtype, self.world_size, self.capabilities, nbytes)

    def candidates(self, collective: str, nbytes: int, dtype: str) -> list[Candidate]:
        """Every protocol of a collective, in the order of the registry."""
        found = []
        for proto in protocols().values():
            if proto.collective != collective:
                continue
            why = self.refusal(proto, dtype, nbytes)
            form = proto.at(nbytes, self.world_size, self.gpu or HOPPER)
            split = pieces(form, nbytes, self.world_size, self.layout.max_bytes) if nbytes else ()
            sent = sum(k * form.wire_bytes(size, self.world_size) for size, k in split)
            terms = self._terms_us(form, nbytes) if why is None else None
            found.append(Candidate(proto, why, sum(k for _, k in split), sent, terms))
        return found

    def _terms_us(self, form: Protocol, nbytes: int) -> dict[str, float] | None:
        if not self.model.covers(form.name, launch=self.priced):
            return None
        return self.model.predict(form, nbytes, self.world_size, self.priced, max_bytes=self.layout.max_bytes)

    def eligible(self, proto: Protocol) -> bool:
        """Whether it may be chosen without being named: a baseline is there to be compared with, or for the kill switch."""
        return not proto.baseline or (self.plain and proto.plain)

    # ---- what is fast ----

    def choose(self, collective: str, nbytes: int, dtype: str, name: str = AUTO) -> Protocol:
        """The protocol for a call, remembered: the named one, the forced one, or the fastest by the model.

        `NotAdmittedError` where it may not run, or where none may.
        """
        key = (collective, nbytes, dtype, name)
        found = self._choices.get(key)
        if found is None:
            try:
                wanted = self.name_for(collective, name)
                found = self._choices[key] = self._choose(collective, nbytes, dtype, wanted)
            except NotAdmittedError as error:
                if name != AUTO or self.forced is None or self.plain:
                    raise
                raise NotAdmittedError(f"FCOMM_PROTOCOL={self.forced}: {error}") from None
        return found

    def choose_with(self, epilogue: Epilogue, collective: str, nbytes: int, dtype: str, name: str = AUTO) -> Protocol:
        """The same for a call with an epilogue: one that can have it, or one that is to be followed by the epilogue's own
        kernel, where none can or where the model expects the two to be faster. `NotAdmittedError` where a protocol is named
        that cannot have it.
        """
        chosen = self.choose(collective, nbytes, dtype, name)
        why = epilogue.refusal(chosen)
        if why is not None and name != AUTO:
            raise NotAdmittedError(f"{chosen.name} is not admitted here: {why}")
        if why is None or self.name_for(collective) != AUTO:
            return chosen
        every = [
            c for c in self.candidates(collective, nbytes, dtype) if c.refusal is None and self.eligible(c.protocol)
        ]
        apart = next(c for c in every if c.protocol is chosen)
        fused = fastest([c for c in every if epilogue.refusal(c.protocol) is None])
        if fused is None:
            return chosen
        if apart.terms_us is None or apart.predicted_us is None or fused.predicted_us is None:
            return fused.protocol
        # The kernel apart costs its launch at least; what it does beside that, the fused one does too.
        return chosen if apart.predicted_us + apart.terms_us["launch"] < fused.predicted_us else fused.protocol

    def name_for(self, collective: str, name: str = AUTO) -> str:
        """What a call's `protocol` stands for: the forced protocol for "auto", where it is one of this collective."""
        if name != AUTO or self.forced is None or self.plain:
            return name
        return self.forced if protocol(self.forced).collective == collective else name

    def _choose(self, collective: str, nbytes: int, dtype: str, name: str) -> Protocol:
        if name != AUTO:
            return self._named(collective, nbytes, dtype, name)
        every = self.candidates(collective, nbytes, dtype)
        best = fastest([c for c in every if c.refusal is None and self.eligible(c.protocol)])
        if best is None:
            why = "; ".join(f"{c.name}: {c.refusal}" for c in every if c.refusal) or "none is registered"
            raise NotAdmittedError(f"no protocol for {collective} of {dtype} among {self.world_size} ranks: {why}")
        return best.protocol

    def _named(self, collective: str, nbytes: int, dtype: str, name: str) -> Protocol:
        proto = protocol(name)
        if proto.collective != collective:
            raise NotAdmittedError(f"{name} is a protocol for {proto.collective}, not for {collective}")
        form = proto.at(nbytes, self.world_size, self.gpu or HOPPER)
        why = self.refusal(form, dtype, nbytes)
        if why is not None:
            raise NotAdmittedError(f"{name} is not admitted here: {why}")
        return form

    def shape(self, proto: Protocol, nbytes: int) -> tuple[int, int] | None:
        """(blocks, threads) that were measured to be better than the protocol's default for a message of that size.

        None: the default. Baselines keep what their authors set.
        """
        return None if proto.baseline else self.model.shape(proto, nbytes, self.world_size, self.priced)


def fastest(candidates: list[Candidate]) -> Candidate | None:
    """The least predicted time; ties, and candidates that the model does not know, go by the order of the registry.

    What the model knows goes before what it does not.
    """
    times = {c.name: c.predicted_us for c in candidates}
    return min(candidates, key=lambda c: math.inf if (us := times[c.name]) is None else us, default=None)
