"""Failures of a training job's members: which belong together, whether the others need who failed, who continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs import commands as do
from freetrain_parsl.executor.jobs.training.rank_order import intact_after
from freetrain_parsl.executor.jobs.training.states import (
    Ended,
    Failure,
    Pausing,
    Recovering,
    Role,
    Starting,
    fewest_to_exclude,
    survivors,
)

if TYPE_CHECKING:
    from freetrain_parsl.errors import TooManyRestarts
    from freetrain_parsl.executor.driver.slot_registry import SlotRegistry
    from freetrain_parsl.executor.jobs.commands import Response
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.executor.jobs.training.group import TrainingProcesses
    from freetrain_parsl.executor.jobs.training.progress import ProgressTracker
    from freetrain_parsl.executor.jobs.training.states import Participant
    from freetrain_parsl.protocol.reports import GroupFailed, PeersFailed

__all__ = ["Recovery"]

_GATHER = 0.1  # seconds: the slots of a node rarely fail at the same instant


class Recovery:
    """The failures of one training job that have had no response yet, and the response.

    Attributes
    ----------
    pending
        The failures; ``None``: there are none.
    """

    def __init__(
        self, request: TrainingRequest, processes: TrainingProcesses, tracker: ProgressTracker, response: Response
    ) -> None:
        self.pending: Recovering | None = None
        self._request = request
        self._processes = processes
        self._tracker = tracker
        self._response = response

    def note(self, failure: Failure) -> None:
        """Note a failure."""
        before = [] if self.pending is None else self.pending.failures
        self.pending = Recovering(self._processes.phase, [*before, failure], self._response.now)

    def miss(self, lost: Participant, failure: Failure) -> None:
        """Note the loss of a slot; if it was to leave in a change, only if the others may still need it.

        Otherwise the command to continue after a failure would interrupt them in the next group. Nobody needs a member
        of a start that was called off, which may be killed because it was far behind the others.
        """
        change, phase = self._processes.change, self._processes.phase
        if lost.role is Role.LEAVER and isinstance(phase, Pausing) and not phase.reported:
            return
        if change is None or lost.role is not Role.LEAVER:
            self.note(failure)
        elif not change.failure:
            change.lost_leavers.append((failure, self._response.now))

    def exclude_unreachable(self, report: GroupFailed | PeersFailed, registry: SlotRegistry) -> None:
        """Exclude the members that the others cannot reach, after a group could not be formed."""
        processes, participants = self._processes, self._processes.participants
        groups = [group for group in (processes.next_group, processes.group) if group is not None]
        ranks = next((group.ranks for group in groups if group.number == report.generation), ())
        with_state = [one.slot for one in participants.values() if one.has_state]
        for slot in fewest_to_exclude(ranks, report.unreachable, with_state):
            member, over = participants.get(slot), isinstance(processes.phase, Ended)
            if member is None or slot not in registry.slots or member.unreachable or over:
                continue
            member.unreachable = True
            reason = f"other nodes of training job {self._request.name} cannot reach it, though it reaches the driver"
            self._response.do(do.SetAside(slot, reason))
            processes.blame(slot, member.node)
            self.note(Failure(f"{member.node}: {reason}", crash=False))

    @property
    def is_due(self) -> bool:
        """Whether no other failure is awaited that belongs to the pending ones."""
        group, pending = self._processes.group, self.pending
        assert pending is not None
        return group is None or not group.running or self._response.now - pending.latest >= _GATHER

    def count(self) -> TooManyRestarts | None:
        """Count the pending failures, which get their response now; return an error if there were too many crashes."""
        assert self.pending is not None
        failures, self.pending = self.pending.failures, None
        failure = next((one for one in failures if one.crash), failures[-1])
        if failure.crash:
            self._tracker.count_crash(failure.reason)
        return self._tracker.too_many_crashes()

    def regroup(self, *, with_newcomers: bool) -> tuple[str, ...]:
        """Continue in place with the survivors; return their slots; empty: none of them has the state."""
        group, phase, change = self._processes.group, self._processes.phase, self._processes.change
        reported = not isinstance(phase, Starting) and not (isinstance(phase, Pausing) and not phase.reported)
        if group is None or not (self._tracker.in_place and reported):
            return ()
        replicas = 1
        if self._request.options.replicas > 1:
            ranks, replicas = intact_after(self._processes.participants, group, change)
        else:
            ranks = survivors(
                self._processes.participants,
                group,
                change,
                with_newcomers=with_newcomers,
                allowed=self._tracker.allowed_counts,
            )
        if ranks:
            self._processes.regroup(ranks, replicas, failure=True)
        return ranks
