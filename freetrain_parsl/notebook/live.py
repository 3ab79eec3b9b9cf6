"""A display that goes on updating while other cells run: a thread reads the run and sends what has changed."""

from __future__ import annotations

import sqlite3
import threading
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import FreeTrainError

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.notebook.snapshot import RunSnapshot

__all__ = ["LiveDisplay", "in_kernel"]

_PERIOD = 1.0  # seconds between looks at the run


class LiveDisplay:
    """Output cells that show a run until it ends.

    Parameters
    ----------
    read
        Returns the state of the run.
    bundle
        Returns what a display shows of a state, by MIME type.
    pause
        Waits, for at most that many seconds, and returns whether to end.
    """

    def __init__(
        self,
        read: Callable[[], RunSnapshot],
        bundle: Callable[[RunSnapshot], dict[str, Any]],
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self._read = read
        self._bundle = bundle
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait
        self._handles: list[Any] = []
        self._shown: RunSnapshot | None = None

    def open(self) -> None:
        """Show the run in the output of the current cell."""
        from IPython.display import display

        snapshot = self._read()
        first = not self._handles
        self._handles.append(display(self._bundle(snapshot), raw=True, display_id=True))  # type: ignore[no-untyped-call]
        self._shown = snapshot
        if first and not snapshot.over:
            threading.Thread(target=self._follow, name="freetrain-notebook", daemon=True).start()

    def close(self) -> None:
        """End the updates."""
        self._closed.set()

    def _follow(self) -> None:
        while not self._pause(_PERIOD):
            try:
                snapshot = self._read()
            except (FreeTrainError, OSError, sqlite3.Error):  # the directory is gone, or cannot be read for now
                continue
            if self._shown is None or snapshot.rows != self._shown.rows or snapshot.milestone != self._shown.milestone:
                self._shown = snapshot
                for handle in self._handles:
                    handle.update(self._bundle(snapshot), raw=True)
            if snapshot.over:
                return


def in_kernel() -> bool:
    """Return whether this is the kernel of a notebook, whose outputs can be updated."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell: Any = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
