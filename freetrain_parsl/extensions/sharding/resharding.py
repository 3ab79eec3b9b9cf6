"""The sharded state of a training job follows its members: which shards each of them holds, and how these move.

A change has four phases: the new shards are filled (`moving`), all members tell each other that they have theirs, each
lets its objects refer to them (`structures`), and all tell each other that they have. Only then the old shards are
dropped. After a failure in between, the members of the next group find a set of shards of which they hold every part.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from freetrain_parsl.errors import PeerFailed, StateLost, UsageError
from freetrain_parsl.extensions.sharding import structures
from freetrain_parsl.extensions.sharding.memory import needs, shortage
from freetrain_parsl.extensions.sharding.moving import BUDGET, Traffic, move
from freetrain_parsl.extensions.sharding.narrowing import Narrowing
from freetrain_parsl.extensions.sharding.rounds import Layout
from freetrain_parsl.extensions.sharding.state import leaves_by_path
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.training.checkpoints.format import is_spread
from freetrain_parsl.training.loop_state import content_of
from freetrain_parsl.training.undo import has_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.extensions.sharding.memory import Need
    from freetrain_parsl.training.group.process_group import Group

__all__ = ["Holding", "Moved", "Resharding"]

_AGREED = torch.zeros(1)  # what members sum to know that all have come so far


class OtherModel(PeerFailed):
    """A process that joined has another model than the others, which continue without it."""


class Holding(NamedTuple):
    """One member's part of a whole set of shards.

    Parameters
    ----------
    made
        Generation of the group for which the set was made.
    owners
        Number of its parts.
    owner
        Number of this part.
    """

    made: int
    owners: int
    owner: int


_NOT_HELD = Holding(-1, -1, -1)


@dataclass(frozen=True)
class Moved:
    """A change of the members, as it was for this one.

    Parameters
    ----------
    seconds
        From the first to the last phase, without forming the group.
    traffic
        What was sent and received.
    """

    seconds: float
    traffic: Traffic


class ShardEntry(NamedTuple):
    """One sharded tensor: its place, the same on all members, what is global about it, and whether it is trained."""

    path: tuple[Any, ...]
    layout: Layout
    trained: bool


_Set = list[torch.Tensor]  # the shards of one holding, each with its padding, by the number of the tensor


class Resharding:
    """The shards of one member.

    Parameters
    ----------
    objects
        Name -> object, as given to ``session.prepare``; may grow until the loop begins.
    budget
        See `move`.
    """

    def __init__(self, objects: Mapping[str, Any], *, budget: int = BUDGET) -> None:
        self.loop: Callable[[], Iterable[tuple[str, Any]]] = tuple
        """Returns the names and values of the loop's state."""
        self._first_of_loop: frozenset[tuple[Any, ...]] = frozenset()
        self._objects = objects
        self._budget = budget
        self._live: Holding | None = None
        self._kept: dict[Holding, _Set] = {}  # others than the live ones
        self._narrowing = Narrowing()
        self.moved: Moved | None = None
        """The last change."""

    # ── what there is ─────────────────────────────────────────────────────────────────────────────

    @property
    def models(self) -> list[nn.Module]:
        """The models, prepared or in the loop's state."""
        things = [*self._objects.values(), *(value for _, value in self.loop())]
        return [thing for thing in things if isinstance(thing, nn.Module)]

    def tensors(self) -> dict[tuple[Any, ...], Any]:
        """Return all sharded tensors, each once, in the same order on all members; a parameter's own follow it."""
        found: dict[tuple[Any, ...], Any] = {}
        seen: set[int] = set()
        for path, tensor in self._all():
            if is_spread(tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                found[path] = tensor
        return found

    def _all(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        states: dict[int, list[tuple[tuple[Any, ...], Any]]] = {}
        for name, index, parameter, state in self._optimizer_states():
            mine = [((name, "state", index, *path), leaf) for path, leaf in leaves_by_path(state)]
            states.setdefault(id(parameter), []).extend(mine)
        for name, thing in (*self._objects.items(), *((f"loop/{name}", value) for name, value in self.loop())):
            if isinstance(thing, nn.Module):
                for inner, parameter in thing.named_parameters():
                    yield (name, inner), parameter
                    if parameter.grad is not None:
                        yield (name, inner, "grad"), parameter.grad
                    yield from states.pop(id(parameter), ())
                for inner, buffer in thing.named_buffers():
                    yield (name, inner), buffer
            elif not isinstance(thing, Optimizer):
                for path, leaf in leaves_by_path(content_of(thing)):
                    yield (name, *path), leaf
        for rest in states.values():
            yield from rest

    def _optimizer_states(self) -> Iterator[tuple[str, int, torch.Tensor, Any]]:
        for name, thing in self._objects.items():
            if isinstance(thing, Optimizer):
                parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
                for index, parameter in enumerate(parameters):
                    yield name, index, parameter, thing.state.get(parameter, {})

    def entries(self, tensors: Mapping[tuple[Any, ...], Any]) -> list[ShardEntry]:
        """Describe tensors.

        Raises
        ------
        NotFollowed
            One has other placements than ``Shard`` over a mesh of one dimension.
        """
        return [
            ShardEntry(
                path,
                Layout(
                    tuple(tensor.shape),
                    tensor.dtype,
                    structures.shard_dim(tensor),
                    structures.local_of(tensor).device.type,
                ),
                tensor.requires_grad,
            )
            for path, tensor in tensors.items()
        ]

    @property
    def sizes_allowed(self) -> AllowedCounts:
        """The numbers of processes over which FSDP2 can shard the models.

        Raises
        ------
        InvalidApp
            There is none.
        """
        lengths, ints = structures.group_sizes(self.models)
        return AllowedCounts(lcm(*ints), gcd(*lengths))

    def problem(self, mesh: DeviceMesh) -> str | None:
        """Return why the models cannot follow a change of the members; ``None`` if they can.

        They are let follow their present mesh as a trial.
        """
        return structures.find_problem(self.models, mesh)

    def obstacle(self, group: Group, size: int | None, replicas: int = 1) -> str | None:
        """Return why the members cannot change in place now; ``None`` if they can; see `SpreadState.obstacle`.

        The old shards are kept until all have their new ones, so that those of all members on a node, old and new, have
        to fit into its memory together.
        """
        structures.reshard(self.models)
        mine: list[Need] | str
        try:
            layouts = [entry.layout for entry in self.entries(self.tensors())]
            # As whole replicas join or leave, those that stay keep their shards.
            keeps = replicas > 1 and self._live is not None and self._live.owners == size
            mine = [] if size is None or keeps else needs(layouts, size, group.rank, self._budget)
        except structures.NotFollowed as error:
            mine = str(error)
        theirs = group.gather_objects(mine)
        return next((each for each in theirs if isinstance(each, str)), None) or shortage(
            each for each in theirs if not isinstance(each, str)
        )

    @property
    def is_pending(self) -> bool:
        """Whether gradients are not reduced yet, so that a change has to wait."""
        return structures.is_pending(self.models)

    # ── changes ───────────────────────────────────────────────────────────────────────────────────

    def follow_loop(self, loop: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Move the sharded tensors in the loop's state, too; `loop` returns its names and values."""
        self.loop = loop
        self._first_of_loop = frozenset(self._spread_in_loop())

    def check_loop(self) -> None:
        """Check that another process, which runs the function up to its loop, has all sharded tensors of the loop.

        Raises
        ------
        UsageError
            It would not have one.
        """
        for name, *path in self._spread_in_loop():
            if (name, *path) not in self._first_of_loop:
                raise UsageError(
                    f"session.state: {name} has got a sharded tensor{' at ' if path else ''}{_name(path)} that its "
                    "first value has not, so that it could not be restored: declare it with one like it, such as "
                    "p.detach().clone() of a parameter, and change this one"
                )

    def _spread_in_loop(self) -> Iterator[tuple[Any, ...]]:
        for name, value in self.loop():
            if not isinstance(value, nn.Module):
                yield from ((name, *path) for path, leaf in leaves_by_path(content_of(value)) if is_spread(leaf))

    def begin(self, group: Group) -> None:
        """Note that this member has its part of the state in its first group."""
        if self._live is None:
            self._live = Holding(group.generation, group.shards, group.position)

    def hand_over(self, group: Group, hosts: Sequence[int], made: int) -> None:
        """Give the shards of all members to those that stay, over the group that they are about to leave.

        Nothing refers to the new shards until `take_over`.

        Parameters
        ----------
        group
            The present group; all its members call this.
        hosts
            Owner -> its rank in it: the members that stay, in the order of their next ranks.
        made
            Generation of the next group.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        assert self._live is not None, "it is a member"
        if len({host % group.shards for host in hosts}) == group.shards:
            return  # they have every part, as whole replicas leave
        began = time.monotonic()
        structures.reshard(self.models)
        tensors = self.tensors()
        managed = structures.managed_parameters(self.models)
        gives = self._live if group.rank == self._live.owner else _NOT_HELD  # else another replica's member does
        new = _NewShards(tensors, self._present(tensors), gives, managed, len(hosts), self._narrowing)
        layouts = [entry.layout for entry in self.entries(tensors)]
        traffic = move(layouts, range(group.shards), hosts, new, group, budget=self._budget)
        if group.rank in hosts:
            self._kept[Holding(made, len(hosts), hosts.index(group.rank))] = new.filled()
        group.sum(_AGREED)
        self.moved = Moved(time.monotonic() - began, traffic)

    def take_over(self, group: Group, mesh_of: Callable[[], DeviceMesh]) -> None:
        """Get this member's part of the state in a new group, from the members that hold it.

        A replica whose members hold their parts of the newest set already keeps them; each other is filled from it.

        Parameters
        ----------
        group
            The new group; all its members call this.
        mesh_of
            Returns its mesh.

        Raises
        ------
        PeerFailed
            A member has failed; this can be called again in another group.
        StateLost
            The members do not hold every part of the state.
        UsageError
            This member is new, and its function has made another model than the others'.
        """
        began = time.monotonic()
        structures.reshard(self.models)
        chosen, hosts, lacking = self._choose(group)
        tensors, entries = self._agree_on_entries(group, hosts[0], has_state=self._live is not None)
        made = chosen.made if len(lacking) < group.replicas else group.generation
        mine = Holding(made, group.shards, group.position)
        traffic = Traffic()
        managed = structures.managed_parameters(self.models)
        for first in lacking:
            new = _NewShards(tensors, self._shards_of(chosen, tensors), chosen, managed, group.shards, self._narrowing)
            members = range(first, first + group.shards)
            layouts = [entry.layout for entry in entries]
            traffic = traffic.followed_by(move(layouts, hosts, members, new, group, budget=self._budget))
            if group.rank in members:
                self._kept[mine] = new.filled()
        group.sum(_AGREED)
        self._commit(mine, tensors, entries, mesh_of())
        group.sum(_AGREED)
        self._kept.clear()
        self._narrowing.settle(self._present(tensors))
        structures.forget_meshes()
        before = self.moved if self.moved is not None and chosen.made == group.generation else None
        self.moved = Moved(time.monotonic() - began, traffic) if before is None else _joined(before, began, traffic)

    def _choose(self, group: Group) -> tuple[Holding, list[int], list[int]]:
        """Return the newest set of shards of which the members hold every part, who holds each, and who lacks them.

        The last are the first ranks of the replicas in which a member does not hold its part.
        """
        holdings = sorted(self._kept.keys() | ({self._live} if self._live is not None else set()))
        hosts: dict[tuple[int, int], dict[int, int]] = {}
        held = group.gather_objects(holdings)
        for rank, theirs in enumerate(held):
            for holding in theirs:
                hosts.setdefault(holding[:2], {}).setdefault(holding.owner, rank)
        whole = [made for made, owners in hosts.items() if len(owners) == made[1]]
        if not whole:
            raise StateLost(
                "a process has failed that alone held its part of the sharded state: it resumes from its checkpoint"
            )
        newest = max(whole)
        ranks = [hosts[newest][owner] for owner in range(newest[1])]
        wanted = [Holding(newest[0], group.shards, position) for position in range(group.shards)]
        lacking = [
            first
            for first in range(0, group.size, group.shards)
            if newest[1] != group.shards
            or any(part not in theirs for part, theirs in zip(wanted, held[first:], strict=False))
        ]
        mine = ranks.index(group.rank) if group.rank in ranks else -1
        return Holding(*newest, mine), ranks, lacking

    def _agree_on_entries(
        self, group: Group, source: int, *, has_state: bool
    ) -> tuple[dict[tuple[Any, ...], Any], list[ShardEntry]]:
        """Return the tensors and what describes them; a newcomer takes the others' description."""
        tensors = self.tensors()
        if _count(group, of=has_state) == group.size:
            return tensors, self.entries(tensors)
        own = (self.entries(tensors), structures.int_of_each_group(self.models)) if group.rank == source else None
        entries, ints = group.broadcast(own, source)
        problem = "" if has_state else self._difference(tensors, entries)
        if _count(group, of=problem != ""):
            problems = group.gather_objects(problem)
            if problem:
                raise UsageError(f"a process that joins has another model than the others: {problem}")
            raise OtherModel(f"a process that joined has another model than the others: {max(problems)}")
        if has_state:
            return tensors, entries
        structures.remember_ints(self.models, ints)
        return self._conformed(tensors, entries), entries

    @staticmethod
    def _difference(tensors: Mapping[tuple[Any, ...], Any], entries: Sequence[ShardEntry]) -> str:
        """Return how a newcomer's parameters differ from the others'; empty if they do not."""
        parameters = {path: tensor for path, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        for path, layout, trained in entries:
            if (tensor := parameters.pop(path, None)) is None:
                if path not in tensors and path[-1] != "grad":
                    return f"it has no {_name(path)}"
                continue
            here = tuple(tensor.shape), tensor.dtype, structures.shard_dim(tensor), tensor.requires_grad
            there = layout.shape, layout.dtype, layout.dim, trained
            if here != there:
                return f"{_name(path)} is {here}, elsewhere {there}"
        return f"{_name(next(iter(parameters)))} is only there" if parameters else ""

    @staticmethod
    def _conformed(tensors: dict[tuple[Any, ...], Any], entries: Sequence[ShardEntry]) -> dict[tuple[Any, ...], Any]:
        """Return a newcomer's tensors in the others' order, with the others' shapes and types."""
        found: dict[tuple[Any, ...], Any] = {}
        for path, layout, _ in entries:
            shape = torch.Size(layout.shape)
            if path in tensors:
                found[path] = tensors[path]
            else:  # a gradient that is not used up yet
                parameter = tensors[path[:-1]]
                found[path] = parameter.grad = structures.empty_like(parameter, shape, layout.dtype, layout.dim)
            if not isinstance(found[path], nn.Parameter):
                structures.move_to_mesh(found[path], found[path].device_mesh, shape, layout.dtype, layout.dim)
        return found

    def _commit(
        self,
        mine: Holding,
        tensors: Mapping[tuple[Any, ...], Any],
        entries: Sequence[ShardEntry],
        mesh: DeviceMesh,
    ) -> None:
        """Let this member's objects refer to the shards of a holding and to a mesh."""
        managed = structures.managed_parameters(self.models)
        if mine != self._live:
            before = self._present(tensors) if self._live is not None else None
            new = self._kept.pop(mine)
            if self._live is not None and before is not None:
                self._kept[self._live] = before
            for tensor, padded, (_, layout, _) in zip(tensors.values(), new, entries, strict=True):
                start, stop = layout.span(mine.owner, mine.owners)
                structures.put(tensor, padded, stop - start, managed.get(id(tensor)))
            self._live = mine
        structures.rebind(self.models, mesh)
        for tensor in tensors.values():
            if id(tensor) not in managed:
                structures.move_to_mesh(tensor, mesh)
        for thing in (*self._objects.values(), *(value for _, value in self.loop())):
            if has_state(thing) and not isinstance(thing, (nn.Module, Optimizer)):
                content = thing.state_dict()
                if any(is_spread(leaf) for _, leaf in leaves_by_path(content)):
                    thing.load_state_dict(content)  # its tensors may be copies of these

    def _present(self, tensors: Mapping[tuple[Any, ...], Any]) -> _Set:
        """Return the shards that the objects refer to."""
        managed = structures.managed_parameters(self.models)
        return [structures.padded_of(tensor, managed.get(id(tensor))) for tensor in tensors.values()]

    def _shards_of(self, holding: Holding, tensors: Mapping[tuple[Any, ...], Any]) -> _Set:
        if holding.owner < 0:
            return []
        return self._present(tensors) if holding == self._live else self._kept[holding]


class _NewShards:
    """The old shards of this member, and its new ones while they are filled; see `moving.Shards`.

    Parameters
    ----------
    tensors
        The tensors.
    old
        This member's old shards.
    holding
        Which these are, if the new shards are filled from them on this member.
    managed
        FSDP2's records of parameters.
    owners
        Number of new parts.
    narrowing
        Keeps those in their place that are in old ones.
    """

    def __init__(
        self,
        tensors: Mapping[tuple[Any, ...], Any],
        old: _Set,
        holding: Holding,
        managed: Mapping[int, Any],
        owners: int,
        narrowing: Narrowing,
    ) -> None:
        self._tensors = list(tensors.values())
        self._old, self._holding = old, holding
        self._managed = managed
        self._owners = owners
        self._narrowing = narrowing
        narrowing.begin()
        self._new: dict[int, torch.Tensor] = {}

    def read(self, tensor: int, owner: int) -> torch.Tensor:  # noqa: ARG002 - this member has one part of a set
        """Return the old shard."""
        return self._old[tensor]

    def allocate(self, tensor: int, owner: int) -> torch.Tensor:
        """Return the new shard, without its padding."""
        like = self._tensors[tensor]
        managed = self._managed.get(id(like))
        dim = managed.fsdp_placement.dim if managed is not None else structures.shard_dim(like)
        layout = Layout(tuple(like.shape), like.dtype, dim)
        start, stop = layout.span(owner, self._owners)
        first = 0 if managed is not None else owner  # the first shard is the largest: FSDP2 pads all to its size
        local = structures.local_of(like)
        shape = layout.local_shape(first, self._owners)
        if (part := self._part_of_old(tensor, layout, owner, shape)) is not None:
            self._new[tensor] = part
            return part
        pinned = managed is not None and managed.pin_memory
        padded = torch.empty(shape, dtype=like.dtype, device=local.device, pin_memory=pinned)
        self._new[tensor] = padded
        shard = padded.narrow(dim, 0, stop - start)
        if padded.shape != shard.shape:
            padded.narrow(dim, stop - start, padded.shape[dim] - (stop - start)).zero_()
        return shard

    def _part_of_old(self, tensor: int, layout: Layout, owner: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a new shard that is a part of the old one; ``None``: it is not, or has padding that this has not."""
        start, stop = layout.span(owner, self._owners)
        if self._holding.owner < 0 or layout.dim or shape[0] != stop - start:
            return None
        begin, end = layout.span(self._holding.owner, self._holding.owners)
        if not begin <= start < stop <= end:
            return None
        return self._narrowing.part_of(self._old[tensor], start - begin, shape)

    def filled(self) -> _Set:
        """Return the new shards with their padding."""
        return [self._new[number] for number in range(len(self._tensors))]


def _joined(before: Moved, began: float, traffic: Traffic) -> Moved:
    """Return a change that has handed over before it took over."""
    return Moved(before.seconds + time.monotonic() - began, before.traffic.followed_by(traffic))


def _count(group: Group, *, of: bool) -> int:
    """Return for how many members something holds: a sum takes one message of each, objects take several."""
    return int(group.sum(torch.tensor([int(of)])).item())


def _name(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
