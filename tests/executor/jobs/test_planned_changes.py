"""Planned changes of a training job's nodes, in place; slots are only names, and time is a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from parsl.serialize import serialize

from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.protocol.messages import StoreReply
from freetrain_parsl.protocol.reports import PauseReason, PeersFailed, RunFinished, RunPaused
from tests.executor.stage import Stage, kinds

if TYPE_CHECKING:
    from pathlib import Path


def test_a_training_grows_when_its_newcomers_are_ready_and_the_survivors_come_first(stage: Stage) -> None:
    stage.running("n1", "n2")
    sent = stage.on("n0", "n1", "n2", "n3")
    assert kinds(sent) == [("s0", "run"), ("s3", "run")]
    assert all(message.place is None for _, message in sent)
    stage.ready("s3")
    assert stage.turn() == []
    stage.ready("s0")
    stage.turn()
    assert [stage.place(f"s{n}") for n in (1, 2, 0, 3)] == [(rank, 4, False) for rank in range(4)]
    assert stage.turn() == []


def test_a_change_ends_one_fragment_and_begins_another_without_a_resume(stage: Stage) -> None:
    stage.running("n0")
    stage.progress("s0", step=20, slot_seconds=2.5)
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.turn()
    stage.joins("s1")
    stage.joins("s0", paused=0.4)
    ended, started = [entry for _, entry in stage.history()][-2:]
    assert (ended.kind, ended.detail["nodes"], ended.detail["failure"]) == ("fragment_ended", ["n0"], False)
    assert ended.detail["slot_seconds"] == 2.5  # of the last report, for the account of node time
    assert (started.kind, started.detail["nodes"]) == ("fragment_started", ["n0", "n1"])
    assert (started.detail["in_place"], started.detail["paused"]) == (True, 0.4)
    assert "fragment_resumed" not in [entry.kind for _, entry in stage.history()]


def test_the_first_that_is_ready_does_not_wait_for_ever_for_a_slow_one(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1", "n2")
    stage.ready("s1")
    assert stage.turn() == []
    stage.now += 6
    assert kinds(stage.turn()) == [("s0", "change"), ("s1", "change")]
    stage.joins("s0", "s1")
    stage.ready("s2")
    stage.turn()
    assert stage.place("s2") == (2, 3, False)


POWERS_OF_TWO = AllowedCounts(divisor_of=8)


def test_a_group_never_has_a_number_of_processes_that_its_model_does_not_allow(stage: Stage) -> None:
    """One newcomer of two is slow: three processes cannot run it."""
    stage.running("n0", "n1", counts=POWERS_OF_TWO)
    stage.on("n0", "n1", "n2", "n3")
    stage.ready("s2")
    stage.now += 6
    assert stage.turn() == []
    stage.ready("s3")
    stage.turn()
    assert stage.place("s3") == (3, 4, False)


def test_a_node_is_exchanged_at_once_where_the_number_of_processes_must_stay(stage: Stage) -> None:
    stage.running("n0", "n1", counts=AllowedCounts(2))
    assert kinds(stage.on("n0", "n2")) == [("s2", "run")]
    assert stage.turn() == []
    stage.ready("s2")
    assert sorted(kinds(stage.turn())) == [("s0", "change"), ("s1", "change"), ("s2", "change")]
    assert [stage.place(f"s{n}")[:2] for n in (0, 2, 1)] == [(0, 2), (1, 2), (None, 0)]


def test_nodes_are_exchanged_one_after_the_other_where_no_larger_group_is_allowed(stage: Stage) -> None:
    stage.running("n0", "n1", counts=AllowedCounts(2, 2))
    stage.on("n2", "n3")
    stage.ready("s2")
    stage.ready("s3")
    stage.turn()
    assert [stage.place(f"s{n}")[:2] for n in (0, 2, 1)] == [(0, 2), (1, 2), (None, 0)]
    stage.joins("s0", "s2")
    stage.turn()
    assert [stage.place(f"s{n}")[:2] for n in (2, 3, 0)] == [(0, 2), (1, 2), (None, 0)]


def test_a_job_is_paused_if_no_group_on_the_way_is_allowed(stage: Stage) -> None:
    stage.running("n0", counts=AllowedCounts(1, 1))
    assert kinds(stage.on("n1")) == [("s1", "run")]
    stage.ready("s1")
    assert sorted(kinds(stage.turn())) == [("s0", "pause"), ("s1", "pause")]


def test_after_a_failure_newcomers_join_only_in_an_allowed_number(stage: Stage) -> None:
    stage.running("n0", "n1", counts=POWERS_OF_TWO)
    stage.on("n0", "n1", "n2", "n3")
    stage.ready("s2")
    stage.ready("s3")
    stage.turn()
    stage.lose("s3")
    stage.group_fails("s0")
    stage.group_fails("s1")
    stage.now += 0.2
    stage.turn()
    assert [stage.place(f"s{n}")[:2] for n in (0, 1)] == [(0, 2), (1, 2)]


def test_nodes_that_go_are_left_at_once_without_waiting_for_newcomers(stage: Stage) -> None:
    stage.running("n0", "n1")
    sent = stage.on("n1", "n2")
    assert ("s2", "run") in kinds(sent)
    assert (stage.place("s0"), stage.place("s1")) == ((None, 0, False), (0, 1, False))
    stage.ends("s0", RunPaused(PauseReason.LEFT))
    stage.joins("s1")
    stage.ready("s2")
    stage.turn()
    assert (stage.place("s1"), stage.place("s2")) == ((0, 2, False), (1, 2, False))


def test_newcomers_that_are_ready_are_taken_in_when_others_leave(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.on("n0", "n1", "n2", "n3")
    stage.ready("s2")
    assert stage.turn() == []
    stage.on("n1", "n2", "n3")
    assert [stage.place(f"s{n}") for n in (0, 1, 2)] == [(None, 0, False), (0, 2, False), (1, 2, False)]


def test_a_slot_that_has_left_is_free_for_another_training(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.submit("u")
    stage.manager.assign("u", frozenset({"n0"}))
    stage.on("n1")
    stage.ends("s0", RunPaused(PauseReason.LEFT))
    stage.joins("s1")
    assert kinds(stage.turn()) == [("s0", "run")]


def test_newcomers_on_nodes_that_are_not_wanted_any_more_are_sent_away(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1")
    assert kinds(stage.on("n0")) == [("s1", "pause")]
    assert stage.turn() == []
    stage.ready("s1")
    assert stage.turn() == [], "it arrives too late"
    stage.ends("s1", PeersFailed(0, "dismissed"))
    assert kinds(stage.on("n0", "n1")) == [("s1", "run")]


def test_what_is_desired_while_an_order_is_carried_out_comes_next(stage: Stage) -> None:
    stage.running("n0", "n1", "n2")
    stage.on("n0", "n1")
    assert stage.on("n0") == []
    stage.ends("s2", RunPaused(PauseReason.LEFT))
    stage.joins("s0")
    assert stage.turn() == []
    stage.joins("s1")
    stage.turn()
    assert (stage.place("s0"), stage.place("s1")) == ((0, 1, False), (None, 0, False))


def test_a_training_moves_to_other_nodes_through_a_group_of_both(stage: Stage) -> None:
    stage.running("n0", "n1")
    assert kinds(stage.on("n2", "n3")) == [("s2", "run"), ("s3", "run")]
    stage.ready("s2")
    assert stage.turn() == [], "it continues on its nodes meanwhile"
    stage.ready("s3")
    stage.turn()
    assert [stage.place(f"s{n}") for n in range(4)] == [(0, 3, False), (None, 0, False), (1, 3, False), (2, 3, False)]
    stage.ends("s1", RunPaused(PauseReason.LEFT))
    stage.joins("s0", "s2", "s3")
    stage.turn()
    assert [stage.place(f"s{n}") for n in (0, 2, 3)] == [(None, 0, False), (0, 2, False), (1, 2, False)]
    stage.ends("s0", RunPaused(PauseReason.LEFT))
    stage.joins("s2", "s3")
    assert [entry.detail["nodes"] for entry in stage.fragments("started")][-1] == ["n2", "n3"]


def test_a_training_whose_new_nodes_are_not_free_is_paused_rather_than_kept_waiting(stage: Stage) -> None:
    """Two training jobs that exchange their nodes would otherwise wait for each other forever."""
    stage.running("n0")
    stage.submit("u")
    stage.on("n1", name="u")
    stage.progress("s1")
    stage.manager.assign("u", frozenset({"n0"}))
    sent = stage.on("n1")
    assert kinds(sent) == [("s0", "pause"), ("s1", "pause")]
    stage.ends("s0", RunPaused(PauseReason.REQUESTED))
    stage.ends("s1", RunPaused(PauseReason.REQUESTED))
    assert kinds(stage.turn()) == [("s1", "run"), ("s0", "run")]


def test_a_node_that_the_batch_system_takes_is_left_at_once_whatever_the_planner_says(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.registry.slots["s1"].leaving = True
    stage.turn()
    assert (stage.place("s0"), stage.place("s1")) == ((0, 1, False), (None, 0, False))


def test_a_training_whose_nodes_are_all_taken_is_paused_at_once_though_others_are_free(stage: Stage) -> None:
    stage.running("n0")
    stage.registry.slots["s0"].leaving = True
    assert kinds(stage.on("n1")) == [("s0", "pause")]


def test_a_training_is_not_run_on_fewer_nodes_than_it_asks_for(stage: Stage) -> None:
    stage.running("n0", "n1", min_nodes=2)
    assert kinds(stage.on("n1", "n2")) == [("s2", "run")]
    stage.ready("s2")
    stage.turn()
    assert [stage.place(f"s{n}") for n in range(3)] == [(None, 0, False), (0, 2, False), (1, 2, False)]


def test_a_node_of_several_slots_joins_when_all_of_them_are_ready(tmp_path: Path) -> None:
    stage = Stage(tmp_path, slots_per_node=2)
    stage.running("n0")
    assert kinds(stage.on("n0", "n1")) == [("s1a", "run"), ("s1b", "run")]
    stage.ready("s1a")
    stage.now += 60
    assert stage.turn() == []
    stage.ready("s1b")
    stage.turn()
    assert [stage.place(slot)[0] for slot in ("s0a", "s0b", "s1a", "s1b")] == [0, 1, 2, 3]
    stage.journal.close()


def test_a_training_that_finishes_while_newcomers_warm_up_sends_them_away(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1", "n2")
    stage.ready("s1")
    stage.sent.clear()
    stage.ends("s0", RunFinished(stage.report()), serialize(1))
    assert kinds(stage.sent) == [("s1", "pause"), ("s2", "pause")]


def test_a_training_that_finishes_before_the_boundary_frees_newcomers_that_wait_in_the_next_group(
    stage: Stage,
) -> None:
    stage.running("n0")
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.turn()
    stage.calls_store("s1", stage.group("s1"), "get", timeout=60.0)
    stage.sent.clear()
    stage.ends("s0", RunFinished(stage.report()), serialize(1))
    answers = [message.ok for slot, message in stage.sent if slot == "s1" and isinstance(message, StoreReply)]
    assert answers == [False]
    assert ("s1", "pause") in kinds(stage.sent)


def test_a_leaver_that_does_not_leave_is_ended(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.on("n0")
    stage.joins("s0")
    stage.now += 60
    stage.turn()
    assert stage.killed == []
    stage.now += 11
    stage.turn()
    assert stage.killed == ["s1"]
    assert stage.turn() == [], "no group needs it"


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_leaver_that_dies_once_the_others_have_left_it_behind_does_not_interrupt_them(
    stage: Stage, lost_first: bool
) -> None:
    """Members of a sharded job that are interrupted after the change would resume from a checkpoint."""
    stage.running("n0", "n1", "n2")
    stage.on("n0", "n1")
    store = stage.group("s0")
    if lost_first:
        stage.lose("s2")
    for slot in ("s0", "s1"):
        stage.calls_store(slot, store, "get", timeout=60.0)
    if not lost_first:
        stage.turn()
        stage.lose("s2")
    for _ in range(3):
        stage.now += 1
        assert kinds(stage.turn()) == []
    stage.joins("s0", "s1")
    assert stage.fragments("started")[-1].detail["nodes"] == ["n0", "n1"]
    assert [entry.detail["failure"] for entry in stage.fragments()] == [False]


@pytest.mark.parametrize("told", [True, False])
def test_a_leaver_that_dies_before_the_others_have_left_is_missed(stage: Stage, told: bool) -> None:
    """They may wait for it for ever if its node has no power."""
    stage.running("n0", "n1", "n2")
    stage.on("n0", "n1")
    stage.calls_store("s0", stage.group("s0"), "get", timeout=60.0)
    stage.lose("s2")
    if told:
        stage.group_fails("s1", stage.changes["s0"].generation)
    stage.now += 0.2 if told else 1.2
    stage.turn()
    stage.now += 0.2
    stage.turn()
    assert (stage.place("s0"), stage.place("s1")) == ((0, 2, True), (1, 2, True))
    stage.joins("s0", "s1")
    assert [entry.detail["failure"] for entry in stage.fragments()] == [True]
