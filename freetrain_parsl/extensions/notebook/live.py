"""A display that continues updating while other cells run: a thread reads the run and sends what has changed.

While the run continues, the output of the cell has the live view, if anywidget is installed, and the state as a table
for viewers that cannot show it. When the run ends, the table and pictures of its nodes and curves take its place, which
a saved notebook keeps.
"""

from __future__ import annotations

import base64
import html
import sqlite3
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import FreeTrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.extensions.notebook.shown import ShownRun
    from freetrain_parsl.extensions.notebook.snapshot import RunSnapshot
    from freetrain_parsl.extensions.notebook.values import Picture
    from freetrain_parsl.extensions.notebook.widget import RunWidget

__all__ = ["LiveDisplay", "bundle_of", "in_kernel"]

_PERIOD = 1.0  # seconds between looks at the run
_TABLE_PERIOD = 2.0  # seconds between updates of a table
_LAST_UPDATE = 15.0  # seconds for which a cell waits for the final pictures
_SAVED_PERIOD = 300.0  # seconds between updates of the table behind a live view, which draw that view anew


def bundle_of(snapshot: RunSnapshot, pictures: Sequence[Picture] = ()) -> dict[str, Any]:
    """Return what is shown of a run, by MIME type; pictures are below the table."""
    page = snapshot.html()
    for picture in pictures:
        if picture.png is not None:
            data = base64.b64encode(picture.png).decode()
            page += f"<img alt='{html.escape(str(picture))}' src='data:image/png;base64,{data}'>"
    return {"text/plain": snapshot.text(), "text/html": page}


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class LiveDisplay:
    """Outputs of cells that show a run until it ends, then its pictures.

    `pause` waits for that many seconds, and returns whether to end the updates.
    """

    def __init__(
        self,
        source: ShownRun,
        pictures: Callable[[], Sequence[Picture]],
        *,
        pause: Callable[[float], bool] = _sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._pictures = pictures
        self._pause = pause
        self._clock = clock
        self._handles: list[Any] = []
        self._widget: RunWidget | None = None
        self._thread: threading.Thread | None = None
        self._shown: RunSnapshot | None = None
        self._updated = 0.0
        self._cell: str | None = None

    @property
    def is_in_this_cell(self) -> bool:
        """Whether the output of the cell that runs now has the run already."""
        return self._cell is not None and self._cell == _this_cell()

    def open(self) -> None:
        """Show the run in the output of the current cell."""
        from IPython.display import display

        self._cell = _this_cell()
        snapshot = self._source.snapshot()
        follows = self._thread is not None and self._thread.is_alive()
        if not (snapshot.over or follows):
            self._widget = _widget_of(self._source)
        handle = display(self._bundle(snapshot), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        if snapshot.over:
            return
        self._handles.append(handle)
        if not follows:
            self._shown, self._updated = snapshot, self._clock()
            self._thread = threading.Thread(target=self._follow, name="freetrain-notebook", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """Wait until the end of the run is shown, so that it is in the notebook when its last cell ends."""
        if self._thread is not None:
            self._thread.join(_LAST_UPDATE)

    def _follow(self) -> None:
        while not self._pause(_PERIOD):
            try:
                snapshot = self._source.snapshot()
                if self._widget is not None:
                    self._widget.push(_line(snapshot))
            # The directory is gone, or cannot be read for now.
            except (FreeTrainError, OSError, sqlite3.Error) as error:
                self._state_problem(str(error))
                continue
            self._update(snapshot)
            if snapshot.over:
                return

    def _state_problem(self, text: str) -> None:
        """Show why the state that is shown is not the present one."""
        if self._widget is not None:
            self._widget.push(text)
        if self._shown is not None:
            self._update(replace(self._shown, notes=(text,)))

    def _update(self, snapshot: RunSnapshot) -> None:
        now = self._clock()
        period = _TABLE_PERIOD if self._widget is None else _SAVED_PERIOD
        is_new = self._shown is None or snapshot.rows != self._shown.rows or snapshot.notes != self._shown.notes
        if snapshot.over or (is_new and now - self._updated >= period):
            self._shown, self._updated = snapshot, now
            bundle = self._bundle(snapshot)
            for handle in self._handles:
                handle.update(bundle, raw=True)
        if snapshot.over:
            self._handles.clear()

    def _bundle(self, snapshot: RunSnapshot) -> dict[str, Any]:
        if snapshot.over:
            return bundle_of(snapshot, self._pictures())
        return {**_shown_by(self._widget), **bundle_of(snapshot)}


def in_kernel() -> bool:
    """Return whether this is the kernel of a notebook, whose outputs can be updated."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell: Any = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _this_cell() -> str | None:
    """Return the id of the request that executes the present cell; ``None``: unknown."""
    from IPython import get_ipython

    shell: Any = get_ipython()
    parent: dict[str, Any] = getattr(shell, "get_parent", dict)()  # as of ipykernel
    return parent.get("header", {}).get("msg_id") or None


def _widget_of(source: ShownRun) -> RunWidget | None:
    try:
        from freetrain_parsl.extensions.notebook.widget import RunWidget
    except ImportError:
        return None
    return RunWidget(source.changes)


def _shown_by(widget: RunWidget | None) -> dict[str, Any]:
    if widget is None:
        return {}
    shown = widget._repr_mimebundle_()
    data = shown[0] if isinstance(shown, tuple) else shown
    return dict(data or {})


def _line(snapshot: RunSnapshot) -> str:
    """Return what the journal does not say: that the driver starts, or why it has not."""
    state = "" if snapshot.state == "running" else f"{snapshot.title}: {snapshot.state}"
    return "; ".join(filter(None, [state, *snapshot.notes]))
