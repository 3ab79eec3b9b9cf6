"""Networks of the fusion benchmark, with data of their kind."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SAMPLES = 2048


class Mlp(nn.Module):
    """Three layers of 64 on 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """Two convolutions with batch normalization and dropout, on images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(512, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class PointNet(nn.Module):
    """PointNet's classifier without its transformations, on clouds of 128 points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 32, 1),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 64, 1),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Conv1d(64, 256, 1),
            nn.BatchNorm1d(256),
        )
        self.score = nn.Sequential(
            nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.points(x).amax(2))


class Block(nn.Module):
    """A block of a transformer that predicts the next character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.projections(self.before_attention(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.layers(self.before_layers(x))


class Transformer(nn.Module):
    """Two blocks of width 32 on 32 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(96, 32), nn.Parameter(torch.zeros(32, 32))
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4), nn.LayerNorm(32))
        self.score = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.blocks(self.characters(x) + self.places)).transpose(1, 2)


class Lstm(nn.Module):
    """One layer of 64 on 32 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(96, 32)
        self.memory = nn.LSTM(32, 64, batch_first=True)
        self.score = nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.memory(self.characters(x))[0]).transpose(1, 2)


NETS: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "pointnet": PointNet,
    "transformer": Transformer,
    "lstm": Lstm,
}


def samples(net: str) -> TensorDataset:
    """Return random samples of the right shape."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    if net in ("transformer", "lstm"):
        text = torch.randint(0, 96, (SAMPLES, 33), generator=generator)
        return TensorDataset(text[:, :-1], text[:, 1:])
    shape = {"mlp": (64,), "cnn": (1, 8, 8), "pointnet": (3, 128)}[net]
    return TensorDataset(torch.randn(SAMPLES, *shape, generator=generator), labels)
