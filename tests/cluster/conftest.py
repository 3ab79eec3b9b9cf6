"""A separate runtime directory for the tests, and clusters in it."""

from __future__ import annotations

import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest

from freetrain_parsl.cluster import processes, registry
from freetrain_parsl.cluster.client import EmbeddedCluster


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    """Separate the tests' clusters from the user's; the path is short, because that of a socket is limited."""
    directory = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def start_cluster(tmp_path):
    """Start clusters that end with the test and leave no processes behind."""
    started: list[EmbeddedCluster] = []

    def start(**options) -> EmbeddedCluster:
        directory = tmp_path / f"cluster{len(started)}"
        cluster = EmbeddedCluster(directory, **{"nodes": 4, "grace": timedelta(seconds=0.5), **options})
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.stop()
        assert processes.marked(registry.mark_prefix(cluster.name)) == []


@pytest.fixture
def eventually():
    """Wait until a condition holds; only for tests of real processes."""

    def wait(condition, seconds: float = 10.0):
        end = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < end, "the condition never held"
            time.sleep(0.02)
        return answer

    return wait
