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
# # The paper's latency figures
#
# Ours against custom AR v2, the fastest all-reduce that the paper knows, in three ways: as its authors set it, with its launch
# shape tuned, and the best of its own algorithms at each size. Both sides have the same launch feature.

# %%
from experiments import claims, frames, lab

runs = lab.runs()

# %% [markdown]
# ## Latency over size

# %%
lab.figure(runs, "all-reduce-latency-late")

# %%
lab.figure(runs, "all-reduce-latency-none")

# %% [markdown]
# ## The change in per cent, wins and losses
#
# A ratio at each size, with the interval of the ratio. Grey points are not told apart; hollow points are about the L2 and not
# counted.

# %%
lab.figure(runs, "all-reduce-reduction-none")

# %%
lab.figure(runs, "all-reduce-reduction-as-set")

# %% [markdown]
# The same as numbers: one row for each size and rank count.

# %%
ratios = frames.ratios(runs[0], frames.OURS, frames.V2_FASTEST)
frames.brief(ratios)

# %% [markdown]
# ## All-gather

# %%
lab.figure(runs, "all-gather-reduction-none")

# %% [markdown]
# ## The paper's numbers beside ours

# %%
found = claims.claims(runs)
frames.brief(found)

# %% [markdown]
# What the gain would mean for the time per token. This is arithmetic about the paper's share, not a measurement.

# %%
headline = claims.headline(found)
print(claims.amdahl_line(found))

# %% [markdown]
# ## Who wins where, and what each idea is worth

# %%
lab.figure(runs, "best-encodings")

# %%
lab.figure(runs, "ablation-encodings")

# %%
lab.figure(runs, "ablation-shots")

# %%
lab.figure(runs, "ablation-launch")

# %%
lab.figure(runs, "floor")
