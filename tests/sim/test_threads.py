"""The cpu backend under ThreadSanitizer: ranks as threads of one process, each CUDA thread a fiber that it knows of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fcomm.backends import cpu, sim
from fcomm.dtypes import BYTES, REDUCIBLE
from fcomm.protocols import protocol
from fcomm.source import Specialisation, flatten
from fcomm.verify.cases import DTYPE, Call, Case, Kernels, make_world
from fcomm.verify.command import every
from fcomm.verify.mutants import Edit, patch_sources

pytestmark = pytest.mark.sim

FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-pthread")
FEW = ("one_shot.flag", "two_shot.lamport16+ll128", "barrier.two_shot")


def compiler_has_tsan(folder: Path) -> bool:
    source = folder / "empty.cpp"
    source.write_text("#include <sanitizer/tsan_interface.h>\nint main() { __tsan_create_fiber(0); return 0; }\n")
    done = subprocess.run(
        [cpu.find_compiler(), *FLAGS, str(source), "-o", str(folder / "empty")], capture_output=True, check=False
    )
    return done.returncode == 0 and subprocess.run([folder / "empty"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("threads")
    if not compiler_has_tsan(made):
        pytest.skip("this compiler, or this machine's address layout, has no ThreadSanitizer with fibers")
    return made


def case(name: str, ranks: int) -> Case:
    """Blocks that share tiles, odd sizes, many calls: what fits a minute under ThreadSanitizer."""
    p = protocol(name)
    sizes = [64, 16, 256, 128] if p.algorithm.granule > 1 or p.algorithm.moves_bytes else [37, 1, 300, 64]
    if p.collective == "reduce_scatter":
        sizes = [s // ranks * ranks or ranks for s in sizes]
    return Case(ranks, tuple(Call(name, s, (2,)) for s in sizes), threads=32, replays=2)


def job(c: Case, path: Path) -> None:
    """Writes what threads.cpp runs: slabs, and each rank's launches with their arguments and bytes."""
    world = make_world(c, sim.LINKS["nvlink"], _NoKernels())
    params_bytes = next(one.params.nbytes for one in world.launches if one.params is not None)
    parts = [
        np.array(
            [c.ranks, len(world.launches), world.images[0].nbytes, world.array_bytes, params_bytes], "<u8"
        ).tobytes()
    ]
    parts += [image.tobytes() for image in world.images]
    for one in world.launches:
        fill = b"" if one.fill is None else one.fill.tobytes()
        want = b"" if one.expected is None else one.expected.tobytes()
        if one.params is not None:
            row = [one.rank, 1, one.blocks, one.threads, 0, 0, 0, 0]
            parts += [np.array(row, "<u8").tobytes(), one.params.tobytes()]
        else:
            row = [one.rank, 0, 1, 1, one.out_at, len(want), one.fill_at, len(fill)]
            parts += [np.array(row, "<u8").tobytes(), want, fill]
    path.write_bytes(b"".join(parts))


class _NoKernels(Kernels):
    """Only the arguments are of interest."""

    def get(self, proto: object, ranks: int, fused: object = None) -> None:  # type: ignore[override]
        return None


def build(name: str, ranks: int, folder: Path, root: Path | None = None) -> Path:
    p = protocol(name)
    spec = Specialisation(p, BYTES if p.algorithm.moves_bytes else REDUCIBLE[DTYPE], ranks)
    text = "#define FC_CPU 1\n" + flatten(spec.root_text(), root) + Path(__file__).with_name("threads.cpp").read_text()
    source = folder / f"{name}-{'mutant' if root else 'shipped'}.cpp"
    source.write_text(text)
    program = source.with_suffix(".exe")
    command = [cpu.find_compiler(), *FLAGS, str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return program


def run(program: Path, name: str, ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / f"{name}.job"
    job(case(name, ranks), path)
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=0 exitcode=66"}
    return subprocess.run([program, path], capture_output=True, text=True, check=False, timeout=300, env=env)


@pytest.mark.parametrize(
    "name", [p.name if p.name in FEW else pytest.param(p.name, marks=pytest.mark.full) for p in every()]
)
def test_no_race_and_the_right_bits(folder: Path, name: str) -> None:
    done = run(build(name, 3, folder), name, 3, folder)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]
    assert "0 wrong outputs" in done.stdout


def test_a_seeded_race_is_reported(folder: Path) -> None:
    """Two-shot hands a tile's sums from thread to thread through the output, behind a barrier; without it they race."""
    name = "two_shot.lamport16+ll128"
    edit = Edit(
        "algo/two_shot.cuh",
        "      block_barrier();  // the tile's sums are in the output",
        "      // the tile's sums are in the output",
    )
    root = folder / "kernels_cu"
    patch_sources("race", [edit], root)
    done = run(build(name, 3, folder, root), name, 3, folder)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
    assert done.returncode == 66
