"""File system calls of the nodes' processes in `peers.py`: on a real cluster, those on a shared file system."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["count_calls"]

_CALL = re.compile(r'\d+ +\w+\((?:[^"<]*(?:<(?P<base>[^>"]*)>)?)?[^"]*"(?P<path>[^"]*)"')


def count_calls(records: Path, environment: Sequence[str], directory: str) -> tuple[int, int]:
    """Return the calls on the files of an environment, and on those of a directory.

    Parameters
    ----------
    records
        Directory with the output of ``strace -f -y -e trace=%file``, one file for each node.
    environment
        Directories of Python, its packages and the code.
    directory
        Checkpoints and records of the training jobs.
    """
    inside = [0, 0]
    places = [(1, Path(directory)), *((0, Path(each)) for each in environment)]
    for record in records.iterdir():
        with record.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                called = _CALL.match(line)
                if called is None or not called["path"]:  # of an open file, or the second half of a call
                    continue
                path = Path(called["base"] or "/", called["path"])
                where = next((number for number, place in places if path.is_relative_to(place)), None)
                if where is not None:
                    inside[where] += 1
    return inside[0], inside[1]
