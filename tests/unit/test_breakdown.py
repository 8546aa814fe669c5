"""Ablations and stages in requests, records, tables and figures: what they may be asked for, and what never reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import experiments
from experiments import breakdown, fitting, frames, plots
from experiments import request as rq
from experiments.tables import nccl_table, summary_tables, variant_table
from fcomm.errors import ArgumentError, FcommError, NotAdmittedError, RecordError
from fcomm.measure import NOT_CHECKED, Case, in_doubt
from fcomm.records import Recorder
from fcomm.variants import LADDER, SHIPPED, STAGES, WITHOUT
from tests.synthetic import CPU, GPU

US = dict(zip(STAGES, (1.0, 0.3, 0.4, 0.1, 0.2, 0.5, -0.2, 0.6, 0.1, 1.0), strict=True))
"""What each stage takes in the runs that are made up here; 4.0 in all."""


def _run(
    out: Path,
    variants: Mapping[str, float],
    provenance: dict[str, Any] = GPU,
    sizes: Sequence[int] = (2048,),
    **facts: Any,
) -> Path:
    """A run of a few sizes, us by variant; all calls take the same time."""
    recorder = Recorder.create(out, "here", str(provenance["backend"]), {"seed": 0, "sizes": list(sizes)})
    recorder.begin(provenance)
    emulated = provenance["backend"] == "cpu"
    cases = [
        Case(
            "all_reduce",
            "one_shot.lamport16",
            "bfloat16",
            nbytes,
            4,
            "graph",
            (2, 128) if name != SHIPPED else None,
            "late",
            variant=name,
        )
        for nbytes in sizes
        for name in variants
    ]
    recorder.plan(
        [
            {
                "blocks": 2, "threads": 128, "placement": "4 ranks on 1 GPU", "sms_per_rank": 33, "warmup": 1, "status": "measured",
                "checked_calls": 4 if c.kind.checked else 0, "wrong": 0 if c.kind.checked else NOT_CHECKED, "reason": "",
                "emulated": emulated, "time_sliced": False, "planned": 10, **c.columns(), "case": k, **facts,
            }
            for k, c in enumerate(cases)
        ]
    )  # fmt: skip
    for k, us in enumerate([*variants.values()] * len(sizes)):
        recorder.append(k, np.full((10, 4), round(us * 1e3), np.int64))
    recorder.finish()
    recorder.close()
    return recorder.path


def _ladder(shipped_us: float = 4.0) -> dict[str, float]:
    upto, total = {}, 0.0
    for stage, us in US.items():
        total += us
        upto[LADDER[stage].name] = total
    return {SHIPPED: shipped_us, **upto, WITHOUT["reduce"].name: 3.95}


# ---- what is asked for -----------------------------------------------------------------------------------------------


def build(*argv: str) -> rq.Request:
    return rq.build_request(rq.parser().parse_args(argv), 8)


def test_a_sweep_is_of_the_shipped_kernels_unless_variants_are_named() -> None:
    assert build().variants == (SHIPPED,)
    assert build("--variants", "shipped,rearm_last,shipped").variants == (SHIPPED, "rearm_last")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--variants", "quick"), "--variants 'quick' is not known; use shipped, arrival_order, rearm_first"),
        (("--variants", "to_poll"), "--variants 'to_poll' is not known"),  # results of no use: for the breakdown alone
        (("--variants", "no_reduce"), "--variants 'no_reduce' is not known"),
        (("--variants", ""), "--variants '' has an empty item"),
        (
            ("--variants", "shipped,rearm_last", "--protocols", "one_shot.ll,two_shot.ll128"),
            "--variants 'rearm_last': none of these protocols has it: its encodings set nothing back",
        ),
        (
            ("--variants", "poll_one", "--collective", "all_gather"),
            "--variants 'poll_one': none of these protocols has it: it is for one_shot and two_shot",
        ),
    ],
)
def test_variants_that_cannot_be_swept(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        build(*argv)
    assert message in str(error.value)


def test_candidates_are_the_variants_that_each_protocol_has() -> None:
    request = build(
        "--protocols",
        "one_shot.ll,one_shot.lamport16,barrier.one_shot",
        "--variants",
        "shipped,rearm_first,own_in_memory",
    )
    every = frozenset({"atomic4", "atomic8", "atomic16", "acquire_release"})
    found = rq.candidates(request.resolved("cpu"), "all_reduce", "bfloat16", 2048, 4, every)
    assert [(c.protocol, c.variant) for c, why in found.items() if why is None] == [
        ("one_shot.ll", SHIPPED),
        ("one_shot.ll", "own_in_memory"),
        ("one_shot.lamport16", SHIPPED),
        ("one_shot.lamport16", "rearm_first"),
        ("one_shot.lamport16", "own_in_memory"),
        ("barrier.one_shot", SHIPPED),
    ]
    assert len(found) == 6


def test_a_dry_run_names_variants() -> None:
    text = rq.dry_run(
        build(
            "--protocols",
            "one_shot.ll",
            "--variants",
            "shipped,poll_one",
            "--sizes",
            "1K",
            "--ranks",
            "2",
            "--backend",
            "cpu",
        )
    )
    assert [line.split()[4:6] for line in text.splitlines() if "one_shot" in line] == [
        ["one_shot.ll", "host"],
        ["one_shot.ll", "poll_one"],
    ]


def asked(*argv: str, started: int = 8) -> rq.Request:
    return breakdown.build_request(breakdown.parser().parse_args(argv), started)


def test_a_breakdown_asks_for_all_stages_of_messages_with_equal_parts() -> None:
    request = asked("--ranks", "2,3")
    assert request.sizes == (2112, 16416, 131136)
    assert request.variants == breakdown.VARIANTS
    assert request.variants[0] == SHIPPED
    assert len(set(request.variants)) == 1 + len(LADDER) + len(WITHOUT)
    assert asked("--sizes", "2K,64K", "--launch", "none,late").launches == ("none", "late")


@pytest.mark.parametrize(
    ("argv", "kind", "message"),
    [
        (("--protocols", "custom_ar_v2.push"), NotAdmittedError, "custom_ar_v2.push cannot be broken down into stages: it is for one_shot"),
        (("--protocols", "all_gather.ll"), NotAdmittedError, "all_gather.ll cannot be broken down"),
        (("--protocols", "one_shot.quick"), NotAdmittedError, "there is no protocol 'one_shot.quick'"),
        (("--protocols", ""), NotAdmittedError, "there is no protocol ''"),
        (("--ranks", "1"), ArgumentError, "start at least two ranks"),
        (("--sizes", "1000"), ArgumentError, "--sizes 1000: a breakdown among 2, 4, 8 ranks takes multiples of 128 bytes"),
        (("--launch", "soon"), ArgumentError, "--launch 'soon' is not known; use none, late, early"),
        (("--mode", "quick"), ArgumentError, "--mode 'quick' is not known; use graph"),
        (("--mode", "skew"), ArgumentError, "--mode 'skew' is not known; use graph, isolated, host, prepared"),
        (("--dtype", "int8"), FcommError, "int8"),
        (("--budget", "soon"), ArgumentError, "--budget 'soon' is not a time"),
    ],
)  # fmt: skip
def test_what_a_breakdown_refuses(argv: tuple[str, ...], kind: type[FcommError], message: str) -> None:
    with pytest.raises(kind) as error:
        asked(*argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# ---- what reads them, and what does not ------------------------------------------------------------------------------


def test_stages_add_up(tmp_path: Path) -> None:
    run = experiments.load(_run(tmp_path, _ladder()))
    found = frames.stages(run)
    assert found["stage"].tolist() == list(STAGES)
    assert found["stage_us"].tolist() == pytest.approx(list(US.values()))
    assert found["share"].sum() == pytest.approx(1)
    assert found["up_to_us"].iloc[-1] == found["shipped_us"].iloc[0] == 4.0
    assert found.set_index("stage")["alone_us"].dropna().to_dict() == pytest.approx({"reduce": 0.05})
    text = breakdown.table(run)
    assert "| rearm    |          2.300 |       2.300 to 2.300 |    -0.200 |   -5.0% |                  - |" in text
    assert "| residual |          4.000 |   shipped, once more |     0.000 |    0.0% |                  - |" in text
    assert "Stages add up to 4.000 of 4.000 µs: within 10%." in text
    assert "4 MPI ranks sharing one NVIDIA H200 through MPS" in text
    assert "EMULATION" not in text
    assert plots.png(plots.breakdown(run)).startswith(b"\x89PNG")


def test_stages_that_do_not_add_up_are_called_so(tmp_path: Path) -> None:
    text = breakdown.table(experiments.load(_run(tmp_path, _ladder(shipped_us=5.0))))
    assert "Stages add up to 4.000 of 5.000 µs: NOT within 10%." in text
    assert "|     1.000 |   20.0% |" in text


def test_an_emulation_is_called_one(tmp_path: Path) -> None:
    run = experiments.load(_run(tmp_path, _ladder(), provenance=CPU))
    assert "## EMULATION on a CPU: one_shot.lamport16, 4 ranks" in breakdown.table(run)
    assert "EMULATION" in str(plots.breakdown(run).get_label())


def test_what_is_not_checked_says_so(tmp_path: Path) -> None:
    run = experiments.load(_run(tmp_path, _ladder()))
    by_name = run.cases.set_index("variant")
    assert by_name["wrong"]["to_poll"] == NOT_CHECKED
    assert by_name["checked_calls"]["to_poll"] == 0 < by_name["checked_calls"][SHIPPED]
    lines = nccl_table(run).splitlines()
    (shipped,) = (line.split() for line in lines if "lamport16  " in line)
    (poll,) = (line.split() for line in lines if "to_poll" in line)
    assert (shipped[-2], poll[-2]) == ("0", "N/A")


def test_a_run_that_lacks_a_stage_is_no_breakdown(tmp_path: Path) -> None:
    lacking = {k: us for k, us in _ladder().items() if k != "to_poll"}
    run = experiments.load(_run(tmp_path, lacking))
    for read in (breakdown.table, plots.breakdown):
        with pytest.raises(RecordError, match="has no case with all stages: it is not a breakdown"):
            read(run)
    sliced = experiments.load(_run(tmp_path, _ladder(), time_sliced=True))
    with pytest.raises(RecordError, match="time-sliced"):
        breakdown.table(sliced)


def test_figures_tables_and_fits_read_shipped_kernels_alone(tmp_path: Path) -> None:
    sizes = (1024, 2048, 4096, 8192)
    run = experiments.load(_run(tmp_path, {SHIPPED: 4.0, "poll_one": 2.0, "to_launch": 1.0}, sizes=sizes))
    assert len(run.latency) == 3 * len(sizes)
    assert run.for_figures()["variant"].tolist() == frames.measured(run)["variant"].tolist() == [SHIPPED] * 4
    assert fitting.read([run]).frame["latency_us"].tolist() == [4.0] * 4
    (best,) = summary_tables(run).values()
    assert "4.00" in best
    assert "2.00" not in best
    alone = experiments.load(_run(tmp_path, {"poll_one": 2.0}))
    readers: list[Callable[[], object]] = [
        alone.for_figures,
        lambda: plots.figures(alone),
        lambda: summary_tables(alone),
    ]
    for read in readers:
        with pytest.raises(RecordError, match="has times of variants alone"):
            read()
    with pytest.raises(RecordError, match="no graph times of a protocol"):
        fitting.read([alone])


def test_ablations_stand_beside_what_they_are_ablations_of(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"inexact": 300, "ranks_differ": 200, "calls_differ": 7}
    run = experiments.load(
        _run(tmp_path, {SHIPPED: 4.0, "poll_one": 5.0, "arrival_order": 3.0, "to_launch": 1.0}, **facts)
    )
    text = variant_table(run)
    assert "| `poll_one` | 5.000 | 5.000 to 5.000 | 4.000 | 1.250 | 0 | 0 | 0 |" in text
    assert (
        "| `arrival_order` | 3.000 | 3.000 to 3.000 | 4.000 | 0.750 | 300 of 4096 | 200 of 1024 | 7 of 4096 |" in text
    )
    assert "to_launch" not in text


def test_variants_of_a_case_are_no_rivals_of_it() -> None:
    cases = [Case("all_reduce", "one_shot.ll", "bfloat16", 2048, 4, variant=v) for v in (SHIPPED, "poll_one")]
    noisy = np.linspace(1.0, 1.2, 20)
    quick, slow = (in_doubt({c: noisy * k for c, k in zip(cases, f, strict=True)}) for f in ((1, 1), (1, 9)))
    assert quick == slow  # each alone in its group, whatever the other takes


def test_records_from_before_there_were_variants_are_of_shipped_kernels(tmp_path: Path) -> None:
    path = _run(tmp_path, {SHIPPED: 4.0}) / "launch-0"
    (path / "seal.json").unlink()
    table = pq.read_table(path / "cases.parquet")
    pq.write_table(table.drop_columns(["variant", "inexact", "ranks_differ", "calls_differ"]), path / "cases.parquet")
    run = experiments.load(path.parent)
    assert run.cases["variant"].tolist() == [SHIPPED]
    assert run.cases["inexact"].isna().all()
    pq.write_table(table.drop_columns(["wrong"]), path / "cases.parquet")
    with pytest.raises(RecordError, match="damaged"):
        experiments.load(path.parent)
