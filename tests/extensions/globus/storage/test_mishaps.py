"""Random mishaps, kills and takeovers: never a wrong or partial checkpoint, at most one owner."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import CollectionUnavailable
from freetrain_parsl.extensions.globus.storage.collections import CollectionPath, CopyItem, GlobusSettings, TaskState
from freetrain_parsl.extensions.globus.storage.mover import Mover
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverPace
from freetrain_parsl.storage.posix import CheckpointDirectory

A, B, HOME = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "abc")
_PACE = MoverPace(turn=0.0, scan=0.0, copies=0.0, request=0.0, poll_least=0.0, poll_most=0.0, retry=1.0, longest=5.0)


@dataclass
class Disks:
    """Directories that play collections; tasks are carried out, or go wrong, when their state is asked for."""

    top: Path
    tasks: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    submissions: dict[str, str] = field(default_factory=dict)

    def path(self, collection: str, path: str) -> Path:
        return self.top.joinpath(collection[0], *PurePosixPath(path).parts[1:])


class MishapCollections:
    """What `Collections` does, with mishaps drawn by the test."""

    def __init__(self, disks: Disks, draw: Any) -> None:
        self._disks = disks
        self._draw = draw

    def _mishap(self, *choices: str) -> str:
        mishap = self._draw(st.sampled_from(["none", "none", "none", "none", *choices]))
        if mishap == "down":
            raise CollectionUnavailable("down")
        return str(mishap)

    def names(self, collection: str, path: str, *, directories: bool = False) -> list[str] | None:
        self._mishap("down")
        directory = self._disks.path(collection, path)
        if not directory.is_dir():
            return None
        return [entry.name for entry in directory.iterdir() if entry.is_dir() or not directories]

    def sizes(self, collection: str, path: str) -> dict[str, int | None] | None:
        self._mishap("down")
        directory = self._disks.path(collection, path)
        return {entry.name: entry.stat().st_size for entry in directory.iterdir()} if directory.is_dir() else None

    def make_directory(self, collection: str, path: str) -> bool:
        mishap = self._mishap("down", "lost")
        try:
            self._disks.path(collection, path).mkdir(parents=True)
        except FileExistsError:
            return False
        if mishap == "lost":
            raise CollectionUnavailable("the answer was lost")
        return True

    def rename(self, collection: str, path: str, to: str) -> bool:
        mishap = self._mishap("down", "lost")
        old, new = self._disks.path(collection, path), self._disks.path(collection, to)
        if not old.exists() or new.exists():
            return False
        old.rename(new)
        if mishap == "lost":
            raise CollectionUnavailable("the answer was lost")
        return True

    def submission_id(self) -> str:
        return f"s{len(self._disks.submissions)}-{self._draw(st.integers(0, 10**9))}"

    def _submit(self, submission: str, *work: Any) -> str:
        mishap = self._mishap("down", "lost")
        task = self._disks.submissions.setdefault(submission, f"t{len(self._disks.submissions)}")
        self._disks.tasks.setdefault(task, work)
        if mishap == "lost":
            raise CollectionUnavailable("the answer was lost")
        return task

    def submit_transfer(self, submission: str, source: str, destination: str, items: list[CopyItem]) -> str:
        return self._submit(submission, "copy", source, destination, items)

    def submit_delete(self, submission: str, collection: str, paths: list[str]) -> str:
        return self._submit(submission, "delete", collection, paths)

    def cancel(self, task: str) -> None:
        self._disks.tasks.pop(task, None)

    def task(self, task: str) -> TaskState:
        mishap = self._mishap("down", "active", "fail", "corrupt")
        if task not in self._disks.tasks:
            return TaskState("FAILED", "unknown")
        if mishap == "active":
            return TaskState("ACTIVE")
        kind, *rest = self._disks.tasks.pop(task)
        if kind == "delete":
            collection, paths = rest
            for path in paths:
                _remove(self._disks.path(collection, path))
            return TaskState("SUCCEEDED")
        source, destination, items = rest
        for item in items:
            here, there = self._disks.path(source, item.source), self._disks.path(destination, item.destination)
            files = [one for one in here.rglob("*") if one.is_file()] if item.recursive else [here]
            for file in files:
                if not file.exists():
                    return TaskState("FAILED", "FILE_NOT_FOUND")
                target = there / file.relative_to(here) if item.recursive else there
                target.parent.mkdir(parents=True, exist_ok=True)
                data = file.read_bytes()
                if mishap == "fail":
                    target.write_bytes(data[: len(data) // 2])
                    return TaskState("FAILED", "FILE_SIZE_CHANGED")
                target.write_bytes(data[:-1] + b"!" if mishap == "corrupt" else data)
        return TaskState("SUCCEEDED")


def _remove(path: Path) -> None:
    for child in sorted(path.rglob("*"), reverse=True):
        child.rmdir() if child.is_dir() else child.unlink()
    if path.exists():
        path.rmdir()


@dataclass
class Site:
    """A site whose driver trains, one step at a time, from the checkpoint that it has."""

    name: str
    disks: Disks
    draw: Any
    clock: Any
    mover: Mover = field(init=False)
    steps: list[str] | None = None  # of the course of training that it runs

    def __post_init__(self) -> None:
        self.root = self.disks.top / self.name / "ft"
        self.run = self.disks.top / f"run-{self.name}"
        for path in (self.root, self.run):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        self.start()

    def start(self) -> None:
        place = CollectionPath(A if self.name == "a" else B, "/ft")
        collections: Any = MishapCollections(self.disks, self.draw)
        self.mover = Mover(
            GlobusSettings(place, CollectionPath(HOME, "/ft")), self.root, self.run, f"{self.name}1", collections,
            clock=self.clock, pace=_PACE,
        )  # fmt: skip
        self.mover.want(["net"])
        self.steps = None

    def train(self, written: set[str]) -> None:
        """Begin or continue, as a driver does; every state is the list of who has trained each step."""
        if self.steps is not None and self.mover.lost("net"):
            self.mover.stopped("net")
            self.steps = None
        if not self.mover.is_ready("net"):
            return
        directory = CheckpointDirectory(self.root, "net")
        if self.steps is None:
            entries = directory.entries()
            self.steps = []
            if entries:
                path, _ = entries[0].verify()  # wrong or partial: this raises
                text = path.read_text()
                assert text in written, "no driver has written this state"
                self.steps = json.loads(text)
                assert len(self.steps) == entries[0].step
            return
        self.steps.append(self.name)
        text = json.dumps(self.steps)
        written.add(text)
        directory.open()
        directory.publish(len(self.steps), lambda sink: sink.write(text.encode()), {"format": 3})
        directory.close()


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data())
def test_nothing_wrong_is_resumed_from_whatever_goes_wrong(tmp_path_factory: Any, data: st.DataObject) -> None:
    disks = Disks(tmp_path_factory.mktemp("disks"))
    now = [1000.0]
    sites = [Site(name, disks, data.draw, lambda: now[0]) for name in "ab"]
    written: set[str] = set()
    (disks.top / "c" / "ft").mkdir(parents=True)
    for _ in range(data.draw(st.integers(5, 40))):
        now[0] += data.draw(st.sampled_from([1.0, 10.0, 60.0, 400.0]))
        for site in sites:
            if data.draw(st.integers(0, 15)) == 0:
                site.start()  # killed, and started again in the same run directory
            if data.draw(st.integers(0, 5)):
                site.mover.turn()
            site.train(written)
        assert sum(site.mover._ownership.generation("net", now[0]) is not None for site in sites) <= 1
