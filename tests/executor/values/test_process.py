"""From the values of a training job to its trackers, once each, whatever fails on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.executor.values.process import Follower
from freetrain_parsl.executor.values.tracker import (
    Row,
    TrackedTraining,
    TrackerSpec,
    as_line,
    fresh,
    last_steps,
    parse_row,
    parse_trackers,
    read_rows,
)
from freetrain_parsl.executor.values.writer import ValueWriter
from freetrain_parsl.extensions.trackers.csv_file import CsvTracker
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.storage.posix import directory_name
from tests.executor.values.reading import read_csv

STORE: dict[str, list[tuple[int, str, float]]] = {}


class MemoryTracker:
    """Keeps values in `STORE`, and fails on demand, after it has taken some of them."""

    failures = 0

    def open(self, training):
        self._id = training.id
        steps: dict[str, int] = {}
        for step, name, _ in STORE.setdefault(self._id, []):
            steps[name] = max(step, steps.get(name, 0))
        return steps

    def log(self, rows):
        for row in rows:
            for name, value in row.values.items():
                STORE[self._id].append((row.step, name, value))
                if MemoryTracker.failures > 0:
                    MemoryTracker.failures -= 1
                    raise ConnectionError("the tracker is away")

    def close(self, outcome):
        STORE.setdefault(f"{self._id} closed", []).append(outcome)


@pytest.fixture
def training(tmp_path):
    STORE.clear()
    MemoryTracker.failures = 0
    return TrackedTraining("t", "1" * 16, tmp_path / "tracker")


def _write(path: Path, steps, name: str = "loss") -> None:
    with path.open("a") as file:
        file.writelines(as_line(Row(step, 1.0, {name: float(step)})) for step in steps)


def _follower(training, path) -> Follower:
    return Follower(training, path, TrackerSpec("tests.executor.values.test_process:MemoryTracker"))


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab")), max_size=40))
def test_steps_rise_and_none_is_there_twice(logged) -> None:
    rows = [Row(step, 1.0, {name: 0.0}) for step, name in logged]
    steps: dict[str, int] = {}
    passed = [(row.step, name) for row in fresh(rows, steps) for name in row.values]
    for name in "ab":
        mine = [step for step, which in passed if which == name]
        assert mine == sorted(set(mine))
        given_ = [step for step, which in logged if which == name]
        assert max(given_, default=None) == max(mine, default=None)
    assert not list(fresh(rows, steps))


@settings(max_examples=25)
@given(st.one_of(st.text(), st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps)))
def test_what_is_no_row_is_none(text) -> None:
    assert parse_row(text) is None


@pytest.mark.parametrize("bad", ['{"step": -1}', '{"step": true, "time": 1}', '{"step": 1, "time": "x", "values": {}}'])
def test_rows_with_strange_fields_are_none(bad) -> None:
    assert parse_row(bad) is None


def test_values_are_such_that_every_tracker_can_store_them(training) -> None:
    """A value that a tracker refuses would hold up all that follow."""
    values = {"large": 10**400, "negative": -(10**400), "whole": 10**20, "file": "x\udcff.png", "na\udcffme": 1}
    row = parse_row(json.dumps({"step": 1, "time": 1.0, "values": values}))
    assert row is not None
    infinite = float("inf")
    expected = {"large": infinite, "negative": -infinite, "whole": 1e20, "file": r"x\udcff.png", r"na\udcffme": 1}
    assert row.values == expected
    tracker = CsvTracker()
    tracker.open(training)
    tracker.log([row])
    tracker.close("finished")
    assert tracker.open(training) == dict.fromkeys(expected, 1)
    tracker.close("finished")


def test_reading_leaves_a_half_line_for_later(tmp_path) -> None:
    path = tmp_path / "values"
    assert read_rows(path) == ([], 0)
    _write(path, [1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    rows, offset = read_rows(path)
    assert [row.step for row in rows] == [1]
    path.write_bytes(whole)
    assert [row.step for row in read_rows(path, offset)[0]] == [2]
    _write(path, range(3, 500))
    assert last_steps(path) == {"loss": 499}
    rows, offset = read_rows(path, 0, most=100)
    assert 0 < len(rows) < 10


def test_a_tracker_that_fails_gets_each_value_once_in_the_end(training, tmp_path) -> None:
    path = tmp_path / "values"
    _write(path, range(1, 6))
    follower = _follower(training, path)
    MemoryTracker.failures = 3
    for now in (0.0, 0.1, 100.0, 200.0, 300.0, 1000.0):
        follower.turn(now)
    assert [step for step, _, _ in STORE[training.id]] == [1, 2, 3, 4, 5]
    _write(path, [6])
    follower.outcome = "finished"
    follower.turn(2000.0)
    assert [step for step, _, _ in STORE[training.id]] == [1, 2, 3, 4, 5, 6]
    assert STORE[f"{training.id} closed"][-1] == "finished"


def test_a_tracker_that_calls_exit_or_is_away_for_days_gets_the_values_in_the_end(
    training, tmp_path, monkeypatch
) -> None:
    """It ended the thread, and with it what other training jobs send to this tracker."""
    path = tmp_path / "values"
    _write(path, [1])
    follower = _follower(training, path)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryTracker, "open", lambda *_: sys.exit(3))
        for attempt in range(1100):
            follower.turn(1000.0 * attempt)
    follower.turn(2e6)
    assert [step for step, _, _ in STORE[training.id]] == [1]


def test_a_process_that_was_killed_is_followed_by_one_that_knows_what_there_is(training, tmp_path) -> None:
    path = tmp_path / "values"
    _write(path, [1, 2])
    _follower(training, path).turn(0.0)  # and never again; its lock is this process's
    (training.directory / "lock").unlink()
    _write(path, [2, 3])
    second = _follower(training, path)
    second.turn(0.0, last=True)
    assert [step for step, _, _ in STORE[training.id]] == [1, 2, 3]
    assert STORE[f"{training.id} closed"] == ["interrupted"]


def test_two_processes_never_write_at_a_time(training, tmp_path) -> None:
    path = tmp_path / "values"
    _write(path, [1])
    first, second = _follower(training, path), _follower(training, path)
    first.turn(0.0)
    second.turn(0.0)
    _write(path, [2])
    second.turn(1.0)
    first.turn(1.0, last=True)
    assert [step for step, _, _ in STORE[training.id]] == [1, 2]
    _write(path, [3])
    second.turn(2.0, last=True)
    assert [step for step, _, _ in STORE[training.id]] == [1, 2, 3]


# ── the driver ────────────────────────────────────────────────────────────────────────────────────


def _row(step: int, **values: float) -> str:
    return json.dumps({"step": step, "epoch": 0, "time": 1.0, "values": values})


def _writer(tmp_path, *specs: TrackerSpec, **options: Any) -> ValueWriter:
    (tmp_path / "log").mkdir(exist_ok=True)
    (tmp_path / "root").mkdir(exist_ok=True)
    writer = ValueWriter(tmp_path / "root", tmp_path / "log", **options)
    writer.track("t", specs)
    return writer


def _steps(path: Path) -> list[int]:
    return [row.step for row in read_rows(path)[0]]


def test_values_that_are_reported_again_are_kept_once_by_all_drivers(tmp_path) -> None:
    first = _writer(tmp_path)
    first.take("t", [_row(1, loss=1.0), _row(2, loss=0.5), "nonsense"])
    first.take("unknown", [_row(1, loss=1.0)])
    first._turn()
    first.take("t", [_row(2, loss=0.5), _row(2, accuracy=0.1), _row(3, loss=0.4)])
    first._turn()
    path = tmp_path / "root" / "t" / "values.jsonl"
    with path.open("a") as file:
        file.write('{"step": 4, "ti')  # killed while it wrote
    second = _writer(tmp_path)
    second.take("t", [_row(3, loss=0.4), _row(4, loss=0.3)])
    second._turn()
    assert _steps(path) == [1, 2, 2, 3, 4]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_training_that_starts_over_is_another_one_for_trackers(tmp_path) -> None:
    writer = _writer(tmp_path)
    writer.take("t", [_row(1, loss=1.0)])
    writer._turn()
    (tmp_path / "root" / "t" / "set-aside-1").mkdir()
    writer.note(record.CodeChanged("t", "starts over"))
    writer.take("t", [_row(1, loss=2.0)])
    writer._turn()
    ids = [(tmp_path / "root" / "t" / name / "id").read_text() for name in ("trackers", "trackers-1")]
    assert ids[0] != ids[1]
    assert _steps(tmp_path / "root" / "t" / "values-1.jsonl") == [1]


@pytest.mark.parametrize(
    ("entry", "outcome"),
    [
        (record.TrainingFinished("t", trained=True, step=1), "finished"),
        (record.TrainingFailed("t", "ValueError: no"), "failed"),
        (record.TrainingFailed("t", "TrainingInterrupted: the driver ended", final=False), "interrupted"),
        (record.TrainingCancelled("t"), "cancelled"),
    ],
)
def test_trackers_learn_how_a_training_ended_and_whether_it_goes_on(tmp_path, entry, outcome) -> None:
    writer = _writer(tmp_path, TrackerSpec("csv"))
    writer._start_process = lambda: None
    writer.take("t", [_row(1, loss=1.0)])
    writer.note(entry)
    writer._turn()
    last = json.loads((tmp_path / "log" / "trackers.jsonl").read_text().splitlines()[-1])
    assert last["outcome"] == outcome


def test_values_wait_while_the_directory_cannot_be_written(tmp_path, caplog) -> None:
    writer = _writer(tmp_path)
    (tmp_path / "root" / "t").write_text("in the way")
    writer.take("t", [_row(1, loss=1.0)])
    writer._turn()
    assert "cannot keep the values" in caplog.text
    (tmp_path / "root" / "t").unlink()
    writer._retry_at = 0.0
    writer._turn()
    assert _steps(tmp_path / "root" / "t" / "values.jsonl") == [1]


@pytest.mark.smoke
@pytest.mark.slow
def test_a_real_process_follows_the_driver_and_ends_with_it(tmp_path) -> None:
    writer = _writer(tmp_path, TrackerSpec("csv"))
    writer.start()
    writer.take("t", [_row(step, loss=1.0 / step) for step in range(1, 4)])
    path = tmp_path / "root" / "t" / "trackers" / "csv" / "t.csv"
    end = time.monotonic() + 60
    while not path.exists() or len(read_csv(path).get("loss", [])) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    process = writer._process
    assert process is not None
    process.kill()  # another one is started
    writer.take("t", [_row(4, loss=0.25)])
    writer.note(record.TrainingFinished("t", trained=True, step=4))
    while len(read_csv(path)["loss"]) < 4:
        assert time.monotonic() < end
        time.sleep(0.05)
    writer.close(60)
    assert [step for step, _ in read_csv(path)["loss"]] == [1, 2, 3, 4]
    assert not (tmp_path / "log" / "trackers.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("superseded", [True, False])
def test_the_trackers_of_a_driver_that_was_replaced_end_nothing(tmp_path, monkeypatch, superseded) -> None:
    """They marked the run that those of the other driver continue, as interrupted."""
    closed = tmp_path / "closed"
    module = f"noting_{superseded}".lower()
    (tmp_path / f"{module}.py").write_text(
        "from pathlib import Path\nclass Noting:\n"
        "    def open(self, training):\n        return {}\n"
        f"    def log(self, rows):\n        Path({str(tmp_path / 'logged')!r}).touch()\n"
        f"    def close(self, outcome):\n        Path({str(closed)!r}).write_text(outcome)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    may_write = [True]
    writer = _writer(tmp_path, *parse_trackers([f"{module}:Noting"]), allowed=lambda: may_write[0])
    writer.start()
    writer.take("t", [_row(1, loss=1.0)])
    end = time.monotonic() + 60
    while not (tmp_path / "logged").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process = writer._process
    assert process is not None
    may_write[0] = not superseded
    writer.take("t", [_row(2, loss=1.0)])
    writer.note(record.TrainingFailed("t", "ValueError: no"))
    writer.close(30)
    assert process.poll() is not None
    assert _steps(tmp_path / "root" / "t" / "values.jsonl") == ([1] if superseded else [1, 2])
    assert closed.exists() is not superseded


@pytest.mark.slow
def test_a_tracker_that_hangs_holds_up_neither_the_driver_nor_another_tracker(tmp_path, monkeypatch) -> None:
    (tmp_path / "hanging.py").write_text(
        "import time\nclass Hanging:\n    def open(self, training):\n        time.sleep(3600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    writer = _writer(tmp_path, *parse_trackers(["hanging:Hanging", "csv"]))
    writer.start()
    writer.take("t", [_row(1, loss=1.0)])
    path = tmp_path / "root" / "t" / "trackers" / "csv" / "t.csv"
    end = time.monotonic() + 60
    while not path.exists() or not read_csv(path):
        assert time.monotonic() < end
        time.sleep(0.05)
    process = writer._process
    begin = time.monotonic()
    writer.close(0.5)
    assert time.monotonic() - begin < 5
    assert process is not None
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_process_catches_up_by_itself_from_its_files(tmp_path) -> None:
    """As after a driver whose trackers could not be reached: its assignments are all that is needed."""
    lines = []
    for name in "abc":
        _write(tmp_path / name, [1, 2, 3])
        item = {"training": name, "id": name * 16, "directory": str(tmp_path), "rows": str(tmp_path / name)}
        lines += [{**item, "trackers": [{"kind": "csv", "options": {}}]}]
        lines += [{"training": name, "id": name * 16, "outcome": "failed"}]
    (tmp_path / "assignments").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-m", "freetrain_parsl.executor.values.process", tmp_path / "assignments"],
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )
    for name in "abc":
        assert read_csv(tmp_path / "csv" / f"{name}.csv") == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tensorbord", "there is no tracker 'tensorbord' (did you mean 'tensorboard'?)"),
        ({"csv": {"direktory": "x"}}, "no option 'direktory' (did you mean 'directory'?); it has directory"),
        ({"csv": {"directory": 3}}, "directory must be a string, got 3"),
        ({"wandb": {"mode": "sometimes"}}, "mode must be 'offline' or 'online', got 'sometimes'"),
        (["csv", {"csv": None}], "tracker 'csv' is named twice"),
        (7, "tracker is a name, or a mapping from names to options, got 7"),
        ({"csv": 7}, "tracker is a name, or a mapping"),
        ("nowhere:Class", "tracker 'nowhere:Class' cannot be created: ModuleNotFoundError: No module named"),
        (
            {"tests.executor.values.test_process:MemoryTracker": {"x": 1}},
            "cannot be created: TypeError: MemoryTracker() takes no arguments",
        ),
        ("__main__:Class", "another process uses it, so its class must be in a module"),
    ],
)
def test_settings_that_cannot_work_are_refused(value, message) -> None:
    with pytest.raises(InvalidSettings) as refused:
        parse_trackers(value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_tracker_of_ones_own_is_described_with_the_directory_of_its_import(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("class Here:\n    pass\n")
    (tmp_path / "own_package" / "inner.py").write_text("class There:\n    pass\n")
    specs = parse_trackers(["own_package:Here", "own_package.inner:There", "csv"], tmp_path)
    assert [spec.as_json().get("import_path") for spec in specs] == [str(tmp_path), str(tmp_path), None]


def test_an_error_in_the_module_of_a_tracker_is_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "faulty_tracker.py").write_text("class Faulty(:\n")
    (tmp_path / "leaving_tracker.py").write_text("import sys\nsys.exit(3)\n")
    for reference, words in (("faulty_tracker:Faulty", "SyntaxError: invalid syntax"), ("leaving_tracker:X", "3")):
        with pytest.raises(InvalidSettings, match=f"tracker '{reference}' cannot be created: .*{words}") as refused:
            parse_trackers(reference, tmp_path)
        assert "\n" not in str(refused.value)


def test_a_tracker_without_its_package_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InvalidSettings, match=r"pip install 'freetrain-parsl\[mlflow\]'"):
        parse_trackers("mlflow")


def test_names_mappings_and_lists_are_accepted() -> None:
    assert parse_trackers(None) == ()
    assert parse_trackers("csv") == (TrackerSpec("csv"),)
    assert parse_trackers(["csv", {"wandb": {"project": "p"}}]) == (
        TrackerSpec("csv"),
        TrackerSpec("wandb", {"project": "p"}),
    )


def test_assignments_that_do_not_exist_are_named(tmp_path) -> None:
    command = [sys.executable, "-m", "freetrain_parsl.executor.values.process", str(tmp_path / "none.jsonl")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "none.jsonl does not exist: nothing was sent" in done.stderr


@pytest.mark.parametrize("option", [date(2026, 1, 1), Path("runs"), {"a": {1, 2}}])
def test_options_of_a_tracker_are_json(option: object) -> None:
    """They are passed to another process; before, the values of all training jobs were lost."""
    with pytest.raises(InvalidSettings, match=r"tracker 'builtins:dict': option 'since' is of type \w+; options are"):
        parse_trackers({"builtins:dict": {"since": option}})
    assert parse_trackers({"builtins:dict": {"since": ["2026", 1, None]}})


def _damage_id(place: Path) -> None:
    (place / "trackers").mkdir(parents=True)
    (place / "trackers" / "id").write_bytes(b"\xff")


@pytest.mark.parametrize("damage", [lambda place: place.write_text("no directory"), _damage_id])
def test_values_that_cannot_be_kept_do_not_hold_up_those_of_other_trainings(tmp_path: Path, damage: Any) -> None:
    """The thread ended, or tried the first training job's values again for ever."""
    (tmp_path / "logs").mkdir()
    root = tmp_path / "checkpoints"
    root.mkdir()
    damage(root / directory_name("a"))
    writer = ValueWriter(root, tmp_path / "logs")
    writer.start()
    for name in ("a", "b"):
        writer.track(name, ())
        writer.take(name, [_row(1, loss=0.5)])
    writer.close()
    rows, _ = read_rows(root / directory_name("b") / "values.jsonl")
    assert [row.step for row in rows] == [1]
