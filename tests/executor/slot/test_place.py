"""A slot's place forks one process after another: each is new, and the place ends, or fails, as the last of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from parsl import curvezmq
from parsl.serialize import deserialize, pack_apply_message

from freetrain_parsl.cluster.processes import process_info
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.payloads.payloads import pack_training
from freetrain_parsl.executor.slot.slot import SlotSettings, run_slot
from freetrain_parsl.protocol.messages import (
    DriverHeartbeat,
    Exit,
    Hello,
    PauseRun,
    Place,
    RunEnded,
    SlotHeartbeat,
    StartRun,
    StartTask,
    TaskEnded,
    Welcome,
)
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import RunFailed, RunFinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from freetrain_parsl.protocol.messages import ToDriver, ToSlot

pytestmark = pytest.mark.slow

_SCRIPT = """
import json, os, resource, signal, socket, sys, threading, time
from freetrain_parsl.executor.slot.place import occupy

HOOKS = []

def state():
    mask = os.umask(0)
    os.umask(mask)
    blocked = [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    return [len(HOOKS), mask, socket.getdefaulttimeout(), blocked, len(os.listdir("/proc/self/fd"))]

def tell(*what):
    print(json.dumps(what), flush=True)

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a worker pool
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal: in the background it is ignored
{work}
occupy(work)
"""


def _place(work: str) -> subprocess.Popen[str]:
    script = _SCRIPT.replace("{work}", work)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _outcome(work: str) -> tuple[list[Any], int, str]:
    """Return what the processes of a place have told, its exit code and its error output."""
    with _place(work) as place:
        out, errors = place.communicate(timeout=60)
    return [json.loads(line) for line in out.splitlines()], place.returncode, errors


@pytest.mark.smoke
def test_each_process_is_as_new_as_the_first_and_knows_what_the_one_before_has_left() -> None:
    told, code, errors = _outcome("""
def work(left):
    tell(left, os.getpid(), os.getppid(), state())
    HOOKS.append(1)
    os.umask(0o7)
    socket.setdefaulttimeout(0.1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    files = [open("/dev/null") for _ in range(20)]
    threading.Thread(target=time.sleep, args=(60,)).start()
    return [*(left or []), os.getpid()] if len(left or []) < 2 else None
""")
    pids = [pid for _, pid, _, _ in told]
    assert [left for left, *_ in told] == [None, pids[:1], pids[:2]], errors
    assert len(set(pids)) == 3
    assert len({place for _, _, place, _ in told}) == 1
    assert [found for *_, found in told] == [told[0][-1]] * 3
    assert told[0][-1][0] == 0
    assert code == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGINT)", 1),
    ],
)
def test_the_place_ends_as_its_process_does(end: str, code: int) -> None:
    assert _outcome(f"def work(left):\n    {end}")[1] == code


def test_an_exception_is_raised_in_the_place_which_is_then_as_before() -> None:
    told, _, errors = _outcome("""
def work(left):
    raise ValueError("it cannot start")

def title():
    with open("/proc/self/comm") as comm:
        return comm.read()

before = title(), state()
try:
    occupy(work)
except ValueError as error:
    tell(str(error), (title(), state()) == before, signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)
sys.exit()
""")
    assert told == [["it cannot start", True, True]], errors


def test_a_signal_that_arrives_between_two_processes_reaches_the_second() -> None:
    told, code, errors = _outcome("""
def work(left):
    if left is None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        return "next"
    signal.signal(signal.SIGTERM, lambda *_: (tell("terminated"), os._exit(3)))
    time.sleep(60)
""")
    assert (told, code) in (([["terminated"]], 3), ([], 128 + signal.SIGTERM)), errors  # before or after its handler


def test_a_signal_that_another_thread_of_the_place_receives_reaches_its_process() -> None:
    """The kernel may choose any thread that does not block a signal, and imports of Parsl start such threads."""
    told, code, errors = _outcome("""
import ctypes

thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
thread.start()

def work(left):
    arrived = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: arrived.set())
    tgkill = 234 if os.uname().machine == "x86_64" else 131
    assert ctypes.CDLL(None).syscall(tgkill, os.getppid(), thread.native_id, signal.SIGTERM) == 0
    tell(arrived.wait(20))
""")
    assert (told, code) == ([[True]], 0), errors


def test_a_process_that_can_open_no_more_files_can_have_a_successor() -> None:
    told, code, errors = _outcome("""
def work(left):
    if left is not None:
        tell(left, len(os.listdir("/proc/self/fd")) < 20)
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            HOOKS.append(open("/dev/null"))
    except OSError:
        return "leaked"
""")
    assert (told, code) == ([["leaked", True]], 0), errors


def test_a_place_that_is_killed_takes_its_process_with_it() -> None:
    with _place("def work(left):\n    tell(os.getpid())\n    time.sleep(60)") as place:
        assert place.stdout is not None
        (pid,) = json.loads(place.stdout.readline())
        place.kill()
        end = time.monotonic() + 20
        while (info := process_info(pid)) is not None and info.alive and time.monotonic() < end:
            time.sleep(0.01)
        assert info is None or not info.alive


def test_a_place_waits_for_the_process_of_one_that_was_killed(tmp_path: Path) -> None:
    """To free the memory of a large process, and of its accelerator, takes longer than to start another slot."""
    with subprocess.Popen(["sleep", "60"]) as ending:
        before = process_info(ending.pid)
        assert before is not None
        (tmp_path / "process-0").write_text(f"{before.pid} {before.started}")
        with _place(f"""
import multiprocessing
from pathlib import Path
from freetrain_parsl.cluster.processes import is_running
from freetrain_parsl.executor.slot.neighbours import process_of
POOL = {str(tmp_path)!r}
multiprocessing.current_process()._config["tempdir"] = POOL

def work(left):
    tell(is_running({before.pid}, {before.started}), process_of(Path(POOL), 0)[0] == os.getpid())

tell("starts")
""") as place:
            assert place.stdout is not None
            assert json.loads(place.stdout.readline()) == ["starts"]
            time.sleep(1.0)
            ending.kill()
            ending.wait()
            out, errors = place.communicate(timeout=60)
    assert [json.loads(line) for line in out.splitlines()] == [[False, True]], errors
    assert list(tmp_path.iterdir()) == []


class _Driver:
    """The driver of one real slot; its messages are received in a thread."""

    def __init__(self, server: SlotServer) -> None:
        self.name = ""
        self._server = server
        self._to_send: queue.SimpleQueue[ToSlot] = queue.SimpleQueue()
        self._received: queue.Queue[ToDriver] = queue.Queue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._exchange)
        self._thread.start()

    def send(self, message: ToSlot) -> None:
        self._to_send.put(message)

    def awaits(self, kind: type) -> Any:
        """Return the next message of a kind."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if isinstance(message := self._received.get(timeout=60), kind):
                return message
        raise TimeoutError(f"no {kind.__name__}")

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()

    def _exchange(self) -> None:
        while not self._over.is_set():
            for name, message in self._server.receive(0.02):
                if isinstance(message, Hello):
                    assert self.name in ("", name), "it is the same slot"
                    self.name = name
                    self._server.send(name, Welcome(3600.0))
                if isinstance(message, SlotHeartbeat):
                    self._server.send(name, DriverHeartbeat())
                self._received.put(message)
            while not self._to_send.empty():
                self._server.send(self.name, self._to_send.get())


@contextmanager
def running_slot(directory: Path, target: Callable[..., None], *before: object) -> Iterator[_Driver]:
    """Start a slot in a process of its own, by ``target(*before, settings, token)``, and wait for its first message."""
    certificates = str(curvezmq.create_certificates(directory))
    driver = _Driver(SlotServer(certificates, (55000, 56000)))
    settings = SlotSettings(("127.0.0.1",), driver._server.port, certificates, 0.2, 60.0, 30.0)
    place = multiprocessing.get_context("spawn").Process(target=target, args=(*before, settings, "token"))
    place.start()
    try:
        driver.awaits(Hello)
        yield driver
        driver.send(Exit())
        place.join(20)
        assert place.exitcode == 0
    finally:
        place.kill()
        driver.close()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[_Driver]:
    with running_slot(tmp_path, run_slot) as driver:
        yield driver


def _train(driver: _Driver, directory: Path, run: int, function: Callable[..., Any]) -> RunEnded:
    options = SessionOptions("t", directory / str(run))
    driver.send(StartRun("t", run, options, pack_training(function, (), {}), Place(run, 0, 1), 60.0))
    ended = driver.awaits(RunEnded)
    assert isinstance(ended, RunEnded)
    return ended


def _leaves_everything(session: Any) -> list[Any]:
    """Return what a training job finds in its process, and change it."""
    before = os.umask(0o7)
    found = [
        os.getpid(),
        before,
        socket.getdefaulttimeout(),
        bool(torch.nn.modules.module._global_forward_hooks),
        float(torch.tensor([1e-40]) * 1.0) != 0,
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]) == set(),
        torch.get_default_dtype() == torch.float32,
    ]
    socket.setdefaulttimeout(0.1)
    torch.nn.modules.module.register_module_forward_hook(lambda _module, _given, out: out * 2)
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    return found


def _fails(session: Any) -> None:
    raise ValueError(f"process {os.getpid()}")


@pytest.mark.smoke
def test_no_training_finds_what_another_one_has_left(driver: _Driver, tmp_path: Path) -> None:
    """Whether it has finished or failed; the slot stays the same, and each of its processes introduces itself."""
    found = []
    for run in (1, 2):
        ended = _train(driver, tmp_path, run, _leaves_everything)
        assert isinstance(ended.end, RunFinished)
        pid, *state = deserialize(ended.payload)
        assert driver.awaits(Hello).pid != pid if run == 1 else True
        found.append((pid, state))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
    assert isinstance(_train(driver, tmp_path, 3, _fails).end, RunFailed)
    pid, *state = deserialize(_train(driver, tmp_path, 4, _leaves_everything).payload)
    assert pid not in {one for one, _ in found}
    assert state == found[0][1]


def test_commands_that_arrive_between_two_processes_are_carried_out(driver: _Driver, tmp_path: Path) -> None:
    for run in range(1, 21):
        options = SessionOptions("t", tmp_path / str(run))
        payload = pack_training(_leaves_everything, (), {})
        driver.send(PauseRun("t", run - 1))  # it is over
        driver.send(StartRun("t", run, options, payload, Place(run, 0, 1), 60.0))
        time.sleep(run % 5 * 0.03)
    assert [driver.awaits(RunEnded).run for _ in range(20)] == list(range(1, 21))


def _pid() -> int:
    return os.getpid()


def _fail() -> None:
    raise ValueError("of the app")


def test_ordinary_tasks_share_a_process_until_one_fails_or_a_training_comes(driver: _Driver, tmp_path: Path) -> None:
    def run(number: int, task: Callable[[], Any]) -> TaskEnded:
        driver.send(StartTask(number, pack_apply_message(task, (), {})))
        ended = driver.awaits(TaskEnded)
        assert isinstance(ended, TaskEnded)
        return ended

    first, second = (deserialize(run(number, _pid).payload) for number in (1, 2))
    assert first == second
    assert run(3, _fail).failed
    third = deserialize(run(4, _pid).payload)
    assert third != first
    trained = deserialize(_train(driver, tmp_path, 1, _leaves_everything).payload)[0]
    assert trained not in (first, third)
    assert deserialize(run(5, _pid).payload) not in (first, third, trained)


def test_a_process_that_stops_itself_is_ended_and_its_place_with_it() -> None:
    """It obeys no command: the worker place was lost until the end of its block, for every job."""
    place = _place(
        """
import freetrain_parsl.executor.slot.place as module
module._LOOK, module._LONGEST_STOP = 0.05, 5

def work(before):
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    )
    place.communicate(timeout=60)
    assert place.returncode == 128 + signal.SIGKILL


def test_a_process_that_is_stopped_for_a_moment_goes_on() -> None:
    place = _place(
        """
import freetrain_parsl.executor.slot.place as module
module._LOOK, module._LONGEST_STOP = 0.05, 1000

def work(before):
    waker = os.fork()
    if waker == 0:
        while module._state(os.getppid()) != "T":
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    tell("continued")
"""
    )
    output, _ = place.communicate(timeout=60)
    assert json.loads(output) == ["continued"]
    assert place.returncode == 0


_WATCHED = """
import ctypes
import freetrain_parsl.executor.slot.place as module
from freetrain_parsl.executor.slot.place import Pulse
module._LOOK = 0.05
pulse = Pulse(0.0)
pulse.patience = 1.0
occupy, watched = (lambda work: watched(work, pulse)), occupy

def beat():
    while True:
        pulse.beat()
        time.sleep(0.02)
"""


def test_a_process_whose_heartbeats_stop_is_ended_and_its_place_with_it() -> None:
    """A long C call keeps Python's lock: it does not read the driver's command to end."""
    place = _place(
        _WATCHED
        + """
def work(before):
    threading.Thread(target=beat, daemon=True).start()
    time.sleep(2.0)
    tell("alive")
    ctypes.PyDLL(None).sleep(100)
"""
    )
    output, errors = place.communicate(timeout=60)
    assert json.loads(output) == ["alive"], errors
    assert place.returncode == 128 + signal.SIGKILL


def test_a_process_that_is_still_starting_is_not_watched() -> None:
    """It may need longer to reach the driver, and says so if it fails."""
    told, code, errors = _outcome(
        _WATCHED
        + """
def work(before):
    if before is None:
        pulse.beat()
        return "next"
    time.sleep(2.5)
    tell("started")
"""
    )
    assert told == [["started"]], errors
    assert code == 0


def test_what_a_process_leaves_in_shared_memory_is_removed_when_it_has_ended() -> None:
    """Not when the pool ends, whose resource tracker it would use else."""
    told, code, errors = _outcome("""
from multiprocessing import resource_tracker, shared_memory
resource_tracker.ensure_running()  # as in a worker pool
KEPT = []

def work(before):
    if before is None:
        KEPT.append(shared_memory.SharedMemory(create=True, size=64))
        return "/dev/shm/" + KEPT[0].name.lstrip("/")
    end = time.monotonic() + 10
    while os.path.exists(before) and time.monotonic() < end:
        time.sleep(0.05)
    tell(os.path.exists(before))
    if os.path.exists(before):
        os.unlink(before)
""")
    assert told == [[False]], errors
    assert code == 0


def test_what_a_process_leaves_ends_with_it_and_no_neighbour_does(tmp_path: Path) -> None:
    """Also a daemon that has left its session; another place, with what its process has started, goes on."""
    daemon = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
    work = f"""
def work(left):
    import subprocess
    read, write = os.pipe()
    if os.fork() == 0:  # an orphan, which ignores the friendly signals
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", {daemon!r}], stdout=write)
        os._exit(0)
    tell(os.getpid(), int(os.read(read, 100)))
    time.sleep(60)
"""
    with _place(work) as crashing, _place(work) as neighbour:
        assert crashing.stdout is not None
        assert neighbour.stdout is not None
        slot, leaked = json.loads(crashing.stdout.readline())
        others = json.loads(neighbour.stdout.readline())
        os.kill(slot, signal.SIGKILL)
        assert crashing.wait(20) == 128 + signal.SIGKILL
        assert process_info(leaked) is None
        assert all((info := process_info(pid)) is not None and info.alive for pid in others)
        assert neighbour.poll() is None
        os.kill(others[0], signal.SIGKILL)
