"""Objectives by name and by function, and the value of a change of nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning import objectives
from freetrain_parsl.planning.model import RescaleCosts, Trainer
from freetrain_parsl.planning.objectives import (
    objective_table,
    register_objective,
    resolve_objective,
    value_table,
)
from freetrain_parsl.planning.scaling import ScalingCurve
from freetrain_parsl.testing.exact import value
from freetrain_parsl.testing.instances import random_instance

TRAINER = Trainer("t", 2, 6, ScalingCurve({1: 100.0, 2: 200.0, 6: 400.0}), RescaleCosts(10, 5, 3), priority=3.0)


@pytest.mark.parametrize(("name", "expected"), [("throughput", 400.0), ("speedup", 2.0), ("priority", 6.0)])
def test_named_objectives(name, expected):
    assert resolve_objective(name)(TRAINER, 6) == expected


@pytest.mark.parametrize("name", sorted(objectives.OBJECTIVES))
@pytest.mark.parametrize("seed", range(5))
def test_table_agrees_with_single_calls(name, seed):
    objective = resolve_objective(name)
    for trainer in random_instance(seed).trainers:
        quick = objective_table(objective, trainer, 30)
        slow = objective_table(objective.__call__, trainer, 30)  # a plain function
        np.testing.assert_allclose(quick, slow, rtol=1e-12)


def test_speedup_of_a_trainer_without_rate_at_its_minimum_is_in_units_of_its_next_rate():
    trainer = Trainer("t", 1, 4, ScalingCurve({1: 0.0, 2: 50.0, 4: 100.0}))
    assert resolve_objective("speedup")(trainer, 4) == 2.0
    idle = Trainer("t", 1, 4, ScalingCurve({1: 0.0}))
    assert resolve_objective("speedup")(idle, 4) == 0.0


def test_table_is_nan_outside_the_bounds():
    table = objective_table(resolve_objective("throughput"), TRAINER, 8)
    assert np.isnan(table).tolist() == [False, True] + [False] * 5 + [True] * 2
    assert table[0] == 0.0


def test_functions_are_asked_only_within_the_bounds():
    asked = []

    def spy(trainer, nodes):
        asked.append(nodes)
        return 1

    objective_table(resolve_objective(spy), TRAINER, 4)
    assert asked == [2, 3, 4]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "1", None, True, [1]])
def test_what_a_function_returns_is_checked(bad):
    with pytest.raises(InvalidSettings, match="trainer 't' on 2 nodes"):
        objective_table(lambda t, n: bad, TRAINER, 4)


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InvalidSettings, match="no objective 'speed'; known are priority, speedup, throughput"):
        resolve_objective("speed")
    with pytest.raises(InvalidSettings, match="got 42"):
        resolve_objective(42)


def test_registered_objective_is_found_and_names_are_not_taken_twice(monkeypatch):
    monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))

    def constant(trainer, nodes):
        return 1.0

    register_objective("constant", constant)
    assert resolve_objective("constant") is constant
    with pytest.raises(InvalidSettings, match="'constant' exists already"):
        register_objective("constant", constant)


@pytest.mark.parametrize("current", range(9))
def test_value_table_is_the_formula(current):
    objective = resolve_objective("throughput")
    table = value_table(objective, TRAINER, current, 8, horizon=60.0)
    allowed = [0, *range(2, 7)]
    assert np.flatnonzero(np.isfinite(table)).tolist() == allowed
    for nodes in allowed:
        assert table[nodes] == pytest.approx(value(objective, TRAINER, current, nodes, 60.0), rel=1e-12)


def test_value_by_hand():
    table = value_table(resolve_objective("throughput"), TRAINER, 4, 6, horizon=60.0)
    # Rates 200, 250, 300, 350, 400 on 2 … 6 nodes; growing costs 10 s, shrinking 5 s, of the 300 it has.
    assert table[[0, 2, 3, 4, 5, 6]].tolist() == [-1500, 10500, 13500, 18000, 18000, 21000]
    started = value_table(resolve_objective("throughput"), TRAINER, 0, 6, horizon=60.0)
    assert started[[0, 2, 6]].tolist() == [0, 57 * 200, 57 * 400]


def test_trainer_larger_than_the_pool_is_worth_nothing_there():
    table = value_table(resolve_objective("speedup"), TRAINER, 0, 1, horizon=60.0)
    assert table.tolist() == [0.0, -math.inf]
    lost = value_table(resolve_objective("throughput"), TRAINER, 1, 1, horizon=60.0)
    assert lost.tolist() == [-5 * 200.0, -math.inf]
