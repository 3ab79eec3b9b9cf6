"""The changing circle of those who train together: orders taken, groups left and formed, states passed on."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.protocol.reports import GroupFailed, Joined, Ready, Report
from freetrain_parsl.training.group.process_group import Group, join
from freetrain_parsl.training.group.state_transfer import pass_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from freetrain_parsl.training.mailbox import ControlMailbox, Membership, Regroup

logger = logging.getLogger(__name__)

_FINGERPRINT = -1  # in a place: not a measure of how far a member is
_BEGUN = 0  # in a place: whether the member has a state


class GroupMember:
    """One member's view of the group that it is in at present.

    Parameters
    ----------
    membership
        Its place at first; ``None``: it comes as a newcomer, and waits for the order that takes it in.
    meet
        Gives the store in which the members of a membership meet.
    mailbox
        Brings the orders.
    report
        Gets what happens to the group.
    """

    def __init__(
        self,
        membership: Membership | None,
        meet: Callable[[Membership], Store],
        mailbox: ControlMailbox,
        report: Callable[[Report], None],
    ) -> None:
        self._meet = meet
        self._mailbox = mailbox
        self._report = report
        self.group = Group()
        self.is_newcomer = membership is None
        """Whether it waits for a state."""
        self.state: Callable[[], dict[str, Any]] = dict
        """Set by the engine: gives the whole state."""
        self.adopt: Callable[[dict[str, Any]], None] = lambda _state: None
        """Set by the engine: takes a whole state over."""
        self._transferred = 0.0
        self._generation = 0  # of the group, or of the one that is being formed
        if membership is not None:
            self._enter(membership)

    def leave(self) -> None:
        """Leave the group; the process stays."""
        self.group.leave()
        self._mailbox.on_abort = lambda: None
        self._mailbox.blocked = lambda: 0.0

    # ── orders ────────────────────────────────────────────────────────────────────────────────────

    def has_order(self) -> bool:
        """Whether there is an order to be carried out at a boundary that all agree on.

        Raises
        ------
        PeerFailed
            The order is to leave the group at once.
        """
        order = self._mailbox.pending
        if order is not None and order.abort and self.group.size > 1:
            raise PeerFailed("a member is lost")
        return order is not None

    def take_order(self) -> Regroup:
        """Take the order that all have agreed to carry out."""
        order = self._mailbox.take_order()
        assert order is not None, "it was there when all agreed"
        return order

    def await_order(self) -> Regroup:
        """Wait, as a newcomer with all but the state, to be taken in."""
        self._report(Ready())
        return self._next_order()

    def strand(self, reason: str, unreachable: tuple[tuple[int, int], ...] = ()) -> Regroup:
        """Leave a group that has lost a member, and wait for the order to go on in another.

        Parameters
        ----------
        reason, unreachable
            See `GroupFailed`.

        Raises
        ------
        PeerFailed
            There will be no order.
        """
        if self.group.size > 1:
            self.group.abort()  # else gloo waits for what the lost member owes: others for this one, or leaving itself
        self.leave()
        pending = self._mailbox.pending
        if pending is None or not pending.abort:
            self._report(GroupFailed(self._generation, reason, unreachable))
        while True:
            order = self._next_order(reason)
            if order.abort or self.is_newcomer:  # else it was given before the loss, to a group that is no more
                return order

    def _next_order(self, reason: str = "the training has ended") -> Regroup:
        order = self._mailbox.take_order(None)
        if order is None:
            raise PeerFailed(reason)
        return order

    # ── groups ────────────────────────────────────────────────────────────────────────────────────

    def move(self, first_order: Callable[[], Regroup], place: Callable[[], tuple[int, ...]]) -> bool:
        """Leave the group and go on in the one that is ordered, or in a later one if that does not come about.

        Parameters
        ----------
        first_order
            Gets the order.
        place
            See `exchange`.

        Returns
        -------
        left
            Whether the others go on without this member.

        Raises
        ------
        PeerFailed
            There will be no order, or the others are where this member cannot follow.
        """
        order = first_order()
        while True:
            self.leave()
            if order.membership is None:
                return True
            try:
                self._enter(order.membership)
                began = time.monotonic()
                state = self._agree_on_state(place())
                self._transferred = time.monotonic() - began
            except PeerFailed as error:
                order = self.strand(str(error), error.unreachable)
            else:
                break
        self._follow(state)
        return False

    def exchange(self, place: Callable[[], tuple[int, ...]]) -> None:
        """Make sure that all members are at the same place with the same parameters.

        Parameters
        ----------
        place
            Gives where this member is, later places greater, and last a fingerprint of its parameters.

        Raises
        ------
        PeerFailed
            A member is gone.
        """
        self._follow(self._agree_on_state(place()))

    def tell_regrouped(self, paused: float) -> None:
        """Report that this member goes on in its new group, after so many seconds."""
        self._report(Joined(self.group.generation, paused, self._transferred))

    def _enter(self, membership: Membership) -> None:
        self._generation = membership.generation
        store = self._meet(membership) if membership.world_size > 1 else None
        self.group = join(membership, store, self._mailbox)
        if (order := self._mailbox.pending) is not None and order.abort:
            raise PeerFailed("a member was lost while the group formed")

    def _agree_on_state(self, place: tuple[int, ...]) -> dict[str, Any] | None:
        """Compare places, and pass the state of those who are ahead to the others; return it if this is one of them."""
        places = [tuple(other.tolist()) for other in self.group.gather(torch.tensor(place))]
        foremost = max(other[:_FINGERPRINT] for other in places)
        first = next(other for other in places if other[:_FINGERPRINT] == foremost)
        sources = [rank for rank, other in enumerate(places) if other == first]
        receivers = [rank for rank, other in enumerate(places) if other != first]
        if first[_BEGUN] and any(p[:_FINGERPRINT] == foremost for p in places if p != first):
            logger.warning("the members' parameters had come to differ; all take those of rank %d", sources[0])
        if not receivers:
            return None
        state = self.state() if self.group.rank in sources else None
        received: dict[str, Any] | None = pass_on(self.group, sources, receivers, state)
        return received

    def _follow(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.adopt(state)
        self.is_newcomer = False
