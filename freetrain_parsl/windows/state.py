"""What a batch system says of itself, in words that Slurm and PBS share: the input of `windows.availability_profile`.

All times are seconds since the epoch by the batch system's own clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BatchState", "Node", "Partition", "PendingJob", "Reservation", "RunningJob", "Scheduling"]


@dataclass(frozen=True)
class Node:
    """A compute node.

    Parameters
    ----------
    name
        Its batch-system name.
    idle
        Nothing runs on it; it may be planned for a job.
    unusable
        Why nothing new may start on it (drained, down, …) in plain English; empty if something may.
    partitions
        The partitions, or queues, that it serves.
    cpus, cpus_free, gpus, gpus_free
        Counts.
    memory, memory_free
        MiB.
    features
        The words that ``--constraint`` knows.
    idle_since
        Since when nothing runs on it, if the batch system tells.
    planned
        The batch system has planned a job on it; told of idle nodes only.
    """

    name: str
    idle: bool
    unusable: str = ""
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    cpus_free: int = 0
    gpus: int = 0
    gpus_free: int = 0
    memory: int = 0
    memory_free: int = 0
    features: frozenset[str] = frozenset()
    idle_since: float | None = None
    planned: bool = False


@dataclass(frozen=True)
class RunningJob:
    """A job that holds nodes until `ends` at the latest; ``None`` without a limit."""

    job: str
    name: str
    user: str
    partition: str
    nodes: tuple[str, ...]
    ends: float | None


@dataclass(frozen=True)
class PendingJob:
    """A job in the queue.

    Parameters
    ----------
    job, name, user, partition
        Whose it is and where it waits.
    node_count
        Nodes that it needs at least.
    walltime
        Seconds that it asks for; infinity without a limit.
    priority
        Larger goes first.
    eligible
        Whether it could start if there were nodes: not held, no unmet dependency, not before its begin time.
    start
        When the batch system plans to start it; ``None`` if it has no plan for it (yet).
    planned_nodes
        Where it plans to; empty if it does not tell.
    named_nodes
        The nodes that the job itself insists on.
    features
        Words that its nodes must have; empty also if the constraint is more than a plain "and" of words.
    reason
        The batch system's own word for why it waits.
    """

    job: str
    name: str
    user: str
    partition: str
    node_count: int
    walltime: float = math.inf
    priority: float = 0.0
    eligible: bool = True
    start: float | None = None
    planned_nodes: tuple[str, ...] = ()
    named_nodes: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    reason: str = ""


@dataclass(frozen=True)
class Reservation:
    """Nodes that nobody without rights may use from `start` to `end`: maintenance, a class, a large run."""

    name: str
    nodes: tuple[str, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Partition:
    """A partition or queue; limits are those of one job.

    Parameters
    ----------
    name, nodes
        Its nodes, by name.
    up
        Whether jobs in it start.
    max_walltime
        Seconds; infinity without a limit.
    min_nodes, max_nodes
        Nodes of one job; ``None`` without a limit.
    tier
        Jobs of a partition with a larger tier go first, and may preempt those of this one if it is preemptible.
    preemptible
        Whether jobs of this partition may be preempted.
    grace
        Seconds of notice that a preempted job gets.
    shared
        Whether several jobs may use one node.
    allow_qos, allow_accounts
        Who may use it; empty for everybody.
    """

    name: str
    nodes: tuple[str, ...]
    up: bool = True
    max_walltime: float = math.inf
    min_nodes: int = 1
    max_nodes: int | None = None
    tier: float = 1.0
    preemptible: bool = False
    grace: float = 0.0
    shared: bool = False
    default: bool = False
    allow_qos: frozenset[str] = frozenset()
    allow_accounts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Scheduling:
    """How the scheduler itself works.

    Parameters
    ----------
    system, version
        E.g. ``slurm``, ``24.11.5``.
    cycle
        Seconds from one pass of the backfill scheduler to the next: how long a start may take though nodes are free.
    plan_ahead
        How far into the future it plans, seconds.
    plan_jobs
        How many pending jobs it plans; ``None`` if not told.
    """

    system: str
    version: str = ""
    cycle: float = 30.0
    plan_ahead: float = 86400.0
    plan_jobs: int | None = None


@dataclass(frozen=True)
class BatchState:
    """Everything that one round of queries has told.

    `hides_jobs`: the jobs of others are not among `running` and `pending`; `others_waiting`: how many of them wait,
    where that is asked for.
    """

    time: float
    scheduling: Scheduling
    nodes: Mapping[str, Node] = field(default_factory=dict)
    running: tuple[RunningJob, ...] = ()
    pending: tuple[PendingJob, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    hides_jobs: bool = False
    others_waiting: int = 0
