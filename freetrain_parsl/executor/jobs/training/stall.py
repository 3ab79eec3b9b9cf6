"""The reason why a training makes no progress, for the journal, the log and the live view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.jobs.training.states import Pausing, Regrouping, Role, Running, Starting, Waiting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from freetrain_parsl.executor.jobs.training.progress import StepWatch
    from freetrain_parsl.executor.jobs.training.states import GroupMembers, Participant, Phase

__all__ = ["stall_reason", "waiting_reason"]

_EXPLAINED_AFTER = 45.0  # seconds; so that the reason is reported within a minute


def stall_reason(
    phase: Phase,
    participants: Mapping[str, Participant],
    *,
    steps: StepWatch,
    desired: Collection[str],
    assigned: float,
    needed: int,
    now: float,
) -> str:
    """Return why a training makes no progress; empty if it does, or has waited only for a short time.

    Parameters
    ----------
    phase, participants
        Of a training that is not over.
    steps
        The times of its steps.
    desired
        The nodes that it is to have.
    assigned
        When it last got nodes after it had none, seconds.
    needed
        The least number of nodes on which it runs.
    now
        Seconds.
    """
    if isinstance(phase, Waiting):
        return waiting_reason(desired, needed, now - max(phase.since, assigned))
    if isinstance(phase, Starting) and now - phase.group.began >= _EXPLAINED_AFTER:
        return f"on {_listed(phase.group.nodes)} its function has not reached session.epochs() yet"
    newcomers = [one for one in participants.values() if one.role is Role.NEWCOMER]
    slow = {one.node for one in newcomers if one.ready is None and now - one.began >= _EXPLAINED_AFTER}
    if slow:
        return f"on {_listed(slow)}, to join the others, its function has not reached session.epochs() yet"
    if isinstance(phase, (Running, Regrouping, Pausing)):
        overdue = steps.overdue(phase.group.began, now)
        if overdue is not None:
            return steps.sentence(overdue, _blocked_nodes(phase.group, participants, overdue / 2))
    return ""


def waiting_reason(desired: Collection[str], needed: int, seconds: float) -> str:
    """Return why nothing runs that has waited for `seconds`; empty if that is a short time.

    Parameters
    ----------
    desired, needed
        As for `stall_reason`.
    seconds
        Since it last had nodes, or got some.
    """
    if seconds < _EXPLAINED_AFTER:
        return ""
    if desired:
        return f"waits for slots on {_listed(desired)} to start or to become free"
    nodes = "a node" if needed == 1 else f"{needed} nodes"
    return f"waits for {nodes} to join; `freetrain explain` shows why idle nodes are not used"


def _blocked_nodes(group: GroupMembers, participants: Mapping[str, Participant], seconds: float) -> str:
    """Name the nodes of a group on which the function does not continue: the others have waited for `seconds`."""
    members = [participants[slot] for slot in group.ranks if slot in participants]
    waiting = {member.node for member in members if member.waited >= seconds}
    blocked = group.nodes - waiting
    if not (waiting and blocked):
        return _listed(group.nodes)
    return f"{_listed(blocked)}, while {_listed(waiting)} only {'waits' if len(waiting) == 1 else 'wait'}"


def _listed(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
