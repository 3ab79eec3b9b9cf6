"""Bare episodes: real driver, job submitter, channel and slots, forked from one process that has imported torch.

There is no HTEX: the parent process is the batch system, and starts a slot on each node of a job. An episode takes
only seconds, because it imports nothing.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed
import zmq
from parsl import curvezmq

from freetrain_parsl.executor.slot.channel import LONGEST_CONNECT
from freetrain_parsl.executor.slot.node_watch import memory_of
from freetrain_parsl.executor.slot.pilot import PLACE
from freetrain_parsl.executor.slot.slot import SlotSettings, run_slot
from freetrain_parsl.places import slot_place
from freetrain_parsl.testing.faults import kill
from tests.support.chaos.bare_driver import drive
from tests.support.chaos.claims import HELD_BY, claims_in, violations_in
from tests.support.chaos.damage import damage_newest
from tests.support.chaos.nonsense import NONSENSE
from tests.support.chaos.scene import FILL, EpisodeSettings, Scene
from tests.support.chaos.small_node import low_memory_file, share_small_node
from tests.support.chaos.verification import problems_of, unexplained_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess
    from pathlib import Path

    from tests.support.chaos.bare_plan import BarePlan

__all__ = ["BARE_FAULTS", "SHARED_FAULTS", "BareScene", "warm_up"]

BARE_FAULTS: Mapping[str, float] = MappingProxyType(
    {
        "kill": 5,  # one or several slots
        "stop": 3,  # a slot, for a while
        "stop_driver": 1.5,
        "kill_driver": 1.5,  # and start another one later
        "preempt": 2,  # a block, and keep its nodes for a while
        "damage": 1.5,  # the newest checkpoint of a training job that has others, and kill all slots
        "clock": 2,  # a step of the driver's wall clock
        "vanish": 1,  # a peer sends a probe, a hello or nonsense, and disconnects
    }
)
"""Faults of bare episodes with relative frequencies; ``fill`` (a full disk) requires a small disk."""

SHARED_FAULTS: Mapping[str, float] = MappingProxyType(
    {
        **BARE_FAULTS,
        "kill_process": 4,  # that of a training job, not the slot's place
        "kill_node": 2,  # all slots of a node
        "low_memory": 4,  # the node on which the leaky training job runs
    }
)
"""Those of bare episodes in which training jobs share nodes."""

_CONTEXT = multiprocessing.get_context("fork")
_CLOCK_STEPS = (-3600.0, -30.0, -5.0, 3.0, 20.0, 60.0)
_GRACE = 4.0
_TOO_MUCH = "of host memory, its share was"  # the reason for which a job that takes its neighbours' memory ends
_DUMP = signal.SIGUSR2  # makes a process write its stacks


@dataclass
class _Job:
    block: str
    nodes: tuple[str, ...]
    started: float
    ends: float
    ending: str = ""  # the final state, once it has been asked to end


@dataclass
class _SlotProcess:
    process: ForkProcess
    node: str
    lane: int
    job: str
    token: str
    driver: int  # process id of its driver
    killed_at: float = float("inf")


def warm_up() -> None:
    """Import what the forked processes need, and set this process up for forking: no threads."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import freetrain_parsl.training.fragment  # noqa: F401 - slots import it first

    torch.optim.Adam([torch.zeros(1)], lr=0.0)  # the first optimizer of a process spends a second on imports
    import highspy  # noqa: F401 - the driver's solver

    gc.collect()
    gc.freeze()  # otherwise each collection in a forked process copies the memory of all imports


class BareScene(Scene):
    """The batch system and the nodes.

    Parameters
    ----------
    settings
        Of the episode.
    plan
        Settings shared by the processes.
    """

    def __init__(self, settings: EpisodeSettings, plan: BarePlan) -> None:
        super().__init__(settings, plan.checkpoints, first=3.0, pause=1.5)
        self.plan = plan
        self._driver: ForkProcess | None = None
        self._link: Connection | None = None
        self._channel: tuple[int, str] | None = None  # the driver's port and certificates
        self._over = False
        self._jobs: dict[str, _Job] = {}
        self._tokens: list[str] = []
        self._slots: dict[int, _SlotProcess] = {}
        self._sessions: set[int] = set()  # of all slots that there were
        self._low: dict[Path, float] = {}  # file that makes a node short of memory -> until when
        self._hit: set[str] = set()  # the units that a fault has hit
        plan.claims.mkdir()
        self._strikes: Mapping[str, Callable[[], str | None]] = {
            "kill": self._kill,
            "kill_process": self._kill_process,
            "kill_node": self._kill_node,
            "low_memory": self._low_memory,
            "stop": self._stop,
            "stop_driver": self._stop_driver,
            "kill_driver": self._kill_driver,
            "preempt": self._preempt,
            "damage": self._damage,
            "clock": self._step_clock,
            "vanish": self._vanish,
            FILL: self.fill,
        }

    # Stages of an episode.

    def live(self) -> None:
        """Run the training jobs to their ends under faults."""
        self._start_driver()
        while not self._over:
            self._turn()
            if self._driver is None and not self._over:
                self.problems.append("the driver's process ended unexpectedly")
                return
            if self.hangs:
                unfinished = [one.name for one in self.plan.subjects if not self.plan.outcome_of(one.name).exists()]
                self.problems.append(f"hangs: after {self.settings.limit:g} s {', '.join(unfinished)} had not ended")
                return
            self.strike_when_due(ready=bool(self._slots))

    def end(self) -> None:
        """End all processes; those that have to be killed are a problem."""
        self.undo()
        if self.problems and self._driver is not None:
            self._driver.kill()
        # A slot of a driver that was killed may still try to reach it.
        patience = time.monotonic() + max(self.plan.heartbeat_timeout, LONGEST_CONNECT) + 12.0
        while time.monotonic() < patience and (self._slots or self._driver):
            self._reap()
            time.sleep(0.05)
        left = list(self._slots) + ([self._driver.pid] if self._driver is not None else [])
        if left and not self.problems:
            self.problems.append(f"left behind after the end: processes {left}; {self._stacks_of(left)}")
        for process in [slot.process for slot in self._slots.values()] + [self._driver]:
            if process is not None:
                process.kill()
                process.join()
        if not left and (orphans := _in_sessions(self._sessions)):
            self.problems.append(f"left behind after the end: children of slots {orphans}")
        if self._link is not None:
            self._link.close()

    def verify(self) -> None:
        """Check the results of the training jobs."""
        for subject in self.plan.subjects:
            outcome = self.plan.outcome_of(subject.name)
            if not outcome.exists():
                if not self.problems:
                    self.problems.append(f"{subject.name}: did not end")
            elif (error := json.loads(outcome.read_text(encoding="utf-8"))["error"]) is None:
                result = self.plan.result_of(subject.name)
                self.problems += problems_of(subject, result, self.plan.epochs, self.plan.samples)
            elif not (subject.leak and _TOO_MUCH in error and any(one.fault == "low_memory" for one in self.faults)):
                self.problems.append(f"{subject.name}: failed: {error}")
        self.problems += violations_in(self.plan.claims)
        for journal in self.plan.directory.glob("journal-*.sqlite"):
            self.problems += unexplained_failures(journal, self._hit)

    def finished(self) -> int:
        """Count the training jobs that ended without an error."""
        outcomes = [self.plan.outcome_of(subject.name) for subject in self.plan.subjects]
        return sum(json.loads(path.read_text(encoding="utf-8"))["error"] is None for path in outcomes if path.exists())

    # Processes.

    def _start_driver(self) -> None:
        ours, theirs = _CONTEXT.Pipe()
        self._channel, self._jobs, self._tokens = None, {}, []
        self._driver = _CONTEXT.Process(
            target=_in_child, args=(self.plan.directory / "driver.out", drive, self.plan, theirs)
        )
        self._driver.start()
        theirs.close()
        self._link = ours

    def _start_slot(self, node: str, lane: int, job: str, token: str) -> None:
        assert self._channel is not None
        assert self._driver is not None
        port, certificates = self._channel
        settings = SlotSettings(("127.0.0.1",), port, certificates, 1.0, self.plan.heartbeat_timeout, _GRACE)
        environment = {
            "PARSL_WORKER_BLOCK_ID": self._jobs[job].block,
            "FREETRAIN_CLUSTER_NODE": node,
            "PARSL_WORKER_RANK": str(lane),
            "PARSL_WORKER_COUNT": str(self.plan.slots_per_node),
            HELD_BY: job,
        }
        pool = self.plan.pool_of(job, node)
        pool.mkdir(exist_ok=True)
        out = self.plan.directory / "slots.out"
        process = _CONTEXT.Process(target=_in_child, args=(out, _slot, environment, settings, token, pool))
        process.start()
        assert process.pid is not None
        assert self._driver.pid is not None
        self._slots[process.pid] = _SlotProcess(process, node, lane, job, token, self._driver.pid)
        self._sessions.add(process.pid)

    def _turn(self) -> None:
        self._listen()
        self._reap()
        now = time.monotonic()
        self.resume_due()
        for slot in self._slots.values():
            if now > slot.killed_at:
                slot.process.kill()
        for low in [low for low, until in self._low.items() if now > until]:
            del self._low[low]
            low.unlink()
        if self._driver is None or self._channel is None:
            return
        for name, job in list(self._jobs.items()):
            here = {(slot.node, slot.lane) for slot in self._slots.values() if slot.job == name}
            if not job.ending and now > job.ends:
                self._end_job(name, "TIMED_OUT")
            if job.ending and not here:
                self._tell("job_ended", name, job.ending)
                del self._jobs[name]  # told once: a driver that is stopped does not read what fills the pipe
            elif not job.ending and now > job.started + 0.3:
                for place in product(job.nodes, range(self.plan.slots_per_node)):
                    if place not in here and self._tokens:
                        self._start_slot(*place, name, self._tokens.pop(0))

    def _listen(self) -> None:
        link = self._link
        try:
            while link is not None and link.poll(0.05):
                self._take(link.recv())
        except (EOFError, ConnectionError):
            self._link = None  # the driver has ended

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("listening", port, certificates):
                self._channel = (port, certificates)
            case ("job", job, block, nodes, seconds):
                now = time.monotonic()
                self._jobs[job] = _Job(block, nodes, now, now + seconds)
            case ("slot", token):
                self._tokens.append(token)
            case ("cancel", job):
                self._end_job(job, "CANCELLED")
            case ("broken", reason):
                self.problems.append(reason)
            case ("over",):
                self._over = True
            case _:
                raise ValueError(f"unknown message {message!r}")

    def _reap(self) -> None:
        if self._driver is not None and not self._driver.is_alive():
            self._listen()
            self._driver = None
        for pid, slot in list(self._slots.items()):
            if not slot.process.is_alive():
                del self._slots[pid]
                if self._driver is not None and slot.driver == self._driver.pid:
                    self._tell("slot_ended", slot.token)

    def _tell(self, *message: object) -> None:
        if self._link is not None:
            with suppress(OSError):  # the driver has ended; its last messages are still to be read
                self._link.send(message)

    def _stacks_of(self, pids: Sequence[int | None]) -> str:
        """Return the stacks of processes that should have ended."""
        sizes = {out: out.stat().st_size for out in self.plan.directory.glob("*.out")}
        for pid in {one for place in filter(None, pids) for one in (place, _working(place))}:
            with suppress(ProcessLookupError):
                os.kill(pid, _DUMP)
        time.sleep(1.0)
        return "".join(out.read_bytes()[size:].decode(errors="replace") for out, size in sizes.items())

    def _end_job(self, name: str, state: str) -> None:
        job = self._jobs.get(name)
        if job is None or job.ending:
            return
        job.ending = state
        for slot in self._slots.values():
            if slot.job == name:
                if state != "CANCELLED":
                    self._hits([slot])
                slot.process.terminate()
                slot.killed_at = time.monotonic() + _GRACE

    # Faults.

    def strike(self, fault: str) -> str | None:
        """Inject a fault; return what it hit, or None if there was no target."""
        return self._strikes[fault]()

    def _hits(self, slots: Iterable[_SlotProcess] | None = None) -> None:
        """Note which units a fault hits: the training jobs on others must not notice it; ``None``: all."""
        everywhere = product(self.plan.nodes, range(self.plan.slots_per_node))
        places = everywhere if slots is None else ((slot.node, slot.lane) for slot in slots)
        self._hit.update(self._place(*place) for place in places)

    def _place(self, node: str, lane: int) -> str:
        return node if self.plan.slots_per_node == 1 else slot_place(node, lane)

    def _kill(self) -> str | None:
        pids = sorted(self._slots)
        if not pids:
            return None
        most = min(len(pids), self.rng.choice([1, 1, 2, 4]))
        victims = self.rng.sample(pids, self.rng.randint(1, most))
        for pid in victims:
            self._hits([self._slots[pid]])
            kill(pid)
        return f"{len(victims)} of {len(pids)} slots"

    def _kill_process(self) -> str | None:
        claims = claims_in(self.plan.claims)
        if not claims:
            return None
        claim = self.rng.choice(claims)
        self._hit.add(self._place(claim.node, claim.lane))
        kill(claim.pid)
        return f"of {claim.training} on {claim.node}/{claim.lane}"

    def _kill_node(self) -> str | None:
        nodes = sorted({(slot.job, slot.node) for slot in self._slots.values()})
        if not nodes:
            return None
        node = self.rng.choice(nodes)
        slots = {pid: slot for pid, slot in self._slots.items() if (slot.job, slot.node) == node}
        self._hits(slots.values())
        for pid in slots:
            kill(pid)
        return f"{node[1]} with {len(slots)} slots"

    def _low_memory(self) -> str | None:
        leaky = {subject.name for subject in self.plan.subjects if subject.leak}
        claims = [claim for claim in claims_in(self.plan.claims) if claim.training in leaky]
        if not claims:
            return None
        claim = self.rng.choice(claims)
        low = low_memory_file(self.plan.pool_of(claim.held_by, claim.node))
        self._low[low] = time.monotonic() + self.rng.choice([1.5, 3, 6])
        low.touch()
        self._hit.add(self._place(claim.node, claim.lane))
        used = memory_of(claim.pid, exact=True) >> 20
        return f"on {claim.node}, where {claim.training} uses {used} MiB"

    def _stop(self) -> str | None:
        pids = sorted(pid for pid in map(_working, self._slots) if not self.is_stopped(pid))
        if not pids:
            return None
        pid, seconds = self.rng.choice(pids), self.rng.choice([0.5, 2, 4, 8, 11])
        self._hits(slot for place, slot in self._slots.items() if _working(place) == pid)
        self.stop_for(pid, seconds)
        return f"a slot for {seconds:g} s"

    def _stop_driver(self) -> str | None:
        if self._driver is None or self._driver.pid is None or self.is_stopped(self._driver.pid):
            return None
        seconds = self.rng.choice([1, 3, 5, 9])
        self._hits()
        self.stop_for(self._driver.pid, seconds)
        return f"for {seconds:g} s"

    def _kill_driver(self) -> str | None:
        if self._driver is None or self._link is None:  # it has closed its end: all training jobs have ended
            return None
        self._hits()
        self._driver.kill()
        self._driver.join()
        self._link.close()
        slots_live_on = self.rng.random() < 0.5
        for slot in [] if slots_live_on else self._slots.values():
            slot.process.kill()
        pause = self.rng.choice([0, 0.5, 2, 5])
        time.sleep(pause)
        self._start_driver()
        return f"{'slots live on' if slots_live_on else 'and all slots'}, another after {pause:g} s"

    def _preempt(self) -> str | None:
        running = sorted(name for name, job in self._jobs.items() if not job.ending)
        if not running:
            return None
        name, seconds = self.rng.choice(running), self.rng.choice([1, 3, 6])
        nodes = self._jobs[name].nodes
        self._tell("taken", nodes, seconds)
        self._end_job(name, "PREEMPTED")
        return f"{len(nodes)} nodes for {seconds:g} s"

    def _damage(self) -> str | None:
        detail = damage_newest(self.checkpoints, self.rng)
        if detail is not None:
            self._hits()
            for slot in self._slots.values():
                slot.process.kill()
        return detail

    def _step_clock(self) -> str:
        seconds = self.rng.choice(_CLOCK_STEPS)
        self._tell("clock", seconds)
        return f"{seconds:+g} s"

    def _vanish(self) -> str | None:
        if self._channel is None:
            return None
        port, certificates = self._channel
        name, frames = self.rng.choice(NONSENSE)
        context = curvezmq.ClientContext(certificates)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 300)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart(frames)
        socket.close()
        context.destroy()
        return name


def _in_child(out: Path, function: Callable[..., None], *arguments: object) -> None:
    """Run a function in its own session, with its output in a file."""
    os.setsid()
    descriptor = os.open(out, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    random.seed()
    faulthandler.register(_DUMP)
    function(*arguments)


def _working(pid: int) -> int:
    """Return the process in which a slot works at the moment; `pid` is that of its place, or of another process."""
    with suppress(psutil.Error):  # it has ended
        place = psutil.Process(pid)
        if place.name() == PLACE and (children := place.children()):
            return children[0].pid
    return pid


def _in_sessions(sessions: Collection[int]) -> list[int]:
    """Return the processes of these sessions that live."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):  # it has just ended
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _slot(environment: Mapping[str, str], settings: SlotSettings, token: str, pool: Path) -> None:
    os.environ.update(environment)
    share_small_node(pool)
    run_slot(settings, token)
