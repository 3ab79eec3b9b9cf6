"""The control channel over real sockets on the loopback."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import pytest
import zmq
from parsl import curvezmq

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.protocol import Message, ProtocolError
from freetrain_parsl.executor.slots import Channel, SlotServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cert_dir(tmp_path: Path) -> str:
    return curvezmq.create_certificates(tmp_path)


class _Driver(threading.Thread):
    """Runs a server in a thread, as the driver does, and echoes what it gets into a queue."""

    def __init__(self, cert_dir: str | None) -> None:
        super().__init__(daemon=True)
        self.server = SlotServer(cert_dir, (55000, 56000))
        self.received: queue.Queue[tuple[str, Message]] = queue.Queue()
        self.to_send: queue.Queue[tuple[str, Message]] = queue.Queue()
        self.stopping = threading.Event()
        self.sent: list[bool] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            for item in self.server.receive(0.05):
                self.received.put(item)
            while not self.to_send.empty():
                self.sent.append(self.server.send(*self.to_send.get()))
        self.server.close()


@pytest.fixture
def driver(cert_dir: str) -> Iterator[_Driver]:
    thread = _Driver(cert_dir)
    thread.start()
    yield thread
    thread.stopping.set()
    thread.join(5)


def channel(driver: _Driver, cert_dir: str | None, **changes: object) -> tuple[Channel, queue.Queue]:
    got: queue.Queue = queue.Queue()
    settings = {
        "handle": got.put,
        "on_lost": lambda: got.put("lost"),
        "beat": 0.05,
        "silence": 30.0,
        **changes,
    }
    return Channel(["127.0.0.1"], driver.server.port, cert_dir, "node/0/x", **settings), got


def test_messages_pass_both_ways_with_their_payloads(driver: _Driver, cert_dir: str) -> None:
    link, got = channel(driver, cert_dir, beat=30.0)
    link.start()
    link.send(Message("hello", {"node": "n1"}, b"\x00payload"))
    name, message = driver.received.get(timeout=5)
    assert (name, message) == ("node/0/x", Message("hello", {"node": "n1"}, b"\x00payload"))
    driver.to_send.put((name, Message("run", {"rank": 3}, b"function")))
    assert got.get(timeout=5) == Message("run", {"rank": 3}, b"function")
    link.close()


def test_what_was_sent_before_close_arrives(driver: _Driver, cert_dir: str) -> None:
    link, _ = channel(driver, cert_dir, beat=30.0)
    link.start()
    for number in range(100):
        link.send(Message("ended", {"number": number}, b"x" * 10_000))
    link.close(5)
    assert [driver.received.get(timeout=5)[1]["number"] for _ in range(100)] == list(range(100))


def test_a_silent_driver_is_noticed_once(driver: _Driver, cert_dir: str) -> None:
    link, got = channel(driver, cert_dir, silence=0.2)
    link.start()
    assert got.get(timeout=5) == "lost"
    with pytest.raises(queue.Empty):
        got.get(timeout=0.5)
    link.close()


def test_nobody_without_the_certificates_gets_a_word_in(driver: _Driver) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"tcp://127.0.0.1:{driver.server.port}")
    stranger.send_multipart(Message("hello", {"slot": "evil"}).frames())
    with pytest.raises(queue.Empty):
        driver.received.get(timeout=0.5)
    context.destroy()


def test_a_client_with_other_certificates_is_not_answered(driver: _Driver, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "other").mkdir()
    other = curvezmq.create_certificates(tmp_path / "other")
    probe = Channel._reachable
    monkeypatch.setattr(Channel, "_reachable", lambda self, hosts, port: probe(self, hosts, port, timeout=0.5))
    with pytest.raises(BatchSystemError, match="reaches the driver at none of"):
        channel(driver, other)


def test_sending_to_a_slot_that_is_not_there_is_told(driver: _Driver) -> None:
    driver.to_send.put(("nobody", Message("exit")))
    for _ in range(100):
        if driver.sent:
            break
        driver.server.wake()
    driver.stopping.set()
    driver.join(5)
    assert driver.sent == [False]


@pytest.mark.parametrize("frames", [[], [b"{}"], [b"{}", b""], [b"nonsense", b""], [b"[1]", b""], [b"1", b"2", b"3"]])
def test_frames_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        Message.of_frames(frames)
