"""Network faults between processes of this machine: broken or stalled connections.

The sockets of a process are duplicated into this one through its pidfd; an operation on a duplicate affects the
connection. Nothing else on the machine changes: no firewall, no namespace, no proxy.
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

_PIDFD_GETFD = 438  # system call number, on every architecture supported by Python except Alpha
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER: not defined in Python
_ACCEPT_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # one BPF instruction: return 0, the number of bytes to keep

Address: TypeAlias = tuple[str, int]


def cut(pid: int, peers: Iterable[int]) -> int:
    """Break the TCP connections between a process and its peers: both sides get an error, or EOF, at once.

    Later connections are not affected.

    Parameters
    ----------
    pid
        The process.
    peers
        Processes of this machine; ended ones are skipped.

    Returns
    -------
    connections : int
        Number of connections broken.

    Raises
    ------
    ProcessLookupError
        The process has ended.
    UsageError
        The kernel denies access to the other process's sockets.
    """
    with _between(pid, peers) as pairs:
        for end in (end for pair in pairs for end in pair):
            _shut_down(end)
        return len(pairs)


@contextmanager
def partition(pid: int, peers: Iterable[int]) -> Iterator[int]:
    """Silently drop all traffic between a process and its peers inside the block.

    Incoming packets are dropped at both ends, as by a dead switch. No data is lost, because TCP retransmits it: after
    the block the connections continue, with a delay that grows with the block's length, up to the same length. If a
    process dies inside the block, its peers do not notice. Connections made inside the block are not affected.

    Parameters
    ----------
    pid
        The process.
    peers
        Processes of this machine; ended ones are skipped.

    Yields
    ------
    connections : int
        Number of connections.

    Raises
    ------
    ProcessLookupError
        The process has ended.
    UsageError
        The kernel denies access to the other process's sockets.
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
        if error.errno != errno.ENOTCONN:  # the other end was faster
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
    """Duplicate the connected TCP sockets of a process: (its address, the peer's, duplicate)."""
    if pid <= 1:
        raise UsageError(f"process id {pid} does not denote a single process that may be harmed")
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
            except OSError:  # it is listening, or not connected
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
    except FileNotFoundError:  # closed in the meantime
        return ""


def _duplicate(process: int, pid: int, descriptor: int) -> int | None:
    """Duplicate a descriptor of another process into this one; ``None`` if it is closed."""
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
        f"the kernel denies this process access to the sockets of process {pid}: run as the same user, and where "
        "/proc/sys/kernel/yama/ptrace_scope is not 0, as root or from an ancestor of it"
    )


def _address(name: tuple[str | int, ...]) -> Address:
    """Return an address in one form, for IPv4 sockets and IPv6 sockets with IPv4-mapped addresses."""
    host = ipaddress.ip_address(str(name[0]).partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return str(host), int(name[1])
