"""Delivery over a connection that may break and be made anew: every message arrives once, in order.

TCP delivers what is sent over one connection. When a connection breaks, the messages on their way are lost, and the
next one begins without them. So both ends number their messages and keep each until the other end has reported its
number in a ``beat``. The slot notices a new connection and reports in ``resumed`` how far it has come; the driver sends
the rest again and answers likewise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.executor.protocol import Message

__all__ = ["UNNUMBERED", "Delivery"]

UNNUMBERED = frozenset({"beat", "resumed", "probe"})
"""Messages that are sent again by themselves, or answered at once."""


class Delivery:
    """One end's view of the messages between a slot and the driver; pure, owned by one thread."""

    def __init__(self) -> None:
        self._last_sent = 0
        self._kept: deque[tuple[int, Message]] = deque()
        self._keeps = True
        self.seen = 0
        """Number of the last message taken."""

    def outgoing(self, message: Message) -> Message:
        """Prepare a message for sending: with its number, or with what has been seen."""
        if message.type in UNNUMBERED:
            return replace(message, header={**message.header, "seen": self.seen})
        self._last_sent += 1
        message = replace(message, header={**message.header, "n": self._last_sent})
        if self._keeps:
            self._kept.append((self._last_sent, message))
        return message

    def end(self) -> None:
        """Keep nothing from now on: the other end is given up."""
        self._keeps = False
        self._kept.clear()

    def incoming(self, message: Message) -> Message | None:
        """Take a message; ``None`` if it came before, or if one before it is missing and will be sent again."""
        header = dict(message.header)
        if (seen := header.pop("seen", None)) is not None:
            while self._kept and self._kept[0][0] <= seen:
                self._kept.popleft()
        number = header.pop("n", None)
        if number is not None:
            if number != self.seen + 1:
                return None
            self.seen = number
        return replace(message, header=header)

    def unseen(self) -> list[Message]:
        """List what the other end has not reported as seen, in order, as it was prepared."""
        return [message for _, message in self._kept]
