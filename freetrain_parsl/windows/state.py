"""The state of a batch system in terms common to Slurm and PBS: the input of `windows.availability_profile`.

All times are seconds since the epoch on the batch system's own clock.
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
        No job runs on it; it may be planned for one.
    unusable
        Why no job can start on it (drained, down, …) in plain English; empty if one can.
    partitions
        The partitions or queues to which it belongs.
    cpus, cpus_free, gpus, gpus_free
        Counts.
    memory, memory_free
        MiB.
    features
        Features for ``--constraint``.
    idle_since
        Since when it has been idle, if known.
    planned
        The batch system has planned a job on it; reported for idle nodes only.
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
    """A job that holds nodes until `ends` at the latest; ``None`` for no limit."""

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
        Its id, name, owner and partition.
    node_count
        Minimum number of nodes.
    walltime
        Requested seconds; infinity for no limit.
    priority
        Higher values start first.
    eligible
        Whether it could start if there were nodes: not held, no unmet dependency, not before its begin time.
    start
        When the batch system plans to start it; ``None`` if it has no plan for it (yet).
    planned_nodes
        The nodes on which it is planned; empty if not reported.
    named_nodes
        The nodes that the job itself requires.
    features
        Features that its nodes must have; also empty if the constraint is more than a plain "and" of features.
    reason
        The batch system's own term for why it is pending.
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
    """Nodes that only authorised users may use from `start` to `end`: maintenance, a class, a large run."""

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
        Its name and the names of its nodes.
    up
        Whether jobs in it start.
    max_walltime
        Seconds; infinity for no limit.
    min_nodes, max_nodes
        Nodes of one job; ``None`` for no limit.
    tier
        Jobs of a partition with a higher tier start first, and may preempt those of this one if it is preemptible.
    preemptible
        Whether jobs of this partition may be preempted.
    grace
        Seconds of notice before a job is preempted.
    shared
        Whether several jobs may use one node.
    allow_qos, allow_accounts
        QOS and accounts that may use it; empty for all.
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
    """Parameters of the scheduler.

    Parameters
    ----------
    system, version
        E.g. ``slurm``, ``24.11.5``.
    cycle
        Seconds between passes of the backfill scheduler: how long a start may take although nodes are free.
    plan_jobs
        How many pending jobs it plans; ``None`` if unknown.
    """

    system: str
    version: str = ""
    cycle: float = 30.0
    plan_jobs: int | None = None


@dataclass(frozen=True)
class BatchState:
    """The result of one round of queries.

    `hides_jobs`: other users' jobs are missing from `running` and `pending`; `others_waiting`: how many of them are
    pending, if queried.
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
