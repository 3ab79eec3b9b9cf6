"""The time in steps that count, over all drivers of a run: what of it lies in the node time that their journals show.

A training job reports the slot-seconds of all steps that have made its state: its position. The position goes back when
a training job resumes from an older checkpoint, and it includes what no journal of this run shows: the steps of an
earlier run, and those that its processes made after their driver was killed. So the steps of each driver are kept as
parts of the positions, from where a group began to the last report of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CountedSteps"]


@dataclass
class _Part:
    """The steps of a training job from one position to another, in slot-seconds, made with one driver."""

    driver: int
    begin: float
    end: float


@dataclass
class _Steps:
    """The steps of one training job."""

    parts: list[_Part]
    is_open: bool = False
    """Whether a group trains."""
    begins_anew: bool = False
    """Whether this group began without a checkpoint, or the record that names its checkpoint follows."""

    def begin(self, driver: int, position: float) -> None:
        """Continue from a checkpoint: steps after it are lost, those before it that no journal shows do not count."""
        kept = [part for part in self.parts if part.begin < position]
        self.parts = [*(replace(part, end=min(part.end, position)) for part in kept), _Part(driver, position, position)]
        self.begins_anew = False

    def reach(self, driver: int, position: float) -> None:
        """Take the position of a report."""
        if self.begins_anew:
            self.begin(driver, 0.0)
        elif not self.parts or self.parts[-1].driver != driver:  # the group before ended before its first report
            end = self.parts[-1].end if self.parts else 0.0
            self.parts.append(_Part(driver, end, end))
        if position < self.parts[-1].begin:  # likewise; from an older checkpoint
            self.begin(driver, position)
        self.parts[-1].end = position

    def copy(self) -> _Steps:
        """Return a copy, to be changed."""
        return _Steps([replace(part) for part in self.parts], is_open=self.is_open, begins_anew=self.begins_anew)


class CountedSteps:
    """Adds up the slot-seconds in steps that count, from the records of one driver after the other."""

    def __init__(self) -> None:
        self._steps: dict[str, _Steps] = {}
        self._reports: dict[str, float] = {}  # training -> position of its last report to the present driver
        self._most: list[float] = []  # of each driver that has ended, the slot-seconds of training

    def take(self, entry: record.Record | None) -> None:
        """Take the next record of the present driver."""
        match entry:
            case record.FragmentStarted(subject=name, in_place=in_place):
                steps = self._steps.setdefault(name, _Steps([]))
                steps.is_open = True
                steps.begins_anew = not in_place
            case record.FragmentResumed(subject=name, slot_seconds=position) if name in self._steps:
                self._steps[name].begin(len(self._most), position)
            case record.FragmentEnded(subject=name, slot_seconds=position) if name in self._steps:
                steps = self._steps[name]
                if steps.is_open and position is not None:  # else a group that never trained
                    steps.is_open = False
                    steps.reach(len(self._most), position)

    def take_progress(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the last report of each training job to the present driver."""
        self._reports = {name: float(report.get("slot_seconds", 0.0)) for name, report in reports.items()}

    def end_driver(self, slot_seconds: float) -> None:
        """Note that the present driver has ended, with this much slot time in which training jobs ran."""
        for name, position in self._reports.items():
            if name in self._steps and self._steps[name].is_open:
                self._steps[name].reach(len(self._most), position)
        for steps in self._steps.values():
            steps.is_open = steps.begins_anew = False
        self._reports = {}
        self._most.append(slot_seconds)

    def total(self, slot_seconds: float = 0.0) -> float:
        """Return the slot-seconds in steps that count so far; `slot_seconds` as in `end_driver`, for one that runs."""
        sums = [0.0] * (len(self._most) + 1)
        for name, steps in self._steps.items():
            now = steps.copy()
            if steps.is_open and name in self._reports:
                now.reach(len(self._most), self._reports[name])
            for part in now.parts:
                sums[part.driver] += part.end - part.begin
        # A driver that was suspended learns late that a group trains: until then its nodes count as between training
        # jobs. The rest is not in its node time.
        return sum(min(sums_of) for sums_of in zip(sums, [*self._most, slot_seconds], strict=True))
