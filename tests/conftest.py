"""A real Slurm on the loopback, one for all tests that want it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.testing.loopback_slurm import PARTITIONS, LoopbackPartition, LoopbackSlurm

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUIRED = "FREETRAIN_TESTS_REQUIRE"  # names, separated by commas, of what must be there: then a test may not skip


@pytest.fixture(scope="session")
def slurm_is_here() -> None:
    """Skip without Slurm, and say what is missing; fail instead where it is required."""
    missing = LoopbackSlurm.missing()
    if missing is not None and "slurm" in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def shared_cluster(slurm_is_here) -> Iterator[LoopbackSlurm]:
    """Bring up the cluster: eight nodes, the first two of them fast, and a scheduler that looks every second."""
    small = LoopbackPartition("small", nodes="node[01-04]", tier=100, extra="MaxTime=30")
    graceless = LoopbackPartition("graceless", preempt="cancel")
    with LoopbackSlurm(
        nodes=8,
        features={"node01": "fast", "node02": "fast"},
        partitions=(*PARTITIONS, small, graceless),
        bf_interval=1,
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster, monkeypatch) -> Iterator[LoopbackSlurm]:
    """Give the cluster to one test, empty, with this process as one of its clients."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, shared_cluster.environment[name])
    yield shared_cluster
    shared_cluster.clear()
