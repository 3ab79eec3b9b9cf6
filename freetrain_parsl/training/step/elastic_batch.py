"""The batch size of a job that lets the driver choose it within a range; without a driver, `BatchChooser` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.planning.curves.elastic_batch import BatchRange, ElasticProfile, NoiseEstimate
from freetrain_parsl.protocol.reports import BatchReport, Progress
from freetrain_parsl.training.step.gradient_noise import NoiseMeter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.protocol.reports import Report
    from freetrain_parsl.training.mailbox import ControlMailbox

__all__ = ["BatchChooser", "ElasticBatch"]


class ElasticBatch:
    """The current batch size and the gradient's noise; the same on all members, in checkpoints and for newcomers.

    Parameters
    ----------
    initial
        The batch size at the start, to which the learning rate belongs.
    least, most
        Its range, inclusive.
    """

    def __init__(self, initial: int, least: int, most: int) -> None:
        self.initial = initial
        self.least = least
        self.most = most
        self.size = initial
        """Samples in the next batch."""
        self.changes = 0
        """How often it has changed; of two members at the same step, the one with more changes is ahead."""
        self.noise = NoiseMeter()

    @property
    def scale(self) -> float:
        """The batch size relative to the initial one."""
        return self.size / self.initial

    def change(self, size: int) -> None:
        """Change the batch size; one outside the range is replaced by the nearest one."""
        size = min(max(size, self.least), self.most)
        if size != self.size:
            self.size = size
            self.changes += 1

    def gain(self, scale: float) -> float:
        """Return how many steps of the initial batch a step of `scale` times its size replaces; as AdaScale.

        Without an estimate of the noise: 1, the rate of the initial batch.
        """
        if (estimate := self.noise.estimate) is None:
            return 1.0
        square, variance = estimate[0] * self.initial, estimate[1]
        return (variance + square) / (variance / scale + square) if variance or square else 1.0

    def report(self) -> BatchReport:
        """Return what the driver chooses the batch size by."""
        square, variance = self.noise.estimate or (None, None)
        return BatchReport(self.size, self.initial, self.least, self.most, square, variance)

    def state(self) -> dict[str, Any]:
        """Return everything but the range as plain values."""
        return {"size": self.size, "changes": self.changes, "noise": self.noise.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state; its size may be outside the range, which the user may have changed."""
        self.size = min(max(int(state["size"]), self.least), self.most)
        self.changes = int(state["changes"])
        self.noise.load(state["noise"])


class BatchChooser:
    """Chooses the batch size of a training job in a single process, from its progress reports.

    Parameters
    ----------
    mailbox
        Receives the sizes.
    """

    def __init__(self, mailbox: ControlMailbox) -> None:
        self._mailbox = mailbox
        self._profile: ElasticProfile | None = None
        self._last: Progress | None = None

    def continued(self, mailbox: ControlMailbox) -> BatchChooser:
        """Return one for the next fragment of the training job, with what is known."""
        other = BatchChooser(mailbox)
        other._profile = self._profile
        return other

    def take(self, report: Report) -> None:
        """Take a report; post another batch size if it is clearly better."""
        if not isinstance(report, Progress) or report.batch is None:
            return
        last, self._last, batch = self._last, report, report.batch
        if self._profile is None:
            self._profile = ElasticProfile(BatchRange(batch.initial, batch.least, batch.most))
        if last is None or last.batch is None or last.batch.size != batch.size or report.step == last.step:
            return
        seconds = report.slot_seconds - last.slot_seconds
        self._profile.times.observe(1, batch.size, report.step - last.step, report.samples - last.samples, seconds)
        if batch.square is not None and batch.variance is not None:
            self._profile.noise = NoiseEstimate(batch.square, batch.variance)
        size = self._profile.next_batch(1, batch.size)
        if size != batch.size:
            self._mailbox.post_batch(size)
