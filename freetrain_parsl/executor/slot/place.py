"""A slot's place in HTEX's worker pool: a process that forks those in which the slot works, one after another.

What a training job leaves in its process (hooks, caches, modules, modes of libraries, signal masks, open files,
threads) cannot be listed, hence not be undone. So none of it reaches the place: it has imported everything, runs no
code of the user, starts no thread and uses no accelerator, and each process that is forked from it is as new as the
first one.

The driver drops a slot without heartbeats and tells it to end, but a process in a long C call that keeps Python's
global interpreter lock does not read the command, nor does one whose user code has broken the thread. It would keep its
worker place from all other jobs: so it shows a `Pulse`.

The place adopts what its processes leave behind, also what has left their session, ends it, and removes their temporary
files: nothing of a job outlives it on a node that other jobs use.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from freetrain_parsl.cluster.processes import adopt_orphans, descendants, end_with_parent, is_running, kill, reap
from freetrain_parsl.executor.payloads.payloads import error_in
from freetrain_parsl.executor.slot.neighbours import clear_traces, pool_directory, process_of, publish_process
from freetrain_parsl.executor.slot.node_share import Lane
from freetrain_parsl.executor.slot.output import flush_streams
from freetrain_parsl.executor.slot.pilot import PLACE, TIDYING, is_tracker, set_process_title
from freetrain_parsl.executor.slot.run_end import serialized_exception

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pulse", "end_process", "occupy"]

_T = TypeVar("_T")

_PASSED_ON: Final = (signal.SIGTERM, signal.SIGUSR1)
_AWAITED: Final = {signal.SIGCHLD, signal.SIGINT, *_PASSED_ON}
_LOOK: Final = 1.0  # seconds after which a signal is noticed that another thread has received
_LONGEST_STOP: Final = 15  # looks at a stopped process until it is ended
_LONGEST_END: Final = 10.0  # seconds for killed processes: one that waits for a file system may never end
_DEBUGGED: Final = "t"
_COMM: Final = Path("/proc/self/comm")
_OUTCOMES: Final[list[int]] = []  # in a forked process: where it leaves what it returns
_SIZE: Final = 8  # bytes of the counter
_LATER: Final = 5.0  # seconds after the driver has given the process up: it may still read the command to end


def occupy(
    work: Callable[[_T | None], _T | None], pulse: Pulse | None = None, *, between: Callable[[], None] = lambda: None
) -> None:
    """Call `work` in forked processes, until one of them ends without a successor; then this process ends likewise.

    The batch system's signals are passed on to the process of the moment, and to those after it: they may arrive
    between two of them. Its SIGINT reaches all processes by itself.

    Parameters
    ----------
    work
        Called with what it has returned in the process before, ``None`` in the first. ``None``: there is no successor.
    pulse
        Beats in these processes once they have started: one in which it stops is ended. ``None``: it is not watched.
    between
        Called in this process when one of them has ended.

    Raises
    ------
    Exception
        The one that `work` has raised; this process can take the next task of the pool.
    """
    title = _COMM.read_text(encoding="utf-8").rstrip("\n")
    received: list[int] = []
    adopt_orphans()
    _await_process()  # of a place that was killed
    _clear_traces()
    mask: set[int] = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    # Only for what another thread receives, such as one that an import of Parsl starts.
    actions = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _PASSED_ON}
    _COMM.write_text(PLACE, encoding="utf-8")
    left: _T | None = None
    try:
        while True:
            outcome = os.memfd_create("freetrain-slot")  # to be written even if no file can be opened any more
            try:
                code = _attend(_fork(work, left, outcome, mask), received, pulse)
                said = os.pread(outcome, os.fstat(outcome).st_size, 0)
            finally:
                os.close(outcome)
                _end_leftovers()
                _clear_traces()
            between()
            if not said:
                os._exit(code if code >= 0 else 128 - code)
            left, failure = pickle.loads(said)  # noqa: S301 - of a process of ours
            if failure:
                raise error_in(failure)
    finally:
        _COMM.write_text(title, encoding="utf-8")
        for number, action in actions.items():
            signal.signal(number, action)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_leftovers() -> None:
    """End what a process has left: the trackers last, which remove what the others have left in ``/dev/shm``."""
    begun = time.monotonic()
    reap()
    while (left := descendants()) and (lasted := time.monotonic() - begun) < _LONGEST_END:
        kill(pid for pid in left if lasted >= TIDYING or not is_tracker(pid))
        time.sleep(TIDYING / 100)
        reap()


def _await_process() -> None:
    """Wait for the process of the place that was here before, if it is still being ended.

    The kernel kills it with its place, but the memory of a large one, and of its accelerator, takes a while to free.
    """
    pool, begun = pool_directory(), time.monotonic()
    if pool is not None and (before := process_of(pool, Lane.of_worker().rank)) is not None:
        while is_running(*before) and time.monotonic() - begun < _LONGEST_END:
            time.sleep(TIDYING / 100)


def _clear_traces() -> None:
    if (pool := pool_directory()) is not None:
        clear_traces(pool, Lane.of_worker().rank)


def _attend(pid: int, received: list[int], pulse: Pulse | None) -> int:
    """Wait for the end of a process, and pass signals on to it; return its exit code, negative if a signal ended it.

    A process that has stopped itself, or that runs without a pulse, would keep its place: it cannot obey the driver,
    which has dropped it. If the batch system suspends a job, it stops this process, too, which then does not look.
    """
    passed = stopped = silent = 0
    first = beats = None if pulse is None else pulse.count()
    while True:
        exits = reap()  # of orphans, too
        if pid in exits:
            return exits[pid]
        while passed < len(received):
            os.kill(pid, received[passed])
            passed += 1
        arrived = signal.sigtimedwait(_AWAITED, _LOOK)
        if arrived is not None and arrived.si_signo in _PASSED_ON:
            received.append(arrived.si_signo)
        elif arrived is None:
            state = _state(pid)
            stopped = stopped + 1 if state == "T" else 0
            if pulse is not None:
                before, beats = beats, pulse.count()
                silent = silent + 1 if first != beats == before and state != _DEBUGGED else 0
            if stopped >= _LONGEST_STOP or (pulse is not None and silent * _LOOK >= pulse.patience):
                os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """Return the state of a child as the kernel names it: ``T``, stopped by a signal; ``t``, by a debugger."""
    with suppress(ProcessLookupError, FileNotFoundError):  # gone: another thread has waited for it
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    return ""


def _fork(work: Callable[[_T | None], _T | None], left: _T | None, outcome: int, mask: set[int]) -> int:
    """Fork a process that calls `work`; return its id."""
    place = os.getpid()
    flush_streams()
    pid = os.fork()
    if pid == 0:
        _perform(work, left, outcome, mask, place)
    return pid


def _perform(
    work: Callable[[_T | None], _T | None], left: _T | None, outcome: int, mask: set[int], place: int
) -> NoReturn:
    code = 1
    _OUTCOMES.append(outcome)
    try:
        end_with_parent(place)
        set_process_title()
        if (pool := pool_directory()) is not None:
            publish_process(pool, Lane.of_worker().rank)
        _use_own_resource_tracker()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        said: tuple[_T | None, bytes]
        try:
            said = work(left), b""
        except Exception as error:  # noqa: BLE001 - it ends this process, and is raised in the place
            said = None, serialized_exception(error)
        if said != (None, b""):
            _write(outcome, said)
        code = 0
    finally:  # KeyboardInterrupt, too: as any signal that ends a process
        flush_streams()
        os._exit(code)


def _write(outcome: int, said: object) -> None:
    with open(outcome, "wb", closefd=False) as file:
        pickle.dump(said, file)


def end_process(left: object) -> NoReturn:
    """End this process, from any of its threads, as if its work had returned `left`."""
    _write(_OUTCOMES[-1], (left, b""))
    os._exit(0)


def _use_own_resource_tracker() -> None:
    """Let multiprocessing start a tracker for this process when it needs one, as in any interpreter.

    A tracker removes what its processes leave in ``/dev/shm`` when the last of them has ended. That of the pool, which
    this process has inherited, would keep the memory of a training job that has crashed for as long as the block lives.
    """
    tracker = resource_tracker._resource_tracker  # noqa: SLF001 - no other way
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]  # noqa: SLF001 - the same


class Pulse:
    """A counter in memory that a place shares with the processes that it forks.

    Without a heartbeat for `heartbeat_timeout` seconds, the driver drops a slot.
    """

    def __init__(self, heartbeat_timeout: float) -> None:
        self.patience = heartbeat_timeout + _LATER
        """Seconds without a beat after which the process is ended."""
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def beat(self) -> None:
        """Show that this process is alive."""
        self._memory[:_SIZE] = ((self.count() + 1) % (1 << 64)).to_bytes(_SIZE, "little")

    def count(self) -> int:
        """Return the number of beats so far, of all processes."""
        return int.from_bytes(self._memory[:_SIZE], "little")
