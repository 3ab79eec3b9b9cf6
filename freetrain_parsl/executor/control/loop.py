"""The control loop: the driver's thread that runs the planner in real time.

It translates messages from slots, the job submitter and the user's threads into planner events, and the planner's
actions into block requests and assignments, which the training manager carries out.
"""

from __future__ import annotations

import logging
import math
import queue
import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parsl.executors.high_throughput.errors import ManagerLost

from freetrain_parsl.errors import BatchSystemError, ClusterGone, TrainingInterrupted
from freetrain_parsl.executor.batch.start_failures import StartWatch
from freetrain_parsl.executor.batch.submitter import (
    BatchSystemEnded,
    BlockRefused,
    BlockSubmitted,
    JobSubmitter,
    StartsFailed,
    SubmissionsEnded,
)
from freetrain_parsl.executor.control.block_cycle import BlockCycle
from freetrain_parsl.executor.control.clock import SteadyClock, SurveyTimes
from freetrain_parsl.executor.control.plain_tasks import Task, TaskQueue
from freetrain_parsl.executor.control.recorded_planner import RecordedPlanner
from freetrain_parsl.executor.control.slot_registry import Block, Slot, SlotRegistry
from freetrain_parsl.executor.control.training_manager import TrainingManager
from freetrain_parsl.executor.environment import Difference, compare, describe_environment
from freetrain_parsl.executor.htex.interchange_watch import InterchangeEnded, InterchangeRestarted
from freetrain_parsl.executor.trainings import SharedSettings, Training
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import PoolNode
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import (
    Closing,
    DriverHeartbeat,
    Exit,
    Hello,
    Invalid,
    RunEnded,
    RunReport,
    SlotHeartbeat,
    StoreRequest,
    TaskEnded,
    Welcome,
)
from freetrain_parsl.windows.base import Survey

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from freetrain_parsl.executor.control.slot_server import SlotServer
    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.settings import SettingsInSeconds
    from freetrain_parsl.protocol.messages import ToDriver

logger = logging.getLogger(__name__)

__all__ = ["CancelTraining", "ControlLoop", "SlotTaskEnded"]


@dataclass(frozen=True)
class CancelTraining:
    """A request to end the training of this future, with its state saved."""

    future: Future[Any]


@dataclass(frozen=True)
class SlotTaskEnded:
    """The HTEX task behind a slot has ended, which happens only if its process died or could not start."""

    token: str
    error: BaseException | None


class ControlLoop(threading.Thread):
    """Owns planner, slots, trainings and journal; all other threads communicate with it through `post`.

    Parameters
    ----------
    policy, planner_settings
        Policy and settings of the planner.
    server, journal
        Owned by this thread once it has started.
    submitter
        The job submitter; its `post` must be this object's.
    shared_settings
        See `SharedSettings`.
    slots_per_node
        Number of slots that make a node complete.
    outdated
        Seconds after which the batch system's last answer is no longer used.
    heartbeat_timeout
        A slot from which no message arrives for this many seconds has failed.
    submit_slot
        Submits one more slot task to HTEX, identified by a token.
    fail_all
        Called with the reason when nothing runs and no slot can ever start.
    refuse_new
        Called with the reason when no further block is submitted, although trainings may still run.
    clock
        Wall clock, seconds since the epoch. It may be stepped: the loop uses a `SteadyClock` based on it.
    monotonic
        Monotonic clock of the `SteadyClock`.
    """

    _PASS = 0.25  # maximum seconds between iterations: bounds the delay in detecting a timeout
    _MOST_FAILED_STARTS = 5
    _MOST_FAULTS = 5  # messages of a slot that cannot be handled
    _MOST_DENIALS = 15  # heartbeats; at least five are sent within the heartbeat timeout
    _PATIENCE = 60.0  # seconds until new slot tasks are submitted for a running block whose slots are missing
    _STEP = 1.0  # steps of the wall clock by more than this, in seconds, are recorded
    _STOPPED = 1.0  # an iteration longer than this, in seconds, may mean that the process was stopped
    _BACKLOG = 0.5  # seconds for which queued messages are then read before timeouts are checked

    def __init__(
        self,
        *,
        policy: Policy,
        planner_settings: SettingsInSeconds,
        server: SlotServer,
        submitter: JobSubmitter,
        journal: Journal,
        shared_settings: SharedSettings,
        slots_per_node: int,
        outdated: float,
        heartbeat_timeout: float,
        submit_slot: Callable[[str], None],
        fail_all: Callable[[Exception], None],
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        refuse_new: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        super().__init__(name="freetrain-driver", daemon=True)
        self._server = server
        self._submitter = submitter
        self._journal = journal
        self._outdated = outdated
        self._surveyed_at: float | None = None
        self._heartbeat_timeout = heartbeat_timeout
        self._peer_timeout = shared_settings.limits.peer_timeout
        self._submit_slot = submit_slot
        self._fail_all = fail_all
        self._refuse_new = refuse_new
        self._closed: BatchSystemError | None = None
        self._clock = SteadyClock(clock, monotonic)
        self._planner = RecordedPlanner(policy, planner_settings, journal.write, self._clock())
        self._survey_times = SurveyTimes()
        self._lead = 0.0
        self._listened = self._clock()
        self._posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._events: list[ev.Event] = []
        self._registry = SlotRegistry(slots_per_node)
        self._starts = StartWatch(self._registry, submitter, startup=self._planner.settings.startup, clock=self._clock)
        self._blocks = BlockCycle(
            self._registry,
            submitter,
            self._starts,
            settings=self._planner.settings,
            emit=self._events.append,
            write=self._write,
            lose=lambda slot, reason: self._lose(slot, reason, crash=False),
            clock=self._clock,
        )
        self._manager = TrainingManager(
            shared_settings,
            registry=self._registry,
            send=server.send,
            kill=self._kill,
            set_aside=self._set_aside,
            inform=self._events.append,
            journal=journal,
            clock=self._clock,
        )
        self._tasks = TaskQueue(self._registry, slots_per_node, server.send)
        self._notes: tuple[str, ...] = ()
        self._tokens = 0
        self._greeted: set[str] = set()
        self._known: set[str] = set()
        """Names of all slots that ever joined; a slot cannot join twice."""
        self._failed_starts = 0
        self._versions = describe_environment()
        self._differences: set[str] = set()
        self._environment_fits = False

    # Other threads.

    def post(self, item: object) -> None:
        """Queue a `Training`, `Task`, `CancelTraining`, `SlotTaskEnded` or `SubmitterMessage` for the loop."""
        if isinstance(item, Survey):
            item = self._survey_times.translate(item, self._clock())  # now, since its times age in the queue
        self._posted.put(item)
        self._server.wake()

    def stop(self, timeout: float) -> None:
        """End the slots and the thread; the job submitter cancels the blocks."""
        self._stopping.set()
        self._server.wake()
        if self.is_alive():
            self.join(timeout)

    # The loop.

    def run(self) -> None:
        """Iterate until stopped."""
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:  # a bug in the loop: its futures must not stay pending forever
            logger.exception("the driver failed")
            reason = f"the driver of the FreeTrain executor failed: {error!r}; see freetrain.log in the run directory"
            self._fail_all(TrainingInterrupted(reason))
        finally:
            for slot in self._registry.slots:
                self._server.send(slot, Exit())
            self._journal.close()
            self._server.close()

    def _turn(self) -> None:
        now = self._clock()
        self._record_step()
        self._listen(min(self._PASS, self._planner.wake_at(now) - now))
        while not self._posted.empty():
            self._on_post(self._posted.get())
        if self._surveyed_at is not None and self._clock() - self._surveyed_at > self._outdated:
            self._surveyed_at = None
            self._events.append(ev.WindowsOutdated(self._clock()))
        self._find_silent()
        self._starts.look()
        self._take_back()
        self._manager.rendezvous.expire(self._clock())
        self._events.append(self._tasks.demand(self._clock()))
        events, self._events[:] = list(self._events), []  # acting produces new events
        self._act(self._planner.advance(*events))
        self._manager.advance()
        self._tasks.serve()
        self._blocks.leave_in_time()
        self._end_if_closed()
        self._submitter.rest(not (self._planner.trainers or self._tasks.waiting or self._registry.blocks))
        self._journal.commit()

    def _listen(self, wait: float) -> None:
        """Handle the slots' messages; if this process was stopped, also all messages sent meanwhile."""
        for slot, message in self._server.receive(wait):
            self._take(slot, message)
        now = self._clock()
        if now - self._listened > self._STOPPED:
            while (left := now + self._BACKLOG - self._clock()) > 0:
                for slot, message in self._server.receive(left):
                    self._take(slot, message)
            now = self._clock()
        self._listened = now

    def _record_step(self) -> None:
        """Record a step of the wall clock, which the journal's times do not follow."""
        lead = self._clock.lead
        if abs(lead - self._lead) > self._STEP:
            step, self._lead = lead - self._lead, lead
            logger.warning("the wall clock was set %s by %.0f s", "forward" if step > 0 else "back", abs(step))
            self._write(record.ClockStepped("", step, lead))

    # What other threads posted.

    def _on_post(self, item: object) -> None:
        if isinstance(item, Training):
            self._manager.submit(item)
        elif isinstance(item, Task):
            self._tasks.submit(item)
        elif isinstance(item, Survey):
            self._on_survey(item)
        elif isinstance(item, BlockSubmitted):
            self._blocks.on_submitted(item.block, item.job)
        elif isinstance(item, BlockRefused):
            self._blocks.end(item.block, f"was refused: {item.reason}")
        elif isinstance(item, StartsFailed):
            next_attempt = self._clock() + item.pause if math.isfinite(item.pause) else None
            self._write(record.StartsFailed("", item.count, item.most, next_attempt, item.reason))
        elif isinstance(item, SubmissionsEnded):
            self._close(BatchSystemError(item.reason))
        elif isinstance(item, CancelTraining):
            self._manager.cancel(item.future)
        else:
            self._on_ended(item)

    def _on_ended(self, item: object) -> None:
        """Handle the end of a slot's process, of HTEX's interchange or of the batch system."""
        if isinstance(item, SlotTaskEnded):
            self._on_slot_task_ended(item)
        elif isinstance(item, InterchangeEnded):
            self._on_interchange_ended(item.reason)
        elif isinstance(item, InterchangeRestarted):
            self._on_interchange_restarted()
        elif isinstance(item, BatchSystemEnded):
            self._fail_all(ClusterGone(f"{item.reason}; checkpoints are kept"))

    def _on_survey(self, survey: Survey) -> None:
        self._surveyed_at = self._clock()
        self._events.append(ev.WindowsSeen(survey.time, survey.windows, survey.terms))
        self._manager.machine_has(survey.nodes)
        for note in survey.notes:
            if note not in self._notes:
                logger.info("about the plan: %s", note)
        self._notes = survey.notes
        self._blocks.on_survey(survey)
        for _ in range(self._registry.overdue(self._clock(), self._PATIENCE)):
            self._order_slot()

    def _close(self, error: BatchSystemError) -> None:
        """Submit no further block: waiting trainings fail, running ones continue as long as they have nodes."""
        if self._closed is None:
            self._closed = error
            self._refuse_new(error)
            self._manager.fail_waiting(error)

    def _end_if_closed(self) -> None:
        """Fail the remaining trainings and tasks once there is no slot, and no block that could provide one."""
        if self._closed is None or self._registry.slots:
            return
        if not any(block.works for block in self._registry.blocks.values()):
            self._manager.fail_all(self._closed)
            self._fail_all(self._closed)

    def _on_slot_task_ended(self, ended: SlotTaskEnded) -> None:
        slot = self._registry.by_token(ended.token)
        if slot is not None:
            self._lose(slot, f"its process ended: {ended.error}", crash=True)
        elif isinstance(ended.error, ManagerLost):
            return  # its block has ended, which HTEX has only now noticed
        elif ended.token in self._greeted:
            # Dropped before its process ended. If its block is still running, the node can have another slot.
            self._order_missing_slots()
            return
        else:
            self._registry.tasks_queued = max(0, self._registry.tasks_queued - 1)
            self._failed_starts += 1
            logger.warning("a slot could not start: %s", ended.error)
        if self._failed_starts >= self._MOST_FAILED_STARTS:
            self._submitter.stop_submitting()
            self._close(
                BatchSystemError(
                    f"{self._failed_starts} slots in a row could not start on their nodes, the last: {ended.error}"
                )
            )
        elif self._registry.blocks:
            self._order_slot()

    def _on_interchange_ended(self, reason: str) -> None:
        """Release the blocks whose worker pools used the interchange: they soon end, and their slots with them."""
        self._write(record.InterchangeEnded("", reason))
        for block in {slot.block for slot in self._registry.slots.values()}:
            if (held := self._registry.blocks.get(block)) is not None:
                self._blocks.make_way(held, self._clock(), "lost HTEX's interchange")

    def _on_interchange_restarted(self) -> None:
        self._write(record.InterchangeRestarted(""))
        self._registry.tasks_queued = 0  # the old interchange's tasks are gone
        self._order_missing_slots()

    def _order_missing_slots(self) -> None:
        for _ in range(self._registry.missing_tasks()):
            self._order_slot()

    def _order_slot(self) -> None:
        self._tokens += 1
        self._registry.tasks_queued += 1
        self._submit_slot(f"slot-{self._tokens}")

    # Slots.

    def _take(self, name: str, message: ToDriver) -> None:
        """Handle a message from a slot; whatever it contains, the trainings of other slots continue."""
        try:
            self._on_message(name, message)
        except (OSError, sqlite3.Error, MemoryError):
            raise  # the driver's fault, not the slot's
        except Exception as error:
            logger.exception("internal error while handling a message")
            self._count_fault(name, f"a {type(message).__name__} could not be handled: {error}")

    def _count_fault(self, name: str, reason: str) -> None:
        """Drop a slot that sends many messages that cannot be handled."""
        slot = self._registry.slots.get(name)
        if slot is None:
            logger.warning("dropped a message of the unknown peer %s: %s", name, reason)
            return
        slot.faults += 1
        if slot.faults == 1:  # else such a slot could fill the disk
            logger.warning("dropped a message of slot %s: %s", name, reason)
        if slot.faults >= self._MOST_FAULTS:
            self._kill(slot, f"{slot.faults} of its messages could not be handled, the last: {reason}")

    def _on_message(self, name: str, message: ToDriver) -> None:
        if isinstance(message, Invalid):
            self._count_fault(name, message.reason)
            return
        if isinstance(message, Hello):
            self._on_hello(name, message)
            return
        slot = self._registry.slots.get(name)
        if slot is None:
            # It counts as failed: its training may be running elsewhere by now.
            self._server.send(name, Exit(now=True))
            return
        slot.heard = self._clock()
        match message:
            case SlotHeartbeat():
                self._server.send(name, DriverHeartbeat())
                self._manager.on_heartbeat(slot, message.waited)
                self._check_assignment(slot, message)
            case StoreRequest():
                self._manager.on_store_request(slot, message)
            case Closing():
                self._on_closing(slot, message)
            case RunReport():
                self._manager.on_report(slot, message)
            case RunEnded():
                self._manager.on_run_ended(slot, message)
            case TaskEnded():
                self._tasks.on_ended(slot, message)
        if slot.leaving and isinstance(message, (RunEnded, TaskEnded)):
            self._lose(slot, "the batch system reclaims its node", crash=False)

    def _check_assignment(self, slot: Slot, heartbeat: SlotHeartbeat) -> None:
        """Drop a slot whose heartbeats keep contradicting its assignment: the command or its result was lost."""
        is_task = isinstance(slot.busy, int)
        given = slot.busy if isinstance(slot.busy, int) else self._manager.run_of(slot)
        does = heartbeat.task if is_task else heartbeat.run
        if given is None or does == given:
            slot.denials = 0
            return
        slot.denials += 1
        if slot.denials > self._MOST_DENIALS:
            self._kill(slot, f"it does not run what it was assigned ({'task' if is_task else 'run'} {given})")

    def _on_hello(self, name: str, message: Hello) -> None:
        if name in self._registry.slots:
            return  # repeated
        if name in self._known:
            self._server.send(name, Exit(now=True))  # dropped meanwhile
            return
        self._known.add(name)
        self._registry.tasks_queued = max(0, self._registry.tasks_queued - 1)
        self._failed_starts = 0
        self._greeted.add(message.token)
        block = self._registry.blocks.get(message.block)
        if block is None or block.releasing:
            # Its node may outlive the block: if the batch system's daemon there has failed, the job cannot be ended,
            # and its worker pool would take the slot tasks that are meant for other nodes.
            self._server.send(name, Exit(now=True, node=True))
            self._order_missing_slots()
            return
        if self._refuse_environment(name, message, block):
            return
        slot = Slot(name, message.token, block.node_of(message.node), block.name, heard=self._clock())
        self._registry.slots[name] = slot
        if block.joined is None:
            block.joined = self._clock()
        closes = block.loses_nodes_at(self._clock())
        self._server.send(name, Welcome(closes - self._clock()))
        self._write(record.SlotJoined(name, slot.node, block.name, message.pid))
        if self._registry.completes(slot):
            self._join_node(slot, block)

    def _join_node(self, slot: Slot, block: Block) -> None:
        """Add the node of a slot, all of whose slots have joined, to the pool."""
        closes = block.loses_nodes_at(self._clock())
        self._events.append(ev.NodesJoined(self._clock(), block.name, (PoolNode(slot.node, closes),)))
        self._write(record.NodeJoined(slot.node, block.name, closes))

    def _set_aside(self, slot: Slot, reason: str) -> None:
        """Take a node out of the pool for some time: it works, but the other nodes cannot reach it."""
        pause = self._registry.set_aside(slot.node, self._clock(), 2 * self._peer_timeout)
        logger.warning("node %s is set aside for %.0f s: %s", slot.node, pause, reason)
        self._write(record.NodeSetAside(slot.node, pause, reason))
        if self._registry.incomplete(slot):
            self._events.append(ev.NodesLeft(self._clock(), (slot.node,)))
            self._write(record.NodeLeft(slot.node, reason))

    def _take_back(self) -> None:
        """Return nodes that were set aside to the pool when their time is over."""
        for slot in self._registry.returning(self._clock()):
            if (block := self._registry.blocks.get(slot.block)) is not None and self._registry.completes(slot):
                self._join_node(slot, block)

    def _refuse_environment(self, name: str, message: Hello, block: Block) -> bool:
        """Compare a new slot's environment with the driver's; return whether its node cannot run trainings."""
        node, fault = message.node, message.fault
        if fault:
            difference: Difference | None = Difference(f"node {node} cannot run trainings: {fault}", refused=True)
        else:
            difference = compare(node, message.versions, self._versions)
        if difference is None:
            self._environment_fits = True
            return False
        if difference.text not in self._differences:  # log once, not for each slot of a node
            self._differences.add(difference.text)
            logger.warning("%s", difference.text)
            self._write(record.EnvironmentDiffers(node, difference.text, difference.refused))
        if not difference.refused:
            self._environment_fits = True
            return False
        self._server.send(name, Exit(now=True, node=True))
        block.releasing = difference.text
        self._submitter.reject(block.name, difference.text)
        if not self._environment_fits:
            # No node has matched so far: the site's configuration is wrong, and further blocks would be wasted.
            self._fail_all(BatchSystemError(difference.text))
        return True

    def _on_closing(self, slot: Slot, message: Closing) -> None:
        slot.leaving = True
        if (block := self._registry.blocks.get(slot.block)) is not None:
            block.warned = True
        self._events.append(ev.NodesClosing(self._clock(), (slot.node,), self._clock() + message.closes_in))
        self._write(record.NodeClosing(slot.node, message.closes_in))
        if message.gone:
            self._lose(slot, "the batch system reclaims its node", crash=False)

    def _find_silent(self) -> None:
        limit = self._listened - self._heartbeat_timeout
        for slot in [slot for slot in self._registry.slots.values() if slot.heard < limit]:
            self._kill(slot, f"no message from it for {self._heartbeat_timeout:g} s")

    def _kill(self, slot: Slot, reason: str) -> None:
        self._server.send(slot.name, Exit(now=True))
        self._lose(slot, reason, crash=True)

    def _lose(self, slot: Slot, reason: str, *, crash: bool) -> None:
        """Drop a slot: its node is incomplete, and its training must continue without it."""
        self._registry.slots.pop(slot.name, None)
        self._server.forget(slot.name)
        crash = crash and not slot.leaving and slot.block in self._registry.blocks
        logger.log(logging.WARNING if crash else logging.INFO, "dropped slot %s: %s", slot.name, reason)
        self._write(record.SlotLost(slot.name, slot.node, reason))
        if self._registry.incomplete(slot):
            self._events.append(ev.NodesLeft(self._clock(), (slot.node,)))
            self._write(record.NodeLeft(slot.node, reason))
        self._manager.on_lost(slot, reason, crash=crash)
        self._tasks.on_lost(slot)

    # Actions.

    def _act(self, actions: ev.Actions) -> None:
        for action in actions:
            if isinstance(action, ev.RequestBlock):
                self._blocks.order(action)
                self._order_missing_slots()
            elif isinstance(action, ev.ReleaseBlock):
                self._blocks.release(action.block)
            elif isinstance(action, ev.Lend):
                self._tasks.lent = action.nodes
            elif isinstance(action, ev.Reassign):
                self._manager.assign(action.trainer, action.nodes)
                self._write(_ASSIGNMENTS[type(action)](action.trainer, sorted(action.nodes)))

    def _write(self, entry: record.Record) -> None:
        self._journal.write(self._clock(), entry)


_ASSIGNMENTS = {ev.Assign: record.Assign, ev.Grow: record.Grow, ev.Shrink: record.Shrink, ev.Stop: record.Stop}
