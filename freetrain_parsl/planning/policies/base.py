"""What every policy is: (pool, trainers, current allocation, now) -> decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.planning.model import Allocation, Decision, Pool, Trainer


class Policy(ABC):
    """Shares the nodes of a pool out among trainers.

    A policy is deterministic and keeps no state between calls that changes its answers, gives a trainer no node
    or between ``min_nodes`` and ``max_nodes``, and never one node to two. ``freetrain_parsl.testing`` has the
    suite that checks this for yours.
    """

    name: ClassVar[str]

    @abstractmethod
    def allocate(self, pool: Pool, trainers: Sequence[Trainer], current: Allocation, now: float) -> Decision:
        """Decide who gets which nodes from `now` on.

        `current` may name nodes that have left the pool: those are lost already.
        """
