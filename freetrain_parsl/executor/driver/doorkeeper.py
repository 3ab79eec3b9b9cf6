"""Limit on unauthenticated connections, so that they cannot use up the process's file descriptors.

Any process that can reach a port can connect to it and send nothing. libzmq accepts such connections without limit,
and a process without free descriptors can neither start a command nor open a file. The doorkeeper observes every
connection through the socket's monitor. When too many have not completed the CurveZMQ handshake, it closes the oldest;
a peer with the certificates completes it within milliseconds.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

__all__ = ["Doorkeeper", "raise_descriptor_limit"]

_MOST_DESCRIPTORS = 65536
_MOST_PENDING = 512
_REPORT_PERIOD = 60.0  # seconds
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

# Bytes that this end sends, in ZMTP 3.1 with CURVE, before the peer has proved that it has the server's key: the
# greeting, and, as the client, also its HELLO.
_GREETING = 64
_HELLO = 202
_MOST_UNPROVED = 4096  # bytes that a peer may send before that; a regular one sends 64 + 202

_BYTES_ACKED = 120  # offset in Linux' struct tcp_info of tcpi_bytes_acked and tcpi_bytes_received (64 bits each)


def raise_descriptor_limit() -> int:
    """Raise this process's limit on file descriptors as far as allowed, up to 65536; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Doorkeeper:
    """Bounds the pending connections of a ZeroMQ socket, in a thread that ends when the socket is closed.

    libzmq reports events to the monitor with blocking sends. While the socket is open, the monitor must always be read,
    or the socket would block.

    By default, an eighth of the process's descriptors may be pending connections, and at most 512.
    """

    _PERIOD = 0.5  # seconds between checks of the pending connections

    def __init__(self, guarded: zmq.Socket[bytes], *, most_pending: int | None = None) -> None:
        if most_pending is None:
            most_pending = min(_MOST_PENDING, max(8, raise_descriptor_limit() // 8))
        self._door = _Door(_sent_unproved(guarded), most_pending)
        self._monitor = guarded.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="freetrain-doorkeeper", daemon=True)
        self._thread.start()

    def join(self, timeout: float = 5.0) -> None:
        """Wait for the thread to end; call after closing the socket and before destroying its context."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._watch()
        except zmq.ContextTerminated:
            pass  # the socket is closed, and its context waits for the monitor
        finally:
            self._monitor.close(0)
            self._door.close()

    def _watch(self) -> None:
        look_at = -math.inf
        while True:
            if self._monitor.poll(int(self._PERIOD * 1000) if self._door.pending else None):
                event = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._door.note(event)
            if (now := time.monotonic()) >= look_at:
                look_at = now + self._PERIOD
                self._door.look(now)


class _Door:
    """The unauthenticated connections of one socket, oldest first."""

    def __init__(self, sent_unproved: int, most_pending: int) -> None:
        self._sent_unproved = sent_unproved
        self._most = most_pending
        self.pending: dict[int, int] = {}
        """Descriptor -> local port."""
        # Allocated now, so that inspecting a connection never needs a new descriptor.
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._closed = 0
        self._reported = -math.inf

    def note(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the monitor: a connection was accepted or closed."""
        if event["event"] == zmq.EVENT_ACCEPTED:
            port = event["endpoint"].rpartition(b":")[2]
            if port.isdigit():  # else not a TCP connection
                self._accepted(event["value"], int(port))
        else:
            self.pending.pop(event["value"], None)

    def _accepted(self, descriptor: int, port: int) -> None:
        """Add a new connection; if there are too many, close the oldest unauthenticated one."""
        self.pending[descriptor] = port
        while len(self.pending) > self._most:
            oldest = next(iter(self.pending))
            self._settle(oldest, self.pending.pop(oldest), most_received=-1)

    def look(self, now: float) -> None:
        """Forget authenticated connections, and close those that send too much without authenticating."""
        settled = [fd for fd, port in self.pending.items() if self._settle(fd, port, most_received=_MOST_UNPROVED)]
        for descriptor in settled:
            del self.pending[descriptor]
        if self._closed and now - self._reported > _REPORT_PERIOD:
            logger.warning("closed %d unauthenticated connections: too many are being opened", self._closed)
            self._closed, self._reported = 0, now

    def close(self) -> None:
        """Close the spare descriptors."""
        os.close(self._nothing)
        os.close(self._copy)

    def _settle(self, descriptor: int, port: int, *, most_received: int) -> bool:
        """Close an unauthenticated connection that sent more than `most_received` bytes; return whether it is settled.

        The descriptor belongs to libzmq, which may have closed it, so its number may have been reused in this process.
        The copy stays valid during the inspection.
        """
        connection = None
        try:
            os.dup2(descriptor, self._copy, inheritable=False)
            connection = socket.socket(fileno=self._copy)
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
                return True
            sent, received = _traffic(connection)
            if sent > self._sent_unproved:
                return True
            if received <= most_received:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return True  # closed, disconnected, or not a socket: not the accepted connection any more
        else:
            self._closed += 1
            return True
        finally:
            if connection is not None:
                connection.detach()
            os.dup2(self._nothing, self._copy, inheritable=False)


def _sent_unproved(one: zmq.Socket[bytes]) -> int:
    """Return the number of bytes that a socket sends to an unauthenticated peer."""
    plays_client = one.getsockopt(zmq.MECHANISM) == zmq.CURVE and not one.getsockopt(zmq.CURVE_SERVER)
    return _GREETING + (_HELLO if plays_client else 0)


def _traffic(connection: socket.socket) -> tuple[int, int]:
    """Return the numbers of bytes sent and received."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 16)
    if len(information) < _BYTES_ACKED + 16:
        raise OSError("this kernel does not count a connection's bytes")  # Linux before 4.2
    acknowledged, received = struct.unpack_from("QQ", information, _BYTES_ACKED)
    return acknowledged, received
