"""Writes learned scaling curves beside the checkpoints, in a thread: a hanging directory does not delay the driver."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from freetrain_parsl.storage.learned_curves import write_rates

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.storage.learned_curves import Rates

__all__ = ["CurveKeeper"]

_PAUSE = 10.0  # seconds between writes
_LAST_WRITE = 2.0  # seconds for which the end of the run waits for it


class CurveKeeper:
    """Keeps the newest curve of each key.

    Parameters
    ----------
    root
        The checkpoint root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pending: dict[str, Rates] = {}
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, key: str, rates: Rates) -> None:
        """Write a curve soon; returns at once."""
        self._pending[key] = rates
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="freetrain-curves", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is left, unless the directory hangs."""
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(_LAST_WRITE)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.wait()
            self._write()
            self._ended.wait(_PAUSE)
        self._write()

    def _write(self) -> None:
        self._changed.clear()
        while self._pending:
            write_rates(self._root, *self._pending.popitem())
