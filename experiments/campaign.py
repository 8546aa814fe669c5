"""Everything that a machine with several GPUs is asked, in one command: ``python -m experiments.campaign``.

Starts its ranks itself, one for each GPU: a report of capabilities and links; whether every admitted protocol is right among 2 to
N ranks; latencies of ours, of the baselines and of other libraries; the fit; decode steps; figures, claims and targets. The parts
share a budget, each ends at its own limit, and all that they leave is kept in one folder: ``--resume FOLDER`` goes on with what
is missing. Where there is one GPU ranks share it, and without a GPU the same parts run on the cpu backend with small sizes: rehearsals.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from experiments import lab, mps, peers, real_links
from experiments.decode import report as decode_report
from experiments.latency import targets_markdown
from experiments.request import COLLECTIVES, FINISH_S, parse_time
from experiments.tables import aligned, latency_csv, rows
from fcomm import bootstrap, records
from fcomm.cli import Parser, folder, launcher_size, listed
from fcomm.cost_model import Model
from fcomm.errors import ArgumentError, FcommError, RecordError, SetupError
from fcomm.measure import PEERS
from fcomm.protocols import CELL_BYTES

if TYPE_CHECKING:
    import pandas as pd

    from fcomm.records import Run

SCHEMA = 1
BUDGET = "8m"
DONE, FAILED, NOT_RUN, RUNNING = "done", "failed", "not run", "running"
STATE, SUMMARY, TARGETS = "state.json", "summary.md", "targets.csv"

# ---- where a campaign runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """What all parts have in common."""

    folder: Path
    ranks: int
    gpus: int
    """0: the cpu backend."""

    @property
    def backend(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def shared(self) -> bool:
        """Whether ranks share a GPU."""
        return 0 < self.gpus < self.ranks


@dataclass(frozen=True)
class Command:
    """What a part runs: ``python ARGUMENTS``, on ranks or (0) by itself."""

    ranks: int
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    under_mps: bool = False
    """By itself it needs a private MPS daemon around it; a sweep and a decode run start their own."""

    def words(self) -> tuple[list[str], dict[str, str]]:
        """The words to run, where the campaign has seen to MPS, and their environment."""
        launched, env = lab.on_ranks(max(self.ranks, 1), *self.arguments)
        alone = launched[launched.index("-n") + 2 :]
        return launched if self.ranks else alone, {**env, **peers.NO_MULTICAST, **self.env}

    def __str__(self) -> str:
        """The same for a reader's shell."""
        wrapped = ["python", "-m", "experiments.mps", "--"] if self.under_mps else []
        launcher = ["mpirun", "-n", str(self.ranks)] if self.ranks else []
        given = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*given, shlex.join([*wrapped, *launcher, "python", *self.arguments])])


# ---- running a part under a limit ------------------------------------------------------------------------------------

GRACE_S = 10.0
"""From the word to end until what is left is killed: a private MPS daemon needs some seconds to stop."""
TOLD_EVERY_S = 10.0


@dataclass(frozen=True)
class Ended:
    """How a command ended. code : None where it was ended at its limit."""

    code: int | None
    seconds: float


Tell = Callable[[float], None]
Runner = Callable[[Command, Path, float, Tell], Ended]
"""Runs a command, its output into a file, for so many seconds at most; tells every now and then how long it has run."""


def run_limited(command: Command, log: Path, limit_s: float, tell: Tell) -> Ended:
    """Runs a command in a session of its own; nothing that it started outlives this call, however the call ends."""
    words, env = command.words()
    start = time.monotonic()
    with log.open("ab") as out:
        out.write(f"$ {command}\n".encode())
        out.flush()
        try:
            process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise SetupError(f"cannot run {words[0]}: {error.strerror}") from None
        try:
            while True:
                passed = time.monotonic() - start
                if passed >= limit_s:
                    return Ended(None, passed)
                try:
                    code = process.wait(min(TOLD_EVERY_S, limit_s - passed))
                except subprocess.TimeoutExpired:
                    tell(time.monotonic() - start)
                else:
                    return Ended(code, time.monotonic() - start)
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it has started: asks first, so that launchers end their ranks and daemons are stopped, then kills.

    The watcher of a private MPS daemon is left alone: it stops the daemon when the ranks are gone, and ends.
    """
    if process.poll() is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived their launcher
        return
    family = _family(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    if _gone(process, family, GRACE_S):
        return
    for pid, since in family.items():
        if _started(pid) == since:  # and not another process that has the number by now
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    _gone(process, family, GRACE_S)  # what holds a GPU needs a moment even so


def _gone(process: subprocess.Popen[bytes], family: Mapping[int, str | None], patience_s: float) -> bool:
    """Waits for the processes to end; whether they have."""
    over = time.monotonic() + patience_s
    while True:
        process.poll()  # so that it does not stay as a zombie
        if not any(_started(pid) == since for pid, since in family.items() if since is not None):
            return True
        if time.monotonic() > over:
            return False
        time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _started(pid: int) -> str | None:
    """When a process was started, in the kernel's count; None where there is none any more."""
    stat = _stat(pid)
    return stat[19] if stat and stat[0] not in "ZX" else None


def _family(pid: int) -> dict[int, str | None]:
    """A process and all that it and its children have started, each with its start: launchers put ranks into groups of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) and not _watches(entry):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return {one: _started(one) for one in found}


def _watches(entry: Path) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--watch" in words and b"experiments.mps" in words


# ---- the parts -------------------------------------------------------------------------------------------------------

Verdict = tuple[str, str]
"""A status and its one sentence."""


@dataclass(frozen=True)
class Part:
    """One part of a campaign."""

    name: str
    what: str
    share_s: float
    """Seconds that it has of a budget of eight minutes; of another one as much as that is of eight minutes."""
    least_s: float
    """With less it cannot even start; on the cpu backend half of that."""
    command: Callable[[Place, float], Command]
    """From the place and the limit in seconds. `ArgumentError` where what it needs is not there."""
    judge: Callable[[Place], Verdict] | None = None
    """Reads the records that it leaves; None: it leaves none, and has said all in its log."""
    derived: bool = False
    """Made from what the others have measured: made again when that has changed. Needs no GPU."""

    def needs_s(self, place: Place) -> float:
        return self.least_s * (1.0 if place.gpus else 0.5)


def _text(seconds: float) -> str:
    return f"{max(seconds, 1.0):.0f}s"


def sweep_budget_s(limit_s: float, backend: str) -> float:
    """The budget of a sweep that must be over within a limit.

    A sweep keeps seconds for its report that are meant for thousands of cases; a short one needs less.
    """
    kept = FINISH_S[backend]
    return 0.9 * limit_s + kept - min(kept, 0.3 * limit_s)


CHECKING = 1.7
"""A sweep gives 45 % of its budget to checking; the part that is there to check has a budget so much longer than its limit."""


def _sweep(place: Place, name: str, budget_s: float, *options: str) -> Command:
    """A sweep into the part's folder; where there is one already, what is missing of it."""
    into = place.folder / name
    if (into / "run.json").is_file():
        return Command(place.ranks, ("-m", "experiments.sweep", "--resume", str(into)))
    if into.is_dir():  # ended before it had a record
        with suppress(OSError):
            into.rmdir()
    arguments = ("--backend", place.backend, "--budget", _text(budget_s), *options, "--into", str(into))
    return Command(place.ranks, ("-m", "experiments.sweep", *arguments))


CPU_SIZES = ("--sizes", "1K,2K,4K,16K", "--modes", "host", "--calls", "12")
CPU_CHECKED = "one_shot.ll,two_shot.lamport16,custom_ar_v2,all_gather.ll,reduce_scatter.ll"
"""Each kernel is compiled on a new machine; the tests check all of them."""
BESIDE_PEERS = "one_shot.ll,one_shot.lamport16,two_shot.ll,two_shot.lamport16,custom_ar_v2,lamport_fp"
SEARCH_FROM_S = 60.0
SHORT_S = 30.0
"""A part with less, in a rehearsal, covers fewer sizes, dependent launch late alone, and fewer decode steps."""


def _info(place: Place, limit_s: float) -> Command:
    return Command(place.ranks, ("-m", "fcomm", "info", "--backend", place.backend), under_mps=place.shared)


def _links(place: Place, limit_s: float) -> Command:
    out = ("--backend", place.backend, "--out", str(place.folder / "links"))
    return Command(place.ranks, ("-m", "experiments.link_matrix", *out))


def checked_sizes(ranks: int, most: int) -> list[int]:
    """Message sizes in bytes that up to eight ranks, and each number of them below `ranks`, can share out evenly: else a
    reduce-scatter among three would be left out of the check without a word.

    The smallest has no whole number of cells for each rank, where that is possible; the others have. most : about the largest.
    """
    even = math.lcm(*range(1, min(ranks, 8) + 1))
    wanted = [2 << 10, *(size for size in (16 << 10, 256 << 10, 1 << 20) if size <= most)]
    units = [2 * even, *[CELL_BYTES * even] * 3]
    return [max(size // unit, 1) * unit for size, unit in zip(wanted, units, strict=False)]


def _correctness(place: Place, limit_s: float) -> Command:
    sizes = checked_sizes(place.ranks, 1 << 20 if place.gpus else 16 << 10)
    every = ("--collective", ",".join(COLLECTIVES), "--ranks", f"2..{place.ranks}", "--calls", "1")
    if place.gpus:
        how = ("--dtypes", "bfloat16", "--modes", "prepared", "--launch", "late")
    else:
        how = ("--dtypes", "bfloat16", "--modes", "prepared", "--protocols", CPU_CHECKED)
    budget_s = CHECKING * limit_s + FINISH_S[place.backend]
    asked = (*every, "--sizes", ",".join(map(str, sizes)), *how, "--shapes", "default")
    return _sweep(place, "correctness", budget_s, *asked)


def _latency(place: Place, limit_s: float, name: str, *options: str) -> Command:
    sizes = ("--sizes", "1K..1M", "--dtypes", "bfloat16") if place.gpus else CPU_SIZES
    if place.gpus and limit_s < SHORT_S:
        sizes = ("--sizes", "2K,8K,64K,512K", "--dtypes", "bfloat16", "--launch", "late")
    return _sweep(place, name, sweep_budget_s(limit_s, place.backend), *sizes, *options)


def _all_reduce(place: Place, limit_s: float) -> Command:
    search = ("--shapes", "search" if limit_s >= SEARCH_FROM_S else "default") if place.gpus else ()
    return _latency(place, limit_s, "all-reduce", *search)


def _all_gather(place: Place, limit_s: float) -> Command:
    few = () if place.gpus else ("--protocols", "all_gather.ll,barrier.all_gather")
    return _latency(place, limit_s, "all-gather", "--collective", "all_gather", *few)


def _peers(place: Place, limit_s: float) -> Command:
    if not place.gpus:
        return _latency(place, limit_s, "peers", "--protocols", "one_shot.ll,custom_ar_v2", "--peers", "mpi")
    late = () if limit_s < SHORT_S else ("--launch", "late")
    how = ("--protocols", BESIDE_PEERS, "--peers", "nccl,torch", *late, "--shapes", "default")
    return _latency(place, limit_s, "peers", *how)


def _decode(place: Place, limit_s: float) -> Command:
    out = ("--backend", place.backend, "--out", str(place.folder / "decode"))
    if not place.gpus:
        return Command(place.ranks, ("-m", "experiments.decode", "--batch", "1", "--calls", "6", *out))
    short = ("--batch", "8", "--calls", "9", "--shapes", "default") if limit_s < SHORT_S else ()
    model = place.folder / "fit" / "model.json"
    env = {"FCOMM_MODEL": str(model)} if model.is_file() else {}
    return Command(place.ranks, ("-m", "experiments.decode", "--model", "llama3-8b", *short, *out), env)


def sweeps(place: Place, *names: str) -> list[Path]:
    """The folders of those sweeps that have records."""
    return [place.folder / name for name in names if (place.folder / name / "run.json").is_file()]


def decodes(place: Place) -> list[Path]:
    """The newest decode run that has records, if there is one."""
    return records.runs(place.folder / "decode")[-1:]


def _of(place: Place, *names: str) -> list[str]:
    found = [str(path) for path in sweeps(place, *names)]
    if not found:
        raise ArgumentError(f"it is made from {' and '.join(names)}, and there are no records of these")
    return found


def _fit(place: Place, limit_s: float) -> Command:
    runs = _of(place, "all-reduce", "all-gather")
    return Command(0, ("-m", "experiments.fit", *runs, "--draws", "10", "--out", str(place.folder / "fit")))


def _figures(place: Place, limit_s: float) -> Command:
    runs = _of(place, "all-reduce", "all-gather", "peers")
    devices = records.load(runs[0]).provenance.get("devices") or [{}]
    known = real_links.published_name(str(devices[0].get("device", ""))) if not place.shared else None
    lines = ("--published", known) if known else ()
    out = ("--no-counted", "--out", str(place.folder / "figures"))
    return Command(0, ("-m", "experiments.figures", *runs, *out, *lines))


def _claims(place: Place, limit_s: float) -> Command:
    runs = [*_of(place, "all-reduce", "all-gather"), *map(str, decodes(place))]
    return Command(0, ("-m", "experiments.claims", *runs, "--out", str(place.folder / "claims")))


# What became of a part, in a sentence.


def _counts(cases: pd.DataFrame) -> str:
    found = cases.loc[cases["protocol"] != "floor", "status"].value_counts()
    words = {
        "measured": "measured",
        "wrong": "WRONG",
        "failed": "failed",
        "dropped": "without time",
        "refused": "refused",
    }
    return ", ".join(f"{found[status]:,} {word}" for status, word in words.items() if status in found)


def _bad(cases: pd.DataFrame) -> str:
    """The first wrong or failed case in words; empty where there is none."""
    bad = rows(cases[cases["status"].isin(["wrong", "failed"])].sort_values("status", ascending=False))
    if not bad:
        return ""
    first, more = bad[0], f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"{first['protocol']} {first['nbytes']} B {first['dtype']} on {first['ranks']} is {first['status']} ({first['reason']}){more}"


def _judge_links(place: Place) -> Verdict:
    path = place.folder / "links" / "links.json"
    try:
        pairs = json.loads(path.read_text())["pairs"]
        broken = [pair for pair in pairs if pair["reason"]]
        if broken:
            a, b = broken[0]["ranks"]
            return (
                FAILED,
                f"{len(broken)} of {len(pairs)} pairs are not connected: ranks {a} and {b}: {broken[0]['reason']}",
            )
        kinds = ", ".join(sorted({pair["kind"] for pair in pairs}))
        us, gbps = ([pair[what] for pair in pairs] for what in ("one_way_us", "gbps"))
        rates = f"{min(us):.2f} to {max(us):.2f} us one way, {min(gbps):.1f} to {max(gbps):.1f} GB/s"
        return DONE, f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}, {kinds}: {rates}"
    except (OSError, ValueError, KeyError, TypeError):
        raise RecordError(f"it left no matrix that can be read: {path}") from None


def _span(n: pd.Series[int]) -> str:
    return f"{n.min()}" if n.min() == n.max() else f"{n.min()} to {n.max()}"


def _judge_correctness(place: Place) -> Verdict:
    cases = records.load(place.folder / "correctness").cases
    if said := _bad(cases):
        return FAILED, said
    admitted = cases[(cases["status"] != "refused") & (cases["protocol"] != "floor")]
    checked = admitted.groupby(["protocol", "ranks"])["checked_calls"].sum().reset_index()
    lacking = [f"{row['protocol']} on {row['ranks']}" for row in rows(checked) if not row["checked_calls"]]
    if lacking:
        more = f" and {len(lacking) - 6} more" if len(lacking) > 6 else ""
        return FAILED, f"not checked before the budget ended: {', '.join(lacking[:6])}{more}"
    there = {(row["collective"], row["ranks"]) for row in rows(admitted)}
    for n in range(2, place.ranks + 1):
        for collective in COLLECTIVES:
            if (collective, n) not in there:
                return FAILED, f"no protocol of {collective} was checked among {n} ranks"
    protocols = admitted["protocol"].nunique()
    calls = int(admitted["checked_calls"].sum())
    return (
        DONE,
        f"{protocols} protocols exact among {_span(admitted['ranks'])} ranks: {calls:,} calls on fresh data compared",
    )


def _judge_sweep(name: str) -> Callable[[Place], Verdict]:
    """Of a sweep of latencies: cases that are wrong or failed are among its findings, and named."""

    def judge(place: Place) -> Verdict:
        run = records.load(place.folder / name)
        if not run.complete:
            return FAILED, f"{sum(run.owed.values()):,} timed calls are missing"
        if run.latency.empty:
            return FAILED, f"no times: {_counts(run.cases)}"
        refused = run.cases[(run.cases["status"] == "refused") & run.cases["protocol"].isin(PEERS)]
        reasons = [f"{row['protocol']}: {row['reason']}" for row in rows(refused.drop_duplicates("protocol"))]
        said = filter(None, [_counts(run.cases), _bad(run.cases), *reasons])
        return DONE, "; ".join(said)

    return judge


def _judge_decode(place: Place) -> Verdict:
    found = decodes(place)
    if not found:
        return FAILED, "it left no records"
    run = records.load(found[0])
    if not run.complete or run.latency.empty:
        return FAILED, "it ended before its steps were timed"
    bad = _bad(run.cases)
    chosen = run.provenance.get("chosen_by")
    return DONE, f"{_counts(run.cases)}; auto chose by {chosen}{f'; {bad}' if bad else ''}"


PARTS = (
    Part("info", "capabilities of each rank, kinds of links, admitted protocols", 15, 8, _info),
    Part("links", "one-way time and bandwidth between each two ranks", 25, 8, _links, _judge_links),
    Part("correctness", "every admitted protocol among 2 to N ranks", 75, 18, _correctness, _judge_correctness),
    Part("all-reduce", "latency of ours and the baselines, three ways", 125, 14, _all_reduce, _judge_sweep("all-reduce")),
    Part("all-gather", "latency of ours and the baselines", 45, 12, _all_gather, _judge_sweep("all-gather")),
    Part("peers", "latency of ours beside NCCL and PyTorch", 50, 12, _peers, _judge_sweep("peers")),
    Part("fit", "the cost model, its errors and regret", 35, 5, _fit, derived=True),
    Part("decode", "time per output token with each way to all-reduce", 70, 12, _decode, _judge_decode),
    Part("figures", "the paper's figures", 30, 8, _figures, derived=True),
    Part("claims", "the paper's numbers beside ours", 10, 4, _claims, derived=True),
)  # fmt: skip
"""In the order in which they run: what must not be missing first."""


def limit_of_first(parts: Sequence[Part], left_s: float, place: Place) -> float:
    """Seconds that the first of these parts has: what it needs at least, and its share of what is left beyond all their needs."""
    first = parts[0]
    beyond = max(left_s - sum(part.needs_s(place) for part in parts), 0.0)
    return first.needs_s(place) + beyond * first.share_s / sum(part.share_s for part in parts)


# ---- state -----------------------------------------------------------------------------------------------------------


@dataclass
class Standing:
    """How a part stands."""

    status: str = NOT_RUN
    says: str = ""
    seconds: float = 0.0
    """Over all attempts."""
    command: str = ""


@dataclass
class State:
    """What is kept of a campaign between two commands."""

    ranks: int
    gpus: int
    budget_s: float
    parts: dict[str, Standing] = field(default_factory=lambda: {part.name: Standing() for part in PARTS})

    def save(self, path: Path) -> None:
        content = {"schema": SCHEMA, **asdict(self)}
        records.write_whole(path, json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> State:
        """`ArgumentError` where there is none, `RecordError` for one that cannot be read."""
        try:
            content = json.loads(path.read_text())
            if content.pop("schema") != SCHEMA:
                raise RecordError(f"{path} is of another version of the campaign: begin a new one")
            parts = {part.name: Standing(**content["parts"].get(part.name, {})) for part in PARTS}
            return cls(int(content["ranks"]), int(content["gpus"]), float(content["budget_s"]), parts)
        except OSError:
            raise ArgumentError(f"{path.parent} is no campaign: it has no {path.name}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RecordError(f"{path} is damaged: begin a new campaign; its runs can still be read") from None


# ---- sharing a GPU ---------------------------------------------------------------------------------------------------


class Sharing:
    """A private MPS daemon for parts whose ranks share a GPU, in the environment of this process and of what it starts."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        self._stack = ExitStack()
        self._added: dict[str, str] = {}

    def start(self) -> None:
        """Sees to it that there is one; where there cannot be, says so once, and ranks take turns on the GPU."""
        if not self._wanted or self._added:
            return
        try:
            self._added = self._stack.enter_context(mps.private_mps())
            os.environ.update(self._added)
        except SetupError as error:
            self._wanted = False
            print(f"note: going on without MPS: {error}", flush=True)

    def stop(self) -> None:
        """Stops it: at the end, and behind a part that failed, since its server may refuse new clients then."""
        for name in self._added:
            os.environ.pop(name, None)
        self._added = {}
        self._stack.close()


# ---- a campaign ------------------------------------------------------------------------------------------------------


class Campaign:
    """Runs parts one after the other and keeps what became of each."""

    def __init__(self, place: Place, state: State, runner: Runner = run_limited) -> None:
        self.place, self.state, self.runner = place, state, runner
        self.logs = folder(place.folder / "logs", "--out")
        self.sharing = Sharing(place.shared)

    def run(self, wanted: Sequence[Part], budget_s: float) -> None:
        """Runs those parts that are not done. What interrupts it leaves state and records as they are by then."""
        try:
            self._run(wanted, time.monotonic() + budget_s)
        finally:
            self.sharing.stop()

    def _run(self, wanted: Sequence[Part], over: float) -> None:
        todo = [p for p in wanted if p.derived or self.state.parts[p.name].status != DONE]
        changed = False
        for k, part in enumerate(todo):
            standing = self.state.parts[part.name]
            if part.derived and standing.status == DONE and not changed:
                print(f"{self._count(part)}: already done", flush=True)
                continue
            left_s = over - time.monotonic()
            if left_s < part.needs_s(self.place):
                if standing.status != DONE:
                    lack = (
                        f"{max(left_s, 0.0):.0f} s of the budget were left, and it needs {part.needs_s(self.place):.0f}"
                    )
                    standing.status, standing.says = NOT_RUN, lack
            else:
                self._part(part, limit_of_first(todo[k:], left_s, self.place))
                changed |= not part.derived
            print(f"{self._count(part)}: {standing.status}{f': {standing.says}' if standing.says else ''}", flush=True)
            self._save()

    def _count(self, part: Part) -> str:
        return f"[{list(self.state.parts).index(part.name) + 1}/{len(self.state.parts)}] {part.name}"

    def _save(self) -> None:
        self.state.save(self.place.folder / STATE)

    def _part(self, part: Part, limit_s: float) -> None:
        standing = self.state.parts[part.name]
        standing.status, standing.says = RUNNING, "it was running when the campaign ended"
        log = self.logs / f"{part.name}.log"
        begun = log.stat().st_size if log.exists() else 0
        start = time.monotonic()
        try:
            command = part.command(self.place, limit_s)
            if "--resume" not in command.arguments:  # the one that began it is the one that repeats it
                standing.command = str(command)
            self._save()
            print(f"{self._count(part)}: {part.what}; at most {limit_s:.0f} s", flush=True)
            if not part.derived:
                self.sharing.start()
            ended = self.runner(command, log, limit_s, lambda s: self._tell(part, s, limit_s, log))
            if ended.code != 0 and not part.derived:
                self.sharing.stop()
            standing.status, standing.says = self._outcome(part, ended, limit_s, log, begun)
        except ArgumentError as error:  # nothing to make it from
            standing.status, standing.says = NOT_RUN, str(error)
        except FcommError as error:
            standing.status, standing.says = FAILED, str(error)
        except KeyboardInterrupt:
            standing.status, standing.says = FAILED, "interrupted; what it recorded is kept"
            raise
        finally:
            standing.seconds += time.monotonic() - start
            self._save()

    def _tell(self, part: Part, seconds: float, limit_s: float, log: Path) -> None:
        print(f"{self._count(part)}: {seconds:.0f} of {limit_s:.0f} s; {last_line(log, 0)[:100]}", flush=True)

    def _outcome(self, part: Part, ended: Ended, limit_s: float, log: Path, begun: int) -> Verdict:
        if ended.code is None:
            return FAILED, f"not over at its limit of {limit_s:.0f} s; what it recorded is kept, and --resume goes on"
        if ended.code == 0 and part.judge is None:
            return DONE, f"logs/{log.name}"
        if (
            ended.code in (0, 1) and part.judge is not None
        ):  # 1: also where some cases were wrong, which the records name
            try:
                return part.judge(self.place)
            except FcommError:
                if ended.code == 0:
                    raise
        return FAILED, f"exit code {ended.code}: {last_line(log, begun) or 'it said nothing'}"


def last_line(log: Path, begun: int) -> str:
    """What a log says last from there on: its last error, else its last line. begun : an offset in bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(begun, log.stat().st_size - (64 << 10)))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [
        line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip() and not line.startswith("$ ")
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")


# ---- the summary -----------------------------------------------------------------------------------------------------


def _runs(paths: Sequence[Path]) -> Iterator[Run]:
    for path in paths:
        with suppress(FcommError):
            yield records.load(path)


def found_targets(place: Place) -> pd.DataFrame:
    """What became of the targets, from what there is."""
    runs = [run for run in _runs(sweeps(place, "all-reduce", "all-gather", "peers")) if len(run.cases)]
    steps = [run for run in _runs(decodes(place)) if decode_report.is_decode(run)]
    model: Model | None = None
    with suppress(FcommError):
        model = Model.load(place.folder / "fit" / "model.json")
    return real_links.targets(runs, steps, model)


def summary(place: Place, state: State, targets: pd.DataFrame) -> str:
    """The whole campaign on a page, as Markdown."""
    runs = list(_runs(sweeps(place, "all-reduce", "all-gather", "peers", "correctness")))
    lines = ["# Campaign", ""]
    if runs:
        lines += [f"{place.ranks} ranks. Taken on: {runs[0].taken_on}.", ""]
    if not place.gpus:
        lines += ["**EMULATION on CPUs: a rehearsal of the commands. Its times say nothing about a GPU.**", ""]
    elif place.shared:
        gpus = f"{place.gpus} GPU{'s' if place.gpus > 1 else ''}"
        no_link = "No time here has a link in it, and none is evidence about NVLink."
        lines += [f"**{place.ranks} ranks share {gpus}: a rehearsal. {no_link}**", ""]
    table = [["part", "what", "status", "seconds", "says"]]
    for part in PARTS:
        s = state.parts[part.name]
        status = FAILED if s.status == RUNNING else s.status
        table.append([part.name, part.what, status, f"{s.seconds:.0f}", s.says.replace("|", "/")])
    lines += [*aligned(table), "", "## Targets", "", targets_markdown(targets), ""]
    lines += ["No NVLink multicast: " + ", ".join(f"{k}={v}" for k, v in peers.NO_MULTICAST.items()) + ".", ""]
    repeat = [s.command for s in state.parts.values() if s.command]
    if repeat:
        lines += ["## To repeat a part", "", "```", *repeat, "```", ""]
    return "\n".join(lines)


# ---- the command -----------------------------------------------------------------------------------------------------


def parser() -> Parser:
    """The options of the command."""
    p = Parser(prog="python -m experiments.campaign", description=(__doc__ or "").split("\n\n")[1], allow_abbrev=False)
    p.add_argument("--budget", metavar="TIME", help=f"for all parts together: 60s, 8m ({BUDGET})")
    p.add_argument("--ranks", type=int, metavar="N", help="ranks to start (one for each GPU; 4 on one GPU, 2 without)")
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), help="auto: cuda where there is a GPU (auto)")
    p.add_argument("--only", metavar="LIST", help=f"parts to run now: {', '.join(part.name for part in PARTS)} (all)")
    p.add_argument("--out", type=Path, metavar="DIR", help="the campaign's folder, a new one (results/TIME-campaign)")
    p.add_argument(
        "--resume", type=Path, metavar="FOLDER",
        help="go on with a campaign: parts that are done are skipped, a sweep that was ended is finished",
    )  # fmt: skip
    return p


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a campaign as Ctrl-C does: the part is ended, state and summary are written. A second one is not heard."""
    heard = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if not heard:
            heard = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin(args: Any) -> tuple[Place, State]:
    """A new campaign, or the one to go on with."""
    if args.resume is not None:
        for option in ("ranks", "backend", "out"):
            if getattr(args, option) is not None:
                raise ArgumentError(f"--resume goes on with a campaign as it was begun: leave out --{option}")
        state = State.load(args.resume / STATE)
        return Place(args.resume, state.ranks, state.gpus), state
    gpus = 0 if args.backend == "cpu" else mps.gpus_without_cuda()
    if args.backend == "cuda" and not gpus:
        raise ArgumentError("--backend cuda: there is no GPU here")
    ranks = args.ranks if args.ranks is not None else (gpus if gpus > 1 else 4 if gpus else 2)
    if ranks < 2:
        raise ArgumentError(f"--ranks {ranks}: an exchange needs at least two ranks")
    out = args.out or Path("results") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-campaign"
    if (out / STATE).exists():
        raise ArgumentError(f"{out} has a campaign: go on with it by --resume {out}, or name another folder with --out")
    return Place(folder(out, "--out"), ranks, gpus), State(ranks, gpus, parse_time(BUDGET))


def main(argv: Sequence[str] | None = None, runner: Runner = run_limited) -> int:
    """The command; returns its exit code: 0 where all parts that were wanted are done, 1 where some are not."""
    args = parser().parse_args(argv)
    if launcher_size() > 1:
        raise ArgumentError("this command starts its ranks itself: run it without mpirun")
    names = [part.name for part in PARTS] if args.only is None else listed(args.only, "--only")
    for name in names:
        if name not in {part.name for part in PARTS}:
            raise ArgumentError(f"--only {name!r} is no part; there are {', '.join(part.name for part in PARTS)}")
    budget_s = None if args.budget is None else parse_time(args.budget)
    place, state = _begin(args)
    state.budget_s = state.budget_s if budget_s is None else budget_s
    where = f"{place.gpus} GPU{'s' if place.gpus > 1 else ''}" if place.gpus else "the cpu backend, an emulation"
    print(
        f"{place.ranks} ranks on {where}{', shared: a rehearsal' if place.shared else ''}; {state.budget_s:.0f} s into {place.folder}",
        flush=True,
    )
    wanted = [part for part in PARTS if part.name in names]
    with _interruptible():
        try:
            Campaign(place, state, runner).run(wanted, state.budget_s)
        finally:
            _close(place, state)
    return 0 if all(state.parts[part.name].status == DONE for part in wanted) else 1


def _close(place: Place, state: State) -> None:
    """Writes the summary and says where it is."""
    found = found_targets(place)
    text = summary(place, state, found)
    records.write_whole(place.folder / SUMMARY, text.encode())
    records.write_whole(place.folder / TARGETS, latency_csv(found))
    print(f"\n{text}\n{place.folder}/ has {SUMMARY}, {TARGETS}, {STATE}, logs/ and the records", flush=True)


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
