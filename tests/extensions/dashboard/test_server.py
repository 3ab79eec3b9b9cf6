"""Where the page is served: on the loopback, or on a private socket, and nowhere else."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.campaign.run_source import ScriptSource
from freetrain_parsl.campaign.store import DATABASE
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.dashboard.server import ServerOptions, serve
from tests.foreign_runs import plant

if TYPE_CHECKING:
    from pathlib import Path


class Started(Exception):
    """Raised instead of serving."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Begin to serve with these options; return the printed address, and call `look` while connections are accepted."""
    monkeypatch.setattr(os, "nice", lambda _by: 0)  # it would last for the other tests

    def start_server(look=lambda _address: None, **options):
        found = []

        def started(address):
            found.append(address)
            look(address)
            raise Started

        with pytest.raises(Started):
            serve(ScriptSource(tmp_path, tmp_path / "journal.sqlite"), ServerOptions(**options), started)
        return found[0]

    return start_server


def test_a_port_is_on_the_loopback_and_the_address_has_a_new_token(start):
    first, second = start(), start()
    assert first.startswith("http://127.0.0.1:")
    tokens = {address.partition("?token=")[2] for address in (first, second)}
    assert len(tokens) == 2
    assert all(len(token) >= 43 for token in tokens)


def test_a_port_that_is_taken_is_one_line(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"--port {port} cannot be used"):
            start(port=port)


def test_a_socket_is_private_and_removed_afterwards(start, tmp_path):
    path = tmp_path / "page.sock"
    modes = []
    start(lambda _address: modes.append(stat.S_IMODE(path.stat().st_mode)), path=path)
    assert modes == [0o600]
    assert not path.exists()


def test_a_stale_socket_is_replaced_but_nothing_else(start, tmp_path):
    path = tmp_path / "page.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    start(path=path)
    with socket.socket(socket.AF_UNIX) as used:
        used.bind(str(path))
        used.listen()
        with pytest.raises(InvalidInput, match="cannot be used"):
            start(path=path)
    path.unlink()
    path.write_text("a file of the user")
    with pytest.raises(InvalidInput, match="cannot be used"):
        start(path=path)
    assert path.read_text() == "a file of the user"


def test_a_missing_package_is_named_with_the_remedy(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "freetrain_parsl.extensions.dashboard.connections", raising=False)
    with pytest.raises(InvalidInput, match=r"needs the package uvicorn: pip install 'freetrain-parsl\[dashboard\]'"):
        start()


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT], [signal.SIGINT] * 2],
    ids=["kill", "closed terminal", "ctrl-c", "ctrl-c twice"],
)
def test_a_signal_while_a_page_is_open_leaves_no_traceback_no_copy_of_a_run_of_others_and_no_socket(
    tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    run = plant(tmp_path / "run")
    (run / DATABASE).chmod(0o666)
    places = {name: tmp_path / name for name in ("temporary", "sockets")}
    for place in places.values():
        place.mkdir(mode=0o700)
    socket_path = os.path.relpath(places["sockets"] / "s", tmp_path)
    script = f"""import os, signal
os.chdir({str(tmp_path)!r})
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
signal.signal(signal.SIGINT, signal.default_int_handler)  # or in the background
from freetrain_parsl.cli import main
main()"""
    command = [sys.executable, "-c", script, "dashboard", "run", "--socket", socket_path]
    environment = {**os.environ, "TMPDIR": str(places["temporary"])}
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server,
        socket.socket(socket.AF_UNIX) as viewer,
    ):
        assert server.stdout is not None
        while b"?token=" not in (line := server.stdout.readline()):
            assert server.poll() is None
        assert all(list(place.iterdir()) for place in places.values())
        viewer.connect(os.path.relpath(tmp_path / socket_path))
        viewer.sendall(b"GET /events?" + line.partition(b"?")[2].strip() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert viewer.recv(100).startswith(b"HTTP/1.1 200 OK")
        for number in numbers:
            server.send_signal(number)
            time.sleep(0.2)
        _, errors = server.communicate(timeout=60)
        assert errors.endswith(b"from a copy\n")
        assert errors.count(b"\n") == 1
        assert server.returncode == 128 + (signal.SIGINT if signal.SIGINT in numbers else signal.SIGTERM)
    assert not any(list(place.iterdir()) for place in places.values())
