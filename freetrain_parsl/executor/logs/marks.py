"""What a training's log says about the training itself: the records of the journal, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.protocol.journal import Record

__all__ = ["mark_of"]

_MOST_NODES = 8  # named in a mark


def mark_of(entry: Record) -> str | None:  # noqa: C901 - one case for each kind of record
    """Return the mark for a record about a training; ``None`` if the log does not mention it."""
    match entry:
        case record.FragmentStarted(nodes=nodes, array=array, in_place=in_place, paused=paused, generation=number):
            how = f", in place after {paused:.2f} s" if in_place else ""
            where = f", fused in {array}" if array else ""
            return f"trains on {_names(nodes)} (fragment {number}{how}){where}"
        case record.FragmentResumed(step=step):
            return f"resumed from the checkpoint of step {step}"
        case record.FragmentEnded(failure=True, nodes=nodes):
            return f"a process failed on {_names(nodes)}"
        case record.FragmentEnded(nodes=nodes):
            return f"left {_names(nodes)}"
        case record.CodeChanged(note=note):
            return note
        case record.TrainingWaits(reason=reason):
            return f"waits: {reason}"
        case record.TrainingTriesAgain():
            return "tries again: the checkpoint directory can be used again"
        case record.SavingFails(reason=reason):
            return f"cannot save: {reason}"
        case record.SavingWorks():
            return "saves again"
        case record.TrainingCancelled():
            return "is being cancelled"
        case record.TrainingFinished(trained=True, step=step):
            return f"finished at step {step}"
        case record.TrainingFinished(step=step):
            return f"had finished at step {step} in an earlier run: nothing was trained"
        case record.TrainingFailed(error=error):
            return f"{'failed' if entry.final else 'ended'}: {' '.join(error.split())}"
    return None


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
    return ", ".join(nodes[:_MOST_NODES]) + more
