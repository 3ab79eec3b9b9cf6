"""The assignment of training jobs to sites against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.extensions.globus.sites.planning.assignment_solver import NOWHERE, assign_sites


def _nobody(trainings: int):
    return np.full(trainings, NOWHERE), np.zeros(trainings, dtype=np.int64)


def _best(values, capacity) -> float:
    ways = [
        [(NOWHERE, 0, 0.0)]
        + [(s, n, row[s][n]) for s in range(len(capacity)) for n in range(1, len(row[s])) if np.isfinite(row[s][n])]
        for row in values
    ]
    return max(
        (
            sum(value for _, _, value in way)
            for way in itertools.product(*ways)
            if all(sum(n for at, n, _ in way if at == s) <= nodes for s, nodes in enumerate(capacity))
        ),
        default=0.0,
    )


@st.composite
def problems(draw):
    capacity = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    value = st.one_of(st.just(-np.inf), st.integers(-20, 100).map(float))
    rows = [
        [np.array([0.0, *draw(st.lists(value, min_size=nodes, max_size=nodes))]) for nodes in capacity]
        for _ in range(draw(st.integers(0, 3)))
    ]
    rows += draw(st.lists(st.sampled_from(rows), max_size=1)) if rows else []  # training jobs with equal values
    return rows, capacity


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_the_best_of_all_assignments_is_found(problem):
    values, capacity = problem
    found = assign_sites(values, capacity, _nobody(len(values)), time_limit=60.0)
    assert found.objective == pytest.approx(_best(values, capacity))
    assert found.bound == pytest.approx(found.objective, rel=1e-7, abs=1e-7)
    used = [sum(found.counts[found.sites == site]) for site in range(len(capacity))]
    assert all(nodes <= most for nodes, most in zip(used, capacity, strict=True))


def test_an_incumbent_is_kept_if_there_is_no_time():
    rng = np.random.default_rng(0)
    values = [[np.concatenate([[0.0], rng.random(30)]) for _ in range(2)] for _ in range(20)]
    incumbent = np.zeros(20, dtype=np.int64), np.ones(20, dtype=np.int64)
    found = assign_sites(values, [30, 30], incumbent, time_limit=0.0)
    assert found.objective >= sum(row[0][1] for row in values)
    assert found.bound >= found.objective


def test_worthless_sites_get_nothing():
    found = assign_sites([[np.array([0.0, -1.0])]], [1], _nobody(1))
    assert (found.sites.tolist(), found.objective, found.bound) == ([NOWHERE], 0.0, 0.0)
