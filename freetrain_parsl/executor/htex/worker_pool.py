"""Run HTEX's worker pool: ``python -m freetrain_parsl.executor.htex.worker_pool ARGUMENT …``.

Parsl starts a new interpreter for each worker, and for the pool's manager before them, which imports Parsl again, and
each slot then imports torch: seconds of CPU time each, in a window of minutes. Here they are forked from one server,
which imports everything once per node while the pool starts (`warm_imports`).

The pool and HTEX's interchange run with a clock that is never stepped, and without optional packages of Parsl.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
import time
from multiprocessing import forkserver
from typing import Final

from freetrain_parsl.executor.driver.clock import SteadyClock
from freetrain_parsl.executor.slot.pilot import hold_pool_directory
from freetrain_parsl.interpreters import in_root_directory

__all__ = ["WARM", "WARM_IMPORTS", "import_lean_parsl", "run_steadily"]

WARM_IMPORTS: Final = "freetrain_parsl.executor.htex.warm_imports"
_POOL: Final = "parsl.executors.high_throughput.process_worker_pool"

# The imports of a slot, after Parsl, until its first step, but for torch's compiler (`deferred_compiler`). None of them
# may touch an accelerator: a forked process cannot use one that its parent has initialized.
WARM: Final = (
    _POOL,
    "freetrain_parsl.executor.slot.slot",
    "freetrain_parsl.training.fragment",
)

_OPTIONAL: Final = ("globus_compute_sdk", "sqlalchemy")


def import_lean_parsl() -> None:
    """Import Parsl without optional packages that this executor never uses: in HTEX's processes, workers and commands.

    Parsl imports the SDK of Globus Compute and SQLAlchemy wherever they are installed: more than half of the processor
    time of its import. The SDK also starts a thread, which a process from which others are forked must not have. User
    code in these processes may still import both, but Parsl's executor for Globus Compute and its monitoring are off
    there.
    """
    unused = [name for name in _OPTIONAL if name not in sys.modules]
    for name in unused:
        sys.modules[name] = None  # type: ignore[assignment]  # an import raises ImportError, which Parsl expects
    try:
        import parsl.executors  # noqa: F401
    finally:
        for name in unused:
            del sys.modules[name]


def run_steadily(module: str) -> None:
    """Run a module as the main program of this process, with ``sys.argv`` unchanged and a clock that is never stepped.

    HTEX uses the wall clock for its heartbeats: a step forward by more than the threshold would end every worker pool.
    Worker processes, which run users' code, are separate processes and see the real wall clock.
    """
    time.time = SteadyClock()
    import_lean_parsl()
    # As if started by the interpreter: multiprocessing looks up functions in the main module.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Start the fork server, then run the pool as this process's main program."""
    _use_pool_directory()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WARM_IMPORTS])
    with in_root_directory():  # the slots go to the pool's directory again
        forkserver.ensure_running()
    import_lean_parsl()

    import parsl.multiprocessing

    parsl.multiprocessing.SpawnContext = context  # type: ignore[assignment]
    run_steadily(_POOL)


def _use_pool_directory() -> None:
    """Let multiprocessing create its sockets in the pool's directory, here and in all processes that this one starts.

    Other temporary files are created where they always are, but for those of jobs that share a node (see
    `executor.slot.neighbours`).
    """
    directory = hold_pool_directory()
    if directory is not None:
        # As `multiprocessing.util.get_temp_dir` sets it. A directory within this one would make the paths too long.
        multiprocessing.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]  # noqa: SLF001


if __name__ == "__main__":
    main()
