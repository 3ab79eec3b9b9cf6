"""All tests here need the real Slurm, including those that start their own."""

from __future__ import annotations

import pytest

from tests.batch_systems.backends import Slurm
from tests.batch_systems.driving import loaded_drivers
from tests.slurm.campaign_shell import SlurmShell


@pytest.fixture(scope="session", autouse=True)
def all_need_slurm(slurm_is_here) -> None:
    """Skip or fail according to `slurm_is_here`."""


@pytest.fixture
def start(cluster, tmp_path):
    """Load Parsl for a partition of the shared cluster."""
    with loaded_drivers(tmp_path) as load:
        yield lambda partition="preemptible", **changes: load(Slurm(cluster, partition), **changes)


@pytest.fixture
def shell(cluster, tmp_path):
    """Make a shell; all its processes are killed at the end."""
    shells: list[SlurmShell] = []

    def make(checkpoint_interval: str) -> SlurmShell:
        shells.append(SlurmShell(cluster, tmp_path, checkpoint_interval))
        return shells[-1]

    yield make
    for shell in shells:
        shell.close()
