"""A training goes on, and ends as if nothing had been, whatever a real Slurm does to its blocks."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import parsl
import pytest

from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from freetrain_parsl.testing.loopback_slurm import LoopbackSlurm
from tests.slurm.driving import Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slurm


@pytest.fixture
def start(cluster, tmp_path) -> Iterator[Callable[..., Driver]]:
    """Load Parsl on the cluster; at the end no job of ours may be left."""
    drivers: list[Driver] = []

    def load(partition: str = "preemptible", **changes) -> Driver:
        drivers.append(Driver(cluster, tmp_path, partition, **changes))
        return drivers[-1].load()

    yield load
    if drivers:
        parsl.dfk().cleanup()
        parsl.clear()
        end = time.monotonic() + 10
        while drivers[-1].jobs() and time.monotonic() < end:
            time.sleep(0.1)
        assert drivers[-1].jobs() == {}


def why_blocks_ended(driver: Driver, pattern: str) -> str:
    """Wait until a block has ended for a reason that reads so."""
    return driver.until(lambda run: next((why for why in run.blocks_ended if re.search(pattern, why)), None))


@pytest.mark.parametrize("partition", ["preemptible", "graceless"])
def test_a_preempted_training_goes_on_and_the_main_job_has_its_nodes_in_seconds(start, cluster, partition) -> None:
    """With ten seconds of grace, and with none."""
    driver = start(partition)
    future = driver.train()
    driver.until_trained()
    step = driver.run.trainings["t"].progress["step"]
    main = cluster.submit("--partition=main", "--nodes=8", "--exclusive", "--time=1", command="sleep 2")
    submitted = time.monotonic()
    cluster.wait_for_state(main, "RUNNING", "COMPLETED", timeout=15)
    assert time.monotonic() - submitted < 5, "the slots save and leave at once: no wait for KillWait"
    why_blocks_ended(driver, "preempted")
    driver.finish(future)
    assert driver.run.fragments[-1].resumed_from >= step


def test_a_block_that_the_administrator_cancels_is_told_apart_and_the_training_goes_on(start, cluster) -> None:
    driver = start()
    future = driver.train()
    driver.until_trained()
    cluster.run("scancel", driver.running())
    why_blocks_ended(driver, "cancelled")
    driver.finish(future)


def test_a_training_survives_the_loss_of_a_node(start, cluster) -> None:
    driver = start()
    future = driver.train()
    run = driver.until_trained()
    lost = run.trainings["t"].nodes[0]
    cluster.kill_node(lost)
    driver.until(lambda run: len(run.fragments) > 1 and lost not in run.fragments[-1].nodes)
    cluster.start_node(lost)
    driver.finish(future)


def test_a_restart_of_the_controller_costs_nothing(start, cluster) -> None:
    driver = start()
    future = driver.train()
    driver.until_trained()
    cluster.stop_controller()
    step = driver.run.trainings["t"].progress["step"]
    driver.until_trained(step + 20)  # the training does not notice
    cluster.start_controller()
    driver.finish(future)
    assert len({fragment.nodes for fragment in driver.run.fragments}) <= 2, "it was not disturbed"
    assert driver.run.blocks_ended == []


def test_a_main_job_does_not_wait_for_a_block_that_cannot_be_preempted(start, cluster) -> None:
    """Where nobody preempts us, we see who waits and leave by ourselves."""
    driver = start("main")
    future = driver.train(nodes=8)
    driver.until_trained()
    main = cluster.submit("--partition=main", "--nodes=8", "--exclusive", "--time=1", command="sleep 1")
    submitted = time.monotonic()
    cluster.wait_for_state(main, "RUNNING", "COMPLETED", timeout=20)
    assert time.monotonic() - submitted < 8, "a round of queries, the closing margin, and a cycle of the scheduler"
    why_blocks_ended(driver, "made way")
    driver.finish(future)


def test_a_training_leaves_before_its_window_ends_and_the_head_job_starts_in_time(start, cluster) -> None:
    """Seven nodes are busy for a minute, then all eight are promised: the hole is one node, one minute."""
    blocker = cluster.submit("--partition=main", "--nodes=7", "--exclusive", "--time=2", command="sleep 45")
    cluster.wait_for_state(blocker, "RUNNING")
    head = cluster.submit("--partition=main", "--nodes=8", "--exclusive", "--time=1", command="sleep 1")
    driver = start("main")
    future = driver.train(nodes=1)
    driver.until_trained()
    assert cluster.state_of(head) == "PENDING"
    cluster.wait_for_state(blocker, "COMPLETED", timeout=50)
    ended = time.monotonic()
    cluster.wait_for_state(head, "RUNNING", "COMPLETED", timeout=30)
    assert time.monotonic() - ended < 10
    driver.finish(future)


def test_a_full_queue_costs_nothing_but_time(tmp_path, monkeypatch) -> None:
    """``sbatch`` then waits for minutes instead of failing: it is ended, and no job comes of it later."""
    with LoopbackSlurm(nodes=2, bf_interval=1, extra=["MaxJobCount=4", "MinJobAge=2"]) as cluster:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, cluster.environment[name])
        full = [cluster.submit("--hold", "--partition=main") for _ in range(3)]
        driver = Driver(cluster, tmp_path, "preemptible").load()
        try:
            future = driver.train()
            assert "full" in why_blocks_ended(driver, "refused")
            cluster.run("scancel", *full)
            driver.until_trained()
            assert len(driver.jobs()) == 1
            driver.finish(future)
        finally:
            parsl.dfk().cleanup()
            parsl.clear()


def test_repeated_refusals_end_the_trainings_with_the_reason(start, cluster) -> None:
    driver = start("backfill", max_refusals=2)
    cluster.run("scontrol", "update", "PartitionName=backfill", "MaxTime=1")
    try:
        future = driver.train()
        with pytest.raises(BatchSystemError, match="refused 2 blocks in a row") as caught:
            future.result(timeout=60)
        assert "partition" in str(caught.value)
    finally:
        cluster.run("scontrol", "update", "PartitionName=backfill", "MaxTime=UNLIMITED")


@pytest.mark.parametrize(("partition", "message"), [("nonesuch", "nonesuch"), ("backfil", "did you mean 'backfill'")])
def test_what_can_never_run_is_refused_before_anything_is_submitted(cluster, tmp_path, partition, message) -> None:
    with pytest.raises(InvalidSettings, match=message):
        Driver(cluster, tmp_path, partition).load()
    parsl.clear()
    assert cluster.run("squeue", "--noheader") == ""
