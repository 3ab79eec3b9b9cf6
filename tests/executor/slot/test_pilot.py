"""The pilot: a node's worker pool and its slots survive the batch system's signal until all slots have saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.executor.slot.pilot import PoolDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

_POOL = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", sys.argv[1], path]) for path in sys.argv[2:]]
time.sleep(60)
"""

# A slot that needs half a second to save after the signal.
_SLOT = """
import signal, sys, time
from pathlib import Path
from freetrain_parsl.executor.slot.pilot import set_process_title, end_node, pilot_of_node
def save(*_):
    time.sleep(0.5)
    Path(sys.argv[1]).write_text("saved")
    sys.exit()
set_process_title()
signal.signal(signal.SIGTERM, save)
Path(sys.argv[1]).write_text("ready")
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a pilot in a new session, as a batch system does, with a pool of that many slots."""
    pilots: list[subprocess.Popen[bytes]] = []

    def begin(slots: int, slot: str = _SLOT) -> subprocess.Popen[bytes]:
        files = [str(tmp_path / f"slot-{number}") for number in range(slots)]
        command = [
            sys.executable,
            "-m",
            "freetrain_parsl.executor.slot.pilot",
            sys.executable,
            "-c",
            _POOL,
            slot,
            *files,
        ]
        pilots.append(subprocess.Popen(command, start_new_session=True))
        assert _until(lambda: all(Path(file).exists() and Path(file).read_text() for file in files))
        return pilots[-1]

    yield begin
    for pilot in pilots:
        _signal_all(pilot.pid, signal.SIGKILL)
        pilot.wait(5)


def _until(condition: Callable[[], object], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _session(session: int) -> list[int]:
    """Return all live processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(its_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


def _signal_all(session: int, number: signal.Signals) -> None:
    for pid in _session(session):
        os.kill(pid, number)


@pytest.mark.smoke
def test_slots_save_before_the_pool_ends_and_then_nothing_is_left(start, tmp_path) -> None:
    """The batch system signals every process of the job, and waits for the node."""
    pilot = start(2)
    assert len(_session(pilot.pid)) == 4
    _signal_all(pilot.pid, signal.SIGTERM)
    assert pilot.wait(10) == 0
    assert [(tmp_path / f"slot-{number}").read_text() for number in (0, 1)] == ["saved", "saved"]
    assert _until(lambda: not _session(pilot.pid), 2)


def test_a_slot_that_has_missed_the_signal_receives_it_again(start, tmp_path) -> None:
    """It was a part of the pool, which ignores the signal, in the moment in which the batch system sent it."""
    pilot = start(2)
    pilot.terminate()
    assert pilot.wait(10) == 0
    assert [(tmp_path / f"slot-{number}").read_text() for number in (0, 1)] == ["saved", "saved"]


def test_the_early_warning_kills_nobody_that_does_not_listen(start) -> None:
    pilot = start(1)
    before = _session(pilot.pid)
    _signal_all(pilot.pid, signal.SIGUSR1)
    time.sleep(0.3)
    assert sorted(_session(pilot.pid)) == sorted(before)


def test_a_slot_that_is_still_starting_leaves_at_once(start) -> None:
    """It has no handler yet, and has inherited from the pool that the signal is ignored."""
    pilot = start(1, _SLOT.replace("signal.signal(signal.SIGTERM, save)", ""))
    begin = time.monotonic()
    _signal_all(pilot.pid, signal.SIGTERM)
    assert pilot.wait(10) == 0
    assert time.monotonic() - begin < 2


def test_a_pool_that_ends_by_itself_ends_the_node(start) -> None:
    pilot = start(1)
    pool = next(pid for pid in _session(pilot.pid) if os.getpgid(pid) == pid != pilot.pid)
    os.kill(pool, signal.SIGKILL)
    assert pilot.wait(10) == 128 + signal.SIGKILL, "as a shell would report"
    assert _until(lambda: not _session(pilot.pid), 2)


def test_a_slot_can_end_its_node(start, tmp_path) -> None:
    """When the driver has failed, the last slot to save releases the whole node."""
    slot = _SLOT.replace("time.sleep(60)", "end_node(pilot_of_node()); save()", 1)
    pilot = start(1, slot)
    pilot.wait(10)
    assert (tmp_path / "slot-0").read_text() == "saved"


@pytest.mark.smoke
def test_a_pool_in_which_no_slot_ever_starts_is_ended_and_says_why() -> None:
    """Its interchange may have died before it could register; it would hold the node for nothing."""
    pilot = subprocess.run(
        [sys.executable, "-m", "freetrain_parsl.executor.slot.pilot", "sleep", "600"],
        env={**os.environ, "FREETRAIN_PILOT_PATIENCE": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert pilot.returncode == 1
    assert "no slot ran here for 1 s" in pilot.stderr


def test_a_pool_with_a_slot_is_left_alone() -> None:
    slot = "printf freetrain-slot > /proc/$$/comm; while :; do sleep 1; done"
    pilot = subprocess.Popen(
        [sys.executable, "-m", "freetrain_parsl.executor.slot.pilot", "bash", "-c", slot],
        env={**os.environ, "FREETRAIN_PILOT_PATIENCE": "2"},
        start_new_session=True,
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            pilot.wait(6)  # several times its patience
    finally:
        pilot.terminate()
        _signal_all(pilot.pid, signal.SIGKILL)
        pilot.wait(10)


# The pool's process: its fork server and its manager each have a socket, as those of Parsl's pool have.
_POOL_WITH_SOCKETS = """
import multiprocessing, signal
from freetrain_parsl.executor.htex.worker_pool import _use_pool_directory
_use_pool_directory()
manager = multiprocessing.get_context("forkserver").Manager()
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_node_leaves_no_temporary_files(short_path, monkeypatch, killed) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    command = [sys.executable, "-m", "freetrain_parsl.executor.slot.pilot", sys.executable, "-c", _POOL_WITH_SOCKETS]
    environment = {**os.environ, "TMPDIR": str(short_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as pilot:
        assert pilot.stdout is not None
        assert pilot.stdout.readline() == b"ready\n"
        [directory] = short_path.iterdir()
        assert len(list(directory.glob("listener-*"))) == 2
        pilot.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        pilot.wait(10)
        if killed:
            with PoolDirectory():
                assert directory.exists(), "the pool is still alive"
            _signal_all(pilot.pid, signal.SIGKILL)
            assert _until(lambda: not _session(pilot.pid))
            with PoolDirectory():  # as the next pilot on this node
                assert not directory.exists()
    assert list(short_path.iterdir()) == []


# A process of the pool that is no slot, with a segment of shared memory.
_KILLED_WITH_MEMORY = """
import sys, time
from multiprocessing import shared_memory
from pathlib import Path
segment = shared_memory.SharedMemory(create=True, size=64)
Path(sys.argv[1]).write_text(segment.name.lstrip("/"))
time.sleep(60)
"""


def test_what_the_processes_of_a_node_leave_in_shared_memory_is_removed(start, tmp_path) -> None:
    """Their trackers are killed last: the memory of the node was lost for all later jobs."""
    pilot = start(1, _KILLED_WITH_MEMORY)
    segment = Path("/dev/shm", (tmp_path / "slot-0").read_text())
    assert segment.exists()
    os.kill(pilot.pid, signal.SIGTERM)
    assert pilot.wait(10) == 0
    try:
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)
