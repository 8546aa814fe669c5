"""What the compiler made of a kernel, read without a GPU: registers, spills, and every access to memory.

The protocols rest on properties that C++ cannot express: an access that carries evidence is one instruction of a certain
width, strong at system scope, and a poll is repeated. So they are looked up where they are visible, in the machine code.
docs/machine-code.md says what is checked, and what cannot be.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fcomm.errors import ArgumentError, SetupError
from fcomm.protocols import Protocol
from fcomm.source import MAX_THREADS, OPTIONS, Specialisation

CUPY_ADDS = ("-ftz=true", "--device-as-default-execution-space")
"""Options that CuPy puts behind those of the cuda backend, whether one likes it or not. The first contradicts ours and
does nothing here: all arithmetic of the kernels is PTX that says how it rounds (tests/unit/test_machine_code.py)."""

KERNEL = "fc_kernel"
FILE_REGISTERS = 65536


@dataclass(frozen=True)
class Architecture:
    """What a GPU of that kind holds. `sms` is that of the largest common product, `product`."""

    name: str
    product: str
    sms: int
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32

    def resident_blocks(self, registers: int, threads: int) -> int:
        """Blocks of so many threads that fit on one SM at a time, by registers and threads (no shared memory is used).

        Registers are handed out to a warp in pieces of 256, from the file of one of the SM's four quarters.
        """
        warps = -(-threads // 32)
        per_warp = -(-registers * 32 // 256) * 256
        by_registers = 4 * (FILE_REGISTERS // 4 // per_warp) // warps
        return min(by_registers, self.threads_per_sm // (32 * warps), self.blocks_per_sm)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        a.name: a
        for a in (
            Architecture("sm_80", "A100", 108),
            Architecture("sm_90", "H100, H200", 132),
            Architecture("sm_100", "B200", 148),
        )
    }
)


def architecture(name: str) -> Architecture:
    """The architecture called `name`, such as sm_90."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise ArgumentError(f"there is no architecture {name!r} here; use one of {', '.join(ARCHITECTURES)}") from None


# ---- compiling ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes
    ----------
    image : bytes
        The whole ELF file.
    registers : int
        Per thread.
    stack_bytes, spill_bytes : int
        Local memory of a thread: its whole frame, and the stores and loads of spilled registers.
    code_bytes : int
        Of the kernel's instructions.
    threads : int
        Per block, at most: what the kernel is compiled for.
    """

    name: str
    arch: str
    image: bytes
    registers: int
    stack_bytes: int
    spill_bytes: int
    code_bytes: int
    threads: int

    def faults(self) -> list[str]:
        """What is wrong with its use of registers and stack."""
        found = []
        if self.stack_bytes or self.spill_bytes:
            found.append(f"{self.stack_bytes} bytes of stack, {self.spill_bytes} bytes of spills")
        if not 0 < self.registers <= FILE_REGISTERS // self.threads:
            found.append(f"{self.registers} registers do not fit {self.threads} threads")
        return [f"{self.name} for {self.arch}: {fault}" for fault in found]


def nvrtc() -> Any:
    """CuPy's binding of the compiler; `SetupError` where CuPy or NVRTC is missing."""
    try:
        from cupy.cuda import nvrtc as binding

        binding.getVersion()
    except Exception as error:  # CuPy's own, ImportError, OSError, RuntimeError: as many as there are loaders
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SetupError(
            f"NVRTC, the CUDA compiler, cannot be loaded ({first.rstrip('.')}): install it with "
            "pip install 'flash-comm[nvrtc]'"
        ) from None
    return binding


def compile_text(name: str, text: str, arch: str, options: tuple[str, ...] = ()) -> Cubin:
    """Compiles a flattened source with the options of the cuda backend, and with further ones where a test wants it."""
    binding = nvrtc()
    architecture(arch)
    program = binding.createProgram(text, f"{name}.cu", (), ())
    try:
        try:
            every = (*OPTIONS, CUPY_ADDS[0], f"-arch={arch}", *CUPY_ADDS[1:], "--ptxas-options=-v", *options)
            binding.compileProgram(program, every)
        except binding.NVRTCError:
            lines = binding.getProgramLog(program).splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
            raise SetupError(f"NVRTC could not compile {name} for {arch}: {first}") from None
        log = binding.getProgramLog(program)
        image = binding.getCUBIN(program) + b"\0"  # CuPy leaves out the last byte
    finally:
        binding.destroyProgram(program)
    found = _from_elf(image)
    spills = [int(b) for b in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    if "registers" not in found or not spills:
        raise SetupError(f"NVRTC does not say how many registers {name} takes; is it older than 12.0?")
    bound = re.search(r"^#define FC_MAX_THREADS (\d+)", text, re.MULTILINE)
    threads = int(bound[1]) if bound else MAX_THREADS
    return Cubin(name, arch, image, found["registers"], found.get("stack", 0), sum(spills), found["code"], threads)


def compile_specialisation(spec: Specialisation, arch: str) -> Cubin:
    """Compiles a kernel as the cuda backend does."""
    return compile_text(spec.name, spec.text(), arch)


def fill_cache(spec: Specialisation, device: int) -> None:
    """Puts a kernel into the disk cache of CuPy, where the cuda backend looks; needs that GPU.

    CuPy's key is the source, the options and the device's architecture: the same call as the backend's makes the same key.
    """
    import cupy

    with cupy.cuda.Device(device):
        cupy.RawModule(code=spec.text(), options=OPTIONS, backend="nvrtc").compile()


_EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE, _EIATTR_REGCOUNT = 0x11, 0x12, 0x2F


def _from_elf(image: bytes) -> dict[str, int]:
    """Registers, bytes of stack and of code of a cubin, from the attributes that the driver itself reads."""
    assert image[:4] == b"\x7fELF"
    (at,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, at + k * size) for k in range(count)]
    strings = headers[names][4]
    found: dict[str, int] = {"code": 0}
    for header in headers:
        start = strings + header[0]
        section = image[start : image.index(b"\0", start)].decode()
        if section.startswith(".text."):
            found["code"] += header[5]
        if section != ".nv.info":
            continue
        data = image[header[4] : header[4] + header[5]]
        k = 0
        while k + 4 <= len(data):
            form, attribute, value = struct.unpack_from("<BBH", data, k)
            k += 4
            if form != 4:
                continue
            words = struct.unpack_from(f"<{value // 4}I", data, k)
            k += value
            if len(words) != 2:
                continue
            if attribute in (_EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE):
                found["stack"] = max(found.get("stack", 0), words[1])
            elif attribute == _EIATTR_REGCOUNT:
                found["registers"] = max(found.get("registers", 0), words[1])
    return found


# ---- reading machine code -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """One instruction that reads or writes memory. Reads of launch arguments (constant bank) are not among them.

    Attributes
    ----------
    address : int
        Of the instruction, in bytes from the kernel's start.
    opcode : str
        As the disassembler writes it.
    kind : str
        load, store, atomic, or other for what a kernel here has no business to use.
    space : str
        global, generic (any of the following, by address), shared, local, other.
    nbytes : int
        Width of the access of one thread.
    strength : str
        strong.sys, strong.gpu, strong.cta, constant (the non-coherent path), weak.
    in_loop : bool
        Whether it is executed again and again: lies in a loop of the control flow.
    spins : bool
        Whether the innermost loop around it also looks at the clock, as every bounded wait does.
    ordered : bool
        A store behind a fence (release), or a load before an invalidation of the cache (acquire), with no other access
        between.
    """

    address: int
    opcode: str
    kind: str
    space: str
    nbytes: int
    strength: str
    in_loop: bool = False
    spins: bool = False
    ordered: bool = False

    def __str__(self) -> str:
        return f"{self.address:#06x} {self.opcode}"


@dataclass(frozen=True)
class Wait:
    """A loop that looks at the clock, with the accesses of which it is the innermost loop."""

    clock_at: int
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class Listing:
    """The machine code of a kernel, as far as memory is concerned."""

    accesses: tuple[Access, ...]
    waits: tuple[Wait, ...]
    opcodes: Counter[str]
    before_wait: tuple[Access, ...] = ()
    """Accesses to global memory that can be reached without passing dependent launch's wait (`griddepcontrol.wait`)."""
    after_trigger: tuple[Access, ...] = ()
    """Accesses to global memory that can be reached from its trigger (`griddepcontrol.launch_dependents`)."""

    def count(self, **wanted: object) -> int:
        """Accesses with the given attributes: ``count(kind="store", nbytes=16)``."""
        return sum(all(getattr(a, k) == v for k, v in wanted.items()) for a in self.accesses)


@dataclass(frozen=True)
class _Instruction:
    address: int
    guarded: bool
    opcode: str
    operands: str


_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_LABEL = re.compile(r"^\s*([.$\w]+):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
# Mnemonics that touch memory. What is not in _SPACES gets the space "other", and thereby fails every check.
_MEMORY = re.compile(r"^(LD|ST|ATOM|RED(?!UX)|SU(?!LEA)|TEX|TLD|TXD|TMML|UBLK|UTMA|UST|ULDG|UATOM|URED|CLD|QSPC)")
_CONSTANT_BANK = {"LDC", "LDCU"}
_SPACES = {
    **dict.fromkeys(("LDG", "STG", "ATOMG", "REDG", "RED"), "global"),
    **dict.fromkeys(("LD", "ST", "ATOM"), "generic"),
    **dict.fromkeys(("LDS", "STS", "ATOMS"), "shared"),
    **dict.fromkeys(("LDL", "STL"), "local"),
}
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@cache
def nvdisasm() -> str:
    """The disassembler: from the wheel nvidia-cuda-nvdisasm, else from PATH; `SetupError` where there is none."""
    for folder in map(Path, sys.path):
        for found in sorted(folder.glob("nvidia/*/bin/nvdisasm")):
            return str(found)
    found_in_path = shutil.which("nvdisasm")
    if found_in_path is None:
        raise SetupError("nvdisasm is missing: install it with pip install 'nvidia-cuda-nvdisasm>=12.9'")
    return found_in_path


def disassemble(cubin: Cubin) -> Listing:
    """Every access to memory in a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.image)
        file.flush()
        # No data flow analysis: a disassembler of another version refuses it, and only comments come of it.
        command = [nvdisasm(), "-c", "-ndf", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"nvdisasm could not read {cubin.name} for {cubin.arch}: {said}")
    return read_listing(done.stdout)


def read_listing(text: str) -> Listing:
    """Reads nvdisasm's text (``-c``) of one kernel."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            code.append(_Instruction(int(found[1], 16), found[2] is not None, found[3], found[4]))
    if not code:
        raise SetupError("nvdisasm shows no instruction; its format has changed")
    loops = _loops(code, labels)
    innermost: list[frozenset[int]] = [
        min((loop for loop in loops if k in loop), key=len, default=frozenset()) for k in range(len(code))
    ]
    clocks = [k for k, i in enumerate(code) if "SR_GLOBALTIMER" in i.operands]
    spinning = {innermost[k] for k in clocks if innermost[k]}
    accesses: dict[int, Access] = {}
    for k, i in enumerate(code):
        base, *suffixes = i.opcode.split(".")
        if not _MEMORY.match(base) or base in _CONSTANT_BANK:
            continue
        space = _SPACES.get(base, "other")
        accesses[k] = Access(
            address=i.address,
            opcode=i.opcode,
            kind="other" if space == "other" else {"L": "load", "S": "store"}.get(base[0], "atomic"),
            space=space,
            nbytes=next((_WIDTHS[s] for s in suffixes if s in _WIDTHS), 4),
            strength=_strength(suffixes),
            in_loop=bool(innermost[k]),
            spins=innermost[k] in spinning,
            ordered=_ordered(code, k),
        )
    waits = [
        Wait(code[k].address, tuple(a for m, a in accesses.items() if innermost[m] == innermost[k])) for k in clocks
    ]
    successors = _successors(code, labels)
    passed, triggers = _at(code, "ACQBULK"), _at(code, "PREEXIT")

    def reached(start: Iterable[int], but: frozenset[int]) -> tuple[Access, ...]:
        there = _reachable(successors, start, but)
        return tuple(a for k, a in accesses.items() if k in there and a.space in ("global", "generic", "other"))

    return Listing(
        tuple(accesses.values()),
        tuple(waits),
        Counter(i.opcode for i in code),
        before_wait=reached([0], passed),
        after_trigger=reached([s for k in triggers for s in successors[k]], frozenset()),
    )


def _at(code: list[_Instruction], opcode: str) -> frozenset[int]:
    return frozenset(k for k, i in enumerate(code) if i.opcode == opcode)


def _reachable(successors: list[tuple[int, ...]], start: Iterable[int], but: frozenset[int]) -> set[int]:
    """The instructions that control can come to from `start` without executing one of `but`."""
    seen: set[int] = set()
    todo = list(start)
    while todo:
        k = todo.pop()
        if k not in seen and k not in but:
            seen.add(k)
            todo += successors[k]
    return seen


def _strength(suffixes: list[str]) -> str:
    if "STRONG" in suffixes:
        scope = suffixes[suffixes.index("STRONG") + 1]
        return {"SYS": "strong.sys", "GPU": "strong.gpu", "SM": "strong.cta", "CTA": "strong.cta"}.get(scope, "weak")
    return "constant" if "CONSTANT" in suffixes else "weak"


def _ordered(code: list[_Instruction], at: int) -> bool:
    """Whether a store comes behind a fence of system scope, or a load before the cache is invalidated, in a row with it."""
    base = code[at].opcode.split(".")[0]
    step = -1 if base[0] == "S" else 1
    k = at + step
    while 0 <= k < len(code):
        i = code[k]
        if i.opcode.startswith("MEMBAR") and i.opcode.endswith(".SYS") and step < 0:
            return True
        if i.opcode.startswith("CCTL.IVALL") and step > 0:
            return True
        other = i.opcode.split(".")[0]
        if (_MEMORY.match(other) and other not in _CONSTANT_BANK) or other in _BRANCHES or other in ("EXIT", "RET"):
            return False
        k += step
    return False


_BRANCHES = {"BRA", "JMP", "CALL", "BRX", "JMX", "BRXU", "JMXU", "WARPSYNC"}


def _successors(code: list[_Instruction], labels: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Where control may go from each instruction. A call returns to the next one; subroutines touch no memory here."""
    out: list[tuple[int, ...]] = []
    for k, i in enumerate(code):
        base = i.opcode.split(".")[0]
        after = (k + 1,) if k + 1 < len(code) else ()
        target = _TARGET.search(i.operands)
        if base in ("BRX", "JMX", "BRXU", "JMXU"):
            raise SetupError(
                f"{i.opcode} at {i.address:#x}: with indirect branches, loops cannot be told from the listing"
            )
        if base in ("EXIT", "RET", "KILL"):
            out.append(after if i.guarded or re.match(r"!?U?P\d", i.operands) else ())
        elif base in ("BRA", "JMP", "WARPSYNC") and target is not None:
            # Conditional: a guard, or an operand beside the target (a predicate, a set of lanes that diverged).
            conditional = i.guarded or i.operands.strip() != target[0]
            out.append((labels[target[1]], *after) if conditional else (labels[target[1]],))
        else:
            out.append(after)
    return out


def _loops(code: list[_Instruction], labels: Mapping[str, int]) -> list[frozenset[int]]:
    """The natural loops of the control flow, as sets of instruction indices; those with one head are joined.

    Not "the range of a backward branch": the compiler moves what is rarely executed out of line, and a poll that was
    hoisted out of its spin would still lie in the range of the loop over the message.
    """
    successors = _successors(code, labels)
    # Basic blocks, to keep the sets small.
    heads = sorted({0, *labels.values(), *(k + 1 for k, s in enumerate(successors) if s != (k + 1,))} - {len(code)})
    block_of = {}
    ends = [*heads[1:], len(code)]
    for b, (start, end) in enumerate(zip(heads, ends, strict=True)):
        block_of.update(dict.fromkeys(range(start, end), b))
    edges = [sorted({block_of[s] for s in successors[end - 1] if s in block_of}) for end in ends]
    entries: list[list[int]] = [[] for _ in heads]
    for b, targets in enumerate(edges):
        for t in targets:
            entries[t].append(b)
    dominators = _dominators(edges, entries)
    bodies: dict[int, set[int]] = {}
    for b, targets in enumerate(edges):
        for head in targets:
            if head not in dominators.get(b, ()):
                continue
            body, todo = bodies.setdefault(head, {head}), [b]
            while todo:
                at = todo.pop()
                if at not in body and at in dominators:
                    body.add(at)
                    todo += entries[at]
    return [frozenset(k for b in body for k in range(heads[b], ends[b])) for body in bodies.values()]


def _dominators(edges: list[list[int]], entries: list[list[int]]) -> dict[int, frozenset[int]]:
    """For each block that the first one reaches: the blocks on every way to it, itself included."""
    order, seen, todo = [], {0}, [0]
    while todo:
        b = todo.pop()
        order.append(b)
        for t in edges[b]:
            if t not in seen:
                seen.add(t)
                todo.append(t)
    everything = frozenset(order)
    found = dict.fromkeys(order, everything)
    found[0] = frozenset({0})
    changed = True
    while changed:
        changed = False
        for b in order[1:]:
            new = frozenset.intersection(*(found[e] for e in entries[b] if e in found)) | {b}
            if new != found[b]:
                found[b], changed = new, True
    return found


# ---- what touches the slots -----------------------------------------------------------------------------------------

# A kernel touches four kinds of memory, and machine code does not tell whose an address is. So the same source is compiled
# with three of them moved to shared memory, where no kernel here has anything; whatever accesses global memory then,
# accesses the slots, and has to be STRONG.SYS without exception. Each kind is told by something that the access itself
# carries, never by the name of the function that makes it:
#
# - The caller's arrays: their addresses get a C++ type of their own, which only load_payload and store_payload take. An
#   address of a slot passed to these does not compile, and a plain access anywhere else stays a weak global access.
# - Rank-local words: control() returns 2^40, and an access at GPU scope goes to shared memory if its address is there.
#   The compiler knows the address' upper bits and decides this; for any other address both branches stay.
# - The error record and the Lamport state: the stores through the pointers r and s, made of p.error and of control(). (The
#   latter's addresses contain an index, and the compiler does not always know the upper bits of such a sum.)
_CONTROL_BASE = "(1ull << 40)"
_MARKED_HEADER = """
namespace fc {
struct ArrayAddress {
  unsigned long long at;
  __device__ __forceinline__ ArrayAddress operator+(unsigned long long more) const { return ArrayAddress{at + more}; }
  __device__ __forceinline__ unsigned long long operator-(ArrayAddress other) const { return at - other.at; }
};
}  // namespace fc
"""
_MARKED_ACCESSES = """
namespace fc {
FC_DEVICE u32 moved(const void* p) { return u32(u64(p)); }
FC_DEVICE void st_moved(u32* p, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(moved(p)), "r"(v) : "memory"); }
FC_DEVICE u8 ld_array(const u8* p) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(moved(p)) : "memory");
  return u8(v);
}
FC_DEVICE u16 ld_array(const u16* p) {
  u16 v;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(moved(p)) : "memory");
  return v;
}
FC_DEVICE u32 ld_array(const u32* p) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(moved(p)) : "memory");
  return v;
}
FC_DEVICE u64 ld_array(const u64* p) {
  u64 v;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(v) : "r"(moved(p)) : "memory");
  return v;
}
FC_DEVICE Cell ld_array(const Cell* p) {
  Cell c;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(c.w[0]), "=r"(c.w[1]), "=r"(c.w[2]), "=r"(c.w[3]) : "r"(moved(p)) : "memory");
  return c;
}
FC_DEVICE void st_array(u8* p, u8 v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(moved(p)), "r"(u32(v)) : "memory"); }
FC_DEVICE void st_array(u16* p, u16 v) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(moved(p)), "h"(v) : "memory"); }
FC_DEVICE void st_array(u32* p, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(moved(p)), "r"(v) : "memory"); }
FC_DEVICE void st_array(u64* p, u64 v) { asm volatile("st.shared.b64 [%0], %1;" ::"r"(moved(p)), "l"(v) : "memory"); }
FC_DEVICE void st_array(Cell* p, Cell c) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
               ::"r"(moved(p)), "r"(c.w[0]), "r"(c.w[1]), "r"(c.w[2]), "r"(c.w[3]) : "memory");
}
}  // namespace fc
"""


def _sub(pattern: str, by: str | Callable[[re.Match[str]], str], text: str) -> str:
    new, count = re.subn(pattern, by, text, flags=re.DOTALL | re.MULTILINE)
    if count == 0:
        raise SetupError(
            f"the kernel sources have nothing like {pattern!r} any more: bring fcomm/machine_code.py in line"
        )
    return new


def _moved_by_address(found: re.Match[str]) -> str:
    """An access at GPU scope, as it is and, for addresses of rank-local words, to shared memory."""
    statement = found[0]
    pointer = re.findall(r'"l"\((\w+)\)', statement)[0]  # inputs begin with the address
    moved = re.sub(r"\.relaxed\.gpu\.global", ".shared", statement).replace(
        f'"l"({pointer})', f'"r"(u32(u64({pointer})))', 1
    )
    return f"if ((u64({pointer}) >> 40) == 1) {{ {moved} }} else {{ {statement} }}"


def marked(text: str) -> str:
    """A flattened source in which only accesses to the slots are accesses to global memory; see above."""
    text = _sub(r"^struct Params \{", lambda m: f"}}{_MARKED_HEADER}namespace fc {{\n{m[0]}", text)
    text = _sub(r"^  u64 in;", "  ArrayAddress in;", text)
    text = _sub(r"^  u64 out;", "  ArrayAddress out;", text)
    text = _sub(r"^    u64 array\[", "    ArrayAddress array[", text)
    text = _sub(r'asm volatile\("\w+\.relaxed\.gpu\.global[^;]*;[^;]*\);', _moved_by_address, text)
    text = _sub(
        r"(Control\* control\(const Params& \w+\) \{) return [^;]*;", rf"\1 return (Control*){_CONTROL_BASE};", text
    )
    text = _sub(r"\bst_(relaxed|release)_sys\(&r->", "st_moved(&r->", text)
    text = re.sub(r"\bu64 message,", "ArrayAddress message,", text)
    text = _sub(r"^struct Payload \{", lambda m: f"}}{_MARKED_ACCESSES}namespace fc {{\n{m[0]}", text)
    start = text.index("FC_DEVICE Payload load_payload")
    end = text.index("}  // namespace fc", text.index("FC_DEVICE void store_payload"))
    payload = _sub(r"\bu64 base,", "ArrayAddress base,", text[start:end])
    payload = _sub(r"const u64 at = base \+ span\.offset;", "const u64 at = (base + span.offset).at;", payload)
    payload = _sub(r"\b(ld|st)_plain\(", r"\1_array(", payload)
    return text[:start] + payload + text[end:]


def slot_listing(spec: Specialisation, arch: str, change: Callable[[str], str] | None = None) -> Listing:
    """A kernel's accesses, those to global memory being the ones that may touch a slot; `change` breaks the source."""
    text = spec.text() if change is None else change(spec.text())
    return disassemble(compile_text(f"{spec.name}-marked", marked(text), arch))


@dataclass(frozen=True)
class Expected:
    """How many instructions of the slot listing a kernel must have, all STRONG.SYS, where that can be counted by hand."""

    cell_loads: int
    cell_stores: int
    flag_loads: int
    flag_stores: int
    """Epoch words that are written with release."""


def expected(protocol: Protocol, n: int) -> Expected:
    """The accesses of a protocol's kernel among n ranks."""
    phases = protocol.encodings
    # A unit wider than an access is looked at once more as a whole.
    loads = sum(
        looks * (2 if e.unit_bytes > e.access_bytes else 1)
        for e, (_, looks) in zip(phases, _sites(protocol, n), strict=True)
    )
    pushes = sum(pushes for pushes, _ in _sites(protocol, n))
    # Setting back: a cell of each rank's slot, once for each region.
    regions = {e.name: e for e in phases}.values()
    rearming = sum(n for e in regions if e.rearm_bytes_per_cell == CELL_WIDTH)
    # A flag is looked at once before the clock is thought of, and then in the wait.
    chunked = sum(e.max_chunks > 0 for e in phases)
    return Expected(loads, pushes + rearming, 2 * chunked, chunked)


def _sites(protocol: Protocol, n: int) -> list[tuple[int, int]]:
    """For each phase: stores of cells where it pushes, and loads of cells where it looks for what was pushed.

    A thread that has something for all peers pushes it to all at once, and one that adds takes all ranks' cells at once,
    its own rank's predicated off. Where a peer gets, or is the source of, a cell of its own, a thread has one at a time.
    """
    return [
        (1 if p == "shard" and k == 0 else n - 1, 1 if k > 0 else n) for k, p in enumerate(protocol.algorithm.phases)
    ]


CELL_WIDTH, WORD_WIDTH = 16, 4


def slot_faults(protocol: Protocol, n: int, listing: Listing, unrolled: bool = False) -> list[str]:
    """What the slot listing of an encoded protocol has that contradicts its encodings; empty if all is well.

    Checked: nothing weaker than STRONG.SYS touches a slot, nothing has another width than a cell or a word, each wait
    polls, and as many accesses as can be counted are there; with `unrolled`, or more where a loop was unrolled.
    """
    found = []
    # Local memory is a thread's own: this listing's kernel may spill where the real one, which is checked for it, does not.
    slots = [a for a in listing.accesses if a.space not in ("shared", "local")]
    words_only_written = not any(e.max_chunks for e in protocol.encodings)
    for a in slots:
        if a.strength != "strong.sys":
            found.append(f"{a} may touch a slot and is not a strong access of system scope")
        if a.space != "global" or a.kind not in ("load", "store"):
            found.append(f"{a} is not a load or store of global memory")
        if a.nbytes not in (CELL_WIDTH, WORD_WIDTH):
            found.append(f"{a} has neither the width of a cell nor of a word")
        if a.kind == "load" and a.nbytes == WORD_WIDTH:
            if words_only_written:  # by the scrubbing before the epoch wraps, and where one word of a cell is set back
                found.append(f"{a} reads a word of a cell")
            elif not a.ordered:
                found.append(f"{a} is a poll of a flag without acquire")
    # A round of polling looks at all cells that a thread waits for, or at one word. The compiler does not always see that
    # cells behind a flag are never waited for, and keeps a wait for them: it polls as well, and is never entered.
    lawful = {(looks, 0) for _, looks in _sites(protocol, n)} | (set() if words_only_written else {(0, 1)})
    for wait in listing.waits:
        loads = [a for a in wait.accesses if a.space == "global" and a.kind == "load"]
        polls = _count(loads, "load", CELL_WIDTH), _count(loads, "load", WORD_WIDTH)
        if polls not in lawful:
            found.append(f"the wait at {wait.clock_at:#06x} polls {polls[0]} cells and {polls[1]} words in a round")
    if len(listing.waits) < len(protocol.encodings):
        found.append(f"{len(listing.waits)} waits look at the clock")
    counted = expected(protocol, n)
    have = Expected(
        cell_loads=_count(slots, "load", CELL_WIDTH),
        cell_stores=_count(slots, "store", CELL_WIDTH),
        flag_loads=_count(slots, "load", WORD_WIDTH),
        flag_stores=sum(a.kind == "store" and a.nbytes == WORD_WIDTH and a.ordered for a in slots),
    )
    more = have.cell_stores - counted.cell_stores
    if unrolled and more > 0 and more % min(pushes for pushes, _ in _sites(protocol, n)) == 0:
        more = 0
    found += [f"{have.cell_stores} stores of cells, not {counted.cell_stores}"] if more else []
    for what in ("cell_loads", "flag_loads", "flag_stores"):
        if getattr(have, what) != getattr(counted, what):
            found.append(f"{getattr(have, what)} {what.replace('_', ' ')}, not {getattr(counted, what)}")
    return [f"{protocol.name}, n = {n}: {fault}" for fault in found]


def baseline_faults(protocol: Protocol, listing: Listing) -> list[str]:
    """What the listing of a baseline's kernel, as it runs, has that no protocol may have.

    Baselines access slots as their originals do. What they share: polls poll, strong accesses are cells or words, and
    nothing is read by the non-coherent path, which may be older than what a barrier promised.
    """
    found = []
    for a in listing.accesses:
        if a.space not in ("global", "generic") or a.strength not in ("strong.sys", "strong.gpu", "weak"):
            found.append(f"{a} is no access that a kernel here makes")
        if a.strength == "strong.sys" and a.nbytes not in (CELL_WIDTH, WORD_WIDTH):
            found.append(f"{a} has neither the width of a cell nor of a word")
    idle = [w for w in listing.waits if not any((a.kind, a.strength) == ("load", "strong.sys") for a in w.accesses)]
    found += [f"the wait at {wait.clock_at:#06x} polls nothing" for wait in idle]
    if not listing.waits:
        found.append("no wait looks at the clock")
    return [f"{protocol.name}: {fault}" for fault in found]


def _count(accesses: Iterable[Access], kind: str, nbytes: int) -> int:
    return sum(a.kind == kind and a.nbytes == nbytes for a in accesses)


# ---- for tables -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeSummary:
    """Counts of a kernel's machine code, for a table beside measured times."""

    protocol: str
    dtype: str
    world_size: int
    arch: str
    registers: int
    code_bytes: int
    spill_bytes: int
    evidence_bytes: int
    """Width in machine code of the loads that see evidence."""
    system_loads: Mapping[int, int]
    """STRONG.SYS loads of slots in the code, by width in bytes."""
    system_stores: Mapping[int, int]
    """STRONG.SYS stores to slots in the code, by width in bytes: pushes, flags, setting back, scrubbing."""
    polls_per_round: tuple[int, ...]
    """Loads of slots in each wait's loop."""
    resident_blocks: int
    """Blocks, of as many threads as the kernel is compiled for, on one SM."""


def summary(spec: Specialisation, arch: str) -> CodeSummary:
    """What a kernel's machine code has, as numbers."""
    cubin = compile_specialisation(spec, arch)
    # A baseline's listing is that of the kernel as it runs: its STRONG.SYS stores include those to the error record.
    listing = slot_listing(spec, arch) if spec.protocol.encodings else disassemble(cubin)
    slots = [a for a in listing.accesses if a.space == "global" and a.strength == "strong.sys"]
    polls = [[a for a in w.accesses if a in slots and a.kind == "load"] for w in listing.waits]

    def by_width(kind: str) -> dict[int, int]:
        return dict(sorted(Counter(a.nbytes for a in slots if a.kind == kind).items()))

    return CodeSummary(
        protocol=spec.protocol.name,
        dtype=spec.dtype.name,
        world_size=spec.world_size,
        arch=arch,
        registers=cubin.registers,
        code_bytes=cubin.code_bytes,
        spill_bytes=cubin.spill_bytes,
        evidence_bytes=min((a.nbytes for p in polls for a in p), default=0),
        system_loads=by_width("load"),
        system_stores=by_width("store"),
        polls_per_round=tuple(len(p) for p in polls),
        resident_blocks=architecture(arch).resident_blocks(cubin.registers, cubin.threads),
    )
