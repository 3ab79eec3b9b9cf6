"""The control loop: the driver's thread that runs the planner in real time.

It passes what slots, the job submitter and the user's threads report to the owners of blocks (`BlockCycle`), slots
(`SlotCycle`), jobs (`JobManager`) and ordinary tasks (`TaskQueue`), and their planner events to the planner,
whose actions they carry out.
"""

from __future__ import annotations

import logging
import math
import queue
import sqlite3
import threading
import time
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import BatchSystemError, ClusterGone, DriverSuperseded, TrainingInterrupted
from freetrain_parsl.executor.batch.submitter import (
    BatchSystemEnded,
    BlockRefused,
    JobSubmitter,
    StartsFailed,
    SubmissionsEnded,
)
from freetrain_parsl.executor.driver.block_cycle import BlockCycle
from freetrain_parsl.executor.driver.clock import SteadyClock, SurveyTimes
from freetrain_parsl.executor.driver.plain_tasks import Task, TaskQueue
from freetrain_parsl.executor.driver.recorded_planner import RecordedPlanner
from freetrain_parsl.executor.driver.settler import Settler
from freetrain_parsl.executor.driver.slot_cycle import SlotCycle, SlotTaskEnded
from freetrain_parsl.executor.driver.slot_registry import SlotRegistry
from freetrain_parsl.executor.jobs.manager import JobManager
from freetrain_parsl.executor.jobs.request import SharedSettings, Training
from freetrain_parsl.planning import events as ev
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.messages import (
    Closing,
    DriverHeartbeat,
    Exit,
    FilesLoaded,
    Hello,
    Invalid,
    Output,
    RunEnded,
    RunMessage,
    RunReport,
    SlotHeartbeat,
    StoreRequest,
    TaskEnded,
    Values,
)
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.texts import text_of
from freetrain_parsl.windows.base import Survey, without_nodes
from freetrain_parsl.windows.commands import COMMAND_COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from freetrain_parsl.executor.driver.slot_registry import Slot
    from freetrain_parsl.executor.driver.slot_server import SlotServer
    from freetrain_parsl.executor.htex.node_start import NodeStart
    from freetrain_parsl.executor.journal import Journal
    from freetrain_parsl.executor.node_kinds import KindOfSlots
    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.settings import SettingsInSeconds
    from freetrain_parsl.protocol.messages import ToDriver

logger = logging.getLogger(__name__)

__all__ = ["CancelTraining", "ControlLoop"]


@dataclass(frozen=True)
class CancelTraining:
    """A request to end the training job of this future, with its state saved."""

    future: Future[Any]


class ControlLoop:
    """A thread that owns planner, slots, training jobs and journal; all others communicate with it through `post`.

    Parameters
    ----------
    server, journal
        Owned by this thread once it has started.
    submitter
        The job submitter; its `post` must be this object's.
    slots_per_node, node_kinds, share_nodes
        See `SlotRegistry`.
    outdated
        Seconds after which the batch system's last answer is no longer used.
    heartbeat_timeout
        A slot from which no message arrives for this many seconds has failed.
    submit_slot
        Submits one more slot task to HTEX, identified by a token.
    fail_all
        Called with the reason when nothing runs and no slot can ever start.
    refuse_new
        Called with the reason when no further block is submitted, although training jobs may still run.
    take_output
        Called with the output of a training job's process: the job's name, the process, and lines; must not block.
    take_values
        Called with values of a training job for trackers: its name, and the rows as in `Logged`; must not block.
    check_driver
        Raises `DriverSuperseded` once another driver has taken over the run; must not block, except after this process
        was suspended.
    clock, monotonic
        The clocks of the loop's `SteadyClock`.
    """

    _PASS = 0.25  # maximum seconds between iterations: bounds the delay in detecting a timeout
    _STEP = 1.0  # steps of the wall clock by more than this, in seconds, are recorded
    _COUNTING = 600.0  # seconds between records of the requests to the batch system
    _STOPPED = 1.0  # an iteration longer than this, in seconds, may mean that the process was stopped
    _CALLBACKS = 5.0  # seconds for which the end waits for callbacks of futures
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
        share_nodes: bool = False,
        outdated: float,
        heartbeat_timeout: float,
        submit_slot: Callable[[str], None],
        fail_all: Callable[[Exception], None],
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        refuse_new: Callable[[Exception], None] = lambda _: None,
        node_kinds: Mapping[str, KindOfSlots] = MappingProxyType({}),
        take_output: Callable[[str, str, bytes], None] = lambda _training, _source, _output: None,
        take_values: Callable[[str, Sequence[str]], None] = lambda _training, _rows: None,
        check_driver: Callable[[], None] = lambda: None,
        node_start: NodeStart | None = None,
    ) -> None:
        self._thread = threading.Thread(target=self.run, name="freetrain-driver", daemon=True)
        self._server = server
        self._submitter = submitter
        self._journal = journal
        self._outdated = outdated
        self._surveyed_at: float | None = None
        self._fail_all = fail_all
        self._refuse_new = refuse_new
        self._take_output = take_output
        self._take_values = take_values
        self._check_driver = check_driver
        self._node_start = node_start
        self._closed: BatchSystemError | None = None
        self._clock = SteadyClock(clock, monotonic)
        self._survey_times = SurveyTimes()
        self._lead = 0.0
        self._counted_at = self._clock()
        self._listened = self._clock()
        self._posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._events: list[ev.Event] = []
        self._registry = SlotRegistry(slots_per_node, node_kinds, share_nodes=share_nodes)
        self._planner = RecordedPlanner(
            policy, planner_settings, journal.write, self._clock(), slots_per_node=self._registry.units_per_node
        )
        self._slots = SlotCycle(
            self._registry,
            server,
            submitter,
            submit_slot=submit_slot,
            emit=self._events.append,
            write=self._write,
            on_lost=self._on_lost,
            fail_all=fail_all,
            heartbeat_timeout=heartbeat_timeout,
            aside=2 * shared_settings.limits.peer_timeout,
            clock=self._clock,
        )
        self._blocks = BlockCycle(
            self._registry,
            submitter,
            settings=self._planner.settings,
            emit=self._events.append,
            write=self._write,
            lose=partial(self._slots.lose, crash=False),
            clock=self._clock,
        )
        self._settler = Settler()
        self._manager = JobManager(
            shared_settings,
            registry=self._registry,
            send=server.send,
            kill=self._slots.kill,
            set_aside=self._slots.set_aside,
            inform=self._events.append,
            journal=journal,
            clock=self._clock,
            settle=self._settler.post,
        )
        self._tasks = TaskQueue(
            self._registry,
            server.send,
            shared_settings.limits.max_restarts,
            self._settler.post,
            shared_settings.values,
        )
        self._notes: tuple[str, ...] = ()
        self._turn_seconds = 0.0
        self._urgent = False  # whether a message has arrived that may require a decision

    # For other threads.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

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
            self._thread.join(timeout)

    # The loop.

    def run(self) -> None:
        """Iterate until stopped."""
        farewell = Exit()
        try:
            while not self._stopping.is_set():
                self._turn()
        except DriverSuperseded as error:
            farewell = Exit(now=True)  # nothing is saved: the training jobs belong to the other driver
            self._fail_all(error)
        except BaseException as error:  # a bug in the loop: its futures must not stay pending forever
            logger.exception("the driver failed")
            reason = (
                f"the driver of the FreeTrain executor failed: {type(error).__name__}: {text_of(error)}; "
                "see freetrain.log in the run directory"
            )
            self._fail_all(TrainingInterrupted(reason))
        finally:
            for slot in self._registry.slots:
                self._server.send(slot, farewell)
            self._record_requests(last=True)
            self._journal.close()
            self._manager.close()
            self._settler.close(self._CALLBACKS)
            self._server.close()

    def _turn(self) -> None:
        now = self._clock()
        self._check_driver()
        self._record_step()
        self._record_requests()
        self._listen(0.0 if self._urgent else min(self._PASS, self._planner.wake_at(now) - now))
        self._urgent = False
        begun = self._clock()
        while not self._posted.empty():
            self._on_post(self._posted.get())
        if self._surveyed_at is not None and self._clock() - self._surveyed_at > self._outdated:
            self._surveyed_at = None
            self._events.append(ev.WindowsOutdated(self._clock()))
        self._check_driver()
        self._slots.kill_silent(self._listened)
        self._blocks.look()
        self._slots.take_back()
        self._manager.rendezvous.expire(self._clock())
        self._events.append(self._tasks.demand(self._clock()))
        events, self._events[:] = list(self._events), []  # acting produces new events
        self._act(self._planner.advance(*events))
        self._receive(0.0)  # with a thousand slots, the planner and the training jobs take a tenth of a second each
        self._manager.advance(partial(self._receive, 0.0))
        self._tasks.serve()
        self._blocks.leave_in_time()
        self._end_if_closed()
        busy = self._planner.has_trainers or self._manager.gathers or self._tasks.waiting or self._registry.blocks
        self._submitter.rest(not busy)
        self._journal.commit(all_progress=False)
        self._turn_seconds = self._clock() - begun

    def _listen(self, wait: float) -> None:
        """Handle the slots' messages for `wait` seconds, or until one of them may require a decision.

        But for as long as the last iteration took, up to `_PASS`: where iterations are long, messages that require
        decisions are frequent, and one iteration is for many of them.

        If this process was stopped, also handle all messages sent in that time.
        """
        began = self._clock()
        until, least = began + wait, began + min(self._turn_seconds, self._PASS)
        while self._receive(until - self._clock()) and self._posted.empty() and self._clock() < until:
            pass
        while self._posted.empty() and not self._stopping.is_set() and (left := least - self._clock()) > 0:
            self._receive(left)
        now = self._clock()
        if now - self._listened > self._STOPPED:
            while (left := now + self._BACKLOG - self._clock()) > 0:
                self._receive(left)
            now = self._clock()
        self._listened = now

    def _receive(self, wait: float) -> bool:
        """Handle the messages that arrive together within `wait` seconds; return whether they are all routine."""
        received, routine = False, True
        for slot, message in self._server.receive(wait):
            self._check_driver()  # the process may have been suspended while it waited
            self._take(slot, message)
            received, routine = True, routine and _is_routine(message)
        self._urgent = self._urgent or not routine
        return received and routine

    def _record_step(self) -> None:
        """Record a step of the wall clock, which the journal's times do not follow."""
        lead = self._clock.lead
        if abs(lead - self._lead) > self._STEP:
            step, self._lead = lead - self._lead, lead
            logger.warning("the wall clock was set %s by %.0f s", "forward" if step > 0 else "back", abs(step))
            self._write(record.ClockStepped("", step, lead))

    def _record_requests(self, *, last: bool = False) -> None:
        """Record how often commands of the batch system were run, every few minutes and at the end."""
        seconds = self._clock() - self._counted_at
        if (last or seconds >= self._COUNTING) and (counts := COMMAND_COUNTS.take()):
            self._write(record.BatchRequests("", seconds, counts))
        if seconds >= self._COUNTING:
            self._counted_at = self._clock()

    # Messages that other threads posted.

    def _on_post(self, item: object) -> None:  # noqa: C901 - one case for each kind
        match item:
            case Training():
                self._manager.submit(item)
            case CancelTraining():
                self._manager.cancel(item.future)
            case Task():
                self._tasks.submit(item)
            case Survey():
                self._on_survey(item)
            case record.BlockSubmitted():
                self._write(item)
            case BlockRefused():
                self._blocks.end(item.block, f"was refused: {item.reason}", refused=True)
            case StartsFailed():
                next_attempt = self._clock() + item.pause if math.isfinite(item.pause) else None
                self._write(record.StartsFailed("", item.count, item.most, next_attempt, item.reason))
            case SubmissionsEnded():
                self._close(BatchSystemError(item.reason))
            case BatchSystemEnded():
                self._fail_all(ClusterGone(f"{item.reason}; checkpoints are kept"))
            case SlotTaskEnded():
                if (error := self._slots.on_task_ended(item)) is not None:
                    self._submitter.stop_submitting()
                    self._close(error)
            case record.InterchangeEnded():
                self._write(item)
                self._make_way_for_interchange()
            case record.InterchangeRestarted():
                self._write(item)
                self._slots.request_again()  # the old interchange's tasks are gone

    def _on_survey(self, survey: Survey) -> None:
        self._surveyed_at = self._clock()
        free = {node for window in survey.windows for node in window.nodes}
        self._registry.avoided = self._registry.aside & free
        windows = without_nodes(survey.windows, self._registry.avoided)
        self._events.append(ev.WindowsSeen(survey.time, windows, survey.terms, survey.terms_by_kind))
        self._slots.nodes_there_are = survey.nodes
        self._manager.machine_has(survey.nodes, survey.nodes_by_kind)
        for note in survey.notes:
            if note not in self._notes:
                logger.info("about the plan: %s", note)
        self._notes = survey.notes
        self._blocks.on_survey(survey)
        self._slots.request_overdue()

    def _close(self, error: BatchSystemError) -> None:
        """Submit no further block: waiting training jobs fail, running ones continue as long as they have nodes."""
        if self._closed is None:
            self._closed = error
            self._refuse_new(error)
            self._manager.fail_waiting(error)

    def _end_if_closed(self) -> None:
        """Fail the remaining training jobs and tasks once there is no slot, and no block that could provide one."""
        if self._closed is None or self._registry.slots:
            return
        if not any(block.works for block in self._registry.blocks.values()):
            self._manager.fail_all(self._closed)
            self._fail_all(self._closed)

    def _make_way_for_interchange(self) -> None:
        """Release the blocks whose worker pools used the interchange: they soon end, and their slots with them."""
        for block in {slot.block for slot in self._registry.slots.values()}:
            if (held := self._registry.blocks.get(block)) is not None:
                self._blocks.make_way(held, self._clock(), "lost HTEX's interchange")

    # Slots.

    def _take(self, name: str, message: ToDriver) -> None:
        """Handle a message from a slot; an error in it does not affect the training jobs of other slots."""
        try:
            match message:
                case Output():  # also of a slot that was dropped
                    self._take_output(message.training, message.source, message.payload)
                case Values():
                    self._take_values(message.training, message.rows)
                    self._journal.keep_values(self._clock(), message.training, message.rows)
                case FilesLoaded():
                    if self._node_start is not None:
                        self._node_start.learn(message.payload)
                case _:
                    self._on_message(name, message)
        except (OSError, sqlite3.Error, MemoryError):
            raise  # the driver's fault, not the slot's
        except Exception as error:
            logger.exception("internal error while handling a message")
            self._slots.count_fault(name, f"a {type(message).__name__} could not be handled: {text_of(error)}")

    def _on_message(self, name: str, message: ToDriver) -> None:
        match message:
            case Invalid():
                self._slots.count_fault(name, message.reason)
                return
            case Hello():
                if self._node_start is not None and (remark := self._node_start.started(message)):
                    self._write(record.PlainStart(message.node, remark))
                self._slots.on_hello(name, message)
                return
        slot = self._registry.slots.get(name)
        if slot is None:
            # It counts as failed: its training job may be running elsewhere by now.
            self._server.send(name, Exit(now=True))
            return
        slot.heard = self._clock()
        match message:
            case SlotHeartbeat():
                self._server.send(name, DriverHeartbeat())
                self._manager.on_heartbeat(slot, message.waited)
                self._slots.check_assignment(slot, message, self._manager.run_of(slot))
            case StoreRequest():
                self._manager.on_store_request(slot, message)
            case Closing():
                self._slots.on_closing(slot, message)
            case RunMessage():
                self._manager.on_message(slot, message)
            case TaskEnded():
                self._tasks.on_ended(slot, message)
        if slot.leaving and isinstance(message, (RunEnded, TaskEnded)):
            self._slots.reclaimed(slot)

    def _on_lost(self, slot: Slot, reason: str, crash: bool) -> None:  # noqa: FBT001 - the slot cycle's callback
        self._manager.on_lost(slot, reason, crash=crash)
        self._tasks.on_lost(slot, reason, crash=crash)

    # Actions.

    def _act(self, actions: ev.Actions) -> None:
        for action in actions:
            match action:
                case ev.RequestBlock():
                    self._blocks.request(action)
                    self._slots.request_missing()
                case ev.QueueBlock():
                    self._blocks.queue(action)
                    self._slots.request_missing()
                case ev.ReleaseBlock():
                    self._blocks.release(action.block)
                case ev.Lend():
                    self._tasks.lent = action.nodes
                case ev.Reassign():
                    self._manager.assign(action.trainer, action.nodes)
                    self._write(_ASSIGNMENTS[type(action)](action.trainer, sorted(action.nodes)))

    def _write(self, entry: record.Record) -> None:
        self._journal.write(self._clock(), entry)


_ROUTINE = (SlotHeartbeat, StoreRequest, Output, Values, FilesLoaded)


def _is_routine(message: ToDriver) -> bool:
    """Return whether a message requires no decision at once.

    A thousand slots send a thousand of these each second; an iteration for each would be most of the driver's work.
    """
    return isinstance(message, _ROUTINE) or (isinstance(message, RunReport) and isinstance(message.report, Progress))


_ASSIGNMENTS = {ev.Assign: record.Assign, ev.Grow: record.Grow, ev.Shrink: record.Shrink, ev.Stop: record.Stop}
