"""The notebooks: their pairs are in step, they run, and their numbers are those of the records and the claims."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import experiments
from experiments import claims, fit, frames, lab
from tests import launch, synthetic
from tests.synthetic import make
from tools import notebooks

SOURCES = sorted(notebooks.NOTEBOOKS.glob("[0-9]*.py"))
# Runs one notebook in a process of its own and keeps what the tests compare.
RUNNER = """
import pickle, sys
from pathlib import Path
from tools import notebooks
path, kept, names = Path(sys.argv[1]), Path(sys.argv[2]), {}
every = notebooks.cells(path.read_text())
outputs = notebooks.run_cells(path, every, names)
wanted = {n: names[n] for n in sys.argv[3].split(",")}
kept.write_bytes(pickle.dumps((wanted, outputs)))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("runs")
    gather = make(out, synthetic.ALL_GATHER, collective="all_gather", sizes=(1024, 65536), ranks=(2,))
    return [make(out, sizes=(1024, 16384, 65536, 1 << 20), calls=8), gather]


def run(name: str, wanted: str, tmp_path: Path, folders: list[Path]) -> tuple[dict[str, Any], list[Any]]:
    """Runs a notebook on small data; the named variables, and the outputs of each cell."""
    kept = tmp_path / "kept"
    (source,) = [p for p in SOURCES if p.stem == name]
    env = launch.environment({"FLASH_COMM_RUNS": os.pathsep.join(map(str, folders)), "TMPDIR": str(tmp_path)})
    arguments = [sys.executable, "-c", RUNNER, str(source), str(kept), wanted]
    done = subprocess.run(
        arguments, env=env, cwd=notebooks.NOTEBOOKS, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    names, outputs = pickle.loads(kept.read_bytes())
    return names, outputs


def pictures(outputs: list[Any]) -> int:
    return sum("image/png" in o.get("data", {}) for shown in outputs for o in shown)


def printed(outputs: list[Any]) -> list[str]:
    return ["".join(o["text"]) for shown in outputs for o in shown if o["output_type"] == "stream"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_pairs_are_in_step(source: Path) -> None:
    assert notebooks.out_of_step(source) is None
    pair = json.loads(source.with_suffix(".ipynb").read_text())
    assert pair["nbformat"] == 4
    assert pair["metadata"] == notebooks.METADATA
    code = [c for c in pair["cells"] if c["cell_type"] == "code"]
    assert any(c["outputs"] for c in code)  # people look at what was run
    for k, cell in enumerate(code, 1):
        assert cell["execution_count"] == k
        lines = [line for line in cell["source"] if line.strip()]
        if '"""' not in "".join(lines):  # a kernel or a script as text is as long as it is
            assert len(lines) <= 3, "".join(lines)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_a_sync_of_an_unchanged_pair_changes_nothing(source: Path) -> None:
    """The header says all that jupytext would add to it, and keeps its version out."""
    header = source.read_text().partition("\n# ---\n")[0]
    for name, value in notebooks.METADATA["jupytext"].items():
        assert f"\n#     {name}: {value}\n" in header
    assert header.count("format_version: '1.3'") == 1
    assert "jupytext_version: " not in header


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_jupytext_reads_and_writes_the_same_pair(source: Path) -> None:
    jupytext = pytest.importorskip("jupytext")
    text = source.read_text()
    assert jupytext.writes(jupytext.reads(text, fmt="py:percent"), fmt="py:percent") == text
    pair = jupytext.read(source.with_suffix(".ipynb"))
    assert jupytext.writes(pair, fmt="py:percent") == text, "out of the notebook, as after an edit there"
    edited = jupytext.reads(text + "\n# %%\n1 + 1\n", fmt="py:percent")
    assert [c.source for c in edited.cells] == [*(c.source for c in notebooks.cells(text)), "1 + 1"]


def drawing(nbytes: int, ranks: int, drawn: list[tuple[int, int]]) -> Any:
    drawn.append((nbytes, ranks))


def test_a_slider_for_each_choice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With widgets that only note what they are told, since the tests need no Jupyter."""
    told: dict[str, Any] = {}

    def interact(function: Any, **sliders: Any) -> None:
        told.update(sliders)
        function(**{name: options[0] for name, options in sliders.items()})

    drawn: list[tuple[int, int]] = []
    widgets = SimpleNamespace(SelectionSlider=lambda options: options, interact=interact)
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    lab.explore(lambda nbytes, ranks: drawing(nbytes, ranks, drawn), nbytes=(1024, 4096), ranks=[2, 8])
    assert told == {"nbytes": [1024, 4096], "ranks": [2, 8]}
    assert drawn == [(1024, 2)]
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    lab.explore(lambda nbytes: drawing(nbytes, 2, drawn), nbytes=[1024])
    assert "sliders need ipywidgets (pip install -e '.[notebooks]')" in capsys.readouterr().out
    assert len(drawn) == 1


def test_sliders_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the widgets themselves, where they are: what a reader's hand does is a change of a value."""
    widgets = pytest.importorskip("ipywidgets")
    sliders: list[Any] = []
    drawn: list[tuple[int, int]] = []

    def slider(options: list[int], make: Any = widgets.SelectionSlider) -> Any:
        sliders.append(make(options=options))
        return sliders[-1]

    monkeypatch.setattr(widgets, "SelectionSlider", slider)
    lab.explore(lambda nbytes, ranks: drawing(nbytes, ranks, drawn), nbytes=(1024, 4096), ranks=[2, 8])
    assert drawn == [(1024, 2)]
    sliders[1].value = 8
    sliders[0].value = 4096
    assert drawn[1:] == [(1024, 8), (4096, 8)]


def test_a_first_look(tmp_path: Path, folders: list[Path]) -> None:
    names, outputs = run("01_first_look", "by_hand_us,best", tmp_path, folders)
    latency = experiments.load(folders[0]).latency.set_index("case")
    assert names["by_hand_us"] == latency.loc[names["best"]["case"], "latency_us"]
    assert pictures(outputs) == 1


def test_the_papers_figures(tmp_path: Path, folders: list[Path]) -> None:
    names, outputs = run("02_paper_figures", "headline,ratios", tmp_path, folders)
    runs = [experiments.load(f) for f in folders]
    assert names["headline"] == claims.headline(claims.claims(runs))
    assert names["ratios"].equals(frames.ratios(runs[0], frames.OURS, frames.V2_FASTEST))
    assert printed(outputs) == [claims.amdahl_line(claims.claims(runs)) + "\n"]
    assert pictures(outputs) == 10


def test_encodings(tmp_path: Path, folders: list[Path]) -> None:
    names, outputs = run("03_encodings", "sizes,ranks,outcome", tmp_path, folders)
    assert (names["sizes"], names["ranks"]) == ([1024, 16384, 65536, 1 << 20], [2, 4])
    again = fit.fit_runs([experiments.load(folders[0])], judge=False)
    assert names["outcome"].model.digest() == again.model.digest()
    assert pictures(outputs) == 7


def test_regret(tmp_path: Path, folders: list[Path]) -> None:
    names, outputs = run("04_regret", "summary,choices", tmp_path, folders)
    judged = fit.fit_runs([experiments.load(folders[0])], draws=1).by_sizes
    assert judged is not None
    of_model = judged.choices[judged.choices["policy"] == "the model"]
    for feature in ("none", "late"):
        worst = 100 * of_model.loc[of_model["launch"] == feature, "regret"].max()
        assert names["summary"].loc[("all_reduce", feature, "the model"), 1.0] == pytest.approx(worst)
    assert pictures(outputs) == 2


@pytest.mark.mpi
def test_your_own_encoding(tmp_path: Path, folders: list[Path]) -> None:
    names, outputs = run("05_your_own_encoding", "checked,caught,passed,torn,run", tmp_path, folders)
    assert set(names["checked"]["status"]) == {"measured"}
    assert (names["checked"]["wrong"] == 0).all()
    assert {"one_shot.sum16", "two_shot.sum16"} < set(names["checked"]["protocol"])
    assert "wrong" in set(names["caught"].cases["status"])  # the broken variant
    assert names["passed"]
    assert not names["torn"]
    (said,) = [text for text in printed(outputs) if "torn data accepted" in text]
    assert "the smallest case found" in said
    latency = names["run"].latency
    assert set(latency["protocol"]) == {"one_shot.sum16", "two_shot.sum16", "one_shot.ll16"}
    assert latency["emulated"].all()
    assert pictures(outputs) == 1


def test_a_pair_out_of_step_is_named(tmp_path: Path) -> None:
    source = tmp_path / "09_some.py"
    source.write_text("# header\n\n# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nx = 1\nx + 1\n\n# %%\nprint(x)\n")
    every = notebooks.cells(source.read_text())
    assert [(c.markdown, c.source) for c in every] == [
        (True, "# Title\n\nWords."),
        (False, "x = 1\nx + 1"),
        (False, "print(x)"),
    ]
    assert notebooks.out_of_step(source) == "09_some.ipynb is missing"
    outputs = notebooks.run_cells(source, every, {})
    assert outputs[1][0]["data"] == {"text/plain": ["2"]}
    assert outputs[2] == [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    source.with_suffix(".ipynb").write_text(notebooks.notebook(every, outputs))
    assert notebooks.out_of_step(source) is None
    source.write_text(source.read_text() + "\n# %%\nx\n")
    assert "other cells" in str(notebooks.out_of_step(source))
    with pytest.raises(ZeroDivisionError):
        notebooks.run_cells(source, notebooks.cells("# %%\n1 / 0\n"), {})
