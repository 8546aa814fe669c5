"""Environment variables: documented one by one, checked when read; sizes and dtypes as people write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcomm import settings
from fcomm.dtypes import ALIASES, BYTES, REDUCIBLE, reducible
from fcomm.errors import ArgumentError
from fcomm.sizes import format_size, parse_size

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.delenv("CXX", raising=False)


def documented() -> dict[str, str]:
    """Variables of docs/settings.md with the defaults that it gives."""
    rows = re.findall(
        r"^\| `(FCOMM_\w+)` \| (.*?) \| .* \|$", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE
    )
    assert len(rows) == len({name for name, _ in rows})
    return dict(rows)


def test_the_page_lists_exactly_the_variables_with_their_defaults() -> None:
    assert {name: text.replace("`", "") for name, text in documented().items()} == {
        s.name: s.default for s in settings.SETTINGS
    }


def test_no_variable_is_read_that_is_not_listed() -> None:
    known = {s.name for s in settings.SETTINGS}
    for folder in ("fcomm", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            assert set(re.findall(r"\bFCOMM_[A-Z_]+\b", path.read_text())) <= known, path
    assert set(re.findall(r"\bFCOMM_[A-Z_]+\b", (ROOT / "docs" / "settings.md").read_text())) == known


def test_defaults() -> None:
    assert settings.backend() == "auto"
    assert settings.protocol() is None
    assert settings.timeout_s() == 30.0
    assert settings.checked() is False
    assert settings.cache_dir().name == "flash-comm"
    assert settings.compiler() is None


@pytest.mark.parametrize(
    ("name", "text", "read", "want"),
    [
        ("FCOMM_BACKEND", "cpu", settings.backend, "cpu"),
        ("FCOMM_BACKEND", " ", settings.backend, "auto"),
        ("FCOMM_PROTOCOL", "one_shot.ll", settings.protocol, "one_shot.ll"),
        ("FCOMM_PROTOCOL", "auto", settings.protocol, None),
        ("FCOMM_TIMEOUT_S", "0.25", settings.timeout_s, 0.25),
        ("FCOMM_CHECKED", "1", settings.checked, True),
        ("FCOMM_CHECKED", "0", settings.checked, False),
        ("FCOMM_CACHE_DIR", "/somewhere", settings.cache_dir, Path("/somewhere")),
        ("FCOMM_CXX", "clang++", settings.compiler, "clang++"),
        ("CXX", "g++-12", settings.compiler, "g++-12"),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, read: Any, want: object) -> None:
    monkeypatch.setenv(name, text)
    assert read() == want


def test_our_compiler_variable_goes_before_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setenv("FCOMM_CXX", "clang++")
    assert settings.compiler() == "clang++"


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("FCOMM_BACKEND", "gpu", settings.backend),
        *(("FCOMM_TIMEOUT_S", text, settings.timeout_s) for text in ("soon", "0", "-1", "nan", "inf", "1e9")),
    ],
)
def test_nonsense_is_one_sentence_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, read: Any
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=f"^{name}={re.escape(text)} is not ") as caught:
        read()
    assert "\n" not in str(caught.value)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("512", 512),
        ("64K", 65536),
        ("64k", 65536),
        (" 1 MiB ", 1 << 20),
        ("2mb", 2 << 20),
        ("8B", 8),
        ("3kib", 3072),
    ],
)
def test_sizes(text: str, want: int) -> None:
    assert parse_size(text) == want


@pytest.mark.parametrize("text", ["", "K", "0", "3X", "-5", "1.5K", "1e3", "1 2", "0x10", "64 K B", "1T"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a size") as caught:
        parse_size(text)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 1 << 40))
def test_a_size_written_is_the_size_read(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


def test_the_shortest_spelling() -> None:
    assert [format_size(n) for n in (100, 1024, 1536, 1 << 20, 3 << 19)] == [
        "100 B",
        "1 KiB",
        "1536 B",
        "1 MiB",
        "1536 KiB",
    ]


# ---- dtypes ---------------------------------------------------------------------------------------------------------


def test_dtypes_by_name_and_by_alias() -> None:
    for name, element in REDUCIBLE.items():
        assert reducible(name) is element
        assert element.name == name == element.numpy.name
        assert element.itemsize == element.numpy.itemsize
    for alias, name in ALIASES.items():
        assert reducible(alias).name == name
    assert {t.kernel_type for t in REDUCIBLE.values()} == {"F32", "F16", "BF16", "I32"}


@pytest.mark.parametrize("name", ["float64", "bytes", "uint8", "", "int64"])
def test_a_dtype_that_cannot_be_summed_is_one_sentence(name: str) -> None:
    assert BYTES.name not in REDUCIBLE
    with pytest.raises(ArgumentError, match=r"cannot be reduced; use one of float32, float16, bfloat16, int32$"):
        reducible(name)


@pytest.mark.parametrize("name", ["FCOMM_PLAIN", "FCOMM_CHECKED"])
def test_a_switch_is_on_off_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = {"FCOMM_PLAIN": settings.plain, "FCOMM_CHECKED": settings.checked}[name]
    for value, on in (("1", True), ("yes", True), ("0", False), ("off", False), ("", False)):
        monkeypatch.setenv(name, value)
        assert ask() is on
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(ArgumentError, match=f"{name}=nonsense is neither yes nor no"):
        ask()
