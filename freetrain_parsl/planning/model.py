"""The words of the design as frozen, validated values. Times are seconds on one clock, chosen by the driver."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidTrainer, PlanningError

if TYPE_CHECKING:
    from freetrain_parsl.planning.curves.scaling import ScalingCurve

Allocation = Mapping[str, frozenset[str]]
"""Trainer name -> names of its nodes. A trainer without nodes is absent."""


class WindowKind(str, Enum):
    """How a window ends."""

    BACKFILL = "backfill"
    """Ends before the next planned start; known when."""
    PREEMPTIBLE = "preemptible"
    """May be taken back at any time, with the site's notice."""


@dataclass(frozen=True)
class Window:
    """A group of idle nodes that close at the same time.

    Parameters
    ----------
    nodes
        Names of the nodes, without repetition. Kept sorted.
    opens
        When the nodes become (or became) free, seconds.
    closes
        When a queued job is going to need them, seconds; ``None`` if unknown.
    kind
        How the window ends.
    partition
        The batch system's partition or queue, if it has any.
    """

    nodes: tuple[str, ...]
    opens: float
    closes: float | None
    kind: WindowKind = WindowKind.BACKFILL
    partition: str = ""

    def __post_init__(self) -> None:
        nodes = tuple(sorted(self.nodes))
        if not nodes or len(set(nodes)) != len(nodes):
            raise PlanningError(f"a window needs one or more different nodes, got {self.nodes!r}")
        if self.closes is not None and self.closes <= self.opens:
            raise PlanningError(f"a window must close after it opens, got {self.opens}..{self.closes}")
        object.__setattr__(self, "nodes", nodes)

    def remaining(self, now: float) -> float:
        """Seconds from `now` until the window closes; infinity if that is unknown."""
        return math.inf if self.closes is None else self.closes - now


@dataclass(frozen=True)
class BlockTerms:
    """How a batch system starts blocks; times in seconds.

    Parameters
    ----------
    start_delay
        How long a block may wait though its nodes are free: a cycle of the scheduler.
    walltime_step
        Walltimes are multiples of this.
    max_walltime, min_nodes, max_nodes
        Limits of one block; ``None`` nodes without a limit.
    hides_waiting
        Nobody preempts blocks, and jobs of others that wait for their nodes are not shown.
    """

    start_delay: float = 0.0
    walltime_step: float = 1.0
    max_walltime: float = math.inf
    min_nodes: int = 1
    max_nodes: int | None = None
    hides_waiting: bool = False


@dataclass(frozen=True)
class PoolNode:
    """A node whose slots we hold, or could hold.

    Parameters
    ----------
    name
        The node's batch-system name.
    closes
        When we lose it, seconds; ``None`` if unknown.
    expected
        When we are likely to lose it if that is unknown, by how long such nodes lasted so far, seconds.
    closing_rate
        Closings per second to be expected of such a node, if its closing is unknown.
    startup
        Seconds until its slots are ready if a block is requested now; zero for a node that we hold or await.
    """

    name: str
    closes: float | None = None
    expected: float = math.inf
    closing_rate: float = 0.0
    startup: float = 0.0

    @property
    def closes_or_inf(self) -> float:
        """When it is known to close: unknown counts as never."""
        return math.inf if self.closes is None else self.closes

    @property
    def lasts_until(self) -> float:
        """When it closes, as far as is known or expected."""
        return self.expected if self.closes is None else self.closes


DEFAULT_HORIZON = 120.0
"""Seconds that a decision is taken to last where nothing was seen of a pool's past."""


class Pool(Mapping[str, PoolNode]):
    """The nodes to share out, by name, in order of name.

    Parameters
    ----------
    nodes
        The nodes.
    horizon
        How long a decision about them is expected to last, seconds.
    max_blocks
        How many blocks may be requested for the nodes that need one; ``None`` for any number.
    """

    def __init__(
        self, nodes: Iterable[PoolNode] = (), horizon: float = DEFAULT_HORIZON, max_blocks: int | None = None
    ) -> None:
        self.horizon = horizon
        self.max_blocks = max_blocks
        self._nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}

    def __getitem__(self, name: str) -> PoolNode:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"Pool({list(self._nodes.values())!r})"


@dataclass(frozen=True)
class RescaleCosts:
    """Seconds of lost training at a change of a trainer's nodes.

    Parameters
    ----------
    up, down
        When a running trainer grows, or shrinks (to nothing too), at the rate it had before.
    start
        When a trainer without nodes gets some, at the rate it then has.
    """

    up: float = 0.0
    down: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up", "down", "start"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidTrainer(f"rescale cost {name!r} must be zero or more seconds, got {value!r}")


DEFAULT_COSTS = RescaleCosts(up=2.0, down=2.0, start=2.0)
"""For trainings that state none."""


@dataclass(frozen=True)
class Trainer:
    """One training job, as the planner sees it.

    Parameters
    ----------
    name
        Unique among the trainers that are alive.
    min_nodes, max_nodes
        It runs on none, or on a number of nodes within these bounds (inclusive).
    curve
        Throughput in samples per second against number of nodes.
    costs
        What a change of its nodes costs.
    work_left
        Samples still to process; infinity if endless or unknown.
    priority
        Positive weight, used by the objective of that name.
    deadline
        When it should be done, seconds; ``None`` if it need not.
    submitted
        When it was submitted, seconds; first come, first served among equals.
    since
        When it last got its first node or lost its last, seconds: since when it runs, or waits; ``None`` means
        since it was submitted.
    """

    name: str
    min_nodes: int
    max_nodes: int
    curve: ScalingCurve
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    work_left: float = math.inf
    priority: float = 1.0
    deadline: float | None = None
    submitted: float = 0.0
    since: float | None = None

    def __post_init__(self) -> None:
        who = f"trainer {self.name!r}"
        if not self.name:
            raise InvalidTrainer("a trainer needs a name")
        if self.min_nodes < 1:
            raise InvalidTrainer(f"{who}: min_nodes must be at least 1, got {self.min_nodes}")
        if self.max_nodes < self.min_nodes:
            raise InvalidTrainer(f"{who}: max_nodes ({self.max_nodes}) is less than min_nodes ({self.min_nodes})")
        if self.curve.first_nodes > self.min_nodes:
            raise InvalidTrainer(
                f"{who}: its scaling curve starts at {self.curve.first_nodes} nodes; "
                f"add a point at or below min_nodes ({self.min_nodes})"
            )
        if math.isnan(self.work_left) or self.work_left < 0:
            raise InvalidTrainer(f"{who}: work_left must be zero or more samples, got {self.work_left!r}")
        if not (math.isfinite(self.priority) and self.priority > 0):
            raise InvalidTrainer(f"{who}: priority must be positive, got {self.priority!r}")

    def rate(self, nodes: int) -> float:
        """Return the samples per second on that many nodes."""
        return self.curve(nodes)


@dataclass(frozen=True)
class Decision:
    """What a policy decided.

    Parameters
    ----------
    allocation
        Trainer -> its nodes; trainers without nodes are absent.
    objective
        Value of the allocation in the policy's own model, units of its objective × seconds.
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
