"""What a change of the group means for a training job: the interrupted batch, the state of newcomers, the pause.

Every member has the whole state, so the members are replicas of each other. When one fails, the others leave the group
and form a new one, and members that are a step behind receive the state of one that is ahead; the interrupted batch is
repeated. The same holds for replicas of several members, between which the state is divided: `replica_groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.protocol.reports import PauseReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.parts import TrainingParts

__all__ = ["GroupChanges"]


class GroupChanges:
    """Carries a training job through the changes of its group, on one member."""

    def __init__(self, training: TrainingParts) -> None:
        self._training = training
        self.is_new = False
        """Whether the group has changed since the last boundary."""
        self.in_call = False
        """Whether it changes in a collective operation of user code."""
        self.received: dict[str, Any] | None = None
        """The state that a newcomer has received, until its loop comes to the batches."""

    @property
    def _members(self) -> GroupMember:
        return self._training.members

    def begin(self) -> None:
        """Come to the same position as the other members, before the loop; a newcomer waits here to join the group."""
        training, members = self._training, self._members
        extension = members.parts = training.extension
        members.state = lambda: extension.sent(training.state.whole())
        members.adopt = self._adopt
        members.meet_replicas = training.replicas.meet
        if members.is_newcomer:
            self._move(members.await_command, began=None)
            return
        try:
            members.exchange(self._place)
        except PeerFailed as error:
            self.recover(error)

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
            The training job cannot continue in place, or the loop's state cannot be put back to the batch's beginning.
        """
        state, batch_runner = self._training.state, self._training.batch_runner
        assert batch_runner is not None, "there is a batch"
        place = state.cursor.place
        if not state.loop.can_be_undone(has_stepped=batch_runner.has_stepped):
            raise error
        batch_runner.cut()
        state.loop.cut()
        self.recover(error)
        state.loop.hold(repeats=state.cursor.place == place)
        batch_runner.hold()

    def _move(self, first_command: Callable[[], Any], began: float | None) -> None:
        """Leave the group and continue in the one given by a command, which may change while the group forms."""
        training, members = self._training, self._members
        if members.move(first_command, self._place):
            training.unwind(PauseReason.LEFT)
        self.is_new = True
        training.replicas.have_met()
        training.checkpoint_manager.rejoin()
        paused = 0.0 if began is None else training.clock() - began
        training.reporter.pace.restart()
        members.tell_regrouped(paused)
        training.reporter.send(at_once=True)

    def _place(self) -> tuple[int, ...]:
        """Return this member's position and the standing of its replica; a newcomer has no position yet."""
        state = self._training.state
        changes = 0 if state.batch is None else state.batch.changes
        place = (int(value) for value in state.cursor.place)
        standing = self._training.replicas.standing()
        return (int(not self._members.is_newcomer), *place, changes, state.results.number, *standing)

    def _adopt(self, sent: dict[str, Any]) -> None:
        """Load the state of a member that is ahead."""
        state, cursor = self._training.state, self._training.state.cursor
        if self.in_call and cursor.pass_ended and cursor.leads_to(sent["cursor"]):
            # Only the result is missing: the others have done what this member's code will do after the epoch.
            state.results.load(sent["results"])
            return
        if not self._members.is_newcomer and sent["cursor"]["epoch"] != cursor.epoch:
            # The user's loop is in an epoch that the others have left, and cannot be advanced from here.
            self._training.unwind(PauseReason.LEFT)
        state.adopt(self._training.extension.received(sent))
        if self._members.is_newcomer and cursor.is_inside:
            self.received = sent
