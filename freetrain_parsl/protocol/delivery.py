"""Delivery over a connection that may break and be made anew: every message arrives once, in order.

TCP delivers what is sent over one connection. When a connection breaks, the messages on their way are lost, and the
next one begins without them. So both ends number their messages and keep each until the other end has reported its
number in a heartbeat. The slot notices a new connection and reports in `Reconnected` how far it has come; the driver
sends the rest again and answers likewise.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from freetrain_parsl.protocol.codec import Envelope
from freetrain_parsl.protocol.messages import DriverHeartbeat, Probe, Reconnected, SlotHeartbeat

if TYPE_CHECKING:
    from freetrain_parsl.protocol.messages import ToDriver, ToSlot

__all__ = ["UNNUMBERED", "Delivery"]

UNNUMBERED = (SlotHeartbeat, DriverHeartbeat, Reconnected, Probe)
"""Messages that are sent again by themselves, or answered at once."""


class Delivery:
    """One end's view of the messages between a slot and the driver; pure, owned by one thread."""

    def __init__(self) -> None:
        self._last_sent = 0
        self._kept: deque[Envelope] = deque()
        self._keeps = True
        self.seen = 0
        """Number of the last message received."""

    def outgoing(self, message: ToDriver | ToSlot) -> Envelope:
        """Prepare a message for sending: with its number, or with what has been seen."""
        if isinstance(message, UNNUMBERED):
            return Envelope(message, seen=self.seen)
        self._last_sent += 1
        envelope = Envelope(message, number=self._last_sent)
        if self._keeps:
            self._kept.append(envelope)
        return envelope

    def end(self) -> None:
        """Keep nothing from now on: the other end is given up."""
        self._keeps = False
        self._kept.clear()

    def incoming(self, envelope: Envelope) -> Any | None:
        """Take a message; ``None`` if it came before, or if one before it is missing and will be sent again."""
        if envelope.seen is not None:
            while self._kept and (self._kept[0].number or 0) <= envelope.seen:
                self._kept.popleft()
        if envelope.number is not None:
            if envelope.number != self.seen + 1:
                return None
            self.seen = envelope.number
        return envelope.message

    def unseen(self) -> list[Envelope]:
        """List what the other end has not reported as seen, in order."""
        return list(self._kept)
