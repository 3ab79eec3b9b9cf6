"""Serves the page of a run on the loopback interface, or on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.dashboard.access import Access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from freetrain_parsl.campaign.run_source import RunSource

__all__ = ["ServerOptions", "serve"]

_NICENESS = 10  # the driver, which may be on the same host, comes first
_LONGEST_SOCKET = 107  # bytes of the path of a Unix socket


@dataclass(frozen=True)
class ServerOptions:
    """Where and for whom the page is served.

    Parameters
    ----------
    port
        TCP port on the loopback interface; 0: a free one.
    path
        Unix socket to serve on instead; private to the user.
    prefix
        Path before all paths, of a proxy that does not remove it.
    hosts
        Names under which a proxy is reached, besides those of the loopback.
    token_needed
        Whether the token is needed; may be false for a Unix socket only.
    """

    port: int = 0
    path: Path | None = None
    prefix: str = ""
    hosts: tuple[str, ...] = ()
    token_needed: bool = True

    def __post_init__(self) -> None:
        if self.path is None and not self.token_needed:
            raise InvalidInput("--no-token needs --socket: every user of this host can connect to a port")
        if self.path is not None and self.port:
            raise InvalidInput("--port and --socket exclude each other")
        if self.prefix and not self.prefix.startswith("/"):
            raise InvalidInput(f"--prefix must begin with a slash, got {self.prefix!r}")
        if self.path is not None and len(os.fsencode(self.path.absolute())) > _LONGEST_SOCKET:
            raise InvalidInput(f"--socket: the path is longer than {_LONGEST_SOCKET} bytes; choose a shorter one")


def serve(source: RunSource, options: ServerOptions, started: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Parameters
    ----------
    source
        The run.
    options
        Where and for whom.
    started
        Called with the address, which contains the token, once connections are accepted.

    Raises
    ------
    InvalidInput
        The port or the socket cannot be used, or packages are missing.
    """
    try:
        from freetrain_parsl.extensions.dashboard.application import make_application
        from freetrain_parsl.extensions.dashboard.connections import Strangers, most_strangers, serve_application
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"freetrain dashboard needs the package {error.name}: pip install 'freetrain-parsl[dashboard]'"
        ) from None
    prefix = options.prefix.rstrip("/")
    access = Access(hosts=options.hosts, any_host=options.path is not None, token_needed=options.token_needed)
    os.nice(_NICENESS)
    with _ended_by_signals(), _listening(options) as listener:
        token = f"?token={access.token}" if access.token_needed else ""
        if options.path is None:
            started(f"http://127.0.0.1:{listener.getsockname()[1]}{prefix}/{token}")
        else:
            started(f"http+unix://{options.path.absolute()} {prefix}/{token}")
        # Nobody else can connect to the socket, whose connections have no names either.
        strangers = Strangers(most_strangers()) if options.path is None else None
        application = make_application(source, access, prefix, None if strangers is None else strangers.known)
        asyncio.run(serve_application(application, listener, strangers))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Unwind the stack at the signals that end a process, so that copies of runs, and the socket, are removed."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # as a shell would report

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        signal.SIGTERM: leave,  # uvicorn handles the first one, and raises it again at the end
        signal.SIGHUP: lambda _number, _frame: signal.raise_signal(signal.SIGTERM),  # uvicorn does not handle it
    }
    numbers = [number for number in handlers if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _listening(options: ServerOptions) -> Iterator[socket.socket]:
    if options.path is None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", options.port))
            except OSError as error:
                raise InvalidInput(
                    f"--port {options.port} cannot be used: {error.strerror}; choose another, or 0 for a free one"
                ) from None
            listener.listen(64)
            yield listener
        return
    path = options.path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
        except OSError as error:
            raise InvalidInput(f"--socket {path} cannot be used: {error.strerror or error}") from None
        listener.listen(64)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove a socket of a server that no longer runs; nothing else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # binding fails, and says why
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
