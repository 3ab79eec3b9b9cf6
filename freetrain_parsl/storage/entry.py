"""A complete checkpoint in a POSIX file system: its manifest with checksums, and verification against it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Protocol

from freetrain_parsl.errors import CheckpointError, DamagedCheckpoint
from freetrain_parsl.storage.problems import is_unavailable, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


_CHUNK = 1 << 20
STATE = "state.pt"
FROZEN = "frozen.pt"
"""Tensors of the state that several training jobs have in common, see `CommonFiles`."""
MANIFEST = "manifest.json"
SHARDS = "shards"
"""Folder for the files that the members of a sharded training job write; the manifest must list all of them."""

FORMAT = 3
"""Version of the layout and of the state's format; checkpoints of other versions are rejected."""

_OWN = "manifest_sha256"
_BLANK = "0" * 64
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # for a file in an existing directory


class Sink(Protocol):
    """Receives the bytes of a state."""

    def write(self, data: bytes, /) -> int:
        """Append `data` and return its length."""

    def flush(self) -> None:
        """Write out buffered data."""


class HashingSink:
    """Passes bytes on to a file and computes their count and SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.count = 0
        self.problem: OSError | None = None

    def write(self, data: bytes, /) -> int:
        """See `Sink`."""
        self._digest.update(data)
        self.count += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.problem = error
            raise

    def flush(self) -> None:
        """See `Sink`."""
        self._file.flush()

    def hexdigest(self) -> str:
        """Return the SHA-256 so far."""
        return self._digest.hexdigest()

    def fill(self, write: Callable[[Sink], object]) -> None:
        """Call `write` on this sink, and raise the file system's own error instead of what C++ code turned it into.

        Raises
        ------
        OSError
            The write failed.
        """
        try:
            write(self)
        except Exception as error:
            if self.problem is not None:
                raise self.problem from error
            raise


def checksum(path: Path) -> dict[str, Any]:
    """Read a file and return its manifest entry: ``bytes`` and ``sha256``.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def sign_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest with the SHA-256 of this text as its last field.

    The checksum is computed with zeros in its place.
    """
    text = json.dumps({**manifest, _OWN: _BLANK}, indent=1) + "\n"
    head, _, tail = text.rpartition(_BLANK)
    return f"{head}{hashlib.sha256(text.encode()).hexdigest()}{tail}"


@dataclass(frozen=True, order=True)
class Entry:
    """One complete checkpoint; later ones sort after earlier ones.

    Parameters
    ----------
    step
        Optimizer steps done.
    revision
        0, or a number that distinguishes checkpoints of one step (before and after the end of an epoch).
    path
        Its directory.
    """

    step: int
    revision: int
    path: Path

    def manifest(self) -> dict[str, Any]:
        """Read the manifest.

        Raises
        ------
        DamagedCheckpoint
            It is missing, unreadable, modified, or belongs to another checkpoint.
        StorageUnavailable
            The file system is temporarily unavailable.
        """
        path = self.path / MANIFEST
        try:
            text = path.read_bytes()
            manifest = json.loads(text)
        except OSError as error:
            raise _unreadable(self, MANIFEST, error) from error
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"damaged checkpoint {self.path}: unreadable {MANIFEST} ({error})") from error
        if not isinstance(manifest, dict):
            raise DamagedCheckpoint(f"damaged checkpoint {self.path}: {MANIFEST} is not a manifest")
        if not _is_signed(text, manifest.pop(_OWN, None)):
            raise DamagedCheckpoint(f"damaged checkpoint {self.path}: {MANIFEST} does not match its own SHA-256")
        if manifest.get("step") != self.step:
            raise DamagedCheckpoint(f"damaged checkpoint {self.path}: {MANIFEST} is not for step {self.step}")
        return manifest

    def verify(self, names: Collection[str] | None = None) -> tuple[Path, dict[str, Any]]:
        """Read the checkpoint and compare its checksums.

        Parameters
        ----------
        names
            Files to check; ``None``: all.

        Returns
        -------
        state, manifest
            Path of the state file, and the manifest.

        Raises
        ------
        DamagedCheckpoint
            Bytes are missing or different; the message contains the path.
        StorageUnavailable
            See `manifest`.
        """
        manifest = self.manifest()
        files = _files(self, manifest)
        for name in files if names is None else names:
            _verify(self, name, files.get(name, {}))
        return self.path / STATE, manifest

    def check_sizes(self) -> dict[str, Any]:
        """Check that all files exist and have their recorded sizes; reads only the manifest.

        Returns
        -------
        manifest
            See `verify`.

        Raises
        ------
        DamagedCheckpoint
            A file is missing or has another size.
        """
        manifest = self.manifest()
        for name, facts in _files(self, manifest).items():
            try:
                size = (self.path / name).stat().st_size
            except OSError as error:
                raise _unreadable(self, name, error) from error
            _compare(self, name, "bytes", size, facts)
        return manifest


def _is_signed(text: bytes, own: object) -> bool:
    """Return whether a manifest's text is the one that was written."""
    if not isinstance(own, str) or len(own) != len(_BLANK):
        return False
    head, found, tail = text.rpartition(own.encode(errors="replace"))
    return bool(found) and hashlib.sha256(head + _BLANK.encode() + tail).hexdigest() == own


def _files(entry: Entry, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of a checkpoint: at least the state, and everything in the shards folder."""
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(facts, dict) for facts in files.values()):
        raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {MANIFEST} does not list its files")
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {MANIFEST} lists {name}, which is outside")
    there = {STATE, *(f"{SHARDS}/{file.name}" for file in (entry.path / SHARDS).glob("*"))}
    if missing := sorted(there - files.keys()):
        raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {MANIFEST} does not list {missing[0]}")
    return files


def _unreadable(entry: Entry, name: str, error: OSError) -> CheckpointError:
    """Distinguish a damaged or missing file from an unavailable file system, which is no reason to fall back."""
    if is_unavailable(error) and not isinstance(error, _GONE):
        return storage_error(f"cannot read {entry.path / name}", entry.path.parent.parent, error)
    return DamagedCheckpoint(f"damaged checkpoint {entry.path}: unreadable {name} ({error})")


def _verify(entry: Entry, name: str, facts: Mapping[str, Any]) -> None:
    try:
        found = checksum(entry.path / name)
    except OSError as error:
        raise _unreadable(entry, name, error) from error
    _compare(entry, name, "bytes", found["bytes"], facts)
    _compare(entry, name, "sha256", found["sha256"], facts)


def _compare(entry: Entry, name: str, what: str, found: object, facts: Mapping[str, Any]) -> None:
    if found == facts.get(what):
        return
    difference = f"has {found} of {facts.get(what)} bytes" if what == "bytes" else "does not match its SHA-256"
    raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {name} {difference}")
