"""Which training jobs of a run train here: all of them, or, with a home, those that this site owns.

A training job whose ownership is lost is ended at a boundary between steps, with its state saved, and waits until this
site owns it again. A result counts once the home has confirmed the ownership.

With a coordinator of several sites, only the training jobs that are assigned to this site are wanted. One that is
withdrawn is ended in the same way; its last checkpoint is brought home, then it is released.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput, TrainingCancelled, TrainingInterrupted
from freetrain_parsl.storage.atomic_files import replace_text
from freetrain_parsl.storage.home import ResultStatus
from freetrain_parsl.storage.owned_files import read_small_file
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from typing_extensions import Self

    from freetrain_parsl.storage.home import Home

__all__ = ["ASSIGNMENT", "Assignment", "OwnedTrainings"]

ASSIGNMENT = "assignment.json"

_CONFIRMATION = 60.0  # seconds for which a run that stops waits for the confirmation of results
_PERIOD = 0.1
_LONGEST_ADMISSION = 1.0  # seconds for which training jobs are submitted at a time


@dataclass(frozen=True)
class Assignment:
    """The training jobs that a coordinator of several sites has assigned to a site, in a file that it replaces.

    The driver reads it several times a minute. One that was delayed on its way does not replace a later one.

    Parameters
    ----------
    order
        Number of the coordinator's order; later ones are larger.
    trainings
        Their names.
    """

    order: int = 0
    trainings: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; the assignment is empty if there is none.

        Raises
        ------
        InvalidInput
            It is damaged.
        """
        try:
            document = parse_stored(read_small_file(path))
            return cls(int(document["order"]), tuple(map(str, document["trainings"])))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from None

    def write(self, path: Path) -> None:
        """Replace the file durably."""
        replace_text(path, json.dumps({"order": self.order, "trainings": list(self.trainings)}) + "\n")


class OwnedTrainings:
    """The training jobs of a run that have not ended.

    Parameters
    ----------
    submissions
        Training -> submits it and returns its future.
    cancel
        Ends a training job, with its state saved.
    home
        ``None``: all training jobs may start at once.
    assigned
        The training jobs that are assigned to this site, with a home; `assign` changes them. ``None``: all, always.
    clock
        Monotonic clock, in seconds.
    """

    def __init__(
        self,
        submissions: Mapping[str, Callable[[], Future[Any]]] | None = None,
        cancel: Callable[[Future[Any]], bool] = lambda _: False,
        home: Home | None = None,
        assigned: Collection[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submissions = dict(submissions or {})
        self._cancel = cancel
        self._home = home
        self._clock = clock
        self._futures: dict[str, Future[Any]] = {}
        self._leaving: set[str] = set()  # those that another site has taken over
        self._withdrawn: set[str] = set()  # those that end because they are not assigned any more
        self.elsewhere = set() if assigned is None else set(self._submissions) - set(assigned)
        self.held = set(self._submissions) - self.elsewhere
        if home is not None:
            home.want(name for name in self._submissions if name in self.held)
            home.abandon(self.elsewhere)

    @property
    def current(self) -> set[str]:
        """Training jobs that were submitted and have not ended."""
        return set(self._futures)

    @property
    def has_ended(self) -> bool:
        """Whether a training job has ended that is not collected yet."""
        return any(future.done() for future in self._futures.values())

    @property
    def is_done(self) -> bool:
        """Whether all training jobs have ended, and their last checkpoints are at home."""
        return not self._futures and not self.held and (self._home is None or self._home.settled)

    def admit(self) -> None:
        """Submit the training jobs that may train here, and end those that may not any more.

        Of thousands, some are left for the next call: the driver's heartbeat must not wait for all of them.
        """
        end = self._clock() + _LONGEST_ADMISSION
        for name in [name for name in self._submissions if name in self.held]:
            if self._clock() > end:
                break
            if self._home is None or self._home.is_ready(name):
                self.held.discard(name)
                self._futures[name] = _submitted(self._submissions[name])
        if self._home is not None:
            for name in self.current - self._leaving:
                if self._home.lost(name) and (self._futures[name].done() or self._cancel(self._futures[name])):
                    self._leaving.add(name)

    def assign(self, assigned: Collection[str]) -> None:
        """Want the training jobs that are assigned to this site now, and give up the others."""
        assert self._home is not None, "training jobs are assigned to sites with a home"
        for name in sorted(self.held.difference(assigned)):
            self.held.discard(name)
            self._leave(name)
        for name in sorted(self.current - self._leaving - self._withdrawn - set(assigned)):
            if not self._futures[name].done() and self._cancel(self._futures[name]):
                self._withdrawn.add(name)
        for name in sorted(self.elsewhere.intersection(assigned)):
            if self._home.has_left(name):
                self.elsewhere.discard(name)
                self.held.add(name)
                self._home.want([name])

    def _leave(self, name: str) -> None:
        assert self._home is not None, "training jobs are assigned to sites with a home"
        self.elsewhere.add(name)
        self._home.leave(name)

    def collect(self, keep: Callable[[str, Future[Any]], None]) -> None:
        """Pass on the futures of training jobs that have ended, and whose result counts."""
        for name, future in list(self._futures.items()):
            if not future.done():
                continue
            if self._counts(name, future):
                keep(name, future)
                del self._futures[name]  # only after it is stored

    def _counts(self, name: str, future: Future[Any]) -> bool:
        """Return whether the outcome of a training job counts; if it never will, hold the training job again."""
        if self._home is None or isinstance(future.exception(), TrainingInterrupted):
            return True
        if name in self._withdrawn:
            self._withdrawn.discard(name)
            if isinstance(future.exception(), TrainingCancelled):
                del self._futures[name]
                self._leaving.discard(name)  # if it was lost, too
                self._leave(name)
                return False
        verdict = ResultStatus.LOST if name in self._leaving else self._home.finished(name)
        if verdict is ResultStatus.LOST:
            del self._futures[name]
            self._leaving.discard(name)
            self.held.add(name)
            self._home.stopped(name)
        return verdict is ResultStatus.CONFIRMED

    def cancel(self, name: str) -> bool:
        """Cancel a training job at the user's request; return whether it is being cancelled."""
        if name in self.held or name in self.elsewhere:
            self.held.discard(name)
            self.elsewhere.discard(name)
            return True
        return name in self._futures and self._cancel(self._futures[name])

    def ended_last(self) -> dict[str, Future[Any]]:
        """Return the training jobs that ended during the shutdown with an outcome that counts."""
        ended: dict[str, Future[Any]] = {}
        end = time.monotonic() + _CONFIRMATION
        done = {
            name: future
            for name, future in self._futures.items()
            if future.done() and not isinstance(future.exception(), TrainingInterrupted)
        }
        while done and time.monotonic() < end:
            for name, future in list(done.items()):
                if name in self._futures and self._counts(name, future):
                    ended[name] = future
                if name in ended or name not in self._futures:
                    del done[name]
            if done:
                time.sleep(_PERIOD)
        return ended

    def remark(self, name: str) -> str:
        """Return what the user should know about a training job and its home."""
        return "" if self._home is None or name in self.elsewhere else self._home.remark(name)

    def notes(self) -> list[str]:
        """Describe what is under way to and from home, and which training jobs wait for it."""
        if self._home is None:
            return []
        return [*self._home.lines(), *(f"{name} waits: {self.remark(name)}" for name in sorted(self.held))]


def _submitted(submit: Callable[[], Future[Any]]) -> Future[Any]:
    """Submit a training job; return a failed future if that is refused: the others continue."""
    try:
        return submit()
    except Exception as error:  # noqa: BLE001 - the app's arguments and its code may raise anything
        refused: Future[Any] = Future()
        refused.set_exception(error)
        return refused
