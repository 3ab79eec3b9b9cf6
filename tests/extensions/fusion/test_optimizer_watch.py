"""Assignments to the states and parameter groups of optimizers are noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl.extensions.fusion.optimizers.optimizer_watch import OptimizerWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


def optimizer() -> Optimizer:
    """Return an Adam that has made a step."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    made = torch.optim.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    made.step()
    return made


def _assign(name: str, value: object) -> Callable[[Optimizer], None]:
    def assign(adam: Optimizer) -> None:
        adam.param_groups[0][name] = value

    return assign


def _new_state(adam: Optimizer) -> None:
    state = next(iter(adam.state.values()))
    state["exp_avg"] = state["exp_avg"].clone()


def _add_group(adam: Optimizer) -> None:
    adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def _add_parameter(adam: Optimizer) -> None:
    adam.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        (_assign("lr", 0.2), True),
        (_assign("betas", (0.8, 0.9)), True),
        (_assign("lr", 0.0), False),
        (_assign("weight_decay", 0.1), False),
        (_assign("amsgrad", True), False),
        (_assign("extra", 1), False),
        (_new_state, False),
        (_add_group, False),
        (_add_parameter, False),
        (lambda adam: adam.load_state_dict(adam.state_dict()), False),
        (lambda adam: adam.state.clear(), False),
    ],
)
@pytest.mark.parametrize("member", [0, 1])
def test_each_assignment_is_noticed(change: Callable[[Optimizer], None], alike: bool, member: int) -> None:
    """In any of the optimizers; numbers other than zero may be exchanged for others."""
    optimizers = [optimizer(), optimizer()]
    watch = OptimizerWatch(optimizers)
    assert watch.is_same()
    change(optimizers[member])
    assert not watch.is_same()
    assert watch.is_alike() is alike
    watch.note()
    assert watch.is_same()


def test_a_step_assigns_nothing() -> None:
    adam = optimizer()
    watch = OptimizerWatch([adam])
    adam.step()
    assert watch.is_same()


def test_numbers_in_lists_are_never_taken_for_the_same() -> None:
    """They can be assigned in place."""
    adam = optimizer()
    adam.param_groups[0]["betas"] = [0.9, 0.99]
    watch = OptimizerWatch([adam])
    adam.param_groups[0]["betas"][0] = 0.5
    assert not watch.is_same()
    assert watch.is_alike()
    assert not watch.is_same()
