"""Optimizers in an array: what each training job's own would do, or a reason why the training jobs go on one by one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

from freetrain_parsl.extensions.fusion.engine.array import Array, MemberObjects
from freetrain_parsl.extensions.fusion.optimizers.optimizers import row_optimizer
from tests.extensions.fusion.sweep_trainings import alone, data, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

RATES = (0.02, 0.05, 0.1)
ROUNDING = 1e-10


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def train(
    session: Any,
    *,
    lr: float,
    optimizers: Callable[..., Sequence[optim.Optimizer]],
    epochs: int = 2,
    change: Callable[..., None] = lambda *_: None,
) -> Any:
    """Train by the optimizers in turns; `change` is called at the start of each epoch."""
    net = network()
    model, *steps = session.prepare(net, *optimizers(net, lr))
    batches = session.loader(data(), batch_size=16)
    losses: list[float] = []
    for epoch in session.epochs(epochs):
        change(model, steps, epoch)
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            session.step(loss, optimizer=steps[len(losses) % len(steps)])
            losses.append(loss.item())
    return {
        "losses": losses,
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizers": [each.state_dict() for each in steps],
    }


def fused_steps_as_alone(root: Path, **point: Any) -> int:
    """Train alone and in an array, compare, and return the number of fused steps."""
    points: list[Mapping[str, Any]] = [{"lr": lr, **point} for lr in RATES]
    outcome = together(root / "array", points, train)
    for number, each in enumerate(points):
        value = alone(root / "alone", str(number), each, train)
        assert distance(outcome.value(str(number)), value) < ROUNDING
    return outcome.engine.fused_steps


def two_of_all_parameters(net: nn.Sequential, lr: float) -> Sequence[optim.Optimizer]:
    return optim.SGD(net.parameters(), lr=lr), optim.Adam(net.parameters(), lr=lr)


def one_with_a_parameter_twice(net: nn.Sequential, lr: float) -> Sequence[optim.Optimizer]:
    return (optim.Adam([*net.parameters(), net[0].weight], lr=lr),)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("optimizers", [two_of_all_parameters, one_with_a_parameter_twice])
def test_parameters_that_are_listed_more_than_once_are_stepped_each_time(
    tmp_path: Path, optimizers: Callable[..., Any]
) -> None:
    assert fused_steps_as_alone(tmp_path, optimizers=optimizers) == 0


def in_two_groups(net: nn.Sequential, lr: float) -> Sequence[optim.Optimizer]:
    return (optim.RMSprop([{"params": net[0].parameters()}, {"params": net[2].parameters()}], lr=lr / 10),)


def unfreezes_and_decays(model: Any, steps: Sequence[optim.Optimizer], epoch: int) -> None:
    model[0].requires_grad_(epoch >= 1)
    for group in steps[0].param_groups:
        group["weight_decay"] = 0.1 * (epoch >= 2)


def test_states_of_a_group_that_is_trained_later_survive_a_change_of_options(tmp_path: Path) -> None:
    """They were made after those of the other group."""
    assert fused_steps_as_alone(tmp_path, optimizers=in_two_groups, epochs=3, change=unfreezes_and_decays) == 12


def test_an_optimizer_without_states_has_none_in_an_array(tmp_path: Path) -> None:
    def maximizing(net: nn.Sequential, lr: float) -> Sequence[optim.Optimizer]:
        return (optim.SGD(net.parameters(), lr=lr, maximize=True),)

    assert fused_steps_as_alone(tmp_path, optimizers=maximizing) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hyperparameters_are_not_rounded_to_the_type_of_the_parameters(dtype: torch.dtype) -> None:
    nets = [network().to(dtype) for _ in RATES]
    steps = [
        optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.999 - lr / 10), weight_decay=lr, eps=1e-4 * lr)
        for net, lr in zip(nets, RATES, strict=True)
    ]
    alone_nets, alone_steps = copy.deepcopy((nets, steps))
    array = Array([MemberObjects([net], [each]) for net, each in zip(nets, steps, strict=True)])
    fused = row_optimizer(steps, array.segments)
    for _ in range(20):
        for net, own in zip(nets, alone_nets, strict=True):
            for parameter, other in zip(net.parameters(), own.parameters(), strict=True):
                other.grad = torch.randn_like(other)
                parameter.grad = other.grad.clone()
        array.take_gradients()
        fused.step()
        for each in alone_steps:
            each.step()
    for net, own in zip(nets, alone_nets, strict=True):
        assert distance(net.state_dict(), own.state_dict()) == 0


def one_for_each_layer(net: nn.Sequential, lr: float) -> Sequence[optim.Optimizer]:
    return tuple(optim.RMSprop(net[layer].parameters(), lr=lr / 10) for layer in (0, 2))


def freezes_a_layer(model: Any, _steps: Sequence[optim.Optimizer], epoch: int) -> None:
    model[0].requires_grad_(epoch != 1)


def test_an_optimizer_whose_parameters_are_all_frozen_steps_none(tmp_path: Path) -> None:
    assert fused_steps_as_alone(tmp_path, optimizers=one_for_each_layer, epochs=3, change=freezes_a_layer) == 12


def keeps_something(model: Any, steps: Sequence[optim.Optimizer], epoch: int) -> None:
    """Add an entry to the state of one parameter, and then make the array take all states anew."""
    if epoch == 1:
        steps[0].state[model[0].weight]["mine"] = torch.ones_like(model[0].weight)
    steps[0].param_groups[0]["weight_decay"] = 0.1 * (epoch == 2)


def test_an_entry_in_the_state_of_one_parameter_is_kept(tmp_path: Path) -> None:
    def adaptive(net: nn.Sequential, lr: float) -> Sequence[optim.Optimizer]:
        return (optim.RMSprop(net.parameters(), lr=lr / 10),)

    assert fused_steps_as_alone(tmp_path, optimizers=adaptive, epochs=3, change=keeps_something) > 0


def counts_steps(session: Any, *, lr: float) -> Any:
    """Count the steps from the second epoch on, by a hook of all optimizers."""
    counted = []
    net = network()
    model, steps = session.prepare(net, optim.SGD(net.parameters(), lr=lr))
    batches = session.loader(data(), batch_size=16)
    hooks = []
    for epoch in session.epochs(3):
        if epoch == 1:
            note = register_optimizer_step_post_hook
            hooks.append(note(lambda stepped, *_: counted.append(1.0) if stepped is steps else None))
        for x, y in batches:
            session.step(cross_entropy(model(x), y))
    hooks[0].remove()
    return {"counted": counted}


def test_hooks_of_all_optimizers_are_called(tmp_path: Path) -> None:
    outcome = together(tmp_path, [{"lr": lr} for lr in RATES], counts_steps)
    assert [outcome.value(str(number))["counted"] for number in range(3)] == [[1.0] * 8] * 3


def assigns_gradients(session: Any, *, lr: float, optimizer: str) -> Any:
    """Train with gradients of a frozen layer that come from elsewhere, in some steps."""
    net = network()
    net[0].weight.requires_grad_(requires_grad=False)
    model, _ = session.prepare(net, getattr(optim, optimizer)(net.parameters(), lr=lr / 10))
    batches = session.loader(data(), batch_size=16)
    losses: list[float] = []
    for _ in session.epochs(2):
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            session.backward(loss)
            if lr > RATES[0] or len(losses) % 2:
                model[0].weight.grad = torch.full_like(model[0].weight, lr)
            session.step()
            assert model[0].weight.grad is None
            losses.append(loss.item())
    return {"losses": losses, "model": model[0].weight.clone()}


@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop"])
def test_gradients_that_are_assigned_to_frozen_parameters_are_stepped(tmp_path: Path, optimizer: str) -> None:
    points = [{"lr": lr, "optimizer": optimizer} for lr in RATES]
    outcome = together(tmp_path / "array", points, assigns_gradients)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, assigns_gradients)
        assert distance(outcome.value(str(number)), value) < ROUNDING
