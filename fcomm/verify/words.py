"""A counterexample in the protocol's words: which cells, which slots, who pushed, polled and set back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fcomm.backends import sim
from fcomm.layout import CONTROL_BYTES, Region, SlabLayout
from fcomm.protocols import CELL_BYTES, ENCODINGS
from fcomm.verify.search import Counterexample

PER_RANK = 7
"""Events of each rank that a short trace shows."""
_CONTROL_WORDS = ("epoch", "poison", "lamport turn", "lamport16 turn", "ticket", "claim")
_WHOLE = ("start", "end", "wait", "trigger")


class Places:
    """What lies at a simulated address."""

    def __init__(self, layout: SlabLayout) -> None:
        self._layout = layout

    def owner(self, at: int) -> int:
        return (at >> 33) - 1

    def is_array(self, at: int) -> bool:
        return bool(at >> 32 & 1)

    def source(self, at: int) -> int | None:
        """The rank whose slot it is."""
        region = self._region(at)
        if region is None or region[0].name.endswith("_state") or region[0].name == "staging":
            return None
        r, inside = region
        within = inside % r.copy_stride if r.copy_stride else inside
        return within // r.slot_stride

    def _region(self, at: int) -> tuple[Region, int] | None:
        """The region, and the byte in it."""
        offset = at - sim.slab_base(self.owner(at))
        every = (r for c in range(self._layout.channels) for r in self._layout.regions(c).values())
        for region in every:
            for copy in range(region.copies):
                start = region.offset + copy * region.copy_stride
                slots = 1 if region.name.endswith("_state") or region.name == "staging" else self._layout.world_size
                if start <= offset < start + slots * region.slot_stride:
                    return region, offset - start + copy * region.copy_stride
        return None

    def slot_of_flags(self, at: int) -> int | None:
        """Where the flags begin that speak for a cell, where there are such."""
        found = self._region(at)
        if found is None or found[0].name != "flag":
            return None
        region, inside = found
        return at - inside % region.copy_stride % region.slot_stride % region.half_stride

    def name(self, at: int) -> str:
        """The place in words, seen from nobody."""
        owner = self.owner(at)
        if self.is_array(at):
            return f"byte {at - sim.array_base(owner)} of rank {owner}'s arrays"
        offset = at - sim.slab_base(owner)
        if offset < self._layout.channels * CONTROL_BYTES:
            word = offset % CONTROL_BYTES // 4
            return f"rank {owner}'s {_CONTROL_WORDS[word] if word < len(_CONTROL_WORDS) else f'control word {word}'}"
        found = self._region(at)
        if found is None:
            return f"byte {offset} of rank {owner}'s slab, which belongs to nothing"
        region, inside = found
        if region.name == "staging":
            return f"cell {inside // CELL_BYTES} of rank {owner}'s staging buffer"
        if region.name.endswith("_state"):
            return f"word {inside // 4} of rank {owner}'s {region.name}"
        copy, within = divmod(inside, region.copy_stride)
        source, slot = divmod(within, region.slot_stride)
        half, byte = divmod(slot, region.half_stride) if region.half_stride else (0, slot)
        encoding = ENCODINGS.get(region.name)
        where = f"rank {owner}'s slot for rank {source} ({region.name}, copy {copy}{', second half' if half else ''})"
        if encoding is None and region.scrubbed:
            return f"flag {byte // 4} of {where}"
        header = encoding.header_bytes if encoding else 0
        return f"flag {byte // 4} of {where}" if byte < header else f"cell {(byte - header) // CELL_BYTES} of {where}"


def _who(event: np.void, me: int) -> str:
    if event["from_rank"] == sim.NOBODY:
        return "what was there before the first call"
    whose = "its own" if event["from_rank"] == me else f"rank {event['from_rank']}'s"
    return f"{whose} of call {event['from_call']}"


def sentence(event: np.void, places: Places) -> str:
    """One event in words."""
    kind, at, rank = sim.EVENTS[event["event"]], int(event["at"]), int(event["rank"])
    values = " ".join(f"{int(v):08x}" for v in event["values"][: max(1, min(4, int(event["bytes"]) // 4))])
    behind = int(event["behind"])
    if kind == "load":
        how = " with acquire" if event["order"] == 2 else ""
        newer = f", and {behind} newer than that" if behind else ""
        return f"looks at {places.name(at)}{how}: sees {_who(event, rank)}{newer} ({values})"
    if kind in ("store", "line"):
        how = " with release" if event["order"] == 3 else ""
        late = f"; lands in front of {behind} newer" if behind else ""
        owner, source = places.owner(at), places.source(at)
        if owner == rank and source not in (None, rank):
            return f"sets back {places.name(at)} ({values}){late}"
        verb = "pushes" if owner != rank else "stores"
        return f"{verb} {places.name(at)}{how} ({values}){late}"
    if kind == "modify":
        return f"draws from {places.name(at)}"
    if kind == "output":
        verdict = "which is wrong" if event["order"] else "as it should be"
        return f"stores {event['bytes']} bytes of its result, {verdict} ({values})"
    if kind == "start":
        grid = f"of {event['bytes']}" if event["bytes"] else "of a step"
        return f"block {event['block']} {grid} becomes resident"
    return {
        "end": "grid is complete" if event["bytes"] else "step is complete",
        "wait": "has waited for the grid ahead",
        "trigger": "lets the next grid in",
        "step": "checks the last result and stores the next input",
    }.get(kind, kind)


def _line(event: np.void, places: Places) -> str:
    thread = (
        "" if sim.EVENTS[event["event"]] in ("start", "end") else f" block {event['block']} thread {event['thread']}"
    )
    return f"rank {event['rank']}, call {event['call']}{thread}: {sentence(event, places)}"


def _relevant(found: Counterexample, places: Places) -> list[int]:
    """The last events of each rank that have to do with the violation."""
    events, outcome = found.events, found.outcome
    group = (
        128 if outcome.at and any(e.name == "ll128" for p in found.case.protocols for e in p.encodings) else CELL_BYTES
    )
    kinds = events["event"]
    whole = np.isin(kinds, [sim.EVENTS.index(k) for k in _WHOLE])
    if outcome.at and not outcome.at >> 32 & 1:
        near = (events["at"] // group == outcome.at // group) & ~whole
        near |= (kinds == sim.EVENTS.index("output")) & (events["order"] != 0)
        start = places.slot_of_flags(outcome.at)
        if start is not None:
            near |= (events["at"] >= start) & (events["at"] < start + ENCODINGS["flag"].header_bytes) & ~whole
    elif outcome.at:
        near = (events["at"] <= outcome.at + 16) & (events["at"] + 16 >= outcome.at) | np.isin(
            kinds, [sim.EVENTS.index(k) for k in ("step", "wait")]
        )
    else:  # nobody can go on: what each rank did last
        near = ~whole
    chosen: list[int] = []
    for rank in range(found.case.ranks):
        mine = np.flatnonzero((events["rank"] == rank) & near)
        chosen += [int(i) for i in _without_repeats(events, mine)[-PER_RANK:]]
        grids = np.flatnonzero((events["rank"] == rank) & whole & np.isin(kinds, [4, 5]))
        chosen += [int(i) for i in grids[-3:]]
    return sorted(set(chosen))


def _without_repeats(events: NDArray[np.void], chosen: NDArray[np.intp]) -> list[int]:
    """Polls that saw the same again are left out."""
    kept: list[int] = []
    last: dict[tuple[int, ...], bytes] = {}
    for i in chosen:
        e = events[i]
        key = (int(e["rank"]), int(e["block"]), int(e["thread"]), int(e["at"]), int(e["event"]))
        what = e["values"].tobytes() + e["call"].tobytes()
        if sim.EVENTS[e["event"]] == "load" and last.get(key) == what:
            continue
        last[key] = what
        kept.append(int(i))
    return kept


def headline(found: Counterexample) -> str:
    """What was violated, in one sentence."""
    o = found.outcome
    places = Places(SlabLayout(found.case.ranks, found.case.max_bytes, found.case.streams))
    if o.kind == "deadlock":
        return f"deadlock: nobody can go on; rank {o.rank} is in call {o.call}, with {o.more} of {o.block} blocks in"
    who = f"rank {o.rank}, block {o.block}, thread {o.thread}, in call {o.call}"
    where = places.name(o.at) if o.at else "?"
    if o.kind == "write over unread data":
        whose = (
            f"; what rank {o.other_rank} pushed in call {o.other_call} was not read"
            if o.other_call or o.other_rank
            else ""
        )
        return f"{o.kind}: {who}, at {where}{whose}"
    return f"{o.kind}: {who}, at {where}"


def story(found: Counterexample, full: bool = False) -> Iterator[str]:
    """The counterexample, line by line; `full`: every event."""
    places = Places(SlabLayout(found.case.ranks, found.case.max_bytes, found.case.streams))
    yield headline(found)
    yield f"case: {found.case.describe()}"
    chosen = range(len(found.events)) if full else _relevant(found, places)
    for i in chosen:
        yield f"  {_line(found.events[i], places)}"
