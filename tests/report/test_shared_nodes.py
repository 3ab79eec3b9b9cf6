"""Runs whose jobs share nodes, in words, pictures and on the page, from handwritten records."""

from __future__ import annotations

import pytest

from freetrain_parsl.executor.jobs.request import TrainingRequest
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.places import count_places
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.events import TrainerSubmitted
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import as_json
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.report.timeline import draw_timeline
from freetrain_parsl.windows.hostlist import show_hosts, show_units


def slots(node, *lanes):
    return [f"{node}/{lane}" for lane in lanes]


WHOLE = [*slots("n0", 0, 1, 2, 3), *slots("n1", 0, 1, 2, 3)]


@pytest.fixture
def view():
    """`large` has two whole nodes, `small` half of a third."""
    view = RunView("shared")
    entries = [record.PlannerStarted("", "milp", {}, 4)]
    entries += [record.TrainingSubmitted(name, 1, 8, None) for name in ("large", "small")]
    entries.append(record.BlockRequested("b1", ["n0", "n1", "n2"], 100.0, None))
    entries.append(record.BlockStarted("b1", ["n0", "n1", "n2"], 110.0))
    entries += [record.NodeJoined(node, "b1", 110.0) for node in ("n0", "n1", "n2")]
    entries.append(record.FragmentStarted("large", 1, WHOLE, in_place=False, paused=0.0))
    entries.append(record.FragmentStarted("small", 1, slots("n2", 2, 3), in_place=False, paused=0.0))
    view.take([(10.0 + time, entry) for time, entry in enumerate(entries)])
    return view


def test_free_slots_that_no_waiting_job_can_use_are_told():
    run = RunState()

    def step(*events, actions=()):
        run.take(0.0, record.PlannerStep("", list(events), list(actions)))
        return run.free_slots

    def job(name, least):
        return {"type": "trainer_submitted", "trainer": {"name": name, "min_nodes": least}}

    nodes = [{"name": name} for name in (*slots("n0", 0, 1, 2, 3), *slots("n1", 0, 1, 2, 3))]
    run.take(0.0, record.PlannerStarted("", "milp", {}, 4))
    assert step({"type": "nodes_joined", "block": "b", "nodes": nodes}) == ""
    held = [{"type": "assign", "trainer": name, "nodes": slots("n0", lane)} for name, lane in (("s", 0), ("t", 1))]
    held += [{"type": "lend", "nodes": slots("n1", 0)}]
    assert step(job("s", 1), job("t", 1), job("big", 4), actions=held) == (
        "5 accelerators are free (n0/2-3,n1/1-3): training job 'big' needs a whole node, 0 are free"
    )
    assert step(job("u", 2)) == "", "it can use them"
    assert step({"type": "trainer_finished", "trainer": "u"}, {"type": "nodes_left", "nodes": slots("n1", 1, 2)}) == (
        "3 accelerators are free (n0/2-3,n1/3): training job 'big' needs a whole node, 0 are free"
    )
    assert step(actions=[{"type": "stop", "trainer": name, "nodes": []} for name in ("s", "t")]) == ""
    assert step({"type": "block_ended", "block": "b"}) == ""


def test_the_counts_of_a_job_with_replicas_are_read_as_the_planner_writes_them():
    request = TrainingRequest(SessionOptions("r", replicas=2), 2, 8, ScalingCurve.of(None))
    nodes = [{"name": name} for name in slots("n0", 0, 1, 2, 3)]
    run = RunState()
    run.take(0.0, record.PlannerStarted("", "milp", {}, 4))
    events = [as_json(TrainerSubmitted(0.0, request.trainer())), {"type": "nodes_joined", "block": "b", "nodes": nodes}]
    run.take(0.0, record.PlannerStep("", events, [{"type": "lend", "nodes": slots("n0", 0, 1, 2)}]))
    assert (
        run.free_slots == "1 accelerator is free (n0/3): training job 'r' needs 2 on one node, where at most 1 is free"
    )


def test_names_and_numbers_of_slots():
    assert show_hosts(["n0", "n1"]) == "n[0-1]"
    assert show_hosts(slots("n0", 0, 1, 2)) == "n0/0-2"
    assert show_hosts(slots("n0", 0, 2, 3)) == "n0/0,2-3"
    assert show_hosts(WHOLE, 4) == "n[0-1]"
    assert show_hosts(WHOLE) == "n[0-1]/0-3"
    assert show_units(slots("n0", 0, 1), 4) == "n0/0-1 (2 accelerators)"
    assert show_units(["n0", "n1"]) == "n0, n1"
    assert count_places(["n0"]) == "1 node"
    assert count_places(slots("n0", 1)) == "1 accelerator on n0"
    assert count_places(WHOLE) == "2 nodes (8 accelerators)"


def test_jobs_say_which_accelerators_they_have(view):
    assert view.state.trainings["large"].where() == "n[0-1] (8 accelerators)"
    assert view.state.trainings["small"].where() == "n2/2-3 (2 accelerators)"
    assert view.state.training_place == "10 of 12 accelerators of 3 nodes"


def test_the_page_has_rows_of_nodes_and_runs_of_slots(view):
    seen = view.since()
    assert seen["nodes"]["name"] == ["n0", "n1", "n2"]
    assert seen["fragments"]["nodes"] == [[0, 8], [10, 2]]
    assert seen["fragments"]["slots"] == [4, 4]
    assert (seen["run"]["training_nodes"], seen["run"]["training_slots"], seen["run"]["shared_slots"]) == (3, 10, 4)


def test_the_picture_is_drawn(view, tmp_path):
    stays = [{"node": node, "kind": "preemptible", "start": 10.0, "end": 30.0} for node in ("n0", "n1", "n2")]
    draw_timeline(view.state, stays, tmp_path / "timeline.svg", title="shared")
    assert "small" in (tmp_path / "timeline.svg").read_text()


def test_a_job_that_has_not_all_nodes_says_why():
    run = RunState()
    run.take(0.0, record.PlannerStarted("", "milp", {}, 1))

    def why(curve, held, *, learned=True, **options):
        job = PlannedJob("t", curve=ScalingCurve(curve, relative=not learned), **options)
        events = [ev.TrainerSubmitted(0.0, job), ev.TrainerHolds(0.0, "t", frozenset(held))]
        nodes = {"type": "nodes_joined", "block": "b", "nodes": [{"name": f"n{number}"} for number in range(4)]}
        run.take(0.0, record.PlannerStep("", [nodes, *map(as_json, events)], []))
        return run.why_not_more("t")

    flat = {1: 10.0, 2: 14.0, 4: 12.0}
    bounds = {"min_nodes": 1, "max_nodes": 4, "costs": CostsInSeconds()}
    assert why(flat, ["n0", "n1"], **bounds) == (
        "2 nodes are free, on which it would not be faster: 14 samples/s on 2, 13 on 3"
    )
    growing = {1: 10.0, 2: 20.0, 4: 38.0}
    costs_more = "2 nodes are free, and the policy expects a change to cost more than it gains"
    assert why(growing, ["n0", "n1"], **bounds) == costs_more
    assert why(flat, ["n0", "n1"], learned=False, **bounds) == costs_more
    assert why(growing, ["n0", "n1", "n2"], allowed_counts=AllowedCounts(3), **{**bounds, "max_nodes": 6}) == (
        "1 node is free, and the next number that it may have is 6"
    )
    assert why(growing, ["n0", "n1"], **{**bounds, "max_nodes": 2}) == ""
    assert why(growing, ["n0", "n1", "n2", "n3"], **{**bounds, "max_nodes": 8}) == "", "none is free"
