"""The logs of training jobs: what they print, wherever they run, as one file in order for each.

They are written in a thread of the driver that alone waits for the file system. A line has the time at which it reached
the driver, the process that printed it, and its text::

    2026-11-23T01:45:16.123Z = trains on n03, n04
    2026-11-23T01:45:17.201Z 0 epoch 3, loss 0.1203

The process is its rank, ``?`` while it joins a running training job, with ``!`` if the line belongs to the exception
that ended it there, and ``=`` for a mark: what the records of the journal say about the training job itself, in words.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import IO, TYPE_CHECKING, Final

from freetrain_parsl.protocol import journal as record
from freetrain_parsl.texts import with_colours_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from freetrain_parsl.protocol.journal import Record

__all__ = [
    "FIRST",
    "LEFT_BEHIND",
    "LOCK",
    "MARK",
    "SUFFIX",
    "LogLine",
    "LogWriter",
    "as_text",
    "leave_behind",
    "log_files",
    "mark_of",
    "names_in",
    "parse_line",
]

MARK: Final = "="
FIRST: Final = "0"

SUFFIX: Final = ".log"
"""Of the newest file of a training job's log; older ones have a number after it, the largest is the oldest."""

_FILE = re.compile(rf"(.+){re.escape(SUFFIX)}(?:\.(\d+))?", re.ASCII)  # the current one has no number
_LINE: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z (=|!?\d{1,7}|!?\?) (.*)", re.DOTALL | re.ASCII)

logger = logging.getLogger(__name__)

_MOST_NODES = 8  # named in a mark
LOCK: Final = "writer.lock"
"""File that a running driver holds locked."""

LEFT_BEHIND: Final = "left-behind"
"""Directory with the lines that slots could no longer send to their driver; the next driver adds them to the logs."""

_PERIOD: Final = 1.0  # seconds between writes: small ones are a load on shared file systems
_MOST_WAITING: Final = 16 << 20  # characters in memory
_FILES: Final = 4  # of each training job
_LARGEST_LOG: Final = 16 << 20  # bytes of each training job
_LARGEST_RUN: Final = 2 << 30  # bytes of all training jobs
_MOST_OPEN: Final = 128  # files that stay open: opening is the expensive part on shared file systems
_ADOPTION_PERIOD: Final = 5.0  # seconds
_LONGEST_PAUSE: Final = 60.0  # seconds between attempts to write


@dataclass(frozen=True)
class LogLine:
    """One line of a training job's log: when it reached the driver, and the process that printed it, or `MARK`."""

    time: float
    training: str
    source: str
    text: str

    @property
    def is_mark(self) -> bool:
        """Whether it says how the training job ended, instead of what it printed."""
        return self.source == MARK

    @property
    def is_main(self) -> bool:
        """Whether it belongs to the training job's main output: the first process's, marks, and exceptions."""
        return self.source in (FIRST, MARK) or self.source.startswith("!")


def as_text(time: float, source: str, text: str) -> str:
    """Return one line or several as they are in the file; control characters other than tabs and colours are left out.

    What UTF-8 cannot encode, such as the bytes of a file name in an exception, is escaped.
    """
    stamp = datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="milliseconds")[:-6]
    prefix = f"{stamp}Z {source} "
    shown = with_colours_only(text)
    return prefix + shown.replace("\n", f"\n{prefix}") + "\n"


def parse_line(training: str, line: str) -> LogLine | None:
    """Return a line of a file; ``None`` if it is not one, e.g. because the driver was killed while it wrote it."""
    if (found := _LINE.fullmatch(line.removesuffix("\n"))) is None:
        return None
    stamp, source, text = found.groups()
    try:
        time = datetime.fromisoformat(f"{stamp}+00:00").timestamp()
    except ValueError:
        return None
    return LogLine(time, training, source, text)


def log_files(directory: Path) -> dict[str, list[Path]]:
    """Return the files of each training job's log, oldest first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in directory.glob(f"*{SUFFIX}*"):
        if (name := _FILE.fullmatch(path.name)) is not None:
            found.setdefault(name[1], []).append((int(name[2] or 0), path))
    return {training: [path for _, path in sorted(numbered, reverse=True)] for training, numbered in found.items()}


def names_in(directory: Path) -> list[str]:
    """Return the training jobs that have a log in a directory."""
    return sorted({path.name.removesuffix(SUFFIX) for path in directory.glob(f"*{SUFFIX}")})


def mark_of(entry: Record) -> str | None:  # noqa: C901 - one case for each kind of record
    """Return the mark for a record about a training job; ``None`` if the log does not mention it."""
    match entry:
        case record.FragmentStarted(nodes=nodes, array=array, in_place=in_place, paused=paused):
            facts = [f"in place after {paused:.2f} s"] if in_place else []
            facts += [f"{entry.moved / 1e6:,.1f} MB moved"] if entry.moved else []
            facts += ["no step repeated"] if entry.repaired else []
            how = f" ({', '.join(facts)})" if facts else ""
            where = f", in {array}" if array else ""
            return f"trains on {_names(nodes)}{how}{where}"
        case record.FragmentResumed():
            return f"resumed from {entry.source}"
        case record.FragmentEnded(failure=True, nodes=nodes):
            return f"{entry.loss}; it trained on {_names(nodes)}"
        case record.FragmentEnded(nodes=nodes):
            return f"left {_names(nodes)}"
        case record.TrainsAlone(reason=reason):
            return f"not fused: {reason}"
        case record.BaseShared(array=array):
            return f"in {array}, {entry.how()}"
        case record.CodeChanged(note=note) | record.TrainingNoted(note=note):
            return note
        case record.TrainingWaits(reason=reason):
            return f"waits: {reason}"
        case record.TrainingTriesAgain():
            return "tries again: the checkpoint directory can be used again"
        case record.SavingFails(reason=reason):
            return f"cannot save: {reason}"
        case record.SavingWorks():
            return "saves again"
        case record.TrainingCancelled():
            return "is being cancelled"
        case record.TrainingFinished(trained=True, step=step):
            return f"finished at step {step}"
        case record.TrainingFinished(step=step):
            return f"had finished at step {step} in an earlier run: nothing was trained"
        case record.TrainingFailed(error=error):
            return f"{'failed' if entry.final else 'ended'}: {' '.join(error.split())}"
    return None


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
    return ", ".join(nodes[:_MOST_NODES]) + more


class LogWriter:
    """The logs of a run's training jobs, in a directory that is private to the user.

    Lines are kept in memory, up to a limit, until they are written, once a second. A slow, full or missing file system
    costs lines, never the driver's time. A driver that another one has replaced is not `allowed` to write any more.
    """

    def __init__(
        self, directory: Path, clock: Callable[[], float] = time.time, allowed: Callable[[], bool] = lambda: True
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._allowed = allowed
        self._lock = threading.Lock()  # of the next three
        self._waiting: dict[str, list[str]] = {}  # training -> texts of complete lines
        self._length = 0
        self._left_out: dict[str, int] = {}  # training -> lines
        self._trainings: set[str] = set()
        self._open: OrderedDict[str, IO[str]] = OrderedDict()
        self._failures = 0
        self._retry_at = 0.0
        self._closing = threading.Event()
        self._ended = False
        self._adopts_at = 0.0
        self._held: int | None = None
        self._thread = threading.Thread(target=self._run, name="freetrain-logs", daemon=True)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, and end the thread; give up after `timeout` seconds."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        elif not self._ended:
            self._end()

    # The control loop's thread.

    def note(self, entry: Record) -> None:
        """Add a mark for what happened to a training job, if the log mentions it."""
        if isinstance(entry, record.TrainingSubmitted):
            self._trainings.add(entry.subject)
        elif entry.subject in self._trainings and (mark := mark_of(entry)) is not None:
            self._add(entry.subject, [as_text(self._clock(), MARK, " ".join(mark.split()))])

    def take(self, training: str, source: str, output: bytes) -> None:
        """Add what a process has printed; ignored if there is no such training job."""
        if training in self._trainings:
            text = output.decode("utf-8", errors="replace").removesuffix("\n")
            self._add(training, [as_text(self._clock(), source, text)])

    def _add(self, training: str, lines: list[str]) -> None:
        length = sum(map(len, lines))
        with self._lock:
            if self._length + length > _MOST_WAITING:
                self._left_out[training] = self._left_out.get(training, 0) + sum(text.count("\n") for text in lines)
                return
            self._waiting.setdefault(training, []).extend(lines)
            self._length += length

    # This object's thread.

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD):
            self._write()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._retry_at = 0.0
        self._write()
        for file in self._open.values():
            with contextlib.suppress(OSError):  # of a full disk: reported
                file.close()
        if self._held is not None:
            os.close(self._held)

    def _write(self) -> None:
        if self._retry_at > time.monotonic() or not self._allowed():
            return
        try:
            if self._held is None:
                self._hold()
            self._adopt()
            with self._lock:
                waiting, self._waiting, self._length = self._waiting, {}, 0
                left_out, self._left_out = self._left_out, {}
            for training in {**waiting, **left_out}:
                if count := left_out.get(training):
                    text = f"{count} lines left out: the log could not be written in time"
                    waiting.setdefault(training, []).append(as_text(self._clock(), MARK, text))
            while waiting:
                training, lines = next(iter(waiting.items()))
                self._append(training, lines)
                del waiting[training]
        except OSError as error:  # full disk, lost mount: not the run's fault
            self._failures += 1
            self._retry_at = time.monotonic() + min(2.0**self._failures, _LONGEST_PAUSE)
            if self._failures == 1:
                logger.warning("cannot write the training jobs' logs in %s: %s; trying again", self._directory, error)
            self._put_back(waiting if self._held is not None else {})
            return
        if self._failures:
            logger.warning("the training jobs' logs can be written again")
        self._failures = 0

    def _put_back(self, waiting: dict[str, list[str]]) -> None:
        """Keep lines for the next attempt; a job whose write has failed may lose or repeat those of a second."""
        later, self._waiting = self._waiting, {}
        with self._lock:
            self._length = 0
        for lines in (waiting, later):
            for training, some in lines.items():
                self._add(training, some)

    def _hold(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        held = os.open(self._directory / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)  # a reader that tests it holds it for a moment
        self._held = held

    def _append(self, training: str, lines: Iterable[str]) -> None:
        file = self._file(training)
        try:
            file.writelines(lines)
            file.flush()
            size = file.tell()
        except OSError:
            with contextlib.suppress(OSError):  # the same
                file.close()
            del self._open[training]
            raise
        if size > min(_LARGEST_LOG, _LARGEST_RUN // len(self._trainings)) // _FILES:
            self._rotate(training)

    def _file(self, training: str) -> IO[str]:
        if (file := self._open.get(training)) is not None:
            self._open.move_to_end(training)
            return file
        while len(self._open) >= _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        path = self._path(training)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a driver was killed while it wrote
            os.write(descriptor, b"\n")
        file = os.fdopen(descriptor, "a", encoding="utf-8", newline="\n")
        self._open[training] = file
        return file

    def _rotate(self, training: str) -> None:
        self._open.pop(training).close()
        for number in range(_FILES - 2, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                self._path(training, number).replace(self._path(training, number + 1))

    def _path(self, training: str, number: int = 0) -> Path:
        return self._directory / f"{training}{SUFFIX}{f'.{number}' if number else ''}"

    def _adopt(self) -> None:
        """Add the lines that slots of an earlier driver could not send; they end some time after it."""
        if time.monotonic() < self._adopts_at and not self._closing.is_set():
            return
        self._adopts_at = time.monotonic() + _ADOPTION_PERIOD
        for path in sorted((self._directory / LEFT_BEHIND).glob("*.lines")):
            training = path.name.split("@")[0]
            with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                lines = [line for line in file if parse_line(training, line) is not None]
            mark = as_text(self._clock(), MARK, "printed in a slot whose driver had failed:")
            end = as_text(self._clock(), MARK, "end of what was printed there")
            self._trainings.add(training)
            path.unlink()
            self._add(training, [mark, *lines, end])


def leave_behind(directory: Path, training: str, slot: str, lines: Iterable[str]) -> None:
    """Store lines for the next driver, atomically; called by a slot whose driver has failed.

    Raises
    ------
    OSError
        The directory cannot be written.
    """
    place = directory / LEFT_BEHIND
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = place / f"{training}@{slot}.lines"
    aside = path.with_suffix(".part")
    with os.fdopen(os.open(aside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.writelines(lines)
    aside.replace(path)
