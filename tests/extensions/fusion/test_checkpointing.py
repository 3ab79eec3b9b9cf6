"""Activation checkpointing inside fused calls: what is computed again is what was computed, for each member."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.forward import checkpointing
from tests.extensions.fusion.members import compared, made


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass, one of them within another such part."""

    def __init__(self, *layers: nn.Module, **options) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.Sequential(*layers)
        self.options = {"use_reentrant": False, **options}

    def forward(self, x):
        return checkpoint(self._part, self.first(x), scale=2.0, **self.options)

    def _part(self, x, scale):
        COMPUTED.append(x.shape)
        return checkpoint(self.layers, x * scale, use_reentrant=False).tanh()


COMPUTED: list[torch.Size] = []


def of(*layers, **options):
    return [each.double() for each in made(lambda: Checkpointed(*(make() for make in layers), **options), range(3))]


def inputs():
    return [(torch.randn(6, 8, dtype=torch.float64),) for _ in range(3)]


@pytest.mark.parametrize("seeds", [[4, 4, 4], [4, 5, 6]], ids=["one seed", "own seeds"])
@pytest.mark.parametrize("shared", [True, False])
def test_dropout_draws_the_same_numbers_again(seeds, shared):
    models = of(lambda: nn.Linear(8, 8), lambda: nn.Dropout(0.3), nn.ReLU)
    assert compared(models, inputs(), shared=shared, seeds=seeds, steps=2).difference < 1e-10


def test_probabilities_that_differ_are_those_of_each_member():
    models = of(lambda: nn.Linear(8, 8), lambda: nn.Dropout(0.1))
    for model, value in zip(models, (0.1, 0.3, 0.6), strict=True):
        model.layers[1].p = value
    assert compared(models, inputs(), shared=False, seeds=[1, 2, 3]).difference < 1e-10


def test_statistics_advance_as_often_as_alone():
    """Twice in a step, as alone: once more in the backward pass."""
    models = of(lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8))
    assert compared(models, inputs(), shared=False, seeds=[1, 2, 3], steps=2).difference < 1e-10


def test_the_part_is_computed_again_on_stacks():
    COMPUTED.clear()
    compared(of(lambda: nn.Linear(8, 8)), inputs(), shared=False, seeds=[1, 2, 3])
    assert len(COMPUTED) == 2 + 3 * 2  # fused, and each alone: once in each direction


@pytest.mark.parametrize("options", [{"debug": True}, {"context_fn": lambda: (torch.no_grad(), torch.no_grad())}])
def test_options_that_are_not_known_are_refused(options):
    with pytest.raises(CannotFuse, match="activation checkpointing with context_fn or debug"):
        compared(of(nn.ReLU, **options), inputs(), shared=False, seeds=[1, 2, 3])


def test_a_torch_with_another_generator_refuses_checkpointing(monkeypatch):
    monkeypatch.setattr(checkpointing, "_is_known", False)
    with pytest.raises(CannotFuse, match="activation checkpointing, or other hooks on saved tensors"):
        compared(of(nn.ReLU), inputs(), shared=False, seeds=[1, 2, 3])
