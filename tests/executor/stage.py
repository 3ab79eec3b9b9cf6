"""A conductor whose slots are only names: the tests say what they say, and read what it answers."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.conductor import Conductor
from freetrain_parsl.executor.journal import Entry, Journal, read_journal
from freetrain_parsl.executor.protocol import Message
from freetrain_parsl.executor.control.slot_registry import Roster, Slot
from freetrain_parsl.executor.trainings import Training, TrainingRequest, TrainingSettings
from freetrain_parsl.planning.model import RescaleCosts
from freetrain_parsl.planning.scaling import ScalingCurve
from freetrain_parsl.training.terms import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.planning import events as ev


class Stage:
    """Four nodes n0 … n3 with slots s0 … s3, or s0a, s0b, … if there are several a node."""

    def __init__(self, directory: Path, *, slots_per_node: int = 1) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, Message]] = []
        self.killed: list[str] = []
        self.aside: list[str] = []
        self.events: list[ev.Event] = []
        self.runs: dict[str, int] = {}
        """Slot -> the number of its run."""
        self.orders: dict[str, Message] = {}
        """Slot -> the last order to regroup that it got."""
        self.roster = Roster(slots_per_node)
        for node in range(4):
            for letter in "abc"[:slots_per_node] if slots_per_node > 1 else ("",):
                slot = Slot(f"s{node}{letter}", "token", f"n{node}", "b", heard=0.0)
                self.roster.slots[slot.name] = slot
                self.roster.completes(slot)
        self.journal = Journal(directory / "journal.sqlite")
        self.conductor = Conductor(
            TrainingSettings(directory, costs=RescaleCosts(2, 2, 2), max_restarts=1),
            roster=self.roster,
            send=self._send,
            kill=self._kill,
            set_aside=lambda slot, _reason: self.aside.append(slot.name),
            emit=self.events.append,
            journal=self.journal,
            clock=lambda: self.now,
        )

    def _send(self, slot: str, message: Message) -> None:
        self.sent.append((slot, message))
        if message.type == "run":
            self.runs[slot] = message["run"]
        elif message.type == "regroup":
            assert message["run"] == self.runs[slot]
            self.orders[slot] = message

    def _kill(self, slot: Slot, reason: str) -> None:
        self.killed.append(slot.name)
        self.lose(slot.name, reason)

    # The user and the planner.

    def submit(self, name: str = "t", **options: Any) -> Future[Any]:
        """Submit a training."""
        future: Future[Any] = Future()
        request = TrainingRequest(
            name, **{"min_nodes": 1, "max_nodes": 4, "scaling": ScalingCurve.default(), **options}
        )
        self.conductor.submit(Training(request, b"function", future))
        return future

    def running(self, *nodes: str, in_place: bool = True, step: int = 1, **options: Any) -> Future[Any]:
        """Submit a training that runs on these nodes and has reported."""
        future = self.submit(**options)
        sent = self.on(*nodes)
        assert {message.type for _, message in sent} == {"run"}
        self.progress(sent[0][0], step=step, in_place=in_place)
        return future

    def on(self, *nodes: str, name: str = "t") -> list[tuple[str, Message]]:
        """Assign and converge; what was said in this turn."""
        self.conductor.assign(name, frozenset(nodes))
        return self.turn()

    def turn(self) -> list[tuple[str, Message]]:
        """Converge; what was said in this turn."""
        self.sent.clear()
        self.conductor.converge()
        return list(self.sent)

    # The slots.

    def says(self, slot: str, kind: str, **header: Any) -> None:
        """Let a slot say something about its run."""
        message = Message(kind, {"trainer": "t", "run": self.runs[slot], **header})
        getattr(self.conductor, f"on_{kind}")(self.roster.slots[slot], message)

    def progress(self, slot: str, run: int | None = None, **changes: Any) -> None:
        """Let a first member report its progress."""
        message = Message(
            "progress", {"trainer": "t", "run": run or self.runs[slot], "progress": self.report(**changes)}
        )
        self.conductor.on_progress(self.roster.slots[slot], message)

    def regrouped(self, *slots: str, paused: float = 0.0) -> None:
        """Let slots go on in the group that they were ordered into."""
        for slot in slots:
            self.says(slot, "regrouped", generation=self.orders[slot]["next"], paused=paused, transferred=0.0)

    def recover(self, *slots: str) -> None:
        """Let the survivors of a loss get their order and carry it out."""
        self.now += 0.2
        self.turn()
        self.regrouped(*slots)

    def stranded(self, slot: str, generation: int | None = None) -> None:
        """Let a slot's collective fail."""
        self.says(slot, "stranded", generation=generation or self.generation, reason="connection closed")

    def ended(self, slot: str, outcome: str, payload: bytes = b"", **header: Any) -> None:
        """Let a slot's run end."""
        message = Message("ended", {"trainer": "t", "run": self.runs[slot], "outcome": outcome, **header}, payload)
        self.conductor.on_ended(self.roster.slots[slot], message)

    def lose(self, slot: str, reason: str = "gone", *, crash: bool = True) -> None:
        """Lose a slot."""
        lost = self.roster.slots.pop(slot)
        self.roster.incomplete(lost)
        self.conductor.on_lost(lost, reason, crash=crash)

    def beats(self, *slots: str) -> None:
        """Let slots give signs of life."""
        for slot in slots:
            self.roster.slots[slot].heard = self.now

    def waits(self, slot: str, seconds: float) -> None:
        """Let a slot tell how long it has waited for the others."""
        self.conductor.on_beat(self.roster.slots[slot], seconds)

    def kv(self, slot: str, **header: Any) -> None:
        """Let a slot use a rendezvous store."""
        self.conductor.rendezvous.handle(slot, Message("kv", header), self.now)

    @staticmethod
    def report(**changes: Any) -> dict[str, Any]:
        """Make a progress report."""
        return asdict(Progress(**{"step": 1, "samples": 16, "samples_total": 100, **changes}))

    # What came of it.

    def order(self, slot: str) -> tuple[int | None, int, bool]:
        """Rank, size and abort of the last order that a slot got."""
        order = self.orders[slot]
        return order["rank"], order["world_size"], order["abort"]

    def group(self, slot: str) -> str:
        """Name the rendezvous store of the group that a slot was ordered into."""
        return f"t/{self.orders[slot]['next']}"

    @property
    def generation(self) -> int:
        """The number of the last group that a training went on in."""
        number: int = self.fragments("started")[-1].detail["generation"]
        return number

    def fragments(self, what: str = "ended") -> list[Entry]:
        """Entries of the journal."""
        return [entry for _, entry in self.history() if entry.kind == f"fragment_{what}"]

    def history(self) -> list[tuple[int, Entry]]:
        """Return the journal."""
        self.journal.commit()
        return list(read_journal(self.journal.path))


def kinds(sent: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    """Say who was told what kind of thing."""
    return [(slot, message.type) for slot, message in sent]
