"""Idle logs, and their conversion to a stream of changes."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.holes import Change, Hole, HoleTable
from freetrain_parsl.extensions.replay.logs.logs import open_log


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="idle.csv"):
        path = tmp_path / name
        data = ("\n".join(lines) + "\n").encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


@pytest.mark.parametrize("name", ["idle.csv", "idle.csv.gz", "unnamed.txt"])
def test_what_happens_at_one_instant_is_one_change(write, name):
    """Comments and header are skipped, changes of an instant are combined, and the log's end is not a change."""
    log = open_log(write("# a log", "node,start,end", "b,0,10", "", "a, 5, 10.5", "c,10,20", name=name))
    assert (log.name, log.nodes, log.start, log.end, log.skipped) == (name, 3, 0, 20, 0)
    assert list(log.changes()) == [
        Change(0, (Hole("b", 0, 10),), ()),
        Change(5, (Hole("a", 5, 10.5),), ()),
        Change(10, (Hole("c", 10, 20),), ("b",)),
        Change(10.5, (), ("a",)),
    ]
    assert log.mean_idle() == pytest.approx(25.5 / 20)


def test_intervals_of_a_node_that_touch_are_one_hole(write):
    log = open_log(write("a,10,20", "a,0,10", "b,10,30"))
    assert list(log.changes()) == [
        Change(0, (Hole("a", 0, 20),), ()),
        Change(10, (Hole("b", 10, 30),), ()),
        Change(20, (), ("a",)),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a,1", "expected 'node,start,end'"),
        ("a,1,2,3", "expected 'node,start,end'"),
        (",1,2", "expected 'node,start,end'"),
        ("a,one,2", "numbers of seconds"),
        ("a,1,nan", "numbers of seconds"),
        ("a,5,5", "must end after it starts, got 5 to 5"),
        ("a,9,5", "must end after it starts, got 9 to 5"),
        ("b,5,15", "node 'b' is already idle by line 2"),
    ],
)
def test_a_bad_line_is_refused_by_number_or_skipped_and_counted(write, line, problem):
    path = write("node,start,end", "b,0,10", line, "c,0,20")
    with pytest.raises(InvalidInput, match=rf"idle\.csv:3: .*{problem}"):
        open_log(path)
    log = open_log(path, lenient=True)
    assert log.skipped == 1
    assert [hole.node for change in log.changes() for hole in change.opened] == ["b", "c"]


@pytest.mark.parametrize("lines", [[], ["# nothing"], ["node,start,end"]])
def test_an_empty_log_is_refused(write, lines):
    with pytest.raises(InvalidInput, match=r"idle\.csv: no idle intervals"):
        open_log(write(*lines))


def test_a_log_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        open_log(tmp_path / "idle.csv")
    (tmp_path / "idle.csv.gz").write_bytes(b"not packed")
    with pytest.raises(InvalidInput, match="cannot be read"):
        open_log(tmp_path / "idle.csv.gz")


def test_a_text_of_no_known_kind_is_refused(write):
    with pytest.raises(InvalidInput, match="unknown format"):
        open_log(write("Dear machine,", name="letter.txt"))


def test_the_machine_may_be_larger_than_what_was_idle_but_not_smaller(write):
    path = write("a,0,1", "b,0,1")
    assert open_log(path, nodes=7).nodes == 7
    with pytest.raises(InvalidSettings, match="2 distinct nodes, more than the 1 given"):
        open_log(path, nodes=1)
    with pytest.raises(InvalidSettings, match="at least one node"):
        open_log(path, nodes=0)


def test_an_idle_log_knows_no_forecasts(write):
    log = open_log(write("a,0,1"))
    assert not log.has_forecasts
    with pytest.raises(InvalidSettings, match="closing times cannot be estimated"):
        log.changes(forecasts=True)


def test_times_that_look_like_outages_are_left_out(write):
    """The time from 100 to 200 with the whole machine idle is removed; a short time is not."""
    path = write("a,0,250", "b,20,30", "b,100,200")
    log = open_log(path, mask_idle_above=0.9, mask_longer_than=50)
    assert [hole for change in log.changes() for hole in change.opened] == [
        Hole("a", 0, 100),
        Hole("b", 20, 30),
        Hole("a", 100, 150),
    ]
    assert (log.start, log.end) == (0, 150)
    with pytest.raises(InvalidInput, match="the whole log looks like an outage"):
        open_log(path, mask_idle_above=0.1, mask_longer_than=50)
    with pytest.raises(InvalidSettings, match=r"must be in \(0, 1\]"):
        open_log(path, mask_idle_above=90)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 9)).map(lambda h: (h[0], h[1], h[1] + h[2])),
        min_size=1,
        max_size=25,
    )
)
def test_changes_keep_the_idle_set(holes):
    """Replaying the changes gives the nodes with open holes at every instant."""
    free: dict[int, int] = {}
    kept = []
    for node, start, end in sorted(holes, key=lambda hole: hole[1]):
        if start >= free.get(node, -1):
            free[node] = end
            kept.append((node, start, end))
    table = HoleTable.sorted("abcde", *zip(*kept, strict=True))
    idle: set[str] = set()
    changes = list(table.changes())
    times = [change.time for change in changes]
    assert times == sorted(set(times))
    for change in changes:
        idle -= set(change.closed)
        opened = {hole.node for hole in change.opened}
        assert not idle & opened
        idle |= opened
        assert idle == {"abcde"[node] for node, start, end in kept if start <= change.time < end}
    assert not idle
    assert [change.time for change in table.changes(before=12)] == [time for time in times if time < 12]


@given(st.sets(st.integers(0, 40), max_size=8).map(sorted))
def test_spans_are_cut_out_of_a_table(edges):
    table = HoleTable.sorted("ab", [0, 1, 1], [0, 5, 30], [40, 25, 38])
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    cut = table.without(spans)
    left = [
        {
            second
            for n, s, e in zip(cut.nodes, cut.starts, cut.ends, strict=True)
            if n == node
            for second in np.arange(s, e)
        }
        for node in (0, 1)
    ]
    gone = {second for start, end in spans for second in range(start, end)}
    assert left == [set(range(40)) - gone, {*range(5, 25), *range(30, 38)} - gone]


def test_a_table_is_cut_to_a_span():
    table = HoleTable.sorted("ab", [0, 1, 0], [0, 5, 20], [10, 30, 25]).within(8, 21)
    assert table.nodes.tolist() == [0, 1, 0]
    assert np.array_equal(table.starts, [8, 8, 20])
    assert np.array_equal(table.ends, [10, 21, 21])
