"""What the journals of a run say, folded once for all presenters, over all its drivers, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.report.projection.counted_steps import CountedSteps
from freetrain_parsl.report.projection.incidents import Incidents
from freetrain_parsl.report.projection.node_time import NodeTime, NodeTimeFold
from freetrain_parsl.report.projection.run import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from freetrain_parsl.protocol.journal import Record
    from freetrain_parsl.report.projection.blocks import BlockHistory
    from freetrain_parsl.report.projection.obstacles import FailedStarts
    from freetrain_parsl.report.sentences import IncidentLevel

__all__ = ["Projection"]

_ENDS = {
    "finished": "finished",
    "stopped": "was stopped",
    "interrupted": "was interrupted",
    "failed": "failed",
    "killed": "was killed",
    "ended": "has ended",
}


class Projection:
    """Folds the records of a run, and what its readers know besides: the time, and how drivers ended.

    A run view is a subclass that follows it record by record: it implements the methods that begin with ``on_``, which
    do nothing here; they are called when the fold has taken what they are about. All times are in seconds since the
    epoch.

    Attributes
    ----------
    state
        Training jobs, fragments, windows and blocks.
    incidents
        Counts failures and notices.
    progress
        The last report of each training job to the last driver that ran it.
    origin
        Time of the first record; ``None``: there is none.
    now
        Up to when the run is known; it never falls.
    ended
        How the last driver ended, in one word; ``None``: it runs.
    problem
        Why a journal cannot be read, in one line; empty: it can.
    is_reading
        Whether there are records that are known, but have not been taken yet.
    """

    def __init__(self) -> None:
        self.state = RunState()
        self.incidents = Incidents()
        self.progress: dict[str, dict[str, Any]] = {}
        self.origin: float | None = None
        self.now = 0.0
        self.ended: str | None = None
        self.problem = ""
        self.is_reading = False
        self._driver_now = 0.0
        """Time of the present driver; earlier than ``now`` if the wall clock was set back before it began."""
        self._last_record = 0.0
        """Time of the last record of the present driver."""
        self._node_time = NodeTimeFold()
        self._earlier = NodeTime()
        """Node time of earlier drivers."""
        self._counted = CountedSteps()

    def begin_driver(self) -> None:
        """Note that a driver runs: the records that follow are of its journal."""
        self.ended = None
        self.on_change()
        self.on_driver_begun()

    def take(self, entries: Iterable[tuple[float, Record | None]]) -> None:
        """Take records of the present driver's journal, each with its time; ``None``: one of another version."""
        self.ended = None
        self.on_change()
        for time, entry in entries:
            self.origin = time if self.origin is None else self.origin
            self._last_record = max(self._last_record, time)
            self._driver_now = max(self._driver_now, time)
            self.now = max(self.now, time)
            self.state.take(time, entry)
            self._node_time.take(time, entry)
            self._counted.take(entry)
            if entry is None:
                continue
            self.on_record(time, entry)
            if (incident := self.incidents.take(entry)) is not None:
                self.on_incident(time, entry.subject, *incident)
        self.on_taken()

    def take_progress(self, reports: Mapping[str, dict[str, Any]], time: float = 0.0) -> None:
        """Take the last progress report of each training job to the present driver, the newest one of `time`."""
        self.on_change()
        if self.origin is not None and time > self._last_record:  # the driver still ran then, if it was killed
            self._last_record = time
            self._driver_now, self.now = max(self._driver_now, time), max(self.now, time)
            self._node_time.pass_time(time)
        self.progress |= reports
        self.state.take_progress(reports)
        self._counted.take_progress(reports)
        self.on_progress(reports)

    def pass_time(self, now: float) -> None:
        """Note the time while a driver runs, by the wall clock."""
        now -= self._node_time.lead
        if self.origin is not None and now > self._driver_now:
            self._driver_now = now
            self.now = max(self.now, now)
            self.on_time(now)

    def end_driver(self, time: float | None, how: str) -> None:
        """Note that the driver ended.

        Parameters
        ----------
        time
            When, by the wall clock; ``None``, of a killed one: when it wrote its last record.
        how
            In one word: finished, stopped, interrupted, failed or killed; ended, if that is unknown.
        """
        self.on_change()
        end = self._last_record if time is None else max(self._last_record, time - self._node_time.lead)
        end = end or self.now  # the journal has no record
        self.now = max(self.now, end)
        self.ended = how
        if time is None:
            running = (name for name, one in self.state.trainings.items() if one.state == "running")
            self.incidents.driver_was_killed(running)
        blocks = list(self.state.blocks.end_driver(end, f"the driver {_ENDS[how]}"))
        self.state.end_driver(end)
        driver = self._node_time.finish(None if time is None else end)
        self._earlier.add(driver)
        self._counted.end_driver(driver.slot_seconds)
        self._node_time = NodeTimeFold()
        self._driver_now = self._last_record = 0.0
        self.on_driver_ended(end, blocks)

    def report_problem(self, text: str) -> None:
        """State why the journal cannot be read, in one line; empty: it can."""
        if text != self.problem:
            self.problem = text
            self.on_change()

    def report_reading(self, reading: bool) -> None:  # noqa: FBT001 - the only parameter
        """State whether there are records that are known, but have not been taken yet."""
        if reading != self.is_reading:
            self.is_reading = reading
            self.on_change()

    @property
    def failed_starts(self) -> FailedStarts | None:
        """The last attempts of the driver that runs to start a block, if they failed."""
        return self.state.failed_starts if self.ended is None else None

    def node_time(self) -> NodeTime:
        """Return the account of all drivers up to now; if the last one is killed, it ends with its last record."""
        account = NodeTime()
        account.add(self._earlier)
        present = self._node_time.so_far(self._driver_now) if self.ended is None else NodeTime()
        account.add(present)
        account.useful_slot_seconds = self._counted.total(present.slot_seconds)
        return account

    # For run views.

    def on_change(self) -> None:
        """Note that something changes."""

    def on_driver_begun(self) -> None:
        """Note that a driver runs."""

    def on_record(self, time: float, entry: Record) -> None:
        """Take a record."""

    def on_incident(self, time: float, subject: str, level: IncidentLevel, text: str) -> None:
        """Take what the last record says of a failure, a repair, or a wait."""

    def on_taken(self) -> None:
        """Note that a portion of records is complete."""

    def on_progress(self, reports: Mapping[str, dict[str, Any]]) -> None:
        """Take progress reports."""

    def on_time(self, now: float) -> None:
        """Take the time of the driver that runs."""

    def on_driver_ended(self, time: float, blocks: Sequence[BlockHistory]) -> None:
        """Note that a driver has ended, and with it its blocks."""
