"""Parts and unions of logs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.sites.logs import LogPart, SiteLog, UnionLog, same_length
from tests.extensions.replay.small_logs import SmallLog, random_logs


def _held(log) -> float:
    return log.mean_idle() * (log.end - log.start)


def _consistent(log) -> bool:
    """Return whether nodes open and close in turn, at increasing times within the log, as their holes say."""
    idle: dict[str, float] = {}
    last = -1.0
    for change in log.changes():
        assert log.start <= change.time < log.end
        assert change.time > last
        last = change.time
        for node in change.closed:
            assert idle.pop(node) == change.time
        for hole in change.opened:
            assert hole.node not in idle
            assert hole.start == change.time
            idle[hole.node] = hole.end
    return set(idle.values()) <= {log.end}


@settings(max_examples=30)
@given(log=random_logs(), edges=st.tuples(st.integers(0, 59), st.integers(1, 60)))
def test_a_part_contains_the_holes_within_it(log, edges):
    first, length = edges[0], min(edges[1], 60 - edges[0])
    part = LogPart(log, first, length)
    expected = sum(max(0.0, min(hole.end, first + length) - max(hole.start, first)) for hole in log.holes)
    assert _consistent(part)
    assert _held(part) == pytest.approx(expected)


@settings(max_examples=30)
@given(first=random_logs(), second=random_logs())
def test_a_union_has_the_idle_nodes_of_all(first, second):
    union = UnionLog([SiteLog("a", first), SiteLog("b", second)])
    assert _consistent(union)
    assert union.mean_idle() == pytest.approx(first.mean_idle() + second.mean_idle())
    assert union.nodes == first.nodes + second.nodes


def test_logs_begin_together_whatever_their_clocks_are():
    late = SmallLog([("x", 1000.0, 1060.0)])
    early = SmallLog([("x", 0.0, 30.0), ("x", 40.0, 90.0)])
    cut = same_length([SiteLog("a", late), SiteLog("b", early)])
    assert [site.log.end - site.log.start for site in cut] == [60.0, 60.0]
    union = UnionLog(cut)
    assert [(change.time, len(change.opened), change.closed) for change in union.changes()] == [
        (0.0, 2, ()),
        (30.0, 0, ("b:x",)),
        (40.0, 1, ()),
    ]


@pytest.mark.parametrize(("after", "seconds"), [(60.0, None), (0.0, 61.0), (-1.0, 10.0), (10.0, 0.0)])
def test_a_part_outside_the_log_is_refused(after, seconds):
    with pytest.raises(InvalidSettings, match="does not contain"):
        LogPart(SmallLog([("x", 0.0, 60.0)]), after, seconds)
