"""Training on the current batch, as user code asks for it: ``session.backward`` and ``session.step``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.training.step.closure import needs_closure

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.optim import Optimizer

    from freetrain_parsl.training.group.changes import GroupChanges
    from freetrain_parsl.training.parts import TrainingParts
    from freetrain_parsl.training.step.batch_runner import BatchRunner
    from freetrain_parsl.training.step.loss_kind import Reduction

__all__ = ["Steps"]


class Steps:
    """Makes the steps of one member; a failure of another one in a step interrupts the batch."""

    def __init__(self, training: TrainingParts, changes: GroupChanges) -> None:
        self._training = training
        self._changes = changes

    def backward(
        self,
        loss: torch.Tensor,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
        *,
        steps: bool = False,
    ) -> bool:
        """Add a piece's gradients; after the last piece, ``.grad`` has the whole batch's gradients, on all members.

        Parameters
        ----------
        loss, items, reduction, steps
            See `BatchRunner.backward`.

        Returns
        -------
        complete
            Whether it was the last piece, and a step can be made.
        """
        training, batch_runner = self._training, self._batch_runner_in_hand()
        recorder = None if training.extension.computes else training.recorder
        if recorder is not None:
            recorder.loss(training, loss)
        try:
            batch_runner.backward(loss, items, reduction, steps=steps)
        except PeerFailed as error:
            self._changes.interrupt(error)
        if recorder is not None:
            recorder.gradients(training)
        return batch_runner.is_complete or batch_runner.others_stepped

    def step(
        self,
        loss: torch.Tensor | None,
        optimizer: Optimizer | None,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
    ) -> bool:
        """Compute the gradients of a loss, if given, and make the optimizer step if the batch is complete.

        Returns
        -------
        made
            Whether the step was made.
        """
        if loss is not None:
            self.backward(loss, items, reduction, steps=True)
        batch_runner = self._batch_runner_in_hand()
        made = batch_runner.step(optimizer, self._training.state.scaling)
        if made:
            self._count(batch_runner)
        return made

    def step_by_closure(
        self,
        closure: Callable[[], torch.Tensor],
        optimizer: Optimizer | None,
        items: torch.Tensor | float | None,
        reduction: Reduction | None,
    ) -> bool:
        """Make a step of an optimizer that evaluates the loss itself, such as LBFGS; return whether it was made."""
        batch_runner = self._batch_runner_in_hand()
        optimizers = batch_runner.chosen(optimizer)
        if not any(map(needs_closure, optimizers)):
            return self.step(closure(), optimizer, items, reduction)
        if len(optimizers) > 1:
            raise UsageError("session.step(closure): say whose step it is with optimizer=…, as each evaluates the loss")

        def evaluate() -> torch.Tensor | float:
            return batch_runner.evaluation(closure, items, reduction)

        try:
            made = batch_runner.step_by_closure(optimizers[0], evaluate, self._training.state.scaling)
        except PeerFailed as error:
            self._changes.interrupt(error)
            made = batch_runner.step(optimizers[0], None)  # which others may have made
        if made:
            self._count(batch_runner)
        return made

    def _count(self, batch_runner: BatchRunner) -> None:
        if batch_runner.cut_off:  # other members have made it, and their state has it
            return
        state = self._training.state
        state.cursor.steps += 1
        if state.cursor.steps == 1:
            state.training_metrics.count_step(batch_runner.batch, batch_runner.tally)
        if self._training.recorder is not None:
            self._training.recorder.step()

    def _batch_runner_in_hand(self) -> BatchRunner:
        self._training.check_running()
        batch_runner = self._training.batch_runner
        if self._training.state.order is None:
            raise UsageError(
                "session.step() was called without a loader, which divides the work over the processes: create one, "
                "data = session.loader(dataset, batch_size=…) before the epoch loop; without a data set, as in "
                "reinforcement learning, over the numbers of the episodes: session.loader(range(1000), batch_size=8)"
            )
        if batch_runner is None or not batch_runner.has_piece:
            raise UsageError(
                "session.step() was called without a batch of session.loader(), or twice for one: create the loader "
                "with data = session.loader(dataset, batch_size=…) before the epoch loop, write `for … in data:`, and "
                "call session.step() once in it"
            )
        return batch_runner
