"""The objects given to ``session.prepare``: their names in checkpoints, and checks of their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.format import check_restorable, is_spread
from freetrain_parsl.training.undo import has_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from freetrain_parsl.training.checkpoints.state import Stateful

__all__ = ["parameters_of", "prepared", "size_of"]

_STATES_PER_PARAMETER = 3  # the parameter, and two moments in common optimizers


def prepared(
    things: Sequence[Any], options: Mapping[str, Any], known: Mapping[str, Stateful], device: torch.device
) -> tuple[list[Any], dict[str, Stateful]]:
    """Move models to the device, create optimizers from classes, and name new objects.

    Parameters
    ----------
    things
        Models, optimizers, optimizer classes and other objects with a state.
    options
        Arguments for an optimizer class.
    known
        The objects of earlier calls.
    device
        Device to which models are moved.

    Returns
    -------
    things
        The same, with optimizers instead of their classes.
    new
        Name in checkpoints -> object, without those that are known.

    Raises
    ------
    UsageError
        An argument has the wrong type.
    CheckpointError
        A state cannot be saved in a checkpoint.
    """
    if not known and not (things and isinstance(things[0], nn.Module)):
        given = type(things[0]).__name__ if things else "nothing"
        raise UsageError(f"session.prepare needs a torch.nn.Module first, got {given}")
    names = {id(thing): name for name, thing in known.items()}
    result: list[Any] = []
    new: dict[str, Stateful] = {}
    given_options = dict(options)
    for thing in things:
        if isinstance(thing, nn.Module):
            _move(thing, device)
        elif isinstance(thing, type) or (callable(thing) and not has_state(thing)):
            thing = _made(thing, [*known.values(), *result], given_options)  # noqa: PLW2901 - it stands for the optimizer
            given_options = {}
        result.append(thing)
        if id(thing) in names:
            continue
        names[id(thing)] = name = _name(thing, {**known, **new})
        _check(thing, name)
        new[name] = thing
    if given_options:
        raise UsageError(
            f"session.prepare: give {', '.join(given_options)} to the optimizer, or pass the optimizer class"
        )
    return result, new


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, except what is sharded: it is where its user wants it, perhaps offloaded."""
    if any(map(is_spread, module.parameters())):
        apply: Any = module._apply  # noqa: SLF001 - what `to` calls; torch's own, without types
        apply(lambda tensor: tensor if is_spread(tensor) else tensor.to(device))
    else:
        module.to(device)


def size_of(objects: Mapping[str, Stateful]) -> int:
    """Return the bytes of a checkpoint of these objects, estimated from the first model."""
    tensors: list[torch.Tensor] = list(objects["model"].state_dict().values())
    return _STATES_PER_PARAMETER * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def parameters_of(objects: Iterable[object]) -> list[nn.Parameter]:
    """Return the parameters of models and optimizers, each once."""
    known: dict[nn.Parameter, None] = {}
    for thing in objects:
        if isinstance(thing, nn.Module):
            known |= dict.fromkeys(thing.parameters())
        elif isinstance(thing, Optimizer):
            known |= dict.fromkeys(p for group in thing.param_groups for p in group["params"])
    return list(known)


def _made(make: Any, before: Sequence[Any], options: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer of the parameters of the last model before it."""
    model = next((thing for thing in reversed(before) if isinstance(thing, nn.Module)), None)
    assert model is not None, "the first object is one"
    optimizer = make(model.parameters(), **options)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"session.prepare needs a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def _name(thing: Any, before: Mapping[str, Stateful]) -> str:
    """Return the name of an object: the first model and the first optimizer have no number."""
    if isinstance(thing, nn.Module) and "model" not in before:
        return "model"
    if isinstance(thing, Optimizer) and "optimizer" not in before:
        return "optimizer"
    return f"{type(thing).__name__} {len(before) - 1}"


def _check(thing: Any, name: str) -> None:
    """Check that an object's state can be saved."""
    if not has_state(thing):
        raise UsageError(f"session.prepare: {type(thing).__name__} has no state_dict and load_state_dict")
    if name == "model":
        states = thing.state_dict()
        check_restorable("the model", {each: states[each] for each in states if not hasattr(states[each], "numel")})
    elif name == "optimizer":
        check_restorable("the optimizer", thing.state_dict()["param_groups"])
    else:
        check_restorable(type(thing).__name__, thing.state_dict())
