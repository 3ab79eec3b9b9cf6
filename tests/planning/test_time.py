"""The planner with inconsistent event times: its time never goes back, and it never fails."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.executor.jobs.training.progress import learned_costs
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies import resolve_policy
from tests.planning.small_events import SETTINGS, joined, only, trainer, window

TIMES = st.floats(-1e6, 1e6)
NODES = st.sampled_from("abc")


@st.composite
def events(draw: st.DrawFn) -> ev.Event:
    time, node, name = draw(TIMES), draw(NODES), draw(st.sampled_from(["one", "two"]))
    return draw(
        st.sampled_from(
            [
                ev.Tick(time),
                ev.WindowsSeen(time, (window("a", "b", opens=time - 1, closes=time + draw(st.floats(1, 1e4))),)),
                ev.WindowsOutdated(time),
                ev.BlockStarted(time, "0", (node,), draw(TIMES)),
                ev.BlockEnded(time, "0"),
                joined(time, "0", node, closes=draw(st.none() | TIMES)),
                ev.NodesLeft(time, (node,)),
                ev.NodesClosing(time, (node,), draw(TIMES)),
                ev.TrainerProgressed(time, name, draw(st.floats(0, 1e9))),
                ev.TrainerLearned(time, trainer(name)),
                ev.TasksWaiting(time, draw(st.integers(0, 2))),
            ]
        )
    )


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("policy", ["milp", "equal-share"])
@given(told=st.lists(events(), max_size=15))
def test_events_in_any_order_of_time_are_taken(policy: str, told: list[ev.Event]) -> None:
    planner = Planner(resolve_policy(policy), SETTINGS)
    planner.advance(ev.TrainerSubmitted(0.0, trainer("one")), ev.TrainerSubmitted(0.0, trainer("two")))
    for event in told:
        planner.advance(event)
        assert planner.statistics.refused == 0


def test_time_does_not_go_back() -> None:
    """A block unused for `idle_timeout` is released, although an event in between had an earlier time."""
    planner = Planner(resolve_policy("milp"), SETTINGS)
    planner.advance(ev.TrainerSubmitted(100.0, trainer("one", most=1)))
    (request,) = only(ev.RequestBlock, planner.advance(ev.WindowsSeen(100.0, (window("a", closes=900.0),))))
    planner.advance(ev.BlockStarted(101.0, request.block, ("a",), 800.0), joined(101.0, request.block, "a", closes=800))
    planner.advance(ev.TrainerFinished(110.0, "one"))
    planner.advance(ev.Tick(-5000.0))
    assert only(ev.ReleaseBlock, planner.advance(ev.Tick(139.0))) == []
    assert only(ev.ReleaseBlock, planner.advance(ev.Tick(141.0))) == [ev.ReleaseBlock(request.block)]


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_refused(time: float) -> None:
    with pytest.raises(PlanningError, match="finite time"):
        ev.Tick(time)


@pytest.mark.parametrize("seconds", [-1e-9, -30.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", ["up", "down", "start"])
def test_a_cost_that_cannot_be_teaches_nothing(kind: str, seconds: float) -> None:
    costs = CostsInSeconds(1.0, 2.0, 3.0)
    assert learned_costs(costs, kind, seconds) == costs
