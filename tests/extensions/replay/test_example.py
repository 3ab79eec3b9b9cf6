"""The example inputs are valid and consistent with each other."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.logs.example import write_example
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.trainers import trainer_set


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return {file.name: file for file in write_example(tmp_path_factory.mktemp("example") / "new")}


def test_the_logs_tell_of_the_same_holes(files):
    logs = [open_log(files[name], nodes=32) for name in ("idle.csv", "jobs.swf", "sacct.txt")]
    holes = [
        {
            (hole.node, hole.start - log.start, hole.end - log.start)
            for change in log.changes()
            for hole in change.opened
        }
        for log in logs
    ]
    assert holes[0] == holes[1] == holes[2]
    assert len(holes[0]) > 100
    assert 1 < logs[1].mean_idle() < 16
    assert [log.has_forecasts for log in logs] == [False, True, True]
    assert [log.skipped + log.clipped for log in logs] == [0, 0, 0]


def test_the_lists_of_trainers_are_the_same(files):
    assert trainer_set(str(files["trainers.yaml"])).trainers == trainer_set(str(files["trainers.csv"])).trainers


def test_the_example_is_always_the_same_and_overwrites_nothing(files, tmp_path):
    again = {file.name: file for file in write_example(tmp_path)}
    assert {name: file.read_text() for name, file in files.items()} == {n: f.read_text() for n, f in again.items()}
    with pytest.raises(InvalidInput, match=r"jobs\.swf.* already exists and is not overwritten"):
        write_example(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be written"):
        write_example(tmp_path / "jobs.swf" / "inside")


def test_the_example_is_not_written_through_links(tmp_path):
    """Somebody else may have put them there, in a shared directory."""
    (tmp_path / "jobs.swf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="File exists"):
        write_example(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
