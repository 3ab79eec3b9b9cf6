"""The control channel: the driver's end (`SlotServer`) and a slot's end (`Channel`)."""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.delivery import Delivery
from freetrain_parsl.executor.doorkeeper import Doorkeeper
from freetrain_parsl.executor.headers import TO_DRIVER, TO_SLOT, is_name
from freetrain_parsl.executor.protocol import Message, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from freetrain_parsl.executor.protocol import Header

logger = logging.getLogger(__name__)

__all__ = ["INVALID", "Channel", "SlotServer", "Waker"]

INVALID = "invalid"
"""Type of a message that stands for one that could not be used."""

_STOPPED = 1.0  # seconds by which a turn may be late before it is taken for a stop of the process
_HANDSHAKE = 10_000  # milliseconds in which a peer must have proved who it is


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
        Ports to choose from: from the first to below the second.
    addresses
        Addresses of this host to listen on; ``"*"``: all. All too if none of them is an address of this host.

    Raises
    ------
    BatchSystemError
        No port of the range is free.
    """

    _MOST_AT_ONCE = 1000  # messages in one `receive`: a slot that sends without end does not hold up the driver

    def __init__(self, cert_dir: str | None, port_range: tuple[int, int], addresses: Sequence[str] = ("*",)) -> None:
        self._context = curvezmq.ServerContext(cert_dir)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a slot that connects anew replaces its dead connection
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
        self._doorkeeper = Doorkeeper(self._socket)
        self.port = self._bind(addresses, port_range)
        self._deliveries: dict[str, Delivery] = {}
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)

    def wake(self) -> None:
        """Make `receive` return early; may be called from any thread."""
        self._waker.wake()

    def send(self, slot: str, message: Message) -> bool:
        """Send to a slot; False if it is not connected.

        A slot that numbers its messages still gets it when it has connected anew, unless it is forgotten meanwhile.
        """
        delivery = self._deliveries.get(slot)
        if delivery is not None:
            message = delivery.outgoing(message)
        return self._send(slot.encode(), message)

    def forget(self, slot: str) -> None:
        """Keep no messages any more for a slot that is lost."""
        if (delivery := self._deliveries.get(slot)) is not None:
            delivery.end()

    def receive(self, timeout: float) -> Iterator[tuple[str, Message]]:
        """Wait at most `timeout` seconds, then give what has come: (slot, message) pairs.

        A message that cannot be used comes as one of type ``invalid`` whose ``reason`` says what is wrong with it.
        """
        ready = dict(self._poller.poll(int(max(0.0, timeout) * 1000)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._socket not in ready:
            return
        for _ in range(self._MOST_AT_ONCE):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = Message.of_frames(frames)
                message.check(TO_DRIVER)
            except ProtocolError as error:
                message = Message(INVALID, {"reason": str(error)})
            if message.type == "probe":
                self._send(identity, message)
                continue
            slot = identity.decode(errors="replace")
            if not is_name(slot) or slot.encode() != identity:
                logger.debug("dropped %r of a peer without a name", message.type)
            elif (taken := self._take(slot, message)) is not None:
                yield slot, taken

    def close(self) -> None:
        """Close the socket; what was sent is still delivered for up to a second."""
        self._waker.close()
        self._socket.close()
        self._doorkeeper.join()
        self._context.destroy()

    def _bind(self, addresses: Sequence[str], port_range: tuple[int, int]) -> int:
        """Listen on one port of all these addresses."""
        here = [address for address in addresses if _is_here(address)]
        if len(here) < len(addresses):
            others = ", ".join(sorted(set(addresses) - set(here)))
            logger.warning("%s: not an address of this host; the driver listens on %s", others, here or "all addresses")
        addresses = here or ["*"]
        candidates = list(range(*port_range))
        random.shuffle(candidates)
        for port in candidates:
            bound: list[str] = []
            try:
                for address in addresses:
                    self._socket.bind(_url(address, port))
                    bound.append(_url(address, port))
            except zmq.ZMQError as error:
                for url in bound:
                    self._socket.unbind(url)
                if error.errno not in (zmq.EADDRINUSE, errno.EACCES):
                    raise BatchSystemError(
                        f"the driver cannot listen on {', '.join(addresses)}: {error}; set address=… on the executor"
                    ) from None
            else:
                return port
        raise BatchSystemError(
            f"the driver cannot listen on {', '.join(addresses)}: "
            f"no port from {port_range[0]} to {port_range[1] - 1} is free"
        )

    def _take(self, slot: str, message: Message) -> Message | None:
        """Take a message once and in order, and what is sent again to a slot that has connected anew."""
        delivery = self._deliveries.get(slot)
        if delivery is None:
            if "n" not in message.header and message.type != "resumed":
                return message  # of a peer that does not number
            delivery = self._deliveries[slot] = Delivery()
        taken = delivery.incoming(message)
        if taken is None or taken.type != "resumed":
            return taken
        logger.info("slot %s has connected anew", slot)
        for unseen in [*delivery.unseen(), delivery.outgoing(Message("resumed"))]:
            self._send(slot.encode(), unseen)
        return None

    def _send(self, identity: bytes, message: Message) -> bool:
        """Send; False if the peer is gone, or takes nothing any more."""
        try:
            self._socket.send_multipart([identity, *message.frames()], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True


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

    _PROBE_PERIOD = 3.0  # seconds

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
        self._delivery = Delivery()
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
                    self._outbox.append(Message("resumed"))
            now = time.monotonic()
            if now - turned > self._beat + _STOPPED:  # this process was stopped, and could not hear the driver
                heard = min(now, heard + now - turned)
            turned = now
            if now - beaten >= self._beat:
                beaten = now
                self._outbox.append(Message("beat", self._condition()))
            while self._outbox:
                link.send_multipart(self._delivery.outgoing(self._outbox.popleft()).frames())
            if now - heard > self._silence and not lost:
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
            message = Message.of_frames(link.recv_multipart())
            message.check(TO_SLOT)
        except ProtocolError as error:
            logger.warning("the driver sent %s", error)
            return
        taken = self._delivery.incoming(message)
        if taken is None or taken.type == "probe":
            return
        if taken.type == "resumed":
            for unseen in self._delivery.unseen():
                link.send_multipart(unseen.frames())
            return
        try:
            self._handle(taken)
        except Exception:
            # A defect in handling one message; without this thread the slot would neither beat nor hear of its end.
            logger.exception("could not handle %r of the driver", taken.type)

    def _reachable(self, addresses: Sequence[str], port: int, timeout: float = 30.0) -> str:
        """Find the first of the driver's addresses that answers: a login node has several."""
        urls = [_url(host, port) for host in addresses]
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
                link.send_multipart(Message("probe", {"pid": os.getpid()}).frames())
            answered = [links[link] for link, _ in poller.poll(int(1000 * min(left, self._PROBE_PERIOD)))]
        for link in links:
            link.close()
        if not answered:
            self._context.destroy()
            raise BatchSystemError(
                f"this node reaches the driver at none of {', '.join(urls)}; set address=… on the executor"
            )
        return answered[0]


def _is_here(address: str) -> bool:
    """Whether this host can listen on an address; behind a translation of addresses it has others."""
    if address == "*":
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL  # another complaint is told when the driver listens
    return True


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
