"""Checkpoints in a POSIX file system: complete or absent, never half.

One directory a trainer, one directory a checkpoint::

    <root>/<trainer>/step-0000000123/state.pt         the state, opaque here
                                     shards/          what the members of a sharded training wrote, if it is one
                                     manifest.json    step, size and SHA-256 of every file, and who wrote it when
    <root>/<trainer>/latest                           name of the newest checkpoint, for people and tools
    <root>/<trainer>/writer                           who writes, for people

A checkpoint is written in the writer's staging directory, synced to disk, and renamed, so that a directory named
``step-…`` is complete whatever was killed when; then ``latest`` is replaced, and old ones go. Reading relies on the
directory names and checksums only, not on ``latest``. There is one writer at a time: the last that called `open`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from freetrain_parsl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
    InvalidSettings,
    StorageUnavailable,
)
from freetrain_parsl.storage.entry import MANIFEST, STATE, Entry, sign_manifest
from freetrain_parsl.storage.hashing import HashingSink, Sink
from freetrain_parsl.storage.ownership import check_owned, check_root, check_tree, make_private
from freetrain_parsl.storage.problems import condition_of, is_unavailable, storage_error
from freetrain_parsl.storage.staging import TEMPORARY, Staging, open_private, sync, sync_directory, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_LATEST = "latest"
_MARKER = ".freetrain-root"
_PERMANENT_AT_FIRST = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)  # nobody has used it before
_CHECKPOINT_NAME = re.compile(r"step-(\d{10,})(?:-([1-9]\d*))?")
_LONGEST_NAME = 200  # leaves room for suffixes under the usual limit of 255 bytes


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written; it counts once `CheckpointDirectory.complete` has returned.

    Parameters
    ----------
    step
        Optimizer steps done.
    path
        Its directory for now.
    begun
        When, on the directory's clock.
    files
        Path in the checkpoint -> ``{"bytes": …, "sha256": …}``.
    """

    step: int
    path: Path
    begun: float
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


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
        They cannot, or other users could write there too; the message says why.
    StorageUnavailable
        They cannot for now: it is full, or its file system does not work.
    """
    refusal = f"cannot write checkpoints in {root}"
    try:
        make_private(root)
        check_root(root)
        with tempfile.NamedTemporaryFile(dir=root, prefix=TEMPORARY) as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
    except ForeignCheckpoint as error:
        raise InvalidSettings(f"{refusal}: {error}") from error
    except OSError as error:
        if is_unavailable(error) and error.errno not in _PERMANENT_AT_FIRST:
            raise StorageUnavailable(f"{refusal}: {error.strerror}", condition_of(root, error)) from error
        raise InvalidSettings(f"{refusal} ({error.strerror or error}); give a writable directory") from error


def identify_root(root: Path) -> str:
    """Return what tells this root from any other directory of the same name, such as a mount point without its mount.

    Raises
    ------
    OSError
        The file system refuses.
    """
    marker = root / _MARKER
    if not marker.exists():
        aside = root / f"{TEMPORARY}root-{secrets.token_hex(4)}"
        write_text(aside, secrets.token_hex(16) + "\n")
        try:
            os.link(aside, marker)  # of several who do this at a time, one comes first
            aside.unlink()
        except FileExistsError:
            aside.unlink()
        except OSError:  # a file system without hard links
            aside.replace(marker)
    return marker.read_text(encoding="ascii").strip()


def check_same_root(root: Path, identity: str) -> None:
    """Make sure that `root` is, on this host, the directory that `identify_root` was asked about.

    Raises
    ------
    StorageUnavailable
        It is missing, or another one.
    """
    try:
        found = (root / _MARKER).read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise storage_error(f"cannot use the checkpoint directory {root} here", root, error) from error
    if found != identity:
        raise StorageUnavailable(
            f"the checkpoint directory {root} is another one on host {socket.gethostname()}; is it mounted there?"
        )


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
        self._root = root
        self._clock = clock
        self._staging: Staging | None = None

    @property
    def is_open(self) -> bool:
        """Whether this is a writer, perhaps one that has been shut out since."""
        return self._staging is not None

    def open(self, generation: int = 0) -> None:
        """Become the one writer: create the directory (private), shut out whoever wrote before and clear its remains.

        Parameters
        ----------
        generation
            Of the group that writes, for people.

        Raises
        ------
        ForeignCheckpoint
            The directory, or the root, is not ours alone.
        StorageUnavailable
            The file system refuses for now.
        CheckpointError
            The file system refuses.
        """
        self.close()
        try:
            make_private(self._root)
            check_root(self._root)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            check_owned(self.path)
            self._staging = Staging(self.path, generation)
        except OSError as error:
            raise storage_error(f"cannot prepare the checkpoint directory {self.path}", self._root, error) from error

    def close(self) -> None:
        """Cease to be the writer."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def entry(self, step: int, revision: int = 0) -> Entry:
        """Name a checkpoint, there or not."""
        name = f"step-{step:010d}-{revision}" if revision else f"step-{step:010d}"
        return Entry(step, revision, self.path / name)

    def entries(self) -> list[Entry]:
        """List the checkpoints, newest first; intact or not is found out by `Entry.verify`.

        Raises
        ------
        StorageUnavailable
            The file system refuses for now.
        CheckpointError
            The file system refuses.
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
        """Make sure that a checkpoint, and all that leads to it from the root, is ours alone.

        Raises
        ------
        ForeignCheckpoint
            Another user owns it or could have changed it.
        StorageUnavailable
            The file system refuses for now.
        DamagedCheckpoint
            It is gone.
        """
        try:
            check_root(self._root)
            check_owned(self.path)
            check_tree(entry.path)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {error.strerror}") from error
        except OSError as error:
            raise storage_error(f"cannot look at {entry.path}", self._root, error) from error

    def begin(self, step: int) -> Draft:
        """Make room for a checkpoint that is to be written.

        Raises
        ------
        CheckpointError
            The file system refuses, or another process writes now.
        """
        with self._writing(f"write a checkpoint of step {step}") as staging:
            return Draft(step, Path(tempfile.mkdtemp(prefix="step-", dir=staging.path)), self._clock())

    def write(self, draft: Draft, name: str, write: Callable[[Sink], object]) -> None:
        """Write a file of a checkpoint durably, and note its checksum.

        Parameters
        ----------
        draft
            Of the checkpoint; removed if this fails.
        name
            Of the file.
        write
            Writes into the sink that it is given.

        Raises
        ------
        CheckpointError
            The file system refuses (full, quota, read-only, gone), or another process writes now.
        """
        with self._writing(f"write a checkpoint of step {draft.step}", draft), open_private(draft.path / name) as file:
            sink = HashingSink(file)
            sink.fill(write)
            sync(file)
            draft.files[name] = {"bytes": sink.count, "sha256": sink.hexdigest()}

    def complete(self, draft: Draft, facts: Mapping[str, Any]) -> tuple[Entry, dict[str, Any]]:
        """Make a checkpoint whose files are written count: it is durable when this returns.

        Parameters
        ----------
        draft
            With all its files, synced, and their checksums.
        facts
            What else the manifest should tell; JSON-able.

        Returns
        -------
        entry, manifest
            Where it is, and its manifest: `facts` with ``step``, ``bytes``, ``files`` and ``write_seconds``.

        Raises
        ------
        CheckpointError
            The file system refuses, or another process writes now.
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
            staging.replace(_LATEST, entry.path.name + "\n")
        return entry, manifest

    def publish(
        self, step: int, write: Callable[[Sink], object], facts: Mapping[str, Any]
    ) -> tuple[Entry, dict[str, Any]]:
        """Write one checkpoint of one file so that it is durable and complete when this returns.

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
            As from `complete`.

        Raises
        ------
        CheckpointError
            The file system refuses (full, quota, read-only, gone), or another process writes now.
        """
        draft = self.begin(step)
        self.write(draft, STATE, write)
        return self.complete(draft, facts)

    def discard(self, draft: Draft) -> None:
        """Give a draft up."""
        shutil.rmtree(draft.path, ignore_errors=True)  # the next writer clears what could not be removed

    def prune(self, newest: Entry, keep: int) -> None:
        """Keep `newest` and the `keep` - 1 before it.

        Checkpoints beyond `newest` go too: the training went back behind them because they were damaged.

        Raises
        ------
        CheckpointError
            The file system refuses, or another process writes now.
        """
        with self._writing("remove old checkpoints") as staging:
            entries = self.entries()
            kept = [entry for entry in entries if entry <= newest][:keep]
            for entry in entries:
                if entry not in kept:
                    staging.remove(entry.path)

    def remove(self, entry: Entry) -> None:
        """Remove a checkpoint at a person's request, whoever writes.

        Raises
        ------
        CheckpointError
            The file system refuses.
        """
        try:
            doomed = self.path / f"{TEMPORARY}gone-{entry.path.name}"
            entry.path.rename(doomed)  # a directory named step-… is never seen half removed
            shutil.rmtree(doomed)
        except OSError as error:
            raise storage_error(f"cannot remove {entry.path}", self._root, error) from error

    def _free_entry(self, step: int) -> Entry:
        revisions = [entry.revision for entry in self.entries() if entry.step == step]
        return self.entry(step, max(revisions) + 1 if revisions else 0)

    @contextmanager
    def _writing(self, what: str, draft: Draft | None = None) -> Iterator[Staging]:
        """Turn what the file system says into an error that says what it means; a draft that fails is removed."""
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
