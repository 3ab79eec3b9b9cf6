"""Training jobs on slots of nodes that they share, with slots that are only names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.planning import events as ev
from freetrain_parsl.protocol.messages import RunReport, StartRun
from tests.executor.stage import Stage, kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Set up nodes n0 … n3 of four slots each, n0/0 … n0/3 with the slots s0a … s0d, and so on."""
    stage = Stage(tmp_path, slots_per_node=4, share_nodes=True)
    yield stage
    stage.journal.close()


def test_a_job_has_the_slots_that_it_is_assigned_and_no_more(stage: Stage) -> None:
    stage.running("n0/1")
    stage.submit(name="other")
    sent = stage.on("n0/2", "n0/3", name="other")
    assert [(slot, message.place.size) for slot, message in sent if isinstance(message, StartRun)] == [
        ("s0c", 2),
        ("s0d", 2),
    ]
    started = {entry.subject: entry.detail["nodes"] for entry in stage.fragments("started")}
    assert started == {"t": ["n0/1"], "other": ["n0/2", "n0/3"]}


def test_a_job_grows_slot_by_slot_inside_a_node(stage: Stage) -> None:
    stage.running("n0/0", "n0/1")
    assert kinds(stage.on("n0/0", "n0/1", "n0/2", "n0/3")) == [("s0c", "run"), ("s0d", "run")]
    stage.ready("s0c")
    stage.ready("s0d")
    stage.turn()
    assert [stage.place(f"s0{letter}")[:2] for letter in "abcd"] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_neighbour_that_is_lost_is_no_concern_of_a_job(stage: Stage) -> None:
    stage.running("n0/0")
    stage.submit(name="other")
    stage.on("n0/1", name="other")
    stage.lose("s0b")
    stage.now += 0.2
    assert kinds(stage.turn()) == []
    assert [entry.subject for entry in stage.fragments()] == ["other"]
    stage.progress("s0a", step=2)


def test_jobs_that_are_lost_with_their_node_are_each_restarted(stage: Stage) -> None:
    stage.running("n0/0")
    stage.submit(name="other")
    stage.on("n0/1", name="other")
    for slot in ("s0a", "s0b", "s0c", "s0d"):
        stage.lose(slot, crash=False)
    stage.now += 0.2
    stage.turn()
    assert {entry.subject: entry.detail["failure"] for entry in stage.fragments()} == {"t": True, "other": True}
    assert kinds(stage.on("n1/3")) == [("s1d", "run")]


def test_all_jobs_leave_a_node_that_closes(stage: Stage) -> None:
    stage.running("n0/0", "n0/1")
    stage.submit(name="other")
    (start,) = stage.on("n0/3", name="other")
    stage.manager.on_message(stage.registry.slots["s0d"], RunReport("other", start[1].run, stage.report()))
    stage.registry.reclaim("n0")
    assert sorted(kinds(stage.turn())) == [("s0a", "pause"), ("s0b", "pause"), ("s0d", "pause")]


def test_the_rates_that_the_planner_learns_are_of_slots(stage: Stage) -> None:
    stage.running("n0/0", "n0/1", samples=1000)
    for step in (10, 20):
        stage.progress("s0a", step=step, samples=100 * step, slot_seconds=2.0 * step)
    learned = [event.trainer for event in stage.events if isinstance(event, ev.TrainerLearned)]
    assert learned[-1].curve(2) == pytest.approx(100.0, rel=0.02)


def test_a_job_that_needs_more_slots_than_there_are_nodes_for_is_refused(stage: Stage) -> None:
    small, large = stage.submit(name="small", min_nodes=8, max_nodes=8), stage.submit(min_nodes=9, max_nodes=12)
    stage.manager.machine_has(2)
    assert not small.done()
    with pytest.raises(InvalidApp, match="there are only 2 for its blocks"):
        large.result(0)


def test_what_a_waiting_job_waits_for_are_slots(stage: Stage) -> None:
    stage.submit(min_nodes=2)
    stage.now += 60.0
    stage.turn()
    (stalled,) = [entry for _, entry in stage.history() if entry.kind == "training_stalled"]
    assert stalled.detail["reason"].startswith("waits for 2 slots to join")
