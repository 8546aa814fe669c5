"""Links between ranks: the commands of `experiments.links` on the cpu backend, and host memory with stand-ins for CUDA."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments import link_maps, links
from experiments.request import build_request, parser
from fcomm.errors import ArgumentError
from tests import launch

pytestmark = pytest.mark.mpi


def test_host_memory_between_ranks() -> None:
    pytest.importorskip("cupy")
    done = launch.mpirun(3, ["-m", "tests.mpi.segments"], timeout=60)
    assert done.stdout.count("SEGMENTS ok") == 3, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_map_on_the_cpu_backend(tmp_path: Path) -> None:
    args = ["-m", "experiments.links", "map", "--backend", "cpu", "--samples", "6", "--out", str(tmp_path)]
    done = launch.mpirun(2, args, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    names = {p.name for p in folder.iterdir()}
    assert names == {"map.parquet", "map.md", "map-n2.png", "crossovers.png", "provenance.json"}
    frame, facts = link_maps.load(folder)
    grid = link_maps.GRIDS["cpu"]
    assert len(frame) == len(grid.sizes) * len(grid.links()) * len(grid.protocols)
    assert facts["backend"] == "cpu"
    assert frame["cpu_emulation"].all()
    assert "cpu backend (EMULATION)" in (folder / "map.md").read_text()
    # No call is faster than its hops over the emulated link, nor than its bytes.
    linked = frame[frame["emulated_link"]]
    least = (
        linked["rounds"] * linked["link_latency_us"]
        + linked["wire_bytes"] / (linked["link_gbps"] * 1e3) / linked["rounds"]
    )
    assert (linked["latency_us"] >= 0.97 * least).all()


@pytest.mark.full
@pytest.mark.parametrize(("command", "more"), [("accuracy", []), ("accuracy", ["--form", "forwarded"]), ("host", [])])
def test_other_commands_on_the_cpu_backend(command: str, more: list[str], tmp_path: Path) -> None:
    args = ["-m", "experiments.links", command, *more, "--backend", "cpu", "--samples", "6", "--out", str(tmp_path)]
    done = launch.mpirun(2, args, timeout=120)
    assert done.returncode in ((0, 1) if command == "accuracy" else (0,)), (
        done.stderr
    )  # a busy CPU does not keep to 5 %
    (folder,) = tmp_path.iterdir()
    assert "cpu backend (EMULATION)" in (folder / f"{command}.md").read_text()
    if command == "host":
        before, after = (pd.read_parquet(folder / name) for name in ("predictions.parquet", "host.parquet"))
        assert "latency_us" not in before
        assert after["predicted_us"].tolist() == before["predicted_us"].tolist()
        assert (folder / "predictions.parquet").stat().st_mtime < (folder / "host.parquet").stat().st_mtime


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["accuracy"], "a link lies between ranks: mpirun -n 2 python -m experiments.links accuracy"),
        (["map", "--samples", "2"], "--samples 2 is not between 6 and 1000"),
        (["host", "--ranks", "1"], "a link lies between ranks"),
        (["map", "--budget", "soon"], "'soon' is not a time"),
        (["maps"], "invalid choice: 'maps'"),
        (["accuracy", "--form", "fast"], "invalid choice: 'fast' (choose from"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        links.main([args[0], *args[1:], "--backend", "cpu"])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sweep_with_a_link_or_a_placement() -> None:
    options = parser()
    asked = build_request(options.parse_args(["--link", "nvlink4", "--placement", "host"]), 2)
    assert (asked.link, asked.placement) == ("latency_us=0.7,gbps=450", "host")
    asked = build_request(options.parse_args(["--link", "nvlink4,form=forwarded,seed=1"]), 2)
    assert asked.link == "latency_us=0.7,gbps=450,form=forwarded,seed=1"
    plain = build_request(options.parse_args([]), 2)
    assert (plain.link, plain.placement) == ("", "device")
    with pytest.raises(ArgumentError, match="'fast' is not a link"):
        build_request(options.parse_args(["--link", "fast"]), 2)
    with pytest.raises(ArgumentError, match="--placement"):
        options.parse_args(["--placement", "disk"])
