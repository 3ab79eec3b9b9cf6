"""Injected faults: they hit real processes, connections and files as intended, and end on time."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest

from freetrain_parsl.errors import UsageError
from freetrain_parsl.testing.faults import (
    Injector,
    corrupting,
    cut,
    kill,
    kill_all,
    partition,
    resume,
    slots_on_this_machine,
    slow,
    stop,
    stopped,
)
from tests.clock import Clock

ECHO = """
import socket, threading
listener = socket.create_server((HOST, 0), family=FAMILY, dualstack_ipv6=FAMILY == socket.AF_INET6)
print(listener.getsockname()[1], flush=True)
def serve(connection):
    while data := connection.recv(1):
        connection.sendall(data)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
# Prints the number of a server after each reply, and "-" and the number once the connection is broken.
PING = """
import os, socket, sys, threading, time
def say(line):
    os.write(1, line.encode())  # in one piece: print writes the end of a line apart
def ping(number, port):
    connection = socket.create_connection(("127.0.0.1", port))
    try:
        while True:
            connection.sendall(b"x")
            if not connection.recv(1):
                break
            say(f"{number}\\n")
            time.sleep(0.01)
    except OSError:
        pass
    say(f"-{number}\\n")
for number, port in enumerate(sys.argv[1:]):
    threading.Thread(target=ping, args=(number, int(port))).start()
"""
SPIN = "while True: pass"
SILENCE = 0.5


class Listener:
    """Output lines of a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, output) -> None:
        with suppress(ValueError):  # closed by the fixture
            for line in output:
                self._lines.put(line.strip())

    def hears(self, wanted: str, timeout: float = 10) -> bool:
        """Return whether it prints this line from now on, within the timeout."""
        while not self._lines.empty():
            self._lines.get()
        return self.said(wanted, timeout)

    def falls_silent(self, line: str, timeout: float = 10) -> bool:
        """Return whether it stops printing this line, for `SILENCE` seconds, within the timeout."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.hears(line, SILENCE):
                return True
        return False

    def said(self, wanted: str, timeout: float = 10) -> bool:
        """Return whether it prints this line, or has since the last check."""
        deadline = time.monotonic() + timeout
        with suppress(queue.Empty):
            while (left := deadline - time.monotonic()) > 0:
                if self._lines.get(timeout=left) == wanted:
                    return True
        return False


@pytest.fixture
def run():
    """Start Python processes from source; they are killed after the test."""
    started = []

    def start(source: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def two_connections(run):
    """Let a process communicate with two others over IPv4; the second of them listens on IPv6."""
    first = run(f"FAMILY, HOST = 2, '127.0.0.1'\n{ECHO}")
    second = run(f"FAMILY, HOST = 10, '::'\n{ECHO}")
    ports = [server.stdout.readline().strip() for server in (first, second)]
    ping = Listener(run(PING, *ports))
    assert ping.hears("0")
    assert ping.hears("1")
    return ping, first.pid, second.pid


# ── processes ─────────────────────────────────────────────────────────────────────────────────────


def test_killed_processes_have_no_last_words(run):
    """All end by SIGKILL; a process that has already ended is skipped."""
    processes = [run(SPIN) for _ in range(3)]
    kill(processes[0].pid)
    assert processes[0].wait() == -signal.SIGKILL
    kill_all(process.pid for process in processes)
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 3
    with pytest.raises(ProcessLookupError):
        kill(processes[0].pid)


def _status(pid: int) -> str:
    """Return the state of a process, once stable; a signal takes effect with a delay."""
    for _ in range(200):
        state = psutil.Process(pid).status()
        if state == psutil.STATUS_STOPPED:
            break
        time.sleep(0.005)
    return state


def test_stopped_process_hangs_until_it_is_resumed(two_connections):
    """Its peers receive neither data nor an error."""
    ping, first, _ = two_connections
    stop(first)
    assert _status(first) == psutil.STATUS_STOPPED
    assert ping.falls_silent("0")
    resume(first)
    assert ping.hears("0")
    with stopped(first):
        assert ping.falls_silent("0")
        assert ping.hears("1")
    assert ping.hears("0")


def test_process_may_end_while_it_is_stopped(run):
    """It is not an error then."""
    process = run(SPIN)
    with stopped(process.pid):
        process.kill()
        process.wait()
    with slow(process := run(SPIN).pid, 0.5):
        kill(process)
    assert _gone(process)


def _gone(pid: int) -> bool:
    return psutil.Process(pid).wait(10) is not None


def _cpu_share(pid: int, seconds: float) -> float:
    process, begun = psutil.Process(pid), time.monotonic()
    before = process.cpu_times().user
    time.sleep(seconds)
    return (process.cpu_times().user - before) / (time.monotonic() - begun)


def test_slowed_process_gets_its_share(run):
    """A process that would use a whole core uses a fifth of it, or less on a busy machine, and is free afterwards."""
    pid = run(SPIN).pid
    with slow(pid, 0.2):
        assert _cpu_share(pid, 1.0) < 0.5
        before = psutil.Process(pid).cpu_times().user
        while psutil.Process(pid).cpu_times().user == before:
            time.sleep(0.01)
    assert psutil.Process(pid).status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize("share", [0, 1, -0.5])
def test_share_of_a_slowed_process_is_a_part(share):
    """Shares of 0 and 1 are other faults."""
    with pytest.raises(UsageError, match="between 0 and 1"), slow(os.getpid(), share):
        pass


@pytest.mark.parametrize("pid", [0, 1, -1, -7])
def test_no_group_of_processes_is_hit_by_mistake(pid):
    """Ids that denote several processes, or the init process, are rejected."""
    for harm in (kill, stop, lambda pid: cut(pid, [])):
        with pytest.raises(UsageError, match="single process"):
            harm(pid)


# ── connections ───────────────────────────────────────────────────────────────────────────────────


def test_cut_connection_breaks_at_once(two_connections):
    """The process reads EOF; its other connections continue, and the peer lives."""
    ping, first, _ = two_connections
    begun = time.monotonic()
    assert cut(ping.pid, [first]) == 1
    assert ping.said("-0")
    assert time.monotonic() - begun < 5
    assert ping.hears("1")
    assert psutil.pid_exists(first)
    assert cut(ping.pid, [first]) == 0


def test_cut_works_from_either_side_and_through_ipv6(two_connections):
    """An IPv6 socket that carries IPv4 is the other end of an IPv4 socket."""
    ping, first, second = two_connections
    assert cut(second, [first, ping.pid, second]) == 1
    assert ping.said("-1")


def test_partitioned_processes_hear_nothing_and_no_error(two_connections):
    """Inside the block there is no traffic, after it the same connection continues; others are not affected."""
    ping, first, _ = two_connections
    with partition(ping.pid, [first]) as connections:
        assert connections == 1
        assert ping.falls_silent("0")
        assert ping.hears("1")
        assert not ping.said("-0", 0.1)
    assert ping.hears("0")


def test_peers_that_have_ended_have_no_connections(two_connections, run):
    """A dead peer is skipped, a dead victim is an error."""
    ping, *_ = two_connections
    dead = run(SPIN)
    dead.kill()
    dead.wait()
    assert cut(ping.pid, [dead.pid]) == 0
    with pytest.raises(ProcessLookupError):
        cut(dead.pid, [ping.pid])


def test_kernel_that_forbids_it_is_named():
    """Another user's process cannot be cut; root could, so root becomes nobody first."""
    source = textwrap.dedent(
        """
        import os
        from freetrain_parsl.errors import UsageError
        from freetrain_parsl.testing.faults import cut
        parent = os.getppid()
        if os.getuid() == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        else:
            parent = 2  # a thread of the kernel, or init's first child: not this user's
        try:
            cut(parent, [os.getpid()])
        except UsageError as error:
            print(error)
        """
    )
    output = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    assert "the kernel denies this process access" in output
    assert "ptrace_scope" in output
    assert output.count("\n") == 1


# ── the injector ──────────────────────────────────────────────────────────────────────────────────


class Lasting:
    """A fault that only records when it is active."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spans: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self.begun = self.clock()

    def __exit__(self, *_) -> None:
        self.spans.append((self.begun, self.clock()))


TARGETS = {"a/0": 11, "a/1": 12, "b/0": 13}
HARMLESS = {name: lambda strike: None for name in ("one", "two", "three")}


def sequence(seed: int, **options: object) -> list[tuple[object, ...]]:
    clock = Clock(100.0)
    injector = Injector(
        seed,
        lambda: TARGETS,
        **{"faults": HARMLESS, "every": timedelta(seconds=3), **options},
        clock=clock,
        sleep=clock.sleep,
    )
    return [(r.at, r.fault, r.victim, r.lasts) for r in injector.run(timedelta(seconds=300))]


def test_same_seed_strikes_the_same():
    """Times, faults, victims and durations follow from the seed, and differ with it."""
    assert sequence(1) == sequence(1)
    assert sequence(1) != sequence(2)
    assert 60 < len(sequence(1)) < 140, "about every 3 s in 300 s"
    assert {victim for _, _, victim, _ in sequence(1)} == set(TARGETS)
    assert {fault for _, fault, _, _ in sequence(1)} == set(HARMLESS)


def test_what_a_fault_draws_does_not_change_what_follows():
    """Each strike has its own generator."""
    greedy = {name: lambda strike: strike.rng.random() and None for name in HARMLESS}
    assert sequence(1, faults=greedy) == sequence(1)


def test_schedule_is_kept_to():
    """Faults by name, at fixed times; only the victims are drawn."""
    schedule = [(timedelta(seconds=5), "two"), (timedelta(seconds=7), "one")]
    assert [row[:2] for row in sequence(1, every=None, schedule=schedule)] == [(5.0, "two"), (7.0, "one")]


def test_lasting_faults_are_undone_in_time_or_at_the_end():
    """One by one at their ends, and the rest when the injector stops."""
    clock = Clock(100.0)
    faults = [Lasting(clock) for _ in range(3)]
    waiting = iter(faults)
    injector = Injector(
        0,
        lambda: TARGETS,
        faults={"hang": lambda strike: next(waiting)},
        schedule=[(timedelta(seconds=at), "hang") for at in (1, 2, 9)],
        lasting=timedelta(seconds=4),
        clock=clock,
        sleep=clock.sleep,
    )
    first, second, third = injector.run(timedelta(seconds=10))
    assert faults[0].spans == [(101.0, pytest.approx(101.0 + first.lasts))]
    assert faults[1].spans == [(102.0, pytest.approx(102.0 + second.lasts))]
    assert third.lasts > 1
    assert faults[2].spans == [(109.0, 110.0)]


def test_faults_are_undone_when_something_goes_wrong():
    """Also when the injector itself fails."""
    clock = Clock(100.0)
    lasting = Lasting(clock)
    faults = {"hang": lambda strike: lasting, "fail": lambda strike: 1 / 0}
    schedule = [(timedelta(seconds=1), "hang"), (timedelta(seconds=2), "fail")]
    injector = Injector(0, lambda: TARGETS, faults=faults, schedule=schedule, clock=clock, sleep=clock.sleep)
    with pytest.raises(ZeroDivisionError):
        injector.run()
    assert lasting.spans == [(101.0, 102.0)]


def test_strikes_that_miss_are_recorded(tmp_path):
    """No target, a process that has ended, a checkpoint that does not exist yet."""
    clock = Clock(100.0)
    nobody = Injector(0, dict, faults=HARMLESS, schedule=[(timedelta(0), "one")], clock=clock, sleep=clock.sleep)
    (record,) = nobody.run()
    assert (record.victim, record.outcome) == (None, "no process to hit")

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    schedule = [(timedelta(0), "kill"), (timedelta(0), "corrupt")]
    faults = {"kill": lambda strike: kill(strike.victim.pid), "corrupt": corrupting(tmp_path)}
    late = Injector(0, lambda: {"a/0": ended.pid}, faults=faults, schedule=schedule, clock=clock, sleep=clock.sleep)
    killed, corrupted = late.run()
    assert "No such process" in killed.outcome
    assert "no checkpoint" in corrupted.outcome


def test_a_node_dies_with_all_its_processes(run):
    """Only processes of the victim's node."""
    processes = {slot: run(SPIN) for slot in ("a/0", "a/1", "b/0")}
    injector = Injector(
        4,
        lambda: {slot: process.pid for slot, process in processes.items()},
        schedule=[(timedelta(0), "kill_node")],
    )
    (record,) = injector.run()
    node = record.victim.partition("/")[0]
    for slot, process in processes.items():
        if slot.startswith(node):
            assert process.wait(10) == -signal.SIGKILL
        else:
            assert process.poll() is None


def test_in_a_thread_it_ends_with_the_block(two_connections):
    """Active faults are then undone."""
    ping, first, _ = two_connections
    stop_it = {"stop": lambda strike: stopped(strike.victim.pid)}
    schedule = [(timedelta(0), "stop"), (timedelta(hours=1), "stop")]
    lasting = timedelta(hours=1)
    with Injector(0, lambda: {"a/0": first}, faults=stop_it, schedule=schedule, lasting=lasting) as injector:
        assert _status(first) == psutil.STATUS_STOPPED
        assert ping.falls_silent("0")
    assert ping.hears("0")
    assert [record.fault for record in injector.records] == ["stop"]


def test_failure_in_the_thread_comes_out_of_the_block():
    """An impossible fault is not ignored silently."""
    failed = threading.Event()

    def fail(strike) -> None:
        failed.set()
        raise UsageError("not here")

    with (
        pytest.raises(UsageError, match="not here"),
        Injector(0, lambda: TARGETS, faults={"fail": fail}, schedule=[(timedelta(0), "fail")]),
    ):
        assert failed.wait(10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either every or schedule"),
        ({"every": timedelta(1), "schedule": []}, "either every or schedule"),
        ({"every": timedelta(0)}, "every must be positive"),
        ({"every": timedelta(1), "faults": {}}, "at least one fault"),
        ({"schedule": [(timedelta(0), "kil")]}, "no fault 'kil' .did you mean 'kill'"),
    ],
)
def test_orders_that_make_no_sense_are_refused(options, message):
    """The error is one line."""
    with pytest.raises(UsageError, match=message):
        Injector(0, lambda: TARGETS, **options)


def test_slots_are_found_in_the_journal():
    """Live slots that have not failed, numbered on their nodes."""
    mine, ended = os.getpid(), subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def entry(kind: str, subject: str, node: str, pid: int | None = None):
        return SimpleNamespace(kind=kind, subject=subject, detail={"node": node, "pid": pid})

    slots = slots_on_this_machine(
        [
            entry("slot_joined", "s1", "n1", mine),
            entry("slot_joined", "s2", "n1", os.getppid()),
            entry("slot_joined", "s3", "n2", ended.pid),
            entry("node_joined", "n2", "n2"),
            entry("slot_joined", "s4", "n2", mine),
            entry("slot_lost", "s1", "n1"),
        ]
    )
    assert slots == {"n1/0": os.getppid(), "n2/0": mine}
