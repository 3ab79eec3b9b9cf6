"""Checkpoints in a POSIX file system: complete or absent, never half.

One directory a trainer, one directory a checkpoint::

    <root>/<trainer>/step-0000000123/state.pt         the state, opaque here
                                     manifest.json    step, size, SHA-256 of state.pt, and who wrote it when
    <root>/<trainer>/latest                           name of the newest checkpoint, for people and tools

A checkpoint is written under a name that starts with ``.tmp-``, synced to disk, and renamed, so that a
directory named ``step-…`` is complete whatever was killed when; then ``latest`` is replaced, and old ones go.
Reading relies on the directory names and checksums only, not on ``latest``. There is one writer at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from freetrain_parsl.errors import CheckpointError, DamagedCheckpoint, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STATE = "state.pt"
_MANIFEST = "manifest.json"
_LATEST = "latest"
_TEMPORARY = ".tmp-"
_CHECKPOINT_NAME = re.compile(r"step-(\d{10,})(?:-([1-9]\d*))?")
_PRIVATE = 0o700
_CHUNK = 1 << 20
_LONGEST_NAME = 200  # leaves room for suffixes under the usual limit of 255 bytes


class Sink(Protocol):
    """Where the bytes of a state go."""

    def write(self, data: bytes, /) -> int:
        """Append `data` and return its length."""

    def flush(self) -> None:
        """Pass on what is buffered."""


@dataclass(frozen=True, order=True)
class Entry:
    """One complete checkpoint; later ones sort after earlier ones.

    Parameters
    ----------
    step
        Optimizer steps done.
    revision
        0, or a number that tells apart checkpoints of one step (before and after the end of an epoch).
    path
        Its directory.
    """

    step: int
    revision: int
    path: Path


def directory_name(trainer: str) -> str:
    """Return the file name for a trainer: the name itself where it is harmless, else percent-encoded.

    Different names never collide.

    Raises
    ------
    InvalidSettings
        The name is empty or too long for a file name.
    """
    try:
        encoded = quote(trainer, safe="")
    except UnicodeEncodeError:
        encoded = ""  # refused below
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if not 1 <= len(encoded) <= _LONGEST_NAME:
        raise InvalidSettings(f"trainer name {trainer!r}: give it 1 to {_LONGEST_NAME} plain characters")
    return encoded


def check_writable(root: Path) -> None:
    """Make sure that checkpoints can be written under `root`, creating it (private) if it is missing.

    Raises
    ------
    InvalidSettings
        They cannot; the message says why.
    """
    try:
        root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=_TEMPORARY) as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise InvalidSettings(
            f"cannot write checkpoints in {root} ({error.strerror or error}); give a writable directory"
        ) from error


class CheckpointDirectory:
    """The checkpoints of one trainer.

    Parameters
    ----------
    root
        Directory of all trainers.
    trainer
        The trainer's name.
    clock
        Seconds, for the writing time.
    """

    def __init__(self, root: Path, trainer: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = root / directory_name(trainer)
        self._clock = clock

    def open(self) -> None:
        """Create the directory (private), and remove what a killed writer left. Only for the writer.

        Raises
        ------
        CheckpointError
            The file system refuses.
        """
        try:
            self.path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            for stale in self.path.glob(f"{_TEMPORARY}*"):
                _remove(stale)
        except OSError as error:
            raise CheckpointError(f"cannot prepare the checkpoint directory {self.path}: {error}") from error

    def entry(self, step: int, revision: int = 0) -> Entry:
        """Name a checkpoint, there or not."""
        name = f"step-{step:010d}-{revision}" if revision else f"step-{step:010d}"
        return Entry(step, revision, self.path / name)

    def entries(self) -> list[Entry]:
        """List the checkpoints, newest first; intact or not is found out by `verify`."""
        if not self.path.is_dir():
            return []
        found = []
        for path in self.path.iterdir():
            match = _CHECKPOINT_NAME.fullmatch(path.name)
            if match:
                found.append(Entry(int(match[1]), int(match[2] or 0), path))
        return sorted(found, reverse=True)

    def publish(
        self, step: int, write: Callable[[Sink], object], facts: Mapping[str, Any]
    ) -> tuple[Entry, dict[str, Any]]:
        """Write one checkpoint so that it is durable and complete when this returns.

        Parameters
        ----------
        step
            Optimizer steps done.
        write
            Writes the state into the sink that it is given.
        facts
            What else the manifest should tell; JSON-able.

        Returns
        -------
        entry, manifest
            Where it is, and its manifest: `facts` with ``step``, ``bytes``, ``sha256`` and ``write_seconds``.

        Raises
        ------
        CheckpointError
            The file system refuses (full, quota, read-only, gone).
        """
        begun = self._clock()
        temporary = None
        try:
            temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.path))  # mkdtemp makes it private
            with (temporary / _STATE).open("wb") as file:
                sink = _HashingSink(file)
                _write(write, sink)
                _sync(file)
            manifest = {
                **facts,
                "step": step,
                "bytes": sink.count,
                "sha256": sink.hexdigest(),
                "write_seconds": round(self._clock() - begun, 6),
            }
            self._write_text(temporary / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
            _sync_directory(temporary)
            entry = self._free_entry(step)
            temporary.rename(entry.path)
            _sync_directory(self.path)
            self._point_latest_at(entry)
        except OSError as error:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)  # best effort: the error below is what matters
            raise CheckpointError(
                f"cannot write a checkpoint of step {step} in {self.path}: {error.strerror or error}"
            ) from error
        return entry, manifest

    def manifest(self, entry: Entry) -> dict[str, Any]:
        """Read the manifest of a checkpoint.

        Raises
        ------
        DamagedCheckpoint
            It is missing, unreadable, or of another checkpoint.
        """
        path = entry.path / _MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: unreadable {_MANIFEST} ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("step") != entry.step:
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {_MANIFEST} does not tell step {entry.step}")
        return manifest

    def verify(self, entry: Entry) -> tuple[Path, dict[str, Any]]:
        """Read a whole checkpoint against its checksum.

        Returns
        -------
        state, manifest
            Path of the state's file, and the manifest.

        Raises
        ------
        DamagedCheckpoint
            Bytes are missing or different; the message has the path.
        """
        manifest = self.manifest(entry)
        state = entry.path / _STATE
        digest, size = hashlib.sha256(), 0
        try:
            with state.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
        except OSError as error:
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: unreadable {_STATE} ({error})") from error
        if size != manifest.get("bytes"):
            raise DamagedCheckpoint(
                f"damaged checkpoint {entry.path}: {_STATE} has {size} of {manifest.get('bytes')} bytes"
            )
        if digest.hexdigest() != manifest.get("sha256"):
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {_STATE} does not match its SHA-256")
        return state, manifest

    def prune(self, newest: Entry, keep: int) -> None:
        """Keep `newest` and the `keep` - 1 before it.

        Checkpoints beyond `newest` go too: the training went back behind them because they were damaged.

        Raises
        ------
        CheckpointError
            The file system refuses.
        """
        kept = [entry for entry in self.entries() if entry <= newest][:keep]
        try:
            for entry in self.entries():
                if entry not in kept:
                    # Renamed first: a directory named step-… is never seen half removed.
                    doomed = self.path / f"{_TEMPORARY}gone-{entry.path.name}"
                    entry.path.rename(doomed)
                    _remove(doomed)
        except OSError as error:
            raise CheckpointError(f"cannot remove old checkpoints in {self.path}: {error}") from error

    def _free_entry(self, step: int) -> Entry:
        revisions = [entry.revision for entry in self.entries() if entry.step == step]
        return self.entry(step, max(revisions) + 1 if revisions else 0)

    def _point_latest_at(self, entry: Entry) -> None:
        aside = self.path / f"{_TEMPORARY}{_LATEST}"
        self._write_text(aside, entry.path.name + "\n")
        aside.replace(self.path / _LATEST)
        _sync_directory(self.path)

    @staticmethod
    def _write_text(path: Path, text: str) -> None:
        with path.open("wb") as file:
            file.write(text.encode())
            _sync(file)


class _HashingSink:
    """Passes bytes on to a file and keeps their count and SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.count = 0
        self.problem: OSError | None = None

    def write(self, data: bytes, /) -> int:
        self._digest.update(data)
        self.count += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.problem = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _write(write: Callable[[Sink], object], sink: _HashingSink) -> None:
    """Write a state, and tell what the file system said, not what became of it on its way through C++."""
    try:
        write(sink)
    except Exception as error:
        if sink.problem is not None:
            raise sink.problem from error
        raise


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
