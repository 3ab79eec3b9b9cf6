"""Replicas of a sharded state: the process groups of one member, and collective operations that end alike in a replica.

The members of a group are divided into replicas of consecutive ranks, each of which has the whole state, divided among
its members. They have two further process groups: one of each replica, in which the model's own collectives are, and
one of each *position*, of the members that have the same part in different replicas. If a process of one replica fails,
the group and the groups of positions break. The groups of the other replicas do not: their members are never
interrupted in a forward or backward pass of the user's code, from which none could continue, as long as all of them
notice the failure at the same point. An error in a sum over a position is therefore recorded, and each operation of
the whole group is followed by a small sum over the replica, in which its members tell each other whether it failed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.training.group import gpus
from freetrain_parsl.training.group.admission import CONNECT_TIMEOUT
from freetrain_parsl.training.group.connections import GroupConnections
from freetrain_parsl.training.group.failures import await_collective

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from freetrain_parsl.training.group.admission import Admission

__all__ = ["AN_INT_IS_REFUSED", "NotStarted", "Pending", "ReplicaGroups", "refuse_groups_within_replicas"]

AN_INT_IS_REFUSED = (
    "fully_shard(reshard_after_forward={}) cannot be combined with replicas, in which torch forms no smaller groups; "
    "give True or False"
)
"""With the int."""

T = TypeVar("T")


class Pending(Protocol):
    """An operation that may not have ended yet."""

    def wait(self) -> bool:
        """Wait for it."""


class NotStarted:
    """Stands for an operation that could not start, or that would be in vain."""

    def __init__(self, error: PeerFailed) -> None:
        self._error = error

    def wait(self) -> bool:
        """Raise the error: where the members of a replica wait, all of them notice it."""
        raise self._error


class ReplicaGroups:
    """The replica of one member, and its position in it; all members of the group create this at the same time.

    Parameters
    ----------
    rank, size
        Its rank in the whole group, and the number of members.
    replicas
        How many replicas there are; it divides `size`.
    admission
        Checks the connections.

    Raises
    ------
    PeerFailed
        A member has failed, or an impostor has taken its place.
    RuntimeError
        A member has failed.
    """

    def __init__(self, rank: int, size: int, replicas: int, admission: Admission) -> None:
        shards = size // replicas
        first = rank - rank % shards
        self.own, self._own_connections = _group(range(first, first + shards), admission)
        """The process group of this member's replica."""
        self._across, self._connections = _group(range(rank % shards, size, shards), admission)
        self._failure: PeerFailed | None = None

    @property
    def failure(self) -> PeerFailed | None:
        """Why the present step cannot be completed with all replicas, as far as this member knows."""
        return self._failure

    @property
    def stuck(self) -> list[dist.ProcessGroup]:
        """The process groups in which a thread waits for ever."""
        both = (self.own, self._own_connections), (self._across, self._connections)
        return [group for group, connections in both if connections.has_lost]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Both process groups."""
        return self.own, self._across

    def note(self, failure: PeerFailed) -> None:
        """Note a failure: all members of this replica come to know of it in the next `jointly`."""
        self._failure = self._failure or failure

    def sum_gradient(self, gradient: torch.Tensor) -> None:
        """Replace a sharded gradient by its sum over the replicas; after a failure, leave it as it is."""
        if self._failure is not None:
            return
        try:
            work = dist.all_reduce(gradient, group=self._across, async_op=True)
            if gpus.is_on_gpu(gradient):
                work.wait()
            else:
                await_collective(work, self._connections)
        except (RuntimeError, PeerFailed) as error:
            self.note(PeerFailed(f"a process of another replica failed ({error})"))
            self._connections.shut_down()  # the same position of other replicas may wait for this one

    def jointly(
        self, operation: Callable[[], T], waits: Callable[[], AbstractContextManager[None]], cut: Callable[[], None]
    ) -> T:
        """Return the result of an operation of the whole group; it succeeds on all members of a replica, or on none.

        Parameters
        ----------
        operation
            The operation.
        waits
            See `Group.waits`.
        cut
            Shuts down the connections of the whole group, so that nobody waits for this member in it.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        result: list[T] = []
        if self._failure is None:
            try:
                with waits():
                    result = [operation()]
            except PeerFailed as error:
                self.note(error)
        if self._failure is not None:
            self._connections.shut_down()
            cut()
        failed = torch.tensor([self._failure is not None], dtype=torch.float32)
        with waits():
            await_collective(dist.all_reduce(failed, group=self.own, async_op=True), self._own_connections)
        if failed.item():
            self.note(PeerFailed("a process of another replica failed, as another member of this replica has noticed"))
            assert self._failure is not None, "noted"
            raise self._failure
        return result[0]

    def shut_down(self, *, own: bool) -> None:
        """Shut down the connections to other replicas, or those of its `own`, too; from any thread."""
        self._connections.shut_down()
        if own:
            self._own_connections.shut_down()


def refuse_groups_within_replicas() -> None:
    """Let ``fully_shard`` refuse an int of ``reshard_after_forward`` on a mesh that has not all processes.

    It would form smaller groups, of the same names in each replica, whose members would wait for ever.
    """
    module: Any = import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    form: Any = getattr(module, "_get_post_forward_mesh_info", None)  # of torch 2.6 to 2.13; there is no public API

    def checked(after_forward: int, mesh_info: Any) -> Any:
        within = mesh_info.mesh.size()
        is_int = not isinstance(after_forward, bool) and 1 < after_forward < within
        if is_int and within < dist.get_world_size():
            raise UsageError(AN_INT_IS_REFUSED.format(after_forward))
        return form(after_forward, mesh_info)

    if form is not None and form.__name__ != checked.__name__:  # once in a process
        module._get_post_forward_mesh_info = checked  # noqa: SLF001 - the same


def _group(ranks: Sequence[int], admission: Admission) -> tuple[dist.ProcessGroup, GroupConnections]:
    """Create a process group of these ranks, which only they call; return it and its connections."""
    connections = GroupConnections()
    group = dist.new_group(list(ranks), timeout=CONNECT_TIMEOUT, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this process is a member"

    def gather(values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in ranks]
        dist.all_gather(parts, values, group=group)
        return parts

    admission.of(ranks).check(group)
    connections.form(gather)
    return group, connections
