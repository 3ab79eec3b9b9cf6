"""A slot's client of the rendezvous server: the key-value store in which the members of a group meet."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Literal

from freetrain_parsl.protocol.messages import StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.protocol.messages import StoreReply, ToDriver

__all__ = ["ChannelStore"]


class ChannelStore:
    """The blocking backend of ``training.group.process_group.RendezvousStore`` for one generation.

    Parameters
    ----------
    group
        The generation's key, ``trainer/generation``.
    send
        Sends a message to the driver; may be called from any thread.
    """

    _GRACE = 5.0  # seconds beyond a get's own timeout after which the driver counts as failed

    def __init__(self, group: str, send: Callable[[ToDriver], None]) -> None:
        self._group = group
        self._send = send
        self._requests = itertools.count()
        self._replies: dict[int, StoreReply | None] = {}
        self._condition = threading.Condition()
        self._closed = False

    def deliver(self, message: StoreReply) -> None:
        """Accept the driver's answer; called by the channel's thread."""
        with self._condition:
            if message.request in self._replies:
                self._replies[message.request] = message
                self._condition.notify_all()

    def close(self) -> None:
        """Fail all pending and later calls: the driver is gone or the generation is over."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Set `key`, and wake the members that wait for it."""
        self._call("set", (key,), value)

    def get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Return the values of `keys`, waiting for them at most `timeout` seconds.

        Raises
        ------
        TimeoutError
            Not all keys were set in time, or the generation ended.
        """
        if not keys:
            return []
        reply = self._call("get", tuple(keys), timeout=timeout)
        ends = itertools.accumulate(reply.sizes)
        return [reply.payload[end - size : end] for size, end in zip(reply.sizes, ends, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key` (0 if absent) and return the sum."""
        return self._call("add", (key,), amount=amount).number

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` are set."""
        return bool(self._call("check", tuple(keys)).number)

    def delete(self, key: str) -> bool:
        """Remove `key`; return whether it existed."""
        return bool(self._call("delete", (key,)).number)

    def _call(
        self,
        operation: Literal["set", "get", "add", "check", "delete"],
        keys: tuple[str, ...],
        value: bytes = b"",
        *,
        timeout: float = 20.0,
        amount: int = 0,
    ) -> StoreReply:
        request = next(self._requests)
        call = StoreRequest(self._group, request, operation, keys, timeout, amount, value)
        with self._condition:
            self._replies[request] = None
            self._send(call)
            self._condition.wait_for(lambda: self._closed or self._replies[request] is not None, timeout + self._GRACE)
            reply = self._replies.pop(request)
        if reply is None or not reply.ok:
            raise TimeoutError(f"rendezvous {self._group}: {operation} {keys[0]!r} got no answer in {timeout:g} s")
        return reply
