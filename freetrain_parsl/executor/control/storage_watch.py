"""When trainings that wait for the checkpoint directory may try again.

A training that cannot start because the directory is full, gone or failing takes no nodes. The directory is looked at
from here, in a thread of its own, since a mount that hangs may hold whoever asks; while it does not work, attempts
become rarer, up to one in five minutes.
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
_HANGS = 30.0  # seconds for which a look at the directory may take


@dataclass
class _Waiting:
    """A training that waits: since which attempt, and until when (seconds since the epoch)."""

    attempts: int
    until: float


class StorageWatch:
    """Owned by the driver's thread.

    Parameters
    ----------
    probe
        Looks whether checkpoints can be written; raises `CheckpointError` if not. Called in a thread.
    clock
        Seconds since the epoch.
    """

    def __init__(self, probe: Callable[[], None], clock: Callable[[], float]) -> None:
        self._probe = probe
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._attempts: dict[str, int] = {}  # of trainings that have tried again and have not started yet
        self._look: _Look | None = None

    def hold(self, training: str) -> float:
        """Let a training wait; return when it will try again, seconds since the epoch."""
        attempts = self._attempts.pop(training, 0) + 1
        until = self._clock() + _pause(attempts)
        self._waiting[training] = _Waiting(attempts, until)
        return until

    def drop(self, training: str) -> None:
        """Forget a training: it has started, or is over."""
        self._waiting.pop(training, None)
        self._attempts.pop(training, None)

    def turn(self) -> tuple[list[str], dict[str, tuple[str, float]]]:
        """Look at the directory if it is time to; to be called again and again.

        Returns
        -------
        ready, postponed
            Trainings that may try again now; and of those that have to wait on: why, and until when.
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
    """A look at the directory, which may take for ever."""

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
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else would hear of it
            self.problem = f"{type(error).__name__}: {error}"


def _pause(attempts: int) -> float:
    return min(_FIRST * 2.0 ** (attempts - 1), _LONGEST)
