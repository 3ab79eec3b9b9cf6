"""Our side of `rescale`: warm processes that run one training job and get the commands that the executor would send."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from _rescale_net import BATCH, LEARNING_RATE, MOMENTUM, Data, StepLog, make_net
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy

from freetrain_parsl.executor.jobs.training.rank_order import least_moved
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import GroupFailed, Joined, Ready
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Membership, Paused, Regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from typing_extensions import Self

_Said = TypeVar("_Said")
_PATIENCE = 60.0
_SPAWN = multiprocessing.get_context("spawn")


def train(session: Any, directory: str) -> None:
    """Train until stopped; the same as under torchrun."""
    log = StepLog(Path(directory))
    model, _ = session.prepare(make_net(), torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    data = session.loader(Data(), BATCH)
    for _ in session.epochs(1 << 20):
        for x, y in data:
            log.write("begin", session.world_size, session.rank, session.metrics["steps"])
            session.step(cross_entropy(model(x), y))
            log.write("end", session.world_size, session.rank, session.metrics["steps"])


def _serve(channel: Connection, port: int, directory: str, function: Callable[..., Any]) -> None:
    """Run fragments as commanded until the channel closes; commands also arrive during fragments."""
    torch.set_num_threads(1)
    starts: queue.Queue[tuple[Membership | None, ControlMailbox] | None] = queue.Queue()

    def listen() -> None:
        mailbox = ControlMailbox()
        try:
            while True:
                message = channel.recv()
                if isinstance(message, Regroup):
                    mailbox.post(message)
                else:
                    mailbox = ControlMailbox()
                    starts.put((message, mailbox))
        except EOFError:
            mailbox.end()
            starts.put(None)

    threading.Thread(target=listen, daemon=True).start()
    store = TCPStore("127.0.0.1", port, is_master=False)
    while (start := starts.get()) is not None:
        membership, mailbox = start
        end = run_fragment(
            function,
            (directory,),
            options=SessionOptions("net", Path(directory), threads=1),
            membership=membership,
            meet=lambda _membership: store,
            mailbox=mailbox,
            report=channel.send,
        )
        channel.send(end)


@dataclass(eq=False)
class Worker:
    """A process of the crew, with its reports."""

    process: Any
    channel: Connection

    def await_report(self, kind: type[_Said] | tuple[type[_Said], ...]) -> _Said:
        """Wait for the next report of a kind; earlier ones of other kinds are dropped.

        Raises
        ------
        TimeoutError
            It did not arrive.
        EOFError
            The process has ended.
        """
        deadline = time.monotonic() + _PATIENCE
        while self.channel.poll(max(0.0, deadline - time.monotonic())):
            report = self.channel.recv()
            if isinstance(report, kind):
                return report
        raise TimeoutError(f"process {self.process.pid} did not report {kind}")


class Crew:
    """Warm processes, some of which form a group; a context manager.

    Parameters
    ----------
    directory
        Directory of checkpoints and logs.
    processes
        Initial number.
    function
        The training job.
    """

    def __init__(self, directory: Path, processes: int, function: Callable[..., Any] = train) -> None:
        self.directory = directory
        self._function = function
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation = 0
        self.members: list[Worker] = []
        self._all: list[Worker] = []
        self._idle: list[Worker] = []
        for _ in range(processes):
            self._hire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._all:  # otherwise each prints that the others have failed
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGSTOP)
        for worker in self._all:
            worker.process.kill()
            worker.process.join()

    def start(self, size: int) -> None:
        """Start the training job in a group."""
        self.members = self._take_idle(size)
        for worker, membership in zip(self.members, self._places(size), strict=True):
            worker.channel.send(membership)

    def resize(self, size: int) -> list[Joined]:
        """Grow, or shrink by the last members, in place; return the members' reports."""
        stay, leave = self.members[:size], self.members[size:]
        newcomers = self._take_idle(size - len(stay))
        for worker in newcomers:
            worker.channel.send(None)
        for worker in newcomers:
            worker.await_report(Ready)
        ranks = least_moved([str(id(one)) for one in self.members], [str(id(one)) for one in [*stay, *newcomers]])
        by_name = {str(id(one)): one for one in [*stay, *newcomers]}
        reports = self._regroup([by_name[name] for name in ranks], leave, abort=False)
        for worker in leave:
            worker.await_report(Paused)
        self._idle += leave
        return reports

    def lose(self, lost: Worker, timeout: float | None) -> list[Joined]:
        """Regroup the peers of a failed member: once one of them is stranded, or else after a timeout."""
        others = [worker for worker in self.members if worker is not lost]
        if timeout is not None:
            time.sleep(timeout)
        else:
            self._await_stranded(others)
        return self._regroup(others, [], abort=True)

    @staticmethod
    def _await_stranded(workers: list[Worker]) -> None:
        # One is enough, and may be the only one: gloo keeps the others waiting for members that left. The command
        # wakes them.
        channels = [worker.channel for worker in workers]
        deadline = time.monotonic() + _PATIENCE
        while ready := wait(channels, max(0.0, deadline - time.monotonic())):
            if any(isinstance(channel.recv(), GroupFailed) for channel in ready):
                return
        raise TimeoutError("no member noticed the failure of another")

    def _hire(self) -> None:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(
            target=_serve, args=(theirs, self._store.port, str(self.directory), self._function), daemon=True
        )
        process.start()
        theirs.close()
        self._idle.append(Worker(process, ours))
        self._all.append(self._idle[-1])

    def _take_idle(self, count: int) -> list[Worker]:
        while len(self._idle) < count:
            self._hire()
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def _regroup(self, members: list[Worker], leave: Sequence[Worker], *, abort: bool) -> list[Joined]:
        for worker, membership in zip(members, self._places(len(members)), strict=True):
            worker.channel.send(Regroup(membership, abort=abort))
        for worker in leave:
            worker.channel.send(Regroup(None))
        self.members = members
        return [worker.await_report(Joined) for worker in members]

    def _places(self, size: int) -> list[Membership]:
        self._generation += 1
        return [Membership("net", self._generation, rank, size, interface="lo") for rank in range(size)]
