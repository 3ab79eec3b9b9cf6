"""Importing this module imports what a slot needs until its first step, for a process from which slots are forked.

Garbage collection is off meanwhile, which would take a fifth of the time. What has been created is not collected later
either: forked processes would copy the memory of all objects.
"""

from __future__ import annotations

import gc
import importlib

from freetrain_parsl.executor.htex.deferred_compiler import defer_compiler
from freetrain_parsl.executor.htex.worker_pool import WARM, import_lean_parsl
from freetrain_parsl.executor.slot.loaded_files import waiting_counted

__all__: list[str] = []


def _import_all() -> None:
    collects = gc.isenabled()
    gc.disable()
    try:
        import_lean_parsl()
        for module in WARM:
            importlib.import_module(module)
        defer_compiler()
        gc.freeze()
    finally:
        if collects:
            gc.enable()


with waiting_counted():
    _import_all()
