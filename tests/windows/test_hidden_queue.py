"""Windows where the batch system hides other users' jobs: which nodes are free, and when our blocks yield."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freetrain_parsl.windows.hidden_queue import hides_jobs
from freetrain_parsl.windows.state import Node, PendingJob
from tests.windows.test_staircase import NOW, cluster, find, steps


def hidden(count: int, planned: str = "", busy: str = "", running: str = "", waiting: int = 0, pending=(), **partition):
    """Make a cluster, some nodes planned, some busy with hidden jobs; `running` is ours: ``a=n1,n2 b=n3``."""
    held = dict(word.split("=") for word in running.split())
    state = cluster(
        count,
        {job: (nodes.replace(",", " "), NOW + 500.0) for job, nodes in held.items()},
        pending,
        partition=partition,
    )
    nodes: dict[str, Node] = dict(state.nodes)
    for name in planned.split():
        nodes[name] = replace(nodes[name], planned=True)
    for name in busy.split():
        nodes[name] = replace(nodes[name], idle=False)
    return replace(state, nodes=nodes, hides_jobs=True, others_waiting=waiting)


def test_planned_nodes_are_somebodys() -> None:
    found = find(hidden(4, planned="n1 n2", preemptible=True))
    assert set(steps(found)) == {"n3", "n4"}
    assert "planned" in found.unused["n1"]
    assert all("hides" in note for note in found.notes)


def test_nodes_that_our_own_pending_job_is_planned_on_count_as_free() -> None:
    ours = PendingJob("a", "a", "ada", "main", 1, 60.0, start=NOW + 9, planned_nodes=("n1",))
    found = find(hidden(3, planned="n1 n2", pending=(ours,), preemptible=True), "a")
    assert set(steps(found)) == {"n1", "n3"}
    found = find(hidden(3, planned="n1", pending=(ours,)), "a")
    assert set(steps(found)) == {"n1", "n2", "n3"}, "no other job is pending"


def test_a_planned_node_shows_that_somebody_waits_though_the_statistics_do_not_yet() -> None:
    """The mark is from the backfill scheduler's passes; the statistics are from the main scheduler's."""
    found = find(hidden(4, planned="n4", running="a=n1"), "a")
    assert (found.windows, found.wanted) == ((), {})
    assert "other jobs are pending" in found.unused["n2"]


def test_while_nobody_waits_nothing_makes_way() -> None:
    assert find(hidden(4, running="a=n1"), "a").wanted == {}


def test_when_somebody_waits_there_are_no_windows_and_all_blocks_make_way() -> None:
    """It is unknown for which nodes."""
    found = find(hidden(5, planned="n5", running="a=n1,n2 b=n3", waiting=1), "a", "b")
    assert found.windows == ()
    assert found.wanted == {"n1": NOW, "n2": NOW, "n3": NOW}
    assert ("other jobs are pending" in found.unused["n4"], "planned" in found.unused["n5"]) == (True, True)


def test_in_a_preemptible_partition_every_unplanned_node_is_used_whoever_waits() -> None:
    found = find(hidden(4, planned="n1", running="a=n2", waiting=7, preemptible=True), "a")
    assert (set(steps(found)), found.wanted) == ({"n3", "n4"}, {})


@pytest.mark.parametrize(
    ("private_data", "user", "hides"),
    [
        ("none", "ada", False),
        ("(null)", "ada", False),
        ("accounts,usage", "ada", False),
        ("accounts,jobs,usage", "ada", True),
        ("ALL", "ada", True),
        ("jobs", "root", False),
        ("jobs", "slurm", False),
    ],
)
def test_jobs_are_hidden_from_all_but_root_and_slurms_own_user(private_data, user, hides) -> None:
    assert hides_jobs(private_data, user, "slurm(64030)") is hides
