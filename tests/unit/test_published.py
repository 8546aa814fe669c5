"""The form on published curves: the errors that were reached, by system, at sizes left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import published
from fcomm.errors import ArgumentError, RecordError

# Median and 95th percentile at sizes left out, over all GPUs and rank counts: what was reached, rounded up. The target is 5 % and
# 15 %; where the percentile is above it, a curve jumps at a switch that the fit does not know.
REACHED = {
    ("sglang 0.5.14", "all_reduce"): (0.03, 0.12),
    ("trtllm 1.3.0rc20", "all_reduce"): (0.03, 0.16),
    ("nccl 2.29.2", "all_gather"): (0.03, 0.14),
    ("nccl 2.29.2", "all_reduce"): (0.03, 0.20),
    ("sglang 0.5.10", "all_reduce"): (0.03, 0.26),
    ("vllm 0.24.0", "all_reduce"): (0.03, 0.31),
}


def test_the_form_describes_systems_that_it_was_not_made_for() -> None:
    frame = published.read()
    frame = frame[frame["gpu"].isin(["b300_sxm", "h200_sxm"]) & frame["system"].isin(["sglang", "trtllm"])]
    frame = frame[frame["version"] != "0.5.10"]
    found = published.evaluate(frame)
    for _, of_it in found.groupby("system"):
        errors, plain = (np.concatenate(of_it[c].tolist()) for c in ("errors", "two_term_errors"))
        assert np.median(errors) <= published.MEDIAN
        assert np.quantile(np.concatenate(of_it["between"].tolist()), 0.95) <= published.P95
        assert np.median(errors) < np.median(plain)
        assert np.quantile(errors, 0.95) < np.quantile(plain, 0.95)
    assert "| all |" in published.report(found)


@pytest.mark.full
def test_all_systems_and_gpus() -> None:
    found = published.evaluate(published.read())
    assert len(found) == 96
    for key, of_it in found.groupby(["system", "collective"]):
        errors, plain = (np.concatenate(of_it[c].tolist()) for c in ("errors", "two_term_errors"))
        median, p95 = REACHED[str(key[0]), str(key[1])]
        assert np.median(errors) <= median
        assert np.quantile(errors, 0.95) <= p95
        assert np.median(errors) < np.median(plain)
    assert (found["median"] < found["two_term_median"]).mean() > 0.9


def test_duplicates_are_averaged_and_modes_are_not_mixed() -> None:
    frame = published.read()
    keys = ["system", "version", "gpu", "collective", "ranks", "bytes"]
    assert not frame.duplicated(keys).any()
    assert frame["bytes"].between(1 << 10, 4 << 20).all()


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "x.csv"
    with pytest.raises(RecordError, match=r"^cannot read .*x\.csv \(No such file or directory\)$"):
        published.read(bad)
    for content in ("a,b\n1,2\n", "", "a\n1,2\n3,4,5,6\n", published.DATA.read_text().replace("latency_us", "us", 1)):
        bad.write_text(content)
        with pytest.raises(
            RecordError, match="is no table of published latencies: a CSV with columns system, version, gpu"
        ):
            published.read(bad)
    bad.write_text(published.DATA.read_text().splitlines()[0] + "\n")
    with pytest.raises(RecordError, match="has no latencies in graph mode of 1024 to 4194304 bytes"):
        published.read(bad)
    text = published.DATA.read_text().splitlines()
    bad.write_text("\n".join([text[0], text[2].rsplit(",", 1)[0] + ",-1"]) + "\n")
    with pytest.raises(RecordError, match="not positive"):
        published.read(bad)


def test_a_switch_is_found_where_a_curve_has_a_step_and_nowhere_else() -> None:
    frame = published.read()
    frame = frame[(frame["system"] == "vllm") & (frame["gpu"] == "b300_sxm")]
    cuts = published.switches(frame)
    assert 128 << 10 < cuts[8] < 256 << 10
    assert 256 << 10 < cuts[4] < 512 << 10
    assert cuts[2] == 512 << 10
    smooth = frame.assign(latency_us=5 + frame["bytes"] / 1e5)
    assert published.switches(smooth) == published.V1_UP_TO


def test_a_page_without_a_place_for_tables_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "evaluate", lambda _: pytest.fail("it has begun"))
    with pytest.raises(
        ArgumentError, match=r"cost-model\.md has no <!-- published --> \.\.\. <!-- /published --> to put tables in"
    ):
        published.main(["--docs", str(tmp_path)])
