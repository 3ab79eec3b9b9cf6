"""A complete checkpoint in a POSIX file system: what its manifest tells, and whether its bytes are those."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import DamagedCheckpoint
from freetrain_parsl.storage.hashing import checksum

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

STATE = "state.pt"
MANIFEST = "manifest.json"


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

    def manifest(self) -> dict[str, Any]:
        """Read the manifest.

        Raises
        ------
        DamagedCheckpoint
            It is missing, unreadable, or of another checkpoint.
        """
        path = self.path / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"damaged checkpoint {self.path}: unreadable {MANIFEST} ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("step") != self.step:
            raise DamagedCheckpoint(f"damaged checkpoint {self.path}: {MANIFEST} does not tell step {self.step}")
        return manifest

    def verify(self, names: Collection[str] | None = None) -> tuple[Path, dict[str, Any]]:
        """Read the checkpoint against its checksums.

        Parameters
        ----------
        names
            Only these of its files; ``None``: all.

        Returns
        -------
        state, manifest
            Path of the state's file, and the manifest.

        Raises
        ------
        DamagedCheckpoint
            Bytes are missing or different; the message has the path.
        """
        manifest = self.manifest()
        files = _files(self, manifest)
        for name in files if names is None else names:
            _verify(self, name, files.get(name, {}))
        return self.path / STATE, manifest

    def check_sizes(self) -> dict[str, Any]:
        """Make sure that all files are there and as long as they were; reads the manifest only.

        Returns
        -------
        manifest
            As from `verify`.

        Raises
        ------
        DamagedCheckpoint
            A file is missing, or shorter or longer than it was.
        """
        manifest = self.manifest()
        for name, facts in _files(self, manifest).items():
            try:
                size = (self.path / name).stat().st_size
            except OSError as error:
                raise DamagedCheckpoint(f"damaged checkpoint {self.path}: unreadable {name} ({error})") from error
            _compare(self, name, "bytes", size, facts)
        return manifest


def _files(entry: Entry, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of a checkpoint; manifests of format 1 tell of one, without its name."""
    files = manifest.get("files", {STATE: manifest})
    if not isinstance(files, dict) or not all(isinstance(facts, dict) for facts in files.values()):
        raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {MANIFEST} does not tell its files")
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {MANIFEST} names a file outside, {name}")
    return files


def _verify(entry: Entry, name: str, facts: Mapping[str, Any]) -> None:
    try:
        found = checksum(entry.path / name)
    except OSError as error:
        raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: unreadable {name} ({error})") from error
    _compare(entry, name, "bytes", found["bytes"], facts)
    _compare(entry, name, "sha256", found["sha256"], facts)


def _compare(entry: Entry, name: str, what: str, found: object, facts: Mapping[str, Any]) -> None:
    if found == facts.get(what):
        return
    difference = f"has {found} of {facts.get(what)} bytes" if what == "bytes" else "does not match its SHA-256"
    raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {name} {difference}")
