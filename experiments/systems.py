"""Published systems as lists of counted terms: which algorithm each runs at which size, and what that does.

The sizes are those of the systems' own rules, read from their sources or descriptions (`docs/baselines.md`, `docs/validation.md`);
none was read off a published curve. What a kernel's instructions cost is taken from the kernel of ours that was rebuilt after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.link_model import Counts, Instructions, count, gpu_share
from fcomm.protocols import V2_PUSH_UP_TO, protocols

KIB, MIB = 1 << 10, 1 << 20
ALWAYS = 1 << 40
"""As a limit in bytes: at every size."""


@dataclass(frozen=True)
class Form:
    """One algorithm as a system runs it."""

    name: str
    like: str
    """Our kernel whose instructions, blocks and threads it has."""
    hops: int
    """One-way latencies on its chain."""
    reads: tuple[str, ...] = ()
    """Phases in which peers are read: of the "whole" message or a "shard"."""
    multicast: bool = False
    """The switch adds what is read and copies what is written: a rank reads one shard and sends one."""
    kernels: int = 1
    copies: int = 0
    """Copies of the message on the rank's own GPU, before and behind."""
    shape: tuple[int, int] | None = None
    """Blocks and threads, where they are not those of `like`."""


PUSH = Form("one-shot push", "custom_ar_v2.push", hops=1)
LAMPORT = Form("one-shot push, Lamport", "lamport_fp", hops=1)
ONE_SHOT = Form("one-shot pull between barriers", "barrier.one_shot", hops=4, reads=("whole",))  # flag, read, flag
TWO_SHOT = Form(  # flag, read, flag, read: sums are stored in the rank's own memory, and its last step needs no barrier
    "two-shot pull between barriers", "barrier.two_shot", hops=6, reads=("shard", "shard")
)
PULL_TWO_SHOT = Form(  # flag, read, store with its acknowledgement (the closing barrier releases), flag
    "two-shot, pull then push", "custom_ar_v2.pull_two_shot", hops=6, reads=("shard",)
)
MULTICAST = Form("two-shot by multicast", "custom_ar_v2.pull_two_shot", hops=6, reads=("shard",), multicast=True)
MULTICAST_WITH_COPIES = Form(  # its buffer is not the caller's: a copy in, a copy out, each a launch
    "two-shot by multicast, copied in and out", "custom_ar_v2.pull_two_shot", hops=6, reads=("shard",), multicast=True,
    kernels=3, copies=2, shape=(24, 1024),
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A form, and the largest message that it is used for."""

    form: Form
    up_to: Mapping[str, Mapping[int, int]]
    """Bytes by rank count, by GPU (`b300`) or family (`hopper`); what is not named is 0. A GPU goes before its family."""


@dataclass(frozen=True)
class System:
    """A published system: the first rule whose limit a message does not pass says what runs."""

    name: str
    launch: str
    """The launch feature of its kernels."""
    rules: tuple[Rule, ...]

    def form(self, nbytes: int, world_size: int, gpu: str) -> Form | None:
        """What it runs; None for a library that is not described here (NCCL)."""
        kind = gpu.removesuffix("_sxm")
        family = gpu_share(gpu).family
        for rule in self.rules:
            limits = rule.up_to.get(kind) or rule.up_to.get(family) or {}
            if nbytes <= limits.get(world_size, 0):
                return rule.form
        return None

    def counts(self, nbytes: int, world_size: int, gpu: str, prices: Instructions) -> Counts | None:
        """Its counted terms for one message on a GPU (`b300_sxm`); None where it runs what is not described here."""
        form = self.form(nbytes, world_size, gpu)
        if form is None:
            return None
        wire = nbytes * (1 + 1 / world_size) if form.multicast else None
        return count(
            protocols()[form.like], nbytes, world_size, gpu_share(gpu), (self.launch,) * form.kernels, prices,
            shape=form.shape, hops=form.hops, reads=form.reads, wire_bytes=wire, copies=form.copies,
        )  # fmt: skip


def _both(limits: Mapping[int, int]) -> dict[str, Mapping[int, int]]:
    return {"hopper": limits, "blackwell": limits}


_EVER = _both(dict.fromkeys(range(2, 9), ALWAYS))
# One-shot below 512 KiB with up to 4 ranks and below 256 KiB beyond, always with 2; 36 blocks of 512 threads.
_BARRIER_ONE_SHOT = _both({2: ALWAYS, 4: 512 * KIB - 1, 6: 256 * KIB - 1, 8: 256 * KIB - 1})

SYSTEMS: Mapping[str, System] = {
    s.name: s
    for s in (
        System("v1", "none", (Rule(ONE_SHOT, _BARRIER_ONE_SHOT), Rule(TWO_SHOT, _EVER))),
        System(
            "v2",
            "late",
            (
                Rule(PUSH, V2_PUSH_UP_TO),
                # With multicast hardware its two-shot uses it on Hopper from these sizes on.
                Rule(
                    PULL_TWO_SHOT,
                    {
                        "hopper": dict.fromkeys(range(2, 7), ALWAYS) | {7: MIB - 1, 8: 512 * KIB - 1},
                        "blackwell": _EVER["blackwell"],
                    },
                ),
                Rule(MULTICAST, _EVER),
            ),
        ),
        System(
            "vllm",
            "none",
            (
                Rule(ONE_SHOT, _BARRIER_ONE_SHOT),
                # Its own kernel below these sizes (vLLM's table for machines with multicast), torch's symmetric memory beyond.
                Rule(
                    TWO_SHOT,
                    {
                        "hopper": {4: 8 * MIB - 1, 8: 256 * KIB - 1},
                        "b200": {4: 2 * MIB - 1, 8: MIB - 1},
                        "b300": {4: 4 * MIB - 1, 8: 4 * MIB - 1},
                    },
                ),
                Rule(MULTICAST_WITH_COPIES, _both({8: ALWAYS})),
            ),
        ),
        System(
            "trtllm",
            "late",
            # By its table for tokens of 4096 elements; beyond these, within the sizes of the validation, NCCL.
            (
                Rule(
                    LAMPORT,
                    {"hopper": {2: 8 * MIB, 4: MIB, 8: 512 * KIB}, "blackwell": {2: 8 * MIB, 4: 2 * MIB, 8: MIB}},
                ),
            ),
        ),
    )
}
"""By the short names of ``experiments/data/validation/protocol.json``."""

BASELINES: Mapping[str, Form] = {
    f.like: f
    for f in (
        PUSH,
        LAMPORT,
        ONE_SHOT,
        TWO_SHOT,
        PULL_TWO_SHOT,
        Form("one-shot pull", "custom_ar_v2.pull_one_shot", hops=4, reads=("whole",)),
        Form("gather between barriers", "barrier.all_gather", hops=4, reads=("whole",)),
        Form("sentinel gather", "sentinel.all_gather", hops=1),
    )
}
"""Our own rebuilt baselines, by name. All other protocols only push: their hops are their rounds."""
