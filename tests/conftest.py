"""The suite's parts, and a real Slurm on the loopback, one for all tests that want it."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from freetrain_parsl.testing.loopback_slurm import PARTITIONS, LoopbackPartition, LoopbackSlurm
from tests.__main__ import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUIRED = "FREETRAIN_TESTS_REQUIRE"  # names, separated by commas, of what must be there: then a test may not skip

# How long examples take depends on what else the machine does, so no time fails a test.
settings.register_profile("suite", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that share the cores must not take all of them each
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what chooses a part of the suite, beside `-m` and `-k`."""
    parser.addoption("--part", choices=PARTS, help="run only the tests of this part (see tests/__main__.py)")


def part_of(item: pytest.Item) -> str:
    """Tell to which part a test belongs: by its marks."""
    if item.get_closest_marker("alone"):
        return "alone"
    if any(map(item.get_closest_marker, ("cluster", "slurm", "hosts"))):
        return "daemons"
    return "slow" if item.get_closest_marker("slow") else "quick"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts."""
    if part := config.getoption("--part"):
        config.hook.pytest_deselected(items=[item for item in items if part_of(item) != part])
        items[:] = [item for item in items if part_of(item) == part]


@pytest.fixture(scope="session", autouse=True)
def runtime_of_the_tests() -> Iterator[None]:
    """Keep embedded clusters apart from the user's and from those of other workers; short, since sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


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
        kill_wait=20,
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster, monkeypatch) -> Iterator[LoopbackSlurm]:
    """Give the cluster to one test, empty, with this process as one of its clients."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, shared_cluster.environment[name])
    yield shared_cluster
    shared_cluster.clear()
