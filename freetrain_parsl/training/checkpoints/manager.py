"""When a training job is saved and from what it resumes; how failed saves are handled."""

from __future__ import annotations

import errno
import logging
import time
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import CheckpointError, PeerFailed, StorageUnavailable, TrainingError
from freetrain_parsl.storage.entry import STATE
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.training.checkpoints.code.code_change import accept_code, other_code_of_this_call
from freetrain_parsl.training.checkpoints.format import Checkpoints, Facts
from freetrain_parsl.training.checkpoints.save_schedule import TRIES, Schedule
from freetrain_parsl.training.checkpoints.saver import SaverParts, WholeSaver
from freetrain_parsl.training.checkpoints.writer_claim import WriterClaim

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from datetime import timedelta
    from pathlib import Path

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.storage.entry import Entry
    from freetrain_parsl.training.checkpoints.format import Restored, State
    from freetrain_parsl.training.checkpoints.saver import Saver
    from freetrain_parsl.training.extension import SessionExtension
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.mailbox import Clock

logger = logging.getLogger(__name__)

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between attempts to save the last state of a training job


class CheckpointManager:
    """Decides on one member when to save, and from which checkpoint to resume; a `Saver` writes.

    Parameters
    ----------
    options
        Directory, number and interval of the checkpoints.
    group_of
        Returns the current group, which changes when the training job is rescaled in place.
    clock
        Monotonic time in seconds.
    """

    def __init__(self, options: SessionOptions, group_of: Callable[[], Group], clock: Clock = time.monotonic) -> None:
        self._group_of = group_of
        self._options = options
        self._clock = clock
        self._directory = CheckpointDirectory(options.checkpoint_root, options.name)
        self._claim = WriterClaim(options, self._directory, group_of)
        self._checkpoints = Checkpoints(self._directory, options.name, options.keep)
        self._schedule = Schedule(options)
        self._parts = SaverParts(self._directory, self._checkpoints, self._claim, self._schedule, group_of)
        self._saver: Saver = WholeSaver(self._parts)
        self._began = 0.0  # start of the background write
        self._mark: Hashable = None  # of the state saved last or being saved
        self.storage_problem = ""
        """Why the last save failed, if its directory was unavailable; empty once a save has succeeded."""
        self.code_note = ""
        """A note for the user about a change of the training job's code; set on the first member at its start."""
        self.newest: Entry | None = None
        """The newest durable checkpoint that this member knows of; only the first member sees later writes."""

    @property
    def path(self) -> Path:
        """The trainer's directory."""
        return self._directory.path

    def choose_saver(self, extension: SessionExtension) -> None:
        """Choose, before the first save, how the state is written: by the first member, or as the extension does."""
        self._saver = extension.saver(self._parts) or self._saver

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
        """Whether a state is being written in the background, or its outcome has not been taken yet."""
        return self._saver.busy

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
        """Save a state; called on all members.

        A state that all have is written by the first, without communication. A sharded one is written by all together;
        without `wait` it is complete once all have called `advance` twice.

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
        if not self._saver.takes_part(group):
            return
        facts = Facts(step, epoch, reason, group.size, group.generation, self._options.code)
        if wait:
            self._settle(self._saver.finish)
        else:
            self.poll()
        if self._saver.busy or (mark is not None and mark == self._mark):
            return
        self._schedule.saving()
        self._began, self._mark = self._clock(), mark
        try:
            if wait:
                self._succeeded(self._saver.save(make_state, facts))
            else:
                self._saver.start(make_state, facts)
        except CheckpointError as error:
            if wait:
                self._mark = None
                raise
            self._failed(error)

    def save_last(self, make_state: Callable[[], State], *, patiently: bool, **facts: Any) -> None:
        """Save the state with which this fragment ends, on all members; log a warning if it could not be saved.

        An unavailable directory is not the training job's fault: the fragment ends normally, and the previous
        checkpoint remains.

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
        logger.warning(
            "training job %s: ends without a checkpoint of step %d; %s", self._options.name, facts["step"], newest
        )

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
        self._take(self._saver.poll)

    @property
    def ready(self) -> bool:
        """Whether this member has written its part of a sharded state; once all members have, call `advance`."""
        return self._saver.ready

    def advance(self) -> None:
        """Continue the save of a sharded state, on all members together.

        Raises
        ------
        TrainingError
            This write and all before it have failed: no checkpoint can be written.
        PeerFailed
            A member has failed.
        """
        self._take(self._saver.advance)

    def close(self) -> None:
        """Wait for the background write, and stop being the writer; a failure is logged as a warning.

        A sharded state that is still being written is dropped, since other members may have left.
        """
        self._settle(self._saver.close)
        self._claim.release()

    def rejoin(self) -> None:
        """Take over or hand over the writing after the group has changed in place, without communication.

        Remains of the previous first member are removed; if it is stopped, not dead, it is fenced off.
        """
        if not self._group_of().is_first:
            self.close()
        elif not self._saver.busy:  # else this member was the writer before; it takes the claim with its next save
            try:
                self._claim.take()
                entries = self._directory.entries()
                self.newest = entries[0] if entries else None
                self._checkpoints.learn()
            except CheckpointError as error:
                logger.warning("%s; training continues, next attempt with the next checkpoint", error)

    def _settle(self, end: Callable[[], Entry | None]) -> None:
        """End the current write; a permanent failure is raised by the next save."""
        try:
            self._take(end)
        except PeerFailed:
            raise
        except TrainingError as error:
            logger.warning("%s", error)

    def _take(self, outcome: Callable[[], Entry | None]) -> None:
        """Call the saver, and handle the outcome of a write."""
        try:
            entry = outcome()
        except CheckpointError as error:
            self._failed(error)
            return
        if entry is not None:
            self._succeeded(entry)

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
            if getattr(error.__cause__, "errno", None) == errno.ENOENT and not self._directory.is_fenced_off:
                self._claim.lose()
        elif self.newest is None and failures >= TRIES:
            raise TrainingError(
                f"training job {self._options.name!r}: none of {failures} checkpoints could be written ({error}); "
                "free space there, or use another checkpoint directory"
            ) from error
        logger.log(
            logging.INFO if known_cause else logging.WARNING,
            "training job %s: %s; training continues, next attempt in %s",
            self._options.name, error, self.interval,
        )  # fmt: skip

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
                self._claim.take()
                found = self._find()
            except CheckpointError as error:
                problem = error
        place = None if found is None else (found.entry.step, found.entry.revision)
        problem, place = group.agree_on((problem, place))
        if problem is not None:
            raise problem
        if place is not None and found is None:  # the first member has verified the checksums of all files
            found = self._checkpoints.load(self._directory.entry(*place), names=[STATE])
        if found is not None:
            self.newest = found.entry
        return found

    def known_step(self) -> int:
        """Return the step of the newest checkpoint, as the first member finds it without reading it; -1 without any."""
        if not self._group_of().is_first:
            return -1
        try:
            return max((entry.step for entry in self._directory.entries()), default=-1)
        except CheckpointError:
            return -1  # the next save, or `restore`, says what is wrong

    def _find(self) -> Restored | None:
        """Read the newest intact checkpoint, if the training job may resume from it."""
        found = self._checkpoints.newest()
        if found is None:
            self.code_note = other_code_of_this_call(self._options, self._directory)
        else:
            found, self.code_note = accept_code(found, self._options, self._directory)
        if self.code_note:
            logger.warning("training job %s: %s", self._options.name, self.code_note)
        return found
