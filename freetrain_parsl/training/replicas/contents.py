"""What is compared between replicas: numbers of the optimizers and the loop, parameters, buffers, optimizer states."""

from __future__ import annotations

import reprlib
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from freetrain_parsl.training.replicas.checksum import Checksum
from freetrain_parsl.training.step.buffers import BufferPlace, persistent_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["Contents", "Fact", "plain"]

_FEW = 32
"""Elements of a container that are compared at every step; of longer ones, as many at the end."""
_PLAIN = frozenset({float, str, bool, type(None)})
"""Types of most hyperparameters, which need no conversion."""
_NOTHING = torch.empty(0)


class Fact(NamedTuple):
    """One thing that must be equal on all members, for a message.

    Parameters
    ----------
    kind
        ``position``, ``hyperparameter``, ``structure``, ``trainable``, ``loop``, ``buffer``, ``parameter`` or
        ``optimizer``.
    name
        How it is called in a message.
    key
        Equal for equal values.
    text
        The value for a message; empty: it is too long for one.
    """

    kind: str
    name: str
    key: str
    text: str


class Contents:
    """The prepared objects, as far as they are compared. What is sharded over the members has no replicas.

    Parameters
    ----------
    objects
        Name -> object, as given to ``session.prepare``.
    loop
        Returns the names and values of the loop's state.
    """

    def __init__(self, objects: Mapping[str, Any], loop: Callable[[], Iterable[tuple[str, object]]]) -> None:
        self._loop = loop
        self._optimizers = [(name, thing) for name, thing in objects.items() if isinstance(thing, Optimizer)]
        self._parameters: dict[nn.Parameter, str] = {}
        self._buffers: dict[BufferPlace, str] = {}
        for name, model in objects.items():
            if not isinstance(model, nn.Module):
                continue
            for inner, parameter in model.named_parameters():
                self._parameters.setdefault(parameter, f"{name}.{inner}")
            for inner, place in persistent_buffers(model):
                if not place.is_statistic:
                    self._buffers.setdefault(place, f"{name}.{inner}")
        for name, number, group in self._groups():
            for index, parameter in enumerate(group["params"]):
                self._parameters.setdefault(parameter, f"{index} of {name} group {number}")
        compared = [parameter for parameter in self._parameters if _is_compared(parameter)]
        self._with_replicas: list[nn.Parameter | BufferPlace] = [*compared, *self._buffers]

    def _groups(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        for name, optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                yield name, number, group

    # ── plain values ──────────────────────────────────────────────────────────────────────────────

    def plain(self, *, whole: bool) -> object:
        """Return the hyperparameters, the flags of the parameters and the loop's state, in the form of `plain`.

        Parameters
        ----------
        whole
            Whether long containers, tensors on a GPU and the states of objects are included, too.
        """
        groups = [
            len(value) if key == "params" else value if type(value) in _PLAIN else plain(value, whole=whole)
            for _, _, group in self._groups()
            for key, value in sorted(group.items())
        ]
        flags = bytes([parameter.requires_grad for parameter in self._parameters])
        return groups, flags, [(name, plain(value, whole=whole)) for name, value in self._loop()]

    # ── tensors ───────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers that have replicas, in a fixed order."""
        return [self.tensor(number) for number in range(len(self._with_replicas))]

    def tensor(self, number: int) -> torch.Tensor:
        """Return one of `tensors`; for a buffer the current one, empty if there is none."""
        what = self._with_replicas[number]
        if isinstance(what, nn.Parameter):
            return what
        tensor = what.tensor
        return tensor if tensor is not None and _is_compared(tensor) else _NOTHING

    def checksum(self) -> tuple[int, ...]:
        """Return a checksum of all tensors, those of the optimizers included."""
        states = [value for _, value in self._optimizer_states() if isinstance(value, torch.Tensor)]
        return Checksum([*self.tensors(), *states]).read()

    def _optimizer_states(self) -> Iterator[tuple[str, object]]:
        states = {name: optimizer.state for name, optimizer in self._optimizers}
        for name, _, group in self._groups():
            for parameter in group["params"]:
                for key, value in states[name].get(parameter, {}).items():
                    if not isinstance(value, torch.Tensor) or _is_compared(value):
                        yield f"{key} of parameter {self._parameters[parameter]} in {name}", value

    # ── for messages ──────────────────────────────────────────────────────────────────────────────

    def facts(self, *, with_tensors: bool) -> Iterator[Fact]:
        """Yield everything that is compared, by name; waits for the GPU."""
        yield from self._plain_facts()
        if with_tensors:
            yield from self._tensor_facts()

    def _plain_facts(self) -> Iterator[Fact]:
        for name, number, group in self._groups():
            where = f"{name} group {number}"
            yield _fact("structure", f"the number of parameters in {where}", len(group["params"]))
            for key in sorted(group):
                if key != "params":
                    yield _fact("hyperparameter", f"{key} of {where}", group[key])
        for parameter, name in self._parameters.items():
            yield _fact("structure", f"the shape of parameter {name}", tuple(parameter.shape))
            yield _fact("trainable", f"requires_grad of parameter {name}", parameter.requires_grad)
        for name, value in self._loop():
            yield _fact("loop", f"{name} of session.state", value)

    def _tensor_facts(self) -> Iterator[Fact]:
        for place, name in self._buffers.items():
            tensor = place.tensor
            if tensor is not None and _is_compared(tensor):
                yield _fact("buffer", f"buffer {name}", tensor)
        for parameter, name in self._parameters.items():
            if _is_compared(parameter):
                yield _fact("parameter", f"parameter {name}", parameter)
        for name, value in self._optimizer_states():
            yield _fact("optimizer", name, value)


def plain(value: object, *, whole: bool) -> object:
    """Return a value in a form whose ``repr`` is the same on all members if the values are equal.

    Parameters
    ----------
    value
        Numbers, strings, tensors, objects with ``state_dict``, containers of these; of others only the type counts.
    whole
        Whether all of it counts; otherwise what is quick to read.
    """
    match value:
        case None | str() | bytes():
            return value
        case bool() | int() | float():  # a number may be an int on one member and a float on another
            return float(value) if abs(value) < 1 << 53 else repr(value)
        case torch.Tensor():
            return _plain_tensor(value, whole=whole)
        case list() | tuple():
            items = value if whole or len(value) <= _FEW else value[-_FEW:]
            return len(value), [plain(item, whole=whole) for item in items]
        case deque():
            return plain(list(value), whole=whole)
        case dict():
            if not whole and len(value) > _FEW:
                return len(value)
            return [(repr(key), plain(value[key], whole=whole)) for key in sorted(value, key=repr)]
    state = getattr(value, "state_dict", None)
    if callable(state):
        return plain(_without_statistics(value, state()), whole=True) if whole else type(value).__name__
    number = getattr(value, "item", None)  # of numpy
    return plain(number(), whole=whole) if callable(number) and getattr(value, "size", 0) == 1 else type(value).__name__


def _without_statistics(value: object, state: object) -> object:
    """Return the state of an object without running statistics, which are local between two averagings."""
    if not isinstance(value, nn.Module) or not isinstance(state, dict):
        return state
    local = {name for name, place in persistent_buffers(value) if place.is_statistic}
    return {name: each for name, each in state.items() if name not in local}


def _plain_tensor(tensor: torch.Tensor, *, whole: bool) -> object:
    if not _is_compared(tensor) or (tensor.is_cuda and not whole):
        return tuple(tensor.shape)
    return tuple(tensor.shape), Checksum([tensor]).read()


def _fact(kind: str, name: str, value: object) -> Fact:
    if not isinstance(value, torch.Tensor):
        return Fact(kind, name, repr(plain(value, whole=True)), reprlib.repr(value))
    key = repr((str(value.dtype), tuple(value.shape), Checksum([value]).read()))
    return Fact(kind, name, key, repr(value.item()) if value.numel() == 1 else "")


def _is_compared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has bits of its own on this member, which others have, too."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and not is_traceable_wrapper_subclass(tensor)  # sharded, or of packed numbers
    )
