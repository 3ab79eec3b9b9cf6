"""The choice of the batch size of a training without a driver; with one, the driver chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.planning.curves.elastic_batch import BatchRange, ElasticProfile, NoiseEstimate
from freetrain_parsl.protocol.reports import Progress

if TYPE_CHECKING:
    from freetrain_parsl.protocol.reports import Report
    from freetrain_parsl.training.mailbox import ControlMailbox

__all__ = ["BatchChooser"]


class BatchChooser:
    """Chooses the batch size of a training in a single process, from its progress reports.

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
        """Return one for the next fragment of the training, with what is known."""
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
