"""All tests here need the real Slurm, including those that start their own."""

from __future__ import annotations

import pytest

from tests.batch_systems.backends import Slurm
from tests.batch_systems.driving import loaded_drivers


@pytest.fixture(scope="session", autouse=True)
def all_need_slurm(slurm_is_here) -> None:
    """Skip or fail according to `slurm_is_here`."""


@pytest.fixture
def start(cluster, tmp_path):
    """Load Parsl for a partition of the shared cluster."""
    with loaded_drivers(tmp_path) as load:
        yield lambda partition="preemptible", **changes: load(Slurm(cluster, partition), **changes)
