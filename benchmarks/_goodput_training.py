"""The training job of `goodput.py`: real torch, real gradients, and steps that mostly sleep."""

from __future__ import annotations

from typing import Any

from freetrain_parsl import training_app

BATCH = 60  # samples per step on all nodes together; equal shares for 1 to 6 nodes
SAMPLE_NODE_SECONDS = 0.03
SAMPLES = 600  # samples per epoch


def make_app(nodes: int) -> Any:
    """Make the training app, whose code is pickled by value; it trains until it is stopped."""

    @training_app(max_nodes=nodes, scaling={1: 1.0, nodes: float(nodes)})
    def train(session: Any, *, batch: int, cost: float, samples: int) -> None:
        import time

        import torch
        from torch.nn.functional import mse_loss
        from torch.utils.data import TensorDataset

        x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
        net = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
        model, _ = session.prepare(net, torch.optim.Adam, lr=1e-3)
        data = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)
        for _ in session.epochs(1_000_000):
            for a, b in data:
                time.sleep(cost * len(a))
                session.step(mse_loss(model(a), b))

    return train
