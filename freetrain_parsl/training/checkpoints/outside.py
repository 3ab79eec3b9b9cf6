"""Parameters that an optimizer trains, and that are in none of the prepared models: a temperature, a list of layers.

They are part of the state like those of the models, by the place that they have in their optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.format import is_spread

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["load_outside", "outside_state"]


def outside_state(objects: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the parameters of the optimizers that are in no model: place -> values.

    Raises
    ------
    UsageError
        One of them is sharded.
    """
    return {place: parameter.detach() for place, parameter in _outside(objects).items()}


def load_outside(objects: Mapping[str, object], state: Mapping[str, torch.Tensor]) -> None:
    """Load the values of these parameters, as far as the state has them.

    Raises
    ------
    RuntimeError
        One has another shape.
    """
    with torch.no_grad():
        for place, parameter in _outside(objects).items():
            if place in state:
                if parameter.shape != state[place].shape:
                    raise RuntimeError(f"{place} has shape {tuple(state[place].shape)}, now {tuple(parameter.shape)}")
                parameter.copy_(state[place])


def _outside(objects: Mapping[str, object]) -> dict[str, nn.Parameter]:
    inside = {p for thing in objects.values() if isinstance(thing, nn.Module) for p in thing.parameters()}
    found: dict[str, nn.Parameter] = {}
    for name, thing in objects.items():
        if not isinstance(thing, Optimizer):
            continue
        for number, group in enumerate(thing.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter in inside:
                    continue
                if is_spread(parameter):
                    raise UsageError(f"session.prepare: pass the model of the {name}'s sharded parameters, too")
                inside.add(parameter)
                found[f"{name}, group {number}, parameter {index}"] = parameter
    return found
