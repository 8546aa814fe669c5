"""What the notebooks need beside frames and plots: which runs to look at, ranks to start, sliders."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import figures
from fcomm import records
from fcomm.errors import ArgumentError, SetupError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fcomm.records import Run

RUNS = "FLASH_COMM_RUNS"
"""Environment variable: folders of the runs that notebooks look at, separated as in PATH."""

MAPS = "FLASH_COMM_MAPS"
"""The same for maps of `experiments.links`."""


def runs(*folders: str | Path) -> list[Run]:
    """The runs to look at: those named here, else those of `RUNS`, else the ones that come with the repository."""
    named = folders or [f for f in os.environ.get(RUNS, "").split(os.pathsep) if f]
    found = [Path(f) for f in named] or records.runs(figures.SHIPPED)
    if not found:
        raise ArgumentError(f"{figures.SHIPPED} has no runs: name folders of your own, such as lab.runs('results/...')")
    return [records.load(f) for f in found]


def link_map(*folders: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Frame and provenance of a map of `experiments.links`: the one named here, else that of `MAPS`, else the one that comes with the
    repository; where there is none, a small one that is measured now, on the cpu backend.
    """
    from experiments import link_maps

    named = folders or [f for f in os.environ.get(MAPS, "").split(os.pathsep) if f]
    found = [Path(f) for f in named] or link_maps.shipped()
    if not found:
        out = workplace()
        said = mpirun(2, "-m", "experiments.links", "map", "--backend", "cpu", "--samples", "6", "--out", out)
        found = [path.parent for path in out.rglob("map.parquet")]
        if not found:
            raise SetupError(
                f"no map comes with the repository, and none could be measured: {said.strip().splitlines()[-1]}"
            )
    return link_maps.load(found[0])


def figure(of: Sequence[Run], name: str) -> Figure | None:
    """A figure by its name in `experiments.figures.FIGURES`; where the runs lack what it needs, None and the reason, printed."""
    drawn = figures.one(of, name)
    if drawn.figure is None:
        print(f"{name} ({drawn.shows}) cannot be drawn: {drawn.reason}")
    return drawn.figure


def workplace() -> Path:
    """A new folder to try something in; the system clears it away."""
    return Path(tempfile.mkdtemp(prefix="flash-comm-"))


def on_ranks(ranks: int, *arguments: str | Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that run ``python arguments...`` on that many ranks of this machine."""
    beside = Path(sys.executable).parent / "mpirun"
    launcher = str(beside) if beside.exists() else shutil.which(os.environ.get("MPIRUN", "mpirun").split()[0])
    if not launcher:
        raise SetupError("there is no mpirun: install an MPI (pip install mpich), or name the launcher in MPIRUN")
    # As root and with more ranks than cores Open MPI has to be told; other libraries ignore these.
    allow = {f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")}
    env = {**os.environ, **allow, "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    root = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    return [launcher, "-n", str(ranks), sys.executable, *map(str, arguments)], env


def mpirun(ranks: int, *arguments: str | Path, timeout_s: float = 300) -> str:
    """Runs ``python arguments...`` on that many ranks; what it printed, errors included where it failed.

    A kernel that serves a browser is no rank itself: ranks are processes of their own, started and ended here.
    """
    command, env = on_ranks(ranks, *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    except subprocess.TimeoutExpired:
        return f"ended after {timeout_s:g} s"
    return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}(exit code {done.returncode})"


def newest(results: Path) -> Run:
    """The newest run under a folder."""
    return records.load(figures.newest(results))


def load(script: Path) -> None:
    """Runs a script's definitions here, such as its `register`; not what it does as a program."""
    runpy.run_path(str(script), run_name="a part")


def broken_copy(folder: Path, encoding: str, right: str, wrong: str) -> Path:
    """A copy of an encoding's header and script in which a piece of text is another one; its folder.

    `ArgumentError` where the text is not there: a variant that is not broken would prove nothing by passing.
    """
    copy = folder / "broken"
    copy.mkdir(exist_ok=True)
    header = (folder / f"{encoding}.cuh").read_text()
    if right not in header:
        raise ArgumentError(f"{encoding}.cuh has no {right!r} to be broken")
    (copy / f"{encoding}.cuh").write_text(header.replace(right, wrong))
    (copy / f"{encoding}.py").write_text((folder / f"{encoding}.py").read_text())
    return copy


def verify(protocol: str, *arguments: str) -> bool:
    """``python -m fcomm verify`` in this process, which knows what was registered here; whether nothing was violated."""
    from fcomm.__main__ import main

    return main(["verify", "--protocol", protocol, *arguments]) == 0


def registers(*names: str, ranks: int, arch: str = "sm_90") -> pd.DataFrame | None:
    """Registers, code and slot accesses of protocols' kernels for a GPU that need not be here; None without the compiler."""
    import pandas as pd

    from fcomm import machine_code, protocols
    from fcomm.dtypes import BFLOAT16
    from fcomm.source import Specialisation

    try:
        found = [machine_code.summary(Specialisation(protocols()[n], BFLOAT16, ranks), arch) for n in names]
    except SetupError as error:
        print(f"no machine code here: {error}")
        return None
    columns = ["protocol", "registers", "spill_bytes", "code_bytes", "evidence_bytes", "system_loads", "system_stores"]
    return pd.DataFrame([vars(s) for s in found])[columns]


def explore(draw: Callable[..., Figure], **choices: Sequence[Any]) -> None:
    """A slider for each named argument of `draw`, over the given values; a sentence where there are no widgets.

    Sliders leave no picture in a saved notebook: follow this with a call of `draw` for one choice.
    """
    try:
        from ipywidgets import SelectionSlider, interact
    except ImportError:
        print("sliders need ipywidgets (pip install -e '.[notebooks]'); the figure below is one choice")
        return
    interact(draw, **{name: SelectionSlider(options=list(values)) for name, values in choices.items()})
