"""Connections of others of this host, however many and whatever they send, do not keep the user from the page."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import re
import resource
import socket
import subprocess
import sys

import pytest

from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.dashboard.connections import Strangers, most_strangers
from tests.extensions.pages.test_run_view import RUN

DESCRIPTORS = 128
MORE = 300  # connections than the server has descriptors
SERVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from pathlib import Path
from freetrain_parsl.campaign.run_source import ScriptSource
from freetrain_parsl.extensions.dashboard.server import ServerOptions, serve
from freetrain_parsl.screen import say
place = Path(sys.argv[1])
serve(ScriptSource(place, place / "journal.sqlite"), ServerOptions(), say)
"""


class Page:
    """A server in a process of its own, with few descriptors."""

    def __init__(self, place):
        self._log = place / "server.log"
        with self._log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(place)], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        address = self.process.stdout.readline()
        self.port, self.path = re.search(r":(\d+)(/\S*)", address).groups()
        self._strangers = []

    def stranger(self, says=b""):
        """Connect without a token; a server that has closed the connection already is no error."""
        one = socket.create_connection(("127.0.0.1", int(self.port)), timeout=20)
        self._strangers.append(one)
        with contextlib.suppress(OSError):
            one.sendall(says)
        return one

    def opened(self, path=None, headers=()):
        """Open a page as the user's browser does; return the connection and the answer."""
        browser = http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=20)
        browser.request("GET", self.path if path is None else path, headers=dict(headers))
        return browser, browser.getresponse()

    def log(self):
        return self._log.read_text()

    def close(self):
        for one in self._strangers:
            one.close()
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def page(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")
    for at, entry in RUN:
        journal.write(at, entry)
    journal.close()
    page = Page(tmp_path)
    yield page
    page.close()


def stream_is_open(stream, changes):
    """Read what there is; at the end of a stream, nothing is read instead of waiting."""
    stream.sock.settimeout(0.2)
    try:
        while changes.readline():
            pass
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",  # refused, and then kept alive
        b"GET /?token=wrong HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /stop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 1000,
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://[\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"\x16\x03\x01 no HTTP\r\n\r\n" * 10,
    ],
    ids=["idle", "slow head", "no token", "wrong token", "large body", "bad origin", "websocket", "garbage"],
)
def test_the_page_answers_however_many_connections_others_hold(page, says):
    """The stream of changes, which was open before, continues; all of it costs the log a few lines."""
    browser, answer = page.opened()
    cookie = answer.getheader("set-cookie").partition(";")[0]
    answer.read()
    stream, changes = page.opened("/events", {"cookie": cookie})
    assert changes.status == 200
    assert changes.readline().startswith(b"id: ")
    for _ in range(MORE):
        page.stranger(says)
    for _ in range(3):
        late, answer = page.opened()
        assert answer.status == 200
        assert b"<title>" in answer.read()
        late.close()
    assert stream_is_open(stream, changes)
    browser.close()
    stream.close()
    assert page.process.poll() is None
    assert "closed 1 connections" in page.log()
    assert page.log().count("\n") <= 3


class Transport:
    """A connection that notes its end."""

    def __init__(self, name, closed):
        self.name = name
        self.closed = closed

    def abort(self):
        self.closed.append(self.name)


def test_a_stranger_is_closed_after_some_seconds_and_the_user_is_not():
    """Also one that sends a byte from time to time, as no request counts that has no token."""
    closed = []

    async def scene():
        strangers = Strangers(10, patience=0.05)
        strangers.opened(("127.0.0.1", 1), Transport("stranger", closed))
        strangers.opened(("127.0.0.1", 2), Transport("user", closed))
        strangers.opened(("127.0.0.1", 3), Transport("gone", closed))
        strangers.known(("127.0.0.1", 2))
        strangers.closed(("127.0.0.1", 3))
        await asyncio.sleep(0.3)
        assert len(strangers) == 0

    asyncio.run(scene())
    assert closed == ["stranger"]


def test_the_oldest_stranger_makes_room_and_the_log_gets_a_line_a_minute(caplog):
    closed = []
    now = 0.0

    async def scene():
        nonlocal now
        strangers = Strangers(2, clock=lambda: now)
        for name in range(6):
            strangers.opened(("127.0.0.1", name), Transport(name, closed))
        now = 61.0
        strangers.opened(("127.0.0.1", 6), Transport(6, closed))
        assert len(strangers) == 2

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    assert closed == [0, 1, 2, 3, 4]
    assert [re.search(r"closed (\d+) connections", line)[1] for line in caplog.messages] == ["1", "4"]


@pytest.mark.parametrize(("soft", "most"), [(64, 16), (1024, 256), (65536, 512), (resource.RLIM_INFINITY, 512), (8, 4)])
def test_strangers_never_use_all_descriptors(monkeypatch, soft, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, resource.RLIM_INFINITY))
    assert most_strangers() == most
