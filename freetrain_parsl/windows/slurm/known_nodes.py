"""Node states between two queries, updated from the queue: which jobs have started and ended there since.

A query for all nodes costs the controller as much as one for all jobs, and what mostly changes between polls is which
jobs run where. Only a node's health and the free resources of shared nodes must be queried.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.windows.state import Node, RunningJob

__all__ = ["KnownNodes"]


class KnownNodes:
    """Nodes as last described, and the jobs on them at that time."""

    def __init__(self) -> None:
        self._nodes: Mapping[str, Node] = {}
        self._jobs: Mapping[str, frozenset[str]] = {}
        self._idle_since: dict[str, float] = {}

    def describe(self, nodes: Mapping[str, Node], running: Iterable[RunningJob]) -> None:
        """Store a new description of all nodes, and the jobs that held nodes at that time."""
        self._nodes, self._jobs = nodes, _jobs_by_node(running)
        self._idle_since = {name: since for name, since in self._idle_since.items() if name in nodes}

    def ended(self, running: Iterable[RunningJob]) -> set[str]:
        """Return the jobs that held nodes at the last description and no longer do."""
        return {job for jobs in self._jobs.values() for job in jobs}.difference(job.job for job in running)

    def with_jobs(self, running: Iterable[RunningJob], now: float) -> dict[str, Node]:
        """Update the description with the jobs that hold nodes `now`, seconds since the epoch.

        A node is idle when its last job has ended. If a job has started on it, it has no free resources; if one of
        several has ended, its free resources are unchanged.
        """
        jobs = _jobs_by_node(running)
        none: frozenset[str] = frozenset()
        current = {}
        for name, node in self._nodes.items():
            before, after = self._jobs.get(name, none), jobs.get(name, none)
            if before == after:
                current[name] = node
            elif not after:
                since = self._idle_since.setdefault(name, now)
                current[name] = replace(
                    node,
                    idle=True,
                    idle_since=since,
                    cpus_free=node.cpus,
                    gpus_free=node.gpus,
                    memory_free=node.memory,
                )
            elif after - before:
                current[name] = replace(node, idle=False, idle_since=None, cpus_free=0, gpus_free=0, memory_free=0)
            else:
                current[name] = node
            if after:
                self._idle_since.pop(name, None)
        return current


def _jobs_by_node(running: Iterable[RunningJob]) -> dict[str, frozenset[str]]:
    jobs: defaultdict[str, set[str]] = defaultdict(set)
    for job in running:
        for name in job.nodes:
            jobs[name].add(job.job)
    return {name: frozenset(there) for name, there in jobs.items()}
