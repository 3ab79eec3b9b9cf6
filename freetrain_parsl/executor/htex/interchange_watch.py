"""Supervision of HTEX's interchange: slot tasks are sent without blocking, and it is restarted if it ends or hangs.

Sending a task while no interchange is connected blocks indefinitely, so tasks are sent from a separate thread. The
driver's sockets are bound, and workers find the interchange at its old port, so a new process can replace the old one.
The new process does not know the old one's worker pools, which soon end by themselves.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq
from parsl.executors.high_throughput.zmq_pipes import CommandClient

from freetrain_parsl.executor.driver.doorkeeper import Doorkeeper
from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Callable

    from parsl.executors.high_throughput.executor import HighThroughputExecutor

logger = logging.getLogger(__name__)

__all__ = [
    "HtexInterchange",
    "InterchangeWatch",
    "guard_sockets",
]

_SEND_TIMEOUT = 1000  # milliseconds


class InterchangeWatch:
    """A thread that sends slot tasks, checks the interchange periodically and restarts it.

    `post` is called with `InterchangeEnded` and `InterchangeRestarted`, and must not block; `give_up` once, with the
    reason, if restarting does not help.
    """

    _LOOK = 0.5  # seconds between checks of the process
    _ASK = 10.0  # seconds between an answer and the next request
    _SILENCE = 30.0  # seconds without an answer after which the process counts as hanging
    _MOST_RESTARTS = 3
    _WITHIN = 600.0  # seconds in which at most _MOST_RESTARTS are made

    def __init__(
        self,
        interchange: HtexInterchange,
        post: Callable[[record.Record], None],
        give_up: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="freetrain-interchange-watch", daemon=True)
        self._interchange = interchange
        self._post = post
        self._give_up = give_up
        self._clock = clock
        self._tasks: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._unsent: deque[str] = deque()
        self._restarts: deque[float] = deque()
        self._stopping = threading.Event()
        self._looked = clock()
        self._ask_at = clock() + self._ASK
        self._asked: float | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, token: str) -> None:
        """Queue a slot task for sending; never blocks."""
        self._tasks.put(token)

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; the interchange keeps running."""
        self._stopping.set()
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        """Watch until stopped, or until restarting does not help."""
        while not self._stopping.is_set():
            self._take_task()
            if self._stopping.is_set():
                return
            reason = self._interchange.why_ended() or self._why_silent()
            if reason is None:
                self._send()
            elif not self._stopping.is_set() and not self._replace(reason):
                return

    def _take_task(self) -> None:
        try:
            token = self._tasks.get(timeout=self._LOOK)
        except queue.Empty:
            return
        if token is not None:
            self._unsent.append(token)

    def _why_silent(self) -> str | None:
        now = self._clock()
        stopped, self._looked = now - self._looked > self._ASK, now
        if self._asked is None:
            if now >= self._ask_at:
                self._interchange.ask()
                self._asked = now
        elif self._interchange.answered():
            self._asked, self._ask_at = None, now + self._ASK
        elif stopped:  # this process was stopped: the answer may be in transit
            self._asked = now
        elif now - self._asked > self._SILENCE:
            return f"has not answered for {self._SILENCE:g} s"
        return None

    def _send(self) -> None:
        try:
            while self._unsent:
                self._interchange.send(self._unsent[0])
                self._unsent.popleft()
        except zmq.Again:
            return  # retried at the next check, unless it has been replaced by then

    def _replace(self, reason: str) -> bool:
        now = self._clock()
        logger.warning("HTEX's interchange %s: starting another", reason)
        self._post(record.InterchangeEnded("", reason))
        while self._restarts and self._restarts[0] <= now - self._WITHIN:
            self._restarts.popleft()
        if len(self._restarts) >= self._MOST_RESTARTS:
            self._give_up(f"HTEX's interchange ended {len(self._restarts) + 1} times in a row; the last one {reason}")
            return False
        self._restarts.append(now)
        try:
            self._interchange.restart()
        except Exception as error:  # whatever Parsl raises: nothing can be started any more
            if not self._stopping.is_set():
                logger.exception("HTEX's interchange could not be restarted")
                self._give_up(f"HTEX's interchange {reason} and could not be restarted: {error}")
            return False
        self._unsent.clear()  # the driver requests again what it still needs
        self._looked = self._clock()
        self._asked, self._ask_at = None, self._looked + self._ASK
        self._post(record.InterchangeRestarted(""))
        return True


def guard_sockets(executor: HighThroughputExecutor) -> None:
    """Bound the connections of strangers to HTEX's sockets: on the loopback, they are open to every user of this host.

    To be called as soon as they exist: a host where files are limited may have too few left for the next socket.
    """
    own: Any = executor  # Parsl's attributes have no types
    for guarded in (own.outgoing_q.zmq_socket, own.incoming_q.results_receiver, own.command_client.zmq_socket):
        Doorkeeper(guarded)


class HtexInterchange:
    """The interchange of an executor that has started; only for the watch's thread.

    `submit` submits a slot task to HTEX, identified by a token.
    """

    def __init__(self, executor: HighThroughputExecutor, submit: Callable[[str], None]) -> None:
        self._executor: Any = executor  # Parsl's attributes have no types
        self._submit = submit
        self._asking = False
        # Without this, sending blocks indefinitely while no interchange is connected.
        self._executor.outgoing_q.zmq_socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT)

    def why_ended(self) -> str | None:
        """Return how the process ended; ``None`` while it runs."""
        code = self._executor.interchange_proc.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def ask(self) -> None:
        """Request its ports, unless another thread has a request pending; does not wait for the answer."""
        client = self._executor.command_client
        if not self._asking and client._lock.acquire(blocking=False):  # noqa: SLF001 - its own calls wait indefinitely
            self._asking = True
            with suppress(zmq.Again):  # not connected: it will not answer
                client.zmq_socket.send_pyobj("WORKER_BINDS", flags=zmq.NOBLOCK)

    def answered(self) -> bool:
        """Return whether the answer has arrived, without waiting."""
        client = self._executor.command_client
        if self._asking:
            if not client.zmq_socket.poll(0):
                return False
            client.zmq_socket.recv_pyobj()
            client._lock.release()  # noqa: SLF001 - as above
            self._asking = False
        return True

    def send(self, token: str) -> None:
        """Submit a slot task; it is dropped if the executor has failed. `zmq.Again`: it currently accepts none."""
        try:
            self._submit(token)
        except zmq.Again:
            never_sent = self._executor._task_counter  # noqa: SLF001 - HTEX registers the task before sending it
            self._executor.tasks.pop(never_sent, None)
            raise
        except Exception:  # HTEX raises the executor's own exception, of any class
            if not self._executor.bad_state_is_set:
                raise

    def restart(self) -> None:
        """End the old process and start a new one at the same worker port; a pending request is dropped."""
        executor = self._executor
        executor.interchange_proc.kill()
        executor.interchange_proc.wait()
        executor.interchange_proc = None
        client, asking, self._asking = executor.command_client, self._asking, False
        executor.command_client = CommandClient(
            executor.loopback_address, executor.interchange_port_range, executor.cert_dir
        )
        Doorkeeper(executor.command_client.zmq_socket)
        client.close()
        if asking:
            client._lock.release()  # noqa: SLF001 - as above
        executor._start_local_interchange_process()  # noqa: SLF001 - as HTEX's own start does
