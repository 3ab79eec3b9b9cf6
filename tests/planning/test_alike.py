"""Trainers that wait behind others of their kind are left out of a decision, and this changes none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freetrain_parsl.planning import alike
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.alike import without_surplus
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob, PoolNode
from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies import POLICIES, resolve_policy


def trainer(number: int) -> PlannedJob:
    return PlannedJob(f"t{number:05}", 1, 1, ScalingCurve.default(), work_left=1e4, submitted=float(number))


def test_of_many_alike_the_first_are_kept_and_all_that_run_or_differ() -> None:
    many = [trainer(number) for number in range(10_000)]
    other = replace(trainer(10_000), priority=2.0)
    kept = without_surplus([*many, other], {"t05000"}, nodes=100)
    assert kept == [*many[:100], many[5000], other]


def test_few_are_all_kept() -> None:
    few = [trainer(number) for number in range(64)]
    assert without_surplus(few, (), nodes=2) == few


@pytest.mark.parametrize("policy", ["milp", "fcfs", "equal-share", "tiresias"])
def test_the_decisions_are_those_with_all_trainers(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decisions() -> list[dict[str, frozenset[str]]]:
        planner = Planner(POLICIES[policy]())
        planner.advance(*[ev.TrainerSubmitted(0.0, trainer(number)) for number in range(100)])
        planner.advance(ev.NodesJoined(1.0, "b", tuple(PoolNode(f"n{number}") for number in range(3))))
        taken = []
        for step in range(5):
            taken.append(planner.assigned)
            planner.advance(ev.TrainerFinished(2.0 + step, min(planner.assigned)))
        return taken

    monkeypatch.setattr(alike, "_LEAST_KEPT", 10)
    few = decisions()
    monkeypatch.setattr(alike, "_LEAST_KEPT", 1000)
    assert few == decisions()
    assert few[0]


def test_a_trainer_that_waits_is_compared_with_the_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000, comparing all of them in each decision took most of the driver's time."""
    compared: list[str] = []
    tell_apart_by = alike._told_apart_by
    monkeypatch.setattr(alike, "_told_apart_by", lambda one: [compared.append(one.name), tell_apart_by(one)][1])
    planner = Planner(resolve_policy("milp"))
    planner.advance(*[ev.TrainerSubmitted(0.0, trainer(number)) for number in range(200)])
    planner.advance(ev.NodesJoined(1.0, "b", (PoolNode("n0"),)))
    for step in range(5):
        planner.advance(ev.TrainerFinished(2.0 + step, min(planner.assigned)))
    assert len(compared) <= 205
