"""The machine code of the kernels, read without a GPU: what may touch a slot is STRONG.SYS, of one width, and polls poll.

Every check has a control: a source broken in the way that it is meant to find.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fcomm import machine_code, measure_cuda
from fcomm.dtypes import BFLOAT16, FLOAT32
from fcomm.errors import ArgumentError, SetupError
from fcomm.machine_code import CUPY_ADDS, Cubin, Listing, compile_specialisation, compile_text, disassemble, slot_faults
from fcomm.protocols import Protocol, protocols
from fcomm.source import LAUNCHES, OPTIONS, Specialisation

try:
    machine_code.nvrtc()
    machine_code.nvdisasm()
except SetupError as error:
    pytest.skip(str(error), allow_module_level=True)

Case = tuple[Specialisation, str]
ROOT = Path(__file__).parents[2]


def case(p: Protocol, k: int, arch: str) -> Case:
    """Element type, world size and alignment in turn: each comes up with some protocol."""
    return Specialisation(p, p.dtypes[k % len(p.dtypes)], 2 + k % 7, aligned=k % 3 != 0), arch


EVERY = list(protocols().values())
ENCODED = [p for p in EVERY if p.encodings]
SOME = [case(p, k, "sm_90") for k, p in enumerate(ENCODED)]
SOME += [
    (Specialisation(p, BFLOAT16, 8), arch)
    for arch in ("sm_80", "sm_100")
    for p in ENCODED
    if p.algorithm.name == "one_shot"
]
ALL = [case(p, k, "sm_90") for p in ENCODED for k in range(7)]
ALL += [(Specialisation(p, p.dtypes[-1], n), arch) for p in ENCODED for n in (2, 8) for arch in ("sm_80", "sm_100")]


class Ahead:
    """Work done in threads, a few jobs ahead of the test that asks: compiler and disassembler run outside the GIL."""

    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))

    def __init__(self, jobs: Mapping[str, Callable[[], Any]]) -> None:
        self.jobs, self.keys = jobs, list(jobs)
        self.started: dict[str, Future[Any]] = {}

    def __getitem__(self, wanted: str) -> Any:
        at = self.keys.index(wanted)
        for key in self.keys[at : at + 4]:
            if key not in self.started:
                self.started[key] = self.pool.submit(self.jobs[key])
        return self.started[wanted].result()


def key(spec: Specialisation, arch: str) -> str:
    return f"{spec.name}-{arch}"


def ahead(make: Callable[[Specialisation, str], Any], cases: Sequence[Case]) -> Ahead:
    return Ahead({key(*c): partial(make, *c) for c in cases})


def parametrize(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("spec", "arch"), cases, ids=lambda v: getattr(v, "name", v))


some, every = ahead(machine_code.slot_listing, SOME), ahead(machine_code.slot_listing, ALL)


def check(spec: Specialisation, arch: str, listing: Listing) -> None:
    # For sm_100 the compiler unrolls some loops, and where the first batch was loaded before the loop that pushes it, it
    # may take the first round out of that: pushes are there several times.
    unrolled = arch == "sm_100" or "shard" in spec.protocol.algorithm.phases
    assert slot_faults(spec.protocol, spec.world_size, listing, unrolled=unrolled) == []


@parametrize(SOME)
def test_only_strong_accesses_touch_slots_and_waits_poll(spec: Specialisation, arch: str) -> None:
    check(spec, arch, some[key(spec, arch)])


@pytest.mark.full
@parametrize(ALL)
def test_the_same_of_every_world_size(spec: Specialisation, arch: str) -> None:
    check(spec, arch, every[key(spec, arch)])


WIDEST = [
    (p, max(n for n in range(2, 9) if p.max_threads(n) == p.max_threads(2)))
    for p in ENCODED
    if p.algorithm.phases[0] == "shard" and "+" not in p.name
]


@pytest.mark.parametrize(("p", "n"), WIDEST)
def test_nothing_spills_among_the_most_ranks_that_its_widest_blocks_are_for(p: Protocol, n: int) -> None:
    assert compile_specialisation(Specialisation(p, FLOAT32, n), "sm_90").faults() == []


def compile_and_read(spec: Specialisation, arch: str) -> tuple[Cubin, Listing]:
    cubin = compile_specialisation(spec, arch)
    return cubin, disassemble(cubin)


BASELINES = [(Specialisation(p, p.dtypes[0], 4), "sm_90") for p in EVERY if p.baseline]
baselines = ahead(compile_and_read, BASELINES)


@parametrize(BASELINES)
def test_baselines_poll_and_read_nothing_stale(spec: Specialisation, arch: str) -> None:
    cubin, listing = baselines[key(spec, arch)]
    assert machine_code.baseline_faults(spec.protocol, listing) == []
    assert cubin.faults() == []


ENCODINGS = ("one_shot.ll", "one_shot.ll128", "one_shot.lamport", "one_shot.flag")


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_runs_has_the_accesses_that_were_checked(name: str) -> None:
    """The checked code is that of a source with other memory moved away; the kernel that runs has the same accesses."""
    spec = Specialisation(protocols()[name], FLOAT32, 3)
    cubin = compile_specialisation(spec, "sm_90")
    real, slots = disassemble(cubin), machine_code.slot_listing(spec, "sm_90")
    assert cubin.faults() == []
    for kind in ("load", "store"):
        wanted = {"kind": kind, "nbytes": 16, "strength": "strong.sys"}
        assert real.count(**wanted) == slots.count(**wanted) > 0
    assert real.count(kind="load", nbytes=4, strength="strong.sys") == slots.count(
        kind="load", nbytes=4, strength="strong.sys"
    )
    for listing in (real, slots):
        polls = [len([a for a in w.accesses if (a.kind, a.strength) == ("load", "strong.sys")]) for w in listing.waits]
        assert polls
        assert all(polls)
    # In the kernel that runs: strong accesses of slots, rank-local words and the error record; plain ones of the arrays.
    assert {a.strength for a in real.accesses} == {"strong.sys", "strong.gpu", "weak"}
    assert not [a for a in real.accesses if a.space not in ("global", "generic")]
    assert {a.space for a in slots.accesses} == {"global", "shared"}


@pytest.mark.parametrize("name", ["one_shot.lamport16", "all_gather.ll16"])
def test_arithmetic_is_that_of_the_contract(name: str) -> None:
    """CuPy asks for flush-to-zero behind our back. Nothing changes: the code is the same without its additions."""
    spec = Specialisation(protocols()[name], protocols()[name].dtypes[0], 4)
    cubin = compile_specialisation(spec, "sm_90")
    opcodes = disassemble(cubin).opcodes
    assert CUPY_ADDS[0] == "-ftz=true"
    assert "--ftz=false" in OPTIONS
    assert not [o for o in opcodes if re.match(r"F(ADD|MUL|FMA|SETP|MNMX)\b", o) and "FTZ" in o]
    assert not [o for o in opcodes if o.startswith(("FFMA", "HFMA2.", "DFMA"))]
    other = compile_text(spec.name, spec.text(), "sm_90", ("-ftz=false",))
    assert disassemble(other).opcodes == opcodes


# ---- dependent launch -----------------------------------------------------------------------------------------------

KERNELS = {p.algorithm.kernel: p for p in reversed(EVERY)}.values()
"""One protocol for each kernel."""


def launch_faults(protocol: Protocol, launch: str, listing: Listing) -> list[str]:
    """What breaks the rules of dependent launch: wait first; the late trigger behind the last poll and output store."""
    found = [f"{a} comes before the wait" for a in listing.before_wait]
    found += [] if listing.opcodes["ACQBULK"] == 1 else ["it does not wait once"]
    if (listing.opcodes["PREEXIT"] > 0) != (launch != "none"):
        found.append(f"{listing.opcodes['PREEXIT']} triggers with launch {launch}")
    if launch == "late" and not protocol.algorithm.own_contract:  # their originals have the trigger elsewhere
        found += [f"{a} comes behind the trigger" for a in listing.after_trigger if a.strength != "strong.gpu"]
    return found


@pytest.mark.parametrize(
    ("p", "launch"),
    [(p, launch) for p in KERNELS for launch in LAUNCHES if launch != "none" or p.name == "one_shot.ll"],
    ids=lambda v: getattr(v, "name", v),
)
def test_dependent_launch_waits_first_and_triggers_last(p: Protocol, launch: str) -> None:
    spec = Specialisation(p, p.dtypes[0], 4, launch=launch)
    assert launch_faults(p, launch, disassemble(compile_specialisation(spec, "sm_90"))) == []


@pytest.mark.parametrize(
    ("pattern", "by", "said"),
    [
        (
            r"(slots\(p, p\.region\[0\], 0\);)\n  launch_wait\(\);(.*?const Turn<Wire> turn\(p\);)",
            r"\1\2\n  launch_wait();",
            "before the wait",
        ),
        (r"\n  launch_wait\(\);", "", "does not wait"),
        (r"\n  late_trigger\(\);", "", "0 triggers"),
        (r"(\n  turn\.rearm\(p, p\.region\[0\]\);)", r"\1 late_trigger();", "behind the trigger"),
    ],
)
def test_a_misplaced_wait_or_trigger_is_found(pattern: str, by: str, said: str) -> None:
    p = protocols()["one_shot.lamport16"]
    text = replacing(pattern, by)(Specialisation(p, FLOAT32, 3, launch="late").text())
    faults = launch_faults(p, "late", disassemble(compile_text("broken", text, "sm_90")))
    assert any(said in fault for fault in faults), faults


def neighbours(aware: bool) -> list[Listing]:
    """Machine code of the kernels around a sandwiched collective."""
    texts = [
        measure_cuda.filler_text(4, True, aware),
        measure_cuda.norm_text(4, True, aware, "bfloat16"),
        measure_cuda.norm_text(4, False, aware, "float32"),
    ]
    return [disassemble(compile_text("neighbour", text, "sm_90")) for text in texts]


def test_neighbours_that_know_dependent_launch_wait_before_they_touch_anything() -> None:
    for listing in neighbours(aware=True):
        assert (listing.opcodes["ACQBULK"], listing.opcodes["PREEXIT"]) == (1, 1)
        assert listing.before_wait == ()
        assert len(listing.after_trigger) == listing.count(space="global") > 0  # behind the wait, and before all else
    for listing in neighbours(aware=False):
        assert (listing.opcodes["ACQBULK"], listing.opcodes["PREEXIT"]) == (0, 0)
        assert listing.count(space="local") == 0


# ---- controls: each check must find what it is for ------------------------------------------------------------------


def replacing(pattern: str, by: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        new, count = re.subn(pattern, by, text, flags=re.DOTALL)
        assert count, pattern
        return new

    return change


TWO_STORES = (
    'asm volatile("st.relaxed.sys.global.v2.b32 [%0], {%1,%2};" ::"l"(p), "r"(c.w[0]), "r"(c.w[1]) : "memory");'
    'asm volatile("st.relaxed.sys.global.v2.b32 [%0+8], {%1,%2};" ::"l"(p), "r"(c.w[2]), "r"(c.w[3]) : "memory");'
)
CELL_STORE = r'asm volatile\("st\.relaxed\.sys\.global\.v4\.b32[^;]*;[^;]*\);'
BROKEN = {
    "a plain push": (
        "one_shot.ll",
        replacing(r"st_relaxed_sys\(slot, Cell", "st_plain(slot, Cell"),
        "not a strong access",
    ),
    "a push of GPU scope": (
        "one_shot.ll",
        replacing(r"st\.relaxed\.sys\.global\.v4", "st.relaxed.gpu.global.v4"),
        "GPU may touch a slot",
    ),
    "a weak look": ("one_shot.ll16", replacing(r"ld\.relaxed\.sys\.global\.v4", "ld.global.v4"), "not a strong access"),
    "a look by the non-coherent path": (
        "one_shot.ll16",
        replacing(r"ld\.relaxed\.sys\.global\.v4", "ld.global.nc.v4"),
        "CONSTANT may touch a slot",
    ),
    "two stores for one": ("one_shot.lamport16", replacing(CELL_STORE, TWO_STORES), "neither the width of a cell"),
    "a hoisted poll": (
        "one_shot.ll",
        replacing(
            r"while \(true\) \{(\s*#pragma unroll\s*for \(u32 r = 0; r < FC_N; r\+\+\) \{[^}]*look[^}]*\})",
            r"\1 while (true) {",
        ),
        "polls 0 cells",
    ),
    "a hoisted flag": (
        "one_shot.flag",
        replacing(r"    seen = ld_acquire_sys\(flag\);\n", ""),
        "polls 0 cells and 0 words",
    ),
    "a flag without release": (
        "one_shot.flag",
        replacing(r"st_release_sys\(flag_of", "st_relaxed_sys(flag_of"),
        "0 flag stores, not 1",
    ),
    "a flag without acquire": ("one_shot.flag", replacing(r"ld\.acquire\.sys", "ld.relaxed.sys"), "without acquire"),
    "re-arming at GPU scope": (
        "one_shot.lamport16",
        replacing(r"\{ Lamport::rearm\(slot\); \}", "{ st_relaxed_gpu(&slot->w[3], kSentinel); }"),
        "GPU may touch a slot",
    ),
    "a peer left out": ("one_shot.ll", replacing(r"for \(u32 j = 1; j < FC_N", "for (u32 j = 2; j < FC_N"), "not 2"),
    "no second look": (
        "one_shot.ll128",
        replacing(r"kSecondLook = true", "kSecondLook = false"),
        "3 cell loads, not 6",
    ),
    "a slot read as if it were input": (
        "one_shot.ll",
        replacing(r"(ablate::input<Wire[^>]*>\((?:p, )?)p\.in,", r"\1p.slab[0],"),
        "could not compile",
    ),
}


def faults_of(what: str) -> list[str]:
    name, change, _ = BROKEN[what]
    p = protocols()[name]
    try:
        return slot_faults(p, 3, machine_code.slot_listing(Specialisation(p, FLOAT32, 3), "sm_90", change))
    except SetupError as refused:
        return [str(refused)]


broken = Ahead({what: partial(faults_of, what) for what in BROKEN})


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_source_is_found(what: str) -> None:
    faults = broken[what]
    assert [f for f in faults if BROKEN[what][2] in f], faults


def test_spills_are_found() -> None:
    spec = Specialisation(protocols()["one_shot.ll"], FLOAT32, 8)
    tight = replacing(r"__launch_bounds__\(FC_MAX_THREADS[^)]*\)", "__launch_bounds__(1024, 2)")
    cubin = compile_text(spec.name, tight(spec.text()), "sm_90")
    assert cubin.registers <= 32
    assert cubin.spill_bytes > 0
    assert cubin.stack_bytes > 0
    assert "bytes of spills" in cubin.faults()[0]


def test_too_many_registers_are_found() -> None:
    cubin = compile_specialisation(Specialisation(protocols()["one_shot.ll"], FLOAT32, 8), "sm_90")
    assert cubin.faults() == []
    assert "do not fit 2048 threads" in replace(cubin, threads=2048).faults()[0]


# ---- the reader -----------------------------------------------------------------------------------------------------

LISTING = """
.text.fc_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.U16.CONSTANT R2, desc[UR6][R2.64] ;
.L_x_1:
        /*0020*/               @P2 LDG.E.128.STRONG.SYS R28, desc[UR6][R14.64] ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/              @!P1 BRA `(.L_x_3) ;
        /*0050*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   MEMBAR.ALL.SYS ;
        /*0070*/                   ERRBAR;
        /*0080*/                   STG.E.STRONG.SYS desc[UR6][R6.64+0x3c], RZ ;
        /*0090*/                   ATOMG.E.INC.STRONG.GPU PT, R12, desc[UR6][R14.64+0x8], R17 ;
        /*00a0*/                   REDUX.OR UR4, R2 ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   CS2R R14, SR_GLOBALTIMERLO ;
        /*00d0*/                   STL.64 [R1], R2 ;
        /*00e0*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00f0*/                   BRA `(.L_x_4);
"""


def test_a_listing_is_read() -> None:
    read = machine_code.read_listing(LISTING)
    seen = [(a.kind, a.space, a.nbytes, a.strength, a.in_loop, a.ordered) for a in read.accesses]
    assert seen == [
        ("load", "global", 2, "constant", False, False),
        ("load", "global", 16, "strong.sys", True, False),
        ("store", "global", 4, "strong.sys", False, True),
        ("atomic", "global", 4, "strong.gpu", False, False),
        ("store", "local", 8, "weak", True, False),
    ]
    # The block with the clock lies behind the loop, and belongs to it.
    assert [(w.clock_at, [a.address for a in w.accesses]) for w in read.waits] == [(0xC0, [0x20, 0xD0])]
    with pytest.raises(SetupError, match="no instruction"):
        machine_code.read_listing("")
    with pytest.raises(SetupError, match="indirect"):
        machine_code.read_listing("/*0000*/ BRX R2 -0x10 ;")


def test_occupancy() -> None:
    hopper = machine_code.architecture("sm_90")
    for registers, threads, blocks in [
        (32, 1024, 2),
        (33, 1024, 1),
        (64, 512, 2),
        (65, 512, 1),
        (128, 512, 1),
        (40, 128, 12),
    ]:
        assert hopper.resident_blocks(registers, threads) == blocks
    assert hopper.resident_blocks(16, 32) == 32
    with pytest.raises(ArgumentError, match="sm_90"):
        machine_code.architecture("sm_12")


def test_summary() -> None:
    got = machine_code.summary(Specialisation(protocols()["one_shot.flag"], FLOAT32, 3), "sm_90")
    assert (got.protocol, got.world_size, got.evidence_bytes) == ("one_shot.flag", 3, 4)
    assert got.system_loads == {4: 2, 16: 3}
    assert got.system_stores[16] == 2
    assert got.resident_blocks >= 1
    assert got.spill_bytes == 0


# ---- python -m fcomm build ------------------------------------------------------------------------------------------


def build(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fcomm", "build", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | environment, timeout=120
    )


def test_build_prints_a_table_where_no_mpi_library_loads(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no MPI library here')\n")
    arguments = ("--arch", "sm_90", "--ranks", "2,3", "--protocol", "one_shot.ll", "--dtypes", "float32,bf16")
    done = build(*arguments, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("one_shot")]
    assert [r[0] for r in rows] == [f"one_shot.ll-{t}-n{n}" for n in (2, 3) for t in ("float32", "bfloat16")]
    for _name, registers, spills, code, blocks, *_grid in rows:
        assert 0 < int(registers) <= 128
        assert int(spills) == 0
        assert int(code) > 1000
        assert int(blocks) >= 1


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        (("--arch", "sm_12"), "sm_90"),
        (("--arch", "sm_90", "--protocol", "one_shot.nothing"), "one_shot.ll"),
        (("--arch", "sm_90", "--protocol", "all_gather.lamport"), "does not exist"),
        (("--arch", "sm_90", "--ranks", "1"), "at least two"),
        (("--arch", "sm_90", "--ranks", "two"), "two"),
        (("--arch", "sm_90", "--dtypes", "float64"), "float64"),
    ],
)
def test_build_refuses_in_one_sentence(
    arguments: tuple[str, ...], finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fcomm import __main__ as command

    assert command.run(["build", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert finding in said.err


def test_build_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fcomm import __main__ as command

    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert command.run(["build", "--arch", "sm_90", "--ranks", "2", "--protocol", "one_shot.ll"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: NVRTC")
    assert "flash-comm[nvrtc]" in said


def test_an_error_in_a_kernel_is_one_sentence() -> None:
    text = (
        Specialisation(protocols()["one_shot.ll"], FLOAT32, 2).text().replace("FC_KERNEL((fc::", "FC_KERNEL((nothing::")
    )
    with pytest.raises(SetupError, match=r"could not compile broken for sm_90: .*error"):
        compile_text("broken", text, "sm_90")
