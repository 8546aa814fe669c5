"""Variants between real ranks: ablations keep what they promise, and a breakdown goes from start to figure."""

from __future__ import annotations

from pathlib import Path

import pytest

import experiments
from fcomm.variants import ABLATIONS, LADDER, SHIPPED, WITHOUT
from tests import launch

pytestmark = [pytest.mark.mpi, pytest.mark.full]


def _only_run(out: Path) -> Path:
    (path,) = (p.parent for p in out.glob("*/run.json"))
    return path


def test_ablations_are_right_and_their_order_shows_in_bits(tmp_path: Path) -> None:
    names = "one_shot.ll,one_shot.lamport,one_shot.ll128,two_shot.lamport16+ll128,two_shot.ll16"
    arguments = ["--protocols", names, "--variants", ",".join(ABLATIONS), "--sizes", "2K,3002", "--ranks", "3"]
    rest = ["--dtypes", "bf16", "--calls", "10", "--budget", "10m", "--out", str(tmp_path)]
    done = launch.mpirun(3, ["-m", "experiments.sweep", *arguments, *rest], timeout=300)
    assert done.returncode == 0, done.stderr
    run = experiments.load(_only_run(tmp_path))
    assert set(run.cases["status"]) == {"measured"}
    assert (run.cases["wrong"] == 0).all()
    assert (run.cases["checked_calls"] > 0).all()
    assert set(run.cases["variant"]) == set(ABLATIONS)
    unfixed = run.cases[run.cases["variant"] == "arrival_order"]
    assert unfixed["inexact"].notna().all()
    assert run.cases[run.cases["variant"] != "arrival_order"]["inexact"].isna().all()
    one_shot = unfixed[unfixed["algorithm"] == "one_shot"]
    assert (one_shot["ranks_differ"] > 100).all()  # each begins with its own part
    assert (unfixed[unfixed["algorithm"] == "two_shot"]["ranks_differ"] == 0).all()  # one rank adds for all
    assert run.for_figures()["variant"].unique().tolist() == [SHIPPED]
    assert "| `own_in_memory` |" in (run.path / "variants.md").read_text()
    assert "## Variants" in done.stdout


def test_a_breakdown_from_start_to_figure(tmp_path: Path) -> None:
    command = ["-m", "experiments.breakdown"]
    arguments = [
        "--protocols",
        "one_shot.lamport16,two_shot.flag",
        "--sizes",
        "1K",
        "--budget",
        "2m",
        "--out",
        str(tmp_path),
    ]
    done = launch.mpirun(2, [*command, *arguments], timeout=200)
    assert done.returncode == 0, done.stderr
    path = _only_run(tmp_path)
    run = experiments.load(path)
    assert run.complete
    assert set(run.cases["status"]) == {"measured"}
    assert set(run.cases["variant"]) == {SHIPPED, *(v.name for v in (*LADDER.values(), *WITHOUT.values()))}
    assert run.cases.groupby("protocol")[["blocks", "threads"]].nunique().eq(1).all(axis=None)
    assert set(run.cases.loc[run.cases["wrong"] < 0, "variant"]) == {
        v.name for v in (*LADDER.values(), *WITHOUT.values()) if not v.checked
    }
    assert done.stdout.count("## EMULATION on a CPU: ") == 2
    assert (path / "breakdown.png").read_bytes().startswith(b"\x89PNG")
    again = launch.mpirun(1, [*command, "--run", str(path)], timeout=60)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == (path / "breakdown.md").read_text().strip()


def test_a_run_that_is_no_breakdown(tmp_path: Path) -> None:
    done = launch.mpirun(2, ["-m", "experiments.breakdown", "--run", str(tmp_path)], timeout=60)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "is not a run: it has no run.json" in lines[0]
