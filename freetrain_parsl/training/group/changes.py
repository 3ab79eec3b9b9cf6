"""What a change of the group means for a training job: the interrupted batch, the state of newcomers, the pause.

Every member has the whole state, so the members are replicas of each other. When one fails, the others leave the group
and form a new one, and members that are a step behind receive the state of one that is ahead; the interrupted batch is
repeated. The same holds for replicas of several members, between which the state is divided: `replica_groups`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import OutOfSync, PeerFailed
from freetrain_parsl.protocol.reports import PauseReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.parts import TrainingParts
    from freetrain_parsl.training.replicas.check import Standing

__all__ = ["GroupChanges"]


class GroupChanges:
    """Carries a training job through the changes of its group, on one member."""

    def __init__(self, training: TrainingParts) -> None:
        self._training = training
        self._turn = 0  # number of boundaries passed
        self._at_boundary = True  # whether this member is at the next one, or before the first
        self._calls = 0  # number of collective operations of user code up to the last boundary
        self._furthest = 0  # in a new group: number of boundaries passed by those that have passed most
        self._settled = 0  # number of boundaries that need no decision, as some members have changed the group in them
        self._is_behind = False  # whether others have the next batch in an interrupted attempt
        self._are_in_batch = False  # whether all that are ahead are in a batch
        self._has_gradients = False  # whether it changes in such an operation between gradients and their step
        self.in_call = False
        """Whether it changes in a collective operation of user code."""
        self.received: dict[str, Any] | None = None
        """The state that a newcomer has received, until its loop comes to the batches."""
        self.joins_in_batch = False
        """Whether the others were in a batch then, and had run the code before it."""

    @property
    def _members(self) -> GroupMember:
        return self._training.members

    def begin(self) -> None:
        """Come to the same position as the other members, before the loop; a newcomer waits here to join the group."""
        training, members = self._training, self._members
        self._calls = training.state.results.number
        extension = members.parts = training.extension
        members.state = lambda: extension.sent(training.state.whole())
        members.adopt = self._adopt
        members.meet_replicas = training.replicas.meet
        members.align = self._align
        if members.is_newcomer:
            self._move(members.await_command, began=None)
            return
        try:
            members.exchange(self._place)
        except PeerFailed as error:
            self.recover(error)

    def reach_boundary(self) -> bool:
        """Note that this member is at a boundary; return whether the members decide there."""
        self._at_boundary = True
        return self._turn >= self._settled

    def pass_boundary(self) -> None:
        """Note that this member leaves a boundary."""
        self._turn, self._at_boundary, self._calls = self._turn + 1, False, self._training.state.results.number

    def carry_out_command(self) -> None:
        """Carry out the command that all members have."""
        self._move(self._members.take_command, self._training.clock())

    def are_refused(self) -> bool:
        """Return whether the group cannot change in place now, and say why; all members call this."""
        if not self._training.extension.spreads:
            return False
        reason = self._training.extension.obstacle(self._members.group, self._members.next_size)
        if reason is not None:
            self._members.note(f"saved and resumed instead of changed in place: {reason}")
        return reason is not None

    def recover(self, error: PeerFailed) -> None:
        """Continue without the failed members, in place, outside a batch.

        Raises
        ------
        PeerFailed
            The training job cannot continue in place.
        Unwind
            The others continue without this member.
        """
        extension, members = self._training.extension, self._members
        if not extension.in_place or (extension.spreads and members.group.replicas == 1):
            raise error
        began = self._training.clock()
        self._move(lambda: members.strand(str(error)), began)

    def interrupt(self, error: PeerFailed) -> None:
        """Interrupt the current batch after a failure, and continue without the failed members.

        Raises
        ------
        PeerFailed
            The training job cannot continue in place, or what user code has done in the batch cannot be undone.
        """
        state, batch_runner = self._training.state, self._training.batch_runner
        assert batch_runner is not None, "there is a batch"
        can_be_undone = batch_runner.can_be_undone and state.loop.can_be_undone(has_stepped=batch_runner.has_stepped)
        # Code under `if session.step(…)` is not repeated, and the call may stand there, before a scheduler's step.
        if not can_be_undone or (self.in_call and batch_runner.may_still_act):
            raise error
        self._has_gradients = self.in_call and batch_runner.is_complete
        self._interrupt(lambda: self.recover(error))

    def join_attempt(self) -> None:
        """Take part, at the beginning of a batch, in the attempt at it that has been interrupted in other members.

        The code that follows in the loop's body may call collective operations, in those members as in this one.
        """
        if self._is_behind:
            self._is_behind = False
            self._interrupt(lambda: None)

    def _interrupt(self, change: Callable[[], None]) -> None:
        """Interrupt the current batch, and change the group."""
        state, batch_runner = self._training.state, self._training.batch_runner
        assert batch_runner is not None, "there is a batch"
        place = state.cursor.place
        batch_runner.cut()
        state.loop.cut()
        change()
        self._has_gradients = False
        repeats, in_batch = state.cursor.place == place, state.cursor.place[:3] == place[:3]
        if in_batch and not repeats and batch_runner.acts_once:
            raise OutOfSync("the others have made a further step of the batch: they continue without it")
        state.loop.hold(repeats=repeats)
        batch_runner.hold(made=state.cursor.steps if in_batch else math.inf, repeats=repeats)

    def _align(self, standings: Sequence[Standing], ahead: Sequence[int]) -> None:
        """Compare with the members that are ahead in the data which boundaries have been passed.

        A boundary ends when all members have come to it, so none is further than at the next. If a failure reaches a
        member at a boundary, others may have passed it, and have the next batch.

        Raises
        ------
        OutOfSync
            This member is new, and the others are in the middle of user code that it would run from its beginning; or
            members have different pieces of a batch, or some have no gradients of it, and user code calls collective
            operations.
        """
        furthest = max((standings[rank] for rank in ahead), key=lambda each: (each.turn, each.at_boundary, each.piece))
        pieces = {each.piece for each in standings if each.turn == furthest.turn and each.piece}
        if len(pieces) > 1 and any(each.calls for each in standings):
            raise OutOfSync("the processes have different pieces of a batch: it resumes from its checkpoint")
        if len({each.has_gradients for each in standings if each.turn == furthest.turn and each.piece}) > 1:
            raise OutOfSync("not all processes have the gradients of a batch: it resumes from its checkpoint")
        in_batch = [rank for rank in ahead if standings[rank].piece]
        self._are_in_batch = len(in_batch) == len(ahead)
        if self._members.is_newcomer:
            in_body = furthest.calls > 0 or not in_batch
            if in_body and not any(standings[rank].at_boundary for rank in ahead):
                raise OutOfSync("the others are in the middle of their loop's body: it joins them later")
            self._turn = furthest.turn - (not furthest.at_boundary)  # of the boundary that opens its first epoch
        self._furthest = furthest.turn
        self._is_behind = furthest.piece > 0 and self._turn < furthest.turn

    def _move(self, first_command: Callable[[], Any], began: float | None) -> None:
        """Leave the group and continue in the one given by a command, which may change while the group forms."""
        training, members = self._training, self._members
        if members.move(first_command, self._place):
            training.unwind(PauseReason.LEFT)
        self._settled = self._furthest + 1
        training.replicas.have_met()
        paused = 0.0 if began is None else training.clock() - began
        training.reporter.pace.restart()
        members.tell_regrouped(paused)
        training.checkpoint_manager.rejoin()  # a hanging file system does not let the driver take this process for dead
        training.reporter.send(at_once=True)

    def _place(self) -> tuple[int, ...]:
        """Return this member's position and the standing of its replica; a newcomer has no position yet."""
        state = self._training.state
        changes = 0 if state.batch is None else state.batch.changes
        place = (int(value) for value in state.cursor.place)
        batch_runner = self._training.batch_runner
        standing = self._training.replicas.standing(
            self._turn,
            at_boundary=self._at_boundary,
            piece=batch_runner.pieces_begun if batch_runner is not None and batch_runner.has_piece else 0,
            calls=state.results.number - self._calls + state.cursor.steps,
            has_gradients=self._has_gradients,
        )
        return (int(not self._members.is_newcomer), *place, changes, state.results.number, *standing)

    def _adopt(self, sent: dict[str, Any]) -> None:
        """Load the state of a member that is ahead."""
        state, cursor, batch_runner = self._training.state, self._training.state.cursor, self._training.batch_runner
        in_batch = batch_runner is not None and batch_runner.has_piece
        leads = cursor.pass_ended and cursor.leads_to(sent["cursor"])
        has_missed = self.in_call and sent["results"]["number"] > state.results.number
        if not in_batch and (leads or (has_missed and sent["cursor"] == cursor.state())):
            # At most a result is missing: the others have done what this member's code will do after the batches.
            state.results.load(sent["results"])
            return
        if not self._members.is_newcomer and sent["cursor"]["epoch"] != cursor.epoch:
            # The user's loop is in an epoch that the others have left, and cannot be advanced from here.
            self._training.unwind(PauseReason.LEFT)
        state.adopt(self._training.extension.received(sent))
        if self._members.is_newcomer:
            self.received, self.joins_in_batch = sent, self._are_in_batch
