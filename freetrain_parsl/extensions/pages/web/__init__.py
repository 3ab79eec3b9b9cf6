"""The parts of the pages that show a run: one script and one style sheet, without a build step."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Final

__all__ = ["run_view_script", "run_view_style"]

_MODULES: Final = ("parts.js", "node_chart.js", "curves.js", "run_view.js")
"""Each imports only from those before it."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[a-z_]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!function createRunView)", re.MULTILINE)


@cache
def run_view_script() -> str:
    """Return ``createRunView`` as one ES module, for places that cannot resolve relative imports."""
    texts = [_read(name) for name in _MODULES]
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts)


@cache
def run_view_style() -> str:
    """Return its style sheet; all of its rules are for elements in ``.ft-run``."""
    return _read("run_view.css")


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
