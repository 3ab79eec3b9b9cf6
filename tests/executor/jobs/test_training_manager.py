"""The training manager with slots that are only names: messages are arguments, time is a number."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import serialize

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.jobs.training.machine import TrainingMachine
from freetrain_parsl.executor.jobs.training.states import fewest_to_exclude
from freetrain_parsl.executor.journal import read_progress
from freetrain_parsl.executor.training_logs import mark_of
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.protocol.messages import ChangeBatch, Place, RunEnded, StoreRequest
from freetrain_parsl.protocol.options import Code
from freetrain_parsl.protocol.reports import (
    BatchReport,
    Noted,
    PauseReason,
    PeersFailed,
    RunFailed,
    RunFinished,
    RunPaused,
)
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.report.sentences import IncidentLevel, incident_of
from tests.executor.stage import Stage, kinds

if TYPE_CHECKING:
    from pathlib import Path

# Starting, pausing, ending.


def test_a_training_starts_on_all_slots_of_its_nodes_with_distinct_ranks(stage: Stage) -> None:
    stage.submit()
    assert stage.turn() == []
    sent = stage.on("n0", "n2")
    assert kinds(sent) == [("s0", "run"), ("s2", "run")]
    assert [m.place for _, m in sent] == [Place(1, 0, 2), Place(1, 1, 2)]
    assert stage.turn() == []


def test_what_slots_of_a_group_share_is_made_once(stage: Stage) -> None:
    stage.submit()
    sent = stage.on("n0", "n1", "n2")
    assert len({id(message.options) for _, message in sent}) == 1


def test_the_slots_of_a_job_that_starts_newcomers_are_looked_up_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.running("n0")
    looked_up: list[int] = []
    complete_slots = stage.registry.complete_slots
    monkeypatch.setattr(stage.registry, "complete_slots", lambda at: looked_up.append(len(at)) or complete_slots(at))
    assert kinds(stage.on("n0", "n1", "n2", "n3")) == [("s1", "run"), ("s2", "run"), ("s3", "run")]
    assert looked_up.count(4) == 1


def test_a_training_that_loses_all_nodes_is_paused_and_starts_again_when_it_gets_some(stage: Stage) -> None:
    stage.running("n0", "n1")
    assert kinds(stage.on()) == [("s0", "pause"), ("s1", "pause")]
    assert stage.turn() == []
    stage.ends("s0", RunPaused(PauseReason.REQUESTED))
    assert stage.on("n1") == [], "its other member has not ended"
    stage.ends("s1", RunPaused(PauseReason.REQUESTED))
    assert kinds(stage.turn()) == [("s1", "run")]
    assert not stage.fragments()[0].detail["failure"]


def test_a_training_that_cannot_change_in_place_is_paused_and_started_on_its_new_nodes(stage: Stage) -> None:
    stage.running("n0", "n1", in_place=False)
    assert kinds(stage.on("n0", "n1", "n2")) == [("s0", "pause"), ("s1", "pause")]
    stage.ends("s0", RunPaused(PauseReason.REQUESTED))
    stage.ends("s1", RunPaused(PauseReason.REQUESTED))
    assert kinds(stage.turn()) == [("s0", "run"), ("s1", "run"), ("s2", "run")]


def test_a_training_that_has_not_reported_yet_may_begin_before_it_grows(stage: Stage) -> None:
    stage.submit()
    stage.on("n0")
    assert stage.on("n0", "n1") == []
    stage.progress("s0")
    assert kinds(stage.turn()) == [("s1", "run")]


def test_a_training_that_has_not_reported_yet_leaves_nodes_by_a_pause(stage: Stage) -> None:
    stage.submit()
    stage.on("n0", "n1")
    assert kinds(stage.on("n0")) == [("s0", "pause"), ("s1", "pause")]


def test_a_training_waits_for_nodes_that_another_still_holds(stage: Stage) -> None:
    stage.running("n0")
    stage.submit("u")
    assert stage.on("n0", name="u") == []
    stage.on()
    stage.ends("s0", RunPaused(PauseReason.REQUESTED))
    assert kinds(stage.turn()) == [("s0", "run")]


def test_members_that_pause_by_themselves_make_all_pause(stage: Stage) -> None:
    """A node is about to close: newcomers are dismissed, and the next group starts from the checkpoint."""
    stage.running("n0", "n1")
    stage.on("n0", "n1", "n2")
    stage.sent.clear()
    stage.ends("s1", RunPaused(PauseReason.CLOSING))
    assert sorted(kinds(stage.sent)) == [("s0", "pause"), ("s2", "pause")]
    stage.ends("s0", RunPaused(PauseReason.CLOSING))
    stage.ends("s2", PeersFailed(0, "dismissed"))
    assert kinds(stage.turn()) == [("s0", "run"), ("s1", "run"), ("s2", "run")]


def test_the_first_members_value_resolves_the_future_and_the_others_may_end_later(stage: Stage) -> None:
    future = stage.running("n0", "n1")
    stage.ends("s0", RunFinished(stage.report(samples=64)), serialize({"loss": 0.5}))
    assert future.result(0) == {"loss": 0.5}
    assert any(isinstance(event, ev.TrainerFinished) for event in stage.events)
    stage.ends("s1", RunFinished(stage.report()))
    assert [entry.kind for _, entry in stage.history()][-2:] == ["training_finished", "fragment_ended"]
    assert read_progress(stage.journal.path)["t"]["samples"] == 64


def test_a_name_is_free_again_while_old_members_are_still_ending(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.ends("s0", RunFinished(stage.report()), serialize(1))
    again = stage.submit()
    stage.on("n2")
    stage.ends("s1", RunFailed(), b"old news")
    assert not again.done()
    stage.ends("s2", RunFinished(stage.report()), serialize(2))
    assert again.result(0) == 2


def test_a_value_that_cannot_be_read_here_fails_the_future_not_the_driver(stage: Stage) -> None:
    future = stage.running("n0")
    stage.ends("s0", RunFinished(stage.report()), b"no serialisation at all")
    with pytest.raises(Exception, match="cannot be deserialized here"):
        future.result(0)


def failed(text: str) -> tuple[RunFailed, bytes]:
    return RunFailed(f"KeyError: {text}"), serialize(RemoteExceptionWrapper(KeyError, KeyError(text), None))


def test_a_node_on_which_a_newcomer_raises_an_exception_is_set_aside_and_the_training_goes_on(stage: Stage) -> None:
    future = stage.running("n0")
    stage.on("n0", "n1")
    stage.ends("s1", *failed("no data here"))
    stage.turn()
    assert stage.aside == ["s1"]
    assert not future.done()
    stage.on("n0", "n2")
    stage.ready("s2")
    stage.turn()
    stage.joins("s0", "s2")
    stage.on("n0", "n1", "n2")
    stage.ends("s1", *failed("still no data"))
    stage.ends("s0", RunFinished(stage.report()), serialize(1))
    assert future.result(0) == 1


def test_an_exception_of_newcomers_on_three_nodes_in_a_row_is_the_function_s(stage: Stage) -> None:
    future = stage.running("n0")
    for slot in ("s1", "s2"):
        stage.on("n0", "n" + slot[1:])
        stage.ends(slot, *failed("broken"))
        assert not future.done()
    stage.on("n0", "n3")
    stage.ends("s3", *failed("broken"))
    with pytest.raises(KeyError, match="broken"):
        future.result(0)


class WithoutText(Exception):
    def __str__(self) -> str:
        return str(self.args[3])


def test_an_exception_whose_text_fails_ends_the_training_all_the_same(stage: Stage) -> None:
    """It was counted as a fault of the slot, and the future stayed pending."""
    future = stage.running("n0")
    stage.ends("s0", RunFailed(), serialize(RemoteExceptionWrapper(WithoutText, WithoutText("a"), None)))
    with pytest.raises(WithoutText):
        future.result(0)


def test_an_exception_of_the_user_ends_the_training_on_all_its_slots_at_once(stage: Stage) -> None:
    future = stage.running("n0", "n1")
    stage.on("n0", "n1", "n2")
    stage.sent.clear()
    stage.ends("s1", RunFailed(), serialize(RemoteExceptionWrapper(KeyError, KeyError("theirs"), None)))
    with pytest.raises(KeyError, match="theirs"):
        future.result(0)
    assert stage.place("s0") == (None, 0, True)
    assert ("s2", "pause") in kinds(stage.sent)
    stage.ends("s0", RunPaused(PauseReason.LEFT))
    stage.ends("s2", PeersFailed(0, "dismissed"))
    assert stage.turn() == []


def test_reports_of_an_earlier_run_are_ignored(stage: Stage) -> None:
    stage.submit()
    stage.on("n0")
    stage.progress("s0", run=stage.runs["s0"] - 1)
    stage.journal.commit()
    assert read_progress(stage.journal.path) == {}


def test_a_late_end_of_an_earlier_run_does_not_free_a_slot_that_runs_another(stage: Stage) -> None:
    stage.running("n0")
    earlier = stage.runs["s0"]
    stage.ends("s0", RunPaused(PauseReason.CLOSING))
    stage.turn()
    assert stage.runs["s0"] > earlier
    late = RunEnded("t", earlier, RunFinished(stage.report()), serialize(1))
    stage.manager.on_message(stage.registry.slots["s0"], late)
    assert stage.registry.slots["s0"].busy == "t"
    assert stage.turn() == []


def test_a_slot_uses_the_rendezvous_of_its_own_training_only(stage: Stage) -> None:
    stage.running("n0")
    stage.submit("u")
    stage.on("n1", name="u")
    stage.sent.clear()
    for slot, group in (("s1", "t/1"), ("s3", "t/1"), ("s0", "t/1")):
        request = StoreRequest(group, 1, "set", ("x",), 1.0, payload=b"value")
        stage.manager.on_store_request(stage.registry.slots[slot], request)
    assert [(slot, message.ok) for slot, message in stage.sent] == [("s1", False), ("s3", False), ("s0", True)]


def test_progress_tells_the_planner_what_is_left(stage: Stage) -> None:
    stage.submit()
    stage.on("n0")
    stage.progress("s0", samples=64, samples_total=100)
    assert ev.TrainerProgressed(0.0, "t", 36.0) in stage.events


# Estimates.


def test_the_planner_learns_what_rescales_cost_if_that_is_news(stage: Stage) -> None:
    stage.running("n0")
    stage.events.clear()
    for paused in (1.0, 0.0):
        stage.on("n0", "n1")
        stage.ready("s1")
        stage.turn()
        stage.joins("s0", "s1", paused=paused)
        stage.on("n0")
        stage.ends("s1", RunPaused(PauseReason.LEFT))
        stage.joins("s0", paused=2.0)
    learned = [event.trainer.costs for event in stage.events if isinstance(event, ev.TrainerLearned)]
    assert [(costs.up, costs.down) for costs in learned] == [(1.5, 2.0), (0.75, 2.0)]


def test_the_planner_learns_how_fast_the_shards_of_a_job_move(stage: Stage) -> None:
    """Of 8 GB, each of two nodes has 4: half of it moves in 2 s, at twice the bandwidth that is assumed."""
    stage.running("n0")
    stage.progress("s0", step=2, sharded_bytes=8 * 10**9)
    stage.events.clear()
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.turn()
    stage.joins("s0", "s1", paused=3.0, transferred=2.0)
    (learned,) = [event.trainer.costs for event in stage.events if isinstance(event, ev.TrainerLearned)]
    assert (learned.up, learned.bandwidth) == (1.5, 1.5e9)
    assert learned.changes(2, 4).tolist() == pytest.approx([2.0, 2.0 + 8 / 3, 0.0, 1.5 + 16 / 9, 1.5 + 4 / 3])


def test_the_planner_learns_the_rate_at_each_size(stage: Stage) -> None:
    stage.running("n0")
    stage.events.clear()
    stage.progress("s0", step=11, samples=1000, slot_seconds=10.0)
    stage.progress("s0", step=21, samples=2000, slot_seconds=20.0)
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.turn()
    stage.progress("s0", step=31, samples=3000, slot_seconds=30.0)  # a change is under way
    stage.joins("s0", "s1")
    stage.progress("s0", step=41, samples=4000, slot_seconds=40.0)
    stage.progress("s0", step=51, samples=5000, slot_seconds=70.0)
    learned = [event.trainer for event in stage.events if isinstance(event, ev.TrainerLearned)]
    rates = [[trainer.curve(nodes) for nodes in (1, 2, 4)] for trainer in learned]
    assert rates[0] == pytest.approx([100, 180, 324], rel=0.02)
    assert rates[-1] == pytest.approx([100, 67, 120], rel=0.02)


def test_the_planner_learns_the_counts_that_a_model_allows(stage: Stage) -> None:
    """In nodes: here of one slot each; the search for its size goes on to the next of them."""
    stage.running("n0", max_nodes=16, scaling=ScalingCurve.to_be_learned())
    stage.events.clear()
    for step in (11, 21):
        rule = AllowedCounts(divisor_of=9)
        stage.progress("s0", step=step, samples=100 * step, slot_seconds=1.0 * step, allowed_counts=rule)
    learned = [event.trainer for event in stage.events if isinstance(event, ev.TrainerLearned)]
    assert {trainer.allowed_counts for trainer in learned} == {AllowedCounts(divisor_of=9)}
    assert [trainer.max_nodes for trainer in learned] == [1, 3]


def test_a_model_that_runs_on_no_count_within_the_bounds_fails_its_job(stage: Stage) -> None:
    future = stage.running("n0", "n1", min_nodes=2, max_nodes=2)
    stage.progress("s0", step=11, allowed_counts=AllowedCounts(3))
    stage.turn()
    with pytest.raises(InvalidApp, match=r"multiples of 3, and none of these is between min_nodes \(2\)"):
        future.result(0)


def test_a_deadline_is_a_time_or_counts_from_the_submission(stage: Stage) -> None:
    stage.now = 50.0
    stage.submit("in", deadline=timedelta(seconds=100))
    stage.submit("at", deadline=datetime.fromtimestamp(400.0, timezone.utc))
    submitted = [event.trainer for event in stage.events if isinstance(event, ev.TrainerSubmitted)]
    assert [trainer.deadline for trainer in submitted] == [150.0, 400.0]


def test_costs_that_the_user_states_are_believed(stage: Stage) -> None:
    stage.running("n0", costs=CostsInSeconds(up=9))
    stage.on("n0", "n1")
    stage.ready("s1")
    stage.turn()
    stage.joins("s0", "s1", paused=1.0)
    assert not any(isinstance(event, ev.TrainerLearned) for event in stage.events)


def test_a_loss_says_nothing_of_what_a_planned_change_costs(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.events.clear()
    stage.lose("s1", crash=False)
    stage.now += 0.2
    stage.turn()
    stage.joins("s0", paused=20.0)
    assert not any(isinstance(event, ev.TrainerLearned) for event in stage.events)


def test_slots_are_told_how_often_trainings_fall_back_on_their_checkpoint(stage: Stage) -> None:
    """An hour at first, and less after failures of all members."""
    stage.submit()
    ((_, first),) = stage.on("n0")
    assert first.options.mean_time_between_failures == timedelta(seconds=3600)
    stage.now = 400.0
    stage.lose("s0", crash=False)
    stage.turn()
    ((_, second),) = stage.on("n1")
    assert second.options.mean_time_between_failures == timedelta(seconds=2000)


def test_a_member_that_others_do_not_reach_is_left_out_and_its_node_set_aside(stage) -> None:
    """The node reaches the driver: neither its process nor the training job has crashed."""
    stage.running("n0", "n1", "n2")
    generation = stage.generation
    for slot in ("s0", "s1", "s2"):
        stage.group_fails(slot, generation, "no way", ((1, 0), (2, 1)))
    stage.recover("s0", "s2")
    assert [stage.place(slot)[:2] for slot in ("s0", "s2")] == [(0, 2), (1, 2)]
    assert stage.place("s1")[0] is None
    assert stage.aside == ["s1"]
    assert stage.killed == []


def test_a_report_of_an_older_group_sets_nobody_aside(stage) -> None:
    stage.running("n0", "n1")
    generation = stage.generation
    stage.group_fails("s0")
    stage.group_fails("s1")
    stage.now += 2.0
    stage.beats("s0", "s1")
    stage.recover("s0", "s1")
    stage.group_fails("s1", generation, "no way", ((1, 0),))
    stage.turn()
    assert stage.aside == []


@pytest.mark.parametrize(
    ("unreachable", "chosen"),
    [
        ([], ()),
        ([(1, 0)], ("b",)),
        ([(1, 0), (2, 1), (3, 1)], ("b",)),
        ([(1, 0), (2, 0), (2, 1)], ("c", "b")),
        ([(3, 0), (3, 1), (2, 0), (2, 1)], ("d", "c")),
        ([(7, 0), (1, 1), (2,)], ()),
    ],
)
def test_few_are_cut_off_so_that_the_others_reach_each_other(unreachable, chosen) -> None:
    assert fewest_to_exclude(("a", "b", "c", "d"), unreachable) == chosen


@pytest.mark.parametrize(("with_state", "chosen"), [("a", ("d", "b")), ("ab", ("a",)), ("bcd", ("a",))])
def test_the_last_slot_with_the_state_is_not_cut_off(with_state, chosen) -> None:
    assert fewest_to_exclude(("a", "b", "c", "d"), [(1, 0), (3, 0)], with_state) == chosen


# Old results, and changed code.


def test_a_result_of_an_earlier_run_is_told_as_one(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The function finds a complete checkpoint, trains nothing, and returns what it returned before."""
    future = stage.submit()
    stage.on("n0")
    stage.progress("s0", step=40, resumed_from=40)
    stage.ends("s0", RunFinished(stage.report(step=40, resumed_from=40)), serialize("old"))
    assert future.result(0) == "old"
    assert "its result is that of an earlier run, whose checkpoint of step 40 was complete" in caplog.text
    assert stage.history()[-2][1].detail == {"trained": False, "step": 40}
    training = RunState(stage.journal.path).refresh().trainings["t"]
    assert training.remark() == "result of an earlier run: nothing was trained"


@pytest.mark.parametrize("resumed_from", [None, 39])
def test_a_result_that_this_run_has_trained_for_is_told_without_a_remark(
    stage: Stage, resumed_from: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    stage.submit()
    stage.on("n0")
    stage.progress("s0", step=resumed_from or 0, resumed_from=resumed_from)
    stage.ends("s0", RunFinished(stage.report(step=40, resumed_from=resumed_from)), serialize("new"))
    assert "earlier run" not in caplog.text
    assert RunState(stage.journal.path).refresh().trainings["t"].remark() == ""


def test_a_change_of_code_is_told_once_and_kept_in_the_journal(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.submit()
    stage.on("n0")
    for step in (1, 2):
        stage.progress("s0", step=step, code_note="starting over: its code has changed")
    assert caplog.text.count("training job t: starting over") == 1
    assert [entry.detail for _, entry in stage.history() if entry.kind == "code_changed"] == [
        {"note": "starting over: its code has changed"}
    ]


def test_a_note_of_a_process_reaches_the_user_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """In the log of the driver, the marks of the training job's own log, the live view and `freetrain explain`."""
    stage.running("n0")
    for _ in range(2):
        stage.reports("s0", Noted("saved and resumed instead of changed in place: torch.compile"))
    assert caplog.text.count("training job t: saved and resumed instead") == 1
    (entry,) = [entry.record for _, entry in stage.history() if entry.kind == "training_noted"]
    assert mark_of(entry) == "saved and resumed instead of changed in place: torch.compile"
    assert incident_of(entry) == (IncidentLevel.NOTICE, mark_of(entry))
    assert RunState(stage.journal.path).refresh().trainings["t"].remark() == mark_of(entry)


def test_the_log_says_how_much_a_change_has_moved(stage: Stage) -> None:
    stage.running("n0")
    stage.on("n0", "n1", "n2")
    for slot in ("s1", "s2"):
        stage.ready(slot)
    stage.turn()
    stage.joins("s0", paused=0.25)
    stage.joins("s1", "s2", paused=0.5, transferred=0.1, received=600_000_000)
    assert mark_of(stage.fragments("started")[-1].record) == (
        "trains on n0, n1, n2 (in place after 0.50 s, 1,200.0 MB moved)"
    )


def test_slots_are_told_the_code_that_they_should_find_in_checkpoints(stage: Stage) -> None:
    code = Code("app:train", {"app.train": "1"})
    stage.submit(code=code, on_code_change="resume", call="train-1")
    (_, message), *_ = stage.on("n0")
    assert message.options.code == code
    assert (message.options.on_code_change, message.options.call) == ("resume", "train-1")


# Elastic batches.


def in_batches(stage: Stage, slot: str, size: int, step: int) -> list[tuple[str, object]]:
    """Report steps of 10 ms on two slots, whatever the batch; return what is sent."""
    stage.sent.clear()
    batch = BatchReport(size, 32, 16, 256, square=1.0, variance=5000.0)
    stage.progress(slot, step=step, samples=step * size, slot_seconds=0.02 * step, batch=batch)
    return list(stage.sent)


def test_the_first_member_is_commanded_to_change_the_batch_until_it_reports_that(stage: Stage) -> None:
    """A command that is lost with the first member is repeated."""
    stage.running("n0", "n1")
    assert in_batches(stage, "s0", 32, 50) == []
    command = ("s0", ChangeBatch("t", stage.runs["s0"], 64))
    assert in_batches(stage, "s0", 32, 100) == [command]
    assert in_batches(stage, "s0", 32, 150) == [command]
    assert in_batches(stage, "s0", 64, 200) == []
    changed = [entry.detail for _, entry in stage.history() if entry.kind == "batch_changed"]
    assert changed == [{"size": 64, "before": 32, "noise_scale": 5000.0}]


def test_a_training_that_changes_its_group_or_pauses_keeps_its_batch(stage: Stage) -> None:
    stage.running("n0", "n1")
    in_batches(stage, "s0", 32, 50)
    stage.on()
    assert in_batches(stage, "s0", 32, 100) == []


def test_the_remark_on_a_training_has_its_batch_and_noise(stage: Stage, tmp_path: Path) -> None:
    stage.running("n0", "n1")
    in_batches(stage, "s0", 32, 50)
    in_batches(stage, "s0", 64, 100)
    stage.journal.commit()
    state = RunState(stage.journal.path).refresh().trainings["t"]
    expected = "in batches of 64 (at first 32, changed once), gradient noise scale 5000"
    assert state.remark() == state.batch_remark() == expected


def test_trainings_that_wait_cost_the_others_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 of them waiting, each message and each turn looked at all."""
    handled: list[str] = []
    original = TrainingMachine.handle

    def counted(self: TrainingMachine, *arguments: Any) -> Any:
        handled.append(self.name)
        return original(self, *arguments)

    futures = [stage.submit(f"w{number}") for number in range(50)]
    stage.running("n0")
    stage.now += 0.5
    stage.turn()
    monkeypatch.setattr(TrainingMachine, "handle", counted)
    stage.now += 0.25
    stage.turn()
    stage.manager.on_heartbeat(stage.registry.slots["s0"], 0.0)
    stage.progress("s0", step=2)
    assert set(handled) == {"t"}
    handled.clear()
    stage.manager.cancel(futures[7])
    assert handled == ["w7"]
    stage.turn()
    assert futures[7].done()
    assert not futures[8].done()
    handled.clear()
    stage.on("n1", name="w9")
    assert set(handled) == {"w9"}
    handled.clear()
    stage.now += 10.0
    stage.turn()
    assert {"w8", "w10"} < set(handled), "they explain what they wait for"


def test_a_training_that_runs_undisturbed_is_looked_at_once_a_second(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred of them, looked at in each turn, were most of the driver's work with a thousand slots."""
    stage.running("n0", "n1")
    stage.turn()
    handled: list[str] = []
    original = TrainingMachine.handle

    def counted(self: TrainingMachine, event: Any, *arguments: Any) -> Any:
        handled.append(type(event).__name__)
        return original(self, event, *arguments)

    monkeypatch.setattr(TrainingMachine, "handle", counted)
    for _ in range(8):
        stage.now += 0.25
        stage.manager.on_heartbeat(stage.registry.slots["s1"], 0.0)
        stage.progress("s0", step=2)
        stage.turn()
    assert Counter(handled) == {"Said": 8, "TimePassed": 2}
    handled.clear()
    stage.registry.reclaim("n9")
    stage.turn()
    assert handled == ["TimePassed"], "a change of any slots may concern it"
    stage.manager.on_heartbeat(stage.registry.slots["s1"], 3.0)
    stage.turn()
    stage.manager.on_heartbeat(stage.registry.slots["s1"], 0.0)
    assert handled == ["TimePassed", "Heartbeat", "TimePassed", "Heartbeat"]
    stage.lose("s1")
    handled.clear()
    for _ in range(3):
        stage.turn()
    assert handled == ["TimePassed"] * 3, "it changes"
