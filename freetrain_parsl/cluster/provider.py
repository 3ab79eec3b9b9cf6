"""Parsl provider for the embedded cluster."""

from __future__ import annotations

import copy
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typeguard
from parsl.jobs.states import JobState, JobStatus
from parsl.launchers.base import Launcher
from parsl.providers.base import ExecutionProvider
from parsl.utils import RepresentationMixin

from freetrain_parsl.cluster.client import ClusterClient, EmbeddedCluster
from freetrain_parsl.cluster.processes import NODE_STARTER
from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.errors import ClusterGone, InvalidSettings
from freetrain_parsl.settings_checks import check_count, check_duration
from freetrain_parsl.typed_arguments import wrong_types_refused

if TYPE_CHECKING:
    from freetrain_parsl.windows.base import WindowSource

_STATES = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED,
    "TIMED_OUT": JobState.TIMEOUT,
    "PREEMPTED": JobState.CANCELLED,  # not FAILED: Parsl's error handlers would count it against the executor
    "CANCELLED": JobState.CANCELLED,
}

_WALLTIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d(?:\.\d+)?)")


def parse_walltime(text: str) -> timedelta:
    """Parse ``[days-]hours:minutes:seconds``, including fractions of a second.

    Raises
    ------
    InvalidSettings
        It is malformed or zero.
    """
    match = _WALLTIME.fullmatch(text)
    if match:
        days, hours, minutes, seconds = match.groups(default="0")
        with suppress(OverflowError, ValueError):  # a number of days, or of digits, that Python does not convert
            walltime = timedelta(days=int(days), hours=int(hours), minutes=int(minutes), seconds=float(seconds))
            if walltime:
                return walltime
    raise InvalidSettings(f"a walltime must have the form HH:MM:SS and must not be zero, got {text[:40]!r}")


class EveryNodeLauncher(Launcher):
    """Starts the command `tasks_per_node` times on a node; the cluster starts the script on every node."""

    def __call__(
        self,
        command: str,
        tasks_per_node: int,
        nodes_per_block: int,  # noqa: ARG002 - Parsl's signature
        script_dir: str = "",  # noqa: ARG002 - Parsl's signature
    ) -> str:
        """Wrap the command."""
        if tasks_per_node == 1:
            return command
        return "\n".join([f"({command}) &"] * tasks_per_node + ["wait"])


class _Connection:
    """The cluster shared by copies of one provider."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: ClusterClient | None = None
        self.own: EmbeddedCluster | None = None
        self.closed = False


class EmbeddedClusterProvider(ExecutionProvider, RepresentationMixin):
    """Runs blocks as preemptible jobs of an embedded cluster.

    ``nodes_per_block``, ``walltime`` and ``nodelist`` are read at submission, so a shallow copy with other values
    submits a block of another shape to the same cluster.

    Parameters
    ----------
    cluster : str or None
        Name or directory of a running cluster; ``None`` to start a private one at the first use.
    nodes : int
        Size of the private cluster.
    workload : sequence of MainJob
        Main queue of the private cluster.
    cluster_dir : str or None
        Directory of the private cluster; ``None`` for ``cluster`` in the script directory.
    grace : timedelta
        Time from SIGTERM to SIGKILL in the private cluster.
    nodes_per_block : int
        Nodes per block.
    walltime : str
        Walltime per block, ``HH:MM:SS``.
    nodelist : tuple of str or None
        Nodes that a block may use; ``None`` for any.
    only : tuple of str or None
        Nodes that all blocks and windows are limited to: those of one kind. ``None`` for all.
    init_blocks, min_blocks, max_blocks, parallelism
        As for every provider; used by the strategy.
    worker_init : str
        Shell commands before the worker starts.
    launcher : Launcher
        How the command is started on a node.
    """

    @wrong_types_refused
    @typeguard.typechecked
    def __init__(
        self,
        cluster: str | None = None,
        *,
        nodes: int = 8,
        workload: Sequence[MainJob] = (),
        cluster_dir: str | None = None,
        grace: timedelta = timedelta(seconds=5),
        nodes_per_block: int = 1,
        walltime: str = "00:10:00",
        nodelist: tuple[str, ...] | None = None,
        only: tuple[str, ...] | None = None,
        init_blocks: int = 0,
        min_blocks: int = 0,
        max_blocks: int = 10,
        parallelism: float = 1.0,
        worker_init: str = "",
        launcher: Launcher | None = None,
    ) -> None:
        parse_walltime(walltime)
        check_duration("EmbeddedClusterProvider: grace", grace, least=timedelta(0))
        for setting, count in (("nodes", nodes), ("nodes_per_block", nodes_per_block), ("max_blocks", max_blocks)):
            check_count(f"EmbeddedClusterProvider: {setting}", count)
        for setting, count in (("init_blocks", init_blocks), ("min_blocks", min_blocks)):
            check_count(f"EmbeddedClusterProvider: {setting}", count, least=0)
        for setting, names in (("nodelist", nodelist), ("only", only)):
            if names is not None and not names:
                raise InvalidSettings(f"EmbeddedClusterProvider: {setting} must name a node, or be None for any")
        self.cluster = cluster
        self.nodes = nodes
        self.workload = workload
        self.cluster_dir = cluster_dir
        self.grace = grace
        self.nodes_per_block = nodes_per_block
        self.walltime = walltime
        self.nodelist = nodelist
        self.only = only
        self.init_blocks = init_blocks
        self.min_blocks = min_blocks
        self.max_blocks = max_blocks
        self.parallelism = parallelism
        self.worker_init = worker_init
        self.launcher = launcher or EveryNodeLauncher()
        self.script_dir: str | None = None
        self.resources: dict[object, Any] = {}
        self.cores_per_node = None
        self.mem_per_node = None
        self._connection = _Connection()

    @property
    def label(self) -> str:
        """The name of this kind of provider."""
        return "embedded"

    @property
    def driver_address(self) -> str:
        """The address at which the nodes, which are all on this machine, reach the driver."""
        return "127.0.0.1"

    @property
    def node_starter(self) -> str:
        """Module through which the program of a node is started, with the command as its arguments; empty: none."""
        return os.environ.get(NODE_STARTER, "")

    @property
    def status_polling_interval(self) -> int:
        """Seconds between status requests; one costs a millisecond."""
        return 1

    def ensure_started(self) -> ClusterClient:
        """Return a client of the cluster; start the cluster first if it is private and not running yet.

        Raises
        ------
        ClusterGone
            The given cluster is not running, or `close` was called.
        BatchSystemError
            The private cluster did not start.
        """
        connection = self._connection
        with connection.lock:
            if connection.closed:
                raise ClusterGone("this provider has been closed")
            if connection.client is None:
                if self.cluster is not None:
                    connection.client = ClusterClient(self.cluster)
                else:
                    own = EmbeddedCluster(
                        self.cluster_dir or Path(self.script_dir or ".") / "cluster",
                        nodes=self.nodes,
                        workload=self.workload,
                        grace=self.grace,
                    )
                    own.start()
                    connection.own, connection.client = own, own.client
            return connection.client

    def window_source(self) -> WindowSource:
        """Return the window source of the cluster."""
        from freetrain_parsl.cluster.window_source import LocalWindowSource

        return LocalWindowSource(self.ensure_started(), self.only)

    def limited_to(self, only: tuple[str, ...], worker_init: str = "") -> EmbeddedClusterProvider:
        """Return a provider of the same cluster for some of its nodes; `worker_init` is run after this one's."""
        limited = copy.copy(self)
        limited.only, limited.worker_init = only, "\n".join(filter(None, [self.worker_init, worker_init]))
        limited.resources = {}
        return limited

    def close(self) -> None:
        """Shut down the private cluster, if any, with all its jobs; all later requests fail."""
        connection = self._connection
        with connection.lock:
            connection.closed = True
            own, connection.own, connection.client = connection.own, None, None
        if own is not None:
            own.stop()

    def submit(self, command: str, tasks_per_node: int, job_name: str = "parsl.embedded") -> str:
        """Submit a block and return its job id.

        Raises
        ------
        InvalidSettings
            The cluster can never run it.
        BatchSystemError
            It did not respond.
        """
        client = self.ensure_started()
        script_dir = Path(self.script_dir or ".").resolve()
        script_dir.mkdir(parents=True, exist_ok=True)
        name = f"{job_name}.{time.time_ns()}"
        script = script_dir / f"{name}.sh"
        body = self.launcher(command, tasks_per_node, self.nodes_per_block, str(script_dir))
        text = f"{self.worker_init}\nexport JOBNAME={name}\n{body}\n"
        with os.fdopen(os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w") as file:
            file.write(text)
        stdout, stderr = f"{script}.out", f"{script}.err"
        job_id = client.submit(
            ["bash", str(script)],
            nodes=self.nodes_per_block,
            walltime=parse_walltime(self.walltime),
            preemptible=True,
            nodelist=self.nodelist or self.only,
            name=name,
            stdout=stdout,
            stderr=stderr,
        )
        self.resources[job_id] = {
            "job_id": job_id,
            "script_path": str(script),
            "job_stdout_path": stdout,
            "job_stderr_path": stderr,
        }
        return job_id

    def status(self, job_ids: Sequence[object]) -> list[JobStatus]:
        """Query the states of jobs in one request."""
        if not job_ids:
            return []
        jobs = self.ensure_started().jobs([str(job_id) for job_id in job_ids])
        return [_status(jobs.get(str(job_id))) for job_id in job_ids]

    def cancel(self, job_ids: Sequence[object]) -> list[bool]:
        """Cancel jobs in one request; return true for those that had not already ended."""
        if not job_ids:
            return []
        cancelled = self.ensure_started().cancel([str(job_id) for job_id in job_ids])
        return [cancelled[str(job_id)] for job_id in job_ids]


def _status(job: dict[str, Any] | None) -> JobStatus:
    if job is None:
        return JobStatus(JobState.UNKNOWN, "the cluster does not know this job")
    codes = job["exit_codes"].values()
    return JobStatus(
        _STATES[job["state"]],
        job["reason"] or None,
        exit_code=next((code for code in codes if code), 0) if codes else None,
        stdout_path=job["stdout"],
        stderr_path=job["stderr"],
    )
