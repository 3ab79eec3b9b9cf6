"""Sets of nodes as integers with one bit per node: and, or, and count of thousands of nodes in a microsecond."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class NodeNames:
    """Converts between node names and bits; bit i is the i-th name.

    Given the number of nodes, it names them ``n00``, ``n01``, …
    """

    def __init__(self, nodes: int | Sequence[str]) -> None:
        if isinstance(nodes, int):
            digits = max(2, len(str(nodes - 1)))
            nodes = [f"n{index:0{digits}d}" for index in range(nodes)]
        self.names = tuple(nodes)
        if not self.names or len(set(self.names)) != len(self.names):
            raise InvalidSettings(f"a cluster needs one or more nodes with distinct names, got {nodes!r}")
        self.all = (1 << len(self.names)) - 1
        self._index = {name: index for index, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def to_names(self, nodes: int) -> tuple[str, ...]:
        """Return the names of the nodes in a set, in the cluster's order."""
        names = []
        while nodes:
            low = nodes & -nodes
            names.append(self.names[low.bit_length() - 1])
            nodes ^= low
        return tuple(names)

    def to_set(self, names: Iterable[str]) -> int:
        """Return the set of the nodes with these names.

        Raises
        ------
        InvalidSettings
            A node does not exist.
        """
        nodes = 0
        for name in names:
            if name not in self._index:
                raise InvalidSettings(f"there is no node {name!r}; the nodes are {self.names[0]}…{self.names[-1]}")
            nodes |= 1 << self._index[name]
        return nodes


def take(nodes: int, count: int) -> int:
    """Take the first `count` nodes of a set; all of them if there are fewer."""
    if nodes.bit_count() <= count:
        return nodes
    if count <= 0:
        return 0
    low, high = (
        count,
        nodes.bit_length(),
    )  # the shortest prefix with `count` bits has a length in between
    while low < high:
        middle = (low + high) // 2
        if (nodes & ((1 << middle) - 1)).bit_count() >= count:
            high = middle
        else:
            low = middle + 1
    return nodes & ((1 << low) - 1)


def take_from(count: int, *preferences: int) -> int:
    """Take `count` nodes from the sets in order, exhausting each before the next; fewer if all are exhausted."""
    taken = 0
    for nodes in preferences:
        missing = count - taken.bit_count()
        if missing == 0:
            break
        taken |= take(nodes & ~taken, missing)
    return taken
