"""The implementation behind a session: decisions at boundaries, changes of the group, saving and restoring.

Decisions to stop, to save or to regroup are made at *boundaries*: when the next batch or the next epoch is requested.
By then the user's loop has done everything that follows a step, and the state is consistent. At a boundary the members
of a group sum one small vector, so that all of them decide the same; a group of one does not communicate.

Every member has the whole state, so the members are replicas of each other. When one fails, the others leave the group
and form a new one, and members that are a step behind receive the state of one that is ahead; the interrupted batch is
repeated.
"""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.protocol.reports import PauseReason, Progress, Report
from freetrain_parsl.training.checkpoints.loading import load_into
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.checkpoints.sharded import check_meshes
from freetrain_parsl.training.checkpoints.state import Stateful, TrainingState
from freetrain_parsl.training.data import random_streams
from freetrain_parsl.training.step.batch_runner import BatchRunner
from freetrain_parsl.training.step.bypass import BypassCheck
from freetrain_parsl.training.step.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.data.order import Batch, Order, Piece
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.mailbox import Clock, ControlMailbox

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 0.5  # minimum time between two reports


class Unwind(BaseException):
    """Carries a pause through the user's function; a BaseException, so that ``except Exception`` does not stop it."""

    def __init__(self, reason: PauseReason) -> None:
        super().__init__(reason.sentence)
        self.reason = reason


class Runtime:
    """One member's part in a training, from joining to leaving.

    Parameters
    ----------
    options
        Options of the training.
    members
        This member's view of the group.
    mailbox
        Commands of the slot.
    report
        Receives the progress on the first member, and the changes of the group on all; must not block.
    clock
        Monotonic clock, in seconds.

    Raises
    ------
    DamagedCheckpoint, CheckpointMismatch, CheckpointError
        The training has checkpoints, but cannot resume from them.
    """

    def __init__(
        self,
        options: SessionOptions,
        members: GroupMember,
        mailbox: ControlMailbox,
        report: Callable[[Report], None],
        clock: Clock,
    ) -> None:
        self.options = options
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.unwinding: PauseReason | None = None
        self.checkpoint_manager = CheckpointManager(options, lambda: self.group)
        self.batch_runner: BatchRunner | None = None
        self._state = TrainingState(
            options.seed,
            lambda: (
                self.checkpoint_manager.newest.path if self.checkpoint_manager.newest else self.checkpoint_manager.path
            ),
        )
        self.training_metrics, self.cursor = self._state.training_metrics, self._state.cursor

        self._members = members
        self._mailbox = mailbox
        self._report = report
        self._clock = clock
        self._in_place = True
        self._total_epochs: int | None = None
        self._pass_ended_here = False  # whether this epoch had its last batch since this process joined
        self._pace = Pace()
        self._paced_samples = 0  # samples at the last boundary
        self._write_seconds = 0.0
        self._boundary_time = clock()
        self._report_time = -math.inf
        self._was_deterministic: bool | None = None

        self._restored = None if members.is_newcomer else self.checkpoint_manager.restore()
        self._resumed_from: int | None = None
        self._refused: tuple[str, ...] = ()
        if self._restored is not None:
            self._refused = self._restored.refused
            self._state.take_counts(self._restored.state)
            self._resumed_from = self.training_metrics.step
            self.checkpoint_manager.mark_saved(self._mark)
        self._started = False
        self._regrouped = False  # whether the group has changed since the last boundary
        self._bypass = BypassCheck()

    @property
    def group(self) -> Group:
        """The current group; a new object after each change."""
        return self._members.group

    @property
    def is_waiting(self) -> bool:
        """Whether this process waits to join a running training."""
        return self._members.is_newcomer

    @property
    def mesh(self) -> DeviceMesh:
        """The members as a device mesh; raises UsageError if they share a GPU or this process is a newcomer."""
        if self._members.is_newcomer:
            raise UsageError("session.mesh: a process that joins in place cannot shard a model; shard in all or none")
        return self.group.mesh(self.device)

    @property
    def user_directory(self) -> Path:
        """Directory for the user function's own files."""
        return self.checkpoint_manager.path / "files"

    def close(self) -> None:
        """Leave the group, wait for a background checkpoint, and restore torch's settings."""
        self._bypass.close()
        if self.batch_runner is not None:
            self.batch_runner.close()
        self._members.leave()
        self.checkpoint_manager.close()
        if self._was_deterministic is not None:
            torch.use_deterministic_algorithms(self._was_deterministic)

    # ── before the loop ───────────────────────────────────────────────────────────────────────────

    def register(self, model: nn.Module, objects: Mapping[str, Stateful], size: int) -> None:
        """Include these objects in the state, and restore them, in this order, if there is a checkpoint.

        Parameters
        ----------
        model
            The network.
        objects
            Name -> object.
        size
            Estimated bytes of a checkpoint.

        Raises
        ------
        CheckpointMismatch
            The checkpoint contains other objects.
        """
        if self._state.objects:
            raise UsageError("call session.prepare once, before the loop, with everything that has a state")
        self._state.objects = dict(objects)
        self.checkpoint_manager.choose_saver(objects)
        self._in_place = not self.checkpoint_manager.sharded
        if not self._in_place and self._members.is_newcomer:
            raise UsageError("a model that is sharded over the processes cannot be joined in place")
        if not self._in_place:
            check_meshes(objects, self.mesh)
        self.batch_runner = BatchRunner(model, list(objects.values()), sharded=not self._in_place)
        self._bypass.watch(self.batch_runner.parameters)
        self.checkpoint_manager.assume_size(size)
        if self._restored is None:
            return
        load_into(self._state.objects, self._restored)

    def use(self, order: Order, *, ramp: int) -> None:
        """Train on a dataset in this order.

        Raises
        ------
        UsageError
            There already is a loader, there is no model yet, or the loop has begun.
        CheckpointMismatch
            The checkpoint belongs to another dataset or batch size.
        """
        if self._started:
            raise UsageError(
                "session.loader() was called inside the epoch loop; call it before the loop: "
                "`data = session.loader(…)`, then `for epoch in session.epochs(…):`, then `for … in data:`"
            )
        if self._state.order is not None:
            raise UsageError("a session has one loader; for other data, as in validation, use a torch DataLoader")
        if self.batch_runner is None:
            raise UsageError("call session.prepare(model, optimizer) before session.loader()")
        if order.shards is not None:
            if not self._in_place:
                raise UsageError("session.loader: deterministic=True cannot be combined with a sharded model")
            if self.device.type == "cuda":  # otherwise torch raises an error for matrix products
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            self._was_deterministic = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(mode=True)
            self.batch_runner.fix_order()
        self.batch_runner.one_step = order.micro_batch is not None or order.shards is not None
        self._state.use(order, ramp)
        if self._restored is not None:
            self._state.take_order(self._restored.state)

    def start(self, total_epochs: int) -> None:
        """Begin to train: from here on the random numbers depend on the position in the data.

        Until here all members, in all fragments, draw the same random numbers, so that what the user's function
        creates before its loop (initial weights, a random split) does not depend on the fragment. A newcomer waits
        here to join the group.
        """
        if self.batch_runner is None:
            raise UsageError("call session.prepare(model, optimizer) before session.epochs()")
        self._total_epochs = total_epochs
        if self._started:
            return
        self._restored = None  # everything in it has been loaded
        self._members.state = self._state.whole
        self._members.adopt = self._adopt
        if self._members.is_newcomer:
            self._change_group(self._members.await_order, began=None)
        else:
            try:
                self._members.exchange(self._place)
            except PeerFailed as error:
                self._recover(error)
        self._started = True
        # The interval starts here: before the loop there is nothing to save.
        self._boundary_time = self._clock()
        self.checkpoint_manager.due(self._boundary_time)
        self._paced_samples = self.training_metrics.samples
        self._seed()
        self._tell(at_once=True)

    # ── in the loop ───────────────────────────────────────────────────────────────────────────────

    def boundary(self) -> None:
        """Decide, together with the other members, whether to stop, to save, or to change the group.

        Raises
        ------
        Unwind
            To stop: the state is saved, or other members have it.
        PeerFailed
            A member has failed, and the training cannot continue in place.
        """
        self.check_running()
        self._count_time()
        if not self._regrouped:  # otherwise the group has just been formed in this boundary
            try:
                self._decide()
            except PeerFailed as error:
                self._recover(error)
        self._regrouped = False
        self._tell()
        self._seed()
        self._boundary_time = self._clock()

    def check_running(self) -> None:
        """Raise `Unwind` again if the user's function caught it."""
        if self.unwinding is not None:
            raise Unwind(self.unwinding)

    def open_epoch(self) -> int:
        """Begin or resume an epoch; return its number."""
        self.boundary()
        self.training_metrics.open_epoch(self.cursor.epoch)
        return self.cursor.epoch

    def begin_pass(self) -> bool:
        """Begin or resume the batches of this epoch; return whether any are left."""
        self.check_running()
        if not self._started:
            raise UsageError("iterate over the session's loader inside `for epoch in session.epochs(…)`")
        if self._pass_ended_here:
            raise UsageError(
                "the session's loader can be iterated over once per epoch; use a DataLoader for further passes"
            )
        return not self.cursor.pass_ended

    def open_batch(self, batch: Batch) -> None:
        """Begin a batch."""
        assert self.batch_runner is not None, "a loader needs a model"
        self.batch_runner.open_batch(self.group, batch, self.device, done=self.cursor.steps)

    def hand_out(self, piece: Piece) -> None:
        """Note the piece that the user's code trains on next, and seed the random numbers for it."""
        assert self.batch_runner is not None, "a loader needs a model"
        self.batch_runner.hand_out(piece)
        self._bypass.begin_batch()
        random_streams.seed_all(self.options.seed, self.cursor.epoch, self.cursor.position, piece.shard)

    def take_back(self) -> None:
        """Note that the user's code is done with a piece, with or without a step."""
        assert self.batch_runner is not None, "a loader needs a model"
        self.batch_runner.take_back()
        self._bypass.end_batch()

    @property
    def cut_off(self) -> bool:
        """Whether the current batch was interrupted by a failed member and has to be repeated."""
        return self.batch_runner is not None and self.batch_runner.cut_off

    def leave_batch(self) -> None:
        """Note that the user's loop over the current batch has ended, whether the batch is done or not."""
        if self.batch_runner is not None:
            self.batch_runner.leave_batch()

    def close_batch(self, batch: Batch) -> None:
        """Advance past a batch."""
        self.cursor.pass_by(batch.samples)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a piece's gradients; after the last piece, ``.grad`` is that of the whole batch, on all members."""
        batch_runner = self._batch_runner_in_hand()
        self._bypass.before_backward()
        try:
            with self._bypass.session_acts():
                batch_runner.backward(loss)
        except PeerFailed as error:
            batch_runner.cut()
            self._recover(error)

    def step(self, optimizer: Optimizer | None) -> bool:
        """Make the optimizer step if the batch is complete; return whether it was made."""
        batch_runner = self._batch_runner_in_hand()
        with self._bypass.session_acts():
            made = batch_runner.step(optimizer, self._state.scaling)
        if not made:
            return False
        self.cursor.steps += 1
        if self.cursor.steps == 1:
            self.training_metrics.count_step(batch_runner.batch, batch_runner.tally)
        return True

    def end_pass(self, expected: torch.Tensor) -> None:
        """Close the metrics of an epoch after its last batch; `expected` are the positions of its samples."""
        self.check_running()
        assert self._state.order is not None, "there is a loader"
        self._bypass.end_pass(self.cursor.epoch, self._state.order.batches, trained=self.training_metrics.has_steps)
        self.training_metrics.close_pass(self.cursor.epoch, expected)
        self.cursor.pass_ended = self._pass_ended_here = True

    def log(self, values: Mapping[str, Any]) -> None:
        """Add the user's values to the history."""
        if not self._started:  # this code runs again in each fragment
            raise UsageError("call session.log inside or after `for epoch in session.epochs(…)`")
        self.training_metrics.log(values)

    def end_epoch(self) -> None:
        """Advance to the next epoch."""
        self.check_running()
        self.leave_batch()
        self._bypass.end_epoch(self.cursor.epoch, trained=self.training_metrics.has_steps)
        self.training_metrics.close_epoch(self.cursor.epoch)
        self.cursor.next_epoch()
        self._pass_ended_here = False

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Save the final state."""
        self._bypass.end_training(self.training_metrics.step)
        if self._state.objects:
            # Even if this step is saved already: functions may log or change their models after the loop.
            self._save_last("the training is done", mark=None, patiently=True)
        self._tell(at_once=True)

    def progress(self) -> Progress:
        """Return the progress of the training."""
        total = None
        if self._total_epochs is not None and self._state.order is not None:
            total = self._total_epochs * self._state.order.samples
        return Progress(
            step=self.training_metrics.step,
            epoch=self.cursor.epoch,
            samples=self.training_metrics.samples,
            samples_total=total,
            slot_seconds=self.training_metrics.slot_seconds,
            loss=self.training_metrics.mean_loss
            if self.training_metrics.mean_loss is not None
            else self.training_metrics.metrics["loss"],
            rate=self._pace.rate,
            samples_lost=self.training_metrics.audit.samples_lost,
            duplicate_samples=self.training_metrics.audit.duplicate_samples,
            checkpoint_step=self.checkpoint_manager.newest.step if self.checkpoint_manager.newest else None,
            resumed_from=self._resumed_from,
            write_seconds=self.checkpoint_manager.write_seconds_estimate,
            refused_checkpoints=self._refused,
            in_place=self._in_place,
            code_note=self.checkpoint_manager.code_note,
            storage_problem=self.checkpoint_manager.storage_problem,
            next_save=self.checkpoint_manager.due_in(self._clock()) if self.checkpoint_manager.storage_problem else 0.0,
        )

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────

    def _decide(self) -> None:
        """Agree with the other members on what to do at this boundary, and do it."""
        ordered = self._members.has_order()  # raises if a member has failed
        if self.group.is_first:
            self._write_seconds = self.checkpoint_manager.write_seconds_estimate
            self._look_after_writing(self.checkpoint_manager.poll)
        requested: float = self._mailbox.pause_requested.is_set()
        closing: float = self._closing()
        save_due: float = self.group.is_first and self.checkpoint_manager.due(self._clock())
        ready: float = self.checkpoint_manager.ready
        if self.group.size > 1:
            # One sum for the votes and for the first member's estimate, which only it can measure.
            estimate = self._write_seconds if self.group.is_first else 0.0
            votes = torch.tensor([requested, closing, save_due, ordered, ready, estimate], dtype=torch.float64)
            requested, closing, save_due, orders, ready, self._write_seconds = self.group.sum(votes).tolist()
            ordered = orders == self.group.size
        if ready == self.group.size:
            self._look_after_writing(self.checkpoint_manager.advance)
        if self.device.type == "cpu" or self._report_due():
            self.training_metrics.settle()  # on a GPU this waits for the last step
        if (ordered or closing or requested or save_due or self.cursor.pass_ended) and self.batch_runner is not None:
            self.batch_runner.average_statistics(self.group)
        if ordered:
            began = self._clock()
            self._change_group(self._members.take_order, began)
        elif closing or requested:
            self._pause(PauseReason.CLOSING if closing else PauseReason.REQUESTED)
        elif save_due:
            self._save("periodic", mark=self._mark)

    def _closing(self) -> bool:
        """Return whether another step would leave too little time for the last checkpoint."""
        closes_in = self._mailbox.closes_in()
        if closes_in is None:
            return False
        margin = self.options.save_margin.total_seconds()
        return closes_in <= self._write_seconds + margin + self._pace.longest_step

    def _pause(self, reason: PauseReason) -> NoReturn:
        self._save_last(reason.sentence, mark=self._mark, patiently=False)
        self._unwind(reason)

    def _unwind(self, reason: PauseReason) -> NoReturn:
        self.unwinding = reason
        if reason is not PauseReason.LEFT:
            self._tell(at_once=True)
        raise Unwind(reason)

    def _report_due(self) -> bool:
        return self._clock() - self._report_time >= _REPORT_SECONDS

    def _tell(self, *, at_once: bool = False) -> None:
        if not self.group.is_first or not (at_once or self._report_due()):
            return
        self.training_metrics.settle()
        self._report_time = self._clock()
        self._report(self.progress())

    def _count_time(self) -> None:
        if self.training_metrics.samples > self._paced_samples:
            seconds = self._clock() - self._boundary_time
            self._pace.add(self.training_metrics.samples - self._paced_samples, seconds)
            self.training_metrics.slot_seconds += seconds * self.group.size
            self._mailbox.underway.set()
            self._paced_samples = self.training_metrics.samples

    def _seed(self) -> None:
        """Seed the random numbers drawn between batches, the same on all members."""
        random_streams.seed_all(self.options.seed, *self.cursor.place)
        if self._state.scaling is not None:
            self._state.scaling.aim(self.group.size)

    # ── other groups ──────────────────────────────────────────────────────────────────────────────

    def _recover(self, error: PeerFailed) -> None:
        """Continue without the failed members, in place; the current batch, if any, is interrupted.

        Raises
        ------
        PeerFailed
            The training cannot continue in place.
        Unwind
            The others continue without this member.
        """
        if not self._in_place:
            raise error
        began = self._clock()
        self._change_group(lambda: self._members.strand(str(error)), began)

    def _change_group(self, first_order: Callable[[], Any], began: float | None) -> None:
        """Leave the group and continue in the one given by a command, which may change while the group forms."""
        left = self._members.move(first_order, self._place)
        if left:
            self._unwind(PauseReason.LEFT)
        self._regrouped = True
        self.checkpoint_manager.rejoin()
        paused = 0.0 if began is None else self._clock() - began
        self._pace.restart()
        self._members.tell_regrouped(paused)
        self._tell(at_once=True)

    def _place(self) -> tuple[int, ...]:
        """Return this member's position and a fingerprint of its parameters; a newcomer has no position yet."""
        assert self.batch_runner is not None, "groups change only in the loop"
        begun = not self._members.is_newcomer
        return (int(begun), *(int(value) for value in self.cursor.place), self.batch_runner.fingerprint())

    def _adopt(self, state: dict[str, Any]) -> None:
        """Load the state of a member that is ahead."""
        if not self._members.is_newcomer and state["cursor"]["epoch"] != self.cursor.epoch:
            # The user's loop is in an epoch that the others have left, and cannot be advanced from here.
            self._unwind(PauseReason.LEFT)
        self._state.adopt(state)

    # ── saving and restoring ──────────────────────────────────────────────────────────────────────

    def _save(self, reason: str, *, mark: tuple[int, ...]) -> None:
        """Save in the background, unless the state with this mark is saved already; all members call this.

        Raises
        ------
        TrainingError
            This write and all before it have failed: no checkpoint can be written.
        """
        self.checkpoint_manager.save(self._state.whole, wait=False, mark=mark, **self._facts(reason))

    def _save_last(self, reason: str, *, mark: tuple[int, ...] | None, patiently: bool) -> None:
        """Save the final state of the fragment, see `CheckpointManager.save_last`; all members call this."""
        self.checkpoint_manager.save_last(self._state.whole, patiently=patiently, mark=mark, **self._facts(reason))

    def _facts(self, reason: str) -> dict[str, Any]:
        return {"step": self.training_metrics.step, "epoch": self.cursor.epoch, "reason": reason}

    @property
    def _mark(self) -> tuple[int, ...]:
        """Identifies the current state, to compare it with saved ones."""
        return self.training_metrics.step, *self.cursor.place

    def _look_after_writing(self, look: Callable[[], None]) -> None:
        """Call `look`, and report progress if it has found a new checkpoint."""
        before = self.checkpoint_manager.newest
        look()
        if self.checkpoint_manager.newest != before:
            self._tell(at_once=True)

    def _batch_runner_in_hand(self) -> BatchRunner:
        self.check_running()
        if self.batch_runner is None or not self.batch_runner.has_piece:
            raise UsageError(
                "session.step() was called without a batch of session.loader(), or twice for one: create the loader "
                "with data = session.loader(dataset, batch_size=…) before the epoch loop, write `for … in data:`, and "
                "call session.step() once in it"
            )
        return self.batch_runner
