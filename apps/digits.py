"""Handwritten digits: a small convolutional network on 1797 real images of 8x8 pixels.

``python apps/digits.py`` is ordinary PyTorch in one process. `train` is the same training job for FreeTrain:
compare its lines with those of `main`. Needs scikit-learn (``pip install freetrain-parsl[examples]``).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from freetrain_parsl import training_app

if TYPE_CHECKING:
    from freetrain_parsl.training.session import TrainingSession


class Net(nn.Module):
    """Two convolutions and a linear layer.

    Parameters
    ----------
    width
        Channels of the first convolution; with more channels a step takes longer.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images, shape (n, 1, 8, 8), to scores, shape (n, 10)."""
        return self.layers(images)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1500 training and 297 test images, the same ones in every process."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def accuracy(model: nn.Module, images: TensorDataset) -> float:
    """Return the fraction of correctly classified images."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in DataLoader(images, batch_size=300)
        )
    model.train()
    return right / len(images)


@training_app(max_nodes=4)
def train(
    session: TrainingSession, *, epochs: int = 10, batch_size: int = 50, lr: float = 0.05, width: int = 32
) -> dict[str, Any]:
    """Train on the idle nodes of a cluster: on any number of nodes, in any number of fragments."""
    training_images, test_images = digits()
    model, _optimizer = session.prepare(Net(width), SGD, lr=lr, momentum=0.9)
    data = session.loader(training_images, batch_size=batch_size)
    for _epoch in session.epochs(epochs):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
        session.log(accuracy=accuracy(model, test_images))
    return session.metrics


def main() -> None:
    """Train in this process, without FreeTrain."""
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits in plain PyTorch.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    training_images, test_images = digits()
    model = Net(options.width)
    optimizer = SGD(model.parameters(), lr=options.lr, momentum=0.9)
    data = DataLoader(training_images, batch_size=options.batch_size, shuffle=True)
    for epoch in range(options.epochs):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch:2d}  loss {loss.item():.3f}  accuracy {accuracy(model, test_images):.3f}")


if __name__ == "__main__":
    main()
