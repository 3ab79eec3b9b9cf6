"""Parameter groups that were added to an optimizer in the loop: the function that resumes has not added them yet."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["add_missing_groups", "names_of_groups"]

Names = list[list[str | None]]
"""Of the parameters of each group; ``None`` for those that are in no prepared model."""


def names_of_groups(objects: Mapping[str, object]) -> dict[str, Names]:
    """Return the names of the parameters of each optimizer."""
    names = {id(parameter): name for name, parameter in _parameters_of(objects).items()}
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
    parameters = _parameters_of(objects)
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


def _parameters_of(objects: Mapping[str, object]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{inner}": parameter
        for name, thing in objects.items()
        if isinstance(thing, nn.Module)
        for inner, parameter in thing.named_parameters()
    }
