"""What leaves a checkpoint directory stays until it is copied; what arrives is verified before it is used."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import CheckpointError, DamagedCheckpoint
from freetrain_parsl.extensions.globus.storage.carrier import Parcel
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverDirectory, MoverState
from freetrain_parsl.storage.posix import CheckpointDirectory

if TYPE_CHECKING:
    from pathlib import Path


def save(root: Path, step: int) -> CheckpointDirectory:
    directory = CheckpointDirectory(root, "net")
    directory.open()
    directory.publish(step, lambda sink: sink.write(b"state"), {"format": 3})
    directory.close()
    return directory


def arrive(root: Path, parcel: Parcel, source: CheckpointDirectory) -> Path:
    """Copy a checkpoint to where it would arrive, readable by all as after a copy with an ordinary umask."""
    files = MoverDirectory(root)
    files.expect(parcel)
    shutil.copytree(source.entries()[0].path, files.arriving(parcel))
    files.arriving(parcel).chmod(0o755)
    return files.arriving(parcel)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "ft"
    path.mkdir(mode=0o700)
    return path


def test_a_packed_checkpoint_outlives_its_removal_and_takes_no_space_until_then(root: Path) -> None:
    entry = save(root, 10).entries()[0]
    files = MoverDirectory(root)
    parcel = files.pack("net", 3, entry)
    packed = files.outgoing(parcel)
    assert (packed / "state.pt").stat().st_ino == (entry.path / "state.pt").stat().st_ino
    assert not (packed / "manifest.json").exists()
    shutil.rmtree(entry.path)
    assert (packed / "state.pt").read_bytes() == b"state"
    assert packed.with_name("step-0000000010.json").is_file()
    files.keep_only([parcel])
    assert packed.is_dir()
    files.keep_only([])
    assert not packed.exists()


def test_an_arrived_checkpoint_is_private_and_those_here_are_set_aside(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    there = save(tmp_path / "elsewhere", 20)
    here = save(root, 90)
    arrive(root, Parcel("net", 2, "step-0000000020"), there)
    MoverDirectory(root).accept(Parcel("net", 2, "step-0000000020"))
    assert [entry.step for entry in here.entries()] == [20]
    assert here.entries()[0].path.stat().st_mode & 0o777 == 0o700
    assert (here.path / "latest").read_text() == "step-0000000020\n"
    assert (here.path / "set-aside-1" / "step-0000000090").is_dir()


@pytest.mark.parametrize("harm", ["truncate", "flip", "link", "missing", "manifest", "extra", "fifo", "deep", "top"])
def test_an_arrived_checkpoint_that_is_not_the_one_that_was_sent_is_not_used(
    root: Path, tmp_path: Path, harm: str
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    parcel = Parcel("net", 2, "step-0000000020")
    path = arrive(root, parcel, save(tmp_path / "elsewhere", 20))
    state = path / "state.pt"
    if harm == "truncate":
        state.write_bytes(b"sta")
    elif harm == "flip":
        state.write_bytes(b"statE")
    elif harm == "link":
        state.unlink()
        state.symlink_to(tmp_path / "elsewhere" / "net" / "step-0000000020" / "state.pt")
    elif harm == "missing":
        shutil.rmtree(path)
    elif harm == "fifo":
        os.mkfifo(path / "more")  # opening it blocks
    elif harm == "deep":
        path.joinpath(*"d" * 30).mkdir(parents=True)
    elif harm == "top":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif harm == "manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "shards").mkdir()
        (path / "shards" / "more").write_bytes(b"x")
    with pytest.raises(CheckpointError):
        MoverDirectory(root).accept(parcel)
    assert CheckpointDirectory(root, "net").entries() == []


def test_the_generation_of_the_checkpoints_here_is_kept(root: Path) -> None:
    files = MoverDirectory(root)
    assert files.generation("net") == 0
    files.set_generation("net", 7)
    assert MoverDirectory(root).generation("net") == 7
    (root / ".freetrain-mover" / "generations" / "net").write_text("nonsense")
    assert files.generation("net") == 0


def test_a_checkpoint_that_is_removed_while_it_is_packed_is_told(root: Path) -> None:
    entry = save(root, 10).entries()[0]
    (entry.path / "state.pt").unlink()
    with pytest.raises(DamagedCheckpoint):
        MoverDirectory(root).pack("net", 1, entry)


_BAD_JOBS = [
    json.dumps(
        {"version": 1, "lines": [], "jobs": [{"kind": "data", "submission": "", "task": "", "parcels": [parcel]}]}
    )
    for parcel in (
        {"training": 5, "generation": 1, "name": "step-0000000001"},
        {"training": "net", "generation": "1", "name": "step-0000000001"},
        {"training": "net", "generation": 1, "name": "../../x"},
    )
]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', '{"version": 2, "jobs": [], "lines": []}', "null", *_BAD_JOBS]
)
def test_a_damaged_state_of_the_mover_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "globus.json").write_text(text)
    with pytest.raises(ValueError, match=r"globus\.json") as caught:
        MoverState.read(tmp_path)
    assert "\n" not in str(caught.value)
