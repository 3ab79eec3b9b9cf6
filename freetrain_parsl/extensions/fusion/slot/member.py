"""A training that is a member of an array: the runtime of its session."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from freetrain_parsl.extensions.fusion.engine.array import MemberObjects
from freetrain_parsl.extensions.fusion.engine.engine import UNFUSED, ArrayMember, FusionEngine
from freetrain_parsl.extensions.fusion.engine.intercept import intercept, original_forward
from freetrain_parsl.extensions.fusion.slot.shared_batches import MemberBatches
from freetrain_parsl.training.extension import SessionExtension
from freetrain_parsl.training.runtime import Runtime
from freetrain_parsl.training.step.closure import needs_closure

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.protocol.reports import Report
    from freetrain_parsl.training.data.order import Order
    from freetrain_parsl.training.extension import DataSource
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.mailbox import Clock, ControlMailbox
    from freetrain_parsl.training.recorder import Recorder
    from freetrain_parsl.training.step.learning_rate import LrScaling
    from freetrain_parsl.training.step.loss_kind import Reduction

__all__ = ["MemberRuntime"]

logger = logging.getLogger(__name__)


class _SharedData(SessionExtension):
    """Gives a member of an array the batches that its engine fetches once for all with the same data."""

    def __init__(self, engine: FusionEngine) -> None:
        self._engine = engine

    def data(self, source: DataSource) -> MemberBatches | None:
        """See `SessionExtension.data`."""
        batches = self._engine.shared_batches(source)
        return None if batches is None else MemberBatches(batches, source)


class MemberRuntime(Runtime):
    """The runtime of one member; its forward passes, backward passes and steps are made by an engine.

    Parameters
    ----------
    engine
        That of the array.
    options, members, mailbox, report, clock, recorder
        See `Runtime`.
    """

    def __init__(
        self,
        engine: FusionEngine,
        options: SessionOptions,
        members: GroupMember,
        mailbox: ControlMailbox,
        report: Callable[[Report], None],
        clock: Clock,
        recorder: Recorder | None = None,
    ) -> None:
        self._engine = engine
        self._strand = engine.current_strand
        self._participant: ArrayMember | None = None
        self._number_of: dict[int, int] = {}  # id of an optimizer -> its place
        self._releases: list[Callable[[], None]] = []
        super().__init__(options, members, mailbox, report, clock, recorder, _SharedData(engine))

    def close(self) -> None:
        """Leave the array and wait for a background checkpoint; the group stays."""
        self.leave_array()
        self._close_training()

    def leave_array(self) -> None:
        """Train alone from here on: models and optimizers are ordinary again."""
        for release in self._releases:
            release()
        self._releases = []
        if self._participant is not None:
            self._engine.leave(self._participant)
            self._participant = None

    def use(self, order: Order, *, lr_scaling: LrScaling, ramp: int) -> None:
        """See `Runtime.use`."""
        super().use(order, lr_scaling=lr_scaling, ramp=ramp)
        for option, given in (
            ("micro_batch", order.micro_batch is not None),
            ("deterministic", order.shards is not None),
            ("scaled", order.scaled),
            ("batch_range", order.batch_range is not None),
        ):
            if given:
                self._train_alone(f"its loader has {option}=")

    def start(self, total_epochs: int) -> None:
        """See `Runtime.start`."""
        first = not self.started
        if first and not self.reporter.not_fused:
            self._take_part()
        if self._participant is not None and self.state.order is not None:
            self.reporter.structure = self._participant.objects.structure(self.state.order.batch_size)
        super().start(total_epochs)
        if first and self._participant is not None:
            self._engine.join(self._participant)

    def boundary(self, *, seed: bool = True) -> None:
        """See `Runtime.boundary`."""
        if self._participant is not None:
            self._engine.end_batch(self._participant)
            self.reporter.trainings = max(1, self._engine.participants)
        super().boundary(seed=seed)

    def backward(
        self, loss: torch.Tensor, items: torch.Tensor | float | None = None, reduction: Reduction | None = None
    ) -> bool:
        """See `Runtime.backward`."""
        if self._participant is None:
            return super().backward(loss, items, reduction)
        batch_runner = self._batch_runner_in_hand()
        weighed = batch_runner.begin_backward(loss, items, reduction)
        if weighed is not None:
            with self._bypass.session_acts():
                self._engine.backward(self._participant, weighed)
            batch_runner.end_backward()
        return batch_runner.is_complete

    def step(
        self,
        loss: torch.Tensor | None,
        optimizer: Optimizer | None,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
    ) -> bool:
        """See `Runtime.step`."""
        if self._participant is None:
            return super().step(loss, optimizer, items, reduction)
        batch_runner = self._batch_runner_in_hand()
        weighed = None
        if loss is not None:
            weighed = batch_runner.begin_backward(loss, items, reduction)
            if weighed is None:
                return False
            batch_runner.end_backward()
        optimizers = batch_runner.begin_step(optimizer)
        if optimizers is None:
            return False
        numbers = tuple(self._number_of[id(each)] for each in optimizers)
        with self._bypass.session_acts():
            clean = self._engine.step(self._participant, weighed, numbers)
        if not clean:
            batch_runner.zero_gradients()
        batch_runner.end_step()
        self._count_step(batch_runner)
        return True

    def _take_part(self) -> None:
        """Let the engine compute the prepared models and optimizers."""
        things = list(self.state.objects.values())
        if not self.extension.in_place:
            self._train_alone("its model is sharded")
            return
        if any(isinstance(thing, torch.amp.GradScaler) for thing in things):
            self._train_alone("it has a GradScaler, whose scale and skipped steps are its own")
            return
        for optimizer in things:
            if isinstance(optimizer, Optimizer) and needs_closure(optimizer):
                self._train_alone(f"its {type(optimizer).__name__} evaluates the loss several times in a step")
                return
        models = [thing for thing in things if isinstance(thing, nn.Module) and not isinstance(thing, AveragedModel)]
        optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
        if not optimizers:
            return  # refused by `start`
        self._number_of = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
        self._participant = ArrayMember(self.options.name, MemberObjects(models, optimizers))
        for number, each in enumerate(models):
            self._releases.append(intercept(each, partial(self._forward, number, each)))

    def _train_alone(self, reason: str) -> None:
        logger.warning("training %s is not fused: %s", self.options.name, reason)
        self.reporter.not_fused = reason
        self.leave_array()

    def _runs_user_code(self) -> bool:
        """See `Runtime`."""
        return self._engine.current_strand is self._strand

    def _forward(self, number: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a model: fused in training, by its own forward otherwise."""
        in_batch = self.batch_runner is not None and self.batch_runner.has_piece
        if in_batch and self._participant is not None and torch.is_grad_enabled():
            output = self._engine.forward(self._participant, number, model, args, kwargs)
            if output is not UNFUSED:
                return output
        return original_forward(model)(model, *args, **kwargs)
