"""A training job without a driver chooses its batch size by the same rules."""

from __future__ import annotations

from freetrain_parsl.protocol.reports import BatchReport, Joined, Progress
from freetrain_parsl.training.mailbox import ControlMailbox
from freetrain_parsl.training.step.elastic_batch import BatchChooser


def report(step: int, size: int = 32, seconds: float = 0.01, variance: float | None = 5000.0) -> Progress:
    """Return a report of steps of `size` samples, each of which took `seconds`."""
    square = None if variance is None else 1.0
    batch = BatchReport(size, 32, 16, 256, square, variance)
    return Progress(step=step, samples=step * size, slot_seconds=step * seconds, batch=batch)


def test_the_batch_grows_if_steps_take_no_longer_and_the_gradient_is_noisy() -> None:
    mailbox = ControlMailbox()
    chooser = BatchChooser(mailbox)
    chooser.take(report(0))
    assert not mailbox.batch_pending
    chooser.take(report(50))
    assert mailbox.take_batch() == 64


def test_it_stays_without_noise_without_an_estimate_and_after_reports_of_other_kinds() -> None:
    mailbox = ControlMailbox()
    for variance in (None, 0.0):
        chooser = BatchChooser(mailbox)
        for item in (report(0, variance=variance), Joined(1, 0.0, 0.0), report(50, variance=variance), Progress()):
            chooser.take(item)
        assert mailbox.take_batch() in (None, 16)


def test_what_is_known_is_used_in_the_next_fragment() -> None:
    """Batches of 64 took much longer than those of 32: after the restart they are not tried again."""
    first, second = ControlMailbox(), ControlMailbox()
    chooser = BatchChooser(first)
    for item in (report(0), report(50), report(50, size=64), report(100, size=64, seconds=0.2)):
        chooser.take(item)
    assert first.take_batch() == 32
    other = chooser.continued(second)
    other.take(report(100))
    other.take(report(150))
    assert not second.batch_pending


def test_reports_across_a_change_of_the_batch_are_not_measured() -> None:
    mailbox = ControlMailbox()
    chooser = BatchChooser(mailbox)
    chooser.take(report(0))
    chooser.take(report(50, size=64))
    assert not mailbox.batch_pending
