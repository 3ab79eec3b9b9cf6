"""The temporary directory of a node's worker pool: it is removed, by a later pilot if its own was killed."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from freetrain_parsl.executor.slot.pilot import POOL_DIRECTORY, PoolDirectory, hold_pool_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Let this test's temporary files be created in a directory of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_removed_with_all_its_files(temporary):
    with PoolDirectory() as directory:
        path = directory.path
        assert path.parent == temporary
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "pymp-1").mkdir()
        (path / "pymp-1" / "listener").touch()
    assert list(temporary.iterdir()) == []


def test_one_whose_pilot_was_killed_is_removed_and_others_are_kept(temporary):
    abandoned, link, file = (temporary / f"ft-pool-{name}" for name in ("abandoned", "link", "file"))
    (abandoned / "pymp-1").mkdir(parents=True)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    file.touch()
    with PoolDirectory() as first, PoolDirectory() as second:
        assert set(temporary.iterdir()) == {first.path, second.path, elsewhere, link, file}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_one_of_another_user_is_kept(temporary):
    other = temporary / "ft-pool-other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    with PoolDirectory():
        assert other.exists()


def test_a_pool_keeps_its_directory_without_its_pilot(temporary, monkeypatch):
    own = temporary / "ft-pool-own"
    own.mkdir()
    monkeypatch.setenv(POOL_DIRECTORY, str(own))
    assert hold_pool_directory() == str(own)
    assert POOL_DIRECTORY not in os.environ, "users' processes do not inherit it"
    with PoolDirectory():
        assert own.exists()


def test_without_a_pilot_there_is_none(monkeypatch):
    monkeypatch.delenv(POOL_DIRECTORY, raising=False)
    assert hold_pool_directory() is None


def test_one_that_is_removed_before_it_is_locked_is_made_again(temporary, monkeypatch):
    """By a pilot that starts at the same time and takes it for an abandoned one."""
    flock, removed = fcntl.flock, []

    def remove_first(descriptor: int, kind: int) -> None:
        if not removed:
            removed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            removed[0].rmdir()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with PoolDirectory() as directory:
        assert directory.path.exists()
        assert directory.path != removed[0]


def test_a_file_system_without_locks_is_no_obstacle(temporary, monkeypatch):
    def refuse(_descriptor: int, _kind: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with PoolDirectory() as first, PoolDirectory() as second:
        assert set(temporary.iterdir()) == {first.path, second.path}
    assert list(temporary.iterdir()) == []
