"""`fcomm.calibrate`: a cost model of this machine, measured in a minute by the ranks of a communicator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fcomm.errors import SetupError

if TYPE_CHECKING:
    from fcomm.communicator import Communicator
    from fcomm.cost_model import Model


def calibrate(comm: Communicator, budget_s: float = 60.0, *, dtype: str | None = None, save: bool = True) -> Model:
    """Measures what the selector may choose, fits the cost model to it, and chooses by it from now on. Collective.

    For the communicator's number of ranks, launch feature and backend. The same result, or the same error, on all ranks.

    Parameters
    ----------
    comm : Communicator
        Of two ranks or more. Nothing of it may be running; prepared calls stay as they are.
    budget_s : float
        Seconds for everything. Rank 0 shows progress on stderr.
    dtype : str, optional
        Element type that is measured; bfloat16, on the cpu backend float32.
    save : bool
        Keep the model in the user's cache folder (FCOMM_CACHE_DIR), where communicators of this machine find it.

    Raises
    ------
    ArgumentError
        For one rank, or a budget that is too short.
    SetupError
        Where ranks share a GPU in turns, without MPS; or without the package `experiments`.
    RecordError, ModelError
        Where results were wrong or times are too few for a fit; where the model cannot be written.
    """
    started_s = time.monotonic()
    try:  # measuring and fitting are the experiments' business, which nothing else here needs
        from experiments import calibrate as tool
        from experiments.request import GPU_LAUNCHES
        from experiments.sweep import on_root
    except ModuleNotFoundError as error:
        raise SetupError(
            f"calibrating needs the package `experiments`, which comes with flash-comm, and {error.name} is missing"
        ) from None
    launches = tuple(dict.fromkeys([*GPU_LAUNCHES, comm.dependent_launch])) if comm.backend.name == "cuda" else ()
    wanted = tool.request(comm.backend.name, (comm.world_size,), budget_s, dtype, launches)
    model = tool.calibrate(comm.mpi, wanted, started_s).model
    if save:
        on_root(comm.mpi, lambda: tool.save(model))
    comm.use_model(model)
    return model
