"""The training manager when members fail, lose their connections, or crash repeatedly; see `tests.executor.stage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from parsl.serialize import serialize

from freetrain_parsl.errors import TooManyRestarts
from freetrain_parsl.executor.training_logs import mark_of
from freetrain_parsl.protocol.reports import PauseReason, PeersFailed, RunFinished, RunPaused
from freetrain_parsl.report.projection.run import RunState
from tests.executor.stage import Stage, kinds

if TYPE_CHECKING:
    from pathlib import Path


def test_a_member_that_an_abort_does_not_wake_is_ended_in_seconds(stage: Stage) -> None:
    """A model's own collective waits for ever for a message that gloo has lost, and heartbeats continue."""
    stage.running("n0", "n1", "n2")
    stage.lose("s2", crash=False)
    stage.now += 0.2
    stage.turn()
    stage.calls_store("s1", stage.group("s1"), "get", timeout=60.0)
    for waited, killed in ((11.0, []), (13.0, ["s0"])):
        stage.now += 7
        for slot in ("s0", "s1"):
            stage.waits(slot, waited)
        stage.turn()
        assert stage.killed == killed
    stage.now += 0.2
    stage.turn()
    assert stage.place("s1") == (0, 1, True)


def test_a_member_of_an_intact_replica_may_wait_for_another(stage: Stage) -> None:
    stage.running("n0", "n1", "n2", "n3", replicas=2, min_nodes=2)
    stage.lose("s1")
    stage.now += 0.2
    stage.turn()
    stage.now += 9
    stage.waits("s2", 9.0)
    stage.turn()
    assert stage.killed == []


def test_after_a_loss_the_survivors_are_ordered_into_the_next_group_at_once(stage: Stage) -> None:
    stage.running("n0", "n1", "n2")
    stage.lose("s1")
    stage.now += 0.2
    stage.turn()
    assert (stage.place("s0"), stage.place("s2")) == ((0, 2, True), (1, 2, True))
    stage.joins("s0", "s2", paused=3.0)
    ended, started = [entry.detail for _, entry in stage.history() if entry.kind.startswith("fragment")][-2:]
    assert (ended["failure"], started["in_place"], started["nodes"]) == (True, True, ["n0", "n2"])
    assert (ended["lost"], started["repaired"]) == ({"s1": "n1"}, True), "the log names the node that was lost"


def test_the_slots_of_a_node_are_lost_together(tmp_path: Path) -> None:
    stage = Stage(tmp_path, slots_per_node=2)
    stage.running("n0", "n1")
    stage.lose("s1a")
    assert stage.turn() == [], "more may fail"
    stage.now += 0.05
    stage.lose("s1b")
    stage.now += 0.2
    stage.turn()
    assert (stage.place("s0a"), stage.place("s0b")) == ((0, 2, True), (1, 2, True))
    stage.journal.close()


def test_a_training_that_lost_its_first_member_is_told_of_by_the_next(stage: Stage) -> None:
    future = stage.running("n0", "n1")
    stage.lose("s0")
    stage.recover("s1")
    stage.ends("s1", RunFinished(stage.report()), serialize("from rank 0"))
    assert future.result(0) == "from rank 0"


def test_when_all_members_are_lost_it_starts_from_the_newest_checkpoint(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.lose("s0", crash=False)
    stage.lose("s1", crash=False)
    stage.turn()
    assert stage.fragments()[0].detail["failure"]
    ((slot, order),) = stage.on("n2")
    assert (slot, order.place is None) == ("s2", False)
    stage.progress("s2", resumed_from=4, slot_seconds=3.0)
    (resumed,) = [entry for _, entry in stage.history() if entry.kind == "fragment_resumed"]
    assert resumed.detail == {"step": 4, "slot_seconds": 3.0, "from_memory": False, "furthest": 1}


def test_newcomers_that_wait_for_a_group_that_is_lost_are_started_afresh(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.lose("s0")
    stage.now += 0.2
    assert kinds(stage.on("n1")) == [("s1", "pause")]
    stage.ends("s1", PeersFailed(0, "dismissed"))
    (sent,) = stage.turn()
    assert (sent[0], sent[1].place is None) == ("s1", False)


def test_a_loss_in_a_training_that_cannot_change_in_place_ends_its_members(stage: Stage) -> None:
    stage.running("n0", "n1", in_place=False)
    stage.lose("s1", crash=False)
    stage.now += 0.2
    stage.on("n0")
    assert stage.place("s0") == (None, 0, True)
    stage.ends("s0", PeersFailed(0, "gone", step=12))
    assert kinds(stage.turn()) == [("s0", "run")]
    stage.progress("s0", step=9, resumed_from=9, from_memory=True)
    told = [mark for _, entry in stage.history() if (mark := mark_of(entry.record))]
    assert told[-3:] == [
        "its process on n1 was lost; it trained on n0, n1",
        "trains on n0",
        "resumed from copies in memory of step 9, repeats steps 10 to 12",
    ]
    assert RunState(stage.journal.path).refresh().trainings["t"].remark() == (
        "its process on n1 was lost; resumed from copies in memory of step 9, repeats steps 10 to 12"
    )


def test_survivors_that_do_not_answer_are_given_up_in_time(stage: Stage) -> None:
    stage.running("n0", "n1", "n2")
    stage.lose("s2", crash=False)
    stage.now += 0.2
    stage.turn()
    stage.joins("s0")
    stage.now += 70
    stage.turn()
    assert stage.killed == []
    stage.now += 0.1
    stage.turn()
    assert stage.killed == ["s1"]
    stage.now += 0.2
    stage.turn()
    assert stage.place("s0") == (0, 1, True)


def test_survivors_that_compute_are_not_given_up_before_another_waits_for_them(stage: Stage) -> None:
    """All validate for longer than the time that a change has: what they do next is to come to the meeting."""
    stage.running("n0", "n1", "n2")
    stage.lose("s2", crash=False)
    stage.now += 0.2
    stage.turn()
    for _ in range(60):
        stage.now += 10
        stage.beats("s0", "s1")
        stage.turn()
    assert stage.killed == []
    stage.calls_store("s0", stage.group("s0"), "get", timeout=60.0)
    stage.now += 60
    stage.turn()
    stage.group_fails("s0", generation=stage.changes["s0"].generation)
    stage.now += 2
    stage.beats("s0", "s1")
    stage.turn()
    assert (stage.killed, stage.place("s1")) == ([], (1, 2, True))
    stage.now += 9
    stage.beats("s0", "s1")
    stage.turn()
    assert stage.killed == ["s1"]


def test_a_member_without_a_group_leaves_when_the_first_one_finishes(stage: Stage) -> None:
    """It has missed the result of the last operation, which the first one has."""
    future = stage.running("n0", "n1")
    stage.group_fails("s1")
    stage.ends("s0", RunFinished(Stage.report()))
    assert future.done()
    assert stage.place("s1") == (None, 0, True)


def test_a_member_that_finishes_is_not_waited_for_by_one_that_has_missed_the_last_result(stage: Stage) -> None:
    stage.running("n0", "n1", "n2")
    stage.group_fails("s0")
    stage.lose("s2", crash=False)
    stage.now += 0.2
    stage.turn()
    assert stage.place("s0") == (0, 2, True)
    stage.ends("s1", RunFinished(Stage.report()))
    stage.now += 0.2
    stage.turn()
    assert stage.place("s0") == (0, 1, True)


def test_a_survivor_that_never_answers_is_dropped_though_the_others_fail_to_meet_before(stage: Stage) -> None:
    """The others, which wait for it in vain, report a failed group after 60 s, and each new command includes it."""
    stage.running("n0", "n1", "n2")
    stage.lose("s2", crash=False)
    stage.now += 0.2
    stage.turn()
    stage.now += 60
    stage.group_fails("s0", generation=stage.changes["s0"].generation)
    stage.now += 2
    stage.beats("s0", "s1")
    stage.turn()
    assert stage.place("s1") == (1, 2, True), "it gets another command"
    stage.now += 9
    stage.beats("s0", "s1")
    stage.turn()
    assert stage.killed == ["s1"]


def test_a_survivor_that_waits_at_the_meeting_is_not_dropped_with_the_one_that_does_not_come(stage: Stage) -> None:
    stage.running("n0", "n1", "n2", "n3")
    stage.lose("s3", crash=False)
    stage.now += 0.2
    stage.turn()
    for slot in ("s0", "s1"):
        stage.calls_store(slot, stage.group(slot), "get", timeout=60.0)
    stage.now += 50
    stage.lose("s1", crash=False)
    stage.now += 0.2
    stage.turn()
    assert (stage.place("s0"), stage.place("s2")) == ((0, 2, True), (1, 2, True))
    stage.now += 21
    stage.beats("s0", "s2")
    stage.turn()
    assert stage.killed == ["s2"]


def test_a_newcomer_that_dies_while_it_warms_up_is_not_waited_for(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1", "n2")
    stage.ready("s1")
    assert stage.turn() == []
    stage.lose("s2")
    stage.on("n0", "n1")
    assert stage.place("s1") == (1, 2, False)


def test_a_newcomer_that_dies_after_the_order_is_a_loss_of_the_next_group(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1", "n2")
    stage.ready("s1")
    stage.ready("s2")
    stage.turn()
    lost = stage.group("s0")
    stage.lose("s2")
    stage.now += 0.2
    stage.turn()
    assert (stage.place("s0"), stage.place("s1")) == ((0, 2, True), (1, 2, True))
    stage.calls_store("s0", lost, "set")
    assert not stage.sent[-1][1].ok, "the rendezvous of the abandoned group is closed"
    stage.joins("s0", "s1")
    assert [entry.detail["nodes"] for entry in stage.fragments("started")] == [["n0"], ["n0", "n1"]]


def test_a_survivor_that_dies_while_the_survivors_of_another_regroup_is_left_out_too(stage: Stage) -> None:
    stage.running("n0", "n1", "n2")
    stage.lose("s0", crash=False)
    stage.now += 0.2
    stage.turn()
    stage.joins("s1")
    stage.lose("s2", crash=False)
    stage.now += 0.2
    stage.turn()
    assert stage.place("s1") == (0, 1, True)
    stage.joins("s1")
    assert [entry.detail["nodes"] for entry in stage.fragments("started")][-1] == ["n1"]


def test_the_state_of_a_leaver_is_used_if_all_who_should_stay_die(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.on("n0", "n1", "n2")
    stage.ready("s2")
    stage.on("n1", "n2")
    stage.lose("s1", crash=False)
    stage.now += 0.2
    stage.turn()
    assert (stage.place("s0"), stage.place("s2")) == ((0, 2, True), (1, 2, True))


def test_newcomers_alone_cannot_go_on(stage: Stage) -> None:
    """The only member with the state fails after its newcomers have received their command."""
    stage.running("n0")
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.turn()
    stage.lose("s0")
    stage.now += 0.2
    assert kinds(stage.on("n1")) == [("s1", "pause")]
    stage.ends("s1", PeersFailed(0, "dismissed"))
    assert [message.place is None for _, message in stage.turn()] == [False]


def test_a_member_that_pauses_is_not_missed_but_one_that_is_lost_meanwhile_is(stage: Stage) -> None:
    """The survivors of a failure during a pause regroup, and then pause."""
    stage.running("n0", "n1")
    stage.on()
    stage.lose("s1", crash=False)
    stage.now += 0.2
    stage.turn()
    assert stage.place("s0") == (0, 1, True)
    stage.sent.clear()
    stage.joins("s0")
    assert kinds(stage.sent) == [("s0", "pause")]


# Members that lose their connections.


def test_a_stranded_member_waits_until_the_loss_shows(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.group_fails("s0")
    stage.now += 2
    stage.beats("s0")
    assert stage.turn() == [], "no heartbeat of the other has arrived since"
    stage.lose("s1")
    stage.now += 0.2
    stage.turn()
    assert stage.place("s0") == (0, 1, True)


def test_members_that_are_stranded_though_all_live_regroup(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.group_fails("s0")
    assert stage.turn() == []
    stage.now += 2
    stage.beats("s0", "s1")
    stage.turn()
    assert (stage.place("s0"), stage.place("s1")) == ((0, 2, True), (1, 2, True))
    stage.now += 2
    stage.beats("s0", "s1")
    assert stage.turn() == [], "a change is in progress"


def test_a_member_that_says_it_is_stranded_when_its_order_is_on_the_way_is_not_ordered_again(stage: Stage) -> None:
    stage.running("n0", "n1", "n2")
    before = stage.generation
    stage.lose("s2")
    stage.now += 0.2
    stage.turn()
    stage.group_fails("s0", generation=before)
    stage.now += 2
    stage.beats("s0", "s1")
    assert stage.turn() == []


def test_a_group_in_which_everybody_only_waits_is_cut_and_regroups(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.waits("s0", 11.0)
    stage.waits("s1", 9.0)
    assert stage.turn() == []
    stage.waits("s1", 10.5)
    stage.turn()
    assert (stage.place("s0"), stage.place("s1")) == ((0, 2, True), (1, 2, True))
    assert stage.turn() == []
    stage.joins("s0", "s1")
    assert stage.turn() == []


def test_a_newcomer_that_hangs_when_its_first_group_is_called_off_is_ended(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.turn()
    stage.ends("s0", RunPaused(PauseReason.CLOSING, stage.report()))
    stage.now += 71
    stage.turn()
    assert stage.killed == ["s1"]


# Crash loops.


def test_crashes_without_a_further_step_end_in_a_message_and_a_step_forgives_them(stage: Stage) -> None:
    """One restart is allowed here."""
    future = stage.running("n0", "n1", "n2", "n3", step=7)
    stage.lose("s3", "segmentation fault")
    stage.recover("s0", "s1", "s2")
    stage.progress("s0", step=8)
    stage.lose("s2", "segmentation fault")
    stage.recover("s0", "s1")
    stage.progress("s0", step=8)
    assert not future.done()
    stage.lose("s1", "bus error")
    stage.now += 0.2
    stage.turn()
    with pytest.raises(TooManyRestarts, match=r"2 crashes without a step beyond step 8.*bus error.*worker logs"):
        future.result(0)
    assert stage.place("s0") == (None, 0, True)


def test_crashes_that_leave_nobody_are_counted_too(stage: Stage) -> None:
    future = stage.submit()
    for node in ("0", "1"):
        stage.on(f"n{node}")
        stage.lose(f"s{node}", "segmentation fault")
        stage.turn()
    with pytest.raises(TooManyRestarts, match="segmentation fault"):
        future.result(0)
    assert len(stage.fragments("ended")) == len(stage.fragments("started")) == 2
    assert not stage.manager.rendezvous._stores


def test_nodes_that_were_taken_are_no_crashes(stage: Stage) -> None:
    future = stage.submit()
    for node in ("0", "1", "2"):
        stage.on(f"n{node}")
        stage.lose(f"s{node}", crash=False)
        stage.turn()
    stage.on("n3")
    assert not future.done()
