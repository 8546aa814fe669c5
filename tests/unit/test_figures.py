"""The paper's figures, the claims, comparisons and counts: what they draw and say, and what they refuse."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import experiments
from experiments import claims, compare, counted, figures, frames, plots, tables
from fcomm import bootstrap, machine_code, records
from fcomm.dtypes import BFLOAT16
from fcomm.errors import ArgumentError, RecordError, SetupError
from fcomm.measure import Case
from fcomm.protocols import protocols
from fcomm.source import Specialisation
from tests import synthetic
from tests.synthetic import make


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All-reduce and all-gather on one shared GPU, as two runs."""
    out = tmp_path_factory.mktemp("runs")
    return [
        make(out, sizes=(1024, 16384, 131072, 1 << 20), features=("none", "late", "early")),
        make(out, synthetic.ALL_GATHER, collective="all_gather", sizes=(1024, 65536), ranks=(2,)),
    ]


@pytest.fixture(scope="module")
def runs(folders: list[Path]) -> list[Any]:
    return [experiments.load(f) for f in folders]


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_a_whole_run_gives_the_whole_set(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    encode = plots.encode

    def look(figure: Any, kind: str) -> bytes:
        seen.append(figure)
        return encode(figure, kind)

    monkeypatch.setattr(plots, "encode", look)
    arguments = [*map(str, folders), "--out", str(tmp_path), "--formats", "svg", "--no-counted"]
    assert figures.main(arguments) == 0
    printed = capsys.readouterr().out
    missing = [line for line in printed.splitlines() if line.startswith("not drawn: ")]
    assert [line.split()[2] for line in missing] == [
        "all-gather-latency-early",
        "all-gather-reduction-early",
        "skew",
    ], printed
    assert all(": " in line.removeprefix("not drawn: ") for line in missing)
    index = (tmp_path / "README.md").read_text()
    for one in figures.FIGURES:
        drawn = (tmp_path / f"{one.name}.svg").is_file()
        assert drawn == (f"## {one.name}\n" in index)
        assert drawn != (f"not drawn: {one.name} " in printed)
        if drawn:
            content = (tmp_path / f"{one.name}.svg").read_text()
            assert content.startswith("<?xml")
    assert "The ranks share one GPU" in index
    assert len(seen) == len(figures.FIGURES) - 3
    for figure in seen:
        assert all(axis.has_data() or axis.patches for axis in figure.axes), figure.get_label()


def test_the_same_records_give_the_same_bytes(runs: list[Any]) -> None:
    one, two = plots.shots(runs[0]), plots.shots(runs[0])
    for kind, magic in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        first, again = plots.encode(one, kind), plots.encode(two, kind)
        assert first == again
        assert first.startswith(magic)


def test_a_latency_figure_has_every_side_and_its_masked_points_hollow(runs: list[Any]) -> None:
    figure = plots.side_latency(runs[0], launch="none")
    axis = figure.axes[1]
    assert axis.get_title() == "4 ranks"
    lines = {line.get_label(): line for line in axis.get_lines() if not str(line.get_label()).startswith("_")}
    assert list(lines) == [
        "flash-comm",
        "custom AR v2 as its authors set it",
        "custom AR v2, launch shape tuned",
        "custom AR v2, best of its algorithms",
        "one-shot Lamport (TensorRT-LLM)",
        "barriers (vLLM)",
    ]
    best = frames.fastest(frames.measured(runs[0], "all_reduce", "none", ranks=4), frames.OURS)
    assert lines["flash-comm"].get_ydata() == pytest.approx(best["latency_us"])
    hollow = [line for line in axis.get_lines() if line.get_markerfacecolor() == "white"]
    assert hollow
    masked = best.loc[best["masked"], "nbytes"].tolist()
    assert any(np.asarray(line.get_xdata()).tolist() == masked for line in hollow)
    assert len({line.get_marker() for line in lines.values()}) == len(lines)  # readable without colours


def test_published_curves_are_drawn_on_request(runs: list[Any]) -> None:
    figure = plots.side_latency(runs[0], launch="none", published=frames.published("h200_sxm"))
    labels = [str(line.get_label()) for line in figure.axes[0].get_lines()]
    assert "published, h200_sxm: custom AR v2 (SGLang)" in labels
    assert "published by others" in str(figure.get_label())


def test_a_reduction_figure_marks_median_and_best(runs: list[Any]) -> None:
    found = frames.ratios(runs[0], frames.OURS, frames.V2_FASTEST, launch="late")
    of_two = frames.summarise(found[found["ranks"] == 2])
    figure = plots.reduction(runs[0], launch="late")
    assert of_two.best is not None
    assert figure.axes[0].get_title() == (
        f"2 ranks: median {of_two.median_percent:+.1f} %, best {of_two.best['change_percent']:+.1f} %"
    )
    assert frames.summarise(found).counts in str(figure.get_label())


def test_a_delay_of_one_rank_and_what_calls_add_to_it(tmp_path: Path) -> None:
    delays = (0.0, 1.0, 5.0, 20.0)
    us = synthetic.rule(synthetic.ALL_REDUCE)

    def added(case: Case, launch: int) -> float:
        return us(case, launch) - min(case.delay_us or 0.0, 0.5)  # half a microsecond was done while others waited

    run = experiments.load(
        make(
            tmp_path,
            us=added,
            sizes=(2048, 65536),
            mode="skew",
            delays_us=delays,
            floors=False,
            features=("none", "late"),
        )
    )
    (drawn,) = [d for d in figures.draw([run]) if d.figure is not None]
    assert drawn.name == "skew"
    figure: Any = drawn.figure
    assert [axis.get_title() for axis in figure.axes] == [
        "2 ranks, 2 KiB",
        "4 ranks, 2 KiB",
        "2 ranks, 64 KiB",
        "4 ranks, 64 KiB",
    ]
    for axis in figure.axes:  # panels share the axis, and every line is inside it
        low, high = axis.get_ylim()
        assert low == 0
        assert axis.get_lines()
        assert all(max(x.get_ydata()) <= high for x in axis.get_lines())
    line = next(x for x in figure.axes[0].get_lines() if x.get_label() == "flash-comm")
    assert list(line.get_xdata()) == list(delays)
    assert np.ptp(line.get_ydata()[1:]) < 0.1
    assert line.get_ydata()[0] - line.get_ydata()[1] == pytest.approx(0.5, abs=0.1)
    assert "Late: each rank in turn" in figure.get_label()
    # Nothing else takes these times for latencies, and nothing mixes the delays.
    assert frames.measured(run).empty
    assert plots.figures(run).keys() == {"skew-all-reduce.png"}
    assert tables.nccl_table(run).count("skew 20us") == len(run.cases) / len(delays)
    found = compare.compare(run, run)
    assert len(found) == len(run.latency)
    assert set(found["verdict"]) == {"same"}
    for launch, words in (
        ("early", "the run has no times of all-reduce with a rank that is late"),
        (None, "two delays"),
    ):
        one = run if launch else experiments.load(make(tmp_path, sizes=(2048,), mode="skew", delays_us=(1.0,)))
        with pytest.raises(RecordError, match=words):
            plots.skew(one, launch=launch)


def test_what_a_run_lacks_is_said(tmp_path: Path) -> None:
    kinds = {("one_shot.ll", "array", None): (1.6, 0.04)}
    lean = experiments.load(make(tmp_path, kinds, sizes=(1024, 2048), ranks=(2,), features=("none",), floors=False))
    became = list(figures.draw([lean]))
    reasons = {d.name: d.reason for d in became if d.figure is None}
    assert {d.name for d in became if d.figure is not None} == {"all-reduce-latency-none", "best-encodings"}
    assert reasons["all-reduce-reduction-none"] == (
        "the run lacks flash-comm or custom AR v2, fastest of three ways with dependent launch none"
    )
    assert reasons["all-gather-latency-none"] == "the run has no times of all-gather"
    assert reasons["ablation-launch"] == "the run has one launch feature only (none)"
    assert reasons["scaling"] == "the run has one number of ranks only (2)"
    assert "no floor" in reasons["floor"]
    assert reasons["skew"] == (
        "the run has no times of all-reduce with a rank that is late: they are taken with --modes skew"
    )
    assert "fewer than two encodings" in reasons["ablation-encodings"]
    assert "a fit needs 4" in reasons["ablation-selector"]
    assert all(reasons.values())


def test_an_emulation_is_drawn_as_one(tmp_path: Path) -> None:
    emulated = experiments.load(
        make(tmp_path, sizes=(1024, 65536), features=("none",), provenance=synthetic.CPU, mode="host", floors=False)
    )
    for name in ("all-reduce-latency-none", "all-reduce-reduction-none", "best-encodings", "ablation-shots"):
        figure = figures.one([emulated], name).figure
        assert figure is not None
        assert str(figure.get_label()).startswith("EMULATION on CPUs")


def test_an_interrupted_run_is_drawn_with_what_it_has(tmp_path: Path) -> None:
    torn = experiments.load(make(tmp_path, sizes=(1024, 2048), finish=False, planned=20))
    for name in ("all-reduce-latency-none", "all-reduce-reduction-late"):
        figure = figures.one([torn], name).figure
        assert figure is not None
        assert "Interrupted run" in str(figure.get_label())


def _sentence(capsys: pytest.CaptureFixture[str], main: Any, *arguments: str | Path) -> str:
    """What a command says when it is refused: exit code 1 or 2, one line, no traceback."""
    assert bootstrap.run(main, [str(a) for a in arguments]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_bad_input_is_one_sentence(tmp_path: Path, folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    old = make(tmp_path, sizes=(1024,))
    (old / "run.json").write_text(json.dumps({"schema_version": 1, "request": {}}))
    sliced = make(tmp_path, sizes=(1024,), time_sliced=True)
    emulated = make(tmp_path, sizes=(1024,), features=("none",), provenance=synthetic.CPU)
    empty = records.Recorder.create(tmp_path, "here", "cuda", {})
    empty.begin(synthetic.GPU)
    empty.close()
    for main in (figures.main, claims.main):
        assert "is not a run" in _sentence(capsys, main, nothing)
        assert "schema 1" in _sentence(capsys, main, old)
        assert "taking turns" in _sentence(capsys, main, sliced)
        assert "no times yet" in _sentence(capsys, main, empty.path)
        assert "different machines" in _sentence(capsys, main, folders[0], emulated)
    assert "--formats 'bmp'" in _sentence(capsys, figures.main, folders[0], "--formats", "bmp")
    assert "--only 'nonsense'" in _sentence(capsys, figures.main, folders[0], "--only", "nonsense")
    assert "'a laptop'" in _sentence(capsys, figures.main, folders[0], "--published", "a laptop")
    (tmp_path / "file").write_text("")
    holds = _sentence(capsys, claims.main, tmp_path)
    assert f"{tmp_path} is not a run: it holds runs: name one, such as {tmp_path}/" in holds
    assert "there is no such folder" in _sentence(capsys, claims.main, tmp_path / "nosuch")
    for main in (figures.main, claims.main, compare.main):
        assert "named twice" in _sentence(capsys, main, folders[0], folders[0])
    for main in (figures.main, claims.main):
        said = _sentence(capsys, main, folders[0], "--out", tmp_path / "file" / "x")
        assert "cannot make the folder" in said
        assert "with --out" in said
    for names in (",", " , "):
        assert "names nothing" in _sentence(capsys, figures.main, folders[0], "--only", names)
        assert "names nothing" in _sentence(capsys, figures.main, folders[0], "--formats", names)
    assert "taking turns" in _sentence(capsys, compare.main, folders[0], sliced)
    assert "emulation" in _sentence(capsys, compare.main, folders[0], emulated)


def test_without_a_run_the_newest_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "make sweep" in _sentence(capsys, figures.main)
    path = make(tmp_path / "results", sizes=(1024, 2048), features=("none",))
    assert figures.main(["--only", "ablation-shots", "--formats", "png"]) == 0
    assert [p.name for p in sorted((path / "figures").iterdir())] == ["README.md", "ablation-shots.png"]
    assert experiments.load(path).complete  # figures are no part of what is sealed


def test_what_the_repository_ships_can_be_drawn() -> None:
    shipped = [experiments.load(p) for p in records.runs(figures.SHIPPED)]
    assert shipped
    drawn = figures.one(shipped, "all-reduce-reduction-none")
    assert drawn.figure is not None
    assert plots.encode(drawn.figure, "png").startswith(b"\x89PNG")


# ---- claims ----------------------------------------------------------------------------------------------------------


def test_claims_are_the_papers_numbers_beside_ours(runs: list[Any]) -> None:
    found = claims.claims(runs)
    row = claims.headline(found)
    assert row is not None
    assert (row["launch"], row["ranks"], row["sharing"]) == ("late", 0, "one GPU shared")
    assert (row["paper_median_percent"], row["paper_best_percent"]) == (-28.8, -43.7)
    s = frames.summarise(frames.ratios(runs[0], frames.OURS, frames.V2_FASTEST, launch="late"))
    assert (row["median_percent"], row["points"], row["faster"]) == (s.median_percent, s.points, s.wins)
    assert (row["iterations_min"], row["launches"]) == (12, 1)
    gather = claims.headline(found, "all_gather")
    assert gather is not None
    assert gather["paper_median_percent"] == -23.8
    assert set(found["launch"]) == {"none", "late", "early", "any against late"}
    text = claims.markdown(found, runs)
    for said in ("-28.8 %", "-43.7 %", "-23.8 %", "-58.9 %", "-1.7 % to -6.8 %", "11.4 %", "not measured here"):
        assert said in text
    assert "The ranks share one GPU" in text
    assert "five or more" in text


def test_the_amdahl_line_is_share_times_cut(runs: list[Any], tmp_path: Path) -> None:
    assert claims.amdahl(-28.8) == pytest.approx(-3.2832)
    assert claims.amdahl(-100, 100) == -100
    found = claims.claims(runs)
    row = claims.headline(found)
    assert row is not None
    assert f"by {11.4 * row['median_percent'] / 100:+.2f} %" in claims.amdahl_line(found)
    emulated = experiments.load(
        make(tmp_path, sizes=(1024, 2048), features=("none",), provenance=synthetic.CPU, mode="host", floors=False)
    )
    found = claims.claims([emulated])
    assert set(found["sharing"]) == {"emulated"}
    assert "nothing about a decode step" in claims.amdahl_line(found)
    assert "EMULATION" in claims.markdown(found, [emulated])


def test_what_a_run_cannot_say_is_not_measured(tmp_path: Path) -> None:
    kinds = {("one_shot.ll", "array", None): (1.6, 0.04)}
    lean = experiments.load(make(tmp_path, kinds, sizes=(1024,), features=("none",)))
    found = claims.claims([lean])
    assert set(found["status"]) == {"not measured here"}
    assert claims.headline(found) is None
    assert "not measured here: the run has no times of all-gather" in claims.markdown(found, [lean])
    # Each rank count masked as a whole: nothing is left to count.
    wet = experiments.load(make(tmp_path, sizes=(1 << 20,), features=("none",), l2_gbps=1.0))
    assert set(claims.claims([wet])["reason"]) >= {"all points are about the L2"}
    claims.markdown(claims.claims([wet]), [wet])


def test_the_claims_command_prints_and_keeps(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert claims.main([*map(str, folders), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "claims.md").read_text() == capsys.readouterr().out
    assert (tmp_path / "claims.csv").read_text().startswith("collective,against,launch,ranks,status")


# ---- comparison ------------------------------------------------------------------------------------------------------


def test_overlapping_intervals_are_no_change(tmp_path: Path) -> None:
    us = synthetic.rule(synthetic.ALL_REDUCE)
    before = make(tmp_path, sizes=(1024, 2048), launches=3, calls=6)
    factor = {"one_shot.ll": 1.2, "two_shot.ll": 0.8}
    after = make(
        tmp_path, us=lambda case, launch: us(case, launch) * factor.get(case.protocol, 1.0), sizes=(1024, 2048), launches=3, calls=6,
        provenance={**synthetic.GPU, "source_hash": "b"},
    )  # fmt: skip
    a, b = experiments.load(before), experiments.load(after)
    found = compare.compare(a, b)
    assert len(found) == len(a.latency)
    changed = found[found["verdict"] != "same"]
    assert {(r["protocol"], r["verdict"]) for r in changed.to_dict("records")} == {
        ("one_shot.ll", "slower"),
        ("two_shot.ll", "faster"),
    }
    assert changed["change_percent"].abs().tolist() == pytest.approx([20] * len(changed), abs=1)
    assert set(compare.compare(a, a)["verdict"]) == {"same"}
    text = compare.markdown(found, a, b, most=1)
    assert "8 faster, 8 slower" in text
    assert "The largest changes (1)" in text
    assert "the kernels are the same" not in text


def test_a_comparison_says_what_else_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make(tmp_path, sizes=(1024, 2048), features=("none",))
    other = {**synthetic.GPU, "devices": [{"device": "NVIDIA H100", "uuid": "GPU-9", "mps": True}]}
    b = make(tmp_path, sizes=(2048, 4096), features=("none",), provenance=other, finish=False, planned=15)
    assert compare.main([str(a), str(b), "--csv", str(tmp_path / "all.csv")]) == 0
    text = capsys.readouterr().out
    for said in (
        "not the same machine",
        "H100",
        "was interrupted",
        "only in",
        "one launch only",
        "the kernels are the same",
    ):
        assert said in text, text
    assert (tmp_path / "all.csv").read_text().startswith("collective,dtype,mode")
    c = make(tmp_path, sizes=(8192,), features=("none",))
    assert compare.main([str(a), str(c)]) == 0
    assert "no case in common" in capsys.readouterr().out


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_counts_by_hand() -> None:
    frame = counted.counted([4096], [4], arch=None).set_index("protocol")
    assert set(frame.index) == {p.name for p in protocols().values() if p.collective == "all_reduce"}
    one = frame.loc["one_shot.ll"]  # 512 cells of 8 bytes of payload to each of three peers
    assert (one["rounds"], one["hops"], one["wire_bytes"]) == (1, 1, 3 * 512 * 16)
    assert one["stores_per_byte"] == one["polls_per_byte"] == 3 * 512 / 4096
    assert one["rearm_bytes"] == 0
    lamport = frame.loc["two_shot.lamport"]  # 64 cells a shard, twice
    assert lamport["stores_per_byte"] == 2 * 3 * 64 / 4096
    assert lamport["rearm_bytes"] == 2 * 3 * 64 * 16
    line = frame.loc["one_shot.ll128"]  # 35 lines of 8 cells, looked at twice
    assert line["stores_per_byte"] == 3 * 35 * 8 / 4096
    assert line["polls_per_byte"] == 2 * line["stores_per_byte"]
    v2 = frame.loc["custom_ar_v2.push"]  # its own slot like a peer's
    assert (v2["stores_per_byte"], v2["rearm_bytes"]) == (4 * 256 / 4096, 4 * 4096)
    assert (frame.loc["barrier.one_shot", "rounds"], frame.loc["barrier.one_shot", "hops"]) == (3, 4)
    assert (frame.loc["barrier.two_shot", "rounds"], frame.loc["barrier.two_shot", "hops"]) == (4, 6)
    assert (frame.loc["custom_ar_v2.pull_two_shot", "rounds"], frame.loc["custom_ar_v2.pull_two_shot", "hops"]) == (
        4,
        5,
    )
    assert frame["registers"].isna().all()
    assert "-" in counted.markdown(counted.counted([4096], [4], arch=None), None)


def test_the_counts_are_those_of_the_machine_code() -> None:
    """One cell's stores and polls, as counted, are the accesses that the compiler made of it."""
    try:
        machine_code.nvrtc()
        machine_code.nvdisasm()
    except SetupError as error:
        pytest.skip(str(error))
    n = 4
    for name, cell_payload in (("one_shot.ll16", 12), ("one_shot.lamport16", 16)):
        frame = counted._count(protocols()[name], cell_payload, n)
        listing = machine_code.slot_listing(Specialisation(protocols()[name], BFLOAT16, n), "sm_90")
        stores = listing.count(kind="store", nbytes=16, strength="strong.sys", space="global")
        rearmed = n if protocols()[name].encodings[0].rearm_bytes_per_cell else 0  # the own rank's is predicated off
        assert frame["stores_per_byte"] * cell_payload == stores - rearmed
        polled = max(sum((a.kind, a.nbytes) == ("load", 16) for a in w.accesses) for w in listing.waits)
        assert frame["polls_per_byte"] * cell_payload == polled - 1  # the own rank's load is predicated off


def test_files_that_cannot_be_written_are_told_before_the_work(
    tmp_path: Path, folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("it has begun")

    for module, name in ((compare, "compare"), (counted, "counted")):
        monkeypatch.setattr(module, name, work)
    for main, named in ((compare.main, folders), (counted.main, [])):
        for path, why in (
            (tmp_path / "no" / "a.csv", f"there is no folder {tmp_path / 'no'}"),
            (tmp_path, "it is a folder"),
        ):
            assert _sentence(capsys, main, *named[:2], "--csv", path) == f"error: --csv {path} cannot be written: {why}"


def test_a_command_without_a_run_names_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for main, name in ((claims.main, "claims"), (figures.main, "figures")):
        said = _sentence(capsys, main)
        assert "there is no run under results/" in said
        assert said.endswith(f"python -m experiments.{name} {figures.SHIPPED}/*/")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "2K,3"], "--sizes 3 B is no whole number of bfloat16 elements"),
        (["--sizes", "2052", "--collective", "reduce_scatter"], "--sizes 2052 B is no whole number of bfloat16 elements in 8 equal parts"),
        (["--sizes", "3", "--collective", "all_gather"], "--sizes 3 B is no whole number of bfloat16 elements"),
    ],
)  # fmt: skip
def test_sizes_that_no_call_has_are_not_counted(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert _sentence(capsys, counted.main, *arguments, "--arch", "none") == f"error: {said}"


def test_the_counted_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    assert counted.main(["--sizes", "2K", "--ranks", "2", "--arch", "none", "--csv", str(path)]) == 0
    assert "| `one_shot.ll` " in capsys.readouterr().out
    assert path.read_text().startswith("collective,protocol,ranks,nbytes")
    with pytest.raises(ArgumentError, match="at least two"):
        counted.main(["--ranks", "1"])
    with pytest.raises(ArgumentError):
        counted.main(["--arch", "sm_1"])


def test_pictures_show_themselves(runs: list[Any]) -> None:
    figure: Any = plots.at_point(runs[0], 1024, 2)
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(RecordError, match="no times of 3 KiB"):
        plots.at_point(runs[0], 3072, 2)
    assert io.BytesIO(plots.png(figure)).read(4) == b"\x89PNG"
    assert math.isfinite(figure.get_figwidth())
