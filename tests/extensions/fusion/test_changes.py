"""Functions that change their models, optimizers or batches while they train, in an array and alone."""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from freetrain_parsl.errors import CannotFuse
from tests.extensions.fusion.sweep_trainings import alone, distance, together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RATES = (0.02, 0.05, 0.1)
ROUNDING, AMPLIFIED = 1e-10, 1e-7  # the latter after an adaptive optimizer has divided by small numbers


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(52, 24, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (52,), generator=generator))


class Net(nn.Module):
    """A network with dropout, a normalization, a temperature, and a second head that may join later."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.first = nn.Linear(24, 12)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 4)
        self.head = nn.Linear(12, 4) if head else None
        self.temperature = 1.0
        self.with_head = False
        self.doubled = nn.Identity()
        self.more = nn.ModuleList()
        self.scales = [1.0]
        self.options = SimpleNamespace(scale={"of all": 1.0})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.dropout(self.first(x))))
        out = self.last(hidden) / self.temperature / self.scales[0] / self.options.scale["of all"]
        for layer in self.more:
            out = layer(out)
        out = 2 * out if hasattr(self, "doubled") else out
        return out + self.head(hidden) if self.head is not None and self.with_head else out


def train(
    session: Any, *, lr: float, change: Callable[..., None], optimizer: str = "SGD", at: int = 2, **options: Any
) -> Any:
    """Train for six epochs; `change` is called at the start of those from `at` on."""
    net = Net(head=change is joins_a_head).double()
    if optimizer == "SGD":
        options = {"momentum": 0.9, **options}
    model, steps = session.prepare(net, getattr(torch.optim, optimizer)(net.parameters(), lr=lr, **options))
    data = session.loader(samples(), batch_size=16)
    losses = []
    kept: dict[str, Any] = {}
    for epoch in session.epochs(6):
        if epoch >= at:
            change(model, steps, lr=lr, epoch=epoch, kept=kept)
        for x, y in data:
            loss = cross_entropy(model(x), y)
            kept.get("in each step", lambda _number: None)(len(losses))
            session.step(loss)
            losses.append(loss.item())
    return {"losses": losses, "model": {name: value.clone() for name, value in model.state_dict().items()}}


def unfreezes(model: Any, _steps: Any, *, epoch: int, **_: Any) -> None:
    model.first.requires_grad_(epoch >= 3)


def evaluates_the_norm(model: Any, _steps: Any, *, lr: float, **_: Any) -> None:
    model.norm.train(lr > 0.03)


def changes_dropout(model: Any, _steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    model.dropout.p = lr * epoch


def changes_the_temperature(model: Any, _steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    model.temperature = 1 + lr * epoch


def replaces_a_layer(model: Any, _steps: Any, *, epoch: int, **_: Any) -> None:
    if epoch == 3:
        model.norm = nn.Identity()


def replaces_and_changes_a_layer(model: Any, _steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    if epoch == 2:
        model.dropout = nn.Dropout(0.3)
    model.dropout.p = 0.3 if epoch < 4 else 5 * lr


def deletes_an_attribute(model: Any, _steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    if epoch == 3 and lr > 0.03:
        del model.doubled


def changes_a_list(model: Any, _steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    model.scales[0] = 1 + lr * epoch


def changes_a_configuration(model: Any, _steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    model.options.scale["of all"] = 1 + lr * epoch


def appends_a_layer(model: Any, _steps: Any, *, epoch: int, **_: Any) -> None:
    if epoch == 3:
        model.more.append(nn.Linear(4, 4, dtype=torch.float64).requires_grad_(requires_grad=False))
        nn.init.eye_(model.more[-1].weight)
        nn.init.zeros_(model.more[-1].bias)


def exchanges_a_hook(model: Any, _steps: Any, *, lr: float, epoch: int, kept: dict[str, Any], **_: Any) -> None:
    if epoch == 2:
        kept["hook"] = model.last.register_forward_hook(halves)
    if epoch == 4 and lr > 0.03:
        kept["hook"].remove()
        kept["hook"] = model.last.register_forward_hook(negates)


def halves(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


def negates(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return -output


def assigns_data(model: Any, _steps: Any, **_: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def rewinds(model: Any, steps: Any, *, epoch: int, kept: dict[str, Any], **_: Any) -> None:
    if epoch == 2:
        kept["best"] = copy.deepcopy((model.state_dict(), steps.state_dict()))
    if epoch == 4:
        model.load_state_dict(kept["best"][0])
        steps.load_state_dict(kept["best"][1])


def rewinds_and_saves(model: Any, steps: Any, *, epoch: int, kept: dict[str, Any], **_: Any) -> None:
    rewinds(model, steps, epoch=epoch, kept=kept)
    steps.state_dict()


def counts_on_and_saves(_model: Any, steps: Any, *, epoch: int, **_: Any) -> None:
    if epoch == 3:
        for state in steps.state.values():
            state["step"] += 3
    steps.state_dict()


def resets_the_optimizer(_model: Any, steps: Any, *, epoch: int, **_: Any) -> None:
    if epoch == 3:
        steps.state = defaultdict(dict)


def scales_the_states(_model: Any, steps: Any, *, epoch: int, **_: Any) -> None:
    if epoch == 3:
        for state in steps.state.values():
            next(value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()).mul_(2)


def turns_momentum_off(_model: Any, steps: Any, *, lr: float, **_: Any) -> None:
    steps.param_groups[0]["momentum"] = 0.9 if lr > 0.03 else 0.0


def assigns_in_a_list(_model: Any, steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    group = steps.param_groups[0]
    if epoch == 2:
        group["betas"] = list(group["betas"])
    group["betas"][0] = 0.9 - lr * epoch


def assigns_data_of_a_buffer(model: Any, _steps: Any, *, lr: float, **_: Any) -> None:
    model.norm.running_mean.data = model.norm.running_mean + lr


def assigns_betas_in_tensors(_model: Any, steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    group = steps.param_groups[0]
    if epoch == 2:
        group["betas"] = tuple(torch.tensor(beta, dtype=torch.float64) for beta in group["betas"])
    group["betas"][0].fill_(0.9 - lr * epoch)


def assigns_momentum_of_numpy(_model: Any, steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    steps.param_groups[0]["momentum"] = np.float32(0.0 if epoch == 2 else 10 * lr / 2)


def counts_steps_anew(_model: Any, steps: Any, *, epoch: int, **_: Any) -> None:
    if epoch == 3:
        next(iter(steps.state.values()))["step"].zero_()


def clips_before_steps(_model: Any, steps: Any, *, lr: float, epoch: int, **_: Any) -> None:
    if epoch == 3:
        parameters = [parameter for group in steps.param_groups for parameter in group["params"]]
        steps.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, lr) and None)


def assigns_each_batch(_model: Any, steps: Any, *, lr: float, kept: dict[str, Any], **_: Any) -> None:
    """Assign the options in each step from now on, by a hook in the loop below."""

    def assign(number: int) -> None:
        steps.param_groups[0]["lr"] = lr / (1 + number % 4)
        steps.param_groups[0]["weight_decay"] = 0.1 if number % 5 else 0.0

    kept["in each step"] = assign


def joins_a_head(model: Any, _steps: Any, *, epoch: int, **_: Any) -> None:
    model.with_head = epoch >= 3


def slow(change: Callable[..., None], *optimizers: str) -> Any:
    """Return the parameters of slow tests."""
    return (pytest.param(change, name, marks=pytest.mark.slow) for name in optimizers)


@pytest.mark.parametrize(
    ("change", "optimizer"),
    [
        *((change, "SGD") for change in (unfreezes, evaluates_the_norm, changes_dropout, changes_the_temperature)),
        *((change, "SGD") for change in (replaces_a_layer, assigns_data, turns_momentum_off)),
        *((change, "SGD") for change in (replaces_and_changes_a_layer, deletes_an_attribute)),
        *((change, "SGD") for change in (appends_a_layer, exchanges_a_hook, changes_a_list, changes_a_configuration)),
        *((change, "Adam") for change in (rewinds, resets_the_optimizer, scales_the_states, joins_a_head)),
        *((change, "Adam") for change in (assigns_in_a_list, assigns_each_batch)),
        (assigns_each_batch, "RMSprop"),
        *((change, "RMSprop") for change in (rewinds_and_saves, counts_on_and_saves)),
        *((change, "Adam") for change in (assigns_betas_in_tensors, counts_steps_anew)),
        *((change, "SGD") for change in (assigns_data_of_a_buffer, assigns_momentum_of_numpy, clips_before_steps)),
        *slow(assigns_each_batch, "SGD", "AdamW"),
        *slow(rewinds, "SGD", "RMSprop"),
        *slow(resets_the_optimizer, "SGD", "NAdam"),
        *slow(scales_the_states, "SGD", "RMSprop"),
        *slow(joins_a_head, "SGD", "RMSprop", "NAdam"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_changes_while_it_trains_have_the_effect_that_they_have_alone(
    tmp_path: Path, change: Callable[..., None], optimizer: str
) -> None:
    points = [{"lr": lr, "change": change, "optimizer": optimizer} for lr in RATES]
    outcome = together(tmp_path / "array", points, train)
    assert outcome.engine.fused_steps > 0 or change is joins_a_head
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, train)
        assert distance(outcome.value(str(number)), value) < (ROUNDING if optimizer == "SGD" else AMPLIFIED)


def goes_on_alone(session: Any, *, lr: float) -> Any:
    """Begin to use weight decay while it is fused, and save the optimizer's state when the other one has ended."""
    net = Net(head=False).double()
    model, optimizer = session.prepare(net, torch.optim.RMSprop(net.parameters(), lr=lr / 10))
    data = session.loader(samples(), batch_size=16)
    losses = []
    for epoch in session.epochs(6):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * (epoch > 0)
        for x, y in data:
            loss = cross_entropy(model(x), y)
            session.step(loss)
            losses.append(loss.item())
        if epoch == 2 and lr == RATES[0]:
            break
        optimizer.state_dict()
    return {"losses": losses}


def test_an_optimizer_that_leaves_an_array_keeps_its_own_state(tmp_path: Path) -> None:
    """Not that from before its options changed."""
    points = [{"lr": lr} for lr in RATES[:2]]
    outcome = together(tmp_path / "array", points, goes_on_alone)
    assert outcome.engine.fused_steps > 0
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, goes_on_alone)
        assert distance(outcome.value(str(number)), value) < AMPLIFIED


def transposes(session: Any, *, lr: float) -> Any:
    """See a square weight transposed, in the same memory."""
    net = nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
    data = session.loader(samples(), batch_size=16)
    losses = []
    for epoch in session.epochs(4):
        if epoch == 2:
            model[2].weight.data = model[2].weight.data.t()
        for x, y in data:
            loss = cross_entropy(model(x), y)
            session.step(loss)
            losses.append(loss.item())
    return {"losses": losses}


def changes_its_dataset(session: Any, *, lr: float) -> Any:
    """One training job changes its samples in place, another one replaces them; those of the third stay."""
    dataset = samples()
    net = nn.Linear(24, 4).double()
    model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
    data = session.loader(dataset, batch_size=16)
    losses = []
    for epoch in session.epochs(4):
        if epoch == 2 and lr == RATES[0]:
            dataset.tensors[0].mul_(2)
        elif epoch == 2 and lr == RATES[1]:
            dataset.tensors = (dataset.tensors[0] + 1, dataset.tensors[1])
        for x, y in data:
            loss = cross_entropy(model(x), y)
            session.step(loss)
            losses.append(loss.item())
    return {"losses": losses}


@pytest.mark.parametrize("train", [transposes, changes_its_dataset])
def test_what_one_training_changes_of_its_tensors_is_its_own(tmp_path: Path, train: Callable[..., Any]) -> None:
    points = [{"lr": lr} for lr in RATES]
    outcome = together(tmp_path / "array", points, train)
    assert outcome.engine.fused_steps > 0
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, train)
        assert distance(outcome.value(str(number)), value) < ROUNDING


def loop(session: Any, *, lr: float, step: Callable[..., torch.Tensor]) -> Any:
    """Train for three epochs with steps of a kind."""
    torch.set_default_dtype(torch.float32)
    net = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model, _ = session.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
    data = session.loader(samples(), batch_size=16)
    losses = [step(session, model, x, y) for _epoch in session.epochs(3) for x, y in data]
    return {"losses": [float(loss) for loss in losses]}


def asks_for_gradients_of_the_batch(session: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    session.step(cross_entropy(model(x), y))
    assert x.grad is not None
    return x.grad.abs().sum()


def runs_in_autocast(session: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model.float()(x.float()), y)
        session.step(loss)
    return loss.detach()


def sets_the_default_dtype(session: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    loss = cross_entropy(model(x), y)
    torch.set_default_dtype(torch.float32)
    session.step(loss)
    return loss.detach() + torch.ones(1).dtype.itemsize


@pytest.mark.parametrize("step", [asks_for_gradients_of_the_batch, runs_in_autocast, sets_the_default_dtype])
def test_what_a_step_sets_is_its_own(tmp_path: Path, step: Callable[..., torch.Tensor]) -> None:
    points = [{"lr": lr, "step": step} for lr in RATES]
    outcome = together(tmp_path / "array", points, loop)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, loop)
        assert distance(outcome.value(str(number)), value) < ROUNDING


def changes_labels(session: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x)
    y.mul_(0)
    loss = out.square().mean() + y.sum()
    session.step(loss)
    return loss.detach()


def calls_backward(session: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    cross_entropy(model(x), y).backward()
    model.zero_grad()
    loss = cross_entropy(model(x), y)
    session.step(loss)
    return loss.detach()


def penalizes(session: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = cross_entropy(model(x), y) + gradient.square().mean()
    session.step(loss)
    return loss.detach()


def test_a_gradient_penalty_is_not_taken_for_a_backward_pass_of_the_training(tmp_path: Path) -> None:
    points = [{"lr": lr, "step": penalizes} for lr in RATES]
    outcome = together(tmp_path / "array", points, loop)
    for number, point in enumerate(points):
        assert distance(outcome.value(str(number)), alone(tmp_path / "alone", str(number), point, loop)) < ROUNDING


@pytest.mark.parametrize(
    ("step", "reason"), [(changes_labels, "changes its batch in place"), (calls_backward, "calls backward")]
)
def test_what_an_array_finds_too_late_ends_its_members(
    tmp_path: Path, step: Callable[..., torch.Tensor], reason: str
) -> None:
    """Their driver then trains them alone, from their checkpoints."""
    outcome = together(tmp_path, [{"lr": lr, "step": step} for lr in RATES], loop)
    for end in outcome.ends.values():
        assert isinstance(end, CannotFuse)
        assert reason in str(end)
