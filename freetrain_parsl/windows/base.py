"""Interface to a batch system: which nodes are idle until when, and the states of our jobs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.planning.model import BlockTerms

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from freetrain_parsl.planning.model import Window

__all__ = ["OUR_JOBS", "BlockState", "BlockStatus", "Refusal", "Survey", "WindowSource", "without_nodes"]

OUR_JOBS = "freetrain."
"""Prefix of the names of all FreeTrain batch jobs of all users: they do not yield to each other."""


class BlockState(str, Enum):
    """State of one of our jobs; the value is the phrase shown in the log."""

    PENDING = "waiting in the queue"
    HELD = "is held in the queue and will not start by itself"
    RUNNING = "running"
    COMPLETED = "ended by itself"
    TIMED_OUT = "reached the end of its walltime"
    PREEMPTED = "was preempted for another job"
    CANCELLED = "was cancelled"
    FAILED = "failed"
    NODE_FAILED = "had a node failure"
    UNKNOWN = "is unknown to the batch system"

    @property
    def ended(self) -> bool:
        """Whether the job no longer holds nodes and never will again."""
        return self not in (BlockState.PENDING, BlockState.HELD, BlockState.RUNNING)


@dataclass(frozen=True)
class BlockStatus:
    """One of our jobs, as reported by the batch system.

    Parameters
    ----------
    state
        Its state.
    nodes
        Names of its nodes once it runs.
    ends
        When its walltime ends, seconds; ``None`` while it is pending or if unknown.
    reason
        The batch system's reason, in plain English, if any.
    lingers
        It has ended for us but was requeued and would start again: it must be cancelled.
    """

    state: BlockState
    nodes: tuple[str, ...] = ()
    ends: float | None = None
    reason: str = ""
    lingers: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why the batch system rejected a job.

    Parameters
    ----------
    reason
        One line in plain English, including the batch system's message.
    passing
        Whether the same job may be accepted later without a change of settings: a full queue, a daemon that is down.
    uncertain
        Whether it may have been accepted nevertheless: only the answer was lost.
    """

    reason: str
    passing: bool
    uncertain: bool = False


@dataclass(frozen=True)
class Survey:
    """One round of queries.

    Parameters
    ----------
    time
        When the batch system answered, seconds since the epoch.
    windows
        The windows, largest first. Nodes on which our own pending jobs are planned count as free.
    blocks
        Job id -> status, for exactly the requested jobs; of a survey that the job submitter has passed on, block ->
        status.
    terms
        How blocks start here.
    wanted
        Nodes that our jobs hold -> when another user's job would start there if we were gone, seconds.
    notes
        Assumptions where the batch system's plan is incomplete, one line each.
    unused
        Nodes that are in no window -> why, in plain English, as far as known.
    took
        How long the round of queries took, seconds; `time` is within it.
    effort
        Cost of such a round to the batch system, relative to an ordinary one: the pause until the next is longer by
        this factor.
    nodes
        Number of nodes on which blocks can ever start, in use or not; ``None`` if unknown.
    terms_by_kind, nodes_by_kind
        Kind of node -> `terms` and `nodes` there; empty where there is one kind only.
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
    terms_by_kind: Mapping[str, BlockTerms] = field(default_factory=dict)
    nodes_by_kind: Mapping[str, int] = field(default_factory=dict)

    def shifted(self, seconds: float) -> Survey:
        """Return the same survey on a clock that is ahead by `seconds`."""
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


def without_nodes(windows: Sequence[Window], nodes: Collection[str]) -> tuple[Window, ...]:
    """Return the windows without some of their nodes, and without those that would have none."""
    if not nodes:
        return tuple(windows)
    left = [(window, tuple(name for name in window.nodes if name not in nodes)) for window in windows]
    return tuple(window if names == window.nodes else replace(window, nodes=names) for window, names in left if names)


def _shifted(window: Window, seconds: float) -> Window:
    opens = window.opens + seconds
    if window.closes is None:
        return replace(window, opens=opens)
    # Rounding must not make the end of a very short window equal its beginning.
    return replace(window, opens=opens, closes=max(window.closes + seconds, math.nextafter(opens, math.inf)))


class WindowSource(ABC):
    """Queries one batch system; a call takes a few commands, independent of the number of jobs and nodes.

    Every method may raise `BatchSystemError`: the batch system did not respond or returned invalid output.
    """

    @abstractmethod
    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        """Find the windows and the states of our jobs `job_ids`, which count as ours in windows and plans."""

    @abstractmethod
    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel some of our jobs in one command; jobs that have already ended are not an error."""

    @abstractmethod
    def find_jobs(self, prefix: str) -> dict[str, str]:
        """Find this user's live jobs whose names begin with `prefix`: job id -> name."""

    def check(self, least_walltime: float) -> None:  # noqa: B027 - most systems need no check
        """Reject settings with which no block can run, before anything is submitted.

        Parameters
        ----------
        least_walltime
            Minimum useful walltime of a block, seconds.

        Raises
        ------
        InvalidSettings
            The partition does not exist, the account may not use it, its limit is below `least_walltime`, …
        CommandNotFound
            The batch system's commands are not available.
        """

    def gpus_on_nodes(self) -> frozenset[int]:
        """Return the numbers of GPUs that nodes on which blocks can start have; empty: unknown."""
        return frozenset()

    def explain_refusal(self, complaint: str) -> Refusal:
        """Explain in plain English why a submission failed; `complaint` is the output of the submit command."""
        return Refusal(complaint, passing=False)
