"""One node of a fake job: ``python -m tests.support.fake_commands.node KIND SCRIPT``, started by the cluster.

The first node runs the batch script; the job ends with it. The others run what `steps` sends them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from freetrain_parsl.windows.hostlist import compress_hosts
from tests.support.fake_commands.steps import connect, job_socket, stay_at_sigterm

_MOST_FILES = 2
_CHUNK = 65536


def main(kind: str, script: str) -> int:
    """Act as a node until the job ends."""
    job = os.environ["FREETRAIN_CLUSTER_JOB_ID"]
    rank = int(os.environ["FREETRAIN_CLUSTER_NODE_RANK"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(job_socket(job, rank)))
    listener.listen()
    if rank > 0:
        return _other_node(job, listener)
    others = _gather(listener)
    if kind == "slurm":
        # Slurm signals the steps of a job that ends, not its batch script.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        env = _slurm_environment(job)
    else:
        stay_at_sigterm()
        env = _pbs_environment(job, script)
    code = subprocess.run([script], env=env, stdin=subprocess.DEVNULL, check=False).returncode
    for connection in others:
        connection.close()
    return code if code >= 0 else 128 - code


def _gather(listener: socket.socket) -> list[socket.socket]:
    """Wait for the other nodes; their connections last as long as the job."""
    return [listener.accept()[0] for _ in _nodes()[1:]]


def _other_node(job: str, listener: socket.socket) -> int:
    stay_at_sigterm()
    first = connect(job_socket(job, 0))
    while True:
        readable, _, _ = select.select([listener, first], [], [])
        if first in readable:  # it never sends data: when it closes, the job ends
            return 0
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    """Run one task for a client."""
    with connection:
        request, files, _, _ = socket.recv_fds(connection, _CHUNK, _MOST_FILES)
        while request and not request.endswith(b"\n"):
            request += connection.recv(_CHUNK)
        asked = json.loads(request)
        own = {key: value for key, value in os.environ.items() if key.startswith("FREETRAIN_CLUSTER")}
        env = {**asked["env"], **own}
        task = subprocess.Popen(
            asked["command"], env=env, cwd=asked["cwd"], stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1]
        )
        for file in files:
            os.close(file)
        ended = os.pidfd_open(task.pid)
        readable, _, _ = select.select([connection.fileno(), ended], [], [])
        os.close(ended)
        if connection.fileno() in readable:
            task.kill()
        code = task.wait()
        with suppress(BrokenPipeError):
            connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())


def _nodes() -> list[str]:
    return os.environ["FREETRAIN_CLUSTER_NODELIST"].split(",")


def _slurm_environment(job: str) -> dict[str, str]:
    nodes, cpus = _nodes(), os.environ["FREETRAIN_FAKE_CPUS"]
    return {
        **os.environ,
        "SLURM_JOB_ID": job,
        "SLURM_JOBID": job,
        "SLURM_JOB_NODELIST": compress_hosts(nodes),
        "SLURM_NODELIST": compress_hosts(nodes),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_CPUS_ON_NODE": cpus,
        "SLURM_JOB_CPUS_PER_NODE": f"{cpus}(x{len(nodes)})" if len(nodes) > 1 else cpus,
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURMD_NODENAME": nodes[0],
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }


def _pbs_environment(job: str, script: str) -> dict[str, str]:
    nodes = _nodes()
    node_file = Path(f"{script}.nodes")
    node_file.write_text("".join(f"{node}\n" for node in nodes), encoding="utf-8")
    return {
        **os.environ,
        "PBS_JOBID": f"{job}.fake",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODEFILE": str(node_file),
        "PBS_NODENUM": "0",
        "PBS_TASKNUM": "1",
        "NCPUS": os.environ["FREETRAIN_FAKE_CPUS"],
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
