"""The driver: the thread that turns the planner in real time.

What slots, the batch desk and the user's threads tell becomes planner events; the planner's actions become block
orders and assignments. A training whose nodes change is paused at a step boundary and, when all its members have
ended, started on the new nodes as the next generation.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.high_throughput.errors import ManagerLost
from parsl.serialize import deserialize

from freetrain_parsl.errors import BatchSystemError, TooManyRestarts, TrainingError
from freetrain_parsl.executor.blocks import BatchDesk, BlockRefused, BlockSpec, BlockSubmitted
from freetrain_parsl.executor.protocol import Message
from freetrain_parsl.executor.rendezvous import RendezvousDesk
from freetrain_parsl.executor.roster import Block, Roster, Slot
from freetrain_parsl.executor.trainings import Generation, Training
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import Decision, PoolNode, RescaleCosts, Window
from freetrain_parsl.planning.planner import Planner, PlannerSettings
from freetrain_parsl.windows.base import Survey

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.executor.slots import SlotServer
    from freetrain_parsl.planning.policies.base import Policy

logger = logging.getLogger(__name__)

__all__ = ["Driver", "DriverSettings", "SlotTaskEnded", "Task"]


@dataclass(frozen=True)
class DriverSettings:
    """How the driver treats slots and trainings; times in seconds.

    Parameters
    ----------
    checkpoint_root
        Where trainings keep their checkpoints; reachable from the nodes.
    checkpoint_interval, keep, save_margin
        See ``training.fragment.SessionOptions``.
    costs
        Rescale costs of trainings that state none.
    slots_per_node
        Slots that make a node complete.
    threads
        Threads of each slot's torch; ``None``: torch's own choice.
    silence
        A slot that says nothing for so long is lost.
    loss_timeout
        When a member is lost, the others must end within this time, or are lost too.
    collective_timeout
        Of torch's collectives and of rendezvous.
    max_crashes
        Slots that may die under a training, on nodes that nobody took, between two checkpoints.
    patience
        A block whose slots are missing so long after its start is offered new slot tasks.
    """

    checkpoint_root: Path
    checkpoint_interval: float = 60.0
    keep: int = 2
    save_margin: float = 2.0
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    slots_per_node: int = 1
    threads: int | None = None
    silence: float = 15.0
    loss_timeout: float = 10.0
    collective_timeout: float = 60.0
    max_crashes: int = 3
    patience: float = 60.0


@dataclass
class Task:
    """An ordinary Parsl task: it runs in one slot, and again in another if that is lost."""

    number: int
    payload: bytes
    future: Future[Any]


@dataclass(frozen=True)
class SlotTaskEnded:
    """The HTEX task behind a slot came back, which it does only when its process died or could not start."""

    token: str
    error: BaseException | None


class Driver(threading.Thread):
    """Owns planner, slots, trainings and journal; everything else talks to it through `post`.

    Parameters
    ----------
    policy, planner_settings
        What the planner is made of.
    server, journal
        Owned by this thread from its start on.
    desk
        The batch desk; its `post` must be this driver's.
    settings
        See `DriverSettings`.
    submit_slot
        Submits one more slot task to HTEX, named by a token.
    fail_all
        Called when no slot can ever start; gets the reason.
    clock
        Seconds since the epoch.
    """

    _PASS = 0.25  # seconds between passes when nothing happens: bounds how late a time-out is noticed
    _MOST_FAILED_STARTS = 5

    def __init__(
        self,
        *,
        policy: Policy,
        planner_settings: PlannerSettings | None,
        server: SlotServer,
        desk: BatchDesk,
        journal: Journal,
        settings: DriverSettings,
        submit_slot: Callable[[str], None],
        fail_all: Callable[[Exception], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(name="freetrain-driver", daemon=True)
        self._planner = Planner(policy, planner_settings, on_decision=self._record_decision)
        self._server = server
        self._desk = desk
        self._journal = journal
        self._settings = settings
        self._submit_slot = submit_slot
        self._fail_all = fail_all
        self._clock = clock
        self._posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._events: list[ev.Event] = []
        self._trainings: dict[str, Training] = {}
        self._roster = Roster(settings.slots_per_node)
        self._rendezvous = RendezvousDesk(self._server.send)
        self._tasks: dict[int, Task] = {}
        self._queued_tasks: list[int] = []
        self._lent: frozenset[str] = frozenset()
        self._windows: tuple[Window, ...] = ()
        self._tokens = 0
        self._greeted: set[str] = set()
        self._failed_starts = 0

    # Other threads.

    def post(self, item: object) -> None:
        """Tell the driver something: a `Training`, a `Task`, a desk's answer or a `SlotTaskEnded`."""
        self._posted.put(item)
        self._server.wake()

    def stop(self, timeout: float) -> None:
        """End the slots and the thread; blocks are the desk's to cancel."""
        self._stopping.set()
        self._server.wake()
        if self.is_alive():
            self.join(timeout)

    # The loop.

    def run(self) -> None:
        """Turn until stopped."""
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:  # the loop's own defect: nobody may wait for ever on a future it holds
            logger.exception("the driver failed")
            self._fail_all(TrainingError(f"the driver of the FreeTrain executor failed: {error!r}; see parsl.log"))
        finally:
            for slot in self._roster.slots:
                self._server.send(slot, Message("exit", {"now": False}))
            self._journal.close()
            self._server.close()

    def _turn(self) -> None:
        now = self._clock()
        wait = min(self._PASS, self._planner.wake_at(now) - now)
        for slot, message in self._server.receive(wait):
            self._on_message(slot, message)
        while not self._posted.empty():
            self._on_post(self._posted.get())
        self._find_silent()
        self._rendezvous.expire(self._clock())
        self._act(self._planner.advance(*self._events, ev.Tick(self._clock())))
        self._events.clear()
        for training in list(self._trainings.values()):
            self._converge(training)
        self._serve_tasks()
        self._journal.commit()

    def _record_decision(self, time: float, purpose: str, decision: Decision) -> None:
        self._journal.write(
            time,
            "decision",
            purpose,
            policy=self._planner.policy.name,
            counts=decision.counts,
            objective=decision.objective,
            proven=decision.proven_optimal,
            seconds=decision.solve_seconds,
        )

    # What other threads posted.

    def _on_post(self, item: object) -> None:
        if isinstance(item, Training):
            self._on_training(item)
        elif isinstance(item, Task):
            self._tasks[item.number] = item
            self._queued_tasks.append(item.number)
            self._tell_tasks()
        elif isinstance(item, Survey):
            self._on_survey(item)
        elif isinstance(item, BlockSubmitted):
            if (block := self._roster.blocks.get(item.block)) is not None:
                block.job = item.job
            self._write("block_submitted", item.block, job=item.job)
        elif isinstance(item, BlockRefused):
            self._end_block(item.block, f"refused: {item.reason}")
        elif isinstance(item, SlotTaskEnded):
            self._on_slot_task_ended(item)

    def _on_training(self, training: Training) -> None:
        trainer = training.request.trainer(self._settings.costs, submitted=self._clock())
        self._trainings[training.name] = training
        self._events.append(ev.TrainerSubmitted(self._clock(), trainer))
        self._write(
            "training_submitted",
            training.name,
            min_nodes=trainer.min_nodes,
            max_nodes=trainer.max_nodes,
            samples=training.request.samples,
        )

    def _on_survey(self, survey: Survey) -> None:
        self._events.append(ev.WindowsSeen(survey.time, survey.windows))
        if survey.windows != self._windows:
            self._windows = survey.windows
            windows = [{"nodes": list(window.nodes), "closes": window.closes} for window in survey.windows]
            self._write("windows", "", windows=windows)
        for block in list(self._roster.blocks.values()):
            status = survey.blocks.get(block.job)
            if status is None:
                continue
            if status.state.ended:
                self._end_block(block.name, status.state.value + (f" ({status.reason})" if status.reason else ""))
            elif status.nodes and not block.started:
                block.start(self._clock(), status.nodes, status.ends)
                self._events.append(ev.BlockStarted(self._clock(), block.name, block.nodes, block.ends))
                if block.ends is not None:
                    self._events.append(ev.NodesClosing(self._clock(), block.nodes, block.ends))
                self._write("block_started", block.name, nodes=list(block.nodes), ends=block.ends)
        for _ in range(self._roster.overdue(self._clock(), self._settings.patience)):
            self._order_slot()

    def _end_block(self, name: str, reason: str) -> None:
        block = self._roster.drop_block(name)
        if block is None:
            return
        logger.info("block %s (%s) %s", name, ", ".join(block.nodes), reason)
        self._write("block_ended", name, nodes=list(block.nodes), reason=reason)
        if block.job is not None:
            self._desk.forget(block.job)
        for slot in self._roster.of_block(name):
            self._lose(slot, f"its block {reason}", crash=False)
        self._events.append(ev.BlockEnded(self._clock(), name))

    def _on_slot_task_ended(self, ended: SlotTaskEnded) -> None:
        slot = self._roster.by_token(ended.token)
        if slot is not None:
            self._lose(slot, f"its process ended: {ended.error}", crash=True)
        elif ended.token in self._greeted:
            return  # lost long ago; HTEX has only now noticed
        else:
            if isinstance(ended.error, ManagerLost):
                return  # its block ended before it could say hello, and was accounted for then
            self._roster.tasks_queued = max(0, self._roster.tasks_queued - 1)
            self._failed_starts += 1
            logger.warning("a slot could not start: %s", ended.error)
        if self._failed_starts >= self._MOST_FAILED_STARTS:
            self._fail_all(
                BatchSystemError(
                    f"{self._failed_starts} slots in a row could not start on their nodes, the last: {ended.error}"
                )
            )
        elif self._roster.blocks:
            self._order_slot()

    def _order_slot(self) -> None:
        self._tokens += 1
        self._roster.tasks_queued += 1
        self._submit_slot(f"slot-{self._tokens}")

    # Slots.

    def _on_message(self, name: str, message: Message) -> None:
        if message.type == "hello":
            self._on_hello(name, message)
            return
        slot = self._roster.slots.get(name)
        if slot is None:
            # Lost already, as far as we know: whatever it runs, others may be running it by now.
            self._server.send(name, Message("exit", {"now": True}))
            return
        slot.heard = self._clock()
        if message.type == "beat":
            self._server.send(name, message)
        elif message.type == "kv":
            self._rendezvous.handle(name, message, self._clock())
        elif message.type == "notice":
            self._on_notice(slot, message["closes_in"])
        elif message.type == "progress":
            self._on_progress(message)
        elif message.type == "ended":
            self._on_ended(slot, message)
        elif message.type == "task_ended":
            self._on_task_ended(slot, message)

    def _on_hello(self, name: str, message: Message) -> None:
        self._roster.tasks_queued = max(0, self._roster.tasks_queued - 1)
        self._failed_starts = 0
        self._greeted.add(message["token"])
        block = self._roster.blocks.get(message["block"])
        if block is None or block.releasing:
            self._server.send(name, Message("exit", {"now": True}))
            return
        slot = Slot(name, message["token"], message["node"], block.name, heard=self._clock())
        self._roster.slots[name] = slot
        closes = block.loses_nodes_at(self._clock())
        self._server.send(name, Message("welcome", {"closes_in": closes - self._clock()}))
        self._write("slot_joined", name, node=slot.node, block=block.name, pid=message["pid"])
        if self._roster.completes(slot):
            node = PoolNode(slot.node, closes)
            self._events.append(ev.NodesJoined(self._clock(), block.name, (node,)))
            self._write("node_joined", slot.node, block=block.name, closes=closes)

    def _on_notice(self, slot: Slot, closes_in: float) -> None:
        slot.leaving = True
        self._events.append(ev.NodesClosing(self._clock(), (slot.node,), self._clock() + closes_in))
        self._write("notice", slot.node, closes_in=closes_in)
        self._desk.survey_soon()
        if slot.busy is None:
            self._lose(slot, "the batch system takes its node", crash=False)

    def _find_silent(self) -> None:
        limit = self._clock() - self._settings.silence
        for slot in [slot for slot in self._roster.slots.values() if slot.heard < limit]:
            self._kill(slot, f"no sign of life for {self._settings.silence:g} s")

    def _kill(self, slot: Slot, reason: str) -> None:
        self._server.send(slot.name, Message("exit", {"now": True}))
        self._lose(slot, reason, crash=True)

    def _lose(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Give a slot up: its node is incomplete, and what it ran must go on without it."""
        self._roster.slots.pop(slot.name, None)
        crash = crash and not slot.leaving and slot.block in self._roster.blocks
        logger.log(logging.WARNING if crash else logging.INFO, "slot %s is lost: %s", slot.name, reason)
        self._write("slot_lost", slot.name, node=slot.node, reason=reason)
        if self._roster.incomplete(slot):
            self._events.append(ev.NodesLeft(self._clock(), (slot.node,)))
            self._write("node_left", slot.node, reason=reason)
        if isinstance(slot.busy, str):
            training = self._trainings.get(slot.busy)
            if training is not None and training.generation is not None:
                training.crashes += crash
                training.last_crash = reason if crash else training.last_crash
                self._end_member(training, training.generation, slot.name, lost=True)
        elif slot.busy is not None:
            self._requeue_task(slot.busy)
        self._desk.survey_soon()

    # Trainings.

    def _on_progress(self, message: Message) -> None:
        training = self._trainings.get(message["trainer"])
        if training is None or message["generation"] != training.generations:
            return
        self._take_progress(training, message["progress"])

    def _take_progress(self, training: Training, progress: dict[str, Any]) -> None:
        if training.take(progress):
            self._write("checkpoint", training.name, step=progress["checkpoint_step"])
        self._write("progress", training.name, **progress)
        total = progress.get("samples_total") or training.request.samples
        if total is not None:
            left = max(0.0, float(total) - progress["samples"])
            self._events.append(ev.TrainerProgressed(self._clock(), training.name, left))

    def _on_ended(self, slot: Slot, message: Message) -> None:
        training = self._trainings.get(message["trainer"])
        slot.busy = None
        if training is None or (generation := training.generation) is None:
            return
        if message["generation"] != generation.number or slot.name not in generation.running:
            return
        outcome = message["outcome"]
        if slot.name == generation.first and message.header.get("progress"):
            self._take_progress(training, message["progress"])
        if outcome == "failed":
            self._fail(training, _exception_of(message.payload))
        elif outcome == "finished" and slot.name == generation.first:
            self._finish(training, deserialize(message.payload))
        self._end_member(training, generation, slot.name, lost=outcome in ("peer_lost", "failed"))
        if slot.leaving:
            self._lose(slot, "the batch system takes its node", crash=False)

    def _end_member(self, training: Training, generation: Generation, slot: str, *, lost: bool) -> None:
        if not generation.end(slot):
            return
        if lost and generation.failing_since is None:
            generation.failing_since = self._clock()
        if not generation.running:
            self._rendezvous.drop(training.key)
            self._write(
                "fragment_ended",
                training.name,
                generation=generation.number,
                nodes=sorted(generation.nodes),
                lost=generation.failing_since is not None,
                progress=training.progress,
            )
            training.generation = None
            if training.future.done():
                self._trainings.pop(training.name, None)

    def _finish(self, training: Training, value: object) -> None:
        self._events.append(ev.TrainerFinished(self._clock(), training.name))
        self._write("training_finished", training.name, progress=training.progress)
        self._journal.commit()  # before anybody who waits for the future looks into it
        training.future.set_result(value)

    def _fail(self, training: Training, error: BaseException) -> None:
        if training.future.done():
            return
        self._events.append(ev.TrainerFailed(self._clock(), training.name))
        self._write("training_failed", training.name, error=f"{type(error).__name__}: {error}")
        self._journal.commit()
        training.future.set_exception(error)
        if training.generation is None:
            self._trainings.pop(training.name, None)
        else:
            self._pause(training, training.generation)

    def _converge(self, training: Training) -> None:
        """Move one training a step from where it runs to where it should."""
        generation = training.generation
        if generation is not None:
            failing = generation.failing_since
            if failing is not None and self._clock() - failing > self._settings.loss_timeout:
                for name in list(generation.running):
                    self._kill(self._roster.slots[name], "its peers were lost and it did not end")
            elif generation.nodes != training.desired and not generation.pausing and failing is None:
                self._pause(training, generation)
            return
        if training.crashes > self._settings.max_crashes:
            self._fail(
                training,
                TooManyRestarts(
                    f"training {training.name!r}: {training.crashes} of its processes died since its last checkpoint, "
                    f"though their nodes were not taken; the last: {training.last_crash}; "
                    "see the worker logs in the run directory"
                ),
            )
            return
        if training.desired and not training.future.done():
            self._start(training)

    def _pause(self, training: Training, generation: Generation) -> None:
        generation.pausing = True
        header = {"trainer": training.name, "generation": generation.number}
        for name in generation.running:
            self._server.send(name, Message("pause", header))

    def _start(self, training: Training) -> None:
        """Start the next generation, if all slots of its nodes are there and free."""
        slots = self._roster.complete_slots(training.desired)
        if slots is None or any(slot.busy is not None or slot.leaving for slot in slots):
            return
        training.generations += 1
        training.generation = Generation(
            training.generations,
            training.desired,
            {slot.name for slot in slots},
            first=slots[0].name,
            started=self._clock(),
        )
        self._rendezvous.open(training.key)
        interval = training.request.checkpoint_interval
        header = {
            "trainer": training.name,
            "generation": training.generations,
            "world_size": len(slots),
            "timeout": self._settings.collective_timeout,
            "checkpoint_root": str(self._settings.checkpoint_root),
            "checkpoint_interval": self._settings.checkpoint_interval if interval is None else interval.total_seconds(),
            "keep": self._settings.keep,
            "save_margin": self._settings.save_margin,
            "seed": training.request.seed,
            "threads": self._settings.threads,
            "epochs": training.request.epochs,
        }
        for rank, slot in enumerate(slots):
            slot.busy = training.name
            self._server.send(slot.name, Message("run", {**header, "rank": rank}, training.payload))
        self._write("fragment_started", training.name, generation=training.generations, nodes=sorted(training.desired))

    # Ordinary tasks.

    def _serve_tasks(self) -> None:
        for slot in self._roster.free_slots(self._lent):
            if not self._queued_tasks:
                break
            number = self._queued_tasks.pop(0)
            task = self._tasks[number]
            slot.busy = number
            self._server.send(slot.name, Message("task", {"task": number}, task.payload))
        self._tell_tasks()

    def _on_task_ended(self, slot: Slot, message: Message) -> None:
        slot.busy = None
        task = self._tasks.pop(message["task"], None)
        if task is not None and message["outcome"] == "finished":
            task.future.set_result(deserialize(message.payload))
        elif task is not None:
            task.future.set_exception(_exception_of(message.payload))
        if slot.leaving:
            self._lose(slot, "the batch system takes its node", crash=False)

    def _requeue_task(self, number: int) -> None:
        if number in self._tasks:
            self._queued_tasks.insert(0, number)

    def _tell_tasks(self) -> None:
        busy = frozenset(slot.node for slot in self._roster.slots.values() if isinstance(slot.busy, int))
        nodes = -(-len(self._queued_tasks) // self._settings.slots_per_node)
        self._events.append(ev.TasksWaiting(self._clock(), nodes, busy))

    # Actions.

    def _act(self, actions: ev.Actions) -> None:
        for action in actions:
            if isinstance(action, ev.RequestBlock):
                self._request(action)
            elif isinstance(action, ev.ReleaseBlock):
                if (block := self._roster.blocks.get(action.block)) is not None:
                    block.releasing = True
                    self._desk.withdraw(action.block)
                self._write("block_released", action.block)
            elif isinstance(action, ev.Lend):
                self._lent = action.nodes
            elif isinstance(action, ev.Reassign) and (training := self._trainings.get(action.trainer)) is not None:
                training.desired = action.nodes
                self._write(type(action).__name__.lower(), action.trainer, nodes=sorted(action.nodes))

    def _request(self, action: ev.RequestBlock) -> None:
        self._roster.blocks[action.block] = Block(action.block, action.nodes, action.seconds, action.window.closes)
        self._desk.order(BlockSpec(action.block, action.nodes, action.seconds))
        for _ in range(self._roster.missing_tasks()):
            self._order_slot()
        self._write(
            "block_requested",
            action.block,
            nodes=list(action.nodes),
            seconds=action.seconds,
            closes=action.window.closes,
        )

    def _write(self, kind: str, subject: str, **detail: Any) -> None:
        self._journal.write(self._clock(), kind, subject, **detail)


def _exception_of(payload: bytes) -> BaseException:
    wrapped = deserialize(payload)
    return wrapped.get_exception() if isinstance(wrapped, RemoteExceptionWrapper) else TrainingError(repr(wrapped))
