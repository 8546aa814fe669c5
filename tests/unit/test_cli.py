"""What the commands have in common: bars, lists, and outputs that are looked at before the work."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from fcomm.cli import folder, listed, progress, target
from fcomm.errors import ArgumentError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def slowly(count: int) -> Iterator[int]:
    for k in range(count):
        time.sleep(0.15)
        yield k


def seen(terminal: Terminal) -> str:
    """What is left on the terminal's line."""
    return terminal.getvalue().rpartition("\r")[2]


def test_a_bar_is_there_while_it_is_of_use_and_nothing_of_it_stays() -> None:
    with contextlib.redirect_stderr(Terminal()) as terminal:
        assert list(progress(range(3), "quickly")) == [0, 1, 2]
        assert terminal.getvalue() == "", "not even a bar at 0 %"
        assert list(progress(slowly(4), "slowly", 4)) == [0, 1, 2, 3]
    assert re.search(r"slowly: +\d+%", terminal.getvalue())
    assert seen(terminal) == ""


def test_a_bar_is_gone_where_its_reader_stops_early() -> None:
    with contextlib.redirect_stderr(Terminal()) as terminal:
        bar = progress(slowly(4), "slowly", 4)
        assert [next(bar) for _ in range(3)] == [0, 1, 2]
        bar.close()  # type: ignore[attr-defined]
    assert "slowly: " in terminal.getvalue()
    assert seen(terminal) == ""
    assert not list(getattr(tqdm, "_instances", []))


def test_lists_name_something() -> None:
    assert listed(" a, b,,a", "--of") == ["a", "b"]
    for text in ("", ",", " , "):
        with pytest.raises(ArgumentError, match=rf"^--of '{text}' names nothing$"):
            listed(text, "--of")


def test_where_a_file_can_be_written(tmp_path: Path) -> None:
    target(tmp_path / "new.csv", "--csv")
    assert list(tmp_path.iterdir()) == [], "looked at, and nothing else"
    (tmp_path / "old.csv").touch()
    target(tmp_path / "old.csv", "--csv")
    for path, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "x.csv", f"there is no folder {tmp_path / 'no'}"),
        (tmp_path / "old.csv" / "x.csv", f"there is no folder {tmp_path / 'old.csv'}"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(f"--csv {path} cannot be written: {why}")):
            target(path, "--csv")


def test_folders_are_made_or_refused(tmp_path: Path) -> None:
    assert folder(tmp_path / "a" / "b", "--out").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(
        ArgumentError, match=r"cannot make the folder .*file \(File exists\): name another one with --out"
    ):
        folder(tmp_path / "file", "--out")
