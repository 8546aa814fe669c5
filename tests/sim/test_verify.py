"""The search under the simulator: shipped protocols pass, every mutant is caught as what it is, and a seed repeats all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcomm.__main__ import run
from fcomm.backends import sim
from fcomm.errors import ArgumentError, SetupError
from fcomm.protocols import ENCODINGS, protocol
from fcomm.verify import Edit, check, mutants, page
from fcomm.verify.cases import Call, Case, Kernels, make_world
from fcomm.verify.command import every
from fcomm.verify.search import BATCH, Counterexample, Tally, case_of, exhaust, search, shrink
from fcomm.verify.words import headline, story

pytestmark = pytest.mark.sim

ROOT = Path(__file__).resolve().parents[2]
NAMES = [p.name for p in every()]
MUTANTS = {m.name: m for m in mutants.load()}
NVLINK = sim.LINKS["nvlink"]


@pytest.fixture(scope="module")
def shipped() -> Kernels:
    return Kernels()


def first_violation(m: mutants.Mutant, kernels: Kernels) -> Counterexample:
    with sim.Simulator(make_world(m.case, sim.link(m.link), kernels, dict(m.regions))) as s:
        outcome = s.random(0, 3000)
        assert outcome.violated
        _, events = s.trace(outcome.seed)
    return Counterexample(m.case, sim.link(m.link), outcome.seed, outcome, events)


# ---- what is shipped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_shipped_protocols_violate_nothing(shipped: Kernels, name: str) -> None:
    tally = Tally(protocol(name), 3, NVLINK)
    search(tally, shipped, 2 * BATCH)
    assert tally.found is None, "\n".join(story(tally.found))
    assert tally.schedules == 2 * BATCH


def test_an_epilogue_over_rows_violates_nothing(shipped: Kernels) -> None:
    tally = Tally(protocol("one_shot.lamport"), 2, NVLINK, rows=True)
    search(tally, shipped, BATCH)
    assert tally.found is None, "\n".join(story(tally.found))
    assert tally.schedules == BATCH


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["one_shot.ll", "one_shot.lamport", "one_shot.lamport16"])
def test_an_epilogue_over_rows_violates_nothing_in_many_schedules(shipped: Kernels, name: str, ranks: int) -> None:
    tally = Tally(protocol(name), ranks, NVLINK, rows=True)
    search(tally, shipped, 1000)
    assert tally.found is None, "\n".join(story(tally.found))


ROWS_MUTANTS = """
[[mutant]]
name = "rows-not-set-back"
fault = "kernels of whole rows set nothing back"
met = "ours"
expected = "stale data accepted"
columns = 8
calls = [["one_shot.lamport", 16], ["one_shot.lamport", 16], ["one_shot.lamport", 16], ["one_shot.lamport", 16]]
edit = [{ file = "algo/one_shot_rows.cuh", old = "turn.rearm(p, p.region[0]);", new = "" }]

[[mutant]]
name = "one-row-recorded"
fault = "one row is recorded as written: the others are not set back"
met = "ours"
expected = "stale data accepted"
columns = 8
calls = [["one_shot.lamport", 16], ["one_shot.lamport", 16], ["one_shot.lamport", 16], ["one_shot.lamport", 16]]
edit = [{ file = "algo/one_shot_rows.cuh", old = "record(p, 1, cells)", new = "record(p, 1, cells_of<Wire>(row_bytes))" }]
"""


@pytest.mark.full
def test_mutants_of_rows_are_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.toml").write_text(ROWS_MUTANTS)
    assert run(["verify", "--mutants", str(tmp_path / "rows.toml")]) == 0
    assert "2 of 2 mutants caught as expected" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", NAMES)
def test_shipped_protocols_violate_nothing_in_many_schedules(shipped: Kernels, name: str, ranks: int) -> None:
    for link in sim.LINKS.values():
        if protocol(name).refusal(None, ranks, link.capabilities) is None:
            tally = Tally(protocol(name), ranks, link, first_seed=10_000)
            search(tally, shipped, 1000 if ranks <= 4 else 200)
            assert tally.found is None, "\n".join(story(tally.found))


@pytest.mark.parametrize("name", [f"one_shot.{e}" for e in ENCODINGS])
def test_a_link_that_tears_the_unit_is_one_that_the_encoding_is_refused_on(shipped: Kernels, name: str) -> None:
    """Every refusal for lack of atomicity has its violation, and every admission none."""
    p = protocol(name)
    for link in sim.LINKS.values():
        tally = Tally(p, 2, link)
        search(tally, shipped, 4 * BATCH)
        admitted = p.refusal(None, 2, link.capabilities) is None
        assert (tally.found is None) == admitted, (link.name, tally.found and headline(tally.found))
        if tally.found is not None:
            assert tally.found.outcome.kind == "torn data accepted"


def test_enumeration_goes_through_all_schedules(shipped: Kernels) -> None:
    few, more = (Tally(protocol("one_shot.ll"), 2, NVLINK) for _ in range(2))
    exhaust(few, shipped, departures=1)
    exhaust(more, shipped, departures=2)
    assert few.found is None
    assert more.found is None
    assert few.complete
    assert more.complete
    assert 50 < few.schedules < more.schedules / 10


@pytest.mark.parametrize("name", ["one_shot.ll", pytest.param("one_shot.lamport16", marks=pytest.mark.full)])
def test_enumeration_with_three_departures(shipped: Kernels, name: str) -> None:
    tally = Tally(protocol(name), 2, NVLINK)
    exhaust(tally, shipped, departures=3)
    assert tally.complete
    assert tally.found is None


def test_enumeration_finds_a_mutant_and_shows_its_schedule_again(shipped: Kernels) -> None:
    tally = Tally(protocol("one_shot.ll"), 2, NVLINK)
    exhaust(tally, mutants.kernels_of(MUTANTS["one-copy"]), departures=2)
    assert tally.found is not None
    assert tally.found.outcome.kind == "write over unread data"
    assert len(tally.found.events) > 10


def test_at_least_two_thousand_schedules_a_minute(shipped: Kernels) -> None:
    """one_shot.ll, 3 ranks, 3 calls, 64 units; processor time, since other tests may run beside this one."""
    case = Case(3, (Call("one_shot.ll", 128, (2,)),) * 3, threads=16)
    with sim.Simulator(make_world(case, NVLINK, shipped)) as s:
        started = time.process_time()
        outcome = s.random(0, 400)
        took_s = time.process_time() - started
    assert not outcome.violated
    assert 400 / took_s * 60 > 2000


# ---- mutants --------------------------------------------------------------------------------------------------------


def test_there_are_enough_mutants_and_half_are_from_the_field() -> None:
    assert len(MUTANTS) >= 25
    assert sum(m.met == "field" for m in MUTANTS.values()) >= len(MUTANTS) / 2
    assert sum(m.ordering for m in MUTANTS.values()) >= 4
    assert max(m.changed_lines for m in MUTANTS.values()) <= mutants.MOST_LINES
    assert {m.expected for m in MUTANTS.values()} >= set(sim.KINDS[1:]) - {
        "sentinel accepted as data",
        "no end in sight",
    }


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_as_expected_and_the_sources_without_it_pass(shipped: Kernels, name: str) -> None:
    verdict = mutants.judge(MUTANTS[name], shipped, seed=0, most=1000)
    assert verdict.fault is None
    assert verdict.sound is not None
    assert verdict.sound.schedules >= 10 * verdict.outcome.schedules


def mutants_file(path: Path, edit: str, **more: str) -> Path:
    fields = {
        "name": '"mine"', "fault": '"a test"', "expected": '"deadlock"', "calls": '[["one_shot.ll", 8]]', "edit": f"[{edit}]",
    } | more  # fmt: skip
    path.write_text("[[mutant]]\n" + "\n".join(f"{k} = {v}" for k, v in fields.items()) + "\n")
    return path


@pytest.mark.parametrize(
    ("edit", "more", "message"),
    [
        ('{ file = "wire/ll.cuh", old = "no such text", new = "" }', {}, "does not apply to wire/ll.cuh: 'no such text' does not stand there"),
        ('{ file = "wire/ll.cuh", old = "static", new = "" }', {}, r"'static' stands there \d+ times"),
        ('{ file = "wire/none.cuh", old = "a", new = "" }', {}, "there is no kernel file wire/none.cuh"),
        ('{ file = "wire/ll.cuh", old = "return c.w[1] == e", new = "return (" }', {}, "could not compile one_shot.ll"),
        ("", {"expected": '"boredom"'}, "expects 'boredom'; violations are"),
        ("", {"calls": '[["two_shot.nix", 8]]'}, "there is no protocol 'two_shot.nix'"),
        ("", {"colour": '"red"'}, "has a field colour"),
        ("", {"faults": '["laziness"]'}, "has the fault 'laziness'"),
        ("", {"link": '"rope"'}, "there is no link 'rope'"),
    ],
)  # fmt: skip
def test_a_bad_list_of_mutants_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: str, more: dict[str, str], message: str
) -> None:
    path = mutants_file(tmp_path / "mine.toml", edit, **more)
    assert run(["verify", "--mutants", str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said


def test_a_patch_of_too_many_lines_is_refused(tmp_path: Path) -> None:
    path = mutants_file(
        tmp_path / "mine.toml", '{ file = "wire/ll.cuh", old = "a", new = "' + "\\n".join("b" * 25) + '" }'
    )
    with pytest.raises(ArgumentError, match="changes 26 lines, and 20 are the most"):
        mutants.load(path)


def test_a_file_that_is_no_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.toml").write_text("= 3")
    for path, message in ((tmp_path / "no.toml", "is no list of mutants"), (tmp_path / "missing.toml", "cannot read")):
        with pytest.raises(ArgumentError, match=message):
            mutants.load(path)


def test_a_mutant_that_is_not_caught_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sources as they are, called a mutant."""
    path = mutants_file(tmp_path / "mine.toml", '{ file = "wire/ll.cuh", old = "// ll: two", new = "// ll: 2" }')
    verdict = mutants.judge(mutants.load(path)[0], Kernels(), 0, 50)
    assert verdict.fault == "mine was not caught in 50 schedules"


def test_a_mutant_that_is_caught_as_something_else_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mutants_file(
        tmp_path / "mine.toml",
        '{ file = "wire/ll.cuh", old = "return c.w[1] == e && c.w[3] == e;", new = "return true;" }',
    )
    assert run(["verify", "--mutants", str(path)]) == 1
    assert "was caught as stale data accepted, and deadlock was expected" in capsys.readouterr().out


# ---- counterexamples ------------------------------------------------------------------------------------------------


def test_a_seed_repeats_its_schedule_exactly(shipped: Kernels) -> None:
    case = case_of(protocol("two_shot.lamport16"), 3, 123, None)
    traces = []
    for _ in range(2):
        with sim.Simulator(make_world(case, NVLINK, shipped)) as s:
            s.random(7, 20)  # what ran before must not matter
            traces.append(s.trace(123))
    assert traces[0][0] == traces[1][0]
    assert len(traces[0][1]) > 100
    assert np.array_equal(traces[0][1], traces[1][1])


@pytest.mark.parametrize("name", ["no-release", "ll128-one-look", "push-before-wait", "own-value-first"])
def test_a_violation_comes_again_with_its_seed(shipped: Kernels, name: str) -> None:
    m = MUTANTS[name]
    kernels = mutants.kernels_of(m)
    found = first_violation(m, kernels)
    with sim.Simulator(make_world(m.case, sim.link(m.link), kernels)) as s:
        again, events = s.trace(found.seed)
    assert replace(again, schedules=0, steps=0) == replace(found.outcome, schedules=0, steps=0)
    assert np.array_equal(events, found.events)


def test_a_counterexample_shrinks_and_tells_its_story(shipped: Kernels) -> None:
    m = MUTANTS["no-release"]
    kernels = mutants.kernels_of(m)
    large = replace(
        m.case, ranks=3, calls=(Call("one_shot.flag", 90, (2, 1, 3)),) * 4, launch="late", devices=1, in_place=True
    )
    with sim.Simulator(make_world(large, NVLINK, kernels)) as s:
        outcome = s.random(0, 500)
        _, events = s.trace(outcome.seed)
    small = shrink(Counterexample(large, NVLINK, outcome.seed, outcome, events), kernels)
    assert small.outcome.kind == outcome.kind == "stale data accepted"
    assert small.case.ranks == 2
    assert len(small.case.calls) == 1
    assert small.case.calls[0].count < 20
    assert (small.case.launch, small.case.in_place, small.case.devices) == ("none", False, 0)
    text = "\n".join(story(small))
    assert re.search(
        r"stale data accepted: rank \d, block 0, thread \d+, in call 0, at cell \d+ of rank \d's slot for rank \d \(flag, copy 0\)",
        text,
    )
    assert re.search(r"rank \d, call 0 block 0 thread \d+: pushes cell \d+ of rank \d's slot", text)
    assert re.search(r"looks at cell \d+ .*: sees what was there before the first call, and 1 newer than that", text)
    assert re.search(r"looks at flag 0 of rank \d's slot .* with acquire: sees rank \d's of call 0", text)
    assert "of its result, which is wrong" in text
    assert len(text.splitlines()) < 60


def test_check_shows_what_is_wrong_with_a_first_version_and_passes_the_right_one() -> None:
    """An encoding in the making: the epoch beside the payload, but in a store of its own."""
    shipped = "st_relaxed_sys(slot, Cell{{v.w[0], v.w[1], v.w[2], e}});"
    first = """for (int i = 0; i < 3; i++) st_relaxed_sys(&slot->w[i], v.w[i]);
    st_relaxed_sys(&slot->w[3], e);"""
    said = check("one_shot.ll16", [Edit("wire/ll16.cuh", shipped, first)])
    assert "torn data accepted" in said
    assert "case: 2 ranks; calls (elements on blocks): one_shot.ll16 1 on 1; 4 threads" in said
    assert check("one_shot.ll16", schedules=60).startswith("no violation in 60 schedules")
    with pytest.raises(ArgumentError, match=r"the patch your edit does not apply to wire/ll16\.cuh"):
        check("one_shot.ll16", [Edit("wire/ll16.cuh", "nothing of the kind", "")])


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protocol", "one_shot.nix"], "there is no protocol 'one_shot.nix'"),
        (["--protocol", "all_gather.lamport"], "does not exist: it would change bytes"),
        (["--link", "rope"], "there is no link 'rope'; the names are nvlink"),
        (["--ranks", "0"], "--ranks 0: an exchange needs at least two ranks"),
        (["--ranks", "two"], "write numbers of ranks"),
        (["--schedules", "0"], "--schedules 0: at least one"),
        (["--ranks", "17"], "--ranks 17: the simulator is for up to 16 ranks"),
        (["--seconds", "-1"], "--seconds -1: a time above zero"),
        (["--seconds", "nan"], "--seconds nan: a time above zero"),
        (["--mutant", "one-copy"], "--mutant one-copy chooses among those of --mutants: give both"),
        (["--schedules", "many"], "invalid int value"),
        (["--calls", "0"], "--calls 0: at least one"),
        (["--seed", "-1"], "--seed -1: not negative"),
        (["--exhaustive", "-1"], "--exhaustive -1: not negative"),
        (
            ["--exhaustive", "1", "--ranks", "3"],
            "--exhaustive is for 2 ranks, 4 calls and the weak memory: leave out --ranks",
        ),
        (["--exhaustive", "1", "--ranks", "2,3"], "leave out --ranks"),
        (["--exhaustive", "--calls", "2", "--sequential"], "leave out --calls and --sequential"),
        (["--protocol", ","], "--protocol ',' names nothing"),
        (["--link", " , "], "--link ' , ' names nothing"),
        (["--ranks", ","], "--ranks ,: write numbers of ranks"),
        (["--mutants", "--mutant", ","], "--mutant ',' names nothing"),
        (["--page", "/nosuch/page.md"], "--page /nosuch/page.md cannot be written: there is no folder /nosuch"),
        (["--page", "/"], "--page / cannot be written: it is a folder"),
        (["--protocol", "one_shot.ll16", "--link", "pcie"], "one_shot.ll16 is not admitted on pcie"),
        (["--mutants", "--mutant", "nix"], "there is no mutant 'nix'"),
        (["--rows", "--protocol", "two_shot.ll"], "--rows: norm needs whole rows"),
        (["--rows", "--exhaustive"], "--rows is for searches: leave out --exhaustive"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["verify", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert message in said


def test_a_source_that_does_not_compile_is_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise SetupError("c++ could not compile one_shot.ll-float32-n2: expected ';'")

    monkeypatch.setattr(sim, "compile_kernel", fails)
    assert run(["verify", "--protocol", "one_shot.ll", "--ranks", "2"]) == 2
    assert "could not compile" in capsys.readouterr().err


def test_a_pass_says_what_was_covered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--protocol", "one_shot.ll", "--ranks", "2", "--schedules", "60", "--seed", "30"]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"one_shot.ll, 2 ranks, nvlink: no violation in 60 schedules \(\d+ steps, seeds 30..89\)\n", said
    )


def test_a_violation_is_exit_1_and_its_command_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--protocol", "one_shot.lamport16", "--ranks", "3", "--link", "pcie", "--force"]) == 1
    said = capsys.readouterr().out
    command = re.search(r"again: python -m fcomm (.*)", said)
    assert command is not None
    assert run(command.group(1).split()) == 1
    again = capsys.readouterr().out
    assert said.splitlines()[0] == again.splitlines()[0]


def test_interrupting_prints_what_was_covered() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "fcomm", "verify", "--protocol", "one_shot.ll", "--ranks", "2", "--schedules", "100000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip
    assert child.stderr is not None
    line = child.stderr.readline()  # a progress line
    assert re.search("schedules .* so far", line)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert re.search(r"interrupted; no violation in \d+ schedules \(\d+ steps\)", out)
    assert "one_shot.ll, 2 ranks, nvlink" in out


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_has_all_protocols_and_mutants() -> None:
    text = (ROOT / "docs" / "verification.md").read_text()
    assert page.START in text
    assert page.names_in(text) == set(NAMES)
    assert set(MUTANTS) <= set(re.findall(r"^\| ([\w-]+) \|", text, re.MULTILINE))
    assert "**" not in text.split(page.START)[1]  # a violation would be bold
