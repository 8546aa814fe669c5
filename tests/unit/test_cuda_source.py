"""What can be known of the CUDA side without a GPU: everything compiles, nothing spills, and the structs are the same."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import numpy as np
import pytest

from fcomm.backends.cpu import CpuKernel, build
from fcomm.dtypes import BFLOAT16, BYTES, FLOAT32, REDUCIBLE
from fcomm.errors import SetupError
from fcomm.layout import CONTROL_DTYPE, ERROR_DTYPE, params_dtype
from fcomm.machine_code import Cubin, compile_text, nvrtc
from fcomm.protocols import protocols
from fcomm.source import MAX_THREADS, OPTIONS, Specialisation, flatten

HELPERS = {
    "probe": ("probe.cuh", "fc::probe"),
    "meet": ("measure/meet.cuh", "fc::meet"),
    "floor": ("measure/floor.cuh", "fc::floor_copy<fc::Bytes>"),
    "filler": ("measure/neighbours.cuh", "fc::filler"),
    "norm": ("measure/neighbours.cuh", "fc::rms_norm<fc::BF16>"),
    "ping-pong": ("measure/pairs.cuh", "fc::ping_pong<false>"),
    "ping-pong of a flag": ("measure/pairs.cuh", "fc::ping_pong<true>"),
    "stream": ("measure/pairs.cuh", "fc::stream"),
    "clock": ("measure/pairs.cuh", "fc::clock_rate"),
}


def specialisations(ranks: range) -> Iterator[Specialisation]:
    for p in protocols().values():
        for t in p.dtypes:
            for n in ranks:
                yield Specialisation(p, t, n)


EVERY = list(specialisations(range(2, 9)))
WIDEST = [s for s in EVERY if s.world_size == 8 and s.dtype in (BFLOAT16, BYTES)]  # the type with most code
# Each protocol at the largest rank count, one of them with every element type, some at an odd count; the other
# architectures take turns. A third of all that there is, still, is what `make test-full` compiles.
SOME = [(s, 90) for s in WIDEST]
SOME += [(s, 90) for s in EVERY if s.world_size == 8 and s.protocol.name == "one_shot.ll" and s.dtype != BFLOAT16]
SOME += [(s, 90) for s in EVERY if s.world_size == 3 and s.dtype in (FLOAT32, BYTES)][::4]
SOME += [(s, (80, 100)[k % 2]) for k, s in enumerate(WIDEST)]
ALL = [(s, 90) for s in EVERY if s.world_size in (2, 5, 8)] + [(s, arch) for s in WIDEST for arch in (80, 100)]
ALL = [pair for pair in ALL if pair not in SOME]


def compile_cubin(name: str, text: str, arch: int) -> Cubin:
    try:
        nvrtc()
    except SetupError as error:  # the wheel with the compiler is an extra
        pytest.skip(str(error))
    return compile_text(name, text, f"sm_{arch}")


def check(spec: Specialisation, arch: int) -> None:
    assert compile_cubin(spec.name, spec.text(), arch).faults() == []


@pytest.mark.parametrize(("spec", "arch"), SOME, ids=lambda v: v.name if isinstance(v, Specialisation) else f"sm_{v}")
def test_compiles_and_does_not_spill(spec: Specialisation, arch: int) -> None:
    check(spec, arch)


@pytest.mark.full
@pytest.mark.parametrize(("spec", "arch"), ALL, ids=lambda v: v.name if isinstance(v, Specialisation) else f"sm_{v}")
def test_all_compile_and_none_spills(spec: Specialisation, arch: int) -> None:
    check(spec, arch)


@pytest.mark.parametrize("name", HELPERS)
def test_the_helpers_compile(name: str) -> None:
    header, call = HELPERS[name]
    lines = ["#define FC_N 8", f"#define FC_MAX_THREADS {MAX_THREADS}", f'#include "{header}"', f"FC_KERNEL(({call}))"]
    assert compile_cubin(name, flatten("\n".join(lines)), 90).registers <= 64


def test_no_arithmetic_options_are_left_to_chance() -> None:
    assert "--fmad=false" in OPTIONS
    assert "--ftz=false" in OPTIONS
    assert not [o for o in OPTIONS if re.search("fast", o)]


@pytest.mark.parametrize("n", range(2, 9))
def test_structs_are_the_same_on_the_device(n: int) -> None:
    """The compiler for the device checks sizes and places; the ones expected are NumPy's."""
    params = params_dtype(n)
    lines = [
        f"#define FC_N {n}",
        f"#define FC_MAX_THREADS {MAX_THREADS}",
        '#include "params.cuh"',
        "#define offsetof(T, m) __INTADDR__(&((T*)0)->m)",
    ]
    facts = {
        "sizeof(fc::Params)": params.itemsize,
        "sizeof(fc::Control)": CONTROL_DTYPE.itemsize,
        "sizeof(fc::ErrorRecord)": ERROR_DTYPE.itemsize,
    }
    member = {"in": "in", "out": "out", "region": "region", "rank": "rank", "protocol": "protocol", "error": "error"}
    facts |= {f"offsetof(fc::Params, {m})": params.fields[f][1] for f, m in member.items()}  # type: ignore[index]
    facts |= {
        f"offsetof(fc::Control, {f})": CONTROL_DTYPE.fields[f][1]  # type: ignore[index]
        for f in ("epoch", "poison", "ticket", "claim", "lamport")
    }
    facts |= {
        f"offsetof(fc::ErrorRecord, {m})": ERROR_DTYPE.fields[f][1]  # type: ignore[index]
        for f, m in {
            "valid": "valid",
            "nbytes": "bytes_low",
            "cell": "cell_low",
            "seen": "seen",
            "channel": "channel",
        }.items()
    }
    lines += [f'static_assert({what} == {value}, "{what}");' for what, value in facts.items()]
    lines += ['extern "C" __global__ void fc_kernel() {}']
    compile_cubin("structs", flatten("\n".join(lines)), 90)


def test_structs_are_the_same_on_the_host() -> None:
    spec = Specialisation(protocols()["one_shot.ll"], REDUCIBLE["float32"], 3)
    sizes = CpuKernel(build(spec)).struct_sizes
    assert sizes == (params_dtype(3).itemsize, CONTROL_DTYPE.itemsize, ERROR_DTYPE.itemsize)


def test_launch_arguments_are_a_pointer_to_a_pointer_to_the_struct() -> None:
    """What `CudaBackend` hands to the driver, followed by hand."""
    from fcomm.backends.cuda import CudaBackend

    backend = CudaBackend.__new__(CudaBackend)
    backend._packed, backend._last = {}, [None]
    params = np.zeros(1, params_dtype(2))
    params["nbytes"] = 4321
    address = backend._pack(params).pointers_address
    first = ctypes.c_void_p.from_address(address).value
    assert first == params.ctypes.data
    offset = params.dtype.fields["nbytes"][1]  # type: ignore[index]
    assert ctypes.c_uint64.from_address(first + offset).value == 4321
    params["nbytes"] = 99  # a plan writes into the same memory for every call
    assert ctypes.c_uint64.from_address(first + offset).value == 99
    assert backend._packed[id(params)].params is params
