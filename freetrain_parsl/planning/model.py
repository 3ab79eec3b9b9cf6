"""The planner's data model: frozen, validated values. Times are seconds on one clock, chosen by the driver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.errors import InvalidApp, PlanningError
from freetrain_parsl.planning.sizes import ANY_COUNT, AllowedCounts, round_down, round_up

if TYPE_CHECKING:
    import numpy.typing as npt

    from freetrain_parsl.planning.curves.scaling import ScalingCurve

Allocation = Mapping[str, frozenset[str]]
"""Trainer name -> names of its nodes. A trainer without nodes is absent."""


class WindowKind(str, Enum):
    """The way in which a window ends."""

    BACKFILL = "backfill"
    """Ends before the next planned start, at a known time."""
    PREEMPTIBLE = "preemptible"
    """May be preempted at any time, with the site's notice."""


@dataclass(frozen=True)
class Window:
    """A group of idle nodes that close at the same time.

    Parameters
    ----------
    nodes
        Names of the nodes, without duplicates. Kept sorted.
    opens
        Time at which the nodes become (or became) free, seconds.
    closes
        Time at which a queued job will need them, seconds; ``None`` if unknown.
    kind
        The way in which it ends.
    partition
        The batch system's partition or queue, if any.
    node_kind
        The kind of its nodes; empty where there is one kind only.
    """

    nodes: tuple[str, ...]
    opens: float
    closes: float | None
    kind: WindowKind = WindowKind.BACKFILL
    partition: str = ""
    node_kind: str = ""

    def __post_init__(self) -> None:
        nodes = tuple(sorted(self.nodes))
        if not nodes or len(set(nodes)) != len(nodes):
            raise PlanningError(f"a window needs at least one node and no duplicates, got {self.nodes!r}")
        if self.closes is not None and self.closes <= self.opens:
            raise PlanningError(f"a window must close after it opens, got {self.opens}..{self.closes}")
        object.__setattr__(self, "nodes", nodes)

    def remaining(self, now: float) -> float:
        """Return the seconds from `now` until the window closes; infinity if unknown."""
        return math.inf if self.closes is None else self.closes - now


@dataclass(frozen=True)
class BlockTerms:
    """The terms on which a batch system starts blocks; times in seconds.

    Parameters
    ----------
    start_delay
        Time for which a block may wait although its nodes are free: one scheduler cycle.
    walltime_step
        Walltimes are multiples of this.
    max_walltime, min_nodes, max_nodes
        Limits of one block; ``None`` means no limit on nodes.
    hides_waiting
        Blocks are not preempted, and other users' jobs that wait for their nodes are hidden.
    may_wait
        Blocks may wait in the queue for any node to become idle: others preempt them when they need it.
    """

    start_delay: float = 0.0
    walltime_step: float = 1.0
    max_walltime: float = math.inf
    min_nodes: int = 1
    max_nodes: int | None = None
    hides_waiting: bool = False
    may_wait: bool = False


@dataclass(frozen=True)
class PoolNode:
    """A node whose slots we hold or could hold.

    Parameters
    ----------
    name
        The node's batch-system name.
    closes
        Time at which it closes, seconds; ``None`` if unknown.
    expected
        Estimated closing time if that is unknown, from how long such nodes have lasted so far, seconds.
    closing_rate
        Expected closings per second of such a node, if its closing is unknown.
    startup
        Seconds until its slots are ready if a block is requested now; zero for a node that is held or awaited.
    host
        The machine that it shares with other nodes of the pool, if the unit of allocation is smaller than a machine:
        one accelerator, for example. Empty: it is a machine of its own.
    node_kind
        Its kind; empty where there is one kind only. A trainer runs on nodes of one kind at a time.
    """

    name: str
    closes: float | None = None
    expected: float = math.inf
    closing_rate: float = 0.0
    startup: float = 0.0
    host: str = ""
    node_kind: str = ""

    @property
    def machine(self) -> str:
        """The machine that it is, or is a part of."""
        return self.host or self.name

    @property
    def closes_or_inf(self) -> float:
        """The known closing time; infinity if unknown."""
        return math.inf if self.closes is None else self.closes

    @property
    def lasts_until(self) -> float:
        """The known or expected closing time."""
        return self.expected if self.closes is None else self.closes


DEFAULT_HORIZON = 120.0
"""Seconds that a decision is assumed to last if there is no history of the pool."""


class Pool(Mapping[str, PoolNode]):
    """The nodes to allocate, by name, in order of name.

    Parameters
    ----------
    nodes
        The nodes.
    horizon
        Time for which a decision about them is expected to last, seconds.
    max_blocks
        Number of blocks that may be requested for the nodes that need one; ``None`` for no limit.
    slots_per_host
        Slots of a host that has all of them, if the nodes are slots of hosts that trainers share; ``None``: as many as
        the fullest host has, which is 1 if each node is a machine of its own.
    """

    def __init__(
        self,
        nodes: Iterable[PoolNode] = (),
        horizon: float = DEFAULT_HORIZON,
        max_blocks: int | None = None,
        slots_per_host: int | None = None,
    ) -> None:
        self.horizon = horizon
        self.max_blocks = max_blocks
        self._nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.slots_per_host = slots_per_host or max(
            Counter(node.host for node in self._nodes.values() if node.host).values(), default=1
        )

    def __getitem__(self, name: str) -> PoolNode:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    # Those of `Mapping` call `__getitem__`, and catch its errors, for each of a thousand nodes.

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._nodes.keys()

    def values(self) -> ValuesView[PoolNode]:
        """Return the nodes."""
        return self._nodes.values()

    def items(self) -> ItemsView[str, PoolNode]:
        """Return the names with their nodes."""
        return self._nodes.items()

    def __repr__(self) -> str:
        return f"Pool({list(self._nodes.values())!r})"


@dataclass(frozen=True)
class CostsInSeconds:
    """`RescaleCosts` as seconds, like all times inside the planner.

    Parameters
    ----------
    up, down
        When a running trainer grows, or shrinks (also to zero nodes), at the rate it had before.
    start
        When a trainer without nodes gets nodes, at its new rate.
    sharded_bytes
        Size of a state that is divided evenly among its nodes, which a change in place moves; 0: each node has all.
    bandwidth
        Bytes per second that a node receives, or sends, meanwhile.
    """

    up: float = 0.0
    down: float = 0.0
    start: float = 0.0
    sharded_bytes: float = 0.0
    bandwidth: float = 1e9

    def __post_init__(self) -> None:
        units = dict.fromkeys(("up", "down", "start"), "seconds") | {"sharded_bytes": "bytes"}
        for name, unit in units.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidApp(f"rescale cost {name!r} must be zero or more {unit}, got {value!r}")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise InvalidApp(f"rescale cost 'bandwidth' must be positive, got {self.bandwidth!r}")

    def changes(self, before: int, last: int) -> npt.NDArray[np.float64]:
        """Tabulate the seconds that a running trainer loses by a change from `before` nodes to 0, 1, …, `last`."""
        counts = np.arange(last + 1)
        seconds = np.where(counts > before, self.up, self.down)
        if self.sharded_bytes:
            seconds = seconds + self.sharded_bytes / self.bandwidth * moved_shares(before, counts)
        return np.where(counts == before, 0.0, seconds)


def moved_shares(before: int, after: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the share of an evenly divided state that the busiest node receives or sends in a change.

    With `s` nodes on one side of the change and `l` on the other, l > s, each of the l - s nodes that come or go moves
    its share, 1/l, and the others what their share grows or shrinks by, 1/s - 1/l, as each keeps the part that overlaps
    most. Where as many nodes are replaced, a new one receives 1/l. A stop moves nothing: it saves.
    """
    fewer, more = np.maximum(np.minimum(before, after), 1), np.maximum(np.maximum(before, after), 1)
    shares: npt.NDArray[np.float64] = np.maximum(1 / more, 1 / fewer - 1 / more)
    return np.where(np.minimum(before, after) > 0, shares, 0.0)


PlacedRate = Callable[[tuple[int, ...]], float]
"""Nodes of a trainer on each host, largest first -> samples per second."""


@dataclass(frozen=True)
class EpochCount:
    """A trainer's progress in epochs, for policies that predict its end from it.

    Parameters
    ----------
    done, left
        Epochs, complete or begun, and epochs that are left or predicted to be.
    samples
        Samples processed so far.
    """

    done: float
    left: float
    samples: float


@dataclass(frozen=True)
class PlannedJob:
    """A training job as the planner sees it.

    Parameters
    ----------
    name
        Unique among the trainers that are alive.
    min_nodes, max_nodes
        It runs on zero nodes or on a number of nodes within these bounds (inclusive). They become the nearest ones
        within them that are allowed.
    curve
        Throughput in samples per second as a function of the number of nodes.
    costs
        Cost of changing its nodes.
    work_left
        Samples left to process; infinity if endless or unknown.
    priority
        Positive weight, used by the objective of that name.
    deadline
        Time by which it should finish, seconds; ``None`` for no deadline.
    submitted
        Time of its submission, seconds; first come, first served among equals.
    since
        Time since which it has been running or waiting, seconds: when it got its first node or lost its last one;
        ``None`` means since it was submitted.
    service
        Node-seconds that it has had so far; the planner counts them.
    placed
        Throughput by placement, if nodes share hosts and it is known; the curve is then for the fewest hosts.
        ``None``: the curve holds wherever its nodes are.
    epochs
        Its progress in epochs, if known.
    node_kinds
        Kinds of nodes on which it may run; empty: any.
    curves
        Kind of node -> `curve` there, where it differs.
    unit
        Samples per second that count as a speedup of 1; ``None``: its rate on `min_nodes`.
    allowed_counts
        The numbers of nodes within the bounds on which its model can run.
    save_seconds
        Time that it needs to write a checkpoint; zero while that is unknown.
    """

    name: str
    min_nodes: int
    max_nodes: int
    curve: ScalingCurve
    costs: CostsInSeconds = field(default_factory=CostsInSeconds)
    work_left: float = math.inf
    priority: float = 1.0
    deadline: float | None = None
    submitted: float = 0.0
    since: float | None = None
    service: float = 0.0
    placed: PlacedRate | None = None
    epochs: EpochCount | None = None
    node_kinds: tuple[str, ...] = ()
    curves: Mapping[str, ScalingCurve] = field(default_factory=dict, hash=False)
    unit: float | None = None
    allowed_counts: AllowedCounts = ANY_COUNT
    save_seconds: float = 0.0

    def __post_init__(self) -> None:
        who = f"training job {self.name!r}"
        if not self.name:
            raise InvalidApp("a training job needs a name")
        if self.min_nodes < 1:
            raise InvalidApp(f"{who}: min_nodes must be at least 1, got {self.min_nodes}")
        if self.max_nodes < self.min_nodes:
            raise InvalidApp(f"{who}: max_nodes ({self.max_nodes}) is less than min_nodes ({self.min_nodes})")
        self._narrow()
        for kind, curve in {"": self.curve, **self.curves}.items():
            if curve.first_nodes > self.min_nodes:
                raise InvalidApp(
                    f"{who}: its scaling curve{f' on nodes of kind {kind!r}' if kind else ''} starts at "
                    f"{curve.first_nodes}; add a point at or below its least size, {self.min_nodes}"
                )
        if math.isnan(self.work_left) or self.work_left < 0:
            raise InvalidApp(f"{who}: work_left must be zero or more samples, got {self.work_left!r}")
        if not (math.isfinite(self.priority) and self.priority > 0):
            raise InvalidApp(f"{who}: priority must be positive, got {self.priority!r}")

    def _narrow(self) -> None:
        least, most = self.allowed_counts.at_least(self.min_nodes), self.allowed_counts.at_most(self.max_nodes)
        if not least or least > most:
            raise InvalidApp(
                f"trainer {self.name!r}: its model runs on numbers of nodes that are {self.allowed_counts}, and none "
                f"of these is between min_nodes ({self.min_nodes}) and max_nodes ({self.max_nodes}); change these"
            )
        object.__setattr__(self, "min_nodes", least)
        object.__setattr__(self, "max_nodes", most)

    def may_have(self, nodes: int) -> bool:
        """Return whether it may run on so many nodes, more than zero."""
        return self.min_nodes <= nodes <= self.max_nodes and nodes in self.allowed_counts

    def may_have_each(self, last: int) -> npt.NDArray[np.bool_]:
        """Tabulate `may_have` for 0, 1, …, `last` nodes, shape (last + 1,)."""
        counts = np.arange(last + 1)
        within = (counts >= self.min_nodes) & (counts <= self.max_nodes)
        return within if self.allowed_counts == ANY_COUNT else within & self.allowed_counts.mask(counts)

    def at_most(self, nodes: int, slots: int = 1) -> int:
        """Return the largest number of nodes that it may have of at most `nodes`; zero if there is none.

        `slots`: of the hosts that trainers share; the number is then a size of `planning.sizes`.
        """
        count = self.allowed_counts.at_most(min(nodes, self.max_nodes))
        while (size := count if slots == 1 else round_down(count, slots)) != count:
            count = self.allowed_counts.at_most(size)
        return count if count >= self.min_nodes else 0

    def at_least(self, nodes: int, slots: int = 1) -> int:
        """Return the smallest number of nodes that it may have of at least `nodes`; as `at_most` otherwise."""
        count = self.allowed_counts.at_least(max(nodes, self.min_nodes))
        while count and (size := count if slots == 1 else round_up(count, slots)) != count:
            count = self.allowed_counts.at_least(size)
        return count if count <= self.max_nodes else 0

    def nearest(self, nodes: int) -> int:
        """Return the number of nodes that it may have that is nearest to `nodes`, the smaller one of two."""
        below, above = self.at_most(nodes), self.at_least(nodes)
        return above if not below or (above and above - nodes < nodes - below) else below

    def rate(self, nodes: int) -> float:
        """Return the samples per second on `nodes` nodes."""
        return self.curve(nodes)

    def may_use(self, node_kind: str) -> bool:
        """Return whether it may run on nodes of a kind."""
        return not self.node_kinds or node_kind in self.node_kinds

    def on_kind(self, node_kind: str) -> PlannedJob:
        """Return the trainer with its curve on nodes of one kind, in units that are the same for all kinds."""
        if not self.curves:
            return self
        # All of its kinds, also if it is limited to one for a while: its value there must not change.
        fastest = max(curve(self.min_nodes) for curve in self.curves.values())
        curve = self.curves.get(node_kind, self.curve)
        return replace(self, curve=curve, curves={}, unit=self.unit or fastest or None)


@dataclass(frozen=True)
class Decision:
    """A policy's decision.

    Parameters
    ----------
    allocation
        Trainer -> its nodes; trainers without nodes are absent.
    objective
        Value of the allocation in the policy's model, in units of its objective × seconds.
    proven_optimal
        Whether no better allocation exists in that model.
    bound
        Upper bound on the objective; equal to it (within the gap) if proven.
    solve_seconds
        Wall time of the solve.
    """

    allocation: Allocation
    objective: float
    proven_optimal: bool
    bound: float
    solve_seconds: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Trainer -> number of its nodes."""
        return {trainer: len(nodes) for trainer, nodes in self.allocation.items()}
