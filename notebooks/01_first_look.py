# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first look at a run
#
# A run is a folder of records: what was planned, every time of every call and rank, and where it was taken.
# `lab.runs()` gives the runs on one shared H200 that come with the repository; `lab.runs("../results/...")` one of yours.

# %%
from experiments import frames, lab, plots

run = lab.runs()[0]
run.taken_on

# %% [markdown]
# **Where were these numbers taken?** Before any number: which machine, how many GPUs, shared or not, an emulation or not.
# Ranks that share one GPU have no link between them, and times of the cpu backend are those of an emulation.

# %%
run.provenance["devices"]

# %% [markdown]
# What was asked for, and what became of it: measured, dropped for lack of time, refused, wrong.

# %%
run.cases.groupby(["collective", "dependent_launch", "ranks", "status"]).size().to_frame("cases")

# %% [markdown]
# ## One case
#
# A time belongs to one rank and one call. A call is over when its slowest rank is, so first the maximum over ranks, then the
# median over calls.

# %%
best = frames.fastest(frames.measured(run), frames.OURS).iloc[0]
best[["collective", "protocol", "ranks", "nbytes", "latency_us", "low_us", "high_us"]].to_frame("the first case")

# %%
times = run.samples[run.samples["case"] == best["case"]].groupby(["launch", "iteration"])["nanoseconds"].max() / 1000
times.describe().to_frame("slowest rank (µs)")

# %% [markdown]
# The same by hand: it is the record's own number.

# %%
by_hand_us = float(times.median())
by_hand_us, float(best["latency_us"])

# %% [markdown]
# ## All of them
#
# `frames.measured` has a row for each case with its interval, its family, and whether it is masked: so large a share of the
# time goes into moving bytes through the L2 of the shared GPU that the figure is about the L2 and not about a protocol.

# %%
measured = frames.measured(run)
measured[["protocol", "ranks", "nbytes", "latency_us", "low_us", "high_us", "family", "masked"]].head(8)

# %%
plots.side_latency(run, collective=measured["collective"].iloc[0])
