"""What the tests of trainings on a real Slurm share: a driver in this process, and a view of its jobs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parsl
from parsl.config import Config
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider

from freetrain_parsl import FreeTrainExecutor, PlannerSettings
from tests.executor.scenario import Site, make_app

if TYPE_CHECKING:
    from concurrent.futures import Future

    from freetrain_parsl.report.run import RunState
    from freetrain_parsl.testing.loopback_slurm import LoopbackSlurm

ROOT = Path(__file__).parents[2]

# Everything in seconds, where a site has minutes.
PLANNER = PlannerSettings(
    startup=8, min_useful=10, closing_margin=3, max_walltime=600, idle_timeout=3, join_timeout=30, settle=1
)
EPOCHS = 20
SAMPLES = EPOCHS * 200


class Driver(Site):
    """A loaded Parsl with one FreeTrainExecutor on a loopback Slurm.

    Parameters
    ----------
    cluster
        Its commands must be on this process's PATH.
    directory
        For the run and its checkpoints.
    partition
        Where blocks go.
    **changes
        Settings of the executor.
    """

    def __init__(self, cluster: LoopbackSlurm, directory: Path, partition: str = "preemptible", **changes: Any) -> None:
        self.slurm = cluster
        self.directory = directory
        self.slow = directory / "slow"
        provider = SlurmProvider(
            partition=partition, launcher=SrunLauncher(), worker_init=f"export PYTHONPATH={ROOT}", cmd_timeout=5
        )
        settings = {
            "planner": PLANNER,
            "poll_interval": timedelta(seconds=1),
            "submissions_per_minute": 60,
            "checkpoint_interval": timedelta(seconds=2),
            "checkpoint_dir": directory / "checkpoints",
            "threads_per_slot": 1,
            "silence": timedelta(seconds=8),
            **changes,
        }
        super().__init__(FreeTrainExecutor(provider=provider, address="127.0.0.1", **settings))

    def load(self) -> Driver:
        """Start the executor."""
        parsl.load(
            Config(
                executors=[self.executor],
                run_dir=str(self.directory / "runinfo"),
                strategy="none",
                initialize_logging=False,
            )
        )
        return self

    def train(self, nodes: int = 2) -> Future[Any]:
        """Submit a training that goes slowly until `finish`."""
        self.slow.touch()
        return make_app(max_nodes=nodes).options(name="t")(epochs=EPOCHS, slow=str(self.slow))

    def until_trained(self, steps: int = 5) -> RunState:
        """Wait until the training has made that many steps."""
        return self.until(
            lambda run: "t" in run.trainings and run.trainings["t"].progress.get("step", 0) >= steps and run
        )

    def finish(self, future: Future[Any]) -> None:
        """Let the training go fast, and hold what must hold however it was disturbed: every sample once."""
        self.slow.unlink()
        assert future.result(timeout=90)["metrics"]["samples"] == SAMPLES
        progress = self.until(lambda run: run.completed and run.trainings["t"].progress)
        assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)

    def jobs(self) -> dict[str, str]:
        """Find our living jobs: id -> state."""
        lines = self.slurm.run("squeue", "--noheader", "--format=%i %T %j").splitlines()
        words = (line.split() for line in lines)
        return {job: state for job, state, name in words if name.startswith("freetrain.")}

    def running(self) -> str:
        """Name our one running job."""
        (job,) = [job for job, state in self.jobs().items() if state == "RUNNING"]
        return job
