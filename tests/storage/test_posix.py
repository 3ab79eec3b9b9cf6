"""Checkpoints on disk are complete or absent, whatever fails."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
    InvalidSettings,
    StorageUnavailable,
)
from freetrain_parsl.storage.entry import sign_manifest
from freetrain_parsl.storage.posix import CheckpointDirectory, directory_name
from freetrain_parsl.storage.root import check_same_root, check_writable, identify_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.storage.entry import Sink


def writer(data: bytes) -> Callable[[Sink], object]:
    return lambda sink: sink.write(data)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    directory = CheckpointDirectory(tmp_path, "net")
    directory.open()
    return directory


def test_what_is_published_can_be_verified(directory: CheckpointDirectory) -> None:
    entry, manifest = directory.publish(7, writer(b"state"), {"epoch": 2})
    path, read = entry.verify()
    assert path.read_bytes() == b"state"
    assert read == manifest
    assert (manifest["step"], manifest["epoch"], manifest["bytes"]) == (7, 2, 5)


def test_the_layout_is_the_documented_one(directory: CheckpointDirectory) -> None:
    directory.publish(123, writer(b"state"), {})
    directory.close()
    names = sorted(str(path.relative_to(directory.path)) for path in directory.path.rglob("*"))
    assert names == [
        "latest", "step-0000000123", "step-0000000123/manifest.json", "step-0000000123/state.pt", "writer",
    ]  # fmt: skip
    assert (directory.path / "latest").read_text() == "step-0000000123\n"


def test_two_checkpoints_of_one_step_both_stay_and_the_later_is_newer(directory: CheckpointDirectory) -> None:
    directory.publish(5, writer(b"before the end of the epoch"), {})
    later, _ = directory.publish(5, writer(b"after"), {})
    assert directory.entries()[0] == later
    assert len(directory.entries()) == 2
    assert (directory.path / "latest").read_text().strip() == later.path.name


def test_newest_is_by_number_not_by_text(directory: CheckpointDirectory) -> None:
    for step in (9_999_999_999, 10_000_000_000, 5):
        directory.publish(step, writer(b""), {})
    assert [entry.step for entry in directory.entries()] == [10_000_000_000, 9_999_999_999, 5]


def test_directories_are_private(directory: CheckpointDirectory) -> None:
    entry, _ = directory.publish(1, writer(b""), {})
    for path in (directory.path, entry.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_prune_keeps_the_newest_and_drops_an_abandoned_future(directory: CheckpointDirectory) -> None:
    """After falling back past damaged checkpoints, these must not be the newest again."""
    for step in (1, 2, 3, 50):
        directory.publish(step, writer(b""), {})
    newest, _ = directory.publish(4, writer(b""), {})
    directory.prune(newest, keep=2)
    assert [entry.step for entry in directory.entries()] == [4, 3]


@given(position=st.integers(0, 999), bit=st.integers(0, 7))
@settings(max_examples=25, deadline=None)
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    directory = CheckpointDirectory(tmp_path_factory.mktemp("root"), "net")
    directory.open()
    entry, _ = directory.publish(1, writer(bytes(1000)), {})
    data = bytearray(1000)
    data[position] ^= 1 << bit
    (entry.path / "state.pt").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="does not match its SHA-256"):
        entry.verify()


def test_a_truncated_state_is_told_by_its_size_and_path(directory: CheckpointDirectory) -> None:
    entry, _ = directory.publish(1, writer(b"12345"), {})
    (entry.path / "state.pt").write_bytes(b"123")
    with pytest.raises(DamagedCheckpoint, match=r"step-0000000001: state\.pt has 3 of 5 bytes"):
        entry.verify()


def test_a_manifest_of_another_step_is_refused(directory: CheckpointDirectory) -> None:
    entry, manifest = directory.publish(1, writer(b""), {})
    (entry.path / "manifest.json").write_text(sign_manifest({**manifest, "step": 2}))
    with pytest.raises(DamagedCheckpoint, match="is not for step 1"):
        entry.verify()


class Killed(BaseException):
    """Simulates SIGKILL: no handler catches it, so nothing is cleaned up."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, moment: int, problem: BaseException) -> None:
    """Raise in the `moment`-th call that makes a checkpoint durable or visible."""
    calls = 0

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                raise problem
            return call(*args, **kwargs)

        return guarded

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "open"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, guard(getattr(owner, name)))


def save(directory: CheckpointDirectory, step: int) -> None:
    entry, _ = directory.publish(step, writer(b"state %d" % step), {})
    directory.prune(entry, keep=1)


def leftovers(directory: CheckpointDirectory) -> list[Path]:
    """List the directories that are not checkpoints, other than the writer's staging directory."""
    found = [path for path in directory.path.rglob("*") if path.is_dir() and ".tmp-" in str(path)]
    assert found.pop(0).parent == directory.path
    return found


def check_usable(directory: CheckpointDirectory, steps: set[int]) -> None:
    """Check that the newest checkpoint is intact, and that `latest` names an existing one."""
    newest = directory.entries()[0]
    path, _ = newest.verify()
    assert newest.step in steps
    assert path.read_bytes() == b"state %d" % newest.step
    assert (directory.path / "latest").read_text() in {f"step-{step:010d}\n" for step in steps}


@pytest.mark.parametrize("moment", range(1, 13))
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(directory: CheckpointDirectory, moment: int) -> None:
    save(directory, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_at(monkeypatch, moment, Killed())
        try:
            save(directory, 2)
        except Killed:
            pass
        else:
            assert moment > 9, "a save makes at least this many calls"
    check_usable(directory, {1, 2})
    directory.open()
    assert leftovers(directory) == []
    save(directory, 3)
    check_usable(directory, {3})


@pytest.mark.parametrize("moment", range(1, 8))  # afterwards it is complete: `latest` may wait for free space
def test_a_full_disk_is_one_clear_error_and_leaves_nothing_behind(directory: CheckpointDirectory, moment: int) -> None:
    save(directory, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_at(monkeypatch, moment, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(CheckpointError, match=r"step 2 in .*net: No space left on device"):
            directory.publish(2, writer(b"state 2"), {})
    check_usable(directory, {1, 2})
    assert leftovers(directory) == []


SAVING_FOREVER = """
import sys
from pathlib import Path
from freetrain_parsl.storage.posix import CheckpointDirectory
directory = CheckpointDirectory(Path(sys.argv[1]), "net")
directory.open()
step = max([entry.step for entry in directory.entries()], default=0)
while True:
    step += 1
    def write(sink):
        for _ in range(64):
            sink.write(step.to_bytes(8, "big") * 512)
    entry, _ = directory.publish(step, write, {})
    directory.prune(entry, 2)
    print(step, flush=True)
"""


def test_sigkill_while_saving_loses_nothing_that_was_called_durable(tmp_path: Path) -> None:
    """Kill a real process at six moments; the newest checkpoint is always intact, and not older than reported."""
    for delay in (0.0, 0.003, 0.008, 0.013, 0.021, 0.034):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        told = int(process.stdout.readline())
        time.sleep(delay)  # this test varies the time of the kill
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        directory = CheckpointDirectory(tmp_path, "net")
        newest = directory.entries()[0]
        path, _ = newest.verify()
        assert newest.step >= max(told, *map(int, rest[-1:]), 0)
        assert path.read_bytes() == newest.step.to_bytes(8, "big") * (512 * 64)


def test_a_file_in_place_of_the_root_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(InvalidSettings, match="give a writable directory") as caught:
        check_writable(tmp_path / "root")
    assert "\n" not in str(caught.value)


def test_a_root_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="Not a directory"):
        check_writable(tmp_path / "file" / "root")


def test_a_writable_root_is_created_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "root")
    assert list((tmp_path / "new" / "root").iterdir()) == []


def test_a_trainer_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "net").write_text("")
    with pytest.raises(CheckpointError, match="cannot prepare"):
        CheckpointDirectory(tmp_path, "net").open()


@given(st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=2, unique=True))
@settings(max_examples=200, deadline=None)
def test_trainer_names_are_safe_file_names_and_never_collide(names: list[str]) -> None:
    try:
        one, other = (directory_name(name) for name in names)
    except InvalidSettings:
        return  # too long once encoded, or not encodable: rejected, which is safe, too
    assert one != other
    assert not one.startswith(".")
    assert "/" not in one
    assert "\0" not in one


@pytest.mark.parametrize("name", ["", "x" * 201, "\ud800"])
def test_names_that_no_file_can_have_are_refused(name: str) -> None:
    with pytest.raises(InvalidSettings, match="name of training job"):
        directory_name(name)


def test_plain_names_stay_readable() -> None:
    assert directory_name("resnet-18_lr.0.1") == "resnet-18_lr.0.1"
    assert directory_name("../a b") == "%2E.%2Fa%20b"


# ── manifests ─────────────────────────────────────────────────────────────────────────────────────


def test_every_flipped_bit_of_a_manifest_is_found(directory: CheckpointDirectory) -> None:
    """Including those in the format, in white space and in the checksum itself."""
    entry, _ = directory.publish(1, writer(b"state"), {"format": 3})
    path = entry.path / "manifest.json"
    text = path.read_bytes()
    for place in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamagedCheckpoint):
                entry.verify()


def test_every_truncated_manifest_is_refused(directory: CheckpointDirectory) -> None:
    entry, _ = directory.publish(1, writer(b"state"), {"format": 3})
    path = entry.path / "manifest.json"
    text = path.read_bytes()
    for size in range(len(text)):
        path.write_bytes(text[:size])
        with pytest.raises(DamagedCheckpoint):
            entry.verify()


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", '{"step": ' + "9" * 5000 + "}", ""])
def test_what_is_no_manifest_is_a_damaged_checkpoint(directory: CheckpointDirectory, text: str) -> None:
    entry, _ = directory.publish(1, writer(b"state"), {})
    (entry.path / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint):
        entry.verify()


@pytest.mark.parametrize("files", [{}, None, [1], {"other.pt": {}}, {"state.pt": 1}])
def test_a_manifest_without_the_state_is_refused(directory: CheckpointDirectory, files: object) -> None:
    entry, manifest = directory.publish(1, writer(b"state"), {})
    (entry.path / "manifest.json").write_text(sign_manifest({**manifest, "files": files}))
    with pytest.raises(DamagedCheckpoint, match=r"does not list (state\.pt|its files)"):
        entry.verify()


def test_a_shard_that_the_manifest_does_not_list_is_refused(directory: CheckpointDirectory) -> None:
    entry, _ = directory.publish(1, writer(b"state"), {})
    (entry.path / "shards").mkdir()
    (entry.path / "shards" / "__0_0.distcp").write_bytes(b"planted")
    with pytest.raises(DamagedCheckpoint, match=r"does not list shards/__0_0\.distcp"):
        entry.verify()


# ── ownership ─────────────────────────────────────────────────────────────────────────────────────

OTHER = 4711  # a user that need not exist on this machine


def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of files")


@pytest.mark.parametrize("which", ["net", "net/step-0000000001", "net/step-0000000001/state.pt"])
def test_what_belongs_to_another_user_is_refused_with_its_owner(directory: CheckpointDirectory, which: str) -> None:
    as_root()
    entry, _ = directory.publish(1, writer(b"state"), {})
    root = directory.path.parent
    os.chown(root / which, OTHER, OTHER)
    with pytest.raises(ForeignCheckpoint, match=f"{which} belongs to user {OTHER}.*remove it, or use another"):
        directory.check_owned(entry)


def test_a_directory_that_another_user_made_in_a_shared_root_is_not_written_to(tmp_path: Path) -> None:
    as_root()
    tmp_path.chmod(0o1777)
    check_writable(tmp_path)  # as in a shared scratch directory
    (tmp_path / "net").mkdir()
    os.chown(tmp_path / "net", OTHER, OTHER)
    with pytest.raises(ForeignCheckpoint, match=f"net belongs to user {OTHER}") as caught:
        CheckpointDirectory(tmp_path, "net").open()
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "net").iterdir()) == []


@pytest.mark.parametrize("which", [".", "net", "net/step-0000000001", "net/step-0000000001/manifest.json"])
def test_what_others_may_change_is_refused_with_the_remedy(directory: CheckpointDirectory, which: str) -> None:
    entry, _ = directory.publish(1, writer(b"state"), {})
    path = directory.path.parent / which
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(ForeignCheckpoint, match=r"can be changed by other users \(mode 0\d\d0\); run: chmod go-w"):
        directory.check_owned(entry)


@pytest.mark.parametrize("which", ["net", "net/step-0000000001", "net/step-0000000001/state.pt"])
def test_a_symbolic_link_below_the_root_is_refused(directory: CheckpointDirectory, which: str) -> None:
    entry, _ = directory.publish(1, writer(b"state"), {})
    path = directory.path.parent / which
    elsewhere = directory.path.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ForeignCheckpoint, match="is a symbolic link"):
        directory.check_owned(entry)


def test_a_root_may_be_a_symbolic_link_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    check_writable(tmp_path / "link")
    CheckpointDirectory(tmp_path / "link", "net").open()


def test_a_root_that_others_may_write_in_is_refused_before_anything_runs(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidSettings, match=r"mode 0777\); run: chmod go-w"):
        check_writable(tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_all_that_is_written_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        check_writable(tmp_path / "a" / "root")
        identify_root(tmp_path / "a" / "root")
        directory = CheckpointDirectory(tmp_path / "a" / "root", "net")
        directory.open()
        directory.publish(1, writer(b"state"), {})
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert {path.name for path in modes} >= {"root", "net", "latest", "writer", "state.pt", "manifest.json"}
    assert [(path, oct(mode)) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)] == []


# ── temporarily unavailable file systems ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES])
def test_a_file_system_that_refuses_for_now_is_told_from_one_that_never_works(
    directory: CheckpointDirectory, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageUnavailable) as caught:
        directory.publish(1, writer(b"state"), {})
    assert caught.value.condition.startswith(f"the checkpoint directory {directory.path.parent} ")
    assert caught.value.condition.endswith(f"({errno.errorcode[code]})")
    assert caught.value.transient


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_for_now_is_not_taken_for_a_damaged_one(
    directory: CheckpointDirectory, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the training job would fall back past it and remove it."""
    entry, _ = directory.publish(1, writer(b"state"), {})
    real = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "state.pt":
            raise OSError(code, os.strerror(code))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageUnavailable):
        entry.verify()


def test_a_directory_that_is_gone_is_no_other_writer(directory: CheckpointDirectory) -> None:
    """For example because it is unmounted: its writer's files return with the mount."""
    directory.publish(1, writer(b"state"), {})
    directory.path.rename(directory.path.with_name("away"))
    with pytest.raises(StorageUnavailable, match="write a checkpoint of step 2"):
        directory.publish(2, writer(b"state"), {})
    directory.path.with_name("away").rename(directory.path)
    directory.publish(2, writer(b"state"), {})


def test_a_full_disk_does_not_keep_anybody_from_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path, "net")
    directory.open()
    directory.publish(1, writer(b"state"), {})

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    later = CheckpointDirectory(tmp_path, "net")
    later.open()
    assert later.entries()[0].verify()[0].read_bytes() == b"state"


def test_a_mount_point_without_its_mount_is_not_taken_for_the_checkpoint_directory(tmp_path: Path) -> None:
    root = tmp_path / "root"
    check_writable(root)
    identity = identify_root(root)
    assert identify_root(root) == identity
    check_same_root(root, identity)
    root.rename(tmp_path / "unmounted")
    with pytest.raises(StorageUnavailable) as caught:
        check_same_root(root, identity)
    assert caught.value.condition == f"the checkpoint directory {root} is missing; is it mounted here? (ENOENT)"
    root.mkdir()
    with pytest.raises(StorageUnavailable):
        check_same_root(root, identity)
    identify_root(root)
    with pytest.raises(StorageUnavailable, match="is a different one on host"):
        check_same_root(root, identity)
