"""Figures of the gate: predicted over published latency, by GPU, rank count and system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from experiments.plots import COLOURS, MARKERS, _dress, _size_ticks, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.validate import Outcome


def over_published(outcome: Outcome) -> Figure:
    """Predicted / published over message size: a row for each held-out rank count, a column for each GPU; grey within the threshold."""
    import pandas as pd

    f = pd.concat([outcome.calibration, outcome.held_out])
    gpus, counts = list(outcome.links), sorted(int(n) for n in f["ranks"].unique())
    figure = picture()(figsize=(3.3 * len(gpus), 2.7 * len(counts) + 1.0), dpi=150, layout="constrained")
    axes = figure.subplots(len(counts), len(gpus), sharex=True, sharey=True, squeeze=False)
    most = outcome.protocol.thresholds.median_error_at_most
    for i, n in enumerate(counts):
        for j, gpu in enumerate(gpus):
            axis = axes[i, j]
            axis.axhspan(1 - most, 1 + most, color="0.9", linewidth=0)
            axis.axhline(1.0, color="0.5", linewidth=0.8)
            for k, system in enumerate(outcome.protocol.systems_held_out):
                of_it = f[(f["gpu"] == gpu) & (f["ranks"] == n) & (f["system"] == system)].sort_values("nbytes")
                if len(of_it):
                    axis.plot(
                        of_it["nbytes"], of_it["predicted_us"] / of_it["published_us"], label=system, color=COLOURS[k],
                        marker=MARKERS[k], markersize=3.5, linewidth=1.0,
                    )  # fmt: skip
            _dress(axis)
            axis.set_yscale("log", base=2)
            axis.set_ylim(0.5, 2.0)
            ticks = [0.5, 0.7, 1.0, 1.4, 2.0]
            axis.set_yticks(ticks, [str(t) for t in ticks])
            axis.minorticks_off()
            what = "calibrated" if n in outcome.protocol.calibration_ranks else "held out"
            axis.set_title(f"{gpu}, {n} ranks ({what})", fontsize=9)
        axes[i, 0].set_ylabel("predicted / published")
    _size_ticks(axes.flat[0], sorted(int(b) for b in np.unique(f["nbytes"])))
    handles, labels = axes[-1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle("PREDICTED all-reduce latency over published latency", fontsize=11)
    return figure
