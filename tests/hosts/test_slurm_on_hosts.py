"""A real Slurm with one slurmd per host, and the driver on the login host: no traffic on the loopback."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import InvalidSettings
from tests.support.hosts import Hosts
from tests.support.hosts.slurm import SlurmOnHosts

pytestmark = [pytest.mark.hosts, pytest.mark.slurm]

SITE = {
    "login": {"eth0": "10.77.0.1/24", "ext0": "10.99.0.1/24"},
    "node01": {"eth0": "10.77.0.11/24"},
    "node02": {"eno1": "10.77.0.12/24"},
}


@pytest.fixture(scope="module")
def hosts(slurm_is_here):
    with Hosts(SITE) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(hosts):
    with SlurmOnHosts(hosts, cpus=2, bf_interval=1) as cluster:
        yield cluster


def test_a_job_step_runs_on_every_host(cluster):
    printed = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", "hostname")
    assert sorted(printed.split()) == ["node01", "node02"]


def test_hosts_of_other_names_are_refused(hosts):
    with (
        Hosts({"login": {"eth0": "10.0.0.1/24"}, "n1": {"eth0": "10.0.0.2/24"}}) as others,
        pytest.raises(InvalidSettings, match="hosts for a Slurm of 1 nodes are login, node01; these are login, n1"),
    ):
        SlurmOnHosts(others)


def test_a_training_runs_in_a_block_of_two_hosts_and_survives_the_loss_of_one(hosts, cluster, start):
    login = start(hosts, provider="slurm", environment=cluster.environment)
    assert login.started["addresses"] == ["10.77.0.1", "10.99.0.1"]
    training = login.train("t", 2)
    training.until(2)
    sent = hosts["node01"].bytes_sent("eth0")
    training.until_steps(steps=5)
    assert hosts["node01"].bytes_sent("eth0") - sent > 10_000
    with hosts.cut("node02"):
        training.until(1)
    training.finish()
    login.close()
    login.until(lambda _: cluster.run("squeue", "--noheader") == "", 60)  # completing jobs are listed too
