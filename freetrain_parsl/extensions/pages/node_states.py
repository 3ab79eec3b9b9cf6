"""What each node was over time: idle, held by us or by others; and what the windows were used for."""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from freetrain_parsl.extensions.pages.changes import Rows

__all__ = ["NodeState", "NodeStates", "WindowHistory", "short_hosts"]

_LONGEST_HOSTS = 120


class NodeState(IntEnum):
    """What a node is, as far as the journal shows."""

    UNKNOWN = 0
    IDLE = 1
    """In a window."""
    OTHERS = 2
    """In no window and not ours: it has a job of another user, or is down."""
    OURS = 3
    """Held by one of our blocks."""


def short_hosts(names: Iterable[str], slots_per_node: int = 1) -> str:
    """Return names of nodes, or of slots of nodes that jobs share, as a list with ranges, cut if it is long."""
    text = show_hosts(names, slots_per_node)
    return text if len(text) <= _LONGEST_HOSTS else f"{text[: _LONGEST_HOSTS - 1]}…"


class NodeStates:
    """Folds windows and blocks into spans of time, one state each.

    Parameters
    ----------
    nodes
        Rows with the column ``name``; a node is known by the number of its row.
    spans
        Rows with the columns ``node``, ``state``, ``begin``, ``end`` (``None``: it lasts).
    relative
        Converts seconds since the epoch to the view's seconds.
    """

    def __init__(self, nodes: Rows, spans: Rows, relative: Callable[[float], float]) -> None:
        self._nodes = nodes
        self._spans = spans
        self._relative = relative
        self._numbers: dict[str, int] = {}
        self._open: dict[str, tuple[int, NodeState]] = {}  # node -> row of its present span, and its state
        self._before: dict[str, int] = {}  # node -> row of the span before
        self._idle: set[str] = set()
        self._held: dict[str, str] = {}  # node -> block
        self._vacated: set[str] = set()
        """Nodes of blocks that have ended since the last survey, which showed them as ours."""
        self._surveyed = False

    def number(self, name: str) -> int:
        """Return the number of a node; a new one gets the next."""
        if name not in self._numbers:
            self._numbers[name] = self._nodes.add(name, "")
        return self._numbers[name]

    def is_kind(self, name: str, kind: str) -> None:
        """Note the kind of a node."""
        self._nodes.change(self.number(name), kind=kind)

    def on_survey(self, time: float, idle: Iterable[str] | None) -> None:
        """Take the idle nodes of a survey; ``None``: the same as before."""
        changed = set(self._vacated)
        if idle is not None:
            before, self._idle = self._idle, set(idle)
            for name in sorted(self._idle - self._numbers.keys()):
                self.number(name)
            changed |= before ^ self._idle
        if not self._surveyed:
            self._surveyed = True
            changed |= self._numbers.keys()
        self._vacated.clear()
        for name in changed:
            self._settle(time, name)

    def on_block_started(self, time: float, block: str, nodes: Iterable[str], since: float | None = None) -> None:
        """Note that a block holds nodes; `since` when, if that is known, which may be before it was seen."""
        for name in nodes:
            self.number(name)
            self._held[name] = block
            self._vacated.discard(name)
            self._settle(time, name)
            if since is not None:
                self._extend(self._open[name][0], self._before.get(name), self._relative(since))

    def _extend(self, row: int, before: int | None, begin: float) -> None:
        """Let a span begin earlier; the span before it ends then."""
        present = self._spans.value(row, "begin")
        if before is not None:
            adjoins = self._spans.value(before, "end") == present
            begin = max(begin, self._spans.value(before, "begin" if adjoins else "end"))
            if adjoins and begin < present:
                self._spans.change(before, end=begin)
        if begin < present:
            self._spans.change(row, begin=begin)

    def on_block_ended(self, time: float, block: str) -> None:
        """Note that a block holds no nodes any more."""
        for name in [name for name, holder in self._held.items() if holder == block]:
            del self._held[name]
            self._vacated.add(name)
            self._settle(time, name)

    def end_driver(self, time: float) -> None:
        """Note that nothing more is known."""
        self._held.clear()
        self._idle.clear()
        self._vacated.clear()
        self._surveyed = False
        for name in self._numbers:
            self._enter(name, NodeState.UNKNOWN, time)

    def _settle(self, time: float, name: str) -> None:
        if name in self._held:
            state = NodeState.OURS
        elif name in self._idle:
            state = NodeState.IDLE
        elif self._surveyed and name not in self._vacated:
            state = NodeState.OTHERS
        else:
            state = NodeState.UNKNOWN
        self._enter(name, state, time)

    def _enter(self, name: str, state: NodeState, time: float) -> None:
        row, before = self._open.get(name, (-1, NodeState.UNKNOWN))
        if state is before:
            return
        now = self._relative(time)
        if row >= 0:
            self._spans.change(row, end=now)
            self._before[name] = row
        row = -1 if state is NodeState.UNKNOWN else self._spans.add(self._numbers[name], int(state), now, None)
        self._open[name] = (row, state)


class WindowHistory:
    """Follows windows from survey to survey, and which of our blocks used them.

    A window is the same as one of the survey before that shares at least half of its nodes.

    Parameters
    ----------
    rows
        With the columns ``opens``, ``closes``, ``ended`` (``None``: it lasts), ``nodes`` (their largest number),
        ``names``, ``kind``, ``used`` (number of nodes that we held), ``blocks``.
    relative
        Converts seconds since the epoch to the view's seconds.
    """

    def __init__(self, rows: Rows, relative: Callable[[float], float]) -> None:
        self._rows = rows
        self._relative = relative
        self._open: dict[int, frozenset[str]] = {}  # row -> its nodes
        self._row_of: dict[str, int] = {}  # node -> row of the last window that it was in

    def on_survey(self, time: float, windows: Sequence[Mapping[str, Any]]) -> None:
        """Take the windows of a survey."""
        before, self._open = self._open, {}
        for window in windows:
            nodes = frozenset(window["nodes"])
            row = self._same(nodes, before)
            if row is None:
                row = self._add(window, nodes)
            else:
                del before[row]
                self._rows.change(row, closes=self._closing(window))
            self._open[row] = nodes
            for name in nodes:
                self._row_of[name] = row
        for row in before:
            self._rows.change(row, ended=self._relative(time))

    def on_block_started(self, block: str, nodes: Iterable[str]) -> None:
        """Note that a block holds nodes, of the windows that they are or were in."""
        rows = Counter(self._row_of[name] for name in nodes if name in self._row_of)
        for row, count in rows.items():
            if row not in self._rows:
                continue
            used = self._rows.value(row, "used") + count
            blocks = self._rows.value(row, "blocks")
            self._rows.change(row, used=used, blocks=f"{blocks}, {block}" if blocks else block)
        for name in nodes:
            self._row_of.pop(name, None)

    def end_driver(self, time: float) -> None:
        """Note that nothing more is known."""
        self.on_survey(time, ())
        self._row_of.clear()

    def _same(self, nodes: frozenset[str], before: Mapping[int, frozenset[str]]) -> int | None:
        shared = Counter(self._row_of.get(name, -1) for name in nodes)
        row, count = max(
            ((row, count) for row, count in shared.items() if row in before), key=lambda one: one[1], default=(-1, 0)
        )
        return row if count and 2 * count >= min(len(nodes), len(before[row])) else None

    def _add(self, window: Mapping[str, Any], nodes: frozenset[str]) -> int:
        kind = str(window.get("node_kind", ""))
        opens = self._relative(window["opens"])
        return self._rows.add(opens, self._closing(window), None, len(nodes), short_hosts(nodes), kind, 0, "")

    def _closing(self, window: Mapping[str, Any]) -> float | None:
        closes = window.get("closes")
        return None if closes is None else self._relative(closes)
