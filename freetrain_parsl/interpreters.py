"""Commands that run modules of this package in another interpreter, without its current directory on the module path.

``python -m`` and ``python -c`` search the current directory first. In a directory that several users may write, such as
a scratch directory, a ``json.py`` that somebody has left there would run as the caller. ``python -P`` exists from
Python 3.11 on only, and the nodes' interpreter may be another one.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FREETRAIN", "in_root_directory", "module_command", "module_in", "script_command"]

_LEAVE_OUT: Final = "import sys; sys.path[:] = filter(None, sys.path); "  # an empty entry stands for the directory
_RUN: Final = 'import runpy; runpy.run_module("'
_AS_MAIN: Final = '", run_name="__main__", alter_sys=True)'

FREETRAIN: Final = "from freetrain_parsl.cli import main; main()"
"""Script of the command line, whose arguments follow."""


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """Return the words that run a module as ``python -m`` does; its arguments follow.

    Launchers of batch systems put them into here-documents, so they have no dollar sign, backquote or backslash.

    Parameters
    ----------
    module
        Its full name.
    python
        The interpreter.
    """
    return script_command(f"{_RUN}{module}{_AS_MAIN}", python)


def script_command(script: str, python: str = sys.executable) -> list[str]:
    """Return the words that run a text as ``python -c`` does; its arguments follow.

    Parameters
    ----------
    script
        The text.
    python
        The interpreter.
    """
    return [python, "-c", f"{_LEAVE_OUT}{script}"]


def module_in(command: list[str]) -> tuple[str, list[str]]:
    """Return the module that a command runs, of `module_command` or with ``-m``, and its arguments."""
    _python, _option, module, *arguments = command
    return module.removeprefix(_LEAVE_OUT + _RUN).removesuffix(_AS_MAIN), arguments


@contextmanager
def in_root_directory() -> Iterator[None]:
    """Go to the root directory, where only administrators can leave modules, and return at the end.

    For interpreters that multiprocessing starts: it runs them by ``python -c``.
    """
    here = os.open(".", os.O_PATH)
    if path := os.environ.get("PYTHONPATH"):  # its relative entries stay the same
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)
