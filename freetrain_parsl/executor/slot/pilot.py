"""Keeps a node's worker pool alive until its slots have saved their work, then ends it at once.

A batch system sends SIGTERM to every process of a job. Parsl's worker pool would die of it, and with the pool the job
step, and with the step, without further notice, the slots that are about to write a checkpoint. So the pool does
not hear the signal; the slots do, and when the last of them has left, this process ends the pool and itself, and the
node is free. A pool that has no slots for a long time ends too: whoever should give it some is gone, and the node would
be held for nothing. Started as ``python -m freetrain_parsl.executor.slot.pilot COMMAND …``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from freetrain_parsl.cluster.processes import living

__all__ = ["end_node", "set_process_title"]

_PILOT = "FREETRAIN_PILOT"  # environment variable: process id of the node's pilot
_SLOT = "freetrain-slot"  # at most 15 characters
_PERIOD = 0.1  # seconds between looks for slots, once a signal has come
_LOOK = 5.0  # seconds between looks for slots before
_PATIENCE = "FREETRAIN_PILOT_PATIENCE"  # environment variable: seconds without a slot until the pool is ended
_DEFAULT_PATIENCE = 600.0


def set_process_title() -> None:
    """Name this process in the process table, for `ps` and for the pilot that waits for it.

    From now on the signal ends it, until it installs a handler: a slot that is still starting has nothing to save.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path("/proc/self/comm").write_text(_SLOT, encoding="ascii")


def end_node() -> None:
    """Let the pilot end this node's worker pool as soon as all slots of the node have left; called in a slot."""
    if (pilot := os.environ.get(_PILOT)) is not None:
        with suppress(ProcessLookupError):  # it has ended, and the pool with it
            os.kill(int(pilot), signal.SIGTERM)


def main(command: list[str]) -> int:
    """Run `command` as a process group of its own; return its exit code, or zero if it left as it was told."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the slots' early warning reaches every process too
    # Blocked before the child exists, so that no signal falls between its start and `sigwait`.
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    environment = {**os.environ, _PILOT: str(os.getpid())}
    pool = subprocess.Popen(command, env=environment, preexec_fn=_deaf)  # noqa: PLW1509 - no threads here
    patience = float(os.environ.get(_PATIENCE, _DEFAULT_PATIENCE))
    seen = time.monotonic()
    while pool.poll() is None:
        received = signal.sigtimedwait(awaited, min(_LOOK, patience))
        if received is None:
            now = time.monotonic()
            if _slots_in(pool.pid):
                seen = now
            elif now - seen >= patience:
                sys.stderr.write(f"freetrain: no slot ran here for {patience:g} s: ending this node's worker pool\n")
                _kill_group(pool.pid)
                pool.wait()
                return 1
        elif received.si_signo == signal.SIGTERM:
            while pool.poll() is None and _slots_in(pool.pid):
                time.sleep(_PERIOD)
            _kill_group(pool.pid)
            pool.wait()
            return 0
    _kill_group(pool.pid)
    return pool.returncode if pool.returncode >= 0 else 128 - pool.returncode


def _deaf() -> None:
    """Make the pool deaf to the batch system's signals; its slots install handlers of their own."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setpgrp()


def _slots_in(group: int) -> bool:
    """Whether a slot lives in this process group."""
    return any(info.group == group and _name(info.pid) == _SLOT for info in living())


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended meanwhile


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
