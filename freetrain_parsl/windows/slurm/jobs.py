"""A job as reported by Slurm's commands, and its conversion to the terms common to all batch systems."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from freetrain_parsl.windows.base import BlockState, BlockStatus
from freetrain_parsl.windows.hostlist import expand_hosts
from freetrain_parsl.windows.slurm.vocabulary import HOLDS_NODES, PendingCause, block_state, explain_reason
from freetrain_parsl.windows.state import PendingJob, RunningJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.windows.state import Partition

__all__ = ["SlurmJob", "block_status", "plain_features", "sort_jobs"]

_PLAIN = re.compile(r"[\w.:-]+(?:[&,][\w.:-]+)*", re.ASCII)


class SlurmJob(NamedTuple):
    """One line of squeue; times in seconds since the epoch, host lists in Slurm's format."""

    job: str
    partition: str
    state: str
    user: str
    walltime: float | None  # None: the partition's
    start: float | None
    ends: float | None
    node_count: int
    nodes: str
    planned_nodes: str
    named_nodes: str
    priority: float
    reason: str
    features: str
    name: str  # possibly truncated
    tasks: int = 1  # of a pending job array, which is one line, that may run at once


def sort_jobs(
    records: Iterable[SlurmJob], partitions: Mapping[str, Partition]
) -> tuple[tuple[RunningJob, ...], tuple[PendingJob, ...]]:
    """Separate the jobs that hold nodes from the pending ones; the others have ended.

    Raises
    ------
    ValueError
        A host list is malformed.
    """
    running: list[RunningJob] = []
    pending: list[PendingJob] = []
    hosts: dict[str, tuple[str, ...]] = {"": ()}
    for record in records:
        if record.state in HOLDS_NODES:
            nodes = _expand(record.nodes, hosts)
            running.append(RunningJob(record.job, record.name, record.user, record.partition, nodes, record.ends))
        elif block_state(record.state)[0] in (BlockState.PENDING, BlockState.HELD):
            nodes_there = sum(len(partitions[name].nodes) for name in record.partition.split(",") if name in partitions)
            pending += [_pending(record, partitions, hosts)] * min(record.tasks, max(1, nodes_there))
    return tuple(running), tuple(pending)


def _pending(record: SlurmJob, partitions: Mapping[str, Partition], hosts: dict[str, tuple[str, ...]]) -> PendingJob:
    waiting, _ = explain_reason(record.reason)
    walltime = record.walltime
    if walltime is None:
        names = (name for name in record.partition.split(",") if name in partitions)
        walltime = max((partitions[name].max_walltime for name in names), default=math.inf)
    return PendingJob(
        record.job,
        record.name,
        record.user,
        record.partition,
        record.node_count,
        walltime,
        record.priority,
        waiting is PendingCause.NODES and record.priority > 0 and record.state == "PENDING",
        record.start,
        _expand(record.planned_nodes, hosts),
        _expand(record.named_nodes, hosts),
        plain_features(record.features) or frozenset(),
        record.reason,
    )


def _expand(text: str, hosts: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if text not in hosts:
        hosts[text] = tuple(expand_hosts(text))
    return hosts[text]


def plain_features(constraint: str) -> frozenset[str] | None:
    """Return the features of a constraint that is a plain "and" of them; ``None`` if it is more than that."""
    if not constraint:
        return frozenset()
    return frozenset(re.split("[&,]", constraint)) if _PLAIN.fullmatch(constraint) else None


def block_status(record: SlurmJob) -> BlockStatus:
    """Return the status of one of our jobs."""
    state, sentence = block_state(record.state)
    # A completing job has ended. With nodes and an end in the past, it would count as a block that left its window.
    runs = state is BlockState.RUNNING and record.state != "COMPLETING"
    nodes = tuple(expand_hosts(record.nodes)) if runs and record.nodes else ()
    if record.state == "PENDING":
        waiting, sentence = explain_reason(record.reason)
        if waiting is PendingCause.CHANGE:
            state = BlockState.HELD
    return BlockStatus(state, nodes, record.ends if runs else None, sentence)
