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
# # Encodings and the cost model: what each one costs
#
# An encoding says how a receiver knows that a piece of a message is there. Each trades bytes on the wire, comparisons, and
# stores that make a slot usable again.

# %%
from experiments import counted, fit, fit_plots, frames, lab, plots

run = lab.runs()[0]

# %% [markdown]
# ## What can be counted
#
# Rounds, wire bytes, stores, polls, re-armed bytes: the same on any machine. (`python -m experiments.counted` adds registers and
# the width of each access from the machine code.)

# %%
counts = counted.counted(sizes=[2048, 65536], ranks=[8], arch=None)
counts.drop(columns=["collective", "form", "evidence_bytes", "registers"]).round(3)

# %% [markdown]
# ## One size, one rank count
#
# Move the sliders: every protocol at that point, the fastest first.

# %%
sizes, ranks = (sorted(frames.measured(run)[column].unique().tolist()) for column in ("nbytes", "ranks"))
lab.explore(lambda nbytes, ranks: plots.at_point(run, nbytes, ranks), nbytes=sizes, ranks=ranks)

# %% [markdown]
# One choice, as a picture that stays:

# %%
plots.at_point(run, sizes[0], ranks[-1])

# %%
plots.at_point(run, sizes[-1], ranks[0])

# %% [markdown]
# ## One encoding at a time
#
# The time with one encoding alone over the time with all of them: what is lost without the others.

# %%
lab.figure([run], "ablation-encodings")

# %%
lab.figure([run], "best-encodings")

# %% [markdown]
# ## The cost model
#
# The same counts, each with a price that was fitted to this run: launch, hops, evidence, wire, re-arming. The selector compares
# these sums. Move the sliders and see which term decides.

# %%
outcome = fit.fit_runs([run], judge=False)
launch = outcome.table.frame["launch"].iloc[0]
lab.explore(lambda nbytes, ranks: fit_plots.terms(outcome.model, nbytes, ranks, launch), nbytes=sizes, ranks=ranks)

# %% [markdown]
# A small message among many ranks, and a large one among few:

# %%
fit_plots.terms(outcome.model, sizes[0], ranks[-1], launch)

# %%
fit_plots.terms(outcome.model, sizes[-1], ranks[0], launch)

# %% [markdown]
# How near the model comes: points are measured, lines are the model's.

# %%
fit_plots.curves(outcome, "all_reduce", launch)
