"""Gathering training jobs that may run fused: a sweep is submitted one training job after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future
    from datetime import datetime, timedelta

    from freetrain_parsl.executor.jobs.request import Fusion, Training, TrainingRequest
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import CostsInSeconds

__all__ = ["CohortKey", "Gathering", "cohort_key"]

_QUIET = 0.5  # seconds without another training job of the same key
_LONGEST = 3.0  # seconds


@dataclass(frozen=True)
class CohortKey:
    """Equal for training jobs that may be in one cohort.

    Parameters
    ----------
    fusion, priority, deadline, costs, scaling, max_nodes, node_kinds
        As in `TrainingRequest`.
    structure
        That of the training jobs, once it is known that they differ from those that have the rest in common.
    """

    fusion: Fusion
    priority: float
    deadline: datetime | timedelta | None
    costs: CostsInSeconds | None
    scaling: ScalingCurve
    max_nodes: int
    node_kinds: tuple[str, ...] = ()
    structure: str = ""


def cohort_key(request: TrainingRequest) -> CohortKey | None:
    """Return the key of a training job: what its planner's trainer cannot have twice; ``None`` if it trains alone.

    A training job that needs several nodes at the same time, or has a scaling curve for each kind of node, trains
    alone.
    """
    if request.fusion is None or request.min_nodes > 1 or request.scaling_by_kind:
        return None
    return CohortKey(
        request.fusion,
        request.priority,
        request.deadline,
        request.costs,
        request.scaling,
        request.max_nodes,
        request.node_kinds,
    )


@dataclass
class _Group:
    first: float
    last: float
    trainings: dict[Future[Any], Training] = field(default_factory=dict)


class Gathering:
    """Training jobs that were submitted a moment ago, by key."""

    def __init__(self) -> None:
        self._groups: dict[CohortKey, _Group] = {}

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._groups)

    def add(self, key: CohortKey, training: Training, now: float) -> None:
        """Add a training job."""
        group = self._groups.setdefault(key, _Group(now, now))
        group.last = now
        group.trainings[training.future] = training

    def take(self, future: Future[Any]) -> list[Training]:
        """Take the training job with this future, if it is here."""
        key = next((key for key, group in self._groups.items() if future in group.trainings), None)
        if key is None:
            return []
        training = self._groups[key].trainings.pop(future)
        if not self._groups[key].trainings:
            del self._groups[key]
        return [training]

    def take_all(self) -> list[Training]:
        """Take all training jobs."""
        return [training for _, trainings in self._taken(list(self._groups)) for training in trainings]

    def ready(self, now: float) -> list[tuple[CohortKey, list[Training]]]:
        """Take the training jobs to which no further ones have been added for a moment."""
        groups = self._groups.items()
        return self._taken(
            [key for key, group in groups if now - group.last >= _QUIET or now - group.first >= _LONGEST]
        )

    def _taken(self, keys: list[CohortKey]) -> list[tuple[CohortKey, list[Training]]]:
        return [(key, list(self._groups.pop(key).trainings.values())) for key in keys]
