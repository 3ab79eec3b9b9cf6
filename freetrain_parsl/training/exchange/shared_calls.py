"""Calls of collective operations in user code, which processes join and leave meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import PeerFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.training.group.changes import GroupChanges
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.parts import TrainingParts
    from freetrain_parsl.training.step.batch_runner import BatchRunner

__all__ = ["SharedCalls"]


class SharedCalls:
    """Makes the calls of one member; their failures change the group."""

    def __init__(self, training: TrainingParts, changes: GroupChanges) -> None:
        self._training = training
        self._changes = changes

    def make(self, operation: Callable[[Group], Any], *, name: str, of_parts: bool) -> Any:
        """Return the result of an operation, the same on all members.

        If a member fails in it, the others take the result of one that has it, or repeat the operation.

        Parameters
        ----------
        operation
            Called with the group; raises PeerFailed if a member has failed.
        name
            The session's verb, for messages.
        of_parts
            Whether the result contains a part from each member. After a failure it can be computed again only if the
            batch is repeated.

        Raises
        ------
        UsageError
            The other members might not call it, too.
        PeerFailed
            A member has failed, and its part is lost: the training job resumes from a checkpoint.
        """
        self._training.check_running()
        batch_runner, results = self._checked(name), self._training.state.results
        number = results.number + 1
        while results.number < number:
            try:
                results.add(operation(self._training.members.group))
            except PeerFailed as error:  # noqa: PERF203 - the loop is this handler's
                if of_parts and (not batch_runner.has_piece or batch_runner.has_stepped):
                    raise
                if batch_runner.has_piece and batch_runner.is_left:  # what follows the loop would be undone
                    raise
                self._changes.in_call = True
                try:
                    (self._changes.interrupt if batch_runner.has_piece else self._changes.recover)(error)
                finally:
                    self._changes.in_call = False
        return results.latest

    def _checked(self, name: str) -> BatchRunner:
        """Check that a process that joins between two steps calls an operation as often as the others do."""
        batch_runner, state = self._training.batch_runner, self._training.state
        if batch_runner is None or not self._training.started:
            raise UsageError(f"call session.{name} inside or after `for epoch in session.epochs(…)`")
        order, cursor, epochs = state.order, state.cursor, self._training.reporter.total_epochs
        if batch_runner.in_closure:
            raise UsageError(f"session.{name} cannot be called in the closure of session.step(closure)")
        if batch_runner.has_piece and order is not None and order.shards is not None:
            raise UsageError(
                f"session.{name} in the loop over the batches cannot be combined with deterministic=True: there the "
                "loop's body runs more often in some processes than in others; call it after this loop"
            )
        over = epochs is not None and cursor.epoch >= epochs
        if not (batch_runner.has_piece or batch_runner.is_left or cursor.pass_ended or over):
            raise UsageError(
                f"session.{name} was called before the batches of an epoch, where a process that joins later would "
                "call it alone; call it in the loop over the batches or after it"
            )
        return batch_runner
