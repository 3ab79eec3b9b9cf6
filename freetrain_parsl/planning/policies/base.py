"""Interface of policies: (pool, trainers, current allocation, now) -> decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from freetrain_parsl.planning.objectives.base import SPEEDUP, Contextual, Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.planning.model import Allocation, Decision, Pool, Trainer


class Policy(ABC):
    """Allocates the nodes of a pool to trainers.

    A policy is deterministic and keeps no state between calls that changes its decisions. It gives a trainer either no
    nodes or between ``min_nodes`` and ``max_nodes``, and never gives a node to two trainers.
    ``freetrain_parsl.testing`` has a test suite that checks this for your own policies.

    It is given nodes of one kind only: where there are several, `planning.node_kinds` first decides which trainer runs
    on which kind.
    """

    name: ClassVar[str]
    by_counts: ClassVar[bool] = False
    """Whether it maximises the sum over trainers of the value of their numbers of nodes."""
    needs_hosts: ClassVar[bool] = False
    """Whether it is about placing trainers on hosts that they share, which only replay and simulation have."""

    @property
    def objective(self) -> Objective | Contextual:
        """The value per second by which the kind of a trainer's nodes is chosen; default: its speedup."""
        return SPEEDUP

    def seconds_of_use(self, pool: Pool, now: float) -> float:  # noqa: ARG002 - for policies that know of closings
        """Return for how long a node of the pool counts when the kind of a trainer's nodes is chosen, s."""
        return pool.horizon

    @abstractmethod
    def allocate(self, pool: Pool, trainers: Sequence[Trainer], current: Allocation, now: float) -> Decision:
        """Decide which trainer gets which nodes from `now` on.

        `current` may contain nodes that have left the pool; these are no longer available.
        """
