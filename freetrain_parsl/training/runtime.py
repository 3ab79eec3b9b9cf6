"""The work between two steps: votes, commands, changes of the group, saves and pauses.

Decisions to stop, to save or to regroup are made at *boundaries*: when the next batch or the next epoch is requested.
By then the user's loop has done everything that follows a step, and the state is consistent. At a boundary the members
of a group sum one small vector, so that all of them decide the same; a group of one does not communicate.

Every member has the whole state, so the members are replicas of each other. When one fails, the others leave the group
and form a new one, and members that are a step behind receive the state of one that is ahead; the interrupted batch is
repeated. The same holds for replicas of several members, between which the state is divided: `replica_groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.protocol.reports import PauseReason, Report
from freetrain_parsl.training.best_epoch import KEEP
from freetrain_parsl.training.checkpoints.loading import Restoration
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.checkpoints.state import SessionState, Stateful
from freetrain_parsl.training.data import random_streams
from freetrain_parsl.training.data.batch_norm import divisible_for
from freetrain_parsl.training.decisions import Decisions
from freetrain_parsl.training.extension import SessionExtension, check_extension, extension_for, recalled
from freetrain_parsl.training.group.process_group import Group
from freetrain_parsl.training.group.shared_calls import SharedCalls
from freetrain_parsl.training.group.shared_gradients import Link
from freetrain_parsl.training.group.shared_results import first_value
from freetrain_parsl.training.preparation import parameters_of, size_of
from freetrain_parsl.training.progress import ProgressReporter
from freetrain_parsl.training.replicas.check import ReplicaCheck
from freetrain_parsl.training.step.batch_runner import BatchRunner
from freetrain_parsl.training.step.bypass import BypassCheck
from freetrain_parsl.training.step.closure import needs_closure
from freetrain_parsl.training.step.learning_rate import check_schedulers

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
    from freetrain_parsl.training.step.loss_kind import Reduction


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
        self.recorder = recorder
        self.extension = extension or SessionExtension()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.checkpoint_manager = manager = CheckpointManager(options, lambda: members.group)
        self.state = SessionState(options.seed, lambda: manager.newest.path if manager.newest else manager.path)
        self.reporter = ProgressReporter(self.state, manager, members, report, clock, self.extension)
        self.replicas = ReplicaCheck(options.name, self.state, members.note)
        self.replicas.loop = self.state.loop.shared
        self._shared_calls = SharedCalls(self.state, members, self.reporter, self._interrupt, self._recover)
        self._decisions = Decisions(
            options, members, mailbox, self.state, self.reporter, manager, self.replicas, clock, lambda: self.extension
        )
        self.batch_runner: BatchRunner | None = None
        """Set by `start`."""
        self.at_start: list[Callable[[], None]] = []
        """Called when the loop begins, before anything is drawn in it."""
        self.started = False
        """Whether the user's loop has begun."""
        self.unwinding: PauseReason | None = None
        """Why the user's function is being left; ``None`` while it runs."""

        self._mailbox = mailbox
        self._clock = clock
        self._regrouped = False  # whether the group has changed since the last boundary
        self._memory = memory
        restored = None if members.is_newcomer else self._restore()
        self._restored = None if restored is None else Restoration(restored)
        self._received: dict[str, Any] | None = None  # by a newcomer, until its loop comes to the batches
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
        """Judge each epoch from now on.

        Raises
        ------
        UsageError
            The loop has begun, or this was called before for the same verb.
        """
        if self.started:
            raise UsageError(f"call session.{best.verb} before `for epoch in session.epochs(…)`")
        followed = self.state.best_epochs.followed
        if best.verb in followed:
            raise UsageError(f"call session.{best.verb} once, with one metric")
        followed[best.verb] = best
        if self._restored is not None:
            self.state.best_epochs.load(self._restored.state["best"])

    def keep(self, values: Mapping[str, Any], *, per_process: bool) -> LoopState:
        """Keep values of the user's loop from now on; restore them, if there is a checkpoint.

        Raises
        ------
        UsageError
            The loop has begun, or a name or value cannot be used.
        """
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
        check_schedulers(self.state.objects.values())
        self.state.trainable.watch(self.state.objects)
        if self._restored is not None:
            self._load_again(self._restored, tell=True)
            if not self.state.cursor.is_inside:
                self._restored = None
        self.members.parts = self.extension
        self.members.state = lambda: self.extension.sent(self.state.whole())
        self.members.adopt = self._adopt
        self.members.meet_replicas = self.replicas.meet
        if self.members.is_newcomer:
            self._change_group(self.members.await_command, began=None)
        else:
            try:
                self.members.exchange(self._place)
            except PeerFailed as error:
                self._recover(error)
        self.started = True
        self._shared_calls.batch_runner = self.batch_runner
        # The interval starts here: before the loop there is nothing to save.
        now = self._clock()
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
            self._mailbox.underway.set()
        if not self._regrouped:  # otherwise the group has just been formed in this boundary
            try:
                self._decide()
            except PeerFailed as error:
                self._recover(error)
        self._regrouped = False
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
        self.boundary()
        epoch = self.state.cursor.epoch
        self.state.training_metrics.open_epoch(epoch)
        return epoch

    def begin_pass(self) -> None:
        """Undo the changes of the code before the batches, if it has run in this epoch before.

        In a process that joins or resumes inside an epoch, ``for epoch in session.epochs(…)`` begins with code that was
        run at the start of the epoch, such as ``state.total = 0``; the state belongs to a later batch.
        """
        if self._restored is not None:
            self._load_again(self._restored, tell=False)
            self._restored = None
        if self._received is not None:
            self.state.adopt_objects(self.extension.received(self._received))
            self._received = None

    def _load_again(self, restored: Restoration, *, tell: bool) -> None:
        """Load what user code has changed since it was restored; see `Restoration.load_again`."""
        restored.load_again(self.state.objects, tell=tell)
        self.state.trainable.load(restored.state["trainable"])
        self.state.loop.load(restored.loop(self.state.loop), rank=self.members.group.rank)
        self.extension.loaded_again()

    def backward(
        self,
        loss: torch.Tensor,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
        *,
        steps: bool = False,
    ) -> bool:
        """Add a piece's gradients; after the last piece, ``.grad`` has the whole batch's gradients, on all members.

        Parameters
        ----------
        loss, items, reduction
            See `BatchRunner.backward`.
        steps
            Whether `step` follows at once.

        Returns
        -------
        complete
            Whether it was the last piece.
        """
        batch_runner = self._batch_runner_in_hand()
        recorder = None if self.extension.computes else self.recorder
        if recorder is not None:
            recorder.loss(self, loss)
        try:
            batch_runner.backward(loss, items, reduction, steps=steps)
        except PeerFailed as error:
            self._interrupt(error)
        if recorder is not None:
            recorder.gradients(self)
        return batch_runner.is_complete

    def step(
        self,
        loss: torch.Tensor | None,
        optimizer: Optimizer | None,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
    ) -> bool:
        """Compute the gradients of a loss, if given, and make the optimizer step if the batch is complete.

        Returns
        -------
        made
            Whether the step was made.
        """
        if loss is not None:
            self.backward(loss, items, reduction, steps=True)
        batch_runner = self._batch_runner_in_hand()
        if not batch_runner.step(optimizer, self.state.scaling):
            return False
        self._count_step(batch_runner)
        return True

    def step_by_closure(
        self,
        closure: Callable[[], torch.Tensor],
        optimizer: Optimizer | None,
        items: torch.Tensor | float | None,
        reduction: Reduction | None,
    ) -> bool:
        """Make a step of an optimizer that evaluates the loss itself, such as LBFGS; return whether it was made."""
        batch_runner = self._batch_runner_in_hand()
        optimizers = batch_runner.chosen(optimizer)
        if not any(map(needs_closure, optimizers)):
            return self.step(closure(), optimizer, items, reduction)
        if len(optimizers) > 1:
            raise UsageError("session.step(closure): say whose step it is with optimizer=…, as each evaluates the loss")

        def evaluate() -> torch.Tensor | float:
            return batch_runner.evaluation(closure, items, reduction)

        try:
            made = batch_runner.step_by_closure(optimizers[0], evaluate, self.state.scaling)
        except PeerFailed as error:
            self._interrupt(error)
            return False
        if made:
            self._count_step(batch_runner)
        return made

    def _count_step(self, batch_runner: BatchRunner) -> None:
        cursor = self.state.cursor
        cursor.steps += 1
        if cursor.steps == 1:
            self.state.training_metrics.count_step(batch_runner.batch, batch_runner.tally)
        if self.recorder is not None:
            self.recorder.step()

    def together(self, operation: Callable[[Group], Any], *, name: str, of_parts: bool) -> Any:
        """Return the result of a collective operation of user code, the same on all members; see `SharedCalls.make`."""
        self.check_running()
        return self._shared_calls.make(operation, name=name, of_parts=of_parts)

    def gradient_link(self, tensor: torch.Tensor, *, gathers: bool) -> Link | None:
        """Return the link that passes a result's gradients to all members; ``None`` without gradients or a batch."""
        batch_runner = self.batch_runner
        if batch_runner is None or not batch_runner.has_piece or not (tensor.requires_grad and torch.is_grad_enabled()):
            return None
        return Link(self.members.group, batch_runner.link(gathers=gathers))

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
        self._restored = self._received = None  # an epoch may end without coming to its batches
        self.state.loop.release()  # if user code has left an interrupted batch
        assert self.batch_runner is not None, "checked by start"
        cursor, metrics, best = self.state.cursor, self.state.training_metrics, self.state.best_epochs
        self._bypass.end_epoch(cursor.epoch, trained=metrics.has_steps)
        metrics.close_epoch(cursor.epoch)
        if best.followed:  # the first member's values count, since the others' may differ by rounding
            values = best.values_in(metrics.metrics["history"][-1])
            values = self.together(lambda group: first_value(group, values), name=KEEP, of_parts=False)
            best.judge(cursor.epoch, values, self.state.objects["model"].state_dict)
        self.batch_runner.leave_batch()
        cursor.next_epoch()
        if best.stops_early:
            self.reporter.total_epochs = cursor.epoch

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Save the final state."""
        self._bypass.end_training(self.state.training_metrics.step)
        if self._restored is not None and self.state.objects:  # there was no loop
            self._restored.check_complete(self.state.objects)
        if self.state.objects:
            # Even if this step is saved already: functions may log or change their models after the loop.
            # No process continues from here, so the other members' values are not needed.
            own = self.state.loop.gather(Group())
            self._save_last(own, "the training job is done", mark=None, patiently=True)
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
        if decision.commanded and self._refuses_change(group):
            self._pause(PauseReason.REQUESTED)
        elif decision.commanded:
            began = self._clock()
            self._change_group(self.members.take_command, began)
        elif decision.closing or decision.requested:
            self._pause(PauseReason.CLOSING if decision.closing else PauseReason.REQUESTED)
        elif decision.save_due:
            self._save("periodic", mark=self._mark)
        elif decision.copy_due:
            self.extension.copy(self.state.whole(self.state.loop.gather(Group())))

    def _pause(self, reason: PauseReason) -> NoReturn:
        own = self.state.loop.gather(self.members.group)
        self._save_last(own, reason.sentence, mark=self._mark, patiently=False)
        self._unwind(reason)

    def _unwind(self, reason: PauseReason) -> NoReturn:
        self.unwinding = reason
        if reason is not PauseReason.LEFT:
            self.reporter.send(at_once=True)
        raise Unwind(reason)

    # ── other groups ──────────────────────────────────────────────────────────────────────────────

    def _recover(self, error: PeerFailed) -> None:
        """Continue without the failed members, in place; the current batch, if any, is interrupted.

        Raises
        ------
        PeerFailed
            The training job cannot continue in place.
        Unwind
            The others continue without this member.
        """
        if not self.extension.in_place or (self.extension.spreads and self.members.group.replicas == 1):
            raise error
        began = self._clock()
        self._change_group(lambda: self.members.strand(str(error)), began)

    def _interrupt(self, error: PeerFailed) -> None:
        """Interrupt the current batch after a failure, and continue without the failed members.

        Raises
        ------
        PeerFailed
            The training job cannot continue in place, or the loop's state cannot be put back to the batch's beginning.
        """
        assert self.batch_runner is not None, "there is a batch"
        loop, place = self.state.loop, self.state.cursor.place
        if not loop.can_be_undone(has_stepped=self.batch_runner.has_stepped):
            raise error
        self.batch_runner.cut()
        loop.cut()
        self._recover(error)
        loop.hold(repeats=self.state.cursor.place == place)
        self.batch_runner.hold()

    def _refuses_change(self, group: Group) -> bool:
        """Return whether the group cannot change in place now, and say why; all members call this."""
        if not self.extension.spreads:
            return False
        reason = self.extension.obstacle(group, self.members.next_size)
        if reason is not None:
            self.members.note(f"saved and resumed instead of changed in place: {reason}")
        return reason is not None

    def _change_group(self, first_command: Callable[[], Any], began: float | None) -> None:
        """Leave the group and continue in the one given by a command, which may change while the group forms."""
        left = self.members.move(first_command, self._place)
        if left:
            self._unwind(PauseReason.LEFT)
        self._regrouped = True
        self.replicas.have_met()
        self.checkpoint_manager.rejoin()
        paused = 0.0 if began is None else self._clock() - began
        self.reporter.pace.restart()
        self.members.tell_regrouped(paused)
        self.reporter.send(at_once=True)

    def _place(self) -> tuple[int, ...]:
        """Return this member's position and the standing of its replica; a newcomer has no position yet."""
        begun = not self.members.is_newcomer
        changes = 0 if self.state.batch is None else self.state.batch.changes
        place = (int(value) for value in self.state.cursor.place)
        return (int(begun), *place, changes, self.state.results.number, *self.replicas.standing())

    def _adopt(self, state: dict[str, Any]) -> None:
        """Load the state of a member that is ahead."""
        cursor = self.state.cursor
        if self._shared_calls.underway and cursor.pass_ended and cursor.leads_to(state["cursor"]):
            # Only the result is missing: the others have done what this member's code will do after the epoch.
            self.state.results.load(state["results"])
            return
        if not self.members.is_newcomer and state["cursor"]["epoch"] != cursor.epoch:
            # The user's loop is in an epoch that the others have left, and cannot be advanced from here.
            self._unwind(PauseReason.LEFT)
        self.state.adopt(self.extension.received(state))
        if self.members.is_newcomer and self.state.cursor.is_inside:
            self._received = state

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

    def _save(self, reason: str, *, mark: tuple[int, ...]) -> None:
        """Save in the background, unless the state with this mark is saved already; all members call this.

        Raises
        ------
        TrainingError
            This write and all before it have failed: no checkpoint can be written.
        """
        own = self.state.loop.gather(self.members.group)
        self.checkpoint_manager.save(lambda: self.state.whole(own), wait=False, mark=mark, **self._facts(reason))

    def _save_last(
        self, own: Sequence[Mapping[str, Any]], reason: str, *, mark: tuple[int, ...] | None, patiently: bool
    ) -> None:
        """Save the final state of the fragment, see `CheckpointManager.save_last`; all members call this."""
        self.checkpoint_manager.save_last(
            lambda: self.state.whole(own), patiently=patiently, mark=mark, **self._facts(reason)
        )

    def _facts(self, reason: str) -> dict[str, Any]:
        return {"step": self.state.training_metrics.step, "epoch": self.state.cursor.epoch, "reason": reason}

    @property
    def _mark(self) -> tuple[int, ...]:
        """Identifies the current state, to compare it with saved ones."""
        return self.state.training_metrics.step, *self.state.cursor.place

    def _batch_runner_in_hand(self) -> BatchRunner:
        self.check_running()
        if self.state.order is None:
            raise UsageError(
                "session.step() was called without a loader, which divides the work over the processes: create one, "
                "data = session.loader(dataset, batch_size=…) before the epoch loop; without a data set, as in "
                "reinforcement learning, over the numbers of the episodes: session.loader(range(1000), batch_size=8)"
            )
        if self.batch_runner is None or not self.batch_runner.has_piece:
            raise UsageError(
                "session.step() was called without a batch of session.loader(), or twice for one: create the loader "
                "with data = session.loader(dataset, batch_size=…) before the epoch loop, write `for … in data:`, and "
                "call session.step() once in it"
            )
        return self.batch_runner
