"""Flattening and hashing of kernel sources: one string holds all that a compiler sees, and one hash names it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fcomm import source
from fcomm.errors import SetupError
from fcomm.protocols import protocols
from fcomm.source import Specialisation, _code, flatten, kernel_root

SPECS = [Specialisation(p, t, 3) for p in protocols().values() for t in p.dtypes]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """a includes b and d/c; b and c include the same d/e, each in its own way."""
    (tmp_path / "d").mkdir()
    (tmp_path / "a.cuh").write_text('#pragma once\n#include <stddef.h>\n#include "b.cuh"\n#include "d/c.cuh"\nint a;\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "d/e.cuh"\nint b;\n')
    (tmp_path / "d" / "c.cuh").write_text('#pragma once\n  #  include "e.cuh"\nint c;\n')
    (tmp_path / "d" / "e.cuh").write_text("#pragma once\n#include <stddef.h>\nint e;\n")
    return tmp_path


def test_each_file_is_there_once_and_before_what_needs_it(tree: Path) -> None:
    text = flatten('#include "a.cuh"\n#include "b.cuh"\nint last;\n', tree)
    assert re.findall(r"int (\w+);", text) == ["e", "b", "c", "a", "last"]
    assert "#pragma once" not in text
    assert '#include "' not in text


def test_system_includes_stay(tree: Path) -> None:
    assert flatten('#include "a.cuh"\n', tree).count("#include <stddef.h>") == 2


def test_line_numbers_are_those_of_the_files(tree: Path) -> None:
    """Where a compiler says file and line, they must be the ones to open."""
    name, number, checked = "specialisation.cu", 1, 0
    texts = {name: '#include "a.cuh"\nint last;\n'}
    for line in flatten(texts[name], tree).splitlines():
        if found := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, name = int(found[1]), found[2]
            continue
        if line:
            text = texts.get(name) or (tree / name).read_text()
            assert line == text.splitlines()[number - 1], (name, number)
            checked += 1
        number += 1
    assert checked == 7


def test_a_missing_include_is_named_in_one_sentence(tree: Path) -> None:
    (tree / "b.cuh").write_text('#pragma once\nint b;\n#include "gone.cuh"\n')
    with pytest.raises(SetupError) as caught:
        flatten('#include "a.cuh"\n', tree)
    assert str(caught.value) == "b.cuh:3 includes gone.cuh, which is not among the kernel sources"


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_specialisation_is_one_self_contained_string(spec: Specialisation) -> None:
    text = spec.text()
    assert '#include "' not in text.replace('#include "cpu/', "")
    assert text.count("FC_KERNEL((") == 1
    starts = re.findall(r'^#line 1 "(.*)"$', text, re.MULTILINE)
    assert len(starts) == len(set(starts))
    for header in (spec.protocol.algorithm.header, *(e.header for e in spec.protocol.encodings)):
        assert header in starts


def test_specialisations_have_names_and_texts_of_their_own() -> None:
    assert len({s.name for s in SPECS}) == len({s.text() for s in SPECS}) == len(SPECS)


def test_the_hash_changes_with_any_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = tmp_path / "kernels_cu"
    shutil.copytree(kernel_root(), root)
    monkeypatch.setattr(source, "kernel_root", lambda: root)
    hash_now = source._own_hash.__wrapped__
    before = hash_now()
    assert before == hash_now()
    links = [root / "link.cuh", root / "forward.cuh"]
    files = sorted(
        p for p in root.rglob("*") if p.is_file() and p.parent.name not in ("sim", "experiments") and p not in links
    )
    assert files
    seen = {before}
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content + b"int changed;\n")
        seen.add(hash_now())
        path.write_bytes(content)
    assert len(seen) == len(files) + 1
    for link in links:
        link.write_text("int changed;\n")
    assert hash_now() == before, "an emulated link is in no kernel that is measured for itself"
    primitives = root / "primitives.cuh"
    text = primitives.read_text()
    primitives.write_text(text + "#if FC_LINK == 2\n#ifdef A\nint changed;\n#endif\nint changed;\n#endif\n")
    assert hash_now() == before
    primitives.write_text(text + "#if FC_LINK == 2\n#else\nint changed;\n#endif\n")
    assert hash_now() in seen - {before}, "the other part of the condition is in every kernel"
    primitives.write_text(text)
    assert hash_now() == before
    files[0].rename(files[0].with_name("renamed.cuh"))
    assert hash_now() not in seen


def test_kernels_inside_the_package_are_found_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`pip install` puts them at fcomm/kernels_cu; a folder of that name beside the package is somebody else's."""
    inside, beside = tmp_path / "fcomm" / "kernels_cu", tmp_path / "kernels_cu"
    for folder in (inside, beside):
        folder.mkdir(parents=True)
        (folder / "primitives.cuh").touch()
    monkeypatch.setattr(source, "__file__", str(tmp_path / "fcomm" / "source.py"))
    find = source.kernel_root.__wrapped__
    assert find() == inside.resolve()
    shutil.rmtree(inside)
    assert find() == beside.resolve()
    shutil.rmtree(beside)
    with pytest.raises(SetupError, match="kernel sources are missing"):
        find()


def test_comments_change_no_hash_and_code_does() -> None:
    assert _code("a;  // why\n\n  // more\nb;\n") == _code("a;\nb; // other") == "a;\nb;"
    assert _code("a;") != _code("a ;")
    assert not any(
        "//" in line and '"' in line.split("//")[0] and '"' in line.split("//")[1]
        for p in kernel_root().rglob("*.cuh")
        for line in p.read_text().splitlines()
    )  # none within a string
