"""Start tasks on the other nodes of a job, as ``srun`` and ``mpiexec`` do.

The cluster starts `node` on every node of a job. On the first it runs the batch script; on the others it waits on a
Unix socket for a task: its arguments, environment and directory as a line of JSON, together with the file descriptors
of its output. It replies with the exit code. If the client disconnects, the task is ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING

from freetrain_parsl.cluster import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["StepTask", "connect", "job_socket", "run_tasks", "stay_at_sigterm"]

_NODE_START_SECONDS = 30.0
_RETRY_SECONDS = 0.02


@dataclass(frozen=True)
class StepTask:
    """A process of a step: its node in the job (0 is the first), and its additions to the step's environment."""

    node: int
    env: Mapping[str, str]


def job_socket(job: str, node: int) -> Path:
    """Return the socket on which a node of a job of this cluster listens."""
    return registry.socket_path(os.environ["FREETRAIN_CLUSTER"]).with_name(f"{job}.{node}")


def connect(path: Path) -> socket.socket:
    """Connect to a node of the job, which may still be starting.

    Raises
    ------
    OSError
        It is not listening after half a minute.
    """
    deadline = time.monotonic() + _NODE_START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return connection


def stay_at_sigterm() -> None:
    """Ignore SIGTERM, which the cluster sends to every process of a job; child processes do not ignore it."""
    signal.signal(signal.SIGTERM, lambda *_: None)


def run_tasks(job: str, command: Sequence[str], tasks: Sequence[StepTask], *, label: bool = False) -> int:
    """Start a command once per task, wait for all, and return the first nonzero exit code.

    Parameters
    ----------
    job
        The cluster's id of this process's job.
    command
        Program and arguments.
    tasks
        The processes to start.
    label
        Prefix every line of output with its task number.
    """
    codes = [0] * len(tasks)
    threads = []
    for number, task in enumerate(tasks):
        threads.append(_start(partial(_run_task, job, command, number, task, codes, label=label)))
    for thread in threads:
        thread.join()
    return next((code for code in codes if code), 0)


def _run_task(job: str, command: Sequence[str], number: int, task: StepTask, codes: list[int], *, label: bool) -> None:
    copiers: list[threading.Thread] = []
    files: list[IO[bytes]] = []
    try:
        for target in (1, 2):
            if label:
                reader, writer = os.pipe()
                files.append(os.fdopen(writer, "wb"))
                copiers.append(_start(_copy, os.fdopen(reader, "rb"), target, f"{number}: ".encode()))
            else:
                files.append(os.fdopen(os.dup(target), "wb"))
        env = {**os.environ, **task.env}
        launch = _run_here if task.node == 0 else _run_there
        codes[number] = launch(job, task.node, command, env, files)
    except OSError as error:
        os.write(2, f"task {number}: {error}\n".encode())
        codes[number] = 1
    finally:
        for file in files:
            file.close()
        for copier in copiers:
            copier.join()


def _run_here(_: str, __: int, command: Sequence[str], env: Mapping[str, str], files: Sequence[IO[bytes]]) -> int:
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1], check=False)
    return done.returncode


def _run_there(job: str, node: int, command: Sequence[str], env: Mapping[str, str], files: Sequence[IO[bytes]]) -> int:
    request = json.dumps({"command": list(command), "env": dict(env), "cwd": os.getcwd()}).encode() + b"\n"  # noqa: PTH109 - a string is sent
    with connect(job_socket(job, node)) as connection:
        sent = socket.send_fds(connection, [request], [file.fileno() for file in files])
        if rest := request[sent:]:  # sending zero bytes is EPIPE if the task has already ended
            connection.sendall(rest)
        with connection.makefile("rb") as answers:
            answer = answers.readline()
    return int(answer) if answer else 1  # the node is gone


def _copy(source: IO[bytes], target: int, prefix: bytes) -> None:
    with source, suppress(BrokenPipeError):
        for line in source:
            os.write(target, prefix + line)


def _start(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread
