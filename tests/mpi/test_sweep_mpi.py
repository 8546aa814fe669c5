"""The sweep under real mpirun: whole runs, kills in the middle, wrong results, disks that fill up."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

import experiments
from tests import launch
from tests.unit.test_docs import listed_in_records

pytestmark = pytest.mark.mpi

SWEEP = ["-m", "experiments.sweep"]
# Two are enough to show the sweep; that the protocols are right is other tests' concern.
# The budget is ample: on a busy machine, or one that must build the kernels first, a short one would drop cases.
TWO = ["--protocols", "one_shot.ll,barrier.one_shot", "--budget", "10m"]


def _only_run(out: Path) -> Path:
    (path,) = (p.parent for p in out.glob("*/run.json"))
    return path


def _sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what went wrong; the launcher may add its own about exit codes."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_sweep_from_start_to_figure(tmp_path: Path) -> None:
    arguments = ["--sizes", "1K,3K,16K", "--ranks", "2..3", "--dtypes", "f32,bf16", "--out", str(tmp_path)]
    done = launch.mpirun(3, [*SWEEP, *TWO, *arguments, "--calls", "20"], timeout=100)
    assert done.returncode == 0, done.stderr
    path = _only_run(tmp_path)
    run = experiments.load(path)
    assert run.complete
    assert set(run.cases["status"]) == {"measured"}
    assert (run.cases["wrong"] == 0).all()
    assert (run.cases["checked_calls"] > 0).all()
    measured = run.cases[["ranks", "nbytes", "dtype"]].drop_duplicates()
    assert len(measured) == 2 * 3 * 2
    assert (path / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.iterdir() if p.is_file() and not listed_in_records(p.name)] == []
    table = [line for line in done.stdout.splitlines() if line.split()[:1] in (["2"], ["3"])]
    assert len(table) == len(run.cases)
    last = done.stdout.splitlines()[-1]
    assert str(path) in last
    assert "emulation" in last
    assert "3 MPI ranks" in last
    assert "ranks: 100%" in done.stderr  # the bar's last state
    for key in ("source_hash", "mpi", "cpu", "cores", "command", "taken_utc", "packages", "ranks_per_device"):
        assert run.provenance[key], key


def test_a_rank_that_is_late_costs_its_delay_once(tmp_path: Path) -> None:
    """The mode on real ranks, to its figure. An emulated call on a busy machine varies by more than a GPU's delays."""
    asked = ["--modes", "skew", "--delays", "0,20000", "--sizes", "1K", "--calls", "12", "--out", str(tmp_path)]
    done = launch.mpirun(2, [*SWEEP, *TWO, *asked], timeout=100)
    assert done.returncode == 0, done.stderr
    path = _only_run(tmp_path)
    run = experiments.load(path)
    assert run.complete
    assert run.cases["delay_us"].tolist() == [0.0, 20000.0] * 2
    assert run.cases["late_rank"].isna().all()
    assert set(run.cases["mode"]) == {"skew"}
    # From the late rank's arrival on; were the delay in it, no call could take less than its 20 ms.
    assert (run.latency["min_us"] < 20000).all()
    assert (path / "skew-all-reduce.png").read_bytes().startswith(b"\x89PNG")
    assert "skew 20000us" in done.stdout


def test_one_rank_copies(tmp_path: Path) -> None:
    done = launch.mpirun(1, [*SWEEP, *TWO, "--sizes", "1K", "--calls", "20", "--out", str(tmp_path)], timeout=120)
    assert done.returncode == 0, done.stderr
    run = experiments.load(_only_run(tmp_path))
    assert run.complete
    assert run.latency["protocol"].tolist() == ["copy"]
    assert run.latency["busbw_gbps"].tolist() == [0.0]


def test_a_killed_sweep_is_readable_and_resumes_to_a_complete_run(tmp_path: Path) -> None:
    arguments = ["--sizes", "1K..32K", "--ranks", "2,3", "--out", str(tmp_path), "--calls", "80"]
    process = launch.mpirun_popen(3, [*SWEEP, *TWO, *arguments])
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            streams = list(tmp_path.glob("*/launch-0/samples.arrows"))
            if streams and streams[0].stat().st_size > 20_000:
                break
            time.sleep(0.005)
    finally:
        launch.kill(process)
        process.communicate()
    path = _only_run(tmp_path)
    cut = experiments.load(path)
    assert not cut.complete
    assert cut.owed, "the sweep was over before it was killed"
    assert len(cut.samples) > 0
    assert not (path / "latency.png").exists()

    wrong_world = launch.mpirun(4, [*SWEEP, "--resume", str(path)], timeout=120)
    assert wrong_world.returncode == 1
    assert "number of ranks" in _sentence(wrong_world)

    done = launch.mpirun(3, [*SWEEP, "--resume", str(path)], timeout=120)
    assert done.returncode == 0, done.stderr
    run = experiments.load(path)
    assert run.complete
    assert (run.cases["iterations"] == run.cases["planned"]).all()
    assert (run.cases["wrong"] == 0).all()
    assert len(run.launches) == 2
    # What had been measured is still there, to the nanosecond, and only the rest was measured again.
    assert run.samples[run.samples["launch"] == 0].reset_index(drop=True).equals(cut.samples)
    assert set(run.samples.loc[run.samples["launch"] == 1, "case"]) == set(cut.owed)
    assert (path / "latency.png").exists()

    again = launch.mpirun(3, [*SWEEP, "--resume", str(path)], timeout=120)
    assert again.returncode == 0, again.stderr
    assert len(experiments.load(path).launches) == 2


@pytest.mark.full
def test_a_search_of_launch_shapes_and_a_second_launch_into_the_same_folder(tmp_path: Path) -> None:
    """On the cpu backend a search finds what it likes: here, that half the grid is best, for ours and for baselines."""
    script, path = tmp_path / "script.py", tmp_path / "folder" / "run"
    script.write_text(SEARCHED)
    asked = ["--protocols", "one_shot.ll,custom_ar_v2.push", "--budget", "10m", "--shapes", "search"]
    arguments = ["--ranks", "3", "--sizes", "1K..16K", "--calls", "10", "--seed", "7", "--into", str(path)]
    first = launch.mpirun(3, [str(script), *asked, *arguments], timeout=100)
    assert first.returncode == 0, first.stderr
    one = experiments.load(path)
    assert (one.cases["status"] == "measured").all()
    # The default shape and the one that was found; sizes between the anchors inherit it.
    assert one.cases.groupby(["protocol", "nbytes"]).size().tolist() == [2] * 10
    tuned = one.cases[one.cases["shape"] != ""]
    assert set(tuned["shape"]) == {"1x32"}
    assert set(zip(tuned["blocks"], tuned["threads"], strict=True)) == {(1, 32)}

    again = launch.mpirun(3, [str(script), *asked, *arguments], timeout=100)
    assert again.returncode == 0, again.stderr
    assert "searching" in first.stderr
    assert "searching" not in again.stderr  # the shapes are those of the first launch
    run = experiments.load(path)
    assert run.complete
    assert [(p["launch"], p["resumes"]) for p in run.launches] == [(0, False), (1, False)]
    identity = ["case", "protocol", "nbytes", "shape", "ranks"]
    assert run.cases[identity].equals(one.cases[identity])
    assert (run.latency["launches"] == 2).all()
    assert (run.cases["iterations"] == 20).all()
    assert run.samples[run.samples["launch"] == 0].reset_index(drop=True).equals(one.samples)


def test_a_candidate_that_hangs_while_it_is_timed_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGING)
    asked = ["--protocols", "one_shot.ll,barrier.one_shot", "--sizes", "1K,2K", "--calls", "20", "--budget", "10m"]
    environment = {"FCOMM_TIMEOUT_S": "1"}
    done = launch.mpirun(2, [str(script), *asked, "--out", str(tmp_path / "r")], timeout=100, env=environment)
    assert done.returncode == 1, done.stderr
    assert "# FAILED, times void" in done.stdout
    run = experiments.load(_only_run(tmp_path / "r"))
    assert run.complete
    status = {(c.protocol, c.nbytes): c.status for c in run.cases.itertuples()}
    assert status.pop(("one_shot.ll", 1024)) == "failed"
    assert set(status.values()) == {"measured"}
    (reason,) = run.cases.loc[run.cases["status"] == "failed", "reason"]
    assert "rank 0" in reason
    assert (run.latency["iterations"] == 20).all()
    assert len(run.latency) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--sizes", "0"], 2, "is not a size"),
        (["--ranks", "2,9"], 2, "asks for 9 ranks and 3 were started"),
        (["--resume", "{tmp}"], 1, "is not a run"),
        (["--out", "{tmp}/file/results"], 1, "cannot write"),
        (["--budget", "1s"], 2, "too short for a single case"),
    ],
)
def test_bad_input_is_one_sentence_and_ends_every_rank(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    (tmp_path / "file").write_text("")
    arguments = [a.format(tmp=tmp_path) for a in arguments]
    if "--out" not in arguments and "--resume" not in arguments:
        arguments += ["--out", str(tmp_path / "results")]
    done = launch.mpirun(3, [*SWEEP, *arguments], timeout=30)
    assert done.returncode == code, done.stderr
    assert says in _sentence(done)
    assert list(tmp_path.glob("**/run.json")) == []


FULL_DISK = """
import resource
from experiments import sweep
from fcomm import bootstrap
from fcomm.records import Recorder

append = Recorder.append
def append_where_files_end_early(self, case, nanoseconds):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        append(self, case, nanoseconds)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
Recorder.append = append_where_files_end_early
raise SystemExit(bootstrap.run(sweep.main))
"""

WRONG_RESULT = """
from experiments import sweep
from fcomm import bootstrap, measure

verify = measure.verify
def verify_and_find(mpi, bound, data):
    wrong, failed = verify(mpi, bound, data)
    return {case: 5 * (case.protocol == "one_shot.ll") for case in wrong}, failed
measure.verify = verify_and_find
raise SystemExit(bootstrap.run(sweep.main))
"""


HANGING = """
from experiments import sweep
from fcomm import bootstrap, measure
from fcomm.measure import Mode

sample, bind = measure.MODES["host"].sample, measure.MODES["host"].bind
timed = {}
def bind_and_tell(comm, case, x, out):
    launch = bind(comm, case, x, out)
    timed[launch] = case
    return launch
def sample_without_one_call(comm, launch, iterations):
    case = timed[launch]
    if comm.rank == 1 and case.protocol == "one_shot.ll" and case.nbytes == 1024:
        return sample(comm, lambda: None, iterations)  # this rank never comes
    return sample(comm, launch, iterations)
measure.MODES = {"host": Mode("host", "", bind_and_tell, sample_without_one_call)}
raise SystemExit(bootstrap.run(sweep.main))
"""

SEARCHED = """
from experiments import search, sweep
from fcomm import bootstrap

learn = search.Shapes.learn
def learn_that_half_is_best(self, case, times_us):
    assert len(times_us) > 1, times_us
    learn(self, case, {change: 1.0 if change == search.Change(1.0, 0.5) else 2.0 for change in times_us})
search.Shapes.learn = learn_that_half_is_best
raise SystemExit(bootstrap.run(sweep.main))
"""

FAILING = """
from experiments import sweep
from fcomm import Communicator, bootstrap
from fcomm.errors import ArgumentError

prepare = Communicator.prepare
def prepare_or_fail(self, collective, x, out=None, *, protocol="auto", **rest):
    if protocol == "one_shot.ll16" and self.rank == 1:
        raise ArgumentError("rank 1 does not want to")
    return prepare(self, collective, x, out, protocol=protocol, **rest)
Communicator.prepare = prepare_or_fail
raise SystemExit(bootstrap.run(sweep.main))
"""


def test_a_protocol_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    protocols = ["--protocols", "one_shot.ll16,one_shot.ll,barrier.one_shot", "--budget", "10m"]
    arguments = ["--sizes", "1K", "--calls", "20", "--out", str(tmp_path / "r")]
    done = launch.mpirun(2, [str(script), *protocols, *arguments], timeout=100, env={"FCOMM_TIMEOUT_S": "2"})
    assert done.returncode == 1, done.stderr
    assert "# FAILED, times void" in done.stdout
    run = experiments.load(_only_run(tmp_path / "r"))
    assert run.complete
    status = dict(zip(run.cases["protocol"], run.cases["status"], strict=True))
    assert status == {"one_shot.ll16": "failed", "one_shot.ll": "measured", "barrier.one_shot": "measured"}
    assert sorted(run.latency["protocol"]) == ["barrier.one_shot", "one_shot.ll"]


def test_all_collectives_and_baselines_with_rules_of_their_own(tmp_path: Path) -> None:
    names = "one_shot.ll,custom_ar_v2,custom_ar_v2.pull_two_shot,lamport_fp,all_gather.ll,sentinel.all_gather,reduce_scatter.ll"
    arguments = [
        "--protocols",
        names,
        "--collective",
        "all_reduce,all_gather,reduce_scatter",
        "--inputs",
        "array,staging",
    ]
    sizes = ["--sizes", "1K,1036", "--dtypes", "f16", "--ranks", "2", "--calls", "10", "--out", str(tmp_path)]
    done = launch.mpirun(2, [*SWEEP, *arguments, *sizes, "--budget", "10m"], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = experiments.load(_only_run(tmp_path)).cases
    assert (cases["wrong"] == 0).all()
    refused = cases[cases["status"] == "refused"]
    assert set(refused["reason"]) == {"it takes multiples of 16 bytes, not 1036"}
    assert set(cases.loc[cases["nbytes"] == 1036, "status"]) == {"refused", "measured"}
    measured = cases[cases["nbytes"] == 1024].set_index("protocol")
    assert (measured["status"] == "measured").all()
    pulled = cases[(cases["nbytes"] == 1024) & (cases["protocol"] == "custom_ar_v2.pull_two_shot")]
    assert set(pulled["input"]) == {"array", "staging"}
    assert measured.loc["custom_ar_v2", "form"] == "custom_ar_v2.push"
    latency = experiments.load(_only_run(tmp_path)).latency
    for name, moved in (("all_gather.ll", 2048), ("reduce_scatter.ll", 1024)):
        (row,) = latency[(latency["protocol"] == name) & (latency["nbytes"] == 1024)].to_dict("records")
        assert row["algbw_gbps"] == pytest.approx(moved / row["latency_us"] / 1e3)
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] / 2)


def test_a_disk_that_fills_up_in_the_middle_ends_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FULL_DISK)
    arguments = ["--sizes", "1K,2K", "--ranks", "2", "--out", str(tmp_path / "r")]
    done = launch.mpirun(3, [str(script), *TWO, *arguments], timeout=120)
    assert done.returncode == 1, done.stderr
    assert "samples.arrows (File too large)" in _sentence(done)
    run = experiments.load(_only_run(tmp_path / "r"))
    assert not run.complete
    assert run.owed


@pytest.mark.full
def test_a_wrong_variant_is_never_timed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRONG_RESULT)
    done = launch.mpirun(
        2, [str(script), *TWO, "--sizes", "1K", "--calls", "20", "--out", str(tmp_path / "r")], timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "WRONG RESULTS" in done.stdout
    run = experiments.load(_only_run(tmp_path / "r"))
    bad = run.cases[run.cases["protocol"] == "one_shot.ll"].to_dict("records")
    assert [(c["status"], c["wrong"], c["iterations"]) for c in bad] == [("wrong", 5, 0)]
    assert "one_shot.ll" not in set(run.latency["protocol"])
    assert "barrier.one_shot" in set(run.latency["protocol"])
