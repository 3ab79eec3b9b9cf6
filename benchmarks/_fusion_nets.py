"""Networks of the fusion benchmark, with data of their kind."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        blocks = [ResidualBlock(inputs, outputs, 1 if inputs == outputs else 2) for inputs, outputs in pairwise(widths)]
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), *blocks
        )
        self.score = nn.Linear(8 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.layers(x).mean((2, 3)))


def dcgan(width: int, noise: int, doublings: int) -> list[nn.Module]:
    """Return DCGAN's generator of images of 4 times two to the power of `doublings` pixels, and its discriminator."""
    widths = [width << step for step in range(doublings)]
    made: list[nn.Module] = [
        nn.ConvTranspose2d(noise, widths[-1], 4, bias=False),
        nn.BatchNorm2d(widths[-1]),
        nn.ReLU(),
    ]
    judged: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, padding=1, bias=False), nn.LeakyReLU(0.2)]
    for small, large in pairwise(widths):
        judged += [nn.Conv2d(small, large, 4, 2, padding=1, bias=False), nn.BatchNorm2d(large), nn.LeakyReLU(0.2)]
    for large, small in pairwise(widths[::-1]):
        made += [nn.ConvTranspose2d(large, small, 4, 2, padding=1, bias=False), nn.BatchNorm2d(small), nn.ReLU()]
    made += [nn.ConvTranspose2d(width, 3, 4, 2, padding=1, bias=False), nn.Tanh()]
    judged += [nn.Conv2d(widths[-1], 1, 4, bias=False), nn.Flatten(0)]
    return [nn.Sequential(*made), nn.Sequential(*judged)]


class Bert(nn.Module):
    """BERT's encoder, with a score for each word of the vocabulary."""

    def __init__(self, words: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, activation="gelu", batch_first=True)
                for _ in range(layers)
            )
        )
        self.score = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.layers(self.words(x) + self.places)).transpose(1, 2)


NETS = ("mlp", "cnn", "pointnet", "transformer", "lstm", "dcgan", "resnet18", "bert")
"""The last three are those of HFTA, with their widths on a GPU and small ones elsewhere."""


def models(net: str) -> list[nn.Module]:
    """Return new models of a training job, each of which has an optimizer of its own."""
    whole = torch.cuda.is_available()
    if net == "dcgan":
        return dcgan(64, 100, 4) if whole else dcgan(8, 16, 2)
    if net == "resnet18":
        return [ResNet18(64 if whole else 8)]
    if net == "bert":  # BERT-medium
        return [Bert(30522, 128, 512, 8) if whole else Bert(256, 32, 64, 2)]
    small = {"mlp": Mlp, "cnn": Cnn, "pointnet": PointNet, "transformer": Transformer, "lstm": Lstm}
    return [small[net]()]


def losses(parts: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the losses of a batch in turns, each with the number of the optimizer that steps next."""
    if len(parts) == 1:
        yield functional.cross_entropy(parts[0](x), y), 0
        return
    generator, judge = parts
    noise = next(iter(generator.parameters())).shape[0]
    made = generator(torch.randn(len(x), noise, 1, 1, device=x.device))
    real, false = judge(x), judge(made.detach())
    score = functional.binary_cross_entropy_with_logits
    yield score(real, torch.ones_like(real)) + score(false, torch.zeros_like(false)), 1
    verdict = judge(made)
    yield score(verdict, torch.ones_like(verdict)), 0


def samples(net: str) -> TensorDataset:
    """Return random samples of the right shape."""
    whole = torch.cuda.is_available()
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    if net in ("transformer", "lstm", "bert"):
        words, length = (30522, 128) if net == "bert" and whole else (96, 32)
        text = torch.randint(0, words, (SAMPLES, length + 1), generator=generator)
        return TensorDataset(text[:, :-1], text[:, 1:])
    size = {"dcgan": 64, "resnet18": 32}.get(net, 8) if whole else 16
    shape = {"mlp": (64,), "cnn": (1, 8, 8), "pointnet": (3, 128)}.get(net, (3, size, size))
    return TensorDataset(torch.randn(SAMPLES, *shape, generator=generator), labels)
