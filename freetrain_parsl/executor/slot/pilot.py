"""Keep a node's worker pool alive until its slots have saved their work, then end it at once.

A batch system sends SIGTERM to every process of a job. It would end Parsl's worker pool, and with the pool the job
step, and with the step, without further notice, the slots that are writing a checkpoint. Therefore the pool ignores
the signal. The slots handle it, and when the last of them has exited, this process ends the pool and itself, which
releases the node. A pool without slots for a long time is ended too: its driver is gone, and the node would be held
for nothing. Started as ``python -m freetrain_parsl.executor.slot.pilot COMMAND …``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Final

from freetrain_parsl.cluster.processes import living
from freetrain_parsl.storage.temporary_directories import lock_directory, make_locked_directory, remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

__all__ = [
    "NODE_FILES",
    "NODE_FILES_OF_POOL",
    "PLACE",
    "POOL_DIRECTORY",
    "TIDYING",
    "PoolDirectory",
    "end_node",
    "hold_pool_directory",
    "is_tracker",
    "pilot_of_node",
    "set_process_title",
]

POOL_DIRECTORY: Final = "FREETRAIN_POOL_DIRECTORY"  # environment variable, for the pool
NODE_FILES: Final = "FREETRAIN_NODE_FILES"
"""Environment variable, ``DESCRIPTOR:DIRECTORY``: files that pilots of this node share, and the lock on them, which
each has inherited: the last one removes them."""

NODE_FILES_OF_POOL: Final = "node-files"
"""File in a pool's directory: directories in the memory of this node that slots have made, one a line. The last pilot
whose slots use one, by a shared lock on it, removes it."""

_PREFIX: Final = "ft-pool-"  # short: the path of a socket has at most 107 characters

_PILOT = "FREETRAIN_PILOT"  # environment variable: process id of the node's pilot
_SLOT = "freetrain-slot"  # at most 15 characters
PLACE: Final = f"{_SLOT}s"  # the parent of a slot's processes, which lives while one succeeds another
_PERIOD = 0.1  # seconds between checks for slots after a signal
TIDYING: Final = 1.0  # seconds for the trackers of multiprocessing to remove what killed processes have left
_LOOK = 5.0  # seconds between checks for slots before a signal
_PATIENCE = "FREETRAIN_PILOT_PATIENCE"  # environment variable: seconds without a slot until the pool is ended
_DEFAULT_PATIENCE = 600.0


class PoolDirectory:
    """The temporary directory of a node's worker pool, private to the user, which exists during a ``with`` block.

    The processes of a pool are killed when their node ends, so none of them can remove its temporary files. The pilot
    removes them, and those of earlier pools on this node whose pilot was killed, too. A directory is locked while its
    pilot or its pool lives, so that it can be told from an abandoned one.

    Attributes
    ----------
    path : pathlib.Path
        The directory.
    """

    path: Path

    def __enter__(self) -> Self:
        remove_abandoned(_PREFIX)
        self._lock: int | None
        self.path, self._lock = make_locked_directory(_PREFIX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # processes that are being killed may still create files
        self.release()

    def release(self) -> None:
        """Close the lock: at the end, or in a process that was forked from the pilot."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_node_files(pool: Path) -> None:
    """Remove the files that the pilots of this node share, if no other pilot uses them."""
    lock, _, name = os.environ.get(NODE_FILES, "").partition(":")
    with suppress(OSError):  # another pilot uses them, or has removed them
        if name and os.path.samestat(os.fstat(int(lock)), os.stat(name)):  # noqa: PTH116 - by its name
            # else this process was not started by the shell that has opened it
            fcntl.flock(int(lock), fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(Path(name))
    with suppress(OSError):  # there are none
        for line in dict.fromkeys((pool / NODE_FILES_OF_POOL).read_text(encoding="utf-8").splitlines()):
            with suppress(OSError):  # slots of another pilot use them
                held = lock_directory(Path(line), fcntl.LOCK_EX)  # until it has another name: nobody begins to use it
                _remove(Path(line))
                os.close(held)


def _remove(directory: Path) -> None:
    gone = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    directory.rename(gone)  # at once: a node that starts now must not find a part of it
    shutil.rmtree(gone, ignore_errors=True)


def hold_pool_directory() -> str | None:
    """Lock the directory of this pool until this process ends, and return it; ``None`` without a pilot."""
    path = os.environ.pop(POOL_DIRECTORY, None)
    if path is not None:
        with suppress(OSError):  # a file system without locks
            lock_directory(Path(path), fcntl.LOCK_SH)
    return path


def set_process_title() -> None:
    """Set this process's name in the process table, for `ps` and for the pilot, which waits for it.

    This also restores the default action of SIGTERM: a slot that is still starting has nothing to save.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path("/proc/self/comm").write_text(_SLOT, encoding="ascii")


def pilot_of_node() -> int | None:
    """Return the process id of this node's pilot; called in a slot, before user code can change the environment."""
    pilot = os.environ.get(_PILOT)
    return None if pilot is None else int(pilot)


def end_node(pilot: int | None) -> None:
    """Make the pilot, if there is one, end its node's worker pool once all slots of the node have exited."""
    if pilot is not None:
        with suppress(ProcessLookupError):  # it has ended, and the pool with it
            os.kill(pilot, signal.SIGTERM)


def start_pool(command: list[str], environment: Mapping[str, str], prepare: Callable[[], None]) -> Popen[bytes]:
    """Start the worker pool; `prepare` runs in its process before the program."""
    return Popen(command, env=environment, preexec_fn=prepare)  # noqa: PLW1509 - no threads here


def main(command: list[str]) -> int:
    """Run `command` in its own process group; return its exit code, or zero after a signal to the pilot."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the early warning to the slots is sent to every process
    # Blocked before the child starts, so that no signal is missed between its start and `sigtimedwait`.
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    with PoolDirectory() as directory:

        def prepare() -> None:
            _deaf()
            directory.release()

        environment = {**os.environ, _PILOT: str(os.getpid()), POOL_DIRECTORY: str(directory.path)}
        code = _attend(start_pool(command, environment, prepare), awaited)
        remove_node_files(directory.path)
    return code


def _attend(pool: Popen[bytes], awaited: set[signal.Signals]) -> int:
    """Wait for the end of the pool or the awaited signals, and end the pool."""
    patience = float(os.environ.get(_PATIENCE, _DEFAULT_PATIENCE))
    seen = time.monotonic()
    while (code := pool.poll()) is None:
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
            _await_slots(pool, received.si_pid)
            _kill_group(pool.pid)
            pool.wait()
            return 0
    _kill_group(pool.pid)
    return code if code >= 0 else 128 - code


def _await_slots(pool: Popen[bytes], sender: int) -> None:
    """Wait until all slots have exited, after SIGTERM from a process.

    A slot that has become one after the batch system's signal has ignored it, as the pool does, and receives it again.
    Not if a slot has asked for the end of its node: it may need its child processes to save.
    """
    slots = _slots_in(pool.pid)
    received = set(slots) if sender in slots else set()
    while pool.poll() is None and slots:
        for slot in slots - received:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(slot, signal.SIGTERM)
        received |= slots
        time.sleep(_PERIOD)
        slots = _slots_in(pool.pid)


def _deaf() -> None:
    """Make the pool ignore the batch system's signals; its slots install their own handlers."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setpgrp()


def _slots_in(group: int) -> set[int]:
    """Return the process ids of the live slots in this process group, and those of their places."""
    return {info.pid for info in living() if info.group == group and _name(info.pid).startswith(_SLOT)}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended


def _kill_group(group: int) -> None:
    """Kill the processes of a group: the trackers last, which remove what the others have left in ``/dev/shm``."""
    trackers = set()
    for info in living():
        if info.group == group:
            if is_tracker(info.pid):
                trackers.add(info.pid)
            else:
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(info.pid, signal.SIGKILL)
    end = time.monotonic() + TIDYING
    while trackers & {info.pid for info in living() if info.group == group} and time.monotonic() < end:
        time.sleep(TIDYING / 50)
    with suppress(ProcessLookupError):  # all its processes have ended
        os.killpg(group, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker of Python's multiprocessing."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
