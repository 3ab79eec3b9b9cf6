"""Saving and restoring as a group: who writes, when, and what becomes of failures.

A state that all members hold alike is written by the first of them alone, in the background: the training is stopped
only while the state is copied to host memory. Of a sharded state each member writes its part in the same way, and
the first publishes the whole, see `joint`.
"""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from freetrain_parsl.errors import CheckpointError, CheckpointMismatch, StorageUnavailable, TrainingError
from freetrain_parsl.storage.entry import STATE
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.storage.root import check_same_root
from freetrain_parsl.training import sharded
from freetrain_parsl.training.background import Background
from freetrain_parsl.training.checkpoint import Checkpoints, Facts
from freetrain_parsl.training.code_change import accept_code, other_code_of_this_call
from freetrain_parsl.training.joint import JointSave, JointWrite
from freetrain_parsl.training.schedule import TRIES, Schedule
from freetrain_parsl.training.snapshot import HostBuffers, in_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from datetime import timedelta
    from pathlib import Path

    from freetrain_parsl.storage.entry import Entry
    from freetrain_parsl.storage.posix import Draft
    from freetrain_parsl.training.checkpoint import Restored, State
    from freetrain_parsl.training.membership import Group
    from freetrain_parsl.training.state import Stateful
    from freetrain_parsl.training.terms import Clock, SessionOptions

logger = logging.getLogger(__name__)

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between the tries to save the last state of a training


class Keeper:
    """One member's part in keeping a training's checkpoints.

    Parameters
    ----------
    options
        Where they are, how many stay, how often.
    group_of
        Returns the present group; it changes in place.
    clock
        Seconds on a clock that never goes back.
    """

    def __init__(self, options: SessionOptions, group_of: Callable[[], Group], clock: Clock = time.monotonic) -> None:
        self._trainer = options.name
        self._group_of = group_of
        self._options = options
        self._clock = clock
        self._directory = CheckpointDirectory(options.checkpoint_root, options.name)
        self._checkpoints = Checkpoints(self._directory, options.name, options.keep)
        self._schedule = Schedule(options)
        self._buffers = HostBuffers()
        self._background: Background[Any] = Background()
        self._joint: JointSave | None = None  # the sharded state that is being written
        self._began = 0.0  # when the write in the background did
        self._writes_for: int | None = None  # generation for which this process became the writer
        self._mark: Hashable = None  # of the state saved last, or being saved
        self.sharded = False
        """Whether the members hold different parts of the state, see `is_sharded`; to be set once it is known."""
        self.storage_problem = ""
        """Why the last attempt to save failed, if its directory could not be used; empty once one has succeeded."""
        self.code_note = ""
        """What the user should know about a change of the training's code; the first member learns it at its start."""
        self.newest: Entry | None = None
        """The newest durable checkpoint, as far as this member knows: the first one learns from its own writes."""

    @property
    def path(self) -> Path:
        """The trainer's directory."""
        return self._directory.path

    # ── when ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def interval(self) -> timedelta:
        """Time from the beginning of a periodic save to that of the next; grows while saving fails."""
        return self._schedule.interval(self._checkpoints.write_seconds_estimate)

    def due(self, now: float) -> bool:
        """Whether it is time for a periodic save; the time before the first call does not count.

        Parameters
        ----------
        now
            Seconds on a clock that never goes back.
        """
        return self._schedule.due(now, self.interval) and not self.busy

    def due_in(self, now: float) -> float:
        """Seconds until the next periodic save is due, as for `due`."""
        return self._schedule.due_in(now, self.interval)

    @property
    def busy(self) -> bool:
        """Whether a state is being written in the background, or `poll` has yet to tell how that went."""
        return self._background.busy or self._joint is not None

    @property
    def write_seconds_estimate(self) -> float:
        """Seconds after which a save that begins now is durable; only the first member learns from its writes."""
        estimate = self._checkpoints.write_seconds_estimate
        if not self.busy:
            return estimate
        return estimate + max(0.0, estimate - (self._clock() - self._began))

    def assume_size(self, size: int) -> None:
        """Say how many bytes a state will have, for the estimates before the first write."""
        self._checkpoints.assume_size(size)
        self._schedule.assume_size(size)

    # ── saving ────────────────────────────────────────────────────────────────────────────────────

    def save(
        self,
        make_state: Callable[[], State],
        *,
        step: int,
        epoch: int,
        reason: str,
        wait: bool,
        mark: Hashable = None,
    ) -> None:
        """Save a state, on all members. Of a state that is not sharded, the first writes; nobody communicates.

        Of a sharded state each member writes its part; it counts once all have come through `advance` twice.

        A periodic save that fails is told in a warning, once for each cause, and tried again, less and less often.

        Parameters
        ----------
        make_state
            Returns the state; called only where and when it is needed.
        step, epoch, reason
            For the manifest.
        wait
            Return when it is durable. Otherwise return once the state is copied, and skip this save if the one
            before is still being written.
        mark
            Tells this state from others: one that is saved already, or being saved, is not written again.

        Raises
        ------
        CheckpointError
            It could not be written, with `wait`.
        TrainingError
            As from `poll`.
        PeerLost
            The state is sharded and a member is gone.
        """
        group = self._group_of()
        if not group.is_first and not self.sharded:
            return
        facts = Facts(step, epoch, reason, group.size, group.generation, self._options.code)
        if self.sharded:
            self._save_together(make_state, facts, mark, wait=wait)
            return
        if wait:
            self._settle()
        else:
            self.poll()
        if self._background.busy or (mark is not None and mark == self._mark):
            return
        self._schedule.saving()
        self._began, self._mark = self._clock(), mark
        if not wait:
            begun = time.monotonic()
            state = self._buffers.copy(make_state())
            blocked = time.monotonic() - begun
            self._schedule.measured(blocked=blocked)
            facts = replace(facts, blocked_seconds=round(blocked, 6))
            self._background.start(lambda: self._write(state, facts))
            return
        state = in_host_memory(make_state())
        try:
            try:
                entry = self._write(state, facts)
            except StorageUnavailable as error:
                if not self._make_room(error):
                    raise
                entry = self._write(state, facts)
        except CheckpointError:
            self._mark = None
            raise
        self._succeeded(entry)

    def save_last(self, make_state: Callable[[], State], *, patiently: bool, **facts: Any) -> None:
        """Save the state with which this fragment ends, on all members, or tell that it could not be saved.

        A directory that cannot be used is not the training's fault: the fragment ends as it would have, and the
        checkpoint before remains.

        Parameters
        ----------
        make_state, **facts
            As for `save`.
        patiently
            Whether to try again for half a minute: nobody waits for the node.

        Raises
        ------
        CheckpointError, PeerLost
            As from `save`, except that the directory cannot be used.
        """
        for pause in (*(_PAUSES if patiently else ()), None):
            try:
                self.save(make_state, wait=True, **facts)
            except StorageUnavailable as error:
                self._failed(error)
            else:
                return
            if pause is not None:
                time.sleep(pause)
        newest = "there is none" if self.newest is None else f"the newest is {self.newest.path}"
        logger.warning("trainer %s: ends without a checkpoint of step %d; %s", self._trainer, facts["step"], newest)

    def _make_room(self, error: StorageUnavailable) -> bool:
        """Give up all checkpoints but the newest intact one for a state that has to be saved; whether that was any."""
        if getattr(error.__cause__, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            return False
        return self._checkpoints.make_room()

    def mark_saved(self, mark: Hashable) -> None:
        """Say that the state with this mark is the one that was restored: it need not be saved again."""
        self._mark = mark

    def poll(self) -> None:
        """Look after the write in the background; to be called at boundaries.

        Raises
        ------
        TrainingError
            It failed, as have all before it: there will never be a checkpoint.
        """
        self._look_after(wait=False)

    def close(self) -> None:
        """Wait for the write in the background, and cease to be the writer; a failure is told in a warning.

        A sharded state that is still being written is given up: the others may be gone.
        """
        if self._joint is not None:
            self._drop_joint()
        self._settle()
        self._directory.close()
        self._writes_for = None

    def rejoin(self) -> None:
        """Take over the writing, or hand it over, after the group has changed in place. Nobody communicates.

        What another first member left half written is cleared away; if it is stopped, not dead, it is shut out.
        """
        if not self._group_of().is_first:
            self.close()
        elif (
            not self._background.busy
        ):  # else it was the writer before; it claims the directory anew with its next save
            try:
                self._claim()
                entries = self._directory.entries()
                self.newest = entries[0] if entries else None
                self._checkpoints.learn()
            except CheckpointError as error:
                logger.warning("%s; training goes on, next try with the next checkpoint", error)

    def _claim(self) -> None:
        """Become the writer, once in each generation: who is shut out in it must not push its way in again."""
        generation = self._group_of().generation
        if self._writes_for != generation:
            if self._options.root_identity:
                check_same_root(self._options.checkpoint_root, self._options.root_identity)
            self._directory.open(generation)
            self._writes_for = generation

    def _write(self, state: State, facts: Facts) -> Entry:
        self._claim()
        return self._checkpoints.save(state, facts)

    def _settle(self) -> None:
        """Wait for the write in the background; if there is no hope, whoever saves next will be told."""
        try:
            self._look_after(wait=True)
        except TrainingError as error:
            logger.warning("%s", error)

    def _look_after(self, *, wait: bool) -> None:
        if self._joint is not None:
            return  # `advance` does
        done = self._background.take(wait=wait)
        if done is None:
            return
        self._schedule.measured(slowdown=done.processor_seconds / torch.get_num_threads())
        if done.error is None:
            assert done.value is not None, "it returned, so there is a checkpoint"
            self._succeeded(done.value)
            return
        if not isinstance(done.error, CheckpointError):
            raise done.error
        self._failed(done.error)

    def _succeeded(self, entry: Entry) -> None:
        self._schedule.succeeded()
        self.storage_problem = ""
        self.newest = entry

    def _failed(self, error: CheckpointError) -> None:
        """Put up with a save that has failed, unless there is no hope: a directory may become usable again."""
        self._mark = None
        told_before = self._schedule.failed(error)
        failures = self._schedule.failures
        if isinstance(error, StorageUnavailable):
            self.storage_problem = error.condition
            if getattr(error.__cause__, "errno", None) == errno.ENOENT:
                self._writes_for = None  # the directory is gone, and with it the place that this writer had in it
        elif self.newest is None and failures >= TRIES:
            raise TrainingError(
                f"trainer {self._trainer!r}: none of {failures} checkpoints could be written ({error}); "
                "make room there, or give another checkpoint directory"
            ) from error
        logger.log(
            logging.INFO if told_before else logging.WARNING,
            "trainer %s: %s; training goes on, next try in %s",
            self._trainer, error, self.interval,
        )  # fmt: skip

    # ── a sharded state ───────────────────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        """Whether this member has done its part of what all do to write a sharded state: once all have, `advance`."""
        if self._joint is None:
            return False
        return self._background.done if self._background.busy else True

    def advance(self) -> None:
        """Go on with a sharded state that is being written, on all members together.

        Raises
        ------
        TrainingError
            It failed, as have all before it: there will never be a checkpoint.
        PeerLost
            A member is gone.
        """
        try:
            self._advance()
        except CheckpointError as error:
            self._failed(error)

    def _save_together(self, make_state: Callable[[], State], facts: Facts, mark: Hashable, *, wait: bool) -> None:
        """Save a sharded state; all members decide the same, since all know how each save before has ended."""
        if wait:
            self._end_joint()
        if self._joint is not None or (mark is not None and mark == self._mark):
            return
        self._schedule.saving()
        self._began, self._mark = self._clock(), mark
        try:
            self._begin_together(make_state, facts, wait=wait)
            if wait:
                self._advance()  # all have written
                self._advance()  # the first has published
        except CheckpointError as error:
            if wait:
                self._mark = None
                raise
            self._failed(error)

    def _end_joint(self) -> None:
        """Wait for what is being written, on all members; if there is no hope, whoever saves next will be told."""
        try:
            while self._joint is not None:
                self.advance()
        except TrainingError as error:
            logger.warning("%s", error)

    def _begin_together(self, make_state: Callable[[], State], facts: Facts, *, wait: bool) -> None:
        """Plan a checkpoint, and begin to write this member's part of it."""
        group = self._group_of()
        begun = time.monotonic()
        draft: Draft | None = None
        problem: CheckpointError | None = None
        if group.is_first:
            try:
                self._claim()
                draft = self._directory.begin(facts.step)
            except CheckpointError as error:
                problem = error
        problem, where = sharded.agree_on((problem, None if draft is None else draft.path), group)
        if problem is not None:
            raise problem
        assert where is not None, "the first member begins one, or tells why not"
        try:
            plain, shards = sharded.split(make_state())
            kept = (plain if group.is_first else {}), sharded.local_parts(shards)
            plain, local = in_host_memory(kept) if wait else self._buffers.copy(kept)
            write = JointWrite(where, shards, local, group, self._directory.path)
        except Exception:
            if draft is not None:
                self._directory.discard(draft)
            raise
        blocked = time.monotonic() - begun
        self._schedule.measured(blocked=blocked)
        facts = replace(facts, blocked_seconds=round(blocked, 6))
        self._joint = JointSave(write, plain, facts, draft)
        self._background.start(write.write)

    def _advance(self) -> None:
        """Wait for this member's part, and take the next step together with the others."""
        group, joint = self._group_of(), self._joint
        assert joint is not None, "somebody began"
        done = self._background.take(wait=True)
        if done is not None and done.error is not None and not isinstance(done.error, CheckpointError):
            raise done.error
        if joint.parts is None:
            assert done is not None, "every member writes"
            assert done.value is not None, "what went wrong is told in it"
            self._schedule.measured(slowdown=done.processor_seconds / torch.get_num_threads())
            try:
                joint.parts = joint.write.collect(done.value)
            except CheckpointError:
                self._drop_joint()
                raise
            if joint.draft is not None:
                self._background.start(lambda: self._publish(joint))
            return
        self._joint = None
        mine = (None, None) if done is None else (done.error, done.value)
        problem, entry = sharded.agree_on(mine, group)
        if problem is not None:
            raise problem
        assert entry is not None, "the first publishes it, or tells why not"
        self._succeeded(entry)

    def _publish(self, joint: JointSave) -> Entry:
        """Make a checkpoint count whose parts are written, on the first member."""
        assert joint.draft is not None, "it is the first"
        assert joint.parts is not None, "they are written"
        try:
            joint.draft.files.update(joint.write.finish(joint.parts))
        except CheckpointError:
            self._directory.discard(joint.draft)
            raise
        return self._checkpoints.save(joint.plain, joint.facts, joint.draft)

    def _drop_joint(self) -> None:
        """Give up what is being written; nobody communicates."""
        joint, self._joint = self._joint, None
        self._background.take(wait=True)
        if joint is not None and joint.draft is not None:
            self._directory.discard(joint.draft)

    # ── restoring ─────────────────────────────────────────────────────────────────────────────────

    def restore(self) -> Restored | None:
        """Read the newest intact checkpoint, the same one on all members; ``None`` if there never was one.

        Raises
        ------
        DamagedCheckpoint, CheckpointMismatch, CodeChanged, ForeignCheckpoint, StorageUnavailable, CheckpointError
            There are checkpoints, but none can be used; raised on all members.
        """
        group = self._group_of()
        found: Restored | None = None
        problem: CheckpointError | None = None
        if group.is_first:
            try:
                self._claim()
                found = self._find()
            except CheckpointError as error:
                problem = error
        place = None if found is None else (found.entry.step, found.entry.revision)
        problem, place = sharded.agree_on((problem, place), group)
        if problem is not None:
            raise problem
        if place is not None and found is None:  # the first member has held all files against their checksums
            found = self._checkpoints.load(self._directory.entry(*place), names=[STATE])
        if found is not None:
            self.newest = found.entry
        return found

    def _find(self) -> Restored | None:
        """Read the newest intact checkpoint, if it is one to go on from."""
        found = self._checkpoints.newest()
        if found is None:
            self.code_note = other_code_of_this_call(self._options, self._directory)
        else:
            found, self.code_note = accept_code(found, self._options, self._directory)
        if self.code_note:
            logger.warning("trainer %s: %s", self._trainer, self.code_note)
        return found

    def load_into(self, objects: Mapping[str, Stateful], restored: Restored) -> None:
        """Put a checkpoint's objects in place, whether they were, or are, sharded or not. Nobody communicates.

        Parameters
        ----------
        objects
            Name -> object, in the order in which they were saved.
        restored
            From `restore`.

        Raises
        ------
        CheckpointMismatch
            It is of other objects.
        """
        states = restored.state["objects"]
        if list(states) != list(objects):
            self._mismatch(restored, f"it holds {', '.join(states)}, but session.prepare got {', '.join(objects)}")
        for name, target in objects.items():
            self._load(name, target, restored)

    def _load(self, name: str, target: Stateful, restored: Restored) -> None:
        try:
            target.load_state_dict(sharded.fill(restored.state["objects"][name], target, restored.entry.path))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            self._mismatch(restored, f"its {name} does not fit: {' '.join(str(error).split())}", error)

    def _mismatch(self, restored: Restored, difference: str, cause: Exception | None = None) -> NoReturn:
        raise CheckpointMismatch(
            f"checkpoint {restored.entry.path} is of another training: {difference}; "
            "undo the change, or use another trainer name or checkpoint directory"
        ) from cause
