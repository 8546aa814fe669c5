# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What a choice costs: regret
#
# No protocol is the fastest everywhere. Regret is the time of the chosen one over that of the best, minus 1. The best of each
# point is found on one half of the launches and scored on the other half, so that it is not lucky by definition.

# %%
from experiments import frames, lab, plots

run = lab.runs()[0]

# %%
frame = frames.first_kind(run, "all_reduce")
regret = frames.regret(run, frame[frame["dependent_launch"] == plots.headline_launch(frame)])

# %% [markdown]
# The selector beside what one could do instead: always one protocol, one size threshold, custom AR v2's table.

# %%
summary = regret.groupby("policy")["regret"].describe(percentiles=[0.5, 0.95])
(100 * summary[["50%", "95%", "max"]]).round(1).sort_values("95%").head(10)

# %%
lab.figure([run], "ablation-selector")

# %% [markdown]
# Where the selector is worst:

# %%
regret[regret["policy"] == "the selector"].sort_values("regret", ascending=False).head(8)
