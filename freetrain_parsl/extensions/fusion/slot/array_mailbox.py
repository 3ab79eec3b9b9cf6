"""The interface between a slot and the array that trains in it. Does not import torch."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from freetrain_parsl.training.mailbox import ControlMailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.mailbox import Clock
    from freetrain_parsl.training.recorder import Recorder

__all__ = ["ArrayMailbox", "Member"]


@dataclass(frozen=True)
class Member:
    """One training job of an array.

    Parameters
    ----------
    options
        Its options.
    load
        Returns the user's function, its arguments and its keyword arguments: called as
        ``function(session, *args, **kwargs)``.
    recorder
        Sees what happens, in a check of the function.
    """

    options: SessionOptions
    load: Callable[[], tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]]
    recorder: Recorder | None = None


class ArrayMailbox:
    """Commands of the slot for an array: further members, pauses, and the time at which the node closes.

    Thread-safe; the array reads it between steps, and each member its own part.

    Parameters
    ----------
    clock
        Monotonic clock, in seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # of the next three
        self._mailboxes: dict[str, ControlMailbox] = {}
        self._closes: timedelta | None = None
        self._closes_set = 0.0
        self._added: deque[Member] = deque()
        self._pause = threading.Event()

    @property
    def pausing(self) -> bool:
        """Whether all members are to pause; no further one starts."""
        return self._pause.is_set()

    @property
    def underway(self) -> bool:
        """Whether a member has made a step."""
        with self._lock:
            return any(mailbox.underway.is_set() for mailbox in self._mailboxes.values())

    def of(self, name: str) -> ControlMailbox:
        """Return the mailbox of a member."""
        with self._lock:
            mailbox = self._mailboxes.get(name)
            if mailbox is None:
                mailbox = self._mailboxes[name] = ControlMailbox(self._clock)
                if self._closes is not None:
                    mailbox.close_after(self._closes - timedelta(seconds=self._clock() - self._closes_set))
                if self.pausing:
                    mailbox.end()
            return mailbox

    def forget(self, name: str) -> None:
        """Drop the mailbox of a member that has ended."""
        with self._lock:
            self._mailboxes.pop(name, None)

    def add(self, member: Member) -> None:
        """Add a member."""
        self.of(member.options.name)
        self._added.append(member)

    def take(self) -> list[Member]:
        """Take the members that were added."""
        if not self._added:
            return []
        return [self._added.popleft() for _ in range(len(self._added))]

    def release(self, name: str) -> None:
        """Request that a member, if it has not ended, pauses at its next boundary, after a checkpoint."""
        with self._lock:
            mailbox = self._mailboxes.get(name)
        if mailbox is not None:
            mailbox.end()

    def end(self) -> None:
        """Request that all members pause."""
        with self._lock:
            self._pause.set()
            mailboxes = list(self._mailboxes.values())
        for mailbox in mailboxes:
            mailbox.end()

    def close_after(self, remaining: timedelta | None) -> None:
        """Set the time until the node closes; ``None`` if it is unknown."""
        with self._lock:
            self._closes, self._closes_set = remaining, self._clock()
            mailboxes = list(self._mailboxes.values())
        for mailbox in mailboxes:
            mailbox.close_after(remaining)

    def waited(self) -> float:
        """Return 0.0: the members do not wait for other processes."""
        return 0.0
