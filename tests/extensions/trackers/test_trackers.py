"""The trackers of this package, with the real packages behind them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freetrain_parsl.executor.values.tracker import Row, TrackedTraining, fresh
from freetrain_parsl.extensions.trackers.csv_file import CsvTracker
from freetrain_parsl.extensions.trackers.mlflow import MlflowTracker
from freetrain_parsl.extensions.trackers.tensorboard import TensorBoardTracker
from freetrain_parsl.extensions.trackers.wandb import WandbTracker, _records
from freetrain_parsl.testing.tracker_suite import TrackerConformance
from tests.executor.values.reading import read_csv, read_mlflow, read_tensorboard, read_wandb


class TestCsv(TrackerConformance):
    def make(self):
        return CsvTracker()

    def read(self, training):
        return read_csv(training.directory / f"{training.name}.csv")

    def test_a_line_that_was_not_written_completely_is_written_again(self, training) -> None:
        tracker = self.make()
        tracker.open(training)
        tracker.log([Row(1, 1.0, {"a": 1.5}), Row(2, 2.0, {"a": 2.5})])
        path = training.directory / "lr-0.1.csv"
        path.write_bytes(path.read_bytes()[:-3])  # killed while it wrote
        again = self.make()
        assert again.open(training) == {"a": 1}
        again.log([Row(2, 2.0, {"a": 2.5})])
        again.close("finished")
        tracker.close("finished")
        assert self.read(training) == {"a": [(1, 1.5), (2, 2.5)]}


_AWKWARD = st.text(alphabet='a",\n\rä', max_size=6)


@settings(max_examples=8)
@example(values=[{"a": 'x"\ny', "b\n": "1\r\n2"}, {"a": "ä,\n\n"}])
@given(values=st.lists(st.dictionaries(_AWKWARD, _AWKWARD, max_size=2), min_size=1, max_size=3))
def test_a_csv_file_that_was_cut_anywhere_ends_as_if_it_had_not_been(values) -> None:
    """Names and values may have quotes and line feeds: a line is not a record."""
    rows = [Row(step, 1.0, each) for step, each in enumerate(values, start=1)]
    with tempfile.TemporaryDirectory() as directory:
        training = TrackedTraining("t", "1" * 16, Path(directory))
        path = training.directory / "t.csv"

        def write() -> None:
            tracker = CsvTracker()
            tracker.log(list(fresh(rows, dict(tracker.open(training)))))
            tracker.close("finished")

        write()
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            write()
            assert path.read_bytes() == whole


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [CsvTracker, pytest.param(TensorBoardTracker, marks=pytest.mark.slow)])
def test_trainings_of_one_name_are_apart_in_a_shared_directory(kind, tmp_path) -> None:
    """Of two campaigns, or before and after a change of the code; otherwise the steps of one hide the other's."""
    shared = str(tmp_path / "shared")
    one, other = (TrackedTraining("t", digit * 16, tmp_path / digit) for digit in "12")
    for training, step in ((one, 100), (other, 5), (one, 200)):
        tracker = kind(shared)
        tracker.open(training)
        tracker.log([Row(step, 1.0, {"loss": 0.5})])
        tracker.close("finished")
    for training, step in ((one, 200), (other, 5)):
        tracker = kind(shared)
        assert tracker.open(training) == {"loss": step}
        tracker.close("finished")
    assert {"t", f"t-{'2' * 16}"} == {path.name.removesuffix(".csv") for path in (tmp_path / "shared").glob("t*")}


class TestTensorBoard(TrackerConformance):
    pytestmark = pytest.mark.slow

    def make(self):
        return TensorBoardTracker()

    def read(self, training):
        return read_tensorboard(training.directory)

    def test_a_record_that_was_not_written_completely_is_written_again(self, training) -> None:
        tracker = self.make()
        tracker.open(training)
        tracker.log([Row(1, 1.0, {"a": 1.5}), Row(2, 2.0, {"a": 2.5})])
        (path,) = training.directory.glob("events*")
        path.write_bytes(path.read_bytes()[:-3])  # killed while it wrote
        again = self.make()
        assert again.open(training) == {"a": 1}
        again.close("interrupted")
        tracker.close("interrupted")


class TestMlflow(TrackerConformance):
    pytestmark = pytest.mark.slow

    @pytest.fixture(autouse=True)
    def uri(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
        self.tracking_uri = (tmp_path / "mlruns").as_uri()

    def make(self):
        return MlflowTracker()

    def read(self, training):
        return read_mlflow(self.tracking_uri)

    @pytest.mark.parametrize(
        ("outcome", "status"),
        [("finished", "FINISHED"), ("failed", "FAILED"), ("cancelled", "KILLED"), ("interrupted", "SCHEDULED")],
    )
    def test_a_run_that_will_go_on_is_not_killed(self, training, outcome, status) -> None:
        from mlflow.tracking import MlflowClient

        def info():
            client = MlflowClient(tracking_uri=self.tracking_uri)
            (run,) = client.search_runs([client.get_experiment_by_name("freetrain").experiment_id])
            return run.info

        tracker = self.make()
        tracker.open(training)
        tracker.close(outcome)
        assert (info().status, info().end_time is None) == (status, outcome == "interrupted")
        self.make().open(training)  # resumed
        assert info().status == "RUNNING"


class TestWandb(TrackerConformance):
    pytestmark = pytest.mark.slow

    def make(self):
        return WandbTracker()

    def read(self, training):
        return read_wandb(training.directory)

    @pytest.mark.parametrize(
        ("outcome", "code", "preempted"),
        [("finished", 0, False), ("failed", 1, False), ("cancelled", 255, False), ("interrupted", 1, True)],
    )
    def test_a_run_that_will_go_on_is_preempted(self, training, outcome, code, preempted) -> None:
        tracker = self.make()
        tracker.open(training)
        tracker.log([Row(1, 1.0, {"a": 1.5})])
        tracker.close(outcome)
        (path,) = training.directory.glob("wandb/offline-run-*/*.wandb")
        records = {record.WhichOneof("record_type"): record for record in _records(path)}
        assert (records["exit"].exit.exit_code, "preempting" in records) == (code, preempted)
