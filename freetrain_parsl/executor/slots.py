"""The control channel: the driver's end (`SlotServer`) and a slot's end (`Channel`)."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.protocol import Message, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from freetrain_parsl.executor.protocol import Header

logger = logging.getLogger(__name__)

__all__ = ["Channel", "SlotServer", "Waker"]


class Waker:
    """Lets other threads interrupt a thread that waits in a `zmq.Poller`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._writer.setblocking(False)  # noqa: FBT003 - the same

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Interrupt the wait; cheap to repeat."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # enough wake-ups are waiting already
        except OSError:
            pass  # closed: nobody waits any more

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


class SlotServer:
    """The driver's end. All methods but `wake` belong to the driver's thread.

    Parameters
    ----------
    cert_dir
        HTEX's private directory of CurveZMQ certificates; ``None`` if the user switched encryption off.
    port_range
        Ports to choose from.
    """

    def __init__(self, cert_dir: str | None, port_range: tuple[int, int]) -> None:
        self._context = curvezmq.ServerContext(cert_dir)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self.port: int = self._socket.bind_to_random_port("tcp://*", *port_range)
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)

    def wake(self) -> None:
        """Make `receive` return early; may be called from any thread."""
        self._waker.wake()

    def send(self, slot: str, message: Message) -> bool:
        """Send to a slot; False if it is not connected."""
        try:
            self._socket.send_multipart([slot.encode(), *message.frames()])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def receive(self, timeout: float) -> Iterator[tuple[str, Message]]:
        """Wait at most `timeout` seconds, then give what has come: (slot, message) pairs."""
        ready = dict(self._poller.poll(int(max(0.0, timeout) * 1000)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._socket not in ready:
            return
        while True:
            try:
                slot, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = Message.of_frames(frames)
            except ProtocolError as error:
                logger.warning("dropped a message: %s", error)
                continue
            if message.type == "probe":
                self._socket.send_multipart([slot, *message.frames()])
                continue
            yield slot.decode(), message

    def close(self) -> None:
        """Close the socket; what was sent is still delivered for up to a second."""
        self._waker.close()
        self._socket.close()
        self._context.destroy()


class Channel(threading.Thread):
    """A slot's end: a thread that owns the socket, beats, and hands every message to `handle`.

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
        Called once when the driver has been silent for `silence` seconds.
    condition
        Called in the channel's thread before each beat; gives what the beat tells beside being one.
    beat, silence
        Seconds between beats, and of silence before the driver counts as gone.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        cert_dir: str | None,
        slot: str,
        *,
        handle: Callable[[Message], None],
        on_lost: Callable[[], None],
        condition: Callable[[], Header] = dict,
        beat: float,
        silence: float,
    ) -> None:
        super().__init__(name="freetrain-channel", daemon=True)
        self._context = curvezmq.ClientContext(cert_dir)
        self.url = self._reachable(addresses, port)
        self._slot = slot
        self._handle = handle
        self._on_lost = on_lost
        self._condition = condition
        self._beat = beat
        self._silence = silence
        self._outbox: deque[Message] = deque()
        self._waker = Waker()
        self._closing = threading.Event()
        self._ends_process = False

    def send(self, message: Message) -> None:
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
        link.connect(self.url)
        poller = zmq.Poller()
        poller.register(link, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        heard = beaten = time.monotonic()
        lost = False
        while not (self._closing.is_set() and not self._outbox):
            ready = dict(poller.poll(int(self._beat * 1000)))
            if self._waker.fileno() in ready:
                self._waker.clear()
            if link in ready:
                heard = time.monotonic()
                self._handle(Message.of_frames(link.recv_multipart()))
            now = time.monotonic()
            if now - beaten >= self._beat:
                beaten = now
                self._outbox.append(Message("beat", self._condition()))
            while self._outbox:
                link.send_multipart(self._outbox.popleft().frames())
            if now - heard > self._silence and not lost:
                lost = True
                self._on_lost()
        link.close()
        self._waker.close()
        self._context.destroy()  # waits, as long as the socket lingers, until what was sent has left this process
        if self._ends_process:
            os._exit(0)

    def _reachable(self, addresses: Sequence[str], port: int, timeout: float = 30.0) -> str:
        """Find the first of the driver's addresses that answers: a login node has several."""
        urls = [f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in addresses]
        poller = zmq.Poller()
        links = {}
        for url in urls:
            link = self._context.socket(zmq.DEALER)
            link.setsockopt(zmq.LINGER, 0)
            link.connect(url)
            link.send_multipart(Message("probe", {"pid": os.getpid()}).frames())
            poller.register(link, zmq.POLLIN)
            links[link] = url
        answered = [links[link] for link, _ in poller.poll(int(timeout * 1000))]
        for link in links:
            link.close()
        if not answered:
            self._context.destroy()
            raise BatchSystemError(
                f"this node reaches the driver at none of {', '.join(urls)}; set address=… on the executor"
            )
        return answered[0]
