"""Arrays on nodes that come and go."""

from __future__ import annotations

import pytest

from freetrain_parsl.protocol import journal as record
from tests.extensions.fusion.cohorts import arrays, paused, records, released, spread, submit


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


@pytest.mark.parametrize("best", [1000, 2], ids=["unknown", "known"])
def test_no_slot_stays_idle_while_others_have_members_to_give(make, best: int) -> None:
    """Of three arrays of two, two give a member to nodes that join: five nodes are better than three."""
    world = make(nodes=5)
    world.best_size, world.steps = best, 200
    submit(world, 6)
    world.advance(1.0)
    world.assign("cohort-1", frozenset({"n0", "n1", "n2"}))
    world.settle(3)
    assert arrays(world) == [2, 2, 2]
    world.assign_all()
    world.settle(6)
    assert arrays(world) == [1, 1, 1, 1, 2]


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
