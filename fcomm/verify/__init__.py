"""Checking protocols under the simulator: cases, search, mutants, counterexamples in words, the table of the docs.

`check` is the whole of it in one call, for a notebook in which a protocol is being made.
"""

from __future__ import annotations

from collections.abc import Sequence

from fcomm.backends import sim
from fcomm.protocols import protocol
from fcomm.verify.cases import Kernels
from fcomm.verify.mutants import Edit, patched_kernels
from fcomm.verify.search import Tally, search, shrink
from fcomm.verify.words import story

__all__ = ["Edit", "check"]


def check(
    name: str, edits: Sequence[Edit] = (), ranks: int = 2, link: str = "nvlink", schedules: int = 500, seed: int = 0
) -> str:
    """Runs schedules of a protocol and says what was covered, or shows the smallest counterexample found.

    name : a protocol such as ``one_shot.ll16``. edits : texts of kernel files and what takes their place, as in a mutant: the
    shipped sources stay as they are. link : a name of `fcomm.backends.sim.LINKS`; that the protocol is refused there is no
    hindrance. Raises `ArgumentError` for an edit that does not apply, `SetupError` for a source that does not compile.
    """
    kernels = patched_kernels("your edit", edits) if edits else Kernels()
    tally = Tally(protocol(name), ranks, sim.link(link), seed)
    search(tally, kernels, schedules)
    if tally.found is None:
        return f"no violation in {tally.schedules} schedules ({tally.steps} steps, {tally.seeds})"
    found = f"after {tally.schedules} schedules, in the smallest case found:"
    return "\n".join([found, *story(shrink(tally.found, kernels))])
