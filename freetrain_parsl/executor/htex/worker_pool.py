"""Run HTEX's worker pool: ``python -m freetrain_parsl.executor.htex.worker_pool ARGUMENT …``.

Parsl starts a new interpreter for each worker, and for the pool's manager before them, which imports Parsl again, and
each slot then imports torch: seconds of CPU time each, in a window of minutes. Here they are forked from one server,
which imports everything once per node while the pool starts (`warm_imports`).
"""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing import forkserver
from typing import Final

from freetrain_parsl.executor.htex.steady import LEAN_PARSL, run_steadily
from freetrain_parsl.executor.slot.pool_directory import hold_pool_directory
from freetrain_parsl.interpreters import in_root_directory

__all__ = ["WARM", "WARM_IMPORTS"]

WARM_IMPORTS: Final = "freetrain_parsl.executor.htex.warm_imports"
_POOL: Final = "parsl.executors.high_throughput.process_worker_pool"

# The imports of a slot until its first step; `torch.optim` imports the compiler front end with the first optimizer.
# None of them may touch an accelerator: a forked process cannot use one that its parent has initialized.
WARM: Final = (
    LEAN_PARSL,
    _POOL,
    "freetrain_parsl.executor.slot.slot",
    "freetrain_parsl.training.fragment",
    "torch._dynamo",
)


def main() -> None:
    """Start the fork server, then run the pool as this process's main program."""
    _use_pool_directory()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WARM_IMPORTS])
    with in_root_directory():  # the slots go to the pool's directory again
        forkserver.ensure_running()
    importlib.import_module(LEAN_PARSL)

    import parsl.multiprocessing

    parsl.multiprocessing.SpawnContext = context  # type: ignore[assignment]
    run_steadily(_POOL)


def _use_pool_directory() -> None:
    """Let multiprocessing create its sockets in the pool's directory, here and in all processes that this one starts.

    Other temporary files, those of users' functions among them, are created where they always are.
    """
    directory = hold_pool_directory()
    if directory is not None:
        # As `multiprocessing.util.get_temp_dir` sets it. A directory within this one would make the paths too long.
        multiprocessing.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]  # noqa: SLF001


if __name__ == "__main__":
    main()
