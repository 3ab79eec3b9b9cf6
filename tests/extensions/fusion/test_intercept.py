"""Replaced forward passes of single objects."""

from __future__ import annotations

import copy
import pickle
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook

from freetrain_parsl.extensions.fusion.engine.intercept import AttributeWatch, intercept, original_forward
from tests.extensions.fusion.sweep_trainings import alone, data, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Derived(Doubling):
    pass


def with_attribute(value: Any) -> nn.Module:
    module = Doubling()
    module.kept = value
    return module


def test_only_the_object_itself_is_intercepted_and_it_stays_what_it_is() -> None:
    one, other = Derived(), Doubling()
    forward = Doubling.forward
    release = intercept(one, lambda args, kwargs: ("intercepted", args, kwargs))
    x = torch.ones(1)
    assert one(x, scale=2) == ("intercepted", (x,), {"scale": 2})
    assert one.forward(x) == ("intercepted", (x,), {})
    assert other(x) == 2
    assert copy.deepcopy(one)(x) == 2
    assert pickle.loads(pickle.dumps(one))(x) == 2
    assert original_forward(one)(one, x) == 2
    assert type(one) is Derived
    release()
    assert one(x) == 2
    assert Doubling.forward is forward


@pytest.mark.parametrize(
    ("module", "noted"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 3), nn.LSTM(2, 2), nn.LayerNorm(2), nn.GELU(), nn.Dropout(0.1)), False),
        (nn.TransformerEncoderLayer(4, 2, 8), False),
        (with_attribute((1, torch.relu, nn.functional.relu, None)), False),
        (with_attribute([1]), True),
        (with_attribute(types.SimpleNamespace(a=1)), True),
        (with_attribute((1, {})), True),
    ],
)
def test_what_modules_keep_may_have_changed_in_the_next_epoch(module: nn.Module, noted: bool) -> None:
    watch = AttributeWatch()
    watch.watch([Doubling(), module] * 2)  # two members, each with two models
    watch.begin_epoch()
    assert watch.changed is noted


def test_a_forward_that_was_assigned_to_a_model_is_intercepted() -> None:
    one, x = Doubling(), torch.ones(1)
    one.forward = assigned = types.MethodType(lambda self, x: 3 * Doubling.forward(self, x), one)  # type: ignore[method-assign]
    release = intercept(one, lambda args, _kwargs: ("intercepted", args))
    assert one(x) == ("intercepted", (x,))
    assert original_forward(one)(one, x) == 6
    copied = copy.deepcopy(one)
    assert copied(x) == 6
    assert copied.forward.model is copied
    release()
    assert one.forward is assigned
    assert one(x) == 6


@pytest.mark.slow  # the compiler's imports
@pytest.mark.parametrize("assigned", [False, True])
def test_what_is_called_instead_is_not_compiled(assigned: bool) -> None:
    """Otherwise all code that runs before it returns would be, that of other members included."""
    model = Doubling()
    if assigned:
        model.forward = types.MethodType(Doubling.forward, model)  # type: ignore[method-assign]
    model.compile(backend="eager")
    release = intercept(model, lambda _args, _kwargs: torch.compiler.is_compiling())
    assert model(torch.ones(1)) is False
    release()
    assert model(torch.ones(1)) == 2


def test_a_class_is_restored_when_its_last_object_is_released() -> None:
    forward = nn.Sequential.forward
    models = [nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))]
    releases = [intercept(model, lambda _args, _kwargs: "intercepted") for model in models]
    releases[0]()
    assert nn.Sequential.forward is not forward
    assert models[1](torch.ones(1, 1)) == "intercepted"
    assert isinstance(models[0](torch.ones(1, 1)), torch.Tensor)
    releases[1]()
    releases[1]()
    assert nn.Sequential.forward is forward


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def halves_gradients(net: nn.Module, _seen: list[float]) -> Any:
    return next(net.parameters()).register_hook(lambda gradient: gradient * 0.5)


def halves_sums_of_gradients(net: nn.Module, _seen: list[float]) -> Any:
    return next(net.parameters()).register_post_accumulate_grad_hook(halve)


def notes_outputs(net: nn.Module, seen: list[float]) -> Any:
    return net.register_forward_hook(lambda _module, _inputs, output: seen.append(float(output.detach().sum())))


def notes_outputs_of_all_modules(net: nn.Module, seen: list[float]) -> Any:
    def note(module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if module is net:
            seen.append(float(output.detach().sum()))

    return register_module_forward_hook(note)


def train(session: Any, *, lr: float, register: Callable[..., Any], begin: int) -> Any:
    seen: list[float] = []
    net = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
    batches = session.loader(data(), batch_size=16)
    hooks = []
    for epoch in session.epochs(3):
        if epoch == begin:
            hooks.append(register(net[0], seen))
        for x, y in batches:
            session.step(cross_entropy(model(x), y))
    hooks[0].remove()
    return {"seen": seen, "model": {name: value.clone() for name, value in model.state_dict().items()}}


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize(
    "register", [halves_gradients, halves_sums_of_gradients, notes_outputs, notes_outputs_of_all_modules]
)
def test_hooks_are_called_as_alone(tmp_path: Path, register: Callable[..., Any], begin: int) -> None:
    points = [{"lr": lr, "register": register, "begin": begin} for lr in (0.02, 0.05, 0.1)]
    outcome = together(tmp_path / "array", points, train)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, train)
        assert distance(outcome.value(str(number)), value) < 1e-10
    assert outcome.engine.fused_steps == 4 * begin


def doubled(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def train_with_a_hook(session: Any, *, lr: float, end: int) -> Any:
    net = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    hook = net[0].register_forward_hook(doubled)
    model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
    batches = session.loader(data(), batch_size=16)
    for epoch in session.epochs(3):
        if epoch == end:
            hook.remove()
        for x, y in batches:
            session.step(cross_entropy(model(x), y))
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("ends", "fused"),
    [((1, 1, 1), 12), ((3, 1, 3), 4), ((1, 3, 3), 4)],
    ids=["all members", "the second", "the first"],
)
def test_a_hook_that_members_remove_is_called_until_then(tmp_path: Path, ends: tuple[int, ...], fused: int) -> None:
    points = [{"lr": lr, "end": end} for lr, end in zip((0.02, 0.05, 0.1), ends, strict=True)]
    outcome = together(tmp_path / "array", points, train_with_a_hook)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, train_with_a_hook)
        assert distance(outcome.value(str(number)), value) < 1e-10
    assert outcome.engine.fused_steps == fused
