"""The blocks that we hold or await: requested in windows, withdrawn if they do not start, released when not needed.

Pure, and part of the planner, which decides which nodes are wanted; this module derives the blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import BlockTerms, PoolNode, Window

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from freetrain_parsl.planning.settings import SettingsInSeconds

__all__ = ["Holdings", "block_size", "block_walltime", "format_span", "least_walltime", "why_not"]

_PARTS = 4  # into which the nodes of a request are divided where blocks are preempted
_MOST_DOUBLINGS = 5  # of the pause after blocks that did not start


def block_walltime(window: Window | None, settings: SettingsInSeconds, terms: BlockTerms, now: float) -> float:
    """Return the walltime of a block that ends before the window closes even if it starts late, s; zero for none.

    Without a window, it is that of a block that waits in the queue.
    """
    most = settings.hidden_jobs_walltime if terms.hides_waiting else settings.max_walltime
    left = math.inf if window is None else window.remaining(now) - terms.start_delay
    longest = min(most, settings.max_walltime, terms.max_walltime, left)
    return max(0.0, math.floor(longest / terms.walltime_step) * terms.walltime_step)


def least_walltime(settings: SettingsInSeconds) -> float:
    """Return the walltime of the shortest block that is worth its start, s."""
    return settings.startup + settings.min_useful + settings.closing_margin


def block_size(settings: SettingsInSeconds, terms: BlockTerms) -> int | None:
    """Return the maximum number of nodes per block; ``None`` for no limit."""
    limits = [limit for limit in (settings.max_nodes_per_block, terms.max_nodes) if limit is not None]
    return min(limits, default=None)


def why_not(window: Window, settings: SettingsInSeconds, terms: BlockTerms, now: float) -> str | None:
    """Explain why no block in this window is worthwhile for any training job; ``None`` if one is."""
    if window.opens > now:
        return f"opens in {format_span(window.opens - now)}"
    if len(window.nodes) < terms.min_nodes:
        return f"fewer nodes than the minimum of {terms.min_nodes} per job"
    walltime = block_walltime(window, settings, terms, now)
    if walltime < least_walltime(settings):
        late = f"start within {format_span(terms.start_delay)} + " if terms.start_delay else ""
        return (
            f"shorter than {late}start-up {format_span(settings.startup)} + "
            f"minimum {format_span(settings.min_useful)} + margin {format_span(settings.closing_margin)}"
            + (f", in steps of {format_span(terms.walltime_step)}" if terms.walltime_step > 1 else "")
        )
    return None


def format_span(seconds: float) -> str:
    """Format a duration briefly: ``40 s``, ``12 min``, ``1 h 30 min``."""
    seconds = round(seconds)
    if seconds < 120 and seconds != 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


@dataclass
class _Block:
    """A block between its request and its end; without nodes, it waits in the queue for any one."""

    nodes: tuple[str, ...]
    ends: float | None
    requested: float
    pinned: bool
    node_kind: str = ""
    avoided: frozenset[str] = frozenset()
    started: bool = False
    unwanted_since: float | None = None
    missing_since: dict[str, float] = field(default_factory=dict)
    """Its nodes whose slots have not joined yet or have left -> since when."""


@dataclass(frozen=True)
class _Pause:
    """Blocks did not start, `times` in a row: such blocks are not requested before `until`."""

    until: float
    times: int

    @classmethod
    def after(cls, last: _Pause | None, seconds: float, now: float) -> _Pause:
        """Return the pause after the last one: from twice the `seconds` on, it doubles each time."""
        times = 1 if last is None else last.times + 1
        return cls(now + seconds * 2 ** min(times, _MOST_DOUBLINGS), times)


class Holdings:
    """Windows as last seen, and our blocks; times in seconds."""

    def __init__(self, settings: SettingsInSeconds) -> None:
        self.settings = settings
        self.windows: tuple[Window, ...] = ()
        self.terms = BlockTerms()
        self._terms_by_kind: Mapping[str, BlockTerms] = {}
        self._blocks: dict[str, _Block] = {}
        self._shunned: dict[str, _Pause] = {}
        """Node -> until when it is not requested."""
        self._refused: dict[str, _Pause] = {}
        """Kind of node -> until when no block is queued for it: the batch system has refused one."""
        self._taken: dict[str, float] = {}
        """Node -> until when it is left to the job for which the batch system takes it back."""
        self._makes_way_until = -math.inf
        self._doubtful = False
        self._seen_at = -math.inf
        self._count = 0

    def __contains__(self, block: str) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the blocks' nodes."""
        return frozenset(block.node_kind for block in self._blocks.values())

    def terms_on(self, node_kind: str) -> BlockTerms:
        """Return the terms for blocks on nodes of a kind."""
        return self._terms_by_kind.get(node_kind, self.terms)

    def startup_on(self, node_kind: str) -> float:
        """Return the longest time from requesting a block on nodes of a kind until its slots are ready."""
        return self.terms_on(node_kind).start_delay + self.settings.startup

    @property
    def startup(self) -> float:
        """The longest such time over all kinds."""
        return max(map(self.startup_on, self._terms_by_kind), default=self.startup_on(""))

    @property
    def kinds_that_may_wait(self) -> frozenset[str]:
        """The kinds of nodes for which blocks may wait in the queue."""
        if not self.settings.standby_blocks:
            return frozenset()
        terms = self._terms_by_kind or {"": self.terms}
        return frozenset(kind for kind, each in terms.items() if each.may_wait)

    @property
    def may_be_requested(self) -> int:
        """Number of further blocks that may be pending or starting."""
        return max(0, self.settings.max_pending_blocks - sum(not block.started for block in self._blocks.values()))

    def wakes(self) -> Iterator[float]:
        """Yield the times at which something falls due without an event."""
        for block in self._blocks.values():
            if block.unwanted_since is not None:
                yield block.unwanted_since + self.settings.idle_timeout
            for since in block.missing_since.values():
                yield since + self.settings.join_timeout
        for pause in (*self._shunned.values(), *self._refused.values()):
            yield pause.until
        yield from (self._makes_way_until, *self._taken.values())

    # Events.

    def see(self, seen: ev.WindowsSeen) -> bool:
        """Store the batch system's latest windows and terms; return whether anything changed."""
        self._seen_at = seen.time
        before = (self.windows, self.terms, self._terms_by_kind)
        self.windows, self.terms, self._terms_by_kind = seen.windows, seen.terms, seen.terms_by_kind
        news = self._doubtful or (self.windows, self.terms, self._terms_by_kind) != before
        self._doubtful = False
        return news

    def doubt(self) -> None:
        """Request nothing before the next survey: idle nodes may have been taken, as our own nodes just were."""
        self._doubtful = True

    def make_way(self, nodes: Iterable[str], now: float, closes: float) -> None:
        """Leave nodes to the job for which the batch system takes them back, until it can have started.

        It may need several, which are not given back at the same moment, and holds none of them meanwhile: a block that
        waits in the queue would get the first one, and the job would have to wait for it once more.
        """
        terms = list((self._terms_by_kind or {"": self.terms}).values())
        if self.kinds_that_may_wait:
            self._taken = {name: until for name, until in self._taken.items() if now < until}
            self._taken |= dict.fromkeys(nodes, closes + max(each.start_delay for each in terms))
            self._makes_way_until = max(self._makes_way_until, closes)

    def _avoided(self, now: float) -> frozenset[str]:
        return frozenset(name for name, until in self._taken.items() if now < until)

    def start(self, started: ev.BlockStarted, joined: Collection[str]) -> None:
        """Record that a block holds nodes now; those that have not `joined` are missing."""
        if (block := self._blocks.get(started.block)) is not None:
            self._start(block, started.nodes)
            block.nodes, block.ends = started.nodes, started.ends
            block.missing_since = {name: started.time for name in started.nodes if name not in joined}
            for name in started.nodes:
                self._shunned.pop(name, None)

    def join(self, block: str, node: str) -> None:
        """Record that a node's slots are ready: its block has started, even if not reported by the batch system yet."""
        if block in self._blocks:
            self._start(self._blocks[block], (node,))
            self._blocks[block].missing_since.pop(node, None)

    def lack(self, block: str, node: str, now: float) -> None:
        """Record that a node's slots have left."""
        if block in self._blocks:
            self._blocks[block].missing_since[node] = now

    def _start(self, block: _Block, nodes: tuple[str, ...]) -> None:
        if not block.nodes:
            block.nodes = nodes
            self._refused.pop(block.node_kind, None)
        block.started = True

    def end(self, block: str, now: float, *, refused: bool) -> None:
        """Record that a block has ended, or was refused."""
        known = self._blocks.pop(block, None)
        if refused and known is not None and not known.nodes:
            kind = known.node_kind
            self._refused[kind] = _Pause.after(self._refused.get(kind), self.startup_on(kind), now)

    def is_over(self, block: str, now: float) -> bool:
        """Return whether a block's walltime is over, up to the margin with which blocks are left."""
        known = self._blocks.get(block)
        return known is not None and known.ends is not None and now >= known.ends - self.settings.closing_margin

    def still_joining(self, joined: Collection[str]) -> bool:
        """Return whether a running block has nodes that have not `joined`."""
        return any(block.started and any(n not in joined for n in block.nodes) for block in self._blocks.values())

    # Decisions.

    def awaited(self, joined: Collection[str], now: float) -> list[PoolNode]:
        """List the nodes of our blocks that have not `joined` but may."""
        return [
            PoolNode(name, block.ends, node_kind=block.node_kind)
            for block in self._blocks.values()
            for name in block.nodes
            if name not in joined
            and not self._given_up(block, name, now)
            and (block.ends is None or block.ends - now > self.settings.closing_margin)
        ]

    def offers(self, joined: Collection[str], now: float) -> list[tuple[Window, list[str]]]:
        """List the windows in which a block is worthwhile, each with its nodes that are neither held nor shunned."""
        if self._doubtful:
            return []
        ours = {name for block in self._blocks.values() for name in block.nodes}.union(joined)
        shunned = {name for name, shunned in self._shunned.items() if now < shunned.until} | self._avoided(now)
        return [
            (window, [name for name in window.nodes if name not in ours and name not in shunned])
            for window in self.windows
            if why_not(window, self.settings, self.terms_on(window.node_kind), now) is None
        ]

    def request(
        self, chosen: frozenset[str], more: int, offers: Iterable[tuple[Window, list[str]]], now: float
    ) -> ev.Actions:
        """Request the chosen nodes and `more` others, longest windows first.

        One block per window, split if large. Where blocks are preempted, split into parts of all nodes that are
        requested, because the batch system takes all nodes of a block even if a job needs one of them.
        """
        actions: ev.Actions = []
        left = self.may_be_requested
        wanted_in: list[tuple[Window, list[str]]] = []
        for window, names in sorted(offers, key=lambda item: (-item[0].remaining(now), item[0].nodes)):
            others = [name for name in names if name not in chosen][:more]
            more -= len(others)
            wanted_in.append((window, [name for name in names if name in chosen] + others))
        part = -(-sum(len(names) for _, names in wanted_in) // max(1, min(_PARTS, left))) or 1
        for window, wanted in wanted_in:
            terms = self.terms_on(window.node_kind)
            shortest = min(other.remaining(now) for other in self.windows if other.node_kind == window.node_kind)
            size = block_size(self.settings, terms) or len(wanted) or 1
            if terms.may_wait:
                size = min(size, part)
            for first in range(0, len(wanted), size):
                nodes = tuple(wanted[first : first + size])
                if not left or len(nodes) < terms.min_nodes:
                    break
                seconds = block_walltime(window, self.settings, terms, now)
                name = str(self._count)
                self._count += 1
                # Where other users' jobs are hidden, it could start on a node that is planned for one of them.
                pinned = terms.hides_waiting or shortest < terms.start_delay + seconds
                self._blocks[name] = _Block(nodes, now + seconds, now, pinned, window.node_kind)
                actions.append(ev.RequestBlock(name, nodes, seconds, window, pinned, self._avoided(now)))
                left -= 1
        return actions

    def waiting(self, node_kind: str) -> list[str]:
        """List the blocks that wait in the queue for any node of a kind."""
        blocks = self._blocks.items()
        return [name for name, block in blocks if block.node_kind == node_kind and not block.nodes]

    def left_to_waiting(self, chosen: frozenset[str], offers: Iterable[tuple[Window, list[str]]]) -> dict[str, str]:
        """Return which of the chosen nodes blocks that wait in the queue will have, and their kinds.

        The batch system starts these where nothing else is planned.
        """
        kinds = {name: window.node_kind for window, names in offers if window.closes is None for name in names}
        free = Counter({kind: len(self.waiting(kind)) for kind in set(kinds.values())})
        found: dict[str, str] = {}
        for name in sorted(chosen & kinds.keys()):
            if free[kinds[name]]:
                free[kinds[name]] -= 1
                found[name] = kinds[name]
        return found

    def may_be_queued(self, node_kind: str, count: int, now: float) -> int:
        """Return how many more blocks may be queued for any node of a kind, so that `count` wait or as many as may."""
        if node_kind in self._refused and now < self._refused[node_kind].until:
            return 0
        count = min(count, self.settings.standby_blocks) - len(self.waiting(node_kind))
        return max(0, min(count, self.may_be_requested))

    def await_nodes(self, node_kind: str, count: int, now: float) -> ev.Actions:
        """Let `count` blocks, or as many as may, wait in the queue for any node of a kind.

        Others that wait are withdrawn after `idle_timeout`, and all at once while nodes are given back: see `make_way`.
        """
        if now < self._makes_way_until:
            withdrawn = self.waiting(node_kind)
            for name in withdrawn:
                del self._blocks[name]
            return [ev.ReleaseBlock(name) for name in withdrawn]
        avoided, terms = self._avoided(now), self.terms_on(node_kind)
        actions: ev.Actions = []
        for name in self.waiting(node_kind):
            if self._blocks[name].avoided and not self._blocks[name].avoided & avoided:  # it would miss these nodes
                del self._blocks[name]
                actions.append(ev.ReleaseBlock(name))
        waiting = self.waiting(node_kind)
        for _ in range(self.may_be_queued(node_kind, count, now)):
            seconds = block_walltime(None, self.settings, terms, now)
            name = str(self._count)
            self._count += 1
            self._blocks[name] = _Block((), None, now, pinned=False, node_kind=node_kind, avoided=avoided)
            actions.append(ev.QueueBlock(name, seconds, node_kind, avoided))
        most = min(count, self.settings.standby_blocks)
        for name in waiting[:most]:
            self._blocks[name].unwanted_since = None
        for name in waiting[most:]:
            if self._is_unwanted_for_long(self._blocks[name], now):
                del self._blocks[name]
                actions.append(ev.ReleaseBlock(name))
        return actions

    def withdraw(self, now: float) -> ev.Actions:
        """Withdraw pending blocks that will not start.

        Either other jobs have taken their nodes, or the batch system does not start them although it could. In the
        second case, their nodes are not requested for a while, longer each time, to avoid endless retries. A start is
        known only from a survey, so blocks are judged at the time of the latest one.
        """
        free = {name: window.node_kind for window in self.windows for name in window.nodes}
        left = Counter(free.values())
        actions: ev.Actions = []
        # First those whose own nodes are still free: they would be requested again at once.
        for name, block in sorted(self._blocks.items(), key=lambda item: not free.keys() >= set(item[1].nodes)):
            if block.started or not block.nodes:
                continue
            kind = block.node_kind
            patience = 2 * self.terms_on(kind).start_delay + self.settings.startup
            left[kind] -= len(block.nodes)
            gone = not free.keys() >= set(block.nodes) if block.pinned else left[kind] < 0
            in_vain = self._seen_at - block.requested > patience
            if not (gone or in_vain):
                continue
            left[kind] += len(block.nodes)
            del self._blocks[name]
            actions.append(ev.ReleaseBlock(name))
            for node in block.nodes if in_vain and not gone else ():
                self._shunned[node] = _Pause.after(self._shunned.get(node), patience, now)
        return actions

    def give_up(self, now: float) -> ev.Actions:
        """Release the blocks of which no node joined, or rejoined, in time."""
        hopeless = [
            name
            for name, block in self._blocks.items()
            if block.started and all(self._given_up(block, node, now) for node in block.nodes)
        ]
        for name in hopeless:
            del self._blocks[name]
        return [ev.ReleaseBlock(name) for name in hopeless]

    def keep(self, node_kind: str) -> None:
        """Release no block on nodes of a kind for a while: more of them are needed."""
        for block in self._blocks.values():
            if block.node_kind == node_kind:
                block.unwanted_since = None

    def release(self, node_kind: str, surplus: int, used: frozenset[str], now: float) -> tuple[ev.Actions, list[str]]:
        """Release blocks with unused nodes of a kind, earliest-closing first, after `idle_timeout` without use.

        At most `surplus` nodes are released, and none of those that are used. Return the actions, and the nodes.
        """
        actions: ev.Actions = []
        nodes: list[str] = []
        mine = (item for item in self._blocks.items() if item[1].node_kind == node_kind and item[1].nodes)
        for name, block in sorted(mine, key=lambda item: (item[1].ends or math.inf, item[0])):
            if used & set(block.nodes) or len(block.nodes) > surplus:
                block.unwanted_since = None
                continue
            surplus -= len(block.nodes)
            if self._is_unwanted_for_long(block, now):
                actions.append(ev.ReleaseBlock(name))
                nodes += block.nodes
                del self._blocks[name]
        return actions, nodes

    def _is_unwanted_for_long(self, block: _Block, now: float) -> bool:
        if block.unwanted_since is None:
            block.unwanted_since = now
        return now - block.unwanted_since >= self.settings.idle_timeout

    def _given_up(self, block: _Block, node: str, now: float) -> bool:
        return now - block.missing_since.get(node, math.inf) >= self.settings.join_timeout
