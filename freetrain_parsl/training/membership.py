"""Process groups that come and go: who trains together, and how they find and leave each other.

The members of a group meet under the prefix ``<trainer>/<generation>`` of a store and leave it when nodes come or go;
the processes stay. Collectives that carry decisions run on CPU tensors over gloo; gradients go over NCCL where there
are GPUs. A group of one needs no store and no network.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerLost, UsageError
from freetrain_parsl.training.admission import Admission
from freetrain_parsl.training.blocked import BlockedThread
from freetrain_parsl.training.reachability import check_reachable

if TYPE_CHECKING:  # torch.distributed does not declare these among its exports
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch._C._distributed_c10d import HashStore, PrefixStore, Store
    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.training.terms import Membership, Notice
else:
    from torch.distributed import HashStore, PrefixStore, Store

_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|socket timeout", re.IGNORECASE
)
_CONNECTING = timedelta(seconds=20)
"""Limit for connections among members that have all come, and reached each other, a moment before."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo"


class KeyValue(Protocol):
    """Where the members of a group meet: a small shared dictionary, blocking on what is not there yet."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value`."""

    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of `key`; wait for it up to `timeout` seconds, then raise TimeoutError."""

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under `key` (0 if absent) atomically, and return the sum."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are there."""

    def delete(self, key: str) -> bool:
        """Remove `key`; whether it was there."""


class RendezvousStore(Store):
    """torch's store on top of any `KeyValue`, so that a rendezvous can use an authenticated channel.

    Parameters
    ----------
    backend
        What carries the keys.
    timeout
        How long to wait for a key that no member has set yet.
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
        return self._backend.get(key, self._timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        """Count."""
        return self._backend.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._backend.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys."""
        for key in keys:
            self._backend.get(key, (timeout or self._timeout).total_seconds())

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name by which torch's C++ calls it
        """Remove a key."""
        return self._backend.delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return self._timeout


class Group:
    """The members that train together at present, and the few things that they do together.

    Parameters
    ----------
    rank, size
        This member's number, and how many there are.
    generation
        Of its `Membership`.
    notice
        Is told when this process does nothing but wait for the others.
    trainer
        Name of the training.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        generation: int = 0,
        notice: Notice | None = None,
        trainer: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.generation = generation
        self.gradients: dist.ProcessGroup | None = None
        """The torch process group for gradients; ``None``: the default one."""
        self.over_gpus = False
        """Whether tensors on GPUs travel directly."""
        self._waiting: Callable[[], AbstractContextManager[None]] = notice.waiting if notice else nullcontext
        self._others_sockets = _sockets().keys()
        self._sockets: frozenset[str] | None = None  # while the group forms: all new ones
        self._joined = False
        self._trainer = trainer
        self._mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the member that writes and reports."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a CPU tensor over all members; `values` itself is left alone.

        Raises
        ------
        PeerLost
            A member is gone.
        """
        if self.size == 1:
            return values
        total = values.clone()
        with self.waits():
            dist.all_reduce(total)
        return total

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors (of one shape) of all members, in order of rank.

        Raises
        ------
        PeerLost
            A member is gone.
        """
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with self.waits():
            dist.all_gather(parts, values, group=self.gradients if values.is_cuda else None)
        return parts

    def begin_sum(self, values: torch.Tensor) -> dist.Work:
        """Begin to replace a tensor by its sum over all members; to be waited for in `waits`.

        Raises
        ------
        PeerLost
            A member is gone.
        """
        with self._peers_expected():
            work: dist.Work | None = dist.all_reduce(
                values, group=self.gradients if values.is_cuda else None, async_op=True
            )
        assert work is not None, "this process is a member"
        return work

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Mark a wait for the other members, and turn its failure into `PeerLost`.

        Raises
        ------
        PeerLost
            A collective inside the block failed.
        """
        with self._waiting(), self._peers_expected():
            yield

    def formed(self, backend: str, timeout: timedelta, admission: Admission) -> None:
        """Take the process group that has just formed into use; `join` calls this.

        Raises
        ------
        PeerLost
            A member is gone, or something else has taken its place.
        """
        self._joined = True
        try:
            with self.waits():
                admission.check()
            if backend != "gloo":
                self.gradients = _group_for_shared_devices(self)
                self.over_gpus = self.gradients is None
                if self.gradients is not None:
                    with self.waits():
                        admission.check(self.gradients)
        except PeerLost:
            self.leave()
            raise
        dist.distributed_c10d._set_pg_timeout(timeout)  # noqa: SLF001 - torch has no public way
        self._sockets = frozenset(_sockets().keys() - self._others_sockets)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the members as a device mesh, to shard models over; a group of one becomes a process group for that.

        It has a name of its own: torch takes meshes of one size and name for the same, and what it remembers of the
        mesh of an earlier group, in which this process had another rank, would be wrong in this one.

        Parameters
        ----------
        device
            This member's.

        Raises
        ------
        UsageError
            Members share a GPU.
        """
        if self._mesh is None:
            if self.gradients is not None:
                raise UsageError("session.mesh: processes that share a GPU cannot shard a model; give each its own")
            from torch.distributed.device_mesh import init_device_mesh

            if not self._joined:
                with _network_interface(_LOOPBACK):
                    dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
                self._joined = True
            name = f"{self._trainer}/{self.generation}"
            self._mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=(name,))
        return self._mesh

    def abort(self) -> None:
        """Break the collectives that the members wait in; from any thread.

        gloo's own abort does not wake a collective that waits (torch 2.13), the end of its connections does.
        """
        for name, descriptor in _sockets().items():
            ours = name not in self._others_sockets if self._sockets is None else name in self._sockets
            if ours:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # raises for the one that listens: without it gloo ends the process
                    connection.shutdown(socket.SHUT_RDWR)
        if self.over_gpus and self._joined:
            group = dist.distributed_c10d._get_default_group()  # noqa: SLF001 - torch has no public way
            group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - the same

    def leave(self) -> None:
        """Leave the process group; the process stays. Harmless if it has left already."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    @contextmanager
    def _peers_expected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"lost a member of a group of {self.size} ({gist(error)})") from error


def join(membership: Membership, store: Store | None, notice: Notice | None = None) -> Group:
    """Become a member of a process group.

    Parameters
    ----------
    membership
        This process's place.
    store
        Where the members meet; not used by a group of one.
    notice
        Is told when this process only waits, and can abort the group, from before it has formed.

    Raises
    ------
    PeerLost
        The others did not come in time, or left.
    """
    group = Group(membership.rank, membership.world_size, membership.generation, notice, membership.trainer)
    if membership.world_size == 1:
        return group
    if store is None:
        raise ValueError(f"a group of {membership.world_size} needs a store to meet in")
    backend = _backend()
    store.set_timeout(membership.meeting)
    if notice is not None:
        notice.on_abort = group.abort
        notice.blocked = BlockedThread(threading.get_ident(), time.monotonic).seconds
    # A name of its own: torch finds the Python store behind a PrefixStore only as long as somebody else holds it.
    own_store = PrefixStore(f"{membership.trainer}/{membership.generation}", store)
    with _network_interface(membership.interface), group.waits():
        try:
            if membership.address is not None:
                check_reachable(own_store, membership.rank, membership.world_size, membership.address)
            admission = Admission.share(own_store, membership.rank, membership.world_size, membership.admission)
            dist.init_process_group(
                backend,
                store=own_store,
                rank=membership.rank,
                world_size=membership.world_size,
                timeout=membership.meeting if membership.address is None else min(membership.meeting, _CONNECTING),
            )
        except (RuntimeError, TimeoutError, ConnectionError) as error:  # torch's own errors are RuntimeErrors
            # torch numbers its groups, and the number is in the keys by which they meet: those to come count from 0.
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - torch has no public way
            raise PeerLost(
                f"trainer {membership.trainer!r}: its {membership.world_size} processes did not all meet "
                f"({gist(error)})"
            ) from error
    group.formed(backend, membership.timeout, admission)
    return group


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error out of user code comes from a collective of its own that lost a member.

    There torch raises plain RuntimeErrors: their text is all there is to go by.
    """
    if isinstance(error, (PeerLost, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def gist(error: BaseException) -> str:
    """Return the first sentence of one of torch's long messages, without the place in torch's source."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error).strip())
    return re.split(r"\. |\n", text, maxsplit=1)[0] or type(error).__name__


def _sockets() -> dict[str, int]:
    """Return the sockets of this process: their unique names, and their descriptors."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def _group_for_shared_devices(group: Group) -> dist.ProcessGroup | None:
    """Return a gloo group where several members share one GPU, which NCCL refuses; else ``None``."""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    mark = torch.tensor([int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:7], "big")])
    distinct = {int(other) for other in group.gather(mark)}
    return None if len(distinct) == group.size else dist.new_group(backend="gloo")


@contextmanager
def _network_interface(name: str | None) -> Iterator[None]:
    """Let gloo and NCCL use that interface; they read it from the environment only."""
    if name is None:
        yield
        return
    before = {variable: os.environ.get(variable) for variable in _INTERFACE_VARIABLES}
    os.environ.update(dict.fromkeys(_INTERFACE_VARIABLES, name))
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
