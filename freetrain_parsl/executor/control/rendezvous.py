"""The rendezvous server: small key-value stores, kept by the driver, in which the members of a group meet.

torch's TCPStore is an open, unauthenticated port, and fails with the node that hosts it. Here the calls are sent over
the slots' control channel, which is authenticated and encrypted and outlives any node. Each generation of a training
has one store, which is dropped when the generation ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.protocol.messages import StoreReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.protocol.messages import StoreRequest

__all__ = ["RendezvousServer"]

# A group of thousands of members needs far less.
_MOST_BYTES = 64 << 20
_MOST_WAITING = 100_000


@dataclass(frozen=True)
class _WaitingGet:
    slot: str
    request: int
    deadline: float


class RendezvousServer:
    """Answers `StoreRequest`s; a get of a missing key is answered once the key is set."""

    def __init__(self, reply: Callable[[str, StoreReply], object]) -> None:
        self._reply = reply
        self._stores: dict[str, dict[str, bytes]] = {}
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, dict[str, list[_WaitingGet]]] = {}
        self._arrived: dict[str, set[str]] = {}

    def open(self, group: str) -> None:
        """Create the store of a generation."""
        self._stores[group] = {}
        self._sizes[group] = 0
        self._waiting[group] = {}
        self._arrived[group] = set()

    def close(self, group: str) -> None:
        """Remove the store of a generation; pending calls fail."""
        self._stores.pop(group, None)
        self._sizes.pop(group, None)
        self._arrived.pop(group, None)
        for gets in self._waiting.pop(group, {}).values():
            for get in gets:
                self._answer(group, get.slot, get.request, ok=False)

    def arrived(self, group: str) -> frozenset[str]:
        """Return the slots that have used the store of a generation; empty if it is not open."""
        return frozenset(self._arrived.get(group, ()))

    def expire(self, now: float) -> None:
        """Fail the gets that have timed out."""
        for group, waiting in self._waiting.items():
            for key, gets in list(waiting.items()):
                for get in [get for get in gets if get.deadline <= now]:
                    gets.remove(get)
                    self._answer(group, get.slot, get.request, ok=False)
                if not gets:
                    del waiting[key]

    def handle(self, slot: str, message: StoreRequest, now: float, *, own: bool = True) -> None:
        """Handle a call from a slot; refuse it if the group is not the slot's `own`, over, or full."""
        group, request, operation = message.group, message.request, message.operation
        store = self._stores.get(group)
        if store is None or not own or not self._has_room(group, message):
            self._answer(group, slot, request, ok=False)
            return
        self._arrived[group].add(slot)
        keys = message.keys
        if operation == "get" and keys[0] not in store:
            waiting = _WaitingGet(slot, request, now + message.timeout)
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
                number = int(store.get(keys[0], b"0")) + message.amount
            except ValueError:  # its value is not a number
                self._answer(group, slot, request, ok=False)
                return
            self._set(group, keys[0], str(number).encode())
        elif operation == "check":
            number = int(all(key in store for key in keys))
        elif operation == "delete":
            number = int(self._remove(group, keys[0]))
        self._answer(group, slot, request, ok=True, number=number, value=value)

    def _has_room(self, group: str, message: StoreRequest) -> bool:
        """Return whether a message keeps the store within the limits of any legitimate group."""
        if message.operation == "get":
            return sum(map(len, self._waiting[group].values())) < _MOST_WAITING
        return self._sizes[group] + len(message.keys[0]) + len(message.payload) <= _MOST_BYTES

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
        self._reply(slot, StoreReply(group, request, ok, number, value))
