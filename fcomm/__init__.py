"""flash-comm: all-reduce and all-gather between the GPUs of one server, for messages of a few KiB to a MiB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fcomm import epilogue, errors
from fcomm.epilogue import Epilogue
from fcomm.protocols import Encoding, protocols, register

if TYPE_CHECKING:
    from fcomm.calibration import calibrate
    from fcomm.communicator import Communicator

__version__ = "0.1.0"
__all__ = [
    "Communicator",
    "Encoding",
    "Epilogue",
    "__version__",
    "calibrate",
    "epilogue",
    "errors",
    "protocols",
    "register",
]


def __getattr__(name: str) -> Any:
    # Records, models and the registry are of use where no MPI library is; only a communicator needs one.
    if name == "Communicator":
        from fcomm.communicator import Communicator

        return Communicator
    if name == "calibrate":
        from fcomm.calibration import calibrate

        return calibrate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
