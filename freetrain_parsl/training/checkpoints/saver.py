"""What the checkpoint manager requires of an object that writes states, and what writes a state that every member has.

The first member writes it alone, in the background.
"""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from freetrain_parsl.errors import StorageUnavailable
from freetrain_parsl.storage.root import check_same_root
from freetrain_parsl.training.checkpoints.background import Background, HostBuffers, in_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.storage.entry import Entry
    from freetrain_parsl.storage.posix import CheckpointDirectory
    from freetrain_parsl.training.checkpoints.format import Checkpoints, Facts, State
    from freetrain_parsl.training.checkpoints.save_schedule import Schedule
    from freetrain_parsl.training.group.process_group import Group


class WriterClaim:
    """Makes this process the only writer of a directory, once in each generation of the group.

    Parameters
    ----------
    options
        Contains the directory's root, and its identity if known.
    directory
        The training job's directory.
    group_of
        Returns the current group.
    """

    def __init__(self, options: SessionOptions, directory: CheckpointDirectory, group_of: Callable[[], Group]) -> None:
        self._options = options
        self._directory = directory
        self._group_of = group_of
        self._generation: int | None = None  # for which this process became the writer

    def take(self) -> None:
        """Become the writer, once in a generation: who was fenced off must not do it again; raises CheckpointError."""
        generation = self._group_of().generation
        if self._generation != generation:
            if self._options.root_identity:
                check_same_root(self._options.checkpoint_root, self._options.root_identity)
            self._directory.open(generation)
            self._generation = generation

    def lose(self) -> None:
        """Note that the directory is missing, and with it the staging directory: `take` opens it again."""
        self._generation = None

    def release(self) -> None:
        """Stop being the writer."""
        self._directory.close()
        self._generation = None


class SaverParts(NamedTuple):
    """What a saver works with.

    Parameters
    ----------
    directory
        The training job's directory.
    checkpoints
        Writes and publishes checkpoints.
    claim
        Taken on the first member before each write.
    schedule
        Receives the measured costs.
    group_of
        Returns the current group.
    """

    directory: CheckpointDirectory
    checkpoints: Checkpoints
    claim: WriterClaim
    schedule: Schedule
    group_of: Callable[[], Group]


class Saver(Protocol):
    """Writes states, one at a time; a failed write raises CheckpointError where its outcome is taken."""

    @property
    def busy(self) -> bool:
        """Whether a state is being written, or the outcome has not been taken yet."""

    @property
    def ready(self) -> bool:
        """Whether this member has done its part and waits for the others: once all are ready, they call `advance`."""

    def takes_part(self, group: Group) -> bool:
        """Return whether this member is needed to write a state; the others do not call `start` and `save`."""

    def start(self, make_state: Callable[[], State], facts: Facts) -> None:
        """Copy a state and start to write it in the background, with these facts; the saver must not be busy."""

    def save(self, make_state: Callable[[], State], facts: Facts) -> Entry:
        """Write a state, see `start`, and return once it is durable."""

    def poll(self) -> Entry | None:
        """Take the outcome without waiting and without communication; return the checkpoint, if there is one."""

    def advance(self) -> Entry | None:
        """Continue the write on all members together; return the checkpoint, once it is durable."""

    def finish(self) -> Entry | None:
        """Wait for the write, on all members that take part; return the checkpoint, if one was being written."""

    def close(self) -> Entry | None:
        """End the write without communication: wait for it, or drop it if it needs other members."""


class WholeSaver:
    """Writes whole states on the first member, without communication; see `Saver` for its methods."""

    def __init__(self, parts: SaverParts) -> None:
        self._checkpoints, self._claim, self._schedule = parts.checkpoints, parts.claim, parts.schedule
        self._buffers = HostBuffers()
        self._background: Background[Entry] = Background()

    @property
    def busy(self) -> bool:
        """Whether a state is being written, or the outcome has not been taken yet."""
        return self._background.busy

    @property
    def ready(self) -> bool:
        """False: the member that writes waits for no other."""
        return False

    def takes_part(self, group: Group) -> bool:
        """Return whether this is the first member."""
        return group.is_first

    def start(self, make_state: Callable[[], State], facts: Facts) -> None:
        """Copy a state, for which the training job is blocked, and start to write it."""
        begun = time.monotonic()
        state = self._buffers.copy(make_state())
        blocked = time.monotonic() - begun
        self._schedule.measured(blocked=blocked)
        facts = replace(facts, blocked_seconds=round(blocked, 6))
        self._background.start(lambda: self._write(state, facts))

    def save(self, make_state: Callable[[], State], facts: Facts) -> Entry:
        """Write a state, in the place of older checkpoints if the disk is full."""
        state = in_host_memory(make_state())
        try:
            return self._write(state, facts)
        except StorageUnavailable as error:
            if not self._make_room(error):
                raise
            return self._write(state, facts)

    def poll(self) -> Entry | None:
        """Take the outcome, if the write has ended."""
        return self._take(wait=False)

    def advance(self) -> Entry | None:
        """Do nothing: no other member takes part."""
        return None

    def finish(self) -> Entry | None:
        """Wait for the write."""
        return self._take(wait=True)

    def close(self) -> Entry | None:
        """Wait for the write."""
        return self._take(wait=True)

    def _write(self, state: State, facts: Facts) -> Entry:
        self._claim.take()
        return self._checkpoints.save(state, facts)

    def _take(self, *, wait: bool) -> Entry | None:
        done = self._background.take(wait=wait)
        if done is None:
            return None
        self._schedule.measured(slowdown=done.processor_seconds / torch.get_num_threads())
        if done.error is not None:
            raise done.error
        return done.value

    def _make_room(self, error: StorageUnavailable) -> bool:
        """Remove all checkpoints but the newest intact one to free space; return whether any were removed."""
        if getattr(error.__cause__, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            return False
        return self._checkpoints.make_room()
