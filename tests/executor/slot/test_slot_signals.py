"""The batch system's signals reach a slot whatever its main thread does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from parsl import curvezmq
from parsl.serialize import pack_apply_message

from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.slot.slot import SlotSettings, run_slot
from freetrain_parsl.protocol.messages import Closing, Exit, Hello, StartTask, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from freetrain_parsl.protocol.messages import ToDriver

_SCRIPT = """
import ctypes, os, signal, threading, time
from freetrain_parsl.executor.slot.channel import SignalSocket

def end(number):
    print(number.name, flush=True)
    os._exit(0)

signals = SignalSocket((signal.SIGTERM, signal.SIGUSR1), end)
signals.install()

def watch():
    while True:
        signals.handle()
        time.sleep(0.01)

threading.Thread(target=watch, daemon=True).start()
{before}
print("ready", flush=True)
{wait}
"""

_IN_C = 'ctypes.CDLL(None).system(b"exec sleep 60")  # resumed after a signal without return to Python'
_IN_PYTHON = "while True: time.sleep(0.1)"

_FORK = """
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM
"""

_OTHER_DESCRIPTOR = """
import socket
pair = socket.socketpair()
pair[1].setblocking(False)
signal.set_wakeup_fd(pair[1].fileno())
"""


@pytest.mark.parametrize(
    ("number", "before", "wait"),
    [
        pytest.param(signal.SIGTERM, "", _IN_C, id="while the main thread is in a call that does not return"),
        pytest.param(signal.SIGUSR1, "", _IN_C, id="the early warning, too"),
        pytest.param(signal.SIGTERM, _FORK, _IN_C, id="but not those of a forked process"),
        pytest.param(signal.SIGTERM, _OTHER_DESCRIPTOR, _IN_PYTHON, id="after an event loop took the descriptor"),
    ],
)
def test_signals_arrive(number: signal.Signals, before: str, wait: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT.format(before=before, wait=wait)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as script:
        assert script.stdout is not None
        try:
            assert script.stdout.readline() == "ready\n"
            script.send_signal(number)
            assert script.stdout.readline() == f"{number.name}\n"
        finally:
            os.killpg(script.pid, signal.SIGKILL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[SlotServer, str]]:
    certificates = str(curvezmq.create_certificates(tmp_path))
    server = SlotServer(certificates, (55000, 56000))
    yield server, certificates
    server.close()


def _await(server: SlotServer, kind: type[ToDriver]) -> str:
    """Receive messages until one of a kind; return the slot's name."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for name, message in server.receive(0.1):
            if isinstance(message, kind):
                return name
    raise TimeoutError(f"no {kind.__name__}")


def _never_returns(started: str) -> None:
    import ctypes
    from pathlib import Path

    Path(started).touch()
    ctypes.CDLL(None).system(b"exec sleep 60")


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["signal", "end of the driver"])
def test_a_slot_leaves_although_its_task_is_in_a_call_that_does_not_return(
    cause: str, server: tuple[SlotServer, str], tmp_path: Path
) -> None:
    driver, certificates = server
    settings = SlotSettings(("127.0.0.1",), driver.port, certificates, 0.2, 60.0, 30.0)
    slot = multiprocessing.get_context("spawn").Process(target=run_slot, args=(settings, "token"))
    slot.start()
    try:
        name = _await(driver, Hello)
        driver.send(name, Welcome(3600.0))
        started = tmp_path / "started"
        task: Callable[[str], None] = _never_returns
        driver.send(name, StartTask(1, pack_apply_message(task, (str(started),), {})))
        while not started.exists():
            driver.receive(0.1)
        if cause == "signal":
            slot.terminate()
            assert _await(driver, Closing) == name
        else:
            driver.send(name, Exit())
            driver.receive(0.1)
        slot.join(10)
        assert slot.exitcode == 0
    finally:
        slot.kill()
