"""A Slurm that rejects blocks, temporarily or permanently."""

from __future__ import annotations

from dataclasses import replace

import parsl
import pytest

from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from tests.batch_systems.backends import Slurm
from tests.batch_systems.driving import RATE_LIMITS, Driver, loaded_drivers
from tests.support.slurm.loopback import LoopbackSlurm

pytestmark = pytest.mark.slurm


def test_a_full_queue_costs_nothing_but_time(tmp_path, monkeypatch) -> None:
    """``sbatch`` then waits for minutes instead of failing: it is killed, and no job results later."""
    with LoopbackSlurm(nodes=2, bf_interval=1, extra=["MaxJobCount=4", "MinJobAge=2"]) as cluster:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, cluster.environment[name])
        full = [cluster.submit("--hold", "--partition=main") for _ in range(3)]
        slurm = Slurm(cluster)
        with loaded_drivers(tmp_path) as load:
            driver = load(slurm)
            future = driver.train()
            assert "full" in driver.until_block_ended("refused")
            cluster.run("scancel", *full)
            driver.until_step()
            assert len(slurm.jobs()) == 1
            driver.finish(future)


def test_repeated_refusals_end_the_trainings_with_the_reason(start, cluster) -> None:
    driver = start("backfill", rate_limits=replace(RATE_LIMITS, max_refusals=2))
    cluster.run("scontrol", "update", "PartitionName=backfill", "MaxTime=1")
    try:
        future = driver.train()
        with pytest.raises(BatchSystemError, match=r"refused 2 blocks in a row.*partition"):
            future.result(timeout=240)
    finally:
        cluster.run("scontrol", "update", "PartitionName=backfill", "MaxTime=UNLIMITED")


@pytest.mark.smoke
@pytest.mark.parametrize(("partition", "message"), [("nonesuch", "nonesuch"), ("backfil", "did you mean 'backfill'")])
def test_what_can_never_run_is_refused_before_anything_is_submitted(cluster, tmp_path, partition, message) -> None:
    with pytest.raises(InvalidSettings, match=message):
        Driver(Slurm(cluster, partition).provider(), tmp_path).load()
    parsl.clear()
    assert cluster.run("squeue", "--noheader") == ""
