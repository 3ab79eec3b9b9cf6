"""The view of several sites: lines that change, or one picture in a terminal."""

from __future__ import annotations

from io import StringIO

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.extensions.globus.sites.coordinator import Coordinator
from freetrain_parsl.extensions.globus.sites.planning.model import SiteRates
from freetrain_parsl.extensions.globus.sites.planning.planner import plan_sites
from freetrain_parsl.extensions.globus.sites.state import CallPace, SiteAnswer, SiteFacts, TrainingAtSite
from freetrain_parsl.extensions.globus.sites.view import SitesView
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob

FACTS = SiteFacts("home", 900.0)


def coordinator_at_work() -> Coordinator:
    curve = ScalingCurve({1: 1.0})
    coordinator = Coordinator(
        [PlannedJob("t", 1, 1, curve)], {"a": SiteRates(), "b": SiteRates()}, CallPace(600, 60), plan_sites
    )
    coordinator.due(0.0)
    coordinator.on_prepared("a", FACTS, 0.0)
    coordinator.on_silence("b", "the endpoint is offline", 0.0)
    coordinator.due(0.0)
    running = TrainingAtSite("t", "running", 0.25, ("n7",))
    coordinator.on_answer("a", SiteAnswer(FACTS, 0, "running", trainings={"t": running}, planned=()), 0.0)
    return coordinator


def test_without_a_terminal_a_line_is_printed_when_something_has_changed() -> None:
    output = StringIO()
    view = SitesView(Screen(file=output, width=200), "four")
    for second in range(5):
        view.show(coordinator_at_work(), float(second))
    lines = output.getvalue().splitlines()
    assert len(lines) == 3
    assert "site b does not answer: the endpoint is offline" in lines[1]
    assert "t              running at a on n7, 25% done: no nodes expected; queued at a" in lines[2]


def test_in_a_terminal_all_is_in_one_picture() -> None:
    output = StringIO()
    view = SitesView(Screen(file=output, width=120, height=40, force_terminal=True), "four")
    with view.opened():
        view.show(coordinator_at_work(), 3.0)
    text = output.getvalue()
    for part in (
        "four · 3 s · 0 of 1 training jobs done",
        "site a: 0 nodes held",
        "site b does not answer",
        "at a on n7",
    ):
        assert part in text
