"""Saving a state of which the members hold different parts: each writes its part, and the first publishes them.

A save has three phases, each started on all members together: they plan the checkpoint and start to write, they
exchange the results and the first member starts to publish it, and the first member sends the outcome to the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import CheckpointError
from freetrain_parsl.extensions.sharding import state as sharded
from freetrain_parsl.extensions.sharding.write import JointWrite
from freetrain_parsl.training.checkpoints.background import Background, HostBuffers, in_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.extensions.sharding.copies import Copies, HostCopy
    from freetrain_parsl.extensions.sharding.write import Part
    from freetrain_parsl.storage.entry import Entry
    from freetrain_parsl.storage.posix import Draft
    from freetrain_parsl.training.checkpoints.format import Facts, State
    from freetrain_parsl.training.checkpoints.saver import SaverParts
    from freetrain_parsl.training.group.process_group import Group


@dataclass
class _Save:
    """A save in progress.

    Parameters
    ----------
    write
        The write of the sharded tensors.
    plain
        The rest of the state, on the first member.
    facts
        For the manifest.
    draft
        The draft, on the first member.
    parts
        The results of all members, once all have written.
    """

    write: JointWrite
    plain: State
    facts: Facts
    draft: Draft | None
    parts: list[Part] | None = None


class ShardedSaver:
    """Writes sharded states, on all members together; see `Saver` for its methods.

    `start`, `save`, `advance` and `finish` communicate; they raise PeerFailed if a member has failed.

    Parameters
    ----------
    parts
        What it works with.
    copies
        Returns the copies of the state for other nodes, if there are any: checkpoints are written from them.
    """

    def __init__(self, parts: SaverParts, copies: Callable[[], Copies | None]) -> None:
        self._copies = copies
        self._directory, self._checkpoints, self._claim, self._schedule, self._group_of = parts
        self._buffers = HostBuffers()
        self._background: Background[Any] = Background()  # returns a Part, then on the first member an Entry
        self._current: _Save | None = None

    @property
    def busy(self) -> bool:
        """Whether a state is being written, or the members have not agreed on the outcome yet."""
        return self._current is not None

    @property
    def ready(self) -> bool:
        """Whether this member has written its part, or published the checkpoint; once all are ready, call `advance`."""
        if self._current is None:
            return False
        return self._background.done if self._background.busy else True

    def takes_part(self, group: Group) -> bool:  # noqa: ARG002 - see `Saver`
        """Return True: every member writes its part."""
        return True

    def start(self, make_state: Callable[[], State], facts: Facts) -> None:
        """Plan a checkpoint, copy this member's part of the state, and start to write it.

        The copy is one for another node, too, where there are such copies and the one before is not on its way.
        """
        self._begin(make_state, facts, self._buffers.copy, self._copies())

    def save(self, make_state: Callable[[], State], facts: Facts) -> Entry:
        """Write a state, and return once the first member has published it."""
        self._begin(make_state, facts, in_host_memory, None)
        self.advance()  # all members have written
        entry = self.advance()  # the first member has published
        assert entry is not None, "the second call returns it or raises an error"
        return entry

    def poll(self) -> Entry | None:
        """Do nothing: the members take the outcome together, with `advance`."""
        return None

    def advance(self) -> Entry | None:
        """Wait for this member's part, and carry out the next phase together with the others."""
        group, save = self._group_of(), self._current
        assert save is not None, "a save was started"
        done = self._background.take(wait=True)
        if done is not None and done.error is not None and not isinstance(done.error, CheckpointError):
            raise done.error
        if save.parts is None:
            assert done is not None, "every member writes"
            assert done.value is not None, "problems are part of the value"
            self._schedule.measured(slowdown=done.processor_seconds / torch.get_num_threads())
            try:
                save.parts = save.write.collect(done.value)
            except CheckpointError:
                self._drop()
                raise
            self._release()
            if save.draft is not None:
                self._background.start(lambda: self._publish(save))
            return None
        self._current = None
        mine: tuple[Exception | None, Entry | None] = (None, None) if done is None else (done.error, done.value)
        problem, entry = group.agree_on(mine)
        if problem is not None:
            raise problem
        assert entry is not None, "the first member publishes it or raises an error"
        return entry

    def finish(self) -> Entry | None:
        """Carry out the remaining phases."""
        entry = None
        while self._current is not None:
            entry = self.advance()
        return entry

    def forget(self) -> None:
        """Drop the write of a group that this member has left."""
        self._drop()

    def close(self) -> Entry | None:
        """Drop the write, since other members may have left."""
        self._drop()
        return None

    def _begin(
        self, make_state: Callable[[], State], facts: Facts, to_host: Callable[[Any], Any], copies: Copies | None
    ) -> None:
        """Plan a checkpoint and start to write this member's part of it."""
        group = self._group_of()
        begun = time.monotonic()
        draft: Draft | None = None
        problem: CheckpointError | None = None
        if group.is_first:
            try:
                self._claim.take()
                draft = self._directory.begin(facts.step)
            except CheckpointError as error:
                problem = error
        problem, where = group.agree_on((problem, None if draft is None else draft.path))
        if problem is not None:
            raise problem
        assert where is not None, "the first member creates it or raises an error"
        try:
            state = make_state()
            plain, shards = sharded.split(state)
            copy = None if copies is None else copies.begin_for_save(state)
            parts = sharded.local_parts(shards) if copy is None else {}
            plain, local = to_host(((plain if group.is_first else {}), parts))
            write = JointWrite(where, shards, local if copy is None else copy.parts, group, self._directory.path)
        except Exception:  # any error of the user's objects: the draft is removed, and the error raised
            self._release()
            if draft is not None:
                self._directory.discard(draft)
            raise
        blocked = time.monotonic() - begun
        self._schedule.measured(blocked=blocked)
        self._current = _Save(write, plain, replace(facts, blocked_seconds=round(blocked, 6)), draft)
        self._background.start(lambda: _write(write, copy))

    def _publish(self, save: _Save) -> Entry:
        """Publish a checkpoint whose parts are written, on the first member."""
        assert save.draft is not None, "this is the first member"
        assert save.parts is not None, "all parts are written"
        try:
            save.draft.files.update(save.write.finish(save.parts))
        except CheckpointError:
            self._directory.discard(save.draft)
            raise
        return self._checkpoints.save(save.plain, save.facts, save.draft)

    def _drop(self) -> None:
        save, self._current = self._current, None
        self._background.take(wait=True)
        self._release()
        if save is not None and save.draft is not None:
            self._directory.discard(save.draft)

    def _release(self) -> None:
        """Let the copy be overwritten of which the checkpoint was written."""
        if (copies := self._copies()) is not None:
            copies.saved()


def _write(write: JointWrite, copy: HostCopy | None) -> Part:
    if copy is not None:
        copy.wait()
    return write.write()
