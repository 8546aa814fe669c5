"""The sweep's command line: what it understands, and what it refuses in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import request as rq
from fcomm.errors import ArgumentError, FcommError, RecordError
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
    assert request.modes == ("host",)
    assert request.budget_s == 60
    assert request.seed == 0


def test_lists_are_sorted_and_each_once() -> None:
    assert build("--sizes", "64K, 4K,4096,1K").sizes == (1024, 4096, 65536)
    assert build("--sizes", "1K..8K,6K").sizes == (1024, 2048, 4096, 6144, 8192)
    assert build("--ranks", "8,2..4,2").ranks == (2, 3, 4, 8)
    assert build("--dtypes", "bf16,f32,bfloat16").dtypes == ("bfloat16", "float32")
    assert build("--protocols", "barrier.one_shot,one_shot.ll").protocols == ("barrier.one_shot", "one_shot.ll")
    assert build("--budget", "1.5m").budget_s == 90


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

    request = build("--sizes", "1K,3K", "--budget", "90")
    assert rq.Request.from_json(json.loads(json.dumps(asdict(request)))) == request
    with pytest.raises(RecordError):
        rq.Request.from_json({"sizes": [1]})


def test_a_dry_run_lists_every_case_and_the_time() -> None:
    text = rq.dry_run(build("--dry-run", "--sizes", "1K,4K", "--backend", "cpu", started=1))
    names = [p.name for p in protocols().values() if p.collective == "all_reduce"]
    lines = text.splitlines()[1:-1]
    assert len(lines) == 3 * 2 * len(names)  # n = 2, 4, 8 as under mpirun -n 8
    assert all(any(name in line for name in names) for line in lines)
    last = text.splitlines()[-1]
    assert f"{len(lines)} cases on the cpu backend" in last
    assert "at most the budget of 60 s" in last


def test_a_dry_run_is_not_refused_for_ranks_that_nobody_started() -> None:
    assert build("--dry-run", "--ranks", "3,5", started=1).ranks == (3, 5)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_candidates_keep_the_reason_of_a_protocol_that_was_named(n: int) -> None:
    admitted: dict[str, Any] = {"a": None, "b": "it does not handle int32"}
    everything = build()
    assert rq.candidates(everything, n, "int32", admitted) == {"a": None}
    assert rq.candidates(everything, 1, "int32", admitted) == {"copy": None}
