"""Limit on connections that have not shown who they are from, so that others cannot keep the user from the page.

Any user of this host can connect to a port of the loopback interface and send nothing, or one byte a second. uvicorn
waits for a request without a limit, and its own limit on connections counts these, too: it would refuse the user. A
process without free descriptors accepts nothing, and asyncio logs a traceback for each connection that waits.

So a connection is a stranger's until a request on it has shown the token. When there are too many strangers, the oldest
is closed, and each after some seconds; the user's browser shows the token within milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from types import FrameType

    from starlette.types import ASGIApp

    Peer = tuple[str, int]

logger = logging.getLogger(__name__)

__all__ = ["Strangers", "most_strangers", "serve_application"]

_PATIENCE: Final = 10.0  # seconds within which a connection must have shown the token
_MOST_STRANGERS: Final = 512
_ACCEPTED_AT_ONCE: Final = 64  # connections, before those that were accepted are looked at
_WAITING: Final = 1024  # connections that the kernel keeps until they are accepted
_LONGEST_HEAD: Final = 32 * 2**10  # bytes of a request's line and headers; browsers send all their cookies
_REPORT_PERIOD: Final = 60.0  # seconds
_GRACE: Final = 0.5  # seconds in which answers are finished when the server ends


def most_strangers() -> int:
    """Return how many connections may be strangers': a quarter of the descriptors of this process, at most 512."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_STRANGERS if soft == resource.RLIM_INFINITY else max(4, min(_MOST_STRANGERS, soft // 4))


class Strangers:
    """The connections that have not shown the token, the oldest first: how many, and for how many seconds."""

    def __init__(self, most: int, patience: float = _PATIENCE, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._patience = patience
        self._report = _Report("closed %d connections that did not show the token of the page", clock)
        self._open: dict[Peer, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, peer: Peer, transport: asyncio.Transport) -> None:
        """Add a connection; if there are too many, close the oldest."""
        late = asyncio.get_running_loop().call_later(self._patience, self._close, peer)
        self._open[peer] = transport, late
        if len(self._open) > self._most:
            self._close(next(iter(self._open)))

    def known(self, peer: Peer | None) -> None:
        """Note that a connection has shown the token: it is the user's, and stays as long as it likes."""
        if peer is not None and (found := self._open.pop(peer, None)) is not None:
            found[1].cancel()

    closed = known
    """A connection that is closed counts no more."""

    def _close(self, peer: Peer) -> None:
        transport, late = self._open.pop(peer)
        late.cancel()
        transport.abort()  # at once: what is not sent yet would keep the descriptor
        self._report.add()


class _Report:
    """Logs how often something has happened, once a minute at most."""

    def __init__(self, text: str, clock: Callable[[], float]) -> None:
        self._text = text
        self._clock = clock
        self._count = 0
        self._logged = -math.inf

    def add(self, *details: object) -> None:
        """Count it; log the count and the details if nothing was logged for a minute."""
        self._count += 1
        if (now := self._clock()) - self._logged >= _REPORT_PERIOD:
            logger.warning(self._text, self._count, *details)
            self._count, self._logged = 0, now


async def serve_application(application: ASGIApp, listener: socket.socket, strangers: Strangers | None = None) -> None:
    """Serve until SIGINT or SIGTERM.

    Parameters
    ----------
    application
        It calls `Strangers.known` with the peer of each request that it serves.
    listener
        A bound socket.
    strangers
        Limits the connections; ``None``: only the user can connect.
    """
    config = uvicorn.Config(
        application,
        http=H11Protocol if strangers is None else _protocol(strangers),
        access_log=False,  # addresses contain the token
        log_level="error",  # others can send invalid requests, each of which would be a line
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # they would replace the peer's address
        h11_max_incomplete_event_size=_LONGEST_HEAD,
        backlog=min(_ACCEPTED_AT_ONCE, most_strangers()),
        ws="none",
    )
    failures = _Report("%d errors of connections; the last: %s", time.monotonic)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.add(_reason(context)))
    await _Server(config).serve(sockets=[listener])


def _protocol(strangers: Strangers) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol for these connections; uvicorn takes a class only."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            if self.client is not None:
                strangers.opened(self.client, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            strangers.closed(self.client)
            super().connection_lost(exc)

    return Protocol


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_WAITING)  # asyncio accepts at once as many as the kernel keeps: too many descriptors

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the streams of open pages; uvicorn would cancel what serves them, each with a traceback."""
        asyncio.get_running_loop().call_later(_GRACE, self._close)
        await super().shutdown(sockets)

    def _close(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.force_exit = False  # a second Ctrl-C would cancel, too; it is half a second at most


def _reason(context: Mapping[str, Any]) -> str:
    """Return what asyncio reports, such as a connection that cannot be accepted, in a few words."""
    error = context.get("exception")
    return f"{context.get('message', '')}" + (f" ({type(error).__name__}: {error})" if error is not None else "")
