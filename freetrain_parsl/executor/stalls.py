"""Says why a training does not get on, once that has lasted: a sentence for the journal, the log and the live view."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.executor.trainings import Training

__all__ = ["why_it_stalls"]

_TOLD_AFTER = 45.0  # seconds; so that everybody is told within a minute


def why_it_stalls(training: Training, now: float) -> str:
    """Return why a training does not get on; empty if it does, or has waited for a short time only.

    Parameters
    ----------
    training
        One that is not over.
    now
        Seconds, on the driver's clock.
    """
    generation = training.generation
    if training.storage_problem:
        return ""  # told already
    if generation is None:
        if now - training.waiting_since < _TOLD_AFTER:
            return ""
        if training.desired:
            return f"waits for slots on {_listed(training.desired)} to start or to become free"
        needed = training.request.min_nodes
        nodes = "a node" if needed == 1 else f"{needed} nodes"
        return f"waits for {nodes} to join; `freetrain explain` says why idle nodes are not used"
    if not generation.reported and not generation.pausing and now - generation.began >= _TOLD_AFTER:
        return f"on {_listed(generation.nodes)} its function has not reached session.epochs() yet"
    slow = {one.node for one in training.newcomers() if one.ready is None and now - one.began >= _TOLD_AFTER}
    if slow:
        return f"on {_listed(slow)}, to join the others, its function has not reached session.epochs() yet"
    return ""


def _listed(nodes: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(nodes))
