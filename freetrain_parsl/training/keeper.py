"""Saving and restoring as a group: the first member writes and chooses, and all of them know how it went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from freetrain_parsl.errors import CheckpointError, DamagedCheckpoint
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.checkpoint import Checkpoints

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.storage.posix import Entry
    from freetrain_parsl.training.checkpoint import Restored, State
    from freetrain_parsl.training.membership import Group
    from freetrain_parsl.training.terms import SessionOptions

_ABSENT, _FOUND, _DAMAGED = 0, 1, 2  # what the first member tells the others about the newest checkpoint


class Keeper:
    """One member's part in keeping a training's checkpoints.

    Parameters
    ----------
    options
        Where they are, and how many stay.
    group
        The fragment's members; all of them call `save` and `restore` together.
    """

    def __init__(self, options: SessionOptions, group: Group) -> None:
        self._trainer = options.name
        self._group = group
        self._directory = CheckpointDirectory(options.checkpoint_root, options.name)
        self._checkpoints = Checkpoints(self._directory, options.name, options.keep)
        self.newest: Entry | None = None
        """The newest checkpoint; the same on all members."""

    @property
    def path(self) -> Path:
        """The trainer's directory."""
        return self._directory.path

    @property
    def write_seconds_estimate(self) -> float:
        """Seconds that the next write may take; the first member alone learns from this fragment's writes."""
        return self._checkpoints.write_seconds_estimate

    def assume_size(self, size: int) -> None:
        """Say how many bytes a state will have, for the estimate before the first write."""
        self._checkpoints.assume_size(size)

    def save(self, state: State, *, step: int, epoch: int, reason: str) -> None:
        """Make a state durable.

        Raises
        ------
        CheckpointError
            It could not be written; raised on all members.
        """
        revision = 0
        problem: CheckpointError | None = None
        if self._group.is_first:
            try:
                revision = self._checkpoints.save(state, step=step, epoch=epoch, reason=reason).revision
            except CheckpointError as error:
                problem = error
        failed, revision = self._group.sum(torch.tensor([problem is not None, revision])).tolist()
        if problem is not None:
            raise problem
        if failed:
            raise CheckpointError(f"trainer {self._trainer!r}: its first process could not write a checkpoint")
        self.newest = self._directory.entry(step, revision)

    def restore(self) -> Restored | None:
        """Read the newest intact checkpoint, the same one on all members; ``None`` if there never was one.

        Raises
        ------
        DamagedCheckpoint, CheckpointMismatch, CheckpointError
            There are checkpoints, but none can be used; raised on all members.
        """
        found: Restored | None = None
        problem: CheckpointError | None = None
        choice = [_ABSENT, 0, 0]
        if self._group.is_first:
            try:
                self._directory.open()
                found = self._checkpoints.newest()
            except CheckpointError as error:
                choice, problem = [_DAMAGED, 0, 0], error
            if found is not None:
                choice = [_FOUND, found.entry.step, found.entry.revision]
        status, step, revision = self._group.sum(torch.tensor(choice)).tolist()
        if problem is not None:
            raise problem
        if status == _DAMAGED:
            raise DamagedCheckpoint(f"trainer {self._trainer!r}: its first process found no usable checkpoint")
        if status == _FOUND and found is None:
            found = self._checkpoints.load(self._directory.entry(step, revision))
        if found is not None:
            self.newest = found.entry
        return found
