"""What a state has of parameters beside the states of the models and optimizers.

Flags that the loop has changed; the names of the parameters of each group, as groups that were added in the loop are
missing in a function that resumes; and parameters that are in none of the prepared models, such as a temperature, by
the place that they have in their optimizer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.format import is_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["TrainableFlags", "add_missing_groups", "load_outside", "names_of_groups", "outside_state"]


class TrainableFlags:
    """The ``requires_grad`` of parameters, as far as the loop has changed it.

    Only the changes are saved and sent. What the user's function sets before its loop is set again in each process, and
    may have been edited since a checkpoint was written.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._initial: dict[str, bool] = {}

    def watch(self, objects: Mapping[str, object]) -> None:
        """Note the flags of all parameters at the start of the loop."""
        self._parameters = _parameters_by_name(objects)
        self._initial = {name: parameter.requires_grad for name, parameter in self._parameters.items()}

    def changes(self) -> dict[str, bool]:
        """Return the flags that have changed: parameter -> flag."""
        flags = {name: parameter.requires_grad for name, parameter in self._parameters.items()}
        return {name: flag for name, flag in flags.items() if flag != self._initial[name]}

    def load(self, changes: Mapping[str, bool]) -> None:
        """Make the changes of a state, and undo those that it does not have."""
        for name, parameter in self._parameters.items():
            flag = changes.get(name, self._initial[name])
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


Names = list[list[str | None]]
"""Of the parameters of each group; ``None`` for those that are in no prepared model."""


def names_of_groups(objects: Mapping[str, object]) -> dict[str, Names]:
    """Return the names of the parameters of each optimizer."""
    names = {id(parameter): name for name, parameter in _parameters_by_name(objects).items()}
    return {
        name: [[names.get(id(parameter)) for parameter in group["params"]] for group in thing.param_groups]
        for name, thing in objects.items()
        if isinstance(thing, Optimizer)
    }


def add_missing_groups(
    optimizer: Optimizer, state: Mapping[str, Any], names: Sequence[Sequence[str | None]], objects: Mapping[str, object]
) -> None:
    """Add the groups that an optimizer lacks and its state has, so that the state can be loaded.

    The user's loop may add them again, where it does so in each iteration of an epoch that is resumed: this has no
    effect then.

    Parameters
    ----------
    optimizer
        The optimizer.
    state
        Its state.
    names
        The names of the parameters of the state's groups.
    objects
        What was prepared, by name.
    """
    missing = range(len(optimizer.param_groups), min(len(state["param_groups"]), len(names)))
    if not missing:
        return
    parameters = _parameters_by_name(objects)
    for number in missing:
        members = [parameters.get(name or "") for name in names[number]]
        if None in members or len(members) != len(state["param_groups"][number]["params"]):
            return  # load_state_dict says what does not fit
        group = {name: value for name, value in state["param_groups"][number].items() if name != "params"}
        inner: Sequence[str] | None = group.pop("param_names", None)
        optimizer.add_param_group(
            {**group, "params": members if inner is None else list(zip(inner, members, strict=True))}
        )
    added = [frozenset(map(id, group["params"])) for group in optimizer.param_groups[missing.start :]]
    optimizer.add_param_group = partial(_add_unless_known, added, optimizer.add_param_group)  # type: ignore[method-assign]  # of this object only


def _add_unless_known(
    known: list[frozenset[int]], add: Callable[[dict[str, Any]], None], group: dict[str, Any]
) -> None:
    """Add a group, unless it was added when a state was loaded."""
    given = group["params"]
    members = [given] if isinstance(given, nn.Parameter) else list(given)
    bare = [member[1] if isinstance(member, tuple) else member for member in members]
    identities = frozenset(map(id, bare))
    if identities in known:
        known.remove(identities)
        return
    add({**group, "params": members})


def _parameters_by_name(objects: Mapping[str, object]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{inner}": parameter
        for name, thing in objects.items()
        if isinstance(thing, nn.Module)
        for inner, parameter in thing.named_parameters()
    }


def outside_state(objects: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the values of the optimizers' parameters in no model, by place; raises UsageError if one is sharded."""
    return {place: parameter.detach() for place, parameter in _outside(objects).items()}


def load_outside(objects: Mapping[str, object], state: Mapping[str, torch.Tensor]) -> None:
    """Load them, as far as the state has them; raises RuntimeError if one has another shape."""
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
