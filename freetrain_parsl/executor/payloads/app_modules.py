"""The modules of an app's directory: each of two directories may have a ``model.py``, and each app has its own.

Python keeps one module of a name, so those of other apps are put aside while an app is imported or serialized. On a
node, where each training job has a process of its own, the directory only has to be searched first.
"""

from __future__ import annotations

import ast
import dis
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.interpreters import script_command
from freetrain_parsl.texts import printable
from freetrain_parsl.training.checkpoints.code.code_identity import in_library, is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import CodeType, ModuleType

__all__ = [
    "WHERE_MODULES_ARE",
    "NodeModules",
    "directory_of",
    "functions_of",
    "import_app_module",
    "imported_in",
    "own_modules",
    "search_first",
]

WHERE_MODULES_ARE: Final = (
    "a node finds modules in the directory of the function's own file, those that are installed, and those on "
    "PYTHONPATH, which the provider's worker_init may export; what a script adds to sys.path counts on its host only"
)

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]

_apps: dict[str, dict[str, ModuleType]] = {}
"""Directory of an app -> its modules, as far as they are imported."""

_lock = threading.RLock()  # apps are serialized in a thread of Parsl's

logger = logging.getLogger(__name__)

_PATIENCE = 20.0  # seconds for the new interpreter, on a busy login node
_ASSIGNED = re.compile(r"\bPYTHONPATH=(\S+)")
_ANY_VARIABLE = re.compile(r"[$`]")

_FIND = """
import importlib.util, json
sys.path[:0] = filter(None, sys.argv[1:2])
found = {}
for name in sys.argv[2:]:
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        continue
    found[name] = spec and (spec.origin if spec.has_location else "")
print(json.dumps(found))
"""


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


def functions_of(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions of an app: a bash app is a partial call of a function of Parsl with the user's."""
    function = inspect.unwrap(function)
    parts = (function.func, *function.args) if isinstance(function, partial) else (function,)
    return [inspect.unwrap(part) for part in parts if callable(part)]


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


class NodeModules:
    """Warns of modules that the driver has found where no node searches, once each: not hours later, on a node.

    The driver's ``sys.path`` may have entries that its script, or a module, has added. Nodes search the directory of
    the app's function, what is installed, and ``PYTHONPATH``. Whether that is enough is asked of a new interpreter.

    Parameters
    ----------
    worker_inits
        Shell commands that run on the nodes first: directories that they put on ``PYTHONPATH`` are searched there.
    known
        Whether it is known what is installed on the nodes; if not, there are no warnings.
    """

    def __init__(self, worker_inits: Iterable[str], *, known: bool = True) -> None:
        given = [path.strip("\"'") for text in worker_inits for path in _ASSIGNED.findall(text)]
        expanded = [re.sub(r"\$\{?PYTHONPATH\b[^:]*", "", path) for path in given]
        self._path = [os.path.expandvars(place) for path in expanded for place in path.split(os.pathsep) if place]
        self._unknown = not known or any(_ANY_VARIABLE.search(place) for place in self._path)
        self._checked: set[tuple[Any, ...]] = set()
        self._told: set[str] = set()
        self._answers: dict[tuple[str, str], str | None] = {}

    def check(self, app: Callable[..., Any], modules: Iterable[str] = ()) -> None:
        """Warn of modules that a call of an app needs and that nodes will not find.

        `modules` are imported when the serialized call is read, beside those of the app's functions.
        """
        for function in functions_of(app):
            self._check_function(function, modules)

    def _check_function(self, function: Callable[..., Any], modules: Iterable[str]) -> None:
        code = getattr(function, "__code__", None)
        key = (code, frozenset(modules))
        if self._unknown or code is None or key in self._checked:
            return
        self._checked.add(key)
        directory = directory_of(function)
        needed = {*modules, *imported_in(code), function.__module__} - {"__main__", "__mp_main__", None}
        with own_modules(directory):
            files = {name: _file_of(name) for name in _with_imports(needed, directory)}
        elsewhere = {
            name: file for name, file in files.items() if file and _place_of(file) != directory and not in_library(file)
        }
        for name, file in self._not_found(directory, elsewhere).items():
            self._warn(function, name, file)

    def _not_found(self, directory: str, files: dict[str, str]) -> dict[str, str]:
        """Return those of the modules that a new interpreter does not find, or finds in another file.

        It is asked once for each module of a directory: that takes a tenth of a second, and Parsl submits nothing then.
        """
        if unknown := [name for name in files if (directory, name) not in self._answers]:
            self._answers |= {(directory, name): place for name, place in self._ask(directory, unknown).items()}
        found = {name: self._answers[directory, name] for name in files if (directory, name) in self._answers}
        return {
            name: files[name]
            for name, place in found.items()
            if place is None or (place and not _same(place, files[name]))
        }

    def _ask(self, directory: str, names: list[str]) -> dict[str, str | None]:
        """Return where a new interpreter finds modules, ``None`` for one that it does not find; empty: unknown."""
        path = os.pathsep.join([*self._path, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            done = subprocess.run(
                [*script_command(_FIND), directory, *names], env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=True,
            )  # fmt: skip
            found: dict[str, str | None] = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            logger.debug("cannot find out which modules nodes find: %s", error)
            return {}
        return found

    def _warn(self, function: Callable[..., Any], name: str, file: str) -> None:
        if file in self._told:
            return
        self._told.add(file)
        code: CodeType = function.__code__
        text = printable(
            f"{function.__name__}() needs module {name!r} of {_place_of(file)}, where nodes do not search: "
            f"{WHERE_MODULES_ARE}"
        )
        logger.warning("%s", text)
        warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)


def _with_imports(names: Iterable[str], directory: str) -> set[str]:
    """Return the first parts of modules' names, with those of the modules that they import when they are imported."""
    seen: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        module = sys.modules.get(name)
        if module is not None and (file := _file_of(name.partition(".")[0])) and _place_of(file) == directory:
            left += _imports_of(module)
    return {name.partition(".")[0] for name in seen}


def _imports_of(module: ModuleType) -> Iterator[str]:
    """Return the modules that a module imports when it is imported itself."""
    try:
        tree = ast.parse(Path(module.__file__ or "").read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            name = "." * node.level + (node.module or "")
            try:
                name = importlib.util.resolve_name(name, module.__package__)
            except ImportError:
                continue
            names = [name, *(f"{name}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name in sys.modules)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return the imports that certainly happen: not those of functions, nor those that may fail or be left out."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.ClassDef, ast.With)):
            yield from _statements(node.body)


def _file_of(name: str) -> str:
    """Return the file of a module, or of its package; empty if it has none."""
    spec: Any
    try:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else module.__spec__
        return os.path.abspath(spec.origin) if spec is not None and spec.has_location else ""  # noqa: PTH100 - fast
    except Exception:  # noqa: BLE001 - of the user's finders and modules, which may raise any exception
        return ""


def _place_of(file: str) -> str:
    """Return the directory in which the module of a file is found."""
    directory, name = os.path.split(file)
    return os.path.dirname(directory) if name == "__init__.py" else directory  # noqa: PTH120 - a plain string


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
