"""The interface between a slot and the training job that it runs. Does not import torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.protocol.reports import PauseReason, Progress

if TYPE_CHECKING:
    from pathlib import Path

Clock = Callable[[], float]
"""Monotonic clock, in seconds; injected wherever time matters."""


@dataclass(frozen=True)
class Membership:
    """The membership of one process in a group.

    Parameters
    ----------
    trainer
        Name of the training job.
    generation
        Number of the group: never used twice in one training job, so that a process of an earlier group
        cannot meet processes of this one.
    rank, world_size
        Rank of this process, from 0, and number of processes.
    replicas
        Number of replicas of a sharded state into which they are divided, by consecutive ranks.
    timeout
        Maximum wait of a collective for an unresponsive peer unless it is aborted before: a dead peer is detected at
        once, a hanging peer by the sender of the commands (`ControlMailbox.waited`, `Regroup.abort`).
    meeting
        Maximum wait of the members for each other to form the group.
    interface
        Network interface for the collectives, such as ``"ib0"``; ``None`` lets the library choose.
    address
        This process's IP address on that interface; before they form the group, the members check that they reach
        each other there. ``None``: no check. Either all members have an address or none has.
    admission
        Maximum wait for the proofs of membership once all members are connected.

    Raises
    ------
    InvalidSettings
        The rank is out of range.
    """

    trainer: str
    generation: int = 0
    rank: int = 0
    world_size: int = 1
    replicas: int = 1
    timeout: timedelta = timedelta(minutes=30)
    meeting: timedelta = timedelta(minutes=1)
    interface: str | None = None
    address: str | None = None
    admission: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidSettings(
                f"training job {self.trainer!r}: rank {self.rank} is not in a group of {self.world_size}"
            )
        if self.replicas < 1 or self.world_size % self.replicas:
            raise InvalidSettings(
                f"training job {self.trainer!r}: {self.world_size} processes are not {self.replicas} equal replicas"
            )


@dataclass(frozen=True)
class Regroup:
    """A command to continue, in place, in another process group.

    Parameters
    ----------
    membership
        This process's membership in the new group; ``None``: the others continue without it, and its fragment ends.
    abort
        A member of the current group has failed: leave the group at once, without waiting for an agreed boundary.
    """

    membership: Membership | None
    abort: bool = False


class ControlMailbox:
    """Commands of the slot for a running training job: pause, regroup, and the time at which the node closes.

    Thread-safe; the training job reads it at step boundaries.

    Parameters
    ----------
    clock
        Monotonic clock, in seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._closes: float | None = None
        self._changed = threading.Condition()
        self._command: Regroup | None = None
        self._batch: int | None = None
        self._ended = False
        self._waiting_since: float | None = None
        self.pause_requested = threading.Event()
        """Set it to end the fragment at the next step boundary, after a checkpoint."""
        self.underway = threading.Event()
        """Set by the training job after its first step: until then the fragment can be dropped without losing work."""
        self.blocked: Callable[[], float] = lambda: 0.0
        """Set by the job: seconds for which its main thread has been observed to be blocked in a collective."""
        self.on_abort: Callable[[], None] = lambda: None
        """Set by the training job: aborts the collectives in which its main thread may wait."""

    def close_after(self, remaining: timedelta | None) -> None:
        """Set the time until the node closes; ``None`` if it is unknown or no longer known."""
        self._closes = None if remaining is None else self._clock() + remaining.total_seconds()

    def closes_in(self) -> float | None:
        """Return the seconds until the node closes, negative after that time; ``None`` if unknown."""
        closes = self._closes
        return None if closes is None else closes - self._clock()

    def post(self, regroup: Regroup) -> None:
        """Post a command; it replaces one that has not been carried out yet."""
        with self._changed:
            self._command = regroup
            self._changed.notify_all()
        if regroup.abort:
            self.on_abort()

    @property
    def pending(self) -> Regroup | None:
        """The command that has not been carried out yet."""
        return self._command

    @property
    def leaves(self) -> bool:
        """Whether the command that has not been carried out yet is to leave the training job."""
        command = self._command
        return command is not None and command.membership is None

    def take_command(self, timeout: float | None = 0.0) -> Regroup | None:
        """Wait for a command and take it; return ``None`` after `timeout` seconds, or if a pause is requested."""
        with self._changed:
            self._changed.wait_for(lambda: self._command is not None or self._ended, timeout)
            command, self._command = self._command, None
            return command

    def post_batch(self, size: int) -> None:
        """Post a batch size for the first member of the group; it replaces one that has not been taken."""
        with self._changed:
            self._batch = size

    @property
    def batch_pending(self) -> bool:
        """Whether there is a batch size that has not been taken."""
        return self._batch is not None

    def take_batch(self) -> int | None:
        """Take the batch size, if any."""
        with self._changed:
            size, self._batch = self._batch, None
            return size

    def end(self) -> None:
        """Request a pause and end all waiting for commands: the slot leaves, or the training job is done."""
        self.pause_requested.set()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the time in which this process only waits for other members."""
        self._waiting_since = self._clock()
        try:
            yield
        finally:
            self._waiting_since = None

    def waited(self) -> float:
        """Return the seconds for which this process has been waiting for other members; 0.0 if it is not waiting.

        Call it about once a second: otherwise waits in collectives of user code are not detected.
        """
        since, blocked = self._waiting_since, self.blocked()
        return blocked if since is None else self._clock() - since


@dataclass(frozen=True)
class Finished:
    """A fragment that ended because the training job is done.

    Parameters
    ----------
    value
        Return value of the user's function on this rank.
    progress
        The final progress.
    checkpoint
        Directory of the final checkpoint; ``None`` if the function never prepared a model.
    """

    value: Any
    progress: Progress
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Paused:
    """A fragment that ended early; its state is in the checkpoint.

    Parameters
    ----------
    reason
        Reason of the pause.
    progress
        The progress at the end.
    checkpoint
        Directory of the checkpoint to resume from; ``None`` for a member that left while the others continue.
    """

    reason: PauseReason
    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None
