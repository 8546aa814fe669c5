"""The cost model as data: what is counted, what is predicted, and what is refused."""

import json
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcomm.cost_model import (
    OWN,
    SHARED,
    TERMS,
    Model,
    identity,
    kept,
    machine_key,
    model_path,
    pieces,
    seed_model,
    smooth_maximum,
    value_at,
    work,
)
from fcomm.errors import ModelError
from fcomm.grids import default_shape
from fcomm.protocols import GpuShare, protocols

SHARED_H200 = {
    "backend": "cuda", "device": "NVIDIA H200", "compute_capability": "9.0", "sms": 132, "shared_gpus": 1, "links": ["same"],
    "share_percent": None,
}  # fmt: skip
OURS = [p for p in protocols().values() if not p.baseline]


def model() -> Model:
    return seed_model(SHARED_H200)


@pytest.mark.parametrize("name", list(protocols()))
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_prediction_is_the_sum_of_its_terms_for_every_protocol(name: str, n: int) -> None:
    for launch in ("none", "late"):
        terms = model().predict(protocols()[name], 65536, n, launch)
        assert tuple(terms) == TERMS
        assert all(v >= 0 for k, v in terms.items() if k not in ("overlap", "correction"))
        assert terms["overlap"] <= 0
        assert sum(terms.values()) == pytest.approx(model().latency_us(protocols()[name], 65536, n, launch))
        assert sum(terms.values()) >= max(terms["launch"], terms["wire"])


@given(st.sampled_from(OURS), st.integers(1, 16), st.sampled_from([2, 4, 8]))
def test_wire_and_rounds_are_the_registrys(p: object, kib: int, n: int) -> None:
    assert isinstance(p, type(OURS[0]))
    w = work(p, kib * 1024, n, (4, 256))
    assert w.wire_mib * 2**20 == p.wire_bytes(kib * 1024, n)
    assert (w.rounds, w.peers) == (p.algorithm.rounds, n - 1)


def test_rearm_passes_and_second_loads_are_counted() -> None:
    lamport, ll128 = protocols()["one_shot.lamport"], protocols()["two_shot.ll128"]
    assert work(lamport, 65536, 4, (16, 256)).rearm_mib * 2**20 == 3 * 65536
    assert work(protocols()["one_shot.ll"], 65536, 4, (16, 256)).rearm_mib == 0
    assert [work(lamport, 65536, 4, (b, 256)).extra_passes for b in (16, 8, 4)] == [0, 1, 3]
    assert work(ll128, 65536, 4, (16, 256)).line_phases == 2
    assert work(protocols()["two_shot.ll+ll128"], 65536, 4, (16, 256)).line_phases == 1


def test_a_message_longer_than_a_slot_is_several_launches() -> None:
    p = protocols()["one_shot.ll"]
    (size, count), *rest = pieces(p, 1 << 20, 8, 1 << 20)
    assert count > 1
    assert size * count == 1 << 20
    assert not rest
    one, all_of_it = (model().predict(p, b, 8, correct=False) for b in (size, 1 << 20))
    assert all_of_it["launch"] == pytest.approx(count * one["launch"])
    assert pieces(p, size + 16, 8, 1 << 20) == ((size, 1), (16, 1))
    assert model().predict(p, 1 << 20, 8, max_bytes=8 << 20)["launch"] == pytest.approx(one["launch"])


def test_a_default_shape_fits_the_share_of_the_gpu() -> None:
    p = protocols()["one_shot.ll"]
    assert default_shape(p, 1024, 8, GpuShare("9.0", 16, 132)) == (1, 256)
    assert default_shape(p, 32768, 8, GpuShare("9.0", 16, 132)) == (16, 256)
    assert default_shape(p, 1 << 20, 8, None) == (2, 32)


def test_searched_shapes_are_inherited_from_the_nearest_size() -> None:
    m = replace(model(), shapes={"one_shot.ll/8/none": ((4096, 0, 0), (65536, 8, 512))})
    p = protocols()["one_shot.ll"]
    assert m.shape(p, 8192, 8) is None
    assert m.shape(p, 32768, 8) == (8, 512)
    assert m.shape(p, 1 << 20, 8) == (8, 512)
    assert m.shape(p, 1 << 20, 8, "late") is None
    assert m.shape(p, 1 << 20, 4) is None
    assert m.predict(p, 1 << 17, 8)["waves"] > model().predict(p, 1 << 17, 8)["waves"]


def test_a_correction_is_interpolated_over_the_logarithm_of_the_size() -> None:
    curve = ((10.0, 0.0), (12.0, 0.2))
    assert [value_at(curve, x) for x in (5, 10, 11, 12, 20)] == pytest.approx([0, 0, 0.1, 0.2, 0.2])
    p = protocols()["one_shot.ll"]
    m = replace(model(), corrections={"one_shot.ll/4/none": curve})
    assert m.latency_us(p, 2048, 4) == pytest.approx(model().latency_us(p, 2048, 4) * math.exp(0.1))
    assert m.latency_us(p, 2048, 8) == model().latency_us(p, 2048, 8)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 8))
def test_the_smooth_maximum_lies_between_the_larger_and_the_sum(a: float, b: float, p: float) -> None:
    assert max(a, b) * (1 - 1e-9) <= smooth_maximum(a, b, p) <= (a + b) * (1 + 1e-9)


def test_a_prediction_takes_microseconds() -> None:
    m, p = model(), protocols()["two_shot.lamport+ll128"]
    m.predict(p, 65536, 8)

    def once() -> float:
        start = time.process_time()
        for _ in range(200):
            m.predict(p, 65536, 8)
        return (time.process_time() - start) / 200

    assert min(once() for _ in range(10)) < 60e-6  # 12 on an idle core


# ---- as a file -------------------------------------------------------------------------------------------------------


def test_a_model_survives_its_file_and_its_hash_follows_its_content(tmp_path: object) -> None:
    m = replace(
        model(), corrections={"one_shot.ll/4/none": ((10.0, 0.1),)}, shapes={"one_shot.ll/4/none": ((1024, 2, 128),)}
    )
    again = Model.from_json(m.to_json())
    assert again == m
    assert again.digest() == m.digest()
    assert replace(m, shared={**m.shared, "hop_us": 0.7}).digest() != m.digest()


def test_damaged_files_are_refused_in_one_sentence(tmp_path: object) -> None:
    text = model().to_json()
    body = json.loads(text)

    def refused(changed: str, why: str) -> None:
        with pytest.raises(ModelError, match=why) as caught:
            Model.from_json(changed)
        assert "\n" not in str(caught.value)

    refused(text[: len(text) // 2], "truncated")
    refused("[]", "no schema")
    refused(json.dumps({**body, "schema": 99}), "schema 99")
    refused(text.replace('"hop_us": ', '"hop_us": 1'), "was changed")
    refused(json.dumps({**body, "model": {"machine": {}}}), "damaged")


@pytest.mark.parametrize("value", [-1.0, float("nan"), None])
def test_impossible_coefficients_are_refused_by_name(value: float) -> None:
    m, key = model(), next(iter(SHARED))
    with pytest.raises(ModelError, match=key):
        replace(m, shared={**m.shared, key: value}).validate()
    key = next(iter(OWN))
    with pytest.raises(ModelError, match=rf"{key} of one_shot\.ll"):
        replace(m, own={**m.own, "one_shot.ll": {**m.own["one_shot.ll"], key: value}}).validate()


def test_models_of_others_are_not_this_machines() -> None:
    m = replace(model(), seed=False)
    assert m.mismatch(SHARED_H200) is None
    assert "another machine (device" in str(m.mismatch({**SHARED_H200, "device": "NVIDIA B200"}))
    assert "shared_gpus" in str(m.mismatch({**SHARED_H200, "shared_gpus": 0}))
    assert "protocols" in str(replace(m, protocols="x").mismatch(SHARED_H200))
    assert model().mismatch({**SHARED_H200, "device": "other"}) is None  # a seed is anyone's


def test_a_model_is_found_where_it_was_saved(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCOMM_CACHE_DIR", str(tmp_path))
    assert kept(SHARED_H200) == []
    m = replace(model(), seed=False)
    path = m.save(model_path(SHARED_H200, (2, 8)))
    assert kept(SHARED_H200) == [path]
    assert path.name.endswith("-n2.8.json")
    assert Model.load(path) == m
    assert kept({**SHARED_H200, "sms": 1}) == []
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.write_text(path.read_text()[:100])
    with pytest.raises(ModelError, match=r"truncated"):
        Model.load(path)
    with pytest.raises(ModelError, match="cannot read"):
        Model.load(path.with_name("absent.json"))


def test_what_has_no_prices_is_refused() -> None:
    m = model()
    with pytest.raises(ModelError, match="early"):
        m.predict(protocols()["one_shot.ll"], 1024, 2, "early")
    with pytest.raises(ModelError, match=r"one_shot\.ll"):
        replace(m, own={}).predict(protocols()["one_shot.ll"], 1024, 2)
    assert m.covers("one_shot.ll", launch="late")
    assert not m.covers("one_shot.ll", 4)
    assert not m.covers("nothing")


# ---- whose ------------------------------------------------------------------------------------------------------------


def gpu_facts(ranks_per_gpu: int, gpus: int, links: list[str]) -> dict[str, object]:
    one = {"device": "NVIDIA H200", "compute_capability": "9.0", "sms_total": 132, "ranks_per_gpu": ranks_per_gpu, "gpus": gpus,
           "links": links, "mps_share_percent": None}  # fmt: skip
    return {"backend": "cuda", "devices": [one], "cores": 8}


def test_identity_does_not_depend_on_how_many_ranks_there_are() -> None:
    two, eight = gpu_facts(2, 1, ["same"] * 2), gpu_facts(8, 1, ["same"] * 8)
    assert identity(two) == identity(eight) == SHARED_H200
    apart = [identity(gpu_facts(1, g, ["same", *["nvlink"] * (g - 1)])) for g in (2, 8)]
    assert apart[0] == apart[1]
    assert apart[0]["shared_gpus"] == 0
    assert apart[0]["links"] == ["nvlink"]
    assert machine_key(apart[0]) != machine_key(SHARED_H200)
    assert identity({"backend": "cpu", "cpu": "X", "cores": 2, "devices": [{}]}) == {
        "backend": "cpu",
        "device": "X",
        "cores": 2,
    }


def test_ranks_share_what_the_machine_says() -> None:
    own = replace(model(), machine={**SHARED_H200, "shared_gpus": 0})
    assert [
        model().sharers(8),
        own.sharers(8),
        replace(model(), machine={"backend": "cpu", "cores": 2}).sharers(4),
    ] == [8, 1, 3]
    gpu = model().gpu(8)
    assert gpu is not None
    assert gpu.sms == 16


def test_the_seed_covers_every_protocol_of_every_machine() -> None:
    for machine in (SHARED_H200, {**SHARED_H200, "shared_gpus": 0}, {"backend": "cpu", "device": "X", "cores": 2}):
        m = seed_model(machine)
        m.validate()
        assert m.seed
        assert all(m.covers(p.name) for p in protocols().values() if p.algorithm.forms is None)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", list(protocols()))
def test_the_smallest_messages_have_a_time(name: str, n: int) -> None:
    """Also those of which ranks have no part."""
    for nbytes in (1, 2, 4, 30):
        total = sum(seed_model({"backend": "cpu"}).predict(protocols()[name], nbytes, n).values())
        assert 0 < total < 1e6


def test_a_file_of_brackets_is_no_model() -> None:
    with pytest.raises(ModelError, match="truncated, or not JSON"):
        Model.from_json("[" * 100_000)
