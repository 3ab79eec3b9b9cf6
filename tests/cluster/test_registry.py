"""Registry of running clusters."""

from __future__ import annotations

import json
import os

import pytest

from freetrain_parsl.cluster import registry
from freetrain_parsl.cluster.processes import process_info
from freetrain_parsl.errors import ClusterGone, InvalidSettings


def test_this_process_is_found_while_it_is_registered(tmp_path):
    registry.register("mine", tmp_path)
    assert registry.find() == registry.find("mine") == registry.find(tmp_path)
    assert registry.find().pid == os.getpid()
    registry.unregister("mine")
    with pytest.raises(ClusterGone, match="no embedded cluster is running"):
        registry.find()


def test_entries_of_dead_processes_and_of_later_ones_of_the_same_id_are_removed(runtime):
    directory = registry.runtime_directory()
    own = process_info(os.getpid())
    for name, pid, started in (("dead", 2**22 + 1, 5), ("reused", own.pid, own.started - 1)):
        (directory / name).mkdir()
        entry = {"name": name, "directory": "/d", "pid": pid, "started": started}
        (directory / name / "cluster.json").write_text(json.dumps(entry))
    (directory / "odd").mkdir()
    (directory / "odd" / "cluster.json").write_text("{}")
    assert registry.running_clusters() == []
    assert list(directory.iterdir()) == []


def test_an_entry_that_is_being_made_is_left_alone(runtime):
    (registry.runtime_directory() / ".new").mkdir()
    assert registry.running_clusters() == []
    assert [entry.name for entry in registry.runtime_directory().iterdir()] == [".new"]


def test_a_directory_that_others_may_enter_is_refused(runtime):
    registry.runtime_directory().chmod(0o755)
    with pytest.raises(InvalidSettings, match="not a private directory owned by you"):
        registry.runtime_directory()


def test_a_link_in_place_of_the_directory_is_refused(runtime, tmp_path):
    (runtime / "freetrain").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(InvalidSettings, match="not a private directory owned by you"):
        registry.runtime_directory()


def test_without_a_runtime_directory_of_the_system_the_one_for_temporary_files_is_used(monkeypatch, runtime):
    monkeypatch.setattr("tempfile.tempdir", str(runtime))
    directory = registry.runtime_directory({})
    assert directory == runtime / f"freetrain-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700


def test_one_directory_has_one_cluster(tmp_path):
    registry.register("mine", tmp_path)
    with pytest.raises(InvalidSettings, match=r"'mine' of .* is already running"):
        registry.register("other", tmp_path)


@pytest.mark.parametrize("seconds", [0.5, 100.0])
def test_a_cluster_whose_parent_was_killed_is_waited_for_some_time(tmp_path, seconds):
    """A driver that was killed, and resumed at once, found its own cluster, which was still ending."""
    now, lines = 0.0, []

    def sleep(period):
        nonlocal now
        now += period
        if now > seconds:
            registry.unregister("mine")

    registry.register("mine", tmp_path, process_info(os.getpid())._replace(started=1))
    registry.wait_for_ending(tmp_path, lines.append, clock=lambda: now, sleep=sleep)
    assert min(seconds, 60.0) < now < min(seconds, 60.0) + 1.0
    assert lines == [f"waiting for the cluster of a driver that was killed to end (process {os.getpid()})"]
    registry.unregister("mine")


@pytest.mark.parametrize("parent", [None, process_info(os.getpid())], ids=["without a parent", "its parent lives"])
def test_a_cluster_that_does_not_end_is_not_waited_for(tmp_path, parent):
    registry.register("mine", tmp_path, parent)
    registry.wait_for_ending(tmp_path, pytest.fail, sleep=pytest.fail)
    registry.unregister("mine")
