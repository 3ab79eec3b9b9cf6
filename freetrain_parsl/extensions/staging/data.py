"""Copies of users' files on a node's own storage: each is made once for all training jobs there.

A copy is in ``freetrain-UID/data-KEY`` of a local directory, as an image of the environment is. The key is of the
path, sizes and times of change of what was submitted, so that a copy is never older than its submission, and a node
that has one reads nothing from the shared file system. Processes that use a copy hold a shared lock on it until they
end. What no process holds is removed if room is needed, by the next copy after a day, by ``freetrain clean`` on its
host, and in memory by the last pilot.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.executor.slot.neighbours import pool_directory
from freetrain_parsl.executor.slot.pilot import NODE_FILES_OF_POOL
from freetrain_parsl.executor.slot.run_end import write_error
from freetrain_parsl.extensions.staging.file_systems import file_system_of, is_shared
from freetrain_parsl.storage.temporary_directories import lock_directory
from freetrain_parsl.texts import printable, text_of
from freetrain_parsl.training.data.staging import LocalCopies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.protocol.options import StagedPath

__all__ = ["NodeCopies"]

_PREFIX: Final = "data-"
_IMAGES: Final = "image-"
_MOST_FILES: Final = 10_000  # each costs calls of the shared file system; users pack more in an archive
_UNUSED: Final = 86400.0  # seconds
_ROOM: Final = 1.25  # times its size must be free: jobs write there, too
_OF_MEMORY: Final = 10  # times its size must be available, where the local directory is memory
_LOOK: Final = 0.2  # seconds between looks at a lock
_SLOWEST: Final = 20e6  # bytes per second at which another process may make a copy
_SHORTEST_WAIT: Final = 60.0  # seconds


class _Unsuitable(Exception):
    """There cannot be a copy, for the reason given."""


class NodeCopies(LocalCopies):
    """Makes the copies; see `LocalCopies`."""

    _held: Final[dict[str, Path]] = {}
    _lock: Final = threading.Lock()  # training jobs that are fused run in threads

    @classmethod
    def describe(cls, path: StagedPath) -> StagedPath:
        """Return a path with size and key."""
        try:
            facts = _facts_of(path.path)
        except (OSError, _Unsuitable) as error:
            if isinstance(error, FileNotFoundError) and not os.path.exists(path.path):
                here = "" if Path(path.name).is_absolute() else f", looked up in {Path.cwd()}"
                raise InvalidApp(f"stage: there is no {path.path} ({path.name}{here})") from None
            raise InvalidApp(f"stage: {path.path} cannot be copied: {text_of(error)}") from None
        return replace(path, key=_key_of(path.path, facts), size=sum(size for _, size, _ in facts))

    @classmethod
    def local(cls, path: StagedPath) -> Path:
        """Return the copy, or the path itself if there is none."""
        with cls._lock:
            if path.key not in cls._held:
                cls._held[path.key] = _copy_or_itself(path)
            return cls._held[path.key]

    @classmethod
    def clean(cls) -> None:
        """Remove all copies on this host that no process uses, and images of the environment likewise."""
        for place in _places():
            with suppress(OSError, _Unsuitable):
                _remove_unused(_cache_in(place, make=False), (_PREFIX, _IMAGES), 0.0)


def _copy_or_itself(path: StagedPath) -> Path:
    why = "there is no local directory"
    for place in _places():
        try:
            return _copy_in(_cache_in(place), path)
        except (OSError, _Unsuitable) as error:  # noqa: PERF203 - each is one that the next place may not have
            why = text_of(error)
    node = platform.node()
    write_error(f"freetrain: node {node} reads {printable(path.path)} where it is, not from a copy: {why}\n")
    return Path(path.path)


def _facts_of(path: str) -> list[tuple[str, int, int]]:
    """Return the files of a path: name in it, bytes, time of change in ns; raises `OSError` or `_Unsuitable`."""
    status = os.stat(path)
    if S_ISREG(status.st_mode):
        if not os.access(path, os.R_OK):
            raise PermissionError("it cannot be read")
        return [("", status.st_size, status.st_mtime_ns)]
    if not S_ISDIR(status.st_mode):
        raise _Unsuitable("it is neither a file nor a directory")
    facts = []
    for name in _files_in(path):
        status = os.stat(f"{path}/{name}")
        if not S_ISREG(status.st_mode):
            raise _Unsuitable(f"{name} in it is neither a file nor a directory, or a link to a directory")
        facts.append((name, status.st_size, status.st_mtime_ns))
        if len(facts) > _MOST_FILES:
            raise _Unsuitable(f"it has more than {_MOST_FILES:,} files: pack them in an archive")
    return sorted(facts)


def _files_in(path: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for directory, directories, files in os.walk(path, onerror=fail):
        inside = os.path.relpath(directory, path)
        yield from (
            os.path.normpath(f"{inside}/{name}")
            for name in (*files, *(name for name in directories if os.path.islink(f"{directory}/{name}")))
        )


def _key_of(path: str, facts: list[tuple[str, int, int]]) -> str:
    return hashlib.sha256(json.dumps([path, facts]).encode(errors="surrogateescape")).hexdigest()[:32]


def _places() -> list[str]:
    """Return directories of this node, a disk before memory, which training needs itself."""
    if given := os.environ.get("FREETRAIN_IMAGE_PLACES"):
        return [place for place in given.split(":") if place]
    pool = pool_directory()  # a job on a shared node has a temporary directory of its own, which ends with it
    temporary = tempfile.gettempdir() if pool is None else str(pool.parent)
    return list(dict.fromkeys(filter(None, [os.environ.get("SLURM_TMPDIR"), temporary, "/tmp", "/dev/shm"])))  # noqa: S108


def _cache_in(place: str, *, make: bool = True) -> Path:
    """Return this user's own directory in a local one."""
    if is_shared(kind := file_system_of(place)):
        raise _Unsuitable(f"{place} is on a file system {kind}, which nodes may share")
    cache = Path(place, f"freetrain-{os.getuid()}")
    if make:
        with suppress(FileExistsError):
            cache.mkdir(mode=0o700)
    status = cache.lstat()
    if not S_ISDIR(status.st_mode) or (status.st_uid, status.st_mode & 0o777) != (os.getuid(), 0o700):
        raise _Unsuitable(f"{cache} is not a private directory of this user")
    return cache


def _copy_in(cache: Path, path: StagedPath) -> Path:
    """Return the copy in a cache, which this process holds from now on."""
    target = cache / f"{_PREFIX}{path.key}"
    inside = target / (Path(path.path).name or "root")
    if _hold(target):
        return inside
    with closing(_lock_file(cache / f"{_PREFIX.rstrip('-')}.lock", path)):
        if _hold(target):  # another process has made it meanwhile
            return inside
        part = cache / f".{target.name}.part"
        for left in cache.glob(f".{_PREFIX}*.part"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        _remove_unused(cache, (_PREFIX,), _UNUSED)
        if _lacks_room(cache, path.size):
            _remove_unused(cache, (_PREFIX,), 0.0)
            if why := _lacks_room(cache, path.size):
                raise _Unsuitable(why)
        _check_unchanged(path)  # each process, and each place, would copy it in vain
        try:
            part.mkdir(mode=0o700)
            _copy(path.path, part / inside.name)
            _check_unchanged(path)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        if not _hold(target):
            raise _Unsuitable(f"{target} was removed at once")
    return inside


def _check_unchanged(path: StagedPath) -> None:
    if _key_of(path.path, _facts_of(path.path)) != path.key:
        raise _Unsuitable("it has changed since its training job was submitted")


def _copy(source: str, to: Path) -> None:
    """Copy a file, or the files of a directory, which may be links; nobody is to write in the copies."""
    if os.path.isdir(source):
        to.mkdir(mode=0o700)
    for name, _, changed in _facts_of(source):
        copy = to / name if name else to
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(f"{source}/{name}" if name else source, copy)
        copy.chmod(0o400)
        os.utime(copy, ns=(changed, changed))


def _hold(target: Path) -> bool:
    """Lock a copy until this process ends, and tell the pilot of one in memory; return whether it exists."""
    try:
        lock_directory(target, fcntl.LOCK_SH)  # stays open
        os.utime(target)
    except OSError:
        return False
    if (pool := pool_directory()) is not None and file_system_of(str(target)) == "tmpfs":
        with suppress(OSError), (pool / NODE_FILES_OF_POOL).open("a", encoding="utf-8") as file:
            file.write(f"{target}\n")
    return True


def _lock_file(path: Path, wanted: StagedPath) -> Any:
    """Lock a file until it is closed; wait while another process makes a copy."""
    file = path.open("a")
    end = time.monotonic() + _SHORTEST_WAIT + wanted.size / _SLOWEST
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # noqa: PERF203 - another process makes a copy
            if time.monotonic() > end:
                file.close()
                raise _Unsuitable(f"{path} was locked for too long") from None
            time.sleep(_LOOK)
        else:
            return file


def _lacks_room(cache: Path, size: int) -> str:
    """Return what is missing for a copy, empty: nothing."""
    status = os.statvfs(cache)
    if (free := status.f_bavail * status.f_frsize) < size * _ROOM:
        return f"{cache} has only {free / 1e6:.0f} MB free, for {size / 1e6:.0f} MB"
    if file_system_of(str(cache)) == "tmpfs":
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        limit = int(os.environ.get("SLURM_MEM_PER_NODE") or 0) << 20
        if min(available, limit or available) < size * _OF_MEMORY:
            return f"{cache} is memory, and ten times {size / 1e6:.0f} MB are not free"
    return ""


def _remove_unused(cache: Path, prefixes: tuple[str, ...], age: float) -> None:
    """Remove what no process holds, and what was not used for a time in seconds."""
    for target in cache.iterdir():
        if target.name.startswith(prefixes) and target.is_dir():
            with suppress(OSError):  # in use, or being removed
                lock = lock_directory(target, fcntl.LOCK_EX)
                try:
                    if time.time() - target.stat().st_mtime >= age:
                        gone = target.with_name(f".{target.name}.{os.getpid()}.part")
                        target.rename(gone)  # at once: nobody must find a part of it
                        shutil.rmtree(gone, ignore_errors=True)
                finally:
                    os.close(lock)
