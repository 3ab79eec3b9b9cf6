"""Injected file faults: the store rejects damaged checkpoints, a full disk is full, and real disks are not filled."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import textwrap

import pytest

from freetrain_parsl.errors import DamagedCheckpoint, UsageError
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.testing.faults import Damage, corrupt_checkpoint, fill_disk


@pytest.fixture
def checkpoints(tmp_path):
    """Two checkpoints of a trainer."""
    directory = CheckpointDirectory(tmp_path, "net")
    directory.open()
    for step in (3, 7):
        directory.publish(step, lambda sink: sink.write(bytes(range(256)) * 8), {})
    return directory


@pytest.mark.parametrize("how", [None, *Damage])
@pytest.mark.parametrize("seed", range(3))
def test_corrupt_checkpoint_is_refused_by_name(checkpoints, how, seed):
    """The store rejects the newest one for any kind of damage, and the previous one is intact."""
    newest, before = checkpoints.entries()
    victim = corrupt_checkpoint(checkpoints.path, random.Random(seed), how)
    assert victim.parent == newest.path
    with pytest.raises(DamagedCheckpoint, match=newest.path.name):
        newest.verify()
    before.verify()


def test_a_checkpoint_can_be_chosen_and_its_damage_follows_from_the_seed(checkpoints):
    """The same seed damages the same bit of the same file."""
    _, before = checkpoints.entries()
    intact = (before.path / "state.pt").read_bytes()
    damaged = []
    for _ in range(2):
        victim = corrupt_checkpoint(before.path, random.Random(1), Damage.FLIP)
        damaged.append(victim.read_bytes())
        victim.write_bytes(intact)
    assert damaged[0] == damaged[1] != intact
    assert len(damaged[0]) == len(intact)


def test_there_must_be_a_checkpoint_to_corrupt(tmp_path):
    """The error for an empty directory is specific."""
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        corrupt_checkpoint(tmp_path, random.Random(0))


def test_full_disk_takes_no_more_and_is_emptied(tmp_path):
    """In a separate small file system: little is left, a larger file gets ENOSPC, and then all is free again."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("the command unshare is missing")
    source = textwrap.dedent(
        """
        import errno, os, sys
        from pathlib import Path
        from freetrain_parsl.testing.faults import fill_disk
        directory = Path(sys.argv[1])
        free = lambda: os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        before = free()
        with fill_disk(directory, limit=8 << 20, spare=16384):
            assert 0 < free() <= 32768, free()
            try:
                (directory / "state").write_bytes(bytes(1 << 20))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                raise AssertionError("there was room")
            (directory / "state").unlink()
        assert free() == before
        print("full, and free again")
        """
    )
    inside = f'mount -t tmpfs -o size=4m none "{tmp_path}" && exec "$@"'
    command = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", inside, "sh"]
    result = subprocess.run([*command, sys.executable, "-c", source, tmp_path], capture_output=True, text=True)
    if "unshare:" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"this user may not mount a file system: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "full, and free again\n"


def test_a_real_disk_is_not_filled(tmp_path):
    """A file system above the limit is rejected, and nothing is written."""
    with pytest.raises(UsageError, match="more than the limit of 1000"), fill_disk(tmp_path, limit=1000):
        pass
    assert list(tmp_path.iterdir()) == []
