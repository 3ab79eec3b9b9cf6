"""Access to the interchange process of Parsl's HighThroughputExecutor."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq
from parsl.executors.high_throughput.zmq_pipes import CommandClient

from freetrain_parsl.executor.driver.doorkeeper import Doorkeeper
from freetrain_parsl.executor.htex.interchange_watch import Interchange

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from parsl.executors.high_throughput.executor import HighThroughputExecutor

__all__ = ["HtexInterchange", "guard_sockets"]

_SEND_TIMEOUT = 1000  # milliseconds


def guard_sockets(executor: HighThroughputExecutor) -> None:
    """Bound the connections of strangers to HTEX's sockets: on the loopback, they are open to every user of this host.

    To be called as soon as they exist: a host where files are limited may have too few left for the next socket.
    """
    own: Any = executor  # Parsl's attributes have no types
    for guarded in (own.outgoing_q.zmq_socket, own.incoming_q.results_receiver, own.command_client.zmq_socket):
        Doorkeeper(guarded)


class HtexInterchange(Interchange):
    """The interchange of an executor that has started.

    Parameters
    ----------
    executor
        The executor that owns it.
    submit
        Submits a slot task to HTEX; receives the token that identifies it.
    submitted
        Called with the token and the future of a submitted task.
    """

    def __init__(
        self,
        executor: HighThroughputExecutor,
        submit: Callable[[str], Future[Any]],
        submitted: Callable[[str, Future[Any]], None],
    ) -> None:
        self._executor: Any = executor  # Parsl's attributes have no types
        self._submit = submit
        self._submitted = submitted
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
        """Request its ports, unless another thread has a request pending."""
        client = self._executor.command_client
        if not self._asking and client._lock.acquire(blocking=False):  # noqa: SLF001 - its own calls wait indefinitely
            self._asking = True
            with suppress(zmq.Again):  # not connected: it will not answer
                client.zmq_socket.send_pyobj("WORKER_BINDS", flags=zmq.NOBLOCK)

    def answered(self) -> bool:
        """Return whether the answer has arrived."""
        client = self._executor.command_client
        if self._asking:
            if not client.zmq_socket.poll(0):
                return False
            client.zmq_socket.recv_pyobj()
            client._lock.release()  # noqa: SLF001 - as above
            self._asking = False
        return True

    def send(self, token: str) -> None:
        """Submit a slot task; it is dropped if the executor has failed."""
        try:
            future = self._submit(token)
        except zmq.Again:
            never_sent = self._executor._task_counter  # noqa: SLF001 - HTEX registers the task before sending it
            self._executor.tasks.pop(never_sent, None)
            raise
        except Exception:  # HTEX raises the executor's own exception, of any class
            if self._executor.bad_state_is_set:
                return
            raise
        self._submitted(token, future)

    def restart(self) -> None:
        """Start a new process at the same worker port; a pending request is dropped."""
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
