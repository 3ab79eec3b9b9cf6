"""The batch system of a replay: it starts, preempts and ends the blocks that the planner requests on idle nodes.

The planner sees what it sees in the executor: at every poll the windows and which blocks have started or ended; at once
that the slots of nodes are ready or gone. A block runs until it is released, until its training jobs have vacated it
shortly before its walltime is over, or until one of its nodes is used again in the log; it is then preempted as a
whole, as batch systems do with jobs.
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
    from collections.abc import Collection, Iterable, Sequence

    from freetrain_parsl.extensions.replay.holes import Change, Hole

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
    """A block that was requested; ``ready`` is infinite before it starts; ``reported``: a poll has shown its start."""

    name: str
    wanted: tuple[str, ...]
    seconds: float
    pinned: bool
    starts: float
    nodes: tuple[str, ...] = ()
    ready: float = math.inf
    ends: float = math.inf
    reported: bool = False
    joined: bool = False


class BlockSite:
    """Blocks on the idle nodes of a log, from `start` on; with `perfect`, the planner sees when idle nodes close."""

    def __init__(self, settings: BlockSettings, start: float, *, perfect: bool) -> None:
        planner = settings.planner.in_seconds()
        self._startup, self._closing_margin = planner.startup, planner.closing_margin
        self._terms = BlockTerms(start_delay=settings.start_delay.total_seconds())
        self._poll = settings.poll_interval.total_seconds()
        self._perfect = perfect
        self._idle: dict[str, Hole] = {}
        self._held: dict[str, str] = {}
        """Node -> its block."""
        self._blocks: dict[str, _Block] = {}
        self._left: list[str] = []
        """Nodes whose slots are gone, which the planner sees at once."""
        self._ended: list[str] = []
        """Blocks that have ended, which the planner sees at the next poll."""
        self._next_poll = start
        self.requested = 0
        self.preempted = 0

    @property
    def next_event(self) -> float:
        """When something happens next without a change in the log, seconds."""
        if self._left:
            return -math.inf
        return min([self._next_poll, *map(_next_event, self._blocks.values())])

    def change(self, change: Change) -> frozenset[str]:
        """Take a change of the idle nodes; return the nodes that training jobs lose."""
        hit = dict.fromkeys(self._held[node] for node in change.closed if node in self._held)
        for node in change.closed:
            del self._idle[node]
        lost: set[str] = set()
        for name in hit:
            lost |= self._end(name)
            self.preempted += 1
        self._idle.update((hole.node, hole) for hole in change.opened)
        return frozenset(lost)

    def pass_to(self, now: float) -> tuple[list[ev.Event], frozenset[str]]:
        """Let blocks start, become ready and end that are due; return the planner's events and lost nodes."""
        events: list[ev.Event] = []
        lost: set[str] = set()
        for block in list(self._blocks.values()):
            if now >= block.ends:
                lost |= self._end(block.name)
                continue
            if not block.nodes and now >= block.starts:
                self._start(block, now)
            if block.nodes and not block.joined and block.ready <= now:
                block.joined = True
                members = (self._member(node, block, now) for node in block.nodes)
                events.append(ev.NodesJoined(now, block.name, tuple(members)))
        if self._left:
            events.append(ev.NodesLeft(now, tuple(self._left)))
            self._left.clear()
        if now >= self._next_poll:
            self._next_poll = now + self._poll
            events += self._survey(now)
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

    def leave_in_time(self, used: Collection[str], now: float) -> None:
        """End the blocks that training jobs have vacated shortly before their walltime is over."""
        for block in list(self._blocks.values()):
            if (
                block.reported
                and block.ends - now <= self._closing_margin
                and not any(node in used for node in block.nodes)
            ):
                self._end(block.name)

    def _start(self, block: _Block, now: float) -> None:
        """Start a block on its nodes or, unless it is pinned, on others; without free nodes it waits for a poll."""
        free = [node for node in self._idle if node not in self._held]
        nodes: Sequence[str] = block.wanted
        if not set(nodes).issubset(free):
            nodes = sorted(free)[: len(block.wanted)]
            if block.pinned or len(nodes) < len(block.wanted):
                block.starts = max(self._next_poll, math.nextafter(now, math.inf))
                return
        block.nodes, block.ends, block.ready = tuple(nodes), now + block.seconds, now + self._startup
        self._held.update(dict.fromkeys(nodes, block.name))

    def _end(self, name: str) -> set[str]:
        block = self._blocks.pop(name)
        for node in block.nodes:
            del self._held[node]
        if block.joined:
            self._left += block.nodes
        self._ended.append(name)
        return set(block.nodes)

    def _survey(self, now: float) -> Iterable[ev.Event]:
        """Yield what the planner sees at a poll."""
        yield ev.WindowsSeen(now, tuple(self._windows(now)), self._terms)
        for name in self._ended:
            yield ev.BlockEnded(now, name)
        self._ended.clear()
        for block in self._blocks.values():
            if block.nodes and not block.reported:
                block.reported = True
                yield ev.BlockStarted(now, block.name, block.nodes, block.ends)
                yield ev.NodesClosing(now, block.nodes, block.ends)

    def _member(self, node: str, block: _Block, now: float) -> PoolNode:
        ends = block.ends if block.reported else now + block.seconds
        return PoolNode(node, min(ends, self._idle[node].end) if self._perfect else ends)

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
