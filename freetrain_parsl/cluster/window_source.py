"""Window source of the embedded cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import Window, WindowKind
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, WindowSource
from freetrain_parsl.windows.hostlist import compress_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.cluster.client import ClusterClient

_STATES = {
    "PENDING": BlockState.PENDING,
    "RUNNING": BlockState.RUNNING,
    "COMPLETED": BlockState.COMPLETED,
    "FAILED": BlockState.FAILED,
    "TIMED_OUT": BlockState.TIMED_OUT,
    "PREEMPTED": BlockState.PREEMPTED,
    "CANCELLED": BlockState.CANCELLED,
}


class LocalWindowSource(WindowSource):
    """Finds the windows of an embedded cluster.

    They are of kind backfill: they close when the cluster's plan needs the nodes (``None`` if it does not). The plan is
    based on requested walltimes, so a main job may start earlier and preempt.

    `only` are the names of the nodes to find; ``None`` for all.
    """

    def __init__(self, client: ClusterClient, only: Sequence[str] | None = None) -> None:
        self._client = client
        self._only = None if only is None else frozenset(only)
        self._nodes = None if only is None else len(frozenset(only))

    def check(self, least_walltime: float) -> None:  # noqa: ARG002 - there is no limit
        """Reject nodes that do not exist; see `WindowSource.check`."""
        if self._only is None:
            return
        names = self._client.nodes()
        if unknown := sorted(self._only - names.keys()):
            raise InvalidSettings(
                f"the embedded cluster has no nodes {compress_hosts(unknown)}; it has {compress_hosts(names)}"
            )

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        """Query the cluster with one request."""
        answer = self._client.survey(job_ids)
        if self._nodes is None:
            self._nodes = len(self._client.nodes())
        windows = [
            Window(nodes, item["opens"], item["closes"], WindowKind.BACKFILL)
            for item in answer["windows"]
            if (nodes := tuple(node for node in item["nodes"] if self._only is None or node in self._only))
        ]
        windows.sort(key=lambda window: (-len(window.nodes), window.nodes))
        return Survey(
            time=answer["time"],
            windows=tuple(windows),
            blocks={job_id: _status(answer["jobs"].get(job_id)) for job_id in job_ids},
            nodes=self._nodes,
        )

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs in one request."""
        self._client.cancel(job_ids)

    def find_jobs(self, prefix: str) -> dict[str, str]:
        """Query the whole queue, which is small."""
        return {
            job: status["name"] for job, status in self._client.queue().items() if status["name"].startswith(prefix)
        }


def _status(job: Mapping[str, Any] | None) -> BlockStatus:
    if job is None:
        return BlockStatus(BlockState.UNKNOWN)
    return BlockStatus(_STATES[job["state"]], tuple(job["nodes"]), job["ends"], job["reason"])
