"""A training as the driver knows it: what was submitted, and the generation of slots that runs it now."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidTrainer
from freetrain_parsl.planning.model import RescaleCosts, Trainer

if TYPE_CHECKING:
    from concurrent.futures import Future
    from datetime import timedelta

    from freetrain_parsl.planning.scaling import ScalingCurve

__all__ = ["Generation", "Training", "TrainingRequest"]


@dataclass(frozen=True)
class TrainingRequest:
    """What ``@training_app`` asks of the executor, for one call.

    Parameters
    ----------
    name
        Names the training and its checkpoints; letters, digits, ``.``, ``_`` and ``-``.
    min_nodes, max_nodes
        Bounds on its number of nodes.
    scaling
        Samples per second against number of nodes.
    priority
        Positive weight for the objectives that use one.
    samples
        Work in all, in samples; ``None`` until the session knows it from its loader and epochs.
    epochs
        Default of ``session.epochs()``.
    costs
        What a rescale costs; ``None``: the executor's own.
    seed
        Of everything random in the training.
    checkpoint_interval
        Between periodic checkpoints; ``None``: the executor's own.
    """

    name: str
    min_nodes: int
    max_nodes: int
    scaling: ScalingCurve
    priority: float = 1.0
    samples: int | None = None
    epochs: int | None = None
    costs: RescaleCosts | None = None
    seed: int = 0
    checkpoint_interval: timedelta | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.name):
            raise InvalidTrainer(
                f"training name {self.name!r} must be 1 to 128 letters, digits, '.', '_' or '-', "
                "the first a letter or digit"
            )
        for word, value in (("samples", self.samples), ("epochs", self.epochs)):
            if value is not None and value <= 0:
                raise InvalidTrainer(f"training {self.name!r}: {word} must be positive, got {value}")
        self.trainer()  # its own checks

    def trainer(self, costs: RescaleCosts | None = None, submitted: float = 0.0) -> Trainer:
        """Describe it to the planner."""
        return Trainer(
            name=self.name,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            curve=self.scaling,
            costs=self.costs or costs or RescaleCosts(),
            work_left=float("inf") if self.samples is None else float(self.samples),
            priority=self.priority,
            submitted=submitted,
        )


@dataclass
class Generation:
    """One fragment of a training on one set of slots.

    Parameters
    ----------
    number
        Counts the fragments of all trainings of this driver, from 1: no two are ever confused.
    nodes
        Where it runs.
    running
        Slots that have not ended it yet.
    first
        The slot of rank 0.
    pausing
        It was told to stop.
    reported
        Its first member has told where it began.
    failing_since
        When a member was lost, seconds since the epoch; the others must end soon.
    """

    number: int
    nodes: frozenset[str]
    running: set[str]
    first: str
    pausing: bool = False
    reported: bool = False
    failing_since: float | None = None

    def key(self, training: str) -> str:
        """Name its rendezvous store."""
        return f"{training}/{self.number}"

    def end(self, slot: str) -> bool:
        """Note that a member has ended; whether it was one."""
        if slot not in self.running:
            return False
        self.running.discard(slot)
        return True


@dataclass
class Training:
    """A training between its submission and the end of its future."""

    request: TrainingRequest
    payload: bytes
    future: Future[Any]
    desired: frozenset[str] = frozenset()
    generation: Generation | None = None
    checkpoint_step: int | None = None
    crashes: int = 0
    """Slots that died under it since its last checkpoint, though nobody took their nodes."""
    last_crash: str = ""

    @property
    def name(self) -> str:
        """The training's name."""
        return self.request.name

    def take(self, progress: dict[str, Any]) -> bool:
        """Note what a progress report says of checkpoints; whether there is a new one."""
        before, self.checkpoint_step = self.checkpoint_step, progress["checkpoint_step"]
        if self.checkpoint_step is None or self.checkpoint_step == before:
            return False
        self.crashes = 0
        return True
