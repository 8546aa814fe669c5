"""What can go wrong, one class for each way of reacting to it. Every message is one sentence that says what to do."""

from __future__ import annotations


class FcommError(Exception):
    """Base of all errors of this package."""


class ArgumentError(FcommError, ValueError):
    """The caller's array, size or option is not one that can be handled."""


class NotAdmittedError(FcommError, ValueError):
    """A protocol was asked for by name where it may not run; the message says why."""


class SetupError(FcommError, RuntimeError):
    """The communicator cannot be built here: no compiler, no MPI, no device, too little memory."""


class DisagreementError(FcommError, RuntimeError):
    """The ranks were asked to do different things; raised on all of them."""


class HangError(FcommError, RuntimeError):
    """A wait for a peer did not end in time.

    Attributes
    ----------
    record : dict
        rank, peer, block, blocks_started, blocks, epoch, protocol, nbytes, cell, expected, seen, channel.
    """

    def __init__(self, message: str, record: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.record = record or {}


class DeviceError(FcommError, RuntimeError):
    """The GPU failed under this process, or a process that shares it did; the process has to be started anew."""


class ClosedError(FcommError, RuntimeError):
    """The communicator was closed, or needs `reset()` after a hang."""


class RecordError(FcommError, RuntimeError):
    """A run's records cannot be written or read."""


class ModelError(FcommError, RuntimeError):
    """A cost model cannot be used here: damaged, of another machine or version, or without the coefficients asked for."""
