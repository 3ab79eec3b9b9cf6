"""Faults of files: damaged checkpoints, full disks."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

_MANIFEST = "manifest.json"
_LATEST = "latest"
_CHUNK = 1 << 20


class Damage(str, Enum):
    """Kinds of damage to a checkpoint; the value describes it."""

    FLIP = "one bit of a file is flipped"
    TRUNCATE = "a file loses its end"
    REMOVE = "a file is gone"
    REMOVE_MANIFEST = "the manifest is gone"


def corrupt_checkpoint(directory: Path, rng: random.Random, how: Damage | None = None) -> Path:
    """Damage a checkpoint as a failing disk does, unnoticed by the process that wrote it.

    Parameters
    ----------
    directory
        Directory of a checkpoint, or of a trainer, for its newest checkpoint.
    rng
        Chooses the file and the position in it, reproducibly.
    how
        Kind of damage; ``None``: chosen by `rng`.

    Returns
    -------
    file : Path
        The file that was damaged or removed.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint, or it contains no data.
    """
    checkpoint = _checkpoint_in(directory)
    how = rng.choice(list(Damage)) if how is None else how
    if how is Damage.REMOVE_MANIFEST:
        (checkpoint / _MANIFEST).unlink()
        return checkpoint / _MANIFEST
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != _MANIFEST)
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise FileNotFoundError(errno.ENOENT, "there is nothing to damage: all files are empty", str(checkpoint))
    victim = rng.choice(files)
    size = victim.stat().st_size
    if how is Damage.REMOVE:
        victim.unlink()
    elif how is Damage.TRUNCATE:
        os.truncate(victim, rng.randrange(size))
    else:
        with victim.open("r+b") as file:
            place = rng.randrange(size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return victim


@contextmanager
def fill_disk(directory: Path, limit: int, spare: int = 4096) -> Iterator[Path]:
    """Fill the file system of a directory inside the block.

    Parameters
    ----------
    directory
        Directory of the file that fills it.
    limit
        Bytes. Larger file systems are rejected, so that no real disk is filled by mistake: use a small one, such as a
        ``tmpfs``.
    spare
        Bytes left free, approximately.

    Yields
    ------
    file : Path
        The file that fills it; removed after the block.

    Raises
    ------
    UsageError
        The file system is larger than `limit`.
    """
    facts = os.statvfs(directory)
    size = facts.f_frsize * facts.f_blocks
    if size > limit:
        raise UsageError(f"fill_disk: the file system of {directory} has {size} bytes, more than the limit of {limit}")
    with tempfile.NamedTemporaryFile(dir=directory, prefix="filling-", buffering=0) as file:
        written = 0
        chunk = os.urandom(_CHUNK)  # incompressible
        while chunk:
            more = _append(file, chunk)
            written += more
            if not more:
                chunk = chunk[: len(chunk) // 2]
        file.truncate(max(0, written - spare))
        os.fsync(file.fileno())  # some file systems report only late that they are full
        yield Path(file.name)


def _append(file: IO[bytes], chunk: bytes) -> int:
    """Write as much as fits, and return the number of bytes."""
    try:
        return file.write(chunk)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return 0


def _checkpoint_in(directory: Path) -> Path:
    if (directory / _MANIFEST).is_file():
        return directory
    try:
        newest = directory / (directory / _LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        newest = directory
    if not (newest / _MANIFEST).is_file():
        raise FileNotFoundError(
            errno.ENOENT, f"there is no checkpoint: neither {_MANIFEST} nor {_LATEST} leads to one", str(directory)
        )
    return newest
