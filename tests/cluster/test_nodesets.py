"""Sets of nodes as bits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.cluster.nodesets import NodeNames, take, take_from


@given(st.sets(st.integers(0, 200)), st.integers(-1, 210))
def test_take_gives_the_first_ones(bits, count):
    nodes = sum(1 << bit for bit in bits)
    assert take(nodes, count) == sum(1 << bit for bit in sorted(bits)[: max(0, count)])


@given(st.lists(st.sets(st.integers(0, 30)), max_size=4), st.integers(0, 40))
def test_take_from_goes_through_the_sets_in_order(preferences, count):
    expected: list[int] = []
    for bits in preferences:
        expected += [bit for bit in sorted(bits) if bit not in expected]
    taken = take_from(count, *(sum(1 << bit for bit in bits) for bits in preferences))
    assert taken == sum(1 << bit for bit in expected[:count])


@given(st.sets(st.integers(0, 119)))
def test_names_and_bits_are_inverse(bits):
    names = NodeNames(120)
    chosen = tuple(names.names[bit] for bit in sorted(bits))
    assert names.to_names(names.to_set(chosen)) == chosen


def test_nodes_are_numbered_with_as_many_digits_as_the_last_one_needs():
    assert NodeNames(8).names[7] == "n07"
    assert NodeNames(101).names[7] == "n007"
