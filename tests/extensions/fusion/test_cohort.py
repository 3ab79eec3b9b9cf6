"""Training jobs that run fused: cohorts and their arrays, with slots that are only models."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import TrainingCancelled
from freetrain_parsl.executor.journal import Journal, read_journal
from freetrain_parsl.extensions.fusion import messages as fused
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol import messages as msg
from tests.extensions.fusion.array_world import ArrayWorld, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ArrayWorld]]:
    journals: list[Journal] = []

    def new(**options: int) -> ArrayWorld:
        journals.append(Journal(tmp_path / f"journal-{len(journals)}.sqlite"))
        return ArrayWorld(tmp_path, journals[-1], **options)

    yield new
    for journal in journals:
        journal.close()


def records(world: ArrayWorld, kind: type[record.Record]) -> list[record.Record]:
    world.journal.commit()
    entries = [entry.record for _, entry in read_journal(world.journal.path, 0)]
    return [entry for entry in entries if isinstance(entry, kind)]


def arrays(world: ArrayWorld) -> list[int]:
    """Return the sizes of the arrays that run."""
    return sorted(len(process.members) for process in world.processes.values() if process.is_array)


def submit(world: ArrayWorld, count: int, **options: int) -> None:
    for number in range(count):
        world.submit(f"t{number}", **options)


def train(world: ArrayWorld, count: int, **options: int) -> None:
    """Submit training jobs, and let them run on all nodes for two turns."""
    submit(world, count, **options)
    world.advance(1.0)
    world.assign_all()
    world.settle(2)


def busy_slot(world: ArrayWorld) -> str:
    """Return the only slot that runs something."""
    (slot,) = [name for name, process in world.processes.items() if process.run]
    return slot


def test_a_single_training_is_not_delayed_for_long_and_trains_alone(make) -> None:
    world = make()
    future = world.submit("t")
    world.advance(0.4)
    assert not world.trainers
    world.advance(0.2)
    assert list(world.trainers) == ["t"]
    world.assign_all()
    world.settle(20)
    assert future.result(0) == "t"


def test_members_of_an_array_without_a_step_for_ten_minutes_say_so(make) -> None:
    world = make(nodes=1)
    train(world, 2)
    world.advance(601.0)
    world.settle()
    said = {(entry.subject, entry.reason.partition(";")[0]) for entry in records(world, record.TrainingStalled)}
    stuck = "has made no step for more than 10 min on n0, in array-1"
    assert said == {("t0", stuck), ("t1", stuck)}
    world.settle(2)
    last = {entry.subject: entry.reason for entry in records(world, record.TrainingStalled)}
    assert last == {"t0": "", "t1": ""}


def test_a_cohort_without_an_array_says_what_it_waits_for_and_takes_it_back(make) -> None:
    world = make(nodes=1)
    submit(world, 2)
    world.advance(1.0)
    world.advance(40.0)
    assert records(world, record.CohortStalled) == []
    world.advance(10.0)
    world.advance(100.0)
    reason = "waits for a node to join; `freetrain explain` shows why idle nodes are not used"
    assert records(world, record.CohortStalled) == [record.CohortStalled("cohort-1", reason)]
    world.assign("cohort-1", frozenset({"n7"}))
    world.advance(40.0)
    assert records(world, record.CohortStalled)[1:] == [record.CohortStalled("cohort-1", "")]
    world.advance(10.0)
    slots = "waits for slots on n7 to start or to become free"
    assert records(world, record.CohortStalled)[2:] == [record.CohortStalled("cohort-1", slots)]
    world.assign_all()
    world.settle(2)
    assert records(world, record.CohortStalled)[3:] == [record.CohortStalled("cohort-1", "")]


def test_the_planner_sees_a_sweep_as_one_trainer_and_each_node_trains_its_share(make) -> None:
    world = make(nodes=2)
    submit(world, 8)
    world.advance(1.0)
    (name,) = world.trainers
    assert name == "cohort-1"
    assert world.trainers[name].trainer.max_nodes == 8
    assert world.trainers[name].trainer.curve.relative
    world.assign_all()
    world.settle(1)
    assert arrays(world) == [2, 2]
    world.settle(1)
    assert arrays(world) == [4, 4]
    world.settle(1)
    assert not world.trainers[name].trainer.curve.relative
    world.settle(20)
    assert [future.result(0) for future in world.futures.values()] == [f"t{number}" for number in range(8)]
    assert not world.trainers
    assert all(process.run is None for process in world.processes.values())


def test_trainings_of_other_keys_priorities_and_sizes_are_not_mixed(make) -> None:
    world = make()
    submit(world, 2)
    for number in range(2):
        world.submit(f"other-{number}", key="another key")
        world.submit(f"small-{number}", limit=2)
    world.advance(1.0)
    assert sorted(world.trainers) == ["cohort-1", "cohort-2", "cohort-3"]


def test_later_trainings_join_the_cohort_and_fill_its_arrays(make) -> None:
    world = make(nodes=1)
    train(world, 2)
    world.submit("late")
    world.settle(4)
    assert list(world.trainers) == ["cohort-1"]
    assert arrays(world) == [3]
    world.settle(20)
    assert world.futures["late"].result(0) == "late"


def test_no_more_members_than_the_user_allows(make) -> None:
    world = make(nodes=1)
    world.best_size = 8
    submit(world, 6, limit=3)
    world.advance(1.0)
    world.assign_all()
    most = 0
    for _ in range(40):
        world.settle()
        most = max(most, *arrays(world), 0)
    assert most == 3
    assert all(future.done() for future in world.futures.values())


def released(world: ArrayWorld, slot: str) -> list[str]:
    """Return the members that a process was commanded to release, and has not received yet."""
    return [message.member for message in world.processes[slot].inbox if isinstance(message, fused.ReleaseMember)]


def paused(world: ArrayWorld, slot: str) -> bool:
    """Return whether a process has a command to pause all members."""
    return any(isinstance(message, msg.PauseRun) for message in world.processes[slot].inbox)


def spread(make: Callable[..., ArrayWorld], *nodes: str, turns: int = 3) -> ArrayWorld:
    """Return a world of two nodes in which four members train on these."""
    world = make(nodes=2)
    world.best_size = 8
    world.steps = 60
    submit(world, 4)
    world.advance(1.0)
    world.assign("cohort-1", frozenset(nodes))
    world.settle(turns)
    return world


def test_a_node_that_joins_gets_members_of_the_others(make) -> None:
    world = spread(make, "n0")
    assert arrays(world) == [4]
    world.assign("cohort-1", frozenset({"n0", "n1"}))
    world.settle(5)
    assert arrays(world) == [2, 2]
    world.settle(70)
    assert all(future.done() for future in world.futures.values())


def test_members_that_change_to_a_new_array_train_on_until_it_takes_them(make) -> None:
    """The members of an array start one after another."""
    world = spread(make, "n0")
    world.assign("cohort-1", frozenset({"n0", "n1"}))
    world.advance()
    assert released(world, "s1") == ["t3"]
    world.settle()
    assert list(world.processes["s1"].members) == ["t0", "t1", "t2"]
    for _ in range(20):  # the new array has not begun
        world.advance()
        world.receive("s1")
        world.step("s1")
        world.deliver("s1")
    assert list(world.processes["s1"].members) == ["t0", "t1", "t2"]
    world.settle(3)
    assert (list(world.processes["s1"].members), list(world.processes["s2"].members)) == (["t0", "t1"], ["t3", "t2"])


def test_a_node_that_is_taken_gives_its_members_back(make) -> None:
    world = spread(make, "n0", "n1", turns=2)
    assert arrays(world) == [2, 2]
    world.assign("cohort-1", frozenset({"n1"}))
    world.settle(6)
    assert arrays(world) == [4]
    world.settle(70)
    assert all(future.done() for future in world.futures.values())


def test_members_on_a_node_that_is_taken_train_on_until_another_array_takes_them(make) -> None:
    world = spread(make, "n0", "n1", turns=4)
    world.assign("cohort-1", frozenset({"n1"}))
    world.advance()
    (first,) = released(world, "s1")
    assert not paused(world, "s1")
    world.settle(4)
    assert first in world.processes["s2"].members
    assert len(world.processes["s2"].members) == 4


def test_a_node_that_is_taken_is_vacated_within_seconds(make) -> None:
    """The other array may take long to start what it was given."""
    world = spread(make, "n0")
    world.assign("cohort-1", frozenset({"n1"}))
    world.advance()
    assert not paused(world, "s1")
    world.advance(5.0)
    assert paused(world, "s1")


def test_a_node_that_is_taken_is_vacated_at_once_if_no_other_takes_its_members(make) -> None:
    world = spread(make, "n0", "n1", turns=4)
    world.assign("cohort-1", frozenset())
    world.advance()
    assert paused(world, "s1")
    assert paused(world, "s2")


def test_a_node_that_closes_is_vacated_at_once(make) -> None:
    world = spread(make, "n0", "n1", turns=4)
    world.processes["s1"].slot.leaving = True
    world.advance()
    assert paused(world, "s1")


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
    assert not records(world, record.TrainsAlone)
    world.settle(200)
    assert [future.result(0) for future in world.futures.values()] == [f"t{number}" for number in range(6)]


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


def test_few_trainings_with_many_nodes_train_alone_on_several(make) -> None:
    world = make(nodes=3)
    submit(world, 2, max_nodes=4)
    world.advance(1.0)
    world.assign("cohort-1", frozenset({"n0", "n1"}))
    world.settle(1)
    assert sorted(world.trainers) == ["t0", "t1"]
    assert not records(world, record.ArrayStarted)


def test_every_slot_of_a_node_has_an_array(make) -> None:
    world = make(nodes=1, slots_per_node=2)
    submit(world, 4)
    world.advance(1.0)
    assert world.trainers["cohort-1"].trainer.max_nodes == 2
    world.assign_all()
    world.settle(2)
    assert arrays(world) == [2, 2]


def test_a_cohort_has_arrays_in_single_slots_of_a_shared_node(make) -> None:
    world = make(nodes=1, slots_per_node=4, share_nodes=True)
    submit(world, 4)
    world.advance(1.0)
    trainer = world.trainers["cohort-1"].trainer
    assert (trainer.min_nodes, trainer.max_nodes) == (1, 4)
    world.assign("cohort-1", frozenset({"n0/1", "n0/3"}))
    world.settle(2)
    assert arrays(world) == [2, 2]
    assert sorted(entry.node for entry in records(world, record.ArrayStarted)) == ["n0/1", "n0/3"]


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


def test_fragments_name_the_array_and_its_time_is_counted_once(make) -> None:
    world = make(nodes=1)
    submit(world, 2)
    world.advance(1.0)
    world.assign_all()
    world.settle(20)
    started, ended = records(world, record.FragmentStarted), records(world, record.FragmentEnded)
    assert {entry.array for entry in started} == {entry.array for entry in ended} == {"array-1"}
    assert {entry.subject for entry in started} == {"t0", "t1"}
    (array,) = records(world, record.ArrayEnded)
    assert array.seconds > 0


def test_the_curve_of_a_cohort_is_that_of_its_best_arrays(make) -> None:
    world = make(nodes=1)
    submit(world, 8)
    world.advance(1.0)
    unknown = world.trainers["cohort-1"].trainer.curve
    assert unknown == ScalingCurve([(n, float(n)) for n, _ in unknown.points], relative=True)
    world.assign_all()
    world.settle(5)
    curve = world.trainers["cohort-1"].trainer.curve
    # A gain of 1.4 with two members, which have 10 samples/s each, then 2.8 with four.
    assert curve(2) == pytest.approx(2 * curve(1))
    assert curve(8) > curve(2)


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
