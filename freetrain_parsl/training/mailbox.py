"""What passes between a slot and the training inside it. Importable anywhere: no torch here."""

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
"""Seconds on a clock that never goes back; injected wherever time matters."""


@dataclass(frozen=True)
class Membership:
    """One process's place among the processes that train together.

    Parameters
    ----------
    trainer
        Name of the training.
    generation
        Number of the fragment: never used twice in one training, so that a process of an earlier
        fragment cannot meet those of this one.
    rank, world_size
        This process's number, from 0, and how many there are.
    timeout
        How long a collective waits for a silent peer, if nobody breaks it off before: a peer that dies is noticed at
        once, and one that hangs by whoever sends orders (`ControlMailbox.waited`, `Regroup.abort`).
    meeting
        How long the members wait for each other when they form the group.
    interface
        Network interface that carries the collectives, such as ``"ib0"``; ``None`` lets the library choose.
    address
        This process's IP address at that interface; the members check there that they reach each other before they
        form the group. ``None``: they do not check. Either all members have one or none has.
    admission
        How long the members wait for each other's proofs of membership once all are connected.

    Raises
    ------
    InvalidSettings
        The rank is not one of the group's.
    """

    trainer: str
    generation: int = 0
    rank: int = 0
    world_size: int = 1
    timeout: timedelta = timedelta(minutes=30)
    meeting: timedelta = timedelta(minutes=1)
    interface: str | None = None
    address: str | None = None
    admission: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidSettings(f"trainer {self.trainer!r}: rank {self.rank} is not in a group of {self.world_size}")


@dataclass(frozen=True)
class Regroup:
    """An order to go on, in place, in another process group.

    Parameters
    ----------
    membership
        This process's place in the new group; ``None``: the others go on without it, and its fragment ends.
    abort
        A member of the present group is lost: do not wait for a boundary that all agree on, leave the group at once.
    """

    membership: Membership | None
    abort: bool = False


class ControlMailbox:
    """What the slot tells the training while it runs: pause, regroup, and when the node closes.

    Thread-safe; the training reads it at step boundaries.

    Parameters
    ----------
    clock
        Seconds on a clock that never goes back.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._closes: float | None = None
        self._changed = threading.Condition()
        self._order: Regroup | None = None
        self._ended = False
        self._waiting_since: float | None = None
        self.pause_requested = threading.Event()
        """Set it to end the fragment at the next step boundary, after a checkpoint."""
        self.underway = threading.Event()
        """Set by the training after its first step: until then the fragment can be dropped and nothing is lost."""
        self.blocked: Callable[[], float] = lambda: 0.0
        """Set by the training: seconds for which its main thread has been blocked in a collective, as far as seen."""
        self.on_abort: Callable[[], None] = lambda: None
        """Set by the training: breaks the collectives that its main thread may wait in."""

    def close_after(self, remaining: timedelta | None) -> None:
        """Say that the node closes that long from now; ``None`` if that is not known (any more)."""
        self._closes = None if remaining is None else self._clock() + remaining.total_seconds()

    def closes_in(self) -> float | None:
        """Seconds until the node closes, negative once past; ``None`` if unknown."""
        closes = self._closes
        return None if closes is None else closes - self._clock()

    def order(self, regroup: Regroup) -> None:
        """Give an order; one that has not been carried out yet is replaced."""
        with self._changed:
            self._order = regroup
            self._changed.notify_all()
        if regroup.abort:
            self.on_abort()

    @property
    def pending(self) -> Regroup | None:
        """The order that waits to be carried out."""
        return self._order

    def take_order(self, timeout: float | None = 0.0) -> Regroup | None:
        """Take the order out, waiting for one; ``None`` after `timeout` seconds, or once a pause is asked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._ended, timeout)
            order, self._order = self._order, None
            return order

    def end(self) -> None:
        """Ask for a pause and end all waiting for orders: the slot leaves, or the training is over."""
        self.pause_requested.set()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the time in which this process does nothing but wait for the other members."""
        self._waiting_since = self._clock()
        try:
            yield
        finally:
            self._waiting_since = None

    def waited(self) -> float:
        """Seconds for which it has been waiting for the other members, zero if it is not.

        To be called about once a second: waits in collectives of user code are only seen then.
        """
        since, blocked = self._waiting_since, self.blocked()
        return blocked if since is None else self._clock() - since


@dataclass(frozen=True)
class Finished:
    """A fragment that ended because the training is done.

    Parameters
    ----------
    value
        What the user's function returned, on this rank.
    progress
        The last state.
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
        Why.
    progress
        The state at the end.
    checkpoint
        Directory of the checkpoint to go on from; ``None`` for a member that left while the others go on.
    """

    reason: PauseReason
    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None
