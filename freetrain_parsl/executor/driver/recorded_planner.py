"""A planner that writes its inputs and outputs to the journal, so that its decisions can be repeated exactly."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import as_json, progress_item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from freetrain_parsl.planning.model import BlockTerms, Decision, Window
    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.settings import SettingsInSeconds

__all__ = ["RecordedPlanner"]


_WindowsAndTerms: TypeAlias = "tuple[tuple[Window, ...], BlockTerms, Mapping[str, BlockTerms]]"


def _content(event: ev.WindowsSeen) -> _WindowsAndTerms:
    return event.windows, event.terms, event.terms_by_kind


def _left(events: Iterable[ev.Event], progress: Mapping[str, ev.TrainerProgressed]) -> dict[str, float]:
    """Return the work left of the trainers whose latest progress no later event has replaced."""
    left = {trainer: event.work_left for trainer, event in progress.items()}
    for event in events:
        match event:
            case ev.TrainerProgressed():
                left[event.trainer] = event.work_left
            case ev.TrainerSubmitted() | ev.TrainerLearned():
                left.pop(event.trainer.name, None)
    return left


class RecordedPlanner(Planner):
    """A `Planner` that records every step and decision: `write` gets each record with its time.

    Events without any effect on the planner are left out: an unchanged demand of tasks or unchanged windows that led to
    no decision, and progress that newer progress, or a new description, replaced before a decision. The rest of the
    progress is one item: with a hundred training jobs it is most of a step.
    """

    def __init__(
        self,
        policy: Policy,
        settings: SettingsInSeconds,
        write: Callable[[float, record.Record], None],
        now: float,
        *,
        slots_per_node: int = 1,
    ) -> None:
        super().__init__(policy, settings, self._record_decision, slots_per_node=slots_per_node)
        self._write = write
        self._progress: dict[str, ev.TrainerProgressed] = {}
        """Trainer -> its latest progress, not recorded yet."""
        self._recorded_tasks = ev.TasksWaiting(now, 0)
        self._recorded_windows: _WindowsAndTerms | None = None
        write(now, record.PlannerStarted("", policy.name, asdict(settings), slots_per_node))

    def advance(self, *events: ev.Event) -> ev.Actions:
        """Process events and return the resulting actions; see `Planner.advance`."""
        plans, moved = self.statistics.plans, self._in_order(events)
        actions = super().advance(*moved)
        progress = {event.trainer: event for event in moved if isinstance(event, ev.TrainerProgressed)}
        if self.statistics.plans == plans and not any(map(self._matters, moved)):
            self._progress.update(progress)
            return actions
        left, self._progress = _left(moved, self._progress), {}
        compact = self._compact(moved, left, self._now)
        self._write(self._now, record.PlannerStep("", compact, [as_json(action) for action in actions]))
        return actions

    def _matters(self, event: ev.Event) -> bool:
        """Return whether an event may have changed the planner's state although it has not led to a decision."""
        match event:
            case ev.TrainerProgressed():
                return False
            case ev.TasksWaiting():
                return not self._same_tasks(event)
            case ev.WindowsSeen():
                return _content(event) != self._recorded_windows
        return True

    def _compact(self, events: Iterable[ev.Event], left: Mapping[str, float], time: float) -> list[dict[str, Any]]:
        """Convert events, without the demand and the contents of windows if these are as last recorded.

        `left`: trainer -> its work left, according to the events.
        """
        compact = []
        for event in events:
            if isinstance(event, ev.TrainerProgressed):
                continue
            if isinstance(event, ev.TasksWaiting):
                if self._same_tasks(event):
                    continue
                self._recorded_tasks = event
            item = as_json(event)
            if isinstance(event, ev.WindowsSeen):
                if _content(event) == self._recorded_windows:
                    del item["windows"]
                    item.pop("terms", None)
                    item.pop("terms_by_kind", None)
                self._recorded_windows = _content(event)
            compact.append(item)
        if left:
            compact.append(progress_item(time, left))
        if not compact or compact[-1]["time"] != time:
            compact.append(as_json(ev.Tick(time)))
        return compact

    def _same_tasks(self, event: ev.TasksWaiting) -> bool:
        recorded = self._recorded_tasks
        return (event.nodes_wanted, event.busy) == (recorded.nodes_wanted, recorded.busy)

    def _record_decision(self, time: float, purpose: str, decision: Decision) -> None:
        self._write(
            time,
            record.Decision(
                purpose,
                policy=self.policy.name,
                counts=decision.counts,
                objective=decision.objective,
                proven=decision.proven_optimal,
                seconds=decision.solve_seconds,
            ),
        )
