"""Every environment variable that the package reads, in one place. ``docs/settings.md`` is checked against this file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fcomm.errors import ArgumentError, NotAdmittedError


@dataclass(frozen=True)
class Setting:
    """One variable: its name, what it does, and its default as a user would write it."""

    name: str
    meaning: str
    default: str


SETTINGS = (
    Setting("FCOMM_BACKEND", "backend that `backend=\"auto\"` stands for: auto, cuda or cpu", "auto"),
    Setting("FCOMM_PROTOCOL", "protocol that `protocol=\"auto\"` stands for; must be admitted", "auto"),
    Setting("FCOMM_PLAIN", "1: all but the plain baseline (barrier.*) is switched off", "0"),
    Setting("FCOMM_MODEL", "file of the cost model, or `seed` for the coefficients of the package", "the one of this machine in the cache folder"),
    Setting("FCOMM_TIMEOUT_S", "seconds after which a wait for a peer is given up", "30"),
    Setting("FCOMM_CHECKED", "1: ranks compare every call's signature before it is launched", "0"),
    Setting("FCOMM_CACHE_DIR", "folder of compiled kernels and fitted models", "the user's cache folder"),
    Setting("FCOMM_CXX", "C++ compiler of the cpu backend", "CXX, else c++, g++ or clang++"),
)  # fmt: skip


_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _get(name: str) -> str | None:
    assert any(s.name == name for s in SETTINGS), name
    value = os.environ.get(name, "").strip()
    return value or None


def _is_set(name: str) -> bool:
    value = (_get(name) or "0").lower()
    if value not in _YES + _NO:
        raise ArgumentError(f"{name}={value} is neither yes nor no: use 1 or 0")
    return value in _YES


def backend() -> str:
    """``auto``, ``cuda`` or ``cpu``."""
    value = _get("FCOMM_BACKEND") or "auto"
    if value not in ("auto", "cuda", "cpu"):
        raise ArgumentError(f"FCOMM_BACKEND={value} is not one of auto, cuda, cpu")
    return value


def protocol() -> str | None:
    """Name of the forced protocol, or None. Encodings of one's own have to be registered before it is asked for."""
    value = _get("FCOMM_PROTOCOL")
    if value is None or value == "auto":
        return None
    from fcomm.protocols import protocol as known

    try:
        return known(value).name
    except NotAdmittedError as error:
        raise ArgumentError(f"FCOMM_PROTOCOL={value}: {error}") from None


def plain() -> bool:
    """The kill switch: whether everything but the plain baseline is off."""
    return _is_set("FCOMM_PLAIN")


def model() -> str | None:
    """The cost model that was named: a path, or ``seed``; None where none was."""
    return _get("FCOMM_MODEL")


def timeout_s() -> float:
    """Seconds until a wait is given up; positive."""
    text = _get("FCOMM_TIMEOUT_S") or "30"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ArgumentError(f"FCOMM_TIMEOUT_S={text} is not a positive number of seconds")
    return value


def checked() -> bool:
    """Whether ranks compare their calls before launching them."""
    return _is_set("FCOMM_CHECKED")


def cache_dir() -> Path:
    """Folder for compiled kernels and fitted models, for this user alone."""
    value = _get("FCOMM_CACHE_DIR")
    if value:
        return Path(value)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash-comm"


def compiler() -> str | None:
    """C++ compiler that the user named, or None."""
    return _get("FCOMM_CXX") or os.environ.get("CXX") or None
