"""The ranks with which the least of a sharded state moves, against all possible assignments."""

from __future__ import annotations

from itertools import permutations

import pytest

from freetrain_parsl.executor.jobs.training.rank_order import _overlap, least_moved


def kept(before: tuple[str, ...], after: tuple[str, ...]) -> float:
    """Return the part of the state that stays where it is."""
    old, new = len(before), len(after)
    pairs = [(before.index(member), rank) for rank, member in enumerate(after) if member in before]
    return sum(_overlap(owner, old, rank, new) for owner, rank in pairs) / (old * new)


@pytest.mark.parametrize(("old", "new"), [(o, n) for o in range(1, 6) for n in range(1, 7)])
def test_no_other_order_moves_less(old: int, new: int) -> None:
    before = tuple("abcdef"[:old])
    after = (*before[:new], *"uvwxyz"[: max(0, new - old)])
    ranks = least_moved(before, after)
    assert sorted(ranks) == sorted(after)
    assert ranks[0] in before
    assert kept(before, ranks) == pytest.approx(max(kept(before, order) for order in permutations(after)))


def test_the_first_rank_is_that_of_a_member_that_stays() -> None:
    assert least_moved("abc", ("c", "b", "n")) == ("b", "n", "c")
    assert least_moved("ab", ("a", "b", "n")) == ("a", "n", "b")
