"""The ``freetrain`` command; one module a verb.

This module imports next to nothing, so that Ctrl-C is answered while the verbs are still being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> None:
    """Run the command line.

    A mistake of the user's is one line on standard error and exit code 2. An interruption is exit code 130.
    """
    with _exit_if_interrupted():
        from freetrain_parsl.cli.commands import app
        from freetrain_parsl.errors import FreeTrainError, UsageError
    try:
        app()
    except UsageError as error:
        sys.stderr.write(f"freetrain: {error}\n")
        sys.exit(2)
    except FreeTrainError as error:
        sys.stderr.write(f"freetrain: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("freetrain: interrupted\n")
        sys.exit(_INTERRUPTED)


@contextmanager
def _exit_if_interrupted() -> Iterator[None]:
    """End the process at once on Ctrl-C.

    An exception would not do: extension modules turn a KeyboardInterrupt raised while they are imported into an
    ImportError. While modules are imported there is nothing to clean up.
    """

    def leave(_number: int, _frame: Any) -> None:
        os.write(2, b"freetrain: interrupted\n")
        os._exit(_INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # it is ignored (a job in the background), or another program's
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
