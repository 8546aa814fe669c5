"""The GPU suite: all ranks on the GPUs that are there, under a private MPS daemon where they outnumber these.

One mpirun for each rank count runs the table of cases, since starting ranks costs more than most cases do. Where a case
breaks its mpirun, another one runs the rest, so that one run of the suite shows all there is to see.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from experiments import mps
from tests import launch, ranks
from tests.gpu import cases
from tests.gpu.conftest import why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

RANKS = (2, 4, 8)
TABLE_LIMIT_S = 150
PREWARM_LIMIT_S = 120
SOME_DTYPES = ["float32", "bfloat16"]
"""Among more than two ranks; all among two. Each kernel of each type has to be compiled."""
ATTEMPTS = 4
ONCE = {
    "no_memory_left_is_one_sentence",
    "a_hang_under_dependent_launch_is_named",
    "the_torch_operator_and_its_example",
    "serving_engines_all_reduce",
    "epilogues_in_graphs",
    "graphs_with_slots_in_host_memory",
    "all_kinds_of_latency_can_be_taken",
    "the_norm_behind_a_collective_is_one",
} | {
    function.__name__
    for function in (
        ranks.models_that_do_not_fit_are_refused_on_all_ranks,
        ranks.ranks_with_different_models_all_say_so,
        ranks.a_model_in_the_cache_is_found_and_one_that_does_not_fit_is_left_alone,
        ranks.the_kill_switch,
        ranks.the_path_is_logged_once_for_each_size_class,
        ranks.an_encoding_cannot_come_while_a_communicator_is_open,
        ranks.ranks_with_other_kernels_all_say_so,
        ranks.epilogues_that_are_refused,
    )
}
"""Cases that take long with many ranks on one GPU, or that have to do with the host alone: for two ranks only."""
FORWARDING = [name for name in (*cases.CASES, *ranks.CASES) if name.startswith("a_link_that_forwards")]
"""Of the second form of link emulation, each with kernels of its own: with `-m full`."""
NAMES = [name for name in (*cases.CASES, *ranks.CASES) if name not in FORWARDING]


def wanted(n: int) -> list[str]:
    return [name for name in NAMES if not (n != 2 and name in ONCE)]


def dtypes(n: int) -> list[str]:
    return [*ranks.DTYPES] if n == 2 else SOME_DTYPES


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, str]]:
    """Environment of the suite's ranks."""
    plans = [f"{n}:{','.join(dtypes(n))}" for n in RANKS]
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.prewarm", *plans], cwd=launch.ROOT, timeout=PREWARM_LIMIT_S, check=False
    )
    if not mps.available():
        yield {}
        return
    with mps.private_mps() as env:
        yield env


@dataclass
class Table:
    """What one rank count's cases said."""

    passed: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)


_tables: dict[int, Table] = {}


def table(n: int, env: dict[str, str]) -> Table:
    if n not in _tables:
        _tables[n] = run_table(n, env)
    return _tables[n]


def run_table(n: int, env: dict[str, str]) -> Table:
    result = Table()
    left = wanted(n)
    end = time.monotonic() + TABLE_LIMIT_S
    for _ in range(ATTEMPTS):
        if not left:
            break
        limit = end - time.monotonic()
        if limit < 10:
            break
        done = launch.mpirun(n, ["-m", "tests.gpu.cases", *left, "--dtypes", *dtypes(n)], timeout=limit, env=env)
        for line in done.stdout.splitlines():
            word, _, rest = line.partition(" ")
            if word in ("PASS", "FAIL"):
                name, seconds = rest.split()
                left.remove(name)
                if word == "PASS":
                    result.passed[name] = float(seconds)
                else:
                    result.failed[name] = done.stderr[-6000:]
            elif line.startswith("#"):
                result.facts.append(line)
        if left and done.returncode != 0:  # it ended in the middle: the next case is the one to blame
            result.failed[left.pop(0)] = f"mpirun -n {n} ended with {done.returncode}\n{done.stderr[-6000:]}"
    for name in left:
        result.failed[name] = "not run: the cases before it took too long"
    slowest = sorted(result.passed.items(), key=lambda item: -item[1])[:5]
    print(f"\nn = {n}: slowest cases {slowest}", *result.facts, sep="\n")
    return result


@pytest.mark.parametrize(("n", "name"), [(n, name) for n in RANKS for name in wanted(n)])
def test_case(n: int, name: str, clients: dict[str, str]) -> None:
    if not clients and n > 2 and mps.gpus_without_cuda() < n:
        pytest.skip(f"{n} ranks on fewer GPUs need MPS, and there is no {mps.CONTROL}")
    found = table(n, clients)
    if name in found.failed:
        pytest.fail(found.failed[name] + "\n" + "\n".join(found.facts[-3:]), pytrace=False)
    assert name in found.passed


@pytest.mark.full
@pytest.mark.parametrize("name", FORWARDING)
def test_forwarding_links(name: str, clients: dict[str, str]) -> None:
    done = launch.mpirun(2, ["-m", "tests.gpu.cases", name, "--dtypes", "float32"], timeout=90, env=clients)
    assert f"PASS {name} " in done.stdout, said(done)


def said(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_a_rank_without_a_gpu_is_named_on_all_ranks(backend: str) -> None:
    args = ["-m", "tests.gpu.cases", "--scenario", "without_a_gpu", "--blind", "--backend", backend]
    done = launch.mpirun(2, args, timeout=60)
    assert done.returncode == 0, said(done)
    assert done.stdout.count("SCENARIO ok") == 2, said(done)


def test_without_mps_results_are_right_and_marked() -> None:
    if mps.gpus_without_cuda() > 1:
        pytest.skip("two ranks have a GPU each here")
    done = launch.mpirun(2, ["-m", "tests.gpu.cases", "--scenario", "short"], timeout=90)
    assert done.stdout.count("SCENARIO ok") == 2, said(done)
    assert done.stdout.count("time_sliced=True") == 2, said(done)
    assert done.stderr.count("share a GPU without MPS") == 1, said(done)


@cache
def sanitizer() -> str | None:
    beside = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


def test_memcheck() -> None:
    tool = sanitizer()
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    args = ["-n", "2", tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "application-only"]
    command = [launch.find_mpirun(), *args, sys.executable, "-m", "tests.gpu.cases", "--scenario", "short"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=launch.ROOT,
        env=launch.environment({"FCOMM_TIMEOUT_S": "60"}), start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        launch.kill(process)
        out, err = process.communicate()
        pytest.fail(f"memcheck took more than 100 s\n{out[-4000:]}\n{err[-4000:]}", pytrace=False)
    text = f"exit code {process.returncode}\n{out[-5000:]}\n{err[-3000:]}"
    for reason in ("not supported", "Unable to find", "not have permission", "InitializationError"):
        if reason in out + err and "SCENARIO ok" not in out:
            pytest.skip(f"compute-sanitizer cannot work here: {reason}")
    assert out.count("SCENARIO ok") == 2, text
    assert process.returncode == 0, text
    assert (out + err).count("ERROR SUMMARY: 0 errors") == 2, text


def test_a_dead_mps_daemon_is_one_sentence_on_all_ranks() -> None:
    if not mps.available():
        pytest.skip(f"there is no {mps.CONTROL}")
    with mps.private_mps() as env:
        pipe = Path(env["CUDA_MPS_PIPE_DIRECTORY"])
        servers = (mps._tell(env, "get_server_list") or "").split()
        for pid in [mps._daemon_pid(pipe), *map(int, servers)]:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        time.sleep(1)
        args = ["-m", "tests.gpu.cases", "--scenario", "construct", "--backend", "auto"]
        done = launch.mpirun(2, args, timeout=60, env=env)
    lines = [line for line in done.stdout.splitlines() if "SCENARIO" in line]
    assert len(lines) == 2, said(done)
    assert all("refused" in line and "MPS" in line for line in lines), said(done)


def test_a_rank_that_dies_under_mps_is_reported_by_the_others() -> None:
    if not mps.available():
        pytest.skip(f"there is no {mps.CONTROL}")
    with mps.private_mps() as env:  # its own daemon: a fault may leave a server unfit for others
        done = launch.mpirun(2, ["-m", "tests.gpu.cases", "--scenario", "death"], timeout=60, env=env)
    survivor = [line for line in done.stdout.splitlines() if "SCENARIO" in line and "rank 0" in line]
    assert survivor, said(done)
    # Where the fault is contained to its client, the survivor learns of it as of any rank that stopped coming.
    assert "a rank sharing this GPU died" in survivor[0] or "gave up waiting for rank 1" in survivor[0], said(done)
