"""Fixtures of the planning tests."""

from __future__ import annotations

import pytest

from freetrain_parsl.planning.planner import Planner
from freetrain_parsl.planning.policies.milp import MilpPolicy
from tests.planning.small_events import SETTINGS


@pytest.fixture
def planner() -> Planner:
    return Planner(MilpPolicy(), SETTINGS)
