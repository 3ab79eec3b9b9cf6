"""The conductor with slots that are only names: every message is an argument, time is a number."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import serialize

from freetrain_parsl.errors import TooManyRestarts
from freetrain_parsl.executor.conductor import Conductor, TrainingSettings
from freetrain_parsl.executor.journal import Journal, read_journal, read_progress
from freetrain_parsl.executor.protocol import Message
from freetrain_parsl.executor.roster import Roster, Slot
from freetrain_parsl.executor.trainings import Training, TrainingRequest
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.scaling import ScalingCurve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRESS = {"step": 4, "samples": 64, "samples_total": 100, "checkpoint_step": 4, "resumed_from": None}


class _Stage:
    """A conductor, its slots n0, n1, … (one a node), and all that it said."""

    def __init__(self, directory: Path, nodes: int = 4) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, Message]] = []
        self.killed: list[str] = []
        self.events: list[ev.Event] = []
        self.roster = Roster(slots_per_node=1)
        for number in range(nodes):
            slot = Slot(f"s{number}", "token", f"n{number}", "b", heard=0.0)
            self.roster.slots[slot.name] = slot
            self.roster.completes(slot)
        self.journal = Journal(directory / "journal.sqlite")
        self.conductor = Conductor(
            TrainingSettings(directory, loss_timeout=10.0, max_crashes=1),
            roster=self.roster,
            send=lambda slot, message: self.sent.append((slot, message)),
            kill=self._kill,
            emit=self.events.append,
            journal=self.journal,
            clock=lambda: self.now,
        )

    def _kill(self, slot: Slot, reason: str) -> None:
        self.killed.append(slot.name)
        self.lose(slot.name, reason)

    def submit(self, name: str = "t") -> Future[Any]:
        future: Future[Any] = Future()
        request = TrainingRequest(name, 1, 4, ScalingCurve.default())
        self.conductor.submit(Training(request, b"function", future))
        return future

    def on(self, *nodes: str, name: str = "t") -> list[tuple[str, Message]]:
        """Assign and converge; what was said in this turn."""
        self.conductor.assign(name, frozenset(nodes))
        return self.turn()

    def turn(self) -> list[tuple[str, Message]]:
        self.sent.clear()
        self.conductor.converge()
        return list(self.sent)

    def ended(self, slot: str, outcome: str, payload: bytes = b"", **header: Any) -> None:
        generation = self.generation
        message = Message("ended", {"trainer": "t", "generation": generation, "outcome": outcome, **header}, payload)
        self.conductor.on_ended(self.roster.slots[slot], message)

    def lose(self, slot: str, reason: str = "gone", *, crash: bool = True) -> None:
        lost = self.roster.slots.pop(slot)
        self.roster.incomplete(lost)
        self.conductor.on_lost(lost, reason, crash=crash)

    @property
    def generation(self) -> int:
        runs = [entry for _, entry in self.history() if entry.kind == "fragment_started"]
        return runs[-1].detail["generation"]

    def history(self) -> list:
        self.journal.commit()
        return list(read_journal(self.journal.path))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[_Stage]:
    stage = _Stage(tmp_path)
    yield stage
    stage.journal.close()


def kinds(sent: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(slot, message.type) for slot, message in sent]


def test_a_training_starts_on_all_slots_of_its_nodes_with_distinct_ranks(stage: _Stage) -> None:
    stage.submit()
    assert stage.turn() == []
    sent = stage.on("n0", "n2")
    assert kinds(sent) == [("s0", "run"), ("s2", "run")]
    assert [(m["rank"], m["world_size"]) for _, m in sent] == [(0, 2), (1, 2)]
    assert stage.turn() == []


def test_a_change_of_nodes_pauses_all_members_once_and_starts_the_next_generation_when_all_have_ended(
    stage: _Stage,
) -> None:
    stage.submit()
    stage.on("n0", "n1")
    assert kinds(stage.on("n1", "n2")) in ([("s0", "pause"), ("s1", "pause")], [("s1", "pause"), ("s0", "pause")])
    assert stage.turn() == []
    stage.ended("s0", "paused")
    assert stage.turn() == []
    stage.ended("s1", "paused")
    assert kinds(stage.turn()) == [("s1", "run"), ("s2", "run")]


def test_a_training_waits_for_nodes_that_another_still_holds(stage: _Stage) -> None:
    stage.submit()
    stage.on("n0")
    stage.submit("u")
    assert stage.on("n0", name="u") == []
    stage.on()
    stage.ended("s0", "paused")
    assert kinds(stage.turn()) == [("s0", "run")]


def test_the_first_members_value_resolves_the_future_and_the_others_may_end_later(stage: _Stage) -> None:
    future = stage.submit()
    stage.on("n0", "n1")
    stage.ended("s0", "finished", serialize({"loss": 0.5}), progress=PROGRESS)
    assert future.result(0) == {"loss": 0.5}
    assert any(isinstance(event, ev.TrainerFinished) for event in stage.events)
    stage.ended("s1", "finished")
    assert [entry.kind for _, entry in stage.history()][-2:] == ["training_finished", "fragment_ended"]
    assert read_progress(stage.journal.path)["t"]["samples"] == 64


def test_a_name_is_free_again_while_old_members_are_still_ending(stage: _Stage) -> None:
    stage.submit()
    stage.on("n0", "n1")
    first = stage.generation
    stage.ended("s0", "finished", serialize(1))
    again = stage.submit()
    stage.on("n2")
    stage.conductor.on_ended(
        stage.roster.slots["s1"],
        Message("ended", {"trainer": "t", "generation": first, "outcome": "failed"}, b"old news"),
    )
    assert not again.done()
    stage.ended("s2", "finished", serialize(2))
    assert again.result(0) == 2


def test_a_value_that_cannot_be_read_here_fails_the_future_not_the_driver(stage: _Stage) -> None:
    future = stage.submit()
    stage.on("n0")
    stage.ended("s0", "finished", b"no serialisation at all")
    with pytest.raises(Exception, match="cannot be read here"):
        future.result(0)


def test_an_exception_of_the_user_ends_the_training_on_all_its_members(stage: _Stage) -> None:
    future = stage.submit()
    stage.on("n0", "n1")
    stage.sent.clear()
    error = RemoteExceptionWrapper(KeyError, KeyError("theirs"), None)
    stage.ended("s1", "failed", serialize(error))
    with pytest.raises(KeyError, match="theirs"):
        future.result(0)
    assert ("s0", "pause") in kinds(stage.sent)
    stage.ended("s0", "peer_lost")
    assert stage.turn() == []


def test_after_a_loss_the_survivors_end_and_the_training_goes_on_without_the_lost(stage: _Stage) -> None:
    stage.submit()
    stage.on("n0", "n1", "n2")
    stage.lose("s1")
    assert stage.on("n0", "n2") == [], "the survivors notice by themselves"
    stage.ended("s0", "peer_lost")
    stage.ended("s2", "peer_lost")
    assert kinds(stage.turn()) == [("s0", "run"), ("s2", "run")]
    ended = [entry for _, entry in stage.history() if entry.kind == "fragment_ended"]
    assert ended[0].detail["lost"]


def test_survivors_that_do_not_notice_are_given_up_in_time(stage: _Stage) -> None:
    stage.submit()
    stage.on("n0", "n1")
    stage.lose("s1", crash=False)
    stage.now = 10.0
    stage.turn()
    assert stage.killed == []
    stage.now = 10.1
    stage.turn()
    assert stage.killed == ["s0"]


def test_crashes_between_two_checkpoints_end_in_a_message_and_a_checkpoint_forgives_them(stage: _Stage) -> None:
    future = stage.submit()
    stage.on("n0")
    stage.lose("s0", "segmentation fault")
    stage.on("n1")
    message = Message("progress", {"trainer": "t", "generation": stage.generation, "progress": PROGRESS})
    stage.conductor.on_progress(message)
    stage.lose("s1", "segmentation fault")
    stage.on("n2")
    assert not future.done()
    stage.lose("s2", "segmentation fault")
    stage.on("n3")
    with pytest.raises(TooManyRestarts, match=r"2 of its processes died.*segmentation fault"):
        future.result(0)


def test_nodes_that_were_taken_are_no_crashes(stage: _Stage) -> None:
    future = stage.submit()
    for node in ("0", "1", "2"):
        stage.on(f"n{node}")
        stage.lose(f"s{node}", crash=False)
    stage.on("n3")
    assert not future.done()


def test_reports_of_an_earlier_generation_are_ignored(stage: _Stage) -> None:
    stage.submit()
    stage.on("n0")
    stale = Message("progress", {"trainer": "t", "generation": stage.generation - 1, "progress": PROGRESS})
    stage.conductor.on_progress(stale)
    assert read_progress(stage.journal.path) == {}


def test_progress_tells_the_planner_what_is_left(stage: _Stage) -> None:
    stage.submit()
    stage.on("n0")
    stage.conductor.on_progress(
        Message("progress", {"trainer": "t", "generation": stage.generation, "progress": PROGRESS})
    )
    assert ev.TrainerProgressed(0.0, "t", 36.0) in stage.events
