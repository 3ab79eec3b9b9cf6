"""Replicas of a sharded training job in the driver: which processes form one, and which continue after a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.driver.slot_registry import Block
from freetrain_parsl.planning.events import TrainerHolds, TrainerSubmitted
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.protocol.messages import ChangeGroup, StartRun
from freetrain_parsl.protocol.reports import PauseReason, PeersFailed, Progress, RunPaused

if TYPE_CHECKING:
    from tests.executor.stage import Stage

OPTIONS = {"replicas": 2, "min_nodes": 2, "sharded_bytes": 1000}


def begin(stage: Stage, *nodes: str, replicas: int = 2, least: int = 2) -> None:
    stage.submit(replicas=replicas, min_nodes=least)
    first = next(
        slot for slot, message in stage.on(*nodes) if isinstance(message, StartRun) and message.place.rank == 0
    )
    stage.progress(first, sharded_bytes=1000)


def places(stage: Stage, *slots: str) -> list[tuple[int, int, int]]:
    """Return rank, size and number of replicas of the last place of each slot."""
    commanded = [stage.changes[slot].place for slot in slots]
    return [(place.rank, place.size, place.replicas) for place in commanded if place is not None]


def test_a_group_has_as_many_replicas_as_there_is_room_for(stage: Stage) -> None:
    stage.submit(replicas=2, min_nodes=2)
    starts = {slot: message.place for slot, message in stage.on("n0", "n1", "n2", "n3")}
    assert {slot: (place.rank, place.size, place.replicas) for slot, place in starts.items()} == {
        "s0": (0, 4, 2), "s1": (1, 4, 2), "s2": (2, 4, 2), "s3": (3, 4, 2),
    }  # fmt: skip


@pytest.mark.parametrize(("nodes", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_a_small_group_has_one_replica(stage: Stage, nodes: int, replicas: int) -> None:
    stage.submit(replicas=2, min_nodes=2)
    starts = [message.place for _, message in stage.on(*[f"n{number}" for number in range(nodes)])]
    assert {place.replicas for place in starts} == {replicas}


def test_replicas_are_on_nodes_that_close_together(stage: Stage) -> None:
    for name, ends in (("early", 100.0), ("late", 200.0)):
        stage.registry.blocks[name] = Block(name, (), 1000.0, ends, started=0.0)
    for slot, block in zip(("s0", "s1", "s2", "s3"), ("late", "early", "early", "late"), strict=True):
        stage.registry.slots[slot].block = block
    stage.submit(replicas=2, min_nodes=2)
    starts = {slot: message.place.rank for slot, message in stage.on("n0", "n1", "n2", "n3")}
    assert starts == {"s1": 0, "s2": 1, "s0": 2, "s3": 3}


def test_the_intact_replica_continues_and_the_other_comes_back(stage: Stage) -> None:
    begin(stage, "n0", "n1", "n2", "n3")
    stage.lose("s1", crash=True)
    stage.ends("s0", PeersFailed("connection closed", 1, ()))
    stage.recover("s2", "s3")
    assert places(stage, "s2", "s3") == [(0, 2, 1), (1, 2, 1)]
    assert all(stage.changes[slot].abort for slot in ("s2", "s3"))
    held = [event for event in stage.events if isinstance(event, TrainerHolds)]
    assert [(event.trainer, event.nodes) for event in held] == [("t", {"n2", "n3"})]
    assert not stage.turn(), "the other nodes are not its own until they are assigned again"


def test_the_end_of_a_replica_that_has_been_given_up_does_not_interrupt_the_other(stage: Stage) -> None:
    begin(stage, "n0", "n1", "n2", "n3")
    stage.lose("s1", crash=True)
    stage.now += 0.2
    stage.turn()
    group = stage.group("s2")
    stage.lose("s0", crash=True)
    for _ in range(3):
        stage.now += 1
        stage.turn()
    assert stage.group("s2") == group
    stage.joins("s2", "s3")
    assert stage.fragments("started")[-1].detail["nodes"] == ["n2", "n3"]


def test_a_replica_joins_as_a_whole(stage: Stage) -> None:
    begin(stage, "n2", "n3")
    sent = stage.on("n0", "n1", "n2", "n3")
    assert [(slot, message.next_size) for slot, message in sent] == [("s0", 2), ("s1", 2)]
    stage.ready("s1")
    stage.now += 10
    assert not stage.turn()
    stage.ready("s0")
    assert {type(message) for _, message in stage.turn()} == {ChangeGroup}
    assert places(stage, "s2", "s3", "s0", "s1") == [(0, 4, 2), (1, 4, 2), (2, 4, 2), (3, 4, 2)]
    stage.joins("s0", "s1", "s2", "s3")
    # A node of the first replica closes: the other stays as it is.
    stage.on("n0", "n1")
    assert places(stage, "s0", "s1") == [(0, 2, 1), (1, 2, 1)]
    assert stage.changes["s2"].place is None


def test_a_newcomer_that_fails_in_a_change_leaves_the_group_as_it_was(stage: Stage) -> None:
    begin(stage, "n2", "n3")
    stage.on("n0", "n1", "n2", "n3")
    for slot in ("s0", "s1"):
        stage.ready(slot)
    stage.turn()
    stage.lose("s1", crash=True)
    stage.recover("s2", "s3")
    assert places(stage, "s2", "s3") == [(0, 2, 1), (1, 2, 1)]


def test_without_an_intact_replica_the_job_resumes_from_its_checkpoint(stage: Stage) -> None:
    begin(stage, "n0", "n1", "n2", "n3")
    stage.lose("s1", crash=True)
    stage.lose("s2", crash=False)
    stage.now += 0.2
    stage.turn()
    assert all(stage.changes[slot].place is None and stage.changes[slot].abort for slot in ("s0", "s3"))
    for slot in ("s0", "s3"):
        stage.ends(slot, RunPaused(PauseReason.LEFT, Progress()))
    sent = stage.on("n0", "n3")
    assert [message.place.replicas for _, message in sent] == [1, 1]


def test_the_planner_counts_in_what_is_divided_into_replicas(stage: Stage) -> None:
    begin(stage, "n0", "n1", "n2", "n3")
    (submitted,) = [event.trainer for event in stage.events if isinstance(event, TrainerSubmitted)]
    assert [count for count in range(1, 5) if submitted.may_have(count)] == [2, 4]
    assert str(submitted.allowed_counts) == "up to 2 equal replicas of at least 2"
    with_condition = replace(submitted, allowed_counts=submitted.allowed_counts & AllowedCounts(4), max_nodes=40)
    assert [count for count in range(1, 41) if with_condition.may_have(count)] == [8, 16, 24, 32, 40]


def test_replicas_need_nodes(stage: Stage) -> None:
    with pytest.raises(InvalidApp, match="replicas=2 of at least min_nodes=2 each need max_nodes=4 or more, got 3"):
        stage.submit(replicas=2, min_nodes=2, max_nodes=3)
