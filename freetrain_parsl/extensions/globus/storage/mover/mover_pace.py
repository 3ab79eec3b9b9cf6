"""How often the mover acts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MoverPace"]


@dataclass(frozen=True)
class MoverPace:
    """Seconds between the mover's actions.

    Parameters
    ----------
    turn
        Between passes of its loop.
    scan
        Between looks for new checkpoints of trainings that have ended or leave.
    copies
        Between copies of running trainings, at least; those of all trainings are made together. A site that stops
        answering loses its trainings at the end of the lease, so what is trained between copies is little beside that.
    request
        Between two requests to Globus, at least.
    poll_least, poll_most
        Between questions for the state of a task: short at first, then a tenth of its age.
    retry, longest
        Until something that failed is tried again: first, and at most.
    """

    turn: float
    scan: float
    copies: float
    request: float
    poll_least: float
    poll_most: float
    retry: float
    longest: float

    @classmethod
    def of(cls, lease: float) -> MoverPace:
        """Return the pace that suits a lease."""
        return cls(
            turn=min(0.25, lease / 100),
            scan=min(2.0, lease / 20),
            copies=min(120.0, lease / 5),
            request=min(0.1, lease / 500),
            poll_least=min(2.0, lease / 20),
            poll_most=min(30.0, lease / 10),
            retry=min(5.0, lease / 20),
            longest=min(120.0, lease / 5),
        )
