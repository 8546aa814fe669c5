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
# # Your own encoding, in eight steps
#
# From one store to a curve in the sweep, on this machine, with or without a GPU. The example is `sum16`: a 16-byte cell whose
# last word is the epoch *plus the sum of the payload*. A cell of which only a part has arrived does not add up, so it shows tearing by
# itself - or so it seems until step 6.

# %%
from experiments import lab, plots
from fcomm import protocols, source

work = lab.workplace()

# %% [markdown]
# ## 1. What an encoding must say
#
# `ll16` is twenty lines: what a cell carries, how it is put, when it is ready. `kernels_cu/wire/base.cuh` lists everything that a
# wire may say, and why slots may be used again.

# %%
print((source.kernel_root() / "wire" / "ll16.cuh").read_text())

# %% [markdown]
# ## 2. One store
#
# `put` is the store: payload and evidence in one 16-byte access. `ready` is what the receiver asks of what it read.

# %%
(work / "sum16.cuh").write_text("""
// sum16: 12 bytes of payload and a word that is the epoch plus their sum. Old evidence in this copy of the slot is that of two
// calls ago (I1 to I3, wire/base.cuh): with its own payload it adds up to another epoch.
#pragma once
#include "wire/base.cuh"

namespace fc {
namespace wire {

struct Sum16 : EpochPerCell, Geometry<3, 4, false> {
  static constexpr u32 kGroupBytes = 12;

  static FC_DEVICE Span span(u32 cell) { return Span{cell * 12ull, 12}; }
  static FC_DEVICE u32 sum(const u32* w) { return w[0] + w[1] + w[2]; }
  static FC_DEVICE void put(Cell* slot, Payload v, u32 e) {
    st_relaxed_sys(slot, Cell{{v.w[0], v.w[1], v.w[2], e + sum(v.w)}});
  }
  static FC_DEVICE bool ready(Cell c, u32 e) { return c.w[3] == e + sum(c.w); }
};

}  // namespace wire
}  // namespace fc
""")

# %% [markdown]
# ## 3. One entry in the registry
#
# The same few lines on all ranks, so they go into a file that ranks run, too. As a script it is the sweep, with one protocol more.

# %%
(work / "sum16.py").write_text("""
from pathlib import Path

from fcomm import Encoding, bootstrap, register

SUM16 = Encoding(
    "sum16", "Sum16", "sum16.cuh", group_cells=1, group_payload=12, copies=2, unit_bytes=16, access_bytes=16,
    rearm_bytes_per_cell=0, needs=frozenset({"atomic16"}),
)
register(SUM16, include=Path(__file__).parent)

if __name__ == "__main__":
    from experiments import sweep

    raise SystemExit(bootstrap.run(sweep.main))
""")
lab.load(work / "sum16.py")

# %% [markdown]
# From here on every algorithm exists with it, in every list.

# %%
[name for name in protocols() if "sum16" in name]

# %% [markdown]
# ## 4. It compiles
#
# For this machine's processor, where it runs without a GPU; `lab.registers` compiles it for one, which need not be here.

# %%
lab.registers("one_shot.sum16", "one_shot.ll16", ranks=8)

# %% [markdown]
# ## 5. The bits are right
#
# Real ranks, data on which the order of summation shows, fresh in every call; the sweep compares before it times anything. The
# column `wrong` counts elements.

# %%
sweep = [work / "sum16.py", "--backend", "cpu", "--out", work, "--budget", "20s", "--calls", "60"]
print(lab.mpirun(2, *sweep, "--sizes", "1K..16K", "--protocols", "one_shot.sum16,two_shot.sum16,one_shot.ll16"))

# %%
run = lab.newest(work)
checked = run.cases[["protocol", "nbytes", "checked_calls", "wrong", "status"]]
checked

# %% [markdown]
# ## 6. A wrong one is caught
#
# A check that passes everything is worth nothing. So break it: `ready` believes whatever it reads.

# %%
broken = lab.broken_copy(work, "sum16", "return c.w[3] == e + sum(c.w);", "return true;")
print(lab.mpirun(2, broken / "sum16.py", *sweep[1:], "--sizes", "1K..16K", "--protocols", "one_shot.sum16"))

# %%
caught = lab.newest(work)
caught.cases[["protocol", "nbytes", "wrong", "status", "reason"]]

# %% [markdown]
# That was an easy one: real ranks get it wrong at once. The hard ones need a schedule that hardly ever happens, and a memory that is
# weaker than this machine's: [verification](../docs/verification.md). As declared, with links that do not tear 16 bytes, `sum16`
# passes.

# %%
passed = lab.verify("one_shot.sum16", "--ranks", "2", "--schedules", "500")

# %% [markdown]
# And where 16 bytes *can* tear? "A cell of which only a part has arrived does not add up" sounds like a proof. The simulator's answer
# is a schedule, with the seed that repeats it.

# %%
torn = lab.verify("one_shot.sum16", "--ranks", "2", "--schedules", "5000", "--link", "pcie", "--force")

# %% [markdown]
# Look at the half of the cell that was missing, `ffffffff 00000001`: it adds up to nothing, so nobody misses it. A sum is no
# evidence of arrival. `needs={"atomic16"}` stays, and keeps `sum16` off such links.
#
# ## 7. Times
#
# They were taken in step 5, after the check, interleaved with `ll16`. On a machine without a GPU they are times of an emulation.

# %%
run.latency[["protocol", "nbytes", "latency_us", "low_us", "high_us"]].round(1)

# %% [markdown]
# ## 8. A curve in the sweep
#
# The figures know it from the registry, as they know all others.

# %%
plots.latency(run)

# %% [markdown]
# To keep it: move the header to `kernels_cu/wire/`, the entry into `ENCODINGS` of `fcomm/protocols.py`, and `make test` runs it
# through layout, wrap-around, machine code and rank tests with all others. On GPUs, the same script without `--backend cpu`.
