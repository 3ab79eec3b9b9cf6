"""Finds the connections of a process group among all sockets of this process, to shut them down and no others.

gloo's own abort does not wake a collective that waits (torch 2.13); the end of its connections does. torch does not
expose them. Each gloo group listens on a port of its own, so a connection is the group's if one of its ends has the
listening port of a member. While the group forms, its ports are not known yet: then it is one of the new connections to
a member's address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["GroupConnections"]

_MOST_LISTENERS = 4  # gloo has one


class GroupConnections:
    """The connections of one group, from before it forms.

    Parameters
    ----------
    members
        IP addresses of the members; ``None``: not known, so that every new connection counts while the group forms.
    """

    def __init__(self, members: frozenset[str] | None = None) -> None:
        self._before = frozenset(_sockets())
        self._members = None if members is None else frozenset(map(_plain, members))
        self._listeners: frozenset[int] = frozenset()
        self._peers: frozenset[int] = frozenset()
        self._open: frozenset[str] = frozenset()
        self._formed = False
        self.cut_at: float | None = None
        """When the connections were shut down, on ``time.monotonic()``."""
        self.has_lost = False
        """Whether a thread waits for ever for a message that gloo lost."""

    def form(self, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """Exchange the listening ports once the group has formed; all members call this.

        Parameters
        ----------
        gather
            Returns the tensors of all members.
        """
        ports = sorted(_listening_port(descriptor) or 0 for descriptor in self._new().values())
        own = [port for port in ports if port][:_MOST_LISTENERS]
        padded = torch.tensor(own + [0] * (_MOST_LISTENERS - len(own)))
        self._listeners = frozenset(own)
        self._peers = frozenset(int(port) for tensor in gather(padded) for port in tensor.tolist() if port)
        self._formed = True
        self._open = frozenset(name for name, _ in self._ours())

    def any_lost(self) -> bool:
        """Return whether a connection of the formed group has ended: its other member has failed, or left."""
        return not self._open <= _sockets().keys()

    def shut_down(self) -> None:
        """Shut the group's connections down; may be called from any thread."""
        self.cut_at = self.cut_at or time.monotonic()
        for _, connection in self._ours():
            with suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def _ours(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield the connections, as duplicates: gloo may close one, and its descriptor be that of another file."""
        for name, descriptor in self._new().items():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                # getpeername raises for a socket that listens: gloo would end the process without it.
                if self._is_ours(connection.getsockname(), connection.getpeername()):
                    yield name, connection

    def _is_ours(self, local: object, remote: object) -> bool:
        if not (isinstance(local, tuple) and isinstance(remote, tuple)):
            return False  # a Unix socket
        if self._formed:
            return local[1] in self._listeners or remote[1] in self._peers
        return self._members is None or _plain(remote[0]) in self._members

    def _new(self) -> dict[str, int]:
        return {name: descriptor for name, descriptor in _sockets().items() if name not in self._before}


def _sockets() -> dict[str, int]:
    """Return the sockets of this process: their unique names, and their descriptors."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def _listening_port(descriptor: int) -> int | None:
    """Return the TCP port that a socket listens on; ``None`` if it does not listen."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as candidate:
        address = candidate.getsockname()
        if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and isinstance(address, tuple):
            port: int = address[1]
            return port
    return None


def _plain(address: str) -> str:
    """Return an IP address without its scope, and IPv4 addresses in IPv6 form as what they are."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)
