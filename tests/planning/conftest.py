"""Fixtures of the planning tests; which instances of the conformance suite are quick."""

from __future__ import annotations

import pytest

from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies.milp import MilpPolicy
from freetrain_parsl.testing.policy_suite import PolicyConformance
from tests.planning.small_events import SETTINGS

QUICK_INSTANCES = 5  # of each test of the suite for each policy


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the other instances to the larger set of tests."""
    if issubclass(getattr(item, "cls", None) or object, PolicyConformance):
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("seed", 0) >= QUICK_INSTANCES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def planner() -> Planner:
    return Planner(MilpPolicy(), SETTINGS)
