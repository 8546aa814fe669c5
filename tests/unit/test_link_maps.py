"""Crossover maps and predictions of another medium, from times that are known by construction."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import link_maps, links
from experiments.links import MediumFacts
from fcomm.errors import RecordError
from tests.unit import test_notebooks
from tests.unit.test_notebooks import folders as folders

SIZES = (4096, 16384, 65536)
LATENCIES, RATES = (0.0, 1.0), (50.0, 400.0)
BYTES = {"one_shot": 1.0, "two_shot": 0.5}
"""Sent, as a share of (n - 1) times the message."""
FACTS = {
    "backend": "cuda",
    "world_size": 4,
    "hostname": "h",
    "devices": [{"uuid": "a", "device": "GPU", "time_sliced": False}],
}


def us(algorithm: str, n: int, nbytes: int, latency: float, rate: float) -> float:
    hops = 1 if algorithm == "one_shot" else 2
    return 2.0 + hops * (0.5 + latency) + BYTES[algorithm] * (n - 1) * nbytes / (rate * 1e3)


def make(noise: float = 0.01, l2_share: float = 0.05) -> pd.DataFrame:
    points: list[tuple[float, float]] = [(math.nan, math.nan), (0.0, math.inf), *itertools.product(LATENCIES, RATES)]
    found = []
    for n, nbytes, (latency, rate), algorithm in itertools.product((2, 4), SIZES, points, BYTES):
        emulated = not math.isnan(latency)
        t = us(algorithm, n, nbytes, latency if emulated else 0.0, rate if emulated else math.inf) + 0.1 * emulated
        found.append(
            {
                "ranks": n, "nbytes": nbytes, "protocol": f"{algorithm}.ll", "algorithm": algorithm, "encoding": "ll", "blocks": 1,
                "threads": 256, "wire_bytes": nbytes, "rounds": 1, "emulated_link": emulated, "link_latency_us": latency,
                "link_gbps": rate, "latency_us": t, "low_us": t * (1 - noise), "high_us": t * (1 + noise), "samples": 7,
                "l2_share": l2_share, "in_turns": False, "cpu_emulation": False,
            }
        )  # fmt: skip
    return pd.DataFrame(found)


def test_winners_margins_and_how_sure() -> None:
    best = link_maps.winners(make())
    assert len(best) == 2 * len(SIZES) * (len(LATENCIES) * len(RATES) + 1)
    for r in best.to_dict("records"):
        point = (int(r["ranks"]), int(r["nbytes"]), r["link_latency_us"], r["link_gbps"])
        times = {a: us(a, *point) + 0.1 for a in BYTES}
        fast, slow = sorted(times, key=lambda a: times[a])
        assert (r["algorithm"], r["second"]) == (fast, f"{slow}.ll")
        assert r["margin"] == pytest.approx(times[slow] / times[fast] - 1)
        assert r["least_margin"] == pytest.approx(times[slow] * 0.99 / (times[fast] * 1.01) - 1)
        assert r["sure"] == (r["least_margin"] > 0)
        assert r["ratio"] == pytest.approx(times["two_shot"] / times["one_shot"])
    assert not best["masked"].any()
    assert not link_maps.winners(make(noise=0.9))["sure"].any()
    assert link_maps.winners(make(l2_share=0.2))["masked"].all()
    frame = make()
    frame.loc[frame["algorithm"] == "two_shot", "in_turns"] = True
    assert link_maps.winners(frame)["masked"].all()


def test_crossovers_lie_where_the_times_are_equal() -> None:
    found = link_maps.crossovers(make()).set_index(["ranks", "link_latency_us", "link_gbps"])["crossover_bytes"]
    for n, latency, rate in itertools.product((2, 4), LATENCIES, RATES):
        equal = (0.5 + latency) / 0.5 * rate * 1e3 / (n - 1)  # one more hop against half the bytes
        if equal > SIZES[-1]:
            assert math.isinf(found[n, latency, rate])
        else:
            assert found[n, latency, rate] == pytest.approx(equal, rel=0.15)  # read off between sizes four times apart
    always = make()
    always.loc[always["algorithm"] == "two_shot", "latency_us"] = 0.1
    assert (link_maps.crossovers(always)["crossover_bytes"] == 0).all()


def test_the_cost_of_the_emulation_is_told_apart() -> None:
    cost = link_maps.emulation_cost(make())
    assert cost["median"].to_numpy() == pytest.approx(0.1)


def test_tables_and_figures_say_what_they_are() -> None:
    frame = make()
    text = link_maps.report(frame, FACTS)
    assert "EMULATED LINKS" in text
    assert "sharing one GPU" in text
    drawn = link_maps.figures(frame, FACTS)
    assert list(drawn) == ["map-n2.png", "map-n4.png", "crossovers.png"]
    for figure in (*drawn.values(), link_maps.slices(frame, FACTS, 4, 16384)):
        assert "EMULATED LINKS" in str(figure.get_label())
    emulation = link_maps.caption(frame.assign(cpu_emulation=True), {**FACTS, "backend": "cpu", "cores": 2})
    assert "cpu backend (EMULATION)" in emulation


def test_a_folder_without_a_map(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="has no map"):
        link_maps.load(tmp_path)


def test_the_notebook(tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    make().to_parquet(tmp_path / "map.parquet")
    (tmp_path / "provenance.json").write_text(json.dumps(FACTS))
    monkeypatch.setenv("FLASH_COMM_MAPS", str(tmp_path))
    names, outputs = test_notebooks.run("06_links", "best", tmp_path, folders)
    pd.testing.assert_frame_equal(names["best"], link_maps.winners(make()))
    assert test_notebooks.pictures(outputs) == 3
    assert any("EMULATED LINKS" in text for text in test_notebooks.printed(outputs))


# ---- another medium ------------------------------------------------------------------------------------------------------


def predicted(**changes: Any) -> float:
    device, bus = MediumFacts({"cell": 0.3, "flag": 0.8}, 1000.0), MediumFacts({"cell": 1.3, "flag": 3.8}, 20.0)
    values: dict[str, Any] = {
        "device_us": 5.0,
        "form": "cell",
        "rounds": 1,
        "wire_bytes": 0,
        "device": device,
        "other": bus,
    }
    return links.predicted_us(**{**values, **changes})


def test_a_prediction_replaces_hops_and_bytes_and_nothing_else() -> None:
    assert predicted() == pytest.approx(5 + 1.0)
    assert predicted(rounds=2, form="flag") == pytest.approx(5 + 2 * 3.0)
    assert predicted(wire_bytes=100_000) == pytest.approx(5 + 1.0 + 100 * (1 / 20 - 1 / 1000))
    assert predicted(other=MediumFacts({"cell": 0.3, "flag": 0.8}, 1000.0)) == pytest.approx(5.0)
    assert predicted(device_us=0.0, rounds=2) == pytest.approx(2 * 1.3)  # never less than the hops


def test_the_report_of_the_errors() -> None:
    media = {2: {"host": MediumFacts({"cell": 1.3, "flag": 3.8}, 20.0)}}
    both = pd.DataFrame(
        {
            "ranks": 2, "nbytes": [1024, 1024], "protocol": ["one_shot.ll", "two_shot.ll"], "device_us": [2.0, 3.0],
            "predicted_us": [4.0, 6.0], "latency_us": [4.4, 5.0], "low_us": [4.0, 4.9], "high_us": [4.5, 5.1],
        }
    )  # fmt: skip
    both["error"] = both["predicted_us"] / both["latency_us"] - 1
    text = links.host_report(FACTS, media, both)
    assert "-9.1 %" in text
    assert "+20.0 %" in text
    assert "median error 14.5 %" in text
    assert "worst 20.0 %" in text
    assert "the predicted one in 1 of 1 cells" in text
    assert np.isfinite(both["error"]).all()
