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
# # What a choice costs: regret
#
# No protocol is the fastest everywhere, so something has to choose. Regret is the time of the chosen one over that of the best,
# minus 1. The best of each point is found on one half of the launches and scored on the other half, so that it is not lucky by
# definition; and the model chooses at sizes that it was not fitted to.

# %%
from experiments import fit, fit_plots, lab

outcome = fit.fit_runs(lab.runs()[:1], draws=8)

# %% [markdown]
# The model beside what one could do instead: always one protocol, one size threshold, a lookup of the nearest size, custom AR
# v2's table (among its own forms).

# %%
choices = outcome.by_sizes.choices
summary = 100 * choices.groupby(["collective", "launch", "policy"])["regret"].quantile([0.5, 0.95, 1]).unstack()
summary.round(1)

# %%
fit_plots.regret(outcome, outcome.by_sizes)

# %% [markdown]
# Where the model's choice is worst:

# %%
of_model = choices[choices["policy"] == "the model"]
of_model.nlargest(8, "regret")[["launch", "ranks", "nbytes", "chosen", "best", "regret"]].round(3)

# %% [markdown]
# What it chooses, over size and ranks; pale rank counts were not measured.

# %%
collective, launch = outcome.table.frame[["collective", "launch"]].iloc[0]
fit_plots.choice_map(outcome, collective, launch)
