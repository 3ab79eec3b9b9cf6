"""A training job that is a member of an array: the extension of its session."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from freetrain_parsl.extensions.fusion.engine.array import MemberObjects
from freetrain_parsl.extensions.fusion.engine.engine import UNFUSED, FusionEngine
from freetrain_parsl.extensions.fusion.engine.intercept import intercept, original_forward
from freetrain_parsl.extensions.fusion.engine.memory import return_freed_memory
from freetrain_parsl.extensions.fusion.forward.shared_base import FROZEN, overlapping
from freetrain_parsl.extensions.fusion.slot.shared_batches import MemberBatches
from freetrain_parsl.training.extension import SessionExtension
from freetrain_parsl.training.step.closure import needs_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from freetrain_parsl.training.checkpoints.state import SessionState, Stateful
    from freetrain_parsl.training.data.cursor import Cursor
    from freetrain_parsl.training.extension import DataSource
    from freetrain_parsl.training.group.regrouping import GroupMember

__all__ = ["MemberExtension"]

logger = logging.getLogger(__name__)


class MemberExtension(SessionExtension):
    """Lets the engine of an array make the forward passes, backward passes and steps of one training job.

    Parameters
    ----------
    engine
        That of the array.
    name
        The training job's name.
    """

    def __init__(self, engine: FusionEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._strand = engine.current_strand
        self._structure = self._not_fused = ""
        self._participant: MemberObjects | None = None
        self._joined = False
        self._cursor: Cursor | None = None  # of the session
        self._epoch = -1  # of the last boundary
        self._number_of: dict[int, int] = {}  # id of an optimizer -> its place
        self._loss: torch.Tensor | None = None  # of the step that follows
        self._releases: list[Callable[[], None]] = []

    @property
    def computes(self) -> bool:  # type: ignore[override]  # read only
        """See `SessionExtension.computes`."""
        return self._participant is not None

    def close(self) -> None:
        """Train alone from here on: models and optimizers are ordinary again."""
        for release in self._releases:
            release()
        self._releases = []
        if self._participant is not None:
            self._engine.leave(self._participant)
            self._participant = None

    def gives_way(self) -> None:
        """Train alone, with the extension for sharded models."""
        self._train_alone("its model is sharded")

    def prepared(self, objects: Mapping[str, Stateful], members: GroupMember, device: torch.device) -> None:  # noqa: ARG002
        """Share frozen tensors with other members at once, before the next one loads the same."""
        _share(_models(objects.values()))

    def loaded_again(self) -> None:
        """Share frozen tensors again: loading has given them memory of their own."""
        if self._participant is not None:
            _share(self._participant.models)

    def data(self, source: DataSource) -> MemberBatches | None:
        """Return the batches that the engine fetches once for all with the same data."""
        batches = self._engine.shared_batches(source)
        return None if batches is None else MemberBatches(batches, source)

    def started(self, state: SessionState, in_batch: Callable[[], bool]) -> None:
        """Let the engine compute the prepared models and optimizers, unless something must be the job's own."""
        things = list(state.objects.values())
        if reason := _reason_against(state):
            self._train_alone(reason)
            return
        models = _models(things)
        optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
        self._number_of = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
        self._participant = MemberObjects(models, optimizers)
        self._cursor = state.cursor
        for number, each in enumerate(models):
            self._releases.append(intercept(each, partial(self._forward, in_batch, number, each)))
        if state.order is not None:
            self._structure = self._participant.structure(state.order.batch_size, state.order.micro_batch)

    def boundary(self) -> None:
        """Join the array at the first boundary; end a batch at each."""
        if self._participant is None:
            return
        if not self._joined:
            self._joined = True
            _share(self._participant.models)  # again: a checkpoint that was loaded has memory of its own
            self._engine.join(self._participant)
        assert self._cursor is not None, "it computes"
        if self._cursor.epoch != self._epoch:
            self._epoch = self._cursor.epoch
            self._engine.begin_epoch()
        self._engine.end_batch(self._participant)
        self.trainings = max(1, self._engine.participants)

    def backward(self, loss: torch.Tensor, *, steps: bool) -> None:
        """Compute the gradients of a loss, now or in the step that follows."""
        assert self._participant is not None, "it computes"
        self._loss = loss if steps else None
        if not steps:
            self._engine.backward(self._participant, loss)

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        """Step these optimizers, together with the other members."""
        assert self._participant is not None, "it computes"
        loss, self._loss = self._loss, None
        self._engine.step(self._participant, loss, tuple(self._number_of[id(each)] for each in optimizers))

    def acts(self) -> bool:
        """Return whether the training job's strand runs."""
        return self._engine.current_strand is self._strand

    def facts(self) -> dict[str, str]:
        """Return which training jobs it may be fused with, and why it is not."""
        kind, reason = ("", "") if self._participant is None else self._engine.facts_of(self._participant)
        structure = f"{self._structure}/{kind}" if kind else self._structure
        return {"structure": structure, "not_fused": self._not_fused or reason}

    def _train_alone(self, reason: str) -> None:
        logger.warning("training job %s is not fused: %s", self._name, reason)
        self._not_fused = reason

    def _forward(
        self, in_batch: Callable[[], bool], number: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of a model: fused in training, by its own forward otherwise."""
        if in_batch() and self._participant is not None and torch.is_grad_enabled():
            output = self._engine.forward(self._participant, number, model, args, kwargs)
            if output is not UNFUSED:
                return output
        return original_forward(model)(model, *args, **kwargs)


def _share(models: Sequence[nn.Module]) -> None:
    """Share frozen tensors with other members, and return the memory that these models had for themselves."""
    if FROZEN.share(models):
        return_freed_memory()


def _models(things: Iterable[object]) -> list[nn.Module]:
    """Return the models that are trained."""
    return [thing for thing in things if isinstance(thing, nn.Module) and not isinstance(thing, AveragedModel)]


def _reason_against(state: SessionState) -> str:
    """Return why a training job cannot be fused; empty if it may be."""
    order = state.order
    if order is not None:
        for option, given in (
            ("deterministic", order.shards is not None),
            ("scaled", order.scaled),
            ("batch_range", order.batch_range is not None),
        ):
            if given:
                return f"its loader has {option}="
    for thing in state.objects.values():
        if isinstance(thing, torch.amp.GradScaler):
            return "it has a GradScaler, whose scale and skipped steps are its own"
        if isinstance(thing, Optimizer) and needs_closure(thing):
            return f"its {type(thing).__name__} evaluates the loss several times in a step"
    for model in _models(state.objects.values()):
        if overlapping([*model.parameters(), *model.buffers()]):
            return "parameters or buffers of its model are views of one another, which stacking would part"
    return ""
