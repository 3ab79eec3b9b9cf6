"""The control channel over real sockets on the loopback."""

from __future__ import annotations

import os
import queue
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.slot import channel as channel_module
from freetrain_parsl.executor.slot.channel import Channel
from freetrain_parsl.protocol.codec import Envelope, decode, encode
from freetrain_parsl.protocol.messages import (
    TO_SLOT,
    Exit,
    Hello,
    Invalid,
    PauseRun,
    Probe,
    SlotHeartbeat,
    StartTask,
    StoreRequest,
    TaskEnded,
    ToDriver,
    ToSlot,
)
from tests.executor.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def cert_dir(tmp_path: Path) -> str:
    return curvezmq.create_certificates(tmp_path)


def task_ended(number: int = 1, payload: bytes = b"") -> TaskEnded:
    return TaskEnded(number, failed=False, payload=payload)


def frames_of(message: ToDriver | ToSlot) -> list[bytes]:
    return encode(Envelope(message))


class _Driver:
    """Runs a server in a thread, as the driver does, and puts the received messages into a queue."""

    def __init__(self, cert_dir: str | None) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.server = SlotServer(cert_dir, (55000, 56000))
        self.received: queue.Queue[tuple[str, ToDriver]] = queue.Queue()
        self.to_send: queue.Queue[tuple[str, ToSlot]] = queue.Queue()
        self.stopping = threading.Event()
        self.sent: list[bool] = []

    def _run(self) -> None:
        while not self.stopping.is_set():
            for item in self.server.receive(0.05):
                self.received.put(item)
            while not self.to_send.empty():
                self.sent.append(self.server.send(*self.to_send.get()))
        self.server.close()


@pytest.fixture
def driver(cert_dir: str) -> Iterator[_Driver]:
    driver = _Driver(cert_dir)
    driver.thread.start()
    yield driver
    driver.stopping.set()
    driver.thread.join(5)


def channel(driver: _Driver, cert_dir: str | None, **changes: object) -> tuple[Channel, queue.Queue]:
    got: queue.Queue = queue.Queue()
    settings = {
        "handle": got.put,
        "on_lost": lambda: got.put("lost"),
        "heartbeat": SlotHeartbeat,
        "beat": 0.05,
        "heartbeat_timeout": 30.0,
        **changes,
    }
    port = settings.pop("port", driver.server.port)
    addresses = settings.pop("addresses", ["127.0.0.1"])
    name = settings.pop("slot", "node/0/x")
    return Channel(addresses, port, cert_dir, name, **settings), got


def test_messages_pass_both_ways_with_their_payloads(driver: _Driver, cert_dir: str) -> None:
    link, got = channel(driver, cert_dir, beat=30.0)
    link.start()
    said = task_ended(1, b"\x00payload")
    link.send(said)
    name, message = driver.received.get(timeout=5)
    assert (name, message) == ("node/0/x", said)
    driver.to_send.put((name, StartTask(3, b"function")))
    assert got.get(timeout=5) == StartTask(3, b"function")
    link.close()


def test_what_was_sent_before_close_arrives(driver: _Driver, cert_dir: str) -> None:
    link, _ = channel(driver, cert_dir, beat=30.0)
    link.start()
    for number in range(100):
        link.send(task_ended(number, b"x" * 10_000))
    link.close(5)
    assert [driver.received.get(timeout=5)[1].task for _ in range(100)] == list(range(100))


def test_a_silent_driver_is_noticed_once(driver: _Driver, cert_dir: str) -> None:
    link, got = channel(driver, cert_dir, heartbeat_timeout=0.2)
    link.start()
    assert got.get(timeout=5) == "lost"
    with pytest.raises(queue.Empty):
        got.get(timeout=0.5)
    link.close()


@pytest.mark.parametrize("beat", [0.05, 30.0])
def test_a_slot_that_ends_while_the_driver_is_silent_leaves_what_it_has_not_acknowledged(
    driver: _Driver, cert_dir: str, beat: float
) -> None:
    """Long before it gives the driver up; if the driver may only be between two heartbeats, it leaves nothing."""
    left: list[object] = []
    link, _ = channel(driver, cert_dir, beat=beat, on_unsent=left.extend)
    link.start()
    link.send(said := task_ended(1, b"x"))
    assert driver.received.get(timeout=5)[1] == said
    time.sleep(0.3)  # more than three short beats
    link.close()
    assert (said in left) is (beat < 1)


def test_the_next_process_of_a_slot_knows_since_when_the_driver_is_silent(driver: _Driver, cert_dir: str) -> None:
    """A job has ended after its driver was killed: what it has printed is in its successor, which is ended, too."""
    left: list[object] = []
    link, _ = channel(driver, cert_dir, on_unsent=left.extend)
    link.start()
    link.send(said := task_ended(1, b"x"))
    assert driver.received.get(timeout=5)[1] == said
    time.sleep(0.3)  # more than three beats
    connection = link.hand_over()
    assert not left
    successor, _ = channel(driver, cert_dir, on_unsent=left.extend, before=connection)
    successor.start()
    successor.close()
    assert said in left


def test_a_slot_that_was_stopped_does_not_take_the_driver_for_silent(
    driver: _Driver, cert_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its machine is suspended, no message passes in either direction; both continue afterwards."""
    ahead = [0.0]
    monkeypatch.setattr(channel_module, "monotonic", lambda: time.monotonic() + ahead[0])
    link, got = channel(driver, cert_dir, heartbeat_timeout=5.0)
    link.start()
    driver.received.get(timeout=60)  # a heartbeat
    ahead[0] = 100.0
    with pytest.raises(queue.Empty):
        got.get(timeout=1.0)
    link.close()


def test_nobody_without_the_certificates_gets_a_word_in(driver: _Driver) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"tcp://127.0.0.1:{driver.server.port}")
    stranger.send_multipart(frames_of(Hello("evil", "n", "b", 1)))
    with pytest.raises(queue.Empty):
        driver.received.get(timeout=0.5)
    context.destroy()


def test_a_client_with_other_certificates_is_not_answered(driver: _Driver, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "other").mkdir()
    other = curvezmq.create_certificates(tmp_path / "other")
    probe = Channel._reachable
    monkeypatch.setattr(Channel, "_reachable", lambda self, hosts, port: probe(self, hosts, port, timeout=0.5))
    with pytest.raises(BatchSystemError, match="cannot reach the driver at any of"):
        channel(driver, other)


def test_sending_to_a_slot_that_is_not_there_is_told(driver: _Driver) -> None:
    driver.to_send.put(("nobody", Exit()))
    for _ in range(100):
        if driver.sent:
            break
        driver.server.wake()
    driver.stopping.set()
    driver.thread.join(5)
    assert driver.sent == [False]


def raw_dealer(context: zmq.Context, driver: _Driver, cert_dir: str, identity: bytes | None = None) -> zmq.Socket:
    """Connect a peer that has the certificates and sends arbitrary messages."""
    dealer = curvezmq.ClientContext.socket(_Certified(context, cert_dir), zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 1000)
    if identity is not None:
        dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.connect(f"tcp://127.0.0.1:{driver.server.port}")
    return dealer


class _Certified:
    """The part of a context that `curvezmq.ClientContext.socket` needs."""

    encrypted = True

    def __init__(self, context: zmq.Context, cert_dir: str) -> None:
        self._ctx = context
        self.cert_dir = cert_dir


def test_a_peer_that_probes_and_vanishes_is_survived(cert_dir: str) -> None:
    """Its probe is read after it has gone: the answer has no recipient."""
    server = SlotServer(cert_dir, (55000, 56000))
    context = zmq.Context()
    dealer = curvezmq.ClientContext.socket(_Certified(context, cert_dir), zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 2000)
    dealer.connect(f"tcp://127.0.0.1:{server.port}")
    dealer.send_multipart(frames_of(Probe()))
    dealer.close()
    context.term()  # the probe has been sent
    until(lambda: not connections_to(server.port))
    assert list(server.receive(1.0)) == []
    server.close()


def test_heartbeats_gather_but_slots_that_meet_are_answered_at_once(
    cert_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waking for each heartbeat of a thousand slots cost more than handling it."""
    server = SlotServer(cert_dir, (55000, 56000))
    waits: list[float] = []
    monkeypatch.setattr("freetrain_parsl.executor.driver.slot_server.time", SimpleNamespace(sleep=waits.append))
    context = zmq.Context()
    dealer = curvezmq.ClientContext.socket(_Certified(context, cert_dir), zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, b"s0")
    dealer.connect(f"tcp://127.0.0.1:{server.port}")
    call = StoreRequest("t/1", 1, "get", ("key",), 1.0)
    for message, waited in ((SlotHeartbeat(), 1), (call, 1), (call, 0), (SlotHeartbeat(), 0), (SlotHeartbeat(), 1)):
        waits.clear()
        dealer.send_multipart(frames_of(message))
        assert list(server.receive(10.0)) == [("s0", message)]
        assert len(waits) == waited
    dealer.close(0)
    context.term()
    server.close()


def test_a_slot_that_reaches_the_driver_at_several_addresses_uses_the_first_that_answers(
    driver: _Driver, cert_dir: str
) -> None:
    """It leaves the other probes unanswered, and the driver continues; ten times, because of the race."""
    addresses = ["127.0.0.2", "127.0.0.1", "192.0.2.255", "::1"]
    for trial in range(10):
        link, _ = channel(driver, cert_dir, slot=f"slot {trial}", beat=30.0, addresses=addresses)
        assert link.url.startswith(("tcp://127.0.0.", "tcp://[::1]"))
        link.start()
        link.send(task_ended())
        assert driver.received.get(timeout=10)[1] == task_ended()
        link.close(5)
    assert driver.thread.is_alive()


BAD_FRAMES = {
    "no frames": [b""],
    "three frames": [b"{}", b"", b""],
    "not JSON": [b"\xff\xfe", b""],
    "deep": [b"[" * 100_000, b""],
    "no type": [b"{}", b""],
    "a list as type": [b'{"v": 2, "type": ["slot_heartbeat"]}', b""],
    "an unknown type": [b'{"v": 2, "type": "please"}', b""],
    "no fields": [b'{"v": 2, "type": "hello"}', b""],
    "a list for a name": [b'{"v": 2, "type": "hello", "token": [], "node": "n", "block": "b", "pid": 1}', b""],
    "a line break in a name": [b'{"v": 2, "type": "hello", "token": "t", "node": "n\\n", "block": "b", "pid": 1}', b""],
    "not a number": [b'{"v": 2, "type": "slot_heartbeat", "waited": NaN}', b""],
    "infinite": [b'{"v": 2, "type": "closing", "closes_in": Infinity, "gone": false}', b""],
    "huge": [b'{"v": 2, "type": "slot_heartbeat", "waited": 1' + b"0" * 4000 + b"}", b""],
    "endless digits": [b'{"v": 2, "type": "slot_heartbeat", "waited": 1' + b"0" * 40_000 + b"}", b""],
    "negative": [b'{"v": 2, "type": "task_ended", "task": -1, "failed": false}', b""],
    "a flag for a number": [b'{"v": 2, "type": "task_ended", "task": true, "failed": false}', b""],
    "half a character": [
        (
            b'{"v": 2, "type": "run_report", "training": "t", "run": 1, '
            b'"report": {"type": "group_failed", "generation": 1, "reason": "\\ud800"}}'
        ),
        b"",
    ],
    "no keys": [
        b'{"v": 2, "type": "store_request", "group": "g", "request": 1, "operation": "get", "keys": [], "timeout": 1}',
        b"",
    ],
    "progress of strings": [
        b'{"v": 2, "type": "run_report", "training": "t", "run": 1, "report": {"type": "progress", "step": "1"}}',
        b"",
    ],
    "another version": [b'{"v": 1, "type": "probe"}', b""],
    "no version": [b'{"type": "probe"}', b""],
    "an unknown field": [b'{"v": 2, "type": "probe", "more": 1}', b""],
    "a report of no kind": [b'{"v": 2, "type": "run_report", "training": "t", "run": 1, "report": {}}', b""],
}


@pytest.mark.parametrize("frames", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_frames_that_cannot_be_used_are_told_as_such_and_the_next_message_is_taken(
    driver: _Driver, cert_dir: str, frames: list[bytes]
) -> None:
    context = zmq.Context()
    dealer = raw_dealer(context, driver, cert_dir, b"node/0/x")
    dealer.send_multipart(frames)
    dealer.send_multipart(frames_of(task_ended()))
    invalid = driver.received.get(timeout=5)[1]
    assert isinstance(invalid, Invalid)
    assert len(invalid.reason) < 500
    assert driver.received.get(timeout=5)[1] == task_ended()
    context.destroy()


@pytest.mark.parametrize("identity", [None, b"\xff\xfe", b"a\nb", b"x" * 255])
def test_only_a_peer_with_a_printable_name_is_a_slot(driver: _Driver, cert_dir: str, identity: bytes | None) -> None:
    context = zmq.Context()
    nameless = raw_dealer(context, driver, cert_dir, identity)
    nameless.send_multipart(frames_of(task_ended()))
    nameless.send_multipart(frames_of(Probe()))
    assert nameless.poll(5000), "probes from any peer are answered"
    assert driver.received.empty() == (identity != b"x" * 255)
    context.destroy()


def test_a_slot_survives_what_it_cannot_use(driver: _Driver, cert_dir: str) -> None:
    def handle(message: ToSlot) -> None:
        if isinstance(message, StartTask):
            raise ZeroDivisionError("a defect")
        got.put(message)

    got: queue.Queue = queue.Queue()
    link, _ = channel(driver, cert_dir, handle=handle)
    link.start()
    name, _ = driver.received.get(timeout=5)
    for message in (Hello("a", "n", "b", 1), PauseRun("t", -1), StartTask(1, b"")):
        driver.to_send.put((name, message))  # type: ignore[arg-type]
    driver.to_send.put((name, PauseRun("t", 1)))
    assert got.get(timeout=5) == PauseRun("t", 1)
    link.close()


def test_what_a_broken_connection_lost_is_sent_again_once_and_in_order(driver: _Driver, cert_dir: str) -> None:
    """In both directions; messages in transit when the connection breaks do not arrive without resending."""
    proxy = Proxy(driver.server.port)
    link, got = channel(driver, cert_dir, port=proxy.port, beat=0.5)
    link.start()
    link.send(task_ended(0))
    name, _ = driver.received.get(timeout=5)
    driver.to_send.put((name, StartTask(0, b"")))
    assert got.get(timeout=5).task == 0
    for cut in range(3):
        proxy.swallow()
        for number in (1, 2):
            link.send(task_ended(10 * cut + number))
            driver.to_send.put((name, StartTask(10 * cut + number, b"")))
        until(lambda: driver.to_send.empty() and not link._outbox)
        proxy.cut()
        driver.to_send.put((name, StartTask(10 * cut + 3, b"")))
        link.send(task_ended(10 * cut + 3))
    expected = [10 * cut + number for cut in range(3) for number in (1, 2, 3)]
    assert [got.get(timeout=10).task for _ in expected] == expected
    told: list[int] = []
    while len(told) < len(expected):
        message = driver.received.get(timeout=10)[1]
        told += [message.task] if isinstance(message, TaskEnded) else []
    assert told == expected
    link.close()
    proxy.close()


def connections_to(port: int) -> list[object]:
    found = psutil.Process().net_connections("tcp")
    return [one for one in found if one.laddr.port == port and one.status != psutil.CONN_LISTEN]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_large_arguments_are_sent_without_a_copy() -> None:
    """No slot is answered while hundreds of megabytes are copied."""
    payload = os.urandom(1 << 20) * 256
    server = SlotServer(None, (55000, 56000), ["127.0.0.1"])
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    try:
        peer.setsockopt(zmq.IDENTITY, b"slot")
        peer.connect(f"tcp://127.0.0.1:{server.port}")
        peer.send_multipart(encode(Envelope(Probe(1))))
        list(server.receive(10.0))
        begin = time.monotonic()
        copy = bytearray(payload)
        copied = time.monotonic() - begin
        del copy
        begin = time.monotonic()
        assert server.send("slot", StartTask(1, payload))
        assert time.monotonic() - begin < copied / 2
        assert isinstance(decode(peer.recv_multipart(), TO_SLOT).message, Probe)
        received = decode(peer.recv_multipart(), TO_SLOT).message
        assert isinstance(received, StartTask)
        assert received.payload == payload
    finally:
        peer.close(0)
        context.term()
        server.close()
