"""Real processes as nodes: start a command in a separate session, and find and signal its processes.

A process belongs to the session that was started for a (job, node), or, if it left that session (``setsid``), has its
mark in the environment. Linux only: it reads ``/proc``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

MARK = "FREETRAIN_CLUSTER_MARK"
"""Environment variable that marks a process as ``directory of the cluster/job/node``."""

NODE_STARTER = "FREETRAIN_NODE_STARTER"
"""Environment variable: module through which programs of nodes are started; see `EmbeddedClusterProvider`."""

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ProcessInfo(NamedTuple):
    """From ``/proc/PID/stat``; `started` (ticks after boot) distinguishes it from later processes with the same id."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it is still running; a zombie is not."""
        return self.state not in ("Z", "X")


def require_proc() -> None:
    """Check that the machine has ``/proc``.

    Raises
    ------
    InvalidSettings
        This is not Linux.
    """
    if not (_PROC / "self" / "stat").exists():
        raise InvalidSettings(f"the embedded cluster needs Linux (it reads /proc), this is {sys.platform}")


def adopt_orphans() -> bool:
    """Become the parent of all orphaned descendants, which reports their exits to us; false if not supported."""
    refused: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return not refused


def end_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, also if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def process_info(pid: int) -> ProcessInfo | None:
    """Look up a process; ``None`` if it does not exist."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the preceding name may contain anything
    return ProcessInfo(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def is_running(pid: int, started: int) -> bool:
    """Return whether the process with this id and start tick is still alive."""
    info = process_info(pid)
    return info is not None and info.started == started and info.alive


def living() -> list[ProcessInfo]:
    """Return all live processes of this machine."""
    infos = (process_info(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdecimal())
    return [info for info in infos if info is not None and info.alive]


def mark_of(pid: int) -> str | None:
    """Return the mark with which a process was started, if its environment is readable."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except (OSError, ProcessLookupError):
        return None
    prefix = f"{MARK}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None


def descendants() -> list[int]:
    """Return all live descendants of this process."""
    everyone = living()
    parents = {info.pid: info.parent for info in everyone}
    return [info.pid for info in everyone if _descends(info.pid, os.getpid(), parents)]


def members(sessions: Mapping[int, str]) -> dict[str, list[ProcessInfo]]:
    """Return the live processes of each mark, given the mark of each session; marks without processes are absent."""
    wanted = set(sessions.values())
    own = process_info(os.getpid())
    assert own is not None, "this process is in /proc"
    found: dict[str, list[ProcessInfo]] = {}
    for info in living():
        mark = sessions.get(info.session)
        # Not only descendants of this process: programs of nodes may be forked from a warm start server.
        if mark is None and info.started >= own.started:
            mark = mark_of(info.pid)
        if mark is not None and mark in wanted:
            found.setdefault(mark, []).append(info)
    return found


def _descends(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and (pid := parents[pid]) > 0:
        if pid == ancestor:
            return True
    return False


def marked(prefix: str) -> list[int]:
    """Return this user's live processes whose mark begins with `prefix`."""
    return [info.pid for info in living() if (mark_of(info.pid) or "").startswith(prefix)]


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdout: Path | None = None,
    stderr: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a separate session, with its output appended to files or discarded.

    Raises
    ------
    OSError
        The command, the directory or a file cannot be opened.
    """
    with ExitStack() as files:
        out = files.enter_context(stdout.open("ab")) if stdout else subprocess.DEVNULL
        err = files.enter_context(stderr.open("ab")) if stderr else subprocess.DEVNULL
        return subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def terminate(processes: Collection[ProcessInfo]) -> None:
    """Send SIGTERM to processes, one group at a time, so that no child forked meanwhile is missed."""
    for group in {info.group for info in processes}:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)


def kill(pids: Iterable[int]) -> None:
    """Kill processes; ignore those already gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap() -> dict[int, int]:
    """Collect all children that have exited: process id -> exit code (negative: the signal that killed it)."""
    exits: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exits
        if pid == 0:
            return exits
        exits[pid] = os.waitstatus_to_exitcode(status)
