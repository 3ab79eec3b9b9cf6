"""Changes of a training job's group: taking commands, leaving and forming groups, transferring states."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import OutOfSync, PeerFailed, StateLost
from freetrain_parsl.protocol.reports import GroupFailed, Joined, Noted, Ready, Report
from freetrain_parsl.training.group.process_group import Group, join
from freetrain_parsl.training.group.spread_state import SpreadState
from freetrain_parsl.training.group.state_transfer import pass_on
from freetrain_parsl.training.replicas.check import Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.training.mailbox import ControlMailbox, Membership, Regroup

_USUAL_SIZE = 2  # of the group that a newcomer joins, if nobody knows
_BEGUN = 0  # index in a place: whether the member has a state
_STANDING = len(Standing._fields)  # numbers at the end of a place that are not part of a member's progress


class GroupMember:
    """One member's view of its current group.

    Parameters
    ----------
    membership
        Its initial membership; ``None``: it is a newcomer and waits for a command to join a group.
    meet
        Returns the store in which the members of a group meet.
    mailbox
        Contains the commands.
    report
        Receives the changes of the group.
    next_size
        For a newcomer: how many members its replica is going to have, as far as it is known.
    """

    def __init__(
        self,
        membership: Membership | None,
        meet: Callable[[Membership], Store],
        mailbox: ControlMailbox,
        report: Callable[[Report], None],
        next_size: int | None = None,
    ) -> None:
        self._meet = meet
        self._mailbox = mailbox
        self._report = report
        self.group = Group(rehearsal=next_size or _USUAL_SIZE) if membership is None else Group()
        self.parts = SpreadState()
        """Set by the runtime: moves the parts of a state that is spread over the members."""
        self.is_newcomer = membership is None
        """Whether this member waits for a state."""
        self.state: Callable[[], dict[str, Any]] = dict
        """Set by the runtime: returns the whole state."""
        self.adopt: Callable[[dict[str, Any]], None] = lambda _state: None
        """Set by the runtime: loads a whole state."""
        self.meet_replicas: Callable[[Group, Sequence[Standing], Sequence[int]], None] = lambda *_: None
        """Set by the runtime: compares the replicas in a new group, see `ReplicaCheck.meet`."""
        self.align: Callable[[Sequence[Standing], Sequence[int]], None] = lambda *_: None
        """Set by the runtime: gets the standings of all members, and the ranks of those that are ahead in the data."""
        self._transferred = 0.0
        self._generation = 0  # of the group, or of the one being formed
        if membership is not None:
            self._enter(membership)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the members as a device mesh; to a newcomer, one of the next group's size, without communication."""
        return self.group.mesh(device)

    def leave(self) -> None:
        """Leave the group; the process stays."""
        self.group.leave()
        self._mailbox.on_abort = lambda: None
        self._mailbox.blocked = lambda: 0.0

    # ── commands ──────────────────────────────────────────────────────────────────────────────────

    def has_command(self) -> bool:
        """Return whether there is a command for an agreed boundary; raises PeerFailed if it is to leave at once."""
        command = self._mailbox.pending
        if command is not None and command.abort and self.group.size > 1:
            failure = PeerFailed("a member has failed")
            if not self.group.note_failure(failure):
                raise failure
        return command is not None and not self.parts.is_pending()

    @property
    def next_size(self) -> int | None:
        """Number of members of a replica in the group of a command that lets this member continue; else ``None``."""
        command = self._mailbox.pending
        if command is None or command.membership is None:
            return None
        return command.membership.world_size // command.membership.replicas

    @property
    def next_replicas(self) -> int:
        """Number of replicas in that group."""
        command = self._mailbox.pending
        return 1 if command is None or command.membership is None else command.membership.replicas

    def take_command(self) -> Regroup:
        """Take the command that all members have agreed to carry out."""
        command = self._mailbox.take_command()
        assert command is not None, "it was present when all members agreed"
        return command

    def await_command(self) -> Regroup:
        """Wait, as a newcomer that is ready except for its state, to join the group."""
        self._report(Ready())
        return self._next_command()

    def strand(self, reason: str, unreachable: tuple[tuple[int, int], ...] = ()) -> Regroup:
        """Leave a group in which a member has failed, and wait for the command to continue in another.

        Parameters
        ----------
        reason, unreachable
            See `GroupFailed`.

        Raises
        ------
        PeerFailed
            No command will come.
        """
        if self.group.size > 1:
            self.group.abort()  # otherwise gloo waits for the failed member, in other members or while leaving
        self.leave()
        pending = self._mailbox.pending
        if pending is None or not pending.abort:
            self._report(GroupFailed(self._generation, reason, unreachable))
        while True:
            command = self._next_command(reason)
            if command.abort or self.is_newcomer:  # otherwise the command is older than the failure
                return command

    def _next_command(self, reason: str = "the training job has ended") -> Regroup:
        command = self._mailbox.take_command(None)
        if command is None:
            raise PeerFailed(reason)
        return command

    # ── groups ────────────────────────────────────────────────────────────────────────────────────

    def move(self, first_command: Callable[[], Regroup], place: Callable[[], tuple[int, ...]]) -> bool:
        """Leave the group and continue in the one given by a command, or in a later one if that does not form.

        Parameters
        ----------
        first_command
            Returns the command.
        place
            See `exchange`.

        Returns
        -------
        left
            Whether the others continue without this member.

        Raises
        ------
        PeerFailed
            No command will come, or this member cannot take over the others' state.
        ReplicasDiffer
            Members at the same position have other parameters.
        """
        command = first_command()
        together = not command.abort and not self.is_newcomer  # the members of the present group change it
        while True:
            try:
                handed_over = self._hand_over(command.membership) if together else 0.0
                together = False
                self.leave()
                if command.membership is None:
                    return True
                self._enter(command.membership)
                began = time.monotonic()
                self._follow(self._agree_on_state(place()), moved=True)
                self._transferred = handed_over + time.monotonic() - began
            except PeerFailed as error:  # noqa: PERF203 - a round is a whole group
                if isinstance(error, (OutOfSync, StateLost)):
                    raise
                command = self.strand(str(error), error.unreachable)
                together = False
            else:
                break
        return False

    def exchange(self, place: Callable[[], tuple[int, ...]]) -> None:
        """Make sure that all members are at the same position with the same parameters.

        Parameters
        ----------
        place
            Returns this member's position, later ones greater, followed by its `Standing`.

        Raises
        ------
        PeerFailed
            A member has failed.
        ReplicasDiffer
            Members at the same position have other parameters.
        """
        self._follow(self._agree_on_state(place()))

    def tell_regrouped(self, paused: float) -> None:
        """Report that this member continues in its new group after a pause in seconds."""
        self._report(Joined(self.group.generation, paused, self._transferred, self.parts.received_bytes))

    def note(self, note: str) -> None:
        """Let the user know of something that all members have found out; the first member reports it."""
        if self.group.is_first:
            self._report(Noted(note))

    def _enter(self, membership: Membership) -> None:
        self._generation = membership.generation
        store = self._meet(membership) if membership.world_size > 1 else None
        self.group = join(membership, store, self._mailbox)
        if (command := self._mailbox.pending) is not None and command.abort:
            raise PeerFailed("a member failed while the group was forming")

    def _agree_on_state(self, place: tuple[int, ...]) -> dict[str, Any] | None:
        """Compare positions, and send the state of the members that are ahead to the others; return it if received."""
        places = [tuple(other.tolist()) for other in self.group.gather(torch.tensor(place))]
        progress = [other[:-_STANDING] for other in places]
        standings = [Standing(*other[-_STANDING:]) for other in places]
        foremost = max(progress)
        ahead = [rank for rank, its_progress in enumerate(progress) if its_progress == foremost]
        # Of these some may have run user code that follows the boundary at this position, and others not yet: what it
        # changes is compared when all have run it. A receiver will run it, too.
        turn = min(standings[rank].turn for rank in ahead)
        peers = [rank for rank in ahead if standings[rank].turn == turn]
        self.meet_replicas(self.group, standings, peers if foremost[_BEGUN] else [])
        self.align(standings, ahead)
        # On processors of different kinds the replicas of peers may have other bits; here they become equal again.
        fingerprint = standings[peers[0]].fingerprint
        sources = [rank for rank in peers if standings[rank].fingerprint == fingerprint]
        receivers = [
            rank for rank in range(len(places)) if rank not in ahead or (rank in peers and rank not in sources)
        ]
        if not receivers:
            return None
        if self.parts.spreads and any(progress[rank][_BEGUN] for rank in receivers):
            raise StateLost(
                "the processes of a sharded model have come to different steps: it resumes from its checkpoint"
            )
        state = self.state() if self.group.rank in sources else None
        received: dict[str, Any] | None = pass_on(self.group, sources, receivers, state)
        return received

    def _follow(self, state: dict[str, Any] | None, *, moved: bool = False) -> None:
        if state is not None:
            self.adopt(state)
        if moved and self.parts.spreads:
            self.parts.take_over(self.group)
        self.is_newcomer = False

    def _hand_over(self, membership: Membership | None) -> float:
        """Let the extension move what members have that leave; return the seconds that this took."""
        if not self.parts.spreads or self.group.size == 1:
            return 0.0
        began = time.monotonic()
        next_place = (-1, -1) if membership is None else (membership.rank, membership.generation)
        places = [tuple(other.tolist()) for other in self.group.gather(torch.tensor(next_place))]
        staying = sorted((place, rank) for rank, (place, _) in enumerate(places) if place >= 0)
        if len(staying) < self.group.size:
            generation = max(generation for _, generation in places)
            self.parts.hand_over(self.group, [rank for _, rank in staying], generation)
        return time.monotonic() - began
