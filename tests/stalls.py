"""Real ranks with kernels that stall: ``mpirun -n N python -m tests.stalls --place before-poll [--mutant NAME]``.

Rank 0 prints one line: ``STALLS ok``, ``STALLS wrong ...`` or ``STALLS hang ...``. Shipped kernels must be ok wherever they
stall; mutants are the negative control and must not be.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import fcomm
from fcomm import checks, source
from fcomm.errors import HangError
from fcomm.protocols import Protocol, protocol
from fcomm.verify import mutants
from fcomm.verify.mutants import Edit, Mutant

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PLACES: dict[str, list[dict[str, str]]] = TABLE["places"]
NEGATIVE: dict[str, str] = TABLE["negative"]
COUNTS = (64, 4096, 257, 2048, 16, 1001)
"""Elements of successive calls: a large one, then smaller ones, then a large one again."""
BURST = 16
"""Calls that are started before the first one is looked at."""
FEW = (
    "one_shot.ll", "one_shot.ll128", "one_shot.lamport", "one_shot.lamport16", "one_shot.flag", "two_shot.ll", "two_shot.lamport16",
    "two_shot.flag", "all_gather.ll16", "reduce_scatter.ll", "custom_ar_v2.push", "lamport_fp",
)  # fmt: skip
"""Each encoding, each algorithm: each kernel is compiled anew for each place."""


def patched(place: str, mutant: str | None, rounds: int, root: Path) -> Mutant:
    """Writes the kernels with a stall at that place, and the mutant's fault if there is one; returns the mutant."""
    known = {m.name: m for m in mutants.load()}
    base = known[mutant] if mutant else known["one-copy"]
    fault = base.edits if mutant else ()
    stalls = [Edit(**e) for e in (TABLE["stall"], *PLACES[place])]
    edits = [Edit(e.file, e.old, e.new.replace("STALL_ROUNDS", str(rounds))) for e in stalls]
    shutil.copytree(source.kernel_root(), root)
    for edit in (*fault, *edits):
        file = root / edit.file
        text = file.read_text()
        if mutant and edit in edits[1:] and edit.old not in text:
            continue  # the fault took the place away
        assert text.count(edit.old) == 1, f"{edit.old!r} stands {text.count(edit.old)} times in {edit.file}"
        file.write_text(text.replace(edit.old, edit.new))
    return base


def background(comm: fcomm.Communicator) -> Any:
    """Memory traffic on another stream of every rank, as long as the returned context lasts (GPUs only)."""
    if comm.backend.name != "cuda":
        return nullcontext()
    import cupy

    class Traffic:
        def __enter__(self) -> None:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                a, b = cupy.zeros(1 << 26, cupy.uint8), cupy.zeros(1 << 26, cupy.uint8)
                for _ in range(4000):
                    a[...] = b

        def __exit__(self, *_: object) -> None:
            self._stream.synchronize()

    return Traffic()


def run(comm: fcomm.Communicator, protocols: list[Protocol], calls: int) -> str:
    """Verified calls of these protocols in turn; what became of them on this rank.

    They are started in bursts and looked at behind each, so that a rank that does not stall gets as far ahead as it can.
    """
    n = comm.world_size
    for burst in range(0, calls, BURST):
        made: list[tuple[int, Protocol, Any, Any, Any, Any]] = []
        for k in range(burst, min(burst + BURST, calls)):
            p = protocols[k % len(protocols)]
            count = COUNTS[k // len(protocols) % len(COUNTS)]
            count = count // 4 * 4 if p.algorithm.granule > 1 else count
            if p.collective == "reduce_scatter":
                count *= n
            xs = [checks.inputs((91, k), r, n, count, "float32") for r in range(n)]
            want = np.asarray(checks.expected(p, xs, comm.rank))
            out = comm.empty(want.size, "float32")
            if p.collective == "all_gather":
                out = out.reshape(n, count)
            made.append((k, p, comm.from_host(xs[comm.rank]), out, want, getattr(comm, p.collective)))
        for k, p, x, out, _, call in made:
            try:
                call(x, out, protocol=p.name)
            except HangError as error:
                return f"hang in call {k} of {p.name}: {error}"
        for k, p, _, out, want, _ in made:
            got = comm.to_host(out).reshape(-1)
            try:
                comm.check()
            except HangError as error:
                return f"hang by call {k} of {p.name}: {error}"
            wrong = checks.wrong_elements(got, want.reshape(-1))
            if wrong:
                return f"wrong: {wrong} of {want.size} elements in call {k} of {p.name}"
    return "ok"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--place", choices=PLACES, required=True)
    parser.add_argument("--mutant", choices=NEGATIVE)
    parser.add_argument("--protocol", default="all", help="names, few (each encoding, each algorithm) or all")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2000, help="readings of the clock that a stall takes")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds until a wait is given up")
    parser.add_argument("--traffic", action="store_true", help="memory traffic in the background")
    options = parser.parse_args()
    mpi = MPI.COMM_WORLD
    folder = tempfile.mkdtemp(prefix="fcomm-stalls-") if mpi.rank == 0 else None
    root = Path(mpi.bcast(folder)) / "kernels_cu"
    base = patched(options.place, options.mutant, options.rounds, root) if mpi.rank == 0 else None
    base = mpi.bcast(base)
    setattr(source, "kernel_root", lambda: root)  # noqa: B010
    try:
        with fcomm.Communicator(mpi, backend=options.backend, max_bytes=1 << 16, timeout_s=options.timeout) as comm:
            if options.mutant:
                wanted = base.case.protocols
            elif options.protocol == "all":
                wanted = [p for p in fcomm.protocols().values() if p.algorithm.forms is None]
            elif options.protocol == "few":
                wanted = [protocol(name) for name in FEW]
            else:
                wanted = [protocol(name) for name in options.protocol.split(",")]
            wanted = [p for p in wanted if p.refusal(None, mpi.size, comm.capabilities) is None]
            with background(comm) if options.traffic else nullcontext():
                said = mpi.allgather(run(comm, wanted, options.calls))
            if mpi.rank == 0:
                bad = [s for s in said if s != "ok"]
                print(f"STALLS {bad[0] if bad else 'ok'}", flush=True)
    finally:
        mpi.Barrier()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
