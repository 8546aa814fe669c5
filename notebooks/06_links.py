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
# # Who wins on which link
#
# Ranks that share a GPU have no link between them, so `mpirun -n 4 python -m experiments.links map` holds each store to a peer back as
# long as a link of some latency and bandwidth would. This notebook looks at such a map. [docs/links.md](../docs/links.md) says what may be
# concluded: about push protocols whose ranks arrive together, and about no link that was not emulated.

# %%
from experiments import lab, link_maps

frame, facts = lab.link_map()
print(link_maps.caption(frame, facts))

# %% [markdown]
# The fastest protocol of each cell, the next one and how far behind it is. `least_margin` is the distance of the near ends of their
# 95 % intervals: where it is negative, the winner is not sure.

# %%
best = link_maps.winners(frame)
best[[*link_maps.CELL, "protocol", "latency_us", "second", "margin", "least_margin", "sure", "masked"]].round(3)

# %% [markdown]
# How many cells each protocol wins, and how many of them for sure:

# %%
best.groupby("protocol")["sure"].agg(cells="size", sure="sum").sort_values("cells", ascending=False)

# %%
counts = sorted(set(frame["ranks"].tolist()))
lab.explore(lambda ranks: link_maps.winner_map(frame, facts, ranks), ranks=counts)

# %%
link_maps.winner_map(frame, facts, counts[0])

# %% [markdown]
# From which size on two hops of shards are faster than one hop of everything. More latency moves it up, less bandwidth down.

# %%
link_maps.crossover_map(frame, facts)

# %% [markdown]
# One size, over the latency. A line's slope is the number of dependent hops: 1 for one-shot, 2 for two-shot; its height is launch, wire
# and the rest. Where the slope is another one, so is the protocol.

# %%
sizes = sorted(set(frame["nbytes"].tolist()))
lab.explore(lambda ranks, nbytes: link_maps.slices(frame, facts, ranks, nbytes), ranks=counts, nbytes=sizes)

# %%
link_maps.slices(frame, facts, counts[0], sizes[len(sizes) // 2])

# %% [markdown]
# What the emulation's own instructions take, in microseconds: differences below this are not about links.

# %%
link_maps.emulation_cost(frame).round(3)
