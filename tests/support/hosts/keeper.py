"""Holds the network namespaces of a `Hosts`, and removes everything in them as soon as the process that made them ends.

Run as a script by its path, with the standard library only, so that it starts at once. It starts one process per host,
in its own namespaces, prints their process ids, and waits for EOF on its standard input, which the kernel closes when
the other process ends, however it ends. Then it kills every process in those namespaces. Namespaces without a process,
and their interfaces, bridges and mounts, are removed by the kernel: none of them has a name outside.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

# Killed with the keeper; prints a line once the namespaces exist.
_HOST = ("setpriv", "--pdeathsig=KILL", "unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c")
_SLEEP = "echo ready; exec sleep infinity"

_PATIENCE = 20.0
_PERIOD = 0.02


def namespace_of(pid: int) -> int | None:
    """Return the number of a process's network namespace; ``None`` if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    return None


def inside(namespaces: set[int]) -> list[int]:
    """List the live processes in these network namespaces."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if namespace_of(pid) in namespaces]


def start_host() -> subprocess.Popen[str]:
    """Start the process that holds a host's namespaces, and wait until they exist."""
    holder = subprocess.Popen(
        [*_HOST, _SLEEP], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


def sweep(namespaces: set[int]) -> list[int]:
    """Kill every process in these namespaces; return those that did not end."""
    deadline = time.monotonic() + _PATIENCE
    while (pids := inside(namespaces)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PERIOD)
    return pids


def main(directory: str, count: str) -> int:
    """Hold `count` hosts until EOF on standard input, clean up, and remove `directory`; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    holders = [start_host() for _ in range(int(count))]
    namespaces = {found for holder in holders if (found := namespace_of(holder.pid)) is not None}
    namespaces.discard(namespace_of(os.getpid()) or 0)  # a holder that failed to create its own is still in ours
    with suppress(BrokenPipeError):  # the other process has already ended
        sys.stdout.write(json.dumps([holder.pid for holder in holders if holder.poll() is None]) + "\n")
        sys.stdout.flush()
    sys.stdin.buffer.read(1)
    left = sweep(namespaces)
    shutil.rmtree(directory, ignore_errors=True)
    return bool(left)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
