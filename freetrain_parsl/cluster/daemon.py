"""The embedded cluster's process: ``python -m freetrain_parsl.cluster.daemon --dir DIR [--nodes N] …``.

It listens on a Unix socket in a private directory (`registry`). A request is one line of JSON, ``{"op": …, …}``, and so
is its response, ``{"ok": true, "result": …}`` or ``{"ok": false, "error": …, "usage": …}``. Times in responses are
seconds since the epoch. It ends, with all its jobs, on SIGTERM, SIGINT, a ``shutdown`` request, or when the process
for which it was started is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.cluster import processes, registry
from freetrain_parsl.cluster.accounting import delays
from freetrain_parsl.cluster.batch import BatchQueue, Command, JobRecord
from freetrain_parsl.cluster.scheduling import Scheduler
from freetrain_parsl.cluster.workload import load_workload
from freetrain_parsl.errors import FreeTrainError, InvalidSettings
from freetrain_parsl.screen import say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

_PARENT_CHECK_SECONDS = 0.5
_MAX_REQUEST = 16 * 2**20  # bytes; a request contains a job's whole environment


class Daemon:
    """Serves requests to a batch system."""

    def __init__(self, batch: BatchQueue, directory: Path) -> None:
        self._batch = batch
        self._directory = directory
        self.stopping = asyncio.Event()
        self._operations: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "ping": self._ping,
            "submit": self._submit,
            "cancel": self._cancel,
            "jobs": self._jobs,
            "queue": self._queue,
            "nodes": self._nodes,
            "expected_starts": self._expected_starts,
            "survey": self._survey,
            "delays": self._delays,
            "usage": self._usage,
            "history": self._history,
            "shutdown": self._shutdown,
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of a connection until it closes."""
        try:
            while line := await reader.readline():
                writer.write(json.dumps(self._answer(line)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError) as error:  # closed, or a line above the limit
            logger.warning("connection closed: %s", error)
        finally:
            writer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            operation = self._operations[request["op"]]
        except (ValueError, KeyError, TypeError):
            return {"ok": False, "usage": True, "error": f"not a request: {line[:100]!r}"}
        try:
            return {"ok": True, "result": operation(request)}
        except FreeTrainError as error:
            return {"ok": False, "usage": isinstance(error, ValueError), "error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            logger.exception("request failed: %r", line[:200])
            return {"ok": False, "usage": True, "error": f"bad {request['op']} request: {error!r}"}

    # -- operations ------------------------------------------------------------------------------------------

    def _ping(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": self._batch.name,
            "directory": str(self._directory),
            "nodes": list(self._batch.scheduler.names.names),
            "time": self._now(),
        }

    def _submit(self, request: Mapping[str, Any]) -> str:
        def path(key: str) -> Path | None:
            return Path(request[key]) if request.get(key) else None

        command = Command(tuple(request["command"]), request["env"], path("cwd"), path("stdout"), path("stderr"))
        if not command.argv:
            raise InvalidSettings("a job needs a command")
        return self._batch.submit(
            command,
            nodes=int(request["nodes"]),
            walltime=float(request["walltime"]),
            preemptible=bool(request["preemptible"]),
            nodelist=request.get("nodelist"),
            name=request.get("name", ""),
        )

    def _cancel(self, request: Mapping[str, Any]) -> dict[str, bool]:
        return self._batch.cancel(request["jobs"])

    def _jobs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        records = self._batch.records
        return {job_id: self._describe(records[job_id]) for job_id in request["jobs"] if job_id in records}

    def _queue(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {job_id: self._describe(record) for job_id, record in self._batch.records.items() if record.end is None}

    def _nodes(self, _: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        nodes: dict[str, dict[str, Any]] = {
            node: {"job": None, "kind": "idle"} for node in self._batch.scheduler.names.names
        }
        for record in self._batch.records.values():
            for node in record.occupied:
                nodes[node] = {"job": record.job.id, "kind": record.kind}
        return nodes

    def _expected_starts(self, _: Mapping[str, Any]) -> dict[str, Any]:
        plan = self._batch.scheduler.expected_starts(self._batch.clock())
        return {
            job_id: {"start": self._batch.epoch(start), "nodes": list(nodes)} for job_id, (start, nodes) in plan.items()
        }

    def _survey(self, request: Mapping[str, Any]) -> dict[str, Any]:
        windows = [
            {
                "nodes": list(nodes),
                "opens": self._batch.epoch(opens),
                "closes": None if closes is None else self._batch.epoch(closes),
            }
            for opens, closes, nodes in self._batch.windows()
        ]
        return {"time": self._now(), "windows": windows, "jobs": self._jobs(request)}

    def _delays(self, _: Mapping[str, Any]) -> list[dict[str, Any]]:
        batch = self._batch
        found = delays(batch.main_records(), len(batch.scheduler.names), batch.clock())
        return [
            {
                "job": item.job_id,
                "submit": batch.epoch(item.submit),
                "expected_start": batch.epoch(item.expected_start),
                "start": None if item.start is None else batch.epoch(item.start),
                "delay": item.delay,
            }
            for item in found
        ]

    def _usage(self, _: Mapping[str, Any]) -> dict[str, float]:
        usage = self._batch.usage_so_far()
        return {
            "time": self._batch.epoch(usage.time),
            "elapsed": usage.time,
            "idle_node_seconds": usage.offered,
            "preemptible_node_seconds": usage.preemptible,
        }

    def _history(self, _: Mapping[str, Any]) -> list[dict[str, Any]]:
        epoch = self._batch.epoch
        return [
            {
                "node": interval.node,
                "job": interval.job,
                "kind": interval.kind,
                "start": epoch(interval.start),
                "end": None if interval.end is None else epoch(interval.end),
            }
            for interval in self._batch.history
        ]

    def _shutdown(self, _: Mapping[str, Any]) -> None:
        logger.info("shutdown was requested")
        self.stopping.set()

    def _now(self) -> float:
        return self._batch.epoch(self._batch.clock())

    def _describe(self, record: JobRecord) -> dict[str, Any]:
        epoch = self._batch.epoch
        return {
            "name": record.name,
            "kind": record.kind,
            "state": record.state.value,
            "reason": record.reason,
            "nodes": list(record.nodes),
            "node_count": record.job.nodes,
            "walltime": record.job.walltime,
            "submit": epoch(record.submit),
            "start": None if record.start is None else epoch(record.start),
            "end": None if record.end is None else epoch(record.end),
            "ends": None if record.start is None else epoch(record.start + record.job.walltime),
            "ending": record.outcome is not None and record.end is None,
            "exit_codes": dict(record.exit_codes),
            "stdout": None if record.command.stdout is None else str(record.command.stdout),
            "stderr": None if record.command.stderr is None else str(record.command.stderr),
        }


def _watch_parent(parent: processes.ProcessInfo | None, daemon: Daemon) -> None:
    if parent is not None and processes.is_running(parent.pid, parent.started):
        asyncio.get_running_loop().call_later(_PARENT_CHECK_SECONDS, _watch_parent, parent, daemon)
    else:
        logger.info("the parent process of this cluster is gone")
        daemon.stopping.set()


async def run(options: argparse.Namespace) -> None:
    """Run a cluster until it is stopped.

    Raises
    ------
    InvalidSettings
        A setting is out of range, or the cluster is already running.
    """
    loop = asyncio.get_running_loop()
    scheduler = Scheduler(options.nodes, margin=options.margin)
    workload = load_workload(options.workload) if options.workload else []
    too_big = max((job.nodes for job in workload), default=0)
    if too_big > options.nodes:
        raise InvalidSettings(f"the workload has a job of {too_big} nodes, the cluster has {options.nodes}")
    processes.adopt_orphans()
    parent = processes.process_info(options.parent_pid) if options.parent_pid else None
    registry.register(options.name, options.dir, parent)
    try:
        batch = BatchQueue(options.name, scheduler, grace=options.grace, workload=workload, loop=loop)
        daemon = Daemon(batch, options.dir)
        loop.add_signal_handler(signal.SIGCHLD, batch.children_exited)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, daemon.stopping.set)
        path = registry.socket_path(options.name)
        server = await asyncio.start_unix_server(daemon.serve, path, limit=_MAX_REQUEST)
        if options.parent_pid:
            _watch_parent(parent, daemon)
        logger.info("cluster %s of %d nodes is ready", options.name, options.nodes)
        say("ready")  # to the process that started this one
        await daemon.stopping.wait()
        logger.info("shutting down")
        server.close()
        batch.close()
        await batch.drained.wait()
        processes.kill(processes.descendants())  # processes that left their session and changed their environment
        logger.info("all processes are gone")
    finally:
        registry.unregister(options.name)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="freetrain_parsl.cluster.daemon", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="directory for its log")
    parser.add_argument("--name", default="", help="name of the cluster (default: generated)")
    parser.add_argument("--nodes", type=int, default=8, help="number of nodes")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--margin", type=float, default=0.0, help="seconds a window closes before its node is needed")
    parser.add_argument("--workload", type=Path, help="main queue, as written by save_workload")
    parser.add_argument("--parent-pid", type=int, default=0, help="end when this process is gone")
    options = parser.parse_args(arguments)
    options.name = options.name or registry.new_name()
    options.dir = options.dir.resolve()
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run a cluster; return 2 if it cannot be started."""
    options = parse(arguments)
    try:
        processes.require_proc()
        for name, value in (("grace", options.grace), ("margin", options.margin)):
            if not 0 <= value < float("inf"):
                raise InvalidSettings(f"{name} must be zero or more seconds, got {value}")
        options.dir.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(
            filename=options.dir / "cluster.log",
            level=logging.INFO,
            format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )
        asyncio.run(run(options))
    except (FreeTrainError, OSError) as error:
        say(f"the embedded cluster cannot run: {error}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
