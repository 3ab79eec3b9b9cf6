"""Failures, repairs and notices of a run, folded from its journals once for all views; only failures are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.journal import read_kinds
from freetrain_parsl.places import node_of
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.sentences import IncidentLevel, incident_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Incidents", "count_failures"]

_COUNTED = (IncidentLevel.FAILURE, IncidentLevel.ERROR)
_KINDS = (
    record.ArrayEnded,
    record.CohortStalled,
    record.EnvironmentDiffers,
    record.FragmentEnded,
    record.InterchangeEnded,
    record.NodeSetAside,
    record.SavingFails,
    record.SlotLost,
    record.StartsFailed,
    record.TrainingFailed,
    record.TrainingStalled,
    record.TrainingWaits,
)
"""Records that may state a failure."""


class Incidents:
    """Says of each record what failed, works again, or is to be known, from one driver after the other.

    Attributes
    ----------
    failures
        Number of failures so far: a process, a node, a group, the storage, a start or a training job has failed. What
        a lost process did to its training job, or to those of its array, is not counted again.
    notices
        Number of notices so far: waits, nodes that the batch system reclaims, nodes that are left early, and the like.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.notices = 0
        self._interrupted: set[str] = set()  # training jobs whose last group was ended by a failure
        self._waiting: set[str] = set()  # training jobs and cohorts that only wait
        self._blamed: set[str] = set()  # slots and nodes whose failure has been counted

    def take(self, entry: record.Record | None) -> tuple[IncidentLevel, str] | None:
        """Take the next record; return its level and what it says, ``None``: nothing of the kind."""
        if entry is None or not self._is_unplanned(entry) or (incident := incident_of(entry)) is None:
            return None
        self.failures += incident[0] in _COUNTED and not self._is_consequence(entry)
        self.notices += incident[0] is IncidentLevel.NOTICE
        return incident

    def driver_was_killed(self, running: Iterable[str]) -> None:
        """Note that a driver was killed: training jobs that ran are repaired when they resume."""
        self._interrupted.update(running)

    def _is_consequence(self, entry: record.Record) -> bool:
        """Return whether a failure was counted when a slot was lost, or a node was set aside."""
        match entry:
            case record.SlotLost():
                self._blamed.add(entry.subject)
            case record.NodeSetAside():
                self._blamed.add(node_of(entry.subject))  # of a slot of a shared node, which `lost` names by its node
            case record.ArrayEnded():
                return entry.slot in self._blamed
            case record.FragmentEnded(array=""):
                places = {*entry.lost, *entry.lost.values()}
                counted = not self._blamed.isdisjoint(places)
                self._blamed -= places
                return counted
            case record.FragmentEnded():
                return True  # the array has ended before
        return False

    def _is_unplanned(self, entry: record.Record) -> bool:
        """Return whether something was repaired, if a training job resumes or continues: it also does by plan."""
        match entry:
            case record.FragmentEnded():
                self._interrupted -= {entry.subject}
                self._interrupted |= {entry.subject} if entry.failure else set()
            case record.FragmentResumed(subject=training):
                was_interrupted = training in self._interrupted
                self._interrupted.discard(training)
                return was_interrupted
            case record.TrainingStalled() | record.CohortStalled() if entry.reason:
                self._waiting -= {entry.subject}
                incident = incident_of(entry)
                self._waiting |= {entry.subject} if incident and incident[0] is IncidentLevel.NOTICE else set()
            case record.TrainingStalled() | record.CohortStalled():
                only_waited = entry.subject in self._waiting
                self._waiting.discard(entry.subject)
                return not only_waited
        return True


def count_failures(journals: Iterable[Path]) -> int:
    """Return the number of failures in journals, see `Incidents`; reads only the records that may state one.

    Raises
    ------
    OSError, sqlite3.Error
        A journal cannot be read.
    """
    incidents = Incidents()
    for journal in journals:
        for entry in read_kinds(journal, _KINDS):
            incidents.take(entry.record)
    return incidents.failures
