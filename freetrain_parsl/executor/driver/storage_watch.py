"""Retries of training jobs that wait for the checkpoint directory.

A training job that cannot start because the directory is full, missing or failing takes no nodes. The directory is
probed here, in a separate thread, since a hanging mount may block the caller. While it is unusable, attempts become
less frequent, down to one in five minutes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StorageWatch"]

_FIRST = 5.0  # seconds until the first attempt
_LONGEST = 300.0  # seconds
_HANGS = 30.0  # seconds after which a probe of the directory counts as hanging


@dataclass
class _Waiting:
    """A training job that waits: its number of attempts, and the time of the next (seconds since the epoch)."""

    attempts: int
    until: float


class StorageWatch:
    """Decides when waiting training jobs may retry. Owned by the control loop's thread.

    `probe` checks whether checkpoints can be written, in a separate thread, and raises `CheckpointError` if not.
    """

    def __init__(self, probe: Callable[[], None], clock: Callable[[], float]) -> None:
        self._probe = probe
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._attempts: dict[str, int] = {}  # of training jobs that are retrying and have not started yet
        self._look: _Look | None = None

    def hold(self, training: str) -> float:
        """Make a training job wait; return the time of its next attempt, seconds since the epoch."""
        attempts = self._attempts.pop(training, 0) + 1
        until = self._clock() + _pause(attempts)
        self._waiting[training] = _Waiting(attempts, until)
        return until

    def drop(self, training: str) -> None:
        """Forget a training job that has started or is over."""
        self._waiting.pop(training, None)
        self._attempts.pop(training, None)

    def turn(self) -> tuple[list[str], dict[str, tuple[str, float]]]:
        """Probe the directory when it is time to; must be called periodically.

        Return the training jobs that may retry now; and, for those that must wait longer, reason and time of the next
        attempt.
        """
        now = self._clock()
        due = [name for name, waiting in self._waiting.items() if now >= waiting.until]
        if self._look is None:
            if due:
                self._look = _Look(self._probe, now)
            return [], {}
        if self._look.running:
            return [], self._postpone(due, "it does not answer") if now - self._look.began > _HANGS else {}
        problem, self._look = self._look.problem, None
        if problem is not None:
            return [], self._postpone(due, problem)
        for name in due:
            self._attempts[name] = self._waiting.pop(name).attempts
        return due, {}

    def _postpone(self, trainings: list[str], reason: str) -> dict[str, tuple[str, float]]:
        for name in trainings:
            waiting = self._waiting[name]
            waiting.attempts += 1
            waiting.until = self._clock() + _pause(waiting.attempts)
        return {name: (reason, self._waiting[name].until) for name in trainings}


class _Look:
    """A probe of the directory, which may hang."""

    def __init__(self, probe: Callable[[], None], now: float) -> None:
        self.began = now
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, args=(probe,), name="freetrain-storage", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _run(self, probe: Callable[[], None]) -> None:
        try:
            probe()
        except CheckpointError as error:
            self.problem = getattr(error, "condition", str(error))
        except Exception as error:  # noqa: BLE001 - reported to the job manager
            self.problem = f"{type(error).__name__}: {error}"


def _pause(attempts: int) -> float:
    return min(_FIRST * 2.0 ** (attempts - 1), _LONGEST)
