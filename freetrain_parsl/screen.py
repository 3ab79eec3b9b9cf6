"""Output for people: no text, from any source, can control the terminal.

Names, labels, hosts, errors, remarks and the output of batch systems come from other programs, and from files that
other users may have written. `say` and `say_json` write lines; `cli.console.Screen` writes tables. Nothing else in this
package prints for people: the tests see to it.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO

from freetrain_parsl.texts import LONGEST_LINE, coloured, printable_lines, shortened

__all__ = ["say", "say_coloured", "say_json", "say_text", "show_logged_warnings"]


def say(*lines: str, err: bool = False) -> None:
    """Print lines, each as one, to standard output or to standard error."""
    for line in lines:
        say_text(f"{shortened(line, LONGEST_LINE)}\n", err=err)


def say_text(text: str, *, err: bool = False) -> None:
    """Print a text as it is divided into lines, without a further end of line."""
    _write(printable_lines(text), sys.stderr if err else sys.stdout)


def say_coloured(line: str, *, flush: bool = True) -> None:
    """Print a line of a log to standard output, with its colours."""
    _write(f"{coloured(line)}\n", sys.stdout, flush=flush)


def say_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as JSON, with all non-ASCII characters escaped."""
    _write(f"{json.dumps(value, indent=indent)}\n", sys.stdout)


def _write(text: str, stream: TextIO, *, flush: bool = True) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a notebook's or a test's stream may have none
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    if flush:
        stream.flush()


class _Lines(logging.Formatter):
    """Formats a record, with its traceback, as `say_text` prints a text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def show_logged_warnings() -> None:
    """Print log records as `say_text` does, if the program has not set up logging."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Lines())
