"""Ablations under the simulator: another place for setting back, another order of polls, a slot of one's own."""

from __future__ import annotations

import pytest

from fcomm.backends import sim
from fcomm.protocols import protocol
from fcomm.variants import ABLATIONS, SHIPPED
from fcomm.verify import mutants
from fcomm.verify.cases import Kernels
from fcomm.verify.search import BATCH, Tally, search
from fcomm.verify.words import headline, story

pytestmark = pytest.mark.sim

NAMES = ("one_shot.ll128", "one_shot.lamport", "one_shot.flag", "two_shot.ll", "two_shot.lamport16+ll128")


def _no_violation(name: str, variant: str, ranks: int, schedules: int) -> None:
    tally = Tally(protocol(name), ranks, sim.LINKS["nvlink"])
    search(tally, Kernels(variant=variant), schedules)
    assert tally.found is None, "\n".join(story(tally.found))
    assert tally.schedules == schedules


@pytest.mark.parametrize(
    ("name", "variant"), [("one_shot.lamport", "own_in_memory"), ("one_shot.ll16", "arrival_order")]
)
def test_an_ablation_violates_nothing(name: str, variant: str) -> None:
    _no_violation(name, variant, 2, BATCH)


@pytest.mark.full
@pytest.mark.parametrize("variant", [v for v in ABLATIONS if v != SHIPPED])
@pytest.mark.parametrize("name", NAMES)
def test_ablations_violate_nothing_in_many_schedules(name: str, variant: str) -> None:
    if ABLATIONS[variant].refusal(protocol(name)) is None:
        for ranks in (2, 3):
            _no_violation(name, variant, ranks, 6 * BATCH)


def test_setting_back_the_wrong_copy_is_found_wherever_it_is_done() -> None:
    """The control: a mutant of the shipped kernel, in the place that an ablation has for setting back."""
    (fault,) = (m for m in mutants.load() if m.name == "re-arm-next-copy")
    patched = mutants.patched_kernels(fault.name, fault.edits)
    tally = Tally(protocol("one_shot.lamport16"), 2, sim.LINKS["nvlink"])
    search(tally, Kernels(patched.root, "rearm_last"), 10 * BATCH)
    assert tally.found is not None
    assert headline(tally.found).startswith("write over unread data")
