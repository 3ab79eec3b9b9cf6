"""The state of a training: what a checkpoint holds, and what newcomers get from the others."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from freetrain_parsl.errors import CheckpointMismatch
from freetrain_parsl.training.data.cursor import Cursor
from freetrain_parsl.training.metrics import TrainingMetrics
from freetrain_parsl.training.step.scaled_batch import LinearScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from freetrain_parsl.training.data.order import Order


class Stateful(Protocol):
    """Anything that can be saved: models, optimizers, schedulers, gradient scalers, averages."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state over."""


class TrainingState:
    """Where a training is, what it has counted, and the user's objects.

    Parameters
    ----------
    seed
        The training's.
    source
        Gives the path of the checkpoint that states come from, for messages.
    """

    def __init__(self, seed: int, source: Callable[[], Path]) -> None:
        self.training_metrics = TrainingMetrics()
        self.cursor = Cursor()
        self.objects: dict[str, Stateful] = {}
        """What the user gave, by name, in the order in which it is restored."""
        self.order: Order | None = None
        self.scaling: LinearScaling | None = None
        self._seed = seed
        self._source = source

    def use(self, order: Order, ramp: int) -> None:
        """Train on a dataset in that order; `ramp` as for `LinearScaling`."""
        self.order = order
        self.training_metrics.keep_ledger(order.length)
        if order.scaled:
            self.scaling = LinearScaling(ramp)

    def whole(self) -> dict[str, Any]:
        """Return all of it, as tensors and plain values."""
        return {
            "seed": self._seed,
            "objects": {name: target.state_dict() for name, target in self.objects.items()},
            "books": self.training_metrics.state(),
            "cursor": self.cursor.state(),
            "factor": None if self.scaling is None else self.scaling.factor,
            "order": asdict(self.order) if self.order else None,
        }

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Take all of a state over."""
        self.take_counts(state)
        self.take_order(state)
        for name, target in self.objects.items():
            target.load_state_dict(state["objects"][name])

    def take_counts(self, state: Mapping[str, Any]) -> None:
        """Take over where the training is and what it has counted.

        Raises
        ------
        CheckpointMismatch
            It is of another seed.
        """
        if state["seed"] != self._seed:
            self._mismatch(f"it was trained with seed {state['seed']}, now it is {self._seed}")
        self.training_metrics.load(state["books"])
        self.cursor.load(state["cursor"])

    def take_order(self, state: Mapping[str, Any]) -> None:
        """Take over what belongs to the order in use.

        Raises
        ------
        CheckpointMismatch
            It is of another dataset or batch size.
        """
        if state["order"] is None or self.order is None:
            return
        for name, before in state["order"].items():
            if getattr(self.order, name) != before and name != "micro_batch":
                self._mismatch(f"it was trained with {name} {before!r}, now it is {getattr(self.order, name)!r}")
        self.training_metrics.load_ledger(state["books"])
        if self.scaling is not None and state["factor"] is not None:
            self.scaling.factor = state["factor"]

    def _mismatch(self, difference: str) -> NoReturn:
        raise CheckpointMismatch(
            f"checkpoint {self._source()} is of another training: {difference}; "
            "undo the change, or use another trainer name or checkpoint directory"
        )
