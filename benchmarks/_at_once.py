"""A function in several processes at the same time, as training jobs share a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def at_once(members: int, function: Callable[..., None], *args: Any) -> list[Any]:
    """Return what each of `members` processes has found.

    Parameters
    ----------
    members
        Number of processes.
    function
        Called in each as ``function(*args, ready, found)``: it waits for the barrier `ready` when it has started, and
        puts one result into the queue `found`.
    args
        Its first arguments.

    Raises
    ------
    SystemExit
        A process has failed.
    """
    context = torch.multiprocessing.get_context("spawn")
    ready, found = context.Barrier(members), context.SimpleQueue()
    processes = [context.Process(target=function, args=(*args, ready, found)) for _ in range(members)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"not all of {members} processes could train on the device")
    return [found.get() for _ in processes]
