"""Keeps the values that jobs log, for their trackers: in a thread of the driver, one file for each job.

The files are next to the checkpoints, so they last as long as the training job, whatever drives it. A process of its
own (`freetrain_parsl.executor.values.process`) passes them to the trackers.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from freetrain_parsl.executor.values.tracker import as_line, fresh, last_steps, parse_row
from freetrain_parsl.interpreters import module_command
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.storage.posix import directory_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from freetrain_parsl.executor.values.tracker import Outcome, TrackerSpec

logger = logging.getLogger(__name__)

__all__ = ["ValueWriter"]

_PERIOD: Final = 1.0  # seconds between writes
_MOST_WAITING: Final = 200_000  # rows in memory while the files cannot be written
_LONGEST_PAUSE: Final = 60.0  # seconds between attempts to write
_MOST_STARTS: Final = 5  # of the process


@dataclass
class _Values:
    """The file of a training job."""

    path: Path
    id: str
    steps: dict[str, int]


class ValueWriter:
    """Writes the values of a driver's training jobs, and starts the process that passes them to trackers.

    The values are beside the checkpoints in `root`. A driver that another one has replaced, whose trackers continue, is
    not `allowed` to write any more.
    """

    def __init__(self, root: Path, log_dir: Path, allowed: Callable[[], bool] = lambda: True) -> None:
        self._root = root
        self._allowed = allowed
        self._assignments = log_dir / "trackers.jsonl"
        self._log = log_dir / "trackers.log"
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._trackers: dict[str, tuple[TrackerSpec, ...]] = {}
        self._values: dict[str, _Values] = {}
        self._waiting: dict[str, list[str]] = {}
        self._ended: dict[str, Outcome] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._failures = 0
        self._retry_at = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freetrain-values", daemon=True)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits, and wait `timeout` seconds at most for the trackers, which continue without the driver."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        if not self._allowed():  # it would mark its runs as interrupted, which those of the other driver continue
            _end_session(process)
        process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("trackers still receive values, in process %d, for some minutes at most", process.pid)

    # Other threads.

    def track(self, training: str, trackers: tuple[TrackerSpec, ...]) -> None:
        """State the trackers of a training job, before it begins."""
        self._trackers[training] = trackers

    def take(self, training: str, rows: Sequence[str]) -> None:
        """Add values; ignored if there is no such training job."""
        if training in self._trackers and self._queue.qsize() < _MOST_WAITING:
            self._queue.put((training, rows))

    def note(self, entry: record.Record) -> None:
        """Note what happened to a training job."""
        match entry:
            case (
                record.CodeChanged() | record.TrainingFinished() | record.TrainingFailed() | record.TrainingCancelled()
            ):
                self._queue.put((entry.subject, entry))

    # This object's thread.

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD):
            self._turn()
        self._retry_at = 0.0
        self._turn()

    def _turn(self) -> None:
        if not self._allowed():
            return
        self._watch_process()
        if time.monotonic() < self._retry_at:
            return
        try:
            while not self._queue.empty():
                training, item = self._queue.get()
                if isinstance(item, record.Record):
                    self._on_record(training, item)
                elif sum(map(len, self._waiting.values())) < _MOST_WAITING:
                    self._waiting.setdefault(training, []).extend(item)
            self._write()
        except OSError as error:  # full disk, lost mount: not the run's fault
            self._failures += 1
            self._retry_at = time.monotonic() + min(2.0**self._failures, _LONGEST_PAUSE)
            if self._failures == 1:
                logger.warning("cannot keep the values of training jobs: %s; trying again", error)
            return
        self._failures = 0

    def _on_record(self, training: str, entry: record.Record) -> None:
        if isinstance(entry, record.CodeChanged):
            try:
                self._write()
            finally:
                self._values.pop(training, None)  # it may have started over
        elif training in self._trackers:
            self._ended[training] = _outcome(entry)

    def _write(self) -> None:
        problem: OSError | None = None
        for training, texts in list(self._waiting.items()):
            try:
                self._write_rows(training, texts)
            except OSError as error:  # may concern the directory of this training job only
                problem = problem or error
                continue
            except Exception:  # of a damaged file or a user's value: those of the others must not wait
                logger.exception("the last values of training job %s cannot be kept", training)
            del self._waiting[training]
        for training in self._ended.keys() - self._waiting.keys():
            if (known := self._values.get(training)) is not None:
                self._assign({"training": training, "id": known.id, "outcome": self._ended[training]})
            del self._ended[training]
        if problem is not None:
            raise problem

    def _write_rows(self, training: str, texts: Sequence[str]) -> None:
        values = self._values.get(training) or self._open(training)
        steps = dict(values.steps)
        rows = (row for text in texts if (row := parse_row(text)) is not None)
        lines = [as_line(row) for row in fresh(rows, steps)]
        if lines:
            with _append(values.path) as file:
                file.writelines(lines)
        values.steps = steps

    def _open(self, training: str) -> _Values:
        directory = self._root / directory_name(training)
        directory.mkdir(mode=0o700, exist_ok=True)
        number = len(list(directory.glob("set-aside-*")))  # times that the training job has started over
        suffix = f"-{number}" if number else ""
        trackers = directory / f"trackers{suffix}"
        trackers.mkdir(mode=0o700, exist_ok=True)
        path = directory / f"values{suffix}.jsonl"
        self._values[training] = values = _Values(path, _identity(trackers / "id"), last_steps(path))
        if self._trackers[training]:
            self._assign(
                {
                    "training": training,
                    "id": values.id,
                    "directory": str(trackers),
                    "rows": str(path),
                    "trackers": [spec.as_json() for spec in self._trackers[training]],
                }
            )
        return values

    def _assign(self, item: dict[str, Any]) -> None:
        with _append(self._assignments) as file:
            file.write(json.dumps(item) + "\n")
        if self._process is None and self._starts == 0 and "trackers" in item:
            self._start_process()

    def _start_process(self) -> None:
        self._starts += 1
        with _append(self._log) as log:
            self._process = subprocess.Popen(
                [*module_command("freetrain_parsl.executor.values.process"), str(self._assignments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the driver
            )

    def _watch_process(self) -> None:
        if self._process is None or self._process.poll() is None:
            return
        logger.warning("the trackers' process ended with code %d; see %s", self._process.returncode, self._log)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
        if self._starts < _MOST_STARTS:
            self._start_process()


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, with the processes that its trackers have started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(entry: record.Record) -> Outcome:
    match entry:
        case record.TrainingFinished():
            return "finished"
        case record.TrainingFailed(final=True):
            return "failed"
        case record.TrainingCancelled():
            return "cancelled"
    return "interrupted"


def _append(path: Path) -> IO[str]:
    """Open a file to add lines; a half line of a driver that was killed is ended."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return os.fdopen(descriptor, "a", encoding="utf-8")


def _identity(path: Path) -> str:
    """Return the id in a file, which is created with the first one."""
    with suppress(FileExistsError):
        aside = path.with_suffix(f".{secrets.token_hex(4)}")
        with os.fdopen(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(8))
        try:
            os.link(aside, path)
        finally:
            aside.unlink()
    return path.read_text(encoding="ascii").strip()
