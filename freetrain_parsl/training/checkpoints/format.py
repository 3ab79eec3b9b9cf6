"""Saving and restoring the state of a training job: torch's file format on top of durable checkpoint directories."""

from __future__ import annotations

import io
import logging
import math
import pickle
import platform
import sys
from collections import deque
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from freetrain_parsl._version import __version__
from freetrain_parsl.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint
from freetrain_parsl.protocol.options import Code
from freetrain_parsl.storage.entry import FORMAT, FROZEN, STATE
from freetrain_parsl.storage.problems import is_unavailable, storage_error
from freetrain_parsl.training.checkpoints.frozen import Content, as_saved, digest_of_all, fill, take_out

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.storage.entry import Entry, Sink
    from freetrain_parsl.storage.posix import CheckpointDirectory, Draft

logger = logging.getLogger(__name__)

State = dict[str, Any]
"""Tensors, numbers, strings, lists and dictionaries: what ``weights_only=True`` can load."""

_SAFETY = 1.5  # a write may take this factor longer than the slowest of the last few
_ASSUMED_BYTES_PER_SECOND = 50e6  # before the first write is measured; a third of a slow disk's measured rate
_ASSUMED_OVERHEAD = 0.2  # seconds; fsync and renames


@dataclass(frozen=True)
class Facts:
    """Manifest fields of a checkpoint, for users and for later versions.

    Parameters
    ----------
    step, epoch
        Progress of the training job.
    reason
        Why it was saved.
    world_size, generation
        Of the group that saved it.
    code
        The training job's code, if known.
    blocked_seconds
        Time for which the save blocked the training job.
    """

    step: int
    epoch: int
    reason: str
    world_size: int = 1
    generation: int = 0
    code: Code | None = None
    blocked_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the manifest."""
        facts = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "code"}
        if self.code is not None:
            facts |= {"code": self.code.identity, "code_parts": dict(self.code.parts), "code_python": self.code.python}
        return facts


@dataclass(frozen=True)
class Restored:
    """A checkpoint in memory.

    Parameters
    ----------
    state
        The saved state, tensors on the CPU; of a sharded training job, without the sharded tensors.
    entry
        Its location.
    refused
        Paths of newer, damaged checkpoints.
    manifest
        Its manifest.
    frozen
        What other training jobs of this process need not read again.
    """

    state: State
    entry: Entry
    refused: tuple[str, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    frozen: Sequence[Content] = ()

    @property
    def code(self) -> Code | None:
        """The code of the training job that wrote it, if its manifest has it."""
        parts, python = self.manifest.get("code_parts"), self.manifest.get("code_python")
        if not isinstance(parts, dict) or not isinstance(python, str):
            return None
        return Code(str(self.manifest.get("code")).partition("#")[0], parts, python)


class Checkpoints:
    """The checkpoints of one trainer, and the cost of writing them.

    Parameters
    ----------
    directory
        Their directory.
    trainer
        The trainer's name, for messages and manifests.
    keep
        How many checkpoints to keep.
    now
        Returns the current time, for the manifests.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        trainer: str,
        keep: int,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._directory = directory
        self._trainer = trainer
        self._keep = keep
        self._now = now
        self._write_seconds: deque[float] = deque(maxlen=5)
        self._assumed = _ASSUMED_OVERHEAD
        self._damaged: frozenset[Entry] = frozenset()  # found when the state was restored
        self._frozen: Mapping[str, Content] = {}  # of the last state, whose digests the next save need not compute

    @property
    def write_seconds_estimate(self) -> float:
        """Seconds that the next write may take: estimated from earlier writes, in this process or before it."""
        return _SAFETY * max(self._write_seconds) if self._write_seconds else self._assumed

    def assume_size(self, size: int) -> None:
        """Set the expected bytes of a state, for the estimate before the first write."""
        self._assumed = _ASSUMED_OVERHEAD + size / _ASSUMED_BYTES_PER_SECOND

    def save(self, state: State, facts: Facts, draft: Draft | None = None) -> Entry:
        """Write a checkpoint, make it the newest, and remove old ones.

        Parameters
        ----------
        state
            Contents of the state file.
        facts
            Fields of the manifest.
        draft
            Contains the other files, if any.

        Raises
        ------
        CheckpointError
            The file system operation failed, or another process is now the writer; earlier checkpoints are untouched.
        """
        rest, self._frozen = take_out(state)
        draft = draft or self._directory.begin(facts.step)
        if frozen := self._frozen:
            self._directory.write_common(
                draft, FROZEN, digest_of_all(frozen), lambda sink: _save(as_saved(frozen), sink)
            )
        self._directory.write(draft, STATE, lambda sink: _save(rest, sink))
        fields_of_manifest = {
            "format": FORMAT,
            "trainer": self._trainer,
            **facts.as_json(),
            "written": self._now().isoformat(timespec="milliseconds"),
            "torch": torch.__version__,
            "freetrain": __version__,
            "python": platform.python_version(),
        }
        entry, manifest = self._directory.complete(draft, fields_of_manifest)
        self._write_seconds.append(manifest["write_seconds"])
        try:
            self._directory.prune(entry, self._keep, self._damaged)
        except CheckpointError as error:  # the new one is durable; the next save retries
            logger.warning("training job %s: %s", self._trainer, error)
        return entry

    def make_room(self) -> bool:
        """Remove all checkpoints but the newest intact one; return whether any were removed.

        Raises
        ------
        CheckpointError
            The file system operation failed, or another process is now the writer.
        """
        entries = self._directory.entries()
        for entry in entries:
            try:
                entry.verify()
            except DamagedCheckpoint:
                continue
            self._directory.prune(entry, keep=1)
            return len(entries) > 1
        return False

    def newest(self) -> Restored | None:
        """Restore the newest intact checkpoint; return ``None`` if there are no checkpoints.

        Damaged checkpoints of a training job that has made no steps count as none: it begins anew with the same result.

        Raises
        ------
        DamagedCheckpoint
            There are checkpoints of later steps, but none is intact.
        CheckpointMismatch
            The newest intact one was written by a version of this package with another format.
        ForeignCheckpoint
            Another user owns it or could have changed it.
        StorageUnavailable
            The file system is temporarily unavailable: a checkpoint that cannot be read at present is not skipped.
        """
        problems: dict[Entry, DamagedCheckpoint] = {}
        entries = self._directory.entries()
        for entry in entries:
            try:
                restored = self.load(entry)
            except DamagedCheckpoint as problem:  # noqa: PERF203 - falling back is what this loop is for
                logger.warning("training job %s: %s; falling back to the previous one", self._trainer, problem)
                problems[entry] = problem
            else:
                self._damaged = frozenset(problems)
                return replace(restored, refused=tuple(str(damaged.path) for damaged in problems))
        if any(entry.step for entry in entries):
            first = next(iter(problems.values()))
            raise DamagedCheckpoint(
                f"training job {self._trainer!r}: none of {len(problems)} checkpoints is intact ({first}); "
                f"restore a good copy, or remove {self._directory.path} to start over"
            ) from first
        return None

    def load(self, entry: Entry, names: Collection[str] | None = None) -> Restored:
        """Restore one checkpoint.

        Parameters
        ----------
        entry
            The checkpoint.
        names
            Files whose checksums are verified; ``None``: all.

        Raises
        ------
        DamagedCheckpoint
            It is missing, or its bytes differ from those that were written.
        CheckpointMismatch
            It was written by a version of this package with another format.
        ForeignCheckpoint
            Another user owns it or could have changed it.
        StorageUnavailable
            The file system is temporarily unavailable.
        """
        self._directory.check_owned(entry)
        path, manifest = entry.verify(names)
        if manifest.get("format") != FORMAT:
            raise CheckpointMismatch(
                f"{entry.path} has format {manifest.get('format')!r}, this version reads {FORMAT}; "
                f"resume with the version that wrote it (freetrain {manifest.get('freetrain')}), or start over "
                "in another checkpoint directory"
            )
        self.learn()
        state, frozen = _read(path, entry)
        return Restored(state, entry, manifest=manifest, frozen=frozen)

    def learn(self) -> None:
        """Read the durations of earlier writes from the manifests."""
        measured = (self._measured_seconds(entry) for entry in reversed(self._directory.entries()))
        self._write_seconds.clear()
        self._write_seconds.extend(seconds for seconds in measured if seconds is not None)

    def _measured_seconds(self, entry: Entry) -> float | None:
        try:
            seconds = entry.manifest().get("write_seconds")
        except CheckpointError:
            return None  # reported when its state is loaded
        return seconds if isinstance(seconds, float) and 0.0 <= seconds < math.inf else None


def other_job(path: Path, difference: str) -> CheckpointMismatch:
    """Return the error that a checkpoint belongs to another training job."""
    return CheckpointMismatch(
        f"checkpoint {path} belongs to another training job: {difference}; "
        "undo the change, or use another name or checkpoint directory"
    )


def is_spread(leaf: Any) -> bool:
    """Return whether the members hold different parts of a tensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    return tensors is not None and isinstance(leaf, tensors.DTensor)


def check_restorable(what: str, state: object) -> None:
    """Check that a state can be loaded without running code from the file.

    Raises
    ------
    CheckpointError
        It contains objects other than tensors, numbers, strings, lists and dictionaries.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"the state of {what} cannot be saved in a checkpoint; its state_dict() must contain only tensors, "
            f"numbers, strings, lists and dictionaries ({_first_line(error)})"
        ) from error


def _save(state: Mapping[str, Any], sink: Sink) -> None:
    torch.save(state, cast("IO[bytes]", sink))


def _read(path: Path, entry: Entry) -> tuple[State, Sequence[Content]]:
    """Read a state, with the tensors that are in a file of their own."""

    def load(path: Path) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True)

    try:
        state = load(path)
        if not isinstance(state, dict) or not isinstance(state.get("objects"), dict):
            raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: it does not contain a training job's state")
        return state, fill(state, lambda: load(entry.path / FROZEN))
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        if is_unavailable(error):
            raise storage_error(f"cannot read {path}", entry.path.parent.parent, error) from error
        raise DamagedCheckpoint(f"damaged checkpoint {entry.path}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
