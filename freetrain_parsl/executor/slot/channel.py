"""A slot's end of the control channel; the driver's end is `executor.control.slot_server`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.addresses import endpoint
from freetrain_parsl.executor.waker import Waker
from freetrain_parsl.protocol.codec import Envelope, ProtocolError, decode, encode
from freetrain_parsl.protocol.delivery import Delivery
from freetrain_parsl.protocol.messages import TO_SLOT, Probe, Reconnected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.protocol.messages import SlotHeartbeat, ToDriver, ToSlot

logger = logging.getLogger(__name__)

__all__ = ["Channel"]

_STOPPED = 1.0  # seconds by which a turn may be late before it is taken for a stop of the process


class Channel(threading.Thread):
    """A slot's end: a thread that owns the socket, sends heartbeats, and passes every message to `handle`.

    Parameters
    ----------
    addresses
        Hosts of the driver; the first that answers is used.
    port
        The driver's port.
    cert_dir
        As in `SlotServer`.
    slot
        This slot's name, unique for ever.
    handle
        Called in the channel's thread with each message; must not block.
    on_lost
        Called once when the driver has been silent for `heartbeat_timeout` seconds.
    heartbeat
        Called in the channel's thread; gives the next heartbeat.
    beat, heartbeat_timeout
        Seconds between heartbeats, and of silence before the driver counts as gone.
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
        heartbeat: Callable[[], SlotHeartbeat],
        beat: float,
        heartbeat_timeout: float,
    ) -> None:
        super().__init__(name="freetrain-channel", daemon=True)
        self._context = curvezmq.ClientContext(cert_dir)
        self.url = self._reachable(addresses, port)
        self._slot = slot
        self._handle = handle
        self._on_lost = on_lost
        self._heartbeat = heartbeat
        self._beat = beat
        self._heartbeat_timeout = heartbeat_timeout
        self._outbox: deque[ToDriver] = deque()
        self._delivery = Delivery()
        self._waker = Waker()
        self._closing = threading.Event()
        self._ends_process = False

    def send(self, message: ToDriver) -> None:
        """Send to the driver, soon; may be called from any thread."""
        self._outbox.append(message)
        self._waker.wake()

    def close(self, timeout: float = 2.0) -> None:
        """Send what is left and end the thread."""
        self._closing.set()
        self._waker.wake()
        if self is not threading.current_thread():
            self.join(timeout)

    def end_process(self) -> None:
        """Send what is left, then end this process, whatever its other threads do; returns at once."""
        self._ends_process = True
        self._closing.set()
        self._waker.wake()

    def run(self) -> None:
        """Exchange messages until closed."""
        link = self._context.socket(zmq.DEALER)
        link.setsockopt(zmq.IDENTITY, self._slot.encode())
        link.setsockopt(zmq.LINGER, 1000)
        link.setsockopt(zmq.SNDHWM, 0)  # else this thread would wait in `send` while the driver cannot be reached
        connected = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        link.connect(self.url)
        poller = zmq.Poller()
        poller.register(link, zmq.POLLIN)
        poller.register(connected, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        connections = 0
        heard = beaten = turned = time.monotonic()
        lost = False
        while not (self._closing.is_set() and not self._outbox):
            ready = dict(poller.poll(int(self._beat * 1000)))
            if self._waker.fileno() in ready:
                self._waker.clear()
            if link in ready:
                heard = time.monotonic()
                self._receive(link)
            if connected in ready:
                connected.recv_multipart()
                connections += 1
                if connections > 1:
                    self._outbox.append(Reconnected())
            now = time.monotonic()
            if now - turned > self._beat + _STOPPED:  # this process was stopped, and could not hear the driver
                heard = min(now, heard + now - turned)
            turned = now
            if now - beaten >= self._beat:
                beaten = now
                self._outbox.append(self._heartbeat())
            while self._outbox:
                link.send_multipart(encode(self._delivery.outgoing(self._outbox.popleft())))
            if now - heard > self._heartbeat_timeout and not lost:
                lost = True
                self._on_lost()
        link.disable_monitor()
        link.close()
        self._waker.close()
        self._context.destroy()  # waits, as long as the socket lingers, until what was sent has left this process
        if self._ends_process:
            os._exit(0)

    def _receive(self, link: zmq.Socket[bytes]) -> None:
        """Take a message of the driver; one that cannot be used is dropped, and this thread goes on."""
        try:
            envelope = decode(link.recv_multipart(), TO_SLOT)
        except ProtocolError as error:
            logger.warning("the driver sent %s", error)
            return
        message: ToSlot | None = self._delivery.incoming(envelope)
        if message is None or isinstance(message, Probe):
            return
        if isinstance(message, Reconnected):
            for unseen in self._delivery.unseen():
                link.send_multipart(encode(unseen))
            return
        try:
            self._handle(message)
        except Exception:
            # A defect in handling one message; without this thread the slot would neither send heartbeats nor end.
            logger.exception("could not handle a %s of the driver", type(message).__name__)

    def _reachable(self, addresses: Sequence[str], port: int, timeout: float = 30.0) -> str:
        """Find the first of the driver's addresses that answers: a login node has several."""
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
        end = time.monotonic() + timeout
        while not answered and (left := end - time.monotonic()) > 0:
            for link in links:  # again: one may be lost with a connection that breaks before the driver reads it
                link.send_multipart(encode(Envelope(Probe(os.getpid()))))
            answered = [links[link] for link, _ in poller.poll(int(1000 * min(left, self._PROBE_PERIOD)))]
        for link in links:
            link.close()
        if not answered:
            self._context.destroy()
            raise BatchSystemError(
                f"this node reaches the driver at none of {', '.join(urls)}; set address=… on the executor"
            )
        return answered[0]
