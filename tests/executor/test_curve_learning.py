"""Throughput reports become scaling curves for the planner."""

from __future__ import annotations

import pytest

from freetrain_parsl.executor.control.curve_learning import CurveLearning
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import RescaleCosts, Trainer
from freetrain_parsl.protocol.reports import Progress


def trainer(name: str = "t", curve: ScalingCurve | None = None, **changes) -> Trainer:
    values = {"min_nodes": 1, "max_nodes": 8, "costs": RescaleCosts(), "work_left": 1000.0, **changes}
    return Trainer(name=name, curve=curve or ScalingCurve.default(), **values)


class Run:
    """A training that reports at a given rate."""

    def __init__(self, one: Trainer) -> None:
        self.learning = CurveLearning()
        self.trainer = one
        self.learning.add(one)
        self.samples, self.slot_seconds, self.group = 0, 0.0, 0

    def trains(self, nodes: int, rate: float, seconds: float = 10.0, *, slots_per_node: int = 1) -> None:
        self.group += 1
        for _ in range(2):
            slots = nodes * slots_per_node
            report = Progress(samples=self.samples, slot_seconds=self.slot_seconds)
            self.learning.observe(self.trainer.name, group=self.group, nodes=nodes, slots=slots, progress=report)
            self.samples += int(rate * seconds)
            self.slot_seconds += seconds * slots

    def update(self) -> Trainer:
        (updated,) = self.learning.changed([self.trainer])
        return updated


def test_a_training_of_which_nothing_is_known_starts_on_its_least_nodes() -> None:
    assert Run(trainer(min_nodes=2)).update().max_nodes == 2


def test_what_is_measured_allows_twice_as_many_nodes() -> None:
    run = Run(trainer())
    run.trains(1, 100.0)
    first = run.update()
    assert (first.max_nodes, first.curve(1), first.curve(2)) == (2, 100.0, 200.0)
    run.trains(2, 150.0)
    second = run.update()
    assert (second.max_nodes, second.curve(2)) == (4, 150.0)


def test_a_stated_curve_keeps_its_shape_around_what_is_measured() -> None:
    run = Run(trainer(curve=ScalingCurve({1: 10.0, 2: 18.0, 4: 30.0}), max_nodes=4))
    run.trains(2, 9.0)
    updated = run.update()
    assert (updated.max_nodes, updated.curve(1), updated.curve(4)) == (4, 5.0, 15.0)


def test_slots_of_a_node_train_at_the_same_time() -> None:
    run = Run(trainer())
    run.trains(1, 100.0, slots_per_node=4)
    assert run.update().curve(1) == pytest.approx(100.0)


def test_a_stretch_that_spans_a_change_of_the_group_is_no_measurement() -> None:
    run = Run(trainer())
    for group in range(5):
        report = Progress(samples=100 * group, slot_seconds=10.0 * group)
        run.learning.observe("t", group=group, nodes=1, slots=1, progress=report)
    assert run.update().max_nodes == 1


def test_the_planner_hears_of_significant_changes_only() -> None:
    run = Run(trainer())
    run.trains(1, 100.0, seconds=100.0)
    run.update()
    run.trains(1, 101.0, seconds=10.0)
    assert run.learning.changed([run.trainer]) == []
    run.trains(1, 400.0, seconds=100.0)
    assert len(run.learning.changed([run.trainer])) == 1
