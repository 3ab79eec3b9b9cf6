"""Reads the journals of a run, as its drivers write them, into its projection."""

from __future__ import annotations

import sqlite3
import time
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import newest_entry, newest_report, read_journal, read_progress
from freetrain_parsl.report.projection.projection import Projection
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.storage.read_only_database import seen_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from freetrain_parsl.protocol.journal import Record

__all__ = ["DAMAGED", "DriverJournal", "RunReader", "read_whole", "state_of"]

_PORTION: Final = 5000  # records taken at once
DAMAGED: Final = (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError, RecursionError)
"""What records with unexpected content raise, wherever that is noticed."""


_P = TypeVar("_P", bound=Projection)


@dataclass(frozen=True)
class DriverJournal:
    """The journal of a driver.

    Parameters
    ----------
    path
        The file.
    how
        How the driver ended: finished, stopped, interrupted, failed or killed; ``None``: it runs.
    ended
        When, seconds since the epoch; ``None`` if it runs or was killed.
    """

    path: Path
    how: str | None = None
    ended: float | None = None


def read_whole(run: Projection, journal: DriverJournal, clock: Callable[[], float] = time.time) -> None:
    """Fold the journal of the next driver.

    Raises
    ------
    InvalidInput
        It cannot be read.
    """
    run.begin_driver()
    with _refused(journal.path):
        run.take((entry.time, entry.record) for _, entry in read_journal(journal.path))
        run.take_progress(read_progress(journal.path), newest_report(journal.path))
    if journal.how is None:
        run.pass_time(clock())
    else:
        run.end_driver(journal.ended, journal.how)


def state_of(journal: Path) -> RunState:
    """Fold the journal of one driver.

    Raises
    ------
    InvalidInput
        It cannot be read.
    """
    with _refused(journal):
        return RunState(journal).refresh()


@contextmanager
def _refused(journal: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error, *DAMAGED) as error:
        raise InvalidInput(f"the journal {journal} cannot be read: {error}") from None


@dataclass
class _Place:
    """How far a journal has been read."""

    file: tuple[int, int] | None = None
    """Its device and inode."""
    entry: int = 0
    damage: str = ""
    """The last entry that was left out, and why."""
    is_over: bool = False
    changed: tuple[int, ...] = ()
    """Sizes and times of its files when they were read last."""


class RunReader(Generic[_P]):
    """Follows the journals of a run.

    What cannot be read is stated by name in the projection, and what was read before stays.

    Parameters
    ----------
    run
        Takes what they say: a `Projection`, or a view, which is one.
    journals
        Returns the journals of its drivers so far, the first one first.
    clock
        Seconds since the epoch.
    """

    def __init__(
        self, run: _P, journals: Callable[[], Sequence[DriverJournal]], clock: Callable[[], float] = time.time
    ) -> None:
        self.run = run
        self._journals = journals
        self._clock = clock
        self._found: Sequence[DriverJournal] = ()
        self._places: dict[Path, _Place] = {}
        self._left: int | None = None
        self.is_behind = False
        """Whether the last `refresh` stopped before the end."""

    def refresh(self, most: int | None = None) -> _P:
        """Read what is new.

        Parameters
        ----------
        most
            Number of entries to read, about; ``None``: all. `is_behind` is true if there are more.
        """
        problem = ""
        self._left = most
        self.is_behind = False
        try:
            self._found = self._journals()
        except (OSError, sqlite3.Error) as error:  # the run directory was removed, or its database is damaged
            problem = f"the state of the run cannot be read: {error}; what was read before is shown"
        for journal in self._found:
            if self.is_behind:
                break
            place = self._places.setdefault(journal.path, _Place())
            try:
                self._follow(journal, place)
            except FileNotFoundError:
                if place.file is not None or journal.how is not None:
                    problem = f"the journal {journal.path} is missing; what was read of it is shown"
                    self._end(journal, place)
            except (OSError, sqlite3.Error, *DAMAGED) as error:
                problem = (
                    f"the journal {journal.path} cannot be read after entry {place.entry}: {error}; what was read of "
                    "it is shown"
                )
                self._end(journal, place)
            if place.damage:
                problem = f"the journal {journal.path} is damaged: {place.damage}; the rest of it is shown"
        self.run.report_problem(problem)
        self.run.report_reading(self.is_behind)
        return self.run

    def _follow(self, journal: DriverJournal, place: _Place) -> None:
        status = journal.path.stat()
        if place.file is None:
            place.file = (status.st_dev, status.st_ino)
            self.run.begin_driver()
        elif place.file != (status.st_dev, status.st_ino):
            raise ValueError("it was replaced by another file")
        changed = seen_state(journal.path)
        if changed != place.changed:
            self._read(journal, place)
            if self.is_behind:
                return
            place.changed = changed
        if journal.how is None:
            if place.is_over:
                place.is_over = False
                self.run.begin_driver()
            self.run.pass_time(self._clock())
        else:
            self._end(journal, place)

    def _end(self, journal: DriverJournal, place: _Place) -> None:
        """State that the driver has ended, unless it runs or that was stated before."""
        if journal.how is not None and not place.is_over:
            place.is_over = True
            self.run.end_driver(journal.ended, journal.how)

    def _read(self, journal: DriverJournal, place: _Place) -> None:
        if newest_entry(journal.path) < place.entry:
            raise ValueError("it has fewer entries than before")
        portion: list[tuple[float, Record | None]] = []
        number = place.entry
        try:
            for number, entry in read_journal(journal.path, place.entry):
                portion.append((entry.time, entry.record))
                if len(portion) == _PORTION:
                    self._take(portion, place, number)
                    if self._left is not None and (left := self._left - _PORTION) <= 0:
                        self.is_behind = True
                        return
                    self._left = None if self._left is None else left
        finally:  # what precedes a damaged entry counts
            if portion:
                self._take(portion, place, number)
        reported = newest_report(journal.path)
        self.run.take_progress(read_progress(journal.path), reported)

    def _take(self, portion: list[tuple[float, Record | None]], place: _Place, number: int) -> None:
        """Pass records on, the last of which has this number; those with unexpected content are left out."""
        place.entry, place.is_over = number, False
        waiting = iter(portion)
        while length_hint(waiting):
            try:
                self.run.take(waiting)
            except DAMAGED as error:  # noqa: PERF203 - once for each damaged entry
                place.damage = f"entry {number - length_hint(waiting)} has unexpected content ({error!r})"
        portion.clear()
