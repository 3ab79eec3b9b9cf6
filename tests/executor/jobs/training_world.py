"""A model of the slots' processes, connected to a real training manager by messages that take any time.

The processes prepare, step together, change groups together at a boundary, detect failed peers at any later time, hang,
and die. Messages between a slot and the driver arrive in order. What the driver sends is checked when it is sent.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsl.serialize import serialize

from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
from freetrain_parsl.executor.jobs.manager import JobManager
from freetrain_parsl.executor.jobs.request import Limits, SharedSettings, Training, TrainingRequest
from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.protocol import messages as msg
from freetrain_parsl.protocol.messages import ChangeBatch, ChangeGroup, PauseRun, Place, RunEnded, RunReport, StartRun
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import (
    BatchReport,
    GroupFailed,
    Joined,
    PauseReason,
    PeersFailed,
    Progress,
    Ready,
    RunFailed,
    RunFinished,
    RunPaused,
    StorageFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.jobs.training.machine import TrainingMachine

UNITS = range(4)
LIMITS = Limits(peer_timeout=5.0, meeting_timeout=20.0, silence_timeout=20.0, max_restarts=3)
LEAST_NODES = {"a": 1, "b": 2}
LAST_STEPS = 5  # that a training job still runs before it ends


def progress_at(step: int) -> Progress:
    """Return the report of a training job whose steps take as long with any batch, so that it should be larger."""
    batch = BatchReport(32, 32, 16, 1024, square=1.0, variance=5000.0)
    return Progress(step=step, samples=32 * step, slot_seconds=0.01 * step, batch=batch)


class UserError(Exception):
    """An error of a training job's own code."""


@dataclass
class Process:
    """The model of a slot's process.

    ``place`` is "preparing" (before its loop), "newcomer" (ready, waits), "group" (trains in `group`), "meeting"
    (waits for the others of `group`) or "stranded" (its group failed); idle without a `run`.
    """

    slot: str
    node: str
    unit: int
    run: StartRun | None = None
    place: str = ""
    group: int = 0
    ranks: int = 0
    rank: int = 0
    step: int | None = None  # ``None``: without the state
    command: ChangeGroup | None = None
    pauses: PauseReason | None = None
    hangs: bool = False
    alone_since: float | None = None
    inbox: deque[msg.ToSlot] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)


class _NoJournal:
    """A journal that discards all entries."""

    def write(self, *_: object) -> None:
        """Discard a record."""

    keep_progress = commit = write


class StorageModel:
    """A storage watch without threads; all attempts fail until `works`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.works = True
        self._clock = clock
        self._waiting: dict[str, float] = {}

    def hold(self, training: str) -> float:
        self._waiting[training] = self._clock() + 5.0
        return self._waiting[training]

    def drop(self, training: str) -> None:
        self._waiting.pop(training, None)

    def turn(self) -> tuple[list[str], dict[str, tuple[str, float]]]:
        due = [name for name, until in self._waiting.items() if self._clock() >= until]
        if not self.works:
            return [], {name: ("full", self.hold(name)) for name in due}
        for name in due:
            del self._waiting[name]
        return due, {}


class World:
    """Training jobs `a` and `b` on four units, their processes, and the messages in transit.

    The units are whole nodes, or slots of one or two nodes that the training jobs share.
    """

    slots_per_node = 1

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = itertools.count()
        self.ending = False
        self.last: dict[str, int] = {}
        """Training -> its last step, once it is known."""
        self.processes: dict[str, Process] = {}
        self.checkpoints = dict.fromkeys(LEAST_NODES, 0)
        self.counted = dict.fromkeys(LEAST_NODES, 0)
        """Training -> number of its steps that count: each is made once."""
        self.heard: dict[str, list[Any]] = {}
        self.dead: list[Process] = []  # whose death the driver has not detected yet
        self.cut: set[frozenset[int]] = set()  # pairs of units that cannot reach each other
        self.places: dict[int, dict[int, str]] = {}
        """Group -> rank -> slot, as commanded."""
        self.runs: dict[str, int] = {}
        self.asked: dict[str, float] = {}
        """Slot -> time of the first command to which it has not responded."""
        self.excluded: set[str] = set()
        self.planned: set[str] = set()
        """Training jobs that the planner knows."""
        self.faults: Counter[str] = Counter()
        """Training -> faults since its furthest step."""
        self.furthest: Counter[str] = Counter()
        self.machines: dict[str, TrainingMachine] = {}
        self.registry = SlotRegistry(self.slots_per_node, share_nodes=True)
        self.manager = JobManager(
            SharedSettings(SessionOptions("world", Path("/nowhere")), costs=CostsInSeconds(1, 1, 1), limits=LIMITS),
            registry=self.registry,
            send=self._send,
            kill=self._kill,
            set_aside=self._set_aside,
            inform=self._inform,
            journal=_NoJournal(),  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        self.storage = StorageModel(lambda: self.now)
        self.manager._storage = self.storage  # type: ignore[assignment]
        self.restarts = 0
        self.batch_commands = 0
        self.futures: dict[str, Future[Any]] = {}
        for name, nodes in LEAST_NODES.items():
            self.futures[name] = Future()
            request = TrainingRequest(SessionOptions(name), nodes, 4, ScalingCurve.default())
            self.manager.submit(Training(request, b"", self.futures[name]))
            self.machines[name] = self.manager._by_name[name].job
        for unit in UNITS:
            self._join(unit)

    # The driver's side of the wire.

    def _join(self, unit: int) -> None:
        node, lane = divmod(unit, self.slots_per_node)
        name = f"n{node}"
        slot = Slot(f"s{unit}-{next(self.names)}", "token", name, "block", heard=self.now)
        slot.lane = self.registry.free_lane(name, lane)
        assert slot.place == self._place(unit)
        self.registry.slots[slot.name] = slot
        assert self.registry.completes(slot)
        self.processes[slot.name] = Process(slot.name, name, unit)

    def _place(self, unit: int) -> str:
        node, lane = divmod(unit, self.slots_per_node)
        return f"n{node}" if self.slots_per_node == 1 else f"n{node}/{lane}"

    def _send(self, slot: str, message: msg.ToSlot) -> None:
        assert slot in self.registry.slots, "no command to a slot that is gone"
        if isinstance(message, StartRun):
            assert not self.registry.slots[slot].leaving, "no start on a node that is reclaimed"
            self.runs[slot] = message.run
            self.asked.pop(slot, None)
        elif isinstance(message, (ChangeGroup, PauseRun)):
            assert message.run == self.runs[slot], "no command to an earlier run"
            self.asked.setdefault(slot, self.now)
        elif isinstance(message, ChangeBatch):
            assert message.run == self.runs[slot], "no command to an earlier run"
            self.batch_commands += 1
        if isinstance(message, (StartRun, ChangeGroup)) and message.place is not None:
            self._note_place(slot, message.place)
        if slot in self.processes:
            self.processes[slot].inbox.append(message)

    def _note_place(self, slot: str, place: Place) -> None:
        members = self.places.setdefault(place.generation, {})
        assert place.rank not in members, "one slot for each rank"
        assert slot not in members.values(), "one rank for each slot"
        assert slot not in self.excluded, "no group with a slot that others cannot reach"
        members[place.rank] = slot

    def _set_aside(self, slot: Slot, reason: str) -> None:
        self.cut.clear()
        self.excluded.add(slot.name)

    def _inform(self, event: planner.Event) -> None:
        if isinstance(event, planner.TrainerSubmitted):
            assert event.trainer.name not in self.planned
            self.planned.add(event.trainer.name)
        elif isinstance(event, (planner.TrainerFinished, planner.TrainerFailed, planner.TrainerWithheld)):
            self.planned.discard(event.trainer)

    def _kill(self, slot: Slot, reason: str) -> None:
        asked = self.asked.get(slot.name)
        assert asked is not None, "killed, though it was to do nothing"
        assert self.now - asked >= LIMITS.peer_timeout, "killed before it could respond"
        self._vanish(slot.name)
        self._lose(slot.name, crash=True)

    def _vanish(self, name: str) -> None:
        self.processes.pop(name, None)
        self.dead = [one for one in self.dead if one.slot != name]

    def _lose(self, name: str, *, crash: bool) -> None:
        slot = self.registry.slots.pop(name)
        self.registry.incomplete(slot)
        self.faults[str(slot.busy)] += crash
        self.manager.on_lost(slot, "gone", crash=crash)
        self.excluded.discard(name)
        self._join(int(name[1]))

    def _assign(self, layout: str) -> None:
        for name, digits in zip(LEAST_NODES, layout.split("/"), strict=True):
            self.manager.assign(name, frozenset(self._place(int(digit)) for digit in digits))

    def _pass_time(self, seconds: float) -> None:
        """Let time pass, with heartbeats of all live processes."""
        self.now += seconds
        for name, process in self.processes.items():
            slot = self.registry.slots[name]
            slot.heard = self.now
            self.manager.on_heartbeat(slot, self._waited(process))
        self.manager.advance()

    def _round(self) -> None:
        """Deliver all messages in transit, and let all processes and the driver act."""
        for process in list(self.processes.values()):
            while process.inbox:
                self._receive(process)
        for process in list(self.processes.values()):
            if process.slot in self.processes:
                self._act(process)
        for process in list(self.processes.values()):
            while process.outbox and process.slot in self.registry.slots:
                self._report(process)
        self._pass_time(0.5)

    def _waited(self, process: Process) -> float:
        """Return how long a process has only waited for its peers."""
        waits = process.place in ("group", "meeting") and not self._works(process)
        if process.run is None or not waits:
            process.alone_since = None
            return 0.0
        if process.alone_since is None:
            process.alone_since = self.now
        return self.now - process.alone_since

    # Actions of processes.

    def _receive(self, process: Process) -> None:
        message = process.inbox.popleft()
        if isinstance(message, (StartRun, ChangeGroup)) and (place := message.place) is not None:
            assert sorted(self.places[place.generation]) == list(range(place.size)), "ranks 0 to size - 1"
        if isinstance(message, StartRun):
            assert process.run is None, "one run at a time"
            process.run, process.command, process.pauses = message, None, None
            process.place, process.step, process.group = "preparing", None, 0
            if (place := message.place) is not None:
                process.group, process.ranks, process.rank = place.generation, place.size, place.rank
                process.step = self.checkpoints[message.training]
        elif process.run is None:
            return
        elif isinstance(message, ChangeGroup) and message.run == process.run.run:
            process.command = message
        elif isinstance(message, PauseRun) and message.run == process.run.run:
            process.pauses = process.pauses or PauseReason.REQUESTED
        elif (
            isinstance(message, msg.StoreReply)
            and not message.ok
            and (process.place, message.group) == ("meeting", self._store(process))
        ):
            self._strand(process, "its store is closed")

    def _report(self, process: Process, *, repeated: bool = False) -> None:
        message = process.outbox.popleft()
        for _ in range(1 + repeated):
            self._hear(process.slot, message)
        if isinstance(message, (RunReport, RunEnded)):
            self.heard.setdefault(process.slot, []).append(message)

    def _hear(self, name: str, message: Any, *, again: bool = False) -> None:
        """Deliver a message; one that is delivered again answers no command that was sent since."""
        slot = self.registry.slots[name]
        if isinstance(message, msg.StoreRequest):
            self.manager.on_store_request(slot, message)
            return
        if isinstance(message, RunEnded):
            self.manager.on_message(slot, message)
            if slot.busy is None:
                self.excluded.discard(name)
            return
        training, report = message.training, message.report
        if isinstance(report, GroupFailed):
            self.faults[training] += 1
        if isinstance(report, Joined) and report.generation == max(self._groups_of(name)) and not again:
            self.asked.pop(name, None)
        self.manager.on_message(slot, message)
        unresolved = self.dead or any(one.hangs for one in self.processes.values())
        if self.machines[training].progress is report and report.step > self.furthest[training]:
            self.furthest[training] = report.step
            self.faults[training] = self.faults[training] if unresolved else 0

    def _groups_of(self, slot: str) -> list[int]:
        return [group for group, members in self.places.items() if slot in members.values()]

    def _tell(self, process: Process, report: Any) -> None:
        assert process.run is not None
        process.outbox.append(RunReport(process.run.training, process.run.run, report))

    def _end(self, process: Process, end: Any, payload: bytes = b"") -> None:
        assert process.run is not None
        process.outbox.append(RunEnded(process.run.training, process.run.run, end, payload))
        process.run, process.place, process.step, process.command = None, "", None, None

    def _store(self, process: Process) -> str:
        assert process.run is not None
        return f"{process.run.training}/{process.group}"

    def _peers(self, process: Process) -> list[Process]:
        """Return all live processes in the group, or at the rendezvous, of this one."""
        return [
            one
            for one in self.processes.values()
            if one.run and (one.group, one.place) == (process.group, process.place)
        ]

    def _works(self, process: Process) -> bool:
        """Return whether all members of its group are alive and take part."""
        peers = self._peers(process)
        return len(peers) == process.ranks and not any(one.hangs for one in peers)

    def _strand(self, process: Process, reason: str, unreachable: tuple[tuple[int, int], ...] = ()) -> None:
        process.place = "stranded"
        self._tell(process, GroupFailed(process.group, reason, unreachable))

    def _act(self, process: Process) -> None:
        if process.run is None or process.hangs:
            return
        command = process.command
        if process.place == "preparing":
            self._prepare(process)
        elif command is not None and command.abort and process.place != "newcomer":
            self._obey(process, command)
        elif process.place == "newcomer":
            if process.pauses:
                self._end(process, PeersFailed(process.group, "dismissed"))
            elif command is not None:
                self._obey(process, command)
        elif process.place == "meeting":
            self._meet(process)
        elif process.place == "group":
            self._boundary(process)
        elif process.pauses and process.step is None:
            self._end(process, PeersFailed(process.group, "dismissed"))

    def _prepare(self, process: Process) -> None:
        assert process.run is not None
        if process.run.place is None:
            process.place = "newcomer"
            self._tell(process, Ready())
        else:
            self._go_to_meeting(process)

    def _obey(self, process: Process, command: ChangeGroup) -> None:
        process.command = None
        if command.place is None:
            self._end(process, RunPaused(PauseReason.LEFT))
            return
        process.group, process.ranks, process.rank = command.generation, command.place.size, command.place.rank
        self._go_to_meeting(process)

    def _go_to_meeting(self, process: Process) -> None:
        process.place, process.alone_since = "meeting", None
        process.outbox.append(msg.StoreRequest(self._store(process), 1, "add", ("arrived",), 1.0, amount=1))

    def _meet(self, process: Process) -> None:
        peers = self._peers(process)
        if not self._works(process):
            late = process.alone_since is not None and self.now - process.alone_since > LIMITS.meeting_timeout
            if late or not self._may_come(process):
                self._strand(process, "did not meet")
            return
        assert process.run is not None
        pairs = itertools.combinations(peers, 2)
        if broken := tuple((a.rank, b.rank) for a, b in pairs if {a.unit, b.unit} in self.cut):
            for one in peers:
                self._strand(one, "cannot connect", broken)
            return
        name = process.run.training
        step = max(one.step for one in peers if one.step is not None)
        others = [one for one in self.processes.values() if one.run and one.run.training == name and not one.hangs]
        assert all(one.step is None or one.step <= step for one in others), "the newest state is used"
        self.counted[name] = step
        for one in peers:
            assert one.run is not None
            one.place, one.step = "group", step
            if one.run.place is not None and one.run.place.generation == one.group:
                if one.rank == 0:
                    self._tell(one, progress_at(step))
            else:
                self._tell(one, Joined(one.group, 0.1, 0.0))

    def _may_come(self, process: Process) -> bool:
        """Return whether all processes missing at a rendezvous are alive and have, or will get, the command."""
        coming = 0
        for one in self.processes.values():
            commands = [one.command, *one.inbox]
            at = one.run is not None and one.group == process.group and one.place in ("meeting", "preparing")
            called = any(
                isinstance(c, (ChangeGroup, StartRun)) and c.place is not None and c.place.generation == process.group
                for c in commands
            )
            coming += at or called
        return coming >= process.ranks

    def _boundary(self, process: Process) -> None:
        """Decide together with the others at the same boundary."""
        peers = self._peers(process)
        assert process.run is not None
        name = process.run.training
        if len(peers) < process.ranks:
            self._strand(process, "connection closed")
            return
        if not self._works(process):
            return
        assert len({one.step for one in peers}) == 1, "the members of a group are at the same step"
        commands = [one.command for one in peers]
        if all(command is not None for command in commands):
            for one, command in zip(peers, commands, strict=True):
                assert command is not None
                self._obey(one, command)
            return
        step = process.step
        assert step is not None
        assert step == self.counted[name], "no sample is counted twice"
        if reasons := {one.pauses for one in peers if one.pauses}:
            reason = PauseReason.CLOSING if PauseReason.CLOSING in reasons else PauseReason.REQUESTED
            self.checkpoints[name] = max(self.checkpoints[name], step)
            for one in peers:
                self._end(one, RunPaused(reason, progress_at(step)))
            return
        if self.ending and step >= self.last.setdefault(name, step + LAST_STEPS):
            self.checkpoints[name] = step
            for one in peers:
                payload = serialize(step) if one.rank == 0 else serialize("of another rank")
                self._end(one, RunFinished(progress_at(step)), payload)
            return
        self.counted[name] += 1
        for one in peers:
            one.step = step + 1
            if one.rank == 0:
                self._tell(one, progress_at(step + 1))

    def _fail_to_save(self, process: Process) -> None:
        self._end(process, StorageFailed("disk full", "full"))

    def _raise(self, process: Process) -> None:
        self._end(process, RunFailed(), serialize(UserError("broken")))
