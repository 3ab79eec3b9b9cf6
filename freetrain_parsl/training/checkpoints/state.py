"""The state of a training: the contents of a checkpoint, which newcomers receive from other members."""

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
    """Objects with a state to save: models, optimizers, schedulers, gradient scalers, averaged models."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class SessionState:
    """A training's position in its data, its metrics, and the user's objects.

    Parameters
    ----------
    seed
        The training's seed.
    source
        Returns the path of the checkpoint that states come from, for messages.
    """

    def __init__(self, seed: int, source: Callable[[], Path]) -> None:
        self.training_metrics = TrainingMetrics()
        self.cursor = Cursor()
        self.objects: dict[str, Stateful] = {}
        """The user's objects by name, in the order in which they are restored."""
        self.order: Order | None = None
        self.scaling: LinearScaling | None = None
        self._seed = seed
        self._source = source

    def use(self, order: Order, ramp: int) -> None:
        """Train on a dataset in this order; `ramp` as for `LinearScaling`."""
        self.order = order
        self.training_metrics.keep_ledger(order.length)
        if order.scaled:
            self.scaling = LinearScaling(ramp)

    def whole(self) -> dict[str, Any]:
        """Return the whole state, as tensors and plain values."""
        return {
            "seed": self._seed,
            "objects": {name: target.state_dict() for name, target in self.objects.items()},
            "books": self.training_metrics.state(),
            "cursor": self.cursor.state(),
            "factor": None if self.scaling is None else self.scaling.factor,
            "order": asdict(self.order) if self.order else None,
        }

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Load a whole state."""
        self.take_counts(state)
        self.take_order(state)
        for name, target in self.objects.items():
            target.load_state_dict(state["objects"][name])

    def take_counts(self, state: Mapping[str, Any]) -> None:
        """Load the position in the data and the metrics.

        Raises
        ------
        CheckpointMismatch
            The state has another seed.
        """
        if state["seed"] != self._seed:
            self._mismatch(f"it was trained with seed {state['seed']}, now it is {self._seed}")
        self.training_metrics.load(state["books"])
        self.cursor.load(state["cursor"])

    def take_order(self, state: Mapping[str, Any]) -> None:
        """Load the parts of a state that depend on the order of the data.

        Raises
        ------
        CheckpointMismatch
            The state belongs to another dataset or batch size.
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
            f"checkpoint {self._source()} belongs to another training: {difference}; "
            "undo the change, or use another trainer name or checkpoint directory"
        )
