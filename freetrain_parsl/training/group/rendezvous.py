"""The store in which the members of a group meet, on top of any shared dictionary."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch.distributed does not export it
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

__all__ = ["KeyValue", "RendezvousStore"]


class KeyValue(Protocol):
    """A small shared dictionary in which the members of a group meet; reads wait for missing keys."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value`."""

    def get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Return the values of `keys`; wait for them for up to `timeout` seconds, then raise TimeoutError."""

    def add(self, key: str, amount: int) -> int:
        """Atomically add to the decimal number under `key` (0 if absent) and return the sum."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist."""

    def delete(self, key: str) -> bool:
        """Remove `key`; return whether it existed."""


class RendezvousStore(Store):
    """A torch store on top of any `KeyValue`, so that a rendezvous can use an authenticated channel.

    Parameters
    ----------
    backend
        Stores the keys.
    timeout
        Maximum wait for a key that has not been set yet.
    """

    def __init__(self, backend: KeyValue, timeout: timedelta = timedelta(minutes=1)) -> None:
        super().__init__()
        self._backend = backend
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._backend.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, in one call of the backend."""
        return self._backend.get(keys, self._timeout.total_seconds())

    def has_extended_api(self) -> bool:
        """Return true: gloo may use `multi_get`."""
        return True

    def add(self, key: str, value: int) -> int:
        """Count."""
        return self._backend.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._backend.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys."""
        self._backend.get(keys, (timeout or self._timeout).total_seconds())

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - called by this name from torch's C++ code
        """Remove a key."""
        return self._backend.delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Timeout of `get` and `wait`."""
        return self._timeout
