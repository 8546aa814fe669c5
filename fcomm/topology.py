"""Which GPU a rank has, who shares it, and what lies between two of them.

GPUs are told apart by UUID: under CUDA_VISIBLE_DEVICES the same ordinal means another device in another process.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fcomm.protocols import HOST_SLOTS

SAME_DEVICE = "same"
NVLINK = "nvlink"
PCIE = "pcie"
UNKNOWN = "unknown"

LINK_CAPABILITIES = {
    SAME_DEVICE: frozenset({"atomic4", "atomic8", "atomic16", "acquire_release", "line128"}),
    NVLINK: frozenset({"atomic4", "atomic8", "atomic16", "acquire_release", "line128"}),
    # A 128-byte line may be split on PCIe, and so may 16 bytes.
    PCIE: frozenset({"atomic4", "atomic8", "acquire_release"}),
    UNKNOWN: frozenset({"atomic4", "atomic8", "acquire_release"}),
}
"""What an encoding may rely on, by kind of link. A probe can veto an encoding, it cannot prove one."""
HOST_CAPABILITIES = frozenset({"atomic8", "acquire_release", HOST_SLOTS})
"""The same where slots lie in host memory, which every rank reaches over its own bus."""

_MPS_TOOL = "nvidia-cuda-mps-control"
_MPS_ENABLED = 133  # cudaDevAttrMpsEnabled: contexts on this device are shared by an MPS server
_P2P_ACCESS, _P2P_NATIVE_ATOMICS = 2, 3  # CU_DEVICE_P2P_ATTRIBUTE_...
_SMALL_SM = {(7, 0), (7, 2), (7, 5), (8, 0)}  # compute capabilities with 64 instead of 128 cores in an SM


@dataclass(frozen=True)
class Device:
    """The GPU of one rank, as every rank may know it.

    `sms` is the number of SMs that this process can use (an MPS share may limit it), `sms_total` that of the whole GPU.
    """

    ordinal: int
    uuid: str
    name: str
    compute_capability: tuple[int, int]
    sms: int
    sms_total: int
    mps: bool


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def device_uuid(ordinal: int) -> str:
    """UUID as ``GPU-...``; the PCI address where the driver tells none."""
    raw = (ctypes.c_ubyte * 16)()
    try:
        failed = _driver().cuDeviceGetUuid_v2(ctypes.byref(raw), ctypes.c_int(ordinal))
    except (OSError, AttributeError):
        failed = 1
    if failed:
        from cupy.cuda import runtime

        return f"PCI-{runtime.deviceGetPCIBusId(ordinal)}"
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def mps_control() -> Path:
    """Where an MPS daemon for this process listens, if there is one."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control"


def mps_enabled(ordinal: int) -> bool:
    """Whether this process's contexts on the device are shared through an MPS server."""
    from cupy.cuda import runtime

    try:
        if runtime.deviceGetAttribute(_MPS_ENABLED, ordinal):
            return True
    except runtime.CUDARuntimeError:  # a driver that does not know the question
        pass
    return mps_control().exists() and bool(_ask_mps())


@cache
def mps_is_dead() -> bool:
    """Whether there is an MPS pipe for this process and nobody at its other end.

    To be asked before CUDA is: with a dead daemon CUDA fails, waits or goes on without MPS, as its version has it.
    """
    return mps_control().exists() and shutil.which(_MPS_TOOL) is not None and _ask_mps() is None


MPS_PATIENCE_S = 10.0


def _ask_mps() -> str | None:
    """The daemon's list of servers (it starts one for its first client); None if it does not answer.

    It speaks with one at a time and turns others away, so the ranks, which all ask at once, try again.
    """
    end = time.monotonic() + MPS_PATIENCE_S
    while True:
        try:
            done = subprocess.run(
                [_MPS_TOOL],
                input="get_server_list\n",
                capture_output=True,
                text=True,
                timeout=MPS_PATIENCE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return done.stdout.strip()
        if time.monotonic() > end:
            return None
        time.sleep(random.uniform(0.05, 0.3))


def describe_device(ordinal: int) -> Device:
    """Facts about a device of this process. Its context must exist already: an MPS share shows only then."""
    from cupy.cuda import runtime

    props = runtime.getDeviceProperties(ordinal)
    capability = (int(props["major"]), int(props["minor"]))
    whole = int(props["multiProcessorCount"])
    usable = min(whole, int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, ordinal)))
    identity = device_uuid(ordinal)
    mps = mps_enabled(ordinal)
    total = max(whole, _total_sms(identity, capability, usable)) if mps else whole
    return Device(ordinal, identity, props["name"].decode(), capability, usable, total, mps)


def _total_sms(identity: str, capability: tuple[int, int], usable: int) -> int:
    """SMs of the whole GPU as seen from an MPS client, whose own view may be limited to a share."""
    cores = _nvml_cores(identity)
    if cores:
        return cores // (64 if capability in _SMALL_SM else 128)
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
    try:
        percent = min(100.0, float(share))
    except ValueError:
        percent = 100.0
    if not 0 < percent < 100:
        return usable
    return max(usable, int((usable - 2) * 100 / percent))  # the share may have been rounded up by two SMs


def _nvml_cores(identity: str) -> int:
    """Cores of a GPU as the management library counts them; 0 where it does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return 0
        try:
            handle, cores = ctypes.c_void_p(), ctypes.c_uint()
            if nvml.nvmlDeviceGetHandleByUUID(identity.encode(), ctypes.byref(handle)) != 0:
                return 0
            return 0 if nvml.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores)) != 0 else int(cores.value)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0


def sm_share(devices: Sequence[Device], rank: int) -> int:
    """SMs that this rank may fill: an equal part of its GPU's, and no more than it can use.

    A share set through MPS is a limit and no reservation, so it does not replace the division by the number of ranks;
    where it is the smaller of the two it has been divided already.
    """
    own = devices[rank]
    sharing = [d for d in devices if d.uuid == own.uuid]
    return max(1, min(own.sms, max(d.sms_total for d in sharing) // len(sharing)))


def link(own: Device, peer: Device) -> str:
    """Kind of link between two ranks' devices, from the first one's process."""
    if own.uuid == peer.uuid:
        return SAME_DEVICE
    ordinal = ordinal_of(peer.uuid)
    if ordinal is None:
        return UNKNOWN  # not visible to this process: mapping its memory may still work
    if not _p2p_attribute(_P2P_ACCESS, own.ordinal, ordinal):
        return UNKNOWN
    return NVLINK if _p2p_attribute(_P2P_NATIVE_ATOMICS, own.ordinal, ordinal) else PCIE


def ordinal_of(identity: str) -> int | None:
    """Ordinal in this process of the device with that UUID; None if it cannot see the device."""
    from cupy.cuda import runtime

    for ordinal in range(runtime.getDeviceCount()):
        if device_uuid(ordinal) == identity:
            return ordinal
    return None


def _p2p_attribute(attribute: int, source: int, target: int) -> int:
    value = ctypes.c_int()
    try:
        failed = _driver().cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, source, target)
    except (OSError, AttributeError):
        return 0
    return 0 if failed else int(value.value)
