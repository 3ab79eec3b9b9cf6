"""Training jobs that cannot be fused, or not with each other."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.fusion.messages import FAILED
from freetrain_parsl.protocol import journal as record
from tests.extensions.fusion.cohorts import arrays, records, submit


def test_trainings_that_cannot_be_fused_train_alone_and_so_do_later_ones(make) -> None:
    world = make(nodes=2)
    world.fuses = False
    submit(world, 4)
    world.advance(1.0)
    world.assign_all()
    world.settle(4)
    assert sorted(world.trainers) == ["t0", "t1", "t2", "t3"]
    assert {entry.subject for entry in records(world, record.TrainsAlone)} == {"t0", "t1", "t2", "t3"}
    world.submit("late")
    assert "late" in world.trainers
    assert records(world, record.TrainsAlone)[-1] == record.TrainsAlone("late", "they differ")
    for _ in range(60):
        world.assign_all()
        world.settle()
    assert all(future.result(0) for future in world.futures.values())


def test_members_that_take_turns_stay_in_arrays_of_which_none_is_faster_than_one_of_them(make) -> None:
    world = make(nodes=2)
    world.steps, world.best_size, world.turns = 60, 4, "fused they are 0.90 times as fast"
    submit(world, 6)
    world.advance(1.0)
    world.assign("cohort-1", frozenset(["n0"]))
    world.settle(8)
    assert arrays(world) == [4], "the others wait"
    curve = world.trainers["cohort-1"].trainer.curve
    assert curve(2) == pytest.approx(2 * curve(1))
    shared = {entry.subject: entry for entry in records(world, record.BaseShared)}
    assert set(shared) == {"t0", "t1", "t2", "t3"}
    expected = "in turns, base shared: 74.0 MB once for 4 members; fused they are 0.90 times as fast"
    assert shared["t0"].how() == expected
    world.assign("cohort-1", frozenset(["n0", "n1"]))
    world.settle(12)
    assert arrays(world) == [3, 3]
    assert {process.turns for process in world.processes.values()} == {world.turns}, "it need not find out again"
    world.crash(min(slot for slot, process in world.processes.items() if process.is_array))
    world.settle(12)
    assert arrays(world) == [3, 3]
    world.end_over_share(min(slot for slot, process in world.processes.items() if process.is_array))
    world.settle(12)
    assert {process.turns for process in world.processes.values()} == {world.turns}, "in arrays of half the size, too"
    assert not records(world, record.TrainsAlone)
    world.settle(200)
    assert [future.result(0) for future in world.futures.values()] == [f"t{number}" for number in range(6)]


def test_a_later_run_starts_no_array_for_what_cannot_be_fused(make) -> None:
    """It does for training jobs with other texts or whole numbers among their arguments: these may be fused."""
    for fuses, starts in ((False, True), (True, False)):
        world = make(nodes=1)
        world.fuses = fuses
        submit(world, 2, likeness="conv")
        world.advance(1.0)
        world.assign_all()
        world.settle(4)
        reasons = {entry.reason for entry in records(world, record.TrainsAlone)}
        assert reasons == {"they differ" if starts else "they differ (found by an earlier run)"}
        assert bool(records(world, record.ArrayStarted)) is starts
    for number in range(2):
        world.submit(f"u{number}", likeness="lstm")
    world.advance(1.0)
    assert list(world.trainers)[-1].startswith("cohort-")


def test_what_cannot_be_fused_is_not_tried_again_with_other_options(make) -> None:
    world = make(nodes=1)
    world.fuses = False
    submit(world, 2, likeness="conv")
    world.advance(1.0)
    world.assign_all()
    world.settle(4)
    world.submit("urgent", key="another priority", likeness="conv")
    assert "urgent" in world.trainers
    assert records(world, record.TrainsAlone)[-1] == record.TrainsAlone("urgent", "they differ")


@pytest.mark.parametrize(
    ("reason", "size", "passing"),
    [("0.9 times as fast", 2, False), (f"{FAILED}, RuntimeError: memory", 1, False), ("eps=0", 1, True)],
)
def test_what_may_be_otherwise_another_time_is_forgotten_after_the_run(make, reason, size, passing) -> None:
    world = make(nodes=1)
    world.fuses, world.refusal, world.passing = False, (reason, size), passing
    submit(world, 2, likeness="conv")
    world.advance(1.0)
    world.assign_all()
    world.settle(4)
    assert {entry.reason for entry in records(world, record.TrainsAlone)} == {reason}
    world.submit("late", likeness="conv")
    assert "late" in world.trainers
    again = make(nodes=1)
    submit(again, 2, likeness="conv")
    assert not records(again, record.TrainsAlone)


def test_trainings_of_different_structures_are_fused_with_their_own(make) -> None:
    world = make(nodes=1)
    submit(world, 6)
    world.structures = {"t1": "wide", "t3": "wide", "t5": "wide"}
    world.advance(1.0)
    world.assign_all()
    together = set()
    for _ in range(120):
        world.assign_all()
        world.settle()
        for process in world.processes.values():
            if len(process.members) > 1 and len({world.structures.get(name, "") for name in process.members}) == 1:
                together.add(frozenset(process.members))
    assert all(future.result(0) for future in world.futures.values())
    assert not records(world, record.TrainsAlone)
    assert {tuple(entry.trainings) for entry in records(world, record.CohortJoined)[1:]} <= {
        ("t1",), ("t3",), ("t5",), ("t3", "t5"), ("t1", "t3"), ("t1", "t3", "t5")
    }  # fmt: skip
    assert {len(names & {"t1", "t3", "t5"}) > 0 for names in together} == {True, False}


def test_a_training_without_another_of_its_kind_says_how_it_differs(make) -> None:
    """Those that have others of their kind, and are fused with them, say nothing."""
    world = make(nodes=3)
    world.steps = 60
    submit(world, 4)
    world.structures = {"t1": "wide"}
    world.advance(1.0)
    for _ in range(20):
        world.assign_all()
        world.settle()
        world.advance(1.0)
    assert records(world, record.TrainsAlone) == [record.TrainsAlone("t1", "they differ")]


def test_a_kind_that_is_found_out_later_is_that_of_the_cohort(make) -> None:
    """The calls of t1 and t3 have other lengths than those of t0 and t2: each pair is fused, on one node in turns."""
    world = make(nodes=1)
    world.steps = 40
    submit(world, 4)
    world.advance(1.0)
    world.assign_all()
    world.settle(2)
    world.structures = {f"t{number}": f"common/{number % 2}" for number in range(4)}
    together = set()
    for _ in range(120):
        world.assign_all()
        world.settle()
        world.advance(0.1)
        together |= {frozenset(process.members) for process in world.processes.values() if len(process.members) > 1}
    assert all(future.result(0) for future in world.futures.values())
    assert {frozenset({"t0", "t2"}), frozenset({"t1", "t3"})} <= together
    assert not records(world, record.TrainsAlone)


def test_trainings_that_arrays_do_not_support_train_alone(make) -> None:
    world = make(nodes=1)
    world.structures = {"t0": "", "t1": "", "t2": "common"}
    world.refusals = {"t1": "its loader has batch_range="}
    submit(world, 3)
    world.advance(1.0)
    for _ in range(40):
        world.assign_all()
        world.settle()
    reasons = {entry.subject: entry.reason for entry in records(world, record.TrainsAlone)}
    assert reasons.keys() == {"t0", "t1"}
    assert reasons["t1"] == "its loader has batch_range="
    assert all(future.result(0) for future in world.futures.values())
