"""A TCP proxy between a slot and the driver, whose connections a test can break."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards bytes to a port of this host; `swallow` drops them from now on, `cut` closes the connections."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._swallows = False
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        """Receive bytes of the current connections without forwarding them."""
        self._swallows = True

    def cut(self) -> None:
        """Close the current connections; new ones work."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for one in pair:
                _end(one)
        self._swallows = False

    def close(self) -> None:
        """Close all connections and stop."""
        self._closing = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            pair = (near, socket.create_connection(("127.0.0.1", self._target)))
            self._pairs.append(pair)
            threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with selectors.DefaultSelector() as selector:
            for one in other:
                selector.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    one = next(socket_ for socket_ in other if socket_ is key.fileobj)
                    try:
                        got = one.recv(65536)
                        if not self._swallows and got:
                            other[one].sendall(got)
                    except OSError:
                        got = b""
                    if not got:
                        selector.close()
                        for end in other:
                            end.close()
                        return


def _end(one: socket.socket) -> None:
    with suppress(OSError):  # already closed
        one.shutdown(socket.SHUT_RDWR)
