"""A driver in this process for any batch system, with a training job that is slow until the test releases it."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import parsl
from parsl.config import Config

from freetrain_parsl import CheckpointSettings, FreeTrainExecutor, PlannerSettings, RateLimits, TrainingSettings
from tests.executor.scenario import Site, make_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.report.projection.run import RunState
    from tests.batch_systems.backends import Backend

# Seconds where a site has minutes.
PLANNER = PlannerSettings(
    startup=timedelta(seconds=8),
    min_useful=timedelta(seconds=10),
    closing_margin=timedelta(seconds=3),
    max_walltime=timedelta(minutes=10),
    idle_timeout=timedelta(seconds=3),
    join_timeout=timedelta(minutes=2),
    settle=timedelta(seconds=1),
)
RATE_LIMITS = RateLimits(poll_interval=timedelta(seconds=1), submissions_per_minute=60)
SAMPLES_PER_EPOCH = 200


class Driver(Site):
    """One FreeTrainExecutor, to be loaded.

    Parameters
    ----------
    provider
        Submits its blocks.
    directory
        Directory of the run and its checkpoints.
    **changes
        Settings of the executor.
    """

    def __init__(self, provider: ExecutionProvider, directory: Path, **changes: Any) -> None:
        self.directory = directory
        self.slow = directory / "slow"
        self.epochs = 0
        settings = {
            "planner": PLANNER,
            "trainings": TrainingSettings(heartbeat_timeout=timedelta(seconds=8), threads_per_slot=1),
            "rate_limits": RATE_LIMITS,
            "checkpoint_dir": directory / "checkpoints",
            "checkpoints": CheckpointSettings(interval=timedelta(seconds=2)),
            **changes,
        }
        super().__init__(FreeTrainExecutor(provider=provider, address="127.0.0.1", **settings))

    def load(self) -> Driver:
        """Start the executor."""
        run_dir = str(self.directory / "runinfo")
        parsl.load(Config(executors=[self.executor], run_dir=run_dir, strategy="none", initialize_logging=False))
        return self

    def train(self, nodes: int = 1, epochs: int = 20) -> Future[Any]:
        """Submit a training job that is slow, more than a second per epoch, until `finish`."""
        self.slow.touch()
        self.epochs = epochs
        return make_app(max_nodes=nodes).options(name="t")(epochs=epochs, slow=str(self.slow))

    @property
    def step(self) -> int:
        """Return the last step reported by the training job."""
        return self.run.trainings["t"].progress.get("step", 0)

    def until_step(self, step: int = 5) -> RunState:
        """Wait until the training job has reached a step."""
        return self.until(
            lambda run: "t" in run.trainings and run.trainings["t"].progress.get("step", 0) >= step and run
        )

    def until_block_ended(self, pattern: str, seconds: float = 240.0) -> str:
        """Wait until a block has ended for a matching reason."""
        return self.until(lambda run: next((why for why in run.blocks_ended if re.search(pattern, why)), None), seconds)

    def finish(self, future: Future[Any]) -> None:
        """Let the training job run fast, and assert that every sample was used exactly once."""
        self.slow.unlink()
        assert future.result(timeout=240)["metrics"]["samples"] == self.epochs * SAMPLES_PER_EPOCH
        progress = self.until(lambda run: run.completed and run.trainings["t"].progress)
        assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)


@contextmanager
def loaded_drivers(directory: Path) -> Iterator[Callable[..., Driver]]:
    """Yield a function that loads a `Driver` (backend, settings); after its end none of our jobs may be left.

    The backend's commands, if it has any, must be on this process's PATH.
    """
    backends: list[Backend] = []

    def load(backend: Backend, **changes: Any) -> Driver:
        backends.append(backend)
        return Driver(backend.provider(), directory, **changes).load()

    try:
        yield load
    finally:
        for backend in backends:
            backend.mend()
            parsl.dfk().cleanup()
        parsl.clear()
    end = time.monotonic() + 10
    for backend in backends:
        while backend.jobs() and time.monotonic() < end:
            time.sleep(0.1)
        assert backend.jobs() == {}
