"""Faults of the network between processes of this machine: connections that break, or fall silent.

The sockets of a process are duplicated into this one through its pidfd; what is done to a duplicate is done to the
connection. Nothing on the machine changes but these connections: no firewall, no name space, no proxy.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PIDFD_GETFD = 438  # the number of the system call, on every architecture that Python runs on but Alpha
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER: Python does not name them
_ACCEPT_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # one BPF instruction: return 0, the bytes to keep

Address: TypeAlias = tuple[str, int]


def cut(pid: int, peers: Iterable[int]) -> int:
    """Break the TCP connections between a process and its peers: both sides get an error, or the end, at once.

    Connections made afterwards are whole.

    Parameters
    ----------
    pid
        The process.
    peers
        Processes of this machine; those that have ended are passed over.

    Returns
    -------
    connections : int
        How many there were.

    Raises
    ------
    ProcessLookupError
        The process has ended.
    UsageError
        The kernel does not let this process at the other's sockets.
    """
    with _between(pid, peers) as pairs:
        for end in (end for pair in pairs for end in pair):
            _shut_down(end)
        return len(pairs)


@contextmanager
def partition(pid: int, peers: Iterable[int]) -> Iterator[int]:
    """Let nothing through between a process and its peers inside the block, and nobody know.

    What arrives at either end is dropped without a word, as by a switch that died; nothing is lost in the end, for
    TCP sends it again: after the block the connections go on, after a while that grows with the block's length, up to
    as long again. A process that dies inside the block dies unheard. Connections made inside the block are whole.

    Parameters
    ----------
    pid
        The process.
    peers
        Processes of this machine; those that have ended are passed over.

    Yields
    ------
    connections : int
        How many there are.

    Raises
    ------
    ProcessLookupError
        The process has ended.
    UsageError
        The kernel does not let this process at the other's sockets.
    """
    program = ctypes.create_string_buffer(_ACCEPT_NOTHING)
    pointer = struct.pack("HP", 1, ctypes.addressof(program))
    with _between(pid, peers) as pairs, ExitStack() as healing:
        for end in (end for pair in pairs for end in pair):
            end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)
            healing.callback(end.setsockopt, socket.SOL_SOCKET, _DETACH_FILTER, 0)
        yield len(pairs)


def _shut_down(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # which it is if the other end was quicker
            raise


@contextmanager
def _between(pid: int, peers: Iterable[int]) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Duplicate both ends of each TCP connection between a process and its peers."""
    with ExitStack() as open_sockets:
        others: dict[tuple[Address, Address], list[socket.socket]] = defaultdict(list)
        for peer in set(peers) - {pid}:
            try:
                ends = _connections(peer, open_sockets)
            except ProcessLookupError:
                continue
            for here, there, end in ends:
                others[here, there].append(end)
        yield [
            (end, other)
            for here, there, end in _connections(pid, open_sockets)
            for other in others.get((there, here), ())
        ]


def _connections(pid: int, open_sockets: ExitStack) -> list[tuple[Address, Address, socket.socket]]:
    """Duplicate the connected TCP sockets of a process: (its address, the other side's, duplicate)."""
    if pid <= 1:
        raise UsageError(f"process id {pid} does not stand for one process that can be harmed")
    process = os.pidfd_open(pid)
    found = []
    try:
        for entry in _descriptors(pid):
            number = _duplicate(process, pid, int(entry.name))
            if number is None:
                continue
            end = open_sockets.enter_context(socket.socket(fileno=number))
            if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
                continue
            try:
                here, there = end.getsockname(), end.getpeername()
            except OSError:  # it listens, or is not connected yet or any more
                continue
            found.append((_address(here), _address(there), end))
    finally:
        os.close(process)
    return found


def _descriptors(pid: int) -> list[Path]:
    """List the open sockets of a process, as entries of ``/proc``."""
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None
    except PermissionError:
        raise _forbidden(pid) from None
    return [entry for entry in entries if _points_at(entry).startswith("socket:")]


def _points_at(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""


def _duplicate(process: int, pid: int, descriptor: int) -> int | None:
    """Duplicate a descriptor of another process into this one; ``None`` if it is closed by now."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = int(libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
    if number >= 0:
        return number
    problem = ctypes.get_errno()
    if problem in (errno.EBADF, errno.ESRCH):
        return None
    if problem == errno.EPERM:
        raise _forbidden(pid)
    raise OSError(problem, f"pidfd_getfd of process {pid}: {os.strerror(problem)}")


def _forbidden(pid: int) -> UsageError:
    return UsageError(
        f"the kernel does not let this process at the sockets of process {pid}: run as the same user, and where "
        "/proc/sys/kernel/yama/ptrace_scope is not 0, as root or from an ancestor of it"
    )


def _address(name: tuple[str | int, ...]) -> Address:
    """Return an address in one form, whether the socket is of IPv4, or of IPv6 and used for IPv4."""
    host = ipaddress.ip_address(str(name[0]).partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return str(host), int(name[1])
