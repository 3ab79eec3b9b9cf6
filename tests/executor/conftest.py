"""A real Parsl with a `FreeTrainExecutor` on a real embedded cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import parsl
import pytest
from parsl.config import Config

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor
from tests.executor.scenario import CHECKPOINTS, PLANNER, RATE_LIMITS, TRAININGS, Site
from tests.executor.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Set up a training manager whose slots are only names."""
    stage = Stage(tmp_path)
    yield stage
    stage.journal.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Load Parsl with one FreeTrainExecutor on an embedded cluster; everything ends with the test."""
    sites: list[Site] = []

    def load(*, nodes: int = 4, workload=(), also=(), cluster: str | None = None, **changes: Any) -> Site:
        provider = EmbeddedClusterProvider(
            cluster, nodes=nodes, workload=workload, cluster_dir=str(tmp_path / "cluster"), grace=timedelta(seconds=4)
        )
        settings = {
            "provider": provider,
            "planner": PLANNER,
            "trainings": TRAININGS,
            "rate_limits": RATE_LIMITS,
            "checkpoint_dir": tmp_path / "checkpoints",
            "checkpoints": CHECKPOINTS,
            **changes,
        }
        executor = FreeTrainExecutor(**settings)
        # Parsl never closes the log file of a run.
        parsl.load(
            Config(
                executors=[executor, *also],
                run_dir=str(tmp_path / "runinfo"),
                strategy="none",
                initialize_logging=False,
            )
        )
        sites.append(Site(executor))
        return sites[-1]

    yield load
    if sites and parsl.DataFlowKernelLoader._dfk is not None:
        parsl.dfk().cleanup()
        parsl.clear()


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Create a file; while it exists, training jobs are slow."""
    file = tmp_path / "slow"
    file.touch()
    return file
