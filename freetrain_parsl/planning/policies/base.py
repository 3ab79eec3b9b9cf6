"""Interface of policies: (pool, trainers, current allocation, now) -> decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.planning.model import Allocation, Decision, Pool, Trainer


class Policy(ABC):
    """Allocates the nodes of a pool to trainers.

    A policy is deterministic and keeps no state between calls that changes its decisions. It gives a trainer either no
    nodes or between ``min_nodes`` and ``max_nodes``, and never gives a node to two trainers.
    ``freetrain_parsl.testing`` has a test suite that checks this for your own policies.
    """

    name: ClassVar[str]

    @abstractmethod
    def allocate(self, pool: Pool, trainers: Sequence[Trainer], current: Allocation, now: float) -> Decision:
        """Decide which trainer gets which nodes from `now` on.

        `current` may contain nodes that have left the pool; these are no longer available.
        """
