"""The selector: pure, deterministic, quick; what is admitted comes before what is fast."""

from __future__ import annotations

import ast
import inspect
import json
import timeit
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcomm import selector
from fcomm.communicator import Communicator, _pieces
from fcomm.cost_model import pieces
from fcomm.dtypes import REDUCIBLE
from fcomm.errors import NotAdmittedError
from fcomm.explanation import Explanation, explain
from fcomm.layout import SlabLayout
from fcomm.protocols import Protocol, protocol, protocols
from fcomm.selector import Selector

if TYPE_CHECKING:
    from fcomm.cost_model import Model

EVERYTHING = frozenset[str]().union(*(p.needs for p in protocols().values()))
COLLECTIVES = sorted({p.collective for p in protocols().values()})
NAMES = list(protocols())


@dataclass
class Double:
    """A model whose every number the test knows: a constant and a time per byte for each protocol."""

    coefficients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    launch: tuple[str, ...] = ("none", "late", "early")

    def covers(self, name: str, world_size: int = 0, launch: str | None = None) -> bool:
        return name in self.coefficients and launch in self.launch

    def predict(self, proto: Protocol, nbytes: int, world_size: int, launch: str, max_bytes: int) -> dict[str, float]:
        start, per_byte = self.coefficients[proto.name]
        launches = sum(number for _, number in pieces(proto, nbytes, world_size, max_bytes))
        return {
            "launch": launches * start * world_size,
            "bytes": per_byte * nbytes,
            "early": -0.25 * (launch == "early"),
        }

    def shape(self, proto: Protocol, nbytes: int, world_size: int, launch: str) -> tuple[int, int] | None:
        return self.shapes.get(proto.name)


coefficient = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.5])  # few values, so that ties occur
models = st.dictionaries(st.sampled_from(NAMES), st.tuples(coefficient, coefficient.map(lambda v: v / 4096)))


@dataclass(frozen=True)
class Facts:
    collective: str
    nbytes: int
    dtype: str
    n: int
    capabilities: frozenset[str]
    coefficients: dict[str, tuple[float, float]]
    launch: str
    plain: bool

    def selector(self, **options: Any) -> Selector:
        """Made anew from the facts: equal to another one, with nothing in common."""
        return Selector(
            SlabLayout(self.n, 1 << 16),
            frozenset(sorted(self.capabilities, reverse=True)),
            cast("Model", Double(dict(reversed(self.coefficients.items())))),
            **{"launch": self.launch, "plain": self.plain, **options},
        )

    @property
    def call(self) -> tuple[str, int, str]:
        return self.collective, self.nbytes, self.dtype


facts = st.builds(
    Facts,
    st.sampled_from(COLLECTIVES),
    st.integers(0, 1 << 18).map(lambda words: 1680 * words // 1000),
    st.sampled_from(sorted(REDUCIBLE)),
    st.integers(2, 16),
    st.sets(st.sampled_from(sorted(EVERYTHING))).map(lambda some: EVERYTHING - some),
    models,
    st.sampled_from(["none", "late", "early"]),
    st.booleans(),
)


def chosen(s: Selector, call: tuple[str, int, str]) -> str | None:
    try:
        return s.choose(*call).name
    except NotAdmittedError:
        return None


@given(facts, facts)
def test_the_same_facts_give_the_same_choice_whatever_was_asked_before(fact: Facts, other: Facts) -> None:
    one, two = fact.selector(), fact.selector()
    chosen(two, other.call)
    assert chosen(one, fact.call) == chosen(two, fact.call) == chosen(two, fact.call)


@given(facts)
def test_first_admitted_then_fast(fact: Facts) -> None:
    s = fact.selector()
    every = s.candidates(*fact.call)
    assert [c.name for c in every] == [p.name for p in protocols().values() if p.collective == fact.collective]
    running = [c for c in every if c.refusal is None and (not c.protocol.baseline or (fact.plain and c.protocol.plain))]
    if not running:
        with pytest.raises(NotAdmittedError) as caught:
            s.choose(*fact.call)
        assert all(f"{c.name}: {c.refusal}" in str(caught.value) for c in every if c.refusal)
        return
    known = [c for c in running if c.predicted_us is not None]
    best = s.choose(*fact.call).name
    if not known:
        assert best == running[0].name
        return
    least = min(cast(float, c.predicted_us) for c in known)
    assert best == next(c.name for c in known if c.predicted_us == least), "the first of the fastest"


@given(facts)
def test_refusals_are_the_registry_s_own_unless_the_switch_is_thrown(fact: Facts) -> None:
    for c in fact.selector().candidates(*fact.call):
        own = c.protocol.refusal(fact.dtype, fact.n, fact.capabilities, fact.nbytes)
        off = fact.plain and not c.protocol.plain and fact.collective != "reduce_scatter"
        assert c.refusal == ("FCOMM_PLAIN has switched off all but the plain baseline" if off else own)
        assert c.terms_us is None or c.refusal is None


@given(facts)
def test_launches_are_those_of_the_communicator(fact: Facts) -> None:
    layout = SlabLayout(fact.n, 1 << 16)
    parts = fact.n if fact.collective == "reduce_scatter" else 1
    nbytes = fact.nbytes // parts * parts
    for c in fact.selector().candidates(fact.collective, nbytes, fact.dtype):
        form = c.protocol.at(nbytes, fact.n)
        comm = cast(Communicator, SimpleNamespace(world_size=fact.n, layout=layout))
        assert c.launches == len(_pieces(comm, form, nbytes))


def test_a_split_call_costs_what_its_pieces_cost() -> None:
    layout = SlabLayout(2, 4096)
    limit = layout.piece_bytes(protocol("one_shot.ll"))
    s = Selector(layout, EVERYTHING, cast("Model", Double({"one_shot.ll": (1.0, 0.5)})))
    found = {c.name: c for c in s.candidates("all_reduce", 3 * limit + 16, "float32")}["one_shot.ll"]
    assert found.launches == 4
    assert found.terms_us == {"launch": 4 * 2.0, "bytes": (3 * limit + 16) / 2, "early": 0.0}
    assert found.predicted_us == 8.0 + (3 * limit + 16) / 2
    one = protocol("one_shot.ll")
    assert found.wire_bytes == 3 * one.wire_bytes(limit, 2) + one.wire_bytes(16, 2)


def test_choosing_looks_at_nothing_but_its_arguments() -> None:
    """All ranks must come to the same choice, so the module may not even import what differs between them."""
    imported = {
        name
        for node in ast.walk(ast.parse(inspect.getsource(selector)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name]
    }
    local = {"os", "time", "random", "socket", "mpi4py", "cupy", "platform", "fcomm.settings", "fcomm.bootstrap"}
    assert not imported & local
    assert "environ" not in inspect.getsource(selector)


def test_a_collective_without_protocols_is_one_sentence() -> None:
    with pytest.raises(NotAdmittedError, match="none is registered"):
        make().choose("all_to_all", 1, "float32")


def test_a_launch_feature_without_prices_has_those_of_its_nearest_kin() -> None:
    model = Double(dict.fromkeys(NAMES, (1.0, 0.001)), launch=("none", "late"))
    s = Selector(SlabLayout(4, 1 << 20), EVERYTHING, cast("Model", model), launch="early")
    assert s.priced == "late"
    found = explain(s, "all_reduce", 4096, "float32", model="m")
    assert (found.launch, found.priced) == ("early", "late")
    assert "no prices for dependent launch early: those of late are shown" in str(found)
    nothing = Selector(SlabLayout(4, 1 << 20), EVERYTHING, cast("Model", Double(launch=())), launch="early")
    assert not nothing.choose("all_reduce", 4096, "float32").baseline


def test_a_remembered_choice_takes_microseconds() -> None:
    s = make(dict.fromkeys(NAMES, (1.0, 0.001)))
    s.choose("all_reduce", 65536, "bfloat16")
    calls = 2000
    best = min(timeit.repeat(lambda: s.choose("all_reduce", 65536, "bfloat16"), number=calls, repeat=20)) / calls
    assert best < 20e-6, f"{best * 1e6:.2f} us"  # measured: 0.3; the target is 2, the machine may be busy


# ---- being told ------------------------------------------------------------------------------------------------------


def make(coefficients: Mapping[str, tuple[float, float]] | None = None, **options: Any) -> Selector:
    return Selector(SlabLayout(4, 1 << 20), EVERYTHING, cast("Model", Double(coefficients or {})), **options)


def test_a_name_goes_before_the_forced_one_and_that_before_the_model() -> None:
    s = make({"two_shot.ll": (0.1, 0.0)}, forced="one_shot.ll16")
    assert s.choose("all_reduce", 4096, "float32").name == "one_shot.ll16"
    assert s.choose("all_reduce", 4096, "float32", "one_shot.ll").name == "one_shot.ll"
    assert s.choose("all_gather", 4096, "float32").collective == "all_gather", "it is for another collective"
    assert make({"two_shot.ll": (0.1, 0.0)}).choose("all_reduce", 4096, "float32").name == "two_shot.ll"


def test_a_name_for_several_is_its_form() -> None:
    assert make().choose("all_reduce", 4096, "bfloat16", "custom_ar_v2").name == "custom_ar_v2.push"
    assert make().choose("all_reduce", 1 << 20, "bfloat16", "custom_ar_v2").name == "custom_ar_v2.pull_two_shot"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_shot.lamport", "one_shot.lamport is not admitted here: it does not handle int32"),
        ("one_shot.nosuch", "there is no protocol 'one_shot.nosuch'"),
        ("all_gather.ll", "all_gather.ll is a protocol for all_gather, not for all_reduce"),
    ],
)
def test_what_cannot_be_forced_is_refused(name: str, words: str) -> None:
    for s, asked in ((make(), name), (make(forced=name), "auto")):
        if "for all_gather" in words and asked == "auto":
            continue
        with pytest.raises(NotAdmittedError) as caught:
            s.choose("all_reduce", 4096, "int32", asked)
        variable = f"FCOMM_PROTOCOL={name}: " if asked == "auto" else ""
        assert str(caught.value).startswith(variable + words)


def test_the_kill_switch_leaves_the_plain_baseline_alone() -> None:
    quick = {
        "one_shot.ll": (0.1, 0.0),
        "barrier.two_shot": (3.0, 0.0),
        "barrier.one_shot": (4.0, 0.0),
        "custom_ar_v2": (1.0, 0.0),
    }
    s = make(quick, plain=True, forced="one_shot.ll")
    assert s.choose("all_reduce", 4096, "float32").name == "barrier.two_shot", "it goes before FCOMM_PROTOCOL"
    assert s.choose("all_reduce", 4096, "float32", "barrier.one_shot").name == "barrier.one_shot"
    assert s.choose("all_gather", 4096, "float32").name == "barrier.all_gather"
    assert not s.choose("reduce_scatter", 4096, "float32").baseline, "it has none"
    for name in ("one_shot.ll", "custom_ar_v2", "lamport_fp"):
        with pytest.raises(NotAdmittedError, match="FCOMM_PLAIN has switched off"):
            s.choose("all_reduce", 4096, "float32", name)


def test_plain_baselines_keep_the_contract() -> None:
    assert [p.name for p in protocols().values() if p.plain] == [
        "barrier.one_shot", "barrier.two_shot", "barrier.all_gather",
    ]  # fmt: skip


def test_a_fitted_grid_is_for_our_own_protocols() -> None:
    model = Double({}, {"one_shot.ll": (8, 256), "barrier.one_shot": (9, 256)})
    s = Selector(SlabLayout(4, 1 << 20), EVERYTHING, cast("Model", model))
    assert s.shape(protocol("one_shot.ll"), 4096) == (8, 256)
    assert s.shape(protocol("one_shot.ll16"), 4096) is None
    assert s.shape(protocol("barrier.one_shot"), 4096) is None, "a baseline keeps what its authors set"


# ---- explaining ------------------------------------------------------------------------------------------------------


@given(facts)
def test_an_explanation_is_the_choice_and_what_led_to_it(fact: Facts) -> None:
    s = fact.selector()
    found = explain(s, *fact.call, model="a double")
    assert found.choice == chosen(fact.selector(), fact.call)
    assert list(found.candidates) == s.candidates(*fact.call)
    said = json.loads(json.dumps(found.to_json()))
    assert said["choice"] == found.choice
    assert [c["protocol"] for c in said["candidates"]] == [c.name for c in found.candidates]
    for c in said["candidates"]:
        assert (c["terms_us"] is None) == (c["predicted_us"] is None)
        assert c["predicted_us"] is None or c["predicted_us"] == pytest.approx(sum(c["terms_us"].values()))
    table = str(found)
    for candidate in found.candidates:
        assert candidate.name in table
        assert candidate.refusal is None or candidate.refusal in table
    if found.choice is not None:
        assert f": {found.choice}\n" in table


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({}, "auto", "the least predicted time among"),
        ({}, "one_shot.ll", "it was named"),
        ({"forced": "one_shot.ll"}, "auto", "FCOMM_PROTOCOL names it"),
        ({"plain": True}, "auto", "FCOMM_PLAIN is set; the least predicted time among the plain baselines"),
        ({"plain": True, "forced": "one_shot.ll"}, "auto", "FCOMM_PLAIN is set"),
    ],
)
def test_the_reason_is_said(options: dict[str, Any], name: str, words: str) -> None:
    found = explain(make(dict.fromkeys(NAMES, (1.0, 0.001)), **options), "all_reduce", 4096, "float32", name, model="m")
    assert found.why.startswith(words)


def test_a_table_shows_times_by_term() -> None:
    s = make({"one_shot.ll": (1.5, 1e-3), "barrier.one_shot": (9.0, 0.0)})
    lines = str(explain(s, "all_reduce", 4096, "int32", model="model abc")).splitlines()
    assert lines[0] == "all_reduce of 4 KiB of int32 among 4 ranks, dependent launch none: one_shot.ll"
    assert "model     model abc" in lines
    rows = [line.split() for line in lines]
    assert ["protocol", "rounds", "launches", "bytes", "sent", "µs", "launch", "bytes"] in rows
    sent = protocol("one_shot.ll").wire_bytes(4096, 4)
    assert ["*", "one_shot.ll", "1", "1", str(sent), "10.10", "6.00", "4.10"] in rows
    assert any(row[:2] == ["one_shot.lamport", "it"] for row in rows), "what is not admitted has its reason"


def test_one_rank_copies() -> None:
    s = Selector(SlabLayout(1, 1 << 16), EVERYTHING, cast("Model", Double()))
    found: Explanation = explain(s, "all_reduce", 4096, "float32", model="m")
    assert found.choice is None
    assert "one rank copies" in str(found)
    assert isinstance(s.choose("all_reduce", 4096, "float32"), Protocol), "and is told what two would be"
