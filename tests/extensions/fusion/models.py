"""Small models, each for one layer or operator of the table of fused operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch import nn

SAMPLES = 6


class Calling(nn.Module):
    """A module, and a function that is called with it."""

    def __init__(self, module, function) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, x):
        return self.function(self.module, x)


class Attention(nn.Module):
    def __init__(self, *, causal=False, dropout=0.0, mask=None, heads=2) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.causal, self.dropout, self.heads = causal, dropout, heads
        self.mask = mask

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = self.mask(x) if self.mask else None
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=self.causal)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).to(x.dtype)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.embedding(x))


class BufferAssigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y - self.mean


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class KeepsMask(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(8, 8).tril()
        return super().forward(x) @ self.mask


class KeepsOutput(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.last = None

    def forward(self, x):
        self.last = super().forward(x).detach()
        return self.last + super().forward(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class TwoFactors(torch.autograd.Function):
    """Two outputs, a saved tensor, an argument that is none, and no form for `torch.vmap`."""

    @staticmethod
    def forward(x, weight, power):
        return x @ weight, (x @ weight) ** power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], output[0])
        ctx.power = inputs[2]

    @staticmethod
    def backward(ctx, first, second):
        x, weight, product = ctx.saved_tensors
        gradient = first + second * ctx.power * product ** (ctx.power - 1)
        return gradient @ weight.T, x.T @ gradient, None


@dataclass
class Result:
    """What a network returns."""

    loss: torch.Tensor
    layers: list[torch.Tensor]
    name: str = "result"


class NewDoubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class PositionalEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(20, 8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x + self.positions[: x.shape[1]])


def vectors():
    return torch.randn(SAMPLES, 8)


def sequences():
    return torch.randn(SAMPLES, 5, 8)


def signals():
    return torch.randn(SAMPLES, 8, 12)


def images():
    return torch.randn(SAMPLES, 4, 8, 8)


def volumes():
    return torch.randn(SAMPLES, 2, 5, 5, 5)


def words():
    return torch.randint(0, 11, (SAMPLES, 5))


def on(module, function):
    return lambda: Calling(module(), function)


def after_linear(*layers, width=8):
    return lambda: nn.Sequential(nn.Linear(8, width), *(layer() for layer in layers))


def after_conv(*layers):
    return lambda: nn.Sequential(nn.Conv2d(4, 4, 1), *(layer() for layer in layers))


def with_linear(function, width=8):
    return on(lambda: nn.Linear(8, width), function)


def first_of(module):
    return on(module, lambda m, x: m(x)[0])


def encoder(**options):
    return lambda: nn.TransformerEncoderLayer(8, 2, 16, **{"dropout": 0.0, "batch_first": True, **options})


def in_place(layer, x, target):
    target += layer(x)
    return target


def one_at_a_time(layer, x):
    out = torch.zeros(x.shape[0], x.shape[1], 8, dtype=x.dtype)
    for position in range(x.shape[1]):
        out[:, position] = layer(x[:, position])
    return out


def negatives_to_zero(layer, x):
    y = layer(x).clone()
    y[y < 0] = 0
    return y


def packed(lstm, x):
    lengths = torch.tensor([5, 4, 3, 2, 2, 1])
    output, (h, _) = lstm(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
    return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0], h


def with_hook():
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda module, arguments, output: output * 2)
    return layer


def unless_nan(layer, x):
    y = layer(x)
    if torch.isnan(y).any():
        return torch.zeros_like(y)
    return y


def inplace_dropout(layer, x, p=0.4):
    y = layer(x)
    F.dropout(y, p, training=True, inplace=True)
    return y


def hidden_grad(layer, x):
    y = layer(x)
    return torch.autograd.grad(y.sum(), layer.weight, create_graph=True)[0]


def hooked(layer, x):
    y = layer(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def with_doubled_weight(layer, x):
    return torch.func.functional_call(layer, {"weight": layer.weight * 2, "bias": layer.bias}, (x,))


def targets():
    return torch.arange(SAMPLES) % 5


def weights():
    return torch.linspace(0.5, 1.5, 5)


def classes(function):
    return with_linear(function, width=5)


def lstm(**options):
    return lambda: nn.LSTM(8, 6, **options)


def gru(**options):
    return lambda: nn.GRU(8, 6, **options)


def rnn(**options):
    return lambda: nn.RNN(8, 6, **options)


def ones(y):
    return torch.ones_like(y)
