"""The work between two steps: votes, commands, changes of the group, saves and pauses.

Decisions to stop, to save or to regroup are made at *boundaries*: when the next batch or the next epoch is requested.
By then the user's loop has done everything that follows a step, and the state is consistent. At a boundary the members
of a group sum one small vector, so that all of them decide the same; a group of one does not communicate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.protocol.reports import PauseReason, Report
from freetrain_parsl.training.best_epoch import KEEP
from freetrain_parsl.training.checkpoints.loading import FINAL, Restoration
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.checkpoints.state import SessionState, Stateful
from freetrain_parsl.training.data import random_streams
from freetrain_parsl.training.data.batch_norm import divisible_for
from freetrain_parsl.training.exchange.shared_calls import SharedCalls
from freetrain_parsl.training.extension import SessionExtension, check_extension, extension_for, recalled
from freetrain_parsl.training.group.changes import GroupChanges
from freetrain_parsl.training.group.decisions import Decisions
from freetrain_parsl.training.group.process_group import Group
from freetrain_parsl.training.preparation import parameters_of, size_of
from freetrain_parsl.training.progress import ProgressReporter
from freetrain_parsl.training.replicas.check import ReplicaCheck
from freetrain_parsl.training.step.batch_runner import BatchRunner
from freetrain_parsl.training.step.bypass import BypassCheck
from freetrain_parsl.training.step.learning_rate import check_schedulers
from freetrain_parsl.training.step.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.best_epoch import BestEpoch
    from freetrain_parsl.training.checkpoints.format import Restored
    from freetrain_parsl.training.data.lazy_positions import Positions
    from freetrain_parsl.training.data.order import Order
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.loop_state import LoopState
    from freetrain_parsl.training.mailbox import Clock, ControlMailbox
    from freetrain_parsl.training.node_memory import NodeMemory
    from freetrain_parsl.training.recorder import Recorder
    from freetrain_parsl.training.step.learning_rate import LrScaling


class Unwind(BaseException):
    """Carries a pause through the user's function; a BaseException, so that ``except Exception`` does not stop it."""

    def __init__(self, reason: PauseReason) -> None:
        super().__init__(reason.sentence)
        self.reason = reason


class Runtime:
    """Decides at the boundaries of a training job, together with the other members, how it continues.

    Parameters
    ----------
    options
        Options of the training job.
    members
        This member's view of the group.
    mailbox
        Commands of the slot.
    report
        Receives the progress on the first member, and the changes of the group on all; must not block.
    clock
        Monotonic clock, in seconds.
    recorder
        Sees what happens, in a check of the function.
    extension
        Takes part in the training job, until the prepared objects need another.
    memory
        Keeps copies of a sharded state; ``None``: there are none.

    Raises
    ------
    DamagedCheckpoint, CheckpointMismatch, CheckpointError
        The training job has checkpoints, but cannot resume from them.
    """

    def __init__(
        self,
        options: SessionOptions,
        members: GroupMember,
        mailbox: ControlMailbox,
        report: Callable[[Report], None],
        clock: Clock,
        recorder: Recorder | None = None,
        extension: SessionExtension | None = None,
        memory: NodeMemory | None = None,
    ) -> None:
        self.options = options
        self.members = members
        self.mailbox = mailbox
        self.clock = clock
        self.recorder = recorder
        self.extension = extension or SessionExtension()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.checkpoint_manager = manager = CheckpointManager(options, lambda: members.group)
        self.state = SessionState(options.seed, lambda: manager.newest.path if manager.newest else manager.path)
        self.reporter = ProgressReporter(self.state, manager, members, report, clock, self.extension)
        self.replicas = ReplicaCheck(options.name, self.state, members.note)
        self.batch_runner: BatchRunner | None = None
        """Set by `start`."""
        self.at_start: list[Callable[[], None]] = []
        """Called when the loop begins, before anything is drawn in it."""
        self.started = False
        """Whether the user's loop has begun."""
        self.without_batches = False
        """Whether the epoch has had its last batch before this process resumed or joined."""
        self._between_loops = False  # whether user code may have run between two loops over epochs
        self.unwinding: PauseReason | None = None
        """Why the user's function is being left; ``None`` while it runs."""

        self._decisions = Decisions(self)
        self._changes = GroupChanges(self)
        self.steps = Steps(self, self._changes)
        self.together = SharedCalls(self, self._changes).make
        self.join_attempt = self._changes.join_attempt
        self._memory = memory
        restored = None if members.is_newcomer else self._restore()
        self._restored = None if restored is None else Restoration(restored)
        if restored is not None:
            self.state.take_counts(restored.state)
            is_durable = restored.entry == manager.newest
            self.reporter.resumed(restored, from_memory=not is_durable)
            if is_durable:
                manager.mark_saved(self._mark)
        self._bypass = BypassCheck(self.extension.acts)  # last: its hooks in torch stay until `close`

    def close(self) -> None:
        """Leave the group, wait for a background checkpoint, and restore torch's settings."""
        self.extension.close()
        self.members.leave()
        self._bypass.close()
        if self.batch_runner is not None:
            self.batch_runner.close()
        self.checkpoint_manager.close()

    # ── before the loop ───────────────────────────────────────────────────────────────────────────

    def register(self, objects: Mapping[str, Stateful]) -> None:
        """Include further objects in the state, and restore them, in this order, if there is a checkpoint.

        Parameters
        ----------
        objects
            Name -> object; the first of all is the model.

        Raises
        ------
        UsageError
            The loop has begun.
        CheckpointMismatch
            The checkpoint contains other objects.
        """
        if self.started:
            raise UsageError("call session.prepare before the loop, with everything that has a state")
        if self.recorder is not None:
            self.recorder.prepared(objects)
        known = self.state.objects
        known |= objects
        self.extension = extension_for(known, self.extension)
        self.extension.prepared(objects, self.members, self.device)
        self.checkpoint_manager.choose_saver(self.extension)
        self.reporter.prepared_by = self.extension
        self._bypass.watch(parameters_of(known.values()))
        self.checkpoint_manager.assume_size(size_of(known))
        if self._restored is not None:
            self._restored.load(known, objects)

    def planned(self, order: Order) -> Order:
        """Return the order of the data to use: a shorter one in a check of the function."""
        return order if self.recorder is None else self.recorder.order(order)

    def use(self, order: Order, *, lr_scaling: LrScaling, ramp: int) -> None:
        """Train on a dataset in this order.

        Raises
        ------
        UsageError
            There already is a loader, or the loop has begun.
        CheckpointMismatch
            The checkpoint belongs to another dataset or batch size.
        """
        if self.started:
            raise UsageError(
                "session.loader() was called inside the epoch loop; call it before the loop: "
                "`data = session.loader(…)`, then `for epoch in session.epochs(…):`, then `for … in data:`"
            )
        if self.state.order is not None:
            raise UsageError("a session has one loader; for other data, as in validation, use a torch DataLoader")
        self.state.use(order, lr_scaling, ramp)
        if self._restored is not None:
            self.state.take_order(self._restored.state)

    def _make_batch_runner(self) -> BatchRunner:
        """Return a batch runner for the prepared objects in the order of the loader."""
        order = self.state.order
        batch_runner = BatchRunner(
            self.state.objects["model"],  # type: ignore[arg-type]  # checked by prepare
            list(self.state.objects.values()),
            self._bypass,
            self.extension,
        )
        if order is None:
            return batch_runner
        if order.shards is not None:
            batch_runner.fix_order(self.device)
        batch_runner.one_step = order.micro_batch is not None or order.shards is not None
        if self.state.batch is not None:
            batch_runner.measure_noise(self.state.batch.noise)
        return batch_runner

    def follow(self, best: BestEpoch) -> None:
        """Judge each epoch from now on; raises UsageError in the loop, or if the verb was called before."""
        if self.started:
            raise UsageError(f"call session.{best.verb} before `for epoch in session.epochs(…)`")
        followed = self.state.best_epochs.followed
        if best.verb in followed:
            raise UsageError(f"call session.{best.verb} once, with one metric")
        followed[best.verb] = best
        if self._restored is not None:
            self.state.best_epochs.load(self._restored.state["best"])

    def keep(self, values: Mapping[str, Any], *, per_process: bool) -> LoopState:
        """Keep values of the user's loop from now on; restore them, if there is a checkpoint."""
        if self.started:
            raise UsageError("call session.state before `for epoch in session.epochs(…)`, and assign its values inside")
        state = self.state.loop.declare(values, per_process=per_process, device=self.device)
        if self._restored is not None:
            kept = self._restored.loop(self.state.loop, values)
            self.state.loop.load(kept, rank=self.members.group.rank, names=set(values))
        return state

    def start(self, total_epochs: int) -> None:
        """Begin to train: from here on the random numbers depend on the position in the data.

        Until here all members, in all fragments, draw the random numbers of a plain script, so that what the user's
        function creates before its loop (initial weights, a random split) does not depend on the fragment. A newcomer
        waits here to join the group.
        """
        if not any(isinstance(thing, Optimizer) for thing in self.state.objects.values()):
            raise UsageError("call session.prepare(model, optimizer) before session.epochs()")
        self.reporter.total_epochs = total_epochs
        if self.started:
            self._between_loops = True
            return
        check_extension(self.state.objects, self.extension)
        for begin in self.at_start:
            begin()
        if self.state.order is not None:
            self.state.order = divisible_for(self.state.objects.values(), self.state.order)
        if self._memory is not None and self.options.makes_copies:
            self.extension.use_memory(self._memory, self.options, self.members)
        if self.options.replicas > 1:
            self.extension.use_replicas(self.members)
        self.extension.started(self.state, lambda: self.batch_runner is not None and self.batch_runner.has_piece)
        self.batch_runner = self._make_batch_runner()
        check_schedulers(self.state.objects.values(), search=not self.members.is_newcomer)
        self.state.trainable.watch(self.state.objects)
        if self._restored is not None:
            self._load_again(self._restored, tell=True)
        self._changes.begin()
        self.started = True
        self._bypass.begin_loop(self.state.objects.values())
        # The interval starts here: before the loop there is nothing to save.
        now = self.clock()
        self.checkpoint_manager.due(now)
        self.reporter.start_counting(now)
        self.state.aim(self.members.group.size)
        self.seed()
        self.reporter.send(at_once=True)
        if self.recorder is not None:
            self.recorder.started()

    # ── in the loop ───────────────────────────────────────────────────────────────────────────────

    def boundary(self, *, seed: bool = True) -> None:
        """Decide, together with the other members, whether to stop, to save, or to change the group.

        Parameters
        ----------
        seed
            Whether user code or a fetch may follow that draws random numbers.

        Raises
        ------
        Unwind
            To stop: the state is saved, or other members have it.
        PeerFailed
            A member has failed, and the training job cannot continue in place.
        """
        self.extension.boundary()
        self.check_running()
        if self.recorder is not None:
            self.recorder.boundary(self)
        if self.reporter.count_step():
            self.mailbox.underway.set()
        if self._changes.reach_boundary():
            try:
                self._decide()
            except PeerFailed as error:
                if self.state.cursor.pass_ended and self.batch_runner and self.batch_runner.averages_statistics:
                    raise  # others may validate with their mean already
                self._changes.recover(error)
        self._changes.pass_boundary()
        self.reporter.send()
        self.state.aim(self.members.group.size)
        if seed:
            self.seed()
        self.reporter.end_boundary()

    def seed(self) -> None:
        """Seed the random numbers drawn between batches, the same on all members."""
        random_streams.seed_all(self.options.seed, *self.state.cursor.place)

    def check_running(self) -> None:
        """Raise `Unwind` again if the user's function caught it."""
        if self.unwinding is not None:
            raise Unwind(self.unwinding)

    def open_epoch(self) -> int:
        """Begin or resume an epoch; return its number."""
        is_new = self._restored is not None and self._restored.is_final  # code that continues a finished job
        if self._between_loops and not is_new and not self.state.cursor.is_inside:
            self._undo_early_code()  # code between loops has run before
        self.boundary()
        cursor, epoch = self.state.cursor, self.state.cursor.epoch
        if cursor.is_inside:  # the code before the batches draws what it has drawn at the start of the epoch
            random_streams.seed_all(self.options.seed, epoch, False, 0, 0)  # noqa: FBT003 - a part of the seed
        else:
            self._restored = None
            if not self._changes.joins_in_batch:
                self._changes.received = None
        self.state.training_metrics.open_epoch(epoch)
        return epoch

    def begin_pass(self) -> None:
        """Undo the changes of the code before the batches, if it has run in this epoch before.

        In a process that joins or resumes inside an epoch, ``for epoch in session.epochs(…)`` begins with code that was
        run at the start of the epoch, such as ``state.total = 0``; the state belongs to a later batch.
        """
        self._undo_early_code()
        self._restored = self._changes.received = None

    def _undo_early_code(self) -> None:
        if self._restored is not None:
            self._load_again(self._restored, tell=False)
        if self._changes.received is not None:
            self.state.adopt_objects(self.extension.received(self._changes.received))

    def _load_again(self, restored: Restoration, *, tell: bool) -> None:
        """Load what user code has changed since it was restored; see `Restoration.load_again`."""
        restored.load_again(self.state.objects, tell=tell)
        self.state.trainable.load(restored.state["trainable"])
        self.state.loop.load(restored.loop(self.state.loop), rank=self.members.group.rank)
        self.extension.loaded_again()

    def end_pass(self, expected: Positions) -> None:
        """Close the metrics of an epoch after its last batch; `expected` are the positions of its samples."""
        self.check_running()
        order, cursor, metrics = self.state.order, self.state.cursor, self.state.training_metrics
        assert order is not None, "there is a loader"
        check_schedulers(self.state.objects.values())  # also those that were made in the loop
        self._bypass.end_pass(cursor.epoch, order.batches, trained=metrics.has_steps)
        metrics.close_pass(cursor.epoch, expected)
        cursor.pass_ended = True

    def end_epoch(self) -> None:
        """Judge the epoch, and advance to the next one."""
        self.check_running()
        self._restored = self._changes.received = None  # an epoch may end without coming to its batches
        self._check_left()
        assert self.batch_runner is not None, "checked by start"
        cursor, metrics, best = self.state.cursor, self.state.training_metrics, self.state.best_epochs
        self._bypass.end_epoch(cursor.epoch, trained=metrics.has_steps)
        self.batch_runner.leave_batch()
        metrics.close_epoch(cursor.epoch)
        if best.followed:  # the first member's values count, since the others' may differ by rounding
            values = best.values_in(metrics.metrics["history"][-1])
            values = self.together(lambda group: group.agree_on(values), name=KEEP, of_parts=False)
            best.judge(cursor.epoch, values, self.state.objects["model"].state_dict)
        self.batch_runner.is_left = False
        cursor.next_epoch()
        self.without_batches = False
        if best.stops_early:
            self.reporter.total_epochs = cursor.epoch

    def release(self) -> None:
        """Undo what user code has done in an interrupted batch, which is repeated."""
        assert self.batch_runner is not None, "there is a batch"
        self.batch_runner.release()
        self.state.loop.release()

    def _check_left(self) -> None:
        """Check that user code has left no interrupted batch, since what a failure has undone in it is not repeated.

        Raises
        ------
        PeerFailed
            It has: the training job resumes from its checkpoint.
        """
        if self.batch_runner is not None and self.batch_runner.cut_off:
            raise PeerFailed("a process failed in a batch in which the loop over the batches was left")

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Save the final state."""
        self._check_left()
        self._bypass.end_training(self.state.training_metrics.step)
        if self._restored is not None and self.state.objects and not self.started:
            self._restored.check_complete(self.state.objects)
        if self.state.objects:
            # Even if this step is saved already: functions may log or change their models after the loop.
            # No process continues from here, so the other members' values are not needed.
            own = self.state.loop.gather(Group())
            self._save_last(own, FINAL, done=True)
        self.reporter.send(at_once=True)

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────

    def _decide(self) -> None:
        """Agree with the other members on what to do at this boundary, and do it."""
        decision = self._decisions.take()
        if decision is None:
            return
        group = self.members.group
        assert self.batch_runner is not None, "checked by start"
        if any(decision) or self.state.cursor.pass_ended:
            self.batch_runner.average_statistics(group)
        if any(decision):
            self.replicas.compare_all(group)
        if decision.commanded and self._changes.are_refused():
            self._pause(PauseReason.REQUESTED)
        elif decision.commanded:
            self._changes.carry_out_command()
        elif decision.closing or decision.requested:
            self._pause(PauseReason.CLOSING if decision.closing else PauseReason.REQUESTED)
        elif decision.save_due:
            own = self.state.loop.gather(group)
            facts = self._facts("periodic")
            self.checkpoint_manager.save(lambda: self.state.whole(own), wait=False, mark=self._mark, **facts)
        elif decision.copy_due:
            self.extension.copy(self.state.whole(self.state.loop.gather(Group())))

    def _pause(self, reason: PauseReason) -> NoReturn:
        own = self.state.loop.gather(self.members.group)
        self._save_last(own, reason.sentence, done=False)
        self.unwind(reason)

    def unwind(self, reason: PauseReason) -> NoReturn:
        """Leave the user's function."""
        self.unwinding = reason
        if reason is not PauseReason.LEFT:
            self.reporter.send(at_once=True)
        raise Unwind(reason)

    # ── saving and restoring ──────────────────────────────────────────────────────────────────────

    def _restore(self) -> Restored | None:
        """Return the newest state, on all members: from copies in their memory, or else from the newest checkpoint."""
        manager = self.checkpoint_manager
        if self._memory is not None and not self.options.makes_copies:
            self._memory.empty()  # of an earlier job
            self._memory.free()
        elif self._memory is not None:
            state = recalled(self._memory, self.options, self.members.group, manager.known_step())
            if state is not None:
                manager.rejoin()
                return state
        return manager.restore()

    def _save_last(self, own: Sequence[Mapping[str, Any]], reason: str, *, done: bool) -> None:
        """Save the state with which this fragment ends, even if it is saved already if the job is `done`; on all."""
        facts, mark = self._facts(reason), None if done else self._mark
        self.checkpoint_manager.save_last(lambda: self.state.whole(own), patiently=done, mark=mark, **facts)

    def _facts(self, reason: str) -> dict[str, Any]:
        return {"step": self.state.training_metrics.step, "epoch": self.state.cursor.epoch, "reason": reason}

    @property
    def _mark(self) -> tuple[int, ...]:
        """Identifies the current state, to compare it with saved ones."""
        return self.state.training_metrics.step, *self.state.cursor.place
