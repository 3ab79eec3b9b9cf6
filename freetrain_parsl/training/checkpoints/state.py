"""The state of a training job: the contents of a checkpoint, which newcomers receive from other members."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer

from freetrain_parsl.training.best_epoch import BestEpochs
from freetrain_parsl.training.checkpoints.format import other_job
from freetrain_parsl.training.checkpoints.parameters import (
    TrainableFlags,
    add_missing_groups,
    load_outside,
    names_of_groups,
    outside_state,
)
from freetrain_parsl.training.data.cursor import Cursor
from freetrain_parsl.training.exchange.shared_results import SharedResults
from freetrain_parsl.training.loop_state import LoopStates
from freetrain_parsl.training.metrics import TrainingMetrics
from freetrain_parsl.training.step.elastic_batch import ElasticBatch
from freetrain_parsl.training.step.learning_rate import RateScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.training.data.order import Order
    from freetrain_parsl.training.step.learning_rate import LrScaling

_MAY_CHANGE = ("micro_batch", "batch_range", "least")  # of an order, without changing the training job


class Stateful(Protocol):
    """Objects with a state to save: models, optimizers, schedulers, gradient scalers, averaged models."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class SessionState:
    """A training job's position in its data, its metrics, and the user's objects.

    Parameters
    ----------
    seed
        The training job's seed.
    source
        Returns the path of the checkpoint that states come from, for messages.
    """

    def __init__(self, seed: int, source: Callable[[], Path]) -> None:
        self.training_metrics = TrainingMetrics()
        self.cursor = Cursor()
        self.objects: dict[str, Stateful] = {}
        """The user's objects by name, in the order in which they are restored."""
        self.trainable = TrainableFlags()
        self.loop = LoopStates()
        """The values of ``session.state``."""
        self.best_epochs = BestEpochs()
        self.order: Order | None = None
        self.batch: ElasticBatch | None = None
        """Its batch, if the driver chooses the size."""
        self.scaling: RateScaling | None = None
        self.results = SharedResults()
        self._seed = seed
        self._source = source

    def use(self, order: Order, lr_scaling: LrScaling, ramp: int) -> None:
        """Train on a dataset in this order; `lr_scaling` and `ramp` as for `RateScaling`."""
        self.order = order
        self.training_metrics.keep_ledger(order.length)
        if order.batch_range is not None:
            least, most = order.batch_range
            # No batch has more samples than an epoch; the learning rate would be that of a larger one.
            self.batch = ElasticBatch(order.batch_size, least, max(order.batch_size, min(most, order.samples)))
            self.scaling = RateScaling(lr_scaling, ramp, self.batch.gain)
            self.training_metrics.facts = self._facts_of_epoch
        elif order.scaled:
            self.scaling = RateScaling(lr_scaling, ramp)

    @property
    def batch_size(self) -> int | None:
        """Samples in the next batch, if the driver chooses this; otherwise ``None``."""
        return None if self.batch is None else self.batch.size

    def aim(self, members: int) -> None:
        """Let the learning rate follow the batch size, which may depend on the number of members."""
        if self.scaling is not None:
            self.scaling.aim(members if self.batch is None else self.batch.scale)

    def _facts_of_epoch(self) -> dict[str, Any]:
        """Return the batch size and the learning rate at the end of an epoch, for the history."""
        assert self.batch is not None, "set with it"
        assert self.scaling is not None, "set with it"
        return {"batch": self.batch.size, "rate": self.scaling.rate}

    def whole(self, own: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the whole state, as tensors and plain values.

        Parameters
        ----------
        own
            The members' own loop states, see `LoopStates.gather`; they are saved, but not sent.
        """
        return {
            "seed": self._seed,
            "objects": {name: target.state_dict() for name, target in self.objects.items()},
            "groups": names_of_groups(self.objects),
            "outside": outside_state(self.objects),
            "books": self.training_metrics.state(),
            "cursor": self.cursor.state(),
            "factor": None if self.scaling is None else self.scaling.scale,
            "rate": None if self.scaling is None else self.scaling.rate,
            "ramp": None if self.scaling is None else list(self.scaling.ramp),
            "batch": None if self.batch is None else self.batch.state(),
            "order": asdict(self.order) if self.order else None,
            "best": self.best_epochs.state(),
            "results": self.results.state(),
            "trainable": self.trainable.changes(),
            "loop": self.loop.state(own),
        }

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Load a whole state."""
        self.take_counts(state)
        self.take_order(state)
        self.best_epochs.load(state["best"])
        self.adopt_objects(state)

    def adopt_objects(self, state: Mapping[str, Any]) -> None:
        """Load the user's objects and the loop's state."""
        for name, target in self.objects.items():
            if isinstance(target, Optimizer):
                add_missing_groups(target, state["objects"][name], state["groups"][name], self.objects)
            target.load_state_dict(state["objects"][name])
        load_outside(self.objects, state["outside"])
        self.trainable.load(state["trainable"])
        self.loop.load(state["loop"])

    def take_counts(self, state: Mapping[str, Any]) -> None:
        """Load the position in the data and the metrics; raises CheckpointMismatch if the seed is another."""
        if state["seed"] != self._seed:
            raise other_job(self._source(), f"it was trained with seed {state['seed']}, now it is {self._seed}")
        self.training_metrics.load(state["books"])
        self.cursor.load(state["cursor"])
        self.results.load(state["results"])

    def take_order(self, state: Mapping[str, Any]) -> None:
        """Load what depends on the order; raises CheckpointMismatch if the data set or batch size is another."""
        if state["order"] is None or self.order is None:
            return
        for name, before in state["order"].items():
            if (now := getattr(self.order, name)) != before and name not in _MAY_CHANGE:
                raise other_job(self._source(), f"it was trained with {name} {before!r}, now it is {now!r}")
        self.training_metrics.load_ledger(state["books"])
        if self.scaling is not None and state["factor"] is not None:
            self.scaling.resume(state["factor"], state["rate"], state["ramp"])
        if self.batch is not None and state["batch"] is not None:
            self.batch.load(state["batch"])
