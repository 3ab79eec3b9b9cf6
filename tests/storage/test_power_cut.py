"""What has to survive a power cut does, if only synchronized data remains."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.campaign.owned_trainings import Assignment
from freetrain_parsl.campaign.store import DATABASE, RunStore
from freetrain_parsl.extensions.globus.sites.state import CoordinatorFile
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverDirectory, MoverState
from freetrain_parsl.storage.posix import CheckpointDirectory
from tests.storage.power_cut import PowerCut

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PowerCut]:
    (tmp_path / "disk").mkdir()
    disk = PowerCut(tmp_path / "disk", monkeypatch)
    yield disk
    disk.close()


def test_what_is_not_synchronized_is_lost(disk: PowerCut, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    for name in ("none", "file", "both"):
        with (place / name).open("w") as file:
            file.write("text")
            file.flush()
            if name != "none":
                os.fsync(file.fileno())
        if name == "both":
            descriptor = os.open(place, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    (place / "late").write_text("text")
    left = disk.after(tmp_path / "left")
    assert {path.name: path.read_text() for path in left.iterdir()} == {"none": "", "file": "text", "both": "text"}


def test_a_published_checkpoint_survives_from_the_first_one_on(
    disk: PowerCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each synchronization while checkpoints are written and removed: the last published one is there, and whole."""
    root = tmp_path / "disk" / "new" / "checkpoints"
    published = 0
    number = itertools.count()
    sync = os.fsync

    def checked(descriptor: int) -> None:
        sync(descriptor)
        left = CheckpointDirectory(disk.after(tmp_path / f"left{next(number)}") / "new" / "checkpoints", "net")
        entries = left.entries()
        assert not published or entries
        if entries:
            path, manifest = entries[0].verify()
            assert manifest["step"] >= published
            assert path.read_bytes() == b"%d" % manifest["step"]

    monkeypatch.setattr(os, "fsync", checked)
    for generation in (1, 2):
        directory = CheckpointDirectory(root, "net")
        directory.open(generation)
        for _ in range(3):
            step = published + 10
            entry, _ = directory.publish(step, lambda sink, step=step: sink.write(b"%d" % step), {})
            published = step
            directory.prune(entry, 1)
        directory.close()
    assert next(number) > 20


def test_a_new_run_survives_before_anything_is_submitted(disk: PowerCut, tmp_path: Path) -> None:
    run = tmp_path / "disk" / "run"
    run.mkdir()
    RunStore.create(run, {"name": "c"}, ["a"])  # SQLite itself makes the content durable
    assert [path.name for path in (disk.after(tmp_path / "left") / "run").iterdir()] == [DATABASE]


def test_small_files_have_their_last_content(disk: PowerCut, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    for order in (1, 2):
        Assignment(order, ("a",)).write(place / "assignment.json")
        CoordinatorFile({"order": order}, ()).write(place)
        MoverState(lines=[f"{order}"]).write(place)
        MoverDirectory(place / "checkpoints").set_generation("a", order)
    left = disk.after(tmp_path / "left")
    assert Assignment.read(left / "assignment.json").order == 2
    found = CoordinatorFile.read(left)
    assert found is not None
    assert found.document == {"order": 2}
    assert MoverState.read(left).lines == ("2",)
    assert MoverDirectory(left / "checkpoints").generation("a") == 2
