"""Follows a run while somebody watches, and passes on what has changed."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from freetrain_parsl.extensions.pages.run_view import RunView
    from freetrain_parsl.report.run_reader import RunReader

__all__ = ["Feed"]

_PERIOD: Final = 1.0  # seconds between looks at the journal
_PORTION: Final = 20_000  # entries read before viewers get what there is


class Feed:
    """The changes of a run, for any number of viewers.

    The journal is read in a thread, once for all of them, and only while there are any.
    """

    def __init__(self, reader: RunReader[RunView], period: float = _PERIOD) -> None:
        self._reader = reader
        self._period = period
        self._lock = threading.Lock()
        self._instance = secrets.token_hex(4)
        self._version = 0
        self._made: dict[int, tuple[int, str, str]] = {}
        """Version that a viewer has -> changes since, up to the present version; most viewers have the same."""
        self._changed = asyncio.Condition()
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None

    def read_ahead(self) -> None:
        """Begin to read what there is, in a thread, before anybody watches."""
        threading.Thread(target=self._read_all, name="freetrain-read-ahead", daemon=True).start()

    def _read_all(self) -> None:
        while self._refresh():
            pass

    @property
    def viewers(self) -> int:
        """Number of viewers."""
        return self._viewers

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow the run meanwhile."""
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._viewers -= 1
            if self._viewers == 0 and self._task is not None:
                task, self._task = self._task, None
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def known(self, event: str) -> int:
        """Return the version that a viewer has whose last event was this one; 0: nothing."""
        instance, _, version = event.partition("-")
        known = int(version) if version.isdecimal() and len(version) < 20 else 0
        return known if instance == self._instance and known <= self._version else 0

    async def next(self, after: int, patience: float) -> tuple[int, str, str] | None:
        """Wait for a version above `after`; return it, its event's name, and the changes as JSON.

        Returns
        -------
        change
            ``None`` if nothing has changed for `patience` seconds.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._version > after), patience)
            except asyncio.TimeoutError:
                return None
        return await asyncio.to_thread(self._since, after)

    def _since(self, after: int) -> tuple[int, str, str]:
        with self._lock:
            made = self._made.get(after)
            if made is None or made[0] != self._reader.run.version:
                delta = self._reader.run.since(after)
                version = delta["version"]
                made = version, f"{self._instance}-{version}", json.dumps(delta, separators=(",", ":"))
                self._made = {known: one for known, one in self._made.items() if one[0] == version} | {after: made}
        return made

    async def _follow(self) -> None:
        while True:
            behind = await asyncio.to_thread(self._refresh)
            version = self._reader.run.version
            if version != self._version:
                async with self._changed:
                    self._version = version
                    self._changed.notify_all()
            await asyncio.sleep(0.05 if behind else self._period)

    def _refresh(self) -> bool:
        with self._lock:
            self._reader.refresh(_PORTION)
        return self._reader.is_behind
