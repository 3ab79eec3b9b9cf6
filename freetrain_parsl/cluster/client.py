"""Client of the embedded cluster, and a context manager that runs one."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.cluster import processes, registry
from freetrain_parsl.cluster.workload import MainJob, save_workload
from freetrain_parsl.errors import BatchSystemError, ClusterGone, InvalidSettings
from freetrain_parsl.interpreters import module_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0  # starting Python takes seconds on a busy machine


class ClusterClient:
    """Sends requests to a running embedded cluster. Thread-safe: each request has its own connection.

    Parameters
    ----------
    cluster
        Its name or directory; ``None`` for the only running one.
    timeout
        Maximum time until a response.

    Raises
    ------
    ClusterGone
        The cluster is not running. Every request raises it too, and `BatchSystemError` if there is no response in
        time.
    """

    def __init__(
        self,
        cluster: str | os.PathLike[str] | None = None,
        *,
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self.name = registry.find(cluster).name
        self._timeout = timeout.total_seconds()
        self._socket_path = str(registry.socket_path(self.name))

    def ping(self) -> dict[str, Any]:
        """Return the cluster's ``name``, ``directory``, ``nodes`` (names) and ``time``."""
        answer: dict[str, Any] = self._request("ping")
        return answer

    def submit(
        self,
        command: Sequence[str],
        *,
        nodes: int = 1,
        walltime: timedelta,
        preemptible: bool = True,
        nodelist: Iterable[str] | None = None,
        name: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdout: str | os.PathLike[str] | None = None,
        stderr: str | os.PathLike[str] | None = None,
    ) -> str:
        """Submit a job and return its id.

        Parameters
        ----------
        command
            Program and arguments, started once on every node of the job.
        nodes, walltime
            Requested number of nodes and walltime.
        preemptible
            Whether the main queue may preempt it.
        nodelist
            Nodes on which it may run; preemptible jobs only.
        name
            Display name.
        env
            Its environment; ``None`` for that of this process.
        cwd
            Its working directory; ``None`` for the current directory.
        stdout, stderr
            Files to which all its nodes append; ``None`` to discard the output.

        Raises
        ------
        InvalidSettings
            The cluster can never run it.
        """
        job_id: str = self._request(
            "submit",
            command=list(command),
            nodes=nodes,
            walltime=walltime.total_seconds(),
            preemptible=preemptible,
            nodelist=None if nodelist is None else list(nodelist),
            name=name,
            env=dict(os.environ if env is None else env),
            cwd=str(Path.cwd() if cwd is None else Path(cwd).resolve()),
            stdout=None if stdout is None else str(Path(stdout).resolve()),
            stderr=None if stderr is None else str(Path(stderr).resolve()),
        )
        return job_id

    def cancel(self, job_ids: Iterable[str]) -> dict[str, bool]:
        """Terminate jobs; return which had not already ended. Their processes may continue for the grace."""
        answer: dict[str, bool] = self._request("cancel", jobs=list(job_ids))
        return answer

    def jobs(self, job_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Describe jobs by id; unknown ones are absent. See `queue` for the keys."""
        answer: dict[str, dict[str, Any]] = self._request("jobs", jobs=list(job_ids))
        return answer

    def queue(self) -> dict[str, dict[str, Any]]:
        """Describe all pending and running jobs, by id.

        Keys: ``name``, ``kind`` (``main`` or ``preemptible``), ``state`` (`batch.JobState`), ``reason``,
        ``nodes`` (names), ``node_count``, ``walltime`` (s), ``submit``, ``start``, ``end``, ``ends`` (end of
        the walltime; s since the epoch or ``None``), ``ending`` (terminated, but not gone yet), ``exit_codes``
        (by node), ``stdout``, ``stderr``.
        """
        answer: dict[str, dict[str, Any]] = self._request("queue")
        return answer

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the use of each node: ``job`` (id or ``None``) and ``kind``, which is ``idle`` if unused."""
        answer: dict[str, dict[str, Any]] = self._request("nodes")
        return answer

    def expected_starts(self) -> dict[str, dict[str, Any]]:
        """Return the planned ``start`` (s since the epoch) and ``nodes`` of every pending main job, by id."""
        answer: dict[str, dict[str, Any]] = self._request("expected_starts")
        return answer

    def survey(self, job_ids: Iterable[str] = ()) -> dict[str, Any]:
        """Query ``time``, ``windows`` (each ``nodes``, ``opens``, ``closes``) and ``jobs`` in one request."""
        answer: dict[str, Any] = self._request("survey", jobs=list(job_ids))
        return answer

    def delays(self) -> list[dict[str, Any]]:
        """Compare main jobs with the same queue without preemptible jobs.

        Each has ``job``, ``submit``, ``expected_start``, ``start`` (s since the epoch; ``None`` if it is still
        pending although it would have started) and ``delay`` (s). See `accounting.delays`.
        """
        answer: list[dict[str, Any]] = self._request("delays")
        return answer

    def usage(self) -> dict[str, float]:
        """Count node-seconds so far: ``idle_node_seconds``, of these ``preemptible_node_seconds``.

        Also ``time`` (s since the epoch) and ``elapsed`` (s), so that two results can be subtracted.
        """
        answer: dict[str, float] = self._request("usage")
        return answer

    def history(self) -> list[dict[str, Any]]:
        """List the use of nodes over time: ``node``, ``job``, ``kind``, ``start``, ``end`` (``None`` if ongoing)."""
        answer: list[dict[str, Any]] = self._request("history")
        return answer

    def shutdown(self) -> None:
        """Shut down the cluster with all its jobs, without waiting."""
        self._request("shutdown")

    def _request(self, operation: str, **parameters: Any) -> Any:
        line = json.dumps({"op": operation, **parameters}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout)
                connection.connect(self._socket_path)
                connection.sendall(line)
                with connection.makefile("rb") as answers:
                    answer = answers.readline()
        except TimeoutError as error:
            raise BatchSystemError(
                f"cluster {self.name!r} did not answer {operation!r} within {self._timeout:g} s"
            ) from error
        except OSError as error:
            raise self._no_answer(f"{operation!r} failed: {error}") from error
        if not answer.endswith(b"\n"):
            raise self._no_answer(f"{operation!r} got an incomplete response")
        reply = json.loads(answer)
        if reply["ok"]:
            return reply["result"]
        if reply["usage"]:
            raise InvalidSettings(reply["error"])
        raise BatchSystemError(reply["error"])

    def _no_answer(self, what: str) -> BatchSystemError:
        """Make the error, depending on whether the cluster has ended or may respond the next time."""
        if any(cluster.name == self.name for cluster in registry.running_clusters()):
            return BatchSystemError(f"cluster {self.name!r}: {what}")
        return ClusterGone(f"cluster {self.name!r} has ended ({what})")


class EmbeddedCluster:
    """Runs an embedded cluster for the duration of a ``with`` block, and no longer than this process.

    Parameters
    ----------
    directory
        Directory for its log and queue; created if missing.
    nodes
        Number of nodes.
    workload
        The main queue; its time begins when the cluster is ready.
    grace
        Time from SIGTERM to SIGKILL.
    margin
        How long before a node is needed its window closes.
    name
        Its name; generated if empty.

    Attributes
    ----------
    client : ClusterClient
        Its client, once it has started.
    """

    client: ClusterClient

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        nodes: int = 8,
        workload: Sequence[MainJob] = (),
        grace: timedelta = timedelta(seconds=5),
        margin: timedelta = timedelta(0),
        name: str = "",
    ) -> None:
        self.directory = Path(directory).resolve()
        self.name = name or registry.new_name()
        self.nodes = nodes
        self.workload = tuple(workload)
        self.grace = grace
        self.margin = margin
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it responds; a cluster of the same directory whose parent was killed may end first.

        Raises
        ------
        BatchSystemError
            It did not start; the message contains the last line of its output.
        """
        registry.wait_for_ending(self.directory, logger.info)
        self.directory.mkdir(parents=True, exist_ok=True)
        queue = self.directory / "workload.json"
        save_workload(self.workload, queue)
        errors = self.directory / "cluster.err"
        command = module_command("freetrain_parsl.cluster.daemon")
        command += ["--dir", str(self.directory), "--name", self.name, "--nodes", str(self.nodes)]
        command += ["--grace", str(self.grace.total_seconds()), "--margin", str(self.margin.total_seconds())]
        command += ["--workload", str(queue), "--parent-pid", str(os.getpid())]
        with errors.open("wb") as stderr:
            # A separate session, so that Ctrl-C reaches only us and we can shut it down properly.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            readable, _, _ = select.select([stdout], [], [], _START_SECONDS)
            ready = bool(readable) and stdout.readline() == b"ready\n"
        if not ready:
            self.stop()
            lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise BatchSystemError(lines[-1] if lines else f"the embedded cluster did not start; see {errors}")
        self.client = ClusterClient(self.name)

    def stop(self) -> None:
        """Shut it down with all its jobs and wait until its processes are gone; do nothing if it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self.grace.total_seconds() + 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Reading the registry removes the entry of a killed cluster. A cluster of the same name may be the reason why
        # ours did not start.
        if self.name not in {info.name for info in registry.running_clusters()}:
            # Repeatedly: a killed daemon may have been about to start another process.
            give_up = time.monotonic() + 5.0
            while (left := processes.marked(registry.mark_prefix(self.name))) and time.monotonic() < give_up:
                processes.kill(left)
                time.sleep(0.02)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
