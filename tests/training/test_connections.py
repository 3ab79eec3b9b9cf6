"""An abort ends the connections of its group, and none of the user's."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.training.group.connections import GroupConnections, _plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEMBER = """
import socket, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.training.group.process_group import join
from freetrain_parsl.training.mailbox import Membership

rank, path, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
own, stop = [], threading.Event()

def user():
    # Something of the user's own connects all the time while the group forms, to the very address of the members.
    while not stop.is_set():
        own.append(socket.create_connection(("127.0.0.1", port)))
        time.sleep(0.005)

thread = threading.Thread(target=user)
thread.start()
store = dist.FileStore(path, 2)
group = join(
    Membership("net", 1, rank, 2, meeting=timedelta(seconds=30), interface="lo", address="127.0.0.1"), store
)
time.sleep(0.1)
stop.set()
thread.join()
assert group.sum(torch.ones(1)).item() == 2.0
if rank == 0:
    threading.Timer(0.3, group.abort).start()
try:
    if rank == 0:
        group.sum(torch.ones(1))  # the other member does not come
    else:
        time.sleep(1.0)
        group.sum(torch.ones(1))
except PeerFailed:
    print("collective aborted")
for connection in own:
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
print(len(own) > 5, "connections of the user work")
"""


@pytest.fixture
def echo() -> Iterator[int]:
    """Serve an echo on the loopback; gives the port."""
    server = socket.create_server(("127.0.0.1", 0), backlog=512)

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(16):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.mark.slow
def test_an_abort_wakes_the_collective_and_leaves_the_users_connections_alone(tmp_path: Path, echo: int) -> None:
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(tmp_path / "store"), str(echo)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    for member in members:
        output, _ = member.communicate(timeout=120)
        assert output.splitlines()[-2:] == ["collective aborted", "True connections of the user work"], output


def test_while_a_group_forms_only_connections_to_members_are_its_own(echo: int) -> None:
    connections = GroupConnections(frozenset({"127.0.0.9"}))
    with socket.create_connection(("127.0.0.1", echo)) as users:
        connections.shut_down()
        users.sendall(b"x")
        assert users.recv(1) == b"x"
    members = GroupConnections(frozenset({"127.0.0.1"}))
    with socket.create_connection(("127.0.0.1", echo)) as ours:
        members.shut_down()
        with pytest.raises(OSError, match=r"Broken pipe|not connected|Transport endpoint"):
            ours.sendall(b"x")


@pytest.mark.parametrize(
    ("address", "plain"), [("127.0.0.1", "127.0.0.1"), ("fe80::1%eth0", "fe80::1"), ("::ffff:10.0.0.1", "10.0.0.1")]
)
def test_addresses_are_compared_without_scope_and_mapping(address: str, plain: str) -> None:
    assert _plain(address) == plain
