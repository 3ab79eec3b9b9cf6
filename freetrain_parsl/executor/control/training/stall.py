"""The reason why a training makes no progress, for the journal, the log and the live view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.executor.control.training.states import Role, Starting, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from freetrain_parsl.executor.control.training.machine import TrainingMachine

__all__ = ["stall_reason"]

_EXPLAINED_AFTER = 45.0  # seconds; so that the reason is reported within a minute


def stall_reason(training: TrainingMachine, now: float) -> str:
    """Return why a training makes no progress; empty if it does, or has waited only for a short time.

    Parameters
    ----------
    training
        A training that is not over.
    now
        Seconds.
    """
    state = training.phase
    if isinstance(state, Waiting):
        if now - state.since < _EXPLAINED_AFTER:
            return ""
        if training.desired:
            return f"waits for slots on {_listed(training.desired)} to start or to become free"
        needed = training.request.min_nodes
        nodes = "a node" if needed == 1 else f"{needed} nodes"
        return f"waits for {nodes} to join; `freetrain explain` shows why idle nodes are not used"
    if isinstance(state, Starting) and now - state.group.began >= _EXPLAINED_AFTER:
        return f"on {_listed(state.group.nodes)} its function has not reached session.epochs() yet"
    newcomers = [one for one in training.participants.values() if one.role is Role.NEWCOMER]
    slow = {one.node for one in newcomers if one.ready is None and now - one.began >= _EXPLAINED_AFTER}
    if slow:
        return f"on {_listed(slow)}, to join the others, its function has not reached session.epochs() yet"
    return ""


def _listed(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
