"""The rendezvous server and its client, connected directly without a network."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.executor.driver.rendezvous import RendezvousServer
from freetrain_parsl.executor.slot.training_run import ChannelStore
from freetrain_parsl.protocol.messages import StoreReply, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Wire:
    """Passes messages between one server and several clients of one group, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clients: dict[str, ChannelStore] = {}
        self.lock = threading.Lock()
        self.server = RendezvousServer(lambda slot, message: self.clients[slot].deliver(message))

    def client(self, slot: str, group: str = "t/1") -> ChannelStore:
        def send(message: StoreRequest) -> None:
            with self.lock:
                self.server.handle(slot, message, self.now)

        self.clients[slot] = ChannelStore(group, send)
        return self.clients[slot]


@pytest.fixture
def wire() -> Iterator[_Wire]:
    wire = _Wire()
    wire.server.open("t/1")
    yield wire
    for client in wire.clients.values():
        client.close()


def test_what_one_sets_the_other_gets(wire: _Wire) -> None:
    a, b = wire.client("a"), wire.client("b")
    a.set("key", b"\x00value")
    assert b.get(["key"], 1.0) == [b"\x00value"]


def test_a_get_waits_for_its_key(wire: _Wire) -> None:
    a, b = wire.client("a"), wire.client("b")
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.extend(b.get(["late"], 10.0)))
    waiter.start()
    a.set("late", b"here")
    waiter.join(5)
    assert found == [b"here"]


def test_a_get_of_several_keys_is_one_call_and_waits_for_all(wire: _Wire) -> None:
    a = wire.client("a")
    a.set("z", b"")
    answers: list[StoreReply] = []
    wire.server._reply = lambda _slot, message: answers.append(message)
    wire.server.handle("b", StoreRequest("t/1", 7, "get", ("x", "y", "z", "y"), 10.0), 0.0)
    for request, (operation, key, value) in enumerate(
        [
            ("set", "y", b"early"),
            ("delete", "y", b""),
            ("set", "x", b"x"),
            ("set", "y", b"late"),
            ("set", "y", b"again"),
        ]
    ):
        wire.server.handle("a", StoreRequest("t/1", request, operation, (key,), 1.0, payload=value), 0.0)  # type: ignore[arg-type]
    assert [message.request for message in answers] == [0, 1, 2, 3, 7, 4]
    assert answers[4] == StoreReply("t/1", 7, ok=True, sizes=(1, 4, 0, 4), payload=b"xlatelate")
    assert not wire.server._stores["t/1"].awaited
    b = wire.client("b")
    wire.server._reply = lambda slot, message: wire.clients[slot].deliver(message)
    assert b.get(["x", "z", "y"], 1.0) == [b"x", b"", b"again"]
    assert b.get([], 1.0) == []


def test_additions_by_several_are_counted(wire: _Wire) -> None:
    a, b = wire.client("a"), wire.client("b")
    assert [a.add("n", 1), b.add("n", 2), a.add("n", -1)] == [1, 3, 2]


def test_check_asks_for_all_keys_and_delete_removes_one(wire: _Wire) -> None:
    a = wire.client("a")
    a.set("x", b"1")
    assert a.check(["x"])
    assert not a.check(["x", "y"])
    assert a.delete("x")
    assert not a.delete("x")


class _HopelessGet:
    """A get, in a separate thread, of a key that is never set."""

    def __init__(self, wire: _Wire, client: ChannelStore) -> None:
        self.error: TimeoutError | None = None
        self.thread = threading.Thread(target=self._get, args=(client,))
        self.thread.start()
        while not wire.server._stores["t/1"].waiting:
            pass

    def _get(self, client: ChannelStore) -> None:
        try:
            client.get(["never"], 30.0)
        except TimeoutError as error:
            self.error = error

    def refused(self) -> str:
        self.thread.join(5)
        assert self.error is not None
        return str(self.error)


def test_a_get_beyond_its_time_is_refused_by_the_server(wire: _Wire) -> None:
    get = _HopelessGet(wire, wire.client("a"))
    with wire.lock:
        wire.server.expire(29.0)
        assert wire.server._stores["t/1"].waiting
        wire.server.expire(30.0)
        assert not wire.server._stores["t/1"].awaited
    assert "never" in get.refused()


def test_dropping_a_generation_frees_who_waits_and_refuses_who_comes_late(wire: _Wire) -> None:
    a = wire.client("a")
    get = _HopelessGet(wire, a)
    with wire.lock:
        wire.server.close("t/1")
    assert get.refused()
    with pytest.raises(TimeoutError):
        a.set("x", b"")


def test_generations_do_not_see_each_other(wire: _Wire) -> None:
    wire.server.open("t/2")
    wire.client("a", "t/1").set("x", b"")
    assert not wire.client("b", "t/2").check(["x"])


def test_what_no_honest_group_does_is_refused(wire: _Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many bytes, too many pending gets, and adding to a value that is not a number."""
    monkeypatch.setattr("freetrain_parsl.executor.driver.rendezvous._MOST_BYTES", 100)
    monkeypatch.setattr("freetrain_parsl.executor.driver.rendezvous._MOST_WAITING", 1)
    a = wire.client("a")
    a.set("x", b"no" * 45)
    with pytest.raises(TimeoutError):
        a.set("y", b"1" * 20)
    with pytest.raises(TimeoutError):
        a.add("x", 1)
    a.delete("x")
    a.set("y", b"1" * 90)
    get = _HopelessGet(wire, a)
    with pytest.raises(TimeoutError):
        wire.client("b").get(["never"], 30.0)
    with wire.lock:
        wire.server.close("t/1")
    get.refused()
