"""A slot's end of the control channel; the driver's end is `executor.driver.slot_server`.

Its thread also handles the batch system's signals. Python runs handlers in the main thread, between two bytecodes:
not while the main thread is in a call that does not return, such as a collective whose peer is gone or a write to a
hanging file system, and at any place of the code, where taking a lock may deadlock. The number of a signal is written
to a socket in the moment in which it arrives.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic  # as it is now: a training job may replace that of the module, and would end its node
from typing import TYPE_CHECKING

import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.addresses import endpoint
from freetrain_parsl.executor.jobs.port import TO_SLOT
from freetrain_parsl.executor.waker import Waker
from freetrain_parsl.protocol.codec import Envelope, ProtocolError, decode, encode
from freetrain_parsl.protocol.delivery import Delivery
from freetrain_parsl.protocol.messages import Probe, Reconnected

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import FrameType

    from freetrain_parsl.protocol.messages import SlotHeartbeat, ToDriver, ToSlot

logger = logging.getLogger(__name__)

__all__ = ["LONGEST_CONNECT", "Channel", "Connection", "SignalSocket"]

LONGEST_CONNECT = 30.0
"""Seconds for which a slot tries to reach its driver."""

_STOPPED = 1.0  # seconds of delay of an iteration above which the process counts as having been stopped
_SILENT_BEATS = 3  # without a message from the driver, after which it has probably failed


@dataclass(frozen=True)
class Connection:
    """What the next process of a slot needs to continue the exchange with the driver.

    Parameters
    ----------
    url
        Address at which the driver answers.
    delivery
        What has been sent and received.
    heard
        When the last message of the driver arrived, on ``time.monotonic()``; ``None``: not yet.
    """

    url: str
    delivery: Delivery
    heard: float | None = None


class Channel:
    """A slot's end of the control channel: a thread that owns the socket, sends heartbeats, and calls `handle`.

    Parameters
    ----------
    addresses
        Addresses of the driver; the first that answers is used.
    port
        The driver's port.
    cert_dir
        As in `SlotServer`.
    slot
        Name of this slot, globally unique.
    handle
        Called with each message, in the channel's thread; must not block.
    on_lost
        Called once when no message has arrived for `heartbeat_timeout` seconds.
    on_unsent
        Called at the end: with the messages that the driver has not acknowledged if it is silent, else with none.
    heartbeat
        Returns the next heartbeat; called in the channel's thread.
    beat, heartbeat_timeout
        Seconds between heartbeats, and without a message after which the driver counts as failed.
    signals
        Signals to handle in the channel's thread.
    before
        What an earlier process of this slot has left: what `hand_over` has returned.
    """

    _PROBE_PERIOD = 3.0  # seconds

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        cert_dir: str | None,
        slot: str,
        *,
        handle: Callable[[ToSlot], None],
        on_lost: Callable[[], None],
        on_unsent: Callable[[Sequence[ToDriver]], None] = lambda _messages: None,
        heartbeat: Callable[[], SlotHeartbeat],
        beat: float,
        heartbeat_timeout: float,
        signals: SignalSocket | None = None,
        before: Connection | None = None,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="freetrain-channel", daemon=True)
        self._context = curvezmq.ClientContext(cert_dir)
        if before is None:
            before = Connection(self._reachable(addresses, port), Delivery())
            self._outbox: deque[ToDriver] = deque()
        else:
            self._outbox = deque([Reconnected()])
        self._connection = before
        self._slot = slot
        self._handle = handle
        self._on_lost = on_lost
        self._on_unsent = on_unsent
        self._heartbeat = heartbeat
        self._signals = signals
        self._beat = beat
        self._heartbeat_timeout = heartbeat_timeout
        self._waker = Waker()
        self._closing = threading.Event()
        self._ends_process = False
        self._hands_over = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: ToDriver) -> None:
        """Queue a message to the driver; may be called from any thread."""
        self._outbox.append(message)
        self._waker.wake()

    @property
    def url(self) -> str:
        """The address at which the driver answers."""
        return self._connection.url

    def hand_over(self) -> Connection:
        """Send the queued messages and end the thread, so that another process can continue with the result."""
        self._hands_over = True
        self.close(timeout=None)
        return self._connection

    def close(self, timeout: float | None = 2.0) -> None:
        """Send the queued messages and end the thread."""
        self._closing.set()
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def end_process(self) -> None:
        """Send the queued messages, then end this process regardless of its other threads; returns at once."""
        self._ends_process = True
        self._closing.set()
        self._waker.wake()

    def _run(self) -> None:
        """Exchange messages until closed."""
        link = self._context.socket(zmq.DEALER)
        link.setsockopt(zmq.IDENTITY, self._slot.encode())
        link.setsockopt(zmq.LINGER, 1000)
        link.setsockopt(zmq.SNDHWM, 0)  # else `send` would block while the driver is unreachable
        connected = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        link.connect(self.url)
        poller = zmq.Poller()
        poller.register(link, zmq.POLLIN)
        poller.register(connected, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        if self._signals is not None:
            poller.register(self._signals, zmq.POLLIN)
        connections = 0
        delivery = self._connection.delivery
        beaten = turned = monotonic()
        heard = turned if self._connection.heard is None else self._connection.heard
        lost = False
        while not (self._closing.is_set() and not self._outbox):
            ready = dict(poller.poll(int(self._beat * 1000)))
            self._waker.clear()
            if self._signals is not None:
                self._signals.handle()
            if link in ready:
                heard = monotonic()
                self._receive(link)
            if connected in ready:
                connected.recv_multipart()
                connections += 1
                if connections > 1:
                    self._outbox.append(Reconnected())
            now = monotonic()
            if now - turned > self._beat + _STOPPED:  # this process was stopped and could not receive
                heard = min(now, heard + now - turned)
            turned = now
            if now - beaten >= self._beat:
                beaten = now
                self._outbox.append(self._heartbeat())
            while self._outbox:
                link.send_multipart(encode(delivery.outgoing(self._outbox.popleft())))
            if now - heard > self._heartbeat_timeout and not lost:
                lost = True
                self._on_lost()
        # A slot may be ended before it gives the driver up: whatever cancels the blocks of a driver that was killed.
        self._connection = replace(self._connection, heard=heard)
        silent = not self._hands_over and (lost or monotonic() - heard > _SILENT_BEATS * self._beat)
        self._end(link, [envelope.message for envelope in delivery.unseen()] if silent else [])

    def _end(self, link: zmq.Socket[bytes], unsent: Sequence[ToDriver]) -> None:
        self._on_unsent(unsent)
        link.disable_monitor()
        link.close()
        self._waker.close()
        self._context.destroy()  # blocks until the messages have left this process, at most for LINGER
        if self._ends_process:
            os._exit(0)

    def _receive(self, link: zmq.Socket[bytes]) -> None:
        """Receive a message from the driver; drop it if it is invalid."""
        try:
            envelope = decode(link.recv_multipart(), TO_SLOT)
        except ProtocolError as error:
            logger.warning("the driver sent %s", error)
            return
        message: ToSlot | None = self._connection.delivery.incoming(envelope)
        if message is None or isinstance(message, Probe):
            return
        if isinstance(message, Reconnected):
            for unseen in self._connection.delivery.unseen():
                link.send_multipart(encode(unseen))
            return
        try:
            self._handle(message)
        except Exception:
            # Without this thread, the slot would neither send heartbeats nor end.
            logger.exception("could not handle a %s message from the driver", type(message).__name__)

    def _reachable(self, addresses: Sequence[str], port: int, timeout: float = LONGEST_CONNECT) -> str:
        """Return the first of the driver's addresses that answers; a login node has several."""
        urls = [endpoint(host, port) for host in addresses]
        poller = zmq.Poller()
        links = {}
        for url in urls:
            link = self._context.socket(zmq.DEALER)
            link.setsockopt(zmq.LINGER, 0)
            link.connect(url)
            poller.register(link, zmq.POLLIN)
            links[link] = url
        answered: list[str] = []
        end = monotonic() + timeout
        while not answered and (left := end - monotonic()) > 0:
            for link in links:  # repeated: a probe is lost if its connection breaks before the driver reads it
                link.send_multipart(encode(Envelope(Probe(os.getpid()))))
            answered = [links[link] for link, _ in poller.poll(int(1000 * min(left, self._PROBE_PERIOD)))]
        for link in links:
            link.close()
        if not answered:
            self._context.destroy()
            raise BatchSystemError(
                f"this node cannot reach the driver at any of {', '.join(urls)}; set address=… on the executor"
            )
        return answered[0]


class SignalSocket(Waker):
    """A descriptor that becomes readable when one of some signals arrives; `handle` passes it to `on_signal`."""

    def __init__(self, numbers: Collection[signal.Signals], on_signal: Callable[[signal.Signals], None]) -> None:
        super().__init__()
        self._numbers = frozenset(numbers)
        self._on_signal = on_signal
        self._forking = threading.local()  # the signal mask of a thread that forks a process

    def install(self) -> None:
        """Receive the signals from now on; called once, in the main thread."""
        for number in self._numbers:
            signal.signal(number, self._write)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Blocked while a process forks, so that the new one has received none when its actions are restored.
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._restore)

    def handle(self) -> None:
        """Handle the signals that have arrived since the last call; one that has arrived repeatedly counts once."""
        arrived: set[int] = set()
        with suppress(BlockingIOError):
            while data := self._reader.recv(4096):
                arrived.update(data)
        for number in self._numbers:
            if number in arrived:
                self._on_signal(number)

    def _write(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's own signature
        """Repeat what `signal.set_wakeup_fd` does: user code, such as an event loop, may have replaced the socket."""
        with suppress(BlockingIOError):  # unread signals fill the socket
            self._writer.send(bytes((number,)))

    def _block(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _restore(self) -> None:
        """Give a forked process, such as a data loader's, the default actions: its signals are not the slot's."""
        signal.set_wakeup_fd(-1)
        for number in self._numbers:
            if signal.getsignal(number) == self._write:
                signal.signal(number, signal.SIG_DFL)
        self._unblock()
