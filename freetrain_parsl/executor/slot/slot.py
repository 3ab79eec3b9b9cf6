"""A slot: the long HTEX task that occupies one worker place on a node and runs what the driver assigns to it.

The main thread runs the user's code, while a `Channel` thread communicates with the driver. Each training job has a
process of its own (see `place`); the next one continues the slot with the same name and connection. A slot never
returns while its block lives, because HTEX would give its place to another task on a node that is about to be
reclaimed. Instead, its process exits, on a command, on the batch system's signal, or when the driver has failed.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import queue
import signal
import threading
import time
import uuid
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from parsl.executors.execute_task import execute_task
from parsl.serialize import serialize

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.addresses import interface_for
from freetrain_parsl.executor.environment import describe_environment
from freetrain_parsl.executor.jobs.port import kind_of
from freetrain_parsl.executor.slot.channel import Channel, Connection, SignalSocket
from freetrain_parsl.executor.slot.loaded_files import (
    IMAGE,
    IMAGE_FAULT,
    loaded_files,
    pack_files,
    seconds_waited,
)
from freetrain_parsl.executor.slot.neighbours import pool_directory, use_own_temporary_directory
from freetrain_parsl.executor.slot.node_share import Lane, core_share, number_visible_devices, physical_cores
from freetrain_parsl.executor.slot.node_watch import NodeWatch
from freetrain_parsl.executor.slot.output import OutputCapture
from freetrain_parsl.executor.slot.pilot import end_node, pilot_of_node
from freetrain_parsl.executor.slot.place import Pulse, end_process, occupy
from freetrain_parsl.executor.slot.run_end import deposit, serialized_exception, try_result, write_error
from freetrain_parsl.executor.slot.training_run import TrainingRun, memory_of_slot
from freetrain_parsl.executor.training_logs import as_text, leave_behind
from freetrain_parsl.protocol.messages import (
    Closing,
    Exit,
    FilesLoaded,
    Hello,
    Output,
    RunMessage,
    RunStart,
    SlotHeartbeat,
    StartRun,
    StartTask,
    StoreReply,
    TaskEnded,
    Welcome,
)
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from freetrain_parsl.executor.jobs.port import Run
    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.protocol.messages import ToDriver, ToSlot
    from freetrain_parsl.training.node_memory import NodeMemory

logger = logging.getLogger(__name__)

__all__ = ["SlotNotStarted", "SlotSettings", "run_slot"]

# Environment variables in which batch systems pass the node's name; others: the host name is used.
_VIRTUAL_NODE = "FREETRAIN_CLUSTER_NODE"  # of the embedded cluster, whose nodes have the same cores
_NODE_VARIABLES = (_VIRTUAL_NODE, "SLURMD_NODENAME")

# Slurm may send the warning signal up to this many seconds before the walltime's end, which the driver knows.
_EARLIEST_WARNING = 120.0

# Seconds for which a slot without a driver may save.
_LONGEST_SAVE = 600.0

# Set by Globus Compute endpoints; hidden from user code.
_SECRETS = ("GLOBUS_COMPUTE_CLIENT_SECRET", "FUNCX_SDK_CLIENT_SECRET")


class SlotNotStarted(Exception):
    """A slot could not start, or failed outside the user's function.

    Parameters
    ----------
    hostname
        The node's name, under the name that HTEX gives it in its own errors.
    reason
        What happened there.
    """

    def __init__(self, hostname: str, reason: str) -> None:
        super().__init__(hostname, reason)  # it is pickled on its way to the driver
        self.hostname, self.reason = hostname, reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class SlotSettings:
    """The arguments of every slot task; times in seconds.

    Parameters
    ----------
    addresses, port, cert_dir
        Addresses and port of the driver, and HTEX's certificates.
    beat, heartbeat_timeout
        Time between heartbeats, and without any after which the driver counts as failed.
    grace
        Time between the batch system's signal and its kill.
    interface
        Network interface, or its network, for the traffic between members; ``None``: the one that reaches the driver.
    log_dir
        Where to leave what training jobs have printed, and the driver has not received when it failed; ``None``:
        nowhere.
    files
        Where large results go; ``None``: all are sent in messages.
    bind_cores
        Whether each of several slots of a node is bound to its share of the cores.
    tell_files
        Whether to tell the driver which files a training job loads.
    """

    addresses: tuple[str, ...]
    port: int
    cert_dir: str | None
    beat: float
    heartbeat_timeout: float
    grace: float
    interface: str | None = None
    log_dir: str | None = None
    files: ValueFiles | None = None
    bind_cores: bool = True
    tell_files: bool = False


@dataclass(frozen=True)
class _Handover:
    """What a process of a slot leaves to the next one, which continues it under its name."""

    name: str
    connection: Connection
    closes: float | None
    inbox: tuple[ToSlot, ...]


def run_slot(settings: SlotSettings, token: str) -> None:
    """Run a slot until the process ends; submitted by the executor as an HTEX task, identified by `token`.

    Its processes connect once torch is imported, so that assignments never wait for imports.

    Raises
    ------
    SlotNotStarted
        A process cannot be started here, or has failed outside the user's function.
    """
    try:
        import freetrain_parsl.training.fragment  # noqa: F401 - already imported by `executor.htex.worker_pool`

        for name in _SECRETS:
            os.environ.pop(name, None)
        number_visible_devices(os.environ)
        if settings.bind_cores and _VIRTUAL_NODE not in os.environ:
            share = core_share(Lane.of_worker(), physical_cores())
            if share is not None:
                share.take()
        gc.freeze()  # garbage collections would copy the memory of all imported objects
        pulse = Pulse(settings.heartbeat_timeout)
        with closing(memory_of_slot(_name_of_node())) as memory:
            occupy(lambda before: _Slot(settings, token, pulse, memory, before).serve(), pulse, between=memory.free)
    except Exception as error:  # whatever it is, the driver has to know on which node
        raise SlotNotStarted(_name_of_node(), f"{type(error).__name__}: {text_of(error)}") from error


def _name_of_node() -> str:
    return next((os.environ[v] for v in _NODE_VARIABLES if os.environ.get(v)), platform.node())


class _Slot:
    def __init__(
        self, settings: SlotSettings, token: str, pulse: Pulse, memory: NodeMemory, before: _Handover | None = None
    ) -> None:
        self._pilot = pilot_of_node()
        self._pulse = pulse
        self._memory = memory
        self._settings = settings
        self._token = token
        self._node = _name_of_node()
        self._name = f"{self._node}/{os.environ.get('PARSL_WORKER_RANK', '0')}/{uuid.uuid4().hex[:8]}"
        self._inbox: queue.SimpleQueue[ToSlot | None] = queue.SimpleQueue()  # ``None`` wakes the main thread
        self._assigned: RunStart | StartTask | None = None  # received and not ended
        self._lock = threading.Lock()  # guards `_run`; held while commands for it are taken out of the inbox
        self._run: Run | None = None
        self._closes: float | None = None  # on time.monotonic()
        self._lane = Lane.of_worker()
        self._watch: NodeWatch | None = None
        self._tells_files = settings.tell_files
        self._others_save = 0.0  # seconds
        self._leaving = False
        if before is not None:
            self._name, self._closes = before.name, before.closes
            for message in before.inbox:
                self._receive(message)
        self._signals = SignalSocket((signal.SIGTERM, signal.SIGUSR1), self._on_signal)
        self._channel = Channel(
            settings.addresses,
            settings.port,
            settings.cert_dir,
            self._name,
            handle=self._handle,
            on_lost=self._driver_lost,
            on_unsent=self._leave_output,
            heartbeat=self._heartbeat,
            beat=settings.beat,
            heartbeat_timeout=settings.heartbeat_timeout,
            signals=self._signals,
            before=None if before is None else before.connection,
        )

    def serve(self) -> _Handover | None:
        """Connect, and carry out commands; return what the next process has to know, or ``None`` if the slot ends."""
        self._signals.install()
        self._channel.start()
        self._channel.send(self._introduction())
        first = self._work()
        if self._leaving:
            self._channel.close()
            return None
        return self._hand_over(first)

    def _hand_over(self, first: RunStart | None = None) -> _Handover:
        connection = self._channel.hand_over()
        waiting = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        inbox = tuple(message for message in (first, *waiting) if message is not None)
        return _Handover(self._name, connection, self._closes, inbox)

    def _introduction(self) -> Hello:
        fault = ""
        if (setting := self._settings.interface) is not None:
            try:
                interface_for(setting, self._channel.url)
            except BatchSystemError as error:
                fault = str(error)
        return Hello(
            token=self._token,
            node=self._node,
            block=os.environ.get("PARSL_WORKER_BLOCK_ID", ""),
            pid=os.getpid(),
            versions=describe_environment(),
            fault=fault,
            waited=seconds_waited(),
            image=Path(os.environ.get(IMAGE, "")).name,
            image_fault=os.environ.get(IMAGE_FAULT, ""),
        )

    # The channel's thread.

    def _handle(self, message: ToSlot) -> None:
        match message:
            case Welcome(closes_in=closes_in):
                self._closes = None if closes_in is None else time.monotonic() + closes_in
            case Exit():
                if message.node:
                    end_node(self._pilot)
                if message.now:
                    os._exit(1)
                self._leave()
            case _:
                self._receive(message)

    def _receive(self, message: ToSlot) -> None:
        match message:
            case RunStart() | StartTask():
                self._assigned = message
                self._put(message)
            case RunMessage() | StoreReply():
                self._put(message)

    def _put(self, message: ToSlot) -> None:
        """Leave a message to the main thread.

        A command may arrive before the main thread has started its run. It is passed on by whichever comes later: this
        thread with the command, or the main thread with the run.
        """
        self._inbox.put(message)
        if self._run is not None:
            self._pass_on()

    def _driver_lost(self) -> None:
        """Save, then end the whole block: no driver is left to assign work."""
        logger.warning(
            "no message from the driver for %.0f s: saving and releasing this node", self._settings.heartbeat_timeout
        )
        end_node(self._pilot)
        self._leave()
        if (run := self._run) is not None:
            run.close()
        deadline = threading.Timer(_LONGEST_SAVE, os._exit, (1,))  # no driver ends the block if the save hangs
        deadline.daemon = True
        deadline.start()

    def _leave_output(self, messages: Sequence[ToDriver]) -> None:
        """Leave what training jobs have printed, and the driver has not received, to the next driver."""
        lines: dict[str, list[str]] = {}
        for message in messages:
            if isinstance(message, Output):
                text = message.payload.decode(errors="replace").removesuffix("\n")
                lines.setdefault(message.training, []).append(as_text(time.time(), message.source, text))
        if self._settings.log_dir is None:
            return
        try:
            for training, some in lines.items():
                leave_behind(Path(self._settings.log_dir), training, self._name.rpartition("/")[2], some)
        except OSError as error:
            logger.warning("what training jobs have printed since the driver failed is lost: %s", error)

    def _heartbeat(self) -> SlotHeartbeat:
        self._pulse.beat()
        run, assigned = self._run, self._assigned
        return SlotHeartbeat(
            run=assigned.run if isinstance(assigned, RunStart) else None,
            task=assigned.task if isinstance(assigned, StartTask) else None,
            waited=0.0 if run is None else run.mailbox.waited(),
        )

    def _on_signal(self, number: signal.Signals) -> None:
        """Handle the end of the walltime or a preemption, or, up to a minute early, the warning of either."""
        if number == signal.SIGUSR1:
            if self._closes is not None and self._closes - time.monotonic() <= _EARLIEST_WARNING:
                return  # of the walltime's end, which the driver knows
            end_node(self._pilot)  # else the node would be held until the grace period is over
        if self._leaving:
            return  # repeated
        run = self._run
        self._channel.send(Closing(self._settings.grace, gone=run is None or run.expendable))
        if run is not None:
            # The driver makes the others continue without this process, or pauses all. Else they pause by themselves.
            self._closes = time.monotonic() + self._settings.grace
            self._tell_closing(run)
        self._leave_after(run)

    def _leave(self) -> None:
        """Save what is worth saving, then end this process."""
        run = self._run
        if run is not None:
            run.mailbox.end()
        self._leave_after(run)

    def _leave_after(self, run: Run | None) -> None:
        """End this process once a run has saved its work; at once if there is none or nothing would be lost."""
        self._leaving = True
        self._inbox.put(None)
        if run is None or run.expendable:
            if run is not None and run.output is not None:
                run.output.flush(last=True)
            self._channel.end_process()  # the main thread may be in a call that does not return

    # The watch's thread.

    def _end_run(self, run: Run, reason: str) -> None:
        """End a run that takes the memory of its neighbours; the next process continues the slot."""
        with self._lock:
            if self._run is not run or self._leaving:
                return  # it has just ended
            self._run = None
        if run.output is not None:
            run.output.flush(last=True)
        self._assigned = None
        for message in run.end_over_share(f"was ended on node {self._node}: {reason}"):
            self._channel.send(message)
        end_process(self._hand_over())

    # Several threads.

    def _send(self, message: ToDriver) -> None:
        """Send a message of a run."""
        report = getattr(message, "report", None)
        if isinstance(report, Progress):
            if self._watch is not None:
                self._watch.takes(report.write_seconds, getattr(message, "member", ""))
            if self._tells_files:
                self._tells_files = False
                self._channel.send(FilesLoaded(pack_files(loaded_files())))
        self._channel.send(message)

    def _tell_closing(self, run: Run) -> None:
        """Tell a run when its node closes: as much earlier as its neighbours need to write their checkpoints."""
        if self._closes is not None:
            remaining = self._closes - self._others_save - time.monotonic()
            run.mailbox.close_after(timedelta(seconds=remaining))

    def _pass_on(self) -> None:
        """Pass the commands for the current run from the inbox to it; those for an earlier run have no effect."""
        with self._lock:
            run = self._run
            if run is None:
                return  # it has just ended: the main thread reads the inbox again
            for _ in range(self._inbox.qsize()):
                message = self._inbox.get_nowait()
                match message:
                    case None | RunStart() | StartTask():
                        self._inbox.put(message)
                    case RunMessage(run=number) if number > run.number:
                        self._inbox.put(message)
                    case StoreReply() | RunMessage():
                        if not run.handle(message):
                            logger.debug("a command for a run that is over: %s", message)

    # The main thread.

    def _work(self) -> RunStart | None:
        """Run what is assigned until the slot leaves, or needs another process; return what that one has to start.

        A training job runs in a process that has run nothing before, and nothing runs there after it, nor after an
        ordinary task that has failed; other tasks share a process, as in Parsl's own workers.
        """
        is_fresh = True
        while not self._leaving:
            match self._inbox.get():
                case RunStart() as message:
                    if not is_fresh:
                        return message
                    self._train(message)
                    return None
                case StartTask() as message:
                    is_fresh = False
                    if not self._run_task(message):
                        return None
                case None:
                    pass
                case message:
                    logger.debug("a command for a run that is over: %s", message)
        return None

    def _train(self, message: RunStart) -> None:
        send, files = self._send, self._settings.files
        run: Run
        if isinstance(message, StartRun):
            interface, address = interface_for(self._settings.interface, self._channel.url)
            run = TrainingRun(message, self._memory, interface=interface, address=address, send=send, files=files)
        else:
            self._memory.empty()  # of an earlier job
            self._memory.free()
            run = kind_of(message).run(message, send, files)
        watch = self._watch_of(run)
        self._tell_closing(run)
        self._run = run
        self._pass_on()
        if self._leaving:
            run.mailbox.end()
        try:
            with OutputCapture(run.deliver, run.source) as run.output, watch:
                ended = run.perform()
                with self._lock:
                    is_over = self._run is not run
                if is_over:
                    threading.Event().wait()  # another thread ends this process
            self._assigned = None  # before the driver learns of the end: its next assignment may follow at once
            self._channel.send(ended)  # as long as it is not queued, `_leave_after` must not find that no run is left
        finally:
            with self._lock:
                self._run = None
            run.close()

    def _watch_of(self, run: Run) -> AbstractContextManager[object]:
        """Take this job's part of a node that others use, too."""
        pool = pool_directory()
        if self._lane.count == 1 or pool is None:
            return nullcontext()
        use_own_temporary_directory(pool, self._lane.rank)

        def saving(seconds: float) -> None:
            self._others_save = seconds
            self._tell_closing(run)

        self._watch = NodeWatch(
            run.label,
            self._lane,
            pool,
            tell=write_error,
            end=lambda reason: self._end_run(run, reason),
            saving=saving,
        )
        return self._watch

    def _run_task(self, message: StartTask) -> bool:
        """Run an ordinary task; return whether it has succeeded."""
        payload, stored, failed = b"", None, True
        try:
            result = serialize(execute_task(message.payload))
            try_result("the app", result)
            payload, stored = deposit(result, self._settings.files)
            failed = False
        except KeyboardInterrupt:  # SIGINT: as in a training job, a crash
            raise
        except BaseException as error:  # noqa: BLE001 - of the user's function, also sys.exit: passed to its future
            payload = serialized_exception(error)
        self._assigned = None
        self._channel.send(TaskEnded(message.task, failed, payload, stored))
        return not failed
