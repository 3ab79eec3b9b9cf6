"""Run by test_scripts.py: a typical script with network, data and constants next to the training function."""

import sys
from datetime import timedelta

import parsl
import torch
from parsl.config import Config
from torch import nn

from freetrain_parsl import (
    EmbeddedClusterProvider,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    TrainingSettings,
    training_app,
)

SCALE = 2.0


class Net(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, 8) to (n, 1)."""
        return self.layer(x)


def data() -> torch.utils.data.TensorDataset:
    """Return a dataset that a linear layer can learn."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, SCALE * x.sum(1, keepdim=True))


@training_app(max_nodes=2, min_nodes=2)
def train(session, lr):
    """Return the last loss, the number of samples, and the number of processes."""
    model, _ = session.prepare(Net(), torch.optim.SGD, lr=lr)
    loader = session.loader(data(), batch_size=32)
    for _ in session.epochs(6):
        for x, y in loader:
            session.step(nn.functional.mse_loss(model(x), y))
    return session.metrics["loss"], session.metrics["samples"], session.world_size


if __name__ == "__main__":
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(nodes=2),
        slots_per_node=2,
        trainings=TrainingSettings(threads_per_slot=1),
        rate_limits=RateLimits(poll_interval=timedelta(seconds=0.5)),
        planner=PlannerSettings(
            startup=timedelta(seconds=8),
            min_useful=timedelta(seconds=5),
            closing_margin=timedelta(seconds=3),
            settle=timedelta(seconds=1),
        ),
    )
    with parsl.load(Config(executors=[executor], run_dir=sys.argv[1], strategy="none", initialize_logging=False)):
        print(*train(lr=0.1).result())
