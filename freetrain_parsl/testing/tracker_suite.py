"""The conformance suite for trackers: subclass `TrackerConformance` in your tests, and pytest runs its tests.

::

    class TestMyTracker(TrackerConformance):
        def make(self):
            return MyTracker()

        def read(self, training):
            return {"loss": [(10, 0.5), (20, 0.25)]}   # what the tracker has of the training job
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.executor.values.tracker import Row, TrackedTraining, Tracker, fresh

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["TrackerConformance"]

_TIME = 1_700_000_000.0


def _rows(steps: Sequence[int]) -> list[Row]:
    return [Row(step, _TIME + step, {"loss": 1.0 / step, "val/accuracy": step / 100}) for step in steps]


def _expected(steps: Sequence[int]) -> dict[str, list[tuple[int, Any]]]:
    return {
        "loss": [(step, pytest.approx(1.0 / step, rel=1e-6)) for step in steps],
        "val/accuracy": [(step, pytest.approx(step / 100, rel=1e-6)) for step in steps],
    }


class TrackerConformance:
    """What a tracker must do; see the module's docstring."""

    def make(self) -> Tracker:
        """Return a new tracker, always with the same options."""
        raise NotImplementedError

    def read(self, training: TrackedTraining) -> Mapping[str, Sequence[tuple[int, float]]]:
        """Return what the tracker has of a training job's one run: name -> (step, value), in order.

        Raise an exception if there are several runs.
        """
        raise NotImplementedError

    @pytest.fixture
    def training(self, tmp_path: Path) -> TrackedTraining:
        """Return a training job with an empty directory."""
        directory = tmp_path / "tracker"
        directory.mkdir(mode=0o700)
        return TrackedTraining("lr-0.1", "0123456789abcdef", directory)

    def test_values_arrive_with_their_steps(self, training: TrackedTraining) -> None:
        """What was logged can be read when the run is closed."""
        tracker = self.make()
        assert not tracker.open(training)
        tracker.log(_rows([10, 20]))
        tracker.log(_rows([30]))
        tracker.close("finished")
        assert dict(self.read(training)) == _expected([10, 20, 30])

    def test_a_reopened_run_goes_on_and_knows_what_it_has(self, training: TrackedTraining) -> None:
        """Another process opens the same run; what it is given anew is left out by the steps that it returns."""
        first = self.make()
        first.open(training)
        first.log(_rows([10, 20]))
        first.close("interrupted")
        second = self.make()
        steps = dict(second.open(training))
        assert steps == {"loss": 20, "val/accuracy": 20}
        second.log(list(fresh(_rows([10, 20, 30]), steps)))
        second.close("failed")
        assert dict(self.read(training)) == _expected([10, 20, 30])

    def test_an_empty_run_can_be_reopened(self, training: TrackedTraining) -> None:
        """A process may end between creating a run and its first value."""
        first = self.make()
        first.open(training)
        first.close("interrupted")
        second = self.make()
        assert not second.open(training)
        second.log(_rows([5]))
        second.close("finished")
        assert dict(self.read(training)) == _expected([5])

    def test_texts_flags_and_strange_numbers_do_no_harm(self, training: TrackedTraining) -> None:
        """All values that `session.log` takes are accepted; other values arrive."""
        tracker = self.make()
        tracker.open(training)
        tracker.log([Row(1, _TIME, {"note": 'ä\\n,"x"', "flag": True, "count": 10**15, "bad": float("nan")})])
        tracker.log(_rows([2]))
        tracker.close("finished")
        assert {name: self.read(training)[name] for name in ("loss", "val/accuracy")} == _expected([2])
