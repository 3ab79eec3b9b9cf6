"""Random models, in double precision: fused, they compute what each computes alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.extensions.fusion.members import compared, made

WIDTHS = st.integers(2, 6)
PROBABILITIES = st.floats(0.05, 0.95)


@st.composite
def vector_models(draw):
    """Draw a sequence of layers on [samples, features]."""
    width = first = draw(WIDTHS)
    layers = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["linear", "norm", "batch", "activation", "dropout", "alpha"]))
        if kind == "linear":
            new = draw(WIDTHS)
            layers.append(partial(nn.Linear, width, new, bias=draw(st.booleans())))
            width = new
        elif kind == "norm":
            layers.append(partial(nn.LayerNorm, width, elementwise_affine=draw(st.booleans())))
        elif kind == "batch":
            layers.append(partial(nn.BatchNorm1d, width, momentum=draw(st.sampled_from([None, 0.1]))))
        elif kind == "activation":
            layers.append(partial(draw(st.sampled_from([nn.Tanh, nn.GELU, nn.Softplus, nn.RReLU, nn.PReLU]))))
        elif kind == "dropout":
            after_linear = not layers or layers[-1].func is nn.Linear  # what others need for their gradient must stay
            layers.append(partial(nn.Dropout, draw(PROBABILITIES), inplace=after_linear and draw(st.booleans())))
        else:
            layers.append(partial(nn.AlphaDropout, draw(PROBABILITIES)))
    return [partial(nn.Linear, first, first), *layers], (first,)


@st.composite
def image_models(draw):
    """Draw a sequence of layers on [samples, channels, height, width]."""
    channels = first = draw(st.integers(1, 3))
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["conv", "transposed", "batch", "group", "pool", "dropout", "activation"]))
        new, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3]))
        if kind == "conv":
            padding = draw(st.sampled_from(["zeros", "circular"]))
            layers.append(partial(nn.Conv2d, channels, new, size, padding=size // 2, padding_mode=padding))
            channels = new
        elif kind == "transposed":
            layers.append(partial(nn.ConvTranspose2d, channels, new, size, padding=size // 2))
            channels = new
        elif kind == "batch":
            layers.append(partial(nn.BatchNorm2d, channels, affine=draw(st.booleans())))
        elif kind == "group":
            layers.append(partial(nn.GroupNorm, 1, channels))
        elif kind == "pool":
            layers.append(draw(st.sampled_from([partial(nn.AvgPool2d, 3, 1, 1), partial(nn.MaxPool2d, 3, 1, 1)])))
        elif kind == "dropout":
            layers.append(partial(draw(st.sampled_from([nn.Dropout, nn.Dropout2d])), draw(PROBABILITIES)))
        else:
            layers.append(draw(st.sampled_from([nn.Tanh, nn.SiLU])))
    return [partial(nn.Conv2d, first, first, 1), *layers], (first, 4, 5)


class First(nn.Module):
    """Returns the first of a recurrent layer's results."""

    def __init__(self, make) -> None:
        super().__init__()
        self.layer = make()

    def forward(self, x):
        return self.layer(x)[0]


@st.composite
def sequence_models(draw):
    """Draw a sequence of layers on [samples, time, features]."""
    width = first = 2 * draw(st.integers(1, 3))
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["recurrent", "attention", "linear"]))
        new, layer_count = 2 * draw(st.integers(1, 3)), draw(st.integers(1, 2))
        dropout = draw(st.sampled_from([0.0, 0.3]))
        if kind == "recurrent":
            options = {
                "num_layers": layer_count,
                "dropout": dropout * (layer_count - 1),
                "bidirectional": draw(st.booleans()),
                "batch_first": draw(st.booleans()),
                "bias": draw(st.booleans()),
            }
            network = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
            layers.append(partial(First, partial(network, width, new, **options)))
            width = new * (2 if options["bidirectional"] else 1)
        elif kind == "attention":
            options = {"dropout": dropout, "batch_first": draw(st.booleans()), "norm_first": draw(st.booleans())}
            layers.append(partial(nn.TransformerEncoderLayer, width, draw(st.sampled_from([1, 2])), 4, **options))
        else:
            layers.append(partial(nn.Linear, width, new))
            width = new
    return layers, (3, first)


def check(model, samples, *, shared, agree, members):
    layers, shape = model

    def make():
        return nn.Sequential(*(layer() for layer in layers)).double()

    torch.manual_seed(samples)
    inputs = [(torch.randn(samples, *shape, dtype=torch.float64),) for _ in range(members)]
    seeds = [5] * members if agree else range(members)
    comparison = compared(made(make, range(members)), inputs, shared=shared, seeds=seeds, steps=2)
    assert comparison.difference < 1e-6  # layers of BatchNorm over few values amplify rounding errors


OPTIONS = {"shared": st.booleans(), "agree": st.booleans(), "members": st.integers(1, 4)}


@given(model=vector_models(), samples=st.integers(2, 5), **OPTIONS)
@settings(max_examples=25)
def test_random_models_of_vectors(model, samples, shared, agree, members):
    check(model, samples, shared=shared, agree=agree, members=members)


@pytest.mark.slow
@given(model=vector_models(), samples=st.integers(2, 5), **OPTIONS)
@settings(max_examples=100)
def test_many_random_models_of_vectors(model, samples, shared, agree, members):
    check(model, samples, shared=shared, agree=agree, members=members)


@pytest.mark.slow
@given(model=image_models(), samples=st.integers(1, 4), **OPTIONS)
@settings(max_examples=60)
def test_random_models_of_images(model, samples, shared, agree, members):
    check(model, samples, shared=shared, agree=agree, members=members)


@pytest.mark.slow
@given(model=sequence_models(), samples=st.integers(1, 4), **OPTIONS)
@settings(max_examples=60)
def test_random_models_of_sequences(model, samples, shared, agree, members):
    check(model, samples, shared=shared, agree=agree, members=members)
