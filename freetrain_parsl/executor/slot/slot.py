"""A slot: the long HTEX task that holds one worker place on a node, and runs what the driver assigns to it.

The main thread runs the user's code; a `Channel` thread talks with the driver meanwhile. A slot never returns while
its block lives: HTEX would give its place to another task of ours on a node that is about to be taken. It ends its
process instead, when told to, when the batch system signals, or when the driver is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import queue
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from parsl.executors.execute_task import execute_task
from parsl.serialize import serialize

from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.addresses import interface_for
from freetrain_parsl.executor.environment import describe_environment
from freetrain_parsl.executor.slot.channel import Channel
from freetrain_parsl.executor.slot.pilot import end_node, set_process_title
from freetrain_parsl.executor.slot.training_run import TrainingRun, serialized_exception
from freetrain_parsl.protocol.messages import (
    ChangeGroup,
    Closing,
    Exit,
    Hello,
    PauseRun,
    SlotHeartbeat,
    StartRun,
    StartTask,
    StoreReply,
    TaskEnded,
    Welcome,
)

if TYPE_CHECKING:
    from types import FrameType

    from freetrain_parsl.protocol.messages import ToSlot

logger = logging.getLogger(__name__)

__all__ = ["SlotSettings", "run_slot"]

# Where batch systems tell a job the name of the node that it is on; the host name stands in on others.
_NODE_VARIABLES = ("FREETRAIN_CLUSTER_NODE", "SLURMD_NODENAME")

# How long before the end of a walltime, which the driver knows, Slurm may send the signal that warns of it, seconds.
_EARLIEST_WARNING = 120.0

# Commands to the run that they name, which the main thread may not have begun yet.
_TO_RUN = (PauseRun, ChangeGroup, StoreReply)

# Set on the endpoint's side of Globus Compute, and no business of user code.
_SECRETS = ("GLOBUS_COMPUTE_CLIENT_SECRET", "FUNCX_SDK_CLIENT_SECRET")


@dataclass(frozen=True)
class SlotSettings:
    """What every slot is told when it is submitted; times in seconds.

    Parameters
    ----------
    addresses, port, cert_dir
        Where the driver listens, and HTEX's certificates.
    beat, heartbeat_timeout
        Between signs of life, and without any until the driver counts as gone.
    grace
        How long the batch system leaves a job after its signal.
    interface
        Network interface, or its network, for the members of a training; ``None``: the one that reaches the driver.
    """

    addresses: tuple[str, ...]
    port: int
    cert_dir: str | None
    beat: float
    heartbeat_timeout: float
    grace: float
    interface: str | None = None


def run_slot(settings: SlotSettings, token: str) -> None:
    """Be a slot until the process ends; submitted by the executor as an HTEX task, `token` names the submission."""
    _Slot(settings, token).serve()


class _Slot:
    def __init__(self, settings: SlotSettings, token: str) -> None:
        set_process_title()
        for name in _SECRETS:
            os.environ.pop(name, None)
        self._settings = settings
        self._token = token
        self._node = next((os.environ[v] for v in _NODE_VARIABLES if os.environ.get(v)), platform.node())
        self._name = f"{self._node}/{os.environ.get('PARSL_WORKER_RANK', '0')}/{uuid.uuid4().hex[:8]}"
        self._inbox: queue.SimpleQueue[ToSlot | None] = queue.SimpleQueue()  # ``None`` wakes the main thread
        self._assigned: StartRun | StartTask | None = None  # has come and has not ended
        self._lock = threading.Lock()  # of `_run`, and held while commands for it are taken out of the inbox
        self._run: TrainingRun | None = None
        self._closes: float | None = None  # on time.monotonic()
        self._leaving = False
        self._channel = Channel(
            settings.addresses,
            settings.port,
            settings.cert_dir,
            self._name,
            handle=self._handle,
            on_lost=self._driver_lost,
            heartbeat=self._heartbeat,
            beat=settings.beat,
            heartbeat_timeout=settings.heartbeat_timeout,
        )

    def serve(self) -> None:
        """Say hello once torch is imported, so that an assignment never waits for an import; then do as told."""
        import torch

        import freetrain_parsl.training.fragment  # noqa: F401 - no work after `executor.htex.worker_pool`, which has done it

        torch.optim.SGD([torch.zeros(1)], lr=0.0)  # the first optimizer of a process imports for a second
        gc.freeze()  # what was imported stays: collections between trainings need not look at it

        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_warning)
        self._channel.start()
        self._channel.send(self._introduction())
        self._work()
        self._channel.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # not a return: see the module's docstring

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
        )

    # The channel's thread.

    def _handle(self, message: ToSlot) -> None:
        match message:
            case Welcome(closes_in=closes_in):
                self._closes = None if closes_in is None else time.monotonic() + closes_in
            case StartRun() | StartTask() | PauseRun() | ChangeGroup() | StoreReply():
                if isinstance(message, (StartRun, StartTask)):
                    self._assigned = message
                # A command may come before the main thread has begun the run that it names. The one of the two that
                # is later, this thread with the command or the main thread with the run, passes it on.
                self._inbox.put(message)
                if self._run is not None:
                    self._pass_on()
            case Exit():
                if message.node:
                    end_node()
                if message.now:
                    os._exit(1)
                self._leave()

    def _driver_lost(self) -> None:
        """Save, then end the whole block: nobody is left to give it work."""
        logger.warning(
            "no word from the driver for %.0f s: saving and ending this node", self._settings.heartbeat_timeout
        )
        end_node()
        self._leave()
        if (run := self._run) is not None:
            run.close()

    def _heartbeat(self) -> SlotHeartbeat:
        run, assigned = self._run, self._assigned
        return SlotHeartbeat(
            run=assigned.run if isinstance(assigned, StartRun) else None,
            task=assigned.task if isinstance(assigned, StartTask) else None,
            waited=0.0 if run is None else run.mailbox.waited(),
        )

    # Both threads.

    def _pass_on(self) -> None:
        """Pass the commands in the inbox that name the run on to it; those for an earlier run have no effect."""
        with self._lock:
            run = self._run
            if run is None:
                return  # it has just ended: the main thread reads the inbox itself again
            for _ in range(self._inbox.qsize()):
                message = self._inbox.get_nowait()
                if not isinstance(message, _TO_RUN) or (
                    not isinstance(message, StoreReply) and message.run > run.number
                ):
                    self._inbox.put(message)
                elif not run.handle(message):
                    logger.debug("a command for a run that is over: %s", message)

    # Any thread, and the signal handler.

    def _on_warning(self, number: int, frame: FrameType | None) -> None:
        """Take a batch system's early warning: of preemption, or, up to a minute too early, of the walltime's end."""
        if self._closes is None or self._closes - time.monotonic() > _EARLIEST_WARNING:
            end_node()  # or the node would stay ours until the grace is over
            self._on_signal(number, frame)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's own signature
        run = self._run
        gone = run is None or run.expendable
        self._channel.send(Closing(self._settings.grace, gone))
        if run is None or gone:
            self._channel.end_process()  # nothing would be lost, and somebody waits for this node
            return
        # The driver lets the others go on without this process, or all pause. If it does not, they do by themselves.
        run.mailbox.close_after(timedelta(seconds=self._settings.grace))
        self._leaving = True
        self._inbox.put(None)

    def _leave(self) -> None:
        self._leaving = True
        if (run := self._run) is not None:
            run.mailbox.end()
        self._inbox.put(None)

    # The main thread.

    def _work(self) -> None:
        """Do what is assigned, one thing after the other, until the slot leaves."""
        while not self._leaving:
            message = self._inbox.get()
            if isinstance(message, StartRun):
                self._train(message)
            elif isinstance(message, StartTask):
                self._run_task(message)
            elif message is not None:
                logger.debug("a command for a run that is over: %s", message)

    def _train(self, message: StartRun) -> None:
        interface, address = interface_for(self._settings.interface, self._channel.url)
        run = TrainingRun(message, interface=interface, address=address, send=self._channel.send)
        if self._closes is not None:
            run.mailbox.close_after(timedelta(seconds=self._closes - time.monotonic()))
        self._run = run
        self._pass_on()
        if self._leaving:
            run.mailbox.end()
        try:
            ended = run.perform()
        finally:
            with self._lock:
                self._run = None
            run.close()
        self._assigned = None
        self._channel.send(ended)
        if not self._leaving:
            # The process stays, and may train another model next; but nobody is to wait for that.
            del run
            gc.collect()

    def _run_task(self, message: StartTask) -> None:
        try:
            payload, failed = serialize(execute_task(message.payload)), False
        except Exception:  # noqa: BLE001 - whatever the user's function raises belongs in the user's future
            payload, failed = serialized_exception(), True
        self._assigned = None
        self._channel.send(TaskEnded(message.task, failed, payload))
