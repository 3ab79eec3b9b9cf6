"""Delivery over a connection that may break and be re-established: every message arrives once, in order.

TCP guarantees delivery only within one connection. When a connection breaks, the messages in transit are lost, and
the next connection starts without them. Therefore both ends number their messages and keep each until the other end
has acknowledged its number in a heartbeat. After a reconnect, the slot sends `Reconnected` with the number of the last
message it has received; the driver resends the rest and answers likewise.
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
"""Messages that are repeated periodically or answered at once, and so need no resending."""


class Delivery:
    """One end's view of the messages between a slot and the driver; pure, owned by one thread."""

    def __init__(self) -> None:
        self._last_sent = 0
        self._kept: deque[Envelope] = deque()
        self._keeps = True
        self.seen = 0
        """Number of the last message received."""

    def outgoing(self, message: ToDriver | ToSlot) -> Envelope:
        """Prepare a message for sending: with its number, or with the number of the last message received.

        After `end` without a number: the other end may lack earlier ones, and would wait for them.
        """
        if isinstance(message, UNNUMBERED) or not self._keeps:
            return Envelope(message, seen=self.seen)
        self._last_sent += 1
        envelope = Envelope(message, number=self._last_sent)
        self._kept.append(envelope)
        return envelope

    def end(self) -> None:
        """Stop keeping messages: the other end has failed."""
        self._keeps = False
        self._kept.clear()

    def incoming(self, envelope: Envelope) -> Any | None:
        """Accept a message; ``None`` if it is a duplicate, or if an earlier one is missing and will be resent."""
        if envelope.seen is not None:
            while self._kept and (self._kept[0].number or 0) <= envelope.seen:
                self._kept.popleft()
        if envelope.number is not None:
            if envelope.number != self.seen + 1:
                return None
            self.seen = envelope.number
        return envelope.message

    def unseen(self) -> list[Envelope]:
        """Return the messages that the other end has not acknowledged, in order."""
        return list(self._kept)
