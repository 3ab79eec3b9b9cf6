"""Processes that are forked from one that has imported what a training job needs, as the slots of a node are."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

# What takes seconds of processor time in each process otherwise. The modules of this directory are not found by the
# server: Python passes it no path.
_WARM = ("freetrain_parsl.training.fragment", "torch._dynamo", "torch.distributed.fsdp")


def forked_warm(*also: str) -> ForkServerContext:
    """Return the context that starts such processes; a test process has one server for all of them.

    Its first use tells what else the server imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_WARM, *also])
    return context
