"""Unauthenticated connections are limited; authenticated ones are not affected. Real sockets on the loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor import executor
from freetrain_parsl.executor.driver.doorkeeper import Doorkeeper
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.htex import interchange_watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST = 8
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class _Server:
    """A bound socket with a doorkeeper, whose peers need the certificates."""

    def __init__(self, directory: Path) -> None:
        self.cert_dir = curvezmq.create_certificates(directory)
        self._context = curvezmq.ServerContext(self.cert_dir)
        self.socket = self._context.socket(zmq.ROUTER)
        self._doorkeeper = Doorkeeper(self.socket, most_pending=MOST)
        self.port: int = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._peers: list[zmq.Socket[bytes]] = []
        self._strangers: list[socket.socket] = []
        self._clients = curvezmq.ClientContext(self.cert_dir)

    def stranger(self, says: bytes = b"") -> socket.socket:
        """Connect without authenticating."""
        stranger = socket.create_connection(("127.0.0.1", self.port))
        stranger.setblocking(False)
        stranger.sendall(says)
        self._strangers.append(stranger)
        return stranger

    def client(self) -> zmq.Socket[bytes]:
        """Connect with the certificates."""
        client = self._clients.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{self.port}")
        self._peers.append(client)
        return client

    def echoes(self, client: zmq.Socket[bytes]) -> bool:
        """Return whether a message of this client arrives, and the answer too."""
        client.send(b"x")
        if not self.socket.poll(10_000):
            return False
        self.socket.send_multipart(self.socket.recv_multipart())
        return bool(client.poll(10_000) and client.recv() == b"x")

    def close(self) -> None:
        for stranger in self._strangers:
            stranger.close()
        for client in self._peers:
            client.close()
        self._clients.destroy(0)
        self.socket.close(0)
        self._doorkeeper.join()
        self._context.destroy(0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_Server]:
    server = _Server(tmp_path)
    yield server
    server.close()


def is_open(stranger: socket.socket) -> bool:
    """Return whether the other end has not closed it; received data is discarded."""
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@pytest.mark.parametrize("says", [b"", GREETING[:10], GREETING], ids=["nothing", "a signature", "a greeting"])
def test_of_many_connections_that_do_not_authenticate_the_newest_few_stay(server: _Server, says: bytes) -> None:
    strangers = [server.stranger(says) for _ in range(10 * MOST)]
    until(lambda: sum(map(is_open, strangers)) <= MOST)
    assert all(map(is_open, strangers[-MOST:]))


def test_peers_with_the_certificates_are_kept_and_let_in_during_a_flood(server: _Server) -> None:
    before = server.client()
    assert server.echoes(before)
    for _ in range(5):
        for _ in range(4 * MOST):
            server.stranger()
        assert server.echoes(server.client())
    assert server.echoes(before)


def test_more_peers_than_may_be_pending_are_let_in_at_once(server: _Server) -> None:
    clients = [server.client() for _ in range(5 * MOST)]
    assert all(map(server.echoes, clients))


def test_a_peer_that_sends_much_without_authenticating_is_closed(server: _Server) -> None:
    """A command that announces a gigabyte but sends only a part: libzmq would wait for the rest."""
    stranger = server.stranger(GREETING + b"\x06" + (1 << 30).to_bytes(8, "big") + b"\x05HELLO" + bytes(8192))
    until(lambda: not is_open(stranger))


@pytest.mark.filterwarnings("error")
def test_a_context_that_its_owner_ends_first_ends_all_the_same() -> None:
    """Parsl closes its sockets at any time; the doorkeeper's own must not block the destruction of their contexts."""
    context = zmq.Context()
    guarded = context.socket(zmq.DEALER)
    guarded.bind_to_random_port("tcp://127.0.0.1")
    doorkeeper = Doorkeeper(guarded)
    guarded.close()
    end = threading.Thread(target=context.term, daemon=True)
    end.start()
    end.join(10)
    assert not end.is_alive()
    doorkeeper.join()


def test_the_end_of_one_socket_leaves_the_others_guarded_and_working(server: _Server) -> None:
    """HTEX replaces one of its sockets when its interchange is restarted."""
    context = zmq.Context()
    other = context.socket(zmq.DEALER)
    Doorkeeper(other)
    other.close()
    context.term()
    strangers = [server.stranger() for _ in range(4 * MOST)]
    until(lambda: sum(map(is_open, strangers)) <= MOST)
    assert server.echoes(server.client())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_when_it_is_closed(tmp_path: Path) -> None:
    before = descriptors()
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        server = _Server(tmp_path / str(number))
        assert server.echoes(server.client())
        server.stranger()
        server.close()
    until(lambda: descriptors() <= before)


_FLOODED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
from pathlib import Path
from parsl import curvezmq
from freetrain_parsl.executor.driver.slot_server import SlotServer
server = SlotServer(curvezmq.create_certificates(Path(sys.argv[1])), (55000, 56000), ["127.0.0.1"])
print(server.port, flush=True)
import select, time
opened, longest, failing_since = 0, 0.0, None
while not select.select([sys.stdin], [], [], 0)[0]:
    list(server.receive(0.01))
    try:
        open("/dev/null").close()
        opened, failing_since = opened + 1, None
    except OSError:
        now = time.monotonic()
        failing_since = failing_since or now
        longest = max(longest, now - failing_since)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], opened, longest, flush=True)
server.close()
"""


@pytest.mark.slow
def test_a_process_with_few_descriptors_has_some_left_through_a_flood(tmp_path: Path) -> None:
    """The limit is 256 descriptors; 400 unauthenticated connections are opened as fast as possible, and kept.

    libzmq accepts in its own thread: on a busy machine, all descriptors may be in use until the doorkeeper runs.
    """
    flooded = subprocess.Popen(
        [sys.executable, "-c", _FLOODED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert flooded.stdin
    assert flooded.stdout
    port = int(flooded.stdout.readline())
    strangers: list[socket.socket] = []
    try:
        for _ in range(400):
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
            strangers.append(stranger)
        time.sleep(3.0)  # all connections are open: the measurement covers this time
        flooded.stdin.write("enough\n")
        flooded.stdin.flush()
        limit, opened, longest_failure = map(float, flooded.stdout.readline().split())
    finally:
        for stranger in strangers:
            stranger.close()
        flooded.stdin.close()
        flooded.wait(20)
        flooded.stdout.close()
    assert limit == 256, "raised"
    assert opened
    assert longest_failure < 1.0


def test_a_driver_that_can_open_no_more_files_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_cert_dir: str) -> None:
        raise RuntimeError("Authenticator thread failed to start")

    monkeypatch.setattr(curvezmq, "ServerContext", fail)
    with pytest.raises(BatchSystemError, match=r"^the driver cannot .* it may open \d+ files \(ulimit -n\): raise"):
        SlotServer(curvezmq.create_certificates(tmp_path), (55000, 56000), ["127.0.0.1"])


@pytest.mark.cluster
def test_strangers_are_bounded_before_the_driver_opens_more(
    start: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took the descriptors that its control channel needs: a start lasts seconds on a busy host."""
    guarded: list[object] = []
    before: list[int] = []

    def guard(socket: zmq.Socket[bytes]) -> Doorkeeper:
        guarded.append(socket)
        return Doorkeeper(socket)

    def listen(*arguments: Any) -> SlotServer:
        before.append(len(guarded))
        return SlotServer(*arguments)

    monkeypatch.setattr(interchange_watch, "Doorkeeper", guard)
    monkeypatch.setattr(executor, "SlotServer", listen)
    start(nodes=1)
    assert before == [3]
