"""Nodes updated from the queue have at most the free resources that a query would report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.windows.slurm.known_nodes import KnownNodes
from freetrain_parsl.windows.state import Node, RunningJob

CPUS = 4
NAMES = ("n1", "n2", "n3")


def described(jobs: dict[str, tuple[str, ...]]) -> dict[str, Node]:
    """Return nodes as reported by a batch system; each job takes one CPU of each of its nodes."""
    used = {name: sum(name in nodes for nodes in jobs.values()) for name in NAMES}
    return {name: Node(name, not used[name], cpus=CPUS, cpus_free=CPUS - used[name]) for name in NAMES}


def running(jobs: dict[str, tuple[str, ...]]) -> list[RunningJob]:
    return [RunningJob(job, job, "ada", "main", nodes, None) for job, nodes in jobs.items()]


queues = st.dictionaries(st.sampled_from("abcd"), st.sets(st.sampled_from(NAMES), min_size=1).map(tuple), max_size=CPUS)


@given(queues, queues)
def test_a_node_is_idle_exactly_when_it_has_no_job_and_no_more_is_free_than_is(before, after) -> None:
    known = KnownNodes()
    known.describe(described(before), running(before))
    now = known.with_jobs(running(after), 100.0)
    for name, node in described(after).items():
        assert now[name].idle is node.idle
        assert now[name].cpus_free <= node.cpus_free


def test_a_node_that_was_busy_with_no_job_to_be_seen_stays_busy() -> None:
    """It may be rebooting."""
    known = KnownNodes()
    known.describe({"n1": Node("n1", idle=False)}, [])
    assert not known.with_jobs([], 100.0)["n1"].idle


def test_since_when_a_node_is_idle_does_not_change_from_look_to_look() -> None:
    known = KnownNodes()
    known.describe(described({"a": ("n1",)}), running({"a": ("n1",)}))
    assert [known.with_jobs([], now)["n1"].idle_since for now in (100.0, 115.0)] == [100.0, 100.0]
    known.with_jobs(running({"b": ("n1",)}), 130.0)
    assert known.with_jobs([], 145.0)["n1"].idle_since == 145.0


def test_the_jobs_that_have_left_their_nodes_are_named() -> None:
    known = KnownNodes()
    known.describe(described({"a": ("n1",), "b": ("n2",)}), running({"a": ("n1",), "b": ("n2",)}))
    assert known.ended(running({"b": ("n2",), "c": ("n1",)})) == {"a"}
