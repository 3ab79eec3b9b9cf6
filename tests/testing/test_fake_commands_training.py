"""A training through the user's own provider, in front of the fake batch systems."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import parsl
import pytest
from parsl.config import Config
from parsl.launchers import MpiExecLauncher, SrunLauncher
from parsl.providers import PBSProProvider, SlurmProvider

from freetrain_parsl import FreeTrainExecutor, PlannerSettings
from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.testing.fake_commands import calls, clear_mishaps, install_fake_pbs, install_fake_slurm, set_mishap
from tests.executor.scenario import Site, make_app

ROOT = Path(__file__).parents[2]
EPOCHS, SAMPLES = 8, 8 * 200
PLANNER = PlannerSettings(
    startup=8, min_useful=10, closing_margin=3, max_walltime=600, idle_timeout=3, join_timeout=30, settle=1
)

pytestmark = pytest.mark.cluster


def slurm(directory, cluster):
    return install_fake_slurm(directory, cluster), SlurmProvider(
        partition="backfill", launcher=SrunLauncher(), worker_init=f"export PYTHONPATH={ROOT}"
    )


def pbs(directory, cluster):
    return install_fake_pbs(directory, cluster), PBSProProvider(
        queue="backfill", cpus_per_node=4, launcher=MpiExecLauncher(), worker_init=f"export PYTHONPATH={ROOT}"
    )


@pytest.fixture(params=[slurm, pbs], ids=["slurm", "pbs"])
def site(request, tmp_path, monkeypatch):
    """Load a Parsl with one FreeTrainExecutor, the fake commands on its PATH."""
    monkeypatch.chdir(tmp_path)  # where the launcher leaves a list of nodes
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with EmbeddedCluster(tmp_path / "cluster", nodes=2, grace=timedelta(seconds=4)) as cluster:
            commands, provider = request.param(tmp_path / "fake", cluster.name)
            monkeypatch.setenv("PATH", str(commands), prepend=":")
            executor = FreeTrainExecutor(
                provider=provider,
                address="127.0.0.1",
                planner=PLANNER,
                poll_interval=timedelta(seconds=1),
                submissions_per_minute=60,
                checkpoint_interval=timedelta(seconds=2),
                checkpoint_dir=tmp_path / "checkpoints",
                threads_per_slot=1,
                silence=timedelta(seconds=8),
            )
            run_dir = str(tmp_path / "runinfo")
            parsl.load(Config(executors=[executor], run_dir=run_dir, strategy="none", initialize_logging=False))
            try:
                site = Site(executor)
                site.batch = cluster.client
                site.fake = tmp_path / "fake"
                yield site
            finally:
                parsl.dfk().cleanup()
                parsl.clear()
                left = [job for job in cluster.client.queue().values() if job["kind"] == "preemptible"]
            assert all(job["ending"] for job in left)


def trained(site):
    """Wait until the training has made some steps."""
    return site.until(lambda run: "t" in run.trainings and run.trainings["t"].progress.get("step", 0) >= 5 and run)


def check_samples(site, future):
    """Hold what must hold however a training was disturbed: every sample once an epoch."""
    assert future.result(timeout=90)["metrics"]["samples"] == SAMPLES
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)


def test_a_training_survives_a_job_of_the_main_queue(site, tmp_path):
    """Its block is preempted, it saves within the grace, and goes on when the main job has ended."""
    slow = tmp_path / "slow"
    slow.touch()
    future = make_app(max_nodes=2).options(name="t")(epochs=EPOCHS, slow=str(slow))
    trained(site)
    main = site.batch.submit(["sleep", "3"], nodes=2, walltime=timedelta(seconds=10), preemptible=False)
    site.until(lambda _: site.batch.jobs([main])[main]["state"] == "COMPLETED")
    slow.unlink()
    check_samples(site, future)


def test_a_batch_system_that_is_down_costs_nothing_but_time(site, tmp_path):
    """The training goes on; while nobody answers, it is asked less and less often."""
    slow = tmp_path / "slow"
    slow.touch()
    future = make_app(max_nodes=2).options(name="t")(epochs=EPOCHS, slow=str(slow))
    step = trained(site).trainings["t"].progress["step"]
    set_mishap(site.fake, "down")
    before = len(calls(site.fake))
    site.until(lambda run: run.trainings["t"].progress["step"] >= step + 40)  # four seconds at least
    assert len(calls(site.fake)) - before <= 4
    clear_mishaps(site.fake)
    slow.unlink()
    check_samples(site, future)
