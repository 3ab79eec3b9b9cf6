"""The batch systems: each keeps to the contract, and others are found by their entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest
from parsl.providers import LocalProvider

from freetrain_parsl.cluster.system import EmbeddedSystem
from freetrain_parsl.executor.batch import systems as module
from freetrain_parsl.executor.batch.slurm import SlurmSystem
from freetrain_parsl.executor.batch.systems import system_of, systems
from freetrain_parsl.extensions.pbs.system import PbsSystem
from freetrain_parsl.testing.window_suite import BatchSystemConformance

if TYPE_CHECKING:
    from collections.abc import Iterator


class TestSlurm(BatchSystemConformance):
    system = SlurmSystem()
    block = "{partition: main, account: a, launcher: srun, command_timeout: 30 s}"
    kinds = "{gpu: {partition: gpu}, cpu: {constraint: old}}"


class TestPbs(BatchSystemConformance):
    system = PbsSystem()
    block = "{queue: main, select_options: 'ngpus=1', launcher_bind: --cpu-bind, preemptible: true}"
    kinds = "{gpu: {queue: gpu}, cpu: {select_options: 'model=old'}}"


class TestEmbeddedCluster(BatchSystemConformance):
    system = EmbeddedSystem()
    block = "{nodes: 3, grace: 2 s}"
    kinds = "{fast: {nodes: 1}, slow: {nodes: 2}}"


class FluxSystem(SlurmSystem):
    """A batch system of another package."""

    name = "flux"


@pytest.fixture
def flux(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    point = EntryPoint("flux", f"{__name__}:FluxSystem", module.GROUP)
    monkeypatch.setattr(module, "entry_points", lambda group: [point])
    systems.cache_clear()
    yield
    systems.cache_clear()


def test_our_systems_are_found_by_name() -> None:
    assert list(systems()) == ["local", "slurm", "pbs"]
    assert all(system.name == name for name, system in systems().items())


@pytest.mark.usefixtures("flux")
def test_a_system_of_another_package_comes_after_ours() -> None:
    assert list(systems()) == ["local", "slurm", "pbs", "flux"]
    assert isinstance(systems()["flux"], FluxSystem)


def test_a_provider_of_no_batch_system_has_none() -> None:
    assert system_of(LocalProvider()) is None
