"""The driver's end of the control channel; a slot's end is `executor.slot.channel`."""

from __future__ import annotations

import errno
import logging
import random
import socket
from typing import TYPE_CHECKING

import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.addresses import endpoint
from freetrain_parsl.executor.driver.doorkeeper import Doorkeeper, raise_descriptor_limit
from freetrain_parsl.executor.jobs.port import TO_DRIVER
from freetrain_parsl.executor.waker import Waker
from freetrain_parsl.protocol.codec import Envelope, ProtocolError, decode, encode, is_name
from freetrain_parsl.protocol.delivery import Delivery
from freetrain_parsl.protocol.messages import Invalid, Probe, Reconnected, SlotHeartbeat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from freetrain_parsl.protocol.messages import ToDriver, ToSlot


logger = logging.getLogger(__name__)

__all__ = ["SlotServer"]

_SHORT, _MOST_HEARTBEATS = 256, 8192  # bytes of a heartbeat that is kept, and their number
_HANDSHAKE = 10_000  # milliseconds within which a peer must authenticate


class SlotServer:
    """The driver's end of the control channel. All methods except `wake` are for the control loop's thread.

    Parameters
    ----------
    cert_dir
        HTEX's private directory of CurveZMQ certificates; ``None`` if encryption is disabled.
    port_range
        Ports to choose from, excluding the upper bound.
    addresses
        Addresses of this host to listen on; ``"*"``: all. If none is an address of this host, all are used.

    Raises
    ------
    BatchSystemError
        No port of the range is free, or no file can be opened.
    """

    _MOST_AT_ONCE = 1000  # messages in one `receive`, so that a slot that floods the driver does not block it

    def __init__(self, cert_dir: str | None, port_range: tuple[int, int], addresses: Sequence[str] = ("*",)) -> None:
        try:
            self._context = curvezmq.ServerContext(cert_dir)
            self._socket = self._context.socket(zmq.ROUTER)
        except (RuntimeError, OSError, zmq.ZMQError) as error:  # RuntimeError: pyzmq's thread for certificates
            raise BatchSystemError(
                f"the driver cannot start its control channel: {error}; it may open {raise_descriptor_limit()} files "
                "(ulimit -n): raise that limit, or see what else this process has open"
            ) from None
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a slot that reconnects replaces its dead connection
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
        self._doorkeeper = Doorkeeper(self._socket)
        self.port = self._bind(addresses, port_range)
        self._deliveries: dict[str, Delivery] = {}
        self._heartbeats: dict[bytes, Envelope] = {}
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)

    def wake(self) -> None:
        """Make `receive` return early; can be called from any thread."""
        self._waker.wake()

    def send(self, slot: str, message: ToSlot) -> bool:
        """Send a message to a slot; return false if it is not connected.

        A slot that numbers its messages receives it after reconnecting, unless `forget` was called for it.
        """
        delivery = self._deliveries.get(slot)
        return self._send(slot.encode(), Envelope(message) if delivery is None else delivery.outgoing(message))

    def forget(self, slot: str) -> None:
        """Discard the unacknowledged messages of a slot that has failed."""
        if (delivery := self._deliveries.get(slot)) is not None:
            delivery.end()

    def receive(self, timeout: float) -> Iterator[tuple[str, ToDriver]]:
        """Wait at most `timeout` seconds, then yield the messages received: (slot, message) pairs.

        A message that cannot be decoded is yielded as `Invalid`.
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
            envelope = self._decoded(frames)
            if isinstance(envelope.message, Probe):
                self._send(identity, envelope)
                continue
            slot = identity.decode(errors="replace")
            if not is_name(slot) or slot.encode() != identity:
                logger.debug("dropped a %s of a peer without a name", type(envelope.message).__name__)
            elif (taken := self._take(slot, envelope)) is not None:
                yield slot, taken

    def _decoded(self, frames: list[bytes]) -> Envelope:
        """Decode a message; a slot's heartbeats are the same until it is sent something or waits for others."""
        if len(frames) == 2 and (known := self._heartbeats.get(frames[0])) is not None:
            return known
        try:
            envelope = decode(frames, TO_DRIVER)
        except ProtocolError as error:
            return Envelope(Invalid(str(error)))
        message = envelope.message
        if isinstance(message, SlotHeartbeat) and not message.waited and len(frames[0]) <= _SHORT:
            if len(self._heartbeats) >= _MOST_HEARTBEATS:
                self._heartbeats.clear()
            self._heartbeats[frames[0]] = envelope
        return envelope

    def close(self) -> None:
        """Close the socket; sent messages are still delivered for up to a second."""
        self._waker.close()
        self._socket.close()
        self._doorkeeper.join()
        self._context.destroy()

    def _bind(self, addresses: Sequence[str], port_range: tuple[int, int]) -> int:
        """Listen on the same port of all addresses, and return the port."""
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
                    self._socket.bind(endpoint(address, port))
                    bound.append(endpoint(address, port))
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

    def _take(self, slot: str, envelope: Envelope) -> ToDriver | None:
        """Accept each message once and in order; resend what a reconnected slot has not received."""
        delivery = self._deliveries.get(slot)
        if delivery is None:
            if envelope.number is None and not isinstance(envelope.message, Reconnected):
                message: ToDriver = envelope.message
                return message  # from a peer that does not number its messages
            delivery = self._deliveries[slot] = Delivery()
        taken: ToDriver | None = delivery.incoming(envelope)
        if not isinstance(taken, Reconnected):
            return taken
        logger.info("slot %s has reconnected", slot)
        for unseen in [*delivery.unseen(), delivery.outgoing(Reconnected())]:
            self._send(slot.encode(), unseen)
        return None

    def _send(self, identity: bytes, envelope: Envelope) -> bool:
        """Send an envelope; return false if the peer is gone or accepts no more messages."""
        try:
            # Large arguments are not copied, because that would block the driver's other threads.
            self._socket.send_multipart([identity, *encode(envelope)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True


def _is_here(address: str) -> bool:
    """Return whether this host can listen on an address; not so for an address that is translated (NAT)."""
    if address == "*":
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL  # other errors are raised when the driver listens
    return True
