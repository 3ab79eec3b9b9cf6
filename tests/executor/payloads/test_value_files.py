"""Large results are in files: the control channel carries what identifies them, and nothing of them is left."""

from __future__ import annotations

import os
import queue
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parsl
import pytest
from parsl import python_app
from parsl.serialize import serialize

from freetrain_parsl import training_app
from freetrain_parsl.errors import CheckpointError, ForeignCheckpoint, StorageUnavailable
from freetrain_parsl.executor.jobs.port import TO_DRIVER
from freetrain_parsl.executor.payloads import value_files
from freetrain_parsl.executor.payloads.payloads import error_in, pack_task, settle_with_value
from freetrain_parsl.executor.payloads.value_files import LARGEST_MESSAGE, ValueFiles
from freetrain_parsl.executor.slot import slot as slot_module
from freetrain_parsl.executor.slot.place import Pulse
from freetrain_parsl.executor.slot.slot import SlotSettings, _Slot
from freetrain_parsl.executor.slot.training_run import TrainingRun
from freetrain_parsl.extensions.fusion.messages import MemberEnded, StartArray
from freetrain_parsl.extensions.fusion.slot.array_run import ArrayRun
from freetrain_parsl.protocol.codec import Envelope, ProtocolError, decode, encode
from freetrain_parsl.protocol.messages import (
    Place,
    RunEnded,
    StartTask,
    StoredValue,
    TaskEnded,
)
from freetrain_parsl.protocol.reports import Progress, RunFinished, StorageFailed
from freetrain_parsl.storage.root import prepare_root
from freetrain_parsl.training import fragment
from freetrain_parsl.training.mailbox import Finished
from freetrain_parsl.training.node_memory import NodeMemory
from tests.executor.slot.start_run import start_run
from tests.small_disk import fill, small_disk

LARGE = os.urandom(LARGEST_MESSAGE + 1)


@pytest.fixture
def files(tmp_path: Path) -> ValueFiles:
    identity = prepare_root(tmp_path / "root")
    return ValueFiles(tmp_path / "root", identity, "site.run", "1a")


def in_root(tmp_path: Path) -> list[str]:
    """Return the files of results that there are."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob(".results/*/*"))


def passed(message: Any) -> Any:
    """Return a message as it arrives, which is small."""
    frames = encode(Envelope(message))
    assert sum(map(len, frames)) < 2000
    return decode(frames, TO_DRIVER).message


def settled(sent: bytes | StoredValue, files: ValueFiles) -> Any:
    future: Future[Any] = Future()
    settle_with_value(future, sent, files)
    return future.result(0)


def test_a_value_is_read_once_from_a_file_of_this_user_only(files: ValueFiles, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        stored = files.store(serialize(LARGE))
    finally:
        os.umask(before)
    (path,) = tmp_path.rglob(".results/*/*")
    assert [part.stat().st_mode & 0o777 for part in (path, path.parent, path.parent.parent)] == [0o600, 0o700, 0o700]
    assert settled(stored, files) == LARGE
    assert in_root(tmp_path) == []
    with pytest.raises(StorageUnavailable, match=r"cannot read the result in /.*: No such file"):
        settled(stored, files)


@pytest.mark.parametrize("value", [print, b"short", {"a": [1.5, None]}], ids=["function", "short", "nested"])
def test_the_object_is_the_same_whatever_it_is(files: ValueFiles, value: object) -> None:
    assert settled(files.store(serialize(value)), files) == value


def test_nothing_is_deserialized_but_what_was_announced(
    files: ValueFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever can change the file runs code in the driver."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    monkeypatch.setattr(value_files, "_LATE", ())
    bomb = serialize(Bomb())
    value = bytes(len(bomb))
    for change in ("bytes", "size", "link", "pipe"):
        stored = files.store(value)
        (path,) = tmp_path.rglob(".results/*/*")
        if change in ("bytes", "size"):
            path.write_bytes(bomb + b"." * (change == "size"))
        else:
            path.unlink()
            other = tmp_path / change
            other.write_bytes(value)
            path.symlink_to(other) if change == "link" else os.mkfifo(path)
        with pytest.raises(CheckpointError, match=r"result in /.*\.results/site\.run\.1a/"):
            settled(stored, files)
        assert in_root(tmp_path) == []
    assert not (tmp_path / "exploded").exists()


def test_a_directory_that_others_can_change_is_refused(files: ValueFiles, tmp_path: Path) -> None:
    (tmp_path / "root" / ".results").mkdir()
    (tmp_path / "root" / ".results").chmod(0o777)
    with pytest.raises(ForeignCheckpoint, match="can be changed by other users"):
        files.store(LARGE)


def test_a_root_that_is_another_directory_here_is_named(tmp_path: Path) -> None:
    prepare_root(tmp_path / "root")
    with pytest.raises(StorageUnavailable, match="is a different one on host"):
        ValueFiles(tmp_path / "root", "another", "site.run", "1a").store(LARGE)


@pytest.mark.parametrize("name", ["../../t/manifest.json", "/etc/passwd", ".", "", "A" * 32, "a" * 33, "a" * 32 + "\n"])
def test_a_name_outside_the_directory_is_no_message(name: str) -> None:
    frames = encode(Envelope(TaskEnded(1, failed=False, payload=b"", stored=StoredValue(name, 1, "a" * 64))))
    with pytest.raises(ProtocolError, match="'name'"):
        decode(frames, TO_DRIVER)


def test_the_value_of_a_future_that_is_done_is_removed(files: ValueFiles, tmp_path: Path) -> None:
    stored = files.store(LARGE)
    future: Future[Any] = Future()
    future.set_result(1)
    settle_with_value(future, stored, files)
    assert in_root(tmp_path) == []


def test_the_next_driver_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    root = tmp_path / "root"
    identity = prepare_root(root)
    for run, driver in (("site.run", "1"), ("site.other", "1"), ("site.run.b", "1"), ("site.old", "1")):
        ValueFiles(root, identity, run, driver).store(b"value")
    (old,) = (root / ".results" / "site.old.1").iterdir()
    os.utime(old, (1.0, 1.0))
    mine = ValueFiles(root, identity, "site.run", "2")
    mine.clear()
    left = [path.name for path in (root / ".results").iterdir() if list(path.iterdir())]
    assert sorted(left) == ["site.other.1", "site.run.b.1"], "of drivers that may live"
    os.utime(old.parent, (1.0, 1.0))
    mine.clear()
    assert not old.parent.exists()
    mine.store(b"value")
    mine.close()
    assert not (root / ".results" / "site.run.2").exists()


def test_a_directory_that_is_removed_meanwhile_is_made_again(
    files: ValueFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = files._prepare

    def and_removed() -> None:
        monkeypatch.setattr(files, "_prepare", prepare)
        prepare()
        files._directory.rmdir()

    monkeypatch.setattr(files, "_prepare", and_removed)
    assert settled(files.store(serialize(LARGE)), files) == LARGE


def test_a_full_disk_is_named_and_nothing_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        files = ValueFiles(disk, prepare_root(disk), "site.run", "1a")
        with pytest.raises(StorageUnavailable, match=r"cannot write a result of 4,194,305 bytes in .*: No space left"):
            files.store(LARGE)
        assert in_root(tmp_path) == []
        fill(disk / "filler")
        with pytest.raises(StorageUnavailable, match="No space left"):
            files.store(LARGE)


# The slot's side.


def run_of(files: ValueFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object) -> RunEnded:
    monkeypatch.setattr(fragment, "run_fragment", lambda *_, **__: Finished(value, Progress(step=5)))
    command = start_run(tmp_path, run=3, place=Place(7, 0, 1))
    ended: RunEnded = passed(TrainingRun(command, interface=None, send=lambda _: None, files=files).perform())
    return ended


def test_the_message_of_a_trainings_end_has_only_what_identifies_the_file(
    files: ValueFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_of(files, tmp_path, monkeypatch, LARGE)
    assert ended.end == RunFinished(Progress(step=5))
    assert ended.stored is not None
    assert settled(ended.stored, files) == LARGE
    assert run_of(files, tmp_path, monkeypatch, b"small").stored is None


def test_a_training_waits_until_its_result_can_be_written(
    files: ValueFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root" / ".freetrain-root").unlink()
    ended = run_of(files, tmp_path, monkeypatch, LARGE)
    assert isinstance(ended.end, StorageFailed)
    assert "is missing; is it mounted here?" in ended.end.condition


def test_so_has_that_of_a_members_end(files: ValueFiles, tmp_path: Path) -> None:
    sent: list[Any] = []
    run = ArrayRun(StartArray("cohort-1", 7, ("0", "1")), send=sent.append, files=files)
    run._ended("0", Finished(LARGE, Progress(step=5)))
    (tmp_path / "root" / ".freetrain-root").unlink()
    run._ended("1", Finished(LARGE, Progress(step=5)))
    first, second = map(passed, sent)
    assert isinstance(first, MemberEnded)
    assert settled(first.stored or b"", files) == LARGE
    assert isinstance(second.end, StorageFailed)


@pytest.mark.parametrize("writable", [True, False])
def test_so_has_that_of_a_tasks_end(
    files: ValueFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable
) -> None:
    sent: queue.SimpleQueue[TaskEnded] = queue.SimpleQueue()
    monkeypatch.setattr(slot_module, "Channel", lambda *_, **__: SimpleNamespace(send=sent.put))
    monkeypatch.setattr(slot_module, "SignalSocket", lambda *_: None)
    if not writable:
        (tmp_path / "root" / ".freetrain-root").unlink()
    slot = _Slot(
        SlotSettings(("127.0.0.1",), 1, None, 1.0, 10.0, 5.0, files=files),
        "token",
        Pulse(10.0),
        NodeMemory("n0", "b0", lambda: None),
    )
    assert slot._run_task(StartTask(3, pack_task(bytes, (LARGEST_MESSAGE + 1,), {}))) is writable
    ended = sent.get_nowait()
    assert ended.failed is not writable
    if writable:
        assert passed(ended).stored is not None
        assert settled(ended.stored or b"", files) == bytes(LARGEST_MESSAGE + 1)
    else:
        assert "cannot use the checkpoint directory" in str(error_in(ended.payload))


@pytest.mark.cluster
def test_large_results_arrive_through_a_real_driver_and_leave_no_files(start) -> None:
    site = start(nodes=2)

    @python_app
    def task() -> bytes:
        return b"t" * 20_000_000

    @training_app
    def train(session) -> bytes:
        return b"p" * 20_000_000

    assert train().result(timeout=60) == b"p" * 20_000_000
    assert task().result(timeout=60) == b"t" * 20_000_000
    parsl.dfk().cleanup()
    parsl.clear()
    assert not list(Path(site.executor.checkpoint_dir).rglob(".results"))
