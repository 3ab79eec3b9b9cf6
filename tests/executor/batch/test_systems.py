"""The batch systems: each keeps to the contract."""

from __future__ import annotations

from parsl.providers import LocalProvider

from freetrain_parsl.cluster.system import EmbeddedSystem
from freetrain_parsl.executor.batch.slurm import SlurmSystem
from freetrain_parsl.executor.batch.systems import SYSTEMS, system_of
from freetrain_parsl.extensions.pbs.system import PbsSystem
from freetrain_parsl.testing.window_suite import BatchSystemConformance


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


def test_our_systems_are_found_by_name() -> None:
    assert list(SYSTEMS) == ["local", "slurm", "pbs"]
    assert all(system.name == name for name, system in SYSTEMS.items())


def test_a_provider_of_no_batch_system_has_none() -> None:
    assert system_of(LocalProvider()) is None
