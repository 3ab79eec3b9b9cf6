"""Counts the starts of slots that fail, by node and time.

A slot that cannot start says something about its node, not about the run: HTEX gives the next task to the worker that
has just become free, so that one node without file descriptors fails any number of starts within milliseconds. These
are one problem of that node. Only problems of several nodes, or of all there are, over a stretch of time end the run.
"""

from __future__ import annotations

from freetrain_parsl.planning.blocks.rules import format_span

__all__ = ["NodeStarts"]

_FIRST_PAUSE = 10.0  # seconds
_LONGEST_PAUSE = 1800.0  # seconds
_SEVERAL = 3  # nodes; their common cause is not on one of them
_MOST_PROBLEMS = 4  # on a single node: the fourth comes after pauses of 10, 20 and 40 s
_STRETCH = 60.0  # seconds; a file system or a network may be away for less


class NodeStarts:
    """The problems that nodes have in starting slots. Times in seconds, from the same clock."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        """Node -> its problems since it last joined the pool."""
        self._until: dict[str, float] = {}
        self._nodes: set[str] = set()
        """The nodes with problems since any node joined the pool, whose number is `_problems`."""
        self._problems = 0
        self._since = 0.0
        self._last = ("", "")

    def failed(self, node: str, error: str, now: float) -> float | None:
        """Count a failed start on a node.

        Parameters
        ----------
        node
            Its name.
        error
            What happened.
        now
            When.

        Returns
        -------
        float or None
            Seconds for which no slot should be started there, longer each time; ``None``: this is part of a problem
            that is known, the node's pause is not over.
        """
        if now < self._until.get(node, now):
            return None
        times = self._in_a_row[node] = self._in_a_row.get(node, 0) + 1
        pause = min(_FIRST_PAUSE * 2.0 ** min(times - 1, 10), _LONGEST_PAUSE)
        self._until[node] = now + pause
        if not self._problems:
            self._since = now
        self._problems += 1
        self._nodes.add(node)
        self._last = node, error
        return pause

    def joined(self, node: str) -> None:
        """Record that all slots of a node have started: slots can start here."""
        self._in_a_row.pop(node, None)
        self._until.pop(node, None)
        self._nodes.clear()
        self._problems = 0

    def hopeless(self, now: float, nodes_there_are: int | None) -> str | None:
        """Return why no slot will ever start, or ``None`` while one may.

        Parameters
        ----------
        now
            The present.
        nodes_there_are
            Number of nodes on which blocks can ever start; ``None`` if unknown.
        """
        stretch, needed = now - self._since, min(_SEVERAL, nodes_there_are or _SEVERAL)
        if self._problems < _MOST_PROBLEMS or stretch < _STRETCH or len(self._nodes) < needed:
            return None
        node, error = self._last
        return (
            f"no slot could start for {format_span(stretch)}, on {', '.join(sorted(self._nodes))}; the last error, "
            f"on {node}: {error}; mend it there, or exclude these nodes in the site's scheduler options, and run again"
        )
