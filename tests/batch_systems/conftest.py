"""Each test here is run on every batch system; that of false Slurm commands only where there is no real Slurm."""

from __future__ import annotations

import tempfile
from datetime import timedelta

import pytest

from freetrain_parsl.cluster.client import EmbeddedCluster
from tests.batch_systems.backends import Embedded, FakePbs, FakeSlurm, Slurm
from tests.batch_systems.driving import loaded_drivers
from tests.support.slurm.loopback import LoopbackSlurm


@pytest.fixture(
    params=[
        pytest.param(Embedded, id="embedded", marks=pytest.mark.cluster),
        *(
            [pytest.param(FakeSlurm, id="fake-slurm", marks=pytest.mark.cluster)]
            if LoopbackSlurm.missing() is not None
            else []
        ),
        pytest.param(FakePbs, id="fake-pbs", marks=pytest.mark.cluster),
        pytest.param(Slurm, id="slurm", marks=pytest.mark.slurm),
    ]
)
def backend(request, tmp_path, monkeypatch):
    """Start a batch system, with its commands on this process's PATH."""
    monkeypatch.chdir(tmp_path)  # the PBS launcher writes a list of nodes there
    if request.param is Slurm:
        slurm = Slurm(request.getfixturevalue("cluster"))
        monkeypatch.setenv("PATH", str(slurm.count_commands(tmp_path / "counted")), prepend=":")
        yield slurm
        return
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)  # short: contains sockets
        with EmbeddedCluster(tmp_path / "cluster", nodes=2, grace=timedelta(seconds=4)) as cluster:
            if request.param is Embedded:
                yield Embedded(cluster)
            else:
                fake = request.param(cluster, tmp_path / "fake")
                monkeypatch.setenv("PATH", str(fake.commands), prepend=":")
                yield fake


@pytest.fixture
def start(backend, tmp_path):
    """Load Parsl for the batch system."""
    with loaded_drivers(tmp_path) as load:
        yield lambda **changes: load(backend, **changes)
