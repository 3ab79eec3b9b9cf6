"""The idle nodes and trainings of a recorded run, for a replay of what happened with the same or another policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.holes import HoleLog, HoleTable, refuse_forecasts
from freetrain_parsl.planning import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from freetrain_parsl.extensions.replay.holes import Change
    from freetrain_parsl.planning.model import Trainer

__all__ = ["JournalLog", "trainers_of"]


class JournalLog(HoleLog):
    """The holes that the planner of a run saw: nodes in windows, or held by its blocks.

    Times are those at which the planner saw a node come or go, which is up to a poll later than it happened.

    Parameters
    ----------
    name
        Name of the run.
    steps
        The events of its planner, step by step.

    Raises
    ------
    InvalidInput
        The planner saw no idle node.
    """

    def __init__(self, name: str, steps: Sequence[Sequence[ev.Event]]) -> None:
        self.name = name
        tracker = _Tracker()
        for events in steps:
            # A survey shows a block's nodes no longer as idle, and only then the block as started.
            for event in sorted(events, key=lambda event: isinstance(event, ev.WindowsSeen)):
                tracker.take(event)
        holes = tracker.finish(steps[-1][-1].time) if steps else []
        if not holes:
            raise InvalidInput(f"{name}: the run saw no idle nodes; there is nothing to replay")
        names = sorted({node for node, _, _ in holes})
        self.nodes = len(names)
        self.start, self.end = steps[0][0].time, steps[-1][-1].time
        index = {node: number for number, node in enumerate(names)}
        nodes, starts, ends = zip(*holes, strict=True)
        self.table = HoleTable.sorted(names, [index[node] for node in nodes], starts, ends)

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        if forecasts:
            raise refuse_forecasts(self.name)
        return self.table.changes(before=self.end)


def trainers_of(steps: Iterable[Iterable[ev.Event]], start: float) -> tuple[Trainer, ...]:
    """Return the trainings of a run as they were submitted, with times in seconds after `start`."""
    trainers: dict[str, Trainer] = {}
    for event in chain.from_iterable(steps):
        if isinstance(event, ev.TrainerSubmitted) and event.trainer.name not in trainers:
            trainer = event.trainer
            deadline = None if trainer.deadline is None else trainer.deadline - start
            trainers[trainer.name] = replace(trainer, submitted=max(0.0, trainer.submitted - start), deadline=deadline)
    return tuple(trainers.values())


class _Tracker:
    """Follows the idle nodes through the events."""

    def __init__(self) -> None:
        self._holes: list[tuple[str, float, float]] = []
        self._since: dict[str, float] = {}
        self._held: dict[str, tuple[str, ...]] = {}
        self._gone: dict[str, float] = {}
        """Nodes whose slots or blocks have ended -> when; the next survey shows whether they are idle."""

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.WindowsSeen(windows=windows):
                self._survey(event.time, {node for window in windows for node in window.nodes})
            case ev.BlockStarted(block=block, nodes=nodes):
                self._held[block] = nodes
                for node in nodes:
                    self._since.setdefault(node, event.time)
            case ev.BlockEnded(block=block):
                for node in self._held.pop(block, ()):
                    self._gone.setdefault(node, event.time)
            case ev.NodesLeft(nodes=nodes):
                for node in nodes:
                    self._gone.setdefault(node, event.time)
            case ev.NodesJoined(nodes=joined):
                for member in joined:
                    self._gone.pop(member.name, None)

    def finish(self, end: float) -> list[tuple[str, float, float]]:
        for node in list(self._since):
            self._close(node, self._gone.get(node, end))
        return [(node, start, end) for node, start, end in self._holes if start < end]

    def _survey(self, time: float, free: set[str]) -> None:
        held = {node for nodes in self._held.values() for node in nodes}
        for node in self._since.keys() - free - held:
            self._close(node, self._gone.get(node, time))
        for node in free:
            self._since.setdefault(node, time)
        self._gone = {node: gone for node, gone in self._gone.items() if node in held}

    def _close(self, node: str, end: float) -> None:
        self._holes.append((node, self._since.pop(node), end))
