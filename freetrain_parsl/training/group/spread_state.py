"""The port of a group to a state of which its members hold different parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.training.group.process_group import Group

__all__ = ["SpreadState"]


class SpreadState:
    """Moves the parts of a state when its group changes; every default is for members that have all of it."""

    spreads: bool = False
    """Whether the members hold different parts of the state, which the extension moves when the group changes."""
    received_bytes: int = 0
    """What this member got of them from others in the last change."""

    def is_pending(self) -> bool:
        """Return whether a change of the group has to wait for a later boundary."""
        return False

    def obstacle(self, group: Group, size: int | None) -> str | None:  # noqa: ARG002
        """Return why the members of a group cannot change in place; ``None`` if they can; all members call this.

        Parameters
        ----------
        group
            The present group.
        size
            Number of members of the next one; ``None``: this member leaves.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        return None

    def hand_over(self, group: Group, hosts: Sequence[int], generation: int) -> None:
        """Move the parts of those that leave a group to those that stay, before any of them leaves it.

        Called on all members of the group if the extension `spreads` and some of them leave.

        Parameters
        ----------
        group
            The present group.
        hosts
            The ranks of those that stay, in the order of their next ranks.
        generation
            Of their next group.

        Raises
        ------
        PeerFailed
            A member has failed.
        """

    def take_over(self, group: Group) -> None:
        """Give each member of a new group its part of the state; newcomers have adopted all that is not spread.

        Called on all members of the group if the extension `spreads`.

        Raises
        ------
        PeerFailed
            A member has failed; it is called again in the next group.
        StateLost
            Those that failed alone held a part of the state.
        UsageError
            This member is new, and its objects are not like those of the others.
        """

    def sent(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the whole state as it is sent to newcomers: without what is spread."""
        return state

    def received(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state that was `sent` as this member's objects can load it; `state` is not changed."""
        return state
