"""Shared helpers of the executor's tests: a policy controlled by the test, a view of the run, and a small job."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from freetrain_parsl import (
    CheckpointSettings,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    TrainingApp,
    TrainingSettings,
    training_app,
)
from freetrain_parsl.planning.model import Decision, Pool
from freetrain_parsl.planning.placement import place
from freetrain_parsl.planning.policies.base import Policy, as_sizes
from freetrain_parsl.report.projection.run import RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.cluster.client import ClusterClient

PLANNER = PlannerSettings(
    startup=timedelta(seconds=5),
    min_useful=timedelta(seconds=2),
    closing_margin=timedelta(seconds=1.5),
    max_walltime=timedelta(minutes=5),
    idle_timeout=timedelta(seconds=2),
    join_timeout=timedelta(minutes=3),
    settle=timedelta(seconds=1),
    replan_interval=timedelta(seconds=0.5),
)
TRAININGS = TrainingSettings(heartbeat_timeout=timedelta(seconds=6), threads_per_slot=1)
RATE_LIMITS = RateLimits(poll_interval=timedelta(seconds=0.5), submissions_per_minute=100)
CHECKPOINTS = CheckpointSettings(interval=timedelta(seconds=2))


class ScriptedPolicy(Policy):
    """Assigns a number of nodes, or of slots of shared ones, set by the test to every trainer, as far as available.

    Parameters
    ----------
    nodes
        The number of nodes.
    avoid
        Nodes that are not assigned.
    """

    name = "scripted"

    def __init__(self, nodes: int = 1, avoid: frozenset[str] = frozenset()) -> None:
        self.nodes = nodes
        self.avoid = avoid

    def allocate(self, pool, trainers, current, now):
        nodes = (node for name, node in pool.items() if name not in self.avoid)
        pool = Pool(nodes, pool.horizon, pool.max_blocks, pool.slots_per_host)
        current = {name: nodes - self.avoid for name, nodes in current.items()}
        left = len(pool)
        counts = {}
        for trainer in trainers:
            counts[trainer.name] = min(self.nodes, left)
            left -= counts[trainer.name]
        if pool.slots_per_host > 1:
            counts = as_sizes(counts, trainers, pool)
        return Decision(place(counts, pool, current), 0.0, proven_optimal=False, bound=0.0)


class Site:
    """A run as seen by a test: the executor, the cluster, and the run's state."""

    def __init__(self, executor: FreeTrainExecutor) -> None:
        self.executor = executor
        self._run: RunState | None = None

    @property
    def cluster(self) -> ClusterClient:
        return self.executor.provider.ensure_started()

    @property
    def run(self) -> RunState:
        if self._run is None:
            self._run = RunState(self.executor.journal_path)
        return self._run.refresh()

    def until(self, condition: Callable[[RunState], Any], seconds: float = 240.0) -> Any:
        """Wait until `condition` of the run is true, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition(self.run):
                return value
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s: {self.run.trainings}")


def make_app(**options: Any) -> TrainingApp:
    """Create a small regression app that returns its parameters.

    Steps take `pause` seconds while the file `slow` exists; each process that calls the function appends its process id
    to the file `calls`.
    """

    @training_app(**{"max_nodes": 4, **options})
    def train(session, *, epochs=6, slow=None, pause=0.1, fail_at=None, calls=None):
        import os
        import time
        from pathlib import Path

        import torch
        from torch.nn.functional import mse_loss
        from torch.utils.data import TensorDataset

        if calls is not None:
            with Path(calls).open("a") as file:
                file.write(f"{os.getpid()}\n")
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(200, 6, generator=generator)
        y = x @ torch.randn(6, 1, generator=generator) + 0.1 * torch.randn(200, 1, generator=generator)
        net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        model, optimizer, scheduler = session.prepare(
            net,
            optimizer := torch.optim.Adam(net.parameters(), lr=0.02),
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8),
        )
        data = session.loader(TensorDataset(x, y), batch_size=16)
        for epoch in session.epochs(epochs):
            for a, b in data:
                time.sleep(pause if slow is not None and Path(slow).exists() else 0.005)
                session.step(mse_loss(model(a), b))
                scheduler.step()
                if fail_at is not None and epoch == fail_at:
                    raise ValueError("the user's own mistake")
        parameters = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
        return {"metrics": session.metrics, "parameters": parameters, "lr": optimizer.param_groups[0]["lr"]}

    return train
