"""Rounds of a move: every element arrives once, no host is over the budget, and large moves keep all hosts busy."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.extensions.sharding.rounds import Layout, rounds_of

LAYOUTS = st.lists(
    st.builds(
        Layout,
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.bfloat16]),
    ).flatmap(
        lambda one: st.integers(0, len(one.shape) - 1).map(lambda dim: Layout(one.shape, one.dtype, dim)),
    ),
    max_size=6,
)
HOSTS = 7


@given(LAYOUTS, st.data(), st.integers(1, 200))
def test_every_column_arrives_once_and_no_host_is_over_the_budget(layouts, data, budget) -> None:
    old = data.draw(st.lists(st.integers(0, HOSTS - 1), min_size=1, max_size=6))
    new = data.draw(st.lists(st.integers(0, HOSTS - 1), min_size=1, max_size=6))
    plans = [list(rounds_of(layouts, old, new, host, budget)) for host in range(HOSTS)]
    assert len({len(plan) for plan in plans}) == 1, "the rounds are the same on all hosts"
    arrived = [defaultdict(list) for _ in layouts]
    for number in range(len(plans[0])):
        # What a host sends is what the other expects.
        sent = {(host, piece) for host in range(HOSTS) for piece in plans[host][number] if old[piece.source] == host}
        received = {
            (host, piece) for host in range(HOSTS) for piece in plans[host][number] if new[piece.target] == host
        }
        assert {piece for _, piece in sent} == {piece for _, piece in received}
        for host in range(HOSTS):
            into = [piece for holder, piece in received if holder == host]
            out = [piece for holder, piece in sent if holder == host and new[piece.target] != host]
            for pieces in (into, out):
                column = max((layouts[piece.tensor].column_bytes for piece in pieces), default=0)
                assert sum(piece.size for piece in pieces) <= budget + column * len(pieces)
            for piece in into:
                arrived[piece.tensor][piece.target].append(piece)
    for tensor, layout in enumerate(layouts):
        for target in range(len(new)):
            begin, end = (index * layout.columns_per_index for index in layout.span(target, len(new)))
            pieces = sorted(arrived[tensor][target], key=lambda piece: piece.start)
            assert all(piece.size == (piece.stop - piece.start) * layout.column_bytes for piece in pieces)
            if layout.column_bytes and begin < end:
                edges = [(piece.start, piece.stop) for piece in pieces]
                assert [edges[0][0], *(stop for _, stop in edges)] == [*(start for start, _ in edges), end]
                assert edges[0][0] == begin
                for piece in pieces:  # the source has these columns
                    first, last = (index * layout.columns_per_index for index in layout.span(piece.source, len(old)))
                    assert first <= piece.start < piece.stop <= last


def test_a_large_tensor_moves_on_all_hosts_in_each_round() -> None:
    """Its rounds are as many as the busiest host needs: the last one, which has to send all that it has."""
    layout, budget = Layout((12_000, 1000), torch.float32), 1 << 20
    plans = [list(rounds_of([layout], range(8), range(12), host, budget)) for host in range(12)]
    assert {len(plan) for plan in plans} == {math.ceil(1500 * 4000 / budget)}
    assert all(all(plan) for plan in plans)


@pytest.mark.parametrize(("old", "new"), [(64, 65), (128, 96)])
def test_a_model_of_70_billion_parameters_is_planned_in_a_moment(old: int, new: int) -> None:
    """Each host computes only its own slices: at most a second, typically 0.1 s."""
    shapes = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *3 * [(28672, 8192)], (8192,), (8192,)]
    layouts = [Layout(shape, torch.float32) for shape in shapes * 80 for _ in range(3)]
    began = time.process_time()
    rounds = list(rounds_of(layouts, range(old), range(new), 5, 16 << 20))
    assert time.process_time() - began < 1
    moved = sum(piece.size for pieces in rounds for piece in pieces)
    assert moved > 4e9
