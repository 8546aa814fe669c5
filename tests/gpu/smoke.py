"""First light: ``python -m experiments.mps -- mpirun -n 8 python3 -m tests.gpu.smoke [--sizes 2048 65536]``.

Says what the ranks find, checks a few calls of every protocol, then prints latencies of all kinds beside the floor.
"""

from __future__ import annotations

import argparse
import faulthandler
from dataclasses import replace

import numpy as np
from mpi4py import MPI

import fcomm
from fcomm import checks, measure, measure_cuda
from tests import ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2048, 16384, 65536, 131072, 262144, 524288])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--modes", nargs="*", default=["graph", "sandwich", "isolated", "host", "prepared"])
    options = parser.parse_args()
    faulthandler.dump_traceback_later(170, exit=True)
    mpi = MPI.COMM_WORLD
    with fcomm.Communicator(mpi, backend="cuda", timeout_s=10) as comm:
        if comm.rank == 0:
            print(comm.backend.describe(), f"slab {comm.slab_bytes >> 20} MiB", flush=True)
        for p, dtype in ranks.reducing(comm):
            for k, count in enumerate((1, 1001, 70000)):
                ranks.reduce_once(comm, p.name, dtype, count, (60, k))
        if comm.rank == 0:
            print("results exact for every protocol and dtype", flush=True)
            print(
                "   n   bytes protocol                 grid " + "".join(f"{m:>10}" for m in options.modes), flush=True
            )
        for nbytes in options.sizes:
            own = checks.inputs((61, nbytes), comm.rank, comm.world_size, nbytes // 2, "bfloat16")
            x, out = comm.from_host(own), comm.empty(nbytes // 2, "bfloat16")
            for p, dtype in ranks.reducing(comm):
                if dtype != "bfloat16":
                    continue
                case = measure.Case("all_reduce", p.name, dtype, nbytes, comm.world_size)
                row = []
                for name in options.modes:
                    mode = measure_cuda.MODES[name]
                    launch = mode.bind(comm, replace(case, mode=name), x, out)
                    every = measure.gather(comm.mpi, mode.sample(comm, launch, options.iterations))
                    row.append("" if every is None else f"{np.median(every.max(axis=1)) / 1e3:10.2f}")
                blocks, threads = measure.grid(comm, case, x, out)
                if comm.rank == 0:
                    print(
                        f"{comm.world_size:4d} {nbytes:7d} {p.name:20s} {blocks:4d}x{threads:<4d}" + "".join(row),
                        flush=True,
                    )
        measure_cuda.close(comm)
    if mpi.rank == 0:
        print("smoke: done", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
