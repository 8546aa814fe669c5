"""Runs on disk: written so that a kill loses one visit of one case, read so that nothing edited or torn is believed.

A run is a folder::

    run.json              schema version and what was asked for
    launch-0/             one mpirun
      provenance.json     where, when and with what
      cases.parquet       what was planned, and how its results compared with the reference (before any timing)
      samples.arrows      times, appended as they are taken; replaced at the end by
      samples.parquet
      seal.json           written last: row counts and SHA-256 of the files above
    launch-1/ ...         a resumed remainder, or the same cases once more as a replicate
    latency.csv, *.png    derived from the above; nothing reads them back

Every file but the stream is written beside its place and renamed, so it is whole or absent. A run is complete when all
its launches are sealed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from fcomm.errors import RecordError
from fcomm.variants import SHIPPED

if TYPE_CHECKING:  # imported where used: seven of eight ranks never touch a record, and these take a second each
    import pandas as pd

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Column:
    """A column of a table: its Arrow type, its unit and its meaning, as ``docs/records.md`` gives them."""

    name: str
    type: str
    unit: str
    meaning: str
    optional: bool = False
    before: tuple[Any, ...] = ()
    """What older records say by not having the column; empty: they have it."""


SAMPLES = (
    Column("launch", "int16", "", "number of the mpirun within the run"),
    Column("case", "int32", "", "number of the case within the run"),
    Column("iteration", "int32", "", "number of the call within launch and case, warm-up not counted"),
    Column("rank", "int16", "", "rank that took the time"),
    Column("nanoseconds", "int64", "ns", "time of the call on that rank"),
)

CASES = (
    Column("launch", "int16", "", "number of the mpirun within the run"),
    Column("case", "int32", "", "number of the case, the same in all launches of the run"),
    Column("collective", "string", "", "all_reduce, all_gather or reduce_scatter"),
    Column(
        "protocol", "string", "", "name in the registry; `copy` for one rank, `floor` for what communicates nothing"
    ),
    Column("form", "string", "", "what ran: the protocol itself, or the one that a name for several stood for"),
    Column("algorithm", "string", "", "the protocol's algorithm"),
    Column("encoding", "string", "", "the encodings of its phases, joined by +; empty for baselines without one"),
    Column("baseline", "bool", "", "there to be compared with; never chosen by the selector"),
    Column("mode", "string", "", "which latency was taken: graph, isolated, host, prepared, sandwich, skew, ..."),
    Column(
        "dependent_launch",
        "string",
        "",
        "launch feature: none, or late (the next grid may be scheduled when all blocks of this one have returned)",
    ),
    Column(
        "input", "string", "", "where the input lay: array (the caller's own) or staging (pulled from there as it is)"
    ),
    Column(
        "variant",
        "string",
        "",
        "how the kernel was compiled: shipped, or an ablation or stage of `fcomm.variants`",
        before=("shipped",),
    ),
    Column("shape", "string", "", "launch shape that was asked for, blocks x threads; empty: the protocol's default"),
    Column(
        "delay_us", "float64", "µs", "mode skew: time by which one rank was held up before each call", optional=True
    ),
    Column("late_rank", "int16", "", "mode skew: the rank that was held up; empty: each in turn", optional=True),
    Column("ranks", "int16", "ranks", "world size of the communicator"),
    Column("dtype", "string", "", "element type"),
    Column("count", "int64", "elements", "elements of one rank's input"),
    Column("nbytes", "int64", "B", "bytes of one rank's input"),
    Column("blocks", "int32", "blocks", "grid that was launched"),
    Column("threads", "int32", "threads", "threads of a block"),
    Column("placement", "string", "", "how many ranks shared how many GPUs or cores"),
    Column("sms_per_rank", "int32", "SMs", "streaming multiprocessors that one rank may use", optional=True),
    Column("rounds", "int32", "hops", "dependent hops over the link, counted from the algorithm"),
    Column("wire_bytes", "int64", "B", "bytes that one rank sends or pulls, evidence included, counted"),
    Column("warmup", "int32", "calls", "untimed calls before each visit"),
    Column(
        "planned", "int32", "calls", "timed calls that every case was to have at least, planned before the first one"
    ),
    Column(
        "iterations",
        "int32",
        "calls",
        "timed calls on record: more than planned where the case was in doubt, fewer where the budget ended the rounds",
    ),
    Column("checked_calls", "int32", "calls", "calls with fresh data compared with the reference before timing"),
    Column(
        "wrong",
        "int64",
        "elements",
        "elements of those calls, or of a replay, over all ranks, whose bits were wrong (-1: "
        "not checked, a stage variant; of arrival_order: that were wrong beyond rounding)",
    ),
    Column(
        "inexact",
        "int64",
        "elements",
        "arrival_order: elements of a call, over all ranks, whose bits are not the contract's",
        optional=True,
    ),
    Column(
        "ranks_differ",
        "int64",
        "elements",
        "arrival_order: elements of a call in which not all ranks have the same bits",
        optional=True,
    ),
    Column(
        "calls_differ",
        "int64",
        "elements",
        "arrival_order: elements, over all ranks, that another call on the same data had "
        "with other bits; like the two before, the most of a few calls",
        optional=True,
    ),
    Column(
        "status",
        "string",
        "",
        "measured, wrong or failed (its times are void), dropped (no time), refused (not admitted)",
    ),
    Column("reason", "string", "", "why it was not measured; empty where it was"),
    Column(
        "dependent_edges",
        "int32",
        "edges",
        "programmatic edges in the captured graph; empty: not counted",
        optional=True,
    ),
    Column(
        "arrival_skew_us",
        "float64",
        "µs",
        "median wait of the first rank for the last one before a timed stretch",
        optional=True,
    ),
    Column(
        "neighbours_us",
        "float64",
        "µs",
        "mode sandwich: median time of the kernels before and after the collective, in the same graph without it",
        optional=True,
    ),
    Column(
        "return_us",
        "float64",
        "µs",
        "modes host and prepared on GPUs: median over calls of the slowest rank's time until the call returned",
        optional=True,
    ),
    Column(
        "l2_gbps",
        "float64",
        "GB/s",
        "rate at which the ranks of one shared GPU copied within its L2, all together",
        optional=True,
    ),
    Column("emulated", "bool", "", "times of the cpu backend: an emulation, not a GPU"),
    Column("time_sliced", "bool", "", "ranks took turns on one GPU: no plot and no fit may read the times"),
)

LATENCY = (
    Column("launches", "int16", "launches", "launches with samples of this case"),
    Column("iterations", "int32", "calls", "timed calls over all launches"),
    Column("latency_us", "float64", "µs", "median over calls of the slowest rank's time"),
    Column("low_us", "float64", "µs", "lower end of the median's 95 % interval; NaN with fewer than 6 calls"),
    Column("high_us", "float64", "µs", "upper end of it"),
    Column("p90_us", "float64", "µs", "90th percentile over calls of the slowest rank's time"),
    Column("p99_us", "float64", "µs", "99th percentile"),
    Column("min_us", "float64", "µs", "smallest over calls of the slowest rank's time"),
    Column("algbw_gbps", "float64", "GB/s", "nbytes (all-gather: ranks x nbytes) / latency_us"),
    Column("busbw_gbps", "float64", "GB/s", "algbw_gbps x the collective's bus factor, as in nccl-tests"),
    Column("floor_us", "float64", "µs", "median of the floor with the same grid and launch feature; NaN: not measured"),
    Column("floor_multiple", "float64", "", "latency_us / floor_us"),
)

_LAUNCH = re.compile(r"launch-(\d+)")


def _schema(columns: Sequence[Column]) -> Any:
    import pyarrow as pa

    kinds = {"string": pa.string(), "bool": pa.bool_(), "float64": pa.float64()}
    return pa.schema(
        [pa.field(c.name, kinds.get(c.type) or getattr(pa, c.type)(), nullable=c.optional) for c in columns]
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def _writing(path: Path, elsewhere: str = "name another folder with --out") -> Iterator[None]:
    """Turns the operating system's refusals into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(f"cannot write {path} ({reason}): free space there, or {elsewhere}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file in its place whole, or leaves what was there; raises `RecordError`."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path, "have it written elsewhere"):
        try:
            with scratch.open("wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Makes a folder for what is derived from records, if there is none; raises `RecordError`."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, default=str) + "\n").encode()


def _parquet(table: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=15)
    return sink.getvalue().to_pybytes()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checksum(columns: Sequence[NDArray[Any]]) -> bytes:
    value = 0
    for column in columns:
        value = zlib.crc32(column.tobytes(), value)
    return b"%08x" % value


class Recorder:
    """Writes one launch of a run. Rank 0 alone has one.

    `create` or `reopen`, then `begin`, `plan`, `append` as often as needed, `finish`. Whatever cannot be written is a
    `RecordError`; a recorder that is left early leaves what a reader may trust.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(str(path / ".lock"))
        with _writing(path):
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise RecordError(f"{path} is being written by another process: wait for it to end") from None
        self.launch = -1
        self._writer: Any = None
        self._buffer = io.BytesIO()
        self._file: io.FileIO | None = None
        self._next: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._rows: dict[int, dict[str, Any]] = {}

    @classmethod
    def create(
        cls,
        out: Path,
        host: str,
        backend: str,
        request: Mapping[str, Any],
        expected_bytes: int = 0,
        path: Path | None = None,
    ) -> Recorder:
        """Starts a new run in a folder of its own: `path`, which must not be there yet, or one under `out`.

        `request` is what a later `--resume` needs to know; `expected_bytes` must be free on the disk.
        """
        now = datetime.now(UTC)
        if path is not None:
            out = path.parent
        name = f"{now:%Y%m%dT%H%M%SZ}-{re.sub(r'[^A-Za-z0-9.]+', '_', host)}-{backend}"
        with _writing(out):
            out.mkdir(parents=True, exist_ok=True)
            if path is not None:
                path.mkdir()
            for attempt in range(1, 100) if path is None else ():
                path = out / (name if attempt == 1 else f"{name}-{attempt}")
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    continue
            assert path is not None
            free = shutil.disk_usage(path).free
            if free < expected_bytes:
                path.rmdir()
                raise RecordError(
                    f"the disk of {out} has {free >> 20} MiB free and this run may need {(expected_bytes >> 20) + 1} MiB: "
                    "free space there, or name another folder with --out"
                )
        content = {
            "schema_version": SCHEMA_VERSION,
            "created_utc": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "request": dict(request),
        }
        try:
            recorder = cls(path)
            write_whole(path / "run.json", _json(content))
        except RecordError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return recorder

    @classmethod
    def reopen(cls, path: Path) -> Recorder:
        """Continues an existing run; what is in it must be readable."""
        _read_run_file(path)
        recorder = cls(path)
        for folder in _launch_folders(path, all_of_them=True):
            if not (folder / "cases.parquet").exists():  # ended before it had a plan: there is nothing in it
                shutil.rmtree(folder, ignore_errors=True)
        return recorder

    def begin(self, provenance: Mapping[str, Any], resumes: bool = False) -> int:
        """Starts a launch and returns its number. `resumes`: it supplies what earlier launches still owe."""
        self.launch = len(_launch_folders(self.path))
        folder = self._folder
        with _writing(folder):
            folder.mkdir()
        write_whole(folder / "provenance.json", _json({**provenance, "launch": self.launch, "resumes": resumes}))
        return self.launch

    def plan(self, cases: Sequence[Mapping[str, Any]]) -> None:
        """Fixes the launch's cases: one mapping of `CASES` columns (without launch and iterations) each."""
        import pyarrow as pa

        optional = {c.name: c.before[0] if c.before else None for c in CASES if c.optional or c.before}
        rows = [{**optional, **row, "launch": self.launch, "iterations": 0} for row in cases]
        self._ranks = {row["case"]: row["ranks"] for row in rows}
        self._rows = {row["case"]: row for row in rows}
        self._write_cases()
        path = self._folder / "samples.arrows"
        with _writing(path):
            self._file = io.FileIO(path, "x")
        self._writer = pa.ipc.new_stream(self._buffer, _schema(SAMPLES))
        self._put()

    def _write_cases(self) -> None:
        import pyarrow as pa

        rows = list(self._rows.values())
        write_whole(self._folder / "cases.parquet", _parquet(pa.Table.from_pylist(rows, schema=_schema(CASES))))

    def amend(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """Puts in what only showed while cases were timed, by case: that one failed, or a fact about its graph."""
        changed = {case: f for case, f in facts.items() if f}
        for case, values in changed.items():
            self._rows[case].update(values)
        if changed:
            self._write_cases()

    def append(self, case: int, nanoseconds: NDArray[np.int64]) -> None:
        """Adds one visit of a case. nanoseconds : shape (iterations, ranks)."""
        import pyarrow as pa

        iterations, ranks = nanoseconds.shape
        assert ranks == self._ranks[case], (case, ranks)
        if self._file is None:
            raise RecordError(f"{self._folder} takes no more samples: writing them failed before")
        first = self._next.get(case, 0)
        self._next[case] = first + iterations
        rows = iterations * ranks
        columns = [
            np.full(rows, self.launch, np.int16),
            np.full(rows, case, np.int32),
            np.repeat(np.arange(first, first + iterations, dtype=np.int32), ranks),
            np.tile(np.arange(ranks, dtype=np.int16), iterations),
            np.ascontiguousarray(nanoseconds, np.int64).reshape(-1),
        ]
        batch = pa.record_batch([pa.array(c) for c in columns], schema=_schema(SAMPLES))
        # One batch is one visit: a kill tears the last batch at most, and a reader tells by its length.
        self._writer.write_batch(batch, custom_metadata={b"crc32": _checksum(columns)})
        self._put()

    def finish(self) -> None:
        """Compacts and seals all launches; the run is complete afterwards."""
        self._end_stream()
        # In ascending order: a remainder that was sealed before what it completes would be forgotten.
        for folder in _launch_folders(self.path):
            if not (folder / "seal.json").exists():
                _seal(folder)
            with _writing(folder):
                (folder / "samples.arrows").unlink(missing_ok=True)

    def save(self, name: str, content: bytes) -> Path:
        """Puts a derived file into the run's folder."""
        write_whole(self.path / name, content)
        return self.path / name

    def discard(self) -> None:
        """Removes this launch, and the run if there is nothing else in it."""
        self.close()
        if self.launch >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        if not _launch_folders(self.path, all_of_them=True):
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets go of the run as it is. Idempotent."""
        self._end_stream()
        self._lock.release()

    def _end_stream(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        file.close()  # without an end marker: the end of the file serves, and is there after a kill too

    def _put(self) -> None:
        """Moves what the stream's writer has produced to the file, all of it or nothing."""
        assert self._file is not None
        content = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        with _writing(self._folder / "samples.arrows"):
            start = self._file.tell()
            rest = memoryview(content)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                # Nothing may follow a torn batch: cut it off, and take no more.
                with suppress(OSError):
                    self._file.truncate(start)
                self._file.close()
                self._file = None
                raise

    @property
    def _folder(self) -> Path:
        return self.path / f"launch-{self.launch}"


def _seal(folder: Path) -> None:
    import pyarrow as pa

    launch = _read_launch(folder)
    samples = pa.Table.from_pandas(launch.samples, schema=_schema(SAMPLES), preserve_index=False)
    write_whole(folder / "samples.parquet", _parquet(samples))
    cases = launch.cases
    cases["iterations"] = cases["case"].map(launch.recorded()).fillna(0).astype("int32")
    write_whole(
        folder / "cases.parquet",
        _parquet(pa.Table.from_pandas(cases, schema=_schema(CASES), preserve_index=False)),
    )
    files = {
        "../run.json": None,
        "provenance.json": None,
        "cases.parquet": len(cases),
        "samples.parquet": len(launch.samples),
    }
    seal = {
        "schema_version": SCHEMA_VERSION,
        "files": {name: {"sha256": _sha256(folder / name), "rows": rows} for name, rows in files.items()},
    }
    write_whole(folder / "seal.json", _json(seal))


# ---- slim copies -----------------------------------------------------------------------------------------------------

SLIM_CALLS = (None, 20, 10, 5, 2, 1)
"""Timed calls of each case that a slim copy keeps: the first of these that fits; None: all."""


# Of few calls an interval is not known, and a floor only where one was measured: NaN here, nothing in the file.
_SUMMARY = (Column("case", "int32", "", ""), *(replace(c, optional=c.type == "float64") for c in LATENCY))


def export(source: Path, destination: Path, limit_bytes: int, launch_feature: str | None = None) -> int | None:
    """Writes a complete run to a folder of its own, in `limit_bytes` at most; returns the calls kept of each case.

    What does not fit is left out of the samples, evenly; the statistics of all of them then go along. None: all are there.
    launch_feature : keep the cases with this dependent launch only; `run.json` says so.
    """
    run = load(source)
    if not run.complete:
        raise RecordError(f"{source} is not complete: finish it with --resume {source}")
    if run.summary is not None:
        raise RecordError(f"{source} is a slim copy already")
    there = list(run.cases["dependent_launch"].unique())
    if launch_feature is not None and launch_feature not in there:
        raise RecordError(f"{source} has no case with dependent launch {launch_feature}; it has {', '.join(there)}")
    with _writing(destination, "name another folder"):
        destination.mkdir(parents=True, exist_ok=True)
        if any(destination.iterdir()):
            raise RecordError(f"{destination} is not empty: name a new folder")
    for calls in SLIM_CALLS:
        with _writing(destination, "name another folder"):
            scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        try:
            _write_slim(run, scratch, calls, launch_feature)
            size = sum(p.stat().st_size for p in scratch.rglob("*") if p.is_file())
            if size <= limit_bytes:
                with _writing(destination, "name another folder"):
                    scratch.chmod(0o755)
                    scratch.replace(destination)
                return calls
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    destination.rmdir()
    raise RecordError(f"{source} does not fit into {limit_bytes} bytes, even with one call of each case")


def _write_slim(run: Run, folder: Path, calls: int | None, launch_feature: str | None) -> None:
    import pyarrow as pa

    content = _read_json(run.path / "run.json")
    if calls is not None:
        names = [c.name for c in _SUMMARY]
        latency = run.latency
        if launch_feature is not None:
            latency = latency[latency["dependent_launch"] == launch_feature]
        summary = pa.Table.from_pandas(latency[names], schema=_schema(_SUMMARY), preserve_index=False)
        write_whole(folder / "latency.parquet", _parquet(summary))
        content["slim"] = {"calls": calls, "latency_sha256": _sha256(folder / "latency.parquet")}
    if launch_feature is not None:
        content["only"] = {"dependent_launch": launch_feature}
    write_whole(folder / "run.json", _json(content))
    for original in _launch_folders(run.path):
        launch, target = _read_launch(original), folder / original.name
        target.mkdir()
        cases, samples = launch.cases, launch.samples
        if launch_feature is not None:
            cases = cases[cases["dependent_launch"] == launch_feature]
            samples = samples[samples["case"].isin(cases["case"])]
        if calls is not None:
            every = samples[["case", "iteration"]].drop_duplicates()
            number = every.groupby("case").cumcount()
            total = every.groupby("case")["iteration"].transform("size")
            # Evenly: a call is kept where calls * number / total passes a whole number.
            kept = every[(number + 1) * calls // total.clip(lower=calls) > number * calls // total.clip(lower=calls)]
            samples = samples.merge(kept, on=["case", "iteration"], how="inner")
        write_whole(target / "provenance.json", (original / "provenance.json").read_bytes())
        for name, frame, schema in (("cases", cases, CASES), ("samples", samples, SAMPLES)):
            table = pa.Table.from_pandas(frame, schema=_schema(schema), preserve_index=False)
            write_whole(target / f"{name}.parquet", _parquet(table))
        _seal(target)


def _read_summary(path: Path, content: Mapping[str, Any]) -> pd.DataFrame | None:
    if "slim" not in content:
        return None
    file = path / "latency.parquet"
    if not file.is_file():
        raise RecordError(f"{file} is missing from a slim copy")
    if _sha256(file) != content["slim"].get("latency_sha256"):
        raise RecordError(f"{file.resolve()} was changed: its SHA-256 is not the recorded one")
    return _read_parquet(file, _SUMMARY)


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass
class _Launch:
    number: int
    sealed: bool
    provenance: dict[str, Any]
    cases: pd.DataFrame
    samples: pd.DataFrame

    def recorded(self) -> dict[int, int]:
        """Timed calls on record, by case."""
        counts = self.samples.groupby("case")["iteration"].nunique()
        return dict(zip(counts.index.tolist(), counts.tolist(), strict=True))


@dataclass
class Run:
    """A run in memory.

    samples : one row for each launch, case, iteration and rank (`SAMPLES`). cases : one row a case, over all launches
    (`CASES` without launch). request : what was asked for. launches : the provenance of each launch.
    """

    path: Path
    request: dict[str, Any]
    launches: list[dict[str, Any]]
    samples: pd.DataFrame
    cases: pd.DataFrame
    complete: bool
    owed: dict[int, int] = field(default_factory=dict)
    """Timed calls that an interrupted run still owes, by case."""
    summary: pd.DataFrame | None = None
    """Of a slim copy: the statistics of all samples, of which it holds a part."""

    @property
    def provenance(self) -> dict[str, Any]:
        """Where and with what the first launch was taken."""
        return self.launches[0] if self.launches else {}

    @cached_property
    def latency(self) -> pd.DataFrame:
        """One row for each case with samples: its columns and the statistics (`LATENCY`)."""
        from fcomm.measure import summarise

        if self.summary is not None:
            return self.cases.drop(columns="iterations").merge(self.summary, on="case", how="inner")
        return summarise(self.samples, self.cases)

    @property
    def taken_on(self) -> str:
        """One clause about the machine, for captions."""
        told = self._taken_on() + (", slots in host memory" if self.request.get("placement") == "host" else "")
        link = self.request.get("link")
        return f"{told}, EMULATED LINK ({link})" if link else told

    def _taken_on(self) -> str:
        p = self.provenance
        ranks = int(self.cases["ranks"].max()) if len(self.cases) else p.get("world_size", 0)
        several = "up to " if self.cases["ranks"].nunique() > 1 else ""
        shared = f"{several}{ranks} MPI {'rank' if ranks == 1 else 'ranks'}"
        if p.get("backend") == "cpu":
            cores = p.get("cores", "?")
            return (
                f"cpu backend (emulation): {shared} on {cores} {'core' if cores == 1 else 'cores'} of "
                f"{p.get('hostname', '?')}; times of an emulation, not of GPUs"
            )
        devices = p.get("devices", [])
        model = devices[0].get("device", "GPU") if devices else "GPU"
        gpus = len({str(d.get("uuid", d)) for d in devices})
        if gpus > 1 or ranks < 2:
            return f"{shared} on {gpus} {model} of {p.get('hostname', '?')}"
        through = "through MPS" if devices and devices[0].get("mps") else "without MPS"
        return f"{shared} sharing one {model} {through}"

    @property
    def one_way_us(self) -> float | None:
        """Microseconds of the medium between two ranks, without the emulated link, if any; None where it was not measured. The
        floor with its hops is ``floor_us + rounds * one_way_us``.
        """
        found = self.provenance.get("one_way_us")
        return None if found is None else float(found)

    def for_figures(self) -> pd.DataFrame:
        """`latency` of the shipped kernels, where it may be shown and fitted; `RecordError` for a run without such times, one that
        was time-sliced, and one whose times are of whole decode steps.
        """
        if "steps" in self.request:
            raise RecordError(
                f"{self.path} has times of whole decode steps, and no latencies of a collective: its decode.md has the table, and "
                "experiments.decode.report makes it"
            )
        self.refuse_time_sliced()
        if self.latency.empty:
            raise RecordError(f"{self.path} holds no times yet: resume it with --resume {self.path}")
        shipped = self.latency[self.latency["variant"] == SHIPPED]
        if shipped.empty:
            raise RecordError(f"{self.path} has times of variants alone, and none of the kernels that the library uses")
        return shipped

    def refuse_time_sliced(self) -> None:
        """Raises `RecordError` for a run whose times nothing may read."""
        if self.cases["time_sliced"].any():
            raise RecordError(
                f"{self.path} was taken with ranks taking turns on one GPU (time-sliced): its times say nothing about "
                "protocols, and no plot or fit reads them"
            )


def load(path: str | Path) -> Run:
    """Reads a run, complete or interrupted; `RecordError` where it was edited, truncated or is of another schema."""
    import pandas as pd

    path = Path(path)
    content = _read_run_file(path)
    launches = [_read_launch(folder) for folder in _launch_folders(path)]
    if launches:
        samples = pd.concat([launch.samples for launch in launches], ignore_index=True)
        every = pd.concat([launch.cases for launch in launches], ignore_index=True)
    else:
        samples, every = _empty(SAMPLES), _empty(CASES)
    return Run(
        path=path,
        request=content["request"],
        launches=[launch.provenance for launch in launches],
        samples=samples,
        cases=_merge(every, samples),
        summary=_read_summary(path, content),
        complete=bool(launches) and all(launch.sealed for launch in launches),
        owed=_owed(launches),
    )


def runs(out: str | Path) -> list[Path]:
    """Folders of the runs under `out`, oldest first."""
    return sorted(p.parent for p in Path(out).glob("*/run.json"))


def _empty(columns: Sequence[Column]) -> pd.DataFrame:
    return _schema(columns).empty_table().to_pandas()


def _merge(every: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row a case over all launches: facts of the first that had time for it, counts of all, and the worst that happened."""
    ordered = every.assign(late=every["status"] == "dropped").sort_values(["case", "late", "launch"], kind="stable")
    ordered = ordered.drop(columns="late")
    merged = ordered.drop_duplicates("case").drop(columns="launch").set_index("case")
    sums = ordered.groupby("case")[["checked_calls", "wrong"]].sum()
    merged[["checked_calls", "wrong"]] = sums.clip(lower=-1)  # what no launch has checked is not checked
    merged["planned"] = ordered.groupby("case")["planned"].max()
    late = [c.name for c in CASES if c.optional]
    merged[late] = ordered.groupby("case")[late].first()  # known in one launch, empty in another that was killed
    counts = samples.drop_duplicates(["launch", "case", "iteration"]).groupby("case").size()
    merged["iterations"] = counts.reindex(merged.index, fill_value=0).astype("int32")
    bad = ordered[ordered["status"].isin(["wrong", "failed"])].drop_duplicates("case").set_index("case")
    merged.loc[bad.index, ["status", "reason"]] = bad[["status", "reason"]]
    return merged.reset_index()


def _owed(launches: Sequence[_Launch]) -> dict[int, int]:
    owed: dict[int, int] = {}
    given_up = {int(c) for one in launches for c in one.cases.loc[one.cases["status"] != "measured", "case"]}
    for launch in launches:
        if launch.sealed:
            continue
        if not launch.provenance["resumes"]:
            runnable = launch.cases[~launch.cases["case"].isin(given_up)]
            for case, planned in zip(runnable["case"], runnable["planned"], strict=True):
                owed[int(case)] = owed.get(int(case), 0) + int(planned)
        for case, count in launch.recorded().items():
            owed[case] = owed.get(case, 0) - count
    return {case: count for case, count in owed.items() if count > 0 and case not in given_up}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise RecordError(f"cannot read {path} ({error.strerror})") from None
    except ValueError:
        raise RecordError(f"{path} is damaged: it is not JSON") from None


def _read_run_file(path: Path) -> dict[str, Any]:
    if not (path / "run.json").is_file():
        inside = runs(path)
        why = (
            f"it holds runs: name one, such as {inside[-1]}"
            if inside
            else "it has no run.json"
            if path.is_dir()
            else "there is no such folder"
        )
        raise RecordError(f"{path} is not a run: {why}")
    content = _read_json(path / "run.json")
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(f"{path} has records of schema {version}; this version reads schema {SCHEMA_VERSION}")
    return content


def _launch_folders(path: Path, all_of_them: bool = False) -> list[Path]:
    """Folders of the launches in order; those without a plan hold nothing and are passed over."""
    numbered = sorted((int(m[1]), p) for p in path.iterdir() if (m := _LAUNCH.fullmatch(p.name)))
    planned = [
        (k, p) for k, p in numbered if all_of_them or (p / "cases.parquet").exists() or (p / "seal.json").exists()
    ]
    if not all_of_them and [k for k, _ in planned] != list(range(len(planned))):
        raise RecordError(
            f"{path} is damaged: it has launches {', '.join(str(k) for k, _ in planned)} and lacks others"
        )
    return [p for _, p in planned]


def _read_launch(folder: Path) -> _Launch:
    sealed = (folder / "seal.json").exists()
    seal = _check_seal(folder) if sealed else {}
    cases = _read_parquet(folder / "cases.parquet", CASES)
    if sealed or not (folder / "samples.arrows").exists():
        whole = (folder / "samples.parquet").exists() or sealed
        samples = _read_parquet(folder / "samples.parquet", SAMPLES) if whole else _empty(SAMPLES)
    else:
        samples = _read_stream(folder / "samples.arrows")
    number = int(folder.name.removeprefix("launch-"))
    provenance = _read_json(folder / "provenance.json")
    launch = _Launch(number, sealed, provenance, cases, samples)
    _check_rows(folder, launch, seal)
    return launch


def _check_seal(folder: Path) -> dict[str, Any]:
    seal = _read_json(folder / "seal.json")
    try:
        for name, facts in seal["files"].items():
            if not (folder / name).is_file():
                raise RecordError(f"{folder / name} is missing from a complete run")
            if _sha256(folder / name) != facts["sha256"]:
                raise RecordError(
                    f"{(folder / name).resolve()} was changed after the run: its SHA-256 is not the sealed one"
                )
    except (KeyError, TypeError, AttributeError):
        raise RecordError(f"{folder / 'seal.json'} is damaged") from None
    return seal


def _check_rows(folder: Path, launch: _Launch, seal: Mapping[str, Any]) -> None:
    """Every timed call has one positive time from each rank of a planned case; counts are those that were sealed."""
    samples, cases = launch.samples, launch.cases

    def damaged(what: str) -> RecordError:
        return RecordError(f"{folder} is damaged: {what}")

    for name, frame in (("cases.parquet", cases), ("samples.parquet", samples)):
        if seal and seal["files"].get(name, {}).get("rows") != len(frame):
            raise damaged(f"{name} has {len(frame)} rows, not as many as were sealed")
    if not {launch.number} >= set(samples["launch"]) | set(cases["launch"]):
        raise damaged("it holds rows of another launch")
    if not cases["case"].is_unique:
        raise damaged("a case is planned twice")
    if samples.empty:
        return
    if (samples["nanoseconds"] <= 0).any():
        raise damaged("a time is not positive")
    if not samples["case"].isin(cases["case"]).all():
        raise damaged("it holds times of a case that was not planned")
    calls = samples.groupby(["case", "iteration"])["rank"].agg(["size", "nunique", "min", "max"])
    want = cases.set_index("case")["ranks"].loc[calls.index.get_level_values("case")].to_numpy()
    ok = (calls["size"] == want) & (calls["nunique"] == want) & (calls["min"] == 0) & (calls["max"] == want - 1)
    if not ok.all():
        case, iteration = ok[~ok].index[0]
        raise damaged(f"iteration {iteration} of case {case} does not have one time from each rank")
    if seal and launch.recorded() != {c: k for c, k in zip(cases["case"], cases["iterations"], strict=True) if k}:
        raise damaged("cases.parquet and samples.parquet disagree on the number of iterations")


def _read_parquet(path: Path, columns: Sequence[Column]) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(path.read_bytes()))
        for c in columns:  # a column that is newer than the file
            if (c.optional or c.before) and c.name not in table.column_names:
                kind, without = _schema([c]).field(0).type, c.before or (None,)
                table = table.append_column(c.name, pa.array(without * len(table), kind))
        return table.select([c.name for c in columns]).cast(_schema(columns)).to_pandas()
    except OSError as error:
        raise RecordError(f"cannot read {path} ({error.strerror or 'it is damaged'})") from None
    except (pa.ArrowException, KeyError, ValueError):
        raise RecordError(f"{path} is damaged: it is not a table of this schema") from None


def _read_stream(path: Path) -> pd.DataFrame:
    """The whole batches of a stream. A batch torn by a kill ends it; one whose checksum is wrong is refused."""
    import pyarrow as pa

    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path} ({error.strerror})") from None
    batches: list[Any] = []
    schema = _schema(SAMPLES)
    try:
        reader = pa.ipc.open_stream(pa.BufferReader(content))
        while True:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            crc = (metadata or {}).get(b"crc32")
            if not batch.schema.equals(schema) or crc != _checksum([c.to_numpy() for c in batch.columns]):
                raise RecordError(f"{path} was changed: the checksum of its batch {len(batches)} is wrong")
            batches.append(batch)
    except (StopIteration, pa.ArrowException, OSError):
        pass  # the end, or where a kill tore it: what comes after was never whole
    return pa.Table.from_batches(batches, schema=schema).to_pandas()
