"""Saving a state that every member has: the first member writes it alone, in the background."""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from freetrain_parsl.errors import StorageUnavailable
from freetrain_parsl.training.checkpoints.background import Background
from freetrain_parsl.training.checkpoints.host_copy import HostBuffers, in_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.storage.entry import Entry
    from freetrain_parsl.training.checkpoints.format import Checkpoints, Facts, State
    from freetrain_parsl.training.checkpoints.save_schedule import Schedule
    from freetrain_parsl.training.checkpoints.writer_claim import WriterClaim
    from freetrain_parsl.training.group.process_group import Group


class WholeSaver:
    """Writes whole states on the first member, without communication; see `Saver` for its methods.

    Parameters
    ----------
    checkpoints
        Writes the files.
    claim
        Taken before each write.
    schedule
        Receives the measured costs.
    """

    def __init__(self, checkpoints: Checkpoints, claim: WriterClaim, schedule: Schedule) -> None:
        self._checkpoints = checkpoints
        self._claim = claim
        self._schedule = schedule
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
        """Copy a state, for which the training is blocked, and start to write it."""
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
