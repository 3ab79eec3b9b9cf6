"""A small regression as a training app; its steps are long while the file `slow` exists."""

import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from freetrain_parsl import training_app

SAMPLES = 200


@training_app(max_nodes=2)
def train(session, *, epochs=6, lr=0.02, slow=None, fail=False):
    """Train; return the number of samples, which is correct only if none was lost or repeated."""
    if fail:
        raise ValueError("the user's own mistake")
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 6, generator=generator)
    y = x @ torch.randn(6, 1, generator=generator)
    model, _ = session.prepare(torch.nn.Linear(6, 1), torch.optim.SGD, lr=lr)
    data = session.loader(TensorDataset(x, y), batch_size=20)
    for _ in session.epochs(epochs):
        for a, b in data:
            end = time.monotonic() + 1.0  # a minute in total: other commands of the test may be slow to start
            while slow is not None and Path(slow).exists() and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.005)
            session.step(mse_loss(model(a), b))
            print("step", session.metrics["steps"])
            session.log(every=1, made=session.metrics["steps"])
    return session.metrics


not_an_app = len
