"""Windows where the batch system hides the jobs of others: what is nobody's, and when our blocks make way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freetrain_parsl.windows.hidden_queue import hides_jobs
from freetrain_parsl.windows.state import Node, PendingJob
from tests.windows.test_staircase import NOW, cluster, find, steps


def hidden(count: int, planned: str = "", busy: str = "", running: str = "", pending=(), **partition):
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
    return replace(state, nodes=nodes, hides_jobs=True)


def test_planned_nodes_are_somebodys_and_one_idle_node_is_left_free() -> None:
    found = find(hidden(5, planned="n1 n2"))
    assert set(steps(found)) == {"n3", "n4"}
    assert "planned" in found.unused["n1"]
    assert "left free" in found.unused["n5"]
    assert any("hides" in note for note in found.notes)


def test_with_a_single_unplanned_node_there_is_no_window() -> None:
    assert find(hidden(4, planned="n1 n2 n3")).windows == ()


def test_in_a_preemptible_partition_every_unplanned_node_is_used_and_nobody_makes_way() -> None:
    found = find(hidden(4, planned="n1", running="a=n2", preemptible=True), "a")
    assert (set(steps(found)), found.wanted) == ({"n3", "n4"}, {})


def test_nodes_that_our_own_pending_job_is_planned_on_count_as_free() -> None:
    ours = PendingJob("a", "a", "ada", "main", 1, 60.0, start=NOW + 9, planned_nodes=("n1",))
    assert "n1" in steps(find(hidden(3, planned="n1 n2", pending=(ours,)), "a"))


def test_while_an_idle_node_is_unplanned_nobody_waits_for_ours() -> None:
    assert find(hidden(4, planned="n3", running="a=n1"), "a").wanted == {}


def test_when_all_idle_nodes_are_planned_all_blocks_make_way() -> None:
    """A job that needs more than is idle may wait for any of them."""
    wanted = find(hidden(5, planned="n5", running="a=n1,n2 b=n3", busy="n4"), "a", "b").wanted
    assert wanted == {"n1": NOW, "n2": NOW, "n3": NOW}


def test_when_no_node_is_idle_the_smallest_block_makes_way() -> None:
    """The same at the next look, while it is still leaving."""
    state = hidden(4, running="a=n1,n2 b=n3", busy="n4")
    assert find(state, "a", "b").wanted == {"n3": NOW} == find(state, "a", "b").wanted


def test_nothing_makes_way_where_nothing_is_held() -> None:
    assert find(hidden(2, busy="n1 n2")).wanted == {}


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
