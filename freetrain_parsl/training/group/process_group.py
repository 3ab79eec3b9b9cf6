"""The group of members that train together, and its collective operations."""

from __future__ import annotations

import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.training.group import gpus
from freetrain_parsl.training.group.blocked_thread import BlockedThread
from freetrain_parsl.training.group.failures import await_collective, await_transfers, peers_expected
from freetrain_parsl.training.group.gpus import GpuWork
from freetrain_parsl.training.group.joining import JoinedGroups
from freetrain_parsl.training.group.replica_groups import NotStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._C._distributed_c10d import Store  # torch.distributed does not export it

    from freetrain_parsl.training.group.replica_groups import Pending
    from freetrain_parsl.training.mailbox import ControlMailbox, Membership

T = TypeVar("T")


class Group(JoinedGroups):
    """The members that currently train together, and their collective operations.

    Raises
    ------
    PeerFailed
        By every operation: a member has failed.
    """

    @property
    def over_gpus(self) -> bool:
        """Whether GPU tensors are sent directly."""
        return self._gpus is not None

    @property
    def shards(self) -> int:
        """Number of members of one replica: those among which a sharded state is divided."""
        return self.size // self.replicas

    @property
    def position(self) -> int:
        """The part of a sharded state that this member has."""
        return self.rank % self.shards

    @property
    def is_first(self) -> bool:
        """Whether this is the member that saves and reports."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a CPU tensor over all members; `values` is not changed."""
        if self.size == 1:
            return values
        total = values.clone()
        self._jointly(lambda: self._await(self._pending(dist.all_reduce(total, async_op=True), total)))
        return total

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors (of equal shape) of all members, by rank."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        group = self.gradients if gpus.is_on_gpu(values) else None

        def wait() -> None:
            self._await(self._pending(dist.all_gather(parts, values, group=group, async_op=True), values))
            if gpus.is_on_gpu(values):
                self.settle()

        self._jointly(wait)
        return parts

    def agree_on(self, value: T) -> T:
        """Return the first member's value, an object that can be pickled, once all members have called this."""
        if self.size == 1:
            return value
        self.sum(torch.zeros(1, dtype=torch.int64))  # else the first member could be ahead by several calls
        return self.broadcast(value if self.is_first else None, 0)

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all members, objects that can be pickled, by rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self.gather(torch.tensor([data.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = zip(self.gather(padded), sizes, strict=True)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]  # noqa: S301 - of proven members

    def begin_sum(self, values: torch.Tensor) -> Pending:
        """Start to replace a tensor by its sum over all members; wait for it with `end_sums`.

        Raises
        ------
        PeerFailed
            A member has failed; with several replicas, `end_sums` raises it.
        """
        if self._of_replicas is not None and self._of_replicas.failure is not None:
            return NotStarted(self._of_replicas.failure)
        try:
            with peers_expected(self.size):
                group = self.gradients if gpus.is_on_gpu(values) else None
                return self._pending(dist.all_reduce(values, group=group, async_op=True), values)
        except PeerFailed as error:
            if self._of_replicas is None:
                raise
            return NotStarted(error)

    def end_sums(self, works: Iterable[Pending]) -> None:
        """Wait for sums; all members call this."""

        def wait() -> None:
            for work in works:
                self._await(work)
                if isinstance(work, GpuWork):
                    self.settle()

        self._jointly(wait)

    def confirm(self) -> None:
        """Make sure that the gradients of a step are there, in all replicas, or none makes it; all members call this.

        Raises
        ------
        PeerFailed
            A member has failed, perhaps in the backward pass: the gradients are not complete.
        """
        if self._of_replicas is not None:

            def settled_sum() -> None:
                self.settle()
                self._await(dist.all_reduce(torch.zeros(1, dtype=torch.int64), async_op=True))

            self._jointly(settled_sum)
        elif self._gpus is not None:
            with self.waits():
                self.settle()

    def sum_gradient(self, gradient: torch.Tensor) -> None:
        """Sum a sharded gradient over the replicas; see `ReplicaGroups.sum_gradient`."""
        if self._of_replicas is not None:
            with self._waiting():  # in a frame of this package, which `BlockedThread` does not take for a collective
                self._of_replicas.sum_gradient(gradient)

    def note_failure(self, failure: PeerFailed) -> bool:
        """Let the next operation of all members fail, on all members of this replica; return whether it will.

        Without replicas it will not: the error is to be raised at once.
        """
        if self._of_replicas is None:
            return False
        self._of_replicas.note(failure)
        return True

    def _pending(self, work: dist.Work | None, values: torch.Tensor) -> Pending:
        assert work is not None, "this process is a member"
        return GpuWork(work) if self._gpus is not None and gpus.is_on_gpu(values) else work

    def broadcast(self, value: T | None, source: int) -> T:
        """Return the value of one member, an object that can be pickled, on all; all members call this."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._jointly(lambda: self._await(dist.broadcast(size, source, async_op=True)))
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._jointly(lambda: self._await(dist.broadcast(data, source, async_op=True)))
        received: T = pickle.loads(data.numpy().tobytes())  # noqa: S301 - of a proven member
        return received

    def begin_transfers(self, operations: list[dist.P2POp]) -> list[Pending]:
        """Start to send and receive tensors of one device, as a batch: NCCL needs no further connections for it."""
        with self.waits():
            return [self._pending(work, operations[0].tensor) for work in dist.batch_isend_irecv(operations)]

    def end_transfers(self, works: Iterable[Pending]) -> None:
        """Wait for sends and receives."""
        others: list[Any] = []
        with self.waits():
            for work in works:
                if isinstance(work, GpuWork):
                    work.wait()  # this thread's stream does
                else:
                    others.append(work)
            self.settle()
            if others:
                await_transfers(others, self.connections)

    def _await(self, work: Any) -> None:
        """Wait for an operation."""
        assert work is not None, "this process is a member"
        if isinstance(work, (GpuWork, NotStarted)):
            work.wait()
        else:
            await_collective(work, self.connections)

    def _jointly(self, operation: Callable[[], T]) -> T:
        """Return the result of an operation of all members, which fails on all members of a replica, or on none."""
        if self._of_replicas is not None:
            return self._of_replicas.jointly(operation, self.waits, self._cut)
        with self.waits():
            return operation()


def join(membership: Membership, store: Store | None, mailbox: ControlMailbox | None = None) -> Group:
    """Join a process group.

    Parameters
    ----------
    membership
        This process's membership.
    store
        The store in which the members meet; not used by a group of one.
    mailbox
        Is notified while this process only waits, and can abort the group, even before it has formed.

    Raises
    ------
    PeerFailed
        Other members did not connect in time, or left.
    """
    rank, size, generation = membership.rank, membership.world_size, membership.generation
    group = Group(rank, size, generation, mailbox, membership.trainer, replicas=membership.replicas)
    if size > 1:
        if store is None:
            raise ValueError(f"a group of {size} needs a store")
        if mailbox is not None:
            mailbox.on_abort = lambda: group.abort(replica=mailbox.leaves)
            mailbox.blocked = BlockedThread(threading.get_ident(), time.monotonic).seconds
        group.form(membership, store)
    return group
