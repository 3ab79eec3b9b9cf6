"""A model of the processes of arrays, connected to a real training manager by messages that take any time.

Members make steps, end, fail and raise exceptions; arrays grow, find out that they cannot fuse, pause and crash. What
the driver sends is checked when it is sent: a training job never runs in two processes.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parsl.serialize import serialize

from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
from freetrain_parsl.executor.jobs.manager import JobManager
from freetrain_parsl.executor.jobs.request import Fusion, Limits, SharedSettings, Training, TrainingRequest
from freetrain_parsl.executor.slot.run_end import serialized_exception
from freetrain_parsl.extensions.fusion import messages as fused
from freetrain_parsl.extensions.fusion.slot.array_run import ArrayRun
from freetrain_parsl.planning import events as planner
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.protocol import messages as msg
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import (
    PauseReason,
    Progress,
    RunFailed,
    RunFinished,
    RunPaused,
    StorageFailed,
)
from tests.executor.jobs.training_world import StorageModel

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.executor.journal import Journal

STEPS = 6  # of each training job, unless a test sets another number


class UserError(Exception):
    """An error of a training job's own code."""


@dataclass
class Process:
    """The model of a slot's process: idle without a `run`."""

    slot: Slot
    run: int | None = None
    name: str = ""
    is_array: bool = False
    members: dict[str, int] = field(default_factory=dict)
    """Member -> its steps."""
    missing: set[str] = field(default_factory=set)
    waiting: list[str] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    pausing: bool = False
    size: int = 2
    measured: int = 1
    turns: str = ""
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)

    def end(self) -> None:
        """Be idle."""
        self.run, self.name, self.is_array, self.pausing = None, "", False, False
        self.members, self.missing, self.waiting, self.released = {}, set(), [], set()


class ArrayWorld:
    """Nodes n0, n1, … with one slot each, or more.

    Parameters
    ----------
    directory
        Of the checkpoints.
    journal
        Of the manager.
    """

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        *,
        nodes: int = 3,
        slots_per_node: int = 1,
        share_nodes: bool = False,
    ) -> None:
        self.now = 0.0
        self.journal = journal
        self.processes: dict[str, Process] = {}
        self.saved: dict[str, int] = {}
        """Training -> steps of its checkpoint."""
        self.futures: dict[str, Future[Any]] = {}
        self.trainers: dict[str, planner.TrainerSubmitted | planner.TrainerLearned] = {}
        self.assigned: dict[str, frozenset[str]] = {}
        self.reason = "UserError: no"
        self.best_size = 4
        self.steps = STEPS
        self.fuses = True
        self.refusal = ("they differ", 1)
        """Why arrays do not fuse, and with how many members they have timed that."""
        self.passing = False
        """Whether that may not hold for others that are alike."""
        self.turns = ""
        self.structures: dict[str, str] = {}
        self.refusals: dict[str, str] = {}
        """Training -> its structure, if it is not that of most."""
        self.registry = SlotRegistry(slots_per_node, share_nodes=share_nodes)
        self._slots = 0
        for node in range(nodes):
            for _ in range(slots_per_node):
                self.join(f"n{node}")
        self.manager = JobManager(
            SharedSettings(SessionOptions("world", directory), costs=CostsInSeconds(1, 1, 1), limits=Limits()),
            registry=self.registry,
            send=self._send,
            kill=lambda slot, _reason: self.crash(slot.name),
            inform=self._inform,
            journal=journal,
            clock=lambda: self.now,
        )
        self.storage = StorageModel(lambda: self.now)
        self.manager._storage = self.storage  # type: ignore[assignment]

    def submit(
        self, name: str, *, max_nodes: int = 1, limit: int | None = None, key: str = "key", likeness: str = ""
    ) -> Future[Any]:
        """Submit a training job that may be fused with all others."""
        request = TrainingRequest(
            SessionOptions(name), 1, max_nodes, ScalingCurve.default(), fusion=Fusion(key, limit), likeness=likeness
        )
        training = Training(request, name.encode(), Future())
        self.futures[name] = training.future
        self.manager.submit(training)
        return training.future

    def join(self, node: str) -> None:
        """Add a slot."""
        self._slots += 1
        slot = Slot(f"s{self._slots}", "token", node, "b", heard=0.0)
        slot.lane = self.registry.free_lane(node, None)
        self.registry.slots[slot.name] = slot
        self.registry.completes(slot)
        self.processes[slot.name] = Process(slot)

    @property
    def nodes(self) -> list[str]:
        """All nodes."""
        return sorted({slot.place for slot in self.registry.slots.values()})

    # ── the planner ───────────────────────────────────────────────────────────────────────────────

    def _inform(self, event: planner.Event) -> None:
        match event:
            case planner.TrainerSubmitted(trainer=trainer):
                assert trainer.name not in self.trainers
                self.trainers[trainer.name] = event
            case planner.TrainerLearned(trainer=trainer) if trainer.name in self.trainers:
                self.trainers[trainer.name] = event
            case planner.TrainerFinished(trainer=name) | planner.TrainerFailed(trainer=name):
                self.trainers.pop(name, None)
                self.assigned.pop(name, None)
            case planner.TrainerWithheld(trainer=name):
                del self.trainers[name]
                self.assigned.pop(name, None)

    def assign(self, name: str, nodes: frozenset[str]) -> None:
        """Assign nodes to a trainer, and take them from the others."""
        for other, had in list(self.assigned.items()):
            if other != name and had & nodes:
                self.assigned[other] = had - nodes
                self.manager.assign(other, had - nodes)
        self.assigned[name] = nodes
        self.manager.assign(name, nodes)

    def assign_all(self) -> None:
        """Share all nodes among the trainers, up to what each can use."""
        free = [node for node in self.nodes if not any(node in had for had in self.assigned.values())]
        for name, event in sorted(self.trainers.items()):
            had = self.assigned.get(name, frozenset())
            more = frozenset(free[: max(0, event.trainer.max_nodes - len(had))])
            free = [node for node in free if node not in more]
            if more:
                self.assign(name, had | more)

    # ── the driver's messages ─────────────────────────────────────────────────────────────────────

    def _send(self, slot: str, message: Any) -> None:
        process = self.processes.get(slot)
        if process is None:
            return
        started = {msg.StartRun: lambda m: [m.training], fused.AddMember: lambda m: [m.options.name]}.get(type(message))
        if started is not None:
            for name in started(message):
                assert not self.futures[name].done(), f"{name} is over"
                others = [p for p in self.processes.values() if self._may_run(p, name)]
                assert not others or (type(message) is msg.StartRun and not others[0].is_array), f"{name} runs twice"
        process.inbox.append(message)

    @staticmethod
    def _may_run(process: Process, name: str) -> bool:
        """Return whether a process runs a training job, or will, as far as the driver can know."""
        ends = [
            m
            for m in process.outbox
            if (isinstance(m, fused.MemberEnded) and m.member == name)
            or (isinstance(m, msg.RunEnded) and m.training == name)
        ]
        runs = {process.run} | {m.run for m in process.inbox if isinstance(m, fused.StartArray)}
        coming = any(
            (isinstance(m, fused.AddMember) and m.options.name == name and m.run in runs)  # else it has no effect
            or (isinstance(m, msg.StartRun) and m.training == name)
            for m in process.inbox
        )
        known = name in process.members or name in process.waiting or (process.run is not None and process.name == name)
        return coming or known or bool(ends)

    def receive(self, slot: str) -> None:
        """Let a process handle its next message."""
        process = self.processes[slot]
        if not process.inbox:
            return
        message = process.inbox.popleft()
        match message:
            case fused.StartArray():
                assert process.run is None
                process.run, process.name, process.is_array = message.run, message.training, True
                process.missing = set(message.members)
                process.size = message.size or 2
                process.measured = message.size or 1
                process.turns = message.turns
            case fused.AddMember():
                if message.run == process.run:
                    process.missing.discard(message.options.name)
                    process.waiting.append(message.options.name)
            case fused.ReleaseMember():
                if message.run == process.run:
                    process.released.add(message.member)
            case msg.StartRun():
                assert process.run is None
                process.run, process.name = message.run, message.training
                process.members = {message.training: self.saved.get(message.training, 0)}
            case msg.PauseRun():
                process.pausing = process.pausing or message.run == process.run

    # ── the processes ─────────────────────────────────────────────────────────────────────────────

    def step(self, slot: str, *, fails: bool = False, full: bool = False) -> None:
        """Let a process continue by a step of its members; one of them `fails`, or finds the disk `full`."""
        process = self.processes[slot]
        if process.run is None or process.missing:
            return
        if process.is_array:
            self._step_array(process, fails=fails, full=full)
        else:
            self._step_alone(process, fails=fails, full=full)

    def _step_array(self, process: Process, *, fails: bool, full: bool) -> None:
        assert process.run is not None
        while process.waiting and len(process.members) < process.size and not process.pausing:
            name = process.waiting.pop(0)
            if name in process.released:
                self._member_ended(process, name, RunPaused(PauseReason.LEFT))
            else:
                process.members[name] = self.saved.get(name, 0)
        for name in list(process.members):
            if process.pausing or name in process.released:
                self.saved[name] = process.members[name]
                self._member_ended(process, name, RunPaused(PauseReason.REQUESTED, self._progress(process, name)))
            elif fails:
                fails = False
                self._member_ended(process, name, RunFailed(self.reason), serialized_exception(UserError(name)))
            elif full:
                self._member_ended(process, name, StorageFailed("no space", "is full"))
            elif process.members[name] >= self.steps:
                self.saved[name] = self.steps
                self._member_ended(process, name, RunFinished(self._progress(process, name)), serialize(name))
            else:
                process.members[name] += 1
                report = fused.MemberReport(process.name, process.run, name, self._progress(process, name))
                process.outbox.append(report)
        if not (process.members or (process.waiting and not process.pausing)):
            process.outbox.append(msg.RunEnded(process.name, process.run, RunPaused(PauseReason.REQUESTED)))
            process.end()
        elif len(process.members) > 1 and (
            not self.fuses or len({self.structures.get(name, "common") for name in process.members}) > 1
        ):
            reason, measured = self.refusal
            told = {"gain_size": measured, "decided": True, "reason": reason, "passing": self.passing}
            process.outbox.append(fused.ArraySized(process.name, process.run, 1, **told))
        elif len(process.members) == process.size > process.measured:
            process.measured, decided = process.size, process.size >= self.best_size
            process.size *= 1 if decided else 2
            if self.turns and decided:
                process.turns = self.turns
                process.outbox.append(fused.BaseShared(process.name, process.run, 74_000_000))
                process.outbox.append(
                    fused.ArraySized(
                        process.name, process.run, process.size, False, 0.9, process.measured, True, turns=self.turns
                    )
                )
                return
            process.outbox.append(
                fused.ArraySized(
                    process.name, process.run, process.size, True, 0.7 * process.measured, process.measured, decided
                )
            )

    def _step_alone(self, process: Process, *, fails: bool, full: bool) -> None:
        name, run = process.name, process.run
        assert run is not None
        progress = self._progress(process, name)
        if process.pausing:
            self.saved[name] = process.members[name]
            end: Any = RunPaused(PauseReason.REQUESTED, progress)
        elif fails:
            end = RunFailed(self.reason)
        elif full:
            end = StorageFailed("no space", "is full")
        elif process.members[name] >= self.steps:
            self.saved[name] = self.steps
            end = RunFinished(progress)
        else:
            process.members[name] += 1
            process.outbox.append(msg.RunReport(name, run, self._progress(process, name)))
            return
        payload = serialized_exception(UserError(name)) if isinstance(end, RunFailed) else serialize(name)
        process.outbox.append(msg.RunEnded(name, run, end, payload))
        process.end()

    def _progress(self, process: Process, name: str) -> Progress:
        step = process.members[name]
        saved = self.saved.get(name)
        return Progress(
            step,
            samples=10 * step,
            samples_total=10 * self.steps,
            rate=10.0,
            checkpoint_step=saved,
            structure=self.structures.get(name, "common") if process.is_array else "",
            not_fused=self.refusals.get(name, "") if process.is_array else "",
        )

    def _member_ended(self, process: Process, name: str, end: Any, payload: bytes = b"") -> None:
        assert process.run is not None
        process.members.pop(name, None)
        process.released.discard(name)
        process.outbox.append(fused.MemberEnded(process.name, process.run, name, end, payload))

    def deliver(self, slot: str) -> None:
        """Let the driver handle the next message of a process."""
        process = self.processes[slot]
        if not process.outbox:
            return
        message = process.outbox.popleft()
        self.manager.on_message(process.slot, message)

    def crash(self, slot: str, *, crash: bool = True) -> None:
        """End a process at once; another takes its place."""
        process = self.processes.pop(slot, None)
        if process is None:
            return
        del self.registry.slots[slot]
        self.registry.incomplete(process.slot)
        self.manager.on_lost(process.slot, "killed", crash=crash)
        self.join(process.slot.node)

    def end_over_share(self, slot: str) -> None:
        """Let the watch of a slot end its array, which takes too much of its node's memory."""
        process = self.processes[slot]
        assert process.run is not None
        run = ArrayRun(fused.StartArray(process.name, process.run, tuple(process.members)), process.outbox.append)
        for name in process.members:
            run.handle(fused.AddMember(process.name, process.run, SessionOptions(name), b""))
        process.outbox.extend(run.end_over_share("was ended on node n0: it used 9 GiB of host memory"))
        process.end()

    # ── all together ──────────────────────────────────────────────────────────────────────────────

    def advance(self, seconds: float = 0.25) -> None:
        """Let time pass."""
        self.now += seconds
        self.manager.advance()

    def settle(self, turns: int = 1) -> None:
        """Let everything happen without faults."""
        for _ in range(turns):
            self.advance()
            for slot in list(self.processes):
                if slot in self.processes:
                    while self.processes[slot].inbox:
                        self.receive(slot)
                    self.step(slot)
                    while slot in self.processes and self.processes[slot].outbox:
                        self.deliver(slot)
