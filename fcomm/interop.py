"""Other libraries' arrays: where they lie and what is in them, without copying, converting or importing anything.

CuPy arrays and PyTorch tensors are looked at directly, since a call's host time counts. Anything else is asked through
DLPack first (the only protocol of the two that knows bfloat16), then through ``__cuda_array_interface__``.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from fcomm.backends.base import View
from fcomm.errors import ArgumentError

DLPACK_CUDA, DLPACK_CUDA_MANAGED = 2, 13
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}

_names: dict[Any, str] = {}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def torch_module() -> Any:
    """PyTorch if the program has imported it, else None."""
    return sys.modules.get("torch")


def is_torch(x: Any) -> bool:
    """Whether x is a PyTorch tensor."""
    torch = torch_module()
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(dtype: Any) -> str:
    """A dtype's name as NumPy (or ml_dtypes) spells it; NumPy takes microseconds to say it, so it is asked once."""
    name = _names.get(dtype)
    if name is None:
        name = str(dtype).removeprefix("torch.") if not isinstance(dtype, np.dtype) else dtype.name
        _names[dtype] = name
    return name


def _wrong_device(kind: str, found: object, device: int) -> ArgumentError:
    return ArgumentError(
        f"the {kind} is on device {found}, but this rank's communicator uses device {device}: move it there first"
    )


def _host(x: Any) -> ArgumentError:
    return ArgumentError(
        f"the {type(x).__name__} is in host memory: copy it to the GPU first (cupy.asarray, or .cuda())"
    )


def view_cupy(x: Any, device: int) -> View:
    """A CuPy array as kernels see it."""
    data = x.data
    if data.device_id != device and x.size:
        raise _wrong_device("CuPy array", data.device_id, device)
    # What x.flags.c_contiguous says; the object in between takes half a microsecond to make.
    return View(data.ptr, x.nbytes, x.size, dtype_name(x.dtype), x.shape, x._c_contiguous, x)


def view_torch(x: Any, device: int) -> View:
    """A PyTorch tensor as kernels see it."""
    where = x.device
    if where.type != "cuda":
        raise _host(x) if where.type == "cpu" else ArgumentError(f"the tensor is on a {where.type} device, not on CUDA")
    if where.index != device:
        raise _wrong_device("tensor", where.index, device)
    return _torch_view(x)


def view_torch_host(x: Any) -> View:
    """A PyTorch tensor in host memory as the cpu backend's kernels see it."""
    if x.device.type != "cpu":
        raise ArgumentError(f"the tensor is on {x.device}, but this communicator's backend is cpu: move it there first")
    return _torch_view(x)


def _torch_view(x: Any) -> View:
    count = x.numel()
    return View(
        x.data_ptr(), count * x.element_size(), count, dtype_name(x.dtype), tuple(x.shape), x.is_contiguous(), x
    )


def view_foreign(x: Any, device: int) -> View:
    """Any other array, through DLPack or else ``__cuda_array_interface__``."""
    if isinstance(x, np.ndarray):
        raise _host(x)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        kind, ordinal = (int(v) for v in x.__dlpack_device__())
        if kind not in (DLPACK_CUDA, DLPACK_CUDA_MANAGED):
            raise _host(x) if kind in (1, 3) else ArgumentError(f"the {type(x).__name__} is not in CUDA memory")
        if ordinal != device:
            raise _wrong_device(type(x).__name__, ordinal, device)
        # -1: no synchronization; the caller orders streams, as for any other array.
        return view_dlpack(x, x.__dlpack__(stream=-1))
    if hasattr(x, "__cuda_array_interface__"):
        return _view_interface(x, device)
    raise ArgumentError(
        f"a {type(x).__name__} is no GPU array: pass a CuPy array, or one with DLPack or __cuda_array_interface__"
    )


def view_dlpack(x: Any, capsule: Any) -> View:
    """Reads a DLPack capsule without consuming it; x keeps the memory alive."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    t = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    kind = _DLPACK_KINDS.get(t.code)
    if t.lanes != 1 or kind is None:
        raise ArgumentError(
            f"DLPack type code {t.code} with {t.lanes} lanes is not an element type that can be handled"
        )
    name = "bool" if kind == "bool" else f"{kind}{t.bits}"
    shape = tuple(int(t.shape[i]) for i in range(t.ndim))
    strides = [int(t.strides[i]) for i in range(t.ndim)] if t.strides else None
    count = int(np.prod(shape, dtype=np.int64))
    address = (t.data or 0) + int(t.byte_offset)
    return View(address, count * (t.bits // 8), count, name, shape, _dense(shape, strides), x)


def _view_interface(x: Any, device: int) -> View:
    from cupy.cuda import runtime

    facts = x.__cuda_array_interface__
    dtype, shape = np.dtype(facts["typestr"]), tuple(int(n) for n in facts["shape"])
    address, strides = int(facts["data"][0]), facts.get("strides")
    count = int(np.prod(shape, dtype=np.int64))
    if count:
        where = runtime.pointerGetAttributes(address).device
        if where != device:
            raise _wrong_device(type(x).__name__, where, device)
    producer = facts.get("stream")
    if producer is not None and not runtime.streamIsCapturing(producer):
        runtime.streamSynchronize(producer)  # version 3 of the interface: it is the consumer that waits
    steps = None if strides is None else [int(s) // dtype.itemsize for s in strides]
    return View(address, count * dtype.itemsize, count, dtype.name, shape, _dense(shape, steps), x)


def _dense(shape: tuple[int, ...], strides: list[int] | None) -> bool:
    """Whether strides (in elements) are those of a C-contiguous array."""
    if strides is None or 0 in shape:
        return True
    step = 1
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and s != step:
            return False
        step *= n
    return True
