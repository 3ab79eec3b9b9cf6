"""What user code does once per optimizer step, in a loop that sees a batch in pieces, or repeats it after a failure.

Methods such as ``scheduler.step()`` have no effect if no step is made: their classes are patched while objects of them
are guarded, so that the objects keep their class, can be pickled, and have the same state. Learning rates and other
hyperparameters that user code sets in a batch are set back if it is interrupted.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

__all__ = ["Hyperparameters", "guard", "once_a_step"]

_CALLED_ONCE_A_STEP: tuple[tuple[type, str], ...] = (
    (LRScheduler, "step"),
    (AveragedModel, "update_parameters"),
    (torch.amp.GradScaler, "unscale_"),
)
_guards: WeakKeyDictionary[Any, Callable[[], bool]] = WeakKeyDictionary()
_originals: dict[tuple[type, str], Any] = {}


def once_a_step(thing: object) -> list[str]:
    """Return the methods of an object that users call once per step."""
    return [method for kind, method in _CALLED_ONCE_A_STEP if isinstance(thing, kind)]


def guard(thing: Any, method: str, acts: Callable[[], bool]) -> Callable[[], None]:
    """Let a method of an object do nothing, and return ``None``, whenever ``acts()`` is false.

    Parameters
    ----------
    thing
        The object; its class defines or inherits the method.
    method
        The method's name.
    acts
        Whether a call has an effect now.

    Returns
    -------
    release
        Ends it, and restores the class if no other object of it is guarded.
    """
    owner = next(kind for kind in type(thing).__mro__ if method in vars(kind))
    if (owner, method) not in _originals:
        _originals[owner, method] = vars(owner)[method]
        setattr(owner, method, _guarded(vars(owner)[method]))
    _guards[thing] = acts

    def release() -> None:
        _guards.pop(thing, None)
        if not any(isinstance(other, owner) for other in _guards) and (owner, method) in _originals:
            setattr(owner, method, _originals.pop((owner, method)))

    return release


def _guarded(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        acts = _guards.get(self)
        return original(self, *args, **options) if acts is None or acts() else None

    return call


class Hyperparameters:
    """Those of the parameter groups of optimizers, as they are at creation.

    A batch that is interrupted is repeated, and so is what the loop's body does in it: without this, a rate that is
    multiplied in each batch would be multiplied twice.

    Parameters
    ----------
    optimizers
        Of the prepared objects.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]

    @property
    def have_changed(self) -> bool:
        """Whether they are others now; tensors are not compared."""
        return any(
            group[name] != value
            for group, before in self._groups
            for name, value in before.items()
            if not isinstance(value, torch.Tensor) and not isinstance(group[name], torch.Tensor)
        )

    def put_back(self) -> None:
        """Set them to what they were; groups that were added since stay as they are."""
        for group, before in self._groups:
            group.update(before)
