"""Run repeatedly by test_scripts.py, with different code each time."""

import logging
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

RATE = 0.1


def data() -> torch.utils.data.TensorDataset:
    """Return a dataset that a linear layer can learn."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


@training_app(epochs=1)
def train(session):
    """Return the learning rate of the training job."""
    model, _ = session.prepare(nn.Linear(8, 1), torch.optim.SGD, lr=RATE)
    batches = session.loader(data(), batch_size=32)
    for _ in session.epochs():
        for x, y in batches:
            session.step(nn.functional.mse_loss(model(x), y))
    return RATE


if __name__ == "__main__":
    logging.getLogger("freetrain_parsl").addHandler(logging.StreamHandler(sys.stderr))
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(nodes=1),
        checkpoint_dir="checkpoints",
        trainings=TrainingSettings(threads_per_slot=1),
        rate_limits=RateLimits(poll_interval=timedelta(seconds=0.5)),
        planner=PlannerSettings(
            startup=timedelta(seconds=8),
            min_useful=timedelta(seconds=5),
            closing_margin=timedelta(seconds=3),
            settle=timedelta(seconds=1),
        ),
    )
    with parsl.load(Config(executors=[executor], run_dir="runs", strategy="none", initialize_logging=False)):
        named = train.options(name="named")
        for future in (train(), named()):
            print(future.result() if future.exception() is None else future.exception())
