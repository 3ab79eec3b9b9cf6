"""The batch system of a replay: it starts, preempts and ends the blocks that the planner requests on idle nodes.

The planner sees what it sees in the executor: windows at every poll, the start of a block, its nodes once their slots
are ready, and its end. A block runs until its walltime is over, until it is released, or until one of its nodes is used
again in the log; it is then preempted as a whole, as batch systems do with jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import BlockTerms, PoolNode, Window, WindowKind
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.settings_checks import check_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.replay.holes import Change, Hole

__all__ = ["BlockSettings", "BlockSite"]


@dataclass(frozen=True)
class BlockSettings:
    """How blocks start.

    Parameters
    ----------
    planner
        The planner's assumptions; slots are ready after its ``startup``.
    start_delay
        Time from the request until the batch system starts a block: a scheduler cycle.
    poll_interval
        Time between the planner's views of the windows.
    """

    planner: PlannerSettings = field(default_factory=PlannerSettings)
    start_delay: timedelta = timedelta(0)
    poll_interval: timedelta = timedelta(seconds=15)

    def __post_init__(self) -> None:
        check_duration("BlockSettings: start_delay", self.start_delay, least=timedelta(0))
        check_duration("BlockSettings: poll_interval", self.poll_interval, least=timedelta(milliseconds=1))


@dataclass
class _Block:
    """A block that was requested; ``ready`` is infinite before it starts."""

    name: str
    wanted: tuple[str, ...]
    seconds: float
    pinned: bool
    starts: float
    nodes: tuple[str, ...] = ()
    ready: float = math.inf
    ends: float = math.inf
    joined: bool = False


class BlockSite:
    """Blocks on the idle nodes of a log.

    Parameters
    ----------
    settings
        How blocks start.
    start
        When the log starts, seconds.
    perfect
        Whether the planner sees when idle nodes close.
    """

    def __init__(self, settings: BlockSettings, start: float, *, perfect: bool) -> None:
        self._startup = settings.planner.in_seconds().startup
        self._terms = BlockTerms(start_delay=settings.start_delay.total_seconds())
        self._poll = settings.poll_interval.total_seconds()
        self._perfect = perfect
        self._idle: dict[str, Hole] = {}
        self._held: dict[str, str] = {}
        """Node -> its block."""
        self._blocks: dict[str, _Block] = {}
        self._next_poll = start
        self.requested = 0
        self.preempted = 0

    @property
    def next_event(self) -> float:
        """When something happens next without a change in the log, seconds."""
        return min([self._next_poll, *map(_next_event, self._blocks.values())])

    def change(self, change: Change) -> tuple[list[ev.Event], frozenset[str]]:
        """Take a change of the idle nodes; return the planner's events, and the nodes that trainings lose."""
        events: list[ev.Event] = []
        hit = dict.fromkeys(self._held[node] for node in change.closed if node in self._held)
        for node in change.closed:
            del self._idle[node]
        lost: set[str] = set()
        for name in hit:
            lost |= self._end(name)
            events.append(ev.BlockEnded(change.time, name))
            self.preempted += 1
        self._idle.update((hole.node, hole) for hole in change.opened)
        return events, frozenset(lost)

    def pass_to(self, now: float) -> tuple[list[ev.Event], frozenset[str]]:
        """Let blocks start, become ready and end that are due; return events and lost nodes as `change` does."""
        events: list[ev.Event] = []
        lost: set[str] = set()
        for block in list(self._blocks.values()):
            if now >= block.ends:
                lost |= self._end(block.name)
                events.append(ev.BlockEnded(now, block.name))
            elif not block.nodes and now >= block.starts:
                events += self._start(block, now)
            if block.nodes and not block.joined and block.ready <= now < block.ends:
                block.joined = True
                events.append(ev.NodesJoined(now, block.name, tuple(self._member(node, block) for node in block.nodes)))
        if now >= self._next_poll:
            self._next_poll = now + self._poll
            events.append(ev.WindowsSeen(now, tuple(self._windows(now)), self._terms))
        return events, frozenset(lost)

    def act(self, actions: Iterable[ev.Action], now: float) -> None:
        """Take the planner's requests and releases."""
        for action in actions:
            if isinstance(action, ev.RequestBlock):
                starts = now + self._terms.start_delay
                self._blocks[action.block] = _Block(action.block, action.nodes, action.seconds, action.pinned, starts)
                self.requested += 1
            elif isinstance(action, ev.ReleaseBlock) and action.block in self._blocks:
                self._end(action.block)

    def _start(self, block: _Block, now: float) -> list[ev.Event]:
        """Start a block on its nodes or, unless it is pinned, on others; without free nodes it waits for a poll."""
        free = [node for node in self._idle if node not in self._held]
        nodes: Sequence[str] = block.wanted
        if not set(nodes).issubset(free):
            nodes = sorted(free)[: len(block.wanted)]
            if block.pinned or len(nodes) < len(block.wanted):
                block.starts = max(self._next_poll, math.nextafter(now, math.inf))
                return []
        block.nodes, block.ends, block.ready = tuple(nodes), now + block.seconds, now + self._startup
        self._held.update(dict.fromkeys(nodes, block.name))
        return [ev.BlockStarted(now, block.name, block.nodes, block.ends)]

    def _end(self, name: str) -> set[str]:
        block = self._blocks.pop(name)
        for node in block.nodes:
            del self._held[node]
        return set(block.nodes)

    def _member(self, node: str, block: _Block) -> PoolNode:
        return PoolNode(node, min(block.ends, self._idle[node].end) if self._perfect else block.ends)

    def _windows(self, now: float) -> Iterable[Window]:
        free = (hole for node, hole in self._idle.items() if node not in self._held)
        if not self._perfect:
            if nodes := tuple(hole.node for hole in free):
                yield Window(nodes, now, None, WindowKind.PREEMPTIBLE)
            return
        for closes, holes in groupby(sorted(free, key=_end_of), key=_end_of):
            if closes > now:
                yield Window(tuple(hole.node for hole in holes), now, closes)


def _next_event(block: _Block) -> float:
    if not block.nodes:
        return block.starts
    return block.ends if block.joined else min(block.ready, block.ends)


def _end_of(hole: Hole) -> float:
    return hole.end
