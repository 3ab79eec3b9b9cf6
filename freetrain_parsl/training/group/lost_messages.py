"""Waits for operations of a group that end even if gloo loses a message when the group is aborted.

gloo (torch 2.13) loses a send whose connection ends when the peer has just become ready to receive: its error is raised
in gloo's own thread, and nobody wakes the thread that waits for it. Once the connections of a group have been shut down
for more than a moment, whatever has not ended by then never will.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from freetrain_parsl.errors import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist

    from freetrain_parsl.training.group.connections import GroupConnections

__all__ = ["await_collective", "await_transfers"]

_LOOK = timedelta(milliseconds=200)
_LOST = 2.0  # seconds after which an operation of closed connections has not ended by itself


def await_collective(work: dist.Work, connections: GroupConnections) -> None:
    """Wait for a collective operation.

    Raises
    ------
    PeerFailed
        A message is lost.
    RuntimeError
        The operation has failed.
    """
    while not work.is_completed():
        _check(connections)
        with suppress(RuntimeError):  # not yet; an error of the operation is raised below
            work.wait(_LOOK)
    work.wait()


def await_transfers(works: Iterable[dist.Work], connections: GroupConnections) -> None:
    """Wait for sends and receives.

    In another thread: they cannot be asked whether they have ended, and a wait with a limit that has passed ends the
    whole group.

    Raises
    ------
    PeerFailed
        A message is lost.
    RuntimeError
        A transfer has failed.
    """
    errors: list[Exception] = []
    ended = threading.Event()

    def wait() -> None:
        try:
            for work in works:
                work.wait()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits: else what has not arrived is used
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=wait, name="freetrain-transfers", daemon=True).start()
    while not ended.wait(_LOOK.total_seconds()):
        _check(connections)
    if errors:
        raise errors[0]


def _check(connections: GroupConnections) -> None:
    if connections.cut_at is not None and time.monotonic() - connections.cut_at > _LOST:
        connections.has_lost = True
        raise PeerFailed("a member failed, and gloo has lost a message of it")
