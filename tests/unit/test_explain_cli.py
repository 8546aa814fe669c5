"""`python -m fcomm explain`: needs neither MPI nor a GPU, says why, and what is wrong with a model in one sentence."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fcomm import bootstrap
from fcomm.__main__ import run
from fcomm.cost_model import Model, seed_model
from fcomm.errors import ArgumentError
from fcomm.source import source_hash
from tests import launch

MACHINE = {
    "backend": "cuda", "device": "NVIDIA H200", "compute_capability": "9.0", "sms": 132, "shared_gpus": 1,
    "links": ["same"], "share_percent": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("FCOMM_MODEL", "FCOMM_PROTOCOL", "FCOMM_PLAIN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model() -> Model:
    """One that passes for fitted, with a favourite."""
    seed = seed_model(MACHINE)
    own = {**seed.own, "two_shot.ll16": dict.fromkeys(seed.own["two_shot.ll16"], 0.0)}
    shapes: dict[str, tuple[tuple[int, int, int], ...]] = {"two_shot.ll16/8/none": ((1024, 7, 128),)}
    return replace(seed, seed=False, source_hash=source_hash(), own=own, shapes=shapes)


def explain(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    code = run(["explain", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    code = run(["explain", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    return err


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_a_table_by_short_names(capsys: pytest.CaptureFixture[str], short: str, name: str) -> None:
    out = explain(capsys, "--bytes", "64K", "--dtype", short, "--ranks", "8")
    lines = out.splitlines()
    assert lines[0].startswith(f"all_reduce of 64 KiB of {name} among 8 ranks, dependent launch none: ")
    assert "model     the seed coefficients of the package, not measured on this machine" in lines
    assert any(line.startswith("slab      50 MiB a rank for messages of 1 MiB") for line in lines)
    assert sum(line.startswith("*") for line in lines) == 1
    assert any(line.split()[:4] == ["one_shot.ll", "1", "1", "917504"] for line in lines), "rounds, launches, bytes"


def test_the_same_for_programs(capsys: pytest.CaptureFixture[str], model: Model, tmp_path: Path) -> None:
    path = model.save(tmp_path / "model.json")
    said: dict[str, Any] = json.loads(explain(capsys, "--bytes", "1K", "--model", path, "--json"))
    assert (said["choice"], said["shape"], said["slab_bytes"]) == ("two_shot.ll16", [7, 128], 50 << 20)
    assert said["why"].startswith("the least predicted time among ")
    chosen = next(c for c in said["candidates"] if c["protocol"] == said["choice"])
    assert chosen["predicted_us"] == pytest.approx(sum(chosen["terms_us"].values()))
    assert chosen["predicted_us"] == min(
        c["predicted_us"] for c in said["candidates"] if not c["refusal"] and not c["baseline"]
    )


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("launch_feature", ["none", "late", "early"])
def test_collectives_and_launch_features(
    capsys: pytest.CaptureFixture[str], collective: str, launch_feature: str
) -> None:
    out = explain(capsys, "--collective", collective, "--launch", launch_feature, "--ranks", "3", "--bytes", "48K")
    assert f"among 3 ranks, dependent launch {launch_feature}: " in out
    assert "unknown" not in out, "the seed has prices for all"


def test_dtypes_that_an_encoding_does_not_take_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    out = explain(capsys, "--dtype", "int32")
    assert "not admitted" in out
    assert any(
        line.split() == ["one_shot.lamport", *["it", "does", "not", "handle", "int32"]] for line in out.splitlines()
    )


def test_the_settings_of_calls_apply(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCOMM_PROTOCOL", "two_shot.flag")
    assert explain(capsys).splitlines()[:2] == [
        "all_reduce of 64 KiB of bfloat16 among 8 ranks, dependent launch none: two_shot.flag",
        "because   FCOMM_PROTOCOL names it",
    ]
    monkeypatch.setenv("FCOMM_PLAIN", "1")
    assert ": barrier." in explain(capsys).splitlines()[0]


def test_a_variable_that_names_nothing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCOMM_PROTOCOL", "nonsense")
    assert refused(capsys).startswith("error: FCOMM_PROTOCOL=nonsense: there is no protocol 'nonsense'; the names are ")
    monkeypatch.setenv("FCOMM_PROTOCOL", "all_gather.lamport")
    assert "FCOMM_PROTOCOL=all_gather.lamport: all_gather.lamport does not exist: it would change" in refused(capsys)


def test_a_call_that_nothing_may_run_is_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCOMM_PROTOCOL", "one_shot.lamport")
    assert run(["explain", "--dtype", "int32"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].endswith(": nothing")
    assert (
        "because   FCOMM_PROTOCOL=one_shot.lamport: one_shot.lamport is not admitted here: it does not handle int32"
        in out
    )


def test_a_gather_moves_any_type(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("int8", "int8"), ("bf16", "bfloat16"), ("complex64", "complex64"), ("bytes", "bytes")):
        out = explain(capsys, "--collective", "all_gather", "--dtype", name)
        assert out.startswith(f"all_gather of 64 KiB of {said} among 8 ranks")
    for name, said in (("no", "there is no dtype 'no'"), ("object", "'object' has no bytes that could be sent")):
        words = refused(capsys, "--collective", "all_gather", "--dtype", name)
        assert said in words
        assert "reduced" not in words
    assert "--bytes 12 is no whole number of complex64 elements" in refused(
        capsys, "--collective", "all_gather", "--dtype", "complex64", "--bytes", "12"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["info", "--help"], ["explain", "--help"]])
def test_help_is_printed_by_the_first_process_of_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for number, says in (("0", True), ("1", False)):
        monkeypatch.setenv("PMI_RANK", number)
        code = 0
        with contextlib.suppress(SystemExit):  # how argparse leaves
            code = run(arguments)
        assert code == 0
        assert bool(capsys.readouterr().out) is says


def test_a_command_for_one_process_is_done_by_the_first_of_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: object) -> int:
        print("done")
        raise ArgumentError("no")

    for number, expected in (("0", (2, "done\n", "error: no\n")), ("1", (0, "", ""))):
        monkeypatch.setenv("PMI_RANK", number)
        code = bootstrap.run(main, [], alone=True)
        assert (code, *capsys.readouterr()) == expected


def test_a_model_is_named_by_the_option_or_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Model, tmp_path: Path
) -> None:
    path = model.save(tmp_path / "model.json")
    words = f"model     model {model.digest()[:12]} of NVIDIA H200, from {path}\n"
    assert words in explain(capsys, "--model", path)
    monkeypatch.setenv("FCOMM_MODEL", str(path))
    assert words in explain(capsys)
    assert "the seed coefficients" in explain(capsys, "--model", "seed")


def test_a_model_of_other_kernels_is_shown_with_a_remark(
    capsys: pytest.CaptureFixture[str], model: Model, tmp_path: Path
) -> None:
    path = replace(model, source_hash="f" * 64).save(tmp_path / "model.json")
    assert "a communicator would refuse it: it was fitted to other kernels" in explain(capsys, "--model", path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:200], "truncated"),
        (lambda text: text.replace('"mode": "graph"', '"mode": "host"'), "SHA-256"),
        (lambda text: text.replace('"schema": ', '"schema": 9'), "schema 9"),
        (lambda text: "", "not JSON"),
        (lambda text: "\x00\xff", "not"),
    ],
)
def test_a_file_that_is_no_model_is_one_sentence(
    capsys: pytest.CaptureFixture[str], model: Model, tmp_path: Path, damage: Any, words: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(damage(model.to_json()))
    said = refused(capsys, "--model", path)
    assert words in said
    assert str(path) in said


def test_models_that_cannot_be_used_at_all(capsys: pytest.CaptureFixture[str], model: Model, tmp_path: Path) -> None:
    path = replace(model, protocols="0" * 64).save(tmp_path / "model.json")
    assert "cannot be used: it was fitted with another set of protocols" in refused(capsys, "--model", path)
    assert "No such file" in refused(capsys, "--model", tmp_path / "nosuch.json")
    assert "cannot read the cost model" in refused(capsys, "--model", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bytes", "3"], "--bytes 3 is no whole number of bfloat16 elements"),
        (["--bytes", "4098", "--collective", "reduce_scatter"], "elements in 8 equal parts"),
        (["--ranks", "1"], "--ranks 1: an exchange needs at least two ranks"),
        (["--launch", "soon"], "--launch"),
        (["--max-bytes", "0"], "'0' is not a size"),
    ],
)
def test_nonsense_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in refused(capsys, *arguments)


def test_further_processes_of_a_launcher_say_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    for arguments in (["explain"], ["explain", "--ranks", "1"], ["build", "--arch", "sm_12345"]):
        assert run(arguments) == 0
        assert capsys.readouterr() == ("", "")


def test_neither_mpi_nor_a_gpu_is_needed() -> None:
    without = "import sys; sys.modules['mpi4py'] = sys.modules['cupy'] = None; from fcomm.__main__ import run; "
    done = subprocess.run(
        [sys.executable, "-c", f"{without}raise SystemExit(run(['explain', '--json']))"],
        env=launch.environment(), capture_output=True, text=True, timeout=60, check=False, cwd=launch.ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choice"]
