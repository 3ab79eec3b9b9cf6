"""The neighbours that keep the copies of a sharded state."""

from __future__ import annotations

from itertools import combinations

import pytest

from freetrain_parsl.extensions.sharding.neighbours import neighbours


@pytest.mark.parametrize(
    ("nodes", "blocks"),
    [("ab", "xx"), ("aabb", "xxxx"), ("abc", "xxy"), ("abcd", "xxyy"), ("aabbccdd", "xxxxyyyy"), ("abacbc", "xxxxxx")],
)
def test_each_copy_is_on_another_node_and_in_another_block_where_there_is_one(nodes: str, blocks: str) -> None:
    targets = neighbours(nodes, blocks)
    assert targets is not None
    assert sorted(targets) == list(range(len(nodes)))
    assert all(nodes[rank] != nodes[target] for rank, target in enumerate(targets))
    if max(map(blocks.count, blocks)) * 2 <= len(blocks):
        assert all(blocks[rank] != blocks[target] for rank, target in enumerate(targets))


@pytest.mark.parametrize("nodes", ["a", "aa", "aab", "aaabb"])
def test_there_are_no_copies_where_a_node_has_more_than_half_of_the_processes(nodes: str) -> None:
    assert neighbours(nodes, "x" * len(nodes)) is None


def test_the_loss_of_any_node_leaves_a_copy_of_each_part() -> None:
    nodes = "aabbccdd"
    targets = neighbours(nodes, "xxxxxxxx")
    assert targets is not None
    keepers = [{nodes[rank], nodes[target]} for rank, target in enumerate(targets)]
    assert all(any(kept - {lost} for kept in [keeper]) for lost in nodes for keeper in keepers)
    assert any(keeper <= set(pair) for pair in combinations("abcd", 2) for keeper in keepers), "two may be too many"
