"""Check before a group forms that its members reach each other over the network.

A member may reach the driver but not other members, if a link or a switch of the second network is down. gloo then
waits for its full timeout, and its error does not identify the failed link. Here every member listens on a port and
connects to all members of lower rank. Then all members receive the list of failed pairs.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from freetrain_parsl.errors import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import Store

__all__ = ["check_reachable"]

_PATIENCE = 5.0  # seconds for a connection: covers two retransmissions, after 1 s and 3 s
_DONE = (0, errno.EISCONN, errno.ECONNREFUSED)  # refused: the host is reachable, the process has left


def check_reachable(store: Store, rank: int, world_size: int, address: str) -> frozenset[str]:
    """Check that all members reach each other; all members call this, and all get the same result.

    Parameters
    ----------
    store
        The store of this group.
    rank, world_size
        This member's number, and how many there are.
    address
        This member's IP address for connections from the others.

    Returns
    -------
    addresses
        The members' IP addresses.

    Raises
    ------
    PeerFailed
        Some members do not reach each other; `PeerFailed.unreachable` contains the pairs of ranks.
    TimeoutError
        A member did not connect in time.
    """
    with ExitStack() as sockets:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = sockets.enter_context(socket.create_server((address, 0), family=family, backlog=world_size))
            place = listener.getsockname()[:2]
        except OSError:  # the address no longer exists: this member is unreachable
            place = None
        store.set(f"reachable/{rank}", json.dumps(place))
        others = [json.loads(sent) for sent in store.multi_get([f"reachable/{other}" for other in range(rank)])]
        failed = sorted(_unreached({other: tuple(sent) if sent else None for other, sent in enumerate(others)}))
        store.set(f"unreached/{rank}", json.dumps([place[0] if place else None, failed]))
        if rank == 0:
            sent = store.multi_get([f"unreached/{member}" for member in range(world_size)])
            answers = [json.loads(answer) for answer in sent]
            addresses = sorted({where for where, _ in answers if where})
            missing = [[member, other] for member, (_, unreached) in enumerate(answers) for other in unreached]
            store.set("unreached", json.dumps([addresses, missing]))
        members, missing = json.loads(store.get("unreached"))
        pairs = tuple((int(member), int(other)) for member, other in missing)
    if pairs:
        failures = ", ".join(f"{member} does not reach {other}" for member, other in pairs)
        raise PeerFailed(f"in a group of {world_size}, rank {failures} at its network interface", unreachable=pairs)
    return frozenset(members)


def _unreached(places: Mapping[int, tuple[str, int] | None]) -> set[int]:
    """Connect to all of these at once, and return those that could not be reached."""
    waiting = set(places)
    deadline = time.monotonic() + _PATIENCE
    with ExitStack() as sockets, selectors.DefaultSelector() as selector:
        for other, place in places.items():
            if place is None:
                continue
            link = sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET))
            link.setblocking(False)  # noqa: FBT003 - signature of socket
            code = link.connect_ex(place)
            if code in _DONE:
                waiting.discard(other)
            elif code == errno.EINPROGRESS:
                selector.register(link, selectors.EVENT_WRITE, other)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _DONE:
                    waiting.discard(key.data)
    return waiting
