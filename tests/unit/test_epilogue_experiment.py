"""The command experiments.epilogue: what it refuses, what its numbers are, what it leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.epilogue import FILLER, FUSED, SEPARATE, Kept, Point, parser, row, table, wanted_of
from fcomm.errors import ArgumentError, NotAdmittedError
from tests import launch

EMULATED = {"devices": [{"device": "a processor", "emulation": True}]}
SHARED = {"devices": [{"device": "a GPU", "emulation": False, "ranks_per_gpu": 8}]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--ranks 1", "at least two ranks"),
        ("--ranks 16", "--ranks asks for 16 ranks and 8 were started"),
        ("--dtype int32", "a norm is of float32, float16 or bfloat16"),
        ("--dtype int7", "int7 cannot be reduced"),
        ("--hidden 100", "rows of a multiple of 16 bytes; the message's have 100 elements, 200 bytes"),
        ("--hidden wide", "--hidden 'wide' is not a list of positive numbers"),
        ("--batches 0", "--batches '0' is not a list of positive numbers"),
        ("--batches 1,,2", "--batches '1,,2' is not a list"),
        ("--batches 4096", "4096 rows of 8192 bfloat16 are more than 8 MiB"),
        ("--launches early", "--launches 'early' is not known; use none, late"),
        ("--iterations 0", "--iterations 0 is not between 1 and 10000"),
        ("--budget 0", "--budget '0' is not a time"),
        ("--fused two_shot.ll", "--fused two_shot.ll: add_rms_norm needs whole rows"),
        ("--separate all_gather.ll", "all_gather.ll is no all-reduce"),
        ("--cpu", "unrecognized arguments: --cpu"),
    ],
)
def test_what_is_refused(arguments: str, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        wanted_of(parser().parse_args(arguments.split()), 8, "cuda")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_protocol_that_does_not_exist_is_refused() -> None:
    with pytest.raises(NotAdmittedError, match="there is no protocol 'nix'"):
        wanted_of(parser().parse_args(["--fused", "nix"]), 8, "cuda")


def test_the_default_is_the_whole_table_on_a_gpu_and_little_on_a_cpu() -> None:
    gpu, cpu = (wanted_of(parser().parse_args([]), 8, backend) for backend in ("cuda", "cpu"))
    assert (gpu.ranks, gpu.batches, gpu.hidden) == ((2, 4, 8), (1, 2, 4, 8, 16, 32, 64), (4096, 5120, 7168, 8192))
    assert gpu.launches == ("none", "late")
    assert (cpu.batches, cpu.hidden, cpu.launches) == ((1, 4), (1024,), ("none",))


def line(saved_us: float) -> dict[str, object]:
    """A line of made-up times: 10 us of filler, 20 of all-reduce and norm, of which fusing saves some; rank 1 is slower."""
    wanted = wanted_of(parser().parse_args([]), 8, "cuda")
    base = np.zeros((8, 2)) + [0.0, 500.0] + np.arange(8)[:, None]
    times = {FILLER: base + 10_000.0, SEPARATE: base + 30_000.0, FUSED: base + 30_000.0 - 1e3 * saved_us}
    return row(wanted, Point(2, "late", 4096, 2), times, {FUSED: "one_shot.ll", SEPARATE: "two_shot.ll"})


def test_a_line_has_net_times_of_the_slowest_rank_and_what_is_saved() -> None:
    found = line(5.0)
    assert found["filler_us"] == pytest.approx(10.5035)
    assert found["separate_us"] == pytest.approx(20.0)
    assert found["fused_us"] == pytest.approx(15.0)
    for name in ("saved_us", "saved_low_us", "saved_high_us"):
        assert found[name] == pytest.approx(5.0)
    assert found["saved_percent"] == pytest.approx(25.0)
    assert found["nbytes"] == 4096 * 2 * 2


def test_the_table_shows_losses_and_says_where_it_was_taken() -> None:
    said = table([line(5.0), line(-1.0)], SHARED)
    assert "+5.00 [+5.00, +5.00]" in said
    assert "-1.00 [-1.00, -1.00] | -5 %" in said
    assert "ranks sharing a GPU" in said
    assert "an emulation on a processor: times of host code, no evidence about a GPU" in table([line(5.0)], EMULATED)


def test_the_folder_must_be_new_and_its_samples_are_whole_after_each_point(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot make the folder"):
        Kept(tmp_path).begin(EMULATED)
    wanted, kept = wanted_of(parser().parse_args([]), 8, "cuda"), Kept(tmp_path / "run")
    kept.begin(EMULATED)
    rows = []
    for batch in (1, 2):
        rows.append(line(1.0))
        kept.add(wanted, Point(2, "none", 4096, batch), {FUSED: np.array([[1.0, 2.0], [3.0, 4.0]])}, rows)
        samples = pd.read_parquet(tmp_path / "run" / "samples.parquet")
        assert len(samples) == 4 * batch
        assert samples["nanoseconds"].tolist()[-4:] == [1.0, 2.0, 3.0, 4.0]
        assert samples["rank"].tolist()[-4:] == [0, 1, 0, 1]
        assert len(pd.read_csv(tmp_path / "run" / "table.csv")) == batch
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["provenance.json", "samples.parquet", "table.csv"]


@pytest.mark.mpi
@pytest.mark.full
def test_two_ranks_measure_and_keep_their_samples(tmp_path: Path) -> None:
    arguments = [
        "-m",
        "experiments.epilogue",
        "--backend",
        "cpu",
        "--batches",
        "1,3",
        "--hidden",
        "64",
        "--iterations",
        "6",
    ]
    done = launch.mpirun(2, [*arguments, "--out", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    assert "an emulation on" in done.stdout
    samples = pd.read_parquet(tmp_path / "run" / "samples.parquet")
    assert samples.groupby(["batch", "variant"]).size().tolist() == [12] * 6
    assert (tmp_path / "run" / "table.md").read_text().strip() in done.stdout
    again = launch.mpirun(2, [*arguments, "--out", str(tmp_path / "run")])
    assert (again.returncode, again.stderr.count("error:")) == (2, 1), again.stderr
    assert "cannot make the folder" in again.stderr
