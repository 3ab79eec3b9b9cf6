"""Files that several checkpoints have in common are written once, and removed with the last of them."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import DamagedCheckpoint, ForeignCheckpoint
from freetrain_parsl.storage.posix import CheckpointDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.storage.entry import Entry, Sink

BASE = "frozen.pt"
CONTENT = b"a frozen base"


class Writer:
    """Writes the common file, and counts how often."""

    def __init__(self) -> None:
        self.writes = 0

    def __call__(self, sink: Sink) -> None:
        self.writes += 1
        sink.write(CONTENT)


def opened(root: Path, name: str) -> CheckpointDirectory:
    directory = CheckpointDirectory(root, name)
    directory.open()
    return directory


def save(directory: CheckpointDirectory, step: int, write: Writer, key: str = "k1") -> Entry:
    draft = directory.begin(step)
    directory.write_common(draft, BASE, key, write)
    directory.write(draft, "state.pt", lambda sink: sink.write(b"own"))
    entry, _ = directory.complete(draft, {})
    directory.prune(entry, keep=2)
    return entry


def test_it_is_written_once_for_all_training_jobs(tmp_path: Path) -> None:
    write = Writer()
    entries = [save(opened(tmp_path, name), step, write) for name in ("a", "b", "c") for step in (1, 2)]
    assert write.writes == 1
    assert len({(entry.path / BASE).stat().st_ino for entry in entries}) == 1
    for entry in entries:
        _, manifest = entry.verify()
        assert manifest["bytes"] == len(CONTENT) + 3


def test_another_content_is_another_file(tmp_path: Path) -> None:
    write = Writer()
    one, other = save(opened(tmp_path, "a"), 1, write), save(opened(tmp_path, "b"), 1, write, key="k2")
    assert write.writes == 2
    assert (one.path / BASE).stat().st_ino != (other.path / BASE).stat().st_ino


def test_it_is_removed_with_the_last_checkpoint_that_has_it(tmp_path: Path) -> None:
    write = Writer()
    first, second = opened(tmp_path, "a"), opened(tmp_path, "b")
    entry = save(first, 1, write)
    save(second, 1, write)
    first.remove(entry)
    save(second, 2, write, key="k2")
    assert {path.name.partition("-")[0] for path in (tmp_path / ".common").iterdir()} == {"k1", "k2"}
    last = save(second, 3, write, key="k2")
    assert {path.name.partition("-")[0] for path in (tmp_path / ".common").iterdir()} == {"k2"}
    for entry in (second.entry(2), last):
        second.remove(entry)
    assert not list((tmp_path / ".common").iterdir())


def test_a_damaged_one_is_written_anew_and_found_when_loaded(tmp_path: Path) -> None:
    write = Writer()
    damaged = save(opened(tmp_path, "a"), 1, write)
    with (damaged.path / BASE).open("r+b") as file:
        file.write(b"!")
    intact = save(opened(tmp_path, "b"), 1, write)
    assert write.writes == 2
    intact.verify()
    with pytest.raises(DamagedCheckpoint, match=r"frozen\.pt does not match its SHA-256"):
        damaged.verify()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_without_links_each_checkpoint_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    write = Writer()
    for name in ("a", "b"):
        save(opened(tmp_path, name), 1, write).verify()
    assert write.writes == 2


def test_one_that_is_removed_at_this_moment_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Writer()
    save(opened(tmp_path, "a"), 1, write)
    link = os.link

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        source.unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    save(opened(tmp_path, "b"), 1, write).verify()
    assert write.writes == 2


def test_a_folder_that_others_could_have_filled_is_not_used(tmp_path: Path) -> None:
    write = Writer()
    save(opened(tmp_path, "a"), 1, write)
    (tmp_path / ".common").chmod(0o777)
    with pytest.raises(ForeignCheckpoint):
        save(opened(tmp_path, "b"), 1, write)
