"""The process that passes values to trackers: ``python -m freetrain_parsl.executor.values.process ASSIGNMENTS``.

It reads files only: the assignments, which say which training job has which trackers, and the files with the values. So
a tracker that is slow, hangs or fails costs the driver nothing, and what it has missed follows. Each tracker has a
thread of its own. The process ends when its standard input is closed, with the driver, after a last look at the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.executor.values.tracker import TrackedTraining, TrackerSpec, fresh, importable, read_rows
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.executor.values.tracker import Outcome, Tracker

logger = logging.getLogger("freetrain_parsl.executor.values")

__all__ = ["Follower"]

_PERIOD: Final = 1.0  # seconds between two looks at the files
_LONGEST_PAUSE: Final = 300.0  # seconds between attempts to reach a tracker
_LONGEST_END: Final = 300.0  # seconds for the last look


class Follower:
    """Passes the values of one training job, which are in the file `rows`, to one tracker."""

    def __init__(self, training: TrackedTraining, rows: Path, spec: TrackerSpec) -> None:
        self.outcome: Outcome | None = None
        """How the training job has ended; ``None`` as long as it has not."""
        self._training = training
        self._rows = rows
        self._spec = spec
        self._tracker: Tracker | None = None
        self._lock: int | None = None
        self._steps: dict[str, int] = {}
        self._offset = 0
        self._failures = 0
        self._retry_at = 0.0
        self._closed = False

    def turn(self, now: float, *, last: bool = False) -> None:
        """Pass on what is new; `last`: then close. Errors of the tracker are logged, and it is opened again later."""
        if self._closed or (now < self._retry_at and not last):
            return
        try:
            self._advance()
            if self._tracker is not None and (last or self.outcome is not None):
                tracker, self._tracker = self._tracker, None
                tracker.close(self.outcome or "interrupted")
            self._failures = 0
        except BaseException as error:  # noqa: BLE001 - of the tracker, also sys.exit: this thread serves others, too
            self._failures += 1
            self._retry_at = now + min(2.0 ** min(self._failures, 20), _LONGEST_PAUSE)
            logger.warning(
                "training job %s, tracker %s: %s: %s",
                self._training.name,
                self._spec.kind,
                type(error).__name__,
                text_of(error),
            )
            tracker, self._tracker = self._tracker, None  # type: ignore[assignment]
            with contextlib.suppress(BaseException):  # of a tracker that has failed
                if tracker is not None:
                    tracker.close("interrupted")
        else:
            self._closed = self.outcome is not None and self._tracker is None and self._offset > 0
        if self._tracker is None and self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _advance(self) -> None:
        while True:
            rows, offset = read_rows(self._rows, self._offset if self._tracker is not None else 0)
            if not rows:
                return
            if self._tracker is None:
                if not self._hold():
                    return
                tracker = self._spec.make()
                self._steps = dict(tracker.open(self._training))
                self._tracker = tracker
            if new := list(fresh(rows, self._steps)):
                self._tracker.log(new)
            self._offset = offset

    def _hold(self) -> bool:
        """Lock the training job's run: the process of an earlier driver may still use it."""
        path = self._training.directory / "lock"
        self._training.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True


class _Process:
    def __init__(self, assignments: Path) -> None:
        self._assignments = assignments
        self._offset = 0
        self._followers: dict[tuple[str, str], list[Follower]] = {}  # training, its id
        self._by_tracker: dict[str, list[Follower]] = {}
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()
        self._complete = threading.Event()  # no further assignment follows

    def run(self) -> None:
        """Serve until standard input is closed."""
        threading.Thread(target=self._await_end, daemon=True).start()
        while not self._ending.wait(_PERIOD):
            self._read()
        self._read()
        self._complete.set()
        end = time.monotonic() + _LONGEST_END
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if missing := not self._assignments.exists():
            logger.error("%s does not exist: nothing was sent", self._assignments)
        os._exit(2 if missing else 0)  # a tracker may hang

    def _await_end(self) -> None:
        while os.read(0, 4096):
            pass
        self._ending.set()

    def _read(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._assignments.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offset += len(complete)
            for line in complete.splitlines():
                self._assign(json.loads(line))

    def _assign(self, item: Mapping[str, Any]) -> None:
        key = item["training"], item["id"]
        if "outcome" in item:
            for follower in self._followers.get(key, ()):
                follower.outcome = item["outcome"]
            return
        followers = self._followers.setdefault(key, [])
        for one in item["trackers"]:
            spec = TrackerSpec(one["kind"], one["options"])
            if (import_path := one.get("import_path")) is not None:
                importable(Path(import_path))
            directory = Path(item["directory"]) / spec.kind.replace(":", "-")
            training = TrackedTraining(item["training"], item["id"], directory)
            follower = Follower(training, Path(item["rows"]), spec)
            followers.append(follower)
            same = self._by_tracker.setdefault(json.dumps(one, sort_keys=True), [])
            same.append(follower)
            if len(same) == 1:
                thread = threading.Thread(target=self._serve, args=(same,), name=spec.kind, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, followers: list[Follower]) -> None:
        while True:
            last = self._complete.wait(_PERIOD)
            for follower in list(followers):
                follower.turn(time.monotonic(), last=last)
            if last:
                return


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    _Process(Path(sys.argv[1])).run()
