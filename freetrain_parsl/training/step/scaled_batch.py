"""Batches that grow with the number of slots, with scaling of the learning rate."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer


class LinearScaling:
    """Multiplies the learning rate by the number of members, gradually after each change.

    The linear scaling rule with warm-up: Goyal et al., Accurate, Large Minibatch SGD (2017), sections 2.1 and 2.2.

    Parameters
    ----------
    ramp
        Steps that a change takes.
    """

    def __init__(self, ramp: int) -> None:
        self._ramp = ramp
        self.factor = 1.0
        """The current factor of the learning rate."""
        self._target = 1.0
        self._stride = 0.0

    def aim(self, members: int) -> None:
        """Start the ramp to another number of members."""
        if members != self._target:
            self._target = float(members)
            self._stride = (self._target - self.factor) / self._ramp

    @contextmanager
    def applied(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Scale the learning rates for one step; schedulers see the unscaled rates."""
        left = self._target - self.factor
        self.factor = self._target if abs(left) <= abs(self._stride) else self.factor + self._stride
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self.factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
