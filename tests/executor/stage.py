"""A training manager whose slots are only names: the tests send the slots' messages, and read its answers."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
from freetrain_parsl.executor.jobs.manager import JobManager
from freetrain_parsl.executor.jobs.request import Limits, SharedSettings, Training, TrainingRequest
from freetrain_parsl.executor.journal import Journal, JournalEntry, read_journal
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.planning.sizes import ANY_COUNT, AllowedCounts
from freetrain_parsl.protocol.messages import (
    ChangeGroup,
    PauseRun,
    RunEnded,
    RunReport,
    StartRun,
    StoreReply,
    StoreRequest,
    ToSlot,
)
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import GroupFailed, Joined, Progress, Ready, Report, RunEnd

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.planning import events as ev

_SESSION = {item.name for item in fields(SessionOptions)}


class Stage:
    """Four nodes n0 … n3 with slots s0 … s3, or s0a, s0b, … if there are several slots per node.

    If jobs share nodes, these are the units n0/0, n0/1, …
    """

    def __init__(self, directory: Path, *, slots_per_node: int = 1, share_nodes: bool = False) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, ToSlot]] = []
        self.killed: list[str] = []
        self.aside: list[str] = []
        self.events: list[ev.Event] = []
        self.runs: dict[str, int] = {}
        """Slot -> the number of its run."""
        self.changes: dict[str, ChangeGroup] = {}
        """Slot -> the last `ChangeGroup` that it received."""
        self.registry = SlotRegistry(slots_per_node, share_nodes=share_nodes)
        for node in range(4):
            for letter in "abcd"[:slots_per_node] if slots_per_node > 1 else ("",):
                slot = Slot(f"s{node}{letter}", "token", f"n{node}", "b", heard=0.0)
                slot.lane = self.registry.free_lane(slot.node, None)
                self.registry.slots[slot.name] = slot
                self.registry.completes(slot)
        self.journal = Journal(directory / "journal.sqlite")
        self.manager = JobManager(
            SharedSettings(
                SessionOptions("stage", directory), costs=CostsInSeconds(2, 2, 2), limits=Limits(max_restarts=1)
            ),
            registry=self.registry,
            send=self._send,
            kill=self._kill,
            set_aside=lambda slot, _reason: self.aside.append(slot.name),
            inform=self.events.append,
            journal=self.journal,
            clock=lambda: self.now,
        )

    def _send(self, slot: str, message: ToSlot) -> None:
        self.sent.append((slot, message))
        if isinstance(message, StartRun):
            self.runs[slot] = message.run
        elif isinstance(message, ChangeGroup):
            assert message.run == self.runs[slot]
            self.changes[slot] = message

    def _kill(self, slot: Slot, reason: str) -> None:
        self.killed.append(slot.name)
        self.lose(slot.name, reason)

    # The user and the planner.

    def submit(self, name: str = "t", **options: Any) -> Future[Any]:
        """Submit a training job."""
        future: Future[Any] = Future()
        session = {key: options.pop(key) for key in list(options) if key in _SESSION}
        request = TrainingRequest(
            SessionOptions(name, **session),
            **{"min_nodes": 1, "max_nodes": 4, "scaling": ScalingCurve.default(), **options},
        )
        self.manager.submit(Training(request, b"function", future))
        return future

    def running(
        self, *nodes: str, in_place: bool = True, step: int = 1, counts: AllowedCounts = ANY_COUNT, **options: Any
    ) -> Future[Any]:
        """Submit a training job that runs on these nodes and has reported."""
        future = self.submit(**options)
        sent = self.on(*nodes)
        assert {type(message) for _, message in sent} == {StartRun}
        self.progress(sent[0][0], step=step, in_place=in_place, allowed_counts=counts)
        return future

    def on(self, *nodes: str, name: str = "t") -> list[tuple[str, ToSlot]]:
        """Assign nodes and converge; return the messages of this turn."""
        self.manager.assign(name, frozenset(nodes))
        return self.turn()

    def turn(self) -> list[tuple[str, ToSlot]]:
        """Converge; return the messages of this turn."""
        self.sent.clear()
        self.manager.advance()
        return list(self.sent)

    # The slots.

    def reports(self, slot: str, report: Report, run: int | None = None) -> None:
        """Send a report of a slot's run."""
        self.manager.on_message(self.registry.slots[slot], RunReport("t", run or self.runs[slot], report))

    def ready(self, slot: str) -> None:
        """Let a newcomer be ready to join."""
        self.reports(slot, Ready())

    def progress(self, slot: str, run: int | None = None, **changes: Any) -> None:
        """Let the member of rank 0 report its progress."""
        self.reports(slot, self.report(**changes), run)

    def joins(self, *slots: str, paused: float = 0.0, transferred: float = 0.0, received: int = 0) -> None:
        """Let slots join the group of their last command."""
        for slot in slots:
            self.reports(slot, Joined(self.changes[slot].generation, paused, transferred, received))

    def recover(self, *slots: str) -> None:
        """Let the survivors of a failure receive and carry out their command."""
        self.now += 0.2
        self.turn()
        self.joins(*slots)

    def group_fails(
        self,
        slot: str,
        generation: int | None = None,
        reason: str = "connection closed",
        unreachable: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Let a slot's collective fail."""
        self.reports(slot, GroupFailed(generation or self.generation, reason, unreachable))

    def ends(self, slot: str, end: RunEnd, payload: bytes = b"") -> None:
        """Let a slot's run end."""
        self.manager.on_message(self.registry.slots[slot], RunEnded("t", self.runs[slot], end, payload))

    def lose(self, slot: str, reason: str = "gone", *, crash: bool = True) -> None:
        """Let a slot fail."""
        lost = self.registry.slots.pop(slot)
        self.registry.incomplete(lost)
        self.manager.on_lost(lost, reason, crash=crash)

    def beats(self, *slots: str) -> None:
        """Let slots send heartbeats."""
        for slot in slots:
            self.registry.slots[slot].heard = self.now

    def waits(self, slot: str, seconds: float) -> None:
        """Let a slot report how long it has waited for the others."""
        self.manager.on_heartbeat(self.registry.slots[slot], seconds)

    def calls_store(self, slot: str, group: str, operation: str, *, timeout: float = 1.0, value: bytes = b"") -> None:
        """Let a slot use a rendezvous store."""
        request = StoreRequest(group, 1, operation, ("x",), timeout, payload=value)  # type: ignore[arg-type]
        self.manager.rendezvous.handle(slot, request, self.now)

    @staticmethod
    def report(**changes: Any) -> Progress:
        """Create a progress report."""
        return Progress(**{"step": 1, "samples": 16, "samples_total": 100, **changes})

    # Results.

    def place(self, slot: str) -> tuple[int | None, int, bool]:
        """Return rank, size and abort of the last `ChangeGroup` that a slot received."""
        change = self.changes[slot]
        return (None, 0, change.abort) if change.place is None else (change.place.rank, change.place.size, change.abort)

    def group(self, slot: str) -> str:
        """Return the name of the rendezvous store of the group that a slot was commanded to join."""
        return f"t/{self.changes[slot].generation}"

    @property
    def generation(self) -> int:
        """Return the number of the group in which a training job last continued."""
        number: int = self.fragments("started")[-1].detail["generation"]
        return number

    def fragments(self, what: str = "ended") -> list[JournalEntry]:
        """Return entries of the journal."""
        return [entry for _, entry in self.history() if entry.kind == f"fragment_{what}"]

    def history(self) -> list[tuple[int, JournalEntry]]:
        """Return the journal."""
        self.journal.commit()
        return list(read_journal(self.journal.path))


def kinds(sent: list[tuple[str, ToSlot]]) -> list[tuple[str, str]]:
    """Return the recipients and kinds of the messages sent."""
    return [(slot, _KINDS[type(message)]) for slot, message in sent]


_KINDS = {StartRun: "run", ChangeGroup: "change", PauseRun: "pause", StoreReply: "reply"}
