"""The simulator places jobs on shared nodes as the planner does in a live run."""

from __future__ import annotations

from datetime import timedelta

import pytest

from freetrain_parsl.extensions.simulate import simulation
from freetrain_parsl.extensions.simulate.comparison import JobKnowledge, competitors
from freetrain_parsl.extensions.simulate.description import ClusterShape
from freetrain_parsl.extensions.simulate.jobs.workload import JobRequest
from freetrain_parsl.places import slot_place
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import PoolNode
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies import POLICIES
from tests.extensions.simulate.small_profiles import small_applications

CLUSTER = ClusterShape(3, 4)
LIVE = ("milp", "ones", "equal-share", "fcfs", "window")


class Both(Planner):
    """The simulator's planner, and one whose slots have joined as those of an executor do: one by one, in blocks."""

    def __init__(self, policy, settings, on_decision, slots_per_node):
        super().__init__(policy, settings, on_decision, slots_per_node)
        self.live = Planner(POLICIES[policy.name](horizon=timedelta(seconds=60)), settings, None, slots_per_node)
        self.compared = self.parts = 0

    def advance(self, *events):
        if isinstance(events[0], ev.NodesJoined):
            self.names = {node.name: node for node in events[0].nodes}
            hosts = sorted({node.host for node in events[0].nodes})
            for lane in range(self.slots_per_node):
                for host in hosts:
                    node = PoolNode(slot_place(host, lane), host=host)
                    self.live.advance(ev.NodesJoined(0.0, f"b{host == hosts[0]}", (node,)))
            return super().advance(*events)
        self.live.advance(*events)
        actions = super().advance(*events)
        assert self.statistics.refused == self.live.statistics.refused == 0
        assert {name: len(nodes) for name, nodes in self.assigned.items()} == {
            name: len(nodes) for name, nodes in self.live.assigned.items()
        }
        assert self.assigned == self.live.assigned
        self.compared += 1
        self.parts += any(len(nodes) < self.slots_per_node for nodes in self.assigned.values())
        return actions


@pytest.mark.parametrize("name", LIVE)
def test_the_simulator_and_a_live_planner_give_the_same_allocations(tmp_path, monkeypatch, name):
    made = []

    class Recorded(Both):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(simulation, "Planner", Recorded)
    applications = small_applications(tmp_path)
    requests = [
        JobRequest(f"j{i}", 40.0 * i, applications["net" if i % 3 else "table"], 1 + i % 5, 256) for i in range(8)
    ]
    [one] = competitors(["milp"], [JobKnowledge.WORK])
    policy = POLICIES[name](horizon=timedelta(seconds=60))
    run = simulation.simulate(requests, CLUSTER, policy, one.description(CLUSTER))
    assert all(job.done_at for job in run.jobs)
    [both] = made
    assert both.compared > 10
    assert both.parts
