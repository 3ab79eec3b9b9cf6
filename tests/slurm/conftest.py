"""All tests here need the real Slurm, also those that bring up one of their own."""

from __future__ import annotations

import pytest

from tests.batch_systems.backends import Slurm
from tests.batch_systems.driving import loaded_drivers


@pytest.fixture(scope="session", autouse=True)
def all_need_slurm(slurm_is_here) -> None:
    """Skip or fail as `slurm_is_here` says."""


@pytest.fixture
def start(cluster, tmp_path):
    """Load Parsl in front of a partition of the shared cluster."""
    with loaded_drivers(tmp_path) as load:
        yield lambda partition="preemptible", **changes: load(Slurm(cluster, partition), **changes)
