"""What every batch system is asked: which nodes are idle until when, and what became of our jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.planning.model import Window


class BlockState(str, Enum):
    """What became of a job of ours; the value is the sentence that the log shows."""

    PENDING = "waiting in the queue"
    RUNNING = "running"
    COMPLETED = "ended by itself"
    TIMED_OUT = "reached the end of its walltime"
    PREEMPTED = "was preempted for another job"
    CANCELLED = "was cancelled"
    FAILED = "failed"
    NODE_FAILED = "lost a node"
    UNKNOWN = "is not known to the batch system"

    @property
    def ended(self) -> bool:
        """Whether the job holds no nodes any more and never will again."""
        return self not in (BlockState.PENDING, BlockState.RUNNING)


@dataclass(frozen=True)
class BlockStatus:
    """A job of ours, as the batch system tells it.

    Parameters
    ----------
    state
        What became of it.
    nodes
        Names of its nodes once it runs.
    ends
        When its walltime ends, seconds; ``None`` while it waits or if unknown.
    reason
        The batch system's own words, if any.
    """

    state: BlockState
    nodes: tuple[str, ...] = ()
    ends: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Survey:
    """One round of queries.

    Parameters
    ----------
    time
        When the batch system answered, seconds since the epoch.
    windows
        The holes that nobody holds, largest first.
    blocks
        Job id -> status, for exactly the jobs that were asked for.
    """

    time: float
    windows: tuple[Window, ...] = ()
    blocks: Mapping[str, BlockStatus] = field(default_factory=dict)


class WindowSource(ABC):
    """Asks one batch system; one call is one round of a few commands, whatever the number of jobs."""

    @abstractmethod
    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        """Find the windows, and the states of `job_ids`.

        Raises
        ------
        BatchSystemError
            The batch system did not answer or answered nonsense.
        """
