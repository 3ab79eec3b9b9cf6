"""Reads the logs of a run's training jobs, also while they are written."""

from __future__ import annotations

import fcntl
import heapq
import os
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.training_logs import LEFT_BEHIND, LOCK, SUFFIX, LogLine, log_files, parse_line
from freetrain_parsl.storage.owned_files import open_directory, open_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["follow_logs", "has_writer", "read_logs"]

_PERIOD = 0.5  # seconds between two looks at the files
_SMALL = 1 << 14  # bytes of a file that is read as a whole


def read_logs(directory: Path, trainings: Sequence[str], *, everything: bool = False) -> Iterator[LogLine]:
    """Yield the lines of these training jobs' logs, merged by time.

    Parameters
    ----------
    directory
        The run's logs.
    trainings
        Their names; those without a log are skipped.
    everything
        Whether to include the output of processes other than the first.
    """
    files = log_files(directory)
    for path in sorted((directory / LEFT_BEHIND).glob("*@*.lines")):
        files.setdefault(path.name.partition("@")[0], []).append(path)
    return _merged([_lines_of(training, files.get(training, [])) for training in trainings], everything=everything)


def follow_logs(
    directory: Path,
    trainings: Callable[[], Iterable[str]],
    *,
    ended: Callable[[], bool],
    sleep: Callable[[float], None],
    everything: bool = False,
    tail: int | None = None,
) -> Iterator[LogLine]:
    """Yield the lines that there are, then those that are added, until the run has ended.

    Parameters
    ----------
    directory, everything
        See `read_logs`.
    trainings
        Returns their names; further ones may be added.
    ended
        Returns whether nothing more will be added.
    sleep
        Waits.
    tail
        Number of lines to begin with; ``None``: all.
    """
    tails: dict[str, _Tail] = {}
    try:
        while True:
            last = ended()  # before the files are read
            if added := [name for name in trainings() if name not in tails]:
                files = log_files(directory)
                tails.update({name: _Tail(directory, name, files.get(name, [])) for name in added})
            new = _merged([each.read() for each in tails.values()], everything=everything)
            yield from new if tail is None else deque(new, maxlen=tail)
            tail = None
            if last:
                return
            sleep(_PERIOD)
    finally:
        for each in tails.values():
            each.close()


def has_writer(directory: Path) -> bool:
    """Return whether a driver writes these logs; works where the file system supports locks."""
    try:
        with open_directory(directory) as opened:
            file = opened.open_file(LOCK)
    except (OSError, InvalidInput):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _merged(logs: Sequence[Iterator[LogLine]], *, everything: bool) -> Iterator[LogLine]:
    lines = heapq.merge(*logs, key=lambda line: line.time)
    return (line for line in lines if everything or line.is_main)


def _lines_of(training: str, files: Iterable[Path]) -> Iterator[LogLine]:
    for path in files:
        yield from _lines_in(training, path)


def _lines_in(training: str, path: Path) -> Iterator[LogLine]:
    with suppress(FileNotFoundError):  # it was rotated or adopted meanwhile
        with open_text(path) as file:
            if not (small := os.fstat(file.fileno()).st_size <= _SMALL):
                yield from _parsed(training, file)
            lines = file.readlines() if small else []
        yield from _parsed(training, lines)  # closed: of ten thousand training jobs, as many would be open at a time


def _parsed(training: str, lines: Iterable[str]) -> Iterator[LogLine]:
    return (line for text in lines if (line := parse_line(training, text)) is not None)


class _Tail:
    """Reads what is added to a training job's log, through rotations."""

    def __init__(self, directory: Path, training: str, files: Sequence[Path]) -> None:
        self._directory = directory
        self._training = training
        self._file: IO[str] | None = None
        self._older: deque[Path] = deque(path for path in files if path.suffix != SUFFIX)
        self._rest = ""

    def read(self) -> Iterator[LogLine]:
        """Yield the lines since the last call."""
        while self._older:
            yield from _lines_in(self._training, self._older.popleft())
        path = self._directory / f"{self._training}{SUFFIX}"
        file = self._file or self._opened(path)
        while file is not None:
            yield from self._read(file)
            if not _is_rotated(file, path):
                break
            yield from self._read(file)  # what was added before the rotation
            file.close()
            file = self._opened(path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _opened(self, path: Path) -> IO[str] | None:
        self._rest = ""
        self._file = None
        with suppress(FileNotFoundError):
            self._file = open_text(path)
        return self._file

    def _read(self, file: IO[str]) -> Iterator[LogLine]:
        text = self._rest + file.read()
        complete, _, self._rest = text.rpartition("\n")
        yield from _parsed(self._training, complete.split("\n"))


def _is_rotated(file: IO[str], path: Path) -> bool:
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False  # between the rotation and the next line
