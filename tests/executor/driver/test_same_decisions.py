"""The journal of a real run: a new planner, given its events, decides as the run's planner did."""

from __future__ import annotations

import pytest

from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.extensions.replay.recorded_run import decide_again, read_run
from freetrain_parsl.places import lane_of
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.policies import resolve_policy
from tests.executor.scenario import make_app

pytestmark = pytest.mark.cluster


def test_the_journal_of_a_run_with_a_preemption_leads_to_the_same_decisions(start) -> None:
    site = start(policy="milp", workload=[MainJob(submit=12.0, nodes=2, run=4.0, walltime=10.0)])
    train = make_app(max_nodes=3)
    futures = [train.options(name=name)(epochs=20) for name in ("a", "b")]
    site.until(lambda run: run.blocks_ended, seconds=60)
    for future in futures:
        future.result(timeout=60)
    site.until(lambda run: run.completed == 2)
    run = read_run(site.executor.journal_path)
    assert list(decide_again(run, resolve_policy("milp"))) == list(run.steps)
    kinds = {type(action) for step in run.steps for action in step.actions}
    assert {ev.RequestBlock, ev.Assign} < kinds
    assert any(isinstance(event, ev.BlockEnded) for step in run.steps for event in step.events)


@pytest.mark.slow
def test_the_journal_of_a_run_on_shared_nodes_leads_to_the_same_decisions(start) -> None:
    """A main job takes one of the nodes, with the training jobs on it."""
    workload = [MainJob(submit=12.0, nodes=1, run=4.0, walltime=10.0)]
    site = start(nodes=2, policy="milp", workload=workload, slots_per_node=2)
    train = make_app(max_nodes=1, fuse=False)
    futures = [train.options(name=name)(epochs=20) for name in ("a", "b", "c")]
    for future in futures:
        future.result(timeout=90)
    site.until(lambda run: run.completed == 3)
    run = read_run(site.executor.journal_path)
    assert run.slots_per_node == 2
    assert list(decide_again(run, resolve_policy("milp"))) == list(run.steps)
    used = {place for step in run.steps for one in step.actions if isinstance(one, ev.Reassign) for place in one.nodes}
    assert used
    assert all(lane_of(place) is not None for place in used)
