"""Members that fail, crash and are cancelled, and full disks: each training job ends once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import TrainingCancelled
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.fusion import messages as fused
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol import messages as msg
from tests.extensions.fusion.array_world import ArrayWorld, UserError
from tests.extensions.fusion.cohorts import arrays, busy_slot, records, submit, train


def test_a_training_that_raises_an_exception_in_an_array_is_repeated_alone(make) -> None:
    """The array may be the cause."""
    world = make(nodes=1)
    train(world, 3)
    slot = busy_slot(world)
    world.step(slot, fails=True)
    for _ in range(30):
        world.assign_all()
        world.settle()
    (alone,) = records(world, record.TrainsAlone)
    assert alone.reason == "it failed in an array, UserError: no"
    assert all(future.result(0) for future in world.futures.values())


def test_an_exception_of_a_training_alone_is_its_own(make) -> None:
    world = make(nodes=1)
    train(world, 2)
    for _ in range(2):
        slot = busy_slot(world)
        world.step(slot, fails=True)
        world.settle(1)
        world.assign("cohort-1", frozenset())
        world.settle(4)
        world.assign_all()
        world.settle(2)
        if any(future.done() for future in world.futures.values()):
            break
    failed = [future.exception(0) for future in world.futures.values() if future.done()]
    assert [type(error) for error in failed] == [UserError]


@pytest.mark.parametrize("reason", ["NonFiniteLoss: nan", "UsageError: call prepare"])
def test_errors_that_are_not_due_to_arrays_are_not_repeated(make, reason) -> None:
    world = make(nodes=1)
    world.reason = reason
    train(world, 2)
    slot = busy_slot(world)
    world.step(slot, fails=True)
    world.settle(20)
    assert [future.exception(0) is None for future in world.futures.values()] == [False, True]


def test_a_cancelled_member_is_saved_and_the_others_go_on(make) -> None:
    world = make(nodes=1)
    submit(world, 5)
    world.advance(1.0)
    world.manager.cancel(world.futures["t4"])  # waits
    assert isinstance(world.futures["t4"].exception(0), TrainingCancelled)
    world.assign_all()
    world.settle(2)
    world.manager.cancel(world.futures["t0"])  # trains
    assert not world.futures["t0"].done()
    world.settle(2)
    assert isinstance(world.futures["t0"].exception(0), TrainingCancelled)
    assert world.saved["t0"] > 0
    world.settle(30)
    assert [world.futures[f"t{number}"].result(0) for number in (1, 2, 3)] == ["t1", "t2", "t3"]
    world.submit("gathering")
    world.manager.cancel(world.futures["gathering"])
    assert isinstance(world.futures["gathering"].exception(0), TrainingCancelled)


def test_members_of_arrays_that_crash_twice_train_alone(make) -> None:
    world = make(nodes=1)
    submit(world, 2)
    world.advance(1.0)
    world.assign_all()
    for _ in range(2):
        world.settle(2)
        (slot,) = [name for name, process in world.processes.items() if process.is_array]
        world.crash(slot)
    assert sorted(world.trainers) == ["t0", "t1"]
    (first, _) = records(world, record.TrainsAlone)
    assert "2 arrays crashed" in first.reason


def test_a_node_that_the_batch_system_takes_is_no_crash(make) -> None:
    world = make(nodes=1)
    submit(world, 2)
    world.advance(1.0)
    world.assign_all()
    for _ in range(4):
        world.settle(2)
        (slot,) = [name for name, process in world.processes.items() if process.is_array]
        world.crash(slot, crash=False)
    assert list(world.trainers) == ["cohort-1"]


def test_a_full_disk_takes_the_cohort_off_its_nodes_until_it_can_be_used(make) -> None:
    world = make(nodes=1)
    train(world, 2)
    slot = busy_slot(world)
    world.step(slot, full=True)
    world.settle(3)
    assert not world.trainers
    assert {entry.subject for entry in records(world, record.TrainingWaits)} == {"t0", "t1"}
    world.storage.works = True
    for _ in range(200):
        world.advance(1.0)
        if world.trainers:
            break
    assert {entry.subject for entry in records(world, record.TrainingTriesAgain)} == {"t0", "t1"}
    world.assign_all()
    world.settle(20)
    assert all(future.result(0) for future in world.futures.values())


def test_all_fail_when_the_driver_gives_up(make) -> None:
    world = make(nodes=1)
    train(world, 3)
    world.submit("gathering")
    world.manager.fail_all(RuntimeError("over"))
    assert all(str(future.exception(0)) == "over" for future in world.futures.values())
    world.settle(3)
    assert all(process.run is None for process in world.processes.values())


def test_an_array_that_takes_too_much_of_its_nodes_memory_goes_on_with_half_the_members(make) -> None:
    """As one that is too large for its accelerator; its members lose what they have done since their checkpoints."""
    world = make(nodes=1)
    world.steps = 30
    train(world, 4)
    world.settle(2)
    assert arrays(world) == [4]
    world.end_over_share(busy_slot(world))
    world.settle(4)
    assert list(world.trainers) == ["cohort-1"]
    assert arrays(world) == [2], "the others wait"
    world.end_over_share(busy_slot(world))
    world.settle(4)
    assert arrays(world) == [1]
    world.settle(140)
    assert [future.result(0) for future in world.futures.values()] == [f"t{number}" for number in range(4)]


def test_a_member_that_takes_too_much_memory_by_itself_fails_and_the_others_go_on(make) -> None:
    world = make(nodes=1)
    train(world, 2)
    world.end_over_share(busy_slot(world))
    world.settle(4)
    assert arrays(world) == [1]
    slot = busy_slot(world)
    (name,) = world.processes[slot].members
    world.end_over_share(slot)
    world.settle(20)
    reason = f"training job {name!r} was ended on node n0: it used 9 GiB of host memory"
    assert str(world.futures.pop(name).exception(0)) == reason
    assert [future.exception(0) for future in world.futures.values()] == [None]


def test_a_process_that_does_not_end_is_killed(make) -> None:
    world = make(nodes=1)
    train(world, 2)
    slot = busy_slot(world)
    world.manager.fail_all(RuntimeError("over"))
    world.advance(11.0)
    assert slot not in world.processes


def anything(world: ArrayWorld, chance: random.Random, cancelled: set[str]) -> None:
    """Let one thing happen."""
    slot = chance.choice(sorted(world.processes))
    name = chance.choice(sorted(world.futures))
    trainer = chance.choice(sorted(world.trainers)) if world.trainers else None
    match chance.choice("aaarrrrssssddddppckwt"):
        case "a":
            world.advance(chance.choice([0.1, 0.3, 2.0]))
        case "r":
            world.receive(slot)
        case "s":
            world.step(slot, fails=chance.random() < 0.02, full=chance.random() < 0.02)
        case "d":
            world.deliver(slot)
        case "p" if trainer is not None:
            most = min(world.trainers[trainer].trainer.max_nodes, chance.randint(0, len(world.nodes)))
            world.assign(trainer, frozenset(chance.sample(world.nodes, most)))
        case "c":
            world.crash(slot, crash=chance.random() < 0.5)
        case "k" if chance.random() < 0.3:
            world.manager.cancel(world.futures[name])
            cancelled.add(name)
        case "w":
            world.settle()
        case "t" if chance.random() < 0.3:
            world.submit(f"late-{len(world.futures)}")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 9))
def test_whatever_happens_every_training_ends_once(tmp_path_factory, seed, count) -> None:
    chance = random.Random(seed)
    directory = tmp_path_factory.mktemp("world")
    journal = Journal(directory / "journal.sqlite")
    world = ArrayWorld(directory, journal, nodes=chance.randint(1, 4))
    world.best_size = chance.choice([2, 4, 8])
    world.fuses = chance.random() < 0.8
    submit(world, count)
    world.structures = {f"t{number}": chance.choice(["common", "wide"]) for number in range(count)}
    cancelled: set[str] = set()
    for _ in range(150):
        anything(world, chance, cancelled)
    world.storage.works = True
    for _ in range(400):
        world.assign_all()
        world.settle()
        world.now += 1.0
        if all(future.done() for future in world.futures.values()):
            break
    for name, future in world.futures.items():
        assert future.done(), (name, world.trainers, world.assigned, world.processes)
        error = future.exception(0)
        assert error is None or isinstance(error, UserError) or name in cancelled or "crashes" in str(error), error
    world.settle(5)
    assert not world.trainers
    assert all(process.run is None and not process.members for process in world.processes.values())
    journal.close()


def test_a_message_of_an_earlier_run_has_no_effect(make) -> None:
    world = make(nodes=1)
    train(world, 2)
    (process,) = [process for process in world.processes.values() if process.run]
    before = dict(process.members)
    world.manager.on_message(process.slot, fused.MemberEnded("cohort-1", 99, "t0", None))  # type: ignore[arg-type]
    world.manager.on_message(process.slot, msg.RunEnded("cohort-1", 99, None))  # type: ignore[arg-type]
    assert process.members == before
    world.settle(20)
    assert all(future.result(0) for future in world.futures.values())
