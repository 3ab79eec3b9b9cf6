"""The state machine of trainings under any order of events, tested against a model of the real processes.

The modelled processes prepare, step together, change groups together at a boundary, detect failed peers at any later
time, die, and receive messages late. Messages between a slot and the driver arrive in order, at any time.
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from parsl.serialize import serialize

from freetrain_parsl.errors import TrainingCancelled
from freetrain_parsl.executor.control.slot_registry import Slot, SlotRegistry
from freetrain_parsl.executor.control.training.states import Abandoning, Waiting
from freetrain_parsl.executor.control.training_manager import TrainingManager
from freetrain_parsl.executor.trainings import Limits, SharedSettings, Training, TrainingRequest
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.protocol.messages import ChangeGroup, PauseRun, RunEnded, RunReport, StartRun, ToSlot
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import (
    GroupFailed,
    Joined,
    PauseReason,
    PeersFailed,
    Progress,
    Ready,
    RunFinished,
    RunPaused,
)

if TYPE_CHECKING:
    from random import Random

    from freetrain_parsl.executor.control.training.machine import TrainingMachine

NODES = ("n0", "n1", "n2", "n3")
# Where the planner wants a and b; mostly a step from one to the next.
LAYOUTS = ("0/", "0/23", "01/23", "012/", "0123/", "1/23", "/0123", "/23", "01/", "02/13", "/")
LAST_STEPS = 5  # that a training still runs before it ends


@dataclass
class Process:
    """The model of a slot's process.

    ``place`` is "preparing" (before its loop), "newcomer" (ready, waits), "group" (trains in `group`), "meeting"
    (waits for the others of `group`) or "stranded" (its group failed); idle without a `run`.
    """

    slot: str
    node: str
    run: StartRun | None = None
    place: str = ""
    group: int = 0
    ranks: int = 0
    rank: int = 0
    step: int | None = None  # ``None``: without the state
    command: ChangeGroup | None = None
    pauses: PauseReason | None = None
    alone_since: float | None = None
    inbox: deque[ToSlot] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)


class _NoJournal:
    """A journal that discards all entries."""

    def write(self, *_: object) -> None:
        """Discard a record."""

    keep_progress = commit = write


class World(RuleBasedStateMachine):
    """Two trainings on four nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = itertools.count()
        self.ending = False
        self.last: dict[str, int] = {}
        """Training -> its last step, once it is known."""
        self.processes: dict[str, Process] = {}
        self.checkpoints: dict[str, int] = {}
        self.heard: dict[str, list[RunReport | RunEnded]] = {}
        self.dead: list[Process] = []  # whose death the driver has not detected yet
        self.registry = SlotRegistry(1)
        self.manager = TrainingManager(
            SharedSettings(
                SessionOptions("world", Path("/nowhere")),
                costs=CostsInSeconds(1, 1, 1),
                limits=Limits(5.0, 20.0, max_restarts=10**6),
            ),
            registry=self.registry,
            send=self._send,
            kill=self._kill,
            inform=lambda _event: None,
            journal=_NoJournal(),  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        self._restarts = self.manager._failure_rate.failures
        self.futures: dict[str, Future[Any]] = {}
        for name, nodes in (("a", 1), ("b", 2)):
            self.futures[name] = Future()
            self.checkpoints[name] = 0
            request = TrainingRequest(SessionOptions(name), nodes, 4, ScalingCurve.default())
            self.manager.submit(Training(request, b"", self.futures[name]))
        for node in NODES:
            self._join(node)

    @initialize()
    def begin(self) -> None:
        """Both trainings train."""
        self.assign_and_settle("0/23")

    def teardown(self) -> None:
        """Without further faults, every training ends."""
        self._settle()

    # The driver's side of the wire.

    def _join(self, node: str) -> None:
        slot = Slot(f"{node}-{next(self.names)}", "token", node, "block", heard=self.now)
        self.registry.slots[slot.name] = slot
        self.registry.completes(slot)
        self.processes[slot.name] = Process(slot.name, node)

    def _send(self, slot: str, message: ToSlot) -> None:
        if slot in self.processes:
            self.processes[slot].inbox.append(message)

    def _kill(self, slot: Slot, reason: str) -> None:
        self.processes.pop(slot.name, None)
        self.dead = [one for one in self.dead if one.slot != slot.name]
        self._lose(slot.name, crash=True)

    def _lose(self, name: str, *, crash: bool) -> None:
        slot = self.registry.slots.pop(name)
        self.registry.incomplete(slot)
        self.manager.on_lost(slot, "gone", crash=crash)
        self._join(slot.node)

    # What may happen.

    @rule(layout=st.sampled_from(LAYOUTS))
    def assign(self, layout: str) -> None:
        """Assign the nodes as the planner does, never one node to two trainings."""
        for name, digits in zip("ab", layout.split("/"), strict=True):
            self.manager.assign(name, frozenset(f"n{digit}" for digit in digits))

    @rule(layout=st.sampled_from(LAYOUTS))
    def assign_and_settle(self, layout: str) -> None:
        """Assign, and let some time pass without events."""
        self.assign(layout)
        for _ in range(12):
            self._round()

    @rule(random=st.randoms(use_true_random=False), rounds=st.integers(1, 12), lazy=st.sampled_from([0.0, 0.2, 0.6]))
    def go_on(self, random: Random, rounds: int, lazy: float) -> None:
        """Run some rounds in which processes act and messages arrive in any order, some of them late."""
        for _ in range(rounds):
            for process in random.sample(list(self.processes.values()), len(self.processes)):
                if process.inbox and random.random() >= lazy:
                    self._receive(process)
                if random.random() >= lazy:
                    self._act(process)
                if process.outbox and process.slot in self.registry.slots and random.random() >= lazy:
                    self._report(process)
            self.wait(0.2)

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
        self.wait(0.5)

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass, with heartbeats of all live processes."""
        self.now += seconds
        for name, process in self.processes.items():
            slot = self.registry.slots[name]
            slot.heard = self.now
            self.manager.on_heartbeat(slot, self._waited(process))
        self.manager.advance()

    def _waited(self, process: Process) -> float:
        """Return how long one of a process's peers has been missing."""
        if process.run is None or process.place not in ("group", "meeting") or self._whole(process):
            process.alone_since = None
            return 0.0
        if process.alone_since is None:
            process.alone_since = self.now
        return self.now - process.alone_since

    @precondition(lambda self: any(process.inbox for process in self.processes.values()))
    @rule(data=st.data())
    def deliver_to_slot(self, data: st.DataObject) -> None:
        """Deliver a message from the driver."""
        slots = [name for name, process in self.processes.items() if process.inbox]
        self._receive(self.processes[data.draw(st.sampled_from(slots))])

    @precondition(lambda self: any(process.outbox for process in self.processes.values()))
    @rule(data=st.data(), repeated=st.booleans())
    def deliver_to_driver(self, data: st.DataObject, repeated: bool) -> None:
        """Deliver a message from a slot, perhaps twice."""
        slots = [name for name, process in self.processes.items() if process.outbox]
        self._report(self.processes[data.draw(st.sampled_from(slots))], repeated=repeated)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Let a process perform its next action."""
        if self.processes:
            self._act(self.processes[data.draw(st.sampled_from(sorted(self.processes)))])

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Kill a process; the driver learns it later."""
        name = data.draw(st.sampled_from(sorted(self.processes))) if self.processes else None
        if name is not None and name not in {one.slot for one in self.dead}:
            self.dead.append(self.processes.pop(name))

    @rule(
        layout=st.sampled_from(LAYOUTS),
        rounds=st.integers(1, 9),
        victims=st.sets(st.sampled_from(NODES), min_size=1, max_size=3),
        late=st.booleans(),
    )
    def die_during_a_change(self, layout: str, rounds: int, victims: set[str], late: bool) -> None:
        """Kill processes some time after the planner has decided otherwise."""
        self.assign(layout)
        for _ in range(rounds):
            self._round()
        for name in [name for name, process in self.processes.items() if process.node in victims]:
            self.dead.append(self.processes.pop(name))
        while self.dead and not late:
            self._lose(self.dead.pop(0).slot, crash=True)

    @precondition(lambda self: any(self.heard.values()))
    @rule(data=st.data())
    def hear_again(self, data: st.DataObject) -> None:
        """Deliver an old message a second time."""
        slots = sorted(slot for slot, messages in self.heard.items() if messages and slot in self.registry.slots)
        if slots:
            slot = data.draw(st.sampled_from(slots))
            self._hear(slot, data.draw(st.sampled_from(self.heard[slot])))

    @precondition(lambda self: self.dead)
    @rule(crash=st.booleans())
    def learn_of_death(self, crash: bool) -> None:
        """Let HTEX report a death."""
        self._lose(self.dead.pop(0).slot, crash=crash)

    @rule(data=st.data())
    def close_node(self, data: st.DataObject) -> None:
        """Reclaim a node, as the batch system does; its process stops at the next boundary, and the others with it."""
        name = data.draw(st.sampled_from(sorted(self.processes))) if self.processes else None
        if name is not None and self.processes[name].place == "group":
            self.processes[name].pauses = PauseReason.CLOSING

    @precondition(lambda self: not any(future.done() for future in self.futures.values()))
    @rule(cancel=st.integers(0, 30))
    def cancel(self, cancel: int) -> None:
        """Rarely, let the user cancel a training."""
        if cancel == 0:
            self.manager.cancel(self.futures["b"])

    # Actions of processes.

    def _receive(self, process: Process) -> None:
        match process.inbox.popleft():
            case StartRun() as start:
                assert process.run is None, "one run at a time"
                process.run, process.command, process.pauses = start, None, None
                process.place, process.step, process.group = "preparing", None, 0
                if (place := start.place) is not None:
                    process.group, process.ranks, process.rank = place.generation, place.size, place.rank
                    process.step = self.checkpoints[start.training]
            case ChangeGroup() as change:
                if process.run is not None and change.run == process.run.run:
                    process.command = change
            case PauseRun() as pause:
                if process.run is not None and pause.run == process.run.run:
                    process.pauses = process.pauses or PauseReason.REQUESTED

    def _report(self, process: Process, *, repeated: bool = False) -> None:
        message = process.outbox.popleft()
        self.heard.setdefault(process.slot, []).append(message)
        for _ in range(1 + repeated):
            self._hear(process.slot, message)

    def _hear(self, name: str, message: RunReport | RunEnded) -> None:
        slot = self.registry.slots[name]
        if isinstance(message, RunEnded):
            self.manager.on_run_ended(slot, message)
        else:
            self.manager.on_report(slot, message)

    def _tell(self, process: Process, report: Any) -> None:
        assert process.run is not None
        process.outbox.append(RunReport(process.run.training, process.run.run, report))

    def _end(self, process: Process, end: Any, payload: bytes = b"") -> None:
        assert process.run is not None
        process.outbox.append(RunEnded(process.run.training, process.run.run, end, payload))
        process.run, process.place, process.step, process.command = None, "", None, None

    def _peers(self, process: Process) -> list[Process]:
        """Return all live processes in the group, or at the rendezvous, of this one."""
        return [
            one
            for one in self.processes.values()
            if one.run and (one.group, one.place) == (process.group, process.place)
        ]

    def _whole(self, process: Process) -> bool:
        return len(self._peers(process)) == process.ranks

    def _act(self, process: Process) -> None:
        if process.run is None:
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
            process.place = "meeting"

    def _obey(self, process: Process, command: ChangeGroup) -> None:
        process.command = None
        if command.place is None:
            self._end(process, RunPaused(PauseReason.LEFT))
        else:
            process.place, process.group = "meeting", command.generation
            process.ranks, process.rank = command.place.size, command.place.rank

    def _meet(self, process: Process) -> None:
        peers = self._peers(process)
        if len(peers) < process.ranks:
            if not self._may_come(process):
                process.place = "stranded"
                self._tell(process, GroupFailed(process.group, "did not meet"))
            return
        step = max(one.step for one in peers if one.step is not None)
        for one in peers:
            assert one.run is not None
            one.place, one.step = "group", step
            if one.run.place is not None and one.run.place.generation == one.group:
                if one.rank == 0:
                    self._tell(one, Progress(step=step, samples=step))
            else:
                self._tell(one, Joined(one.group, 0.1, 0.0))

    def _may_come(self, process: Process) -> bool:
        """Return whether all processes missing at a rendezvous are alive and have, or will get, the command."""
        assert process.run is not None
        coming = 0
        for one in self.processes.values():
            commands = [one.command, *one.inbox]
            at = one.run is not None and one.group == process.group and one.place in ("meeting", "preparing")
            coming += at or any(
                (isinstance(c, ChangeGroup) and c.place is not None and c.generation == process.group)
                or (isinstance(c, StartRun) and c.place is not None and c.place.generation == process.group)
                for c in commands
            )
        return coming >= process.ranks

    def _boundary(self, process: Process) -> None:
        """Decide together with the others at the same boundary."""
        peers = self._peers(process)
        assert process.run is not None
        name = process.run.training
        if len(peers) < process.ranks:
            process.place = "stranded"
            self._tell(process, GroupFailed(process.group, "connection closed"))
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
        if reasons := {one.pauses for one in peers if one.pauses}:
            reason = PauseReason.CLOSING if PauseReason.CLOSING in reasons else PauseReason.REQUESTED
            self.checkpoints[name] = max(self.checkpoints[name], step)
            for one in peers:
                self._end(one, RunPaused(reason, Progress(step=step, samples=step)))
            return
        if self.ending and step >= self.last.setdefault(name, step + LAST_STEPS):
            self.checkpoints[name] = step
            for one in peers:
                payload = serialize(step) if one.rank == 0 else b""
                self._end(one, RunFinished(Progress(step=step, samples=step)), payload)
            return
        for one in peers:
            one.step = step + 1
            if one.rank == 0:
                self._tell(one, Progress(step=step + 1, samples=step + 1))

    # Invariants.

    @invariant()
    def at_most_one_group_of_a_training_trains(self) -> None:
        for name in "ab":
            groups = {
                one.group
                for one in self.processes.values()
                if one.run and one.run.training == name and one.place == "group" and self._whole(one)
            }
            assert len(groups) <= 1, groups

    @invariant()
    def every_slot_is_free_or_has_one_training(self) -> None:
        owners: dict[str, str] = {}
        for managed in self.manager._managed:
            for slot in managed.machine.participants:
                assert slot not in owners
                owners[slot] = managed.machine.name
        for name, slot in self.registry.slots.items():
            assert slot.busy == owners.get(name)

    @invariant()
    def no_work_is_given_up_while_a_process_has_it(self) -> None:
        """Check that no live process is ahead of the checkpoint to which its training falls back."""
        before, self._restarts = self._restarts, self.manager._failure_rate.failures
        if self._restarts == before:
            return
        for process in self.processes.values():
            if process.run is not None and process.step is not None:
                abandoned = isinstance(self._machine(process.run.training).phase, (Abandoning, Waiting))
                assert not abandoned or process.step <= self.checkpoints[process.run.training]

    def _machine(self, name: str) -> TrainingMachine:
        return next(one.machine for one in self.manager._managed if one.machine.name == name)

    def _settle(self) -> None:
        """Deliver all messages in transit, and assign nodes to both trainings until they have ended."""
        self.ending = True
        for _ in range(400):
            while self.dead:
                self._lose(self.dead.pop(0).slot, crash=False)
            self.assign("0/23")
            self._round()
            if all(future.done() for future in self.futures.values()):
                break
        for name, future in self.futures.items():
            states = [str(one.machine.state) for one in self.manager._managed]
            assert future.done(), (name, states, self.processes)
            error = future.exception()
            assert error is None or isinstance(error, TrainingCancelled), error
            if error is None:
                assert future.result() >= 0


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
