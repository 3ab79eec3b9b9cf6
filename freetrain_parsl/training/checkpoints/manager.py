"""Saving and restoring as a group: which member writes, when, and how failures are handled.

A replicated state is written by the first member alone, in the background: the training is blocked only while the state
is copied to host memory. Of a sharded state each member writes its part in the same way, and the first member publishes
the checkpoint, see `JointSave`.
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
from freetrain_parsl.training.checkpoints import sharded
from freetrain_parsl.training.checkpoints.background import Background
from freetrain_parsl.training.checkpoints.code_change import accept_code, other_code_of_this_call
from freetrain_parsl.training.checkpoints.format import Checkpoints, Facts
from freetrain_parsl.training.checkpoints.host_copy import HostBuffers, in_host_memory
from freetrain_parsl.training.checkpoints.save_schedule import TRIES, Schedule
from freetrain_parsl.training.checkpoints.sharded_write import JointSave, JointWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from datetime import timedelta
    from pathlib import Path

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.storage.entry import Entry
    from freetrain_parsl.storage.posix import Draft
    from freetrain_parsl.training.checkpoints.format import Restored, State
    from freetrain_parsl.training.checkpoints.state import Stateful
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.mailbox import Clock

logger = logging.getLogger(__name__)

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between attempts to save the last state of a training


class CheckpointManager:
    """One member's part in keeping a training's checkpoints.

    Parameters
    ----------
    options
        Directory, number and interval of the checkpoints.
    group_of
        Returns the current group, which changes when the training is rescaled in place.
    clock
        Monotonic time in seconds.
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
        self._joint: JointSave | None = None  # the sharded state being written
        self._began = 0.0  # start of the background write
        self._writes_for: int | None = None  # generation for which this process became the writer
        self._mark: Hashable = None  # of the state saved last or being saved
        self.sharded = False
        """Whether the members hold different parts of the state, see `is_sharded`; set once it is known."""
        self.storage_problem = ""
        """Why the last save failed, if its directory was unavailable; empty once a save has succeeded."""
        self.code_note = ""
        """A note for the user about a change of the training's code; set on the first member at its start."""
        self.newest: Entry | None = None
        """The newest durable checkpoint that this member knows of; only the first member sees later writes."""

    @property
    def path(self) -> Path:
        """The trainer's directory."""
        return self._directory.path

    # ── when ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def interval(self) -> timedelta:
        """Time from the start of a periodic save to the start of the next; grows while saves fail."""
        return self._schedule.interval(self._checkpoints.write_seconds_estimate)

    def due(self, now: float) -> bool:
        """Return whether a periodic save is due; the time before the first call does not count.

        Parameters
        ----------
        now
            Monotonic time in seconds.
        """
        return self._schedule.due(now, self.interval) and not self.busy

    def due_in(self, now: float) -> float:
        """Return the seconds until the next periodic save is due, see `due`."""
        return self._schedule.due_in(now, self.interval)

    @property
    def busy(self) -> bool:
        """Whether a state is being written in the background, or `poll` has not yet taken the outcome."""
        return self._background.busy or self._joint is not None

    @property
    def write_seconds_estimate(self) -> float:
        """Seconds after which a save that starts now is durable; only the first member measures its writes."""
        estimate = self._checkpoints.write_seconds_estimate
        if not self.busy:
            return estimate
        return estimate + max(0.0, estimate - (self._clock() - self._began))

    def assume_size(self, size: int) -> None:
        """Set the expected bytes of a state, for the estimates before the first write."""
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
        """Save a state; called on all members. A replicated state is written by the first, without communication.

        Of a sharded state each member writes its part; the save is complete once all have passed `advance` twice.

        A failed periodic save is logged as a warning, once for each cause, and retried with growing intervals.

        Parameters
        ----------
        make_state
            Returns the state; called only where and when needed.
        step, epoch, reason
            For the manifest.
        wait
            Return when the state is durable. Otherwise return once it is copied, and skip this save if the
            previous one is still being written.
        mark
            Identifies this state: one that is saved already, or being saved, is not written again.

        Raises
        ------
        CheckpointError
            It could not be written, with `wait`.
        TrainingError
            See `poll`.
        PeerFailed
            The state is sharded and a member has failed.
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
        """Save the state with which this fragment ends, on all members; log a warning if it could not be saved.

        An unavailable directory is not the training's fault: the fragment ends normally, and the previous checkpoint
        remains.

        Parameters
        ----------
        make_state, **facts
            See `save`.
        patiently
            Whether to retry for half a minute, if the node is not about to be released.

        Raises
        ------
        CheckpointError, PeerFailed
            See `save`, except for an unavailable directory.
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
        newest = "no checkpoint exists" if self.newest is None else f"the newest is {self.newest.path}"
        logger.warning("trainer %s: ends without a checkpoint of step %d; %s", self._trainer, facts["step"], newest)

    def _make_room(self, error: StorageUnavailable) -> bool:
        """Remove all checkpoints but the newest intact one to free space; return whether any were removed."""
        if getattr(error.__cause__, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            return False
        return self._checkpoints.make_room()

    def mark_saved(self, mark: Hashable) -> None:
        """Note that the state with this mark was restored and need not be saved again."""
        self._mark = mark

    def poll(self) -> None:
        """Take the outcome of the background write, if it has ended; called at boundaries.

        Raises
        ------
        TrainingError
            This write and all before it have failed: no checkpoint can be written.
        """
        self._look_after(wait=False)

    def close(self) -> None:
        """Wait for the background write, and stop being the writer; a failure is logged as a warning.

        A sharded state that is still being written is dropped, since other members may have left.
        """
        if self._joint is not None:
            self._drop_joint()
        self._settle()
        self._directory.close()
        self._writes_for = None

    def rejoin(self) -> None:
        """Take over or hand over the writing after the group has changed in place, without communication.

        Remains of the previous first member are removed; if it is stopped, not dead, it is fenced off.
        """
        if not self._group_of().is_first:
            self.close()
        elif (
            not self._background.busy
        ):  # else this member was the writer before; it claims the directory again with its next save
            try:
                self._claim()
                entries = self._directory.entries()
                self.newest = entries[0] if entries else None
                self._checkpoints.learn()
            except CheckpointError as error:
                logger.warning("%s; training continues, next attempt with the next checkpoint", error)

    def _claim(self) -> None:
        """Become the writer, once in each generation: a member that was fenced off must not claim it again."""
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
        """Wait for the background write; a permanent failure is raised by the next save."""
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
            assert done.value is not None, "no error, so there is a checkpoint"
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
        """Handle a failed save: continue, since the directory may recover, unless no save has ever succeeded."""
        self._mark = None
        known_cause = self._schedule.failed(error)
        failures = self._schedule.failures
        if isinstance(error, StorageUnavailable):
            self.storage_problem = error.condition
            if getattr(error.__cause__, "errno", None) == errno.ENOENT:
                self._writes_for = None  # the directory is missing, and with it the staging directory
        elif self.newest is None and failures >= TRIES:
            raise TrainingError(
                f"trainer {self._trainer!r}: none of {failures} checkpoints could be written ({error}); "
                "free space there, or use another checkpoint directory"
            ) from error
        logger.log(
            logging.INFO if known_cause else logging.WARNING,
            "trainer %s: %s; training continues, next attempt in %s",
            self._trainer, error, self.interval,
        )  # fmt: skip

    # ── a sharded state ───────────────────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        """Whether this member has written its part of a sharded state; once all members have, call `advance`."""
        if self._joint is None:
            return False
        return self._background.done if self._background.busy else True

    def advance(self) -> None:
        """Continue the save of a sharded state, on all members together.

        Raises
        ------
        TrainingError
            This write and all before it have failed: no checkpoint can be written.
        PeerFailed
            A member has failed.
        """
        try:
            self._advance()
        except CheckpointError as error:
            self._failed(error)

    def _save_together(self, make_state: Callable[[], State], facts: Facts, mark: Hashable, *, wait: bool) -> None:
        """Save a sharded state; all members decide the same, since all know the outcome of each previous save."""
        if wait:
            self._end_joint()
        if self._joint is not None or (mark is not None and mark == self._mark):
            return
        self._schedule.saving()
        self._began, self._mark = self._clock(), mark
        try:
            self._begin_together(make_state, facts, wait=wait)
            if wait:
                self._advance()  # all members have written
                self._advance()  # the first member has published
        except CheckpointError as error:
            if wait:
                self._mark = None
                raise
            self._failed(error)

    def _end_joint(self) -> None:
        """Wait for the current write, on all members; a permanent failure is raised by the next save."""
        try:
            while self._joint is not None:
                self.advance()
        except TrainingError as error:
            logger.warning("%s", error)

    def _begin_together(self, make_state: Callable[[], State], facts: Facts, *, wait: bool) -> None:
        """Plan a checkpoint and start to write this member's part of it."""
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
        assert where is not None, "the first member creates it or raises an error"
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
        """Wait for this member's part, and carry out the next step together with the others."""
        group, joint = self._group_of(), self._joint
        assert joint is not None, "a save was started"
        done = self._background.take(wait=True)
        if done is not None and done.error is not None and not isinstance(done.error, CheckpointError):
            raise done.error
        if joint.parts is None:
            assert done is not None, "every member writes"
            assert done.value is not None, "problems are part of the value"
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
        assert entry is not None, "the first member publishes it or raises an error"
        self._succeeded(entry)

    def _publish(self, joint: JointSave) -> Entry:
        """Publish a checkpoint whose parts are written, on the first member."""
        assert joint.draft is not None, "this is the first member"
        assert joint.parts is not None, "all parts are written"
        try:
            joint.draft.files.update(joint.write.finish(joint.parts))
        except CheckpointError:
            self._directory.discard(joint.draft)
            raise
        return self._checkpoints.save(joint.plain, joint.facts, joint.draft)

    def _drop_joint(self) -> None:
        """Drop the current write, without communication."""
        joint, self._joint = self._joint, None
        self._background.take(wait=True)
        if joint is not None and joint.draft is not None:
            self._directory.discard(joint.draft)

    # ── restoring ─────────────────────────────────────────────────────────────────────────────────

    def restore(self) -> Restored | None:
        """Read the newest intact checkpoint, the same one on all members; return ``None`` if there are no checkpoints.

        Raises
        ------
        DamagedCheckpoint, CheckpointMismatch, CodeChanged, ForeignCheckpoint, StorageUnavailable, CheckpointError
            There are checkpoints, but none is usable; raised on all members.
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
        if place is not None and found is None:  # the first member has verified the checksums of all files
            found = self._checkpoints.load(self._directory.entry(*place), names=[STATE])
        if found is not None:
            self.newest = found.entry
        return found

    def _find(self) -> Restored | None:
        """Read the newest intact checkpoint, if the training may resume from it."""
        found = self._checkpoints.newest()
        if found is None:
            self.code_note = other_code_of_this_call(self._options, self._directory)
        else:
            found, self.code_note = accept_code(found, self._options, self._directory)
        if self.code_note:
            logger.warning("trainer %s: %s", self._trainer, self.code_note)
        return found

    def load_into(self, objects: Mapping[str, Stateful], restored: Restored) -> None:
        """Load a checkpoint into objects; either may be sharded or not. Members do not communicate.

        Parameters
        ----------
        objects
            Name -> object, in the order of saving.
        restored
            From `restore`.

        Raises
        ------
        CheckpointMismatch
            The checkpoint contains other objects.
        """
        states = restored.state["objects"]
        if list(states) != list(objects):
            self._mismatch(restored, f"it contains {', '.join(states)}, but session.prepare got {', '.join(objects)}")
        for name, target in objects.items():
            self._load(name, target, restored)

    def _load(self, name: str, target: Stateful, restored: Restored) -> None:
        try:
            target.load_state_dict(sharded.fill(restored.state["objects"][name], target, restored.entry.path))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            self._mismatch(restored, f"its {name} does not fit: {' '.join(str(error).split())}", error)

    def _mismatch(self, restored: Restored, difference: str, cause: Exception | None = None) -> NoReturn:
        raise CheckpointMismatch(
            f"checkpoint {restored.entry.path} belongs to another training: {difference}; "
            "undo the change, or use another trainer name or checkpoint directory"
        ) from cause
