"""The modules of an app's directory: each of two directories may have a ``model.py``, and each app has its own.

Python keeps one module of a name, so those of other apps are put aside while an app is imported or serialized. On a
node, where each training has a process of its own, the directory only has to be searched first.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.training.checkpoints.code.code_identity import is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, ModuleType

__all__ = ["WHERE_MODULES_ARE", "directory_of", "import_app_module", "imported_in", "own_modules", "search_first"]

WHERE_MODULES_ARE: Final = (
    "a node finds modules in the directory of the function's own file, those that are installed, and those on "
    "PYTHONPATH, which the provider's worker_init may export; what a script adds to sys.path counts on its host only"
)

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]

_apps: dict[str, dict[str, ModuleType]] = {}
"""Directory of an app -> its modules, as far as they are imported."""

_lock = threading.RLock()  # apps are serialized in a thread of Parsl's


def directory_of(function: Callable[..., Any]) -> str:
    """Return the directory from which a function's module, or script, was imported; empty if it is in a library."""
    name = getattr(function, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or not is_own(name):
        return ""
    if name == "__main__":
        if getattr(module, "__file__", None) != getattr(getattr(function, "__code__", None), "co_filename", ""):
            # A notebook's cell, for which modules are looked up in the kernel's directory; or it comes from elsewhere.
            return os.getcwd() if "" in sys.path else ""  # noqa: PTH109 - a plain string
        name = module.__spec__.name if module.__spec__ is not None else name
    return _root(name, module)


def import_app_module(name: str, directory: str) -> ModuleType:
    """Import a module of an app, whose other modules are looked up in its directory first."""
    with own_modules(directory):
        search_first(directory)
        importlib.invalidate_caches()
        try:
            return importlib.import_module(name)
        finally:
            loaded = list(sys.modules.items())
            _apps[directory] = {name: module for name, module in loaded if _root(name, module) == directory}


def imported_in(code: CodeType) -> Iterator[str]:
    """Return the names of modules that a function's code, or functions in it, import; not relative ones."""
    if _IMPORT_NAME in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME" and level.argval == 0:
                yield str(step.argval)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from imported_in(constant)


@contextmanager
def own_modules(directory: str) -> Iterator[None]:
    """Put aside the modules of apps of other directories, in favour of those of this one."""
    with _lock:
        modules = [item for place, own in _apps.items() if place != directory for item in own.items()]
        others = {name: module for name, module in modules if sys.modules.get(name) is module}
        for name in others:
            del sys.modules[name]
        sys.modules.update(_apps.get(directory, {}))
        try:
            yield
        finally:
            sys.modules.update(others)


def search_first(directory: str) -> None:
    """Let imports search a directory, if it is not empty, before all others."""
    if directory and sys.path[:1] != [directory]:
        sys.path[:] = [directory, *(place for place in sys.path if place != directory)]


def _root(name: str | None, module: ModuleType) -> str:
    """Return the directory in which the import of a module began; empty if it is not in a file."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return ""
    levels = str(name).count(".") + (os.path.basename(file) == "__init__.py")  # noqa: PTH119 - of all modules: fast
    for _ in range(levels + 1):
        file = os.path.dirname(file)  # noqa: PTH120 - the same
    return os.path.abspath(file) if file else ""  # noqa: PTH100 - the same
