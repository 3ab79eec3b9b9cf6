"""The live view of a run as a Jupyter widget: the same script that draws the page of ``freetrain dashboard``.

Importing this module needs anywidget (extra ``notebook``). The kernel sends what has changed since the last time. It
can do so while a cell runs, but answers only between cells. So the browser keeps all changes, for views that are opened
later, and asks for everything only if it has missed some, as after a reload of the page.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from freetrain_parsl.extensions.pages.web import run_view_script, run_view_style

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RunWidget"]

_LIGHT, _DARK = re.findall(r"^ *\.ft-run \{([^}]*)\}", run_view_style(), re.MULTILINE)[:2]
# A notebook has a theme of its own, and JupyterLab has rules for lists.
_THEMES = f"""
body[data-jp-theme-light="true"] .ft-run, body.vscode-light .ft-run {{{_LIGHT} color-scheme: light; }}
body[data-jp-theme-light="false"] .ft-run, body.vscode-dark .ft-run {{{_DARK} color-scheme: dark; }}
.ft-run .ft-cards dt, .ft-run .ft-cards dd {{ float: none; display: block; width: auto; }}
"""
_WIDGET = """
export default () => {
  let changes = [];
  let version = 0;
  const views = new Set();
  const take = (model) => {
    const { base, delta } = model.get("change");
    if (!delta) return;
    if (base === 0) changes = [];
    else if (base !== version) {
      model.send({ want: "everything" });
      return;
    }
    version = delta.version;
    changes.push(delta);
    for (const view of views) view.update(delta);
  };
  return {
    initialize({ model }) {
      take(model);
      model.on("change:change", () => take(model));
    },
    render({ model, el }) {
      const line = document.createElement("p");
      line.setAttribute("role", "status");
      const say = () => { line.textContent = model.get("line"); line.hidden = !line.textContent; };
      say();
      model.on("change:line", say);
      el.append(line);
      const view = createRunView(el);
      changes.forEach((delta) => view.update(delta));
      views.add(view);
      return () => { views.delete(view); view.destroy(); model.off("change:line", say); };
    },
  };
};
"""


class RunWidget(anywidget.AnyWidget):
    """A view of a run in the browser; `changes` is like `RunView.since`."""

    _esm = run_view_script() + _WIDGET
    _css = run_view_style() + _THEMES
    change = traitlets.Dict().tag(sync=True)
    """``delta``, as of ``changes``, and the version that it is ``base``d on; 0: it is everything."""
    line = traitlets.Unicode().tag(sync=True)
    """What the journal cannot say, such as why the driver did not start."""

    def __init__(self, changes: Callable[[int], dict[str, Any]], **more: Any) -> None:
        self._changes = changes
        self._sent = 0
        self._lock = threading.Lock()
        super().__init__(change=self._next() or {}, **more)
        self.on_msg(self._on_message)

    def push(self, line: str = "") -> None:
        """Send what has changed."""
        with self._lock:
            if (change := self._next()) is not None:
                self.change = change
            self.line = line

    def _next(self) -> dict[str, Any] | None:
        base, delta = self._sent, self._changes(self._sent)
        if delta["version"] == base:
            return None
        self._sent = delta["version"]
        return {"base": base, "delta": {**delta, "reset": base == 0}}

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if isinstance(content, dict) and content.get("want") == "everything":
            with self._lock:
                self._sent = 0
                self.change = self._next() or {}
