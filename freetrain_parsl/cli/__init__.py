"""The ``freetrain`` command; one module per verb.

This module imports almost nothing, so that Ctrl-C works while the verbs are still being imported.
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

    Usage errors print one line to standard error and exit with code 2; an interruption exits with code 130.
    """
    with _exit_if_interrupted():
        from freetrain_parsl.cli.verbs import app_of
        from freetrain_parsl.errors import FreeTrainError, UsageError
        from freetrain_parsl.screen import say, show_logged_warnings

        show_logged_warnings()
    try:
        with _exit_if_interrupted():
            app = app_of(*sys.argv[1:2])
        app()
    except UsageError as error:
        say(f"freetrain: {error}", err=True)
        sys.exit(2)
    except FreeTrainError as error:
        say(f"freetrain: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        say("freetrain: interrupted", err=True)
        sys.exit(_INTERRUPTED)


@contextmanager
def _exit_if_interrupted() -> Iterator[None]:
    """End the process at once on Ctrl-C.

    An exception is not enough: extension modules turn a KeyboardInterrupt raised during their import into an
    ImportError. There is nothing to clean up during imports.
    """

    def leave(_number: int, _frame: Any) -> None:
        os.write(2, b"freetrain: interrupted\n")
        os._exit(_INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored (background job) or set by another program
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
