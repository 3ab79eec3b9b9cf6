"""Where the members of a training find each other: small key-value stores, kept by the driver.

torch's own TCPStore is an open, unauthenticated port, and dies with the node that hosts it. Here the store's calls
travel over the slots' control channel, which is authenticated and encrypted and outlives any node. One store a
generation of a training; it is dropped when the generation ends.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.executor.protocol import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ChannelKeyValue", "RendezvousDesk"]

# What a group of thousands of members needs is far below.
_MOST_BYTES = 64 << 20
_MOST_WAITING = 100_000


@dataclass(frozen=True)
class _WaitingGet:
    slot: str
    request: int
    deadline: float


class RendezvousDesk:
    """The driver's side: answers ``kv`` messages, some later, when the key that they wait for is set."""

    def __init__(self, reply: Callable[[str, Message], object]) -> None:
        self._reply = reply
        self._stores: dict[str, dict[str, bytes]] = {}
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, dict[str, list[_WaitingGet]]] = {}
        self._visitors: dict[str, set[str]] = {}

    def open(self, group: str) -> None:
        """Make the store of a generation."""
        self._stores[group] = {}
        self._sizes[group] = 0
        self._waiting[group] = {}
        self._visitors[group] = set()

    def drop(self, group: str) -> None:
        """Forget a generation; whoever still waits is told that it is over."""
        self._stores.pop(group, None)
        self._sizes.pop(group, None)
        self._visitors.pop(group, None)
        for gets in self._waiting.pop(group, {}).values():
            for get in gets:
                self._answer(group, get.slot, get.request, ok=False)

    def visitors(self, group: str) -> frozenset[str]:
        """Return the slots that have come to meet in a generation that is open."""
        return frozenset(self._visitors.get(group, ()))

    def expire(self, now: float) -> None:
        """Refuse the gets that have waited too long."""
        for group, waiting in self._waiting.items():
            for key, gets in list(waiting.items()):
                for get in [get for get in gets if get.deadline <= now]:
                    gets.remove(get)
                    self._answer(group, get.slot, get.request, ok=False)
                if not gets:
                    del waiting[key]

    def handle(self, slot: str, message: Message, now: float, *, own: bool = True) -> None:
        """Take one ``kv`` message of a slot; refuse it if the group is not the slot's `own`, over, or full."""
        group, request, operation = message["group"], message["request"], message["operation"]
        store = self._stores.get(group)
        if store is None or not own or not self._has_room(group, message):
            self._answer(group, slot, request, ok=False)
            return
        self._visitors[group].add(slot)
        keys: list[str] = message["keys"]
        if operation == "get" and keys[0] not in store:
            waiting = _WaitingGet(slot, request, now + message["timeout"])
            self._waiting[group].setdefault(keys[0], []).append(waiting)
            return
        number = 0
        value = b""
        if operation == "get":
            value = store[keys[0]]
        elif operation == "set":
            self._set(group, keys[0], message.payload)
        elif operation == "add":
            try:
                number = int(store.get(keys[0], b"0")) + message["amount"]
            except ValueError:  # it was set to something else
                self._answer(group, slot, request, ok=False)
                return
            self._set(group, keys[0], str(number).encode())
        elif operation == "check":
            number = int(all(key in store for key in keys))
        elif operation == "delete":
            number = int(self._remove(group, keys[0]))
        self._answer(group, slot, request, ok=True, number=number, value=value)

    def _has_room(self, group: str, message: Message) -> bool:
        """Whether a message would not make the store larger than any honest group does."""
        if message["operation"] == "get":
            return sum(map(len, self._waiting[group].values())) < _MOST_WAITING
        return self._sizes[group] + len(message["keys"][0]) + len(message.payload) <= _MOST_BYTES

    def _set(self, group: str, key: str, value: bytes) -> None:
        self._remove(group, key)
        self._stores[group][key] = value
        self._sizes[group] += len(key) + len(value)
        for get in self._waiting[group].pop(key, []):
            self._answer(group, get.slot, get.request, ok=True, value=value)

    def _remove(self, group: str, key: str) -> bool:
        value = self._stores[group].pop(key, None)
        if value is None:
            return False
        self._sizes[group] -= len(key) + len(value)
        return True

    def _answer(self, group: str, slot: str, request: int, *, ok: bool, number: int = 0, value: bytes = b"") -> None:
        header = {"group": group, "request": request, "ok": ok, "number": number}
        self._reply(slot, Message("kv", header, value))


class ChannelKeyValue:
    """The slot's side: the blocking backend of ``training.membership.RendezvousStore`` for one generation.

    Parameters
    ----------
    group
        The generation's key, ``trainer/generation``.
    send
        Sends a message to the driver; may be called from any thread.
    """

    _GRACE = 5.0  # seconds beyond a get's own time-out before the driver itself counts as gone

    def __init__(self, group: str, send: Callable[[Message], None]) -> None:
        self._group = group
        self._send = send
        self._requests = itertools.count()
        self._replies: dict[int, Message | None] = {}
        self._condition = threading.Condition()
        self._closed = False

    def deliver(self, message: Message) -> None:
        """Take the driver's answer (called by the channel's thread)."""
        with self._condition:
            if message["request"] in self._replies:
                self._replies[message["request"]] = message
                self._condition.notify_all()

    def close(self) -> None:
        """Fail what waits and all that comes: the driver is gone or the generation is over."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Set `key`, waking who waits for it."""
        self._call("set", [key], value)

    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of `key`, waiting for it at most `timeout` seconds.

        Raises
        ------
        TimeoutError
            The key was not set in time, or the generation ended.
        """
        return self._call("get", [key], timeout=timeout).payload

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key` (0 if absent) and return the sum."""
        return int(self._call("add", [key], amount=amount)["number"])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are set."""
        return bool(self._call("check", list(keys))["number"])

    def delete(self, key: str) -> bool:
        """Remove `key`; whether it was there."""
        return bool(self._call("delete", [key])["number"])

    def _call(
        self, operation: str, keys: list[str], value: bytes = b"", *, timeout: float = 20.0, amount: int = 0
    ) -> Message:
        request = next(self._requests)
        header = {
            "group": self._group,
            "request": request,
            "operation": operation,
            "keys": keys,
            "timeout": timeout,
            "amount": amount,
        }
        with self._condition:
            self._replies[request] = None
            self._send(Message("kv", header, value))
            self._condition.wait_for(lambda: self._closed or self._replies[request] is not None, timeout + self._GRACE)
            reply = self._replies.pop(request)
        if reply is None or not reply["ok"]:
            raise TimeoutError(f"rendezvous {self._group}: {operation} {keys[0]!r} got no answer in {timeout:g} s")
        return reply
