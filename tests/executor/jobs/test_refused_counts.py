"""A function that fails on a number of processes which its model does not allow: the job starts on another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.slot.run_end import serialized_exception
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.protocol.messages import StartRun
from freetrain_parsl.protocol.reports import CountRefused, PauseReason, PeersFailed, RunFailed, RunPaused
from tests.executor.stage import Stage, kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.journal.close()


def refused(size: int, allowed: AllowedCounts) -> RunFailed:
    return RunFailed("ValueError: torch's words", CountRefused(size, allowed, "net.weight is at fault"))


def notes(stage: Stage) -> list[str]:
    return [entry.detail["note"] for _, entry in stage.history() if entry.kind == "training_noted"]


def learned(stage: Stage) -> AllowedCounts:
    """Return the rule that the planner got last."""
    return [event.trainer for event in stage.events if isinstance(event, ev.TrainerLearned)][-1].allowed_counts


def test_a_first_start_on_a_count_that_is_not_allowed_is_repeated_on_another_one(stage: Stage) -> None:
    """It counts neither as a failure nor as a crash, sets no node aside, and is said once."""
    future = stage.submit()
    stage.on("n0", "n1", "n2")
    for slot in ("s0", "s1", "s2"):
        stage.ends(slot, refused(3, AllowedCounts(divisor_of=8)), serialized_exception(ValueError("torch's words")))
    assert learned(stage) == AllowedCounts(divisor_of=8)
    assert stage.turn() == [], "not again on the three that it still has"
    assert kinds(stage.on("n0", "n1")) == [("s0", "run"), ("s1", "run")]
    assert not future.done()
    assert [entry.detail["failure"] for entry in stage.fragments()] == [False]
    assert notes(stage) == [
        "it cannot run on 3 processes: net.weight is at fault; it gets numbers of nodes that are divisors of 8"
    ]
    assert (stage.aside, stage.killed) == ([], [])
    stage.progress("s0", allowed_counts=AllowedCounts(2))
    assert learned(stage) == AllowedCounts(2, 8), "what the session reports later comes on top"


def test_members_that_lose_the_first_one_to_fail_are_ended_and_not_counted(stage: Stage) -> None:
    """They wait for it in a collective; what they say of it comes before or after."""
    future = stage.submit()
    stage.on("n0", "n1", "n2")
    stage.ends("s2", PeersFailed(stage.generation, "connection closed"))
    stage.sent.clear()
    stage.ends("s0", refused(3, AllowedCounts(2)))
    assert kinds(stage.sent) == [("s1", "change")]
    assert stage.place("s1") == (None, 0, True)
    stage.ends("s1", PeersFailed(stage.generation, "connection closed"))
    stage.now += 1.0
    assert kinds(stage.on("n0", "n1")) == [("s0", "run"), ("s1", "run")]
    assert [entry.detail["failure"] for entry in stage.fragments()] == [False]
    assert not future.done()


def test_it_fails_if_no_count_is_left_or_the_refusal_excludes_none(stage: Stage) -> None:
    """The error names the bounds, and what is refused; the second time, it is the function's own."""
    future = stage.submit(min_nodes=3)
    stage.on("n0", "n1", "n2")
    stage.ends("s0", refused(3, AllowedCounts(divisor_of=2)), serialized_exception(ValueError("torch's words")))
    with pytest.raises(
        InvalidApp, match=r"divisors of 2, and none .* on 3 processes it failed: net\.weight is at fault"
    ):
        future.result(0)


def test_a_refusal_that_leaves_as_many_counts_is_the_functions_own_error(stage: Stage) -> None:
    """Otherwise it could be repeated for ever."""
    future = stage.submit()
    stage.on("n0", "n1", "n2")
    stage.ends("s0", refused(2, AllowedCounts()), serialized_exception(ValueError("torch's words")))
    with pytest.raises(ValueError, match="torch's words"):
        future.result(0)


def test_counts_are_learned_in_nodes_of_several_processes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, slots_per_node=2)
    stage.submit()
    stage.on("n0", "n1", "n2")
    stage.ends("s0a", refused(6, AllowedCounts(divisor_of=8)))
    assert learned(stage) == AllowedCounts(divisor_of=4)
    stage.journal.close()


def test_a_newcomer_that_prepares_for_a_count_that_is_not_allowed_is_not_its_nodes_fault(stage: Stage) -> None:
    """The members train undisturbed; no other one is started until the planner has assigned other nodes."""
    future = stage.running("n0", "n1", max_nodes=4)
    assert kinds(stage.on("n0", "n1", "n2")) == [("s2", "run")]
    stage.ends("s2", refused(3, AllowedCounts(2)))
    assert (stage.aside, stage.turn()) == ([], [])
    assert learned(stage) == AllowedCounts(2)
    assert [type(message) for _, message in stage.on("n0", "n1", "n2", "n3")] == [StartRun, StartRun]
    assert not future.done()


def test_a_start_that_was_to_be_paused_learns_from_a_refusal_too(stage: Stage) -> None:
    stage.submit()
    stage.on("n0", "n1", "n2")
    assert kinds(stage.on("n0"))[0] == ("s0", "pause")
    stage.ends("s0", refused(3, AllowedCounts(2)))
    for slot in ("s1", "s2"):
        stage.ends(slot, RunPaused(PauseReason.REQUESTED))
    assert stage.turn() == []
    assert kinds(stage.on("n0", "n3")) == [("s0", "run"), ("s3", "run")]


def test_a_newcomer_that_was_dismissed_with_its_group_may_still_be_refused(stage: Stage) -> None:
    stage.running("n0", "n1")
    stage.on("n0", "n1", "n2")
    for slot in ("s0", "s1"):
        stage.lose(slot, crash=False)
    stage.now += 0.2
    assert kinds(stage.turn()) == [("s2", "pause")]
    stage.ends("s2", refused(3, AllowedCounts(2)))
    assert (stage.registry.slots["s2"].busy, stage.aside) == (None, [])


def test_a_training_that_was_cancelled_remains_so_if_a_newcomer_is_refused(stage: Stage) -> None:
    future = stage.running("n0", "n1")
    stage.on("n0", "n1", "n2")
    stage.manager.cancel(future)
    stage.ends("s2", refused(3, AllowedCounts(2)))
    assert kinds(stage.turn()) == [("s0", "pause"), ("s1", "pause")]


def test_members_of_a_refused_start_that_are_far_behind_are_killed_but_not_counted(stage: Stage) -> None:
    """The nodes of a first start may be apart by more than the time within which members end after a failure."""
    stage.submit()
    stage.on("n0", "n1", "n2")
    stage.ends("s0", refused(3, AllowedCounts(2)))
    stage.now += 100.0
    stage.turn()
    assert stage.killed == ["s1", "s2"]
    stage.now += 1.0
    stage.turn()
    assert [entry.detail["failure"] for entry in stage.fragments()] == [False]
    assert kinds(stage.on("n0", "n3")) == [("s0", "run"), ("s3", "run")]
