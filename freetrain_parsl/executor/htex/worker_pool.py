"""Runs HTEX's worker pool: ``python -m freetrain_parsl.executor.htex.worker_pool ARGUMENT …``.

Parsl gives each worker, and the pool's manager before them, an interpreter of its own, which imports Parsl again, and
a slot then imports torch: seconds of a core each, in a hole that lasts minutes. Here they are forked from one server,
which imports all of that once for a node, while the pool itself starts.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from typing import Final

from freetrain_parsl.executor.htex.steady import run_steadily

__all__ = ["WARM"]

_POOL: Final = "parsl.executors.high_throughput.process_worker_pool"

# What a slot imports until its first step; `torch.optim` imports the compiler's front end when an optimizer is made.
# Nothing here may touch an accelerator: a process cannot use one that its parent has initialised before it was forked.
WARM: Final = (_POOL, "freetrain_parsl.executor.slot.slot", "freetrain_parsl.training.fragment", "torch._dynamo")


def main() -> None:
    """Start the server, then run the pool as this process's main program."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(WARM))
    forkserver.ensure_running()

    import parsl.multiprocessing

    parsl.multiprocessing.SpawnContext = context  # type: ignore[assignment]
    run_steadily(_POOL)


if __name__ == "__main__":
    main()
