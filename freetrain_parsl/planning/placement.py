"""Node placement for decided counts: growing trainers keep their nodes, shrinking ones release the first to close."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import PlanningError
from freetrain_parsl.planning.sizes import ANY_COUNT, are_sizes, room, round_down, sizes_within, wanted
from freetrain_parsl.planning.solvers.shared_hosts import Parts, most_valuable_stays

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from freetrain_parsl.planning.model import Allocation, PlannedJob, Pool
    from freetrain_parsl.planning.solvers.highs import Counts

__all__ = ["SharedHosts", "check_allocation", "current_counts", "place"]


def place(
    counts: Mapping[str, int],
    pool: Pool,
    current: Allocation,
    move_costs: Mapping[str, float] = MappingProxyType({}),
    hosts: SharedHosts | None = None,
) -> dict[str, frozenset[str]]:
    """Choose nodes for decided counts without moving trainers between nodes.

    A trainer keeps as many of its nodes as its count allows, those that close last. Growing trainers, in order of
    name, take the free nodes that close last, ready ones first. Unknown closings are replaced by the expected ones;
    ties are broken by node name.

    If nodes are slots of hosts that trainers share, counts are sizes of `planning.sizes`: each small trainer is placed
    inside one host, and larger ones on whole hosts. Trainers of unchanged count stay where they are if all fit;
    otherwise those move whose moves cost least, which is solved exactly. After them, as many slots as possible of the
    others are kept. The rest, largest first, take the hosts that are ready and close last, fullest first.

    Parameters
    ----------
    counts
        Trainer -> number of nodes; absent trainers get none.
    pool
        The nodes to allocate.
    current
        Trainer -> its nodes before; nodes that have left the pool are ignored.
    move_costs
        Trainer -> cost of moving it to another host, where hosts are shared; absent ones cost 1.
    hosts
        Those of this pool and allocation, where hosts are shared, if they are known.

    Returns
    -------
    dict
        Trainer -> its nodes; trainers without nodes are absent.

    Raises
    ------
    PlanningError
        A negative count, more nodes in total than the pool has, a node that two trainers already hold, or sizes that
        do not fit on shared hosts, or a count that is no size.
    """
    _check_counts(counts, pool)
    if pool.slots_per_host > 1:
        return _place_sizes(counts, hosts or SharedHosts(pool, current), move_costs)
    held = _holders(current, pool)
    order = [node.name for node in sorted(pool.values(), key=lambda node: (node.startup, -node.lasts_until, node.name))]
    kept: dict[str, list[str]] = {name: [] for name in sorted(counts)}
    free: list[str] = []
    for node in order:
        trainer = held.get(node)
        if trainer is not None and len(kept.get(trainer, ())) < counts.get(trainer, 0):
            kept[trainer].append(node)
        else:
            free.append(node)
    spare = iter(free)
    for trainer, nodes in kept.items():
        nodes.extend(islice(spare, counts[trainer] - len(nodes)))
    return {trainer: frozenset(nodes) for trainer, nodes in kept.items() if nodes}


class SharedHosts:
    """The hosts of a pool whose slots trainers share, and what trainers have there.

    Parameters
    ----------
    pool
        Its nodes are slots of hosts.
    current
        Trainer -> its slots; those that have left the pool are ignored.
    """

    def __init__(self, pool: Pool, current: Allocation) -> None:
        self.slots = pool.slots_per_host
        self.on: dict[str, list[str]] = {}
        """Host -> its slots in the pool."""
        ends: dict[str, tuple[float, float]] = {}
        for node in pool.values():
            machine, lasts = node.host or node.name, node.expected if node.closes is None else node.closes
            if (slots := self.on.get(machine)) is None:
                self.on[machine], ends[machine] = [node.name], (node.startup, -lasts)
            else:
                slots.append(node.name)
                if -lasts > ends[machine][1]:
                    ends[machine] = ends[machine][0], -lasts
        self._number = {host: number for number, host in enumerate(self.on)}
        self.last_closing = ends
        """Host -> key that sorts ready ones first, then those that close last."""
        self.held: dict[str, dict[str, list[str]]] = {}
        """Trainer -> host -> its slots there."""
        for slot, trainer in sorted(_holders(current, pool).items()):
            node = pool[slot]
            self.held.setdefault(trainer, {}).setdefault(node.host or node.name, []).append(slot)

    def whole(self, trainer: str) -> list[str]:
        """Return the hosts that a trainer has for itself, those that close last first."""
        mine = self.held.get(trainer, {})
        return sorted(
            (host for host in mine if len(mine[host]) == self.slots), key=lambda host: (*self.last_closing[host], host)
        )

    def is_laid_out(self, trainer: str) -> bool:
        """Return whether its slots are part of one host, of a size, or whole hosts."""
        mine = self.held.get(trainer, {})
        count = sum(map(len, mine.values()))
        if count >= self.slots:
            return len(mine) * self.slots == count
        return len(mine) == 1 and round_down(count, self.slots) == count

    def parts(self, trainers: Sequence[str], counts: Counts) -> Parts:
        """Return what trainers keep on one host each if they get these counts; nothing of a trainer of whole hosts."""
        host, sizes = np.full(len(trainers), -1, dtype=np.int64), np.zeros(len(trainers), dtype=np.int64)
        for row, (name, count) in enumerate(zip(trainers, counts.tolist(), strict=True)):
            mine = self.held.get(name, {})
            if count and mine and not (count >= self.slots and self.whole(name)):
                best = min(mine, key=lambda host: (-len(mine[host]), *self.last_closing[host], host))
                host[row], sizes[row] = self._number[best], min(count, self.slots)
        return Parts(self.slots, np.array([len(slots) for slots in self.on.values()], dtype=np.int64), host, sizes)

    def choose(self, free: Mapping[str, Collection[str]], wanted: int) -> str | None:
        """Return the best host, out of these with free slots, for `wanted` slots; ``None`` if none has as many."""
        fitting = (host for host, slots in free.items() if len(slots) >= wanted)
        return min(fitting, key=lambda host: (*self.last_closing[host], len(free[host]), host), default=None)


def _place_sizes(
    counts: Mapping[str, int], hosts: SharedHosts, move_costs: Mapping[str, float]
) -> dict[str, frozenset[str]]:
    sizes = np.fromiter(counts.values(), dtype=np.int64)
    if not are_sizes(sizes, hosts.slots).all():
        raise PlanningError(
            f"placement: not all of {dict(counts)} are sizes on hosts of {hosts.slots} slots; `as_sizes` rounds them"
        )
    if (wanted(sizes, hosts.slots) > room(map(len, hosts.on.values()), hosts.slots)).any():
        raise PlanningError(f"placement: {dict(counts)} do not fit on these hosts of {hosts.slots} slots")
    free = {host: set(slots) for host, slots in hosts.on.items()}
    placed: dict[str, set[str]] = {name: set() for name in sorted(counts) if counts[name]}

    def take(name: str, host: str, number: int) -> None:
        own = hosts.held.get(name, {}).get(host, [])
        first = sorted(free[host], key=lambda slot: (slot not in own, slot))[:number]
        placed[name].update(first)
        free[host].difference_update(first)

    for name in placed:
        for host in hosts.whole(name)[: counts[name] // hosts.slots]:
            take(name, host, hosts.slots)
    names = [name for name in placed if len(placed[name]) < counts[name]]
    missing = np.array([counts[name] - len(placed[name]) for name in names], dtype=np.int64)
    parts = hosts.parts(names, np.where(missing == [counts[name] for name in names], missing, 0))
    parts = replace(parts, free=np.array([len(slots) for slots in free.values()], dtype=np.int64))
    number_of = list(hosts.on)
    stays = most_valuable_stays(parts, missing, _weights(names, counts, hosts, move_costs))
    for row in range(len(names)):
        if stays[row]:
            take(names[row], number_of[parts.host[row]], int(parts.sizes[row]))
    for name in sorted(names, key=lambda name: (-counts[name], name)):
        while left := counts[name] - len(placed[name]):
            size = min(left, hosts.slots)
            best = hosts.choose(free, size)
            if best is None:
                raise PlanningError(f"placement: no host has {size} free slots for trainer {name!r}")
            take(name, best, size)
    return {name: frozenset(slots) for name, slots in placed.items()}


def _weights(
    names: Sequence[str], counts: Mapping[str, int], hosts: SharedHosts, move_costs: Mapping[str, float]
) -> npt.NDArray[np.float64]:
    """Value stays by the cost of the move that they avoid; then, far below any of these, by the slots that are kept."""
    kept = np.array([max(map(len, hosts.held.get(name, {"": ""}).values())) for name in names], dtype=np.float64)
    unchanged = np.array([hosts.is_laid_out(n) and sum(map(len, hosts.held[n].values())) == counts[n] for n in names])
    costs = np.where(unchanged, [move_costs.get(name, 1.0) for name in names], 0.0)
    least = costs[costs > 0].min(initial=np.inf)
    scale = 1e-3 * (least if np.isfinite(least) else 1.0) / max(kept.sum(), 1.0)
    weights: npt.NDArray[np.float64] = costs + scale * kept
    return weights


def check_allocation(
    allocation: Allocation, pool: Pool, trainers: Iterable[PlannedJob], *, any_layout: bool = False
) -> None:
    """Reject an allocation that violates the contract of `Policy`.

    Parameters
    ----------
    allocation, pool, trainers
        Of one decision.
    any_layout
        Whether trainers may have any slots of hosts that they share; see `Policy.any_layout`.

    Raises
    ------
    PlanningError
        It names an unknown trainer or node, gives a node to two trainers, or gives a trainer nodes of several kinds,
        nodes of a kind that it cannot use, or a number of nodes that it may not have (including an empty set: a trainer
        without nodes must be absent); or, where hosts are shared, slots that are neither part of one host nor whole
        hosts, or a number of them that is no size.
    """
    known = {trainer.name: trainer for trainer in trainers}
    owner: dict[str, str] = {}
    for name, nodes in allocation.items():
        trainer = known.get(name)
        if trainer is None:
            raise PlanningError(f"allocation: unknown trainer {name!r}; allocate only to the trainers passed in")
        if not trainer.may_have(len(nodes)):
            allowed = trainer.allowed_counts
            which = "" if allowed == ANY_COUNT else f" in numbers that are {allowed}"
            raise PlanningError(
                f"allocation: trainer {name!r} takes {trainer.min_nodes} to {trainer.max_nodes} nodes{which}, "
                f"got {len(nodes)}; leave it out to give it none"
            )
        for node in sorted(nodes):
            if node not in pool:
                raise PlanningError(f"allocation: trainer {name!r} got node {node!r}, which is not in the pool")
            if node in owner:
                raise PlanningError(f"allocation: node {node!r} is assigned to both {owner[node]!r} and {name!r}")
            owner[node] = name
        kinds = sorted({pool[node].node_kind for node in nodes})
        if len(kinds) > 1:
            raise PlanningError(f"allocation: trainer {name!r} got nodes of several kinds: {', '.join(kinds)}")
        if not trainer.may_use(kinds[0]):
            raise PlanningError(f"allocation: trainer {name!r} got nodes of kind {kinds[0]!r}, which it cannot use")
    if pool.slots_per_host > 1 and not any_layout:
        hosts = SharedHosts(pool, allocation)
        for name in allocation:
            if not hosts.is_laid_out(name):
                raise PlanningError(
                    f"allocation: trainer {name!r} got {len(allocation[name])} slots on hosts of {hosts.slots}: a "
                    f"trainer takes {', '.join(map(str, sizes_within(hosts.slots)))} slots of one host, or whole hosts"
                )


def current_counts(trainers: Sequence[PlannedJob], pool: Pool, current: Allocation) -> dict[str, int]:
    """Count the nodes of each trainer that are still in the pool."""
    return {trainer.name: sum(node in pool for node in current.get(trainer.name, ())) for trainer in trainers}


def _check_counts(counts: Mapping[str, int], pool: Pool) -> None:
    for trainer, count in counts.items():
        if count < 0:
            raise PlanningError(f"placement: trainer {trainer!r} cannot have {count} nodes")
    if (total := sum(counts.values())) > len(pool):
        raise PlanningError(f"placement: {total} nodes are allocated, but the pool has {len(pool)}")


def _holders(current: Allocation, pool: Pool) -> dict[str, str]:
    """Node -> trainer that holds it, for the nodes of the pool."""
    held: dict[str, str] = {}
    for trainer, nodes in current.items():
        for node in nodes:
            if node not in pool:
                continue
            if node in held:
                first, second = sorted((held[node], trainer))
                raise PlanningError(f"placement: node {node!r} is held by both {first!r} and {second!r}")
            held[node] = trainer
    return held
