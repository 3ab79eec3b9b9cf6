"""Node placement for decided counts: growing trainers keep their nodes, shrinking ones release the first to close."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import PlanningError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from freetrain_parsl.planning.model import Allocation, PlannedJob, Pool

__all__ = ["check_allocation", "current_counts", "keep_to_whole_hosts", "place", "place_emptiest_first"]


def place(counts: Mapping[str, int], pool: Pool, current: Allocation) -> dict[str, frozenset[str]]:
    """Choose nodes for decided counts without moving trainers between nodes.

    A trainer keeps as many of its nodes as its count allows, those that close last. Growing trainers, in order of
    name, take the free nodes that close last, ready ones first. Unknown closings are replaced by the expected ones;
    ties are broken by node name.

    If nodes share hosts, a trainer whose count changes is placed anew, on as few hosts as possible: any change is a
    restart in such a cluster, and nearby nodes are faster. Larger trainers choose first, and a small one takes the host
    that it leaves with the fewest free nodes.

    Parameters
    ----------
    counts
        Trainer -> number of nodes; absent trainers get none.
    pool
        The nodes to allocate.
    current
        Trainer -> its nodes before; nodes that have left the pool are ignored.

    Returns
    -------
    dict
        Trainer -> its nodes; trainers without nodes are absent.

    Raises
    ------
    PlanningError
        A negative count, more nodes in total than the pool has, or a node that two trainers already hold.
    """
    _check_counts(counts, pool)
    if pool.nodes_per_host > 1:
        return _place_on_hosts(dict(sorted(counts.items(), key=lambda item: -item[1])), pool, current, _tightest)
    held = _holders(current, pool)
    order = sorted(pool, key=lambda name: (pool[name].startup, -pool[name].lasts_until, name))
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


def place_emptiest_first(counts: Mapping[str, int], pool: Pool, current: Allocation) -> dict[str, frozenset[str]]:
    """Choose nodes as `place` does, but each host with the most free nodes first, in the order of `counts`.

    Tiresias and Optimus place trainers like this in Pollux' evaluation. Without shared hosts it is `place`.
    """
    if pool.nodes_per_host == 1:
        return place(counts, pool, current)
    _check_counts(counts, pool)
    return _place_on_hosts(counts, pool, current, _emptiest)


Choice = Callable[[Mapping[str, Sequence[str]], int], str]
"""(free nodes of each host, nodes wanted) -> host."""


def _emptiest(free: Mapping[str, Sequence[str]], wanted: int) -> str:  # noqa: ARG001 - signature of a choice
    return max(free, key=lambda host: len(free[host]))


def _tightest(free: Mapping[str, Sequence[str]], wanted: int) -> str:
    """Return the host that keeps the fewest free nodes, or the emptiest if none has as many as wanted."""
    fitting = [host for host in free if len(free[host]) >= wanted]
    return min(fitting, key=lambda host: len(free[host])) if fitting else _emptiest(free, wanted)


def _place_on_hosts(
    counts: Mapping[str, int], pool: Pool, current: Allocation, choose: Choice
) -> dict[str, frozenset[str]]:
    """Keep trainers whose count is their number of nodes, and place the others anew, in the order of `counts`."""
    kept = {
        name: nodes
        for name, nodes in current.items()
        if nodes and counts.get(name, 0) == len(nodes) and all(node in pool for node in nodes)
    }
    taken = frozenset().union(*kept.values())
    free: dict[str, list[str]] = {}
    for node in pool.values():
        if node.name not in taken:
            free.setdefault(node.host or node.name, []).append(node.name)
    placed = dict(kept)
    for name, count in counts.items():
        if name in kept or not count:
            continue
        nodes: list[str] = []
        while len(nodes) < count:
            host = choose(free, count - len(nodes))
            share = min(count - len(nodes), len(free[host]))
            nodes += free[host][:share]
            del free[host][:share]
            if not free[host]:
                del free[host]
        placed[name] = frozenset(nodes)
    return placed


def keep_to_whole_hosts(values: npt.NDArray[np.float64], nodes_per_host: int) -> None:
    """Disallow counts that need a part of a host besides whole ones: such trainers would share hosts and slow down.

    A trainer that could then have no count at all keeps those that it has. `values`, of each trainer on 0, 1, …, N
    nodes, shape (J, N + 1), become minus infinity for these counts.
    """
    if nodes_per_host == 1:
        return
    counts = np.arange(values.shape[1])
    partial = (counts > nodes_per_host) & (counts % nodes_per_host != 0)
    runs_otherwise = np.isfinite(values[:, ~partial][:, 1:]).any(axis=1)
    values[np.ix_(runs_otherwise, partial)] = -np.inf


def check_allocation(allocation: Allocation, pool: Pool, trainers: Iterable[PlannedJob]) -> None:
    """Reject an allocation that violates the contract of `Policy`.

    Raises
    ------
    PlanningError
        It names an unknown trainer or node, gives a node to two trainers, or gives a trainer nodes of several kinds,
        nodes of a kind that it cannot use, or a number of nodes outside its bounds (including an empty set: a trainer
        without nodes must be absent).
    """
    known = {trainer.name: trainer for trainer in trainers}
    owner: dict[str, str] = {}
    for name, nodes in allocation.items():
        trainer = known.get(name)
        if trainer is None:
            raise PlanningError(f"allocation: unknown trainer {name!r}; allocate only to the trainers passed in")
        if not trainer.min_nodes <= len(nodes) <= trainer.max_nodes:
            raise PlanningError(
                f"allocation: trainer {name!r} takes {trainer.min_nodes} to {trainer.max_nodes} nodes, "
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


def current_counts(trainers: Sequence[PlannedJob], pool: Pool, current: Allocation) -> dict[str, int]:
    """Count the nodes of each trainer that are still in the pool."""
    return {trainer.name: sum(node in pool for node in current.get(trainer.name, ())) for trainer in trainers}


def _check_counts(counts: Mapping[str, int], pool: Pool) -> None:
    for trainer, count in counts.items():
        if count < 0:
            raise PlanningError(f"placement: trainer {trainer!r} cannot have {count} nodes")
    if (wanted := sum(counts.values())) > len(pool):
        raise PlanningError(f"placement: {wanted} nodes are allocated, but the pool has {len(pool)}")


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
