"""A job's run in a slot: translates the driver's messages for the job, and its reports for the driver.

The main thread is in `Run.perform`; `Run.handle` is called by the channel's thread meanwhile.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from freetrain_parsl.errors import TrainingError
from freetrain_parsl.executor.jobs.port import Run
from freetrain_parsl.executor.payloads.payloads import unpack_training
from freetrain_parsl.executor.slot.node_share import memory_of_node
from freetrain_parsl.executor.slot.run_end import (
    deposit,
    end_by,
    print_exception,
    serialize_result,
    serialized_exception,
)
from freetrain_parsl.protocol.messages import (
    ChangeBatch,
    ChangeGroup,
    Output,
    PauseRun,
    RunEnded,
    RunReport,
    StoreReply,
    StoreRequest,
    Values,
)
from freetrain_parsl.protocol.reports import Joined, Logged, RunFailed, RunFinished, RunPaused
from freetrain_parsl.training.mailbox import ControlMailbox, Finished, Membership, Regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.protocol.messages import Place, RunMessage, StartRun, ToDriver
    from freetrain_parsl.protocol.reports import Report, RunEnd
    from freetrain_parsl.training.node_memory import NodeMemory

__all__ = ["ChannelStore", "TrainingRun", "memory_of_slot"]

# A newcomer joins the rendezvous at once, the members after their current step or validation.
_WHILE_OTHERS_TRAIN = timedelta(minutes=30)


def memory_of_slot(node: str) -> NodeMemory:
    """Return the memory of a slot on this node, which its processes inherit; see `NodeMemory`."""
    from freetrain_parsl.training.node_memory import NodeMemory

    return NodeMemory(node, os.environ.get("PARSL_WORKER_BLOCK_ID", ""), memory_of_node)


class ChannelStore:
    """The blocking backend of ``training.group.rendezvous.RendezvousStore`` for one generation.

    The `group` is the generation's key, ``trainer/generation``.
    """

    _GRACE = 5.0  # seconds beyond a get's own timeout after which the driver counts as failed

    def __init__(self, group: str, send: Callable[[ToDriver], None]) -> None:
        self._group = group
        self._send = send
        self._requests = itertools.count()
        self._replies: dict[int, StoreReply | None] = {}
        self._condition = threading.Condition()
        self._closed = False

    def deliver(self, message: StoreReply) -> None:
        """Accept the driver's answer; called by the channel's thread."""
        with self._condition:
            if message.request in self._replies:
                self._replies[message.request] = message
                self._condition.notify_all()

    def close(self) -> None:
        """Fail all pending and later calls: the driver is gone or the generation is over."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Set `key`, and wake the members that wait for it."""
        self._call("set", (key,), value)

    def get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Return the values of `keys`, waiting for them at most `timeout` seconds.

        Raises
        ------
        TimeoutError
            Not all keys were set in time, or the generation ended.
        """
        if not keys:
            return []
        reply = self._call("get", tuple(keys), timeout=timeout)
        ends = itertools.accumulate(reply.sizes)
        return [reply.payload[end - size : end] for size, end in zip(reply.sizes, ends, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key` (0 if absent) and return the sum."""
        return self._call("add", (key,), amount=amount).number

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` are set."""
        return bool(self._call("check", tuple(keys)).number)

    def delete(self, key: str) -> bool:
        """Remove `key`; return whether it existed."""
        return bool(self._call("delete", (key,)).number)

    def _call(
        self,
        operation: Literal["set", "get", "add", "check", "delete"],
        keys: tuple[str, ...],
        value: bytes = b"",
        *,
        timeout: float = 20.0,
        amount: int = 0,
    ) -> StoreReply:
        request = next(self._requests)
        call = StoreRequest(self._group, request, operation, keys, timeout, amount, value)
        with self._condition:
            self._replies[request] = None
            self._send(call)
            self._condition.wait_for(lambda: self._closed or self._replies[request] is not None, timeout + self._GRACE)
            reply = self._replies.pop(request)
        if reply is None or not reply.ok:
            raise TimeoutError(f"rendezvous {self._group}: {operation} {keys[0]!r} got no answer in {timeout:g} s")
        return reply


class TrainingRun(Run):
    """The execution of one `StartRun` command.

    Parameters
    ----------
    command, send, files
        As in `Run`.
    interface
        Network interface for the traffic between members; ``None``: torch's choice.
    memory
        Keeps copies of a sharded state; ``None``: there are none.
    address
        This node's IP address on that interface; ``None``: the members do not check that they can reach each other.
    """

    def __init__(
        self,
        command: StartRun,
        memory: NodeMemory | None = None,
        *,
        interface: str | None,
        send: Callable[[ToDriver], None],
        address: str | None = None,
        files: ValueFiles | None = None,
    ) -> None:
        super().__init__(command, send, files)
        self._memory = memory
        self.mailbox: ControlMailbox = ControlMailbox()
        self._command = command
        self._interface = interface
        self._address = address
        self._meeting = timedelta(seconds=command.meeting_timeout)
        self._lock = threading.Lock()  # of the next three
        self._stores: dict[str, ChannelStore] = {}
        self._memberships: dict[int, Membership] = {}
        self._abandoned_before = 0.0
        self._membership: Membership | None = None
        if command.place is not None:
            self._membership = self._member(command.place, self._meeting)
        self._generation = 0 if command.place is None else command.place.generation  # current or forming
        self._is_member = self._membership is not None

    @property
    def expendable(self) -> bool:
        """Whether no work would be lost if this process ended now; a member without a group may have the only state."""
        return not self._is_member or not self.mailbox.underway.is_set()

    @property
    def source(self) -> str:
        """The process, as the training job's log names it: its rank, or ``?`` while it joins."""
        return "?" if self._membership is None or not self._is_member else str(self._membership.rank)

    @property
    def label(self) -> str:
        """What it is, for people and for the other slots of its node."""
        return f"training job {self._training!r}"

    def end_over_share(self, reason: str) -> list[ToDriver]:
        """Return the report of the end: as if the function had raised an exception, as it would need as much again."""
        error = TrainingError(f"{self.label} {reason}")
        return [RunEnded(self._training, self.number, RunFailed(str(error)), serialized_exception(error))]

    def deliver(self, source: str, lines: bytes) -> None:
        """Pass on what the training job has printed."""
        self._send(Output(self._training, source, lines))

    def perform(self) -> RunEnded:
        """Run the training job until it ends in this slot; return the message that reports the end."""
        from freetrain_parsl.training.extension import count_refused
        from freetrain_parsl.training.fragment import run_fragment

        end: RunEnd
        payload, stored = b"", None
        try:
            function, args, kwargs = unpack_training(self._command.payload)
            ended = run_fragment(
                function,
                args,
                kwargs,
                options=self._command.options,
                membership=self._membership,
                meet=self._meet,
                mailbox=self.mailbox,
                report=self._report,
                memory=self._memory,
                next_size=self._command.next_size,
            )
            if isinstance(ended, Finished):
                end = RunFinished(ended.progress)
                is_first = self._membership is not None and self._membership.rank == 0
                if is_first:
                    payload, stored = deposit(serialize_result(self._training, ended.value), self._files)
            else:
                end = RunPaused(ended.reason, ended.progress)
        except KeyboardInterrupt as error:
            # SIGINT, from the batch system or a person: as with any other signal that ends a process, it is a crash.
            self.attribute(f"!{self.source}")
            print_exception(error)
            raise
        except BaseException as error:  # noqa: BLE001 - of the user's function: passed to the user's future
            end, payload = end_by(error, self._generation)
            if isinstance(end, RunFailed):
                end = replace(end, refused=count_refused(error))
                if end.refused is None:
                    self.attribute(f"!{self.source}")
                    print_exception(error)
        return RunEnded(self._training, self.number, end, payload, stored)

    def handle(self, message: RunMessage | StoreReply) -> bool:
        """Handle a message from the driver; return false if it is for another run, or for a group already left."""
        match message:
            case StoreReply():
                with self._lock:
                    store = self._stores.get(message.group)  # created before its first request
                if store is None:
                    return False
                store.deliver(message)
            case ChangeGroup(run=self.number):
                self._change_group(message)
            case ChangeBatch(run=self.number):
                self.mailbox.post_batch(message.size)
            case PauseRun(run=self.number):
                if self._is_member:
                    self.mailbox.pause_requested.set()
                else:
                    self.mailbox.end()
            case _:
                return False
        return True

    def close(self) -> None:
        """Fail all rendezvous: the driver has failed, or the run is over."""
        self._abandon(math.inf)

    def _abandon(self, before: float) -> None:
        """Fail all rendezvous of generations before this one, also of one that the main thread is about to enter."""
        with self._lock:
            self._abandoned_before, stores = before, list(self._stores.values())
        for store in stores:
            store.close()

    # The channel's thread.

    def _change_group(self, message: ChangeGroup) -> None:
        membership = None
        if message.place is not None:
            is_newcomer = self._command.place is None and not self._is_member
            membership = self._member(message.place, _WHILE_OTHERS_TRAIN if is_newcomer else self._meeting)
            with self._lock:
                self._memberships[membership.generation] = membership
        if message.abort:
            self._abandon(math.inf if membership is None else membership.generation)
        self.mailbox.post(Regroup(membership, abort=message.abort))

    def _member(self, place: Place, meeting: timedelta) -> Membership:
        return Membership(
            trainer=self._training,
            generation=place.generation,
            rank=place.rank,
            world_size=place.size,
            replicas=place.replicas,
            meeting=meeting,
            interface=self._interface,
            address=self._address,
        )

    # The main thread.

    def _meet(self, membership: Membership) -> Store:
        from freetrain_parsl.training.group.rendezvous import RendezvousStore

        self._generation = membership.generation
        group = f"{membership.trainer}/{membership.generation}"
        with self._lock:
            store = self._stores[group] = ChannelStore(group, self._send)
            if membership.generation < self._abandoned_before:
                store.close()
        return RendezvousStore(store)

    def _report(self, report: Report) -> None:
        if isinstance(report, Joined):
            self._joined(report)
            self.attribute(self.source)
        elif isinstance(report, Logged):
            self._send(Values(self._training, report.rows))
            return
        self._send(RunReport(self._training, self.number, report))

    def _joined(self, report: Joined) -> None:
        group = f"{self._training}/{report.generation}"
        with self._lock:
            self._membership = self._memberships[report.generation]
            self._memberships = {n: m for n, m in self._memberships.items() if n > report.generation}
            old = [self._stores.pop(name) for name in list(self._stores) if name != group]
        for store in old:
            store.close()
        self._generation = report.generation
        self._is_member = True
        self.mailbox.underway.set()  # the others have made steps, and a part of the state may only be here
