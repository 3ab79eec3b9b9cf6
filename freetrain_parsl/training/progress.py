"""The progress of a training job: measured on all members, reported by the first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from freetrain_parsl.protocol.reports import Logged, Progress, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.training.checkpoints.format import Restored
    from freetrain_parsl.training.checkpoints.manager import CheckpointManager
    from freetrain_parsl.training.checkpoints.state import SessionState
    from freetrain_parsl.training.extension import SessionExtension
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.mailbox import Clock

_REPORT_SECONDS = 0.5  # minimum time between two reports
_MEMORY_SECONDS = 5.0
_LONGEST_STEP_DECAY = 0.95  # an unusually long step is forgotten after some dozens of steps


class Pace:
    """Exponentially weighted throughput over the last seconds.

    The first step of a fragment is excluded, since it includes lazy initialization.
    """

    def __init__(self) -> None:
        self._samples = 0.0
        self._seconds = 0.0
        self._steps = 0
        self.longest_step = 0.0
        """Seconds of the longest recent step, the first step included."""
        self.longest_tail: float | None = None
        """The same of the code after the batches of an epoch, until all members had run it; ``None``: not known yet."""

    def add(self, samples: int, seconds: float) -> None:
        """Count a step."""
        self.longest_step = max(seconds, _LONGEST_STEP_DECAY * self.longest_step)
        self._steps += 1
        if self._steps == 1:
            return
        decay = math.exp(-seconds / _MEMORY_SECONDS)
        self._samples = decay * self._samples + samples
        self._seconds = decay * self._seconds + seconds

    def restart(self) -> None:
        """Reset the throughput, which differs between groups, but keep the longest step."""
        self._samples = self._seconds = 0.0
        self._steps = 0

    @property
    def rate(self) -> float | None:
        """Samples per second; ``None`` before the second step."""
        return self._samples / self._seconds if self._seconds > 0 else None


class ProgressReporter:
    """Measures the progress of a training job between boundaries, and reports it on the first member.

    Parameters
    ----------
    state, checkpoint_manager
        The runtime's own.
    members, report, clock, extension
        See `Runtime`.
    """

    def __init__(
        self,
        state: SessionState,
        checkpoint_manager: CheckpointManager,
        members: GroupMember,
        report: Callable[[Report], None],
        clock: Clock,
        extension: SessionExtension,
    ) -> None:
        self.pace = Pace()
        self.total_epochs: int | None = None
        """Epochs of the whole training job, once the user's loop has begun."""
        self.extension = extension
        """The run's extension, even if the prepared objects have another."""
        self.prepared_by = extension
        """The extension of the prepared objects."""
        self._state = state
        self._checkpoint_manager = checkpoint_manager
        self._members = members
        self._report = report
        self._clock = clock
        self._counted_samples = 0  # samples at the last boundary
        self._counted_until = clock()  # time of the last boundary
        self._reported = -math.inf
        self._ended_pass: int | None = None  # the group in which the last boundary was after the last batch of an epoch
        self._rows_sent = 0
        self._resumed_from: int | None = None
        self._from_memory = False
        self._refused: tuple[str, ...] = ()

    def resumed(self, restored: Restored, *, from_memory: bool) -> None:
        """Note that the training job has resumed from a checkpoint, or from copies; its position is in the state."""
        self._resumed_from, self._refused = self._state.training_metrics.step, restored.refused
        self._from_memory = from_memory

    def start_counting(self, now: float) -> None:
        """Leave out everything before: samples of earlier fragments, time before the loop."""
        self._counted_until = now
        self._counted_samples = self._state.training_metrics.samples

    def count_step(self) -> bool:
        """Count the samples and the time since the last boundary; return whether there was a step."""
        metrics = self._state.training_metrics
        seconds = self._clock() - self._counted_until
        if metrics.samples <= self._counted_samples:
            return False
        self.pace.add(metrics.samples - self._counted_samples, seconds)
        metrics.slot_seconds += seconds * self._members.group.size / self.extension.trainings
        self._counted_samples = metrics.samples
        return True

    def end_boundary(self) -> None:
        """Leave out the time spent at a boundary."""
        group, now = self._members.group.generation, self._clock()
        if self._ended_pass == group:
            self.pace.longest_tail = max(now - self._counted_until, (self.pace.longest_tail or 0.0) / 2)
        self._counted_until, self._ended_pass = now, group if self._state.cursor.pass_ended else None

    @property
    def due(self) -> bool:
        """Whether the last report is old enough for another one."""
        return self._clock() - self._reported >= _REPORT_SECONDS

    def send(self, *, at_once: bool = False) -> None:
        """Report the progress on the first member, if a report is due or, with `at_once`, in any case."""
        if not self._members.group.is_first or not (at_once or self.due):
            return
        self._state.training_metrics.settle()
        self._reported = self._clock()
        self._report(self.progress())
        self.send_rows()

    def send_rows(self) -> None:
        """Report the values for trackers on the first member."""
        logged = self._state.training_metrics.logged
        if self._members.group.is_first:
            for rows in logged.reports(self._rows_sent):
                self._report(Logged(rows))
            self._rows_sent = logged.count

    def progress(self) -> Progress:
        """Return the progress of the training job."""
        manager, metrics = self._checkpoint_manager, self._state.training_metrics
        total = None
        if self.total_epochs is not None and self._state.order is not None:
            total = self.total_epochs * self._state.order.samples
        return Progress(
            step=metrics.step,
            epoch=self._state.cursor.epoch,
            samples=metrics.samples,
            samples_total=total,
            slot_seconds=metrics.slot_seconds,
            loss=metrics.metrics["loss"] if metrics.mean_loss is None else metrics.mean_loss,
            rate=self.pace.rate,
            samples_lost=metrics.audit.samples_lost,
            duplicate_samples=metrics.audit.duplicate_samples,
            checkpoint_step=manager.newest.step if manager.newest else None,
            resumed_from=self._resumed_from,
            from_memory=self._from_memory,
            write_seconds=manager.write_seconds_estimate,
            refused_checkpoints=self._refused,
            in_place=self.prepared_by.in_place,
            allowed_counts=self.prepared_by.allowed_counts,
            sharded_bytes=self.prepared_by.sharded_bytes,
            code_note=manager.code_note,
            batch=None if self._state.batch is None else self._state.batch.report(),
            storage_problem=manager.storage_problem,
            next_save=manager.due_in(self._clock()) if manager.storage_problem else 0.0,
            **self.extension.facts(),
        )
