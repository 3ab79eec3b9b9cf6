"""The ranks in a changed group of a sharded training job: those with which the least of the state has to move."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["least_moved"]


def least_moved(before: Sequence[str], after: Sequence[str]) -> tuple[str, ...]:
    """Return the members of the next group in the order of their ranks.

    A member of rank *i* of *n* has the part of the state from *i*/*n* to (*i* + 1)/*n*. Those that stay get the ranks
    whose parts overlap most with their own, the largest overlaps first; newcomers get the others. The first rank is
    never a newcomer's.

    Parameters
    ----------
    before
        The members of the present group, by rank.
    after
        Those of the next group, in any order.
    """
    old, new = len(before), len(after)
    stay, newcomers = set(before) & set(after), iter([member for member in after if member not in set(before)])
    pairs = [(rank, owner) for rank in range(new) for owner, member in enumerate(before) if member in stay]
    # The first rank before all others, then by overlap.
    pairs.sort(key=lambda pair: (pair[0] > 0, -_overlap(pair[1], old, pair[0], new), pair))
    ranks: dict[int, str] = {}
    for rank, owner in pairs:
        if rank not in ranks and before[owner] in stay:
            ranks[rank] = before[owner]
            stay.remove(before[owner])
    return tuple(ranks[rank] if rank in ranks else next(newcomers) for rank in range(new))


def _overlap(one: int, ones: int, other: int, others: int) -> int:
    """Return the overlap of two parts, in units of 1 / (ones · others)."""
    return max(0, min((one + 1) * others, (other + 1) * ones) - max(one * others, other * ones))
