"""Job logs: the holes between jobs, and forecasts of their closings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.holes import Hole
from freetrain_parsl.extensions.replay.logs.job_log import JobLog, RecordedJob
from freetrain_parsl.extensions.replay.logs.logs import open_log


def job(submit, start, end, nodes, walltime=None, hosts=None):
    return RecordedJob("log, job 1", submit, start, end, nodes, walltime, hosts)


def holes(log):
    return [hole for change in log.changes() for hole in change.opened]


@pytest.fixture
def write_swf(tmp_path):
    """Write a log of (submit, wait, run, nodes, walltime)."""

    def write_swf(*rows, head="; MaxNodes: 4", name="log.swf"):
        lines = [
            f"{number} {submit} {wait} {run} {nodes} -1 -1 {nodes} {walltime} -1 1" + " -1" * 7
            for number, (submit, wait, run, nodes, walltime) in enumerate(rows, start=1)
        ]
        path = tmp_path / name
        path.write_text("\n".join([head, *lines, ""]))
        return path

    return write_swf


def test_jobs_get_the_first_free_nodes_and_leave_the_others_idle(write_swf):
    log = open_log(write_swf((0, 0, 10, 2, 20), (0, 5, 10, 1, 20), (0, 12, 8, 3, 20)))
    assert (log.nodes, log.start, log.end, log.has_forecasts) == (4, 0, 20, True)
    assert holes(log) == [
        Hole("node2", 0, 5),
        Hole("node3", 0, 12),
        Hole("node0", 10, 12),
        Hole("node1", 10, 12),
        Hole("node2", 15, 20),
    ]


@pytest.mark.parametrize("forecasts", [False, True])
def test_a_job_of_zero_length_takes_its_nodes_for_an_instant(write_swf, forecasts):
    """A training job on them is stopped nevertheless: the hole ends, and another one begins."""
    log = open_log(write_swf((0, 0, 10, 4, 20), (0, 15, 0, 2, 20), (0, 15, 0, 2, 20), (0, 20, 8, 4, 20)))
    assert (log.zero_length, log.clipped) == (2, 0)
    (at_15,) = (change for change in log.changes(forecasts=forecasts) if change.time == 15)
    assert sorted(at_15.closed) == ["node0", "node1"]
    assert {(hole.node, hole.end) for hole in at_15.opened} == {("node0", 20), ("node1", 20)}


def test_a_job_of_zero_length_that_finds_too_few_nodes_says_nothing_of_the_machine(write_swf):
    log = open_log(write_swf((0, 0, 10, 3, 20), (0, 5, 0, 2, 20), (0, 12, 8, 4, 20)))
    assert (log.zero_length, log.clipped) == (1, 0)


def test_a_partition_has_a_size_of_its_own(write_swf):
    path = write_swf((0, 0, 10, 2, 20), (0, 12, 8, 3, 20))
    with pytest.raises(InvalidInput, match="give the number of nodes of partition '1'"):
        open_log(path, partition="1")


@pytest.mark.parametrize("options", [{"processors_per_node": 4}, {"partition": "1"}])
def test_logs_that_list_nodes_take_no_options_of_processors(tmp_path, options):
    (tmp_path / "idle.csv").write_text("a,0,10\n")
    with pytest.raises(InvalidSettings, match="for job logs in Standard Workload Format"):
        open_log(tmp_path / "idle.csv", **options)


def test_a_node_has_a_processor(write_swf):
    with pytest.raises(InvalidSettings, match="at least one processor"):
        open_log(write_swf((0, 0, 10, 2, 20)), processors_per_node=0)


def test_a_job_log_is_known_by_its_first_line_too(write_swf):
    assert open_log(write_swf((0, 0, 10, 2, 20), name="log.txt")).nodes == 4


def test_a_log_that_does_not_tell_the_size_is_refused_unless_it_is_given(write_swf):
    path = write_swf((0, 0, 10, 2, 20), head="; Version: 2")
    with pytest.raises(InvalidInput, match="neither MaxNodes nor MaxProcs"):
        open_log(path)
    assert open_log(path, nodes=3).nodes == 3


def test_a_malformed_line_is_refused_or_counted(write_swf):
    path = write_swf((0, 0, 10, 2, 20), (0, 0, "ten", 2, 20))
    with pytest.raises(InvalidInput, match=r"log\.swf, line 3: expected 18 numbers"):
        open_log(path)
    assert open_log(path, lenient=True).skipped == 1


def test_a_log_without_jobs_is_refused(write_swf):
    with pytest.raises(InvalidInput, match="contains no job that ran"):
        open_log(write_swf())
    with pytest.raises(InvalidInput, match="covers no time"):
        JobLog("log", [job(0, 5, math.inf, 1)], 4)


def test_more_nodes_in_use_than_there_are_is_refused_or_clipped(write_swf):
    path = write_swf((0, 0, 10, 3, 20), (0, 5, 10, 2, 20))
    with pytest.raises(InvalidInput, match=r"log\.swf, job 2: it started on 2 nodes when only 1 of 4 were free"):
        open_log(path)
    log = open_log(path, lenient=True)
    assert (log.clipped, log.skipped) == (1, 0)
    assert holes(log) == [Hole("node3", 0, 5), *(Hole(f"node{n}", 10, 15) for n in range(3))]


def test_a_rounding_of_times_in_a_long_log_is_clipped_without_asking():
    jobs = [job(10 * n, 10 * n, 10 * n + 10, 4) for n in range(100)]
    assert JobLog("log", [*jobs, job(0, 995, 1010, 1)], 4).clipped == 1
    with pytest.raises(InvalidInput, match="started on 5 nodes"):
        JobLog("log", [*jobs, job(0, 1010, 1020, 5)], 4)


def test_a_long_log_is_cut_to_the_time_at_which_all_jobs_are_known():
    """Jobs before the first end may be missing at the beginning, and jobs after the last start at the end."""
    log = JobLog("log", [job(0, 0, 10, 1), job(0, 0, 50, 1), job(0, 95, 105, 1), job(0, 90, 300, 1)], 2)
    assert (log.start, log.end) == (0, 300)
    log = JobLog("log", [job(0, 0, 10, 1), job(0, 0, 50, 1), job(0, 95, 105, 1), job(0, 90, 110, 1)], 2)
    assert (log.start, log.end) == (10, 95)
    assert holes(log) == [Hole("node0", 10, 90), Hole("node1", 50, 95)]


def test_named_nodes_are_held_as_recorded_and_may_be_shared():
    log = JobLog("log", [job(0, 0, 10, 2, None, "b[1-2]"), job(0, 5, 20, 1, None, "b2"), job(0, 0, 20, 1)], 4)
    assert [name for _, names in log.placements() for name in names] == ["b1", "b2", "node0", "b2"]
    assert holes(log) == [Hole("node1", 0, 20), Hole("b1", 10, 20)]
    with pytest.raises(InvalidInput, match="ran on 2 distinct nodes, more than the machine's 1"):
        JobLog("log", [job(0, 0, 10, 2, None, "b[1-2]")], 1)


def test_forecasts_are_what_the_queue_told():
    """A hole closes when the head of the queue is planned to start; other holes do not close."""
    log = JobLog(
        "log",
        [
            job(0, 0, 30, 2, 40),  # ends before its walltime
            job(10, 30, 60, 3, 20),  # waits for it, planned at 40
            job(20, None, 25, 4, 20),  # cancelled: planned at 60
        ],
        4,
    )
    assert [(change.time, change.expected) for change in log.changes(forecasts=True)] == [
        (0, {"node2": None, "node3": None}),
        (10, {"node2": 40, "node3": None}),
        (20, {"node2": 40, "node3": 60}),
        (25, {"node2": 40, "node3": None}),
        (30, {"node3": None}),
    ]


def test_a_node_that_is_due_has_an_unknown_closing():
    """A job that waits although it fits, or for one that exceeded its walltime, may start at any moment."""
    log = JobLog("log", [job(0, 0, 30, 2, 10), job(0, 20, 40, 1, 5), job(5, 30, 60, 3, 5)], 4)
    expected = {change.time: change.expected for change in log.changes(forecasts=True)}
    assert expected == {
        0: {"node2": None, "node3": None},  # the second fits
        5: {"node2": None, "node3": None},  # the third is planned behind the first two
        20: {"node3": None},  # the first is overdue, so the third is due
        30: {},
        40: {"node2": None},
    }
    due = {change.time: change.due for change in log.changes(forecasts=True)}
    assert due == {0: {"node2"}, 5: {"node2"}, 20: {"node3"}, 30: frozenset(), 40: frozenset()}


def test_a_job_without_a_walltime_is_taken_to_ask_for_the_longest_seen():
    log = JobLog("log", [job(0, 0, 80, 1, 50), job(0, 10, 100, 2, None), job(20, 100, 120, 4, 5)], 4)
    expected = {change.time: change.expected for change in log.changes(forecasts=True)}
    assert expected[20] == {"node3": 60}  # when the second ends, 10 + 50
    log = JobLog("log", [job(0, 0, 80, 3, None), job(20, 80, 120, 2, 5)], 4)
    assert next(iter(log.changes(forecasts=True))).expected == {"node3": None}


def test_without_walltimes_there_are_no_forecasts():
    log = JobLog("log", [job(0, 0, 80, 1)], 4)
    assert not log.has_forecasts
    with pytest.raises(InvalidSettings, match="requested walltimes"):
        log.changes(forecasts=True)


jobs_of_a_machine = st.lists(
    st.builds(
        lambda submit, wait, run, nodes, slack, cancelled: (
            job(submit, None, submit + wait, nodes, max(1, run + slack))
            if cancelled
            else job(submit, submit + wait, submit + wait + run, nodes, max(1, run + slack))
        ),
        st.integers(0, 40),
        st.integers(0, 10),
        st.integers(1, 15),
        st.integers(1, 5),
        st.integers(-5, 10),
        st.booleans(),
    ),
    min_size=1,
    max_size=25,
).filter(lambda jobs: any(job.start is not None for job in jobs))


@given(jobs_of_a_machine)
def test_a_node_is_idle_when_no_job_holds_it(jobs):
    """Brute force over the seconds; with forecasts the holes are the same, and each idle node has a forecast."""
    log = JobLog("log", jobs, 5, lenient=True)
    held = {name: set() for name in ("node0", "node1", "node2", "node3", "node4")}
    for item, names in log.placements():
        assert len(names) <= item.nodes
        for name in names:
            seconds = set(range(int(item.began), int(item.end)))
            assert not held[name] & seconds
            held[name] |= seconds
    idle = {name: set() for name in held}
    for hole in holes(log):
        idle[hole.node] |= set(range(int(hole.start), int(hole.end)))
    span = set(range(int(log.start), int(log.end)))
    assert idle == {name: span - held[name] for name in held}

    with_forecasts = list(log.changes(forecasts=True))
    assert [(c.time, c.opened, c.closed) for c in with_forecasts if c.opened or c.closed] == [
        (c.time, c.opened, c.closed) for c in log.changes()
    ]
    for change in with_forecasts:
        assert change.expected is not None
        assert set(change.expected) == {name for name in idle if change.time in idle[name]}
        assert all(change.expected[name] is None for name in change.due)
        assert all(time is None or time > change.time for time in change.expected.values())
