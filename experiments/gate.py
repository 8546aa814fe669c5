"""The gate that predictions for GPUs with links of their own have to pass: its protocol as data, and its metrics.

What is compared, and from which value on it counts as passed, is in ``experiments/data/validation/protocol.json`` and was
committed before the first comparison; `docs/validation.md` says why each choice is as it is. ``python -m experiments.validate``
runs it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.frames import grouped
from experiments.tables import rows
from fcomm.errors import RecordError

if TYPE_CHECKING:
    import pandas as pd

FOLDER = Path(__file__).parent / "data" / "validation"
PROTOCOL = FOLDER / "protocol.json"
PUBLISHED = Path(__file__).parent / "data" / "published_latency.csv"

CELLS = ("gpu", "ranks", "nbytes", "system", "published_us", "predicted_us")
"""Columns of the cells that are compared: one row for each GPU, rank count, message size and system."""
GROUP = ["gpu", "ranks", "nbytes"]
"""What the order of the systems is looked at within."""


@dataclass(frozen=True)
class Thresholds:
    """From which value on the gate is passed; all three are needed."""

    median_error_at_most: float
    """Of |predicted / published - 1| over all held-out cells."""
    kendall_tau_at_least: float
    """Mean over (GPU, ranks, size) of Kendall's tau-b between predicted and published latencies of the systems."""
    difference_counts_over: float
    """A pair of systems counts where the slower one takes longer by more than this share, as published."""
    signs_right_at_least: float
    """Share of those pairs, over all (GPU, ranks, size), of which the faster one is predicted; a predicted tie is wrong."""


@dataclass(frozen=True)
class Protocol:
    """What is calibrated on what, and what is predicted."""

    gpus: tuple[str, ...]
    systems: Mapping[str, tuple[str, str]]
    """Columns `system` and `version` of the published table, by our short name."""
    least_bytes: int
    most_bytes: int
    calibration_systems: tuple[str, ...]
    calibration_ranks: tuple[int, ...]
    systems_held_out: tuple[str, ...]
    ranks_held_out: tuple[int, ...]
    thresholds: Thresholds


def protocol(path: Path = PROTOCOL) -> Protocol:
    """Reads the protocol; `RecordError` where the file is not one."""
    try:
        body = json.loads(path.read_text())
        return Protocol(
            tuple(body["gpus"]), {k: (str(v[0]), str(v[1])) for k, v in body["systems"].items()},
            int(body["least_bytes"]), int(body["most_bytes"]),
            tuple(body["calibration"]["systems"]), tuple(body["calibration"]["ranks"]),
            tuple(body["held_out"]["systems"]), tuple(body["held_out"]["ranks"]), Thresholds(**body["thresholds"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not the protocol of a validation ({type(error).__name__})") from None


def published(which: Protocol, path: Path = PUBLISHED) -> pd.DataFrame:
    """Published latencies within the protocol's GPUs, systems and sizes, all rank counts: gpu, ranks, nbytes, system, published_us.

    All-reduce under CUDA graphs; duplicates averaged. `RecordError` for another table, and where a latency is not positive.
    """
    import pandas as pd

    names = {f"{system} {version}": k for k, (system, version) in which.systems.items()}
    try:
        f = pd.read_csv(path, dtype={"version": str})
        f = f[(f["collective"] == "all_reduce") & (f["mode"] == "graph") & f["gpu"].isin(which.gpus)]
        f = f[f["bytes"].between(which.least_bytes, which.most_bytes)]
        f = f.assign(system=(f["system"] + " " + f["version"]).map(names))
        f = f.dropna(subset=["system"]).rename(columns={"bytes": "nbytes", "latency_us": "published_us"})
        f = f.groupby([*GROUP, "system"])["published_us"].mean().reset_index()
        good = np.isfinite(f["published_us"].to_numpy(float)) & (f["published_us"].to_numpy(float) > 0)
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"{path} is not the table of published latencies ({type(error).__name__})") from None
    if not good.all():
        raise RecordError(f"{path} has a latency that is not positive")
    return f


def errors(cells: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.float64]]:
    """|predicted / published - 1| of each cell."""
    return np.abs(cells["predicted_us"].to_numpy(float) / cells["published_us"].to_numpy(float) - 1)


def orders(cells: pd.DataFrame) -> pd.DataFrame:
    """Kendall's tau-b of the systems' order, one row for each (GPU, ranks, size) with two systems or more: `GROUP`, tau.

    Where all are predicted, or published, alike there is no order to be right about: tau is 0.
    """
    import pandas as pd
    from scipy.stats import kendalltau

    found = []
    for key, of_it in grouped(cells, GROUP):
        if len(of_it) > 1:
            tau = float(kendalltau(of_it["predicted_us"], of_it["published_us"], variant="b").statistic)
            found.append((*key, 0.0 if math.isnan(tau) else tau))
    return pd.DataFrame(found, columns=[*GROUP, "tau"])


def signs(cells: pd.DataFrame, over: float) -> pd.DataFrame:
    """Pairs of systems whose published latencies differ by more than that share: `GROUP`, faster, slower, right.

    right : the faster one is predicted to be faster; a tie is not.
    """
    import pandas as pd

    found = []
    for key, of_it in grouped(cells, GROUP):
        for fast, slow in itertools.combinations(rows(of_it.sort_values(["published_us", "system"])), 2):
            if slow["published_us"] > (1 + over) * fast["published_us"]:
                right = bool(fast["predicted_us"] < slow["predicted_us"])
                found.append((*key, fast["system"], slow["system"], right))
    return pd.DataFrame(found, columns=[*GROUP, "faster", "slower", "right"])


@dataclass(frozen=True)
class Verdict:
    """What the gate found."""

    cells: int
    median_error: float
    kendall_tau: float
    orders: int
    """(GPU, ranks, size) that tau is the mean over."""
    signs_right: float
    pairs: int
    thresholds: Thresholds

    @property
    def misses(self) -> tuple[str, ...]:
        """What was not reached, in words; empty if the gate is passed. Nothing compared is nothing passed."""
        return tuple(self._misses())

    @property
    def passed(self) -> bool:
        return not self.misses

    def _misses(self) -> Iterator[str]:
        t = self.thresholds
        if not self.median_error <= t.median_error_at_most:
            yield f"the median error is {self.median_error:.1%}, at most {t.median_error_at_most:.0%} was asked for"
        if not self.kendall_tau >= t.kendall_tau_at_least:
            yield f"Kendall's tau is {self.kendall_tau:.2f}, at least {t.kendall_tau_at_least:.2f}"
        if not self.signs_right >= t.signs_right_at_least:
            yield (
                f"{self.signs_right:.1%} of the differences over {t.difference_counts_over:.0%} have the right sign, "
                f"at least {t.signs_right_at_least:.0%}"
            )

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        if self.passed:
            return (
                f"the gate is passed: median error {self.median_error:.1%}, Kendall's tau {self.kendall_tau:.2f}, "
                f"{self.signs_right:.1%} of the signs right"
            )
        return f"the gate is not passed: {'; '.join(self.misses)}"


def judge(cells: pd.DataFrame, thresholds: Thresholds) -> Verdict:
    """Applies the gate to held-out cells. cells : see `CELLS`."""
    taus, pairs = orders(cells), signs(cells, thresholds.difference_counts_over)
    return Verdict(
        len(cells), float(np.median(errors(cells))) if len(cells) else math.nan,
        float(taus["tau"].mean()) if len(taus) else math.nan, len(taus),
        float(pairs["right"].mean()) if len(pairs) else math.nan, len(pairs), thresholds,
    )  # fmt: skip
