"""The rendezvous server: small key-value stores, kept by the driver, in which the members of a group meet.

torch's TCPStore is an open, unauthenticated port, and fails with the node that hosts it. Here the calls are sent over
the slots' control channel, which is authenticated and encrypted and outlives any node. Each generation of a training
job has one store, which is dropped when the generation ends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.protocol.messages import StoreReply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.protocol.messages import StoreRequest

__all__ = ["RendezvousServer"]

# A group of thousands of members needs far less.
_MOST_BYTES = 64 << 20
_MOST_WAITING = 100_000


@dataclass(eq=False)
class _WaitingGet:
    slot: str
    request: int
    keys: tuple[str, ...]
    deadline: float
    missing: set[str]


@dataclass
class _Store:
    """The values of one generation, and the gets that wait for some of its keys."""

    values: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    """Bytes of the keys and values."""
    arrived: set[str] = field(default_factory=set)
    """The slots that have used it."""
    waiting: set[_WaitingGet] = field(default_factory=set)
    awaited: dict[str, set[_WaitingGet]] = field(default_factory=lambda: defaultdict(set))
    """Missing key -> the gets that wait for it."""

    def set(self, key: str, value: bytes) -> list[_WaitingGet]:
        """Set a value; return the gets that have all their values now."""
        self.remove(key)
        self.values[key] = value
        self.size += len(key) + len(value)
        complete = []
        for get in self.awaited.pop(key, ()):
            get.missing.discard(key)
            if not get.missing and not self.postpone(get):  # a key may have been deleted since
                complete.append(get)
        return complete

    def remove(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.size -= len(key) + len(value)
        return True

    def postpone(self, get: _WaitingGet) -> bool:
        """Let a get wait for the keys that are missing now; return whether there are any."""
        self.forget(get)
        get.missing = {key for key in get.keys if key not in self.values}
        if get.missing:
            self.waiting.add(get)
        for key in get.missing:
            self.awaited[key].add(get)
        return bool(get.missing)

    def forget(self, get: _WaitingGet) -> None:
        """Let a get no longer wait."""
        self.waiting.discard(get)
        for key in get.missing:
            if (others := self.awaited.get(key)) is not None:
                others.discard(get)
                if not others:
                    del self.awaited[key]


class RendezvousServer:
    """Answers `StoreRequest`s; a get of missing keys is answered once all of them are set."""

    def __init__(self, reply: Callable[[str, StoreReply], object]) -> None:
        self._reply = reply
        self._stores: dict[str, _Store] = {}

    def open(self, group: str) -> None:
        """Create the store of a generation."""
        self._stores[group] = _Store()

    def close(self, group: str) -> None:
        """Remove the store of a generation; pending calls fail."""
        store = self._stores.pop(group, None)
        for get in store.waiting if store is not None else ():
            self._refuse(group, get.slot, get.request)

    def arrived(self, group: str) -> frozenset[str]:
        """Return the slots that have used the store of a generation; empty if it is not open."""
        return frozenset(self._stores[group].arrived) if group in self._stores else frozenset()

    def expire(self, now: float) -> None:
        """Fail the gets that have timed out."""
        for group, store in self._stores.items():
            for get in [get for get in store.waiting if get.deadline <= now]:
                store.forget(get)
                self._refuse(group, get.slot, get.request)

    def handle(self, slot: str, message: StoreRequest, now: float, *, own: bool = True) -> None:
        """Handle a call from a slot; refuse it if the group is not the slot's `own`, over, or full."""
        group, request, operation, keys = message.group, message.request, message.operation, message.keys
        store = self._stores.get(group)
        if store is None or not own or not _has_room(store, message):
            self._refuse(group, slot, request)
            return
        store.arrived.add(slot)
        if operation == "get":
            get = _WaitingGet(slot, request, keys, now + message.timeout, set())
            if not store.postpone(get):
                self._answer(group, store, get)
            return
        number = 0
        complete: Sequence[_WaitingGet] = ()
        if operation == "set":
            complete = store.set(keys[0], message.payload)
        elif operation == "add":
            try:
                number = int(store.values.get(keys[0], b"0")) + message.amount
            except ValueError:  # its value is not a number
                self._refuse(group, slot, request)
                return
            complete = store.set(keys[0], str(number).encode())
        elif operation == "check":
            number = int(all(key in store.values for key in keys))
        elif operation == "delete":
            number = int(store.remove(keys[0]))
        self._reply(slot, StoreReply(group, request, ok=True, number=number))
        for get in complete:
            self._answer(group, store, get)

    def _answer(self, group: str, store: _Store, get: _WaitingGet) -> None:
        values = [store.values[key] for key in get.keys]
        sizes = tuple(map(len, values))
        self._reply(get.slot, StoreReply(group, get.request, ok=True, sizes=sizes, payload=b"".join(values)))

    def _refuse(self, group: str, slot: str, request: int) -> None:
        self._reply(slot, StoreReply(group, request, ok=False))


def _has_room(store: _Store, message: StoreRequest) -> bool:
    """Return whether a message keeps a store within the limits of any legitimate group."""
    if message.operation == "get":
        return len(store.waiting) < _MOST_WAITING
    return store.size + len(message.keys[0]) + len(message.payload) <= _MOST_BYTES
