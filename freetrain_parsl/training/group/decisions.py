"""The joint decision of a group's members at a boundary: one sum of their votes, the same for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.training.parts import TrainingParts

__all__ = ["BoundaryDecision", "Decisions"]

_UNKNOWN_TAIL = 60.0  # seconds that the code after the batches may take, in the first epoch of a process
_DECISION_SECONDS = 0.05  # between two decisions of a group of one: in between, the steps of small models have no cost


class BoundaryDecision(NamedTuple):
    """The members' decision; the first field that is true is carried out.

    After the last batch of an epoch all wait for the code that follows the batches, unless a node closes before: a
    process that joins or resumes there would run this code without a batch, and may need one.

    Parameters
    ----------
    commanded
        All have a command to change the group.
    closing
        A node closes before another step and a checkpoint are certain.
    requested
        The driver has requested a pause.
    save_due
        A periodic save is due.
    copy_due
        A copy in memory is due.
    """

    commanded: bool
    closing: bool
    requested: bool
    save_due: bool
    copy_due: bool


class Decisions:
    """Takes the decisions of one member, together with the others."""

    def __init__(self, training: TrainingParts) -> None:
        self._training = training
        self._mailbox, self._members, self._clock = training.mailbox, training.members, training.clock
        self._state, self._reporter = training.state, training.reporter
        self._checkpoint_manager = training.checkpoint_manager
        self._on_gpu = torch.cuda.is_available()
        self._write_seconds = 0.0
        self._due_at = 0.0  # by the clock, for a group of one

    def take(self) -> BoundaryDecision | None:
        """Decide; ``None``: there was nothing to decide. Saves in progress and the batch size are taken care of here.

        Raises
        ------
        PeerFailed
            A member has failed.
        TrainingError
            No checkpoint can be written.
        """
        group, manager = self._members.group, self._checkpoint_manager
        if not self._on_gpu or self._reporter.due:
            self._state.training_metrics.settle()  # on a GPU this waits for the last step
        if group.size == 1 and not self._is_due():
            return None
        commanded = self._members.has_command()  # raises if a member has failed
        if group.is_first:
            self._write_seconds = manager.write_seconds_estimate
            self._look_after_writing(manager.poll)
        requested: float = self._mailbox.pause_requested.is_set()
        closing: float = self._closing()
        between = not self._state.cursor.pass_ended
        save_due: float = group.is_first and between and manager.due(self._clock())
        ready: float = manager.ready
        extension = self._training.extension
        copy_due: float = (
            group.is_first and between and extension.copy_due(self._state.training_metrics.step, self._clock())
        )
        copied: float = extension.copy_arrived
        batch: float = self._requested_batch()
        if group.size > 1:
            # One sum for the votes and for the first member's estimate, which only it can measure.
            estimate = self._write_seconds if group.is_first else 0.0
            own = [requested, closing, save_due, commanded, ready, batch, copy_due, copied, estimate]
            own += self._training.replicas.votes(whole=self._is_last_boundary)
            votes = torch.tensor(own, dtype=torch.float64)
            *counts, self._write_seconds, hashes, squares = group.sum(votes).tolist()
            requested, closing, save_due, commands, ready, batch, copy_due, copied = counts
            self._training.replicas.judge(group, hashes, squares)
            commanded = commands == group.size
        if ready == group.size:
            self._look_after_writing(manager.advance)
        if copied == group.size:
            extension.copied()
        if batch:
            self._change_batch(int(batch))
        commanded = commanded and (between or bool(closing))
        return BoundaryDecision(commanded, bool(closing), bool(requested) and between, bool(save_due), bool(copy_due))

    @property
    def _is_last_boundary(self) -> bool:
        """Whether all batches of the last epoch are done."""
        cursor, epochs = self._state.cursor, self._reporter.total_epochs
        return cursor.pass_ended and epochs is not None and cursor.epoch + 1 >= epochs

    def _is_due(self) -> bool:
        """Return whether a group of one may have something to decide; it reads the clock only now and then."""
        now = self._clock()
        if now < self._due_at:
            mailbox = self._mailbox
            asked = mailbox.pause_requested.is_set() or mailbox.pending is not None or mailbox.batch_pending
            return asked or self._state.cursor.pass_ended
        self._due_at = now + _DECISION_SECONDS
        return True

    def _requested_batch(self) -> int:
        """Take the batch size that the driver has sent to this member; zero if there is none, or if it is late.

        Only the first member's counts: any other was sent to an earlier first member. A batch that has had
        one of several steps keeps its samples.
        """
        size = self._mailbox.take_batch()
        in_time = self._members.group.is_first and self._state.batch is not None and not self._state.cursor.steps
        return size if size is not None and in_time else 0

    def _change_batch(self, size: int) -> None:
        batch, pace = self._state.batch, self._reporter.pace
        assert batch is not None, "requested"
        before = batch.size
        batch.change(size)
        pace.restart()
        pace.longest_step *= max(1.0, batch.size / before)  # a step more must still fit before the node closes
        self._reporter.send(at_once=True)

    def _closing(self) -> bool:
        """Return whether another step, or the code after the batches, would leave too little time for a checkpoint."""
        closes_in = self._mailbox.closes_in()
        if closes_in is None:
            return False
        margin = self._training.options.save_margin.total_seconds()
        # Training jobs that share the process save one after another.
        writing = self._reporter.extension.trainings * self._write_seconds
        return closes_in <= writing + margin + self._until_next()

    def _until_next(self) -> float:
        """Return how many seconds the next boundary may take to come."""
        step, tail = self._reporter.pace.longest_step, self._reporter.pace.longest_tail
        if not self._state.cursor.pass_ended:
            return step
        if not (self._mailbox.pause_requested.is_set() or self._mailbox.pending):
            return step if tail is None else min(step, tail)  # a long validation may go on without this node
        return max(step, _UNKNOWN_TAIL) if tail is None else tail

    def _look_after_writing(self, look: Callable[[], object]) -> None:
        """Call `look`, and report progress if it has found a new checkpoint."""
        before = self._checkpoint_manager.newest
        look()
        if self._checkpoint_manager.newest != before:
            self._reporter.send(at_once=True)
