"""Run a module with a clock that is never stepped.

Started as ``python -m freetrain_parsl.executor.htex.steady MODULE ARGUMENT …``.

HTEX uses the wall clock for its heartbeats: a step forward by more than the threshold would end every worker pool.
Worker processes, which run users' code, are separate processes and see the real wall clock.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import time
from typing import Final

from freetrain_parsl.executor.driver.clock import SteadyClock

__all__ = ["LEAN_PARSL", "run_steadily"]

LEAN_PARSL: Final = "freetrain_parsl.executor.htex.lean_parsl"


def run_steadily(module: str) -> None:
    """Run a module as the main program of this process, with ``sys.argv`` unchanged."""
    time.time = SteadyClock()
    importlib.import_module(LEAN_PARSL)
    # As if started by the interpreter: multiprocessing looks up functions in the main module.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.argv[0]
    run_steadily(sys.argv[0])
