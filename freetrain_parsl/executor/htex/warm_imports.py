"""Import what a slot needs until its first step, for a process from which slots are forked."""

from __future__ import annotations

import gc
import importlib
from typing import Final

__all__ = ["MODULES"]

# `torch.optim` imports the compiler front end with the first optimizer. None of them may touch an accelerator: a
# forked process cannot use one that its parent has initialized.
MODULES: Final = (
    "freetrain_parsl.executor.htex.lean_parsl",
    "parsl.executors.high_throughput.process_worker_pool",
    "freetrain_parsl.executor.slot.slot",
    "freetrain_parsl.training.fragment",
    "torch._dynamo",
)


def _import_all() -> None:
    """Import the modules without collecting garbage meanwhile, which would take a fifth of the time.

    Nor is what they have created looked at later, which would copy its memory into each forked process.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for module in MODULES:
            importlib.import_module(module)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


_import_all()
