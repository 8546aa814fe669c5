"""The model's form on data that nobody here took: ``python -m experiments.published``.

Fits the form of `fcomm.cost_model`, with the same code, to published latencies of other libraries on GPUs with a link of their own,
for each system and GPU, and predicts message sizes that were left out. Beside it a fit of two terms, a + b x bytes, for each rank
count.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import fitting
from experiments.fit import block_of, replace_block
from experiments.fitting import Floats, Table, fit, predictions
from experiments.judging import summary
from fcomm import bootstrap
from fcomm.cli import Parser
from fcomm.errors import RecordError
from fcomm.grids import default_shape
from fcomm.protocols import GpuShare, protocols

if TYPE_CHECKING:
    import pandas as pd

DATA = Path(__file__).parent / "data" / "published_latency.csv"
SIZES = (1 << 10, 4 << 20)
MAX_BYTES = 64 << 20
"""Of the communicators that the counts are made for: these systems do not split messages of 4 MiB."""
SMS = {"h": 132, "b": 148, "g": 152}
"""SMs by the first letter of the GPU's name."""

V1_UP_TO = {2: 512 << 10, 4: 512 << 10, 8: 256 << 10}
"""Largest message in bytes, by rank count, of the barrier one-shot of vLLM and of the older SGLang; beyond, their two-shot."""


STEP, FLAT = 1.45, 1.3
"""A switch: times rise by more than the first for twice the bytes, and by less than the second behind that."""
MULTICAST_FROM = {8: 512 << 10, 7: 1 << 20}
"""Message in bytes from which custom AR v2's two-shot uses multicast on Hopper under graphs, by rank count."""

Switches = Mapping[int, float]


def switches(frame: pd.DataFrame) -> dict[int, float]:
    """The size in bytes at which a system of two algorithms goes over, by rank count: where its curve has a step, else as known.

    Only of vLLM and the older SGLang: what they do beyond is not published for Blackwell.
    """
    found: dict[int, float] = {}
    if frame["system"].iloc[0] not in ("vllm", "sglang"):
        return found
    for n in np.unique(frame["ranks"].to_numpy(int)):
        of_n = frame[frame["ranks"] == n].sort_values("bytes")
        x, y = np.log2(of_n["bytes"].to_numpy(float)), of_n["latency_us"].to_numpy(float)
        rises = (y[1:] / y[:-1]) ** (1 / np.diff(x))
        k = int(np.argmax(rises))
        step = rises[k] > STEP and k + 1 < len(rises) and rises[k + 1] < FLAT
        found[int(n)] = float(2 ** ((x[k] + x[k + 1]) / 2)) if step else float(V1_UP_TO.get(int(n), 0))
    return found


def counted_as(system: str, version: str, collective: str, nbytes: int, ranks: int, family: str, cuts: Switches) -> str:
    """The protocol of the registry whose counts describe what a system runs at a size.

    Custom AR v2 by its own table; its multicast form, and NCCL's ring, as a two-phase exchange whose hops grow with the peers.
    """
    if collective == "all_gather":
        return "barrier.all_gather"
    if system == "sglang" and version >= "0.5.14":
        if family == "hopper" and nbytes >= MULTICAST_FROM.get(ranks, SIZES[1] + 1):
            return "barrier.two_shot"
        return (
            protocols()["custom_ar_v2"]
            .at(nbytes, ranks, GpuShare("10.0" if family == "blackwell" else "9.0", 1, 1))
            .name
        )
    if system in ("sglang", "vllm"):
        return "barrier.one_shot" if nbytes <= cuts.get(ranks, 0) else "barrier.two_shot"
    return "lamport_fp" if system == "trtllm" else "barrier.two_shot"


def read(path: Path = DATA) -> pd.DataFrame:
    """One row for each system, GPU, collective, rank count and size: graph mode, NCCL in its own; duplicates averaged."""
    import pandas as pd

    try:
        frame = pd.read_csv(path)
        frame = frame[frame["bytes"].between(*SIZES) & ((frame["mode"] == "graph") | (frame["system"] == "nccl"))]
        keys = ["system", "version", "gpu", "collective", "ranks", "bytes"]
        frame = frame.groupby(keys)["latency_us"].mean().reset_index()
    except OSError as error:
        raise RecordError(f"cannot read {path} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise RecordError(
            f"{path} is no table of published latencies: a CSV with columns system, version, gpu, collective, ranks, bytes, mode and "
            "latency_us"
        ) from None
    if frame.empty:
        raise RecordError(f"{path} has no latencies in graph mode of {SIZES[0]} to {SIZES[1]} bytes")
    odd = ~(np.isfinite(frame["latency_us"]) & (frame["latency_us"] > 0))
    if odd.any():
        raise RecordError(f"{path} has a latency that is not positive")
    return frame


def table_of(frame: pd.DataFrame, cuts: Switches) -> Table:
    """The rows of one system and GPU, as a fit reads them."""
    first = frame.iloc[0]
    gpu_name = str(first["gpu"])
    family = "hopper" if gpu_name.startswith("h") else "blackwell"
    sms = SMS[gpu_name[0]]
    gpu = GpuShare("9.0" if family == "hopper" else "10.0", sms, sms)
    records = []
    for system, version, collective, n, nbytes, us in frame[
        ["system", "version", "collective", "ranks", "bytes", "latency_us"]
    ].itertuples(index=False):
        name = counted_as(system, version, collective, int(nbytes), int(n), family, cuts)
        shape = default_shape(protocols()[name], int(nbytes), int(n), gpu)
        records.append((name, "none", int(n), int(nbytes), "bfloat16", *shape, collective, True, False, float(us)))
    import pandas as pd

    columns = [*fitting._KEY, "collective", "baseline", "searched", "latency_us"]
    f = pd.DataFrame(records, columns=columns)
    us = f["latency_us"].to_numpy(float)
    machine = {
        "backend": "cuda",
        "device": gpu_name,
        "compute_capability": gpu.architecture,
        "sms": sms,
        "shared_gpus": 0,
    }
    return Table(
        f, us[:, None], np.stack([us, us], 1), [us[k : k + 1] for k in range(len(us))], 1, machine, "graph", gpu_name, (), "",
        max_bytes=MAX_BYTES,
    )  # fmt: skip


def left_out(frame: pd.DataFrame) -> tuple[Floats, Floats]:
    """Relative errors at sizes left out: of the form, and of a + b x bytes (for each rank count, on relative error).

    frame : one system and GPU. A switch between algorithms is looked for in what was not left out.
    """
    form, plain = np.full(len(frame), np.nan), np.full(len(frame), np.nan)
    us, sizes, ranks = (frame[c].to_numpy(float) for c in ("latency_us", "bytes", "ranks"))
    for size in np.unique(sizes):
        out = sizes == size
        cuts = switches(frame[~out])
        train, f = table_of(frame[~out], cuts), table_of(frame[out], cuts).frame
        model, _ = fit(train)
        # An algorithm that ran at this size alone has no prices: then those of the nearest size's.
        names = [
            p if p in model.own else _nearest(train, int(n), int(size))
            for p, n in zip(f["protocol"], f["ranks"], strict=True)
        ]
        form[out] = predictions(f.assign(protocol=names), model)
        for k in np.flatnonzero(out):
            same = ~out & (ranks == ranks[k])
            x, y = sizes[same], us[same]
            (a, b), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(len(y)), rcond=None)
            plain[k] = a + b * size
    return np.abs(form / us - 1), np.abs(plain / us - 1)


def _nearest(train: Table, n: int, size: int) -> str:
    f = train.frame[train.frame["ranks"] == n]
    return str(f.loc[(np.log(f["nbytes"].astype(float)) - np.log(size)).abs().idxmin(), "protocol"])


def evaluate(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each system, collective, GPU and rank count: errors of the form and of the two terms at sizes left out."""
    import pandas as pd

    found: list[dict[str, Any]] = []
    for (system, version, collective, gpu), of_it in frame.groupby(["system", "version", "collective", "gpu"]):
        form, plain = left_out(of_it)
        ranks, sizes = of_it["ranks"].to_numpy(int), of_it["bytes"].to_numpy()
        between = (sizes > sizes.min()) & (sizes < sizes.max())
        for n in np.unique(ranks):
            a, b = summary(form[ranks == n]), summary(plain[ranks == n])
            found.append(
                {"system": f"{system} {version}", "collective": collective, "gpu": gpu, "ranks": n,
                 "median": a["median"], "p95": a["p95"], "two_term_median": b["median"], "two_term_p95": b["p95"],
                 "errors": form[ranks == n], "between": form[(ranks == n) & between], "two_term_errors": plain[ranks == n]}
            )  # fmt: skip
    return pd.DataFrame(found)


MEDIAN, P95 = 0.05, 0.15


def report(found: pd.DataFrame) -> str:
    """By system, over GPUs and rank counts; as Markdown."""
    lines = [
        "| system | collective | curves | median | p95 | p95 between the ends | two terms: median | p95 | curves within 5 % / 15 % | curves below two terms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (system, collective), of_it in [*found.groupby(["system", "collective"]), (("all", ""), found)]:
        a, b = (
            summary(np.concatenate(of_it["errors"].tolist())),
            summary(np.concatenate(of_it["two_term_errors"].tolist())),
        )
        inner = summary(np.concatenate(of_it["between"].tolist()))
        within = ((of_it["median"] <= MEDIAN) & (of_it["p95"] <= P95)).sum()
        below = (of_it["median"] < of_it["two_term_median"]).sum()
        lines.append(
            f"| {system} | {collective} | {len(of_it)} | {a['median']:.1%} | {a['p95']:.1%} | {inner['p95']:.1%} | {b['median']:.1%} | {b['p95']:.1%} | "
            f"{within} | {below} |"
        )
    worst = found.sort_values("p95", ascending=False).head(8)
    lines += [
        "",
        "Largest misses:",
        "",
        "| system | collective | GPU | ranks | median | p95 |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.system} | {r.collective} | {r.gpu} | {r.ranks} | {r.median:.1%} | {r.p95:.1%} |"
        for r in worst.itertuples()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = Parser(prog="python -m experiments.published", description=(__doc__ or "").split(":")[0], allow_abbrev=False)
    assert isinstance(p, argparse.ArgumentParser)
    p.add_argument(
        "--data", type=Path, default=DATA, metavar="CSV", help="published latencies (the copy in the repository)"
    )
    p.add_argument("--docs", type=Path, metavar="DIR", help="also put the tables into DIR/cost-model.md")
    args = p.parse_args(argv)
    frame = read(args.data)
    if args.docs is not None:
        block_of(args.docs / "cost-model.md", "published")
    text = report(evaluate(frame))
    print(text)
    if args.docs is not None:
        replace_block(args.docs / "cost-model.md", "published", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(bootstrap.run(main, alone=True))
