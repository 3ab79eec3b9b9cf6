"""What every batch system is asked: which nodes are idle until when, and what became of our jobs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.planning.model import BlockTerms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.planning.model import Window

__all__ = ["OUR_JOBS", "BlockState", "BlockStatus", "Refusal", "Survey", "WindowSource"]

OUR_JOBS = "freetrain."
"""How the names of all batch jobs of FreeTrain begin, whoever runs it: they do not make way for each other."""


class BlockState(str, Enum):
    """What became of a job of ours; the value is the sentence that the log shows."""

    PENDING = "waiting in the queue"
    HELD = "is held in the queue and would never start by itself"
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
        return self not in (BlockState.PENDING, BlockState.HELD, BlockState.RUNNING)


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
        What the batch system says of it, in plain English, if anything.
    lingers
        It ended for us, but is in the queue, to start again though nobody waits for it: to be cancelled.
    """

    state: BlockState
    nodes: tuple[str, ...] = ()
    ends: float | None = None
    reason: str = ""
    lingers: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why the batch system did not take a job.

    Parameters
    ----------
    reason
        One line in plain English, with the batch system's own words.
    passing
        Whether the same job may be taken later without a change of settings: a full queue, a daemon that is down.
    """

    reason: str
    passing: bool


@dataclass(frozen=True)
class Survey:
    """One round of queries.

    Parameters
    ----------
    time
        When the batch system answered, seconds since the epoch.
    windows
        The holes that nobody holds, largest first. Nodes that our own pending jobs are planned on count as free.
    blocks
        Job id -> status, for exactly the jobs that were asked for.
    terms
        How blocks start here.
    wanted
        Nodes that our jobs hold -> when a job of somebody else would start there if we were gone, seconds.
    notes
        Where the batch system's plan says nothing and what was assumed instead, one line each.
    unused
        Nodes that are in no window -> why, in plain English, as far as the batch system tells.
    took
        How long the round of queries took, seconds; `time` lies within it.
    effort
        What such a round costs the batch system, compared to an ordinary one: the pause until the next is that much
        longer.
    nodes
        How many nodes there are for blocks in all, whoever has them; ``None`` if that is not known.
    """

    time: float
    windows: tuple[Window, ...] = ()
    blocks: Mapping[str, BlockStatus] = field(default_factory=dict)
    terms: BlockTerms = field(default_factory=BlockTerms)
    wanted: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)
    took: float = 0.0
    effort: float = 1.0
    nodes: int | None = None

    def shifted(self, seconds: float) -> Survey:
        """Return the same survey on a clock that is ahead by so many seconds."""
        if not seconds:
            return self
        blocks = {
            job: status if status.ends is None else replace(status, ends=status.ends + seconds)
            for job, status in self.blocks.items()
        }
        return replace(
            self,
            time=self.time + seconds,
            windows=tuple(_shifted(window, seconds) for window in self.windows),
            blocks=blocks,
            wanted={node: time + seconds for node, time in self.wanted.items()},
        )


def _shifted(window: Window, seconds: float) -> Window:
    opens = window.opens + seconds
    if window.closes is None:
        return replace(window, opens=opens)
    # Rounding must not make a very short window end where it begins.
    return replace(window, opens=opens, closes=max(window.closes + seconds, math.nextafter(opens, math.inf)))


class WindowSource(ABC):
    """Asks one batch system; one call is a handful of commands, whatever the number of jobs and nodes.

    Every method may raise `BatchSystemError`: the batch system did not answer, or answered nonsense.
    """

    @abstractmethod
    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        """Find the windows, and the states of our jobs `job_ids`, which count as ours in windows and plans."""

    @abstractmethod
    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs of ours, all in one command; those that have ended already are no error."""

    @abstractmethod
    def find_jobs(self, prefix: str) -> dict[str, str]:
        """Find the living jobs of this user whose names begin with `prefix`: job id -> name."""

    def check(self, least_walltime: float) -> None:  # noqa: B027 - most systems have nothing to refuse
        """Refuse what can never run, before anything is submitted.

        Parameters
        ----------
        least_walltime
            Of a block that is worth submitting, seconds.

        Raises
        ------
        InvalidSettings
            There is no such partition, the account may not use it, its limit is below `least_walltime`, …
        CommandNotFound
            The batch system's commands are not here.
        """

    def explain_refusal(self, complaint: str) -> Refusal:
        """Say in plain English why a submission failed; `complaint` is what the submit command printed."""
        return Refusal(complaint, passing=False)
