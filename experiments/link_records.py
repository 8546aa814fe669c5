"""What `experiments.links` and its parts share: folders of records, and the time of one protocol on one medium."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.sweep import HANG_S
from fcomm import Communicator, checks, measure
from fcomm.errors import RecordError, SetupError
from fcomm.links import Link
from fcomm.measure import Case
from fcomm.protocols import protocols
from fcomm.records import write_whole

if TYPE_CHECKING:
    import pandas as pd
    from mpi4py import MPI


class Folder:
    """Where one command keeps what it finds. Rank 0 alone has one; every file is whole or not there."""

    def __init__(self, out: Path, what: str, facts: dict[str, Any]) -> None:
        host = re.sub(r"[^A-Za-z0-9.]+", "_", str(facts["hostname"]))
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{host}-{facts['backend']}-links-{what}"
        try:
            out.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, 100):
                self.path = out / (name if attempt == 1 else f"{name}-{attempt}")
                try:
                    self.path.mkdir()
                    break
                except FileExistsError:
                    continue
        except OSError as error:
            raise RecordError(f"cannot write {out} ({error.strerror}): name another folder with --out") from None
        self.write("provenance.json", json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n")

    def write(self, name: str, content: str | bytes) -> None:
        write_whole(self.path / name, content.encode() if isinstance(content, str) else content)

    def table(self, name: str, frame: pd.DataFrame) -> None:
        """A frame as Parquet."""
        sink = io.BytesIO()
        frame.to_parquet(sink, index=False)
        self.write(f"{name}.parquet", sink.getvalue())


def taken_on(facts: dict[str, Any]) -> str:
    """One clause about the machine, for captions. facts : a provenance."""
    ranks = facts["world_size"]
    if facts["backend"] == "cpu":
        return f"cpu backend (EMULATION): up to {ranks} MPI ranks on {facts['cores']} cores of {facts['hostname']}; times of an emulation"
    devices = facts["devices"]
    gpus = len({d.get("uuid") for d in devices})
    shared = f"sharing one {devices[0]['device']}" if gpus == 1 else f"on {gpus} {devices[0]['device']}"
    sliced = ", TIME-SLICED: no time here says anything" if any(d.get("time_sliced") for d in devices) else ""
    return f"up to {ranks} MPI ranks {shared}{sliced}"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median, and the ends of its distribution-free 95 % interval; those are the extremes for 6 to 8 values."""
    low, high = measure.median_interval(values)
    return float(np.median(values)), low, high


def say(mpi: MPI.Intracomm, line: str) -> None:
    """A line of progress, from rank 0."""
    if mpi.rank == 0:
        print(line, file=sys.stderr, flush=True)


_groups: dict[int, MPI.Intracomm] = {}


def open_first(
    world: MPI.Intracomm, n: int, backend: str, max_bytes: int, placement: str = "device", link: Link | None = None
) -> Communicator:
    """A communicator of the first n ranks, which call it together, for measurements."""
    if n not in _groups:
        _groups[n] = world.Create_group(world.Get_group().Range_incl([(0, n - 1, 1)]), tag=n)
    options: dict[str, Any] = {} if backend == "cpu" else {"timeout_s": HANG_S}
    comm = Communicator(
        _groups[n], backend=backend, max_bytes=max_bytes, model="seed", placement=placement, link=link, **options
    )
    refuse_turns(comm)
    return comm


def refuse_turns(comm: Communicator) -> None:
    """`SetupError` where ranks take turns on a GPU."""
    if getattr(comm.backend, "time_sliced", False):
        raise SetupError("the ranks take turns on a GPU (no MPS), so their times say nothing about links: use MPS")


def close(comm: Communicator) -> None:
    """Gives back what measuring has allocated, and closes. Collective."""
    if comm.backend.name == "cuda":
        from fcomm import measure_cuda

        measure_cuda.close(comm)
    comm.close()


# ---- one protocol on one medium ----------------------------------------------------------------------------------------

MODES = {"cuda": "graph", "cpu": "prepared"}
"""How a call is timed: one of many in a replayed CUDA graph, resp. a prepared call from a barrier of the ranks on."""


class Candidate:
    """A protocol made ready for one size on one communicator, its results compared with the exact ones. Collective to make.

    calls : in the longer of two graphs, whose slope is the time of one call; on GPUs.
    """

    def __init__(self, comm: Communicator, name: str, nbytes: int, dtype: str, calls: int) -> None:
        self.comm = comm
        collective = protocols()[name].collective
        self.case = Case(collective, name, dtype, nbytes, comm.world_size, MODES[comm.backend.name])
        x, out = measure.arrays(comm, self.case)
        self.blocks, self.threads = measure.grid(comm, self.case, x, out)
        self._calls: Any
        if comm.backend.name == "cuda":
            from fcomm.measure_cuda import GraphCalls

            self._calls = GraphCalls(comm, self.case, x, out, calls)  # which verifies what it replays
        else:
            self._mode = measure.modes("cpu")[self.case.mode]
            self._calls = self._mode.bind(comm, self.case, x, out)
            self._verify(x, out)

    def _verify(self, x: Any, out: Any) -> None:
        form = self.case.form(self.comm.gpu)
        data = measure.Dataset(self.comm, (7,), self.case, (form,))
        x[...] = data.own.reshape(x.shape)

        def wrong() -> int:
            self._calls()
            self.comm.check()
            return checks.wrong_elements(self.comm.to_host(out).reshape(-1), data.want(form))

        total = int(sum(self.comm.mpi.allgather(measure.together(self.comm.mpi, wrong))))
        if total:
            raise measure.WrongElementsError(f"{self.case.protocol}: {total} wrong elements", total)

    def sample(self, count: int) -> NDArray[np.float64]:
        """Microseconds of one call on the slowest rank; shape (count,), alike on all ranks. Collective."""
        mine = (
            self._calls.sample(count)
            if self.comm.backend.name == "cuda"
            else self._mode.sample(self.comm, self._calls, count)
        )
        every = np.empty((self.comm.world_size, count), np.int64)
        self.comm.mpi.Allgather(np.ascontiguousarray(mine, np.int64), every)
        return every.max(axis=0) / 1e3

    @property
    def columns(self) -> dict[str, Any]:
        """What was launched."""
        form = self.case.form(self.comm.gpu)
        assert form is not None
        return {
            "ranks": self.case.ranks,
            "nbytes": self.case.nbytes,
            "protocol": self.case.protocol,
            "algorithm": form.algorithm.name,
            "encoding": "+".join(dict.fromkeys(e.name for e in form.encodings)),
            "blocks": self.blocks,
            "threads": self.threads,
            "wire_bytes": form.wire_bytes(self.case.nbytes, self.case.ranks),
            "rounds": form.algorithm.rounds,
        }
