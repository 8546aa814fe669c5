"""Notebooks as pairs: ``notebooks/name.py`` in jupytext's percent format is the source, ``name.ipynb`` has its outputs.

``python tools/notebooks.py [NAME ...]`` runs the sources, each in a process of its own, and writes the pairs; ``--check``
only compares. Neither needs Jupyter, so that the tests can do both; jupytext reads and writes the same pairs.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
METADATA = {
    # Without the filter each sync would put the version of whoever ran it into the sources.
    "jupytext": {
        "formats": "ipynb,py:percent",
        "notebook_metadata_filter": "-jupytext.text_representation.jupytext_version",
    },
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_MARK = re.compile(r"^# %%(?: \[(markdown)\])?\s*$")


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook."""

    markdown: bool
    source: str
    line: int
    """Of the source file, where its first line is."""


def cells(text: str) -> list[Cell]:
    """The cells of a source in percent format; what precedes the first mark is the file's header."""
    found: list[Cell] = []
    lines: list[str] = []
    markdown, start = False, 0

    def end() -> None:
        if start:
            kept = [re.sub(r"^# ?", "", line) for line in lines] if markdown else lines
            found.append(Cell(markdown, "\n".join(kept).strip("\n"), start + 1))

    for number, line in enumerate(text.splitlines(), 1):
        mark = _MARK.match(line)
        if mark:
            end()
            markdown, start, lines = mark[1] is not None, number, []
        else:
            lines.append(line)
    end()
    return found


def run_cells(path: Path, every: Sequence[Cell], names: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Runs the code in order in `names`; the outputs of each cell. An exception leaves with the place in the source."""
    outputs: list[list[dict[str, Any]]] = []
    for cell in every:
        shown: list[dict[str, Any]] = []
        outputs.append(shown)
        if cell.markdown or not cell.source:
            continue
        tree = ast.parse(cell.source, str(path))
        ast.increment_lineno(tree, cell.line - 1)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        tree.body = tree.body if last is None else tree.body[:-1]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, str(path), "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), str(path), "eval"), names)
        if printed.getvalue():
            shown.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
        if value is not None:
            shown.append({"output_type": "execute_result", "data": _data(value), "metadata": {}})
    return outputs


def _data(value: Any) -> dict[str, Any]:
    """A value as a notebook shows it: a picture, a table, or its text."""
    data: dict[str, Any] = {}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    if hasattr(value, "_repr_html_") and (html := value._repr_html_()):
        data["text/html"] = _lines(html)
    data["text/plain"] = _lines(repr(value))
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(every: Sequence[Cell], outputs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The pair's content, as text of an .ipynb file."""
    content: list[dict[str, Any]] = []
    count = 0
    for k, (cell, shown) in enumerate(zip(every, outputs, strict=True)):
        one: dict[str, Any] = {
            "id": f"cell-{k:02d}",
            "cell_type": "markdown" if cell.markdown else "code",
            "metadata": {},
            "source": _lines(cell.source),
        }
        if not cell.markdown:
            count += 1
            results = [{**o, "execution_count": count} if o["output_type"] == "execute_result" else o for o in shown]
            one |= {"execution_count": count, "outputs": results}
        content.append(one)
    made = {"cells": content, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def out_of_step(path: Path) -> str | None:
    """Why a source and its pair do not have the same cells, in one clause; None if they do."""
    pair = path.with_suffix(".ipynb")
    if not pair.is_file():
        return f"{pair.name} is missing"
    ours = [(c.markdown, c.source) for c in cells(path.read_text())]
    theirs = [(c["cell_type"] == "markdown", "".join(c["source"])) for c in json.loads(pair.read_text())["cells"]]
    return None if ours == theirs else f"{pair.name} has other cells than {path.name}"


def _write(path: Path) -> None:
    every = cells(path.read_text())
    os.chdir(path.parent)
    outputs = run_cells(path, every, {"__name__": "__main__"})
    scratch = path.with_suffix(".ipynb.tmp")
    scratch.write_text(notebook(every, outputs))
    scratch.replace(path.with_suffix(".ipynb"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = argparse.ArgumentParser(prog="python tools/notebooks.py", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME", help="notebooks, such as 01_first_look (all)")
    p.add_argument("--check", action="store_true", help="say which pairs are out of step; run nothing")
    p.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    paths = [NOTEBOOKS / f"{Path(n).stem}.py" for n in args.names] or sorted(NOTEBOOKS.glob("[0-9]*.py"))
    for path in paths:
        if not path.is_file():
            print(f"error: there is no notebook {path}", file=sys.stderr)
            return 2
    if args.check:
        problems = list(filter(None, map(out_of_step, paths)))
        for problem in problems:
            print(f"{problem}: python tools/notebooks.py writes it", file=sys.stderr)
        return 1 if problems else 0
    if args.here:
        try:
            _write(paths[0])
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    for path in paths:
        print(f"running {path.name}", flush=True)
        done = subprocess.run([sys.executable, __file__, "--here", path.stem], env=env, check=False)
        if done.returncode:
            print(f"error: {path.name} failed and its pair was left as it was", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
