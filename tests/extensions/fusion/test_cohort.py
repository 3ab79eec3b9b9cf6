"""Training jobs that run fused: how cohorts form, what the planner sees of them, and what they record."""

from __future__ import annotations

import pytest

from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.protocol import journal as record
from tests.extensions.fusion.cohorts import arrays, records, submit, train


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


def test_the_first_measurement_is_recorded_before_the_best_size_is_known(make) -> None:
    """Many sweeps end before it is."""
    world = make(nodes=1)
    world.best_size = 100
    train(world, 4)
    assert records(world, record.ArrayMeasured) == [record.ArrayMeasured("cohort-1", 2, 1.4)]
