"""Checkpoints in a POSIX file system: complete or absent, never partial.

One directory per trainer, one directory per checkpoint::

    <root>/<trainer>/step-0000000123/state.pt         the state, opaque to this module
                                     frozen.pt        tensors that several training jobs have in common
                                     shards/          files written by the members of a sharded training job
                                     manifest.json    step, size and SHA-256 of every file, origin and time
    <root>/<trainer>/latest                           name of the newest checkpoint, for users and tools
    <root>/<trainer>/writer                           the current writer, for users
    <root>/.common/                                   further names of files that are in several checkpoints

A checkpoint is written in the writer's staging directory, synced to disk, and renamed, so that a directory named
``step-…`` is complete even if a process is killed at any point; then ``latest`` is replaced and old checkpoints are
removed. Readers rely only on directory names and checksums, not on ``latest``. There is one writer at a time: the last
one that called `open`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from freetrain_parsl.errors import CheckpointError, DamagedCheckpoint, InvalidSettings
from freetrain_parsl.storage.atomic_files import (
    TEMPORARY,
    Staging,
    open_private,
    sync,
    sync_directory,
    sync_name,
    write_text,
)
from freetrain_parsl.storage.common_files import CommonFiles
from freetrain_parsl.storage.entry import MANIFEST, STATE, Entry, HashingSink, Sink, sign_manifest
from freetrain_parsl.storage.owned_files import check_owned, check_root, check_tree, make_private
from freetrain_parsl.storage.problems import storage_error
from freetrain_parsl.storage.root import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

__all__ = ["CheckpointDirectory", "Draft", "check_writable", "directory_name"]

_LATEST = "latest"
_CHECKPOINT_NAME = re.compile(r"step-(\d{10,})(?:-([1-9]\d*))?")
_LONGEST_NAME = 200  # leaves room for suffixes under the usual limit of 255 bytes


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written; it counts once `CheckpointDirectory.complete` has returned."""

    step: int
    path: Path  # temporary
    begun: float  # on the directory's clock
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path in the checkpoint -> ``{"bytes": …, "sha256": …}``."""


def directory_name(trainer: str) -> str:
    """Return the file name for a trainer: the name itself if it is safe, else percent-encoded.

    Different names never collide.

    Raises
    ------
    InvalidSettings
        The name is empty or too long for a file name.
    """
    try:
        encoded = quote(trainer, safe="")
    except UnicodeEncodeError:
        encoded = ""  # rejected below
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if not 1 <= len(encoded) <= _LONGEST_NAME:
        raise InvalidSettings(f"name of training job {trainer!r}: use 1 to {_LONGEST_NAME} plain characters")
    return encoded


class CheckpointDirectory:
    """The checkpoints of one trainer.

    Parameters
    ----------
    root
        Directory that contains those of all trainers.
    trainer
        The trainer's name.
    clock
        Seconds, to measure write times.
    """

    def __init__(self, root: Path, trainer: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = root / directory_name(trainer)
        self._root = root
        self._clock = clock
        self._staging: Staging | None = None
        self._common = CommonFiles(root)

    @property
    def is_open(self) -> bool:
        """Whether this is a writer, possibly one that has since been replaced."""
        return self._staging is not None

    @property
    def is_fenced_off(self) -> bool:
        """Whether this was the writer, and another one has replaced it."""
        return self._staging is not None and not self._staging.is_mine

    def open(self, generation: int = 0) -> None:
        """Become the only writer: create the directory (private), fence off the previous writer and remove its remains.

        Parameters
        ----------
        generation
            Generation of the writing group, for users.

        Raises
        ------
        ForeignCheckpoint
            Another user owns, or could change, the directory or the root.
        StorageUnavailable
            The file system is temporarily unavailable.
        CheckpointError
            The file system operation failed.
        """
        self.close()
        try:
            make_private(self._root)
            check_root(self._root)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
                sync_name(self.path)
            check_owned(self.path)
            self._staging = Staging(self.path, generation)
        except OSError as error:
            raise storage_error(f"cannot prepare the checkpoint directory {self.path}", self._root, error) from error

    def close(self) -> None:
        """Stop being the writer."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def entry(self, step: int, revision: int = 0) -> Entry:
        """Return the entry of a checkpoint, which need not exist."""
        name = f"step-{step:010d}-{revision}" if revision else f"step-{step:010d}"
        return Entry(step, revision, self.path / name)

    def entries(self) -> list[Entry]:
        """List the checkpoints, newest first; `Entry.verify` checks whether they are intact.

        Raises
        ------
        StorageUnavailable
            The file system is temporarily unavailable.
        CheckpointError
            The file system operation failed.
        """
        try:
            names = [path.name for path in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error(f"cannot list the checkpoints in {self.path}", self._root, error) from error
        matches = (_CHECKPOINT_NAME.fullmatch(name) for name in names)
        found = [Entry(int(match[1]), int(match[2] or 0), self.path / match[0]) for match in matches if match]
        return sorted(found, reverse=True)

    def check_owned(self, entry: Entry) -> None:
        """Check the ownership of a checkpoint and of all directories from the root down to it.

        Raises
        ------
        ForeignCheckpoint
            Another user owns, or could have changed, one of them.
        StorageUnavailable
            The file system is temporarily unavailable.
        DamagedCheckpoint
            It no longer exists.
        """
        try:
            check_root(self._root)
            check_owned(self.path)
            check_tree(entry.path)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {error.strerror}") from error
        except OSError as error:
            raise storage_error(f"cannot access {entry.path}", self._root, error) from error

    def begin(self, step: int) -> Draft:
        """Create a draft of a checkpoint to be written.

        Raises
        ------
        CheckpointError
            The file system operation failed, or another process is now the writer.
        """
        with self._writing(f"write a checkpoint of step {step}") as staging:
            return Draft(step, Path(tempfile.mkdtemp(prefix="step-", dir=staging.path)), self._clock())

    def write(self, draft: Draft, name: str, write: Callable[[Sink], object]) -> None:
        """Write a file of a checkpoint durably and record its checksum; if this fails, the draft is removed.

        Raises
        ------
        CheckpointError
            The write failed (full, quota, read-only, unmounted), or another process is now the writer.
        """
        with self._writing(f"write a checkpoint of step {draft.step}", draft), open_private(draft.path / name) as file:
            sink = HashingSink(file)
            sink.fill(write)
            sync(file)
            draft.files[name] = {"bytes": sink.count, "sha256": sink.hexdigest()}

    def write_common(self, draft: Draft, name: str, key: str, write: Callable[[Sink], object]) -> None:
        """Add a file that checkpoints have in common: by a link to the one with this key, or see `write`.

        Parameters
        ----------
        draft, name, write
            As for `write`.
        key
            Letters and digits that identify the content.

        Raises
        ------
        CheckpointError
            See `write`.
        """
        with self._writing(f"write a checkpoint of step {draft.step}", draft):
            facts = self._common.link(key, draft.path / name)
            if facts is not None:
                draft.files[name] = facts
                return
        self.write(draft, name, write)
        with self._writing(f"write a checkpoint of step {draft.step}", draft):
            self._common.add(key, draft.path / name, draft.files[name]["sha256"])

    def complete(self, draft: Draft, facts: Mapping[str, Any]) -> tuple[Entry, dict[str, Any]]:
        """Publish a checkpoint whose files are written; it is durable when this returns.

        Parameters
        ----------
        draft
            Draft with all files synced and their checksums recorded.
        facts
            Further JSON-serializable fields of the manifest.

        Returns
        -------
        entry, manifest
            Its entry and its manifest: `facts` with ``step``, ``bytes``, ``files`` and ``write_seconds``.

        Raises
        ------
        CheckpointError
            The file system operation failed, or another process is now the writer.
        """
        with self._writing(f"write a checkpoint of step {draft.step}", draft) as staging:
            manifest = {
                **facts,
                "step": draft.step,
                "bytes": sum(file["bytes"] for file in draft.files.values()),
                "files": dict(sorted(draft.files.items())),
                "write_seconds": round(self._clock() - draft.begun, 6),
            }
            write_text(draft.path / MANIFEST, sign_manifest(manifest))
            sync_directory(draft.path)
            entry = self._free_entry(draft.step)
            draft.path.rename(entry.path)
            sync_directory(self.path)
            staging.note(_LATEST, entry.path.name + "\n")
        return entry, manifest

    def publish(
        self, step: int, write: Callable[[Sink], object], facts: Mapping[str, Any]
    ) -> tuple[Entry, dict[str, Any]]:
        """Write a checkpoint that consists of one file; it is durable and complete when this returns.

        Parameters
        ----------
        step
            Optimizer steps done.
        write
            Writes the state to the given sink.
        facts
            Further JSON-serializable fields of the manifest.

        Returns
        -------
        entry, manifest
            See `complete`.

        Raises
        ------
        CheckpointError
            The write failed (full, quota, read-only, unmounted), or another process is now the writer.
        """
        draft = self.begin(step)
        self.write(draft, STATE, write)
        return self.complete(draft, facts)

    def discard(self, draft: Draft) -> None:
        """Discard a draft."""
        shutil.rmtree(draft.path, ignore_errors=True)  # the next writer removes what is left

    def prune(self, newest: Entry, keep: int, damaged: Container[Entry] = ()) -> None:
        """Keep `newest` and the `keep` - 1 intact checkpoints before it.

        Checkpoints after `newest` are removed, too: the training job fell back past them because they were damaged.

        Parameters
        ----------
        newest
            The newest intact checkpoint.
        keep
            How many to keep.
        damaged
            Those that are known to be damaged: each would take the place of an intact one.

        Raises
        ------
        CheckpointError
            The file system operation failed, or another process is now the writer.
        """
        with self._writing("remove old checkpoints") as staging:
            entries = self.entries()
            kept = [entry for entry in entries if entry <= newest and entry not in damaged][:keep]
            for entry in entries:
                if entry not in kept:
                    staging.remove(entry.path)
            self._common.remove_unused()
            if not self._latest_is(newest):  # there was no disk space for it before
                staging.note(_LATEST, newest.path.name + "\n")

    def set_aside(self) -> Path:
        """Move all checkpoints into a separate directory, where they are kept but ignored; return this directory.

        Raises
        ------
        CheckpointError
            The file system operation failed, or another process is now the writer.
        """
        with self._writing("set checkpoints aside"):
            number = 1
            while (aside := self.path / f"set-aside-{number}").exists():
                number += 1
            aside.mkdir(mode=0o700)
            for entry in self.entries():
                entry.path.rename(aside / entry.path.name)
            sync_directory(aside)
            sync_directory(self.path)
        return aside

    def adopt(self, arrived: Path, entry: Entry) -> None:
        """Publish a complete checkpoint that was copied from another site; checkpoints of this site are set aside.

        Its directory `arrived` is in the same file system.

        Raises
        ------
        CheckpointError
            The file system operation failed, or another process is now the writer.
        """
        if self.entries():
            self.set_aside()
        with self._writing("adopt a checkpoint") as staging:
            arrived.rename(entry.path)
            sync_directory(self.path)
            staging.note(_LATEST, entry.path.name + "\n")

    def _latest_is(self, entry: Entry) -> bool:
        try:
            return (self.path / _LATEST).read_text(encoding="utf-8").strip() == entry.path.name
        except OSError:
            return False

    def remove(self, entry: Entry) -> None:
        """Remove a checkpoint at the user's request, whichever process is the writer.

        Raises
        ------
        CheckpointError
            The file system operation failed.
        """
        try:
            doomed = self.path / f"{TEMPORARY}gone-{entry.path.name}"
            entry.path.rename(doomed)  # so that a directory named step-… is never partially removed
            shutil.rmtree(doomed)
            self._common.remove_unused()
        except OSError as error:
            raise storage_error(f"cannot remove {entry.path}", self._root, error) from error

    def _free_entry(self, step: int) -> Entry:
        revisions = [entry.revision for entry in self.entries() if entry.step == step]
        return self.entry(step, max(revisions) + 1 if revisions else 0)

    @contextmanager
    def _writing(self, what: str, draft: Draft | None = None) -> Iterator[Staging]:
        """Convert file system errors into errors of this package, and remove a draft that failed."""
        staging = self._staging
        if staging is None:
            raise CheckpointError(f"cannot {what} in {self.path}: it is not open for writing")
        try:
            yield staging
        except OSError as error:
            if not staging.is_mine:
                raise CheckpointError(
                    f"cannot {what} in {self.path}: another process has taken over ({staging.successor()})"
                ) from error
            if draft is not None:
                self.discard(draft)
            raise storage_error(f"cannot {what} in {self.path}", self._root, error) from error
        except Exception:
            if draft is not None:
                self.discard(draft)
            raise
