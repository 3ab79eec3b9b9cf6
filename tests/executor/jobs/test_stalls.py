"""A training job without progress reports the reason, and a newcomer that hangs is dropped; slots are only names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from parsl.serialize import serialize

from freetrain_parsl.errors import CodeChanged, InvalidApp, TooManyRestarts, TrainingInterrupted
from freetrain_parsl.executor.slot.run_end import serialized_exception
from freetrain_parsl.protocol.reports import PauseReason, PeersFailed, RunFailed, RunFinished, RunPaused

if TYPE_CHECKING:
    from tests.executor.stage import Stage


def reasons(stage: Stage) -> list[str]:
    return [entry.detail["reason"] for _, entry in stage.history() if entry.kind == "training_stalled"]


# Training jobs that are too large.


def test_a_training_that_needs_more_nodes_than_there_are_is_refused_when_it_is_submitted(stage: Stage) -> None:
    stage.manager.machine_has(4)
    future = stage.submit(min_nodes=5, max_nodes=8)
    with pytest.raises(InvalidApp, match=r"'t' needs 5 nodes at the same time, .* only 4 .* lower min_"):
        future.result(0)
    assert not stage.submit("fits", min_nodes=4).done()


def test_a_training_that_was_submitted_before_the_size_of_the_machine_was_known_is_refused_then(stage: Stage) -> None:
    future = stage.submit(min_nodes=5, max_nodes=8)
    stage.manager.machine_has(None)
    assert not future.done()
    stage.manager.machine_has(4)
    assert isinstance(future.exception(0), InvalidApp)


def test_a_training_that_runs_is_not_ended_by_a_machine_that_shrinks(stage: Stage) -> None:
    future = stage.running("n0", "n1", min_nodes=2)
    stage.manager.machine_has(1)
    stage.turn()
    assert not future.done()


# Waits.


def test_a_training_without_nodes_says_within_a_minute_what_it_waits_for_and_takes_it_back(stage: Stage) -> None:
    stage.submit(min_nodes=3)
    stage.now += 40
    stage.turn()
    assert reasons(stage) == []
    stage.now += 15
    stage.turn()
    stage.now += 100
    stage.turn()
    assert reasons(stage) == ["waits for 3 nodes to join; `freetrain explain` shows why idle nodes are not used"]
    stage.on("n0", "n1", "n2")
    stage.progress("s0")
    stage.turn()
    assert reasons(stage)[1:] == [""]


def test_the_wait_for_slots_counts_from_the_assignment_of_the_nodes(stage: Stage) -> None:
    stage.submit()
    stage.now += 300
    stage.manager.assign("t", frozenset({"n0", "n9"}))
    stage.turn()
    assert reasons(stage) == []
    stage.now += 50
    stage.turn()
    assert reasons(stage) == ["waits for slots on n0, n9 to start or to become free"]


def test_a_function_that_never_reaches_its_loop_is_named_with_its_nodes(stage: Stage) -> None:
    stage.submit()
    stage.on("n0", "n1")
    stage.now += 50
    stage.turn()
    assert reasons(stage) == ["on n0, n1 its function has not reached session.epochs() yet"]


def test_a_newcomer_that_does_not_get_ready_is_named_while_the_others_train(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1")
    stage.now += 50
    stage.turn()
    assert reasons(stage) == ["on n1, to join the others, its function has not reached session.epochs() yet"]
    stage.ready("s1")
    stage.turn()
    assert reasons(stage)[1:] == [""]


# Steps that do not come, though the processes respond.


def stepping(stage: Stage, *nodes: str, seconds: float, until: int) -> None:
    """Let a training job run on `nodes` and make steps that take `seconds`."""
    stage.running(*nodes, step=0)
    for step in range(1, until + 1):
        stage.now += seconds
        stage.progress("s0", step=step)
    stage.turn()


def test_a_training_without_a_step_for_ten_minutes_names_the_nodes_on_which_it_is_blocked(stage: Stage) -> None:
    stepping(stage, "n0", "n1", "n2", seconds=0.5, until=8)
    stage.now += 590
    stage.turn()
    assert reasons(stage) == []
    for slot in ("s0", "s2"):
        stage.waits(slot, 590.0)
    stage.now += 20
    stage.turn()
    stage.now += 300
    stage.turn()
    blocked = "on n1, while n0, n2 only wait; the last that it reported was step 8, and a step took 0.5 s"
    assert reasons(stage) == [f"has made no step for more than 10 min {blocked}"]
    for slot in ("s0", "s2"):
        stage.waits(slot, 1190.0)
    stage.now += 300
    stage.turn()
    assert reasons(stage)[1:] == [f"has made no step for more than 20 min {blocked}"]
    assert stage.killed == []
    stage.progress("s0", step=9)
    stage.turn()
    assert reasons(stage)[2:] == [""]


def test_slow_steps_are_given_fifty_times_their_median_and_one_long_step_changes_nothing(stage: Stage) -> None:
    stepping(stage, "n0", seconds=60.0, until=9)
    stage.now += 500
    stage.progress("s0", step=10)
    stage.now += 50 * 60 - 1
    stage.turn()
    assert reasons(stage) == []
    stage.now += 2
    stage.turn()
    (reason,) = reasons(stage)
    assert reason.startswith(
        "has made no step for more than 50 min on n0; the last that it reported was step 10, and a step took 60 s"
    )


def test_the_time_without_nodes_is_not_one_without_steps(stage: Stage) -> None:
    stepping(stage, "n0", seconds=1.0, until=3)
    stage.on()
    stage.ends("s0", RunPaused(PauseReason.REQUESTED, stage.report(step=3)))
    stage.turn()
    stage.now += 5000
    stage.turn()
    assert len(reasons(stage)) == 1  # waits for a node
    stage.on("n0")
    stage.progress("s0", step=3)
    stage.now += 590
    stage.turn()
    assert reasons(stage)[1:] == [""]


def test_a_training_that_ends_takes_its_reason_back(stage: Stage) -> None:
    stepping(stage, "n0", seconds=1.0, until=3)
    stage.now += 601
    stage.turn()
    stage.ends("s0", RunFinished(stage.report(step=4)), serialize(1))
    assert reasons(stage)[1:] == [""]


# Ends that are not failures.


@pytest.mark.parametrize(
    ("error", "final"), [(CodeChanged("edited"), False), (TrainingInterrupted("gone"), False), (ValueError("no"), True)]
)
def test_the_journal_says_whether_resume_continues_a_training_that_ended_with_an_error(
    stage: Stage, error: Exception, final: bool
) -> None:
    future = stage.running("n0")
    stage.ends("s0", RunFailed(str(error)), serialized_exception(error))
    assert type(future.exception(0)) is type(error)
    (entry,) = [entry for _, entry in stage.history() if entry.kind == "training_failed"]
    assert entry.detail == {"error": f"{type(error).__name__}: {error}", "final": final}


# Newcomers that hang between their command and the rendezvous.


def ordered(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1", "n2")
    stage.ready("s1")
    stage.ready("s2")
    stage.turn()
    assert stage.place("s2") == (2, 3, False)


def meets(stage: Stage, slot: str) -> None:
    stage.calls_store(slot, stage.group(slot), "get", timeout=60.0)


def test_a_newcomer_that_hangs_after_its_order_is_given_up_and_the_others_go_on_in_place(stage: Stage) -> None:
    ordered(stage)
    meets(stage, "s1")
    stage.now += 9
    stage.turn()
    assert stage.killed == []
    stage.now += 2
    stage.turn()
    assert stage.killed == ["s2"]
    stage.now += 0.2
    stage.turn()
    assert (stage.place("s0"), stage.place("s1")) == ((0, 2, True), (1, 2, True))
    stage.joins("s0", "s1")
    assert stage.fragments("started")[-1].detail["nodes"] == ["n0", "n1"]


def test_newcomers_that_wait_at_the_meeting_are_not_given_up_however_long_the_others_take(stage: Stage) -> None:
    ordered(stage)
    meets(stage, "s1")
    meets(stage, "s2")
    stage.now += 600
    stage.beats("s0", "s1", "s2")
    stage.turn()
    assert stage.killed == []


def test_after_a_meeting_that_failed_though_all_live_the_members_go_on_without_the_newcomers(stage: Stage) -> None:
    """Members that train together can connect to each other; a newcomer may be on an unreachable network."""
    ordered(stage)
    for slot in ("s0", "s1", "s2"):
        meets(stage, slot)
    stage.group_fails("s0", generation=stage.changes["s0"].generation)
    stage.now += 2
    stage.beats("s0", "s1", "s2")
    stage.turn()
    assert stage.place("s0") == (0, 1, True)
    stage.joins("s0")
    assert stage.fragments("started")[-1].detail["nodes"] == ["n0"]


def test_groups_with_an_impostor_are_formed_anew_a_bounded_number_of_times_and_the_last_reason_is_told(
    stage: Stage,
) -> None:
    """One restart without a step is allowed here."""
    future = stage.running("n0", "n1")
    for _ in range(2):
        assert not future.done()
        stage.group_fails("s0", generation=stage.generation)
        stage.now += 2
        stage.beats("s0", "s1")
        stage.turn()
        if not future.done():
            stage.joins("s0", "s1")
    with pytest.raises(TooManyRestarts, match=r"2 crashes .* its members lost their connections.*: connection closed"):
        future.result(0)


def test_a_sharded_group_in_which_everybody_only_waits_ends_and_starts_again_from_its_checkpoint(stage: Stage) -> None:
    stage.running("n0", "n1", in_place=False)
    stage.waits("s0", 11.0)
    stage.waits("s1", 10.5)
    stage.turn()
    assert stage.place("s0") == stage.place("s1") == (None, 0, True)
    stage.ends("s0", PeersFailed(0, "dismissed"))
    stage.ends("s1", PeersFailed(0, "dismissed"))
    assert [(slot, message.place is None) for slot, message in stage.turn()] == [("s0", False), ("s1", False)]
    assert stage.fragments()[-1].detail["failure"]
