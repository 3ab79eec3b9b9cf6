"""A step is verified: computed fused and one by one, with everything restored afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from freetrain_parsl.extensions.fusion.engine.per_member import PerMember
from freetrain_parsl.extensions.fusion.forward import vmap_level
from freetrain_parsl.extensions.fusion.forward.forward import Stacked
from freetrain_parsl.extensions.fusion.forward.verification import verify
from tests.extensions.fusion.members import Streams, made, stacks


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(108, 4)
        )

    def forward(self, x):
        return self.layers(x)


class WithListedWeight(nn.Module):
    """Uses its parameter through a list, which a swap of parameters does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.listed = [self.weight]

    def forward(self, x):
        return x @ self.listed[0] + 0 * self.weight.sum()


def verified(model, x, *, seeds=(1, 2, 3), make_streams=Streams):
    return verified_models(made(model, range(3)), x, seeds, make_streams)


def verified_models(models, x, seeds=(1, 2, 3), make_streams=Streams, differing=None):
    parameters, buffers = stacks(models)
    before = {name: stack.clone() for name, stack in {**parameters, **buffers}.items()}
    own_buffers = [[buffer.clone() for buffer in each.buffers()] for each in models]
    streams = make_streams(seeds)
    states = list(streams.states)
    result = verify(models, models, parameters, buffers, (x,), {}, streams, differing=differing)
    assert all(torch.equal(before[name], stack) for name, stack in {**parameters, **buffers}.items())
    assert all(all(map(torch.equal, old, each.buffers())) for old, each in zip(own_buffers, models, strict=True))
    assert all(stack.grad is None for stack in parameters.values())
    assert all(map(torch.equal, states, streams.states))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_that_is_the_same_passes(dtype):
    torch.manual_seed(0)
    stack = torch.randn(3, 5, 1, 8, 8, dtype=dtype)
    assert verified(lambda: Network().to(dtype), Stacked(stack)) is None
    assert verified(lambda: Network().to(dtype), stack[0]) is None


def test_different_dropout_probabilities_pass():
    models = made(Network, range(3))
    numbers = PerMember([0.1, 0.0, 0.7])
    for model, number in zip(models, numbers.values, strict=True):
        model.layers[4].p = number
    assert verified_models(models, torch.randn(5, 1, 8, 8), differing={"layers.4.p": numbers}) is None


@pytest.mark.parametrize("inside", [True, False])
def test_low_precision_has_its_own_tolerance(inside):
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                return self.layers(x).float()

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        assert verified(Inside, torch.randn(5, 8)) is None


def test_a_parameter_that_is_used_behind_the_back_is_noticed():
    assert "differs" in verified(WithListedWeight, torch.randn(5, 8))


def test_other_random_numbers_are_noticed():
    class Wrong(Streams):
        """Gives all members the numbers of the first in the fused pass, where it claims that they agree."""

        agree = True

        @property
        def states(self):
            return self._states

        @states.setter
        def states(self, states):
            self._states = states

    assert "differs" in verified(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(5, 8), make_streams=Wrong
    )


def test_what_cannot_be_fused_is_the_reason():
    class Deciding(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item() * self.weight.sum().item()

    assert ".item()" in verified(lambda: Deciding(8, 8), torch.randn(5, 8))


def test_gradients_of_inputs_are_compared():
    x = torch.randn(3, 5, 8, requires_grad=True)
    assert verified(lambda: nn.Linear(8, 8), Stacked(x)) is None
    assert x.grad is None


def test_outputs_that_are_no_tensors_are_compared():
    class WithName(nn.Linear):
        def forward(self, x):
            return {"y": super().forward(x), "name": "linear", "sizes": [x.shape[0]]}

    assert verified(lambda: WithName(8, 8), torch.randn(5, 8)) is None


def test_the_mode_of_gradients_does_not_matter():
    with torch.no_grad():
        assert verified(lambda: nn.Linear(8, 8), torch.randn(5, 8)) is None


def test_a_wrong_gradient_is_noticed(monkeypatch):
    """A rule whose outputs are right and whose gradients are not fails."""
    from freetrain_parsl.extensions.fusion.forward.operators import RULES, layers

    def detached(fused, func, input, weight, bias=None):  # noqa: A002
        return layers.linear(fused, func, input, weight.detach(), bias)

    monkeypatch.setitem(RULES, F.linear, detached)
    assert "gradient" in verified(lambda: nn.Linear(8, 8), torch.randn(5, 8))


def test_a_transform_inside_is_noticed_without_private_functions(monkeypatch):
    monkeypatch.setattr(vmap_level, "_private", None)

    class WithGradient(nn.Linear):
        def forward(self, x):
            return torch.func.grad(lambda value: super(WithGradient, self).forward(value).sum())(x)

    assert verified(lambda: WithGradient(8, 8), torch.randn(5, 8)) is not None


def test_numbers_that_are_none_on_the_fused_side_only_are_noticed(monkeypatch):
    """NaN is neither smaller nor larger than a limit."""
    from freetrain_parsl.extensions.fusion.forward.operators import RULES, layers

    def without_a_number(fused, func, input, weight, bias=None):  # noqa: A002
        return layers.linear(fused, func, input, weight, bias) * float("nan")

    monkeypatch.setitem(RULES, F.linear, without_a_number)
    assert "differs" in verified(lambda: nn.Linear(8, 8), torch.randn(5, 8))


class Counts(nn.Module):
    """Counts its calls in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        return self.layer(x) / self.calls


def test_a_tensor_that_a_model_changes_in_place_is_refused_and_as_before():
    models = made(Counts, range(3))
    reason = verified_models(models, Stacked(torch.randn(3, 5, 4)))
    assert "calls" in reason
    assert [float(model.calls) for model in models] == [0.0, 0.0, 0.0]


def test_missing_memory_is_no_verdict(monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("freetrain_parsl.extensions.fusion.forward.verification.fused_call", fails)
    with pytest.raises(torch.OutOfMemoryError):
        verified(Network, Stacked(torch.randn(3, 2, 1, 8, 8)))
