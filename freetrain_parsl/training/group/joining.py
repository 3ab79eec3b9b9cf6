"""How the members of a training job form process groups, abort them, and leave them.

The members of a group meet under the prefix ``<trainer>/<generation>`` of a store and leave the group when nodes join
or leave; the processes stay. Collectives for decisions run on CPU tensors over gloo; gradients use NCCL on GPUs. A
group of one needs no store and no network.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.training.group import gpus
from freetrain_parsl.training.group.admission import CONNECT_TIMEOUT, Admission
from freetrain_parsl.training.group.connections import GroupConnections
from freetrain_parsl.training.group.failures import FAILED_TOGETHER, await_collective, gist, peers_expected
from freetrain_parsl.training.group.gpus import GpuGroups
from freetrain_parsl.training.group.reachability import check_reachable
from freetrain_parsl.training.group.replica_groups import ReplicaGroups, refuse_groups_within_replicas

if TYPE_CHECKING:  # torch.distributed does not export these
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch._C._distributed_c10d import HashStore, PrefixStore, Store
    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.training.mailbox import ControlMailbox, Membership
else:
    from torch.distributed import HashStore, PrefixStore

__all__ = ["JoinedGroups", "gloo_environment"]

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FEW_STORE_CALLS = {
    "GLOO_ENABLE_STORE_V2_API": "1",  # one call for the addresses of all members, instead of two for each
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1",  # one address of each member, instead of one for each of its peers
}
_LOOPBACK = "lo"


class JoinedGroups:
    """The torch process groups of one member, from before they form until it leaves them.

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

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Mark a wait for the other members, and convert its failure to `PeerFailed`."""
        with self._waiting(), peers_expected(self.size):
            yield

    def settle(self) -> None:
        """Wait until what was sent between GPUs has arrived, before it is used for what lasts; see `GpuGroups`."""
        if self._gpus is not None:
            self._gpus.settle()

    def form(self, membership: Membership, store: Store) -> None:
        """Meet the other members in a store, and form the process groups.

        Raises
        ------
        PeerFailed
            Other members did not connect in time, or left, or an impostor has taken the place of one.
        """
        backend = gpus.backend()
        with ExitStack() as environment, self.waits():
            environment.enter_context(gloo_environment(membership.interface))
            try:
                admission = self._meet(membership, store, backend)
            except FAILED_TOGETHER as error:
                # torch numbers its groups, and the number is part of the rendezvous keys: newcomers count from 0.
                dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - no public API
                raise PeerFailed(
                    f"training job {membership.trainer!r}: its {membership.world_size} processes did not all connect "
                    f"({gist(error)})"
                ) from error
            self._environment = environment.pop_all()  # NCCL reads its variable only at the first exchange of gradients
        self._joined = True
        try:
            self._form_others(backend, admission)
        except PeerFailed:
            self.leave()
            raise
        groups = [None, *([] if self.gradients is None else [self.gradients])]
        for each in groups if self._of_replicas is None else (*groups, *self._of_replicas.groups):
            dist.distributed_c10d._set_pg_timeout(membership.timeout, each)  # noqa: SLF001 - no public API

    def _meet(self, membership: Membership, store: Store, backend: str) -> Admission:
        """Form the default process group; return what checks its connections."""
        timeout = membership.meeting
        store.set_timeout(timeout)
        # A separate variable: torch finds the Python store behind a PrefixStore only while it is referenced elsewhere.
        own_store = PrefixStore(f"{membership.trainer}/{membership.generation}", store)
        if membership.address is not None:
            members = check_reachable(own_store, self.rank, self.size, membership.address)
            before, self.connections = self.connections, GroupConnections(members)
            if before.cut_at is not None:  # by an abort in the meantime
                self.connections.cut_at = before.cut_at
            # All have arrived. gloo waits this long for a peer that has died since, and no abort wakes it before it
            # has a socket.
            timeout = min(timeout, CONNECT_TIMEOUT)
            store.set_timeout(timeout)
        admission = Admission.share(own_store, self.rank, self.size, membership.admission)
        dist.init_process_group(backend, store=own_store, rank=self.rank, world_size=self.size, timeout=timeout)
        return admission

    def _form_others(self, backend: str, admission: Admission) -> None:
        """Check the connections of the default process group, and form those for gradients and replicas."""
        with self.waits():
            admission.check()
        uses_nccl = backend != "gloo" and gpus.may_use_nccl(
            [each.tolist() for each in self._gathered(torch.tensor(gpus.facts()))]
        )
        if backend != "gloo" and not uses_nccl:
            with self.waits():
                self.gradients = dist.new_group(backend="gloo", timeout=CONNECT_TIMEOUT)
                admission.check(self.gradients)
        self.connections.form(self._gathered)
        if uses_nccl:
            self._gpus = GpuGroups(self.connections.any_lost)
        with self.waits():
            if self.replicas > 1:
                self._of_replicas = ReplicaGroups(self.rank, self.size, self.replicas, admission)
            if self._gpus is not None:
                self._gpus.form(dist.distributed_c10d._get_default_group())  # noqa: SLF001 - no public API
                for replicas in () if self._of_replicas is None else self._of_replicas.groups:
                    self._gpus.form(replicas)

    def _gathered(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with self.waits():
            await_collective(dist.all_gather(parts, values, async_op=True), self.connections)
        return parts

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
