"""The output of sacct, and its host lists."""

from __future__ import annotations

import math

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.holes import Hole
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.logs.sacct import SacctLog
from freetrain_parsl.windows.hostlist import expand_hosts, natural_order

HEADER = "JobID|Submit|Start|End|NNodes|Timelimit|State|NodeList"


def at(seconds):
    return f"1970-01-01T{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def row(job="1", submit=0, start=0, end=10, nodes=1, limit="00:30:00", state="COMPLETED", hosts="n1"):
    times = [at(time) if isinstance(time, int) else time for time in (submit, start, end)]
    return "|".join([job, *times, str(nodes), limit, state, hosts])


@pytest.fixture
def write(tmp_path):
    def write(*lines, header=HEADER):
        path = tmp_path / "sacct.txt"
        path.write_text("\n".join([header, *lines, ""]))
        return path

    return write


def read(path, **options):
    return list(SacctLog(path, **options))


def test_a_log_of_sacct_becomes_holes(write):
    log = open_log(
        write(row("1", 0, 0, 10, 2, hosts="n[1-2]"), row("2", 0, 5, 30, 1, hosts="n3"), row("3", 0, 20, 30, 1)), nodes=3
    )
    assert (log.nodes, log.start, log.end, log.has_forecasts) == (3, 0, 30, True)
    assert [hole for change in log.changes() for hole in change.opened] == [
        Hole("n3", 0, 5),
        Hole("n1", 10, 20),
        Hole("n2", 10, 30),
    ]


def test_the_size_of_the_machine_must_be_given(write):
    with pytest.raises(InvalidInput, match="sinfo -h -o %D"):
        open_log(write(row()))


def test_columns_may_come_in_any_order_and_node_names_may_be_missing(write):
    path = write(
        f"COMPLETED|me|5|{at(9)}|3|{at(2)}|{at(1)}|2", header="State|User|JobID|End|NNodes|Start|Submit|Timelimit"
    )
    (job,) = read(path)
    assert (job.submit, job.start, job.end, job.nodes, job.walltime, job.hosts) == (1, 2, 9, 3, 120, None)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("1-12:00:00", 129600),
        ("1-12", 129600),
        ("02:03:04", 7384),
        ("03:04", 184),
        ("90", 5400),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_time_limits_are_read_as_slurm_writes_them(write, limit, seconds):
    assert [job.walltime for job in read(write(row(limit=limit)))] == [seconds]


def test_jobs_that_run_wait_or_were_cancelled_are_told_apart(write):
    jobs = read(
        write(
            row("1", 0, 5, "Unknown", state="RUNNING"),
            row("2", 0, "Unknown", "Unknown", state="PENDING", hosts="None assigned"),
            row("3", 0, "None", 8, state="CANCELLED by 7", hosts="None assigned"),
            row("4_[1-5]", 0, 9, 9, state="CANCELLED by 7", hosts="None assigned"),
        )
    )
    assert [(job.start, job.end) for job in jobs] == [(5, math.inf), (None, math.inf), (None, 8), (None, 9)]


def test_a_job_that_ended_as_it_started_ran_if_it_had_nodes(write):
    """If the column of nodes is missing, unless it was cancelled."""
    with_hosts = [row("1", 0, 9, 9, state="FAILED"), row("2", 0, 9, 9, state="CANCELLED by 7", hosts="None assigned")]
    assert [job.start for job in read(write(*with_hosts))] == [9, None]


def test_a_job_told_again_counts_as_told_last_and_one_requeued_runs_again(write):
    jobs = read(
        write(
            row("1", 0, 5, "Unknown", state="RUNNING"),
            row("1", 0, 5, 20),
            row("1.batch", 0, 5, 20),
            HEADER,
            row("1", 0, 30, 40),
        )
    )
    assert [(job.start, job.end) for job in jobs] == [(5, 20), (30, 40)]


def test_times_may_be_seconds_since_1970(write):
    (job,) = read(write("1|100|200|300|1|10|COMPLETED|n1"))
    assert (job.submit, job.start, job.end) == (100, 200, 300)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1|2|3", "expected 8 fields as in the header, got 3"),
        (row(submit="Unknown"), "no time of submission"),
        (row(start="yesterday"), "expected a time such as"),
        (row(start=20, end=10), "ends .* before it starts"),
        (row(nodes="two"), "NNodes must be an integer"),
        (row(limit="long"), "expected a Timelimit such as"),
        (row(hosts="n[1-"), "not a list of nodes"),
    ],
)
def test_a_bad_line_is_refused_by_number_or_skipped_and_counted(write, line, problem):
    path = write(row("1", 0, 0, 50), line, row("9", 0, 20, 90, hosts="n2"))
    with pytest.raises(InvalidInput, match=rf"sacct\.txt:3: .*{problem}"):
        open_log(path, nodes=2)
    log = open_log(path, nodes=2, lenient=True)
    assert log.skipped == 1
    assert len(list(log.placements())) == 2


def test_a_missing_column_is_named(write):
    with pytest.raises(InvalidInput, match=r"sacct\.txt:1: no column Submit, Timelimit; print them with"):
        open_log(write("1|0|1|2", header="JobID|Start|End|NNodes"), nodes=2)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("nid[001-003,007],login1", ["nid001", "nid002", "nid003", "nid007", "login1"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a[8-11]-ib,b", ["a8-ib", "a9-ib", "a10-ib", "a11-ib", "b"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists_are_expanded(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a[", "a[1-", "a[2-1]", "a[x]", "a]", "a[]"])
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(ValueError, match="not a list of nodes"):
        expand_hosts(text)


def test_a_host_list_of_more_nodes_than_any_machine_has_is_refused():
    """It is rejected before it is expanded."""
    with pytest.raises(ValueError, match="is a list of more than"):
        expand_hosts("a[1-99999999]")


def test_names_sort_by_their_numbers():
    assert sorted(["n10", "n2", "a1b10", "a1b9", "n"], key=natural_order) == ["a1b9", "a1b10", "n", "n2", "n10"]
