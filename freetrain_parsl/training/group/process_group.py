"""Process groups: how the members of a training job form a group and leave it.

The members of a group meet under the prefix ``<trainer>/<generation>`` of a store and leave the group when nodes join
or leave; the processes stay. Collectives for decisions run on CPU tensors over gloo; gradients use NCCL on GPUs. A
group of one needs no store and no network.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.training.group import gpus
from freetrain_parsl.training.group.admission import Admission
from freetrain_parsl.training.group.blocked_thread import BlockedThread
from freetrain_parsl.training.group.connections import GroupConnections
from freetrain_parsl.training.group.gpus import GpuGroups, GpuWork
from freetrain_parsl.training.group.lost_messages import await_collective, await_transfers
from freetrain_parsl.training.group.reachability import check_reachable
from freetrain_parsl.training.group.replica_groups import NotStarted, ReplicaGroups, refuse_groups_within_replicas

if TYPE_CHECKING:  # torch.distributed does not export these
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch._C._distributed_c10d import HashStore, PrefixStore, Store
    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.training.group.replica_groups import Pending
    from freetrain_parsl.training.mailbox import ControlMailbox, Membership
else:
    from torch.distributed import HashStore, PrefixStore, Store

T = TypeVar("T")

_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|socket timeout", re.IGNORECASE
)
_CONNECT_TIMEOUT = timedelta(seconds=10)
"""For connections between members that have all arrived and reached each other a moment before."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FEW_STORE_CALLS = {
    "GLOO_ENABLE_STORE_V2_API": "1",  # one call for the addresses of all members, instead of two for each
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1",  # one address of each member, instead of one for each of its peers
}
_LOOPBACK = "lo"
_FAILED_TOGETHER = (RuntimeError, TimeoutError, ConnectionError)  # by torch, and by the store of a group that forms


class KeyValue(Protocol):
    """A small shared dictionary in which the members of a group meet; reads wait for missing keys."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value`."""

    def get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Return the values of `keys`; wait for them for up to `timeout` seconds, then raise TimeoutError."""

    def add(self, key: str, amount: int) -> int:
        """Atomically add to the decimal number under `key` (0 if absent) and return the sum."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist."""

    def delete(self, key: str) -> bool:
        """Remove `key`; return whether it existed."""


class RendezvousStore(Store):
    """A torch store on top of any `KeyValue`, so that a rendezvous can use an authenticated channel.

    Parameters
    ----------
    backend
        Stores the keys.
    timeout
        Maximum wait for a key that has not been set yet.
    """

    def __init__(self, backend: KeyValue, timeout: timedelta = timedelta(minutes=1)) -> None:
        super().__init__()
        self._backend = backend
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._backend.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, in one call of the backend."""
        return self._backend.get(keys, self._timeout.total_seconds())

    def has_extended_api(self) -> bool:
        """Return true: gloo may use `multi_get`."""
        return True

    def add(self, key: str, value: int) -> int:
        """Count."""
        return self._backend.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._backend.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys."""
        self._backend.get(keys, (timeout or self._timeout).total_seconds())

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - called by this name from torch's C++ code
        """Remove a key."""
        return self._backend.delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Timeout of `get` and `wait`."""
        return self._timeout


class Group:
    """The members that currently train together, and their collective operations.

    Parameters
    ----------
    rank, size
        This member's number, and how many there are.
    generation
        Generation of its `Membership`.
    mailbox
        Is notified while this process only waits for other members.
    trainer
        Name of the training job.
    rehearsal
        Number of processes of the mesh that a newcomer prepares its model on, without communication.
    replicas
        Number of replicas of a sharded state into which the members are divided, by consecutive ranks.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        generation: int = 0,
        mailbox: ControlMailbox | None = None,
        trainer: str = "",
        rehearsal: int | None = None,
        replicas: int = 1,
    ) -> None:
        self.rank = rank
        self.size = size
        self.generation = generation
        self.gradients: dist.ProcessGroup | None = None
        """The torch process group for gradients; ``None``: the default group."""
        self._gpus: GpuGroups | None = None
        self._waiting: Callable[[], AbstractContextManager[None]] = mailbox.waiting if mailbox else nullcontext
        self.connections = GroupConnections()
        """The group's own among all sockets of this process."""
        self._joined = False
        self._environment = ExitStack()
        self._trainer = trainer
        self._mesh: DeviceMesh | None = None
        self._rehearsal = rehearsal
        self.replicas = replicas
        """How many replicas there are."""
        self._of_replicas: ReplicaGroups | None = None

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
        """Return the sum of a CPU tensor over all members; `values` is not changed.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        if self.size == 1:
            return values
        total = values.clone()
        self._jointly(lambda: self._await(self._pending(dist.all_reduce(total, async_op=True), total)))
        return total

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors (of equal shape) of all members, by rank.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
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
        """Return the first member's value, an object that can be pickled, on all members.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        if self.size == 1:
            return value
        return self.gather_objects(value if self.is_first else None)[0]  # type: ignore[return-value]

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all members, objects that can be pickled, by rank.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
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
            with self._peers_expected():
                group = self.gradients if gpus.is_on_gpu(values) else None
                return self._pending(dist.all_reduce(values, group=group, async_op=True), values)
        except PeerFailed as error:
            if self._of_replicas is None:
                raise
            return NotStarted(error)

    def end_sums(self, works: Iterable[Pending]) -> None:
        """Wait for sums; all members call this.

        Raises
        ------
        PeerFailed
            A member has failed.
        """

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
                self._await(dist.all_reduce(torch.zeros(1), async_op=True))

            self._jointly(settled_sum)
        elif self._gpus is not None:
            with self.waits():
                self.settle()

    def settle(self) -> None:
        """Wait until what was sent between GPUs has arrived, before it is used for what lasts: see `GpuGroups.settle`.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        if self._gpus is not None:
            self._gpus.settle()

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
        """Return the value of one member, an object that can be pickled, on all; all members call this.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._jointly(lambda: self._await(dist.broadcast(size, source, async_op=True)))
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._jointly(lambda: self._await(dist.broadcast(data, source, async_op=True)))
        received: T = pickle.loads(data.numpy().tobytes())  # noqa: S301 - of a proven member
        return received

    def begin_transfers(self, operations: list[dist.P2POp]) -> list[Pending]:
        """Start to send and receive; as a batch, for which NCCL needs no further connections.

        Parameters
        ----------
        operations
            At least one; their tensors are on one device.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        with self.waits():
            return [self._pending(work, operations[0].tensor) for work in dist.batch_isend_irecv(operations)]

    def end_transfers(self, works: Iterable[Pending]) -> None:
        """Wait for sends and receives.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
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

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Mark a wait for the other members, and convert its failure to `PeerFailed`.

        Raises
        ------
        PeerFailed
            A collective inside the block failed.
        """
        with self._waiting(), self._peers_expected():
            yield

    def formed(self, backend: str, timeout: timedelta, admission: Admission, environment: ExitStack) -> None:
        """Start to use a process group that has just formed; called by `join`.

        Parameters
        ----------
        backend
            Name of its torch backends.
        timeout
            Of its collectives.
        admission
            Checks its connections.
        environment
            Restores the environment; closed when this process leaves the group.

        Raises
        ------
        PeerFailed
            A member has failed, or an impostor has taken its place.
        """
        self._joined = True
        self._environment = environment
        try:
            with self.waits():
                admission.check()
            uses_nccl = backend != "gloo" and gpus.may_use_nccl(
                [each.tolist() for each in self.gather(torch.tensor(gpus.facts()))]
            )
            if backend != "gloo" and not uses_nccl:
                with self.waits():
                    self.gradients = dist.new_group(backend="gloo")
                    admission.check(self.gradients)
            self.connections.form(self.gather)
            if uses_nccl:
                self._gpus = GpuGroups(self.connections.any_lost)
            with self.waits():
                if self.replicas > 1:
                    self._of_replicas = ReplicaGroups(self.rank, self.size, self.replicas, admission)
                if self._gpus is not None:
                    self._gpus.form(dist.distributed_c10d._get_default_group())  # noqa: SLF001 - no public API
                    for replicas in () if self._of_replicas is None else self._of_replicas.groups:
                        self._gpus.form(replicas)
        except PeerFailed:
            self.leave()
            raise
        for each in (None,) if self._of_replicas is None else (None, *self._of_replicas.groups):
            dist.distributed_c10d._set_pg_timeout(timeout, each)  # noqa: SLF001 - no public API

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return this replica as a device mesh for sharded models; for this a group of one becomes a process group.

        The mesh has a unique name: torch identifies meshes by size and name, and its cached data of the mesh of an
        earlier group, in which this process had another rank, would be wrong in this one.

        Parameters
        ----------
        device
            This member's device.

        Raises
        ------
        UsageError
            Members share a GPU.
        """
        if self._mesh is None:
            if self.gradients is not None:
                raise UsageError(gpus.SHARED_GPU)
            from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

            size = self.size
            if self._rehearsal is not None and _rehearse(self._rehearsal):
                size, self._joined = self._rehearsal, True
            elif not self._joined:
                with gloo_environment(_LOOPBACK):
                    dist.init_process_group(gpus.backend(), store=HashStore(), rank=0, world_size=1)
                self._joined = True
            name = f"{self._trainer}/{self.generation}" if self._rehearsal is None else "rehearsal"
            if self._of_replicas is not None:
                refuse_groups_within_replicas()
                self._mesh = DeviceMesh.from_group(self._of_replicas.own, device.type, mesh_dim_names=(name,))
            else:
                self._mesh = init_device_mesh(device.type, (size,), mesh_dim_names=(name,))
        return self._mesh

    def abort(self, *, replica: bool = True) -> None:
        """Abort the collectives in which members wait; from any thread.

        Parameters
        ----------
        replica
            Whether also those of this member's replica; otherwise it is intact, and continues.
        """
        if self._of_replicas is not None:
            self._of_replicas.shut_down(own=replica)
        self._cut(replica=replica)

    def _cut(self, *, replica: bool = False) -> None:
        self.connections.shut_down()
        if (between := self._gpus) is not None and self._joined:
            between.abort(but=None if replica or self._of_replicas is None else self._of_replicas.own)

    def leave(self) -> None:
        """Leave the process group; the process stays. Has no effect if it has left already."""
        if self._joined:
            self._joined = False
            stuck = [dist.group.WORLD, self.gradients] if self.connections.has_lost else []
            if self._of_replicas is not None:
                stuck += self._of_replicas.stuck
            for group in stuck:  # its destructor would wait for its thread, which waits for what gloo has lost
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            if self._gpus is not None:
                self._gpus.close()
            self._gpus = None  # it refers to the groups
            with self._environment:
                dist.destroy_process_group()
            # While something refers to the group, such as a sharded model, its connections stay open, and a member
            # that has not noticed a failure would wait for this one.
            self.connections.shut_down()
            if self._of_replicas is not None:
                self._of_replicas.shut_down(own=True)

    @contextmanager
    def _peers_expected(self) -> Iterator[None]:
        try:
            yield
        except _FAILED_TOGETHER as error:
            raise PeerFailed(f"a member of a group of {self.size} failed ({gist(error)})") from error


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
    group = Group(
        membership.rank,
        membership.world_size,
        membership.generation,
        mailbox,
        membership.trainer,
        replicas=membership.replicas,
    )
    if membership.world_size == 1:
        return group
    if store is None:
        raise ValueError(f"a group of {membership.world_size} needs a store")
    backend = gpus.backend()
    timeout = membership.meeting
    store.set_timeout(timeout)
    if mailbox is not None:
        mailbox.on_abort = lambda: group.abort(replica=mailbox.leaves)
        mailbox.blocked = BlockedThread(threading.get_ident(), time.monotonic).seconds
    # A separate variable: torch finds the Python store behind a PrefixStore only while it is referenced elsewhere.
    own_store = PrefixStore(f"{membership.trainer}/{membership.generation}", store)
    with ExitStack() as environment, group.waits():
        environment.enter_context(gloo_environment(membership.interface))
        try:
            if membership.address is not None:
                members = check_reachable(own_store, membership.rank, membership.world_size, membership.address)
                before, group.connections = group.connections, GroupConnections(members)
                if before.cut_at is not None:  # by an abort in the meantime
                    group.connections.cut_at = before.cut_at
                # All have arrived. gloo waits this long for a peer that has died since, and no abort wakes it before it
                # has a socket.
                timeout = min(timeout, _CONNECT_TIMEOUT)
                store.set_timeout(timeout)
            admission = Admission.share(own_store, membership.rank, membership.world_size, membership.admission)
            dist.init_process_group(
                backend,
                store=own_store,
                rank=membership.rank,
                world_size=membership.world_size,
                timeout=timeout,
            )
        except _FAILED_TOGETHER as error:
            # torch numbers its groups, and the number is part of the rendezvous keys: newcomers count from 0.
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - no public API
            raise PeerFailed(
                f"training job {membership.trainer!r}: its {membership.world_size} processes did not all connect "
                f"({gist(error)})"
            ) from error
        kept = environment.pop_all()  # NCCL reads its variable only at the first exchange of gradients
    group.formed(backend, membership.timeout, admission, kept)
    return group


def _rehearse(size: int) -> bool:
    """Make a default process group of this size that does not communicate; return whether torch has one.

    The process is its last member, whose shards are the smallest.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:  # of another version: a newcomer then holds the whole model until it joins
        return False
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    return True


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error from user code was caused by a failed member in a collective.

    Collectives called by user code raise plain RuntimeErrors, which only differ in their text.
    """
    if isinstance(error, (PeerFailed, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def gist(error: BaseException) -> str:
    """Return the first sentence of a long torch message, without the location in torch's source."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error).strip())
    return re.split(r"\. |\n", text, maxsplit=1)[0] or type(error).__name__


@contextmanager
def gloo_environment(interface: str | None) -> Iterator[None]:
    """Make gloo and NCCL use an interface, which they read only from the environment, and set what else they read."""
    wanted = {} if interface is None else dict.fromkeys(_INTERFACE_VARIABLES, interface)
    wanted |= _FEW_STORE_CALLS | gpus.ENVIRONMENT
    before = {variable: os.environ.get(variable) for variable in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
