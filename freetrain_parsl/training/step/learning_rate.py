"""The learning rate of batches that are larger or smaller than the one that it was chosen for."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import ASGD, SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["LrScaling", "RateScaling", "Rule", "check_schedulers"]

Rule: TypeAlias = Literal["auto", "linear", "sqrt", "adascale", "none"]
"""How the learning rate follows the batch size."""

LrScaling: TypeAlias = Rule | Callable[[float], float]
"""A `Rule`, or a function: batch size relative to the initial one -> factor of the learning rate."""


def check_schedulers(objects: Iterable[object], *, search: bool = False) -> None:
    """Check that each learning-rate scheduler of a prepared optimizer is prepared, too.

    Otherwise its state is in no checkpoint, and a process that joins begins its schedule anew: the learning rates of
    the processes differ. Schedulers leave a mark on the optimizer, except for ``ReduceLROnPlateau``. An object of
    another kind may contain the scheduler and its state.

    Parameters
    ----------
    objects
        What has been prepared.
    search
        Whether to search this process for schedulers, also those that leave no mark; takes some ten milliseconds.

    Raises
    ------
    UsageError
        A scheduler is missing.
    """
    known = list(objects)
    plain = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
    if not all(isinstance(thing, plain) for thing in known):
        return
    prepared = [thing for thing in known if isinstance(thing, LRScheduler)]
    scheduled = [getattr(scheduler, "optimizer", None) for scheduler in prepared]
    optimizers = [thing for thing in known if isinstance(thing, Optimizer)]
    unknown = any(
        getattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched", False)
        and not any(other is optimizer for other in scheduled)
        for optimizer in optimizers
    )
    if unknown or (search and _unprepared(optimizers, prepared)):
        raise UsageError(
            "a learning-rate scheduler was made, but not given to the session, so that its state would not be "
            "saved: pass it to session.prepare, too"
        )


def _unprepared(optimizers: Sequence[Optimizer], prepared: Sequence[LRScheduler]) -> bool:
    """Return whether these optimizers have schedulers that are neither prepared nor parts of one that is."""
    known: list[LRScheduler] = []
    parts: list[object] = list(prepared)
    while parts:
        part = parts.pop()
        if isinstance(part, LRScheduler) and not any(part is each for each in known):
            known.append(part)
            parts += vars(part).values()  # also under a name of the user's
        elif isinstance(part, (list, tuple)):
            parts += part
    found = list(gc.get_referrers(*optimizers))
    attributes = [each for each in found if type(each) is dict and each.get("optimizer") in optimizers]
    found += [owner for each in attributes for owner in gc.get_referrers(each)]
    schedulers = [each for each in found if isinstance(each, LRScheduler) and vars(each).get("optimizer") in optimizers]
    return any(not any(each is one for one in known) for each in schedulers)


class RateScaling:
    """Multiplies the learning rates by factors that follow the batch size, gradually after each change.

    ``linear``: the batch size relative to the initial one, with warm-up (Goyal et al., Accurate, Large Minibatch SGD,
    2017, sections 2.1 and 2.2). ``sqrt``: its square root, for adaptive optimizers (Malladi et al., On the SDEs and
    Scaling Rules for Adaptive Gradient Algorithms, 2022). ``auto``: ``linear`` for SGD and averaged SGD, ``sqrt`` for
    every other optimizer. ``adascale``: how many steps of the initial batch a step replaces (Johnson et al., AdaScale
    SGD, 2020). ``none``: 1.

    Parameters
    ----------
    rule
        The rule.
    ramp
        Steps that a change takes.
    gain
        Batch size relative to the initial one -> steps of the initial batch that a step replaces; for ``adascale``.
    """

    def __init__(self, rule: LrScaling, ramp: int, gain: Callable[[float], float] = lambda scale: scale) -> None:
        self._rule = rule
        self._ramp = ramp
        self._gain = gain
        self.scale = 1.0
        """The batch size relative to the initial one, on its way to that of the current batch."""
        self.rate: float | None = None
        """Learning rate of the first parameter group in the last step; ``None`` before the first one."""
        self._target = 1.0
        self._stride = 0.0

    def aim(self, scale: float) -> None:
        """Start the ramp to another batch size, relative to the initial one."""
        if scale != self._target:
            self._target = float(scale)
            self._stride = (self._target - self.scale) / self._ramp

    @property
    def ramp(self) -> tuple[float, float]:
        """The scale at the end of the current ramp, and the change with each step."""
        return self._target, self._stride

    def resume(self, scale: float, rate: float, ramp: Sequence[float]) -> None:
        """Continue a ramp from another process or an earlier run."""
        self.scale, self.rate = scale, rate
        self._target, self._stride = ramp

    def factor(self, optimizer: Optimizer) -> float:
        """Return the current factor of an optimizer's learning rates.

        Raises
        ------
        UsageError
            The user's function returns something other than a positive number.
        """
        rule = self._rule
        if rule == "auto":
            rule = "linear" if isinstance(optimizer, (SGD, ASGD)) else "sqrt"
        match rule:
            case "linear":
                return self.scale
            case "sqrt":
                return math.sqrt(self.scale)
            case "adascale":
                return self._gain(self.scale)
            case "none":
                return 1.0
        assert callable(rule), "checked by the loader"
        factor: object = rule(self.scale)
        if not (isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0):
            raise UsageError(
                f"session.loader: lr_scaling returned {factor!r} for a batch {self.scale:g} times the initial one; "
                "it must return a positive number"
            )
        return float(factor)

    @contextmanager
    def applied(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Scale the learning rates for one step; schedulers see the unscaled rates."""
        left = self._target - self.scale
        self.scale = self._target if abs(left) <= abs(self._stride) else self.scale + self._stride
        groups = [(group, self.factor(optimizer)) for optimizer in optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group, _ in groups]
        for (group, factor), rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        if groups:
            self.rate = float(groups[0][0]["lr"])
        try:
            yield
        finally:
            for (group, _), rate in zip(groups, rates, strict=True):
                group["lr"] = rate
