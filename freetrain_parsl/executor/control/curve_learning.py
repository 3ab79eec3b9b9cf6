"""Scaling curves of running trainings, learned from the throughput that they report at each number of nodes.

A training without a stated curve starts on its ``min_nodes`` and is tried on more while that pays; a stated curve keeps
its shape where nothing has been measured. See `freetrain_parsl.planning.curves.learning`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.planning.curves.learning import Profile, learned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.planning.model import Trainer
    from freetrain_parsl.protocol.reports import Progress

__all__ = ["CurveLearning"]

_SIGNIFICANT = 0.05  # relative change of a rate below which the planner keeps the curve that it has


@dataclass
class _Stretch:
    """The last report of a group of constant size."""

    group: int
    samples: int
    slot_seconds: float


class CurveLearning:
    """What has been measured of each training; pure."""

    def __init__(self) -> None:
        self._profiles: dict[str, Profile] = {}
        self._last: dict[str, _Stretch] = {}
        self._known: dict[str, Trainer] = {}

    def add(self, trainer: Trainer) -> None:
        """Start measuring a training; its own curve is the prior unless it is relative."""
        self._profiles[trainer.name] = Profile(trainer.curve)

    def remove(self, name: str) -> None:
        """Forget a training."""
        for kept in (self._profiles, self._last, self._known):
            kept.pop(name, None)

    def observe(self, name: str, *, group: int, nodes: int, slots: int, progress: Progress) -> None:
        """Take a progress report.

        Parameters
        ----------
        name
            The training.
        group
            Number of its group: stretches that span a change of the group are not measurements.
        nodes, slots
            Size of the group.
        progress
            The report; the time of its steps is measured where they are made.
        """
        profile, last = self._profiles.get(name), self._last.get(name)
        self._last[name] = _Stretch(group, progress.samples, progress.slot_seconds)
        if profile is None or last is None or last.group != group:
            return
        samples, seconds = progress.samples - last.samples, (progress.slot_seconds - last.slot_seconds) / slots
        if samples > 0 and seconds > 0:
            profile.observe(nodes, samples, seconds)

    def changed(self, trainers: Iterable[Trainer]) -> list[Trainer]:
        """Return the trainers of whom the planner should get another description, with that description.

        Parameters
        ----------
        trainers
            All that are alive, as their users describe them, with the work left and the costs known now.
        """
        updated = []
        for trainer in learned(trainers, self._profiles):
            known = self._known.get(trainer.name)
            if known is None or _differ(known, trainer):
                self._known[trainer.name] = trainer
                updated.append(trainer)
        return updated


def _differ(known: Trainer, now: Trainer) -> bool:
    if (known.max_nodes, known.costs, known.curve.relative) != (now.max_nodes, now.costs, now.curve.relative):
        return True
    before, after = dict(known.curve.points), dict(now.curve.points)
    if before.keys() != after.keys():
        return True
    return any(abs(after[nodes] - rate) > _SIGNIFICANT * rate for nodes, rate in before.items())
