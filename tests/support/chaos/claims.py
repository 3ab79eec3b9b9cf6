"""Which training job runs in which slot, as its processes say: two at once in one slot are a violation."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HELD_BY", "Claim", "claim_slot", "claims_in", "violations_in"]

HELD_BY = "FREETRAIN_CHAOS_HELD_BY"
"""Environment variable: the batch job that holds the node, where two may hold it at once."""

_VIOLATIONS = "violations"
_CLAIM = "slot-"


@dataclass(frozen=True)
class Claim:
    """A process of a training job in a slot.

    Parameters
    ----------
    training
        The training job.
    node, lane
        The slot.
    held_by
        The batch job that holds the node; empty if only one can.
    pid
        The process.
    """

    training: str
    node: str
    lane: int
    held_by: str
    pid: int


def claim_slot(directory: Path, training: str) -> None:
    """Claim the slot of this process until it ends; the kernel then releases the lock, however it ends."""
    node, lane = os.environ["FREETRAIN_CLUSTER_NODE"], int(os.environ["PARSL_WORKER_RANK"])
    held_by = os.environ.get(HELD_BY, "")
    own = Claim(training, node, lane, held_by, os.getpid())
    descriptor = os.open(directory / f"{_CLAIM}{held_by}-{node}-{lane}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(descriptor, 4096, 0).decode()
        if f'"pid": {own.pid}}}' in other:
            return  # the members of an array share their process
        with (directory / _VIOLATIONS).open("a", encoding="utf-8") as file:
            file.write(f"two processes in one slot: {asdict(own)} and {other}\n")
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(own)).encode(), 0)


def claims_in(directory: Path) -> list[Claim]:
    """Return the claims of the processes that live; without locks, which would be in the way of a process."""
    found = []
    for path in sorted(directory.glob(f"{_CLAIM}*")):
        with suppress(ValueError):  # just claimed, and not written yet
            claim = Claim(**json.loads(path.read_text(encoding="utf-8")))
            if psutil.pid_exists(claim.pid):
                found.append(claim)
    return found


def violations_in(directory: Path) -> list[str]:
    """Return the violations that were found, one line each."""
    path = directory / _VIOLATIONS
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
