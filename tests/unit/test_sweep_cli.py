"""The sweep's command line: what it understands, and what it refuses in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import request as rq
from experiments import sweep
from fcomm.errors import ArgumentError, FcommError, RecordError
from fcomm.measure import Case
from fcomm.protocols import protocols
from fcomm.sizes import format_size, parse_size


def build(*argv: str, started: int = 8) -> rq.Request:
    return rq.build_request(rq.parser().parse_args(argv), started)


def test_defaults() -> None:
    request = build()
    assert request.sizes == tuple(1024 << k for k in range(11))
    assert request.ranks == (2, 4, 8)
    assert request.dtypes == ("float32",)
    assert request.protocols == ()
    assert request.collectives == ("all_reduce",)
    assert (request.modes, request.launches, request.inputs, request.calls) == ((), (), (), 0)
    assert request.budget_s == 60
    assert request.seed == 0


def test_lists_are_sorted_and_each_once() -> None:
    assert build("--sizes", "64K, 4K,4096,1K").sizes == (1024, 4096, 65536)
    assert build("--sizes", "1K..8K,6K").sizes == (1024, 2048, 4096, 6144, 8192)
    assert build("--ranks", "8,2..4,2").ranks == (2, 3, 4, 8)
    assert build("--dtypes", "bf16,f32,bfloat16").dtypes == ("bfloat16", "float32")
    assert build("--protocols", "barrier.one_shot,one_shot.ll").protocols == ("barrier.one_shot", "one_shot.ll")
    assert build("--budget", "1.5m").budget_s == 90


def test_what_is_left_open_is_the_backends_own() -> None:
    on_cpu, on_gpu = build().resolved("cpu"), build().resolved("cuda")
    assert (on_cpu.modes, on_cpu.launches, on_cpu.calls) == (("host",), ("none",), 2000)
    assert (on_gpu.modes, on_gpu.launches, on_gpu.calls) == (("graph",), ("none", "late"), 200)
    assert on_gpu.resolved("cuda") == on_gpu
    asked = build("--modes", "host", "--launch", "late", "--calls", "7").resolved("cuda")
    assert (asked.modes, asked.launches, asked.calls) == (("host",), ("late",), 7)
    with pytest.raises(ArgumentError, match="graph is not for the cpu backend; use host, prepared"):
        build("--modes", "graph").resolved("cpu")
    with pytest.raises(ArgumentError, match="--launch late is for GPUs"):
        build("--launch", "none,late").resolved("cpu")


def test_launch_shapes_are_searched_on_gpus_where_the_budget_has_room() -> None:
    def shapes(backend: str, *argv: str) -> str:
        return build(*argv).resolved(backend).shapes

    assert shapes("cuda") == "default"
    assert shapes("cuda", "--budget", "2m") == "search"
    assert shapes("cuda", "--budget", "2m", "--shapes", "default") == "default"
    assert shapes("cpu", "--budget", "1h") == "default"
    assert shapes("cpu", "--shapes", "search") == "search"
    old = {key: value for key, value in vars(build()).items() if key != "shapes"}  # a run of before there was a search
    assert rq.Request.from_json(old).shapes == ""


def test_protocols_belong_to_the_collectives_asked_for() -> None:
    both = build("--collective", "all_gather,all_reduce", "--protocols", "all_gather.ll,one_shot.ll")
    assert both.collectives == ("all_gather", "all_reduce")
    with pytest.raises(ArgumentError, match=r"one_shot.*' is for all_reduce, and this sweep is of all_gather"):
        build("--collective", "all_gather", "--protocols", "one_shot.ll")


@pytest.mark.parametrize(("started", "ranks"), [(1, (1,)), (2, (2,)), (3, (2, 3)), (8, (2, 4, 8)), (6, (2, 4, 6))])
def test_default_ranks(started: int, ranks: tuple[int, ...]) -> None:
    assert build(started=started).ranks == ranks


BAD = {
    "--sizes": ["", "0", "-4", "4X", "1K,,2K", "8K..1K", "1..", "..4K", "1e3", "1K..64G", "3", "1K,1022", "0K..4K"],
    "--ranks": ["", "0", "-1", "9", "2,9", "8..2", "two", "1.5", "2..", "99999999999"],
    "--dtypes": ["", "float64", "f32,,bf16", "int8"],
    "--protocols": ["", "nope", "one_shot.ll,", "auto"],
    "--modes": ["", "fast", "host,"],
    "--calls": ["0", "-1", "many", "99999999"],
    "--budget": ["0", "0s", "-5s", "soon", "10 years", "1m30s"],
    "--seed": ["-1", "x", "1.5"],
    "--backend": ["gpu"],
    "--collective": ["", "allreduce", "all_reduce,"],
    "--launch": ["", "soon", "none,,late"],
    "--inputs": ["", "here"],
    "--share": ["0", "101", "-5", "all"],
    "--shapes": ["", "best", "4x256"],
}


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, values in BAD.items() for v in values])
def test_nonsense_is_one_sentence(option: str, value: str) -> None:
    with pytest.raises(FcommError) as caught:
        build(f"{option}={value}")
    message = str(caught.value)
    assert "\n" not in message
    assert option.lstrip("-") in message or value in message
    from fcomm.bootstrap import exit_code

    assert exit_code(caught.value) == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--modes", "skew", "--delays", "1,-2"], "--delays '-2' is not a number of microseconds"),
        (["--modes", "skew", "--delays", "1,soon"], "--delays 'soon' is not a number of microseconds"),
        (["--modes", "skew", "--delays", "nan"], "--delays 'nan' is not"),
        (["--modes", "skew", "--delays", "1e6"], "between 0 and 100000"),
        (["--modes", "skew", "--delays", "1,,2"], "empty item"),
        (["--delays", "1,2"], "--delays is for --modes skew"),
        (["--late-rank", "0"], "--late-rank is for --modes skew"),
        (["--modes", "skew", "--late-rank", "2"], "--late-rank 2 is no rank of 2"),
        (["--modes", "skew", "--late-rank", "-1"], "--late-rank -1 is no rank of 2"),
    ],
)
def test_bad_delays_are_one_sentence(argv: list[str], says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        build(*argv)
    assert says in str(caught.value)


def test_delays_are_cases_of_their_own() -> None:
    asked = build(
        "--modes", "skew", "--protocols", "one_shot.ll,barrier.one_shot", "--delays", "5,0,2.5,5", "--late-rank", "1"
    )
    cases = _candidates(asked, "cpu", 4)
    assert [(c.protocol, c.delay_us, c.late_rank) for c in cases] == [
        (name, us, 1) for name in ("one_shot.ll", "barrier.one_shot") for us in (0.0, 2.5, 5.0)
    ]
    assert {c.input for c in cases} == {"array"}
    assert build("--modes", "skew").resolved("cuda").delays_us == rq.DELAYS_US["cuda"]
    assert build("--modes", "skew").resolved("cpu").delays_us == rq.DELAYS_US["cpu"]
    assert build("--modes", "prepared").resolved("cpu").delays_us == ()
    assert _candidates(asked, "cpu", 1) == {}  # nobody to be late for
    text = rq.dry_run(
        build("--dry-run", "--backend", "cpu", "--modes", "skew", "--delays", "0,300", "--sizes", "1K", "--ranks", "2")
    )
    assert text.count("skew 300us") == text.count("skew 0us") == len(rq.CPU_PROTOCOLS)


def test_a_sandwich_is_for_gpus_and_its_neighbours_for_dependent_launch() -> None:
    with pytest.raises(
        ArgumentError, match="--modes sandwich is for GPUs: the cpu backend runs one grid after the other"
    ):
        build("--modes", "prepared,sandwich").resolved("cpu")
    with pytest.raises(
        ArgumentError, match="--modes sandwich_dependent is about dependent launch: use --launch late or early"
    ):
        build("--modes", "sandwich_dependent", "--launch", "none").resolved("cuda")
    both = build("--modes", "sandwich,sandwich_dependent", "--protocols", "one_shot.ll,barrier.one_shot")
    assert [(c.protocol, c.mode, c.dependent_launch, c.input) for c in _candidates(both, "cuda", 4)] == [
        (name, mode, launch, where)
        for name, where in (("one_shot.ll", "array"), ("barrier.one_shot", "staging"))
        for mode, launch in (("sandwich", "none"), ("sandwich", "late"), ("sandwich_dependent", "late"))
    ]
    whole = _candidates(both, "cuda", 4, dtype="int32")
    assert all("normalises floating-point numbers" in str(why) for why in whole.values())


def test_unknown_options_and_abbreviations_are_refused() -> None:
    for argv in (["--size", "1K"], ["--bogus"], ["extra"]):
        with pytest.raises(ArgumentError):
            build(*argv)


def test_sizes_must_be_whole_elements_of_every_dtype() -> None:
    assert build("--sizes", "1022", "--dtypes", "bf16").sizes == (1022,)
    with pytest.raises(ArgumentError, match="1022 is no whole number of float32"):
        build("--sizes", "1022", "--dtypes", "bf16,f32")


def test_more_ranks_than_started_says_how_to_start_them() -> None:
    with pytest.raises(ArgumentError, match="asks for 4 ranks and 1 was started: use mpirun -n 4"):
        build("--ranks", "2,4", started=1)


@given(st.integers(1, 1 << 40))
def test_labels_are_read_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes
    assert parse_size(str(nbytes)) == nbytes


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    try:
        nbytes = parse_size(text)
    except ArgumentError:
        return
    assert nbytes > 0


@given(st.lists(st.sampled_from([*"0123456789KMG.,- ", ".."]), max_size=8).map("".join))
def test_any_list_is_sizes_or_an_error(text: str) -> None:
    try:
        sizes = rq.parse_sizes(text)
    except ArgumentError:
        return
    assert sizes
    assert all(0 < b <= rq.LARGEST for b in sizes)
    assert list(sizes) == sorted(set(sizes))


def test_a_request_survives_json() -> None:
    import json
    from dataclasses import asdict

    request = build("--sizes", "1K,3K", "--budget", "90", "--share", "12.5", "--inputs", "staging").resolved("cuda")
    assert rq.Request.from_json(json.loads(json.dumps(asdict(request)))) == request
    with pytest.raises(RecordError):
        rq.Request.from_json({"sizes": [1]})


def test_a_dry_run_lists_every_case_and_the_time() -> None:
    text = rq.dry_run(build("--dry-run", "--sizes", "1K,4K", "--backend", "cpu", started=1))
    names = rq.CPU_PROTOCOLS
    lines = text.splitlines()[1:-1]
    assert len(lines) == 3 * 2 * len(names)  # n = 2, 4, 8 as under mpirun -n 8
    assert all(any(name in line for name in names) for line in lines)
    last = text.splitlines()[-1]
    assert f"{len(lines)} cases on the cpu backend" in last
    assert "10 calls of each, then the budget of 60 s is spent where most is in doubt" in last
    assert "would not fit" in rq.dry_run(build("--dry-run", "--backend", "cpu", "--budget", "20s", started=1))


def test_a_dry_run_is_not_refused_for_ranks_that_nobody_started() -> None:
    assert build("--dry-run", "--ranks", "3,5", started=1).ranks == (3, 5)


EVERYTHING = frozenset({"atomic4", "atomic8", "atomic16", "acquire_release", "line128"})


def _candidates(request: rq.Request, backend: str, n: int, **facts: Any) -> dict[Case, str | None]:
    point = {"collective": "all_reduce", "dtype": "bfloat16", "nbytes": 4096, "capabilities": EVERYTHING, **facts}
    return rq.candidates(request.resolved(backend), n=n, **point)


def test_a_protocol_that_was_named_keeps_its_reason_and_others_are_left_out() -> None:
    named = build("--protocols", "one_shot.ll,custom_ar_v2")
    reasons = {c.protocol: why for c, why in _candidates(named, "cpu", 4, nbytes=1022).items()}
    assert reasons == {"one_shot.ll": None, "custom_ar_v2": "it takes multiples of 16 bytes, not 1022"}
    everything = _candidates(build("--launch", "none", "--inputs", "array"), "cuda", 4, nbytes=1022)
    assert set(everything.values()) == {None}
    assert not {"custom_ar_v2", "custom_ar_v2.push", "lamport_fp"} & {c.protocol for c in everything}
    every = [p.name for p in protocols().values() if p.collective == "all_reduce"]
    assert [c.protocol for c in _candidates(build("--protocols", "all"), "cpu", 4)] == every
    few = _candidates(build(), "cpu", 4)
    assert tuple(c.protocol for c in few) == rq.CPU_PROTOCOLS
    assert set(few.values()) == {None}
    without = _candidates(build("--launch", "none"), "cuda", 4, capabilities=EVERYTHING - {"line128"})
    assert not any("ll128" in c.protocol for c in without)
    assert [c.protocol for c in _candidates(build(), "cpu", 1)] == ["copy"]


def test_both_launch_features_are_candidates_on_gpus() -> None:
    cases = _candidates(build("--protocols", "one_shot.ll"), "cuda", 4)
    assert [(c.mode, c.dependent_launch, c.input) for c in cases] == [
        ("graph", "none", "array"),
        ("graph", "late", "array"),
    ]
    cases = _candidates(build("--protocols", "one_shot.ll"), "cuda", 4, launches=["none"])
    assert [c.dependent_launch for c in cases] == ["none"]


def test_pull_protocols_find_their_input_in_the_staging_buffer_in_graphs() -> None:
    """As their originals do; and whether a name for several pulls depends on the size."""
    names = "one_shot.ll,barrier.one_shot,custom_ar_v2.pull_two_shot,custom_ar_v2.push,custom_ar_v2"
    request = build("--protocols", names, "--launch", "none", "--modes", "graph,host")

    def inputs(nbytes: int, *more: str) -> dict[tuple[str, str], set[str]]:
        asked = build("--protocols", names, "--launch", "none", "--modes", "graph,host", *more)
        found: dict[tuple[str, str], set[str]] = {}
        for c in _candidates(asked, "cuda", 8, nbytes=nbytes):
            found.setdefault((c.protocol, c.mode), set()).add(c.input)
        return found

    assert request.inputs == ()
    small, large = inputs(4096), inputs(1 << 20)
    for found in (small, large):
        assert found["one_shot.ll", "graph"] == found["custom_ar_v2.push", "graph"] == {"array"}
        assert found["barrier.one_shot", "graph"] == found["custom_ar_v2.pull_two_shot", "graph"] == {"staging"}
        assert found["barrier.one_shot", "host"] == {"array"}
    assert small["custom_ar_v2", "graph"] == {"array"}
    assert large["custom_ar_v2", "graph"] == {"staging"}
    both = inputs(4096, "--inputs", "array,staging")
    assert both["barrier.one_shot", "graph"] == {"array", "staging"}
    assert both["one_shot.ll", "graph"] == {"array"}


def test_floors_are_one_for_each_grid_and_launch_feature_of_a_point() -> None:
    def surveyed(name: str, blocks: int, launch: str = "none", **facts: Any) -> sweep.Surveyed:
        case = Case("all_reduce", name, "float32", 4096, 2, facts.pop("mode", "graph"), None, launch)
        return sweep.Surveyed(case, blocks=blocks, threads=256, cost_s=1e-3, **facts)

    found = [
        surveyed("one_shot.ll", 2), surveyed("one_shot.ll16", 2), surveyed("two_shot.ll", 3), surveyed("one_shot.ll", 2, "late"),
        surveyed("one_shot.flag", 9, status="wrong"), surveyed("one_shot.ll", 7, mode="host"),
    ]  # fmt: skip
    floors = sweep._floors(found)
    assert [(f.case.protocol, f.case.shape, f.case.dependent_launch) for f in floors] == [
        ("floor", (2, 256), "none"), ("floor", (3, 256), "none"), ("floor", (2, 256), "late"),
    ]  # fmt: skip
    assert all(f.cost_s == 1e-3 for f in floors)
