"""Variants of our kernels: the shipped one is untouched by them, each one is what its name says, and stages end by themselves."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fcomm import machine_code
from fcomm.backends import cpu
from fcomm.dtypes import BFLOAT16, FLOAT32, REDUCIBLE
from fcomm.errors import ArgumentError, NotAdmittedError, SetupError
from fcomm.layout import CALL_WORDS, CONTROL_BYTES, CONTROL_DTYPE, ERROR_DTYPE, SlabLayout
from fcomm.protocols import protocol, shard_bytes
from fcomm.source import Specialisation, kernel_root
from fcomm.variants import ABLATIONS, LADDER, SHIPPED, STAGES, WITHOUT, Variant, check_message, variant

EVERY = [*ABLATIONS.values(), *LADDER.values(), *WITHOUT.values()]
ENCODINGS = ("ll", "ll16", "ll128", "lamport", "lamport16", "flag")

try:
    machine_code.nvrtc()
    machine_code.nvdisasm()
    no_compiler = ""
except SetupError as error:
    no_compiler = str(error)
compiler = pytest.mark.skipif(bool(no_compiler), reason=no_compiler)


# ---- as data ---------------------------------------------------------------------------------------------------------


def test_every_variant_has_a_name_and_bits_of_its_own() -> None:
    assert len({v.name for v in EVERY}) == len(EVERY)
    others = [v.bits for v in EVERY if v.name not in (SHIPPED, LADDER["wire"].name)]
    assert len(set(others)) == len(others)
    assert 0 not in others
    assert variant(SHIPPED).bits == LADDER["wire"].bits == 0


def test_the_kernels_know_the_bits_by_the_same_names() -> None:
    text = (kernel_root() / "ablate" / "variant.cuh").read_text()
    found = {name: 1 << int(k) for name, k in re.findall(r"\bk(\w+) = (?:has\()?1u << (\d+)", text)}
    ablations = {re.sub(r"_(\w)", lambda m: m[1].upper(), f"_{v.name}"): v.bits for v in ABLATIONS.values() if v.bits}
    stages = {name.capitalize(): LADDER[before].bits & ~LADDER[name].bits for before, name in _steps()}
    assert found == {**ablations, **stages}


def _steps() -> list[tuple[str, str]]:
    names = list(STAGES)
    return list(itertools.pairwise(names))


def test_a_step_of_the_ladder_is_one_stage() -> None:
    for before, name in _steps():
        assert LADDER[name].bits & ~LADDER[before].bits == 0
        assert (LADDER[before].bits & ~LADDER[name].bits).bit_count() == 1
    for stage, v in WITHOUT.items():
        before = {b: a for a, b in _steps()}[stage]
        assert v.bits == LADDER[before].bits & ~LADDER[stage].bits


def test_only_shipped_text_is_without_a_variant() -> None:
    spec = Specialisation(protocol("one_shot.lamport16"), BFLOAT16, 4, launch="late")
    assert "#define FC_VARIANT" not in spec.root_text()
    last = Specialisation(protocol("one_shot.lamport16"), BFLOAT16, 4, launch="late", variant="arrival_order")
    assert "#define FC_VARIANT 0x1\n" in last.root_text()
    assert last.name == f"{spec.name}-arrival_order"


@pytest.mark.parametrize(
    ("name", "of", "why"),
    [
        ("rearm_first", "one_shot.ll", "its encodings set nothing back"),
        ("own_in_memory", "two_shot.ll", "it is for one_shot"),
        ("arrival_order", "all_gather.ll", "it is for one_shot and two_shot"),
        ("arrival_order", "two_shot.flag", "all cells of a chunk are there when the first one is looked at"),
        ("to_poll", "barrier.one_shot", "it is for one_shot and two_shot"),
    ],
)
def test_a_protocol_without_such_a_variant_is_refused(name: str, of: str, why: str) -> None:
    p = protocol(of)
    with pytest.raises(NotAdmittedError, match=f"{of} has no variant {name}: {why}"):
        Specialisation(p, p.dtypes[0], 2, variant=name)


def test_a_variant_that_is_none() -> None:
    with pytest.raises(ArgumentError, match="there is no variant 'quick'; use one of shipped, arrival_order,"):
        Specialisation(protocol("one_shot.ll"), FLOAT32, 2, variant="quick")


def test_stages_of_parts_that_are_not_equal_are_refused() -> None:
    for name in ("to_launch", "to_poll", "no_input"):
        check_message(name, protocol("two_shot.ll"), 96, 3)
        with pytest.raises(
            ArgumentError, match=f"the variant {name} of two_shot.ll takes messages of 3 equal parts of a multiple"
        ):
            check_message(name, protocol("two_shot.ll"), 1024, 3)
        check_message(name, protocol("one_shot.ll"), 1022, 3)
    for name in (SHIPPED, "poll_one", "to_wire"):
        check_message(name, protocol("two_shot.ll"), 1022, 3)


def test_a_communicator_of_a_variant_chooses_no_protocol() -> None:
    from mpi4py import MPI

    from fcomm import Communicator

    x = np.ones(4, np.float32)
    with pytest.raises(ArgumentError, match="there is no variant 'quick'"):
        Communicator(MPI.COMM_SELF, backend="cpu", variant="quick")
    with Communicator(MPI.COMM_SELF, backend="cpu", max_bytes=4096, variant="poll_one") as comm:
        with pytest.raises(ArgumentError, match="a communicator of the variant poll_one chooses no protocol: name one"):
            comm.all_reduce(x)
        assert (comm.all_reduce(x, protocol="one_shot.ll") == x).all()


def test_a_sandwich_of_other_bits_is_refused() -> None:
    from fcomm.measure import SANDWICH, Case

    for name, why in (("arrival_order", "compared to the bit"), ("to_poll", "compared to the bit"), ("poll_one", None)):
        case = Case("all_reduce", "one_shot.ll", "float32", 1024, 2, SANDWICH, variant=name)
        reason = case.refusal(frozenset({"atomic8"}))
        assert (reason is None) == (why is None), reason
        assert why is None or why in str(reason)


# ---- machine code ----------------------------------------------------------------------------------------------------

_HOOKS = (
    (r"^ *if constexpr \(ablate::kArrivalOrder\) \{\n(?:.*\n)*?^ *continue;\n *\}\n", ""),
    (r"^ *if constexpr \(!kTogether\)\s*return .*;\n", ""),
    (r"^ *if constexpr \(ablate::[^{;]*;\n", ""),
    (r" && kElsewhere == ablate::kRearmElsewhere && !ablate::without\(ablate::kRearm\)", ""),
    (r" \|\| ablate::kOwnInMemory\b| && !ablate::kOwnInMemory\b| \|\| ablate::without\(ablate::k\w+\)", ""),
    (r" & \(ablate::kOwnInMemory \? ~0u : (~\(1u << p\.rank\))\)", r" & \1"),
    (r"ablate::without\(ablate::kWire\) \? from\(peer\) : ", ""),
    (r"ablate::input<", "load_payload<"),
    (r"ablate::output<", "store_payload<"),
    (r"!ablate::kPollOne", "true"),
)
"""What the variants have put into the kernels, and what there would be without it."""


def _without_hooks(text: str) -> str:
    found = 0
    for pattern, by in _HOOKS:
        text, count = re.subn(pattern, by, text, flags=re.MULTILINE)
        found += count
    assert found > 20
    kept = re.sub(r"^namespace ablate \{\n(?:.*\n)*?\}.*\n", "", text, flags=re.MULTILINE)  # their own files
    left = re.findall(r"^.*\bablate::.*$", kept, flags=re.MULTILINE)
    assert [line.strip() for line in left] == ["friend struct ablate::Arrival;"]
    return text


def _code(text: str) -> bytes:
    cubin = machine_code.compile_text("kernel", text, "sm_90")
    return _kernel_section(cubin.image)


def _kernel_section(image: bytes) -> bytes:
    """The instructions of a cubin, an ELF file of 64 bits: its section .text.fc_kernel."""
    at = int.from_bytes(image[0x28:0x30], "little")
    size, count, names = (int.from_bytes(image[k : k + 2], "little") for k in (0x3A, 0x3C, 0x3E))

    def field(section: int, offset: int, width: int) -> int:
        start = at + section * size + offset
        return int.from_bytes(image[start : start + width], "little")

    strings = field(names, 0x18, 8)
    for k in range(count):
        start = strings + field(k, 0, 4)
        if image[start : image.index(b"\0", start)] == b".text.fc_kernel":
            return image[field(k, 0x18, 8) :][: field(k, 0x20, 8)]
    raise AssertionError("no kernel in the cubin")


def _shipped_is_untouched(spec: Specialisation) -> None:
    code = _code(spec.text())
    assert len(code) > 1000
    assert _code(_without_hooks(spec.text())) == code


@compiler
def test_shipped_machine_code_is_what_it_would_be_without_variants() -> None:
    _shipped_is_untouched(Specialisation(protocol("one_shot.lamport16"), BFLOAT16, 8, launch="late"))


@compiler
@pytest.mark.full
@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize(
    "name",
    [f"{a}.{e}" for a in ("one_shot", "two_shot") for e in ENCODINGS]
    + ["two_shot.lamport16+ll128", "all_gather.ll", "reduce_scatter.lamport"],
)
def test_all_shipped_machine_code_is_what_it_would_be_without_variants(name: str, ranks: int) -> None:
    p = protocol(name)
    _shipped_is_untouched(Specialisation(p, p.dtypes[ranks % len(p.dtypes)], ranks, aligned=ranks != 3))


def _accesses(name: str, of: Variant) -> Counter[str]:
    spec = Specialisation(protocol(name), BFLOAT16, 3, launch="late", variant=of.name)
    listing = machine_code.disassemble(machine_code.compile_specialisation(spec, "sm_90"))
    assert not listing.before_wait
    found = Counter(f"{a.kind} {a.strength} {a.nbytes}" for a in listing.accesses)
    found["waits"] = len(listing.waits)
    return found


@compiler
def test_each_step_has_the_accesses_of_its_stage() -> None:
    """lamport16 among three ranks: what a stage adds is in the machine code, and what comes behind it is not."""
    seen = {stage: _accesses("one_shot.lamport16", LADDER[stage]) for stage in ("launch", "stores", "poll")}
    assert not +seen["launch"]
    assert seen["stores"]["load strong.gpu 16"] == 1  # the epoch
    assert seen["stores"]["load weak 16"] > 0 < seen["stores"]["store weak 16"]
    assert seen["stores"]["store strong.sys 16"] == 2  # to two peers
    assert seen["stores"]["atomic strong.gpu 4"] == seen["stores"]["waits"] == seen["stores"]["load strong.sys 16"] == 0
    assert seen["poll"]["store strong.sys 16"] == 2 + 3  # and three slots are set back
    assert seen["poll"]["atomic strong.gpu 4"] == 1 + 1  # the ticket, and the claim of an expired wait
    assert seen["poll"]["waits"] == 1
    assert seen["poll"]["load strong.sys 16"] == 3


@compiler
@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["one_shot.ll", "one_shot.flag", "two_shot.lamport", "two_shot.ll128", "two_shot.lamport16+ll128"]
)
def test_every_variant_compiles(name: str) -> None:
    for k, v in enumerate(EVERY):
        if v.refusal(protocol(name)) is None:
            spec = Specialisation(protocol(name), BFLOAT16, (2, 8, 5)[k % 3], aligned=k % 4 != 0, variant=v.name)
            machine_code.compile_specialisation(spec, ("sm_80", "sm_100")[k % 2])


# ---- stages on one rank alone ----------------------------------------------------------------------------------------


class Alone:
    """One rank of a number of ranks, without the others: what a kernel leaves in their slabs would be a fault."""

    def __init__(self, name: str, ranks: int, of: str) -> None:
        p = protocol(name)
        self.layout, self.ranks = SlabLayout(ranks, 4096), ranks
        self.kernel = cpu.CpuKernel(cpu.build(Specialisation(p, FLOAT32, ranks, variant=of)))
        memory = np.zeros(self.layout.slab_bytes + 128, np.uint8)
        start = -memory.ctypes.data % 128
        self.slab = memory[start : start + self.layout.slab_bytes]
        self.kept: list[Any] = [memory]
        self.error = np.zeros(1, ERROR_DTYPE)
        slabs = [int(self.slab.ctypes.data)] + [8] * (ranks - 1)  # nobody's memory: a store there ends the process
        self.params = self.layout.params(p, 0, slabs, int(self.error.ctypes.data), 0, 5.0)
        self.slab[:CONTROL_BYTES].view(CONTROL_DTYPE)[:] = self.layout.initial_control()
        for region in self.layout.regions().values():
            self.slab[region.offset : region.offset + region.copies * region.copy_stride] = region.cleared_to

    def call(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        y = np.full_like(x, 77.0)
        shard = shard_bytes(x.nbytes, self.ranks)
        for name, value in zip(CALL_WORDS, (x.ctypes.data, y.ctypes.data, x.nbytes, shard, shard), strict=True):
            self.params[name] = value
        self.params["aligned"] = True
        assert self.kernel.run(self.params.ctypes.data, 2, 32) == 0
        assert not self.error["valid"][0]
        return y


def _alone(name: str, ranks: int, stage: str) -> None:
    world = Alone(name, ranks, LADDER[stage].name)
    two_shot = name.startswith("two_shot")
    stages = list(STAGES)
    adds, polls = (stages.index(stage) >= stages.index(s) for s in ("reduce", "poll"))
    for k, count in enumerate((96, 480, 48, 480, 96, 48)):  # each call's own data, more and less of it
        x = np.random.default_rng([k, ranks]).integers(-99, 99, count * ranks // 2).astype(np.float32)
        parts = x.reshape(ranks, -1)
        y = world.call(x)
        if stages.index(stage) < stages.index("output"):
            assert (y == 77.0).all()
        elif not two_shot:
            assert (y == (x * ranks if adds else x)).all()
        elif polls:  # my part is the sum of all, sent as if by everyone
            assert (y.reshape(ranks, -1) == (parts.sum(axis=0) if adds else parts[0])).all()
        else:
            assert (y.reshape(ranks, -1)[0] == parts[0]).all()
        words = world.slab[:CONTROL_BYTES].view(CONTROL_DTYPE)[0]
        advances = stages.index(stage) >= stages.index("exit")
        assert words["epoch"] == 2 + (k + 1 if advances else 0)


@pytest.mark.parametrize(("name", "ranks", "stage"), [("one_shot.lamport16", 3, "reduce"), ("two_shot.ll", 2, "poll")])
def test_a_rank_alone_ends_and_waits_for_its_own_cells(name: str, ranks: int, stage: str) -> None:
    """Nothing leaves the slab, so nothing can hang; and what it polls is this very call's, as the output shows."""
    _alone(name, ranks, stage)


@pytest.mark.full
@pytest.mark.parametrize("stage", ["stores", "rearm", "poll", "reduce"])
@pytest.mark.parametrize(
    "name", [f"{a}.{e}" for a in ("one_shot", "two_shot") for e in ENCODINGS] + ["two_shot.lamport16+ll128"]
)
def test_every_stage_ends_on_a_rank_alone(name: str, stage: str) -> None:
    _alone(name, 3, stage)


# ---- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_sums_in_another_order_are_within_rounding_and_others_are_not(dtype: str) -> None:
    from fcomm import checks

    xs = [checks.inputs(5, r, 8, 4000, dtype) for r in range(8)]
    for order in ([3, 1, 0, 2, 7, 6, 5, 4], [7, 6, 5, 4, 3, 2, 1, 0]):
        got = checks.reduce_reference([xs[k] for k in order])
        assert checks.beyond_order(xs, got) == 0
        assert (checks.wrong_elements(got, checks.reduce_reference(xs)) > 100) == REDUCIBLE[dtype].is_float
    assert checks.beyond_order(xs, checks.reduce_reference(xs[:7])) > 1000  # one rank's part is missing
    stale = checks.reduce_reference([*xs[:7], checks.inputs(6, 7, 8, 4000, dtype)])
    assert checks.beyond_order(xs, stale) > 1000


def test_what_is_not_finite_has_the_contracts_bits() -> None:
    from fcomm import checks

    xs = [np.array([np.inf, np.nan, 1.0, 1.0], np.float32), np.array([1.0, 1.0, 2.0, 2.0], np.float32)]
    want = checks.reduce_reference(xs)
    assert checks.beyond_order(xs, want) == 0
    got = want.copy()
    got.view(np.uint32)[1] = 0xFFFFFFFF  # a NaN, and not the canonical one
    got[2] = np.inf
    assert checks.beyond_order(xs, got) == 2
