"""Cleans up a `loopback_slurm` as soon as the process that started it ends, however it ends.

Run as a script by its path, with the standard library only, so that it starts at once: it waits on its standard input,
which closes with the other process, then kills every process of the cluster and removes the cluster's directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["MARK", "is_alive", "marked"]

MARK = "FREETRAIN_LOOPBACK_SLURM"
"""Environment variable of every daemon and every client of a cluster; its value is the cluster's name."""

_JOB_MARK = "SLURM_CLUSTER_NAME"  # set by Slurm in every job, regardless of the job's environment
_PATIENCE = 20.0
_PERIOD = 0.02


def marked(cluster: str) -> list[int]:
    """List the live processes of a cluster: its daemons, job steps and jobs."""
    wanted = {f"{name}={cluster}".encode() for name in (MARK, _JOB_MARK)}
    mine = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != mine and is_alive(int(entry.name)):
            with suppress(OSError):  # it has ended, or belongs to another user
                if not wanted.isdisjoint((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process exists; zombies do not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def sweep(cluster: str) -> list[int]:
    """Kill every process of a cluster; return the survivors."""
    deadline = time.monotonic() + _PATIENCE
    while (pids := marked(cluster)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PERIOD)
    return pids


def main(cluster: str, directory: str) -> int:
    """Wait for the end of the parent process, then clean up after it; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read(1)  # a byte, or EOF
    left = sweep(cluster)
    shutil.rmtree(directory, ignore_errors=True)
    return bool(left)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
